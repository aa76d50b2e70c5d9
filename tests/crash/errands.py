"""The agents and tools that victims run: one tool for each effect class.

The effects of the tools go into the ledger.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.crash import fate, paid
from tests.crash.ledger import Ledger

from perdure import Budget, Call, Outcome, Run, Tool, ToolFailed, agent, tool

ORDER = "order"
OUTPUT = {"before": "before seen", "receipt": f"{ORDER} done", "after": "after seen"}


async def do(what: str, call: Call, *, by_key: bool = False) -> str:
    """The effect: where it can be cut off, and where it reaches the world."""
    ledger, doom = Ledger.here(), fate.current()
    ledger.note("begun", what, call)
    if doom.place == "handover":
        doom.on_drain()
        await asyncio.sleep(0.03)
    if doom.place in ("renew", "flight"):
        doom.in_flight = True
        await asyncio.sleep(60)
    doom.meet("effect", "before")
    receipt = ledger.perform(what, call, by_key=by_key)
    doom.meet("effect", "after")
    return receipt


async def ask_the_service(what: str, call: Call) -> Outcome:
    """The hook: the service knows what has reached it."""
    ledger, doom = Ledger.here(), fate.current()
    doom.meet("reconcile", "before")
    ledger.note("asked", what, call)
    return Outcome.happened(f"{what} done") if ledger.has_happened(call.key) else Outcome.not_happened()


@tool(effect="read")
async def look(what: str, call: Call) -> str:
    Ledger.here().note("looked", what, call)
    return f"{what} seen"


@tool(effect="idempotent")
async def deadly(what: str, call: Call) -> None:
    """Kills the worker that performs it."""
    Ledger.here().note("begun", what, call)
    fate.die()


@tool(effect="read")
async def read(what: str, call: Call) -> str:
    return await do(what, call)


@tool(effect="idempotent")
def idempotent(what: str, call: Call) -> str:
    return asyncio.run(do(what, call))  # a sync tool: it runs in a thread


@tool(effect="keyed")
async def keyed(what: str, call: Call) -> str:
    return await do(what, call, by_key=True)


@tool(effect="keyed")
async def keyed_reconcile(what: str, call: Call) -> str:
    return await do(what, call, by_key=True)


@tool
def once(what: str, call: Call) -> str:
    return asyncio.run(do(what, call))


@tool(effect="once")
async def once_reconcile(what: str, call: Call) -> str:
    return await do(what, call)


@tool(effect="transaction")
def transaction(what: str, call: Call) -> str:
    doom = fate.current()
    Ledger.here().note("begun", what, call)
    if doom.place == "handover":
        doom.on_drain()
        time.sleep(0.03)
    if doom.place in ("renew", "flight"):
        doom.in_flight = True
        time.sleep(0.5 if doom.place == "renew" else 60)  # on SQLite the renewal comes through when the tool lets go of the write lock
    doom.meet("effect", "before")
    call.connection.execute(paid.MAKE)
    call.connection.execute(paid.WRITE, (what, call.run_id, call.number, call.attempt))
    doom.meet("effect", "after")
    return f"{what} done"


keyed_reconcile.reconcile(ask_the_service)
once_reconcile.reconcile(ask_the_service)

TOOLS: dict[str, Tool[..., Any]] = {
    found.name: found for found in (read, idempotent, keyed, keyed_reconcile, once, once_reconcile, transaction)
}


@agent(version="1")
async def errand(run: Run, kind: str, nap_s: float) -> dict[str, str]:
    """A look, the call under test, a wait, a look."""
    before = await look("before")
    try:
        receipt = await TOOLS[kind](ORDER)
    except ToolFailed as failed:
        receipt = f"failed: {failed.message}"
    await asyncio.sleep(nap_s)
    return {"before": before, "receipt": receipt, "after": await look("after")}


@agent(version="1")
async def branch(run: Run, kind: str, order: str) -> list[str]:
    """A call that a fork makes too, and a call that depends on the input."""
    return [await TOOLS[kind](ORDER), await TOOLS[kind](order), await look("after")]


@agent(version="1")
async def lives(run: Run, kind: str) -> dict[str, str]:
    """A look, the call under test, a look; each in a life of its own."""
    done: dict[str, str] = run.restored or {}
    if "before" not in done:
        await run.checkpoint({"before": await look("before")})
    if "receipt" not in done:
        await run.checkpoint({**done, "receipt": await TOOLS[kind](ORDER)})
    return {**done, "after": await look("after")}


@agent(version="1")
async def doomed(run: Run, rounds: int) -> None:
    """Some lives with an effect each, and then a call that kills its worker."""
    done: int = run.restored or 0
    if done < rounds:
        await idempotent(f"round {done}")
        await run.checkpoint(done + 1)
    await deadly("last")


@agent(version="1")
async def crossing(run: Run, kind: str) -> dict[str, str]:
    """The call under test is under way while the agent takes a checkpoint."""
    done: dict[str, str] = run.restored or {}
    order = asyncio.create_task(TOOLS[kind](ORDER)) if "receipt" not in done else None
    if "before" not in done:
        before = await look("before")
        await run.checkpoint({"before": before, **({"receipt": order.result()} if order is not None and order.done() else {})})
    receipt = done["receipt"] if order is None else await order
    return {"before": done["before"], "receipt": receipt, "after": await look("after")}


@agent(version="1", budget=Budget(calls=2, on_exceed="fail"))
async def allowance(run: Run, kind: str) -> dict[str, str]:
    """A look, the call under test, a look that the budget does not cover."""
    return {"before": await look("before"), "receipt": await TOOLS[kind](ORDER), "after": await look("after")}


@agent(version="1")
async def mishap(run: Run, kind: str) -> dict[str, str]:
    """A look, the call under test, a look; and a bug, until it is fixed."""
    before = await look("before")
    receipt = await TOOLS[kind](ORDER)
    after = await look("after")
    if not Ledger.here().path.with_suffix(".fixed").exists():
        raise ValueError("a bug")
    return {"before": before, "receipt": receipt, "after": after}
