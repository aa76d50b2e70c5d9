"""Who works on what, over several machines: a worker whose connection is gone is looked at more closely than its lease alone would."""

from __future__ import annotations

import time

from perdure.store.claims import LEASE_RAN_OUT, Claims
from perdure.store.cursor import Cursor, Database
from perdure.store.journal import Journal
from perdure.store.liveness import Liveness
from perdure.store.postgres.bell import NotifyBell

GRACE_S = 3.0  # a worker that was cut off has this long to come back: after a restart of the server all of them have
_COUNT_EVERY_S = 10.0
_FORGET_US = 3_600_000_000


class PostgresClaims(Claims):
    def __init__(self, database: Database, journal: Journal, liveness: Liveness, bell: NotifyBell) -> None:
        super().__init__(database, journal, liveness)
        self._bell = bell
        self._cut_off: dict[str, tuple[int, float]] = {}  # worker → its last beat, and when we first saw it without a connection
        self._counted_s = float("-inf")

    def reap(self, worker: str, lease_us: int, now: int) -> int:
        self._count(lease_us)
        return super().reap(worker, lease_us, now) + self._reap_cut_off(worker, now)

    def _reap_cut_off(self, worker: str, now: int) -> int:
        """Runs of workers whose connection has been gone for a while and who have given no other sign of life since."""
        seen_s = time.monotonic()
        found: dict[str, int] = {row[0]: row[1] for row in self._database.read("workers_without_session")}
        found.pop(worker, None)
        before = self._cut_off
        self._cut_off = {
            other: before[other] if other in before and before[other][0] == beat else (beat, seen_s) for other, beat in found.items()
        }
        gone = [(other, beat) for other, (beat, since_s) in self._cut_off.items() if seen_s - since_s >= GRACE_S]
        if not gone:
            return 0

        def lose(cursor: Cursor) -> int:
            return sum(
                cursor.change("lose_runs_of_cut_off_worker", {"worker": other, "now": now, "beat_at": beat, "lost": LEASE_RAN_OUT})
                for other, beat in gone
            )

        return self._database.write(lose, lambda cursor, _: False)

    def _count(self, lease_us: int) -> None:
        if time.monotonic() - self._counted_s < _COUNT_EVERY_S:
            return
        self._counted_s = time.monotonic()
        ((crowd, ancient),) = self._database.read("count_workers", {"silent_us": max(_FORGET_US, 10 * lease_us)})
        self._bell.crowd = max(crowd, 1)
        if ancient:
            self._database.write(
                lambda cursor: cursor.change("forget_workers", {"silent_us": max(_FORGET_US, 10 * lease_us)}), lambda cursor, _: True
            )
