"""fold(events) → RunState: the only code that interprets a journal.

The fold changes one RunState in place. Its time is linear in the number of events.

`TRANSITIONS` defines the life of a call. If the table does not allow an event, perdure did not write this journal.

    proposed ──→ awaiting_approval → approved | failed (rejected, expired, withdrawn)
    proposed | approved ──→ started(1)
    started(k) ──→ completed | failed | retry_wait → started(k+1) | in_doubt
    in_doubt   ──→ completed | failed (resolved)   | did not happen → idle → started(k+1) | retry_wait (ask again later)

If a person reopens the run (`run_reopened`), the agent goes back to an earlier point. The world does not go back. So
the calls keep their states, except that a failed call may be tried again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from perdure.core.approval import usable_until
from perdure.core.budget import NOTHING, Amounts, amounts_of, most_of, rest_of
from perdure.core.codec import Payload, decode, encode
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalVoted,
    ApprovalWithdrawn,
    AttentionNeeded,
    BudgetDeclared,
    BudgetExceeded,
    BudgetRaised,
    CallAnswered,
    CallHeld,
    CallKept,
    CallRequestedAgain,
    CancelRequested,
    CheckpointTaken,
    ChildFinished,
    ChildStarted,
    DecisionMade,
    Effect,
    Event,
    Failure,
    FrameChanged,
    LabelsChanged,
    Limits,
    ModelCallInitiated,
    OutcomeReused,
    PatchMarked,
    PinChanged,
    PlanGenerated,
    RetryScheduled,
    RunAdopted,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunFailed,
    RunForked,
    RunPaused,
    RunReleased,
    RunReopened,
    RunRequeued,
    RunRestored,
    RunSucceeded,
    RunUnpaused,
    SignalReceived,
    StatusReported,
    ThoughtRecorded,
    TimerFired,
    TimerSet,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
    Unsettled,
    Usage,
    event_at,
)
from perdure.core.events import Status as Status
from perdure.core.failures import HARMLESS_KINDS, IN_DOUBT_KINDS
from perdure.core.identity import CallKeys
from perdure.core.labels import with_labels
from perdure.core.prompt_deltas import is_request
from perdure.core.suspects import goes_further
from perdure.core.times import iso
from perdure.core.transitions import landing
from perdure.errors import StoreCorrupt

Phase = Literal["proposed", "awaiting_approval", "approved", "started", "failing", "retry_wait", "in_doubt", "idle", "completed", "failed"]
# Types of failures that perdure itself records:
NOT_STARTED = "NotStarted"  # the attempt never began: the worker released the run before the attempt could begin
LOST = "AnswerLost"  # the worker was lost before the answer was recorded, and another attempt may be made
FINISHED: frozenset[str] = frozenset(("succeeded", "failed", "cancelled"))
ENDED: frozenset[Phase] = frozenset(("completed", "failed"))

# (phase, event) → next phase. Every other pair is refused as corruption.
TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    ("proposed", "initiated"): "started",
    ("proposed", "failed_for_good"): "failed",
    ("proposed", "asked"): "awaiting_approval",
    ("failing", "asked"): "awaiting_approval",  # the intent was recorded, but the attempt never began
    ("awaiting_approval", "granted"): "approved",
    ("awaiting_approval", "refused"): "failed",
    ("approved", "initiated"): "started",
    ("approved", "refused"): "failed",  # the approval was granted, and later expired or was withdrawn
    ("approved", "failed_for_good"): "failed",
    ("started", "initiated"): "started",  # the worker died inside an attempt that may be repeated
    ("started", "completed"): "completed",
    ("started", "failed"): "failing",
    ("started", "failed_for_good"): "failed",
    ("started", "in_doubt"): "in_doubt",
    ("started", "happened"): "completed",  # a person resolved the call before the next worker recorded the doubt
    ("started", "did_not_happen"): "idle",
    ("started", "resolved_failed"): "failed",
    ("failing", "in_doubt"): "in_doubt",  # an earlier attempt may have happened
    ("failing", "retry"): "retry_wait",
    ("failing", "initiated"): "started",
    ("failing", "failed_for_good"): "failed",
    ("retry_wait", "initiated"): "started",
    ("retry_wait", "failed_for_good"): "failed",  # the call was cancelled while it waited for its next attempt
    ("retry_wait", "in_doubt"): "in_doubt",
    ("in_doubt", "in_doubt"): "in_doubt",
    ("in_doubt", "retry"): "in_doubt",  # the reconcile hook is asked again later
    ("in_doubt", "initiated"): "started",  # a `keyed` call inside its key window: sent again with the same key
    ("in_doubt", "happened"): "completed",
    ("in_doubt", "did_not_happen"): "idle",
    ("in_doubt", "resolved_failed"): "failed",
    ("idle", "initiated"): "started",
    ("idle", "failed_for_good"): "failed",
    # A person reopened the run, and the agent makes the call again, or still waits for it.
    ("failed", "again"): "idle",
    ("failed", "again_in_doubt"): "in_doubt",  # the failure does not prove that the effect did not happen
    ("completed", "again"): "idle",  # only `read` calls and requests to models
}
# Only in a fork (`call_answered`): a call of any phase gets an answer, and no attempt is made.
ANSWERS: dict[str, Phase] = {"result": "completed", "failure": "failed"}


_ABOUT_ASKS = frozenset((ApprovalRequested, ApprovalVoted, ApprovalDecided, ApprovalEscalated, ApprovalExpired, ApprovalWithdrawn))
_ABOUT_CHILDREN = frozenset((ChildStarted, ChildFinished))
_ABOUT_BRANCHES = frozenset((CallRequestedAgain, OutcomeReused))
_NOT_ABOUT_TOOLS = _ABOUT_ASKS | _ABOUT_CHILDREN | _ABOUT_BRANCHES | {CallAnswered}
# In a rehearsal no attempt is ever begun, and no worker ever holds it: none of these events can follow `run_forked`.
_OF_THE_WORLD = (
    *(RunClaimed, ToolCallInitiated, ToolCallCompleted, ToolCallFailed, ToolCallInDoubt, ToolCallResolved),
    *(RetryScheduled, ChildFinished, RunReopened),
)


RESTORED = "a person: restored from a backup"


def restored_words(taken_at: int) -> str:
    return f"restored from a backup of {iso(taken_at)[:19]}Z; what happened since is unknown"


class CallState(Struct, gc=False, omit_defaults=True):
    """The state of one call.

    The image of a checkpoint holds it: fields are only added, with a default.
    """

    number: int
    tool: str
    effect: Effect
    recorded_key: str  # if empty, `keys` derives the key
    args: Payload | None  # a worker forgets the arguments of calls that have ended: see RunCore._forget_arguments
    first_seq: int
    first_ts: int
    keys: CallKeys
    phase: Phase = "proposed"
    asked_seq: int = 0  # the seq of the event with which the agent last requested the call
    attempt: int = 0
    intent_seq: int = 0  # the seq of the last attempt's intent
    last_seq: int = 0
    last_ts: int = 0
    timeout_s: float | None = None
    settle_s: float | None = None
    has_reconcile: bool = False
    keyless: bool = False  # the tool did not get the key, so no service can know it
    retry_at: int | None = None
    turn: int | None = None  # the start time of the call under its rate limit
    asks: int = 0  # how often the reconcile hook has answered "in progress"
    result: Payload | None = None
    failure: Failure | None = None
    doubt: str | None = None
    doubtful: bool = False  # some attempt may have happened, and its outcome is not known yet
    # An attempt failed without proof that its effect did not happen, or a person said that the call failed.
    unproven: bool = False
    failed: int = 0  # how many attempts failed; an attempt that was stopped, or lost with its worker, does not count
    failed_at: int = 0  # the number of the last attempt whose failure was recorded, also if the attempt was stopped
    quiet_since: int = 0  # when the end of the last attempt was recorded, or the next worker claimed the run
    # An attempt was cut off, and nothing proves that its worker is dead: that worker may still be sending the request.
    worker_may_live: bool = False
    loose: bool = False  # some attempt may still be running: "not found" proves nothing about that attempt
    progress: Payload | None = None  # the last progress that an attempt reported and an event recorded
    furthest: Any = None  # the furthest progress of all attempts, decoded; see goes_further
    resolved_by: str | None = None
    approval: str | None = None  # the id of the call's approval, if the call needs an approval
    withdrawn: int = 0  # how many attempts never began although their intents were recorded
    started_at: int = 0  # when the intent of the last attempt was recorded
    estimate: Usage | None = None  # the estimate of the attempt under way
    unsettled: Usage | None = None  # what the attempts in doubt may have cost, beyond the usage that was reported
    reserved: Amounts = NOTHING  # what is reserved for `estimate` and `unsettled`
    used: Usage = Usage()  # the usage of all attempts together
    busy_us: int = 0
    # The run that this run was forked from has made the call: its outcome counts, and it is never attempted here.
    inherited: bool = False
    of_model: bool = False  # it is a request to a model
    holds: tuple[int, ...] = ()  # the seqs of its `call_held` and `call_kept`, which alternate

    @property
    def may_cost(self) -> Usage | None:
        """What the attempts of the call may have cost, beyond the usage that was reported.

        With a key, several attempts have one effect together: so the cost counts only once.
        """
        return most_of(self.estimate, self.unsettled)

    def cost_if(self, outcome: Literal["happened", "did_not_happen", "failed"]) -> Usage | None:
        """What is charged when the call's doubt is resolved with this outcome.

        A call that is resolved as failed may have happened, so it is charged.
        """
        return None if outcome == "did_not_happen" else self.may_cost

    @property
    def key(self) -> str:
        """The idempotency key: the same for every attempt."""
        return self.recorded_key or self.keys.key(self.number, self.tool)

    @property
    def digest(self) -> str | None:
        """The digest of the arguments, including a person's edits."""
        return None if self.args is None else self.args.digest

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def begun(self) -> bool:
        """May some attempt have begun?"""
        return self.attempt > self.withdrawn

    @property
    def held(self) -> bool:
        """Does the agent consider again whether it wants the call? Then no attempt may begin."""
        return len(self.holds) % 2 == 1


