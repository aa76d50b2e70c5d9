"""What goes into the run core and what comes out of it. Plain data: an engine sends inputs and carries out steps.

    input  →  RunCore.step(input, now, mono)  →  Step

An engine keeps three rules:

1. It makes `Step.append` durable before it begins an attempt in `Step.begin` (G2), and answers every append with exactly one of
   `Committed`, `RolledBack` and `AppendRefused`. Until then the core sends no other append.
2. It answers every `Step.question` with exactly one of `LedgersRead`, `PlaceGiven`, `NotNow` and `NoAnswer`.
3. It ends every attempt that it has begun with exactly one `AttemptEnded`, and every hook that it has asked with one `HookAnswered`,
   unless the step told it to forget the hook.

Inputs that arrive while the core waits for an answer are kept, and taken in order of arrival after it. Times are microseconds: `now` is
the wall clock, `mono` a clock that never jumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from perdure.core.approval import Expire, Withdraw
from perdure.core.attempts import Performed
from perdure.core.budget import NOTHING, Amounts, Charge, Ledger
from perdure.core.events import AnyBody, BudgetExceeded, Event, Failure, Reason, Status, Usage
from perdure.core.identity import CallKeys
from perdure.core.outcome import Outcome
from perdure.core.rate import Rate


# -- inputs -------------------------------------------------------------------------------------------------------------
class InboxRow(Struct, frozen=True, gc=False):
    """Something from outside for a run that a worker holds: a signal, a decision, a cancel, the end of a child."""

    inbox_id: int
    run_id: str
    call: int | None
    body: AnyBody | None  # None: a newer version has written it, and it cannot be decoded here
    event_id: str  # the sender's: it looks for this one when it does not know whether its post has arrived


class JournalRead(Struct, frozen=True, gc=False):
    """The run was claimed, and this is its journal. The first input of every core, apart from post."""

    events: Sequence[Event]
    budgets: frozenset[str] = frozenset()  # the runs whose budgets apply: its own, and those above it
    reserved: Amounts = NOTHING  # what the ledgers keep free for its open calls
    crashes: int = 0  # that its row still counts
    epoch: int | None = None  # of the claim; None: the last one in the journal is the claim


class AttemptEnded(Struct, frozen=True, gc=False):
    number: int
    attempt: int
    result: Performed
    usage: Usage | None = None


class HookAnswered(Struct, frozen=True, gc=False):
    number: int
    attempt: int
    outcome: Outcome
    asked_at: int  # by the monotonic clock


class Posted(Struct, frozen=True, gc=False):
    row: InboxRow


class ClockReached(Struct, frozen=True, gc=False):
    """`Step.wake_after_us` has passed, or the clock was set."""


class Committed(Struct, frozen=True, gc=False):
    """The append is durable."""

    begun: bool = True  # False: the attempts that were to begin after it have not
    lease_in_doubt: bool = False  # the reason for that: another worker may have taken the run meanwhile
    result: Event | None = None  # of the transaction that the append held


class RolledBack(Struct, frozen=True, gc=False):
    """The append held a transaction, and nothing was written: the tool has failed, or (None) the store could not be written."""

    failure: Failure | None = None


class AppendRefused(Struct, frozen=True, gc=False):
    """Nothing was written: the lease is lost, or an approval that the append uses is over."""

    why: str
    still_ours: bool  # the lease holds, and nothing was written meanwhile
    post: Sequence[InboxRow] = ()  # all that lies unread for the run


class LedgersRead(Struct, frozen=True, gc=False):
    """The answer to `ReadLedgers`."""

    ledgers: Sequence[Ledger]
    beside: dict[str, Amounts] = {}  # budget → what other runs of this worker have recorded and not committed under it


class PlaceGiven(Struct, frozen=True, gc=False):
    """The answer to `TakePlace`: the call may start at this time."""

    at: int


class NotNow(Struct, frozen=True, gc=False):
    """The question cannot be answered now; ask again at this time."""

    at: int


class NoAnswer(Struct, frozen=True, gc=False):
    """Answering the question has failed, for a reason that is no fault of the store's: the run stops until a person has looked."""

    error: Exception


class NotSettled(Struct, frozen=True, gc=False):
    """An approval could not be settled as `Step.settle` asked for: it is tried again when it is due."""

    number: int


