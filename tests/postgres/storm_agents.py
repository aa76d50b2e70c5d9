"""The runs in a storm: calls of every effect class, timers, approvals, signals and children.

The seed of a run alone decides what the run does, so that the checks know afterwards what it should have done.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from tests.postgres import storm_service as service

from perdure import Call, Outcome, Retry, Run, Tool, agent, tool

# The calls must survive the storm: no retry here ever gives up.
AGAIN = Retry(attempts=200, base=0.02, factor=1.5, max_delay=0.5, jitter=0.5)
TIMEOUT_S = 1.5


async def _act(what: str, ms: int, call: Call, *, drops: bool = False) -> str:
    await asyncio.sleep(ms / 1000)
    receipt = await service.perform(what, call, drops=drops)
    await asyncio.sleep(ms / 1000)
    return receipt


@tool(effect="read", timeout=TIMEOUT_S, retry=AGAIN)
async def glance(what: str, ms: int, call: Call) -> str:
    return await _act(what, ms, call)


@tool(effect="idempotent", timeout=TIMEOUT_S, retry=AGAIN)
def turn(what: str, ms: int, call: Call) -> str:
    return asyncio.run(_act(what, ms, call))


@tool(effect="keyed", timeout=TIMEOUT_S, retry=AGAIN)
async def charge(what: str, ms: int, call: Call) -> str:
    return await _act(what, ms, call, drops=True)


@tool(effect="once", timeout=TIMEOUT_S, retry=AGAIN)
async def ship(what: str, ms: int, call: Call) -> str:
    return await _act(what, ms, call)


@ship.reconcile
async def _(what: str, ms: int, call: Call) -> Outcome:
    return Outcome.happened(f"{what} done") if await service.find(call.key) else Outcome.not_happened()


@tool(effect="once", timeout=TIMEOUT_S, settle=120, retry=AGAIN)
async def ship_by_a_slow_service(what: str, ms: int, call: Call) -> str:
    return await _act(what, ms, call)


@ship_by_a_slow_service.reconcile
async def _(what: str, ms: int, call: Call) -> Outcome:
    return Outcome.happened(f"{what} done") if await service.find(call.key) else Outcome.not_happened()


@tool(effect="once", timeout=TIMEOUT_S, retry=AGAIN)
async def mail(what: str, ms: int, call: Call) -> str:
    """A call without a hook: a person has to find out what happened."""
    return await _act(what, ms, call)


@tool(effect="transaction", timeout=TIMEOUT_S, retry=AGAIN)
def book(what: str, ms: int, call: Call) -> str:
    """Its table has no unique key, which would hide a second booking."""
    call.connection.execute("INSERT INTO booked (what, key, run, number) VALUES (?, ?, ?, ?)", (what, call.key, call.run_id, call.number))
    time.sleep(ms / 1000)
    return f"{what} done"


TOOLS: dict[str, Tool[..., Any]] = {found.name: found for found in (glance, turn, charge, ship, ship_by_a_slow_service, mail, book)}


@dataclass(frozen=True)
class Calls:
    """Calls at the same time: tool, what, milliseconds."""

    calls: list[tuple[str, str, int]]


@dataclass(frozen=True)
class Nap:
    seconds: float


@dataclass(frozen=True)
class Ask:
    number: int

    @property
    def outcome(self) -> str:
        return "rejected" if self.number % 4 == 0 else "approved"


@dataclass(frozen=True)
class Word:
    number: int


@dataclass(frozen=True)
class Child:
    seed: int


Step = Calls | Nap | Ask | Word | Child


def plan(seed: int, *, leaf: bool = False) -> list[Step]:
    """The steps of the run with this seed."""
    chance = random.Random(f"plan {seed} {leaf}")
    steps: list[Step] = []
    words = 0
    for place in range(chance.randint(1, 2) if leaf else chance.randint(3, 6)):
        kind = "calls" if leaf else chance.choices(("calls", "nap", "ask", "word", "child"), weights=(8, 2, 2, 2, 2))[0]
        match kind:
            case "calls":
                names = chance.choices(list(TOOLS), weights=(2, 2, 4, 4, 0, 3, 3), k=chance.choice((1, 1, 2, 3)))
                steps.append(Calls([(name, f"{place}.{n}", chance.choice((0, 0, 10, 60, 200, 400))) for n, name in enumerate(names)]))
            case "nap":
                steps.append(Nap(chance.choice((0.01, 0.2, 0.6, 1.5))))
            case "ask":
                steps.append(Ask(chance.randrange(1000)))
            case "word":
                steps.append(Word(words))
                words += 1
            case _:
                steps.append(Child(seed * 100 + place))
    return steps


async def _calls(step: Calls) -> list[str]:
    return list(await asyncio.gather(*(TOOLS[name](what, ms) for name, what, ms in step.calls)))


@agent(version="1")
async def chore(run: Run, seed: int) -> list[Any]:
    """A child: nothing but calls."""
    return [await _calls(step) for step in plan(seed, leaf=True) if isinstance(step, Calls)]


@agent(version="1")
async def errand(run: Run, seed: int) -> list[Any]:
    done: list[Any] = []
    for step in plan(seed):
        match step:
            case Calls():
                done.append(await _calls(step))
            case Nap(seconds):
                await asyncio.sleep(seconds)
            case Ask(number):
                done.append((await run.request_approval("storm", {"number": number})).outcome)
            case Word():
                done.append(await run.receive("word"))
            case Child(child):
                done.append(await chore(child))
    return done


@agent(version="1")
async def single(run: Run, name: str, ms: int) -> str:
    """One call of that tool."""
    return str(await TOOLS[name]("single", ms))


AGENTS = (errand, single)


def expected(seed: int, *, leaf: bool = False) -> list[Any]:
    """The result of the run, if no person had to settle a call."""
    told: list[Any] = []
    for step in plan(seed, leaf=leaf):
        match step:
            case Calls(calls):
                told.append([f"{what} done" for _, what, _ in calls])
            case Ask():
                told.append(step.outcome)
            case Word(number):
                told.append(number)
            case Child(child):
                told.append(expected(child, leaf=True))
            case Nap():
                pass
    return told