class AskState(Struct, gc=False, omit_defaults=True):
    """The state of one approval according to the journal. As with CallState, fields are only added."""

    number: int
    request: ApprovalRequested  # with the current `by` and `expires_at`, which an escalation changes
    asked_seq: int
    asked_at: int
    outcome: Literal["approved", "rejected", "expired", "withdrawn"] | None = None
    voters: tuple[str, ...] = ()
    by: str | None = None
    note: str | None = None
    source: str | None = None
    input: Payload | None = None  # what was approved
    digest: str | None = None
    edited: bool = False
    escalated: bool = False
    settled_seq: int = 0
    settled_at: int = 0
    # A `run_reopened` withdrew the approval; if a decision was not read by a worker, only the row has it.
    superseded: bool = False

    @property
    def pending(self) -> bool:
        return self.outcome is None

    @property
    def open(self) -> bool:
        """May the approval still change? The grant of a call's approval may expire or be withdrawn before the call begins."""
        return self.outcome is None or (self.outcome == "approved" and self.request.tool is not None)


class ChildState(Struct, gc=False, omit_defaults=True):
    """The state of one child according to its parent's journal. As with CallState, fields are only added."""

    number: int
    agent: str
    version: str
    run_id: str
    input: Payload
    started_seq: int
    started_at: int
    ended: ChildFinished | None = None
    ended_at: int = 0
    asked_seq: int = 0  # as in CallState
    inherited: bool = False  # it is a child of the run that this run was forked from; only its outcome counts


_NO_KEYS = CallKeys("", "")


class OldFrame(Struct, frozen=True, gc=False):
    """The frame of earlier turns: each turn that event `after`, or an earlier event, has caused."""

    after: int
    frame: Payload


