"""Which runs no live worker can drive, and why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perdure.core.identity import undone_by
from perdure.core.query import EVERYTHING, UNFINISHED, Query
from perdure.engine.api import Reading
from perdure.inspect.view import all_rows
from perdure.inspect.workers import missing, name_of, state_of
from perdure.store.api import FINISHED, RunRow, WorkerRow


def gap(row: RunRow, workers: Sequence[WorkerRow]) -> str | None:
    """In a few words: why no worker drives the run now, or why no worker will drive the run when it is ready.

    None if a worker drives the run or will drive the run, if the run has ended, or if it is an undo or a specimen.
    """
    if row.status in FINISHED or undone_by(row.run_id) is not None or row.specimen is not None:
        return None  # no worker serves an undo: only `perdure undo` drives an undo
    if row.holder is None:
        return _lack(row, workers)
    holder = next((worker for worker in workers if worker.worker == row.holder), None)
    if holder is not None and holder.alive:
        return None
    # The next worker that serves the run takes it over. If there is no such worker, `_lack` says so.
    held = f"held by {name_of(row.holder, workers)}, which {state_of(holder)}"
    return "; ".join(words for words in (held, _lack(row, workers)) if words)


def _lack(row: RunRow, workers: Sequence[WorkerRow]) -> str | None:
    if not any(worker.alive for worker in workers):
        return "no worker is up"
    lacking = missing(row, workers)
    return None if lacking is None else lacking.partition(": ")[0]


def stranded(row: RunRow, workers: Sequence[WorkerRow], now: int) -> str | None:
    """Like `gap`, but only for a run that is ready; None if the run is not ready."""
    return gap(row, workers) if row.ready_at is not None and row.ready_at <= now else None


def unserved(store: Reading, workers: Sequence[WorkerRow], query: Query = EVERYTHING) -> Iterator[RunRow]:
    """Unfinished runs that match the query and that no live worker can drive, newest first."""
    return (row for row in all_rows(store, query.within(status=UNFINISHED)) if gap(row, workers) is not None)
