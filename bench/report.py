"""The table: for a terminal, for a page, and for a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from figures import Figure

_HEADINGS = ("workload", "figure", "spread", "target", "", "note")


def table(figures: Sequence[Figure]) -> str:
    """Plain text: a line for each figure, and its note below it."""
    rows = [_HEADINGS, *map(_cells, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS) - 1)]
    lines = []
    for name, *numbers, verdict, note in rows:
        aligned = [cell.rjust(width) for cell, width in zip(numbers, widths[1:4], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *aligned, verdict]).rstrip())
        lines += [f"    {note}"] if note and note != _HEADINGS[-1] else []
    return "\n".join(lines)


def markdown(facts: dict[str, str], figures: Sequence[Figure]) -> str:
    rows = [_HEADINGS, ("---", "--:", "--:", "--:", "---", "---"), *map(_cells, figures)]
    told = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return "# perdure, measured\n\n" + told + "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def document(facts: dict[str, str], figures: Sequence[Figure]) -> dict[str, Any]:
    return {
        "machine": facts,
        "figures": [
            {
                "name": figure.name,
                "median": figure.sample.median,
                "values": figure.sample.values,
                "unit": figure.unit,
                "target": figure.target,
                "bound": figure.bound,
                "verdict": figure.verdict,
                "note": figure.note,
            }
            for figure in figures
        ],
    }


def _cells(figure: Figure) -> tuple[str, ...]:
    lowest, highest = min(figure.sample.values), max(figure.sample.values)
    target = "" if figure.target is None else f"{'≥' if figure.bound == 'at least' else '≤'} {_number(figure.target)}"
    spread = f"{_number(lowest)} – {_number(highest)}"
    return figure.name, f"{_number(figure.sample.median)} {figure.unit}", spread, target, figure.verdict, figure.note


def _number(value: float) -> str:
    """Three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
