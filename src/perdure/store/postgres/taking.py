"""The first runs of a line, claimed in two round trips: a look without locks, and a statement that takes what is still as it was seen.

Whose turn it is, limits and suspects are weighed inside a transaction, which takes ten. Where one line alone has ready runs, its queue has
no limit and nobody in it is suspect, there is nothing to weigh; and with the look comes what there is of a new run's journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import psycopg

from perdure.core.suspects import SUSPECT_CRASHES
from perdure.settings import Queue
from perdure.store.api import Claimed, Served
from perdure.store.claims import Take
from perdure.store.cursor import Cursor, Row
from perdure.store.lines import crashes_if_taken, which
from perdure.store.postgres.arrays import Byteas, Int8s, Texts
from perdure.store.postgres.cursor import PostgresCursor
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.faults import is_loss
from perdure.store.rows import is_sound, key_of

_LOOKS = 3
_EVENT = slice(26, 33)  # behind the columns of a run


class Unheard(Exception):
    """Nobody knows what was taken, and it may be so yet: whoever claims next, in a transaction, either takes it, and what comes later is
    refused, or passes it by, since it is taken by now or just being taken. What `arrived` tells is ours."""

    def __init__(self, arrived: Callable[[], list[tuple[int, Claimed]]]) -> None:
        self.arrived = arrived


class _Lost(Exception):
    """The connection broke while the statement was under way."""


class _Seen(NamedTuple):
    runs: list[Row]  # each with its first event
    lines: int
    queue: str
    tenant: str
    name: str | None  # of the worker

    def is_to_be_weighed(self, limits: Mapping[str, Queue]) -> bool:
        return self.name is None or self.lines > 1 or self.queue in limits or not all(map(_is_simple, self.runs))


class Taking:
    """Claims where there is nothing to weigh."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    def claim(
        self, worker: str, served: Sequence[Served], limit: int, now: int, queues: Sequence[str] | None, limits: Mapping[str, Queue]
    ) -> list[tuple[int, Claimed]] | None:
        """What was taken, with its numbers; None when it has to be found out in a transaction."""
        for _ in range(_LOOKS):
            rows = self._database.read("first_of_line", {"worker": worker, "now": now, "limit": limit, **which(served, queues)})
            if not rows:
                return None  # there is a row in any case, except for a name that cannot be stored
            seen = _seen(rows)
            if seen.is_to_be_weighed(limits):
                return None
            if not seen.runs:
                return []
            if taken := self._take_seen(seen, worker, now):
                return taken
            # Others were faster, and another look shows what they have left.
        return None

    def _take_seen(self, seen: _Seen, worker: str, now: int) -> list[tuple[int, Claimed]]:
        firsts = {key_of(row): row[_EVENT] for row in seen.runs if row[_EVENT][0] is not None}
        takes = {key_of(row): Take(row, worker, seen.name or "", now) for row in seen.runs}

        def of(keys: set[int]) -> list[tuple[int, Claimed]]:
            return [(key, take.with_journal(firsts.get(key))) for key, take in takes.items() if key in keys]

        try:
            return of(self._take(_values(list(takes.values()), seen, worker, now)))
        except _Lost:
            # The crash window: they may be taken, or be it yet, and nobody has heard so. What is there is ours.
            if there := self._arrived(takes, wait=False):
                return of(there)
            raise Unheard(lambda: of(self._arrived(takes, wait=True))) from None

    def _take(self, values: Mapping[str, object]) -> set[int]:
        begun_s = time.monotonic()
        try:
            with self._database.connections.lent() as connection:
                taken = {key for (key,) in PostgresCursor(connection).all("claim_many", values)}
        except psycopg.Error as error:
            if is_loss(error):
                self._database.connections.lost()
                raise _Lost from None
            return set()  # nothing was written, and the transaction meets the reason again
        self._database.committed_since(begun_s)
        return taken

    def _arrived(self, takes: Mapping[int, Take], *, wait: bool) -> set[int]:
        """Those that bear our nonces: it was one transaction, so that with one of them all are there."""

        def look(cursor: Cursor) -> set[int]:
            if wait:  # for the lost statement, should it be under way
                cursor.all("lock_runs", {"keys": list(takes), "ending": []})
            guards = {key: cursor.one("guard_of_run", (key,)) for key in takes}
            return {key for key, guard in guards.items() if guard is not None and guard[4] == takes[key].claimed.lease.nonce}

        return self._database.write(look, lambda *_: True) if wait else self._database.reading(look)


def _seen(rows: list[Row]) -> _Seen:
    lines, queue, tenant, name = rows[0][-4:]
    return _Seen([row for row in rows if row[0] is not None], lines, queue, tenant, name)


def _is_simple(row: Row) -> bool:
    return is_sound(row) and crashes_if_taken(row) < SUSPECT_CRASHES


def _values(takes: Sequence[Take], seen: _Seen, worker: str, now: int) -> dict[str, object]:
    events = [take.sealed.event for take in takes]
    return {
        "ids": Int8s.of([take.key for take in takes]),
        "befores": Int8s.of([event.seq - 1 for event in events]),
        "epochs": Int8s.of([event.epoch for event in events]),
        "nonces": Byteas.of([take.claimed.lease.nonce for take in takes]),
        "heads": Byteas.of([take.sealed.hash for take in takes]),
        "crashes": Int8s.of([take.claimed.row.crashes for take in takes]),
        "event_ids": Byteas.of([bytes.fromhex(event.event_id) for event in events]),
        "data": Texts.of_utf8([take.sealed.data for take in takes]),
        "worker": worker,
        "now": now,
        "queue": seen.queue,
        "tenant": seen.tenant,
    }
