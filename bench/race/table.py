"""The place of one measurement: a new folder, database and server, removed afterwards."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bench.race.exchange import Companion, CutOff, Exchange
from bench.race.lanes import Lane
from bench.race.sizes import Sizes

_START_S = 60.0


class Databases(Protocol):
    """A PostgreSQL server, as far as it is needed here."""

    def new_database(self) -> str: ...

    def drop(self, url: str) -> None: ...


class Ground:
    """What all measurements share: the disk, the PostgreSQL server if there is one, and the sizes."""

    def __init__(self, folder: Path, databases: Databases | None, sizes: Sizes) -> None:
        self.folder = folder
        self.databases = databases
        self.sizes = sizes
        self.exchange = Exchange(folder / "said")
        self._numbers = itertools.count(1)

    @contextmanager
    def table(self, lane: Lane) -> Iterator[Table]:
        """A separate place for a lane."""
        folder = self.folder / f"{next(self._numbers):04d}-{lane.contestant.name}"
        folder.mkdir()
        try:
            with self._database(lane) as url, self._server(lane, folder) as server:
                yield Table(self, lane, folder, url, server)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _database(self, lane: Lane) -> Iterator[str | None]:
        if lane.store != "postgres":
            yield None
            return
        assert self.databases is not None, f"{lane.name} is in the race, and there is no PostgreSQL"
        url = self.databases.new_database()
        try:
            yield url
        finally:
            self.databases.drop(url)

    @contextmanager
    def _server(self, lane: Lane, folder: Path) -> Iterator[Companion | None]:
        if lane.store != "own":
            yield None
            return
        given = {"folder": str(folder), "url": None, "server": None, "as_shipped": lane.as_shipped}
        with self.exchange.companion(lane.contestant, "serve", given, _START_S) as server:
            yield server


class Table:
    """Asks the contestant of one lane, in one place. All questions of a cell share the time limit of the cell."""

    def __init__(self, ground: Ground, lane: Lane, folder: Path, url: str | None, server: Companion | None) -> None:
        self.ground = ground
        self.lane = lane
        self.sizes = ground.sizes
        self.server = server
        self.why: list[str] = []
        self.woken = 0
        said = None if server is None else server.said
        self._always = {"folder": str(folder), "url": url, "server": said, "as_shipped": lane.as_shipped}
        self._ended = time.monotonic()
        self._limit_s = 0.0
        self._deadline = 0.0

    def begin(self, limit_s: float) -> None:
        """Start a new time limit of that many seconds."""
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    def ask(self, role: str, **parameters: Any) -> dict[str, Any]:
        try:
            answer = self._exchange.ask(self.lane.contestant, role, self._always | parameters, self._left())
        finally:
            self._ended = time.monotonic()
        self._note(answer)
        return answer

    @contextmanager
    def companion(self, role: str, **parameters: Any) -> Iterator[Companion]:
        with self._exchange.companion(self.lane.contestant, role, self._always | parameters, self._left()) as companion:
            self._note(companion.said)
            yield companion

    def seconds_to_last_words(self, role: str, **parameters: Any) -> float:
        """The time from the start of a new process to its last output.

        It starts only when the death of the process before has been noticed. A server needs a time-out for that, and the rest of this
        time-out at the lane's turn would depend on the other contestants.
        """
        time.sleep(max(0.0, self._ended + self.sizes.noticed_s - time.monotonic()))
        begun = time.monotonic_ns()
        reached = self.ask(role, **parameters)["reached_ns"]
        return float(reached - begun) / 1e9

    @contextmanager
    def another(self) -> Iterator[Table]:
        """A second place for the same lane, within the same time."""
        with self.ground.table(self.lane) as other:
            other.begin(self._left())
            yield other

    @property
    def _exchange(self) -> Exchange:
        return self.ground.exchange

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise CutOff(f"cut off after {self._limit_s:.0f} s")
        return left

    def _note(self, answer: dict[str, Any]) -> None:
        if "why" in answer and str(answer["why"]) not in self.why:
            self.why.append(str(answer["why"]))
