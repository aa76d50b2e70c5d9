"""An agent with eight parallel branches of several calls each, a race and a time-out.

Its seed alone decides what it does.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.crash import fate, paid
from tests.crash.ledger import Ledger

from perdure import Call, NotSent, Outcome, Retry, Run, Tool, agent, tool

BRANCHES = 8
AGAIN = Retry(attempts=4, base=0.002, jitter=0)


async def _act(what: str, ms: int, call: Call, *, by_key: bool = False) -> str:
    ledger, doom = Ledger.here(), fate.current()
    if "!" in what and call.attempt == 1:
        raise NotSent("refused, the first time")
    await asyncio.sleep(ms / 1000)
    doom.meet("effect", "before")
    receipt = ledger.perform(what, call, by_key=by_key)
    doom.meet("effect", "after")
    await asyncio.sleep(ms / 1000)
    return receipt


@tool(effect="read", retry=AGAIN)
async def glance(what: str, ms: int, call: Call) -> str:
    return await _act(what, ms, call)


@tool(effect="idempotent", retry=AGAIN)
def turn(what: str, ms: int, call: Call) -> str:
    return asyncio.run(_act(what, ms, call))


@tool(effect="keyed", retry=AGAIN)
async def charge(what: str, ms: int, call: Call) -> str:
    return await _act(what, ms, call, by_key=True)


@tool(effect="once", retry=AGAIN)
async def ship(what: str, ms: int, call: Call) -> str:
    return await _act(what, ms, call)


@ship.reconcile
async def _(what: str, ms: int, call: Call) -> Outcome:
    return Outcome.happened(f"{what} done") if Ledger.here().has_happened(call.key) else Outcome.not_happened()


@tool(effect="once", retry=AGAIN)
async def mail(what: str, ms: int, call: Call) -> str:
    return await _act(what, ms, call)


@tool(effect="transaction", retry=AGAIN)
def book(what: str, ms: int, call: Call) -> str:
    fate.current().meet("effect", "before")
    call.connection.execute(paid.MAKE)
    call.connection.execute(paid.WRITE, (what, call.run_id, call.number, call.attempt))
    fate.current().meet("effect", "after")
    return f"{what} done"


TOOLS: dict[str, Tool[..., Any]] = {found.name: found for found in (glance, turn, charge, ship, mail, book)}


def plan(seed: int, branch: int) -> list[tuple[str, str, int]]:
    """The calls of one branch: tool, what, milliseconds."""
    chance = random.Random(f"{seed}.{branch}")
    names = chance.choices(list(TOOLS), weights=[3, 3, 4, 3, 1, 2], k=chance.randint(2, 4))
    return [(name, f"{branch}.{place}{chance.choice(['', '', '', '!'])}", chance.choice([0, 0, 1, 3])) for place, name in enumerate(names)]


async def _branch(seed: int, branch: int) -> list[str]:
    return [await TOOLS[name](what, ms) for name, what, ms in plan(seed, branch)]


async def _race(seed: int) -> str:
    chance = random.Random(f"{seed}.race")
    racers = [asyncio.create_task(TOOLS[name](f"race.{name}", chance.randint(0, 6))) for name in ("charge", "turn", "ship", "glance")]
    done, losers = await asyncio.wait(racers, return_when=asyncio.FIRST_COMPLETED)
    for loser in losers:
        loser.cancel()
    await asyncio.gather(*losers, return_exceptions=True)
    return str(min(winner.result() for winner in done))


async def _hurry(seed: int) -> str:
    chance = random.Random(f"{seed}.hurry")
    try:
        async with asyncio.timeout(0.01):
            return str(await charge("hurry", chance.choice([0, 2, 8, 15])))
    except TimeoutError:
        return "too late"


@agent(version="1")
async def thicket(run: Run, seed: int) -> dict[str, Any]:
    async with asyncio.TaskGroup() as group:
        branches = [group.create_task(_branch(seed, branch)) for branch in range(BRANCHES)]
        race, hurry = group.create_task(_race(seed)), group.create_task(_hurry(seed))
    return {
        "branches": [branch.result() for branch in branches],
        "race": race.result(),
        "hurry": hurry.result(),
        "last": await glance("last", 0),
    }
