"""Budgets and rate limits.

A ledger is the budget of a run and all runs below it together, with the amounts that these runs have used. A charge
counts in the run's own ledger and in all ledgers above it. A rate limit is shared by all workers.
"""

from __future__ import annotations

from perdure.core.budget import NOTHING, Amounts
from perdure.core.events import BudgetExceeded, BudgetRaised, Limits
from perdure.core.rate import Rate, next_start
from perdure.errors import Conflict
from perdure.store.api import Charge, Ledger
from perdure.store.cursor import Cursor, Row
from perdure.store.part import Part
from perdure.store.rows import body_or_none


def open_ledger(cursor: Cursor, key: int, above: int | None, limits: Limits) -> None:
    """Give the run a budget of its own, under the budget `above`: what the run uses counts in both."""
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
    """Count a charge in the run's budget and in all budgets above it, in the commit of the events that charge."""
    reserved = differences.reserved
    if not reserved and not differences.spent:
        return
    _count(cursor, key, differences)
    if reserved:
        cursor.change("reserve", (key, reserved.usd_micros, reserved.tokens, reserved.calls, reserved.busy_us))


def free_reserved(cursor: Cursor, key: int) -> None:
    """The run has ended: free what it still has reserved for attempts whose end was not recorded."""
    for row in cursor.all("free_reserved", (key,)):
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
    """Raise the run's own budget; Conflict if the run has no budget of its own."""
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
    way_out = f"the budget of run {above[0]} applies to it: raise that budget" if above else "no budget limits it"
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
    """The id of the run whose budget was used up, as the last `budget_exceeded` event of `run_id` says."""
    body = body_or_none(data, f"the last budget_exceeded of run {run_id}")
    return body.budget_of if isinstance(body, BudgetExceeded) else None


def _ledger(row: Row) -> Ledger:
    run_id, usd_micros, tokens, calls, busy_us, on_exceed, *sums = row
    limits = Limits(usd_micros=usd_micros, tokens=tokens, calls=calls, busy_us=busy_us, on_exceed=on_exceed)
    return Ledger(run_id, limits, spent=Amounts(*sums[:4]), reserved=Amounts(*sums[4:]))


# -- rate limits: for each key one schedule of starts and one pause, which all workers share


# A worker that had to wait for the write lock has a `now` that is some seconds old. If `now` is older than the stored
# time by more than this, the worker's clock was set back.
_SET_BACK_US = 60_000_000
# How long to wait for a rate's row that another process has locked. The wait is short because a worker asks on its
# event loop; the worker retries later.
_PATIENCE_S = 0.1


class Rates(Part):
    def admit(self, rate: Rate, now: int) -> int:
        """Take the next place. Returns the time (µs) from which the attempt may start.

        If the attempt does not start, its place stays taken.
        """
        assert rate.key is not None, "the tool must give its rate a key before `admit` is called"
        if rate.limit is None:
            # The rate has no limit, only a pause: nothing has to be written.
            rows = self._database.read("rate", (rate.key,))
            return max(now, rows[0][1]) if rows else now
        key = rate.key

        def book(cursor: Cursor) -> tuple[int, int]:
            cursor.patience(_PATIENCE_S)
            cursor.change("make_rate", (key,))
            due, paused_until, seen_at = cursor.all("rate_to_change", (key,))[0]
            lag = seen_at - now
            if lag > _SET_BACK_US:
                # Move the schedule back with the clock. Otherwise every attempt would also wait for the time by which
                # the clock was set back.
                due, paused_until = due - lag, paused_until - lag
            at, due = next_start(rate, due=due, paused_until=paused_until, now=now)
            seen_at = now if lag > _SET_BACK_US else max(now, seen_at)
            cursor.change("book_rate", {"key": key, "due": due, "paused_until": paused_until, "seen_at": seen_at})
            return at, due

        def arrived(cursor: Cursor, booked: tuple[int, int]) -> bool:
            found = cursor.one("rate", (key,))
            return found is not None and bool(found[0] >= booked[1])

        return self._database.write(book, arrived)[0]

    def hold_back(self, key: str, until: int) -> None:
        """No attempt under the key starts before `until`. A pause that is already longer stays as it is."""

        def pause(cursor: Cursor) -> None:
            cursor.patience(_PATIENCE_S)
            cursor.change("hold_rate_back", {"key": key, "until": until})

        def arrived(cursor: Cursor, _: None) -> bool:
            found = cursor.one("rate", (key,))
            return found is not None and bool(found[1] >= until)

        self._database.write(pause, arrived)