class RunState(Struct, gc=False, eq=False):
    """A run as of its last folded event."""

    created: RunCreated | None = None
    keys: CallKeys = _NO_KEYS  # derives the keys of the run's calls; set by `run_created`
    status: Status = "queued"
    seq: int = 0
    epoch: int = 0
    reopened: int = 0  # how often people have reopened the run
    reopened_at: int = 0  # when they last did
    fresh: bool = False  # the field `fresh` of the last `run_reopened`
    forked: RunForked | None = None  # how this run was made, if it is a fork
    inherited: int = 0  # how many events of a fork are copies of events of the run that was forked
    forked_numbers: int = 0  # the last number of a call in these events
    created_at: int = 0
    updated_at: int = 0
    started_seq: int | None = None
    worker: str | None = None
    worker_name: str | None = None  # "host:pid" of the worker that last claimed the run; kept after a release
    version: str = ""  # the version of the agent that drives the run now; empty: no worker has claimed the run yet
    began_with: str = ""  # the version of the agent that began the run
    frames: list[OldFrame] = []  # the frames of earlier turns, if the frame was changed (`FrameChanged`)
    numbers: int = 0  # the last number in use: calls, approvals and children share one sequence of numbers
    calls: dict[int, CallState] = {}
    open: dict[int, CallState] = {}
    asks: dict[int, AskState] = {}  # the approval of a tool call has the number of that call
    pending: dict[int, AskState] = {}
    children: dict[int, ChildState] = {}
    alive: dict[int, ChildState] = {}  # children that have not ended
    signals: int = 0
    pins: dict[str, str] = {}  # tool → the pin that was recorded last: at the first call, or when the pin changed
    pin_changes: list[PinChanged] = []
    patches: set[str] = set()
    budget: Limits | None = None  # with the amounts that people have added
    over: BudgetExceeded | None = None
    attempts: int = 0  # how many attempts began or may have begun
    busy_us: int = 0
    reserved: Amounts = NOTHING
    used: Usage = Usage()
    timers: dict[int, int] = {}  # timers that the run was parked for: number → due
    waiting_for: str | None = None
    wake_at: int | None = None
    # Set when the run was released while calls waited for money that other calls have reserved: the time when the wait
    # began.
    short_since: int | None = None
    cancel: CancelRequested | None = None
    paused: RunPaused | None = None
    attention: AttentionNeeded | None = None
    crashes: int = 0  # takeovers in a row, without progress in between
    crashes_alone: int = 0  # how many of these takeovers lost a worker whose only suspect was this run
    said: str | None = None
    labels: dict[str, str] = {}  # replaced by each change, never changed in place
    checkpoint: int = 0  # the seq of the last `checkpoint_taken`
    checkpoints: int = 0  # how many checkpoints the run has taken
    output: Payload | None = None
    failure: Failure | None = None

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    def is_open(self, number: int) -> bool:
        """Does the run still wait for the end of this call, approval or child?"""
        return number in self.open or number in self.alive or number in self.pending

    def apply(self, event: Event) -> None:
        """Fold the next event into the state."""
        seq, number, kind = event.seq, event.call, type(event.body)
        if seq != self.seq + 1 and not (self.seq == 1 and kind is CheckpointTaken):
            raise StoreCorrupt(f"{self._name()}: event {seq} follows event {self.seq}", hint="`perdure verify` tells what is missing")
        if self.status in FINISHED and kind is not RunReopened and kind is not RunForked:
            raise StoreCorrupt(f"{self._name()}: event {seq} ({event.type}) comes after the run's end")
        if self.inherited:
            self._check_fork(event)
        before, self.seq = self.seq, seq
        self.updated_at = event.ts
        if self.epoch != event.epoch:  # to set a field of a struct takes ten times as long as to read it
            self.epoch = event.epoch
        if number is None:
            self._apply_run(event, before)
        elif kind not in _NOT_ABOUT_TOOLS:
            self._apply_tool(event, number)
        elif kind in _ABOUT_BRANCHES:
            self._apply_again(event, number)
        elif kind is CallAnswered:
            self._answered(event, number)
        elif kind in _ABOUT_ASKS:
            self._apply_ask(event, number)
        else:
            self._apply_child(event, number)

    def _apply_run(self, event: Event, before: int) -> None:
        body = event.body
        match body:
            case RunCreated():
                self.created, self.created_at = body, event.ts
                self.keys = CallKeys.of(body)
                self.inherited = body.inherited
                self.version, self.budget = body.version, body.budget
                self.began_with, self.labels = body.version, body.labels
            case RunClaimed():
                self._claimed(event, body)
            case RunSucceeded():
                self.status, self.output = "succeeded", body.output
            case RunFailed():
                self.status, self.failure = "failed", body.failure
            case RunCancelled():
                self.status = "cancelled"
                for one in body.unsettled:
                    call = self._known(event, one.call)
                    self._settle_cost(call, one.usage)
            case RunReleased():
                self.status, self.waiting_for, self.wake_at = body.status, body.waiting_for, body.wake_at
                self.worker, self.crashes, self.crashes_alone, self.short_since = None, 0, 0, body.short_since
                if body.abrupt:
                    self._let_loose()
            case TimerSet():
                self.timers[body.timer] = body.due
            case TimerFired():
                self.timers.pop(body.timer, None)
                self.crashes = self.crashes_alone = 0
            case StatusReported():
                self.said = body.text
            case LabelsChanged():
                self.labels = with_labels(self.labels, body.labels)
            case CancelRequested():
                self.cancel, self.paused = self.cancel or body, None
                self.status = "needs_attention" if self.is_restored else "cancelling"
            case AttentionNeeded():
                self.attention = body
            case RunRestored():
                self.attention = AttentionNeeded("restored", restored_words(body.taken_at))
                self.status, self.waiting_for, self.wake_at, self.worker = "needs_attention", RESTORED, None, None
            case RunRequeued() | RunUnpaused():
                self.attention, self.waiting_for, self.wake_at = None, None, None
                self.crashes = self.crashes_alone = 0
                self.paused = self.over = None
                self.status = "cancelling" if self.cancel else "queued"
            case RunPaused():
                self.paused = None if self.cancel else body
                self._land(body)
            case SignalReceived():
                self.signals += 1
                self._land(body)
            case RunAdopted():
                self.version = body.version
            case FrameChanged():
                self.version = body.version
                # After a rewind, the frame of turns that are superseded applies to fewer turns than before.
                self.frames = [*(one for one in self.frames if one.after < body.after), OldFrame(body.after, body.frame)]
            case PinChanged():
                self.pins[body.what] = body.after
                self.pin_changes.append(body)
            case PatchMarked():
                self.patches.add(body.name)
            case BudgetExceeded():
                self.over = body
            case BudgetDeclared():
                self.budget = body.limits
            case BudgetRaised():
                self.budget = None if self.budget is None else raised(self.budget, body.added)
            case RunReopened():
                self._reopen(event, body)
            case RunForked():
                self._fork(event, body)
            case CheckpointTaken():
                if event.seq != before + 1:
                    self._restore(image_in(body))
                self.timers = {}  # the timers of the life that has ended
                self.checkpoint, self.checkpoints = event.seq, self.checkpoints + 1
            case CallKept():
                call = self._known(event, body.number)
                if call.held:  # a call that has ended meanwhile may have been held, too
                    call.holds = (*call.holds, event.seq)
            case ThoughtRecorded() | DecisionMade() | PlanGenerated() | OutcomeReused():
                pass
            case _:
                raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) names no call")

    def _claimed(self, event: Event, body: RunClaimed) -> None:
        if self.started_seq is None:
            self.started_seq = event.seq
        self.worker, self.worker_name = body.worker, body.name or body.worker
        if body.version:
            self.version = self.began_with = body.version
        self.status = "cancelling" if self.cancel else "running"
        self.waiting_for = self.wake_at = None
        self.attention = self.over = None  # the worker that claims the run finds out whether these reasons still apply
        for call in self.open.values():
            if call.phase == "started":
                call.quiet_since = event.ts
                call.worker_may_live = call.worker_may_live or not body.proven_dead
        if body.takeover:
            self.crashes += 1
            self.crashes_alone += body.lost_with == 0

    def _take_progress(self, call: CallState, progress: Payload | None) -> None:
        if progress is None:
            return
        call.progress = progress
        if (reported := progress.inline) is not None and goes_further(call.furthest, now := decode(reported)):
            call.furthest = now
            self.crashes = self.crashes_alone = 0

    def _reopen(self, event: Event, body: RunReopened) -> None:
        """Reset everything that only the agent knows to the event `back_to`. The calls in the world do not change."""
        if self.status == "succeeded" or not 1 <= body.back_to < event.seq:
            raise StoreCorrupt(
                f"{self._name()}: event {event.seq} reopens a run that has succeeded, or goes back to an event that it has not"
            )
        self.reopened, self.reopened_at, self.fresh = self.reopened + 1, event.ts, body.fresh
        self._stand_up()
        for number in body.withdrawn:
            ask = self.asks.get(number)
            if ask is None:
                raise StoreCorrupt(f"{self._name()}: event {event.seq} withdraws an approval of call {number}, which has none")
            self._settle(ask, event, "withdrawn")
            ask.superseded = True
        for one in body.unsettled:
            self._settle_cost(self._known(event, one.call), one.usage)
        for call in self.open.values():
            if call.holds and not call.begun:
                # The agent goes back to where it considered the call, or to before that.
                call.holds = tuple(seq for seq in call.holds if seq <= body.back_to)
        for call in [call for call in self.open.values() if call.asked_seq > body.back_to]:
            # A call that may have happened stays in doubt. Its worker may still be alive, because no later claim has
            # proved that it is dead.
            del self.open[call.number]
            if call.phase == "started":
                call.quiet_since, call.worker_may_live = event.ts, True
        for number in body.again:
            self.open[number] = self._known(event, number)
            self._again(self.open[number], event)
        for number in body.children:
            child = self.children.get(number)
            if child is None:
                raise StoreCorrupt(f"{self._name()}: event {event.seq} reopens call {number}, which is no child")
            child.ended, child.ended_at, self.alive[number] = None, 0, child

    def _stand_up(self) -> None:
        """Forget how the run ended, waited or was steered: it is queued."""
        self.status, self.worker = "queued", None
        self.output = self.failure = self.cancel = self.paused = self.attention = self.over = self.said = None
        self.waiting_for = self.wake_at = self.short_since = None
        self.crashes = self.crashes_alone = 0
        self.timers = {}

    # -- forks: core/fork.py makes their journals ---------------------------------------------------------------------
    def _check_fork(self, event: Event) -> None:
        """StoreCorrupt if the event cannot follow in a fork. In a rehearsal nothing may touch the world."""
        assert self.created is not None
        if event.seq == self.inherited + 1 and type(event.body) is not RunForked:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) cannot follow: event 1 says that the run is forked here")
        if event.seq > self.inherited and self.created.rehearses and isinstance(event.body, _OF_THE_WORLD):
            raise StoreCorrupt(
                f"{self._name()}: event {event.seq} ({event.type}) cannot be: the run is a rehearsal, and nothing in it touches the world"
            )

    def _fork(self, event: Event, body: RunForked) -> None:
        """All events so far are those of another run: what it has done is done, and it has paid for it."""
        created = self.created
        assert created is not None
        if event.seq > self.inherited + 1 or (event.seq > self.inherited) != (body.run_id == created.run_id):
            raise StoreCorrupt(f"{self._name()}: event {event.seq} says that the run is a fork, and event 1 does not")
        self.forked, self.created_at, self.forked_numbers = body, event.ts, self.numbers
        self.keys = CallKeys.of(created, body.run_id)
        self._stand_up()
        self.used, self.attempts, self.busy_us, self.reserved = Usage(), 0, 0, NOTHING
        for call in self.calls.values():
            if call.ended or (call.begun and not is_repeatable_class(call)):
                call.inherited = True
            else:
                # Nothing of it has happened, or it may be made any number of times: the fork makes it as a call of its own.
                call.keys, call.recorded_key = self.keys, ""
            call.estimate = call.unsettled = None
            call.used, call.busy_us, call.reserved = Usage(), 0, NOTHING
        for child in self.children.values():
            child.inherited = True
        self.alive = {}

    def _answered(self, event: Event, number: int) -> None:
        """A call of a fork got an answer without an attempt."""
        body = event.body
        assert isinstance(body, CallAnswered), body
        call, child = self.calls.get(number), self.children.get(number)
        assert self.created is not None
        # In a live fork, only the edits of the person who made it are such answers, and they are in its first commit.
        last = self.seq if self.created.rehearses else self.inherited + 1 + (0 if self.forked is None else len(self.forked.edits))
        if self.forked is None or event.seq > last or (call is None and child is None) or (body.result is None) == (body.failure is None):
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) answers call {number}, which it cannot answer")
        if child is not None:
            ended = "failed" if body.result is None else "succeeded"
            child.ended, child.ended_at = ChildFinished(child.run_id, ended, body.result, body.failure), event.ts  # type: ignore[arg-type]
            self.alive.pop(number, None)
            return
        assert call is not None
        call.phase = ANSWERS["failure" if body.result is None else "result"]
        call.result, call.failure, call.last_seq, call.last_ts = body.result, body.failure, event.seq, event.ts
        call.doubtful = call.loose = call.unproven = False
        self.open.pop(number, None)
        if body.usage is not None:
            self._settle_cost(call, body.usage)

    def _again(self, call: CallState, event: Event) -> None:
        """Make another attempt of an ended call possible. If the call may have happened, it is in doubt."""
        certain = is_repeatable(call)
        self._move(call, event, "again" if certain else "again_in_doubt")
        if call.inherited:
            assert is_repeatable_class(call), call  # core/reopen.py: no other call of the run that was forked is attempted
            call.inherited, call.keys, call.recorded_key = False, self.keys, ""
        call.doubtful = not certain
        call.doubt = None if certain else "it failed before the run was reopened, and that does not prove that it did not happen"
        call.failed = call.failed_at = call.asks = 0
        call.retry_at = call.turn = call.resolved_by = None
        call.last_seq, call.last_ts = event.seq, event.ts

    def _restore(self, image: Image) -> None:
        """The state just before a checkpoint: the events between `run_created` and it were not read, or were removed."""
        for name in _IMAGED:
            setattr(self, name, getattr(image, name))
        self.pins, self.patches = dict(image.pins), set(image.patches)
        assert self.created is not None
        theirs, self.keys = self.keys, self.keys if image.forked is None else CallKeys.of(self.created, image.forked.run_id)
        for call in image.calls:
            call.keys = theirs if call.inherited else self.keys
            call.reserved = call.reserved or NOTHING
            self.calls[call.number] = call
            if call.number in image.open:
                self.open[call.number] = call
        for event in image.requests:
            # The image leaves out the arguments of calls that have ended. Such a call may be attempted again.
            ended = self.calls.get(event.call or 0)
            if ended is not None and ended.args is None and isinstance(event.body, ToolCallInitiated | ToolCallProposed):
                ended.args = event.body.args
        for ask in image.asks:
            if ask.edited and ask.number in self.calls and ask.outcome == "approved":
                self.calls[ask.number].args = ask.input
            self.asks[ask.number] = ask
            if ask.pending:
                self.pending[ask.number] = ask
        for child in image.children:
            self.children[child.number] = child
            if child.ended is None:
                self.alive[child.number] = child

    def forget_all_but(self, numbers: Collection[int]) -> None:
        """Forget the calls, approvals and children that have other numbers: a checkpoint was taken, and they are over."""
        for known in (self.calls, self.asks, self.children):
            for number in [number for number in known if number not in numbers]:
                del known[number]

    def _let_loose(self) -> None:
        for call in self.open.values():
            if call.phase == "started":
                call.loose = True

    @property
    def is_restored(self) -> bool:
        """Does the run come from a backup, and has no person let it go on since?"""
        return self.status == "needs_attention" and self.attention is not None and self.attention.reason == "restored"

    def _land(self, body: AnyBody) -> None:
        """Set the status of the run after an event from outside, if no worker holds the run."""
        if self.worker is None:
            self.status = landing(self.status, self.attention.reason if self.attention else None, body)[0]

    def _new_number(self, event: Event, number: int) -> None:
        if number != self.numbers + 1:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) is about call {number}, which was never initiated")
        self.numbers = number

    def _apply_ask(self, event: Event, number: int) -> None:
        body = event.body
        if isinstance(body, ApprovalRequested):
            if body.tool is None:
                self._new_number(event, number)
            else:
                call = self._known(event, number)
                self._move(call, event, "asked")
                call.approval = body.approval
            self.asks[number] = self.pending[number] = AskState(number, body, event.seq, event.ts)
            return
        ask = self.asks.get(number)
        if ask is None or not ask.open:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) is about call {number}, where no approval is open")
        match body:
            case ApprovalVoted():
                ask.voters = (*ask.voters, body.by)
            case ApprovalEscalated():
                if ask.request.on_expiry == "escalate":
                    ask.voters = ()  # other people are asked: earlier votes do not count
                ask.request = structs.replace(ask.request, by=body.to, expires_at=body.expires_at)
                ask.escalated = True
            case ApprovalDecided():
                ask.by, ask.note, ask.source, ask.digest = body.by, body.note, body.source, body.digest
                ask.input, ask.edited = body.input or ask.request.input, body.input is not None
                if body.granted:
                    ask.request = structs.replace(ask.request, expires_at=usable_until(ask.request, escalated=ask.escalated))
                self._settle(ask, event, "approved" if body.granted else "rejected")
            case ApprovalExpired():
                self._settle(ask, event, "expired")
            case ApprovalWithdrawn():
                self._settle(ask, event, "withdrawn")
        self._land(body)

    def _settle(self, ask: AskState, event: Event, outcome: Literal["approved", "rejected", "expired", "withdrawn"]) -> None:
        ask.outcome, ask.settled_seq, ask.settled_at = outcome, event.seq, event.ts
        self.pending.pop(ask.number, None)
        if ask.request.tool is None:
            return
        call = self._known(event, ask.number)
        self._move(call, event, "granted" if outcome == "approved" else "refused")
        call.last_seq, call.last_ts = event.seq, event.ts
        if outcome == "approved":
            if ask.edited:
                call.args = ask.input
            return
        call.failure = refusal(outcome, ask.by, ask.note)
        self.open.pop(ask.number, None)

    def _apply_again(self, event: Event, number: int) -> None:
        """The agent made a superseded call again, or got the outcome of such a call."""
        body, call = event.body, self.calls.get(number)
        if call is None and number not in self.children and number not in self.asks:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) is about call {number}, which was never initiated")
        if not isinstance(body, CallRequestedAgain):
            return
        if call is None:
            if (child := self.children.get(number)) is not None and number not in self.alive:
                child.asked_seq = event.seq
            return
        if number in self.open:
            return  # it was never superseded: an earlier life of the agent has requested it, and it goes on
        call.asked_seq = event.seq
        if not call.ended:
            self.open[number] = call
        elif body.anew or (call.phase == "failed" and not keeps_failure(call)):
            self.open[number] = call
            self._again(call, event)

    def _apply_child(self, event: Event, number: int) -> None:
        body = event.body
        if isinstance(body, ChildStarted):
            self._new_number(event, number)
            child = ChildState(number, body.agent, body.version, body.run_id, body.input, event.seq, event.ts, asked_seq=event.seq)
            self.children[number] = self.alive[number] = child
            return
        assert isinstance(body, ChildFinished)
        ended = self.alive.pop(number, None)
        if ended is None or ended.run_id != body.run_id:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) is about call {number}, which is no child at work")
        ended.ended, ended.ended_at = body, event.ts
        self._land(body)

    def _known(self, event: Event, number: int) -> CallState:
        call = self.calls.get(number)
        if call is None:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) is about call {number}, which was never initiated")
        return call

    def _first(self, event: Event, number: int) -> CallState:
        body = event.body
        if not isinstance(body, (ToolCallInitiated, ToolCallProposed)):
            return self._known(event, number)
        self._new_number(event, number)
        call = CallState(number, body.tool, body.effect, body.key, body.args, event.seq, event.ts, self.keys, asked_seq=event.seq)
        call.of_model = type(body) is ModelCallInitiated or (type(body) is ToolCallProposed and is_request(body.args))
        self.calls[number] = self.open[number] = call
        return call

    def _apply_tool(self, event: Event, number: int) -> None:
        body = event.body
        call = self.calls.get(number) or self._first(event, number)
        call.last_seq, call.last_ts = event.seq, event.ts
        # Nearly all events are the intent or the result of a call. These two types are checked first, without the
        # slower pattern matching.
        if isinstance(body, ToolCallInitiated):
            self._initiated(call, event, body)
            return
        if isinstance(body, ToolCallCompleted):
            self._move(call, event, "completed")
            call.result, call.failure = body.result, body.failure
            if body.progress is not None:
                call.progress = body.progress
            self._take_time(call, event.ts - call.started_at)
            if body.usage is not None or call.estimate is not None or call.unsettled is not None:
                self._settle_cost(call, body.usage)
        else:
            self._apply_rarer(call, event)
        if call.phase in ENDED:
            self.open.pop(number, None)
            if self.crashes:
                self.crashes = self.crashes_alone = 0

    def _initiated(self, call: CallState, event: Event, body: ToolCallInitiated) -> None:
        if call.holds and call.held:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) begins call {call.number}, which its agent holds")
        if call.phase == "started" and call.effect in ("once", "keyed"):
            # The worker died inside the attempt, and the same key is sent again: the earlier attempt may have
            # happened.
            call.unsettled, call.doubtful = call.may_cost, True
        elif call.phase == "started":
            call.unproven = True  # its class allows another attempt, but the lost one may have happened
        self._move(call, event, "initiated")
        if call.attempt == 0:
            call.first_ts = event.ts  # the age of a key counts from its first attempt, not from the proposal
        call.attempt, call.intent_seq, call.started_at = body.attempt, event.seq, event.ts
        call.timeout_s, call.settle_s = body.timeout_s, body.settle_s
        call.has_reconcile, call.keyless, call.estimate = body.reconcile, body.keyless, body.estimate
        if call.first_seq != event.seq:  # the call was proposed, or this is another attempt
            call.retry_at = call.turn = None
            call.quiet_since = 0
        if body.pinned is not None:
            self.pins.setdefault(f"tool {body.tool}", body.pinned)
        self.attempts += 1
        if body.estimate is not None or call.reserved is not NOTHING or call.unsettled is not None:
            self._hold(call)

    def _apply_rarer(self, call: CallState, event: Event) -> None:
        body = event.body
        match body:
            case ToolCallProposed():
                call.retry_at = call.turn = body.at
            case ToolCallFailed():
                began = call.phase == "started" and body.failure.type not in (NOT_STARTED, LOST)
                call.withdrawn += body.failure.type == NOT_STARTED
                sent = call.phase == "started" and body.failure.type != NOT_STARTED
                call.unproven = call.unproven or (sent and body.failure.kind not in HARMLESS_KINDS)
                self._move(call, event, "failed_for_good" if body.final else "failed")
                self._count(call, body.attempt, body.failure, event.ts)
                self._take_progress(call, body.progress)
                self._take_time(call, event.ts - call.started_at if began else 0)
                self._settle_cost(call, body.usage, still=None if body.final else call.unsettled)
                if body.failure.type == NOT_STARTED:
                    self.attempts -= 1  # an attempt counts only if it began
            case ToolCallInDoubt():
                # An attempt that was cut off (no failure) adds no busy time: its duration is unknown.
                self._take_time(call, event.ts - call.started_at if call.phase == "started" and body.failure else 0)
                self._settle_cost(call, body.usage, still=_unsettled(call, body))
                self._move(call, event, "in_doubt")
                self._count(call, body.attempt, body.failure, event.ts)
                call.doubt, call.doubtful = body.why, True
                self._take_progress(call, body.progress)
                call.loose = call.loose or body.loose
            case CallHeld():
                if call.begun or call.ended or call.held:
                    raise StoreCorrupt(
                        f"{self._name()}: event {event.seq} ({event.type}) cannot follow: call {call.number} is {call.phase}"
                    )
                call.holds = (*call.holds, event.seq)
            case RetryScheduled() if body.turn:
                call.turn = body.at
            case RetryScheduled():
                self._move(call, event, "retry")
                call.retry_at = body.at
                call.asks += body.reconcile
            case ToolCallResolved():
                self._move(call, event, "resolved_failed" if body.outcome == "failed" else body.outcome)
                call.result, call.failure, call.resolved_by, call.retry_at = body.result, body.failure, body.by, None
                call.doubtful = call.loose = call.worker_may_live = False
                call.unproven = body.outcome == "failed"
                self._settle_cost(call, body.usage)
                if self.status == "needs_attention" and not self.is_restored:
                    # A person has resolved the call. If something else is wrong, the next worker finds that again.
                    self.attention, self.waiting_for, self.wake_at = None, None, None
                    self.status = "cancelling" if self.cancel else "queued"
            case _:
                raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) is not about a call")

    def take_back(self, intent: ToolCallInitiated, before: CallState, instead: Event) -> None:
        """Undo the last intent of a call, which was not written to the journal.

        `instead` is the event that gets the seq of this intent.
        """
        call = self.calls[before.number]
        assert (call.phase, call.intent_seq, call.last_seq) == ("started", instead.seq, instead.seq), call
        reserved = call.reserved
        for field in before.__struct_fields__:
            setattr(call, field, getattr(before, field))
        self.reserved = self.reserved + -reserved + call.reserved
        self.attempts -= 1
        if intent.pinned is not None:
            del self.pins[f"tool {intent.tool}"]
        self._apply_tool(instead, before.number)

    @property
    def spent(self) -> Amounts:
        """What the run itself has used so far."""
        return amounts_of(self.used, calls=self.attempts, busy_us=self.busy_us)

    def _hold(self, call: CallState) -> None:
        """Reserve what the call may cost now. This replaces what was reserved for the call before."""
        cost = call.estimate if call.unsettled is None else call.may_cost
        reserved = NOTHING if cost is None else amounts_of(cost)
        if reserved is not call.reserved:
            self.reserved = self.reserved + -call.reserved + reserved
            call.reserved = reserved

    def _settle_cost(self, call: CallState, usage: Usage | None, still: Usage | None = None) -> None:
        """Charge `usage` for an attempt that has ended, or whose end will never be known.

        `still` stays reserved: it is what attempts in doubt may have cost.
        """
        if usage is not None:
            call.used, self.used = added(call.used, usage), added(self.used, usage)
        call.estimate, call.unsettled = None, still
        self._hold(call)

    def _take_time(self, call: CallState, busy_us: int) -> None:
        if busy_us > 0:  # the clock may have been set back
            call.busy_us += busy_us
            self.busy_us += busy_us

    def _count(self, call: CallState, attempt: int, failure: Failure | None, ts: int) -> None:
        if failure is not None:
            call.failure = failure
            call.quiet_since = call.quiet_since or ts
            if attempt != call.failed_at and failure.type not in (NOT_STARTED, LOST):
                call.failed, call.failed_at = call.failed + (failure.kind != "cancelled"), attempt

    def _move(self, call: CallState, event: Event, what: str) -> None:
        phase = TRANSITIONS.get((call.phase, what))
        if phase is None:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) cannot follow: call {call.number} is {call.phase}")
        call.phase = phase

    def _name(self) -> str:
        return f"run {self.created.run_id}" if self.created else "journal"


