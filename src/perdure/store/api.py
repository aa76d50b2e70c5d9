"""The Store protocol: what a journal's database must do, and nothing more. Also the records that stores return.

`Store` is the union of smaller protocols, one for each concern.

A store is blocking and thread-safe. A worker writes to a run by `append`: in one transaction, `append` checks the
guard (run, epoch, nonce, expected seq) and inserts. Leases say which worker should work on a run; the guard says
which worker may write to the run. The tests in tests/conformance check every implementation against this file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from perdure import shell
from perdure.core import codec
from perdure.core.approval import ApprovalStatus as ApprovalStatus
from perdure.core.approval import Judgement, Standing
from perdure.core.budget import Amounts
from perdure.core.budget import Charge as Charge
from perdure.core.budget import Ledger as Ledger
from perdure.core.events import AnyBody, CancelRequested, Event, Failure, Reason
from perdure.core.identity import ChainEntry, Sealed, undo_id
from perdure.core.query import EVERYTHING, Query
from perdure.core.rate import Rate
from perdure.core.schedule import ScheduleEvent
from perdure.core.state import FINISHED as FINISHED
from perdure.core.state import Status as Status
from perdure.core.steps import InboxRow as InboxRow
from perdure.core.steps import RowChange as RowChange
from perdure.core.suspects import Group
from perdure.core.times import utc
from perdure.errors import Conflict, StoreCorrupt
from perdure.settings import Queue

# The place of a run in the order in which runs became visible. Each store decides what the two numbers mean.
Place = tuple[int, int]


class Reopen(Struct, frozen=True, gc=False):
    """One run that a person reopens, and the events that record this."""

    run_id: str
    seen: int  # the run's last event when the events were computed
    # (body, call, event id). The first body is `run_reopened`: the run's last event causes it, it causes the others.
    events: Sequence[tuple[AnyBody, int | None, str]]
    version: str | None = None  # the version of the agent that goes on with the run; None: the same as before


class NewRun(Struct, frozen=True, gc=False):
    """A run to create; `created` is its first event's body."""

    run_id: str
    created: AnyBody
    event_id: str
    ts: int
    input_digest: str  # digest of the canonical input: the same run id with another input is a Conflict
    blobs: tuple[bytes, ...] = ()
    # The ids of the artifacts that the input names. The run's family may open those that have the run's tenant.
    artifacts: tuple[str, ...] = ()
    # The artifacts that the input contains as pointers. NotFound if the tenant does not have one of them.
    needed_artifacts: tuple[str, ...] = ()
    # For an undo: the number of events that the run had when its undo was planned. Conflict if it has more now.
    undoes: int | None = None


class RunRow(Struct, frozen=True, gc=False):
    """The projection of a run, written in the same commit as its events."""

    run_id: str
    agent: str
    version: str  # or NO_VERSION
    tenant: str
    actor: str | None
    queue: str
    target: str | None
    input_digest: str
    status: Status
    waiting_for: str | None  # in words: "timer until …", "retry of charge (call 4) at …"
    # The time (µs) from which any worker may claim the run. None: the run is held, or finished, or waits for something
    # from outside.
    ready_at: int | None
    seq: int
    head: bytes  # hash of the event at seq
    epoch: int
    holder: str | None  # id of the worker that holds the run
    # How many times in a row the run was taken over from a dead worker without progress (`RowChange.progress`).
    crashes: int
    error: str | None
    created_at: int
    updated_at: int
    priority: int = 0
    attention: Reason | None = None  # why the run needs attention
    parent: str | None = None  # the run id of the parent
    parent_call: int | None = None
    # How the run's last holder was lost. 1: its lease ran out; 2: its process is gone; 0: the holder was not lost, or
    # the run was claimed again after the loss.
    lost: int = 0
    # How many other runs the lost worker held. Each of these runs may have killed the worker. If this run is a
    # suspect, only the other suspects count.
    lost_with: int = 0
    # JSON of a `Specimen`, if the run was imported from a file for people to look at. No worker drives it, and it
    # accepts no post. None: a run of this journal.
    specimen: str | None = None

    def check_not_restored(self) -> None:
        """Conflict if the run comes from a backup, and no person has let it go on since."""
        if self.attention == "restored":
            raise Conflict(
                f"run {self.run_id} was restored from a backup, and what it did since is unknown: a person has to let it go on",
                hint=f"see what it needs: {shell.command('why', self.run_id)}; then: {shell.command('unpause', self.run_id)}",
            )

    def check_live(self) -> None:
        """Raise Conflict if the run is a specimen.

        Every post calls this; triggers refuse all other writes to a specimen.
        """
        imported = self.imported
        if imported is not None and imported.fork_of is not None:
            raise Conflict(
                f"run {self.run_id} is a rehearsal, a fork of run {imported.fork_of}: no worker drives it, and it takes nothing",
                hint=f"for a fork with effects: {shell.command('fork', imported.fork_of)} --at {imported.at} --live, with the same --edit and "
                f"--input as the rehearsal ({shell.command('why', self.run_id)} names them)",
            )
        if self.specimen is not None:
            raise Conflict(
                f"run {self.run_id} is a specimen, an imported copy to look at: no worker drives it, and it accepts no post",
                hint="act on the run in the journal that it came from",
            )

    @property
    def imported(self) -> Specimen | None:
        """Where a specimen came from; None for a run of this journal. StoreCorrupt if the column was edited."""
        if self.specimen is None:
            return None
        try:
            return msgspec.json.decode(self.specimen, type=Specimen)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreCorrupt(
                f"the row of specimen {self.run_id} is damaged ({error})",
                hint=f"delete it and import it again: perdure prune --specimen {shell.quote(self.run_id)}",
            ) from None


class Specimen(Struct, frozen=True, gc=False, omit_defaults=True):
    """Where a specimen came from: from a file, or, if it is a stored rehearsal, from a run of this journal."""

    file_sha256: str  # the SHA-256 of the imported file; empty for a rehearsal
    exported_at: str
    imported_at: int
    by: str  # the person who imported it, or made the fork
    redacted: int = 0  # how many values of the whole file were redacted before it was written
    original_head: str | None = None  # only for a redacted copy: the head of the run in the original journal
    fork_of: str | None = None  # only of a stored rehearsal: the run that was forked
    at: int = 0  # … and the event after which the rehearsal begins


class Watched(Struct, frozen=True, gc=False):
    """What a caller that waits for a run looks at: the run's row, and the rows of the unfinished runs below it."""

    row: RunRow
    family: tuple[RunRow, ...] = ()


