"""Claims on PostgreSQL, in one statement if possible. Also: reaps the runs of workers whose connection is gone.

A claim that must respect turns, limits and suspects is a transaction of ten round trips. These rules do not matter if
all lines with ready runs have the same queue, tenant and priority, the queue has no limit, and no run of these lines is
a suspect. Then one statement claims the first runs of the lines, and returns them with their journals and inboxes.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import psycopg

from perdure.core.events import Event, RunClaimed, encode_body
from perdure.core.suspects import SUSPECT_CRASHES
from perdure.errors import StoreCorrupt, StoreUnavailable
from perdure.settings import Queue
from perdure.store.api import NO_VERSION, Claimed, Lease, Served
from perdure.store.claims import Claims, lose_runs_of_silent_worker
from perdure.store.cursor import KEY, Cursor, Row
from perdure.store.part import Means
from perdure.store.postgres.bell import NotifyBell
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.faults import is_loss
from perdure.store.postgres.queries import PostgresCursor
from perdure.store.queues import which
from perdure.store.rows import event_from, inbox_row, key_of, run_row

_LOOKS = 3
# A claim returns a journal of at most this many events. A longer journal is read later, when its run begins, because a
# hundred runs may be claimed together.
_FEW_EVENTS = 200
_NONCE, _EVENT_ID, _TAKES = KEY + 1, KEY + 2, KEY + 3  # the positions of columns that come after the columns of a run
_SEEN, _RUN, _MORE = slice(0, 3), slice(3, 4 + _TAKES), slice(4 + _TAKES, None)  # the columns of claim_at_once


class Unheard(Exception):
    """The answer to a claim was lost; the claim may still be committed. `arrived` returns the claimed runs.

    Now it is safe to claim in a transaction. If the transaction claims a run first, the late statement finds the run
    held. If the late statement is first, the transaction skips the run.
    """

    def __init__(self, arrived: Callable[[], list[tuple[int, Claimed]]]) -> None:
        self.arrived = arrived


class _Lost(Exception):
    """The connection broke while the statement was under way."""


class _Ask(NamedTuple):
    """The parameters of one claim."""

    worker: str
    now: int
    body: RunClaimed
    secret: bytes  # identifies the runs that this claim takes

    @property
    def token(self) -> int:
        return int.from_bytes(self.secret[:8], signed=True)


class _Next(NamedTuple):
    served: Mapping[str, object]
    commits: int  # how many commits this process had made after the claim
    ready_at: int | None  # when the next run of the served lines is ready


class Taking:
    """Claims in one statement, if turns, limits and suspects do not matter."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._next: _Next | None = None
        self.names: dict[str, str] = {}  # the names of the workers that this store has registered, by worker id

    def claim(
        self, worker: str, served: Sequence[Served], limit: int, now: int, queues: Sequence[str] | None, limits: Mapping[str, Queue]
    ) -> list[tuple[int, Claimed]] | None:
        """The claimed runs with their keys; None: the claim has to be made in a transaction."""
        self._next = None
        if worker not in self.names:
            return None
        lines = which(served, queues)
        body = RunClaimed(worker, self.names[worker])
        choice = {"limit": limit, "limited": msgspec.json.encode(list(limits)).decode(), **lines, "served": _entries(served, body)}
        for _ in range(_LOOKS):
            commits = self._database.commits
            ask = _Ask(worker, now, body, secrets.token_bytes(16))
            try:
                rows = self._send({**_values(ask), **choice})
            except _Lost:
                # The answer was lost: runs may have been claimed, or may still be claimed. The secret of this claim
                # finds them.
                if there := self._arrived(ask, wait=False):
                    return there
                raise Unheard(partial(self._arrived, ask, wait=True)) from None
            if not rows:
                return None  # no row: a value cannot be stored, or the statement was refused
            runs, to_be_weighed, later = next(row[_SEEN] for row in rows if row[0] is not None)
            if to_be_weighed:
                return None
            taken = _taken(ask, rows)
            if runs < limit and len(taken) == runs:
                # No ready run is left. This stays true until this process commits something, or hears a ring.
                self._next = _Next(lines, commits + bool(taken), later)
            if taken or not runs:
                return taken
            # Other workers have claimed these runs first: look again for other runs.
        return None

    def next_ready(self, served: Sequence[Served], queues: Sequence[str] | None) -> _Next | None:
        """When the next run is ready, as the last claim saw it. None if this process has committed something since."""
        known = self._next
        return known if known is not None and (which(served, queues), self._database.commits) == known[:2] else None

    def _send(self, values: Mapping[str, object]) -> list[Row]:
        """The answer of claim_at_once; empty if the statement was refused."""
        begun_s = time.monotonic()
        try:
            with self._database.connections.lent() as connection:
                rows = PostgresCursor(connection).all("claim_at_once", values)
        except UnicodeEncodeError:
            return []
        except psycopg.Error as error:
            if is_loss(error):
                self._database.connections.lost()
                raise _Lost from None
            return []  # nothing was written, and the claim in a transaction will raise the same error
        if any(row[_RUN][0] is not None for row in rows):
            self._database.committed_since(begun_s)
        return rows

    def _arrived(self, ask: _Ask, *, wait: bool) -> list[tuple[int, Claimed]]:
        """The runs that the claim has taken. The claim was one transaction: it has taken all its runs, or no run."""

        def look(cursor: Cursor) -> list[tuple[int, Claimed]]:
            if wait:  # wait for the end of the lost statement, if that is still under way
                cursor.one("claim_is_over", {"token": ask.token})
            rows = cursor.all("claimed_at_once", {"worker": ask.worker, "secret": ask.secret})
            return [(key_of(row), _claimed(ask, row)) for row in rows]

        return self._database.write(look, lambda *_: True) if wait else self._database.reading(look)


