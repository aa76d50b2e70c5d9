"""Agents whose runs are recorded, and the world that their tools change: this world survives every power loss."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.power.autopsy import BOOKS
from tests.power.told import Effect

from perdure import Agent, Budget, Call, Outcome, Run, agent, tool

LONG = 70_000  # characters: more than an event holds


class World:
    """The effects outside, by the key of the call; `note` also writes them into the log of the disk."""

    def __init__(self, note: Callable[[object], None] = lambda mark: None, before: dict[str, Effect] | None = None) -> None:
        self.note = note
        self.happened: Counter[str] = Counter(dict.fromkeys(before or (), 1))
        self.begun: Counter[str] = Counter(self.happened)

    def act(self, what: str, call: Call, *, by_key: bool = False) -> str:
        self.begun[call.key] += 1
        if not (by_key and call.key in self.happened):  # a service that knows keys drops a request that it has had
            self.happened[call.key] += 1
            self.note(Effect(call.run_id, call.key, what))
        return f"{what} done"

    def knows(self, key: str) -> bool:
        """The answer of the service when a hook asks it."""
        return key in self.happened


WORLD = [World()]  # the present world


@tool(effect="read")
async def look(what: str) -> str:
    return f"{what} seen"


@tool(effect="read")
async def fetch(what: str) -> str:
    return what * LONG


@tool(effect="idempotent")
async def mark(what: str, call: Call) -> str:
    return WORLD[0].act(what, call)


@tool(effect="keyed")
async def pay(what: str, call: Call) -> str:
    return WORLD[0].act(what, call, by_key=True)


@tool
async def ship(what: str, call: Call) -> str:
    return WORLD[0].act(what, call)


@ship.reconcile
async def _(what: str, call: Call) -> Outcome:
    return Outcome.happened(f"{what} done") if WORLD[0].knows(call.key) else Outcome.not_happened()


@tool(effect="transaction")
def book(what: str, call: Call) -> str:
    call.connection.execute(f"CREATE TABLE IF NOT EXISTS {BOOKS} (run TEXT, call INTEGER, what TEXT)")
    call.connection.execute(f"INSERT INTO {BOOKS} VALUES (?, ?, ?)", (call.run_id, call.number, what))
    return f"{what} booked"


@tool(approval=True)
async def wire(what: str, call: Call) -> str:
    return WORLD[0].act(what, call)


@tool
async def mumble(what: str, call: Call) -> str:
    WORLD[0].act(what, call)
    raise TimeoutError("no answer")


@agent(version="1")
async def trade(run: Run, order: str) -> list[str]:
    """Calls one after the other, two at once, one of every effect class, a large result, a timer."""
    run.note(f"trading {order}")
    seen = await asyncio.gather(look(order), look(f"{order}/history"))
    done = [await pay(f"{order} paid"), await book(f"{order} sale"), await ship(f"{order} shipped")]
    run.decide("go on", among=["go on", "stop"], reason="it is due")
    page = await fetch("x")
    done += await asyncio.gather(mark(f"{order} marked"), pay(f"{order} fee"))
    await asyncio.sleep(60)
    return [*seen, *done, str(len(page)), await book(f"{order} end")]


@agent(version="1")
async def ask(run: Run, text: str) -> list[str]:
    """Two questions for people, one of them about a call."""
    decision = await run.request_approval("publish", {"text": text}, reason="it is public")
    return [decision.outcome, await wire(f"{text} wired")]


@agent(version="1")
async def hear(run: Run, count: int) -> list[Any]:
    """So many messages from outside, each answered."""
    return [await pay(f"answer to {await run.receive('chat')}") for _ in range(count)]


@agent(version="1")
async def doubt(run: Run, what: str) -> str:
    """A call whose outcome is unknown."""
    return await mumble(what)


@agent(version="1", budget=Budget(calls=50))
async def parent(run: Run, names: list[str]) -> list[str]:
    return list(await asyncio.gather(*(child(name) for name in names), pay("parent's own")))


@agent(version="1")
async def child(run: Run, name: str) -> str:
    await look(name)
    return await pay(f"{name} paid")


@agent(version="1")
async def small(run: Run, name: str) -> list[str]:
    return [await pay(f"{name} one"), await mark(f"{name} two")]


AGENTS: tuple[Agent[Any, Any], ...] = (trade, ask, hear, doubt, parent, child, small)
