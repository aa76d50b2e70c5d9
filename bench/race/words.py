"""How figures are written, on the page and in the plot."""

from __future__ import annotations


def number(value: float) -> str:
    """Three digits that count, and no more than were measured."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def with_unit(value: float, unit: str) -> str:
    return f"{number(value)}{'' if unit in ('%', '×', '/s') else ' '}{unit}"


def times(value: float) -> str:
    return f"{number(value)}×"
