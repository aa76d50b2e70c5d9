"""What an answer has cost: by the price that the user names, else by the list of the package genai-prices where it is installed."""

from __future__ import annotations

import sys
from decimal import Decimal
from functools import lru_cache
from typing import Any

from msgspec import Struct

from perdure.errors import InvalidInput
from perdure.models.messages import Tokens

_MILLION = Decimal(1_000_000)
_MOST_USD = Decimal(1_000_000_000)  # of one answer: as much as an attempt can have spent


class Price(Struct, frozen=True):
    """US dollars per million tokens. What was read from the provider's cache or written to it costs as input unless it is named."""

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
        """Dollars, exact: in the decimal figures that prices are written in."""
        cached = self.input if self.cached is None else self.cached
        stored = self.input if self.stored is None else self.stored
        plain = max(tokens.input - tokens.cached - tokens.stored, 0)
        parts = ((plain, self.input), (tokens.cached, cached), (tokens.stored, stored), (tokens.output, self.output))
        return sum((max(count, 0) * Decimal(str(price)) for count, price in parts), Decimal(0)) / _MILLION


def cost_of(provider: str, model: str, price: Price | None, tokens: Tokens) -> Decimal:
    """Dollars; 0 where nobody knows the price. Never raises: the answer is there and paid for, whatever was counted."""
    counted = _sane(tokens)
    if price is not None:
        return min(price.of(counted), _MOST_USD)
    listed = _listed(provider, model)
    return Decimal(0) if listed is None else min(listed(counted), _MOST_USD)


def quick_cost_of(provider: str, model: str, price: Price | None, tokens: Tokens) -> Decimal:
    """The same before anything is asked: 0 as long as the list has not been read, which takes longer than a loop may stand still."""
    return cost_of(provider, model, price, tokens) if price is not None or "genai_prices" in sys.modules else Decimal(0)


def is_priced(provider: str, model: str, price: Price | None) -> bool:
    """Whether anybody knows what this model costs."""
    return price is not None or _listed(provider, model) is not None


def _sane(tokens: Tokens) -> Tokens:
    """Whole numbers, none of them negative, and no more cached and stored than there was."""
    asked, said, cached, stored = (
        max(count, 0) if isinstance(count, int) else 0 for count in (tokens.input, tokens.output, tokens.cached, tokens.stored)
    )
    cached = min(cached, asked)
    return Tokens(asked, said, cached, min(stored, asked - cached))


@lru_cache(maxsize=256)
def _listed(provider: str, model: str) -> Any:
    """How the list prices this model; None if it does not know it, or there is no list."""
    if not provider:
        return None
    try:
        from genai_prices import Usage, calc_price  # late: it takes a third of a second, and a worker may never ask a model
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
            return Decimal(0)  # the list knows the model, and not what this kind of token costs

    try:
        priced(Tokens(input=2, output=1))
    except (LookupError, ValueError):
        return None
    return known
