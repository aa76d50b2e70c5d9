"""Runs that wait because their workers died: they may be the cause, and the workers that serve them hold as many such runs as they may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perdure.core.suspects import ANY_SIZE, SUSPECT_CRASHES, Group, largest_group
from perdure.inspect.serving import serves
from perdure.inspect.words import plural
from perdure.store.api import RunRow, WorkerRow

NAMED = 3  # workers


def crashes_if_taken(row: RunRow) -> int:
    """How many workers in a row died with the run and without progress, so far."""
    return row.crashes + (row.lost > 0)


def waits_as_suspect(row: RunRow, workers: Sequence[WorkerRow], groups: Mapping[str, Group], now: int) -> bool:
    """Whether the run is ready, and every worker that would take it holds other suspects that leave no room for it."""
    crashes = crashes_if_taken(row)
    if row.holder is not None or row.ready_at is None or row.ready_at > now or crashes < SUSPECT_CRASHES:
        return False
    would = [worker for worker in workers if serves(worker, row)]
    return bool(would) and not any(groups.get(worker.worker, Group()).admits(crashes, row.lost_with) for worker in would)


def suspect_words(row: RunRow, workers: Sequence[WorkerRow], groups: Mapping[str, Group]) -> str:
    """Why it waits: how many workers died with it, how large a group of suspects it may be in, and which workers hold one."""
    most = largest_group(crashes_if_taken(row), row.lost_with)
    own = "" if most == ANY_SIZE else ", this one alone" if most == 1 else f", this one in a group of at most {most:,}"
    busy = [worker for worker in workers if serves(worker, row) and worker.worker in groups]
    held = ", ".join(f"{worker.name} holds {groups[worker.worker].size:,}" for worker in busy[:NAMED])
    return f"{deaths_words(row)}: it may be what kills them, and waits as a suspect; suspects are driven in groups{own}, and {held}"


def deaths_words(row: RunRow) -> str:
    return f"{plural(crashes_if_taken(row), 'worker')} in a row died with it"
