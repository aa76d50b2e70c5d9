"""What an attempt uses, in integers: reported by the tool while the tool runs, or estimated in its declaration."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from msgspec import structs

from perdure.core.budget import micros
from perdure.core.events import Usage
from perdure.errors import InvalidInput

Cost = float | str | Decimal | Usage

# The most micro-dollars or tokens of one attempt. It is far above any real value, and a sum of thousands of such
# values still fits into 64 bits.
MOST = 10**15
MAX_MODEL_CHARS = 200
_COUNTS = ("usd_micros", "tokens_in", "tokens_out", "tokens_cached")


def checked(usage: Usage, what: str) -> Usage:
    """The usage itself. Raises InvalidInput if a value is out of range."""
    for name in _COUNTS:
        count = getattr(usage, name)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST:
            raise InvalidInput(f"{what}: {name}={count!r:.60} is not a whole number from 0 to {MOST:,}")
    if usage.model is not None and not _is_name(usage.model):
        raise InvalidInput(f"{what}: model={usage.model!a:.60} is not a name of 1 to {MAX_MODEL_CHARS} printable characters")
    return usage


def added(so_far: Usage | None, more: Usage) -> Usage:
    """The sum of both, with the model that was named last."""
    if so_far is None:
        return more
    return Usage(
        so_far.usd_micros + more.usd_micros,
        so_far.tokens_in + more.tokens_in,
        so_far.tokens_out + more.tokens_out,
        so_far.tokens_cached + more.tokens_cached,
        so_far.model if more.model is None else more.model,
    )


def capped(usage: Usage) -> Usage:
    """The usage, limited to the largest values that can be recorded."""
    return structs.replace(usage, **{name: min(getattr(usage, name), MOST) for name in _COUNTS})


def estimated(cost: Cost | None, what: str) -> Usage | None:
    """What `@tool(cost=…)` reserves before each attempt; None: nothing. `cost` is in dollars, or a Usage."""
    if cost is None:
        return None
    usage = checked(cost if isinstance(cost, Usage) else Usage(usd_micros=micros(cost, what)), what)
    return None if usage == Usage() else usage


def _is_name(model: Any) -> bool:
    return isinstance(model, str) and 0 < len(model) <= MAX_MODEL_CHARS and model.isprintable()
