"""The cost of an answer: exact by the user's price, by the list, or unknown.

An unknown price never loses the answer.
"""

from __future__ import annotations

import sys
from decimal import Decimal
from typing import Any

import pytest
from tests.models.adapters import Api, ask, every_api, model_for
from tests.servers.providers import Provider, say
from tests.unit.drive_tools import perdure, run

from perdure import Run, agent
from perdure.errors import InvalidInput
from perdure.models import Anthropic, OpenAI, Price, Tokens
from perdure.models.prices import _listed, cost_of


@pytest.fixture(autouse=True)
def _fresh_list() -> Any:
    _listed.cache_clear()
    yield
    _listed.cache_clear()


def test_a_price_is_exact() -> None:
    price = Price(input=3, output=15, cached=0.3, stored=3.75)
    # 1,000 plain, 200 read from the cache, 40 written to it
    assert price.of(Tokens(input=1240, output=10, cached=200, stored=40)) == Decimal("0.00336")
    assert Price(input=0.1, output=0.2).of(Tokens(input=3, output=0)) == Decimal("0.0000003")


def test_what_is_cached_costs_as_input_unless_it_is_named() -> None:
    assert Price(input=1, output=1).of(Tokens(input=100, cached=60, stored=20)) == Decimal("0.0001")
    assert Price(input=1, output=1, cached=0).of(Tokens(input=100, cached=60)) == Decimal("0.00004")


@pytest.mark.parametrize("wrong", [-1, 1e6, float("nan"), float("inf"), "3", True, None])
def test_a_price_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="dollars per million tokens"):
        Price(input=wrong, output=1) if wrong is not None else Price(input=1, output="x")  # type: ignore[arg-type]


def test_the_list_knows_what_models_cost() -> None:
    pytest.importorskip("genai_prices")
    tokens = Tokens(input=1_000_000, output=0)
    assert cost_of("anthropic", "claude-3-5-haiku-latest", None, tokens) > 0
    assert cost_of("openai", "gpt-4o-mini", None, tokens) == Decimal("0.15")
    cached = Tokens(input=1_000_000, cached=1_000_000)
    assert 0 < cost_of("openai", "gpt-4o-mini", None, cached) < cost_of("openai", "gpt-4o-mini", None, tokens)
    stored = Tokens(input=1_000_000, stored=1_000_000)
    assert cost_of("anthropic", "claude-3-5-haiku-latest", None, stored) > cost_of("anthropic", "claude-3-5-haiku-latest", None, tokens)


def test_what_nobody_knows_costs_nothing() -> None:
    assert cost_of("anthropic", "claude-nobody-knows", None, Tokens(input=10)) == 0
    assert cost_of("", "gpt-4o-mini", None, Tokens(input=10)) == 0
    assert cost_of("no-such-provider", "gpt-4o-mini", None, Tokens(input=10)) == 0


def test_without_the_list_a_price_is_unknown_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    assert cost_of("openai", "gpt-4o-mini", None, Tokens(input=10)) == 0
    assert cost_of("openai", "gpt-4o-mini", Price(input=1, output=1), Tokens(input=10)) == Decimal("0.00001")


NONSENSE = [Tokens(input=-5, output=-1), Tokens(cached=50), Tokens(input=10, cached=50, stored=50), Tokens(input="x"), Tokens(input=10**40)]  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", NONSENSE, ids=str)
def test_nonsense_is_priced_without_a_failure(tokens: Tokens) -> None:
    for price in (Price(input=3, output=15, cached=0.3), None):
        assert 0 <= cost_of("openai", "gpt-4o-mini", price, tokens) <= 10**9


def test_who_is_asked_at_another_address_has_no_price_of_openais() -> None:
    assert (OpenAI("gpt-4o-mini").provider, OpenAI("gpt-4o-mini", base_url="http://127.0.0.1").provider) == ("openai", "")
    assert Anthropic("x").provider == "anthropic"


@every_api
def test_the_journal_has_the_tokens_and_the_cost_of_the_ledger(api: Api, provider: Provider) -> None:
    model = model_for(api, price=Price(input=10, output=100, cached=1, stored=12.5))

    @agent(version="1")
    async def asks(run: Run) -> str:
        return (await model.ask("one")).text + (await model.ask("two")).text

    async def main() -> Any:
        async with perdure(None, [asks]) as app:
            assert await app.run(asks) == "yesyes"
            return (await app.costs("model"))[0]

    provider.script([say("yes", cached=40, stored=8)])
    row = run(main())
    lines = [line.tokens for line in provider.requests()]
    assert (row.tokens_in, row.tokens_out, row.tokens_cached) == tuple(
        sum(line[name] for line in lines) for name in ("input", "output", "cached")
    )
    plain = sum(line["input"] - line["cached"] - line["stored"] for line in lines)
    expected = plain * 10 + 80 * 1 + 16 * 12.5 + row.tokens_out * 100
    assert row.usd_micros == expected


@every_api
def test_asking_outside_an_agent_just_asks(api: Api, provider: Provider) -> None:
    provider.script(["yes"])
    assert run(ask(model_for(api))).text == "yes"
