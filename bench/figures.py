"""Figures: the measured values, the spread of the repeats, and the targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct


class Sample(Struct, frozen=True):
    """Repeats of one measurement. The median counts; lowest and highest are the spread."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        assert len(values) >= 3, "fewer than three repeats say nothing"
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def over(self, other: Sample) -> Sample:
        """This sample divided by the other, repeat by repeat: both values of a repeat see the same machine speed."""
        return Sample.of([ours / theirs for ours, theirs in zip(self.values, other.values, strict=True)])


class Figure(Struct, frozen=True):
    """One line of the table. A line without a target is for information."""

    name: str
    sample: Sample
    unit: str
    target: float | None = None
    bound: Literal["at least", "at most"] = "at least"
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        good = self.sample.median >= self.target if self.bound == "at least" else self.sample.median <= self.target
        return "ok" if good else "miss"
