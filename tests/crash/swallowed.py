"""A process that gets Ctrl-C while a task of its worker is being woken.

Usage: `python -m tests.crash.swallowed FOLDER WHOSE MOMENT`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Any

from perdure import Perdure, Run, agent, tool

folder, whose, moment = sys.argv[1:]
begun = asyncio.Event()


class Loop(asyncio.SelectorEventLoop):
    """A loop that is struck where it wakes that task: before the callback is entered, or when it begins to run."""

    leaving = False

    def call_soon(self, callback: Callable[..., Any], *args: Any, **options: Any) -> asyncio.Handle:  # type: ignore[override]
        if self.leaving and whose in _name(callback):
            self.leaving = False
            if moment == "entered":
                strike()
            return super().call_soon(strike)
        return super().call_soon(callback, *args, **options)


def _name(callback: Any) -> str:
    task = getattr(callback, "__self__", None)
    return f"{task.get_name()} {task.get_coro()}" if isinstance(task, asyncio.Task) else ""


def strike() -> None:
    signal.raise_signal(signal.SIGINT)


@tool(effect="once")
async def take_long() -> None:
    begun.set()
    await asyncio.sleep(3600)


@agent(version="1")
async def works(run: Run) -> None:
    await take_long()


async def main(loop: Loop) -> None:
    async with Perdure(f"sqlite:///{folder}/db", agents=[works]) as app:
        await app.start(works, id="r")
        working = asyncio.create_task(app.work())
        await begun.wait()
        await asyncio.sleep(0.05)  # its other tasks wait as well
        loop.leaving = True
        strike()  # the first one: asyncio cancels this task
        await working


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=Loop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Loop)
        runner.run(main(loop))
