"""Who works on what, over several machines: a worker whose connection is gone is looked at more closely than its lease alone would."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from perdure.errors import StoreUnavailable
from perdure.settings import Queue
from perdure.store.api import Claimed, Served
from perdure.store.claims import Claims
from perdure.store.cursor import Cursor
from perdure.store.losing import lose_runs_of_silent_worker
from perdure.store.part import Means
from perdure.store.postgres.bell import NotifyBell
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.taking import Taking, Unheard

GRACE_S = 6.0  # a worker that was cut off has this long to come back: connecting may take 5 s, and after an outage all of them do it
_COUNT_EVERY_S = 10.0
_FEW = 10  # workers; of so many everybody looks at the others whenever it is asked to
_SPREAD_S = 0.05  # per worker, of more: together they look twenty times a second, however many they are
_FOR_EVER_US = 10**15
_FORGET_US = 3_600_000_000


class PostgresClaims(Claims):
    _bell: NotifyBell
    _database: PostgresDatabase

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._taking = Taking(self._database)
        self._heard = -1  # rings, before the last claim
        self._cut_off: dict[str, tuple[int, float]] = {}  # worker → its last beat, and when we first saw it without a connection
        self._counted_s = float("-inf")
        self._look_s = float("-inf")  # when it is our turn again

    def register(
        self, worker: str, name: str, pid: int, now: int, serves: Sequence[Served] = (), queues: Sequence[str] | None = None
    ) -> None:
        super().register(worker, name, pid, now, serves, queues)
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
        """The claim just before has seen it, most of the time: then nothing is asked of the server."""
        if self._bell.listening and self._bell.heard == self._heard and (known := self._taking.next_ready(served, queues)) is not None:
            return known.ready_at
        return super().next_ready(served, queues)

    def _heard_late(self, unheard: Unheard, weighed: Sequence[Claimed]) -> list[Claimed]:
        """What the statement whose answer was lost has taken after all. It may be more than was asked for, and would be driven by nobody."""
        try:
            return self._known(unheard.arrived())
        except StoreUnavailable:
            if not weighed:
                raise
            return []  # those that were taken since are not lost for that; these are found among what is held and not driven

    def _known(self, taken: Sequence[tuple[int, Claimed]]) -> list[Claimed]:
        for key, claimed in taken:
            self._keys[claimed.lease.run_id] = key
        return [claimed for _, claimed in taken]

    def _reap(self, worker: str, lease_us: int, now: int) -> int:
        """Among many workers it is not always one's turn: then nothing, and another one looks."""
        self._count(lease_us)
        if self._bell.crowd > _FEW:
            if time.monotonic() < self._look_s:
                return 0
            self._look_s = time.monotonic() + self._bell.crowd * _SPREAD_S * random.uniform(0.5, 1.5)
        lost = super()._reap(worker, lease_us, now)
        # Whoever judges nobody by silence has been out of touch itself: then everybody else's connection may be on its way back as well.
        return lost + (self._reap_cut_off(worker, now) if lease_us < _FOR_EVER_US else 0)

    def _reap_cut_off(self, worker: str, now: int) -> int:
        """Runs of workers whose connection has been gone for a while and who have given no other sign of life since."""
        seen_s = time.monotonic()
        found: dict[str, int] = {row[0]: row[1] for row in self._database.read("workers_without_session")}
        found.pop(worker, None)
        before = self._cut_off
        self._cut_off = {
            other: before[other] if other in before and before[other][0] == beat else (beat, seen_s) for other, beat in found.items()
        }
        if found.keys() - before.keys():
            # Our next turn may be far off: whoever sees it first looks again as soon as the time is up.
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
        ((crowd, ancient),) = self._database.read("count_workers", {"lease_us": lease_us, **silent})
        self._bell.crowd = max(crowd, 1)
        if ancient:
            self._database.write(lambda cursor: cursor.change("forget_workers", silent), lambda cursor, _: True)
