"""The inputs and steps of the run core, as plain data: an engine sends inputs and carries out steps.

    input  →  RunCore.step(input, now, mono)  →  Step

An engine keeps three rules:

1. The engine makes `Step.append` durable before it begins an attempt in `Step.begin` (G2). It answers every append
   with exactly one of `AppendCommitted`, `RolledBack` and `AppendRefused`. Before that answer the core sends no other
   append.
2. The engine answers every `Step.question` with exactly one of `LedgersRead`, `PlaceGiven`, `NotNow` and
   `LimitUnanswered`.
3. The engine reports the end of every attempt that it began, with exactly one `AttemptEnded`. It reports the answer of
   every hook that it asked, with one `HookAnswered`, unless a step told the engine to forget the hook.

The core keeps inputs that arrive while it waits for an answer, and handles them after the answer, in order of arrival.
Times are microseconds: `now` is the wall clock, `mono` a clock that never jumps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from perdure.core.approval import Expire, Withdraw
from perdure.core.budget import NOTHING, Amounts, Charge, Ledger
from perdure.core.events import AnyBody, BudgetExceeded, Event, Failure, FrameChanged, Reason, RunClaimed, RunReopened, Status, Usage
from perdure.core.identity import CallKeys
from perdure.core.loop_detector import CircleWatch
from perdure.core.machine import Asked, Machine
from perdure.core.outcomes import Outcome, Performed
from perdure.core.rate import Rate
from perdure.core.state import RunState


# -- inputs -------------------------------------------------------------------------------------------------------------
class InboxRow(Struct, frozen=True, gc=False):
    """One piece of post for a run that a worker holds: a signal, a decision, a cancel, the end of a child."""

    inbox_id: int
    run_id: str
    call: int | None
    body: AnyBody | None  # None: a newer version of perdure wrote the row, and this version cannot decode it
    # Chosen by the sender. If the sender does not know whether its post was written, it searches for this id.
    event_id: str


class ParkedRun(Struct, frozen=True, eq=False):
    """What an engine may keep in memory of a parked run, so that the next claim continues without a replay.

    The journal stays the only truth. An engine uses a parked run only if `last` is still an event of the journal, and
    if no other worker has claimed the run since (`goes_on_from`). A worker that keeps nothing replays the journal.
    """

    last: Event  # the last event that `state` and `machine` know: the `run_released` that parked the run
    state: RunState
    machine: Machine
    watch: CircleWatch | None
    calls: dict[int, Asked]  # every call, approval and child that the machine has requested
    unwanted: set[int]  # the numbers of calls, approvals and children that the agent no longer waits for
    compared: set[str]  # names of tools whose pin was compared with the recorded pin


def goes_on_from(parked: ParkedRun, events: Sequence[Event]) -> bool:
    """May the run go on from `parked`? `events` is the end of its journal, from `parked.last` on.

    If another worker has driven the run in the meantime, its agent is replayed, as after a crash. The same is true if a
    person has reopened the run, since its agent goes back, or has changed its frame.
    """
    kinds = [type(event.body) for event in events]
    return bool(events) and events[0] == parked.last and kinds.count(RunClaimed) == 1 and not {RunReopened, FrameChanged} & {*kinds}


class JournalRead(Struct, frozen=True, gc=False):
    """The run was claimed, and this is its journal. Only post may arrive before this input."""

    events: Sequence[Event]  # the whole journal; with `parked`, the events after `parked.last`
    budgets: frozenset[str] = frozenset()  # ids of the runs whose budgets apply to this run: itself and its ancestors
    reserved: Amounts = NOTHING  # what the ledgers have reserved for the run's open calls
    crashes: int = 0  # the number of crashes in the run's row
    epoch: int | None = None  # the epoch of the claim; None: the last epoch in the journal is the epoch of the claim
    parked: ParkedRun | None = None
    # (call, attempt) → the stored progress of an attempt that was cut off, as JSON. The journal does not have it yet.
    progress: Mapping[tuple[int, int], bytes] = {}


class AttemptEnded(Struct, frozen=True, gc=False):
    number: int
    attempt: int
    result: Performed
    usage: Usage | None = None
    progress: bytes | None = None  # the last progress that the attempt reported, as JSON


class HookAnswered(Struct, frozen=True, gc=False):
    number: int
    attempt: int
    outcome: Outcome
    asked_at: int  # monotonic


class Posted(Struct, frozen=True, gc=False):
    row: InboxRow


class ClockReached(Struct, frozen=True, gc=False):
    """`Step.wake_after_us` has passed, or the clock was set."""


class AppendCommitted(Struct, frozen=True, gc=False):
    """The append is durable."""

    begun: bool = True  # False: the attempts in `Step.begin` were not begun
    lease_in_doubt: bool = False  # the attempts were not begun because another worker may have taken over the run
    result: Event | None = None  # the result of the append's transaction


class RolledBack(Struct, frozen=True, gc=False):
    """The append held a transaction and was rolled back.

    `failure` is the failure of the transaction's tool. If it is None, the store could not write.
    """

    failure: Failure | None = None


class AppendRefused(Struct, frozen=True, gc=False):
    """Nothing was written: the lease is lost, or an approval that the append consumes has ended."""

    why: str
    still_ours: bool  # this worker still holds the lease, and no other writer has appended to the run
    post: Sequence[InboxRow] = ()  # all unread inbox rows of the run


class LedgersRead(Struct, frozen=True, gc=False):
    """The answer to `ReadLedgers`."""

    ledgers: Sequence[Ledger]
    # Run id of a budget → what other runs of this worker have recorded under that budget and not yet committed.
    beside: dict[str, Amounts] = {}


class PlaceGiven(Struct, frozen=True, gc=False):
    """The answer to `TakePlace`: the call may start at this time."""

    at: int


class NotNow(Struct, frozen=True, gc=False):
    """The question cannot be answered now. The core asks again at the time `at`."""

    at: int


class LimitUnanswered(Struct, frozen=True, gc=False):
    """The question could not be answered because of an error. The run stops until a person has looked at it."""

    error: Exception


class NotSettled(Struct, frozen=True, gc=False):
    """`Step.settle` failed for this approval. The core tries again later."""

    number: int


class Crowded(Struct, frozen=True, gc=False):
    """Other runs wait for the place that this waiting run occupies in the worker."""


class Drain(Struct, frozen=True, gc=False):
    """Release the run at the next step boundary: attempts under way may end, and no new attempt begins."""


class StopAttempts(Struct, frozen=True, gc=False):
    """The drain has taken too long: stop the attempts under way.

    Effects that may have happened are recorded as in doubt.
    """


Answer = LedgersRead | PlaceGiven | NotNow | LimitUnanswered
CommitAnswer = AppendCommitted | RolledBack | AppendRefused
Input = (
    JournalRead | AttemptEnded | HookAnswered | Posted | ClockReached | CommitAnswer | Answer | NotSettled | Crowded | Drain | StopAttempts
)


# -- steps --------------------------------------------------------------------------------------------------------------
class RowChange(Struct, frozen=True, gc=False):
    """What an append does to the run's row."""

    status: Status
    waiting_for: str | None = None
    ready_at: int | None = None
    error: str | None = None
    attention: Reason | None = None
    # True: set the column `holder` to NULL. If the run has unread inbox rows, it is ready at once, and `ready_at` does
    # not matter.
    release: bool = False
    progress: bool = False  # the run made progress: set the column `crashes` to 0


