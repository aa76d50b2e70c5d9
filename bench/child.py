"""The other processes of the benchmark: `child.py ROLE URL ARGUMENT`. What they have measured is the last line that they print."""

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
    """Be ready, begin when told to, and serve the queue until SIGTERM."""
    async with Perdure(url, agents=[agents.steps, agents.labours]) as app:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.drain)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await app.work()


async def build(url: str, calls: str) -> None:
    """A run of that many calls, and a process that dies in the one after."""
    # Nobody measures this part, so that it need not wait for the disk.
    async with Perdure(url, agents=[agents.doomed], settings=Settings(synchronous="normal")) as app:
        await app.run(agents.doomed, int(calls), id="long")


async def resume(url: str, _: str) -> None:
    """The same run in another process, up to its next call."""
    print(time.monotonic_ns(), flush=True)
    async with Perdure(url, agents=[agents.doomed]) as app:
        await app.drive("long")


async def talk(url: str, turns: str) -> None:
    """A conversation of that many turns, and a process that dies in the tool after."""
    async with Perdure(url, agents=[agents.talker], settings=Settings(synchronous="normal")) as app:
        await app.run(agents.talker, f"{turns} last_words", id="long")


async def talk_on(url: str, _: str) -> None:
    """The same conversation in another process, up to its next tool."""
    print(time.monotonic_ns(), flush=True)
    async with Perdure(url, agents=[agents.talker]) as app:
        await app.drive("long")


async def park(url: str, runs: str) -> None:
    """That many runs, each waiting for an approval, and no process."""
    async with Perdure(url, agents=[agents.asking], settings=Settings(synchronous="normal")) as app:
        handles = [await app.start(agents.asking) for _ in range(int(runs))]
        async with asyncio.TaskGroup() as group:
            group.create_task(app.work())
            while (await handles[-1].status()).status != "waiting_approval":
                await asyncio.sleep(0.05)
            while app.store.next_notice() is not None:  # people have been told of all of them
                await asyncio.sleep(0.05)
            app.drain()


async def idle(url: str, seconds: str) -> None:
    """A worker with nothing to do for so long: its peak memory in MB, and its share of a core in %."""
    async with Perdure(url, agents=[agents.asking, agents.punctual]) as app, asyncio.TaskGroup() as group:
        group.create_task(app.work())
        await asyncio.sleep(0.5)
        used, begun = time.process_time(), time.monotonic()
        await asyncio.sleep(float(seconds))
        share = (time.process_time() - used) / (time.monotonic() - begun)
        print(peak_mb(), share * 100, flush=True)
        app.drain()


async def crowd(url: str, runs: str) -> None:
    """That many runs, all alive at once, and the most memory that this process has ever held."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started this, and who ends it then
    role, url, argument = sys.argv[1:]
    asyncio.run(ROLES[role](url, argument))
