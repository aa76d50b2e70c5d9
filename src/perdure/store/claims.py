"""Who works on what: workers, leases, and runs that change hands."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

import msgspec

from perdure import shell
from perdure.core.events import Event, RunClaimed
from perdure.core.identity import seal
from perdure.core.suspects import Group
from perdure.errors import AlreadyRunning, Conflict, NotFound, RunEnded, StoreCorrupt, UnknownAgent, WrongVersion
from perdure.settings import Queue
from perdure.store.api import FINISHED, Backlog, Claimed, Lease, RunRow, Served, WorkerRow
from perdure.store.cursor import Cursor, Row
from perdure.store.lines import Choice, Room, Suspects, which
from perdure.store.losing import LEASE_RAN_OUT, PROVEN_DEAD, load_of, lose_runs, lose_runs_of_silent_worker, lose_some
from perdure.store.part import Means, Part
from perdure.store.rows import as_lost, event_from, event_row, key_of, run_row

T = TypeVar("T")
_pairs = msgspec.json.Decoder(tuple[tuple[str, str], ...]).decode
_texts = msgspec.json.Decoder(tuple[str, ...]).decode
LONG_AGO = 10  # leases: so long gone is who was silent before anybody looked


class _Beat(NamedTuple):
    """A worker's last sign of life, as it was seen from here."""

    at: int  # by its own words
    since_s: float  # when it was first seen, by the monotonic clock
    ahead_s: float  # of the monotonic clock was the wall clock then
    heard: bool  # another one was seen before it: the worker has lived under our eyes

    @classmethod
    def seen(cls, before: _Beat | None, at: int, now_s: float, ahead_s: float) -> _Beat:
        return before if before is not None and before.at == at else cls(at, now_s, ahead_s, before is not None)

    def is_silent(self, now_s: float, ahead_s: float, lease_s: float, *, long_gone: bool) -> bool:
        is_steady = abs(ahead_s - self.ahead_s) < lease_s / 2  # else the wall clock was set since then
        return now_s - self.since_s >= lease_s or (long_gone and not self.heard and is_steady)