class OpenAttempt(Struct, frozen=True, gc=False):
    """An attempt that is under way."""

    call: int
    tool: str  # the name of the tool or the model
    attempt: int
    since: int  # µs
    progress: bytes | None = None  # JSON: what the attempt last reported with `call.heartbeat`, as it is stored


class Current(Struct, frozen=True, gc=False):
    """What a run's journal says about the present state of the run, beyond the columns of its row."""

    said: str | None = None  # the last status text of the agent
    failure: Failure | None = None  # why the run failed
    running: tuple[OpenAttempt, ...] = ()  # the attempts under way, by the number of their call


NO_VERSION = ""  # the version of a run that takes the version of the first worker that claims it


class Served(Struct, frozen=True, gc=False):
    """An agent and one version of its code. The worker that serves it has this code."""

    agent: str
    version: str


def serves(agents: Collection[Served], row: RunRow) -> bool:
    """Does a worker with these agents serve the run? Any version of its agent serves a run without a version."""
    if row.version == NO_VERSION:
        return any(one.agent == row.agent for one in agents)
    return Served(row.agent, row.version) in agents


class Lease(Struct, frozen=True, gc=False):
    """The right to write to one run. It is void as soon as another claim has a higher epoch."""

    run_id: str
    worker: str
    epoch: int
    nonce: bytes


class Claimed(Struct, frozen=True, gc=False):
    lease: Lease
    row: RunRow  # the run's row after the claim: row.seq is the seq of the event `run_claimed`
    events: tuple[Event, ...] | None = None  # the run's whole journal; None: not read with the claim
    post: tuple[InboxRow, ...] | None = None  # the run's inbox; None: not read with the claim
    takeover: bool = False  # the worker before did not release the run: it died, or its lease expired


class Append(Struct, frozen=True, gc=False):
    """Events of one run, to be committed whole or not at all.

    What follows from the events is written in the same commit:

    - an `approval_requested` creates the approval's row;
    - a `tool_call_initiated` that names an approval consumes that approval. The append is Refused unless the approval
      is approved, is not consumed, is for this very tool and digest of arguments, and has not expired. It must still
      be valid at the time of the event, and now (`at` plus the time that the append has waited);
    - a `child_started` creates the child's run;
    - a terminal event of a child posts a `child_finished` to its parent;
    - an event that people should know about gets a notice.
    """

    lease: Lease
    expected_seq: int  # the run's seq before this append
    events: tuple[Sealed, ...]  # may be empty: only the row changes
    blobs: tuple[bytes, ...] = ()  # content-addressed; written in the same commit as the events that name the blobs
    row: RowChange | None = None
    consumed: tuple[int, ...] = ()  # inbox rows that these events record
    left: tuple[int, ...] = ()  # inbox rows that the holder has seen and leaves in the inbox
    charge: Charge | None = None  # only for a run that has a budget, or whose parents have a budget
    # The worker's clock when this append was sent, new at every retry. The events may be older than `at`.
    at: int = 0


class Committed(Struct, frozen=True, gc=False):
    """The append is durable."""


class Refused(Struct, frozen=True, gc=False):
    """The guard did not hold: another worker has the run, or the run's seq has changed. Stop work on the run at once.

    If `why` begins with "approval ", the lease still holds: a call did not start, because its approval has expired.
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
    lease_us: int | None = None  # the worker's own lease_s; None: a version of perdure that did not record it
    # True: it is proven that the worker's process is gone. A worker that is neither alive nor dead is silent: it may
    # be suspended, or cut off from the database.
    dead: bool = False


class Backlog(Struct, frozen=True, gc=False):
    """One tenant's runs in one queue: how many wait for a worker, and how many are held."""

    queue: str
    tenant: str
    ready: int
    since: int | None  # when the run that has waited longest became ready (µs)
    held: int


class Unfinished(NamedTuple):
    """How many runs of an agent in a queue are in this status, and need attention for this reason."""

    agent: str
    queue: str
    status: Status
    attention: Reason | None
    runs: int


class Waiting(NamedTuple):
    """How many runs, or approvals, of an agent in a queue wait; and since when the first of them does (µs)."""

    agent: str
    queue: str
    number: int
    since: int


class StoreFigures(Struct, frozen=True, gc=False):
    """What metrics say about a database. Each list has a row for a group of runs, and none for a single run."""

    unfinished: Sequence[Unfinished]
    ready: Sequence[Waiting]  # runs that wait for a worker
    pending: Sequence[Waiting]  # approvals
    held: Mapping[str, int]  # worker → how many runs it holds


class ApprovalRow(Struct, frozen=True, gc=False):
    """The projection of an approval."""

    approval: str
    run_id: str
    call: int
    agent: str
    tenant: str
    actor: str | None
    asked_at: int
    standing: Standing  # the request in its present form, its status and the votes so far
    settled_at: int | None = None

    @property
    def status(self) -> ApprovalStatus:
        return self.standing.status

    @property
    def action(self) -> str:
        return self.standing.request.action

    @property
    def input(self) -> Any:
        """The proposed input, as a JSON value.

        None if the input is stored as a blob; then `app.load(row.standing.request.input)` returns the input.
        """
        inline = self.standing.request.input.inline
        return None if inline is None else codec.decode(inline)

    @property
    def reason(self) -> str | None:
        return self.standing.request.reason

    @property
    def by(self) -> tuple[str, ...]:
        """Who may decide. Empty: every person may decide."""
        return self.standing.request.by

    @property
    def quorum(self) -> int:
        return self.standing.request.quorum

    @property
    def voters(self) -> tuple[str, ...]:
        """Who has voted yes so far."""
        return self.standing.voters

    @property
    def editable(self) -> tuple[str, ...]:
        return self.standing.request.editable

    @property
    def expires_at(self) -> datetime | None:
        """When the approval expires, in UTC. None: never, or after the year 9999."""
        at = self.standing.request.expires_at
        try:
            return None if at is None else utc(at)
        except OverflowError:
            return None


class ApprovalFilter(Struct, frozen=True, gc=False):
    status: ApprovalStatus | None = "pending"  # None: all
    tenant: str | None = None
    run_id: str | None = None
    limit: int = 100


class NoticeRow(Struct, frozen=True, gc=False):
    """A notice: an event of a run, for people. It is sent at least once; `event.event_id` identifies duplicates."""

    notice_id: int
    row: RunRow
    event: Event
    attempts: int  # how many times the notice was taken for sending before


