"""How figures are written, on the page and in the plot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def number(value: float) -> str:
    """Three digits that count, and no more than were measured."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def with_unit(value: float, unit: str) -> str:
    return f"{number(value)}{'' if unit in ('%', '×', '/s') else ' '}{unit}"


def times(value: float) -> str:
    """A ratio: two digits, since the third is never the same the next time."""
    if value < 9.95:
        return f"{value:.2g}×"
    return f"{round(value, 1 - math.floor(math.log10(value))):,.0f}×"


def counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def versions(about: Mapping[str, Any]) -> str:
    """What took part: the library that was used, and the server that it brings if it has one."""
    named = f"{about['name']} {about['version']}"
    return f"{named}, server {about['server']}" if "server" in about else named
