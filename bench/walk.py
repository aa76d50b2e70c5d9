"""Counts the Python calls and the files that one tool call goes through, from `await tool()` to its recorded result.

    .venv/bin/python bench/walk.py            # the counts and the walk
    .venv/bin/python bench/walk.py --counts   # only the counts

One run on a new SQLite file calls a `keyed` async tool several times. The last call is counted, because everything
that is created only once exists by then. `sys.setprofile` counts entries into Python functions of perdure, in every
thread: a coroutine counts each time that it is resumed. Only the public API is used, so the script also measures an
older checkout:
`OTHER/.venv/bin/python bench/walk.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import perdure
from perdure import Perdure, Run, agent, tool

_PACKAGE = str(Path(perdure.__file__).parent) + "/"
_CALLS = 5  # the calls of the run; the last call is counted


class Entry(NamedTuple):
    """One entry into a function of perdure."""

    thread: str
    depth: int  # how many functions of perdure on this thread have not returned yet
    code: CodeType

    @property
    def file(self) -> str:
        return self.code.co_filename.removeprefix(_PACKAGE)


class Walk:
    """Records every entry into a function of perdure while the profiler is switched on."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.on = False
        self._depths: dict[int, int] = {}  # by thread

    def notice(self, frame: FrameType, what: str, _: Any) -> None:
        if not self.on or what not in ("call", "return") or not frame.f_code.co_filename.startswith(_PACKAGE):
            return
        thread = threading.get_ident()
        depth = self._depths.get(thread, 0)
        if what == "call":
            self.entries.append(Entry(threading.current_thread().name, depth, frame.f_code))
            self._depths[thread] = depth + 1
        else:
            self._depths[thread] = max(0, depth - 1)  # below 0: the function was entered before the walk began

    @property
    def files(self) -> list[str]:
        """The files, in the order in which they were first entered."""
        return list(dict.fromkeys(entry.file for entry in self.entries))

    @property
    def switches(self) -> int:
        """How often the calls go from one file to another."""
        return sum(one.file != other.file for one, other in zip(self.entries, self.entries[1:], strict=False))


walk = Walk()


@tool(effect="keyed")
async def step(text: str) -> str:
    """Does nothing."""
    return text


@agent(version="1")
async def walked(run: Run, calls: int) -> None:
    for number in range(calls):
        walk.on = number == calls - 1
        await step(f"{number:020d}")
        walk.on = False


async def drive(url: str) -> None:
    async with Perdure(url, agents=[walked]) as app:
        await app.run(walked, _CALLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--counts", action="store_true", help="print the counts alone, without the walk")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        threading.setprofile(walk.notice)
        sys.setprofile(walk.notice)
        try:
            asyncio.run(drive(f"sqlite:///{folder}/walk.db"))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    functions = {entry.code for entry in walk.entries}
    print(f"{len(walk.entries)} calls of {len(functions)} functions in {len(walk.files)} files, {walk.switches} switches between files")
    if not asked.counts:
        for entry in walk.entries:
            thread = "" if entry.thread == threading.main_thread().name else f"   [{entry.thread}]"
            print(f"{'  ' * entry.depth}{entry.file}:{entry.code.co_qualname}{thread}")


if __name__ == "__main__":
    main()
