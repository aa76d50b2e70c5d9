"""How long forks and rewinds of a long run take, beside its resume: `python -m bench.fork [EVENTS] [URL]`.

A run with so many events waits for a signal. Its resume reads and replays the journal, until the agent waits again. A fork
reads it, replays it up to the point, and writes a copy of it in one commit. A rewind reads and replays it, and writes a few
events. The measurements alternate, and each begins with an app that has not seen the run. The medians are printed, as CPU
time of this process and as time on the clock, with their ratios to the resume.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from perdure import Perdure, Run, Settings, agent, tool

SETTINGS = Settings(cache_runs=0, park_after_s=0)
ROUNDS = 5


@tool(effect="idempotent")
async def put(number: int) -> str:
    return f"{number} is there"


@agent(version="1")
async def long(run: Run, calls: int) -> str:
    for number in range(calls):
        await put(number)
    while (word := str(await run.receive("go"))) == "on":
        pass
    return word


async def measured(url: str, act: Callable[[Perdure], Awaitable[Any]]) -> tuple[float, float]:
    """Seconds of CPU and on the clock that this takes, in an app that has not seen the run before."""
    async with Perdure(url, [long], settings=SETTINGS) as app:
        gc.collect()
        cpu, clock = time.process_time(), time.perf_counter()
        await act(app)
        return time.process_time() - cpu, time.perf_counter() - clock


async def main(events: int, url: str) -> None:
    last = 0
    async with Perdure(url, [long], settings=SETTINGS) as app:
        for number in range(ROUNDS):
            await app.start(long, events // 2 - 1, id=f"run-{number}")
            await app.drive(f"run-{number}")
        last = (await app.handle("run-0").row()).seq
    end, middle = last - 1, last // 4 * 2 + 1
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(ROUNDS):
        run_id = f"run-{number}"
        acts: dict[str, Callable[[Perdure], Awaitable[Any]]] = {
            "a live fork at the end": lambda app, run_id=run_id: app.live_fork(run_id, id=f"live-end-{run_id}", at=end),  # type: ignore[misc]
            "a live fork in the middle": lambda app, run_id=run_id: app.live_fork(run_id, id=f"live-{run_id}", at=middle),  # type: ignore[misc]
            "a rehearsal at the end": lambda app, run_id=run_id: app.fork(run_id, at=end),  # type: ignore[misc]
            "a rehearsal in the middle": lambda app, run_id=run_id: app.fork(run_id, at=middle),  # type: ignore[misc]
            "a stored rehearsal at the end": lambda app, run_id=run_id: app.fork(run_id, id=f"end-{run_id}", at=end),  # type: ignore[misc]
            "a stored rehearsal in the middle": lambda app, run_id=run_id: app.fork(run_id, id=f"mid-{run_id}", at=middle),  # type: ignore[misc]
            "a rewind to the end": lambda app, run_id=run_id: app.rewind(run_id, to=end, dry_run=True),  # type: ignore[misc]
            "a rewind to the middle": lambda app, run_id=run_id: app.rewind(run_id, to=middle),  # type: ignore[misc]
        }
        for name, act in acts.items():
            async with Perdure(url, [long], settings=SETTINGS) as app:
                await app.signal(run_id, "go", "on")
            found.setdefault("the resume", []).append(await measured(url, lambda app, run_id=run_id: app.drive(run_id)))  # type: ignore[misc]
            found.setdefault(name, []).append(await measured(url, act))
    resume = [median(some) for some in zip(*found["the resume"], strict=True)]
    print(f"a run with {last:,} events, medians of {ROUNDS} rounds")
    for name, times in found.items():
        cpu, clock = (median(some) for some in zip(*times, strict=True))
        print(
            f"{name}: {cpu * 1000:.0f} ms of CPU, {cpu / resume[0]:.2f} × the resume; {clock * 1000:.0f} ms on the clock, {clock / resume[1]:.2f} ×"
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        size = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
        asyncio.run(main(size, sys.argv[2] if len(sys.argv) > 2 else f"sqlite:///{folder}/journal.db"))
