"""The agents and tools of the simulation: together they make every kind of call, and each is short.

Before an agent runs, the caller sets the services that the tools use.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tests.sim.outside import PRICE, Outside

from perdure import (
    Agent,
    Approval,
    Budget,
    Call,
    ChildFailed,
    NotApproved,
    Outcome,
    Plan,
    ReAct,
    Retry,
    Run,
    Step,
    Tool,
    ToolFailed,
    Usage,
    agent,
    ref,
    tool,
)
from perdure.models import Answer, Request, Scripted
from perdure.models.scripted import use, uses

TIMEOUT_S = 2.0
COST = Usage(usd_micros=PRICE)
_AGAIN = Retry(attempts=4, base=0.1, factor=2.0, max_delay=1.0)


class Stage:
    """What is being played now."""

    outside: Outside


def _outside() -> Outside:
    return Stage.outside


@tool(effect="read", timeout=TIMEOUT_S, retry=_AGAIN, cost=COST)
async def look(what: str, call: Call) -> str:
    return await _outside().perform(call, "read")


@tool(effect="idempotent", timeout=TIMEOUT_S, retry=_AGAIN, cost=COST)
async def settle(what: str, call: Call) -> str:
    return await _outside().perform(call, "idempotent")


@tool(effect="keyed", timeout=TIMEOUT_S, retry=_AGAIN, cost=COST)
async def pay(what: str, call: Call) -> str:
    return await _outside().perform(call, "keyed")


@tool(effect="keyed", timeout=TIMEOUT_S, retry=_AGAIN, cost=COST)
async def refund(what: str, call: Call) -> str:
    return await _outside().perform(call, "keyed")


@tool(effect="transaction", cost=COST)
def book(what: str, call: Call) -> str:
    return _outside().write(call)


@tool(timeout=TIMEOUT_S, retry=_AGAIN, cost=COST)
async def launch(what: str, call: Call) -> str:
    return await _outside().perform(call, "once")


@tool(timeout=TIMEOUT_S, retry=_AGAIN, cost=COST)
async def order(what: str, call: Call) -> str:
    return await _outside().perform(call, "once")


@refund.reconcile
async def _find_refund(what: str, call: Call) -> Outcome:
    return await _outside().find(call)


@order.reconcile
async def _find_order(what: str, call: Call) -> Outcome:
    return await _outside().find(call)


@tool(approval=Approval(by=("ann", "bob"), expires=30.0), timeout=TIMEOUT_S, retry=_AGAIN, cost=COST)
async def demolish(what: str, call: Call) -> str:
    return await _outside().perform(call, "once")


@tool(effect="keyed", approval=Approval(expires=5.0), timeout=TIMEOUT_S, retry=_AGAIN, cost=COST)
async def grant(what: str, call: Call) -> str:
    return await _outside().perform(call, "keyed")


@tool(effect="transaction", approval=True, cost=COST)
def sign(what: str, call: Call) -> str:
    return _outside().write(call)


TOOLS: list[Tool[..., Any]] = [look, settle, pay, refund, book, launch, order]
ASKED: list[Tool[..., Any]] = [demolish, grant, sign]


async def _told(call: Any) -> str:
    """The outcome of a call in one word, so that the run continues after any outcome."""
    try:
        return str(await call)
    except NotApproved as refused:
        return refused.outcome
    except ToolFailed as failed:
        return failed.kind


@agent(version="1")
async def errand(run: Run, which: int) -> list[str]:
    """One thing after the other."""
    run.note("off we go")
    return [await _told(TOOLS[which](f"{run.id} main")), await _told(TOOLS[(which + 3) % 7]("then")), await _told(look("last"))]


@agent(version="1")
async def crowd(run: Run, which: int) -> list[str]:
    """Several calls at once, each of which continues independently."""

    async def both(first: int) -> str:
        return await _told(TOOLS[first % 7]("one")) + await _told(TOOLS[(first + 2) % 7]("two"))

    return list(await asyncio.gather(*(both(which + place) for place in range(3))))


@agent(version="1")
async def hurry(run: Run, which: int) -> list[str]:
    """Does not wait for long, and looks at what came first."""
    done = []
    try:
        async with asyncio.timeout(0.02):
            done.append(await TOOLS[which]("in time"))
    except TimeoutError:
        done.append("late")
    except ToolFailed as failed:
        done.append(failed.kind)
    first, others = await asyncio.wait(
        [asyncio.ensure_future(_told(pay("race"))), asyncio.ensure_future(_told(settle("race")))], return_when=asyncio.FIRST_COMPLETED
    )
    done.append(run.decide(f"{len(first)} first", reason="they were faster"))
    return [*done, *await asyncio.gather(*others)]


@agent(version="1")
async def petition(run: Run, which: int) -> list[str]:
    """Asks people, for itself and for a call."""
    decision = await run.request_approval("go", {"which": which}, expires=8.0)
    return [decision.outcome, await _told(ASKED[which % 3](run.id)), await _told(pay("after"))]


@agent(version="1")
async def forum(run: Run, which: int) -> list[str]:
    """Asks several at once while it does something."""
    answers = await asyncio.gather(*(_told(one("together")) for one in ASKED), _told(TOOLS[which]("beside")))
    return list(answers)


@agent(version="1")
async def listener(run: Run, which: int) -> list[str]:
    """Waits for post, and not for ever."""
    heard = []
    for _ in range(2):
        try:
            heard.append(str(await run.receive("post", timeout=6.0)))
        except TimeoutError:
            heard.append("nothing")
        heard.append(await _told(TOOLS[which]("about it")))
    return heard


@agent(version="1")
async def sleeper(run: Run, which: int) -> str:
    await asyncio.sleep(0.1 + which)
    run.status("awake")
    return await _told(TOOLS[which]("woken"))


@agent(version="1")
async def child(run: Run, which: int) -> str:
    if which == 6:
        raise ValueError("a child that fails")
    return await _told(TOOLS[which]("below")) + await _told(settle("below"))


@agent(version="1")
async def parent(run: Run, which: int) -> list[str]:
    """Children that fail, end, or are not waited for."""

    async def of(place: int) -> str:
        try:
            return str(await child(place % 7))
        except ChildFailed as failed:
            return failed.kind

    try:
        async with asyncio.timeout(20.0):
            return list(await asyncio.gather(of(which), of(which + 1), _told(pay("beside"))))
    except TimeoutError:
        return [await _told(settle("without them"))]


@agent(version="1", budget=Budget(calls=6, usd="0.30", on_exceed="fail"))
async def purse(run: Run, which: int) -> list[str]:
    """From one small purse, with a child."""
    done = list(await asyncio.gather(*(_told(TOOLS[(which + place) % 7]("spent")) for place in range(3))))
    try:
        done.append(str(await child(which % 6)))
    except (ChildFailed, ToolFailed) as failed:
        done.append(failed.kind)
    return done


@agent(version="1")
async def tidy(run: Run, which: int) -> str:
    """Cleans up when it is cancelled."""
    try:
        await asyncio.sleep(1.0)
        return await _told(launch("slowly")) + await _told(TOOLS[which]("then"))
    except asyncio.CancelledError:
        await _told(settle("cleaned up"))
        raise


@agent(version="1")
async def elder(run: Run, which: int) -> str:
    """Not every worker has it."""
    return await _told(TOOLS[which]("old"))


class Moody(Scripted):
    """A model that takes its time, is busy at times, and breaks off."""

    async def answer(self, request: Request, call: Call) -> Answer:
        await _outside().think(call)
        return await super().answer(request, call)


_MODEL = Moody(
    [uses(use("pay", what="first"), use("order", what="second")), uses(use("look", what="third")), "It is done."],
    name="moody",
    retry=Retry(attempts=20, base=0.1, max_delay=0.5),
    timeout=5.0,
)
clerk = ReAct("clerk", model=_MODEL, tools=[pay, order, look], version="1")
route = Plan(
    "route",
    version="1",
    steps=[
        Step("first", look, {"what": "first"}, on_failure="continue"),
        Step("second", pay, {"what": ref("first")}, on_failure="continue"),
        Step("third", order, {"what": "third"}, on_failure="continue", after=["second"]),
        Step("last", settle, {"what": "last"}, on_failure="stop", after=["third"]),
    ],
)

AGENTS: list[Agent[Any, Any]] = [errand, crowd, hurry, petition, forum, listener, sleeper, child, parent, purse, tidy, clerk, route]
STARTED: list[Agent[Any, Any]] = [
    errand,
    errand,
    crowd,
    hurry,
    petition,
    forum,
    listener,
    sleeper,
    parent,
    purse,
    tidy,
    clerk,
    route,
    elder,
]


def arguments(which: Agent[Any, Any], number: int) -> tuple[Any, ...]:
    if which is clerk:
        return (f"case {number}",)
    return () if which is route else (number % 7,)
