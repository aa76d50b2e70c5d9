"""What a run has used, and what it may: counted from its journal, and from the ledgers that apply to it."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.budget import Amounts
from perdure.core.events import Limits
from perdure.core.state import RunState
from perdure.inspect.words import amount, money, plural, seconds, span, used
from perdure.store.api import Ledger


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


def cost_of(state: RunState) -> Cost:
    """What the run has used, as of the last event that was folded."""
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
    )


def cost_words(state: RunState) -> str:
    """The same in one line."""
    cost = cost_of(state)
    tries = f" ({plural(cost.attempts, 'attempt')})" if cost.attempts != cost.calls else ""
    alone = ", without its children" if state.children else ""
    if not cost.calls:
        return f"nothing{alone}"
    more = used(state.used) or "no tokens or money"
    return f"{plural(cost.calls, 'call')}{tries}, {span(state.spent.busy_us)} in them, {more}{alone}"


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
    return f"{whose}: {', '.join(map(_limit_words, view.limits)) or 'no limit'}; when it is used up: {view.on_exceed}"


def _limit_words(one: Limit) -> str:
    reserved = f" and {_bare(one.what, one.reserved)} reserved" if one.reserved else ""
    return f"{_bare(one.what, one.spent)}{reserved} of {amount(one.what, one.limit)}"


def _bare(what: str, number: int) -> str:
    return money(number) if what == "usd" else f"{number / 1e6:,.3f}".rstrip("0").rstrip(".") if what == "seconds" else f"{number:,}"
