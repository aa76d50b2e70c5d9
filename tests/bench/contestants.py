"""Contestants for tests: programs of a few lines that behave well or badly."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from bench.race.lanes import Contestant, Lane
from bench.race.results import Cell
from bench.race.sizes import Sizes
from bench.race.table import Ground

TINY = Sizes(
    steps=20,
    runs=5,
    steps_of_a_run=3,
    queued=10,
    idle_starts=3,
    short_run=20,
    long_run=40,
    noticed_s=0.0,
    turns=4,
    parked=5,
    parked_s=0.2,
    wakes=2,
    shared_runs=6,
    shared_steps=2,
    tool_ms=10.0,
    slow_steps=3,
    slow_runs=3,
    slow_steps_of_a_run=2,
)

_GOOD = """
def sequential(given):
    return {"seconds": given["steps"] / 100, "p50_us": 10.0, "p99_us": 20.0, "bytes": 1000 + 50 * given["steps"]}
"""


def contestant(folder: Path, name: str, body: str = _GOOD, roles: str = "sequential") -> Contestant:
    """A program whose roles are the functions in `body`."""
    program = folder / f"with_{name}.py"
    listed = ", ".join(f'"{role}": {role}' for role in roles.split())
    program.write_text(f"import os, sys, time\nimport wire\n{body}\nwire.compete({{{listed}}})\n")
    return Contestant(name, program, Path(sys.executable))


def lane(folder: Path, name: str, body: str = _GOOD, roles: str = "sequential") -> Lane:
    return Lane(contestant(folder, name, body, roles), "sqlite")


def ground(folder: Path, sizes: Sizes = TINY) -> Ground:
    scratch = folder / "scratch"
    scratch.mkdir()
    return Ground(scratch, None, sizes)


def heeds_signals() -> None:
    """Let this process and its children be interrupted: processes that a shell starts in the background ignore Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Silent:
    """Nobody watches."""

    def begin(self, measurement: str, lane: str, repeat: int) -> None: ...

    def end(self, cell: Cell) -> None: ...
