"""The Store protocol: what a journal's database must do, and nothing more. It is the union of smaller ones, by concern.

Blocking, thread-safe, and one commit path: `append` checks the guard (run, epoch, nonce, expected seq) and inserts in one
transaction. Leases say who should work; the guard says who may write. The conformance suite in perdure.testing holds every
implementation to what is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Protocol

from msgspec import Struct

from perdure.core import codec
from perdure.core.approval import ApprovalStatus as ApprovalStatus
from perdure.core.approval import Judgement, Standing
from perdure.core.budget import Amounts
from perdure.core.budget import Charge as Charge
from perdure.core.budget import Ledger as Ledger
from perdure.core.events import AnyBody, Event, Reason
from perdure.core.identity import Sealed
from perdure.core.rate import Rate
from perdure.core.state import FINISHED as FINISHED
from perdure.core.state import Status as Status
from perdure.core.steps import InboxRow as InboxRow
from perdure.core.steps import RowChange as RowChange
from perdure.core.suspects import Group
from perdure.settings import Queue

Place = tuple[int, int]  # of a run in the order in which runs came into being; what the numbers mean is the store's own affair

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class NewRun(Struct, frozen=True, gc=False):
    """A run to create; `created` is its first event's body."""

    run_id: str
    created: AnyBody
    event_id: str
    ts: int
    input_digest: str  # of the canonical input: the same id with another input is a Conflict
    blobs: tuple[bytes, ...] = ()


class RunRow(Struct, frozen=True, gc=False):
    """The projection of a run, written in the same commit as its events."""

    run_id: str
    agent: str
    version: str
    tenant: str
    actor: str | None
    queue: str
    target: str | None
    input_digest: str
    status: Status
    waiting_for: str | None  # in words: "timer until …", "retry of charge (call 4) at …"
    ready_at: int | None  # from when on anybody may claim it (µs); None: held, finished, or only something from outside can wake it
    seq: int
    head: bytes  # hash of the event at seq
    epoch: int
    holder: str | None  # id of the worker that holds it
    crashes: int  # claims in a row that took it over from a dead worker, with no completion in between
    error: str | None
    created_at: int
    updated_at: int
    priority: int = 0
    attention: Reason | None = None  # why it needs attention
    parent: str | None = None  # run id
    parent_call: int | None = None
    lost: int = 0  # how its last worker was lost, if it has not been taken since: 1 its lease ran out, 2 its process is gone
    lost_with: int = 0  # other runs that may be to blame for that: all that the worker held; of a suspect, the other suspects


class Served(Struct, frozen=True, gc=False):
    """An agent in a version, which a worker has the code of."""

    agent: str
    version: str


class Lease(Struct, frozen=True, gc=False):
    """The right to write one run: refused as soon as somebody else has a higher epoch."""

    run_id: str
    worker: str
    epoch: int
    nonce: bytes


class Claimed(Struct, frozen=True, gc=False):
    lease: Lease
    row: RunRow  # as of after the claim: row.seq is the seq of its `run_claimed`
    events: tuple[Event, ...] | None = None  # its whole journal, where that came along with the claim
    post: tuple[InboxRow, ...] | None = None  # what lay in its inbox, where that came along too


class Append(Struct, frozen=True, gc=False):
    """Events of one run, to be committed whole or not at all.

    What follows from the events is written with them: an `approval_requested` makes its row; a `tool_call_initiated` that names an
    approval consumes it, and the append is Refused unless that approval is approved, unconsumed, of this very tool and digest of
    arguments, and not expired, neither when the event was recorded nor now, by `at` and what the append had to wait since; a
    `child_started` creates the child's run; a terminal event of a child hands its parent a `child_finished`; whatever people should
    hear of gets a notice.
    """

    lease: Lease
    expected_seq: int  # the run's seq before this append
    events: tuple[Sealed, ...]  # may be empty: only the row changes
    blobs: tuple[bytes, ...] = ()  # content-addressed; in the same commit as the events that name them
    row: RowChange | None = None
    consumed: tuple[int, ...] = ()  # inbox rows that these events stand for
    left: tuple[int, ...] = ()  # inbox rows that the holder has seen and leaves where they are
    charge: Charge | None = None  # only for runs that have a budget, their own or one above them
    at: int = 0  # the worker's clock when this was sent, again at every resend: its events may have waited for the disk


