"""The data of the page: the run, its holder, the workers, the run's children, approvals and budgets, and its undo.

Only `look`, in this module, reads the store; the other modules of the page only choose words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.decide import Patience
from perdure.core.events import BudgetExceeded, RunClaimed
from perdure.core.identity import undo_id, undone_by
from perdure.core.reopen import reopening, retry_point
from perdure.core.state import RunState, own_children
from perdure.engine.api import Reading
from perdure.errors import PerdureError
from perdure.inspect.cost import CostAll, Limit, cost_with_children, limit_words, limits_of
from perdure.inspect.text import amount, clock, iso, plain, plural, seconds
from perdure.inspect.view import RunView, loader, progress_now, read_run
from perdure.inspect.workers import is_served, lease_of, missing, no_room, suspect_words, version_served, waits_as_suspect
from perdure.settings import Settings
from perdure.store.api import FINISHED, ApprovalRow, InboxRow, Ledger, ProgressRow, RunRow, WorkerRow

RUNS_NAMED = 3
BUDGETS_NAMED = 3  # only a few, because a journal is read for each budget


# -- Budgets that stopped runs, with the amounts of now: reserved amounts may have been settled since the stop
class Shortage(Struct, frozen=True):
    """A budget that stopped one or more runs."""

    budget_of: str
    limit: Limit  # the limit that was reached, with the amounts of now
    wanted: int  # the amount that the first stopped call wanted
    runs: list[str]  # the runs below the page's run that this budget stopped

    @property
    def least(self) -> int:
        """The least amount to add before the first stopped call can start; 0 if the budget is large enough again."""
        spent, limit = self.limit.spent, self.limit.limit
        # A limit that is reached stops even a call that costs nothing.
        return max(spent + self.wanted - limit, spent - limit + 1, 0)


def own_shortage(store: Reading, reading: RunView, ledgers: Sequence[Ledger]) -> Shortage | None:
    """The budget that stopped the run itself, or because of which it failed; None if no budget did."""
    attention, over = reading.state.attention, reading.state.over
    if reading.state.status == "failed" and reading.row.specimen is None:
        return _failed_shortage(store, reading, ledgers)
    if over is None or attention is None or attention.reason != "budget":
        return None
    return _now(over, ledgers, [])


def _failed_shortage(store: Reading, reading: RunView, ledgers: Sequence[Ledger]) -> Shortage | None:
    """The budget because of which the run, or a child that a retry lets go on too, failed."""
    try:
        found = reopening(reading.events, retry_point(reading.events, reading.state), by="preview", state=reading.state)
    except PerdureError:
        return None  # it cannot be retried
    if found.over is not None:
        return _now(found.over, ledgers, [])
    below = (_failed_shortage(store, read_run(store, child), store.ledgers(child)) for child in found.children)
    return next((short for short in below if short is not None), None)


def shortages_below(store: Reading, below: Sequence[RunRow]) -> list[Shortage]:
    """The first BUDGETS_NAMED budgets that stopped runs below this run. Each budget has one entry for all its runs."""
    in_order = sorted(below, key=lambda row: (row.created_at, row.parent_call or 0))
    stopped = [row.run_id for row in in_order if row.attention == "budget"]
    found: list[Shortage] = []
    while stopped and len(found) < BUDGETS_NAMED:
        first = stopped.pop(0)
        over = read_run(store, first).state.over
        if over is not None:
            together = set(store.over_budget(over.budget_of)) & {*stopped}
            found.append(_now(over, store.ledgers(first), [first, *(run_id for run_id in stopped if run_id in together)]))
            stopped = [run_id for run_id in stopped if run_id not in together]
    return found


def _now(over: BudgetExceeded, ledgers: Sequence[Ledger], runs: list[str]) -> Shortage:
    ledger = next((ledger for ledger in ledgers if ledger.run_id == over.budget_of), None)
    limits = [] if ledger is None else limits_of(ledger.limits, ledger.spent, ledger.reserved)
    as_recorded = Limit(over.what, over.limit, over.used, 0)
    return Shortage(over.budget_of, next((limit for limit in limits if limit.what == over.what), as_recorded), over.wanted, runs)


def shortage_words(short: Shortage) -> str:
    """Whose budget it is, how much of the budget is used now, and how much more a call wanted."""
    wanted = f", and {amount(short.limit.what, short.wanted)} more wanted" if short.wanted else ""
    how = "is used up" if short.least else "was used up, and has room again"
    return f"the budget of run {short.budget_of} {how}: {limit_words(short.limit)}{wanted}"


def stopped_words(short: Shortage) -> str:
    """How many children this budget stopped, and their run ids."""
    who = plural(len(short.runs), "child stands", "children stand")
    names = ", ".join(short.runs[:RUNS_NAMED]) + (", …" if len(short.runs) > RUNS_NAMED else "")
    return f"{who} still for the budget of {short.budget_of} ({names}): {limit_words(short.limit)}"


# -- The undo of a finished run. It is a separate run, and its journal says which steps are done


class Undoing(Struct, frozen=True):
    """The run that undoes the root run of the page's run, and with it all runs below the root."""

    run_id: str
    status: str
    by: str  # who asked for the undo
    at: str  # the time of the undo's last event
    calls: dict[int, str]  # call of the page's run → "undone", "not undone" or "to be undone"
    words: str


