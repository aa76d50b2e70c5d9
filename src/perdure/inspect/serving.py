"""Who would go on with a run: the workers that live, have its agent in its version, and take from its queue."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.inspect.words import plural
from perdure.store.api import RunRow, Served, WorkerRow


def serves(worker: WorkerRow, row: RunRow) -> bool:
    """Whether this worker would take the run."""
    return worker.alive and Served(row.agent, row.version) in worker.serves and (worker.queues is None or row.queue in worker.queues)


def name_of(worker: str, workers: Iterable[WorkerRow]) -> str:
    """The worker as people know it: host:pid; its id alone when it has signed off."""
    return next((one.name for one in workers if one.worker == worker), worker)


def is_served(row: RunRow, workers: Iterable[WorkerRow]) -> bool:
    """Whether any worker that lives would take the run."""
    return any(serves(worker, row) for worker in workers)


def version_served(row: RunRow, workers: Iterable[WorkerRow]) -> bool:
    """Whether any worker that lives has the run's code, whatever queues it takes from."""
    return any(worker.alive and Served(row.agent, row.version) in worker.serves for worker in workers)


def missing(row: RunRow, workers: Iterable[WorkerRow]) -> str | None:
    """What no worker has that this run needs, in words; None when one has it, or when no worker lives at all."""
    alive = [worker for worker in workers if worker.alive]
    if not alive or is_served(row, alive):
        return None
    here = f"{plural(len(alive), 'worker')} {'is' if len(alive) == 1 else 'are'} alive"
    versions = sorted({served.version for worker in alive for served in worker.serves if served.agent == row.agent})
    if version_served(row, alive):
        queues = sorted({queue for worker in alive for queue in worker.queues or ()})
        return f"no worker takes from queue {row.queue}: {here}, for {', '.join(queues)}"
    if versions:
        return f"no worker serves version {row.version} of {row.agent}: {here}, with version {' and '.join(versions)}"
    return f"no worker serves agent {row.agent}: {here}, with other agents"
