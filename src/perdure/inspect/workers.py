"""The workers and the queues: which workers are alive, which agents they serve, which runs wait, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from perdure.core.suspects import ANY_SIZE, SUSPECT_CRASHES, Group, largest_group
from perdure.engine.api import Reading
from perdure.inspect.text import iso, plural, seconds
from perdure.settings import Queue
from perdure.store.api import Backlog, RunRow, WorkerRow
from perdure.store.api import serves as has_code


class WorkerView(Struct, frozen=True):
    """A worker that is registered in the store, alive or dead."""

    worker: str
    name: str  # host:pid
    alive: bool
    dead: bool  # the process is proven to be gone; a worker that is neither alive nor dead is silent
    since: str  # ISO 8601
    last_seen: str
    silent_s: float
    lease_s: float  # the worker's own setting
    lease_left_s: float  # below zero: any other worker may take over the runs of this worker
    runs: int
    serves: list[str]
    queues: list[str] | None  # None: the worker serves all queues


class Lag(Struct, frozen=True):
    """A queue: how many runs are ready, how long the oldest of these has waited, and how many runs are held."""

    queue: str
    ready: int
    waited_s: float  # how long the oldest ready run has waited
    held: int
    tenants: int
    limit: int | None  # at most this many held runs, by the settings of this process


class Crew(Struct, frozen=True):
    workers: list[WorkerView]
    queues: list[Lag]


def crew(store: Reading, now: int, lease_us: int, limits: Mapping[str, Queue]) -> Crew:
    """Every registered worker, and every queue that has ready or held runs."""
    parties: dict[str, list[Backlog]] = {}
    for party in store.backlog(now):
        parties.setdefault(party.queue, []).append(party)
    queues = [_lag(queue, members, limits.get(queue), now) for queue, members in parties.items()]
    return Crew([_member(worker, now, lease_us) for worker in store.workers(now, lease_us)], queues)


def lease_of(worker: WorkerRow, lease_us: int) -> int:
    """The worker's own lease (µs). `lease_us`: the setting of this process, for a worker that recorded none."""
    return lease_us if worker.lease_us is None else worker.lease_us


def state_of(worker: WorkerRow | None) -> str:
    """Is the holder of a run alive, dead or silent, in a few words? None: the holder is not registered any more."""
    if worker is None:
        return "is not registered any more"
    return "is alive" if worker.alive else "is dead" if worker.dead else "is silent (suspended, or cut off from the database)"


def _member(worker: WorkerRow, now: int, lease_us: int) -> WorkerView:
    lease = lease_of(worker, lease_us)
    return WorkerView(
        worker=worker.worker,
        name=worker.name,
        alive=worker.alive,
        dead=worker.dead,
        since=iso(worker.started_at),
        last_seen=iso(worker.beat_at),
        silent_s=seconds(max(now - worker.beat_at, 0)),
        lease_s=seconds(lease),
        lease_left_s=seconds(worker.beat_at + lease - now),
        runs=worker.runs,
        serves=[f"{one.agent}@{one.version}" for one in worker.serves],
        queues=None if worker.queues is None else list(worker.queues),
    )


def _lag(queue: str, parties: Sequence[Backlog], limit: Queue | None, now: int) -> Lag:
    since = [party.since for party in parties if party.since is not None]
    return Lag(
        queue=queue,
        ready=sum(party.ready for party in parties),
        waited_s=seconds(max(now - min(since), 0)) if since else 0.0,
        held=sum(party.held for party in parties),
        tenants=len(parties),
        limit=None if limit is None else limit.concurrency,
    )


def no_room(row: RunRow, backlog: Sequence[Backlog], limits: Mapping[str, Queue]) -> str | None:
    """In words: the queue limit that blocks the run; None if no limit blocks it. Workers may have other settings."""
    limit = limits.get(row.queue)
    if limit is None:
        return None
    of_queue = sum(party.held for party in backlog if party.queue == row.queue)
    of_tenant = sum(party.held for party in backlog if (party.queue, party.tenant) == (row.queue, row.tenant))
    if limit.concurrency is not None and of_queue >= limit.concurrency:
        return f"queue {row.queue} is full: {plural(of_queue, 'run')} of at most {limit.concurrency} are being worked on"
    if limit.per_tenant is not None and of_tenant >= limit.per_tenant:
        return f"tenant {row.tenant} has its share of queue {row.queue}: {plural(of_tenant, 'run')} of at most {limit.per_tenant}"
    return None


# -- Which workers would claim a run? Live workers that serve the run's agent in its version, and its queue


def serves(worker: WorkerRow, row: RunRow) -> bool:
    """Would this worker claim the run?"""
    return worker.alive and has_code(worker.serves, row) and (worker.queues is None or row.queue in worker.queues)


def name_of(worker: str, workers: Iterable[WorkerRow]) -> str:
    """The name of the worker (host:pid). If the worker is no longer registered: its id."""
    return next((one.name for one in workers if one.worker == worker), worker)


def is_served(row: RunRow, workers: Iterable[WorkerRow]) -> bool:
    """Would any live worker claim the run?"""
    return any(serves(worker, row) for worker in workers)


def version_served(row: RunRow, workers: Iterable[WorkerRow]) -> bool:
    """Does any live worker serve the run's version, on any queue?"""
    return any(worker.alive and has_code(worker.serves, row) for worker in workers)


def missing(row: RunRow, workers: Iterable[WorkerRow]) -> str | None:
    """In words: what the run needs and no live worker serves.

    None if a live worker would claim the run, or if no worker is alive.
    """
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


# -- Suspects: ready runs whose workers died. A suspect waits while every worker that serves it has a full group


NAMED = 3  # at most this many workers are named


def crashes_if_taken(row: RunRow) -> int:
    """How many workers died in a row while they held the run, without progress between these deaths."""
    return row.crashes + (row.lost > 0)


def waits_as_suspect(row: RunRow, workers: Sequence[WorkerRow], groups: Mapping[str, Group], now: int) -> bool:
    """Is the run a ready suspect, and does every worker that serves it hold a group that does not admit it?"""
    crashes = crashes_if_taken(row)
    if row.holder is not None or row.ready_at is None or row.ready_at > now or crashes < SUSPECT_CRASHES:
        return False
    would = [worker for worker in workers if serves(worker, row)]
    return bool(would) and not any(groups.get(worker.worker, Group()).admits(crashes, row.lost_with) for worker in would)


def suspect_words(row: RunRow, workers: Sequence[WorkerRow], groups: Mapping[str, Group]) -> str:
    """Why the suspect waits: how many workers died with this run, how large its group may be, who holds groups now."""
    most = largest_group(crashes_if_taken(row), row.lost_with)
    own = "" if most == ANY_SIZE else ", this one alone" if most == 1 else f", this one in a group of at most {most:,}"
    busy = [worker for worker in workers if serves(worker, row) and worker.worker in groups]
    held = ", ".join(f"{worker.name} holds {groups[worker.worker].size:,}" for worker in busy[:NAMED])
    return f"{deaths_words(row)}: it may be what kills them, and waits as a suspect; suspects are driven in groups{own}, and {held}"


def deaths_words(row: RunRow) -> str:
    return f"{plural(crashes_if_taken(row), 'worker')} in a row died with it"