def _entries(served: Sequence[Served], body: RunClaimed) -> str:
    """The served lines as claim_at_once takes them: each with its agent and version.

    The entry of runs without a version also has the version that they take, and the event of their claim.
    """
    entries: dict[tuple[str, str], tuple[str, ...]] = {}
    for one in served:  # if there are several versions of an agent, the last one replaces the others
        entries[one.agent, one.version] = (one.agent, one.version)
        claim = msgspec.structs.replace(body, version=one.version)
        entries[one.agent, NO_VERSION] = (one.agent, NO_VERSION, one.version, encode_body(claim).decode())
    return msgspec.json.encode(list(entries.values())).decode()


def _values(ask: _Ask) -> dict[str, object]:
    return {
        "worker": ask.worker,
        "name": ask.body.name,
        "now": ask.now,
        "secret": ask.secret,
        "token": ask.token,
        "data": encode_body(ask.body).decode(),
        "suspect": SUSPECT_CRASHES,
        "few": _FEW_EVENTS,
    }


def _claimed(ask: _Ask, found: Row) -> Claimed:
    row = run_row(found)
    return Claimed(Lease(row.run_id, ask.worker, row.epoch, found[_NONCE]), row)


def _taken(ask: _Ask, rows: Sequence[Row]) -> list[tuple[int, Claimed]]:
    """The claimed runs in the answer, in the order of their keys, each with its events and inbox rows."""
    runs = sorted([row[_RUN] for row in rows if row[_RUN][0] is not None], key=key_of)
    journals: dict[int, list[Row]] = {key_of(run): [] for run in runs}
    inboxes: dict[int, list[Row]] = {key_of(run): [] for run in runs}
    for row in rows:
        if row[_RUN][0] is None and (key := key_of(row[_RUN])) is not None:
            seq, event_id, ts, epoch, call, cause, data, inbox_id = row[_MORE]
            if inbox_id is None:
                journals[key].append((seq, event_id, ts, epoch, call, cause, data))
            else:
                inboxes[key].append((inbox_id, call, data, event_id))
    return [(key, _coming_with(ask, run, sorted(journals[key]), sorted(inboxes[key]))) for run in runs if (key := key_of(run)) in journals]


def _coming_with(ask: _Ask, run: Row, journal: Sequence[Row], inbox: Sequence[Row]) -> Claimed:
    """The claim with the run's inbox; also with the journal, if the answer contains the whole journal.

    If the journal cannot be decoded, it is left out, and the worker gets the same error when it reads the journal.
    """
    claimed = _claimed(ask, run)
    run_id, row = claimed.lease.run_id, claimed.row
    post = tuple([inbox_row((inbox_id, run_id, call, data, event_id)) for inbox_id, call, data, event_id in inbox])
    claimed = msgspec.structs.replace(claimed, post=post)
    if len(journal) != row.seq - 1:
        return claimed
    try:
        events = [event_from(run_id, event) for event in journal]
    except StoreCorrupt:
        return claimed
    body = msgspec.structs.replace(ask.body, version=run[_TAKES] or "")
    claim = Event(row.seq, run[_EVENT_ID].hex(), ask.now, row.epoch, None, row.seq - 1, body)
    return msgspec.structs.replace(claimed, events=(*events, claim))


# -- leases on several machines: a worker whose connection is gone is noticed before its lease runs out


# How long a worker may take to connect again after its connection is gone. To connect takes up to 5 s, and after an
# outage all workers connect at once.
GRACE_S = 6.0
_COUNT_EVERY_S = 10.0
_FEW = 10  # if there are at most this many workers, each worker reaps at every call
# With more workers, each worker waits this many seconds per worker: so all together reap twenty times a second.
_SPREAD_S = 0.05
_FOR_EVER_US = 10**15
_FORGET_US = 3_600_000_000