class Crowded(Struct, frozen=True, gc=False):
    """Other runs need the room that this one has while it waits."""


class Drain(Struct, frozen=True, gc=False):
    """Hand the run over at the next step boundary: attempts under way may end, and no new one starts."""


class StopAttempts(Struct, frozen=True, gc=False):
    """The drain has taken too long: end what is under way. What may have happened is recorded as in doubt."""


Answer = LedgersRead | PlaceGiven | NotNow | NoAnswer
CommitAnswer = Committed | RolledBack | AppendRefused
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
    release: bool = False  # give the run up: holder := NULL. With unread inbox rows it is ready at once, whatever ready_at says
    progress: bool = False  # a completion is among the events: crashes := 0


class Begin(Struct, frozen=True, gc=False):
    """An attempt to begin, or a hook to ask, with all that its tool is told."""

    number: int
    attempt: int
    tool: Any
    args: bytes
    key: str  # empty: the one that `keys` makes
    keys: CallKeys
    covered_s: float = 0.0  # begun this late after its append was sent, it is covered by the wait before "not found" is believed
    after_us: int = 0  # of a hook: ask it no sooner


class Transaction(Struct, frozen=True, gc=False):
    """A call whose effect and whose result are part of the append. The result is the event right behind the append's."""

    begin: Begin
    cause: int
    event_id: str
    reserved: Amounts
    started_at: int
    estimate: Usage | None
    metered: bool


class Append(Struct, frozen=True, gc=False):
    """Everything recorded since the last append, to be made durable in one commit."""

    after_seq: int  # the run's seq before it
    events: Sequence[Event]  # may be empty: only the row changes
    blobs: tuple[bytes, ...] = ()
    row: RowChange | None = None
    consumed: tuple[int, ...] = ()  # inbox rows that these events stand for
    left: tuple[int, ...] = ()  # inbox rows that were seen and stay where they are
    charge: Charge | None = None  # only for runs under a budget
    transaction: Transaction | None = None


class ReadLedgers(Struct, frozen=True, gc=False):
    """What is left in the budgets above this run?"""


class TakePlace(Struct, frozen=True, gc=False):
    """When may this call start under its rate? `held`: the place in line that it has already."""

    number: int
    rate: Rate
    held: int | None


Question = ReadLedgers | TakePlace


class Settle(Struct, frozen=True, gc=False):
    """An approval whose time is over, or whose answer is not wanted any more. The result comes as post."""

    number: int
    approval: str
    how: Expire | Withdraw


class CancelChild(Struct, frozen=True, gc=False):
    run_id: str
    reason: str


class HoldBack(Struct, frozen=True, gc=False):
    """The service wants no more until then: that goes for all runs that use it."""

    rate: Rate
    until: int


class Note(Struct, frozen=True, gc=False):
    """Something for the log."""

    level: Literal["info", "warning", "error"]
    text: str


class Rested(Struct, frozen=True, gc=False):
    """The run is given up, or over, and that is durable. The core takes no more inputs."""

    check_budget: BudgetExceeded | None = None  # it stopped for this: if the budget was raised meanwhile, it shall go on


class Broken(Struct, frozen=True, gc=False):
    """The run cannot be driven on here. Nothing more may be written, except that it is given up."""

    kind: Literal["fenced", "conflict"]
    why: str


class Step(Struct, gc=False):
    """What an engine has to do now, in this order."""

    notes: tuple[Note, ...] = ()
    stop: tuple[int, ...] = ()  # attempts
    forget: tuple[int, ...] = ()  # hooks: their answers are not wanted any more
    serve: tuple[Any, ...] = ()  # agents of children: a worker that drives the parent serves them too
    settle: tuple[Settle, ...] = ()
    cancel: tuple[CancelChild, ...] = ()
    hold_back: tuple[HoldBack, ...] = ()
    ask: tuple[Begin, ...] = ()  # reconcile hooks
    begin_now: list[Begin] = []  # attempts that need no durable intent: reads
    question: Question | None = None
    append: Append | None = None
    begin: Sequence[Begin] = ()  # attempts to begin when the append is durable
    wake_after_us: int | None = None
    yields: bool = False  # it only waits for other runs: if they need the room, the engine says `Crowded`
    end: Rested | Broken | None = None
