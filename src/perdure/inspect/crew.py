"""Who works, for how long they have been silent, and what waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from perdure.engine.api import Reading
from perdure.inspect.words import iso, plural, seconds
from perdure.settings import Queue
from perdure.store.api import Backlog, RunRow, WorkerRow


class Member(Struct, frozen=True):
    """A worker that has signed on and not off."""

    worker: str
    name: str  # host:pid
    alive: bool
    since: str  # ISO 8601
    last_seen: str
    silent_s: float
    lease_left_s: float  # below zero: whoever looks first takes its runs
    runs: int
    serves: list[str]
    queues: list[str] | None  # None: all


class Lag(Struct, frozen=True):
    """A queue: how much of it is ready, for how long, and how much is being worked on."""

    queue: str
    ready: int
    waited_s: float  # the one that has waited longest
    held: int
    tenants: int
    limit: int | None  # by the settings of whoever looks


class Crew(Struct, frozen=True):
    workers: list[Member]
    queues: list[Lag]


def crew(store: Reading, now: int, lease_us: int, limits: Mapping[str, Queue]) -> Crew:
    """Everybody who has signed on, and every queue in which something is ready or held."""
    parties: dict[str, list[Backlog]] = {}
    for party in store.backlog(now):
        parties.setdefault(party.queue, []).append(party)
    queues = [_lag(queue, members, limits.get(queue), now) for queue, members in parties.items()]
    return Crew([_member(worker, now, lease_us) for worker in store.workers(now, lease_us)], queues)


def _member(worker: WorkerRow, now: int, lease_us: int) -> Member:
    return Member(
        worker=worker.worker,
        name=worker.name,
        alive=worker.alive,
        since=iso(worker.started_at),
        last_seen=iso(worker.beat_at),
        silent_s=seconds(max(now - worker.beat_at, 0)),
        lease_left_s=seconds(worker.beat_at + lease_us - now),
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
    """Which limit of its queue keeps the run from being taken, in words; None when none does. Every worker goes by its own settings."""
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
