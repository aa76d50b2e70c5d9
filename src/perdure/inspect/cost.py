"""The cost of a run, from its journal, and the budgets that apply to the run."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perdure.core.budget import Amounts
from perdure.core.events import Event, Limits, ModelCallFailed, Usage
from perdure.core.identity import undo_id
from perdure.core.state import LOST, RunState, own_children
from perdure.engine.api import Reading
from perdure.inspect.text import amount, money, plural, seconds, span, used
from perdure.store.api import Ledger, RunRow

_DAY_US = 86_400_000_000  # the clock of a child's worker may be this much behind


class Cost(Struct, frozen=True):
    """The cost of the run so far, without its children."""

    calls: int  # calls with at least one attempt
    attempts: int
    seconds: float  # the time of all attempts together
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    usd_micros: int
    usd: float
    lost: int = 0  # lost answers of models; for each of them, the cost above has the reserved amount


class CostAll(Struct, frozen=True):
    """The cost of a run and all runs below it so far."""

    runs: int  # runs with at least one call that began
    calls: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    usd_micros: int
    usd: float
    lost: int = 0


class Limit(Struct, frozen=True):
    """One limit of a budget, in micro-dollars, tokens, calls or microseconds."""

    what: str
    limit: int
    spent: int
    reserved: int


class BudgetView(Struct, frozen=True):
    """A budget that applies to the run: the run's own budget, or the budget of a run above it.

    The cost of the owner and of all runs below the owner counts in this budget.
    """

    run_id: str
    on_exceed: str
    limits: list[Limit]


def cost_of(state: RunState, events: Sequence[Event]) -> Cost:
    """The cost of the run, as of the last of these events. `state` is the fold of these events."""
    used_up = state.used
    return Cost(
        calls=sum(call.attempt > 0 and not call.inherited for call in state.calls.values()),
        attempts=state.spent.calls,
        seconds=seconds(state.spent.busy_us),
        tokens_in=used_up.tokens_in,
        tokens_out=used_up.tokens_out,
        tokens_cached=used_up.tokens_cached,
        usd_micros=used_up.usd_micros,
        usd=round(used_up.usd_micros / 1e6, 6),
        lost=sum(isinstance(event.body, ModelCallFailed) and event.body.failure.type == LOST for event in events[state.inherited :]),
    )


def cost_with_children(store: Reading, row: RunRow) -> CostAll:
    """The cost of the run and all runs below it. The undo of the run does not count: it is a separate run."""
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
    """The cost of a run in one line. `whole` is the cost of the run together with its children."""
    if whole is not None:
        usage = Usage(whole.usd_micros, whole.tokens_in, whole.tokens_out, whole.tokens_cached)
        both = f"{plural(whole.calls, 'call')}, {used(usage) or 'no tokens or money'}{lost_words(whole.lost)}"
        return f"{both}, with its children; itself: {_alone(state, events)}"
    return _alone(state, events) + (", without its children" if own_children(state) else "")


def lost_words(lost: int) -> str:
    """How many requests to models were lost. A lost request counts with the reserved amount: its cost is not known."""
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
    """Each limit that is set, with the spent and the reserved amount."""
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