class Begin(Struct, frozen=True, gc=False):
    """An attempt to begin, or a hook to ask, with everything that is passed to the tool."""

    number: int
    attempt: int
    tool: Any
    args: bytes
    key: str  # the idempotency key; if empty, `keys` derives the key
    keys: CallKeys
    # If the attempt begins at most `covered_s` seconds after its append was sent, the engine need not check the lease.
    # The wait before a hook's "not found" counts (`decide.quiet_after_s`) includes this time.
    covered_s: float = 0.0
    after_us: int = 0  # only for a hook: ask the hook after this many microseconds
    # The last progress that an earlier attempt of the call reported, as JSON. A hook gets the progress of the last
    # attempt.
    last_progress: bytes | None = None


class Transaction(Struct, frozen=True, gc=False):
    """A call whose effect and result are part of the append's commit.

    The result of the call is the event that follows the events of the append.
    """

    begin: Begin
    cause: int
    event_id: str
    reserved: Amounts
    started_at: int
    estimate: Usage | None
    metered: bool


class StepAppend(Struct, frozen=True, gc=False):
    """Everything recorded since the last append, to be made durable in one commit."""

    after_seq: int  # the run's seq before this append
    events: Sequence[Event]  # if empty, only the row changes
    blobs: tuple[bytes, ...] = ()
    row: RowChange | None = None
    consumed: tuple[int, ...] = ()  # inbox rows that were handled: the commit deletes them
    left: tuple[int, ...] = ()  # inbox rows that were read and stay in the inbox
    charge: Charge | None = None  # only for runs under a budget
    transaction: Transaction | None = None


