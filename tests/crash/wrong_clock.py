"""Processes whose wall clock is wrong, or is set while they live.

libc itself gives the wrong time to the whole process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.crash.nursery import JOURNAL, Nursery
from tests.crash.world import World

from perdure.cli import why

SOURCE = Path(__file__).with_name("wrong_clock.c")


def build(folder: Path) -> Path | None:
    """The library; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "wrong_clock.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True, timeout=60)
    return library


def nursery(library: Path) -> Nursery:
    """Its victims can be given another clock."""
    return Nursery({"LD_PRELOAD": str(library)})


class WallClock:
    """The clock of a machine: all who follow it see the same time, and see it being set."""

    def __init__(self, world: World, name: str = "clock", wrong_s: float = 0.0) -> None:
        self._world = world
        self.path = world.folder / name
        self.path.write_bytes(struct.pack("q", 0))
        self.set(wrong_s)

    def set(self, wrong_s: float) -> None:
        with open(self.path, "r+b") as file:  # in place: other processes have mapped the file
            file.write(struct.pack("q", round(wrong_s * 1e6)))

    def start(self, victim: str, **args: Any) -> int:
        return self._world.start(victim_under, clock=str(self.path), what=victim, args=args)

    def run(self, victim: str, **args: Any) -> int:
        return self._world.wait(self.start(victim, **args))


def victim_under(folder: str, clock: str, what: str, args: dict[str, Any]) -> None:
    """Run another victim by this clock."""
    before = time.time()
    assert ctypes.CDLL(None).follow_clock(clock.encode()) == 0
    (wrong_us,) = struct.unpack("q", Path(clock).read_bytes())
    assert abs(time.time() - before - wrong_us / 1e6) < 60, "this process does not go by the clock that it was given"
    module, _, name = what.partition(":")
    getattr(importlib.import_module(f"tests.crash.{module}"), name)(folder=folder, **args)


def explain(folder: str, run_id: str) -> None:
    """What `perdure why` says about the run, in the log."""
    why.command.main([run_id, "--url", os.environ[JOURNAL]], standalone_mode=False)
