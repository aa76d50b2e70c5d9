"""A worker with a schedule, in a process of its own. The tests kill it, from outside or at a point that they name.

python -m tests.crash.scheduled URL LEDGER [before | inside | after NUMBER]

With a point, the process ends with SIGKILL at the commit of its NUMBERth tick: before the transaction begins, inside
it, after its run was inserted, or right after the commit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any, NoReturn

from perdure import Every, Perdure, Run, Schedule, Settings, agent, tool
from perdure.store import schedules
from perdure.store.creation import insert_run

LEDGER = ""


@tool(effect="once", timeout=5)
async def pay(tick: str) -> None:
    """The effect: a line in a file that perdure does not write."""
    file = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{tick}\n".encode())
    os.close(file)


@agent(version="1", schedule=Schedule(Every(seconds=1), missed="all", overlap="allow"))
async def beat(run: Run) -> None:
    await pay(str(run.scheduled_for))


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def die_at(point: str, number: int) -> None:
    """End this process at the commit of a tick."""
    change, insert = schedules.Schedules.change_schedule, insert_run
    ticks = 0

    def counted(self: Any, one: Any) -> Any:
        nonlocal ticks
        ticks += one.start is not None
        if ticks == number and point == "before":
            die()
        answer = change(self, one)
        if ticks == number and point == "after":
            die()
        return answer

    def inserted(cursor: Any, new: Any, **options: Any) -> bool:
        done = insert(cursor, new, **options)
        if ticks == number and point == "inside":
            die()
        return done

    schedules.Schedules.change_schedule = counted  # type: ignore[method-assign, assignment]
    schedules.insert_run = inserted  # type: ignore[attr-defined]


async def main(url: str) -> None:
    async with Perdure(url, [beat], settings=Settings(lease_s=3, poll_s=0.02)) as app:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, app.drain)
        await app.work()


if __name__ == "__main__":
    LEDGER = sys.argv[2]
    if len(sys.argv) > 3:
        die_at(sys.argv[3], int(sys.argv[4]))
    asyncio.run(main(sys.argv[1]))
