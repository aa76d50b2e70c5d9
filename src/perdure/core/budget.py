"""What a run may use, and what it has: whole numbers only, so that sums are exact and the same on every replay."""

from __future__ import annotations

from decimal import Context, Decimal, InvalidOperation
from typing import Any, get_args

from msgspec import Struct, structs

from perdure.core.codec import shown
from perdure.core.events import BudgetExceeded, Limits, OnExceed, Usage
from perdure.errors import InvalidInput


class Amounts(Struct, frozen=True, gc=False):
    """A sum of use, or a difference of two."""

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
    """What an append does to the budgets above its run."""

    reserved: Amounts
    spent: Amounts


class Ledger(Struct, frozen=True, gc=False):
    """A budget, and what is used of it."""

    run_id: str  # whose it is
    limits: Limits  # raises included
    spent: Amounts
    reserved: Amounts


# Our own: what the program around us has set up for its decimals must not change what something costs.
_ROUNDING = Context(prec=60, rounding="ROUND_HALF_UP")
_NAMES = {"usd_micros": "usd", "tokens": "tokens", "calls": "calls", "busy_us": "seconds"}
_MOST_WHOLE, _MOST_COUNTED = 10**12, 10**15  # sums of several of these still fit into 64 bits
_MOST = {"usd_micros": _MOST_WHOLE * 10**6, "tokens": _MOST_COUNTED, "calls": _MOST_COUNTED, "busy_us": _MOST_WHOLE * 10**6}


def amounts_of(usage: Usage | None, *, calls: int = 0, busy_us: int = 0) -> Amounts:
    """What the usage comes to."""
    if usage is None:
        return Amounts(0, 0, calls, busy_us) if calls or busy_us else NOTHING
    return Amounts(usage.usd_micros, usage.tokens_in + usage.tokens_out, calls, busy_us)


def most_of(one: Usage | None, other: Usage | None) -> Usage | None:
    """The larger of both, in each amount."""
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
    """What of the estimate is left after what was said; None if nothing is."""
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
    """What stands against using `wanted` on top of `used`; None if nothing does.

    A limit that has been reached stops even what costs nothing: nobody knows what the call will cost in the end (G14).
    """
    for name, said in _NAMES.items():
        limit, so_far, more = getattr(limits, name), getattr(used, name), getattr(wanted, name)
        if limit is not None and (so_far + more > limit or so_far >= limit):
            return BudgetExceeded(budget_of=budget_of, what=said, limit=limit, used=so_far, wanted=more)
    return None


def too_much(limits: Limits, add: Limits) -> str | None:
    """What of the budget would lie above what any budget may allow, with its bound; None if nothing would."""
    for name, most in _MOST.items():
        limit, more = getattr(limits, name), getattr(add, name)
        if limit is not None and more is not None and limit + more > most:
            return f"{_NAMES[name]} (at most {most // 10**6 if name in ('usd_micros', 'busy_us') else most:,})"
    return None


def Budget(  # reads as the noun that it is
    *,
    usd: float | int | str | Decimal | None = None,
    tokens: int | None = None,
    calls: int | None = None,
    seconds: float | None = None,
    on_exceed: OnExceed = "pause",
) -> Limits:
    """What a run, with all its children, may use: money, tokens in and out, calls, and seconds that its calls take.

    Reserved before a call and settled after it. `on_exceed`: "pause" stops the run until somebody adds to it, "fail" fails the call.
    """
    if on_exceed not in get_args(OnExceed):
        raise InvalidInput(f'Budget(on_exceed={shown(on_exceed)}): "pause" or "fail"')
    return Limits(
        usd_micros=None if usd is None else micros(usd, "Budget(usd=)"),
        tokens=_count(tokens, "tokens"),
        calls=_count(calls, "calls"),
        busy_us=None if seconds is None else micros(seconds, "Budget(seconds=)"),
        on_exceed=on_exceed,
    )


def micros(value: Any, what: str) -> int:
    """Millionths, as a whole number; InvalidInput for what is no amount. Half a millionth counts as one."""
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
