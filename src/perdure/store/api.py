"""The Store protocol: what a journal's database must do, and nothing more.

Blocking, thread-safe, and one commit path: `append` checks the guard (run, epoch, nonce, expected seq) and inserts in one
transaction. Leases say who should work; the guard says who may write. The conformance suite in perdure.testing holds every
implementation to what is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from perdure.core.chain import Sealed
from perdure.core.events import AnyBody, Event
from perdure.core.state import FINISHED as FINISHED
from perdure.core.state import Status as Status


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


class Lease(Struct, frozen=True, gc=False):
    """The right to write one run: refused as soon as somebody else has a higher epoch."""

    run_id: str
    worker: str
    epoch: int
    nonce: bytes


class Claimed(Struct, frozen=True, gc=False):
    lease: Lease
    row: RunRow  # as of after the claim: row.seq is the seq of its `run_claimed`


class RowChange(Struct, frozen=True, gc=False):
    """What an append does to the projection, besides seq, head and updated_at."""

    status: Status
    waiting_for: str | None = None
    ready_at: int | None = None
    error: str | None = None
    release: bool = False  # give the run up: holder := NULL. With unread inbox rows it is ready at once, whatever ready_at says
    progress: bool = False  # a completion is among the events: crashes := 0


class Append(Struct, frozen=True, gc=False):
    """Events of one run, to be committed whole or not at all."""

    lease: Lease
    expected_seq: int  # the run's seq before this append
    events: tuple[Sealed, ...]  # may be empty: only the row changes
    blobs: tuple[bytes, ...] = ()  # content-addressed; in the same commit as the events that name them
    row: RowChange | None = None
    consumed: tuple[int, ...] = ()  # inbox rows that these events stand for
    left: tuple[int, ...] = ()  # inbox rows that the holder has seen and leaves where they are


class Committed(Struct, frozen=True, gc=False):
    """The append is durable."""


class Refused(Struct, frozen=True, gc=False):
    """The guard did not hold: somebody else has the run, or its seq has moved. Stop working on it at once."""

    why: str


Appended = Committed | Refused


class InboxRow(Struct, frozen=True, gc=False):
    """Something from outside (a cancel, a resolution) for a run that a worker holds: its holder journals it."""

    inbox_id: int
    run_id: str
    call: int | None
    body: AnyBody | None  # None: it was written by a newer version and cannot be decoded here


class WorkerRow(Struct, frozen=True, gc=False):
    worker: str
    name: str  # "host:pid"
    pid: int
    started_at: int
    beat_at: int
    alive: bool
    runs: int


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


class Store(Protocol):
    """The journal's database. Every method may be called from any thread and may block."""

    url: str

    # -- runs ---------------------------------------------------------------------------------------------------------
    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        """Create the run (True), or return the one that has this id already (False)."""

    def get(self, run_id: str) -> RunRow | None: ...

    # -- the journal --------------------------------------------------------------------------------------------------
    def append(self, batch: Sequence[Append]) -> list[Appended]:
        """Commit all whose guard holds, in one transaction; an answer for each, in order. Durable when it returns."""

    def transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]]) -> tuple[Appended, Any]:
        """One transaction: check the guard and insert `head`, call work(connection), insert the Append it returns, commit.

        When work raises, everything is rolled back and the exception goes up: nothing has happened. The connection refuses
        transaction control and any write to perdure's own tables.
        """

    def read(self, run_id: str, after: int = 0) -> list[Event]:
        """The events with seq > after, in order. StoreCorrupt when one cannot be decoded."""

    def stored(self, run_id: str) -> list[Stored]:
        """The rows exactly as they lie there, for verify."""

    def hash_at(self, run_id: str, seq: int) -> bytes: ...

    def growing(self, after: int = 0, newest: int = 0, limit: int = 1000) -> list[tuple[int, RunRow]]:
        """The runs numbered above `after` that are numbered above `newest` or have not finished, each with its number, in that order.

        Numbers follow the order of creation, whatever the clocks say, and a finished run never changes: whoever knows all runs up
        to `newest` learns from this what may have grown since, and misses nothing.
        """

    def blob(self, digest: str) -> bytes:
        """The blob, verified against its digest; StoreCorrupt when it is missing or differs."""

    # -- who works ----------------------------------------------------------------------------------------------------
    def register(self, worker: str, name: str, pid: int, now: int) -> None:
        """Announce a worker and take its liveness lock, which the kernel frees when the process dies."""

    def unregister(self, worker: str, now: int) -> None:
        """Forget a worker; runs that it still holds become claimable."""

    def renew(self, worker: str, now: int) -> None:
        """A sign of life: leases of this worker count from now."""

    def claim(self, worker: str, served: Sequence[str], limit: int, now: int, *, run_id: str | None = None) -> list[Claimed]:
        """Take up to `limit` ready runs of the served agents, each with epoch + 1 and a `run_claimed` event, in one commit.

        With run_id: that run alone, ready or not, unless it is finished (RunEnded) or a live worker holds it (AlreadyRunning).
        Runs with crashes >= 2 are suspects: at most one of them is claimed while this worker holds another suspect.
        """

    def reap(self, worker: str, lease_us: int, now: int) -> int:
        """Make the runs of dead workers (lock free, or no sign of life for lease_us) claimable; how many."""

    def workers(self, now: int, lease_us: int) -> list[WorkerRow]: ...

    # -- from outside -------------------------------------------------------------------------------------------------
    def post(
        self, run_id: str, call: int | None, body: AnyBody, *, event_id: str, now: int, status: Status, expect: Callable[[RunRow], None]
    ) -> bool:
        """Hand something to a run: appended at once when nobody holds it (True), else put in its inbox for the holder (False).

        Appended at once means: sealed onto the head with the run's epoch, seq + 1, status as given, ready_at = now. A holder that
        is dead (its lock is free) does not count as one.

        `expect` is called with the run's row inside the transaction and raises to refuse. NotFound, RunEnded.
        """

    def inbox(self, worker: str) -> list[InboxRow]:
        """What has arrived for the runs that this worker holds, in order of arrival."""

    def next_ready(self, served: Sequence[str]) -> int | None:
        """When the next run of these agents becomes ready (µs); in the past if one is ready now; None if none will by itself."""

    def version(self) -> int:
        """A number that changes when anything was committed, by any process. Cheap: asked many times a second."""

    # -- house --------------------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, str]:
        """What `doctor` shows: file, sizes, pragmas, schema version, library version."""

    def problems(self) -> list[str]:
        """What is wrong with the database as a whole, in words: journals whose run is gone, guards that are missing or changed.

        What is wrong inside a journal is verify's to find.
        """

    def close(self) -> None: ...

    # Last, because inside the class the name `list` means this method from here on.
    def list(self, wanted: Filter) -> list[RunRow]:
        """Newest first."""
