"""The budgets that runs stand still for, as they are now: what was reserved when a call was stopped may have been given back since."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perdure.core.events import BudgetExceeded
from perdure.engine.api import Reading
from perdure.inspect.cost import Limit, limit_words, limits_of
from perdure.inspect.view import RunView, read_run
from perdure.inspect.words import amount, plural
from perdure.store.api import Ledger, RunRow

RUNS_NAMED = 3
BUDGETS_NAMED = 3  # a journal is read for each


class Shortage(Struct, frozen=True):
    """A budget that leaves no room for what somebody wants to do."""

    budget_of: str
    limit: Limit  # as it is now
    wanted: int  # for the first call that was stopped
    runs: list[str]  # below the run that the page is about, and stopped by it

    @property
    def least(self) -> int:
        """What has to be added before that call can start; nothing, when there is room again."""
        spent, limit = self.limit.spent, self.limit.limit
        # A limit that has been reached stops even what costs nothing.
        return max(spent + self.wanted - limit, spent - limit + 1, 0)


def own_shortage(reading: RunView, ledgers: Sequence[Ledger]) -> Shortage | None:
    """The budget that the run itself stands still for."""
    attention, over = reading.state.attention, reading.state.over
    if over is None or attention is None or attention.reason != "budget":
        return None
    return _now(over, ledgers, [])


def shortages_below(store: Reading, below: Sequence[RunRow]) -> list[Shortage]:
    """The first few budgets that runs below stand still for, whosever they are: one cause each, however many it stops."""
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
    """Whose budget, how much of it is used now, and how much was wanted."""
    wanted = f", and {amount(short.limit.what, short.wanted)} more wanted" if short.wanted else ""
    how = "is used up" if short.least else "was used up, and has room again"
    return f"the budget of run {short.budget_of} {how}: {limit_words(short.limit)}{wanted}"


def stopped_words(short: Shortage) -> str:
    """How many runs below stand still for it, and which."""
    who = plural(len(short.runs), "child stands", "children stand")
    names = ", ".join(short.runs[:RUNS_NAMED]) + (", …" if len(short.runs) > RUNS_NAMED else "")
    return f"{who} still for the budget of {short.budget_of} ({names}): {limit_words(short.limit)}"
