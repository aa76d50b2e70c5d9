"""What the page about a run is made from: the run, who holds it, who else works, and what time it is."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perdure.inspect.view import Reading, read_run
from perdure.inspect.words import iso, seconds
from perdure.store.api import Store, WorkerRow


class Holder(Struct, frozen=True):
    worker: str
    name: str
    alive: bool
    last_seen: str | None  # ISO 8601
    silent_s: float | None


class Scene(Struct, frozen=True):
    """What the page is made from."""

    reading: Reading
    holder: Holder | None
    workers: list[WorkerRow]
    now: int
    max_asks: int  # how often a reconcile hook may say "in progress"

    @property
    def held(self) -> bool:
        """Whether somebody who lives works on the run."""
        return self.holder is not None and self.holder.alive

    @property
    def alive(self) -> int:
        return sum(worker.alive for worker in self.workers)


def look(store: Store, run_id: str, now: int, lease_us: int, max_asks: int) -> Scene:
    """The run and its surroundings, now."""
    reading = read_run(store, run_id)
    workers = store.workers(now, lease_us)
    return Scene(reading, _holder(reading, workers, now), workers, now, max_asks)


def _holder(reading: Reading, workers: Sequence[WorkerRow], now: int) -> Holder | None:
    held_by = reading.row.holder
    if held_by is None:
        return None
    found = next((worker for worker in workers if worker.worker == held_by), None)
    if found is None:
        return Holder(held_by, held_by, alive=False, last_seen=None, silent_s=None)
    return Holder(held_by, found.name, found.alive, iso(found.beat_at), seconds(now - found.beat_at))