class Committed(Struct, frozen=True, gc=False):
    """The append is durable."""


class Refused(Struct, frozen=True, gc=False):
    """The guard did not hold: somebody else has the run, or its seq has moved. Stop working on it at once.

    When `why` begins with "approval ", the lease holds, and a call did not start because the time of its approval is over.
    """

    why: str


Appended = Committed | Refused


class WorkerRow(Struct, frozen=True, gc=False):
    worker: str
    name: str  # "host:pid"
    pid: int
    started_at: int
    beat_at: int
    alive: bool
    runs: int
    serves: tuple[Served, ...] = ()
    queues: tuple[str, ...] | None = None  # None: all


class Backlog(Struct, frozen=True, gc=False):
    """One tenant's runs in one queue: how many wait for a worker and how many have one."""

    queue: str
    tenant: str
    ready: int
    since: int | None  # when the one that has waited longest became ready (µs)
    held: int


class ApprovalRow(Struct, frozen=True, gc=False):
    """The projection of an approval."""

    approval: str
    run_id: str
    call: int
    agent: str
    tenant: str
    actor: str | None
    asked_at: int
    standing: Standing  # the request as it is now, its status and the votes so far
    settled_at: int | None = None

    @property
    def status(self) -> ApprovalStatus:
        return self.standing.status

    @property
    def action(self) -> str:
        return self.standing.request.action

    @property
    def input(self) -> Any:
        """What is proposed, as a JSON value. None for one that is too long for the journal: `app.load(row.standing.request.input)` has it."""
        inline = self.standing.request.input.inline
        return None if inline is None else codec.decode(inline)

    @property
    def reason(self) -> str | None:
        return self.standing.request.reason

    @property
    def by(self) -> tuple[str, ...]:
        """Who may decide; nobody named: anybody."""
        return self.standing.request.by

    @property
    def quorum(self) -> int:
        return self.standing.request.quorum

    @property
    def voters(self) -> tuple[str, ...]:
        """Who has agreed so far."""
        return self.standing.voters

    @property
    def editable(self) -> tuple[str, ...]:
        return self.standing.request.editable

    @property
    def expires_at(self) -> datetime | None:
        """When its time is over, in UTC; None: never, or beyond the year 9999."""
        at = self.standing.request.expires_at
        try:
            return None if at is None else _EPOCH + timedelta(microseconds=at)
        except OverflowError:
            return None


class ApprovalFilter(Struct, frozen=True, gc=False):
    status: ApprovalStatus | None = "pending"  # None: all
    tenant: str | None = None
    run_id: str | None = None
    limit: int = 100


class NoticeRow(Struct, frozen=True, gc=False):
    """Something that people should hear of: an event of a run. Sent at least once; `event.event_id` tells copies apart."""

    notice_id: int
    row: RunRow
    event: Event
    attempts: int  # before this one


class CostRow(Struct, frozen=True, gc=False):
    """What a group of runs has used."""

    group: str
    runs: int
    calls: int
    busy_us: int
    usd_micros: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    lost: int = 0  # requests to models whose answers were lost with a worker: what those used is not in the figures, for nobody knows


class Filter(Struct, frozen=True, gc=False):
    status: str | None = None
    agent: str | None = None
    tenant: str | None = None
    limit: int = 100
    before: int | None = None  # created_at below this, for paging


class Stored(Struct, frozen=True, gc=False):
    """One row of the events table exactly as it lies there, for verify: nothing decoded, nothing trusted."""

    seq: Any
    event_id: Any
    ts: Any
    epoch: Any
    call: Any
    cause: Any
    data: Any
    hash: Any


