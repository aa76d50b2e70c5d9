"""Budgets: what a run may use and what it has used.

All amounts are integers, so that sums are exact and the same on every replay.
"""

from __future__ import annotations

from decimal import Context, Decimal, InvalidOperation
from typing import Any, get_args

from msgspec import Struct, structs

from perdure.core.codec import shown
from perdure.core.events import BudgetExceeded, Limits, OnExceed, Usage
from perdure.errors import InvalidInput


class Amounts(Struct, frozen=True, gc=False):
    """A sum of usage, or a difference of two sums."""

    usd_micros: int = 0
    tokens: int = 0
    calls: int = 0
    busy_us: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.usd_micros + other.usd_micros, self.tokens + other.tokens, self.calls + other.calls, self.busy_us + other.busy_us
        )

    def __neg__(self) -> Amounts:
        return Amounts(-self.usd_micros, -self.tokens, -self.calls, -self.busy_us)

    def __bool__(self) -> bool:
        return any((self.usd_micros, self.tokens, self.calls, self.busy_us))


NOTHING = Amounts()


class Charge(Struct, frozen=True, gc=False):
    """What an append adds to the ledgers of the budgets that apply to its run. The amounts may be negative."""

    reserved: Amounts
    spent: Amounts


class Ledger(Struct, frozen=True, gc=False):
    """A budget, and how much of it is spent and reserved."""

    run_id: str  # the run that has the budget
    limits: Limits  # with the amounts that people have added
    spent: Amounts
    reserved: Amounts


# perdure has its own decimal context, so that the decimal context of the host program cannot change amounts.
_ROUNDING = Context(prec=60, rounding="ROUND_HALF_UP")
_NAMES = {"usd_micros": "usd", "tokens": "tokens", "calls": "calls", "busy_us": "seconds"}
_MOST_WHOLE, _MOST_COUNTED = 10**12, 10**15  # a sum of several amounts of this size still fits into 64 bits
_MOST = {"usd_micros": _MOST_WHOLE * 10**6, "tokens": _MOST_COUNTED, "calls": _MOST_COUNTED, "busy_us": _MOST_WHOLE * 10**6}


def amounts_of(usage: Usage | None, *, calls: int = 0, busy_us: int = 0) -> Amounts:
    """The usage as amounts, plus calls and busy time."""
    if usage is None:
        return Amounts(0, 0, calls, busy_us) if calls or busy_us else NOTHING
    return Amounts(usage.usd_micros, usage.tokens_in + usage.tokens_out, calls, busy_us)


def most_of(one: Usage | None, other: Usage | None) -> Usage | None:
    """For each field, the larger value of the two."""
    if one is None or other is None:
        return one or other
    return Usage(
        max(one.usd_micros, other.usd_micros),
        max(one.tokens_in, other.tokens_in),
        max(one.tokens_out, other.tokens_out),
        max(one.tokens_cached, other.tokens_cached),
        one.model or other.model,
    )


def rest_of(estimate: Usage | None, said: Usage | None) -> Usage | None:
    """The estimate minus the reported usage; None if nothing is left."""
    if estimate is None or said is None:
        return estimate
    rest = Usage(
        max(estimate.usd_micros - said.usd_micros, 0),
        max(estimate.tokens_in - said.tokens_in, 0),
        max(estimate.tokens_out - said.tokens_out, 0),
        max(estimate.tokens_cached - said.tokens_cached, 0),
    )
    return None if rest == Usage() else structs.replace(rest, model=estimate.model)


def exceeded(budget_of: str, limits: Limits, used: Amounts, wanted: Amounts) -> BudgetExceeded | None:
    """The first limit that `used` plus `wanted` would exceed; None if no limit would be exceeded.

    A limit that has been reached also stops calls without an estimate: the cost of such a call is not known in advance
    (G14).
    """
    for name, said in _NAMES.items():
        limit, so_far, more = getattr(limits, name), getattr(used, name), getattr(wanted, name)
        if limit is not None and (so_far + more > limit or so_far >= limit):
            return BudgetExceeded(budget_of=budget_of, what=said, limit=limit, used=so_far, wanted=more)
    return None


