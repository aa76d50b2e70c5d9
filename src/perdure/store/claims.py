"""Claims: workers, leases, heartbeats, and the runs that are lost with a dead worker.

A lost run can be claimed at once. Its row stores how many other runs were lost together with it (`lost_with`), since
each of these runs may have killed the worker. The count is too small if the store takes the runs from the dead worker
one by one. This happens on PostgreSQL if another transaction has locked a run at that moment, and on both stores if a
run got a post before the death was noticed. Both are rare, and a run is wrongly blamed only after several such deaths
in a row.
"""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

import msgspec

from perdure import shell
from perdure.core.events import Event, RunClaimed
from perdure.core.identity import seal
from perdure.core.suspects import SUSPECT_CRASHES, Group
from perdure.errors import AlreadyRunning, Conflict, NotFound, RunEnded, StoreCorrupt, UnknownAgent, WrongVersion
from perdure.settings import Queue
from perdure.store.api import FINISHED, NO_VERSION, Backlog, Claimed, Lease, RunRow, Served, WorkerRow
from perdure.store.cursor import Cursor, Row
from perdure.store.part import Means, Part
from perdure.store.queues import Choice, HeldSuspects, Kind, Room, line_of, version_taken, which
from perdure.store.rows import as_lost, check_not_ended, event_from, event_row, has_ended, key_of, run_row

log = logging.getLogger("perdure.store")
LEASE_RAN_OUT, PROVEN_DEAD = 1, 2  # the values of perdure_runs.lost


class Load(NamedTuple):
    """How many runs a worker holds, and how many of them are suspects."""

    runs: int
    suspects: int

    def beside(self, crashes: int) -> int:
        """How many other runs may be to blame, if a run with this number of crashes is lost with the worker."""
        return max((self.suspects if crashes >= SUSPECT_CRASHES else self.runs) - 1, 0)


def load_of(cursor: Cursor, worker: str) -> Load:
    runs, suspects = cursor.all("load_of_worker", (worker,))[0]
    return Load(runs, suspects)


def lose_runs(cursor: Cursor, worker: str, now: int, lost: int) -> int:
    """Make all runs of the worker claimable, and mark them as lost. Returns how many runs."""
    return cursor.change("lose_runs", {**_values(cursor, worker, now), "lost": lost})


def lose_runs_of_silent_worker(cursor: Cursor, worker: str, now: int, beat_at: int) -> int:
    """Like lose_runs. If the worker has sent another heartbeat since `beat_at`, nothing is changed."""
    return cursor.change("lose_runs_of_silent_worker", {**_values(cursor, worker, now), "lost": LEASE_RAN_OUT, "beat_at": beat_at})


def lose_some(cursor: Cursor, worker: str, now: int, runs: Iterable[tuple[str, int]]) -> int:
    """Like lose_runs, for these runs alone. A run that was claimed again has another epoch, and is not changed."""
    values = {**_values(cursor, worker, now), "lost": LEASE_RAN_OUT}
    return sum(cursor.change("lose_run", {**values, "run_id": run_id, "epoch": epoch}) for run_id, epoch in sorted(runs))


def _values(cursor: Cursor, worker: str, now: int) -> Mapping[str, object]:
    # Count the runs before the statement that marks them as lost. Inside that statement, SQLite would count only the
    # runs that the worker still holds.
    load = load_of(cursor, worker)
    return {"worker": worker, "now": now, "beside": load.beside(0), "beside_suspects": load.beside(SUSPECT_CRASHES)}


# -- workers, leases and claims


T = TypeVar("T")
_pairs = msgspec.json.Decoder(tuple[tuple[str, str], ...]).decode
_texts = msgspec.json.Decoder(tuple[str, ...]).decode
# If this process has not yet observed a worker, and the worker's last heartbeat is older than this many leases, the
# worker counts as dead.
LONG_AGO = 10


class _Beat(NamedTuple):
    """A worker's last heartbeat, as this process observed it."""

    at: int  # the time of the heartbeat, as the worker's row says
    since_s: float  # when this process first saw this heartbeat, by the monotonic clock
    ahead_s: float  # how far the wall clock was ahead of the monotonic clock when this process first saw it
    heard: bool  # this process has seen an earlier heartbeat too, so the worker was alive meanwhile

    @classmethod
    def seen(cls, before: _Beat | None, at: int, now_s: float, ahead_s: float) -> _Beat:
        return before if before is not None and before.at == at else cls(at, now_s, ahead_s, before is not None)

    def is_silent(self, now_s: float, ahead_s: float, lease_s: float, *, long_gone: bool) -> bool:
        is_steady = abs(ahead_s - self.ahead_s) < lease_s / 2  # False: the wall clock was set meanwhile
        return now_s - self.since_s >= lease_s or (long_gone and not self.heard and is_steady)