class Moved(Struct, frozen=True, gc=False):
    """Where a journal is now, or will be; this one takes nothing more."""

    to_url: str  # without user and password
    by: str
    at: int
    done: bool  # False: the move is under way, or was interrupted

    @property
    def words(self) -> str:
        """What is said to whoever still uses it."""
        at = datetime.fromtimestamp(self.at // 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        if self.done:
            return f"this journal was moved to {self.to_url} on {at}; use that one"
        return (
            f"this journal is being moved to {self.to_url} since {at} and takes nothing more; the same `perdure copy` again finishes that, "
            "with --abandon it is taken back"
        )


class Member(Struct, frozen=True, gc=False):
    run_id: str
    seq: int
    head: bytes
    finished: bool


class Family(Struct, frozen=True, gc=False):
    """A run without a parent and all below it, its undo included; the oldest first."""

    place: int  # in the order of roots
    root: str
    members: tuple[Member, ...]

    @property
    def finished(self) -> bool:
        return all(member.finished for member in self.members)


class Head(Struct, frozen=True, gc=False):
    """How far a run's journal goes, or went when it was pruned."""

    seq: int
    head: bytes
    pruned: bool


class Whole(Struct, frozen=True, gc=False):
    """A run with everything that lies beside its journal, as it travels from one database to another: numbers stay behind."""

    run: tuple[Any, ...]  # the columns of its row that travel, run_id first
    ledger_of: str | None  # the run whose budget applies first
    events: list[Stored]
    approvals: list[tuple[Any, ...]]
    signals: list[tuple[Any, ...]]
    budgets: list[tuple[Any, ...]]  # none or one; the first column: the run whose budget is above it
    reserved: list[tuple[Any, ...]]
    inbox: list[tuple[Any, ...]]
    notices: list[tuple[Any, ...]]
    blobs: list[str]  # digests of what it has put into the blob store

    @property
    def run_id(self) -> str:
        run_id: str = self.run[0]
        return run_id


class RateRow(Struct, frozen=True, gc=False):
    key: str
    due: int
    paused_until: int
    seen_at: int


class Prunable(Struct, frozen=True, gc=False):
    """A family that ended long enough ago."""

    place: int  # in the order of roots
    root: str
    runs: int
    events: int


class Pruned(Struct, frozen=True, gc=False):
    """How much was deleted."""

    families: int
    runs: int
    events: int
    blobs: int

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(self.families + other.families, self.runs + other.runs, self.events + other.events, self.blobs + other.blobs)


class Tombstone(Struct, frozen=True, gc=False):
    """What is left of a run that was pruned."""

    run_id: str
    agent: str
    tenant: str
    status: str  # "returned": a copy that was taken back when its move was abandoned
    events: int
    head: bytes
    created_at: int
    finished_at: int
    pruned_at: int
    by: str


class Reading(Protocol):
    """What can be read of runs: all that the app, the command line and `inspect` ask. Every store is one.

    It is the half of an engine that changes nothing (see perdure.engine.api). Blocking: whoever has a loop asks on a thread where
    `remote` says that an answer may take long.
    """

    url: str
    remote: bool  # a commit crosses a network: then nobody waits for one on the event loop's own thread

    @property
    def ahead_us(self) -> int:
        """How far the database's clock is ahead of this machine's (µs); 0 where they are the same."""

    def get(self, run_id: str) -> RunRow | None: ...

    def family(self, run_id: str) -> list[RunRow]:
        """The unfinished runs below this one: its children, theirs, and so on."""

    def read(self, run_id: str, after: int = 0) -> list[Event]:
        """The events with seq > after, in order. StoreCorrupt when one cannot be decoded."""

    def stored(self, run_id: str) -> list[Stored]:
        """The rows exactly as they lie there, for verify."""

    def hash_at(self, run_id: str, seq: int) -> bytes: ...

    def growing(self, after: Place = (0, 0), newest: Place = (0, 0), limit: int = 1000) -> list[tuple[Place, RunRow]]:
        """The runs placed after `after` that are placed after `newest` or have not finished, each with its place, in that order.

        Whatever the clocks say, a run that becomes visible later has a later place, and a finished run never changes: whoever knows
        all runs up to `newest` learns from this what may have grown since, and misses nothing. Places are compared and handed back;
        right before (a, b) comes (a, b - 1).
        """

    def blob(self, digest: str) -> bytes:
        """The blob, verified against its digest; StoreCorrupt when it is missing or differs."""

    def approval(self, approval: str) -> ApprovalRow | None: ...

    def approvals(self, wanted: ApprovalFilter) -> list[ApprovalRow]:
        """Those that expire first come first, then the oldest."""

    def unread(self, run_id: str) -> list[InboxRow]:
        """What has arrived for this run and is not in its journal, in order of arrival, whoever holds it.

        Of a finished run: what somebody was told had arrived, and what came too late for it to read.
        """

    def ledgers(self, run_id: str) -> list[Ledger]:
        """The budgets that apply to the run, its own first, then those of its parents. Empty: none."""

    def over_budget(self, run_id: str) -> list[str]:
        """The unfinished runs that stand still because of this run's budget: themselves `needs_attention` for `budget`."""

    def costs(
        self, by: Literal["agent", "tenant", "model", "day", "run", "root", "tool"], *, since: int = 0, tenant: str | None = None
    ) -> list[CostRow]:
        """What runs have used, by group, the most expensive first; "root": children with the run that was started.

        Counted from the journals: once, whatever was replayed.
        """

    def workers(self, now: int, lease_us: int) -> list[WorkerRow]: ...

    def backlog(self, now: int) -> list[Backlog]:
        """What is ready and what is held, of each tenant in each queue, in that order; who has neither is left out."""

    def suspects(self) -> dict[str, Group]:
        """Of each worker that holds suspects, the group of them."""

    def tombstone(self, run_id: str) -> Tombstone | None: ...

    def tombstones(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Tombstone]]:
        """Those placed after `after`, each with its place, in the order in which they came."""

    def moved(self) -> Moved | None:
        """Where the journal is moving to, or was moved to; None while it is open."""

    def facts(self) -> dict[str, str]:
        """What `doctor` shows: file, sizes, pragmas, schema version, library version."""

    def problems(self) -> list[str]:
        """What is wrong with the database as a whole, in words: journals whose run is gone, guards that are missing or changed.

        What is wrong inside a journal is verify's to find.
        """

    def version(self) -> int:
        """A number that changes when anything was committed, by any process. Cheap."""

    def close(self) -> None: ...

    # Last, because inside the class the name `list` means this method from here on.
    def list(self, wanted: Filter) -> list[RunRow]:
        """Newest first."""


