"""Budgets: exact sums, and limits that hold exactly (G14, T24)."""

from __future__ import annotations

import decimal
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.budget import NOTHING, Amounts, Budget, amounts_of, exceeded, micros, too_much
from perdure.core.events import BudgetExceeded, Limits, Usage
from perdure.errors import InvalidInput


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (2, 2_000_000),
        (2.00, 2_000_000),
        ("0.1", 100_000),
        (0.1, 100_000),  # the written decimal number, not the nearest binary fraction
        (0.1 + 0.2, 300_000),
        (1.005, 1_005_000),
        (0.0000005, 1),
        (0.00000049, 0),
        ("0.0000015", 2),
        (Decimal("1.234567"), 1_234_567),
        (0, 0),
        (-0.0, 0),
        (10**12, 10**18),
        ("1e3", 1_000_000_000),
        ("1e-999999999", 0),
    ],
)
def test_amounts_are_whole_millionths(given, expected):
    assert micros(given, "x") == expected
    assert type(micros(given, "x")) is int


NO_NUMBERS: list[Any] = [True, False, None, "", "a", "1,5", "NaN", "sNaN", b"1", [], [5], Fraction(1, 2), Hostile()]
NO_AMOUNTS: list[Any] = [-1, "-0.1", float("nan"), float("inf"), Decimal("Infinity"), 10**12 + 1, 10**400, 10**5000, "1e999999999"]


@pytest.mark.parametrize("given", [*NO_NUMBERS, *NO_AMOUNTS], ids=lambda given: type(given).__name__)
def test_what_is_no_amount_is_refused_by_name(given):
    with pytest.raises(InvalidInput, match=r"Budget\(usd=\)"):
        micros(given, "Budget(usd=)")


def test_what_the_program_has_set_up_for_its_decimals_changes_nothing():
    with decimal.localcontext() as context:
        context.prec = 2
        context.rounding = decimal.ROUND_UP
        context.traps[decimal.Inexact] = True
        assert micros("123.4567894", "x") == 123_456_789


def test_a_budget_is_made_of_whole_numbers():
    assert Budget(usd=2.50, tokens=1000, calls=7, seconds=1.5).limits == Limits(2_500_000, 1000, 7, 1_500_000, "pause")
    assert Budget(calls=0, on_exceed="fail").limits == Limits(calls=0, on_exceed="fail")
    assert Budget().limits == Limits()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"usd": "x"}, r"Budget\(usd=\)"),
        ({"seconds": -1}, r"Budget\(seconds=\)"),
        ({"seconds": True}, r"Budget\(seconds=\)"),
        *(
            ({"tokens": value}, r"Budget\(tokens=.*a whole number from 0")
            for value in (-1, 1.0, True, "5", 10**16, 10**5000, float("nan"), Hostile())
        ),
        ({"calls": 1.5}, r"Budget\(calls=1.5\)"),
        *(({"on_exceed": value}, '"pause" or "fail"') for value in ("stop", None, 5, Hostile())),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(given: dict[str, Any], said: str):
    with pytest.raises(InvalidInput, match=said):
        Budget(**given)


AMOUNTS = st.builds(Amounts, *[st.integers(-(10**18), 10**18)] * 4)


@given(st.lists(AMOUNTS, max_size=5), st.randoms())
def test_sums_do_not_depend_on_the_order_and_what_is_given_back_is_gone(parts, random):
    total = sum(parts, NOTHING)
    random.shuffle(parts)
    assert sum(parts, NOTHING) == total
    assert total + -total == NOTHING
    assert not total + -total
    assert bool(total) == (total != NOTHING)


def test_usage_counts_tokens_in_and_out_and_not_the_cached_ones_twice():
    usage = Usage(usd_micros=5, tokens_in=100, tokens_out=20, tokens_cached=90, model="m")
    assert amounts_of(usage, calls=1, busy_us=7) == Amounts(5, 120, 1, 7)
    assert amounts_of(None, calls=1) == Amounts(calls=1)
    assert amounts_of(None) == NOTHING


def limited(name: str, limit: int) -> Limits:
    return msgspec.structs.replace(Limits(), **{name: limit})


NAMES = {"usd_micros": "usd", "tokens": "tokens", "calls": "calls", "busy_us": "seconds"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("used", "wanted", "stopped"),
    [
        (0, 0, False),
        (0, 10, False),
        (9, 1, False),  # exactly the rest
        (9, 0, False),
        (9, 2, True),
        (0, 11, True),
        (10, 0, True),  # a limit that is reached stops even a free call
        (11, 0, True),
    ],
)
def test_up_to_the_limit_and_not_beyond_it(name, used, wanted, stopped):
    found = exceeded("r", limited(name, 10), Amounts(**{name: used}), Amounts(**{name: wanted}))
    assert found == (BudgetExceeded("r", NAMES[name], 10, used, wanted) if stopped else None)


def test_no_limit_stops_nothing_and_zero_stops_everything():
    much = Amounts(10**18, 10**18, 10**18, 10**18)
    assert exceeded("r", Limits(), much, much) is None
    for name in NAMES:
        assert exceeded("r", limited(name, 0), NOTHING, NOTHING) is not None


@given(
    limits=st.builds(Limits, *[st.one_of(st.none(), st.integers(0, 5))] * 4), wants=st.lists(st.builds(Amounts, *[st.integers(0, 3)] * 4))
)
def test_whatever_is_let_through_one_after_the_other_stays_inside_every_limit(limits, wants):
    used = NOTHING
    for wanted in wants:
        if exceeded("r", limits, used, wanted) is None:
            used = used + wanted
    for name in NAMES:
        limit = getattr(limits, name)
        assert limit is None or getattr(used, name) <= limit


@pytest.mark.parametrize("name", NAMES.values())
def test_a_sum_is_bounded_as_each_of_its_parts_is(name):
    def of(amount: int) -> Limits:
        return Budget(**{name: amount}).limits  # type: ignore[arg-type]

    most = 10**12 if name in ("usd", "seconds") else 10**15
    assert too_much(of(most - 1), of(1)) is None
    assert too_much(of(most), Limits()) is None
    assert too_much(Limits(), of(most)) is None
    assert too_much(of(most), of(1)) == f"{name} (at most {most:,})"
