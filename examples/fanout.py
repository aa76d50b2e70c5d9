"""Two hundred calls, ten at a time, under one deadline: plain asyncio, and every finished call survives a crash.

perdure run examples/fanout.py:fan_out count:=200 --id census
"""

from __future__ import annotations

import asyncio

from perdure import Retry, Run, agent, tool


@tool(effect="read", timeout=5, retry=Retry(attempts=3, base=0.2))
async def measure(number: int) -> int:
    """Something slow that changes nothing."""
    await asyncio.sleep(0.05)  # inside a tool this is an ordinary sleep
    return number * number


@agent(version="1")
async def fan_out(run: Run, count: int = 200, limit: int = 10, deadline_s: float = 60.0) -> dict[str, int]:
    """The sum of the measurements, out of `count`, that arrive before the deadline."""
    gate = asyncio.Semaphore(limit)
    sizes: list[int] = []

    async def one(number: int) -> None:
        async with gate:
            sizes.append(await measure(number))

    try:
        async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(number))
    except TimeoutError:
        run.note(f"out of time after {len(sizes)} of {count}")
    return {"measured": len(sizes), "sum": sum(sizes)}