class Image(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a run still needs of the events between its first event and a checkpoint."""

    version: str
    epoch: int
    numbers: int
    worker: str | None = None
    worker_name: str | None = None
    status: Status = "running"
    started_seq: int | None = None
    reopened: int = 0
    reopened_at: int = 0
    fresh: bool = False
    signals: int = 0
    budget: Limits | None = None
    attempts: int = 0
    busy_us: int = 0
    reserved: Amounts = NOTHING
    used: Usage = Usage()
    crashes: int = 0
    crashes_alone: int = 0
    said: str | None = None
    labels: dict[str, str] = {}
    cancel: CancelRequested | None = None
    checkpoint: int = 0
    checkpoints: int = 0
    began_with: str = ""
    forked: RunForked | None = None
    forked_numbers: int = 0
    pins: dict[str, str] = {}
    patches: list[str] = []
    open: list[int] = []  # of `calls`: those that have not ended and are not superseded
    calls: list[CallState] = []
    asks: list[AskState] = []
    children: list[ChildState] = []
    # The requests of the calls, approvals and children that the next life may make again, and their outcomes so far.
    requests: list[Event] = []
    outcomes: list[Event] = []


_IMAGED = tuple(
    name
    for name in Image.__struct_fields__
    if name in RunState.__struct_fields__ and name not in ("calls", "open", "asks", "children", "pins", "patches")
)


def image_of(state: RunState, requests: Sequence[Event], outcomes: Sequence[Event]) -> bytes:
    """The image of this state, as JSON."""
    numbers = {event.call for event in requests} | set(state.open) | set(state.pending) | set(state.alive)
    image = Image(
        **{name: getattr(state, name) for name in _IMAGED},
        pins=dict(sorted(state.pins.items())),
        patches=sorted(state.patches),
        open=sorted(state.open),
        # A worker has forgotten the arguments of calls that have ended.
        calls=[
            structs.replace(call, args=None, progress=None) if call.ended else call
            for number, call in sorted(state.calls.items())
            if number in numbers
        ],
        asks=[ask for number, ask in sorted(state.asks.items()) if number in numbers],
        children=[child for number, child in sorted(state.children.items()) if number in numbers],
        requests=list(requests),
        outcomes=list(outcomes),
    )
    return encode(decode(_encode_image(image)))  # canonical, as every payload


def image_problem(state: RunState, body: CheckpointTaken, events: Sequence[Event]) -> str | None:
    """How the image contradicts the events before the checkpoint; None if it does not. `state`: the fold of `events`."""
    image = image_in(body)
    unknown = [one for one in (*image.requests, *image.outcomes) if event_at(events, one.seq) != one]
    if unknown and len(events) > 1 and isinstance(events[1].body, CheckpointTaken):
        # The events before this first checkpoint may have been removed. Its image still has those that are needed.
        first = image_in(events[1].body)
        kept = {one.seq: one for one in (*first.requests, *first.outcomes)}
        unknown = [one for one in unknown if kept.get(one.seq) != one]
    if unknown:
        return "it holds an event that is not in the journal before it"
    return None if image_of(state, image.requests, image.outcomes) == body.image.inline else "it does not hold the state of the run"


def image_in(body: CheckpointTaken) -> Image:
    """The image that this checkpoint holds."""
    assert body.image.inline is not None
    return _decode_image(body.image.inline)


def payloads(body: AnyBody) -> Iterator[Payload]:
    """Every payload in the body. Of those in the image of a checkpoint, the ones that are stored as blobs."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Payload):
            yield value
    if isinstance(body, CheckpointTaken):
        yield from (one.payload for one in body.signals)
        yield from (one for one in _payloads_in(image_in(body)) if isinstance(one.blob, str))


def _payloads_in(value: Any) -> Iterator[Payload]:
    """The payloads in a structure. JSON of users is inside of payloads, and is not looked into: it may look like one."""
    if isinstance(value, Payload):
        yield value
    elif isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from _payloads_in(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _payloads_in(item)


# The keys of a call follow from `created`.
_encode_image = msgspec.json.Encoder(enc_hook=lambda _: None).encode
_decode_image = msgspec.json.Decoder(Image, dec_hook=lambda _, __: _NO_KEYS).decode


def is_made_anew(call: CallState, fresh: bool) -> bool:
    """With `--fresh`, is this completed call made again? Not under an approval: it was granted for one execution."""
    return fresh and call.phase == "completed" and call.effect == "read" and call.approval is None


def is_repeatable_class(call: CallState) -> bool:
    """Does its effect class allow any number of attempts?"""
    return call.effect in ("read", "idempotent", "transaction")


def is_repeatable(call: CallState) -> bool:
    """May this ended call be attempted again without asking what became of it?

    A `once` or `keyed` call may, if the failures of all its attempts prove that nothing happened. After any other
    failure, `core/decide.py` decides as for a call in doubt.
    """
    return is_repeatable_class(call) or not (call.unproven or call.doubtful)


def keeps_failure(call: CallState) -> bool:
    """Is the failure of this call used again, if the agent makes the call again? Else it is attempted again."""
    return call.inherited or is_certain_end(call)


def is_certain_end(call: CallState) -> bool:
    """Did this failed call certainly happen, so that only its result is lost?

    Such a call is never attempted again. perdure 0.1 recorded it as failed, if a reconcile hook said that it happened.
    """
    return call.failure is not None and call.failure.kind == "not_encodable"


Happened = Literal["yes", "maybe", "no"]


def happened(call: CallState) -> Happened:
    """Has this call changed something outside? "maybe": nothing proves that it has, and nothing proves that it has not.

    Lists of what a run has done, or may have done, are made with this function. `read` calls and requests to models
    change nothing.
    """
    if call.effect == "read" or call.of_model:
        return "no"
    if call.phase == "completed" or is_certain_end(call):
        return "yes"
    if not call.begun or call.effect == "transaction":
        return "no"  # a transaction without a result was rolled back
    under_way = call.phase in ("started", "in_doubt")
    return "maybe" if under_way or call.doubtful or call.unproven else "no"


def own_children(state: RunState) -> list[str]:
    """The ids of the runs that this run has started: no children of the run that it was forked from, and none in a rehearsal."""
    if state.created is not None and state.created.rehearses:
        return []
    return [child.run_id for child in state.children.values() if not child.inherited]


def unsettled(calls: Iterable[CallState]) -> tuple[Unsettled, ...]:
    """The calls among these that may have happened, and what each of them may have cost."""
    return tuple(
        Unsettled(call.number, call.attempt, call.may_cost)
        for call in calls
        if call.may_cost is not None and call.effect != "transaction"  # a transaction without a result did not happen
    )


def _unsettled(call: CallState, doubt: ToolCallInDoubt) -> Usage | None:
    """What the call may have cost beyond its reported usage, after this doubt was recorded."""
    if doubt.failure is not None and doubt.failure.kind not in IN_DOUBT_KINDS:
        return call.unsettled  # this attempt certainly failed: the doubt is about an earlier one
    return most_of(rest_of(call.estimate, doubt.usage), call.unsettled)


def added(one: Usage, other: Usage) -> Usage:
    """The sum of both. The sum names a model only if all usage is the usage of that model."""
    return Usage(
        one.usd_micros + other.usd_micros,
        one.tokens_in + other.tokens_in,
        one.tokens_out + other.tokens_out,
        one.tokens_cached + other.tokens_cached,
        other.model if one == Usage() or one.model == other.model else None,
    )


def raised(limits: Limits, more: Limits) -> Limits:
    """The limits raised by `more`. A limit of None stays None: unlimited."""

    def sum_of(limit: int | None, added: int | None) -> int | None:
        return None if limit is None else limit + (added or 0)

    return Limits(
        sum_of(limits.usd_micros, more.usd_micros),
        sum_of(limits.tokens, more.tokens),
        sum_of(limits.calls, more.calls),
        sum_of(limits.busy_us, more.busy_us),
        limits.on_exceed,
    )


def refusal(outcome: Literal["rejected", "expired", "withdrawn"], by: str | None, note: str | None) -> Failure:
    """The failure of a call that was not approved. Rejected, expired and withdrawn are different answers (T20)."""
    words = {
        "rejected": f"rejected by {by}{f': {note}' if note else ''}",
        "expired": "the approval was given, and expired before the call could start" if by else "nobody decided in time",
        "withdrawn": "the approval was withdrawn",
    }[outcome]
    return Failure(kind=outcome, type="NotApproved", message=words)


def fold(events: Iterable[Event]) -> RunState:
    """The state after all of these events."""
    state = RunState()
    for event in events:
        state.apply(event)
    return state
