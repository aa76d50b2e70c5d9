"""What came of it: every repeat of every lane as it was measured, and what follows from that."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.race.figures import BY_KEY
from bench.race.lanes import beside, is_ours
from bench.race.sizes import Sizes
from msgspec import Struct


class Cell(Struct, frozen=True, omit_defaults=True):
    """One measurement of one lane in one repeat (0: what was prepared for all of them): with figures, failed, or absent.

    `gives` are the figures that it was to give.
    """

    measurement: str
    lane: str
    repeat: int
    seconds: float
    gives: tuple[str, ...]
    figures: dict[str, float] = {}
    failed: str | None = None
    absent: str | None = None
    why: tuple[str, ...] = ()
    is_cut_off: bool = False


class Summary(Struct, frozen=True):
    """Repeats of one figure in one lane. `times` is how many times better perdure is: the median of the ratios, repeat by repeat."""

    median: float
    low: float
    high: float
    repeats: int
    times: float | None = None


class Results(Struct):
    """A whole race, as it is written down."""

    date: str
    quick: bool
    repeats: int
    sizes: Sizes
    machine: dict[str, str]
    contestants: dict[str, dict[str, Any]]
    left_out: dict[str, str]
    lanes: list[str]
    cells: list[Cell]
    seconds: float = 0.0
    is_whole: bool = False

    def values(self, key: str, lane: str) -> dict[int, float]:
        """One figure of one lane: repeat → value."""
        return {cell.repeat: cell.figures[key] for cell in self.cells if cell.lane == lane and key in cell.figures}

    def summary(self, key: str, lane: str) -> Summary | None:
        values = self.values(key, lane)
        if not values:
            return None
        numbers = list(values.values())
        return Summary(statistics.median(numbers), min(numbers), max(numbers), len(numbers), self.times(key, lane))

    def times(self, key: str, lane: str) -> float | None:
        """How many times better perdure is on the same kind of store. Below 1 it is worse. None where one of the two is missing."""
        if is_ours(lane):
            return None
        theirs, ours = self.values(key, lane), self.values(key, beside(lane))
        pairs = [(ours[repeat], theirs[repeat]) for repeat in theirs if repeat in ours]
        ratios = [one / other for one, other in _better_on_top(key, pairs) if other > 0]
        return statistics.median(ratios) if ratios else None

    def without(self, key: str, lane: str) -> list[Cell]:
        """The cells of this lane that were to give this figure, and failed or have nothing of the kind."""
        return [cell for cell in self.cells if cell.lane == lane and key in cell.gives and (cell.failed or cell.absent)]


def _better_on_top(key: str, pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(ours, theirs) where more is better; (theirs, ours) where less is."""
    return [pair if BY_KEY[key].better == "more" else (pair[1], pair[0]) for pair in pairs]