class JournalStore(Protocol):
    """Runs and their journals: created, appended to under the guard, and who hears of a commit."""

    remote: bool  # as in Reading

    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        """Create the run (True), or return the one that has this id already (False). Conflict when that one was pruned (T14)."""

    def create_runs(self, news: Sequence[NewRun]) -> list[tuple[RunRow, bool]]:
        """As create_run for several runs, in one commit: all of them, or an error and none."""

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        """Commit all whose guard holds, in one transaction; an answer for each, in order. Durable when it returns."""

    def transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]]) -> tuple[Appended, Any]:
        """One transaction: check the guard and insert `head`, call work(connection), insert the Append it returns, commit.

        When work raises, everything is rolled back and the exception goes up: nothing has happened. The connection refuses
        transaction control and any write to perdure's own tables.
        """

    def listen(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Call `ring`, from any thread, soon after something was committed that a worker may have to act on; returns how to end that.

        A hint: it may come late, more than once, or not at all. Whoever listens also looks at `version` from time to time.
        """


class LeaseStore(Protocol):
    """Who works on what."""

    def register(
        self, worker: str, name: str, pid: int, now: int, serves: Sequence[Served] = (), queues: Sequence[str] | None = None
    ) -> None:
        """Announce a worker, or what it serves now, and take its liveness lock, which the kernel frees when the process dies."""

    def unregister(self, worker: str, now: int) -> None:
        """Forget a worker; runs that it still holds become claimable."""

    def renew(self, worker: str, now: int) -> None:
        """A sign of life: leases of this worker count from now."""

    def claim(
        self,
        worker: str,
        served: Sequence[Served],
        limit: int,
        now: int,
        *,
        run_id: str | None = None,
        below: str | None = None,
        queues: Sequence[str] | None = None,
        limits: Mapping[str, Queue] | None = None,
    ) -> list[Claimed]:
        """Take up to `limit` ready runs of the served agents and versions, each with epoch + 1 and a `run_claimed` event, in one commit.

        `queues` are those to take from (None: all). `limits` say how many runs of a queue, and of one tenant in it, may be held at
        a time, by whomever. Tenants take turns: of those that have something ready in a queue, the one goes first whose last turn
        is longest ago; inside a tenant's line the higher priority goes first, then what has been ready longest.

        With run_id: that run alone, ready or not, unless it is finished (RunEnded), paused (Conflict), of another version
        (WrongVersion) or held by a live worker (AlreadyRunning); nothing, when `limits` are given and leave no room for it. With
        `below`: ready runs of that run's family alone. Neither asks for turns or queues: somebody wants them by name.
        Runs with crashes >= 2 are suspects: however they are asked for, a worker holds no more of them at a time than `core.suspects`
        says (of those that were lost once more as suspects, half as many as were lost together).
        """

    def reap(self, worker: str, lease_us: int, now: int) -> int:
        """Make the runs of dead workers claimable; how many. Dead is one whose lock is free, or that was seen to give no sign of life for lease_us.

        Seen by whoever calls this again and again on the same store, by the monotonic clock: no wall clock that is set makes anybody dead.
        """

    def held(self, worker: str) -> list[tuple[str, int]]:
        """The runs that this worker holds, each with the epoch of its lease."""

    def let_go(self, worker: str, runs: Sequence[tuple[str, int]], now: int) -> int:
        """Make these runs claimable if that worker holds them under these epochs, as those of a dead one; how many.

        For a worker that holds what it does not drive: it was cut off, or interrupted, before it heard that its claim had arrived.
        """

    def next_ready(self, served: Sequence[Served], queues: Sequence[str] | None = None) -> int | None:
        """When the next run of these agents becomes ready (µs); in the past if one is ready now; None if none will by itself."""

    def left_behind(self, served: Sequence[Served], now: int, *, but: Sequence[str] = ()) -> list[tuple[Served, Served, str]]:
        """What a worker must know to go on with ready children that it does not serve, whose parents, or theirs, it serves.

        (the parent's kind, the kind of child that it can name, the run id of such a parent that is not in `but`), each pair of kinds once.
        """


class InboxStore(Protocol):
    """What reaches a run from outside. Whoever holds the run journals it; while nobody does, it is appended at once."""

    def post(
        self,
        run_id: str,
        call: int | None,
        body: AnyBody,
        *,
        event_id: str,
        now: int,
        status: Status | None = None,
        expect: Callable[[RunRow], None] | None = None,
    ) -> bool:
        """Hand something to a run: appended at once when nobody holds it (True), else put in its inbox for the holder (False).

        Appended at once means: sealed onto the head with the run's epoch, seq + 1; status and ready_at become what `core.landing`
        says (`status`, where given, is the status instead). A holder that is dead (its lock is free) does not count as one.

        What follows from the body is written with it: a `budget_raised` raises the run's ledger, a `run_adopted` its version. What a
        `tool_call_resolved` charges is counted in the ledgers if it is appended at once; otherwise the holder charges it. A signal
        whose key the run has had before on that topic changes nothing (True).

        `expect`, where there is one, is called with the run's row inside the transaction and raises to refuse. NotFound, RunEnded.
        """

    def end(self, run_id: str, body: AnyBody, *, event_id: str, now: int, expect: Callable[[RunRow], None] | None = None) -> None:
        """Append a terminal event to a run that nobody holds. Its parent hears of it, and its children are asked to stop.

        What the run has still reserved is given back; what the body charges (`RunCancelled.unsettled`) is charged. `expect` is called
        with the run's row inside the transaction and raises to refuse. NotFound, RunEnded, AlreadyRunning.
        """

    def decide(self, approval: str, judgement: Judgement, *, event_id: str, now: int, tenant: str | None = None) -> ApprovalRow:
        """The only way in which an approval changes: judge it and write what follows, in one transaction.

        `core.approval.judge` gets its standing as it is in that transaction, and raises to refuse; a vote must be in time when it is
        written. The ruling's standing is stored, and its body handed to the run as `post` does. Of two who decide at once, the second
        one is judged by what the first has left. NotFound, also when it is another tenant's; RunEnded.
        """

    def inbox(self, worker: str) -> list[InboxRow]:
        """What has arrived for the runs that this worker holds, in order of arrival."""


class LimitStore(Protocol):
    """What runs may use, over all workers."""

    def admit(self, rate: Rate, now: int) -> int:
        """Take the next place in the rate's line, over all workers: the time (µs) from which the attempt may start."""

    def hold_back(self, key: str, until: int) -> None:
        """Nobody starts anything under this rate's key before then."""

    def reserved(self, run_id: str) -> Amounts:
        """What the ledgers have reserved for the run's own attempts."""


class OutboxStore(Protocol):
    """What people should hear of: written in the commit of the event, sent at least once."""

    def take_notices(self, now: int, limit: int, hold_us: int) -> list[NoticeRow]:
        """Notices that are due, for this caller alone for the next hold_us: whoever takes one and dies leaves it to the next."""

    def notice_done(self, notice_id: int) -> None: ...

    def notice_failed(self, notice_id: int, *, next_at: int, error: str) -> None: ...

    def next_notice(self) -> int | None:
        """When the next notice is due (µs)."""


class ArchiveStore(Protocol):
    """Journals that move, and families that are deleted."""

    def close_journal(self, to_url: str, *, by: str, now: int, lease_us: int) -> Moved:
        """Close it for a move: from now on whatever would change a run, or register a worker, is refused with a StoreError.

        AlreadyRunning, which names them, while workers live; runs of dead ones become free first. Nothing happens when it is closed for
        the same place; Conflict when it is closed for another.
        """

    def finish_move(self) -> None:
        """Everything has arrived: the journal stays closed for good."""

    def reopen_journal(self) -> None:
        """Take a move back that has not ended; Conflict when it has. Whoever calls has made sure that nothing goes on elsewhere."""

    def count_runs(self) -> int: ...

    def other_tables(self) -> list[str]:
        """Tables in the same place that are not the journal's: those of transaction tools, for one."""

    def families(self, after: int = 0, limit: int = 500) -> list[Family]:
        """Families whose root is placed after `after`, in the order in which they began."""

    def heads(self, run_ids: Sequence[str]) -> dict[str, Head]:
        """How far those of these runs go that are here, or were pruned here."""

    def wholes(self, run_ids: Sequence[str]) -> list[Whole]:
        """These runs with everything that belongs to them, the oldest first."""

    def take_in(self, parts: Callable[[], Iterable[Sequence[Whole]]]) -> None:
        """Insert whole runs, parents before children, all in one transaction; Conflict, and nothing, when an id is taken.

        `parts` may be called again when the transaction was rolled back because of another one.
        """

    def missing_blobs(self, digests: Iterable[str]) -> list[str]:
        """Those of these that are not here."""

    def put_blobs(self, blobs: Sequence[bytes]) -> None:
        """Have them here before the runs that name them."""

    def give_back(self, families: Sequence[Sequence[tuple[str, int, bytes]]], *, by: str, now: int) -> list[str]:
        """Delete copied families, each told as (run id, seq, head) with its root first, that are exactly as they came; families that are not here are none.

        One transaction. When some have gone on nothing is deleted, and the answer names those runs. The ids stay free.
        """

    def rates(self) -> list[RateRow]: ...

    def take_in_rates(self, rates: Sequence[RateRow]) -> None: ...

    def prunable(self, before: int, statuses: Sequence[str], *, after: int = 0, limit: int = 100) -> list[Prunable]:
        """Families placed after `after` whose root has one of these statuses, all of which ended before then, with no notice left to send."""

    def prune(self, roots: Sequence[str], before: int, *, by: str, now: int) -> Pruned:
        """Delete these families in one transaction, with the blobs that nobody else has, and leave a tombstone for each run.

        One that is not over any more, because somebody has begun to undo it or the like, is left alone.
        """

    def take_in_tombstones(self, tombstones: Sequence[Tombstone]) -> None:
        """Of another journal, which moves here; those whose run has one already are left out."""


class Store(Reading, JournalStore, LeaseStore, InboxStore, LimitStore, OutboxStore, ArchiveStore, Protocol):
    """The journal's database. Every method may be called from any thread and may block."""

    cut_off_after_s: float  # others take the runs of a worker this long after they saw its connection end; inf: they see none
    pause_s: float  # after it was out of reach it may be for this long that a process does not ask whether it is back
