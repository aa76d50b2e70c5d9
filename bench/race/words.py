"""How figures are written, on the page and in the plot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def number(value: float) -> str:
    """Three significant digits."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def with_unit(value: float, unit: str) -> str:
    return f"{number(value)}{'' if unit in ('%', '×', '/s') else ' '}{unit}"


def times(value: float) -> str:
    """A ratio: two digits, because the third differs in every race."""
    if value < 9.95:
        return f"{value:.2g}×"
    return f"{round(value, 1 - math.floor(math.log10(value))):,.0f}×"


def counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def versions(about: Mapping[str, Any]) -> str:
    """The version of a contestant: its library, and its server if it has one."""
    named = f"{about['name']} {about['version']}"
    return f"{named}, server {about['server']}" if "server" in about else named
