"""A run leaves no objects of perdure for the garbage collector.

Reason: the collector went through thousands of ended runs again and again, and took a third of the time of a worker
with a long queue.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.garbage import own_garbage
from tests.unit.drive_tools import perdure, run

from perdure import Agent, Circles, Perdure, Run, agent, tool

RUNS = 30
# On these versions the frames of a traceback refer to the frames that called them: a drive and its core, too, wait for the collector.
CALLERS = 75 if (3, 12) <= sys.version_info < (3, 14) else 0


@tool(effect="once")
async def act(number: int) -> int:
    return number


@tool(effect="once", retry=None)
async def fail() -> None:
    raise ValueError("no")


@agent(version="1")
async def ends(run: Run) -> int:
    return sum(await asyncio.gather(act(1), act(2)))


@agent(version="1", circles=Circles(repeats=3))
async def watched(run: Run) -> int:
    return await act(1)


@agent(version="1")
async def fails(run: Run) -> None:
    await fail()


@agent(version="1")
async def listens(run: Run) -> int:
    return await act(await run.receive("go"))


@agent(version="1")
async def asks(run: Run) -> int:
    return await ends()


async def end(app: Perdure, which: Agent[[], Any]) -> None:
    handles = await asyncio.gather(*(app.start(which) for _ in range(RUNS)))
    await asyncio.gather(*(handle.result() for handle in handles), return_exceptions=True)


async def park(app: Perdure, which: Agent[[], Any]) -> None:
    for number in range(RUNS):
        await app.start(which, id=f"r{number}")
        assert (await app.engine.drive(f"r{number}", wait=False)).status == "waiting"


async def stop(app: Perdure, which: Agent[[], Any]) -> None:
    await park(app, which)
    for number in range(RUNS):
        await app.cancel(f"r{number}", by="ann")
        assert (await app.engine.drive(f"r{number}", wait=False)).status == "cancelled"


async def wake(app: Perdure, which: Agent[[], Any]) -> None:
    await park(app, which)
    for number in range(RUNS):
        await app.signal(f"r{number}", "go", number)
        assert (await app.engine.drive(f"r{number}", wait=False)).status == "succeeded"


@pytest.mark.parametrize(
    ("which", "work", "objects"),
    [
        (ends, end, 1),
        (watched, end, 1),
        (fails, end, 40 + CALLERS),  # an error has its traceback, and its future in it
        # Asyncio ties a task to the future that it waits for, and the task still waited when the run was parked.
        (asks, end, 15),
        (listens, park, 15),
        (listens, stop, 15 + CALLERS),
        (listens, wake, 15),
    ],
    ids=["ends", "watched", "fails", "asks a child", "is parked", "is cancelled", "is woken"],
)
def test_a_run_leaves_nothing_of_ours_to_the_garbage_collector(
    which: Agent[[], Any], work: Callable[[Perdure, Agent[[], Any]], Any], objects: int
) -> None:
    async def main() -> int:
        async with perdure(None, [which, ends]) as app:
            await end(app, ends)  # create everything that is created once for all runs
            gc.collect()
            gc.disable()
            try:
                await work(app, which)
                await asyncio.sleep(0)
                return gc.collect()
            finally:
                gc.enable()

    with own_garbage():
        left = run(main())
    assert left < RUNS * objects, f"{left / RUNS:.1f} objects of each run"


# -- objects of a run are freed inside of the run ---------------------------------------------------------------------
unrecorded: list[int] = []
cleaning: list[asyncio.Future[None]] = []


@tool(effect="once")
async def clean_up() -> None:
    unrecorded.append(1)


class Heirloom:
    """An object that calls a tool when its last reference is gone."""

    def __init__(self, heirs: int = 0) -> None:
        self.heirs = heirs

    def __del__(self) -> None:
        if self.heirs:
            by_timer(Heirloom(self.heirs - 1))
        cleaning[:] = [asyncio.ensure_future(clean_up())]

    def __call__(self, *_: object) -> None: ...


def by_timer(heirloom: Heirloom) -> None:
    asyncio.get_running_loop().call_later(3600, heirloom)


def by_handler(heirloom: Heirloom) -> None:
    asyncio.get_running_loop().set_exception_handler(heirloom)


def by_callback(heirloom: Heirloom) -> None:
    asyncio.get_running_loop().call_soon(heirloom)


HOLDERS = {"timer": by_timer, "handler": by_handler, "callback": by_callback}


@agent(version="1")
async def leaves(run: Run, holder: str, heirs: int, ending: str) -> None:
    HOLDERS[holder](Heirloom(heirs))
    if ending == "waiting":
        await run.receive("go")
    if ending == "needs_attention":
        raise KeyboardInterrupt  # callbacks that are ready stay in the queue


@pytest.mark.parametrize(
    ("holder", "ending"),
    [
        ("timer", "succeeded"),
        ("timer", "waiting"),
        ("timer", "needs_attention"),
        ("handler", "succeeded"),
        ("handler", "waiting"),
        ("callback", "needs_attention"),
    ],
)
@pytest.mark.parametrize("heirs", [0, 2])
def test_what_only_a_runs_own_loop_still_refers_to_calls_no_tool_unrecorded_when_the_run_is_let_go(
    holder: str, heirs: int, ending: str
) -> None:
    unrecorded.clear()
    cleaning.clear()

    async def main() -> tuple[str, list[str]]:
        async with perdure(None, [leaves]) as app:
            await app.start(leaves, holder, heirs, ending, id="r")
            row = await app.engine.drive("r", wait=False)
            gc.collect()
            for _ in range(10):
                await asyncio.sleep(0)
            return row.status, [event.type for event in await app.handle("r").events()]

    status, told = run(main())
    assert status == ending
    assert unrecorded == []
    assert "tool_call_initiated" not in told