class KeptProgress(Struct, frozen=True, gc=False):
    """The progress of an attempt under way, to be stored under the lease of its worker."""

    lease: Lease
    call: int
    attempt: int
    progress: bytes  # canonical JSON


class EndedAttempt(Struct, frozen=True, gc=False):
    """An attempt whose end is in the journal, or that a later attempt has replaced. Its progress can be deleted."""

    run_id: str
    call: int
    attempt: int


class ProgressRow(Struct, frozen=True, gc=False):
    """The stored progress of an attempt. If the attempt has ended, readers ignore the row, and it is deleted soon."""

    run_id: str
    call: int
    attempt: int
    progress: bytes  # canonical JSON
    at: int  # when it was stored


ONE_GROUP_EACH = ("agent", "tenant", "run", "root")  # the groupings of costs in which each run is in exactly one group


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
    # How many model requests lost their answer because a worker died. What these requests used is unknown, and is not
    # in the sums above.
    lost: int = 0
    # wall_us: the time from the creation of each run to its last event so far. waiting_us: the part of that time in
    # which no worker held the run, because the run waited in its line or was parked. With "root", only the root's own
    # times count, because its children run at the same time. Both are 0 if a run can be in several groups.
    wall_us: int = 0
    waiting_us: int = 0


class Stored(Struct, frozen=True, gc=False):
    """One row of the events table exactly as it is stored, for verify: nothing is decoded, and nothing is trusted."""

    seq: Any
    event_id: Any
    ts: Any
    epoch: Any
    call: Any
    cause: Any
    data: Any
    hash: Any


BACKUP = "backup of "