class PostgresClaims(Claims):
    _bell: NotifyBell
    _database: PostgresDatabase

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._taking = Taking(self._database)
        self._heard = -1  # the count of rings before the last claim
        # By worker: the worker's last heartbeat, and when this process first saw the worker without a connection.
        self._cut_off: dict[str, tuple[int, float]] = {}
        self._counted_s = float("-inf")
        self._look_s = float("-inf")  # when it is the turn of this process to reap again

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
        super().register(worker, name, pid, now, serves, queues, lease_us)
        self._taking.names[worker] = name

    def unregister(self, worker: str, now: int) -> None:
        self._taking.names.pop(worker, None)
        super().unregister(worker, now)

    def _claim_by_turns(
        self,
        worker: str,
        served: Sequence[Served],
        limit: int,
        now: int,
        queues: Sequence[str] | None,
        limits: Mapping[str, Queue],
    ) -> list[Claimed]:
        self._heard = self._bell.heard
        try:
            taken = self._taking.claim(worker, served, limit, now, queues, limits)
        except Unheard as unheard:
            weighed = super()._claim_by_turns(worker, served, limit, now, queues, limits)
            return [*weighed, *self._heard_late(unheard, weighed)]
        if taken is None:
            return super()._claim_by_turns(worker, served, limit, now, queues, limits)
        return self._known(taken)

    def next_ready(self, served: Sequence[Served], queues: Sequence[str] | None = None) -> int | None:
        """When the next run is ready. Most of the time the last claim has seen this, and the server is not asked."""
        if self._bell.listening and self._bell.heard == self._heard and (known := self._taking.next_ready(served, queues)) is not None:
            return known.ready_at
        return super().next_ready(served, queues)

    def _heard_late(self, unheard: Unheard, weighed: Sequence[Claimed]) -> list[Claimed]:
        """The runs that the lost statement has claimed. Without this, the worker would hold and not drive them."""
        try:
            return self._known(unheard.arrived())
        except StoreUnavailable:
            if not weighed:
                raise
            # Keep the runs that the transaction has claimed. The worker later releases the runs that it holds but does
            # not drive.
            return []

    def _known(self, taken: Sequence[tuple[int, Claimed]]) -> list[Claimed]:
        for key, claimed in taken:
            self._keys[claimed.lease.run_id] = key
        return [claimed for _, claimed in taken]

    def _reap(self, worker: str, lease_us: int, now: int) -> int:
        """Reap dead workers. Many workers take turns: if it is not the turn of this worker, nothing is done."""
        self._count(lease_us)
        if self._bell.worker_count > _FEW:
            if time.monotonic() < self._look_s:
                return 0
            self._look_s = time.monotonic() + self._bell.worker_count * _SPREAD_S * random.uniform(0.5, 1.5)
        lost = super()._reap(worker, lease_us, now)
        # `lease_us` is endless if this worker itself was cut off (see Renewer.silence). Then do not reap other workers
        # without a connection: they may have been cut off at the same time, and may connect again soon.
        return lost + (self._reap_cut_off(worker, now) if lease_us < _FOR_EVER_US else 0)

    def _reap_cut_off(self, worker: str, now: int) -> int:
        """Reap the runs of workers whose connection has been gone for GRACE_S seconds without a new heartbeat."""
        seen_s = time.monotonic()
        found: dict[str, int] = {row[0]: row[1] for row in self._database.read("workers_without_session")}
        found.pop(worker, None)
        before = self._cut_off
        self._cut_off = {
            other: before[other] if other in before and before[other][0] == beat else (beat, seen_s) for other, beat in found.items()
        }
        if found.keys() - before.keys():
            # The next turn of this process may be much later, so look again as soon as GRACE_S seconds have passed.
            self._look_s = min(self._look_s, seen_s + GRACE_S)
        gone = [(other, beat) for other, (beat, since_s) in self._cut_off.items() if seen_s - since_s >= GRACE_S]
        if not gone:
            return 0

        def lose(cursor: Cursor) -> int:
            return sum(lose_runs_of_silent_worker(cursor, other, now, beat) for other, beat in gone)

        return self._database.write(lose, lambda cursor, _: False)

    def _count(self, lease_us: int) -> None:
        if time.monotonic() - self._counted_s < _COUNT_EVERY_S:
            return
        self._counted_s = time.monotonic()
        silent = {"silent_us": max(_FORGET_US, 10 * lease_us)}
        ((worker_count, ancient),) = self._database.read("count_workers", {"lease_us": lease_us, **silent})
        self._bell.worker_count = max(worker_count, 1)
        if ancient:
            self._database.write(lambda cursor: cursor.change("forget_workers", silent), lambda cursor, _: True)
