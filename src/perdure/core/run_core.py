"""The rules of a run, as one pure object: `RunCore` takes an input and returns one step.

`core/steps.py` lists the inputs, the contents of a step, and the rules that an engine keeps.

    agent machine   runs the agent's code: takes completions, returns commands              (core/machine.py)
    run core        decides about commands and attempts, and when to park a run             (here)
    engine          makes appends durable, performs attempts, keeps time                    (engine/local/drive.py)

Nothing here does I/O, reads a clock, logs or calls back. Sometimes the rules need a fact from outside in the middle of
a turn (what is left in a budget, when a rate limit allows a call). A turn is therefore a generator: the generator
yields a question and continues with the answer.

One turn makes one append: the completion that woke the agent and the intents of the agent's next calls are in one
commit. This order is required (G2): record intent → commit → begin effect → record result and next intent → commit.

Sections, in this order: the turn · replay · commands of the agent · calls that may begin · attempts that ended · post
· approvals, and what the agent no longer waits for · time · rest · the append.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from copy import copy
from itertools import repeat
from typing import Any, Literal, Protocol, TypeVar, cast

from msgspec import Raw, Struct, structs

from perdure.core import codec
from perdure.core.agent_loop import DoesNotRest
from perdure.core.approval import Expire, Withdraw
from perdure.core.budget import NOTHING, Amounts, Charge, amounts_of, exceeded, most_of
from perdure.core.codec import Payload, decode
from perdure.core.decide import (
    GiveUp,
    Park,
    Patience,
    Perform,
    Reconcile,
    Verdict,
    Wait,
    after_failed_attempt,
    after_hook,
    decide,
    is_not_ready,
    lost_answer,
    quiet_after_s,
    settle_s,
)
from perdure.core.events import (
    OF_MODEL,
    OF_TOOL,
    AnyBody,
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalVoted,
    ApprovalWithdrawn,
    AttentionNeeded,
    BudgetDeclared,
    BudgetExceeded,
    BudgetRaised,
    CallEvents,
    CallHeld,
    CallKept,
    CallRequestedAgain,
    CancelRequested,
    CheckpointTaken,
    ChildFinished,
    ChildStarted,
    Effect,
    Event,
    Failure,
    Limits,
    OutcomeReused,
    PinChanged,
    PlanGenerated,
    Reason,
    RetryScheduled,
    RunCancelled,
    RunFailed,
    RunPaused,
    RunReleased,
    RunReopened,
    RunSucceeded,
    RunUnpaused,
    SignalReceived,
    TimerFired,
    TimerSet,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
    UnreadSignal,
    tag_of,
)
from perdure.core.failures import describe
from perdure.core.history import Requests
from perdure.core.identity import KEY_SCHEME, approval_id, child_id
from perdure.core.idle import Ask, Sleep, Stay, Stuck, at_rest
from perdure.core.loop_detector import Circles, CircleWatch
from perdure.core.machine import (
    Abandon,
    AskApproval,
    Asked,
    CallCompleted,
    CallFailed,
    CallTool,
    Cancelled,
    Command,
    Completion,
    Failed,
    Finish,
    Hold,
    Machine,
    Record,
    StartChild,
    Succeeded,
    TakeCheckpoint,
    TimerDue,
)
from perdure.core.outcomes import Abandoned, Raised, Returned, Unrecordable
from perdure.core.replay import Frontier, completion_of, inheritance, replay
from perdure.core.state import ENDED, FINISHED, LOST, NOT_STARTED, AskState, CallState, RunState, image_of, is_made_anew, refusal
from perdure.core.steps import (
    Answer,
    AppendCommitted,
    AppendRefused,
    AttemptEnded,
    Begin,
    Broken,
    CancelChild,
    ClockReached,
    Crowded,
    Drain,
    HoldBack,
    HookAnswered,
    InboxRow,
    Input,
    JournalRead,
    LedgersRead,
    LimitUnanswered,
    Note,
    NotNow,
    NotSettled,
    ParkedRun,
    PlaceGiven,
    Posted,
    Question,
    ReadLedgers,
    Rested,
    RolledBack,
    RowChange,
    Settle,
    Step,
    StepAppend,
    StopAttempts,
    TakePlace,
    Transaction,
)
from perdure.core.suspects import goes_further, is_poison
from perdure.core.trace_context import RunTrace
from perdure.errors import Diverged, InvalidInput, PerdureError, StoreUnavailable

T = TypeVar("T")
Asking = Generator[Question, Answer, T]  # a part of a turn: it may yield a question to the engine, and it returns T
# A part of a turn that has asked nothing and is done. `yield from` takes any iterable, and an empty tuple is faster
# than a generator. The functions that run for every call are plain functions: they return this tuple, or a generator.
_NO_QUESTION = cast("Asking[None]", ())
_Decision = ApprovalVoted | ApprovalEscalated | ApprovalDecided | ApprovalExpired | ApprovalWithdrawn
# The core reads this post before it decides about the call. Reason: an approval that was granted may have expired or
# been withdrawn in the meantime. If the call were started first, the store would refuse the append that starts it.
_ANSWERS = (ToolCallResolved, ApprovalVoted, ApprovalEscalated, ApprovalDecided, ApprovalExpired, ApprovalWithdrawn)
# No call starts in the last 50 ms before its approval expires: the approval could expire before the intent is
# committed.
_START_MARGIN_US = 50_000
_SETTLE_AGAIN_US = 1_000_000
_LEDGER_AGAIN_US = 500_000
# Longer than an ordinary call stays in doubt. While a call is in doubt, its cost stays reserved.
_LEDGER_PATIENCE_US = 900_000_000
_LONGEST_SLEEP_US = 60_000_000  # a longer sleep would notice a jump of the wall clock too late
# Work that is due may wait for something slow: without this sleep the core would loop without a pause.
_SHORTEST_SLEEP_US = 1_000
# After one of these events, more of them may follow soon.
_NEWS = frozenset((ChildFinished, ApprovalDecided, ApprovalExpired, ApprovalWithdrawn))
_UNBEGUN = ("proposed", "approved", "retry_wait", "idle", "failing")


class RunSettings(Struct, frozen=True):
    """The settings that the rules of a run use."""

    inline_bytes: int
    max_steps: int
    poison_limit: int
    reconcile_asks: int
    patience: Patience
    park_after_us: int  # a run with nothing to do for longer than this is parked
    # After a child ended or an approval was decided, the worker holds the run for this long: more children may end
    # soon.
    linger_us: int
    flush_us: int  # how long results of `read` calls may wait for the next append
    traced: bool = False  # the worker reports spans: log records of every agent get the id of its trace


class AgentCode(Protocol):
    """What the core needs to know about the agent of a run."""

    @property
    def circles(self) -> Circles | None: ...

    @property
    def budget(self) -> Limits | None: ...

    def machine_of(self, state: RunState, load: Callable[[Payload], bytes], max_steps: int) -> Machine: ...


class PendingRelease(Struct, frozen=True, gc=False):
    """Why the run is released once the attempts under way have ended.

    While `RunCore.closing` is set, no new call begins.
    """

    status: Literal["queued", "paused", "needs_attention"]
    waiting_for: str
    attention: Reason | None = None
    cause: int | None = None  # the seq of the event that makes the run close; None: there is no such event (a drain)


class Later(Struct, frozen=True, gc=False):
    """The call may not start yet: look again at the time `at`."""

    at: int
    has_place: bool = True  # False: `at` is only the time of the next check, not the call's place under its rate limit


class Over(Struct, frozen=True, gc=False):
    """There is not enough left in the budget for the call."""

    what: BudgetExceeded
    limits: Limits


class RunCore:
    """One claimed run, from its claim to its release. `step` takes one input and returns what the engine has to do."""

    # Slots: with more than 30 attributes, instances do not share the keys of their dicts. Then Python cannot cache the
    # lookup of a method, and each run has a dict of its own that does not fit into the processor's cache.
    __slots__ = (
        "_approved",
        "_arrived",
        "_asked",
        "_blobs",
        "_budgets",
        "_charged",
        "_claimed_mono",
        "_claimed_seq",
        "_code",
        "_compared",
        "_consumed",
        "_crowded",
        "_cut_off",
        "_dirty_since",
        "_due",
        "_durable_seq",
        "_ended_mono",
        "_events",
        "_expiries",
        "_hook_due",
        "_hooks",
        "_ids",
        "_kept",
        "_last_news",
        "_ledgers",
        "_left",
        "_machine",
        "_mono",
        "_now",
        "_obeying",
        "_out",
        "_places",
        "_precious",
        "_refused",
        "_released",
        "_requests",
        "_running",
        "_seen",
        "_sent",
        "_settings",
        "_settling",
        "_short",
        "_short_before",
        "_shown",
        "_starting",
        "_stored",
        "_suspect",
        "_turn",
        "_unneeded",
        "_unwanted",
        "_urgent",
        "_waits",
        "_watch",
        "_withdrawn",
        "closing",
        "run_id",
        "state",
    )

    def __init__(self, run_id: str, code: AgentCode, settings: RunSettings, ids: Iterator[str], blobs: Mapping[str, bytes]) -> None:
        self.run_id = run_id
        self.state = RunState()
        self.closing: PendingRelease | None = None
        self._code = code
        self._settings = settings
        self._ids = ids
        self._stored = blobs
        self._machine: Machine | None = None
        self._watch: CircleWatch | None = None
        # Inputs that are not handled yet, and the state that the core needs to handle them in turns.
        self._arrived: deque[Input] = deque()
        self._seen: set[int] = set()  # ids of inbox rows that arrived: the same row may be read and arrive again
        self._turn: Asking[None] | None = None  # the turn that waits for an answer to its question
        self._ledgers: LedgersRead | None = None  # the ledgers as they were read in this turn
        self._sent: StepAppend | None = None  # the append under way
        self._starting: list[int] = []  # the calls that begin when `_sent` is durable
        # Everything that is recorded and not durable yet.
        self._durable_seq = 0
        self._events: list[Event] = []
        self._blobs: dict[str, bytes] = {}
        self._consumed: list[int] = []
        self._left: list[int] = []
        self._budgets: frozenset[str] = frozenset()  # if empty, no budget applies, and nothing is charged
        self._charged = (NOTHING, NOTHING)  # the part of state.reserved and state.spent that is in the ledgers already
        # The end of an effect is recorded and not durable: append at once. The result of a `read` may wait.
        self._precious = False
        self._urgent = False  # a recorded event creates a child: do not wait for `flush_us`
        self._dirty_since: int | None = None  # monotonic
        # What the agent has requested, and the state of these calls. The keys of the dicts and the members of the sets
        # are call numbers. A comment that begins with → describes the values of a dict.
        self._asked: dict[int, Asked] = {}
        self._requests = Requests()
        self._unwanted: set[int] = set()  # calls, approvals and children that the agent has stopped waiting for
        self._unneeded: set[int] = set()  # approvals to withdraw and children to cancel, once they are durable
        self._due: list[int] = []  # calls whose intent is recorded: they begin after the next append
        self._running: set[int] = set()  # calls with an attempt under way
        self._hooks: dict[int, int] = {}  # → the attempt that the reconcile hook is being asked about
        self._hook_due: dict[int, int] = {}  # → the monotonic time at which the hook is to be asked
        self._waits: dict[int, int] = {}  # → when the call is considered again
        self._places: dict[int, int] = {}  # → the reserved start time of the call under its rate limit
        self._short: dict[int, int] = {}  # → since when the call has waited for money that other calls have reserved
        # → the same time, for calls that were open at the claim: their wait began before the claim.
        self._short_before: dict[int, int] = {}
        # (call, attempt) → the stored progress of an attempt that was cut off before this claim. The first event about
        # that attempt records it.
        self._cut_off: dict[tuple[int, int], bytes] = {}
        self._approved: dict[int, CallState] = {}  # → the call's state before the intent that consumes its approval
        self._expiries: dict[int, int] = {}  # → when the approval has to be checked
        self._withdrawn: set[int] = set()  # approvals to withdraw
        self._settling: set[int] = set()  # approvals that the engine was told to settle
        self._compared: set[str] = set()  # names of tools whose pin was compared with the recorded pin
        # Failures and reused outcomes that were recorded during `_obey`. They are delivered after the last command. Each is
        # (the recorded event, the event whose completion is delivered). For a reused outcome these are two events.
        self._refused: deque[tuple[Event, Event]] = deque()
        self._kept: list[int] = []  # calls that the agent has just kept: they are considered after its last command
        self._obeying = False
        self._ended_mono: dict[int, int] = {}  # → when the last attempt ended in this worker without a result
        self._claimed_mono = 0
        self._claimed_seq = 0
        self._last_news: int | None = None  # when a child last ended or an approval was last decided (monotonic)
        self._released: Event | None = None  # the `run_released` of this core, once it is durable
        self._shown = "running"  # the status in the run's row
        self._suspect = False  # the row has a count of crashes: the first progress after this claim sets it to 0
        self._crowded = False
        self._now = 0
        self._mono = 0
        self._out = Step()

    # -- the turn -------------------------------------------------------------------------------------------------------
    def step(self, given: Input, now: int, mono: int, *, more: bool = False) -> Step:
        """Take one input at the time `now`, and return what the engine has to do.

        `more`: another input follows immediately.

        Inputs that arrive together are handled in one turn and make one append. So if a cancel or a pause has arrived
        too, the calls that earlier post would start do not begin.
        """
        self._now, self._mono = now, mono
        out = self._out = Step()
        kind = type(given)
        answer: Answer | None = None
        if isinstance(given, AppendCommitted) and self._sent is not None:
            self._take_commit(given)
            if out.end is not None or (more and given.result is None):
                return out
            turn = self._go_on(given.result)
        elif self._sent is not None and isinstance(given, RolledBack | AppendRefused):
            turn = self._unwritten(given)
        elif self._turn is not None and isinstance(given, Answer):
            turn, answer = self._turn, given
            self._ledgers = given if isinstance(given, LedgersRead) else None
        elif kind is JournalRead:
            turn = self._begin(given)  # type: ignore[arg-type]
        else:
            if kind is AttemptEnded:
                self._arrived.append(given)
            else:
                self._keep(given)
            if more or self._sent is not None or self._turn is not None or self.state.created is None:
                # `given` is kept until the turn can begin: at the next input, at an answer, or when the journal
                # arrives.
                return out
            turn = self._go_on()
        if answer is None:
            # The turn begins here. Most turns have no question, and `next` with a default is faster than a
            # StopIteration.
            question = next(turn, None)
        else:
            try:
                question = turn.throw(answer.error) if isinstance(answer, LimitUnanswered) else turn.send(answer)
            except StopIteration:
                question = None
        if question is not None:
            self._turn, out.question = turn, question
        elif self._turn is not None:
            self._turn = self._ledgers = None
        return out

    def close(self) -> None:
        """Close the agent's machine. This is allowed in every state of the agent."""
        if self._machine is not None:
            self._machine.close()
            self._machine = None

    def parked(self) -> ParkedRun | None:
        """What the engine may keep of the run after `Rested`; None if the run is over, or if it has to be replayed.

        If the run was closing, it has to be replayed: events that were recorded in that time were not delivered to its
        agent. If this method returns a parked run, the caller owns the machine from now on and has to close it.
        """
        machine, last = self._machine, self._released
        if machine is None or last is None or self.closing is not None or self.state.finished:
            return None
        self._machine = None
        return ParkedRun(last, self.state, machine, self._watch, self._asked, self._unwanted, self._compared, self._requests)

    def begin_release(self) -> None:
        """Begin no new call from now on, because the run is to be released.

        The input `Drain` does this too, but the core may handle that input late. In between, an append may become
        durable, and the calls of that append must not begin. So an engine calls this method before it sends `Drain`.
        """
        self.closing = self.closing or PendingRelease("queued", "another worker: the one before was drained")

    @property
    def may_begin(self) -> bool:
        """May the calls with recorded intents begin?

        Not while the run is closing. There is one exception: if the run closes because a later call exceeds a budget,
        these calls may begin, because the budget covers them.
        """
        return self.closing is None or self.closing.attention == "budget"

    @property
    def is_asking(self) -> bool:
        """Does a turn wait for the answer to its question?"""
        return self._turn is not None

    @property
    def budgets(self) -> frozenset[str]:
        """The ids of the runs whose budgets apply to this run."""
        return self._budgets

    def uncharged(self, budget_of: str) -> Amounts:
        """What this run has recorded under the budget of run `budget_of`, and no ledger contains yet."""
        if budget_of not in self._budgets:
            return NOTHING
        charge = self._charge()
        return charge.reserved + charge.spent

    def _keep(self, given: Input) -> None:
        match given:
            case Posted(row):
                if row.inbox_id not in self._seen:
                    self._seen.add(row.inbox_id)
                    self._arrived.append(given)
            case Drain():
                self.begin_release()
                self._drop_unasked_hooks()
            case StopAttempts():
                self._stop_all()
            case ClockReached():
                pass  # every turn looks at the time
            case _:
                self._arrived.append(given)

    def _go_on(self, result: Event | None = None) -> Asking[None]:
        """Handle what has arrived; then append, wait or rest.

        `result`: the result event of a transaction that has just become durable.
        """
        if result is not None:
            try:
                yield from self._deliver(result)
            except Exception as error:
                self._go_wrong(error)
        while self._arrived:
            given = self._arrived.popleft()
            try:
                yield from self._take_end(given) if type(given) is AttemptEnded else self._take(given)
            except Exception as error:
                self._go_wrong(error)
        machine, closing = self._machine, self.closing
        if closing is None and machine is not None and (machine.timers or self._waits or self._expiries):
            try:
                yield from self._wake_due(machine)
            except Exception as error:
                self._go_wrong(error)
            closing = self.closing
        if self._unneeded and not self._events and not self._consumed:
            self._end_unneeded()
        may_begin = closing is None or closing.attention == "budget"
        if (self._due or self._precious or self._unneeded) and may_begin and self.state.status not in FINISHED:
            self._append(None)
        elif not self._running and not self._hooks and (closing is not None or not self._due):
            yield from self._rest()
        else:
            self._arm()

    def _take(self, given: Input) -> Asking[None]:
        match given:
            case HookAnswered():
                yield from self._take_answer(given)
            case Posted(row):
                yield from self._read(row)
            case NotSettled(number):
                self._settling.discard(number)
            case Crowded():
                self._crowded = True
            case _:
                raise AssertionError(f"the core does not wait for {given}")

    def _go_wrong(self, error: Exception) -> None:
        """Stop this run after an error, until a person has looked at it. Other runs are not affected."""
        match error:
            case StoreUnavailable():
                # Nothing is wrong with the run itself: the next worker tries to read the store again.
                self._note("error", f"{error}; the run is released")
                self.closing = self.closing or PendingRelease("queued", "another look at its journal")
            case Diverged():
                self._attend("diverged", str(error), self._claimed_seq)
            case DoesNotRest():
                self._attend("stuck", str(error))
            case PerdureError():
                self._attend("error", f"{type(error).__name__}: {error}")
            case _:
                self._note("error", "unexpected error; the run is parked\n" + "".join(traceback.format_exception(error)))
                # Use describe(), because the __str__ of the error may raise.
                self._attend("error", f"unexpected {type(error).__name__}: {describe(error).message}")

    def _attend(self, reason: Reason, detail: str, cause: int | None = None) -> None:
        """Stop the run until a person has looked at it. Attempts under way may end, and their ends are recorded.

        `cause` is the event that shows the problem; None: the last event.
        """
        if self.closing is None or self.closing.status == "queued":
            cause, needed = self.state.seq if cause is None else cause, self.state.seq + 1
            # Set `closing` first: `_record` looks for circles, and may call this method again.
            self.closing = PendingRelease("needs_attention", f"a person: {reason.replace('_', ' ')}", reason, needed)
            self._record(AttentionNeeded(reason, detail), cause=cause)

    def _stop_all(self) -> None:
        self._out.stop += tuple(self._running)
        self._out.forget += tuple(self._hooks)
        self._hooks.clear()

    def _note(self, level: Literal["info", "warning", "error"], text: str) -> None:
        self._out.notes += (Note(level, f"run {self.run_id}: {text}"),)

    # -- replay ---------------------------------------------------------------------------------------------------------
    def _begin(self, journal: JournalRead) -> Asking[None]:
        """Rebuild the machine from the journal, and continue at the frontier."""
        parked, circles = journal.parked, self._code.circles
        if parked is not None:
            self.state, self._machine, self._compared = parked.state, parked.machine, parked.compared
            self._asked, self._requests, self._unwanted, watch = parked.calls, parked.requests, parked.unwanted, parked.watch
        else:
            watch = None if circles is None else CircleWatch(circles)
        state = self.state
        for event in journal.events:
            state.apply(event)
            self._requests.see(event)
            kind = type(event.body)
            if kind is RunReleased or kind is CheckpointTaken:
                self._last_news = None
            elif kind in _NEWS:
                self._last_news = self._mono
            if circles is not None and (kind is RunReopened or kind is CheckpointTaken):
                watch = CircleWatch(circles)  # the agent went back, or began a new life: its calls before that do not count
            if watch is not None:
                watch.observe(event, None if event.call is None else state.calls.get(event.call))
        if journal.epoch not in (None, state.epoch):
            # Another worker claimed the run before its journal was read here: the store would refuse every append of
            # this core.
            self._out.end = Broken("fenced", f"run {self.run_id}: its lease was lost while its journal was read")
            return
        self._watch = watch
        self._claimed_mono, self._claimed_seq, self._durable_seq = self._mono, state.seq, state.seq
        self._suspect = journal.crashes > 0
        self._budgets = journal.budgets
        # A person may have resolved a doubt while no worker held the run: the next append frees what was reserved for
        # that call.
        self._charged = (journal.reserved if journal.budgets else state.reserved, state.spent)
        if state.short_since is not None:
            # The wait is counted from its first start. If each claim started the wait again, it might never end.
            self._short_before = dict.fromkeys(state.open, state.short_since)
        # A call that waits for its start time under a rate limit keeps that time. If it had to go to the end of the
        # queue after each claim, it might never start.
        self._places = {call.number: call.turn for call in state.open.values() if call.turn is not None}
        for (number, attempt), progress in journal.progress.items():
            cut_off = state.open.get(number)
            if cut_off is not None and (cut_off.phase, cut_off.attempt) == ("started", attempt):
                self._cut_off[number, attempt] = progress
        if state.paused is not None:
            # Post arrived while the run was being released as paused. That post is read now, and the run is released
            # as paused again.
            self.closing = PendingRelease("paused", f"a person who unpauses it; {state.paused.by} paused it")
        if watch is not None and watch.circling is not None:
            self._attend("circling", watch.circling)  # the previous worker died before it could release the run
        elif not self._came_further() and is_poison(state.crashes, state.crashes_alone, self._settings.poison_limit):
            deaths = f"{state.crashes} workers in a row died while they drove this run, and no call ended in between"
            self._attend("poison", f"{deaths}; in {state.crashes_alone} of these deaths it was the worker's only suspect")
        elif self._must_declare_budget():
            assert self._code.budget is not None
            declared = self._record(BudgetDeclared(self._code.budget), cause=state.seq)
            # The next claim reads the ledger that this commit makes: no call begins before the budget applies.
            self.closing = PendingRelease("queued", "a worker: the budget that its agent declares applies now", cause=declared.seq)
        else:
            try:
                yield from self._rebuild(journal.events)
            except Exception as error:
                self._go_wrong(error)
        yield from self._go_on()

    def _must_declare_budget(self) -> bool:
        """Was the run started without its code, does the code declare a budget, and has the agent not begun yet?"""
        state = self.state
        assert state.created is not None
        return state.created.by_name and state.budget is None and self._code.budget is not None and not state.numbers

    def _came_further(self) -> bool:
        """Did an attempt that was cut off come further than all attempts before?

        The next event about its call records that.
        """
        return any(goes_further(self.state.open[number].furthest, decode(progress)) for (number, _), progress in self._cut_off.items())

    def _rebuild(self, events: Sequence[Event]) -> Asking[None]:
        state = self.state
        if self._machine is None:
            self._machine = self._new_machine()
            frontier = replay(self._machine, events, self._load)
            if frontier.in_the_way is not None:  # the code of this version has changed since a person let it go on with the run
                raise Diverged(f"this code cannot go on with the run: {frontier.in_the_way}", seq=state.seq)
            # Open calls of an earlier life, for which the agent had stopped waiting, are unwanted.
            left = {
                number for number in self._open_numbers() if number not in frontier.calls and number not in self._machine.earlier.requests
            }
            self._asked, self._unwanted = frontier.calls, frontier.abandoned | left
            for tool in {asked.tool.name: asked.tool for asked in self._asked.values() if isinstance(asked, CallTool)}.values():
                self._pinned(tool)  # records an event if the tool has changed since this run first called it (T30)
        else:  # this worker has kept the machine since it parked the run: the tools are the same objects
            frontier = replay(self._machine, events, self._load, Frontier(self._asked, self._unwanted, []))
        open_before, known = list(state.open.values()), state.numbers
        again = {command.number for _, command in frontier.pending if isinstance(command, Asked)}  # superseded calls, and new ones
        for number in [number for number in self._asked if number <= known and number not in again and not state.is_open(number)]:
            self._forget_arguments(number)
        needed = {*self._machine.waits_for, *self._open_numbers()}
        for number in [number for number in self._requests.requests if number not in needed]:
            self._requests.forget(number)
        yield from self._obey(frontier.pending)
        for number, hold in list(self._machine.holds.items()):
            # The last worker could not hold the call: it died, or the call had no approval yet. Do it before the core
            # decides about the call, because its approval may be granted.
            self._hold(number, hold.cause)
        # The agent made these calls again while the last worker was closing the run.
        for number in [number for number in self._machine.waits_for if number <= known and number not in again]:
            if number not in self._machine.edits:
                self._reuse_outcome(number, state.seq)
        yield from self._obey(())
        yield from self._read_answers()
        for call in open_before:
            # If post has just started the call, no decision is needed: the call was not cut off and is not in doubt.
            if not call.ended and call.number not in self._due and not self._is_busy(call.number):
                yield from self._consider(call)
        for ask in list(state.pending.values()):
            self._watch_expiry(ask)
        for number in state.alive:
            asked = self._asked.get(number)
            if asked is not None:  # if not, an earlier life has started the child, and this one has not asked for it yet
                assert isinstance(asked, StartChild), asked
                self._out.serve += (asked.agent,)
        for number in sorted(self._unwanted):
            if number > known or number not in state.calls:
                # The number belongs to a child or an approval. Or it belongs to a call for which the agent stopped
                # waiting in the same activation in which the agent made the call.
                yield from self._obey([(state.seq, Abandon(number))])

    def _open_numbers(self) -> set[int]:
        return {*self.state.open, *self.state.pending, *self.state.alive}

    def _read_answers(self) -> Asking[None]:
        """Read the post about calls that were cut off or wait for an approval, before the core decides about them."""
        answers = [one for one in self._arrived if isinstance(one, Posted) and isinstance(one.row.body, _ANSWERS)]
        for posted in answers:
            self._arrived.remove(posted)
            try:
                yield from self._read(posted.row)
            except Exception as error:
                self._go_wrong(error)

    def _load(self, payload: Payload) -> bytes:
        inline = payload.inline
        if inline is not None:
            return inline
        assert isinstance(payload.blob, str)
        recorded = self._blobs.get(payload.blob)
        return self._stored[payload.blob] if recorded is None else recorded

    # -- commands of the agent ------------------------------------------------------------------------------------------
    def _deliver(self, event: Event, completion: Completion | None = None, source: Event | None = None) -> Asking[None]:
        """Deliver the event to the machine, and carry out the machine's commands.

        `source`: the event that holds the completion, if `event` says that a superseded outcome is reused.

        While the run is closing, nothing is delivered: the next worker delivers the event.
        """
        machine = self._machine
        if self.closing is not None:
            return _NO_QUESTION
        assert machine is not None
        if type(event.body) is CheckpointTaken:
            return self._begin_life(event)
        source = source or event
        completion = completion or completion_of(source, self._load)
        if completion is None or machine.finished:
            return _NO_QUESTION
        if (kept := machine.keeps(event)) is not None:
            return self._obey(list(zip(repeat(event.seq), kept))) if kept else _NO_QUESTION
        if machine.left:
            machine.keep_for_next_life(event, source, completion)
            return _NO_QUESTION
        machine.cause, machine.source = event.seq, source.seq
        commands = machine.deliver(event.ts, completion)
        if event.call is not None and not machine.is_waiting_for(event.call):
            self._requests.forget(event.call)
        if len(commands) > 1:
            # `Abandon` comes last. It may fail a call, that failure may end the run, and nothing can be recorded after
            # the end of the run.
            # The checkpoint comes after it: it holds what is open then.
            commands.sort(key=lambda command: 2 if isinstance(command, TakeCheckpoint) else isinstance(command, Abandon))
        return self._obey(list(zip(repeat(event.seq), commands))) if commands else _NO_QUESTION

    def _take_checkpoint(self, command: TakeCheckpoint, cause: int) -> None:
        """Record the end of the agent's life. Its next life begins when all commands are recorded."""
        state, machine = self.state, self._machine
        assert machine is not None
        while self._refused:
            # The life is over: what was recorded for it belongs to the next one.
            event, source = self._refused.popleft()
            completion = completion_of(source, self._load)
            if completion is not None and machine.keeps(event) is None:
                machine.keep_for_next_life(event, source, completion)
        earlier, waiting = machine.left_over
        requests = [*(machine.earlier.requests[number] for number in earlier), *(self._requests.requests[number] for number in waiting)]
        outcomes = [end for number in earlier for end in machine.earlier.outcomes.get(number, ())]
        for number in waiting:
            edited, ends = self._requests.edits.get(number), machine.after_life.get(number, [])
            outcomes += ends if edited is None or edited in ends else [edited, *ends]
        image = image_of(state, sorted(requests, key=_seq), sorted(outcomes, key=_seq))
        signals = tuple(UnreadSignal(topic, self._pack(payload)) for topic, payload in machine.unread)
        body = CheckpointTaken(self._pack(command.state), Payload(json=Raw(image)), signals, command.timers)
        event = self._record(body, cause=cause)
        if self._code.circles is not None:
            self._watch = CircleWatch(self._code.circles)
        left = {one.call for one in requests if one.call is not None} | self._open_numbers() | self._running | set(self._hooks)
        state.forget_all_but(left)
        for number in [number for number in self._asked if number not in left]:
            del self._asked[number]
        for number in [number for number in self._requests.requests if number not in left]:
            self._requests.forget(number)
        self._unwanted &= left
        self._refused.append((event, event))

    def _new_machine(self) -> Machine:
        machine = self._code.machine_of(self.state, self._load, self._settings.max_steps)
        assert self.state.created is not None
        if self._settings.traced or self.state.created.trace is not None:
            machine.trace_id = RunTrace(self.state.created).trace_id
        return machine

    def _begin_life(self, checkpoint: Event) -> Asking[None]:
        """Begin the agent's next life, in the same way as a replay from this checkpoint."""
        assert self._machine is not None
        self._machine.close()
        machine = self._machine = self._new_machine()
        machine.begin_life(inheritance(checkpoint, self._load), self._load)
        machine.cause = machine.source = checkpoint.seq
        commands = machine.start(checkpoint.ts)
        commands.sort(key=lambda command: 2 if isinstance(command, TakeCheckpoint) else isinstance(command, Abandon))
        return self._obey(list(zip(repeat(checkpoint.seq), commands)))

    def _obey(self, commands: Sequence[tuple[int, Command]]) -> Asking[None]:
        """Carry out commands of the machine.

        A call may be refused at once. That failure is delivered only after all commands are recorded. If it were
        delivered earlier, the machine's next commands would be recorded before the rest of these commands.
        """
        outermost, self._obeying = not self._obeying, True
        try:
            broken: Exception | None = None
            for cause, command in commands:
                try:
                    yield from self._call(command, cause) if type(command) is CallTool else self._do(command, cause)
                except Exception as error:
                    # Record the remaining commands before the run stops because of this error. If only a part of the
                    # commands were recorded, replay would report a divergence.
                    broken = broken or error
                    if isinstance(command, CallTool) and command.number > self.state.numbers:
                        self._propose(command, cause, "handover")
            if broken is not None:
                raise broken
            while outermost and (self._refused or self._kept):
                if self._kept:
                    yield from self._go_on_with_kept(self._kept.pop(0))
                    continue
                event, source = self._refused.popleft()
                yield from self._deliver(event, source=source)
        finally:
            if outermost:
                self._obeying = False
                self._refused.clear()
                self._kept.clear()

    def _do(self, command: Command, cause: int) -> Asking[None]:
        match command:
            case CallTool():
                yield from self._call(command, cause)  # in the common case `_obey` calls `_call` directly
            case Finish(Succeeded(output)):
                self._record(RunSucceeded(self._pack(output)), cause=cause)
            case Finish(Failed(failure)):
                self._record(RunFailed(failure), cause=cause)
            case Finish(Cancelled()):
                self._record(RunCancelled(self.state.cancel.reason if self.state.cancel else None), cause=cause)
            case AskApproval() | StartChild() if command.number <= self.state.numbers:
                yield from self._request_again(command.number, cause)
            case AskApproval():
                self._ask_approval(command, cause)
            case StartChild():
                self._start_child(command, cause)
            case Record(PlanGenerated() as body):
                # A plan may be too large to be stored inline, and the machine cannot create blobs.
                assert body.plan.inline is not None, body.digest
                self._record(structs.replace(body, plan=self._pack(body.plan.inline)), cause=cause)
            case Record(CallKept(number) as body):
                self._record(body, cause=cause)
                self._kept.append(number)
            case Record(body):
                self._record(body, cause=cause)
            case Hold(number):
                self._hold(number, cause)
            case TakeCheckpoint():
                self._take_checkpoint(command, cause)
            case Abandon(number, stop):
                self._unwanted.add(number)
                yield from self._abandon(number, stop)

    def _call(self, command: CallTool, cause: int) -> Asking[None]:
        """The agent makes a call: start the call, or propose it and wait for an approval, a rate limit or a budget."""
        tool, number = command.tool, command.number
        self._asked[number] = command
        if number <= self.state.numbers:
            return self._request_again(number, cause)
        if self.closing is not None:
            self._propose(command, cause, "handover")
            return _NO_QUESTION
        if tool.approval is not None and (asks := tool.asks(command.args)) is not False:
            self._propose(command, cause, "approval")
            return self._ask_for(command, asks)
        if tool.rate is not None or self._budgets:
            return self._call_within_limits(command, cause)
        self._begin_first(command, cause)
        return _NO_QUESTION

    def _begin_first(self, command: CallTool, cause: int) -> None:
        """Record the intent of the first attempt."""
        tool, number = command.tool, command.number
        key = self.state.keys.key(number, tool.name) if tool.shows_key else ""
        self._initiate(tool, number, cause, effect=tool.effect, key=key, args=self._pack(command.args))
        self._ready(self.state.calls[number])

    def _call_within_limits(self, command: CallTool, cause: int) -> Asking[None]:
        tool, number = command.tool, command.number
        barrier = yield from self._barrier(number, tool)
        match barrier:
            case None:
                self._begin_first(command, cause)
            case Later(at, has_place):
                self._propose(command, cause, "rate" if tool.rate is not None else "budget", at if has_place else None)
                self._waits[number] = at
            case Over():
                self._propose(command, cause, "budget")
                yield from self._over_budget(self.state.calls[number], barrier)

    def _request_again(self, number: int, cause: int) -> Asking[None]:
        """The agent made a superseded call again. perdure treats both requests as one call (core/history.py)."""
        state = self.state
        call = state.calls.get(number)
        anew = call is not None and is_made_anew(call, state.fresh)
        event = self._record(CallRequestedAgain(anew), call=number, cause=cause)
        self._unwanted.discard(number)
        self._reuse_outcome(number, event.seq)
        if call is not None and number in state.open and self.closing is None and number not in self._due and not self._is_busy(number):
            yield from self._consider(call)

    def _reuse_outcome(self, number: int, cause: int) -> None:
        """Record that the agent gets the outcome of a superseded call.

        The outcome is delivered after the agent's commands.

        If the call is still open, the agent learns only how a person has edited its arguments.
        """
        assert self._machine is not None
        if self.closing is not None:
            return  # nothing is delivered while the run is closing: the next worker does this
        is_open = self.state.is_open(number)
        for source in self._machine.earlier.outcomes.get(number, ()):
            if not is_open or isinstance(source.body, ApprovalDecided):
                self._refused.append((self._record(OutcomeReused(source.seq), call=number, cause=cause), source))

    def _propose(
        self, command: CallTool, cause: int, until: Literal["approval", "rate", "budget", "handover"], at: int | None = None
    ) -> None:
        tool, number = command.tool, command.number
        args, digest = self._pack(command.args), codec.digest(command.args)
        key = self.state.keys.key(number, tool.name)
        self._record(ToolCallProposed(tool.name, tool.effect, key, args, digest, until, at), call=number, cause=cause)

    def _initiate(
        self,
        tool: Any,
        number: int,
        cause: int,
        *,
        effect: Effect,
        key: str,
        attempt: int = 1,
        args: Payload | None = None,
        digest: str | None = None,
        approval: str | None = None,
    ) -> None:
        """Record the intent of an attempt."""
        intent = tool.events.initiated(
            tool=tool.name,
            effect=effect,
            key=key,
            attempt=attempt,
            args=args,
            digest=digest,
            timeout_s=tool.timeout_s,
            settle_s=tool.settle_s,
            reconcile=tool.reconciler is not None,
            approval=approval,
            pinned=self._pinned(tool) if tool.name not in self._compared and (attempt == 1 or approval is not None) else None,
            estimate=tool.estimate,
            keyless=tool.keyless,
        )
        self._record(intent, call=number, cause=cause)

    def _ready(self, call: CallState) -> None:
        """The intent is recorded: the call begins after the next append."""
        if call.effect == "read" and not self._budgets:
            # A `read` changes nothing, and after a crash it can be made again. So it does not wait for the commit of
            # its intent. A `read` under a budget does wait: before the commit, other runs that share the budget do not
            # see the charge (G14).
            self._running.add(call.number)
            self._ended_mono.pop(call.number, None)
            self._out.begin_now.append(self._begin_of(call))
        else:
            self._due.append(call.number)

    def _begin_of(self, call: CallState, after_us: int = 0) -> Begin:
        asked: Any = self._asked[call.number]
        covered_s = self._settings.patience.settle_s
        if call.settle_s is not None:
            covered_s = min(covered_s, call.settle_s)
        progress = None if call.progress is None else self._load(call.progress)
        return Begin(call.number, call.attempt, asked.tool, asked.args, call.recorded_key, self.state.keys, covered_s, after_us, progress)

    def _tool_call(self, call: CallState) -> CallTool:
        asked = self._asked[call.number]
        assert isinstance(asked, CallTool), call
        return asked

    def _pinned(self, tool: Any) -> str | None:
        """The tool's pin if the run calls the tool for the first time; otherwise None.

        If the pin has changed since the first call, that is recorded.
        """
        what, pin = f"tool {tool.name}", tool.pin()
        before = self.state.pins.get(what)
        if before is None:
            return str(pin)
        self._compared.add(tool.name)
        if before != pin:
            self._note("warning", f"{what} has changed since the run first called it ({before}, now {pin})")
            self._record(PinChanged(what, before, pin), cause=self._claimed_seq)
        return None

    def _abandon(self, number: int, stop: bool) -> Asking[None]:
        state = self.state
        if number in state.alive or number in state.pending:
            self._unneeded.add(number)
        elif number in state.open:
            call = state.open[number]
            # An attempt with an effect is not stopped, unless the whole run is cancelled.
            if stop and number in self._running and (state.cancel is not None or call.effect in ("read", "idempotent")):
                self._out.stop += (number,)
            if number in self._asked:
                yield from self._give_up_if_idle(call)
            else:
                yield from self._leave(call, wanted=False)

    def _give_up_if_idle(self, call: CallState) -> Asking[None]:
        number = call.number
        if call.phase == "approved":
            self._forget(number)  # the call may be waiting for its rate limit
            self._unneeded.add(number)
            return
        if call.doubtful:
            # An earlier attempt may have happened: the doubt remains although the agent has stopped waiting. After a
            # cancel no further attempt begins.
            if number in self._due and self.state.cancel is not None:
                self._due.remove(number)
                self._withdraw_intent(call)
                yield from self._consider(call)
            return
        if number in self._due:
            # The intent is recorded, but the effect has not begun: the engine begins it after the append, and the
            # append was not sent yet.
            self._due.remove(number)
            yield from self._give_up(call)
        elif call.phase in ("retry_wait", "idle", "failing", "proposed"):
            self._forget(number)
            yield from self._give_up(call)

    def _forget(self, number: int) -> None:
        """Drop the wait and the hook of this call.

        Either a person has settled the call, or its approval was decided, or the agent stopped waiting for the call.
        """
        self._waits.pop(number, None)
        if self._hooks.pop(number, None) is not None:
            self._out.forget += (number,)

    def _give_up(self, call: CallState) -> Asking[None]:
        yield from self._fail(call, Failure(kind="cancelled", type="Cancelled", message="the agent no longer waits for this call"))

    def _fail(self, call: CallState, failure: Failure, cause: int | None = None) -> Asking[None]:
        """Record that the call has failed and is not tried again, and deliver the failure."""
        failed = self._events_of(call).failed
        cause = call.last_seq if cause is None else cause
        yield from self._deliver(self._record(failed(failure, attempt=call.attempt, final=True), call=call.number, cause=cause))

    def _events_of(self, call: CallState) -> CallEvents:
        """The event types of the call. An earlier life may have made the call: then its tool is not known here."""
        asked = self._asked.get(call.number)
        if isinstance(asked, CallTool):
            events: CallEvents = asked.tool.events
            return events
        return OF_MODEL if call.of_model else OF_TOOL

    def _refuse(self, call: CallState, failure: Failure) -> Asking[None]:
        """Fail a call before it has begun.

        The failure is delivered after all commands of the activation are recorded.
        """
        failed = self._tool_call(call).tool.events.failed
        event = self._record(failed(failure, attempt=call.attempt, final=True), call=call.number, cause=call.last_seq)
        self._refused.append((event, event))
        if not self._obeying:
            yield from self._obey(())

    def _withdraw_intent(self, call: CallState) -> None:
        """Record that an attempt with a recorded intent never began.

        Without this record, the next worker would have to treat the attempt as in doubt.
        """
        failure = Failure(kind="not_sent", type=NOT_STARTED, message="its worker released the run before the call began")
        failed = self._tool_call(call).tool.events.failed
        self._record(failed(failure, attempt=call.attempt), call=call.number, cause=call.intent_seq)

    def _start_child(self, command: StartChild, cause: int) -> None:
        agent, number = command.agent, command.number
        self._asked[number] = command
        assert self.state.created is not None
        body = ChildStarted(
            agent=agent.name,
            version=agent.version,  # the parent's code means this very code, also if another agent has the same name
            run_id=child_id(self.run_id, number),
            input=self._pack(command.args),
            digest=codec.digest(command.args),
            target=agent.target,
            queue=agent.queue,
            budget=agent.budget,
            key_scheme=KEY_SCHEME,
            key_namespace=self.state.created.key_namespace,
            trace=None if self.state.created.trace is None else RunTrace(self.state.created).run_span(self.state.reopened).recorded,
        )
        self._record(body, call=number, cause=cause)
        self._urgent = True  # the commit creates the child
        self._out.serve += (agent,)

    # -- calls that may begin -------------------------------------------------------------------------------------------
    def _barrier(self, number: int, tool: Any) -> Asking[Later | Over | None]:
        """What prevents the call from starting now: a budget or a rate limit. None: the call may start."""
        if self._budgets:
            barrier = yield from self._budget_barrier(number, tool)
            if barrier is not None:
                return barrier
            self._short.pop(number, None)
        if tool.rate is None:
            return None
        answer = yield TakePlace(number, tool.rate, self._places.get(number))
        if isinstance(answer, NotNow):
            return Later(answer.at, has_place=False)  # the call keeps its place, if it has one
        assert isinstance(answer, PlaceGiven), answer
        self._places.pop(number, None)
        if answer.at <= self._now:
            return None
        self._places[number] = answer.at
        return Later(answer.at)

    def _budget_barrier(self, number: int, tool: Any) -> Asking[Later | Over | None]:
        read: Answer | None = self._ledgers
        if read is None:
            read = yield ReadLedgers()
        if isinstance(read, NotNow):
            return Later(read.at, has_place=False)
        assert isinstance(read, LedgersRead), read
        call = self.state.calls.get(number)
        # With a key, several attempts have one effect together: the amount that is reserved for the attempts in doubt
        # covers the next attempt too.
        kept = None if call is None else call.may_cost
        wanted = amounts_of(most_of(tool.estimate, kept), calls=1)
        # The ledgers do not contain what this run has recorded and not yet committed, such as the reservations of many
        # calls that begin together.
        uncharged = self._charge()
        more = uncharged.reserved + uncharged.spent + -amounts_of(kept)
        for ledger in read.ledgers:
            used = ledger.spent + ledger.reserved + more
            found = exceeded(ledger.run_id, ledger.limits, used, wanted)
            if found is None:
                beside = read.beside.get(ledger.run_id, NOTHING)
                if beside and exceeded(ledger.run_id, ledger.limits, used + beside, wanted) is not None:
                    # Other runs of this worker have recorded costs under this budget, and their commits are under way.
                    # Soon the ledger contains these costs.
                    return Later(self._now, has_place=False)
                continue
            if exceeded(ledger.run_id, ledger.limits, ledger.spent + uncharged.spent, wanted) is None:
                # The budget is not spent: other calls have reserved a part of it, and may need less. So this call
                # waits until they have ended. But it does not wait for ever: a run whose worker died, or whose call is
                # in doubt, keeps its reservation.
                since = self._short.setdefault(number, self._short_before.get(number, self._now))
                if self._now - since < _LEDGER_PATIENCE_US:
                    return Later(self._now + _LEDGER_AGAIN_US, has_place=False)
            return Over(found, ledger.limits)
        return None

    def _over_budget(self, call: CallState, over: Over) -> Asking[None]:
        unstarted = call.phase in _UNBEGUN and not call.doubtful
        lost = call.failure is not None and call.failure.type == LOST
        words = over_words(over.what)
        # A call that may have happened is not reported as failed.
        if over.limits.on_exceed == "fail" and unstarted and not lost:
            yield from self._refuse(call, Failure(kind="over_budget", type="BudgetExceeded", message=words, over=over.what))
            return
        self._record(over.what, cause=call.last_seq)
        self._attend("budget", f"call {call.number} ({call.tool}): {words}")

    def _consider(self, call: CallState) -> Asking[None]:
        """Decide what to do about an open call without an attempt under way."""
        number = call.number
        wanted = number not in self._unwanted
        if number not in self._asked:
            yield from self._leave(call, wanted)
            return
        ask = self.state.asks.get(number)
        asked = self._tool_call(call)
        if ask is not None and ask.edited and ask.input is not None and call.attempt:
            # The call has begun with the edited arguments. It keeps these arguments, even if today's code would
            # convert them differently.
            asked = self._asked[number] = CallTool(number, asked.tool, self._load(ask.input))
        if call.held and wanted:
            return  # the agent considers it: the call goes on when the agent keeps it
        if call.phase == "awaiting_approval":
            if not wanted:
                self._unneeded.add(number)  # if the call is wanted, `_expiries` has its approval
            return
        if call.phase == "approved":
            if wanted:
                yield from self._start_approved(call)
            else:
                self._unneeded.add(number)
            return
        if call.phase in ("proposed", "failing") and wanted and ask is None and not call.begun and asked.tool.approval is not None:
            asks = asked.tool.asks(asked.args)
            if asks is not False:
                # The run was released before the approval was requested, or before the call began.
                yield from self._ask_for(asked, asks)
                return
        yield from self._follow(call, self._verdict(call, asked, wanted))

    def _leave(self, call: CallState, wanted: bool) -> Asking[None]:
        """An earlier life of the agent has made the call, and this life has not: so there is no code to go on with.

        The call goes on when the agent makes it again. What may have happened is in doubt until then, so that a person
        sees it.
        """
        repeatable = call.effect in ("read", "idempotent", "transaction")
        if call.phase == "started" and not repeatable:
            self._doubt(call, "its worker died inside it, and since its checkpoint the agent has not made the call again")
        elif not wanted and (repeatable or not call.doubtful) and call.phase in ("started", *_UNBEGUN) and call.phase != "approved":
            self._forget(call.number)
            yield from self._give_up(call)
        elif not wanted and call.phase in ("awaiting_approval", "approved"):
            self._unneeded.add(call.number)

    def _verdict(self, call: CallState, asked: CallTool, wanted: bool) -> Verdict:
        return decide(
            call,
            has_reconcile=asked.tool.reconciler is not None,
            key_window_s=asked.tool.key_window_s,
            max_asks=self._settings.reconcile_asks,
            wanted=wanted,
            cancelling=self.state.cancel is not None,
            now=self._now,
        )

    def _follow(self, call: CallState, verdict: Verdict) -> Asking[None]:
        match verdict:
            case Perform(attempt):
                yield from self._attempt_again(call, attempt)
            case Wait(until):
                self._waits[call.number] = until
            case Reconcile():
                settle = min(settle_s(call, self._settings.patience), self._settings.patience.settle_s)
                if call.phase != "in_doubt":
                    self._doubt(call, "its worker died inside it; its reconcile hook is being asked")
                self._ask_hook(call, round(settle * 1e6))
            case GiveUp():
                if self._was_lost(call):
                    self._lose(call)  # no further attempt is made, but the lost attempt may have cost money
                yield from self._give_up(call)
            case Park(why):
                if call.phase != "in_doubt" or why not in (call.doubt or ""):
                    self._doubt(call, f"{why}; {call.doubt}"[:500] if call.doubt else why)

    def _doubt(self, call: CallState, why: str) -> None:
        # If an earlier worker made the attempt, the cause is the claim. If not, it is the last event of the call.
        cause = max(self._claimed_seq, call.last_seq)
        self._record(ToolCallInDoubt(call.attempt, why, progress=self._stored_progress(call)), call=call.number, cause=cause)

    def _stored_progress(self, call: CallState) -> Payload | None:
        """The stored progress of the attempt, if the attempt was cut off. Returned once, to be recorded."""
        progress = self._cut_off.pop((call.number, call.attempt), None)
        return None if progress is None else self._pack(progress)

    def _attempt_again(self, call: CallState, attempt: int) -> Asking[None]:
        tool = self._tool_call(call).tool
        # The event that made another attempt necessary: a failure, a resolved doubt, or the claim after a crash.
        cause = call.last_seq if call.last_seq > call.intent_seq else self._claimed_seq
        ask = self.state.asks.get(call.number)
        if ask is not None and not call.begun and ask.request.expires_at is not None and ask.request.expires_at <= self._now:
            # The intent consumed the approval, but the worker released the run before the call began. No call begins
            # after its approval has expired (G9).
            yield from self._fail(call, refusal("expired", ask.by, None), cause)
            return
        if self._was_lost(call):
            cause = self._lose(call)
        elif call.effect == "keyed" and (call.number, call.attempt) in self._cut_off:
            # The call is made again with the same key. This event records the progress of the lost attempt.
            self._doubt(call, "its worker died inside it")
            cause = call.last_seq
        barrier = None
        if tool.rate is not None or self._budgets:
            barrier = yield from self._barrier(call.number, tool)
        if isinstance(barrier, Later):
            self._wait_for_turn(call, barrier)
        elif isinstance(barrier, Over):
            yield from self._over_budget(call, barrier)
        else:
            self._places.pop(call.number, None)
            self._initiate(tool, call.number, cause, effect=call.effect, key=call.recorded_key, attempt=attempt)
            self._ready(call)

    def _wait_for_turn(self, call: CallState, later: Later) -> None:
        if later.has_place and call.turn != later.at:
            self._record(RetryScheduled(attempt=call.attempt + 1, at=later.at, turn=True), call=call.number, cause=call.last_seq)
        self._waits[call.number] = later.at

    def _was_lost(self, call: CallState) -> bool:
        """Was the worker lost during an attempt that may be repeated and may have cost money?

        Such an attempt is a request to a model, or a `read` or `idempotent` attempt with an estimate. An attempt whose
        progress was stored is treated in the same way, because the event also records the progress.
        """
        if call.phase != "started" or call.effect not in ("read", "idempotent"):
            return False
        return self._tool_call(call).tool.events is OF_MODEL or call.estimate is not None or (call.number, call.attempt) in self._cut_off

    def _lose(self, call: CallState) -> int:
        """Record the lost attempt and charge its estimate, because the attempt may have cost money.

        Without this charge, repeated crashes could spend any amount beyond the budget (T33).
        """
        tool = self._tool_call(call).tool
        lost, progress = lost_answer("its worker ended", tool), self._stored_progress(call)
        failed = tool.events.failed(lost, attempt=call.attempt, usage=call.estimate, progress=progress)
        return self._record(failed, call=call.number, cause=call.intent_seq).seq

    # -- attempts that ended, hooks that answered -----------------------------------------------------------------------
    def _take_end(self, ended: AttemptEnded) -> Asking[None]:
        number, result = ended.number, ended.result
        call = self.state.calls[number]
        self._running.discard(number)
        if call.phase in ENDED or ended.attempt != call.attempt:
            return  # in the meantime a person has resolved that attempt
        asked: Any = self._asked[number]
        wanted = number not in self._unwanted
        progress = None if ended.progress is None else self._pack(ended.progress)
        if isinstance(result, (Returned, Unrecordable)):
            # For an attempt that happened, the reported usage is charged. If the attempt reported no usage, its
            # estimate is charged.
            usage = call.estimate if ended.usage is None else ended.usage
            self._precious = self._precious or call.effect != "read"
            completion: Completion
            if isinstance(result, Returned):
                packed = self._pack(result.result)
                done = asked.tool.events.completed(result=packed, attempt=ended.attempt, usage=usage, progress=progress)
                completion = CallCompleted(number, result.result)
            else:
                done = asked.tool.events.completed(failure=result.failure, attempt=ended.attempt, usage=usage, progress=progress)
                completion = CallFailed(number, result.failure, ended.attempt)
            yield from self._deliver(self._record(done, call=number, cause=call.intent_seq), completion)
            return
        self._ended_mono[call.number] = self._mono
        loose, closing = isinstance(result, Abandoned), self.closing is not None
        after = after_failed_attempt(
            call, result.failure, ended.usage, asked.tool, loose=loose, wanted=wanted, closing=closing, now=self._now, progress=progress
        )
        yield from self._state(call, asked.tool, after.bodies)
        if isinstance(result, Raised) and is_not_ready(result.failure) and wanted and not call.ended:
            self._attend(
                "error", f"call {call.number} ({call.tool}) cannot be made here, and was not: {result.failure.message}", call.last_seq
            )
        yield from self._go_on_with(call, asked, wanted, after.verdict)

    def _take_answer(self, answer: HookAnswered) -> Asking[None]:
        number = answer.number
        if self._hooks.get(number) != answer.attempt:
            return  # in the meantime a person has resolved the doubt
        del self._hooks[number]
        call = self.state.calls[number]
        if call.ended or answer.attempt != call.attempt or call.phase != "in_doubt":
            return
        asked, outcome = self._tool_call(call), answer.outcome
        quiet_at = self._quiet_at(call)
        if outcome.kind != "happened" and not outcome.final and quiet_at is not None and answer.asked_at < quiet_at:
            # The request of the lost attempt may still arrive at the service. Ask again when it cannot arrive any
            # more.
            left_us = max(quiet_at - self._mono, 0)
            self._ask_hook(call, left_us)
            said = {"not_happened": "found nothing", "in_progress": "says in progress"}.get(outcome.kind, "does not know")
            words = "the request may still arrive, so the hook is asked again in"
            self._note("warning", f"the hook of {call.tool} (call {number}) {said}; {words} {left_us / 1e6:.0f} s")
            return
        wanted = number not in self._unwanted
        cancelling = self.state.cancel is not None
        after = after_hook(call, outcome, asked.tool, wanted=wanted, cancelling=cancelling, now=self._now, pack=self._pack)
        yield from self._state(call, asked.tool, after.bodies)
        yield from self._go_on_with(call, asked, wanted, after.verdict)

    def _ask_hook(self, call: CallState, after_us: int) -> None:
        self._hooks[call.number] = call.attempt
        self._hook_due[call.number] = self._mono + after_us
        self._out.ask += (self._begin_of(call, after_us),)

    def _drop_unasked_hooks(self) -> None:
        """Drop the hooks that were not asked yet: the next worker asks these hooks."""
        waiting = [number for number in self._hooks if self._hook_due[number] > self._mono]
        for number in waiting:
            del self._hooks[number]
        self._out.forget += tuple(waiting)

    def _state(self, call: CallState, tool: Any, bodies: Sequence[AnyBody]) -> Asking[None]:
        for body in bodies:
            cause = call.intent_seq if call.phase == "started" else call.last_seq
            event = self._record(body, call=call.number, cause=cause)
            self._precious = self._precious or call.effect != "read"
            if tool.rate is not None and isinstance(body, ToolCallFailed | ToolCallInDoubt):
                failure = body.failure
                if failure is not None and failure.kind == "rate_limited":
                    wait_s = 1.0 if failure.retry_after_s is None else failure.retry_after_s
                    self._out.hold_back += (HoldBack(tool.rate, self._now + round(wait_s * 1e6)),)
            yield from self._deliver(event)
        if call.ended or call.phase == "idle":
            self._ended_mono.pop(call.number, None)

    def _go_on_with(self, call: CallState, asked: CallTool, wanted: bool, verdict: Perform | Park | None) -> Asking[None]:
        if call.ended or self._is_busy(call.number) or self.closing is not None:
            return
        if verdict is None:
            yield from self._consider(call)
        else:
            yield from self._follow(call, verdict)

    def _is_busy(self, number: int) -> bool:
        return number in self._running or number in self._hooks

    def _quiet_at(self, call: CallState) -> int | None:
        """When a hook's "not found" starts to count for this call, by the monotonic clock; None: never.

        If the attempt ended under this claim, the wait starts at the end of the attempt. If not, the wait starts at
        the claim. Recorded times are not used, because the wall clock may have been set since then.
        """
        after_s = quiet_after_s(call, self._settings.patience)
        return None if after_s is None else self._ended_mono.get(call.number, self._claimed_mono) + round(after_s * 1e6)

    # -- post -----------------------------------------------------------------------------------------------------------
    def _read(self, row: InboxRow) -> Asking[None]:
        """Record the event of one inbox row in the journal, and deliver the event to the agent."""
        state, body = self.state, row.body
        if body is None:
            self._left.append(row.inbox_id)
            newer = f"something from outside (inbox row {row.inbox_id}) was written by a newer perdure; upgrade this worker"
            self._attend("error", newer)
            return
        if state.finished:
            self._note("info", f"{tag_of(body)} came too late and changes nothing")
            self._left.append(row.inbox_id)
            return
        self._consumed.append(row.inbox_id)
        # The event keeps the event id that the sender chose. If the sender does not know whether its post was written,
        # it searches for that id.
        event_id = row.event_id or None
        # If post answers no event of this journal, its cause is the event before it. The store uses the same rule.
        before = state.seq
        match body:
            case CancelRequested() if state.cancel is None:
                event = self._record(body, cause=before, event_id=event_id)
                if self.closing is not None and self.closing.status != "queued":
                    # The run was to be parked when its attempts had ended. A cancel does not wait for these attempts,
                    # nor for a person. The next worker delivers the cancel to the agent. This worker cannot do that:
                    # it did not deliver the completions that were recorded while the run was closing.
                    self.closing = PendingRelease("queued", "another worker: it is to be cancelled", cause=event.seq)
                    self._stop_all()
                yield from self._deliver(event)
            case RunPaused() if state.cancel is None:
                event = self._record(body, cause=before, event_id=event_id)
                if self.closing is None or self.closing.status == "queued":
                    self.closing = PendingRelease("paused", f"a person who unpauses it; {body.by} paused it", cause=event.seq)
            case RunUnpaused() if state.paused is not None:
                event = self._record(body, cause=before, event_id=event_id)
                if self.closing is not None and self.closing.status == "paused":
                    # While the run was closing, new calls were only proposed. The next worker starts these calls.
                    self.closing = PendingRelease("queued", "another worker: it was unpaused", cause=event.seq)
            case BudgetRaised():
                self._record(body, cause=before, event_id=event_id)
            case SignalReceived():
                yield from self._deliver(self._record(body, cause=before, event_id=event_id))
            case ToolCallResolved() if row.call in state.calls and self._is_about(body, state.calls[row.call]):
                yield from self._hear_of_resolution(state.calls[row.call], body, event_id)
            case ApprovalVoted() | ApprovalEscalated() | ApprovalDecided() | ApprovalExpired() | ApprovalWithdrawn() if (
                # If the run was reopened meanwhile, the approval may be withdrawn.
                row.call in state.asks and state.asks[row.call].open
            ):
                yield from self._hear_of_approval(state.asks[row.call], body, event_id)
            case ChildFinished() if row.call in state.alive:
                self._last_news = self._mono
                event = self._record(body, call=row.call, cause=state.alive[row.call].started_seq, event_id=event_id)
                yield from self._deliver(event)
            case _:
                self._note("warning", f"{tag_of(body)} came too late and changes nothing")

    def _is_about(self, answer: ToolCallResolved, call: CallState) -> bool:
        """Is the answer about the call's current attempt, and is that attempt in doubt or cut off?"""
        cut_off = call.phase == "started" and not self._is_busy(call.number) and call.number not in self._due
        return (call.phase == "in_doubt" or cut_off) and answer.attempt == call.attempt

    def _hear_of_resolution(self, call: CallState, body: ToolCallResolved, event_id: str | None) -> Asking[None]:
        self._forget(call.number)
        # The cost is computed here, from the current state of the call. The sender of the answer does not know the
        # cost.
        charged = structs.replace(body, usage=call.cost_if(body.outcome))
        event = self._record(charged, call=call.number, cause=call.last_seq, event_id=event_id)
        yield from self._deliver(event)
        if call.number in self.state.open and self.closing is None:
            yield from self._consider(call)

    def _hear_of_approval(self, ask: AskState, body: _Decision, event_id: str | None) -> Asking[None]:
        number = ask.number
        if self._can_take_back(number):
            # The grant and then the end of the approval arrived in one turn. The store would refuse the append that
            # starts the call, so the start is taken back.
            self._take_back(number)
        event = self._record(body, call=number, cause=ask.asked_seq, event_id=event_id)
        if ask.pending:
            self._watch_expiry(ask)
            return
        self._expiries.pop(number, None)
        self._settling.discard(number)
        self._forget(number)  # the call may have been waiting for its rate limit
        self._last_news = self._mono
        yield from self._deliver(event)
        call = self.state.open.get(number)
        if call is not None and self.closing is None:
            yield from self._consider(call)

    # -- approvals, and what the agent no longer waits for --------------------------------------------------------------
    def _ask_approval(self, command: AskApproval, cause: int) -> None:
        number, policy = command.number, command.policy
        self._asked[number] = command
        payload = self._pack(command.input)
        body = policy.request(self._approval_id(number), command.action, payload, command.input, now=self._now, reason=command.reason)
        self._record(body, call=number, cause=cause)
        self._watch_expiry(self.state.asks[number])

    def _ask_for(self, command: CallTool, asks: str | bool) -> Asking[None]:
        """Request the approval of exactly this call. The request names the arguments that the decision may edit."""
        tool, number = command.tool, command.number
        policy = tool.approval
        assert policy is not None and self.state.created is not None
        impossible = policy.check_for(self.state.created.actor)
        if impossible is not None:
            failure = Failure(kind="refused", type="InvalidInput", message=f"its approval could never be granted: {impossible}")
            yield from self._refuse(self.state.calls[number], failure)
            return
        body = policy.request(
            self._approval_id(number),
            tool.name,
            self._pack(command.args),
            command.args,
            now=self._now,
            reason=asks if isinstance(asks, str) else None,
            tool=tool.name,
            editable_schema=self._pack(codec.encode(tool.editable_schema())) if policy.editable else None,
        )
        self._record(body, call=number, cause=self.state.seq)
        self._watch_expiry(self.state.asks[number])
        if self._machine is not None and number in self._machine.holds:
            self._hold(number, self._machine.holds[number].cause)
            if not self._obeying:
                yield from self._obey(())

    def _hold(self, number: int, cause: int) -> None:
        """The agent considers again whether it wants this call. If it needs an approval and has not begun, it is held.

        The order of the journal counts: if the intent of the call is durable, the call begins. If the intent was recorded
        in this turn, it is taken back.
        """
        call = self.state.open.get(number)
        if call is None or call.held or number not in self.state.asks:
            return
        if self._can_take_back(number):
            self._take_back(number)
        elif number in self._due and not call.doubtful and call.attempt == call.withdrawn + 1:
            # The approval was consumed by an earlier intent, whose attempt never began.
            self._due.remove(number)
            self._withdraw_intent(call)
        if call.begun:
            return
        self._forget(number)  # the call may be waiting for its rate limit
        event = self._record(CallHeld(), call=number, cause=cause)
        self._refused.append((event, event))

    def _go_on_with_kept(self, number: int) -> Asking[None]:
        """The agent keeps a call that was held: it may begin, unless the agent has held it again meanwhile."""
        call = self.state.open.get(number)
        if call is not None and self.closing is None and number not in self._due and not self._is_busy(number):
            yield from self._consider(call)

    def _approval_id(self, number: int) -> str:
        assert self.state.created is not None
        return approval_id(self.state.created.tenant, self.run_id, number)

    def _start_approved(self, call: CallState) -> Asking[None]:
        """Start an approved call with exactly the approved arguments.

        The commit that starts the call consumes the approval (G9).
        """
        ask, asked = self.state.asks[call.number], self._tool_call(call)
        assert ask.outcome == "approved"
        expires_at, now = ask.request.expires_at, self._now
        if expires_at is not None and expires_at - _START_MARGIN_US <= now:
            if expires_at <= now:
                self._settle(ask, Expire())
            else:
                self._expiries[call.number] = expires_at
            return
        try:
            asked = self._as_approved(ask, asked)
        except InvalidInput as refused:
            failure = Failure(kind="refused", type="InvalidInput", message=f"as edited by {ask.by}: {refused}")
            failed = asked.tool.events.failed(failure, attempt=0, final=True)
            yield from self._deliver(self._record(failed, call=call.number, cause=call.last_seq))
            return
        barrier = None
        if asked.tool.rate is not None or self._budgets:
            barrier = yield from self._barrier(call.number, asked.tool)
        if isinstance(barrier, Later):
            self._wait_for_turn(call, barrier)
            if expires_at is not None:
                self._expiries[call.number] = expires_at  # the approval may expire before the call may start
        elif isinstance(barrier, Over):
            yield from self._over_budget(call, barrier)
        else:
            self._expiries.pop(call.number, None)
            self._consume(call, ask, asked)

    def _as_approved(self, ask: AskState, asked: CallTool) -> CallTool:
        if not ask.edited:
            return asked
        assert ask.input is not None
        edited = CallTool(asked.number, asked.tool, asked.tool.edited(asked.args, self._load(ask.input)))
        self._asked[asked.number] = edited
        return edited

    def _consume(self, call: CallState, ask: AskState, asked: CallTool) -> None:
        digest = codec.digest(asked.args)
        # The arguments must equal the approved arguments, byte for byte. The store checks that again in the commit
        # that starts the call.
        if digest != ask.digest:
            self._attend(
                "error", f"call {call.number} ({call.tool}): its arguments are not those that were approved; it was not made", call.last_seq
            )
            return
        self._approved[call.number] = copy(call)
        args = self._pack(asked.args) if ask.edited else None
        self._initiate(
            asked.tool,
            call.number,
            call.last_seq,
            effect=asked.tool.effect,
            key=call.recorded_key,
            attempt=call.attempt + 1,
            args=args,
            digest=digest,
            approval=ask.request.approval,
        )
        self._due.append(call.number)  # even if it is a `read`: the approval must be durably consumed before it begins

    def _can_take_back(self, number: int) -> bool:
        """Is the call's last event the intent that consumes its approval, and is this intent not durable yet?"""
        before = self._approved.get(number)
        if before is None:
            return False
        call = self.state.calls[number]
        return call.attempt == before.attempt + 1 and call.last_seq == call.intent_seq > self._durable_seq

    def _take_back(self, number: int) -> None:
        """Remove the recorded intent of a call whose approval ended before the append: the call has not begun."""
        before = self._approved.pop(number)
        # The intent was never written. Another event gets its seq, so that the events after the intent keep their
        # seqs.
        place = self.state.calls[number].intent_seq - self._durable_seq - 1
        intent = self._events[place].body
        assert isinstance(intent, ToolCallInitiated)
        postponed = RetryScheduled(attempt=intent.attempt, at=self._now, turn=True)
        self._events[place] = structs.replace(self._events[place], event_id=next(self._ids), body=postponed)
        self.state.take_back(intent, before, self._events[place])
        if intent.pinned is not None:
            self._compared.discard(intent.tool)
        if number in self._due:
            self._due.remove(number)

    def _watch_expiry(self, ask: AskState) -> None:
        """Note when the approval expires. An escalation changes that time.

        If the agent no longer waits for the approval, withdraw it at once.
        """
        self._settling.discard(ask.number)
        if ask.number in self._withdrawn:
            self._settle(ask, Withdraw())
        elif ask.request.expires_at is not None:
            self._expiries[ask.number] = ask.request.expires_at
        else:
            self._expiries.pop(ask.number, None)

    def _settle(self, ask: AskState, how: Expire | Withdraw) -> None:
        """Tell the engine to expire or withdraw the approval. The result arrives as post.

        A person may decide at the same time. The store's transaction decides which change came first (T17).
        """
        # The approval is checked again until the result has arrived. So the run has a wake time even if the engine
        # could not settle the approval and the run was parked in the meantime.
        self._expiries[ask.number] = self._now + _SETTLE_AGAIN_US
        if ask.number not in self._settling:
            self._settling.add(ask.number)
            self._out.settle += (Settle(ask.number, ask.request.approval, how),)

    def _end_unneeded(self) -> None:
        """Withdraw the approvals and cancel the children that the agent no longer waits for.

        This is called only when every recorded event is durable: before that, these approvals and children may not
        exist in the store.
        """
        unneeded, self._unneeded = self._unneeded, set()
        state = self.state
        for number in sorted(unneeded.intersection(state.asks)):
            ask = state.asks[number]
            if ask.pending or (number in state.open and state.open[number].phase == "approved"):
                self._withdrawn.add(number)
                self._settle(ask, Withdraw())
        reason = (state.cancel.reason if state.cancel else None) or "its parent does not wait for it any more"
        for number in sorted(unneeded.intersection(state.alive)):
            self._out.cancel += (CancelChild(state.alive[number].run_id, reason),)

    # -- time -----------------------------------------------------------------------------------------------------------
    def _wake_due(self, machine: Machine) -> Asking[None]:
        """Fire the timers and continue the calls that are due now.

        Timers that the agent sets during this turn wait for the next turn.
        """
        now = self._now
        for number in [number for number, at in self._expiries.items() if at <= now]:
            self._settle(self.state.asks[number], Withdraw() if number in self._withdrawn else Expire())
        for number in sorted(number for number, at in self._waits.items() if at <= now):
            del self._waits[number]
            yield from self._consider(self.state.calls[number])
        last = machine.timers_set
        while (timer := machine.next_timer()) is not None and timer[0] <= now and timer[1] <= last and self.closing is None:
            if self.state.finished:
                return  # the run has ended: nothing waits for the remaining timers
            event = self._record(TimerFired(timer[1]), cause=machine.timer_cause(timer[1]))
            yield from self._deliver(event, TimerDue(timer[1]))

    def _arm(self) -> None:
        """Set the time of the next wake-up: the next timer, wait or expiry, or the latest time of the next append.

        If the append is due now, send it now.
        """
        if not (self._events or self._consumed or self._waits or self._expiries or (self._machine is not None and self._machine.timers)):
            return  # the common case: the run only waits for attempts
        wakes: list[int] = []
        if self._events or self._consumed:
            if self._dirty_since is None:
                self._dirty_since = self._mono
            left_us = self._dirty_since + self._settings.flush_us - self._mono
            if left_us <= 0 or (self._urgent and self.closing is None):
                self._append(None)
                return
            wakes.append(left_us)
        if self.closing is None and self._machine is not None:
            times = [*self._waits.values(), *self._expiries.values()]
            if (timer := self._machine.next_timer()) is not None:
                times.append(timer[0])
            if times:
                wakes.append(min(times) - self._now)
        if wakes:
            self._out.wake_after_us = min(max(min(wakes), _SHORTEST_SLEEP_US), _LONGEST_SLEEP_US)

    # -- rest -----------------------------------------------------------------------------------------------------------
    def _rest(self) -> Asking[None]:
        """No attempt is under way: finish the run, release the run, or wait."""
        state, closing = self.state, self.closing
        if state.finished:
            failure = state.failure
            error = f"{failure.type}: {failure.message}"[:500] if failure else None
            self._append(RowChange(state.status, error=error, release=True, progress=True))
        elif closing is not None:
            if closing.attention == "budget" and (yield from self._has_room_again()):
                closing = self.closing = PendingRelease("queued", "another worker: its budget was raised meanwhile")
            due, self._due = self._due, []
            for number in due:
                self._withdraw_intent(state.calls[number])
            self._release(closing.status, closing.waiting_for, self._now if closing.status == "queued" else None, closing.attention)
        else:
            yield from self._wait()

    def _has_room_again(self) -> Asking[bool]:
        """Was the budget that stops this run raised in the meantime?"""
        if self.state.over is None:
            return False
        read = yield ReadLedgers()
        return isinstance(read, LedgersRead) and has_room_again(self.state.over, read)

    def _wait(self) -> Asking[None]:
        machine, state = self._machine, self.state
        assert machine is not None
        # If other runs need this run's place in the worker, park the run at once (park_after_us=0). A parent that
        # polls its children must make room for the children. A run that waits for reserved money must make room for
        # the runs that reserved it. A suspect that waits for money always parks: the runs that reserved the money may
        # be suspects too, and may need its place in the group of suspects.
        makes_room, self._crowded = self._crowded or (self._suspect and bool(self._short)), False
        timer = machine.next_timer()
        rest = at_rest(
            state,
            next_timer=timer,
            waits={**self._waits, **self._expiries},
            topics=machine.topics,
            now=self._now,
            park_after_us=0 if makes_room else self._settings.park_after_us,
        )
        match rest:
            case Stay():
                self._out.yields = not makes_room and (bool(state.alive) or bool(self._short))
                self._arm()
            case Sleep(status, waiting_for, wake_at):
                if self._lingers():
                    return
                if timer is not None and timer[0] == wake_at and timer[1] not in state.timers:
                    self._record(TimerSet(timer=timer[1], due=timer[0]), cause=machine.timer_cause(timer[1]))
                self._release(status, waiting_for, wake_at)
            case Ask(calls, wake_at):
                self._record(AttentionNeeded("in_doubt", f"{rest.names}: {calls[0].doubt}"), cause=calls[0].last_seq)
                self._release("needs_attention", f"a person: {rest.names} in doubt", wake_at, "in_doubt")
            case Stuck():
                self._attend(
                    "stuck",
                    "the agent waits for something that nothing can bring about: no call, approval or child is open, "
                    "it listens for no signal, and no timer is set",
                )
                yield from self._rest()

    def _lingers(self) -> bool:
        """Should the worker hold the run for a short time, because more of its children or approvals may end soon?

        If the run were released and replayed after the end of each of its n children, the work would grow with n².
        """
        if self._last_news is None or not (self.state.alive or self.state.pending):
            return False
        left_us = self._last_news + self._settings.linger_us - self._mono
        if left_us <= 0:
            return False
        self._arm()
        if self._out.append is None:
            wake = self._out.wake_after_us
            self._out.wake_after_us = max(left_us if wake is None else min(wake, left_us), _SHORTEST_SLEEP_US)
        return True

    def _release(
        self,
        status: Literal["queued", "waiting", "waiting_approval", "paused", "needs_attention"],
        waiting_for: str,
        wake: int | None,
        attention: Reason | None = None,
    ) -> None:
        # After a cancel was requested, the status is `cancelling`, unless the run is paused or needs attention.
        standing = "cancelling" if self.state.cancel is not None and status not in ("paused", "needs_attention") else status
        short_since = min(self._short.values(), default=None)
        closing = self.closing
        cause = self.state.seq if closing is None or closing.cause is None else closing.cause
        self._record(RunReleased(standing, waiting_for, wake, short_since=short_since), cause=cause)
        detail = self.state.attention.detail[:500] if self.state.attention else None
        self._append(
            RowChange(standing, waiting_for=waiting_for, ready_at=wake, error=detail, attention=attention, release=True, progress=True)
        )

    # -- the append -----------------------------------------------------------------------------------------------------
    def _record(self, body: AnyBody, *, cause: int, call: int | None = None, event_id: str | None = None) -> Event:
        """Record an event. The state contains the event at once, and the next append makes the event durable.

        `cause` is the seq of an earlier event of this journal. `perdure trace` shows it as the reason of this event.
        """
        state = self.state
        event = Event(state.seq + 1, event_id or next(self._ids), self._now, state.epoch, call, cause, body)
        state.apply(event)
        self._events.append(event)
        if call is not None:
            self._requests.see(event)
        if self._watch is not None:
            self._look_for_circles(event)
        if call is not None and call in self._asked and not state.is_open(call):
            self._forget_arguments(call)
        return event

    def _forget_arguments(self, number: int) -> None:
        """Drop the arguments and progress of an ended call: the journal has them, and a run may make many calls."""
        del self._asked[number]
        ended = self.state.calls.get(number)
        if ended is not None:
            ended.args = ended.progress = None

    def _look_for_circles(self, event: Event) -> None:
        if self._watch is not None:
            circling = self._watch.observe(event, None if event.call is None else self.state.calls.get(event.call))
            if circling is not None:
                self._attend("circling", circling, event.seq)

    def _pack(self, encoded: bytes) -> Payload:
        """A payload for an event. A value that is too large to be stored inline becomes a blob of the same append."""
        if len(encoded) <= self._settings.inline_bytes and b"\\ud" not in encoded:
            return Payload(json=Raw(encoded))  # the common case
        payload, blob = codec.pack(encoded, self._settings.inline_bytes)
        if blob is not None:
            assert isinstance(payload.blob, str)
            self._blobs[payload.blob] = blob
        return payload

    def _charge(self) -> Charge:
        """What the events that are not durable yet change in the ledgers."""
        reserved, spent = self._charged
        return Charge(self.state.reserved + -reserved, self.state.spent + -spent)

    def _append(self, row: RowChange | None) -> None:
        """Send everything recorded so far as one append. The calls in `_due` begin when this append is durable."""
        state, out = self.state, self._out
        precious, self._precious, self._urgent, self._dirty_since = self._precious, False, False, None
        transaction = None
        if row is None:
            if self._due and (self.closing is None or self.may_begin) and state.status not in FINISHED:
                due, self._due = self._due, []
                begins = []
                for number in due:
                    call = state.calls[number]
                    if call.effect == "transaction":
                        self._due.append(number)  # it stays due: one append can hold only one transaction
                    else:
                        self._starting.append(number)
                        begins.append(self._begin_of(call))
                out.begin = begins
                # If the append holds the end of an effect, the append must not wait for the transaction's tool: a
                # crash inside that tool would turn a known result into a doubt.
                if self._due and not precious:
                    transaction = self._transaction(state.calls[self._due.pop(0)])
            progress = self._suspect and state.crashes == 0
            if transaction is None and (progress or state.status != self._shown):
                row = RowChange(state.status, progress=progress)
        charge = self._charge() if self._budgets else None
        self._sent = out.append = StepAppend(
            self._durable_seq,
            self._events,
            tuple(self._blobs.values()),
            row,
            tuple(self._consumed),
            tuple(self._left),
            charge,
            transaction,
        )

    def _transaction(self, call: CallState) -> Transaction:
        begin = self._begin_of(call)
        return Transaction(
            begin, call.intent_seq, next(self._ids), call.reserved, call.started_at, call.estimate, metered=bool(self._budgets)
        )

    def _take_commit(self, answer: AppendCommitted) -> None:
        """The append is durable.

        A crash from here on leaves intents without results. For these calls `decide` decides by effect class.
        """
        sent, self._sent = self._sent, None
        starting, self._starting = self._starting, []
        assert sent is not None
        state, row, result = self.state, sent.row, answer.result
        self._durable_seq += len(sent.events)
        self._events, self._consumed = [], []
        self._blobs.clear()
        if result is not None:
            assert result.seq == self._durable_seq + 1, result
            state.apply(result)
            self._durable_seq = result.seq
            self._look_for_circles(result)
            if result.call in self._asked and not state.is_open(result.call):
                self._forget_arguments(result.call)
        assert state.seq >= self._durable_seq, (state.seq, self._durable_seq)
        if self._budgets:
            self._charged = (state.reserved, state.spent)
        if row is not None:
            self._shown, self._suspect = row.status, self._suspect and not row.progress
            if row.release:
                self._released = sent.events[-1] if sent.events else None
                self._out.end = Rested(state.over if row.attention == "budget" else None)
                return
        if self._unneeded:
            # Do this now, and not in the next turn that records nothing. If calls answer quickly, appends follow each
            # other without such a turn for a long time.
            self._end_unneeded()
        if answer.begun:
            self._running.update(starting)
            for number in starting:
                self._ended_mono.pop(number, None)
        else:
            self._due = starting + self._due
            if answer.lease_in_doubt and self.may_begin:
                # Release the run, and record that these calls did not begin. If another worker holds the run already,
                # the store refuses that append.
                self.closing = PendingRelease("queued", "another worker: the one before sent no heartbeat for longer than its lease")

    def _unwritten(self, answer: RolledBack | AppendRefused) -> Asking[None]:
        """The append was not written: keep everything that the append contains, and continue."""
        sent, self._sent = self._sent, None
        assert sent is not None
        self._due, self._starting = self._starting + self._due, []
        if isinstance(answer, AppendRefused):
            yield from self._hear_of_refusal(sent, answer)
            return
        assert sent.transaction is not None, "only a transaction is rolled back; any other append is sent again until it is answered"
        begin = sent.transaction.begin
        if answer.failure is None:
            self._due.insert(0, begin.number)
        else:
            # The effect has not happened. The intent is still in `_events`, and the next append writes the intent
            # together with the failure.
            self._arrived.appendleft(AttemptEnded(begin.number, begin.attempt, Raised(answer.failure)))
        yield from self._go_on()

    def _hear_of_refusal(self, sent: StepAppend, refused: AppendRefused) -> Asking[None]:
        """The store refused the append.

        If the reason is an approval that has ended, send the append again without the start of that call.
        """
        state, now = self.state, self._now
        # This includes calls that were not to begin. When a run is released, one append may hold both the intent that
        # consumes the approval and the record that the call never began.
        intents = [call.number for call in state.calls.values() if call.intent_seq > self._durable_seq]
        lapsed = [number for number in intents if self._has_lapsed(number, now)]
        for number in lapsed:
            self._settle(state.asks[number], Expire())  # the result arrives as post
        # The reason may also be unread post about one of these calls. For example, the call's approval has expired by
        # another worker's clock. Other post does not explain a refusal. If such post counted, an append that is always
        # refused would be sent for ever.
        unread = [one.row for one in self._arrived if isinstance(one, Posted)]
        unread += [row for row in refused.post if row.inbox_id not in self._seen]
        answers = [row for row in unread if row.call in intents and isinstance(row.body, _ANSWERS)]
        over = lapsed or sorted({row.call for row in answers if row.call is not None})
        if not lapsed and (not refused.still_ours or not over):
            # "conflict": this worker still holds the lease, but the append was refused. The append would be refused
            # again, so a person has to look at the run.
            self._out.end = Broken("conflict" if refused.still_ours else "fenced", refused.why)
        elif not all(map(self._can_take_back, over)):
            # A run that is being released may have recorded that such a call never began. Without the intent of the
            # call, that event is invalid.
            self._out.end = Broken("fenced", refused.why)
        else:
            if not lapsed:
                for row in answers:
                    self._keep(Posted(row))
            yield from self._go_on_without(sent, over, refused.why)

    def _go_on_without(self, sent: StepAppend, numbers: Collection[int], why: str) -> Asking[None]:
        """Send the refused append again without the starts of these calls.

        If the run were released instead, the attempts under way would be cut off and left in doubt.
        """
        self._note("info", f"{why}; the run goes on without it")
        for number in numbers:
            self._take_back(number)
        if sent.transaction is not None and sent.transaction.begin.number not in numbers:
            self._due.insert(0, sent.transaction.begin.number)
        self._precious = True  # the rest of the append has not been written yet: send it at once
        yield from self._go_on()

    def _has_lapsed(self, number: int, now: int) -> bool:
        ask = self.state.asks.get(number)
        return ask is not None and ask.request.expires_at is not None and ask.request.expires_at <= now


