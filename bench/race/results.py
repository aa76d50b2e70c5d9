"""The results: every repeat of every lane as it was measured, and the medians and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.race.figures import BY_KEY
from bench.race.interruption import Interruption
from bench.race.lanes import beside, contestant_of, is_ours
from bench.race.sizes import Sizes
from msgspec import Struct


class Cell(Struct, frozen=True, omit_defaults=True):
    """One measurement of one lane in one repeat (0: the preparation for all repeats): with figures, failed, or absent.

    `gives` are the figures that it should give.
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
    """Repeats of one figure in one lane. `times` is how many times better perdure is: the median, the lowest and the highest of the
    ratios, repeat by repeat."""

    median: float
    low: float
    high: float
    repeats: int
    times: float | None = None
    times_low: float | None = None
    times_high: float | None = None


class Results(Struct):
    """A whole race, as it is written to the JSON file."""

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
    load_before: float = 0.0
    interrupted: Interruption | None = None

    def values(self, key: str, lane: str) -> dict[int, float]:
        """One figure of one lane: repeat → value."""
        return {cell.repeat: cell.figures[key] for cell in self.cells if cell.lane == lane and key in cell.figures}

    def summary(self, key: str, lane: str) -> Summary | None:
        values = self.values(key, lane)
        if not values:
            return None
        numbers = list(values.values())
        ratios = self._ratios(key, lane)
        spread = (min(ratios), max(ratios)) if ratios else (None, None)
        return Summary(statistics.median(numbers), min(numbers), max(numbers), len(numbers), self.times(key, lane), *spread)

    def times(self, key: str, lane: str) -> float | None:
        """How many times better perdure is on the same kind of store. Below 1 it is worse. None if one of the two is missing."""
        ratios = self._ratios(key, lane)
        return statistics.median(ratios) if ratios else None

    def _ratios(self, key: str, lane: str) -> list[float]:
        if is_ours(lane):
            return []
        theirs, ours = self.values(key, lane), self.values(key, beside(lane))
        pairs = [(ours[repeat], theirs[repeat]) for repeat in theirs if repeat in ours]
        # The size of an empty store is subtracted, so a small store can have a negative size.
        return [one / other for one, other in _better_on_top(key, pairs) if one >= 0 and other > 0]

    def without(self, key: str, lane: str) -> list[Cell]:
        """The cells of this lane that should give this figure, and failed or are absent."""
        return [cell for cell in self.cells if cell.lane == lane and key in cell.gives and (cell.failed or cell.absent)]

    def was_tried(self, key: str, lane: str) -> bool:
        """Was this lane planned to give this figure?"""
        return any(cell.lane == lane and key in cell.gives for cell in self.cells)

    def silent(self) -> list[str]:
        """The lanes without any figure."""
        heard = {cell.lane for cell in self.cells if cell.figures}
        return [lane for lane in self.lanes if lane not in heard]

    def remarks(self, key: str, lane: str) -> list[str]:
        """The notes on one figure of one lane: why it is missing, and remarks of the contestant."""
        cells = [cell for cell in self.cells if cell.lane == lane and key in cell.gives]
        tried = [cell for cell in cells if cell.failed and "not tried again" not in cell.failed]
        failed = [f"{lane}, {cell.measurement}, {_when(cell, tried)}: {cell.failed}" for cell in tried]
        name = contestant_of(lane)
        absent = [f"{name}, {cell.measurement}: {cell.absent}" for cell in cells if cell.absent]
        why = [f"{name}, {cell.measurement}: {text}" for cell in cells for text in cell.why]
        workload = BY_KEY[key].workload
        said = self.contestants.get(name, {}).get("notes", {})
        # Only for planned figures: a lane as shipped does not have all workloads that its contestant remarks on.
        own = [f"{name}, {workload}: {said[workload]}"] if cells and workload in said else []
        return list(dict.fromkeys([*failed, *absent, *why, *own]))


def _when(cell: Cell, tried: Sequence[Cell]) -> str:
    """In which repeats the same happened."""
    repeats = [str(other.repeat) for other in tried if (other.measurement, other.failed) == (cell.measurement, cell.failed)]
    return f"repeat {', '.join(repeats)}" if cell.repeat else "when it was prepared"


def _better_on_top(key: str, pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(ours, theirs) if more is better; (theirs, ours) if less is better; empty if neither is."""
    match BY_KEY[key].better:
        case "more":
            return list(pairs)
        case "less":
            return [(theirs, ours) for ours, theirs in pairs]
        case None:
            return []