def too_much(limits: Limits, add: Limits) -> str | None:
    """The first limit that would be too large after adding `add`, in words; None if there is no such limit."""
    for name, most in _MOST.items():
        limit, more = getattr(limits, name), getattr(add, name)
        if limit is not None and more is not None and limit + more > most:
            return f"{_NAMES[name]} (at most {most // 10**6 if name in ('usd_micros', 'busy_us') else most:,})"
    return None


class Budget:
    """What a run and all its children may use together.

    `usd` is money. `tokens` counts input and output tokens. `calls` counts attempts. `seconds` is the total time that
    attempts take. The estimated cost of a call is reserved before the call begins, and replaced by its real cost after
    the call has ended. `on_exceed="pause"` stops the run until a person adds to the budget
    (`app.unpause(run_id, add=Budget(usd=5))`). `on_exceed="fail"` fails the call with BudgetExceeded.
    """

    __slots__ = ("limits",)

    def __init__(
        self,
        *,
        usd: float | int | str | Decimal | None = None,
        tokens: int | None = None,
        calls: int | None = None,
        seconds: float | int | str | Decimal | None = None,
        on_exceed: OnExceed = "pause",
    ) -> None:
        if on_exceed not in get_args(OnExceed):
            raise InvalidInput(f'Budget(on_exceed={shown(on_exceed)}): "pause" or "fail"')
        self.limits = Limits(
            usd_micros=None if usd is None else micros(usd, "Budget(usd=)"),
            tokens=_count(tokens, "tokens"),
            calls=_count(calls, "calls"),
            busy_us=None if seconds is None else micros(seconds, "Budget(seconds=)"),
            on_exceed=on_exceed,
        )

    def __eq__(self, other: object) -> bool:
        return self.limits == other.limits if isinstance(other, Budget) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.limits)

    def __repr__(self) -> str:
        limits = self.limits
        said = {"usd": _whole(limits.usd_micros), "tokens": limits.tokens, "calls": limits.calls, "seconds": _whole(limits.busy_us)}
        parts = [f"{name}={value}" for name, value in said.items() if value is not None]
        return f"Budget({', '.join([*parts, f'on_exceed={limits.on_exceed!r}'])})"


def limits_of(budget: Any, what: str) -> Limits | None:
    """The limits of a Budget, as events record them. Raises InvalidInput for anything that is no budget."""
    if budget is None or isinstance(budget, Limits):
        return budget
    if isinstance(budget, Budget):
        return budget.limits
    raise InvalidInput(f"{what}{shown(budget)} is not a Budget(usd=…)")


def _whole(micros: int | None) -> Decimal | None:
    return None if micros is None else Decimal(micros).scaleb(-6).normalize() + 0


def micros(value: Any, what: str) -> int:
    """The value in millionths, as an integer. Half a millionth is rounded up.

    Raises InvalidInput if the value is not an amount.
    """
    exact = None
    if isinstance(value, (int, float, str, Decimal)) and not isinstance(value, bool):
        try:
            exact = Decimal(value if isinstance(value, int) else str.__str__(value) if isinstance(value, str) else str(value))
        except (InvalidOperation, ValueError):
            exact = None
    if exact is None or not exact.is_finite() or not 0 <= exact <= _MOST_WHOLE:
        raise InvalidInput(f"{what}: {shown(value)} is not an amount; a number from 0 to 10¹²")
    return int(exact.scaleb(6, _ROUNDING).to_integral_value(context=_ROUNDING))


def _count(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_COUNTED:
        raise InvalidInput(f"Budget({name}={shown(value)}): a whole number from 0 to 10¹⁵")
    return value
