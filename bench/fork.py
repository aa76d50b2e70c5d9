"""How long a fork of a long run takes, beside its resume: `python -m bench.fork [EVENTS] [URL]`.

A run with so many events waits for a signal. Its resume reads and replays the journal, and ends the run. A fork reads it, replays
it up to the point, and writes a copy of it in one commit. The best of three is printed, with the ratio to the resume.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from perdure import Perdure, Run, Settings, agent, tool

SETTINGS = Settings(cache_runs=0, park_after_s=0)
TIMES = 3


@tool(effect="idempotent")
async def put(number: int) -> str:
    return f"{number} is there"


@agent(version="1")
async def long(run: Run, calls: int) -> str:
    for number in range(calls):
        await put(number)
    return str(await run.receive("go"))


async def measured(url: str, act: Callable[[Perdure], Awaitable[Any]]) -> float:
    """Seconds that this takes in an app that has not seen the run before."""
    async with Perdure(url, [long], settings=SETTINGS) as app:
        begun = time.perf_counter()
        await act(app)
        return time.perf_counter() - begun


async def main(events: int, url: str) -> None:
    async with Perdure(url, [long], settings=SETTINGS) as app:
        for number in range(TIMES):
            await app.start(long, events // 2 - 1, id=f"run-{number}")
            await app.drive(f"run-{number}")
        last = (await app.handle("run-0").row()).seq
        point = last - 1
    forks: dict[str, list[float]] = {}
    for number in range(TIMES):
        run_id = f"run-{number}"
        for name, at in (("at the end", point), ("in the middle", last // 4 * 2 + 1)):
            found = await measured(url, lambda app, at=at, run_id=run_id: app.live_fork(run_id, id=f"live-{at}-{run_id}", at=at))  # type: ignore[misc]
            forks.setdefault(f"a live fork {name}", []).append(found)
            found = await measured(url, lambda app, at=at, run_id=run_id: app.fork(run_id, id=f"stored-{at}-{run_id}", at=at))  # type: ignore[misc]
            forks.setdefault(f"a stored rehearsal {name}", []).append(found)
    resumes = []
    for number in range(TIMES):
        async with Perdure(url, [long], settings=SETTINGS) as app:
            await app.signal(f"run-{number}", "go", "on")
        resumes.append(await measured(url, lambda app, number=number: app.drive(f"run-{number}")))  # type: ignore[misc]
    resume = min(resumes)
    print(f"a run with {last:,} events: its resume takes {resume * 1000:.0f} ms")
    for name, times in forks.items():
        print(f"{name}: {min(times) * 1000:.0f} ms, {min(times) / resume:.2f} × the resume")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        size = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
        asyncio.run(main(size, sys.argv[2] if len(sys.argv) > 2 else f"sqlite:///{folder}/journal.db"))
