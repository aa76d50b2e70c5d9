"""The order of the race: for every workload the first repeat of all lanes, then the second of all lanes.

So variations of the machine affect all lanes in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Protocol

from bench.race.exchange import Absent, CutOff, Failed
from bench.race.lanes import Lane
from bench.race.measurements import Figures, Measurement
from bench.race.results import Cell
from bench.race.table import Ground, Table

Places = Callable[[], AbstractContextManager[Table]]
Outcome = tuple[Figures, Sequence[str]]


class Told(Protocol):
    """An observer of the race, for progress."""

    def begin(self, measurement: str, lane: str, repeat: int) -> None: ...

    def end(self, cell: Cell) -> None: ...


class Race:
    """Runs the measurements of all lanes in turn, and appends every cell to `cells` as soon as it is measured."""

    def __init__(self, ground: Ground, lanes: Sequence[Lane], repeats: int, told: Told, cells: list[Cell]) -> None:
        self._ground = ground
        self._lanes = lanes
        self._repeats = repeats
        self._told = told
        self._cells = cells

    def run(self, measurement: Measurement) -> None:
        lanes = [lane for lane in self._lanes if measurement.takes(lane)]
        if measurement.prepare is None:
            self._by_turns(measurement, [(lane, self._fresh(lane)) for lane in lanes])
            return
        with ExitStack() as kept:
            self._by_turns(measurement, [(lane, self._kept(measurement, lane, kept)) for lane in lanes])

    def _by_turns(self, measurement: Measurement, entries: Sequence[tuple[Lane, Places]]) -> None:
        for repeat in range(1, self._repeats + 1):
            for lane, place in entries:
                given_up = self._given_up(measurement, lane)
                if given_up is not None:
                    self._skip(measurement, lane, repeat, given_up)
                else:
                    self._cell(measurement, lane, repeat, partial(self._within, place, measurement))

    def _within(self, place: Places, measurement: Measurement) -> Outcome:
        with place() as table:
            table.begin(measurement.limit_s)
            return measurement.measure(table), table.why

    def _fresh(self, lane: Lane) -> Places:
        return lambda: self._ground.table(lane)

    def _kept(self, measurement: Measurement, lane: Lane, kept: ExitStack) -> Places:
        """A place that is prepared now and kept until the last repeat is over."""
        tables: list[Table] = []

        def prepare() -> Outcome:
            table = kept.enter_context(self._ground.table(lane))
            table.begin(measurement.prepare_limit_s)
            assert measurement.prepare is not None
            figures = measurement.prepare(table)
            tables.append(table)
            return figures, table.why

        self._cell(measurement, lane, 0, prepare)

        @contextmanager
        def again() -> Iterator[Table]:
            yield tables[0]

        return again

    def _given_up(self, measurement: Measurement, lane: Lane) -> Cell | None:
        """An earlier cell after which a repeat is useless: the preparation failed, it timed out, or the workload is not supported."""
        earlier = [cell for cell in self._cells if cell.measurement == measurement.name and cell.lane == lane.name]
        return next((cell for cell in earlier if cell.absent or (cell.failed and (cell.repeat == 0 or cell.is_cut_off))), None)

    def _skip(self, measurement: Measurement, lane: Lane, repeat: int, because: Cell) -> None:
        self._keep(
            Cell(
                measurement.name,
                lane.name,
                repeat,
                0.0,
                measurement.gives,
                failed=because.failed and f"not tried again: {because.failed}",
                absent=because.absent,
                is_cut_off=because.is_cut_off,
            )
        )

    def _cell(self, measurement: Measurement, lane: Lane, repeat: int, work: Callable[[], Outcome]) -> None:
        self._told.begin(measurement.name, lane.name, repeat)
        begun = time.monotonic()
        figures: Figures = {}
        why: Sequence[str] = ()
        failed = absent = None
        is_cut_off = False
        try:
            figures, why = work()
        except Absent as reason:
            absent = str(reason)
        except Failed as reason:
            failed, is_cut_off = str(reason), isinstance(reason, CutOff)
        except Exception as error:  # a malformed answer can raise many exceptions, and must not stop the other lanes
            failed = f"its answer cannot be used: {type(error).__name__}: {error}"
        self._keep(
            Cell(
                measurement.name,
                lane.name,
                repeat,
                time.monotonic() - begun,
                measurement.gives,
                dict(figures),
                failed,
                absent,
                tuple(why),
                is_cut_off,
            )
        )

    def _keep(self, cell: Cell) -> None:
        self._cells.append(cell)
        self._told.end(cell)
