"""Progress and remaining time: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from bench.bar import TwoLines
from bench.race.results import Cell
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_GUESS_S = 8.0

Key = tuple[str, str]
"""A measurement and a lane."""


class Forecast:
    """The remaining time, estimated from earlier repeats of the same cell, else from other cells, else from an earlier race."""

    def __init__(self, planned: Sequence[Key], earlier: Mapping[Key, float]) -> None:
        self._left = list(planned)
        self._earlier = earlier
        self._took: dict[Key, list[float]] = {}

    @property
    def count(self) -> int:
        return len(self._left)

    def took(self, key: Key, seconds: float) -> None:
        if key in self._left:
            self._left.remove(key)
        self._took.setdefault(key, []).append(seconds)

    def left_s(self) -> float:
        return sum(map(self._expected, self._left))

    def _expected(self, key: Key) -> float:
        if key in self._took:
            return statistics.fmean(self._took[key])
        if key in self._earlier:
            return self._earlier[key]
        neighbours = [seconds for (measurement, _), took in self._took.items() if measurement == key[0] for seconds in took]
        return statistics.fmean(neighbours) if neighbours else _GUESS_S


def earlier_durations(cells: Sequence[Cell]) -> dict[Key, float]:
    took: dict[Key, list[float]] = {}
    for cell in cells:
        took.setdefault((cell.measurement, cell.lane), []).append(cell.seconds)
    return {key: statistics.fmean(seconds) for key, seconds in took.items()}


class Lines:
    """For a log: one line for each finished cell."""

    def __init__(self, forecast: Forecast, stream: TextIO) -> None:
        self._forecast = forecast
        self._total = forecast.count
        self._stream = stream

    def begin(self, measurement: str, lane: str, repeat: int) -> None:
        """Said when it is over."""

    def end(self, cell: Cell) -> None:
        self._forecast.took((cell.measurement, cell.lane), cell.seconds)
        done = self._total - self._forecast.count
        print(f"{done}/{self._total}  {told(cell)}; {left(self._forecast)}", file=self._stream, flush=True)


class Bar:
    """For a terminal: a bar, and above it a line for each finished cell."""

    def __init__(self, forecast: Forecast, bar: Progress) -> None:
        self._forecast = forecast
        self._bar = bar
        self._task: TaskID = bar.add_task("", total=forecast.count, left=left(forecast))

    def begin(self, measurement: str, lane: str, repeat: int) -> None:
        self._bar.update(self._task, description=f"{measurement}: {lane}, {_time(repeat)}")

    def end(self, cell: Cell) -> None:
        self._forecast.took((cell.measurement, cell.lane), cell.seconds)
        self._bar.console.print(told(cell), highlight=False, markup=False)
        self._bar.update(self._task, advance=1, left=left(self._forecast))


def bar_on(console: Console) -> Progress:
    columns = (BarColumn(20), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    return TwoLines(*columns, console=console)


@contextmanager
def shown(planned: Sequence[Key], earlier: Mapping[Key, float]) -> Iterator[Lines | Bar]:
    forecast = Forecast(planned, earlier)
    if not sys.stderr.isatty():
        yield Lines(forecast, sys.stderr)
        return
    with bar_on(Console(stderr=True)) as bar:
        yield Bar(forecast, bar)


def told(cell: Cell) -> str:
    """One cell in one line."""
    if cell.absent:
        outcome = f"not there: {cell.absent}"
    elif cell.failed:
        outcome = f"FAILED: {cell.failed}"
    else:
        outcome = ", ".join(f"{key.partition('.')[2]} {value:,.4g}" for key, value in cell.figures.items()) or "done"
    return f"{cell.measurement}: {cell.lane}, {_time(cell.repeat)}: {outcome} ({cell.seconds:.1f} s)"


def left(forecast: Forecast) -> str:
    return f"about {time.strftime('%H:%M:%S', time.gmtime(forecast.left_s()))} left"


def _time(repeat: int) -> str:
    return f"repeat {repeat}" if repeat else "preparing"
