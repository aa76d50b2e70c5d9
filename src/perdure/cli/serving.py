"""Which runs no live worker can go on with, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from perdure.core.identity import undone_by
from perdure.engine.api import Reading
from perdure.inspect.serving import missing, name_of
from perdure.inspect.view import all_rows
from perdure.store.api import FINISHED, Filter, RunRow, Status, WorkerRow


def gap(row: RunRow, workers: Sequence[WorkerRow]) -> str | None:
    """Why nobody goes on with the run, or would if it were ready, in a few words; None if one would, it has ended, or is an undo."""
    if row.status in FINISHED or undone_by(row.run_id) is not None:
        return None  # an undo goes on with the command that began it: no worker serves one
    if row.holder is None:
        return _lack(row, workers)
    if any(worker.alive and worker.worker == row.holder for worker in workers):
        return None
    # It is taken over by the next worker that looks; that there is one is not certain.
    held = f"held by {name_of(row.holder, workers)}, which is dead or silent"
    return "; ".join(words for words in (held, _lack(row, workers)) if words)


def _lack(row: RunRow, workers: Sequence[WorkerRow]) -> str | None:
    if not any(worker.alive for worker in workers):
        return "no worker is up"
    lacking = missing(row, workers)
    return None if lacking is None else lacking.partition(": ")[0]


def stranded(row: RunRow, workers: Sequence[WorkerRow], now: int) -> str | None:
    """The same for a run that is ready: it would go on now, and nobody takes it."""
    return gap(row, workers) if row.ready_at is not None and row.ready_at <= now else None


def unserved(store: Reading, workers: Sequence[WorkerRow], wanted: Filter) -> list[RunRow]:
    """Unfinished runs that no live worker could go on with, whatever they wait for, newest first; the filter's limit does not count."""
    open_ = [one for one in get_args(Status) if one not in FINISHED and wanted.status in (None, one)]
    rows = [row for one in open_ for row in all_rows(store, Filter(one, wanted.agent, wanted.tenant)) if gap(row, workers) is not None]
    return sorted(rows, key=lambda row: row.created_at, reverse=True)
