"""Ledgers: what a run and its children may use together, and what they have. A charge counts in every budget above the run."""

from __future__ import annotations

from perdure.core.budget import NOTHING, Amounts
from perdure.core.events import BudgetExceeded, BudgetRaised, Limits
from perdure.errors import Conflict
from perdure.store.api import Charge, Ledger
from perdure.store.cursor import Cursor, Row
from perdure.store.part import Part
from perdure.store.rows import body_or_none


def open_ledger(cursor: Cursor, key: int, above: int | None, limits: Limits) -> None:
    """Give the run a budget of its own, inside the one above it: a child never opens a fresh allowance."""
    values = {
        "run": key,
        "above": above,
        "usd_micros": limits.usd_micros,
        "tokens": limits.tokens,
        "calls": limits.calls,
        "busy_us": limits.busy_us,
        "on_exceed": limits.on_exceed,
    }
    cursor.change("insert_budget", values)
    cursor.change("own_ledger", (key,))


def charge(cursor: Cursor, key: int, differences: Charge) -> None:
    """Count it in the run's budget and in all above it, in the commit of the events that it belongs to."""
    reserved = differences.reserved
    if not reserved and not differences.spent:
        return
    _count(cursor, key, differences)
    if reserved:
        cursor.change("reserve", (key, reserved.usd_micros, reserved.tokens, reserved.calls, reserved.busy_us))


def give_back(cursor: Cursor, key: int) -> None:
    """The run has ended: what it has still reserved (nobody saw the end of that attempt) is free for the others."""
    for row in cursor.all("give_back", (key,)):
        _count(cursor, key, Charge(reserved=-Amounts(*row), spent=NOTHING))


def _count(cursor: Cursor, key: int, differences: Charge) -> None:
    spent, reserved = differences.spent, differences.reserved
    values = {
        "run": key,
        "spent_usd_micros": spent.usd_micros,
        "spent_tokens": spent.tokens,
        "spent_calls": spent.calls,
        "spent_busy_us": spent.busy_us,
        "reserved_usd_micros": reserved.usd_micros,
        "reserved_tokens": reserved.tokens,
        "reserved_calls": reserved.calls,
        "reserved_busy_us": reserved.busy_us,
    }
    cursor.change("charge_budgets", values)


def raise_limits(cursor: Cursor, key: int, run_id: str, raised: BudgetRaised) -> None:
    """Add to the run's own budget; Conflict when it has none."""
    added = raised.added
    values = {
        "run": key,
        "usd_micros": added.usd_micros or 0,
        "tokens": added.tokens or 0,
        "calls": added.calls or 0,
        "busy_us": added.busy_us or 0,
    }
    if cursor.change("raise_budget", values) == 1:
        return
    above = [row[0] for row in cursor.all("ledgers_of_run", (run_id,))]
    way_out = f"it stands under that of run {above[0]}: raise that one" if above else "and none above it: it may use what it needs"
    raise Conflict(f"run {run_id} has no budget of its own; {way_out}")


class Budgets(Part):
    def ledgers(self, run_id: str) -> list[Ledger]:
        return [_ledger(row) for row in self._database.read("ledgers_of_run", (run_id,))]

    def reserved(self, run_id: str) -> Amounts:
        rows = self._database.read("reserved_by_run", (run_id,))
        return Amounts(*rows[0]) if rows else NOTHING

    def over_budget(self, run_id: str) -> list[str]:
        return [
            stopped
            for stopped, data in self._database.read("over_budget", (run_id,))
            if data is not None and _budget_of(stopped, data) == run_id
        ]


def _budget_of(run_id: str, data: bytes) -> str | None:
    """Whose budget was used up, by the run's last word about it."""
    body = body_or_none(data, f"the last budget_exceeded of run {run_id}")
    return body.budget_of if isinstance(body, BudgetExceeded) else None


def _ledger(row: Row) -> Ledger:
    run_id, usd_micros, tokens, calls, busy_us, on_exceed, *sums = row
    limits = Limits(usd_micros=usd_micros, tokens=tokens, calls=calls, busy_us=busy_us, on_exceed=on_exceed)
    return Ledger(run_id, limits, spent=Amounts(*sums[:4]), reserved=Amounts(*sums[4:]))
