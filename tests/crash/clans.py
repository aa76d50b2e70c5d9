"""Agents with children, with a shared budget, with an inbox, and with a place in a queue."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.crash import fate
from tests.crash.chores import work
from tests.crash.ledger import Ledger

from perdure import Budget, BudgetExceeded, Call, ChildFailed, Run, agent, tool

BUDGET_CALLS = 120
SLOW_S = 0.3


@tool(effect="keyed")
async def toil(what: str, seconds: float, call: Call) -> str:
    """An effect with a beginning and an end in the ledger."""
    ledger, doom = Ledger.here(), fate.current()
    ledger.note("begun", what, call)
    await asyncio.sleep(seconds)
    doom.meet("effect", "before")
    receipt = ledger.perform(what, call, by_key=True)
    doom.meet("effect", "after")
    ledger.note("ended", what, call)
    return receipt


@agent(version="1", queue="kin")
async def kin(run: Run, name: str, seconds: float) -> str:
    return await toil(name, seconds)


@agent(version="1")
async def clan(run: Run, children: int, seconds: float, busy: bool = False) -> list[str]:
    """Children at the same time; if `busy`, also its own call, so that its worker keeps the run."""
    beside = [work("beside", SLOW_S)] if busy else []
    born: list[Any] = [kin(f"child {place}", seconds) for place in range(children)]
    done = await asyncio.gather(*born, *beside)
    return [str(receipt) for receipt in done[:children]]


@agent(version="1")
async def household(run: Run, seconds: float) -> dict[str, Any]:
    """Waits for a child, for a person and for a timer at the same time, and cleans up when it is cancelled."""

    async def napping() -> str:
        await asyncio.sleep(seconds)
        return "rested"

    try:
        child, decision, nap = await asyncio.gather(kin("child", seconds), run.request_approval("go"), napping())
    except ChildFailed as failed:
        return {"failed": failed.kind}
    except asyncio.CancelledError:
        await work("cleaned up", 0)
        raise
    return {"child": child, "decision": decision.outcome, "nap": nap}


async def _spend(run: Run, calls: int) -> int:
    """How many calls there was money for."""
    made = 0
    for place in range(calls):
        try:
            await toil(f"{run.id} {place}", 0.02)
        except BudgetExceeded:
            break
        made += 1
    return made


@agent(version="1")
async def heir(run: Run, calls: int) -> int:
    return await _spend(run, calls)


@agent(version="1", budget=Budget(calls=3, on_exceed="fail"))
async def purse(run: Run, calls: int) -> int:
    """A child with its own small budget."""
    return await _spend(run, calls)


@agent(version="1", budget=Budget(calls=BUDGET_CALLS, on_exceed="fail"))
async def spender(run: Run, children: int, calls: int) -> list[int]:
    """All of them from one purse."""
    return list(await asyncio.gather(*(heir(calls) for _ in range(children))))


@agent(version="1")
async def listener(run: Run, count: int) -> list[str]:
    """The signals in the order in which they arrived; from time to time it makes a call."""
    heard = []
    for place in range(count):
        heard.append(await run.receive("post"))
        if place % 40 == 20:
            await work(f"noted {place}", 0)
    return heard
