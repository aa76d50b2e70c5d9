"""A process that a signal strikes in the middle of its agent's code, its tool's or its policy's: `python -m tests.crash.struck FOLDER HOW WHERE`."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from perdure import Perdure, Run, agent, tool

EXIT = 7
place = ""  # where the blow falls
folder = Path()
released = asyncio.Event()  # what `linger` waits for


def strike(here: str) -> None:
    """Ctrl-C as often as it takes: asyncio.run makes a cancel of the first one. Or what a handler of the user's makes of a SIGTERM."""
    if here != place:
        return
    if signal.getsignal(signal.SIGTERM) is leave:
        signal.raise_signal(signal.SIGTERM)
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


def leave(*_: object) -> None:
    sys.exit(EXIT)


def asks(amount: int) -> bool:
    strike("policy")
    return False


@tool(effect="read")
async def look() -> int:
    return 5


@tool(effect="idempotent")
async def linger() -> None:
    if place:
        await released.wait()


@tool(effect="once", approval=asks)
async def pay(amount: int) -> int:
    with (folder / "effects").open("a") as effects:
        effects.write(f"{amount}\n")
    strike("tool")
    return amount


@agent(version="1")
async def payer(run: Run) -> int:
    lingering = asyncio.create_task(linger())
    amount = await look()
    strike("agent")
    await pay(amount)
    await lingering
    return amount


async def main() -> None:
    async with Perdure(f"sqlite:///{folder}/db", agents=[payer]) as app:
        await app.run(payer, id="r")


if __name__ == "__main__":
    folder, place = Path(sys.argv[1]), sys.argv[3]
    match sys.argv[2]:
        case "twice":
            asyncio.run(main())
        case "bare":
            asyncio.new_event_loop().run_until_complete(main())
        case "again":
            loop = asyncio.new_event_loop()
            going_on = loop.create_task(main())
            try:
                loop.run_until_complete(going_on)
            finally:  # as asyncio.run does: the loop turns again, and a call in flight may end there
                released.set()
                for _ in range(100):
                    loop.run_until_complete(asyncio.sleep(0))
        case "exit":
            signal.signal(signal.SIGTERM, leave)
            asyncio.run(main())
