"""The other processes of the benchmark: `child.py ROLE URL ARGUMENT`. What they have measured is the last line that they print."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
import time
from pathlib import Path

import agents

from perdure import Perdure, Settings

CALLS_OF_A_LIVE_RUN = 20


async def serve(url: str, _: str) -> None:
    """Serve the queue until SIGTERM."""
    async with Perdure(url, agents=[agents.punctual]) as app:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.drain)
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


def peak_mb() -> float:
    """The peak of this program. What getrusage tells on Linux includes the moment before exec, when this was still its parent."""
    status = Path("/proc/self/status")
    if status.exists():
        kilobytes = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kilobytes) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


ROLES = {"serve": serve, "build": build, "resume": resume, "crowd": crowd}

if __name__ == "__main__":
    role, url, argument = sys.argv[1:]
    asyncio.run(ROLES[role](url, argument))