def _seq(event: Event) -> int:
    return event.seq


def has_room_again(over: BudgetExceeded, read: LedgersRead) -> bool:
    """Was the budget that was used up raised in the meantime?"""
    limits = [getattr(ledger.limits, _FIELDS[over.what]) for ledger in read.ledgers if ledger.run_id == over.budget_of]
    return any(limit is None or limit > over.limit for limit in limits)


_FIELDS = {"usd": "usd_micros", "tokens": "tokens", "calls": "calls", "seconds": "busy_us"}
_UNITS = {"usd": ("$", 1_000_000, ""), "seconds": ("", 1_000_000, " s"), "tokens": ("", 1, " tokens"), "calls": ("", 1, " calls")}


def over_words(over: BudgetExceeded) -> str:
    """The message about a used-up budget."""
    used, limit, wanted = (_amount(over.what, number) for number in (over.used, over.limit, over.wanted))
    # `used` includes reservations of other calls, and a reservation is freed when it is not needed. So `used` is shown
    # only if it reaches the limit.
    how = f"{used} of {limit}" if over.used >= over.limit else f"its {limit} do not cover {wanted} more"
    return f"the budget of run {over.budget_of} is used up: {how}"


def _amount(what: str, number: int) -> str:
    before, unit, after = _UNITS[what]
    if unit == 1:
        return f"{before}{number:,}{after}"
    whole, part = divmod(number, unit)
    decimals = f"{part:06d}".rstrip("0")
    shown = f"{whole:,}.{decimals:0<2}" if before else f"{whole:,}.{decimals}".rstrip(".")
    return f"{before}{shown}{after}"
