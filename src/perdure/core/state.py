"""fold(events) → RunState. In place, linear, and the only reading of a journal.

The life of a call is a table: an event that the table does not allow means that the journal was not written by us.

    started(k) ──→ completed | failed | retry_wait → started(k+1) | in_doubt
    in_doubt   ──→ completed | failed (resolved)   | did not happen → idle → started(k+1) | retry_wait (ask again later)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.events import (
    AttentionNeeded,
    CancelRequested,
    DecisionMade,
    Effect,
    Event,
    Failure,
    RetryScheduled,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunFailed,
    RunReleased,
    RunRequeued,
    RunSucceeded,
    StatusReported,
    ThoughtRecorded,
    TimerFired,
    TimerSet,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
)
from perdure.errors import StoreCorrupt

Status = Literal[
    "queued", "running", "waiting_approval", "waiting", "paused", "needs_attention", "cancelling", "succeeded", "failed", "cancelled"
]
Phase = Literal["proposed", "started", "failing", "retry_wait", "in_doubt", "idle", "completed", "failed"]
NOT_STARTED = "NotStarted"  # type of the failure of an attempt whose worker gave the run up before it began
FINISHED: frozenset[str] = frozenset(("succeeded", "failed", "cancelled"))
ENDED: frozenset[Phase] = frozenset(("completed", "failed"))

# (phase, event) → phase. What is not here cannot happen.
TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    ("proposed", "initiated"): "started",
    ("started", "initiated"): "started",  # the worker died inside a read or an idempotent attempt
    ("started", "completed"): "completed",
    ("started", "failed"): "failing",
    ("started", "failed_for_good"): "failed",
    ("started", "in_doubt"): "in_doubt",
    ("started", "happened"): "completed",  # a person was faster than the next worker to see the doubt
    ("started", "did_not_happen"): "idle",
    ("started", "resolved_failed"): "failed",
    ("failing", "in_doubt"): "in_doubt",  # an attempt before this one may have happened
    ("failing", "retry"): "retry_wait",
    ("failing", "initiated"): "started",
    ("failing", "failed_for_good"): "failed",
    ("retry_wait", "initiated"): "started",
    ("retry_wait", "failed_for_good"): "failed",  # cancelled while it waited
    ("retry_wait", "in_doubt"): "in_doubt",
    ("in_doubt", "in_doubt"): "in_doubt",
    ("in_doubt", "retry"): "in_doubt",  # the reconcile hook is asked again later
    ("in_doubt", "initiated"): "started",  # keyed, inside its window: the same key again
    ("in_doubt", "happened"): "completed",
    ("in_doubt", "did_not_happen"): "idle",
    ("in_doubt", "resolved_failed"): "failed",
    ("idle", "initiated"): "started",
    ("idle", "failed_for_good"): "failed",
}


class CallState(Struct, gc=False):
    """Where one call stands."""

    number: int
    tool: str
    effect: Effect
    key: str
    args: Payload | None
    digest: str | None
    first_seq: int
    first_ts: int
    phase: Phase = "proposed"
    attempt: int = 0
    intent_seq: int = 0  # of the last attempt
    last_seq: int = 0
    last_ts: int = 0
    timeout_s: float | None = None
    has_reconcile: bool = False
    retry_at: int | None = None
    asks: int = 0  # how often the reconcile hook has answered "in progress"
    result: Payload | None = None
    failure: Failure | None = None
    doubt: str | None = None
    doubtful: bool = False  # some attempt may have happened, and nobody has settled that yet
    failed: int = 0  # attempts that failed by themselves; those that a dying worker cut off do not count
    failed_at: int = 0  # the last attempt whose end, by itself or by being stopped, is on record
    worker_gone: bool = False  # the last attempt was cut off with its worker, and the kernel says that the worker is gone
    loose: bool = False  # some attempt may still be running: "not found" proves nothing about it
    resolved_by: str | None = None

    @property
    def ended(self) -> bool:
        return self.phase in ENDED


class RunState:
    """A run as of its last folded event."""

    def __init__(self) -> None:
        self.created: RunCreated | None = None
        self.status: Status = "queued"
        self.seq = 0
        self.epoch = 0
        self.created_at = 0
        self.updated_at = 0
        self.started_seq: int | None = None
        self.worker: str | None = None
        self.worker_name: str | None = None  # "host:pid" of who claimed it last; it stays when the run is given up
        self.calls: dict[int, CallState] = {}
        self.open: dict[int, CallState] = {}
        self.timers: dict[int, int] = {}  # those that the run was parked on: number → due
        self.waiting_for: str | None = None
        self.wake_at: int | None = None
        self.cancel: CancelRequested | None = None
        self.attention: AttentionNeeded | None = None
        self.crashes = 0
        self.said: str | None = None
        self.output: Payload | None = None
        self.failure: Failure | None = None

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    def apply(self, event: Event) -> None:
        """Fold one more event in."""
        if event.seq != self.seq + 1:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} follows event {self.seq}; `perdure verify` tells what is missing")
        if self.finished:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) comes after the run's end")
        self.seq = event.seq
        self.epoch = event.epoch
        self.updated_at = event.ts
        body = event.body
        if event.call is not None:
            self._apply_call(event, event.call)
            return
        match body:
            case RunCreated():
                self.created, self.created_at = body, event.ts
            case RunClaimed():
                self._claimed(event, body)
            case RunReleased():
                self.status, self.waiting_for, self.wake_at = body.status, body.waiting_for, body.wake_at
                self.worker, self.crashes = None, 0
                if body.abrupt:
                    self._let_loose()
            case TimerSet():
                self.timers[body.timer] = body.due
            case TimerFired():
                self.timers.pop(body.timer, None)
                self.crashes = 0
            case StatusReported():
                self.said = body.text
            case CancelRequested():
                self.cancel = self.cancel or body
                self.status = "cancelling"
            case AttentionNeeded():
                self.attention = body
            case RunRequeued():
                self.attention, self.waiting_for, self.wake_at, self.crashes = None, None, None, 0
                self.status = "cancelling" if self.cancel else "queued"
            case RunSucceeded():
                self.status, self.output = "succeeded", body.output
            case RunFailed():
                self.status, self.failure = "failed", body.failure
            case RunCancelled():
                self.status = "cancelled"
            case ThoughtRecorded() | DecisionMade():
                pass
            case _:
                raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) names no call")

    def _claimed(self, event: Event, body: RunClaimed) -> None:
        if self.started_seq is None:
            self.started_seq = event.seq
        self.worker, self.worker_name = body.worker, body.name or body.worker
        self.status = "cancelling" if self.cancel else "running"
        self.waiting_for = self.wake_at = None
        self.attention = None  # whoever takes the run looks again
        for call in self.open.values() if body.proven_dead else ():
            call.worker_gone = call.worker_gone or call.phase == "started"
        if body.takeover:
            self.crashes += 1

    def _let_loose(self) -> None:
        for call in self.open.values():
            if call.phase == "started":
                call.loose = True

    def _apply_call(self, event: Event, number: int) -> None:
        body = event.body
        call = self.calls.get(number)
        if call is None:
            if not isinstance(body, ToolCallInitiated) or number != len(self.calls) + 1:
                raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) is about call {number}, which was never initiated")
            call = CallState(number, body.tool, body.effect, body.key, body.args, body.digest, event.seq, event.ts)
            self.calls[number] = self.open[number] = call
        call.last_seq, call.last_ts = event.seq, event.ts
        match body:
            case ToolCallInitiated():
                self._move(call, event, "initiated")
                call.attempt, call.intent_seq, call.timeout_s, call.retry_at = body.attempt, event.seq, body.timeout_s, None
                call.has_reconcile, call.worker_gone = body.reconcile, False
            case ToolCallCompleted():
                self._move(call, event, "completed")
                call.result, call.failure = body.result, body.failure
            case ToolCallFailed():
                self._move(call, event, "failed_for_good" if body.final else "failed")
                self._count(call, body.attempt, body.failure)
            case ToolCallInDoubt():
                self._move(call, event, "in_doubt")
                self._count(call, body.attempt, body.failure)
                call.doubt, call.doubtful = body.why, True
                call.loose = call.loose or body.loose
            case RetryScheduled():
                self._move(call, event, "retry")
                call.retry_at = body.at
                call.asks += body.reconcile
            case ToolCallResolved():
                self._move(call, event, "resolved_failed" if body.outcome == "failed" else body.outcome)
                call.result, call.failure, call.resolved_by, call.retry_at = body.result, body.failure, body.by, None
                call.doubtful = call.loose = False
                if self.status == "needs_attention":
                    # A person has settled it: whatever else was wrong shows itself again when the run goes on.
                    self.attention, self.waiting_for, self.wake_at = None, None, None
                    self.status = "cancelling" if self.cancel else "queued"
            case _:
                raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) is not about a call")
        if call.ended:
            self.open.pop(number, None)
            self.crashes = 0

    def _count(self, call: CallState, attempt: int, failure: Failure | None) -> None:
        if failure is not None:
            call.failure = failure
            if attempt != call.failed_at and failure.type != NOT_STARTED:
                call.failed, call.failed_at = call.failed + (failure.kind != "cancelled"), attempt

    def _move(self, call: CallState, event: Event, what: str) -> None:
        phase = TRANSITIONS.get((call.phase, what))
        if phase is None:
            raise StoreCorrupt(f"{self._name()}: event {event.seq} ({event.type}) cannot follow: call {call.number} is {call.phase}")
        call.phase = phase

    def _name(self) -> str:
        return f"run {self.created.run_id}" if self.created else "journal"


def fold(events: Iterable[Event]) -> RunState:
    """The state after all of these events."""
    state = RunState()
    for event in events:
        state.apply(event)
    return state
