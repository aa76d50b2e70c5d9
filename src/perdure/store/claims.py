"""Who works on what: workers, leases, and runs that change hands."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

import apsw
import msgspec

from perdure.core.chain import seal
from perdure.core.events import Event, RunClaimed
from perdure.errors import AlreadyRunning, NotFound, RunEnded, UnknownAgent
from perdure.store.api import FINISHED, Claimed, Lease, RunRow, WorkerRow
from perdure.store.database import Database
from perdure.store.journal import Journal
from perdure.store.liveness import Liveness
from perdure.store.queries import QUERIES
from perdure.store.rows import Row, event_row, run_row

SUSPECT_CRASHES = 2
_LEASE_RAN_OUT, _PROVEN_DEAD = 1, 2  # perdure_runs.lost


class Claims:
    """Leases on runs, and the signs of life of those who hold them."""

    def __init__(self, database: Database, journal: Journal, liveness: Liveness) -> None:
        self._database = database
        self._journal = journal
        self._liveness = liveness

    def register(self, worker: str, name: str, pid: int, now: int) -> None:
        # The lock first: whoever sees the row can rely on it.
        self._liveness.hold(worker)
        try:
            self._database.write(
                lambda cursor: cursor.execute(QUERIES["insert_worker"], {"worker": worker, "name": name, "pid": pid, "now": now}),
                lambda cursor, _: cursor.execute(QUERIES["worker_by_id"], (worker,)).fetchone() is not None,
            )
        except BaseException:
            self._liveness.free(worker)
            raise

    def unregister(self, worker: str, now: int) -> None:
        """A run that was not given up before is a takeover for whoever claims it: its calls may have been in flight."""

        def leave(cursor: apsw.Cursor) -> None:
            cursor.execute(QUERIES["lose_runs"], {"worker": worker, "now": now, "lost": _LEASE_RAN_OUT})
            cursor.execute(QUERIES["delete_worker"], (worker,))

        self._database.write(leave, lambda cursor, _: cursor.execute(QUERIES["worker_by_id"], (worker,)).fetchone() is None)
        self._liveness.free(worker)

    def renew(self, worker: str, now: int) -> None:
        self._liveness.refresh(worker)

        def beat(cursor: apsw.Cursor) -> None:
            cursor.execute(QUERIES["beat"], (now, worker))
            if cursor.connection.changes() != 1:
                raise NotFound(
                    f"worker {worker} is not registered (any more), so that it holds nothing that could be renewed; register it again"
                )

        self._database.write(beat, lambda cursor, _: False)

    def claim(self, worker: str, served: Sequence[str], limit: int, now: int, run_id: str | None) -> list[Claimed]:
        def take(cursor: apsw.Cursor) -> list[tuple[int, Claimed]]:
            registered: Row | None = cursor.execute(QUERIES["worker_by_id"], (worker,)).fetchone()
            if registered is None:
                raise NotFound(f"worker {worker} is not registered; register it before it claims anything")
            found = self._ready(cursor, worker, served, limit, now) if run_id is None else [self._this_one(cursor, served, run_id)]
            return [(row[19], _take(cursor, row, worker, registered[0], now)) for row in found]

        def arrived(cursor: apsw.Cursor, taken: list[tuple[int, Claimed]]) -> bool:
            # The nonce is of this claim alone.
            return any(cursor.execute(QUERIES["guard_of_run"], (key,)).fetchall()[0][4] == claimed.lease.nonce for key, claimed in taken)

        taken = self._database.write(take, arrived)
        for key, claimed in taken:
            self._journal.remember(claimed.lease.run_id, key)
        return [claimed for _, claimed in taken]

    def reap(self, worker: str, lease_us: int, now: int) -> int:
        # Nobody declares itself dead: a worker that asks is alive, and its renewer decides about its own leases.
        rows = [row for row in self._database.read("list_workers") if row[0] != worker]
        gone = [row[0] for row in rows if self._liveness.is_dead(row[0])]
        silent = [row[0] for row in rows if row[4] < now - lease_us and row[0] not in gone]
        orphaned = [holder for (holder,) in self._database.read("holders_without_worker")]
        if not (gone or silent or orphaned):
            return 0

        def lose(cursor: apsw.Cursor) -> int:
            before = cursor.connection.total_changes()
            for dead in gone:
                cursor.execute(QUERIES["lose_runs"], {"worker": dead, "now": now, "lost": _PROVEN_DEAD})
            for missing in orphaned:
                cursor.execute(QUERIES["lose_runs"], {"worker": missing, "now": now, "lost": _LEASE_RAN_OUT})
            for mute in silent:
                # Its process exists and may wake up: the row stays, so that its next sign of life counts again.
                cursor.execute(QUERIES["lose_runs_of_silent_worker"], {"worker": mute, "now": now, "before": now - lease_us})
            lost = cursor.connection.total_changes() - before
            cursor.executemany(QUERIES["delete_worker"], [(dead,) for dead in gone])
            return lost

        lost = self._database.write(lose, lambda cursor, _: False)
        for dead in gone:
            self._liveness.forget(dead)
        return lost

    def workers(self, now: int, lease_us: int) -> list[WorkerRow]:
        return [
            WorkerRow(worker, name, pid, started_at, beat_at, beat_at >= now - lease_us and not self._liveness.is_dead(worker), runs)
            for worker, name, pid, started_at, beat_at, runs in self._database.read("list_workers")
        ]

    def holds(self, holder: str | None) -> bool:
        """Whether somebody who lives holds it; a dead holder does not count as one."""
        return holder is not None and not self._liveness.is_dead(holder)

    def _ready(self, cursor: apsw.Cursor, worker: str, served: Sequence[str], limit: int, now: int) -> list[Row]:
        wanted = {"worker": worker, "served": msgspec.json.encode(list(served)).decode(), "limit": limit, "now": now}
        rows = cursor.execute(QUERIES["claimable_runs"], wanted).fetchall()
        suspects = [row for row in rows if _crashes_if_taken(row) >= SUSPECT_CRASHES]
        # One suspect at a time: should it kill this worker too, the others are not blamed for it.
        return [row for row in rows if row not in suspects[1:]]

    def _this_one(self, cursor: apsw.Cursor, served: Sequence[str], run_id: str) -> Row:
        found: Row | None = cursor.execute(QUERIES["run_by_id"], (run_id,)).fetchone()
        if found is None:
            raise NotFound(f"there is no run {run_id}; `perdure list` shows those that there are")
        row = run_row(found)
        if row.status in FINISHED:
            raise RunEnded(f"run {run_id} has finished ({row.status}) and cannot be resumed; start a new one, or fork it")
        if row.agent not in served:
            raise UnknownAgent(
                f"run {run_id} belongs to agent {row.agent!r}, which this worker does not serve; start one with it: perdure worker FILE.py"
            )
        if row.holder is None:
            return found
        if not self._liveness.is_dead(row.holder):
            name, beat_at = cursor.execute(QUERIES["worker_by_id"], (row.holder,)).fetchone() or (row.holder, row.updated_at)
            seen = datetime.fromtimestamp(beat_at / 1e6, UTC).isoformat(timespec="seconds")
            raise AlreadyRunning(f"run {run_id} is held by worker {name}, last seen {seen}; wait for it, or stop that process")
        return (*found[:20], _PROVEN_DEAD)


def _crashes_if_taken(row: Row) -> int:
    crashes: int = row[15]
    lost: int = row[20]
    return crashes + (lost > 0)


def _take(cursor: apsw.Cursor, found: Row, worker: str, name: str, now: int) -> Claimed:
    row, key, lost = run_row(found), found[19], found[20]
    body = RunClaimed(worker=worker, name=name, takeover=lost > 0, proven_dead=lost == _PROVEN_DEAD)
    epoch, seq, nonce = row.epoch + 1, row.seq + 1, secrets.token_bytes(16)
    sealed = seal(row.head, Event(seq, uuid.uuid4().hex, now, epoch, None, row.seq, body))
    crashes = _crashes_if_taken(found)
    values = {"id": key, "epoch": epoch, "nonce": nonce, "worker": worker, "seq": seq, "head": sealed.hash, "crashes": crashes, "now": now}
    cursor.execute(QUERIES["claim_run"], values)
    cursor.execute(QUERIES["insert_event"], event_row(key, sealed))
    after: RunRow = msgspec.structs.replace(
        row,
        status=row.status if row.status == "cancelling" else "running",
        waiting_for=None,
        ready_at=None,
        seq=seq,
        head=sealed.hash,
        epoch=epoch,
        holder=worker,
        crashes=crashes,
        error=None,
        updated_at=max(row.updated_at, now),
    )
    return Claimed(Lease(row.run_id, worker, epoch, nonce), after)