class Claims(Part):
    """Leases on runs, and the signs of life of those who hold them."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._beats: dict[str, _Beat] = {}  # of the other workers

    def register(
        self, worker: str, name: str, pid: int, now: int, serves: Sequence[Served] = (), queues: Sequence[str] | None = None
    ) -> None:
        values = {"worker": worker, "name": name, "pid": pid, "now": now, **which(serves, queues)}
        # The lock first: whoever sees the row can rely on it.
        newly = self._liveness.hold(worker)
        try:
            self._database.write(
                lambda cursor: cursor.change("insert_worker", values),
                lambda cursor, _: cursor.one("worker_by_id", (worker,)) is not None,
            )
        except BaseException:
            if newly:
                self._liveness.free(worker)
            raise

    def unregister(self, worker: str, now: int) -> None:
        """A run that was not given up before is a takeover for whoever claims it: its calls may have been in flight."""

        def leave(cursor: Cursor) -> None:
            lose_runs(cursor, worker, now, LEASE_RAN_OUT)
            cursor.change("delete_worker", (worker,))

        try:
            self._database.write(leave, lambda cursor, _: cursor.one("worker_by_id", (worker,)) is None)
        except BaseException:
            # The crash window: its rows still say that it works, and a thread of a tool may do so for long. A lock that came free would prove
            # its death, "not found" would be believed about that tool's call, and the call made again.
            self._liveness.cling(worker)
            raise
        self._liveness.free(worker)
        self._bell.ring()

    def renew(self, worker: str, now: int) -> None:
        self._liveness.refresh(worker)

        def beat(cursor: Cursor) -> None:
            if cursor.change("beat", {"worker": worker, "now": now}) != 1:
                raise NotFound(
                    f"worker {worker} is not registered (any more), so that it holds nothing that could be renewed; register it again"
                )

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
            return self._claim_this(worker, served, run_id, now, limits or {})
        if below is not None:
            return self._claim_below(worker, served, below, limit, now)
        return self._claim_by_turns(worker, served, limit, now, queues, limits or {})

    def _claim_by_turns(
        self,
        worker: str,
        served: Sequence[Served],
        limit: int,
        now: int,
        queues: Sequence[str] | None,
        limits: Mapping[str, Queue],
    ) -> list[Claimed]:
        """Ready runs, up to the limit, by turns."""
        return self._take(worker, now, lambda cursor: Choice(cursor, worker, limits, now).take(served, queues, limit))

    def _claim_this(self, worker: str, served: Sequence[Served], run_id: str, now: int, limits: Mapping[str, Queue]) -> list[Claimed]:
        """That run alone, ready or not, unless the limits or this worker's suspects leave no room for it.

        Turns do not apply to what somebody asks for by name.
        """

        def choose(cursor: Cursor) -> list[Row]:
            found = self._this_one(cursor, served, run_id)
            row, room = run_row(found), Room(cursor, limits)
            room.look([row.queue])
            if row.holder is not None:
                room.count(row.queue, row.tenant, -1)  # its dead holder's place is its own
            return [found] if room.has(row.queue, row.tenant) and Suspects(cursor, worker).may_take(found) else []

        return self._take(worker, now, choose)

    def _claim_below(self, worker: str, served: Sequence[Served], run_id: str, limit: int, now: int) -> list[Claimed]:
        """Ready runs of that run's family."""

        def choose(cursor: Cursor) -> list[Row]:
            suspects = Suspects(cursor, worker)
            wanted = {"run_id": run_id, "now": now, "limit": limit, "suspects": not suspects.is_full}
            return list(filter(suspects.may_take, cursor.all("ready_below", {**wanted, **which(served, None)})))

        return self._take(worker, now, choose)

    def _take(self, worker: str, now: int, choose: Callable[[Cursor], list[Row]]) -> list[Claimed]:
        def take(cursor: Cursor) -> list[tuple[int, Claimed]]:
            registered = cursor.one("worker_by_id", (worker,))
            if registered is None:
                raise NotFound(f"worker {worker} is not registered; register it before it claims anything")
            takes = [Take(row, worker, registered[0], now) for row in choose(cursor)]
            cursor.each("claim_run", [take.values for take in takes])
            cursor.each("insert_event", [take.event for take in takes])
            firsts = _first_events(cursor, [take.key for take in takes if take.sealed.event.seq == 2])
            return [(take.key, take.with_journal(firsts.get(take.key))) for take in takes]

        def arrived(cursor: Cursor, taken: list[tuple[int, Claimed]]) -> bool:
            # The nonce is of this claim alone.
            return any(cursor.all("guard_of_run", (key,))[0][4] == claimed.lease.nonce for key, claimed in taken)

        taken = self._database.write(take, arrived)
        for key, claimed in taken:
            self._keys[claimed.lease.run_id] = key
        return [claimed for _, claimed in taken]

    def next_ready(self, served: Sequence[Served], queues: Sequence[str] | None = None) -> int | None:
        ((ready_at,),) = self._database.read("next_ready", which(served, queues))
        assert ready_at is None or isinstance(ready_at, int), ready_at
        return ready_at

    def left_behind(self, served: Sequence[Served], now: int, *, but: Sequence[str] = ()) -> list[tuple[Served, Served, str]]:
        values = {"served": which(served, None)["served"], "now": now, "but": msgspec.json.encode(but).decode()}
        rows = self._database.read("left_behind", values)
        return [(Served(*row[:2]), Served(*row[2:4]), row[4]) for row in rows]

    def reap(self, worker: str, lease_us: int, now: int) -> int:
        lost = self._reap(worker, lease_us, now)
        if lost:
            self._bell.ring()
        return lost

    def _reap(self, worker: str, lease_us: int, now: int) -> int:
        # Nobody declares itself dead: a worker that asks is alive, and its renewer decides about its own leases.
        long_ago = {"lease_us": LONG_AGO * lease_us, "now": now}
        rows = [row for row in self._database.read("list_workers", long_ago) if row[0] != worker]
        gone = [row[0] for row in rows if self._liveness.is_dead(row[0])]
        holding = [row for row in self._silent(rows, lease_us / 1e6, now) if row[5]]
        silent = [(row[0], row[4]) for row in holding if row[0] not in gone]
        orphaned = [holder for (holder,) in self._database.read("holders_without_worker")]
        if not (gone or silent or orphaned):
            return 0

        def lose(cursor: Cursor) -> int:
            lost = sum(lose_runs(cursor, dead, now, PROVEN_DEAD) for dead in gone)
            lost += sum(lose_runs(cursor, missing, now, LEASE_RAN_OUT) for missing in orphaned)
            # Its process exists and may wake up: the row stays, so that its next sign of life counts again.
            lost += sum(lose_runs_of_silent_worker(cursor, mute, now, beat) for mute, beat in silent)
            cursor.each("delete_worker", [(dead,) for dead in gone])
            return lost

        lost = self._database.write(lose, lambda cursor, _: False)
        for dead in gone:
            self._liveness.forget(dead)
        return lost

    def _silent(self, rows: Sequence[Row], lease_s: float, now: int) -> list[Row]:
        """Those that have given no sign of life for that long.

        Seen from here, by a clock that nobody can set: wall clocks jump, this machine's and the database's, and then everybody's last
        sign of life looks old, or will for hours not look old. The wall clock is believed only about a worker that was never heard, that
        it calls long gone (the last column), and only while it has not been set under our eyes; and not about one whose process is there:
        it may have been set just before we came.
        """
        now_s, before = time.monotonic(), self._beats
        ahead_s = now / 1e6 - now_s
        self._beats = {row[0]: _Beat.seen(before.get(row[0]), row[4], now_s, ahead_s) for row in rows}
        return [row for row in rows if self._beats[row[0]].is_silent(now_s, ahead_s, lease_s, long_gone=self._is_long_gone(row))]

    def _is_long_gone(self, row: Row) -> bool:
        return bool(row[-1]) and not self._liveness.is_alive(row[0])

    def held(self, worker: str) -> list[tuple[str, int]]:
        return [(run_id, epoch) for run_id, epoch in self._database.read("held_by_worker", (worker,))]

    def let_go(self, worker: str, runs: Sequence[tuple[str, int]], now: int) -> int:
        # What cannot be looked up is done again at the next round.
        lost = self._database.write(lambda cursor: lose_some(cursor, worker, now, runs), lambda cursor, _: False)
        if lost:
            self._bell.ring()
        return lost

    def workers(self, now: int, lease_us: int) -> list[WorkerRow]:
        return [
            WorkerRow(
                worker,
                name,
                pid,
                started_at,
                beat_at,
                not is_silent and not self._liveness.is_dead(worker),
                runs,
                tuple(Served(agent, version) for agent, version in _listed(serves, _pairs)),
                None if queues is None else _listed(queues, _texts),
            )
            for worker, name, pid, started_at, beat_at, runs, serves, queues, is_silent in self._database.read(
                "list_workers", {"lease_us": lease_us, "now": now}
            )
        ]

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
        """The run, if it may be taken, with how its holder was lost."""
        found = cursor.one("run_to_change", (run_id,))
        if found is None:
            raise NotFound(f"there is no run {run_id}; `perdure list` shows those that there are")
        row = run_row(found)
        _check_resumable(row, served)
        if row.holder is None:
            return found
        if not self._liveness.is_dead(row.holder):
            name, beat_at = cursor.one("worker_by_id", (row.holder,)) or (row.holder, row.updated_at)
            seen = datetime.fromtimestamp(beat_at / 1e6, UTC).isoformat(timespec="seconds")
            raise AlreadyRunning(f"run {run_id} is held by worker {name}, last seen {seen}; wait for it, or stop that process")
        return as_lost(found, PROVEN_DEAD, load_of(cursor, row.holder).beside(row.crashes))


