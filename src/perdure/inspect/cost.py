"""What a run has used, and what it may: counted from its journal, and from the ledgers that apply to it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perdure.core.budget import Amounts
from perdure.core.events import Event, Limits, ModelCallFailed, Usage
from perdure.core.identity import undo_id
from perdure.core.state import LOST, RunState
from perdure.engine.api import Reading
from perdure.inspect.words import amount, money, plural, seconds, span, used
from perdure.store.api import Ledger, RunRow

_DAY_US = 86_400_000_000  # by how much the clock of a child's worker may be behind


class Cost(Struct, frozen=True):
    """What the run itself has used so far, without its children."""

    calls: int  # that were begun
    attempts: int
    seconds: float  # that attempts took
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    usd_micros: int
    usd: float
    lost: int = 0  # requests to models whose answers were lost with a worker: counted above with what was reserved for them


class CostAll(Struct, frozen=True):
    """What a run and all below it have used so far."""

    runs: int  # that have begun a call
    calls: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    usd_micros: int
    usd: float
    lost: int = 0


class Limit(Struct, frozen=True):
    """One thing that a budget limits: in micro-dollars, tokens, calls or microseconds."""

    what: str
    limit: int
    spent: int
    reserved: int


class BudgetView(Struct, frozen=True):
    """A budget that applies to the run: its own, or one above it. Everything below its owner counts in it."""

    run_id: str
    on_exceed: str
    limits: list[Limit]


def cost_of(state: RunState, events: Sequence[Event]) -> Cost:
    """What the run has used, as of the last of these events, which the state is the fold of."""
    used_up = state.used
    return Cost(
        calls=sum(call.attempt > 0 for call in state.calls.values()),
        attempts=state.spent.calls,
        seconds=seconds(state.spent.busy_us),
        tokens_in=used_up.tokens_in,
        tokens_out=used_up.tokens_out,
        tokens_cached=used_up.tokens_cached,
        usd_micros=used_up.usd_micros,
        usd=round(used_up.usd_micros / 1e6, 6),
        lost=sum(isinstance(event.body, ModelCallFailed) and event.body.failure.type == LOST for event in events),
    )


def cost_with_children(store: Reading, row: RunRow) -> CostAll:
    """What the run and all below it have used. Its undo is none of them: that is a run of its own."""
    below, undo = f"{row.run_id}/", undo_id(row.run_id)
    rows = [
        one
        for one in store.costs("run", since=row.created_at - _DAY_US, tenant=row.tenant)
        if (one.group == row.run_id or one.group.startswith(below)) and one.group != undo
    ]
    usd = sum(one.usd_micros for one in rows)
    return CostAll(
        runs=len(rows),
        calls=sum(one.calls for one in rows),
        tokens_in=sum(one.tokens_in for one in rows),
        tokens_out=sum(one.tokens_out for one in rows),
        tokens_cached=sum(one.tokens_cached for one in rows),
        usd_micros=usd,
        usd=round(usd / 1e6, 6),
        lost=sum(one.lost for one in rows),
    )


def cost_words(state: RunState, events: Sequence[Event], whole: CostAll | None = None) -> str:
    """The same in one line; `whole` is what it comes to with its children."""
    if whole is not None:
        usage = Usage(whole.usd_micros, whole.tokens_in, whole.tokens_out, whole.tokens_cached)
        both = f"{plural(whole.calls, 'call')}, {used(usage) or 'no tokens or money'}{lost_words(whole.lost)}"
        return f"{both}, with its children; itself: {_alone(state, events)}"
    return _alone(state, events) + (", without its children" if state.children else "")


def lost_words(lost: int) -> str:
    """What is only estimated in the figures: nobody has heard what a lost answer has used."""
    return f", with {plural(lost, 'lost request')} to models, counted with what was reserved for them" if lost else ""


def _alone(state: RunState, events: Sequence[Event]) -> str:
    cost = cost_of(state, events)
    tries = f" ({plural(cost.attempts, 'attempt')})" if cost.attempts != cost.calls else ""
    if not cost.calls:
        return "nothing"
    more = used(state.used) or "no tokens or money"
    return f"{plural(cost.calls, 'call')}{tries}, {span(state.spent.busy_us)} in them, {more}{lost_words(cost.lost)}"


def budget_view(ledger: Ledger) -> BudgetView:
    return BudgetView(ledger.run_id, ledger.limits.on_exceed, limits_of(ledger.limits, ledger.spent, ledger.reserved))


def limits_of(limits: Limits, spent: Amounts, reserved: Amounts) -> list[Limit]:
    """What of each limit is used."""
    names = (("usd", "usd_micros"), ("tokens", "tokens"), ("calls", "calls"), ("seconds", "busy_us"))
    return [
        Limit(what, getattr(limits, name), getattr(spent, name), getattr(reserved, name))
        for what, name in names
        if getattr(limits, name) is not None
    ]


def budget_words(view: BudgetView, run_id: str) -> str:
    """A budget in one line."""
    whose = "its own budget" if view.run_id == run_id else f"the budget of run {view.run_id}, shared with it"
    return f"{whose}: {', '.join(map(limit_words, view.limits)) or 'no limit'}; when it is used up: {view.on_exceed}"


def limit_words(one: Limit) -> str:
    """How much of one limit is used: "$0.16 and $0.03 reserved of $0.20", "2 of 2 calls"."""
    reserved = f" and {_bare(one.what, one.reserved)} reserved" if one.reserved else ""
    return f"{_bare(one.what, one.spent)}{reserved} of {amount(one.what, one.limit)}"


def _bare(what: str, number: int) -> str:
    return money(number) if what == "usd" else f"{number / 1e6:,.3f}".rstrip("0").rstrip(".") if what == "seconds" else f"{number:,}"
