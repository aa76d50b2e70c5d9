"""One measurement of `bench/ab.py`, in its own process: `ab_child.py WORKLOAD URL`.

It prints wall seconds, CPU seconds and the peak memory of the process in MB. It uses only the public API of perdure,
so the same file measures this checkout and an older checkout.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from memory import peak_mb

from perdure import Perdure, Run, Settings, agent, tool

RESUMED_CALLS = 10_000
_LINE_CALLS = 1_000
_SIGNALS = 40
_PATIENCE_S = 60.0


@tool(effect="keyed")
async def step(text: str) -> str:
    """Does nothing: its intent is durable before it begins."""
    return text


@tool(effect="idempotent")
async def die() -> None:
    """Kills this process as `kill -9` does, if the environment says so; otherwise prints that the call was reached."""
    if os.environ.get("AB_DIES"):
        os.kill(os.getpid(), signal.SIGKILL)
    reached.set()


@tool(effect="idempotent")
async def when() -> float:
    """The moment at which the effect begins."""
    return time.perf_counter()


@agent(version="1")
async def steps(run: Run, calls: int) -> int:
    for number in range(calls):
        await step(f"{number:020d}")
    return calls


@agent(version="1")
async def doomed(run: Run, calls: int) -> None:
    for number in range(calls):
        await step(f"{number:020d}")
    await die()


@agent(version="1")
async def listening(run: Run) -> float:
    await run.receive("go")
    return await when()


reached = asyncio.Event()


class Stopwatch:
    """Wall and CPU seconds of this process since it was started."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


async def fan(url: str) -> tuple[float, float]:
    """200 concurrent runs of 20 calls."""
    return await _worked(url, [20] * 200)


async def queued(url: str) -> tuple[float, float]:
    """1,000 queued runs of one call, drained by one worker."""
    return await _worked(url, [1] * 1000)


async def line(url: str) -> tuple[float, float]:
    """One run with sequential calls, on a file whose log (WAL) has its full length."""
    async with Perdure(url, agents=[steps]) as app:
        await app.run(steps, _LINE_CALLS)
        watch = Stopwatch()
        await app.run(steps, _LINE_CALLS)
        return watch.read()


async def build(url: str) -> tuple[float, float]:
    """Make a run of 10,000 calls. This process dies in the next call, and `resume` resumes the run."""
    async with Perdure(url, agents=[doomed], settings=Settings(synchronous="normal")) as app:
        await app.run(doomed, RESUMED_CALLS, id="long")
    raise AssertionError("the process outlived its last call")


async def resume(url: str) -> tuple[float, float]:
    """Resume the run of `build`: from opening the journal to its next call."""
    watch = Stopwatch()
    async with Perdure(url, agents=[doomed]) as app, asyncio.TaskGroup() as group:
        driving = group.create_task(app.drive("long"))
        await reached.wait()
        taken = watch.read()
        await driving
    return taken


async def signalled(url: str) -> tuple[float, float]:
    """From `signal` to the next effect of a parked run, with an idle worker in this process: the mean of many."""
    async with Perdure(url, agents=[listening]) as app, Perdure(url) as sender, asyncio.TaskGroup() as group:
        stop = asyncio.Event()
        group.create_task(app.work(stop=stop))
        handles = [await app.start(listening) for _ in range(_SIGNALS + 1)]
        for handle in handles:
            while app.store.get(handle.id).status != "waiting":  # every version of perdure has this call
                await asyncio.sleep(0.02)
        taken, watch = 0.0, Stopwatch()
        for number, handle in enumerate(handles):
            begun = time.perf_counter()
            await sender.signal(handle.id, "go")
            effect_at = await handle.result(timeout=_PATIENCE_S)
            if number:  # the first signal also opens connections and prepares statements
                taken += effect_at - begun
        cpu = watch.read()[1]
        stop.set()
        return taken / _SIGNALS, cpu / _SIGNALS


async def _worked(url: str, inputs: Sequence[int]) -> tuple[float, float]:
    """The time from the worker's start until it has finished all these runs, which were queued before."""
    left, stop = len(inputs), asyncio.Event()

    def count(run_id: str, events: Sequence[Any]) -> None:
        nonlocal left
        left -= sum(event.type == "run_succeeded" for event in events)
        if not left:
            stop.set()

    async with Perdure(url, agents=[steps], observers=[count]) as app:
        for calls in inputs:
            await app.start(steps, calls)
        watch = Stopwatch()
        await app.work(stop=stop)
        return watch.read()


WORKLOADS: dict[str, Callable[[str], Coroutine[Any, Any, tuple[float, float]]]] = {
    "fan": fan,
    "line": line,
    "queued": queued,
    "build": build,
    "resume": resume,
    "signal": signalled,
}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C bench/ab.py ends this process
    workload, url = sys.argv[1:]
    wall_s, cpu_s = asyncio.run(WORKLOADS[workload](url))
    print(wall_s, cpu_s, peak_mb())