def _first_events(cursor: Cursor, keys: Sequence[int]) -> dict[int, Row]:
    """Of those runs, the first event each: in one question instead of one for each of them."""
    if not keys:
        return {}
    return {row[0]: row[1:] for row in cursor.all("first_events", (msgspec.json.encode(keys).decode(),))}


def _listed(data: str, decode: Callable[[str], tuple[T, ...]]) -> tuple[T, ...]:
    """What a worker says that it serves; nothing when that cannot be read: one row that was edited must not hide the other workers."""
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError):
        return ()


def _check_resumable(row: RunRow, served: Sequence[Served]) -> None:
    """Raise unless whoever serves these may go on with the run."""
    if row.status in FINISHED:
        raise RunEnded(f"run {row.run_id} has finished ({row.status}) and cannot be resumed; start a new one, or fork it")
    if row.status == "paused":
        raise Conflict(f"run {row.run_id} is paused and stays so until somebody lets it go on: {shell.command('unpause', row.run_id)}")
    versions = [one.version for one in served if one.agent == row.agent]
    if not versions:
        raise UnknownAgent(
            f"run {row.run_id} belongs to agent {row.agent!r}, which this worker does not serve; start one with it: perdure worker FILE.py"
        )
    if row.version not in versions:
        raise WrongVersion(
            f"run {row.run_id} was begun with version {row.version} of agent {row.agent!r}, and this worker serves {' and '.join(versions)}; "
            f"start a worker with the old code, or let the new code go on with it: {shell.command('resume', row.run_id, f'FILE.py:{row.agent}')} --adopt"
        )


class Take:
    """One run in a worker's hands: what is written for it, and what the worker gets."""

    def __init__(self, found: Row, worker: str, name: str, now: int) -> None:
        row, self.key = run_row(found), key_of(found)
        was_lost = row.lost > 0
        lost_with = row.lost_with if was_lost else 0
        body = RunClaimed(worker=worker, name=name, takeover=was_lost, proven_dead=row.lost == PROVEN_DEAD, lost_with=lost_with)
        epoch, seq, nonce = row.epoch + 1, row.seq + 1, secrets.token_bytes(16)
        sealed = seal(row.head, Event(seq, uuid.uuid4().hex, now, epoch, None, row.seq, body))
        crashes = row.crashes + was_lost
        lease = {"epoch": epoch, "nonce": nonce, "worker": worker}
        history = {"crashes": crashes, "lost_with": row.lost_with}
        self.values = {"id": self.key, **lease, "seq": seq, "head": sealed.hash, **history, "now": now}
        self.sealed, self.event = sealed, event_row(self.key, sealed)
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
            lost=0,
            error=None,
            attention=None,
            updated_at=max(row.updated_at, now),
        )
        self.claimed = Claimed(Lease(row.run_id, worker, epoch, nonce), after)

    def with_journal(self, first: Row | None) -> Claimed:
        """With its whole journal, where that is one event and this claim, and with an empty inbox: it was never held.

        A journal that cannot be read is met again by whoever drives the run.
        """
        if first is None:
            return self.claimed
        claimed = msgspec.structs.replace(self.claimed, post=())
        try:
            return msgspec.structs.replace(claimed, events=(event_from(self.claimed.lease.run_id, first), self.sealed.event))
        except StoreCorrupt:
            return claimed