def undoing_of(store: Reading, run_id: str, now: int) -> Undoing | None:
    """The undo of the run; None if there is no undo, or if the run itself is an undo."""
    undo = undo_id(run_id.partition("/")[0])
    if undone_by(run_id) is not None or store.get(undo) is None:
        return None
    reading = read_run(store, undo)
    state = reading.state
    assert state.created is not None
    planned = plain(state.created.input, loader(store))
    calls = {step["call"]: "not undone" for step in planned["left"] if step["run"] == run_id}
    outcomes = _outcomes(state)
    for place, step in enumerate(planned["steps"]):
        if step["run"] == run_id:
            calls[step["call"]] = outcomes[place] if place < len(outcomes) else "not undone" if state.finished else "to be undone"
    words = _words(reading.status, planned["by"], clock(state.updated_at, now), in_part="not undone" in outcomes or bool(planned["left"]))
    return Undoing(undo, reading.status, planned["by"], iso(state.updated_at), calls, words)


def _outcomes(state: RunState) -> list[str]:
    """The outcome of each step that the undo has finished, in the order of the steps."""
    undone = {call.number for call in state.calls.values() if call.phase == "completed"}
    given_up = {ask.number for ask in state.asks.values() if ask.outcome not in (None, "approved")}
    # The undo does its steps one after another, so the call numbers are in the order of the steps.
    return ["undone" if number in undone else "not undone" for number in sorted(undone | given_up)]


def _words(status: str, by: str, when: str, *, in_part: bool) -> str:
    if status == "succeeded":
        return f"undone{' in part' if in_part else ''} by {by} at {when}"
    if status in FINISHED:
        return f"its undo, which {by} asked for, {'was ' if status == 'cancelled' else ''}{status} at {when}: calls that it has undone stay undone"
    return f"being undone, as {by} asked: that is {status.replace('_', ' ')}"


# -- The scene: all data of the page


class Holder(Struct, frozen=True):
    worker: str
    name: str
    alive: bool
    last_seen: str | None  # ISO 8601
    silent_s: float | None
    since: str | None = None  # when the holder claimed the run
    lease_until: str | None = None  # when the lease ends, if the holder sends no more heartbeat
    runs: int = 0
    dead: bool = False  # it is proven that its process is gone; a holder that is neither alive nor dead is silent


class Scene(Struct, frozen=True):
    """All data of the page about one run, as it was when `look` read the store."""

    reading: RunView
    holder: Holder | None
    workers: list[WorkerRow]
    now: int
    max_asks: int  # how often a reconcile hook is asked before a person must decide
    patience: Patience
    below: list[RunRow]  # the unfinished runs below the run: children, their children, and so on
    approvals: dict[str, ApprovalRow]  # id → row, of the approvals that are pending in the journal
    ledgers: list[Ledger]
    short: Shortage | None  # the budget that stopped the run, or because of which it failed
    short_below: list[Shortage]  # the budgets that stopped runs below the run
    undoing: Undoing | None  # the run that undoes this run
    cost_all: CostAll | None  # only for a run with children: the cost together with the children
    unread: list[InboxRow]  # only for a finished run: the post that the run never read
    load: Callable[[Payload], bytes]
    progress: dict[int, ProgressRow] = {}  # call → the stored progress of its attempt, which is under way or was cut off
    no_room: str | None = None  # the queue limit that blocks a ready run
    suspect: str | None = None  # why a ready run waits as a suspect

    @property
    def held(self) -> bool:
        """Does a live worker hold the run?"""
        return self.holder is not None and self.holder.alive

    @property
    def silent(self) -> bool:
        """Is the holder silent: not alive, and not proven dead?"""
        return self.holder is not None and not self.holder.alive and not self.holder.dead and self.holder.last_seen is not None

    @property
    def alive(self) -> int:
        return sum(worker.alive for worker in self.workers)

    @property
    def served(self) -> bool:
        """Is there a live worker that would claim the run?"""
        return is_served(self.reading.row, self.workers)

    @property
    def version_served(self) -> bool:
        """Is there a live worker that serves the run's version, on any queue?"""
        return version_served(self.reading.row, self.workers)

    @property
    def missing(self) -> str | None:
        """What the run needs and no live worker serves; None if a worker would claim it, or if no worker is alive."""
        return missing(self.reading.row, self.workers)


def look(store: Reading, run_id: str, now: int, settings: Settings) -> Scene:
    """Read the run, and all other data of the page, as it is now."""
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
        short=own_shortage(store, reading, ledgers),
        short_below=shortages_below(store, below),
        undoing=undoing_of(store, run_id, now) if state.finished else None,
        cost_all=cost_with_children(store, reading.row) if own_children(state) else None,
        unread=store.unread(run_id) if state.finished else [],
        load=loader(store),
        progress=progress_now(reading, store.progress([run_id])) if state.open else {},
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
    until = iso(found.beat_at + lease_of(found, lease_us))
    return Holder(held_by, found.name, found.alive, *seen, since, until, found.runs, found.dead)