class ReadLedgers(Struct, frozen=True, gc=False):
    """What is left in the budgets that apply to this run?"""


class TakePlace(Struct, frozen=True, gc=False):
    """When may this call start under its rate limit? `held`: the start time that the call was given before, if any."""

    number: int
    rate: Rate
    held: int | None


Question = ReadLedgers | TakePlace


class Settle(Struct, frozen=True, gc=False):
    """Expire or withdraw this approval: its time is over, or the agent no longer waits for the decision.

    The result arrives as post.
    """

    number: int
    approval: str
    how: Expire | Withdraw


class CancelChild(Struct, frozen=True, gc=False):
    run_id: str
    reason: str


class HoldBack(Struct, frozen=True, gc=False):
    """The service refuses requests until the time `until`. Before that, no run may start a call under this limit."""

    rate: Rate
    until: int


class Note(Struct, frozen=True, gc=False):
    """Something for the log."""

    level: Literal["info", "warning", "error"]
    text: str


class Rested(Struct, frozen=True, gc=False):
    """The run is released or finished, and the commit that says so is durable. The core takes no more inputs."""

    # If set: the run stopped because of this exceeded budget. If the budget was raised in the meantime, requeue the
    # run.
    check_budget: BudgetExceeded | None = None


class Broken(Struct, frozen=True, gc=False):
    """This core cannot drive the run any further. The engine may write nothing more, except to release the run."""

    kind: Literal["fenced", "conflict"]
    why: str


class Step(Struct, gc=False):
    """What an engine has to do now, in this order."""

    notes: tuple[Note, ...] = ()
    stop: tuple[int, ...] = ()  # numbers of the calls whose attempts are to be stopped
    forget: tuple[int, ...] = ()  # numbers of the calls whose hooks' answers are no longer needed
    serve: tuple[Any, ...] = ()  # agents of children: the worker that drives the parent serves these agents too
    settle: tuple[Settle, ...] = ()
    cancel: tuple[CancelChild, ...] = ()
    hold_back: tuple[HoldBack, ...] = ()
    ask: tuple[Begin, ...] = ()  # reconcile hooks to ask
    begin_now: list[Begin] = []  # attempts that need no durable intent: attempts of `read` calls
    question: Question | None = None
    append: StepAppend | None = None
    begin: Sequence[Begin] = ()  # attempts to begin when the append is durable
    wake_after_us: int | None = None
    # True: the run waits only for its children, or for budget that other runs have reserved. If other runs need this
    # run's place in the worker, the engine sends `Crowded`.
    yields: bool = False
    end: Rested | Broken | None = None
