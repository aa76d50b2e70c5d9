"""The other processes of the benchmark: `child.py ROLE URL ARGUMENT`. The last line of output is the measurement."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import agents
from memory import peak_mb

from perdure import Perdure, Settings

CALLS_OF_A_LIVE_RUN = 20


async def serve(url: str, _: str) -> None:
    """Serve the queue until SIGTERM."""
    async with Perdure(url, agents=[agents.punctual, agents.asking]) as app:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.drain)
        await app.work()


async def stand_by(url: str, _: str) -> None:
    """Wait for a line on stdin, then serve the queue until SIGTERM."""
    async with Perdure(url, agents=[agents.steps, agents.labours]) as app:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.drain)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await app.work()


async def build(url: str, calls: str) -> None:
    """Make a run of `calls` calls; this process dies in the next call."""
    # This part is not measured, so it need not wait for the disk.
    async with Perdure(url, agents=[agents.doomed], settings=Settings(synchronous="normal")) as app:
        await app.run(agents.doomed, int(calls), id="long")


async def resume(url: str, _: str) -> None:
    """Resume the run of `build` in another process, up to its next call."""
    print(time.monotonic_ns(), flush=True)
    async with Perdure(url, agents=[agents.doomed]) as app:
        await app.engine.drive("long")


async def talk(url: str, turns: str) -> None:
    """Make a conversation of `turns` turns; this process dies in the next tool."""
    async with Perdure(url, agents=[agents.talker], settings=Settings(synchronous="normal")) as app:
        await app.run(agents.talker, f"{turns} last_words", id="long")


async def talk_on(url: str, _: str) -> None:
    """Resume the conversation of `talk` in another process, up to its next tool."""
    print(time.monotonic_ns(), flush=True)
    async with Perdure(url, agents=[agents.talker]) as app:
        await app.engine.drive("long")


async def park(url: str, runs: str) -> None:
    """Park `runs` runs, each of which waits for an approval."""
    async with Perdure(url, agents=[agents.asking], settings=Settings(synchronous="normal")) as app:
        handles = [await app.start(agents.asking) for _ in range(int(runs))]
        async with asyncio.TaskGroup() as group:
            group.create_task(app.work())
            while (await handles[-1].row()).status != "waiting_approval":
                await asyncio.sleep(0.05)
            while app.store.next_notice() is not None:  # until all notices are sent
                await asyncio.sleep(0.05)
            app.drain()


async def idle(url: str, seconds: str) -> None:
    """A worker with nothing to do for `seconds`: prints its peak memory in MB, and its share of a core in %."""
    async with Perdure(url, agents=[agents.asking, agents.punctual]) as app, asyncio.TaskGroup() as group:
        group.create_task(app.work())
        await asyncio.sleep(0.5)
        used, begun = time.process_time(), time.monotonic()
        await asyncio.sleep(float(seconds))
        share = (time.process_time() - used) / (time.monotonic() - begun)
        print(peak_mb(), share * 100, flush=True)
        app.drain()


async def crowd(url: str, runs: str) -> None:
    """Hold `runs` runs in memory at once; prints the peak memory of this process."""
    agents.crowd.expected = int(runs)
    async with Perdure(url, agents=[agents.sociable]) as app:
        for _ in range(int(runs)):
            await app.start(agents.sociable, CALLS_OF_A_LIVE_RUN)
        async with asyncio.TaskGroup() as group:
            group.create_task(app.work())
            await agents.crowd.all_here.wait()
            print(peak_mb(), flush=True)
            agents.crowd.may_go.set()
            app.drain()


ROLES = {
    "serve": serve,
    "stand_by": stand_by,
    "build": build,
    "resume": resume,
    "talk": talk,
    "talk_on": talk_on,
    "crowd": crowd,
    "park": park,
    "idle": idle,
}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent process ends this one
    role, url, argument = sys.argv[1:]
    asyncio.run(ROLES[role](url, argument))
