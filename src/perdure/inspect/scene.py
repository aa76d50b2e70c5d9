"""What the page about a run is made from: the run, who holds it, who else works, its children, approvals and budgets, and the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.decide import Patience
from perdure.core.events import RunClaimed
from perdure.engine.api import Reading
from perdure.inspect.cost import CostAll, cost_with_children
from perdure.inspect.crew import no_room
from perdure.inspect.serving import is_served, missing, version_served
from perdure.inspect.shortage import Shortage, own_shortage, shortages_below
from perdure.inspect.suspects import suspect_words, waits_as_suspect
from perdure.inspect.undone import Undoing, undoing_of
from perdure.inspect.view import RunView, loader, read_run
from perdure.inspect.words import iso, seconds
from perdure.settings import Settings
from perdure.store.api import ApprovalRow, InboxRow, Ledger, RunRow, WorkerRow


class Holder(Struct, frozen=True):
    worker: str
    name: str
    alive: bool
    last_seen: str | None  # ISO 8601
    silent_s: float | None
    since: str | None = None  # when it took the run
    lease_until: str | None = None  # unless it gives another sign of life
    runs: int = 0


class Scene(Struct, frozen=True):
    """What the page is made from."""

    reading: RunView
    holder: Holder | None
    workers: list[WorkerRow]
    now: int
    max_asks: int  # how often a reconcile hook may say "in progress"
    patience: Patience
    below: list[RunRow]  # its children that have not ended, theirs, and so on
    approvals: dict[str, ApprovalRow]  # those that the journal has as pending
    ledgers: list[Ledger]
    short: Shortage | None  # the budget that it stands still for
    short_below: list[Shortage]  # those that runs below it stand still for
    undoing: Undoing | None  # what undoes it
    cost_all: CostAll | None  # of a run that has children: with them
    unread: list[InboxRow]  # of a finished run: what arrived as it ended
    load: Callable[[Payload], bytes]
    no_room: str | None = None  # the limit of its queue that keeps a ready run from being taken
    suspect: str | None = None  # why it waits, though it is ready: its workers died, and others hold runs of that kind

    @property
    def held(self) -> bool:
        """Whether somebody who lives works on the run."""
        return self.holder is not None and self.holder.alive

    @property
    def alive(self) -> int:
        return sum(worker.alive for worker in self.workers)

    @property
    def served(self) -> bool:
        """Whether a worker lives that would go on with the run."""
        return is_served(self.reading.row, self.workers)

    @property
    def version_served(self) -> bool:
        """Whether a worker lives that has the run's code, whatever queues it takes from."""
        return version_served(self.reading.row, self.workers)

    @property
    def missing(self) -> str | None:
        """What no worker has that the run needs; None also when there is no worker at all."""
        return missing(self.reading.row, self.workers)


def look(store: Reading, run_id: str, now: int, settings: Settings) -> Scene:
    """The run and its surroundings, now."""
    lease_us = round(settings.lease_s * 1e6)
    reading = read_run(store, run_id)
    state = reading.state
    workers = store.workers(now, lease_us)
    row = reading.row
    is_ready = row.holder is None and row.ready_at is not None and row.ready_at <= now
    below = store.family(run_id) if state.alive else []
    ledgers = store.ledgers(run_id)
    groups = store.suspects()
    asked = [store.approval(ask.request.approval) for ask in state.pending.values()]
    return Scene(
        reading=reading,
        holder=_holder(reading, workers, now, lease_us),
        workers=workers,
        now=now,
        max_asks=settings.reconcile_asks,
        patience=Patience.of(settings),
        below=below,
        approvals={row.approval: row for row in asked if row is not None},
        ledgers=ledgers,
        short=own_shortage(reading, ledgers),
        short_below=shortages_below(store, below),
        undoing=undoing_of(store, run_id, now) if state.finished else None,
        cost_all=cost_with_children(store, reading.row) if state.children else None,
        unread=store.unread(run_id) if state.finished else [],
        load=loader(store),
        no_room=no_room(row, store.backlog(now), settings.queues) if settings.queues and is_ready else None,
        suspect=suspect_words(row, workers, groups) if waits_as_suspect(row, workers, groups, now) else None,
    )


def _holder(reading: RunView, workers: Sequence[WorkerRow], now: int, lease_us: int) -> Holder | None:
    held_by = reading.row.holder
    if held_by is None:
        return None
    claims = ((event.ts, event.body.name) for event in reversed(reading.events) if isinstance(event.body, RunClaimed))
    at, name = next(claims, (None, ""))
    since = None if at is None else iso(at)
    found = next((worker for worker in workers if worker.worker == held_by), None)
    if found is None:
        return Holder(held_by, name or held_by, alive=False, last_seen=None, silent_s=None, since=since)
    seen = iso(found.beat_at), seconds(max(now - found.beat_at, 0))
    return Holder(held_by, found.name, found.alive, *seen, since, iso(found.beat_at + lease_us), found.runs)
