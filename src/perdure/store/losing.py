"""Runs that a worker has lost: they can be claimed at once, and each remembers how many others may be to blame for it.

What is taken from a dead worker one by one, before the others, is not counted beside those: on PostgreSQL a run that is just being
written to, on both stores one that somebody has written to before anybody had noticed the death. It is rare, and an innocent run is
blamed only after several such deaths in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from perdure.core.suspects import SUSPECT_CRASHES
from perdure.store.cursor import Cursor

LEASE_RAN_OUT, PROVEN_DEAD = 1, 2  # perdure_runs.lost


class Load(NamedTuple):
    """What a worker holds."""

    runs: int
    suspects: int

    def beside(self, crashes: int) -> int:
        """How many others may be to blame when a run with so many crashes is lost with that worker."""
        return max((self.suspects if crashes >= SUSPECT_CRASHES else self.runs) - 1, 0)


def load_of(cursor: Cursor, worker: str) -> Load:
    runs, suspects = cursor.all("load_of_worker", (worker,))[0]
    return Load(runs, suspects)


def lose_runs(cursor: Cursor, worker: str, now: int, lost: int) -> int:
    """Make all runs of that worker claimable; how many."""
    return cursor.change("lose_runs", {**_values(cursor, worker, now), "lost": lost})


def lose_runs_of_silent_worker(cursor: Cursor, worker: str, now: int, beat_at: int) -> int:
    """The same, unless the worker has given another sign of life since that one."""
    return cursor.change("lose_runs_of_silent_worker", {**_values(cursor, worker, now), "lost": LEASE_RAN_OUT, "beat_at": beat_at})


def lose_some(cursor: Cursor, worker: str, now: int, runs: Iterable[tuple[str, int]]) -> int:
    """The same for these of them, each with its epoch, unless it was claimed anew since we looked."""
    values = {**_values(cursor, worker, now), "lost": LEASE_RAN_OUT}
    return sum(cursor.change("lose_run", {**values, "run_id": run_id, "epoch": epoch}) for run_id, epoch in sorted(runs))


def _values(cursor: Cursor, worker: str, now: int) -> Mapping[str, object]:
    # Counted before the statement that takes them away: inside it, SQLite would count what is left of them.
    load = load_of(cursor, worker)
    return {"worker": worker, "now": now, "beside": load.beside(0), "beside_suspects": load.beside(SUSPECT_CRASHES)}