class Claims(Part):
    """Leases on runs, and the heartbeats of the workers that hold them."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._beats: dict[str, _Beat] = {}  # the last heartbeats of the other workers
        self._told: set[str] = set()  # the runs with an edited row that this process has logged
        self._lines: dict[Kind, int] = {}  # lines that claims have moved runs to; a line is never deleted

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
        values = {"worker": worker, "name": name, "pid": pid, "now": now, "lease_us": lease_us, **which(serves, queues)}
        values["served"] = msgspec.json.encode([(one.agent, one.version) for one in dict.fromkeys(serves)]).decode()
        # Take the lock before the row is written: a worker that sees the row relies on the lock.
        newly = self._liveness.hold(worker)
        try:
            self._database.write(
                lambda cursor: self._register(cursor, values),
                lambda cursor, _: cursor.one("worker_by_id", (worker,)) is not None,
            )
        except BaseException:
            if newly:
                self._liveness.free(worker)
            raise

    def _register(self, cursor: Cursor, values: Mapping[str, object]) -> None:
        if cursor.all("interrupted_batches", ("restore",)):
            # Runs and tombstones are still missing: a run with one of their ids would do everything a second time.
            raise Conflict(
                f"{self._database.where} is being restored from a backup, and that has not ended",
                hint="wait for it; if it was interrupted, type the same perdure restore again",
            )
        cursor.change("insert_worker", values)

    def unregister(self, worker: str, now: int) -> None:
        """Remove the worker's row.

        A run that the worker still holds is marked as lost, because its calls may still run: the next claim takes the
        run over.
        """

        def leave(cursor: Cursor) -> None:
            lose_runs(cursor, worker, now, LEASE_RAN_OUT)
            cursor.change("delete_worker", (worker,))

        try:
            self._database.write(leave, lambda cursor, _: cursor.one("worker_by_id", (worker,)) is None)
        except BaseException:
            # The worker's row is still there, and a thread of a tool may still run for a long time. If the lock became
            # free now, the worker would count as proven dead. Then another worker would believe the answer "not found"
            # about that tool's call, and would make the call again.
            self._liveness.keep_until_exit(worker)
            raise
        self._liveness.free(worker)
        self._bell.ring()

    def renew(self, worker: str, now: int) -> None:
        self._liveness.refresh(worker)

        def beat(cursor: Cursor) -> None:
            if cursor.change("beat", {"worker": worker, "now": now}) != 1:
                raise NotFound(f"worker {worker} is not registered (any more), so it has no lease to renew; register it again")

        self._database.write(beat, lambda cursor, _: False)

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
        if run_id is not None:
            claimed = self._claim_this(worker, served, run_id, now, limits or {})
        elif below is not None:
            claimed = self._claim_below(worker, served, below, limit, now)
        else:
            claimed = self._claim_by_turns(worker, served, limit, now, queues, limits or {})
        if claimed and self._bell.watched:
            self._bell.moved([one.lease.run_id for one in claimed])
        return claimed

    def _claim_by_turns(
        self,
        worker: str,
        served: Sequence[Served],
        limit: int,
        now: int,
        queues: Sequence[str] | None,
        limits: Mapping[str, Queue],
    ) -> list[Claimed]:
        """Claim up to `limit` ready runs; tenants take turns."""
        return self._take(worker, served, now, lambda cursor: Choice(cursor, worker, limits, now).take(served, queues, limit))

    def _claim_this(self, worker: str, served: Sequence[Served], run_id: str, now: int, limits: Mapping[str, Queue]) -> list[Claimed]:
        """Claim only the run `run_id`, ready or not. Turns do not apply.

        If the limits, or the suspects that this worker holds, leave no room for the run, nothing is claimed.
        """

        def choose(cursor: Cursor) -> list[Row]:
            found = self._this_one(cursor, served, run_id)
            row, room = run_row(found), Room(cursor, limits)
            room.look([row.queue])
            if row.holder is not None:
                # The run is already counted as held by its dead holder: do not count it twice.
                room.count(row.queue, row.tenant, -1)
            return [found] if room.has(row.queue, row.tenant) and HeldSuspects(cursor, worker).may_take(found) else []

        return self._take(worker, served, now, choose)

    def _claim_below(self, worker: str, served: Sequence[Served], run_id: str, limit: int, now: int) -> list[Claimed]:
        """Claim ready runs below the run `run_id`."""

        def choose(cursor: Cursor) -> list[Row]:
            suspects = HeldSuspects(cursor, worker)
            wanted = {"run_id": run_id, "now": now, "limit": limit, "suspects": not suspects.is_full}
            return list(filter(suspects.may_take, cursor.all("ready_below", {**wanted, **which(served, None)})))

        return self._take(worker, served, now, choose)

    def _take(self, worker: str, served: Sequence[Served], now: int, choose: Callable[[Cursor], list[Row]]) -> list[Claimed]:
        edited: list[Row] = []
        lines: dict[Kind, int] = {}

        def take(cursor: Cursor) -> list[tuple[int, Claimed]]:
            registered = cursor.one("worker_by_id", (worker,))
            if registered is None:
                raise NotFound(f"worker {worker} is not registered; register it before it claims anything")
            chosen = choose(cursor)
            edited[:] = filter(has_ended, chosen)
            for row in edited:
                _set_aside(cursor, row)
            takes = [Take(row, worker, registered[0], now, served) for row in chosen if not has_ended(row)]
            lines.clear()
            for take in takes:
                if take.moves_to is not None:
                    kind = take.moves_to
                    lines[kind] = self._lines.get(kind) or lines.get(kind) or line_of(cursor, *kind)
                    take.values["line"] = lines[kind]
            cursor.each("claim_run", [take.values for take in takes])
            cursor.each("insert_event", [take.event for take in takes])
            firsts = _first_events(cursor, [take.key for take in takes if take.sealed.event.seq == 2])
            return [(take.key, take.with_journal(firsts.get(take.key))) for take in takes]

        def arrived(cursor: Cursor, taken: list[tuple[int, Claimed]]) -> bool:
            # The nonce belongs to this claim alone, so it proves that the claim was committed.
            return any(cursor.all("guard_of_run", (key,))[0][4] == claimed.lease.nonce for key, claimed in taken)

        taken = self._database.write(take, arrived)
        self._lines.update(lines)  # only now: a line of a transaction that was rolled back does not exist
        for key, claimed in taken:
            self._keys[claimed.lease.run_id] = key
        for found in edited:
            self._tell(run_row(found))
        return [claimed for _, claimed in taken]

    def _tell(self, row: RunRow) -> None:
        if row.run_id not in self._told:
            self._told.add(row.run_id)
            log.error("run %s: not claimed, because %s", row.run_id, _edited(row))

    def next_ready(self, served: Sequence[Served], queues: Sequence[str] | None = None) -> int | None:
        ((ready_at,),) = self._database.read("next_ready", which(served, queues))
        assert ready_at is None or isinstance(ready_at, int), ready_at
        return ready_at

    def parents_to_replay(self, served: Sequence[Served], now: int, *, but: Sequence[str] = ()) -> list[tuple[Served, Served, str]]:
        values = {"served": which(served, None)["served"], "now": now, "but": msgspec.json.encode(but).decode()}
        rows = self._database.read("parents_to_replay", values)
        return [(Served(*row[:2]), Served(*row[2:4]), row[4]) for row in rows]

    def reap(self, worker: str, lease_us: int, now: int) -> int:
        lost = self._reap(worker, lease_us, now)
        if lost:
            self._bell.ring()
        return lost

    def _reap(self, worker: str, lease_us: int, now: int) -> int:
        # Leave out the worker that calls this: it is alive, and its own renewer decides about its leases.
        rows = [row for row in self._database.read("list_workers", {"now": now}) if row[0] != worker]
        gone = [row[0] for row in rows if self._liveness.is_dead(row[0])]
        holding = [row for row in self._silent(rows, lease_us, now) if row[5]]
        silent = [(row[0], row[4]) for row in holding if row[0] not in gone]
        orphaned = [holder for (holder,) in self._database.read("holders_without_worker")]
        if not (gone or silent or orphaned):
            return 0

        def lose(cursor: Cursor) -> int:
            lost = sum(lose_runs(cursor, dead, now, PROVEN_DEAD) for dead in gone)
            lost += sum(lose_runs(cursor, missing, now, LEASE_RAN_OUT) for missing in orphaned)
            # The process of a silent worker may still exist and wake up. So the worker's row stays, and its next
            # heartbeat counts again.
            lost += sum(lose_runs_of_silent_worker(cursor, mute, now, beat) for mute, beat in silent)
            cursor.each("delete_worker", [(dead,) for dead in gone])
            return lost

        lost = self._database.write(lose, lambda cursor, _: False)
        for dead in gone:
            self._liveness.forget(dead)
        return lost

    def _silent(self, rows: Sequence[Row], lease_us: int, now: int) -> list[Row]:
        """The workers without a heartbeat for their lease, measured by this process with the monotonic clock.

        A worker whose own lease is longer than `lease_us` sends heartbeats less often, so its own lease counts.

        Wall clocks jump, on this machine and in the database: then every heartbeat looks old, or none looks old for
        hours. So the wall clock makes a worker silent only if all of these hold. The last heartbeat is very old (the
        last column). This process has seen no second heartbeat of the worker. The wall clock was not set since this
        process first saw the worker. It is not proven that the worker's process exists (the clock may have been set
        just before this process started).
        """
        now_s, before = time.monotonic(), self._beats
        ahead_s = now / 1e6 - now_s
        self._beats = {row[0]: _Beat.seen(before.get(row[0]), row[4], now_s, ahead_s) for row in rows}
        leases = [(row, max(lease_us, row[8] or 0)) for row in rows]
        return [
            row
            for row, lease in leases
            if self._beats[row[0]].is_silent(now_s, ahead_s, lease / 1e6, long_gone=self._is_long_gone(row, lease))
        ]

    def _is_long_gone(self, row: Row, lease_us: int) -> bool:
        return bool(row[-1] > LONG_AGO * lease_us) and not self._liveness.is_alive(row[0])

    def held(self, worker: str) -> list[tuple[str, int]]:
        return [(run_id, epoch) for run_id, epoch in self._database.read("held_by_worker", (worker,))]

    def release_undriven(self, worker: str, runs: Sequence[tuple[str, int]], now: int) -> int:
        # After a commit with unknown outcome, the worker calls this again for the runs that it still holds.
        lost = self._database.write(lambda cursor: lose_some(cursor, worker, now, runs), lambda cursor, _: False)
        if lost:
            self._bell.ring()
        return lost

    def workers(self, now: int, lease_us: int) -> list[WorkerRow]:
        return [self._worker(row, lease_us) for row in self._database.read("list_workers", {"now": now})]

    def _worker(self, row: Row, lease_us: int) -> WorkerRow:
        worker, name, pid, started_at, beat_at, runs, serves, queues, own_lease_us, age_us = row
        dead = self._liveness.is_dead(worker)
        return WorkerRow(
            worker,
            name,
            pid,
            started_at,
            beat_at,
            alive=age_us <= (own_lease_us or lease_us) and not dead,
            runs=runs,
            serves=tuple(Served(agent, version) for agent, version in _listed(serves, _pairs)),
            queues=None if queues is None else _listed(queues, _texts),
            lease_us=own_lease_us,
            dead=dead,
        )

    def backlog(self, now: int) -> list[Backlog]:
        ready = {(row[0], row[1]): (row[2], row[3]) for row in self._database.read("ready_by_party", {"now": now})}
        held = {(row[0], row[1]): row[2] for row in self._database.read("held_by_party")}
        return [Backlog(*party, *ready.get(party, (0, None)), held.get(party, 0)) for party in sorted({*ready, *held})]

    def suspects(self) -> dict[str, Group]:
        groups: dict[str, Group] = {}
        for holder, crashes, lost_with in self._database.read("held_suspects"):
            groups.setdefault(holder, Group()).add(crashes, lost_with)
        return groups

    def _this_one(self, cursor: Cursor, served: Sequence[Served], run_id: str) -> Row:
        """The row of the run, if the run may be claimed. If the holder is dead, the row is marked as lost."""
        found = cursor.one("run_to_change", (run_id,))
        if found is None:
            raise NotFound(f"there is no run {run_id}", hint="`perdure list` shows the runs")
        row = run_row(found)
        row.check_live()
        _check_resumable(row, served)
        check_not_ended(found)
        if row.holder is None:
            return found
        if not self._liveness.is_dead(row.holder):
            name, beat_at = cursor.one("worker_by_id", (row.holder,)) or (row.holder, row.updated_at)
            seen = datetime.fromtimestamp(beat_at / 1e6, UTC).isoformat(timespec="seconds")
            raise AlreadyRunning(
                f"run {run_id} is held by another worker", hint=f"worker {name}, last seen {seen}: wait for it, or stop that process"
            )
        return as_lost(found, PROVEN_DEAD, load_of(cursor, row.holder).beside(row.crashes))


def _set_aside(cursor: Cursor, found: Row) -> None:
    """Stop a run that has ended by its journal, and whose edited row says that it is ready. Nothing is appended."""
    row = run_row(found)
    # If the status in the row says that the run is finished, a trigger would refuse this change. So the row stays
    # ready, and every later claim that chooses the row leaves it out, as this one does.
    if row.status not in FINISHED:
        cursor.change("set_aside", {"id": key_of(found), "error": _edited(row)})


def _edited(row: RunRow) -> str:
    command = f"{shell.command('verify', row.run_id)} --repair"
    return f"its row was edited: by its journal it has ended (event {row.seq}); write the row again: {command}"


def _first_events(cursor: Cursor, keys: Sequence[int]) -> dict[int, Row]:
    """The first event of each of these runs, in one query for all runs."""
    if not keys:
        return {}
    return {row[0]: row[1:] for row in cursor.all("first_events", (msgspec.json.encode(keys).decode(),))}


def _listed(data: str, decode: Callable[[str], tuple[T, ...]]) -> tuple[T, ...]:
    """The agents or queues in a worker's row.

    Empty if the column cannot be decoded: one damaged row must not hide the other workers.
    """
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError):
        return ()


def _check_resumable(row: RunRow, served: Sequence[Served]) -> None:
    """Raise an error unless a worker that serves these agents may continue the run."""
    if row.status in FINISHED:
        raise RunEnded(f"run {row.run_id} has finished ({row.status}) and cannot be resumed; start a new one")
    if row.status == "paused":
        raise Conflict(f"run {row.run_id} is paused", hint=f"unpause it first: {shell.command('unpause', row.run_id)}")
    row.check_not_restored()
    versions = [one.version for one in served if one.agent == row.agent]
    if not versions:
        raise UnknownAgent(
            f"run {row.run_id} belongs to agent {row.agent!r}, which this worker does not serve",
            hint="start one with it: perdure worker FILE.py",
        )
    if row.version not in (NO_VERSION, *versions):
        raise WrongVersion(
            f"run {row.run_id} was begun with version {row.version} of agent {row.agent!r}, and this worker serves {' and '.join(versions)}",
            hint=f"start a worker with the old code, or let the new code go on with it: {shell.command('adopt', row.run_id, f'FILE.py:{row.agent}')}",
        )


class Take:
    """One claim of one run: the values that the claim writes, and the `Claimed` that the worker gets."""

    def __init__(self, found: Row, worker: str, name: str, now: int, served: Sequence[Served]) -> None:
        row, self.key = run_row(found), key_of(found)
        was_lost = row.lost > 0
        lost_with = row.lost_with if was_lost else 0
        dead, version = row.lost == PROVEN_DEAD, version_taken(row, served)
        body = RunClaimed(worker=worker, name=name, takeover=was_lost, proven_dead=dead, lost_with=lost_with, version=version)
        # The line of the version that the run takes; the caller puts its number into `values`.
        self.moves_to: Kind | None = (row.agent, version, row.queue, row.tenant, row.priority) if version else None
        epoch, seq, nonce = row.epoch + 1, row.seq + 1, secrets.token_bytes(16)
        sealed = seal(row.head, Event(seq, uuid.uuid4().hex, now, epoch, None, row.seq, body))
        crashes = row.crashes + was_lost
        lease = {"epoch": epoch, "nonce": nonce, "worker": worker}
        history = {"crashes": crashes, "lost_with": row.lost_with}
        self.values = {
            "id": self.key,
            **lease,
            "seq": seq,
            "head": sealed.hash,
            **history,
            "now": now,
            "version": version or None,
            "line": None,
        }
        self.sealed, self.event = sealed, event_row(self.key, sealed)
        after: RunRow = msgspec.structs.replace(
            row,
            version=version or row.version,
            status=row.status if row.status == "cancelling" else "running",
            waiting_for=None,
            ready_at=None,
            seq=seq,
            head=sealed.hash,
            epoch=epoch,
            holder=worker,
            crashes=crashes,
            lost=0,
            error=None,
            attention=None,
            updated_at=max(row.updated_at, now),
        )
        self.claimed = Claimed(Lease(row.run_id, worker, epoch, nonce), after, takeover=was_lost)

    def with_journal(self, first: Row | None) -> Claimed:
        """The claim. If `first` is given, the claim contains the whole journal and an empty inbox.

        `first` is the first event of a run that was never held before. The journal of such a run has two events:
        `first` and the event of this claim. If `first` cannot be decoded, the claim contains no events, and the worker
        gets the same error when it reads the journal.
        """
        if first is None:
            return self.claimed
        claimed = msgspec.structs.replace(self.claimed, post=())
        try:
            return msgspec.structs.replace(claimed, events=(event_from(self.claimed.lease.run_id, first), self.sealed.event))
        except StoreCorrupt:
            return claimed
