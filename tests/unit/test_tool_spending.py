"""The usage of an attempt, its estimate, and how often a tool may start."""

from __future__ import annotations

import asyncio
import sys
import threading
from decimal import Decimal
from typing import Any

import pytest

from perdure.core.events import Usage
from perdure.core.rate import Rate
from perdure.errors import InvalidInput
from perdure.tool import Call, Tool, tool


def declared(**options: Any) -> Tool[..., Any]:
    def ask(question: str) -> str:
        return question

    return tool(**options)(ask)


# --- spending ----------------------------------------------------------------------------------------------------------------


def test_an_attempt_that_has_said_nothing_has_no_usage_and_one_that_says_nothing_was_spent_has_one():
    call = Call.outside()
    assert call.usage is None
    call.spend(usd=0, tokens_in=0)
    assert call.usage == Usage()


def test_what_is_spent_adds_up_exactly():
    call = Call.outside()
    for _ in range(10):
        call.spend(usd=0.1, tokens_in=3, tokens_out=2, tokens_cached=1)
    call.spend(usd=Decimal("0.000001"), model="small")
    call.spend(usd="2", model="large")
    call.spend(tokens_in=1)
    assert call.usage == Usage(usd_micros=3_000_001, tokens_in=31, tokens_out=20, tokens_cached=10, model="large")


@pytest.mark.parametrize(
    ("amounts", "words"),
    [
        ({"usd": -1}, r"call.spend\(usd=\): -1 is not an amount"),
        ({"usd": float("nan")}, "nan is not an amount"),
        ({"usd": float("inf")}, "inf is not an amount"),
        ({"usd": True}, "True is not an amount"),
        ({"usd": "cheap"}, "'cheap' is not an amount"),
        ({"usd": None}, "None is not an amount"),
        ({"usd": 10**10}, "usd_micros=10000000000000000 is not a whole number from 0 to 1,000,000,000,000,000"),
        ({"tokens_in": -1}, "tokens_in=-1 is not a whole number"),
        ({"tokens_out": 1.5}, "tokens_out=1.5 is not a whole number"),
        ({"tokens_cached": True}, "tokens_cached=True is not a whole number"),
        ({"tokens_in": "7"}, "tokens_in='7' is not a whole number"),
        ({"tokens_in": 10**15 + 1}, "tokens_in=1000000000000001"),
        ({"model": ""}, "model='' is not a name"),
        ({"model": "x" * 201}, "is not a name of 1 to 200"),
        ({"model": "a\nb"}, "is not a name"),
        ({"model": "\ud800"}, r"model='\\ud800' is not a name"),
        ({"model": 4}, "model=4 is not a name"),
    ],
)
def test_what_is_no_amount_is_refused_before_anything_is_added(amounts, words):
    call = Call.outside()
    call.spend(tokens_in=5)
    with pytest.raises(InvalidInput, match=words):
        call.spend(**{"usd": 1, "tokens_in": 1, **amounts})
    assert call.usage == Usage(tokens_in=5)


def test_a_sum_that_cannot_be_is_refused_and_changes_nothing():
    call = Call.outside()
    call.spend(tokens_out=10**15)
    with pytest.raises(InvalidInput, match="with what was spent before: tokens_out=1000000000000001"):
        call.spend(usd=1, tokens_out=1)
    assert call.usage == Usage(tokens_out=10**15)


def test_nothing_is_lost_when_many_threads_spend():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as often as there is a chance to
    call, together = Call.outside(), threading.Barrier(8)

    def work() -> None:
        together.wait(60)
        for _ in range(2000):
            call.spend(usd="0.000001", tokens_in=1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    assert call.usage == Usage(usd_micros=16_000, tokens_in=16_000)


def test_what_another_process_has_spent_is_never_refused():
    call = Call.outside()
    call.add_usage(Usage(tokens_in=10**15, model="m"))
    call.add_usage(Usage(tokens_in=7, usd_micros=3))
    assert call.usage == Usage(tokens_in=10**15, usd_micros=3, model="m")


def test_a_tool_outside_an_agent_may_spend():
    seen: list[Usage | None] = []

    @tool
    async def ask(call: Call) -> str:
        call.spend(usd=0.01)
        seen.append(call.usage)
        return "answer"

    assert asyncio.run(ask()) == "answer"
    assert seen == [Usage(usd_micros=10_000)]


# --- estimates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "estimate"),
    [
        (None, None),
        (0, None),
        (Usage(), None),
        (0.02, Usage(usd_micros=20_000)),
        (Decimal("0.5"), Usage(usd_micros=500_000)),
        (Usage(usd_micros=7, tokens_in=1000), Usage(usd_micros=7, tokens_in=1000)),
    ],
)
def test_a_cost_is_an_estimate_in_whole_numbers(cost, estimate):
    assert declared(cost=cost).estimate == estimate


@pytest.mark.parametrize(
    "cost",
    [-0.01, float("nan"), "cheap", True, [1], Usage(tokens_in=-1), Usage(usd_micros=1.5), Usage(tokens_out=True)],  # type: ignore[arg-type]
)
def test_a_cost_that_is_no_amount_is_refused_at_the_declaration(cost):
    with pytest.raises(InvalidInput, match="tool ask: cost: "):
        declared(cost=cost)


# --- how often ---------------------------------------------------------------------------------------------------------------


def test_a_rate_counts_under_the_name_of_the_tool_unless_it_has_a_key():
    assert declared().rate is None
    assert declared(rate=Rate(10, per=60)).rate == Rate(10, per=60, key="ask")
    assert declared(rate=Rate(10, key="provider"), name="other").rate == Rate(10, key="provider")
    assert declared(rate=Rate(), name="other").rate == Rate(key="other")


@pytest.mark.parametrize("rate", [10, "10/s", True])
def test_what_is_no_rate_is_refused_at_the_declaration(rate):
    with pytest.raises(InvalidInput, match=r"tool ask: rate=.* is not a Rate"):
        declared(rate=rate)
