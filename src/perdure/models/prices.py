"""The cost of an answer.

The price is the user's `Price`. Without it, the price comes from the package genai-prices, if that is installed.
"""

from __future__ import annotations

import sys
from decimal import Decimal
from functools import lru_cache
from typing import Any

from msgspec import Struct

from perdure.errors import InvalidInput
from perdure.models.messages import Tokens

_MILLION = Decimal(1_000_000)
_MOST_USD = Decimal(1_000_000_000)  # the limit for the cost of one answer: an attempt cannot record a larger amount


class Price(Struct, frozen=True):
    """Prices in US dollars per million tokens.

    `cached`: for input that was read from the provider's cache. `stored`: for input that was written to the cache.
    Without a value, the price of `input` is used for them.
    """

    input: float
    output: float
    cached: float | None = None
    stored: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached", "stored"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e6):
                raise InvalidInput(f"Price({name}={value!r:.60}): dollars per million tokens, from 0 to a million")

    def of(self, tokens: Tokens) -> Decimal:
        """The exact cost in dollars, as a decimal number."""
        cached = self.input if self.cached is None else self.cached
        stored = self.input if self.stored is None else self.stored
        plain = max(tokens.input - tokens.cached - tokens.stored, 0)
        parts = ((plain, self.input), (tokens.cached, cached), (tokens.stored, stored), (tokens.output, self.output))
        return sum((max(count, 0) * Decimal(str(price)) for count, price in parts), Decimal(0)) / _MILLION


def cost_of(provider: str, model: str, price: Price | None, tokens: Tokens) -> Decimal:
    """The cost in dollars. 0 if the price is not known.

    This function never raises an exception: an error here would lose an answer that was paid for.
    """
    counted = _sane(tokens)
    if price is not None:
        return min(price.of(counted), _MOST_USD)
    listed = _listed(provider, model)
    return Decimal(0) if listed is None else min(listed(counted), _MOST_USD)


def quick_cost_of(provider: str, model: str, price: Price | None, tokens: Tokens) -> Decimal:
    """Like `cost_of`, but 0 if the needed list of prices is not imported yet: the import would block the loop."""
    return cost_of(provider, model, price, tokens) if price is not None or "genai_prices" in sys.modules else Decimal(0)


def is_priced(provider: str, model: str, price: Price | None) -> bool:
    """Is the price of this model known?"""
    return price is not None or _listed(provider, model) is not None


def _sane(tokens: Tokens) -> Tokens:
    """The tokens as non-negative integers. `cached` and `stored` together are at most `input`."""
    asked, said, cached, stored = (
        max(count, 0) if isinstance(count, int) else 0 for count in (tokens.input, tokens.output, tokens.cached, tokens.stored)
    )
    cached = min(cached, asked)
    return Tokens(asked, said, cached, min(stored, asked - cached))


@lru_cache(maxsize=256)
def _listed(provider: str, model: str) -> Any:
    """A function that computes the cost of tokens of this model with the list of prices.

    None if the list is not installed or does not contain the model.
    """
    if not provider:
        return None
    try:
        from genai_prices import Usage, calc_price  # imported only here, because it takes a third of a second
    except ImportError:
        return None

    def priced(tokens: Tokens) -> Decimal:
        usage = Usage(
            input_tokens=tokens.input, output_tokens=tokens.output, cache_read_tokens=tokens.cached, cache_write_tokens=tokens.stored
        )
        return Decimal(calc_price(usage, model, provider_id=provider).total_price)

    def known(tokens: Tokens) -> Decimal:
        try:
            return priced(tokens)
        except (LookupError, ValueError):
            return Decimal(0)  # the list knows the model, but not the price of this kind of token

    try:
        priced(Tokens(input=2, output=1))
    except (LookupError, ValueError):
        return None
    return known