class Moved(Struct, frozen=True, gc=False):
    """This journal is closed: it was moved, or is being moved, to another database; or it is a backup."""

    to_url: str  # without user and password
    by: str
    at: int
    done: bool  # False: the move is under way, or was interrupted

    @property
    def is_backup(self) -> bool:
        return self.to_url.startswith(BACKUP)

    @property
    def words(self) -> str:
        """The message for a process that still uses the closed journal."""
        at = datetime.fromtimestamp(self.at // 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        if self.is_backup:
            return f"this is a {self.to_url} from {at}, and can only be read: perdure restore FILE --to URL restores it"
        if self.done:
            return f"this journal was moved to {self.to_url} on {at}; use that one"
        return (
            f"this journal is being moved to {self.to_url} since {at}, and accepts no more writes; to finish the move, run the same "
            "`perdure copy` again; to undo it, add --abandon"
        )


class Member(Struct, frozen=True, gc=False):
    run_id: str
    seq: int
    head: bytes
    finished: bool


class Family(Struct, frozen=True, gc=False):
    """A root (a run without a parent), all runs below the root, and the root's undo run; the oldest run first."""

    place: int  # the place of the root in the order of roots
    root: str
    members: tuple[Member, ...]

    @property
    def finished(self) -> bool:
        return all(member.finished for member in self.members)


class Head(Struct, frozen=True, gc=False):
    """The last event of a run's journal. If the run was pruned: the last event that the journal had."""

    seq: int
    head: bytes
    pruned: bool


class Checkpoint(Struct, frozen=True, gc=False):
    """Where a run begins whose agent has taken checkpoints."""

    seq: int  # the last checkpoint; 0: the run went back to before it
    removed: int = 0  # the events from 2 to this one were removed; 0: none
    head: bytes | None = None  # the hash of that event
    by: str | None = None
    at: int | None = None


class Whole(Struct, frozen=True, gc=False):
    """A run with all rows that belong to the run, for a copy to another database. Database keys are not copied."""

    run: tuple[Any, ...]  # the columns of the run's row that are copied, run_id first
    ledger_of: str | None  # the id of the run whose budget applies first to this run; None: no budget applies
    events: list[Stored]
    approvals: list[tuple[Any, ...]]
    signals: list[tuple[Any, ...]]
    # No row, or one row. Its first column is the id of the run that has the next budget above.
    budgets: list[tuple[Any, ...]]
    reserved: list[tuple[Any, ...]]
    inbox: list[tuple[Any, ...]]
    notices: list[tuple[Any, ...]]
    blobs: list[str]  # digests of the blobs that the run has stored
    artifacts: list[str] = []  # ids of the artifacts that the run's family uses; only a root has them
    # Only in a move: those artifacts whose bytes stay outside of the database. Their rows are inserted with the run.
    outside: list[ArtifactRow] = []
    checkpoints: list[tuple[Any, ...]] = []  # no row, or one row
    labels: list[tuple[str, str]] = []  # (key, value)

    @property
    def run_id(self) -> str:
        run_id: str = self.run[0]
        return run_id


def undone(run_id: str, so: str) -> Conflict:
    """The error for a run that has an undo: its journal says that calls have results, and their effects are undone."""
    return Conflict(f"run {run_id} has been undone, or is being undone, by run {undo_id(run_id)}, so {so}; start a new run")


class Recorded(Struct, frozen=True, gc=False):
    """The journal of a run, for a fork: its events, and for each of them the bytes that were hashed."""

    run_id: str
    events: Sequence[Event]
    data: Sequence[bytes]


class NewFork(Struct, frozen=True, gc=False):
    """A fork to store: its row, its journal and what belongs to it."""

    whole: Whole  # its events are those that the parent does not have
    parent: str  # the run that was forked; the fork uses its blobs and artifacts too
    # The seq of each event that is the same in the parent → its hash in the journal of the fork. The database copies
    # these events from the parent.
    copied: Mapping[int, bytes]
    blobs: Sequence[bytes] = ()  # new ones

    @property
    def is_live(self) -> bool:
        return self.whole.run[-1] is None  # else it is a rehearsal, kept as a specimen


class ArtifactRow(Struct, frozen=True, gc=False):
    """An artifact: where its bytes are, and which run and tenant it belongs to."""

    artifact: str  # 32 hexadecimal digits, the last part of its URI
    run_id: str  # the run whose call saved it
    tenant: str
    call: int
    attempt: int
    # saving: the bytes are not complete; the attempt that saves them may have died. deleting: no family uses the
    # artifact any more, and its bytes are being deleted.
    state: Literal["saving", "saved", "deleting"]
    place: str | None  # the URL of a folder or a bucket; None: the bytes are in this database, in chunks
    object: str | None  # its name in that place
    sha256: bytes | None
    size: int | None
    content_type: str
    created_at: int


class RateRow(Struct, frozen=True, gc=False):
    key: str
    due: int
    paused_until: int
    seen_at: int


class Prunable(Struct, frozen=True, gc=False):
    """A family that ended long enough ago to be pruned."""

    place: int  # the place of the root in the order of roots
    root: str
    runs: int
    events: int


class Kept(Struct, frozen=True, gc=False):
    """A family that cannot be pruned now, and why."""

    root: str
    why: str


class Pruned(Struct, frozen=True, gc=False):
    """How much was deleted."""

    families: int
    runs: int
    events: int
    blobs: int
    artifacts: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(
            self.families + other.families,
            self.runs + other.runs,
            self.events + other.events,
            self.blobs + other.blobs,
            self.artifacts + other.artifacts,
        )


class Checkpointed(Struct, frozen=True, gc=False):
    """A run whose events before its last checkpoint can be removed."""

    place: int
    run_id: str
    status: Status
    updated_at: int
    events: int  # how many
    needed: str | None = None  # why they must stay for now, in words; None: they can be removed


class Tombstone(Struct, frozen=True, gc=False):
    """What is left of a run that was pruned."""

    run_id: str
    agent: str
    tenant: str
    # The run's status at its end. "returned": the run was a copy, deleted when the move was undone
    # (`perdure copy --abandon`).
    status: str
    events: int
    head: bytes
    created_at: int
    finished_at: int
    pruned_at: int
    by: str


class ApprovalRepair(Struct, frozen=True, gc=False):
    """The row of an approval, as the journal has it."""

    approval: str
    seq: int
    call: int
    action: str
    asked_at: int
    status: str
    deciders: tuple[str, ...]
    expires_at: int | None
    escalated: bool
    voters: tuple[str, ...]
    digest: str
    settled_by: str | None
    note: str | None
    settled_at: int | None


class Repair(Struct, frozen=True):
    """What has to be written, so that the rows of a run agree with its journal."""

    run_id: str
    seen: RunRow  # the row as it was when the repair was computed: if it has changed since, nothing is written
    row: dict[str, Any]  # the columns of the run's row that are wrong, with their right values
    approvals: tuple[ApprovalRepair, ...] = ()
    ledger: Ledger | None = None  # the run's own budget
    labels: dict[str, str] | None = None  # None: they are right
    words: tuple[str, ...] = ()  # each change, for people


class MissingHead(Struct, frozen=True, gc=False):
    """A run that has lost an event: the journal-wide chain has the event, and the journal does not have it.

    The run was not pruned.
    """

    number: int
    # The seq of the first event that the journal-wide chain has, and that is missing or different in the run's journal.
    first_seq: int
    last_seq: int
    name: str | None  # the run's id in the chain, if the missing events include its first event
    run_id: str | None  # the id of the run that has this number now; None if there is none
    seq: int | None  # the last event of that run


class ScheduleRow(Struct, frozen=True, gc=False):
    """The projection of a schedule's journal, written in the same commit as its events."""

    schedule_id: str
    agent: str
    queue: str
    due_at: int | None
    waits_for: str | None  # the run that must have ended before the next tick starts one
    state: bytes  # JSON of a `core.schedule.ScheduleState`
    seq: int
    head: bytes


class ScheduleChange(Struct, frozen=True, gc=False):
    """Events of one schedule, its row after them, and the run that they start, to be committed whole or not at all."""

    row: ScheduleRow  # as it is after the change
    expected_seq: int  # the schedule's seq before the change; 0: it is new
    events: tuple[ScheduleEvent, ...]
    start: NewRun | None = None
    cancel: tuple[str, CancelRequested, str] | None = None  # a run to cancel: its id, the event's body and id


class ScheduleCopy(Struct, frozen=True, gc=False):
    """A whole schedule, for a copy to another database."""

    row: ScheduleRow
    events: list[Stored]


class Batch(Struct, frozen=True, gc=False):
    """A bulk operation: what a person has ordered for many runs with one command."""

    batch: str
    verb: str
    query: str | None  # as it was typed; its relative times count from `at`. None: the runs were named one by one
    given: str  # JSON: the other arguments and options
    by: str
    at: int
    ended_at: int | None = None  # None: it was interrupted, or goes on


class Reading(Protocol):
    """All reads that the app, the command line and `inspect` need. Every store has them.

    An engine has the same reads (see perdure.engine.api). Every read blocks. If `remote` is true, a read may take
    long: then code on an event loop must call it from a thread.
    """

    url: str
    schema_version: int
    remote: bool  # true: a read crosses a network, so the event loop's own thread must never wait for a read

    @property
    def ahead_us(self) -> int:
        """How far the database's clock is ahead of this machine's clock (µs); 0 if both are the same clock."""

    def get(self, run_id: str) -> RunRow | None: ...

    def family(self, run_id: str) -> list[RunRow]:
        """The unfinished runs below this run: its children, their children, and so on."""

    def watched(self, run_ids: Collection[str], families: Collection[str]) -> dict[str, Watched]:
        """These runs by id, read in one statement. A run that does not exist is not in the answer.

        `families` are some of `run_ids`. For these runs, the answer also has the unfinished runs below them.
        """

    def watch(self, moved: Callable[[Collection[str] | None], None]) -> Callable[[], None]:
        """Call `moved`, from any thread, soon after a commit, with the ids of the runs that have changed.

        Returns a function that ends the calls. None instead of ids: any run may have changed.

        A call of `moved` is only a hint: it may come late, more than once, or not at all. So a watcher also polls
        `version`.
        """

    def read(self, run_id: str, after: int = 0, limit: int | None = None) -> list[Event]:
        """The events with seq > after, in order, at most `limit`. StoreCorrupt if an event cannot be decoded."""

    def recorded(self, run_id: str) -> Recorded:
        """All events of the run, with their bytes. StoreCorrupt if an event cannot be decoded."""

    def checkpoint(self, run_id: str) -> Checkpoint | None:
        """Where the run begins, if its agent has taken a checkpoint."""

    def removed(self) -> dict[str, tuple[int, bytes]]:
        """The runs whose events from 2 on were removed before a checkpoint: the last of these events, and its hash."""

    def read_many(self, after: Mapping[str, int], limit: int) -> dict[str, list[Event]]:
        """Like `read`, for several runs in one statement. `after`: run id → the seq of its last known event."""

    def current(self, run_ids: Sequence[str]) -> dict[str, Current]:
        """What these runs say and do now, in one query. A run that does not exist is not in the result.

        The journals are not decoded as a whole: this is for lists of runs, and for programs that poll.
        """

    def stored(self, run_id: str) -> list[Stored]:
        """The rows exactly as they are stored, for verify."""

    def hash_at(self, run_id: str, seq: int) -> bytes: ...

    def hashes(self, run_id: str, after: int, limit: int) -> list[bytes]:
        """The hashes of the events with seq > after, in order, at most `limit`."""

    def growing(self, after: Place = (0, 0), newest: Place = (0, 0), limit: int = 1000) -> list[tuple[Place, RunRow]]:
        """The runs after the place `after`, in order, each with its place.

        Up to the place `newest`, only runs that may have changed are returned: the unfinished runs, and the runs that
        were ever reopened in this database. A run that becomes visible later has a later place, whatever the clocks
        say, and a finished run changes only when it is reopened. So a reader that knows all runs up to `newest` gets
        every run that may have new events. A reader only compares places and passes them in again. The place right
        before (a, b) is (a, b - 1).
        """

    def blob(self, digest: str) -> bytes:
        """The blob, verified against its digest. StoreCorrupt if the blob is missing or does not match the digest."""

    def artifact(self, artifact: str) -> ArtifactRow | None: ...

    def artifact_chunk(self, artifact: str, number: int) -> bytes | None:
        """The chunk with this number (from 0) of an artifact in this database. None: there is no such chunk."""

    def may_open(self, artifact: str, run_id: str) -> bool:
        """Does the family of this run use the artifact: has it saved or got the artifact (by an input or a signal)?"""

    def artifacts_of(self, run_id: str) -> list[ArtifactRow]:
        """The artifacts that this run's own calls have saved, the oldest first."""

    def artifact_runs(self, after: str = "", limit: int = 100) -> list[str]:
        """The ids of the runs that have saved artifacts, in order, after the id `after`. Some runs may be pruned."""

    def approval(self, approval: str) -> ApprovalRow | None: ...

    def approvals(self, wanted: ApprovalFilter) -> list[ApprovalRow]:
        """The approvals that match, sorted by expiry (the soonest first), then by age (the oldest first).

        Approvals of specimens are left out, unless `run_id` names the specimen: no decision about them counts.
        """

    def unread(self, run_id: str) -> list[InboxRow]:
        """The inbox rows of this run that are not in its journal yet, in order of arrival. The run may be held or not.

        If the run has finished, these rows came too late to be read. Their senders were told that the post had
        arrived.
        """

    def progress(self, run_ids: Sequence[str]) -> list[ProgressRow]:
        """The stored progress of attempts of these runs, by call. It may be older than what the attempt last reported.

        A row counts only if the journal says that this very attempt is under way, or was cut off.
        """

    def labels(self, run_ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """The labels of each of these runs, by key."""

    def ledgers(self, run_id: str) -> list[Ledger]:
        """The budgets that apply to the run: first its own, then the budgets of its parents. Empty: no budget."""

    def over_budget(self, run_id: str) -> list[str]:
        """The unfinished runs that stopped because this run's budget was used up (`needs_attention`, `budget`)."""

    def costs(
        self, by: Literal["agent", "tenant", "model", "day", "run", "root", "tool"], *, since: int = 0, tenant: str | None = None
    ) -> list[CostRow]:
        """What runs have used, by group, the most expensive group first. With "root", children count for their root.

        The sums come from the journals: each attempt counts once, however often the run was replayed. Specimens are
        left out: they are copies, and their cost belongs to the database that they come from.
        """

    def workers(self, now: int, lease_us: int) -> list[WorkerRow]:
        """All workers. `alive` is judged by the lease that the worker has recorded; without one, by `lease_us`."""

    def backlog(self, now: int) -> list[Backlog]:
        """How many runs are ready and how many are held, per queue and tenant, sorted by queue and tenant.

        A tenant without a ready or a held run in a queue has no entry for that queue.
        """

    def suspects(self) -> dict[str, Group]:
        """The group of suspects of each worker that holds a suspect."""

    def tombstone(self, run_id: str) -> Tombstone | None: ...

    def tombstones(self, after: int = 0, limit: int = 1000) -> list[tuple[int, Tombstone]]:
        """The tombstones placed after `after`, each with its place, in the order in which they were written."""

    def chain(self, after: tuple[int, int], limit: int = 5000) -> list[ChainEntry]:
        """The entries of the journal-wide chain after (chain, n), in order."""

    def chain_ends(self) -> list[ChainEntry]:
        """The last linked entry of each chain."""

    def missing_heads(self, run_id: str | None = None) -> list[MissingHead]:
        """The runs whose journal lacks an event that the chain has. With `run_id`: only that run."""

    def unchained(self, run_id: str | None = None) -> dict[str, int]:
        """The runs without a holder whose last event is not in the chain: run id → seq. `run_id`: only that run."""

    def schedules(self) -> list[ScheduleRow]:
        """All schedules by id, also those that were removed: their journals stay."""

    def schedule(self, schedule_id: str) -> ScheduleRow | None: ...

    def schedule_events(self, schedule_id: str, after: int = 0) -> list[Stored]:
        """The events of the schedule with seq > after, exactly as they are stored."""

    def missing_schedule_heads(self) -> list[MissingHead]:
        """The schedules whose journal lacks an event that the journal-wide chain has."""

    def unchained_schedules(self) -> dict[str, int]:
        """The schedules whose last event is not in the journal-wide chain: id → seq."""

    def moved(self) -> Moved | None:
        """The database to which the journal is being moved, or was moved. None while the journal is open."""

    def check_open(self) -> None:
        """Ask the database whether the journal is open. StoreError if it is closed, or if there is no answer."""

    def facts(self) -> dict[str, str]:
        """Facts for `perdure doctor`: file, sizes, pragmas, schema version, library version."""

    def problems(self) -> list[str]:
        """What is wrong with the database as a whole, in words: events without a run, missing or changed guards.

        Damage inside one journal is found by verify, not here.
        """

    def version(self) -> int:
        """A number that changes whenever any process commits something. This is a cheap question."""

    def close(self) -> None: ...

    def figures(self, now: int) -> StoreFigures:
        """Figures for metrics: grouped counts, which an index serves.

        They are read beside all other work: a long count delays no worker of this process.
        """

    def find(self, query: Query, limit: int = 100, after: str | None = None, *, oldest_first: bool = False) -> list[tuple[str, RunRow]]:
        """The runs that match, the newest first, each with the cursor of the runs after it.

        With `after`, a cursor, the list goes on there: page by page, each run is in it once, however many were created
        at the same time and whatever has changed meanwhile. InvalidInput if it is no cursor, or of the other direction.
        """

    def count(self, query: Query, by: str = "status", limit: int = 1000) -> dict[str | None, int]:
        """How many of the runs that match are in each group: by a column of GROUPS in core/query.py, or by label.KEY.

        The largest groups come first, at most `limit`. None: the runs without an error, or without the label. Specimens
        do not count.
        """

    # `list` comes last: below it, the name `list` would mean this method and not the type.
    def list(self, query: Query = EVERYTHING, limit: int = 100) -> list[RunRow]:
        """The runs that match, the newest first."""


class JournalStore(Protocol):
    """Creates runs, appends to their journals under the guard, and rings a bell after commits."""

    remote: bool  # as in Reading

    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        """Create the run (True), or return the run that has this id already (False).

        Conflict if a run with this id was pruned, or is a specimen.
        """

    def create_run_on(self, connection: Any, new: NewRun) -> tuple[RunRow, bool]:
        """Like create_run, in the transaction that the caller has begun on this connection, and will end.

        If there is an error, nothing of the run is in that transaction. InvalidInput if the connection cannot be used.
        """

    def create_runs(self, news: Sequence[NewRun]) -> list[tuple[RunRow, bool]]:
        """Like create_run, for several runs in one commit. If there is an error, no run is created."""

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        """Commit all appends whose guard holds, in one transaction.

        Returns one answer for each append, in order. On return, the committed appends are durable.
        """

    def read_life(self, run_id: str) -> list[Event]:
        """What a worker replays: the run's first event, and the events from its last checkpoint on, or all events."""

    def transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]]) -> tuple[Appended, Any]:
        """In one transaction: check the guard, insert `head`, call `work` with the connection, insert its Append.

        If `work` raises, the transaction is rolled back and the caller gets the exception: nothing has happened. The
        connection refuses transaction control and any write to perdure's own tables.
        """

    def listen(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Call `ring`, from any thread, soon after a commit that leaves work for a worker.

        Returns a function that ends the calls.

        A ring is only a hint: it may come late, more than once, or never. So a listener also polls `version`.
        """


class LeaseStore(Protocol):
    """Workers and their leases: which worker holds which run."""

    def register(
        self,
        worker: str,
        name: str,
        pid: int,
        now: int,
        serves: Sequence[Served] = (),
        queues: Sequence[str] | None = None,
        lease_us: int | None = None,
    ) -> None:
        """Register a worker, or update what it serves. Take its liveness lock, which is freed when the worker dies.

        Other workers count this worker as silent after `lease_us` without a heartbeat; None: after their own lease.
        """

    def unregister(self, worker: str, now: int) -> None:
        """Remove a worker. Runs that it still holds become claimable."""

    def renew(self, worker: str, now: int) -> None:
        """A heartbeat: the leases of this worker last a full lease time from now on."""

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
        """Claim up to `limit` ready runs of the served agents in one commit.

        Each claimed run gets epoch + 1 and a `run_claimed` event. A run without a version takes the version in
        `served`; if that has several versions of the agent, the last of them.

        Only runs in `queues` are claimed (None: all queues). `limits` say how many runs of one queue, and of one
        tenant in that queue, all workers together may hold at a time. Tenants take turns: among the tenants with a
        ready run in a queue, the tenant whose last turn is longest ago is served first. Among the runs of one tenant
        in a queue, the run with the highest priority is claimed first, then the run that has been ready longest.

        With `run_id`: claim only that run, ready or not. It is an error if the run is finished (RunEnded), paused
        or a specimen (Conflict), of another version (WrongVersion) or held by a live worker (AlreadyRunning). If `limits` are given
        and leave no room for the run, nothing is claimed. With `below`: claim only ready runs below that run. With
        `run_id` or `below`, turns and `queues` do not apply.

        Runs with crashes >= 2 are suspects. No claim gives a worker more suspects than `core.suspects` allows: if a
        worker died with several suspects, the next worker may hold only half as many of them.
        """

    def reap(self, worker: str, lease_us: int, now: int) -> int:
        """Make the runs of dead workers claimable. Returns how many runs.

        A worker is dead if its lock is free, or if it sent no heartbeat for its lease: the longer of `lease_us` and
        the lease that it has recorded. The store measures this time with the monotonic clock, so a worker does not
        count as dead because a wall clock was set.
        """

    def held(self, worker: str) -> list[tuple[str, int]]:
        """The runs that this worker holds, each with the epoch of its lease."""

    def release_undriven(self, worker: str, runs: Sequence[tuple[str, int]], now: int) -> int:
        """Make these runs claimable, like the runs of a dead worker, if `worker` holds them under these epochs.

        Returns how many runs.

        A worker calls this for runs that it holds but does not drive, because the answer to its claim was lost.
        """

    def next_ready(self, served: Sequence[Served], queues: Sequence[str] | None = None) -> int | None:
        """When the next run of these agents becomes ready (µs). A time in the past: a run is ready now.

        None: no run of these agents has a time at which it becomes ready.
        """

    def parents_to_replay(self, served: Sequence[Served], now: int, *, but: Sequence[str] = ()) -> list[tuple[Served, Served, str]]:
        """The runs to replay: each has a served agent, and below it is a ready run whose agent is not served.

        The replay finds the agent of the child that leads to this ready run. Each entry is (agent and version of the
        parent, agent and version of the child, run id of one such parent). Runs in `but` are left out. Each pair of
        agents occurs once.
        """


class ScheduleStore(Protocol):
    """Schedules. No worker holds one: each change names the seq that its author has read, and only one such change counts."""

    def next_schedules(self, served: Sequence[Served], queues: Sequence[str] | None = None) -> list[ScheduleRow]:
        """The schedules of these agents and queues whose ticks are due next, the first one first: at most 20.

        A schedule that is paused, was removed, or waits for the end of a run is left out.
        """

    def change_schedule(self, change: ScheduleChange) -> Literal["done", "moved_on", "taken"]:
        """Commit the change. On "done" it is durable; otherwise nothing was written.

        "moved_on": the schedule has newer events than `expected_seq`. "taken": a run has the id of the run to start,
        or had it before it was pruned.
        """

    def take_in_schedules(self, copies: Sequence[ScheduleCopy]) -> int:
        """Insert whole schedules of another journal. Those that are here already are left out; Conflict if they differ.

        Returns how many were inserted.
        """


class ProgressStore(Protocol):
    """What attempts under way have reported. This is not part of the journals."""

    def keep_progress(self, kept: Sequence[KeptProgress], ended: Sequence[EndedAttempt], now: int) -> None:
        """Store the progress of attempts, and forget the progress of ended attempts, in one transaction.

        A progress is stored only if its worker holds the run under the epoch of the lease, and no later attempt of the
        call has a progress already. Otherwise nothing changes; this is no error.
        """


class InboxStore(Protocol):
    """Writes to a run from outside. If the run is held, its holder appends the event; else it is appended at once."""

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
        """Post an event to a run. True: the event was appended at once. False: the event is in the run's inbox.

        An event that is appended at once is sealed onto the head with the run's epoch and seq + 1. The run's status
        and ready_at become what `core.transitions` says; if `status` is given, the run gets that status instead. A
        run whose holder is dead (the holder's lock is free) counts as not held.

        What follows from the body is written in the same commit: a `budget_raised` raises the run's ledger, and a
        `run_adopted` changes the run's version. If a `tool_call_resolved` is appended at once, its charge is counted
        in the ledgers at once; otherwise the holder counts it. If the run has had a signal with the same topic and key
        before, nothing changes and the answer is True.

        `expect`, if given, is called with the run's row inside the transaction, and raises an error to refuse the
        post. Other errors: NotFound, RunEnded; Conflict for a specimen.
        """

    def end(self, run_id: str, body: AnyBody, *, event_id: str, now: int, expect: Callable[[RunRow], None] | None = None) -> None:
        """Append a terminal event to a run that is not held.

        The run's parent gets a `child_finished`; the run's children are cancelled.

        The amounts that the run still has reserved are freed, and the amounts in `RunCancelled.unsettled` are charged.
        `expect`, if given, is called with the run's row inside the transaction, and raises an error to refuse the end.
        Other errors: NotFound, RunEnded, AlreadyRunning; Conflict for a specimen.
        """

    def reopen(self, runs: Sequence[Reopen], *, now: int) -> None:
        """Append the events that reopen these runs, and make the runs ready: all of them in one transaction, or none.

        Conflict if a run has newer events than `Reopen.seen`, has succeeded, or is a specimen. Other errors: NotFound,
        AlreadyRunning.
        """

    def decide(self, approval: str, judgement: Judgement, *, event_id: str, now: int, tenant: str | None = None) -> ApprovalRow:
        """Judge a vote, an expiry or a withdrawal, and write what follows, in one transaction.

        An approval changes only here, except that a call consumes it, and that the end of its run withdraws it.

        `core.approval.judge` gets the standing as it is in that transaction, and raises an error to refuse. A vote is
        refused if the approval has expired by the time the vote is written. The new standing is stored, and its event
        is posted to the run as `post` does. Of two decisions at the same time, the second is judged by the standing
        after the first. Other errors: NotFound, also for an approval of another tenant; RunEnded; Conflict for an
        approval of a specimen.
        """

    def inbox(self, worker: str) -> list[InboxRow]:
        """The inbox rows of the runs that this worker holds, in order of arrival."""


class ArtifactStore(Protocol):
    """Artifacts: their rows, and the bytes of those that lie in this database."""

    def begin_artifact(self, new: ArtifactRow) -> None:
        """Insert the artifact's row before its first byte is written anywhere. The run's family may open the artifact.

        `tenant` and `state` of `new` are ignored: the tenant is that of the run. NotFound if there is no such run.
        """

    def add_chunk(self, artifact: str, number: int, data: bytes) -> None:
        """Write the next chunk. Conflict if the artifact is not being saved any more: it was deleted as an orphan."""

    def place_artifact(self, artifact: str, place: str, name: str) -> None:
        """From now on the bytes are in that place. Chunks in this database are deleted. Conflict as in add_chunk."""

    def finish_artifact(self, artifact: str, sha256: bytes, size: int) -> None:
        """The bytes are complete and durable: the artifact can be opened. Conflict as in add_chunk."""

    def use_artifacts(self, run_id: str, artifacts: Sequence[str]) -> None:
        """Let the family of this run open these artifacts.

        Artifacts that are not saved or have another tenant are left out.
        """

    def doom_artifact(self, artifact: str) -> bool:
        """Mark an orphan for deletion: no family may open it from now on, and `doomed_artifacts` returns it.

        False: the artifact does not exist any more, or a family that has not saved it uses it.
        """

    def doomed_artifacts(self, limit: int = 100) -> list[ArtifactRow]:
        """Artifacts whose bytes are to be deleted."""

    def delete_artifact(self, artifact: str) -> None:
        """Delete the row and the chunks of a doomed artifact. Bytes in another place must be deleted before."""

    def take_in_artifact(self, row: ArtifactRow, chunks: Iterable[bytes]) -> None:
        """Insert an artifact of another journal, before its run. It can be opened when `take_in` has inserted the run.

        If an interrupted copy has left an incomplete artifact, it is replaced. If the artifact is already saved here,
        nothing happens.
        """

    def outside_artifacts(self, after: str = "", limit: int = 100) -> list[ArtifactRow]:
        """The saved artifacts whose bytes are in a folder or bucket, in order of their ids, after the id `after`."""

    def artifact_families(self, artifact: str) -> list[str]:
        """The ids of the roots of all families that use the artifact."""


class LimitStore(Protocol):
    """Rate limits and budgets, over all workers."""

    def admit(self, rate: Rate, now: int) -> int:
        """Take the next place under a rate limit, which all workers share.

        Returns the time (µs) from which the attempt may start.
        """

    def hold_back(self, key: str, until: int) -> None:
        """No attempt under this rate's key starts before `until`."""

    def reserved(self, run_id: str) -> Amounts:
        """The amounts that the ledgers have reserved for the run's own attempts."""


class OutboxStore(Protocol):
    """Notices for people: written in the commit of their event, sent at least once."""

    def take_notices(self, now: int, limit: int, hold_us: int) -> list[NoticeRow]:
        """Take notices that are due. For the next `hold_us`, no other caller gets them.

        If the caller dies, the notices are due again after `hold_us`.
        """

    def notice_done(self, notice_id: int) -> None: ...

    def notice_failed(self, notice_id: int, *, next_at: int, error: str) -> None: ...

    def next_notice(self) -> int | None:
        """When the next notice is due (µs)."""


class BatchStore(Protocol):
    """Bulk operations. The events of the runs name their batch; these rows say what was ordered."""

    def open_batch(self, new: Batch) -> None: ...

    def batch(self, batch: str) -> Batch | None: ...

    def interrupted_batches(self, verb: str) -> list[Batch]:
        """The batches of this verb that have not ended, the newest first."""

    def end_batch(self, batch: str, now: int) -> None:
        """Each run of the batch was looked at: the batch cannot be continued any more."""


class ArchiveStore(Protocol):
    """Moves journals to another database, prunes families, repairs rows, and restores the schema."""

    def restore_schema(self, *, check: bool = False) -> list[str]:
        """Create again the triggers and indexes of the schema that are missing or were changed.

        Returns each of them in words. With `check`, nothing is changed.
        """

    def repair(self, repair: Repair) -> None:
        """Write the rows of a run as its journal has them, in one transaction. Events are not touched.

        AlreadyRunning if a worker that is not known to be dead holds the run. Conflict if the run has changed since
        the repair was computed.
        """

    def close_journal(self, to_url: str, *, by: str, now: int, lease_us: int) -> Moved:
        """Close the journal for a move. From then on writes to runs, and new workers, are refused with a StoreError.

        First, the runs of dead workers become claimable. If workers are alive: AlreadyRunning, which names them. If
        the journal is already closed for the same destination, nothing changes; if it is closed for another
        destination, that is a Conflict.
        """

    def finish_move(self) -> None:
        """Mark the move as finished: everything was copied, and the journal stays closed for ever."""

    def reopen_journal(self) -> None:
        """Undo a move; Conflict if the move has finished. The caller has made sure that no copy is in use."""

    def snapshot_to(self, file: Path) -> AbstractContextManager[bool]:
        """True: the whole database is in the new file. False: inside, all reads see the database as it was at the beginning.

        Other processes may write meanwhile.
        """

    def mark_backup(self, of: str, *, by: str, now: int) -> None:
        """Close this journal: it is a backup of another one, and nothing is written to it or driven from it any more."""

    def count_runs(self) -> int: ...

    def other_tables(self) -> list[str]:
        """The tables in the same database that are not part of the journal, such as tables of transaction tools."""

    def families(self, after: int = 0, limit: int = 500) -> list[Family]:
        """Families whose root is placed after `after`, in the order in which they began."""

    def heads(self, run_ids: Sequence[str]) -> dict[str, Head]:
        """The last event of each of these runs, if this database has the run or its tombstone."""

    def wholes(self, run_ids: Sequence[str]) -> list[Whole]:
        """These runs with everything that belongs to them, the oldest run first."""

    def take_in(self, parts: Callable[[], Iterable[Sequence[Whole]]]) -> None:
        """Insert whole runs, parents before children, in one transaction.

        Conflict if an id is taken; then nothing is inserted.

        `parts` may be called again: if the database rolls the transaction back because of another transaction, the
        whole work is repeated.
        """

    def take_in_specimen(
        self, wholes: Sequence[Whole], blobs: Sequence[bytes], artifacts: Callable[[], Iterable[tuple[ArtifactRow, Iterable[bytes]]]]
    ) -> None:
        """Insert a family of specimens, parents before children, with its blobs and artifacts, in one transaction.

        Conflict if an id is taken, or belonged to a run that was pruned; then nothing is inserted. `artifacts` may be
        called again, like the `parts` of `take_in`.
        """

    def insert_fork(self, new: NewFork) -> None:
        """Insert a fork in one transaction, with the blobs and artifacts that it shares with its parent.

        Conflict if the id is taken, or belonged to a run that was pruned; NotFound if the parent was pruned meanwhile.
        """

    def missing_blobs(self, digests: Iterable[str]) -> list[str]:
        """The digests among these whose blobs are not in this database."""

    def put_blobs(self, blobs: Sequence[bytes]) -> None:
        """Store blobs, before the runs that name them are inserted."""

    def delete_copies(self, families: Sequence[Sequence[tuple[str, int, bytes]]], *, by: str, now: int) -> list[str]:
        """Delete copied families again, if they are exactly as they were copied.

        Each family is a list of (run id, seq, head), the root first.

        All families are deleted in one transaction. If runs have continued since they were copied, nothing is
        deleted, and the answer names these runs. A family that is not in this database is skipped. The ids of the
        deleted runs can be used again.
        """

    def delete_specimens(self, roots: Sequence[str], *, by: str, now: int) -> Pruned:
        """Delete these families of specimens, in one transaction. The ids of the deleted runs can be used again.

        NotFound, or Conflict if a run is no specimen; then nothing is deleted.
        """

    def rates(self) -> list[RateRow]: ...

    def take_in_rates(self, rates: Sequence[RateRow]) -> None: ...

    def prunable(self, before: int, statuses: Sequence[str], *, after: int = 0, limit: int = 100) -> list[Prunable]:
        """Families whose root is placed after `after`, that ended before `before`, and have no notice left to send.

        The root of each family has one of these statuses. Specimens are left out: `delete_specimens` deletes them.
        """

    def judged(self, roots: Sequence[str], before: int) -> list[Prunable | Kept]:
        """Which of these families can be pruned: all runs ended before `before`, and there is no notice left to send."""

    def checkpointed(self, *, after: int = 0, limit: int = 100) -> list[Checkpointed]:
        """The runs without a holder that have events before their last checkpoint, in order, after the place `after`."""

    def remove_before_checkpoint(self, run_id: str, *, by: str, now: int) -> Pruned:
        """Remove the events between the run's first event and its last checkpoint.

        Conflict if something still needs these events: a notice that was not sent, or an undo that has not ended.
        """

    def prune(self, roots: Sequence[str], before: int, *, by: str, now: int) -> Pruned:
        """Delete these families in one transaction, with the blobs that no other run uses. Each run gets a tombstone.

        Artifacts that no other family uses become doomed (`doomed_artifacts`).

        A family that has an unfinished run again, for example an undo run, is not deleted.
        """

    def take_in_tombstones(self, tombstones: Sequence[Tombstone]) -> None:
        """Insert the tombstones of a journal that moves to this database.

        A run that already has a tombstone here is left out.
        """


class Store(
    Reading,
    JournalStore,
    LeaseStore,
    ScheduleStore,
    ProgressStore,
    InboxStore,
    ArtifactStore,
    LimitStore,
    OutboxStore,
    BatchStore,
    ArchiveStore,
    Protocol,
):
    """The journal's database. Every method may be called from any thread and may block."""

    # How many seconds after the loss of a worker's connection the other workers take over its runs. inf: they cannot
    # see the loss of a connection.
    cut_off_after_s: float
    pause_s: float  # after an outage, a process may wait up to this many seconds before it tries the database again
