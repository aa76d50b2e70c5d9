"""A process that gets a signal in the middle of the code of its agent, its tool or its policy.

Usage: `python -m tests.crash.struck FOLDER HOW WHERE`.
"""

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
    """Send Ctrl-C as often as needed: asyncio.run turns the first into a cancel.

    Or SIGTERM, with a handler of the user.
    """
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


@tool(effect="once")
async def refund(amount: int) -> None:
    with (folder / "effects").open("a") as effects:
        effects.write(f"-{amount}\n")


@agent(version="1")
async def payer(run: Run) -> int:
    lingering = asyncio.create_task(linger())
    amount = await look()
    try:
        strike("agent")
    except BaseException:
        await refund(amount)  # no replay comes past here
        raise
    await pay(amount)
    await lingering
    return amount


@agent(version="1")
async def patient(run: Run) -> None:
    try:
        await run.receive("go")
    finally:
        strike("letting go")


@agent(version="1")
async def one_of_many(run: Run) -> None:
    if run.id == "r0":
        strike("first")


async def main() -> None:
    async with Perdure(f"sqlite:///{folder}/db", agents=[payer, patient]) as app:
        if place == "letting go":
            await app.start(patient, id="r")
            await app.engine.drive("r", wait=False)
        else:
            await app.run(payer, id="r")


async def all_but_the_first(app: Perdure) -> list[str]:
    return [(await app.handle(f"r{number}").result(timeout=50), "succeeded")[1] for number in range(1, 5)]


def go_on() -> None:
    loop = asyncio.new_event_loop()
    app = Perdure(f"sqlite:///{folder}/db", agents=[one_of_many])
    loop.run_until_complete(app.__aenter__())
    for number in range(5):
        loop.run_until_complete(app.start(one_of_many, id=f"r{number}"))
    working = loop.create_task(app.work())
    try:
        loop.run_until_complete(asyncio.sleep(60))
    except KeyboardInterrupt:
        print(*loop.run_until_complete(all_but_the_first(app)))
    app.drain()
    loop.run_until_complete(working)
    loop.run_until_complete(app.__aexit__(None, None, None))


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
        case "goes on":
            go_on()
        case "exit":
            signal.signal(signal.SIGTERM, leave)
            asyncio.run(main())
