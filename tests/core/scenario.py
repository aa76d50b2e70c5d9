"""The agents that the explorer runs, each with what may happen to it. Together they make every kind of call; each is as short as it can be.

The tools are declared like a user's, and never run: the engine of the explorer performs them in its own world.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from tests.core.world import CLOCK_SLACK_US, KEY_SLACK_US, KEY_WINDOW_S, SECOND

from perdure import Agent, Approval, Budget, Outcome, Rate, Retry, Run, ToolFailed, Usage, agent, tool
from perdure.core.budget import NOTHING, Amounts
from perdure.errors import ChildFailed

_TWICE = Retry(attempts=2, base=2.0, jitter=0.0)
_COST = Usage(usd_micros=100)


@dataclass(frozen=True)
class Scenario:
    """An agent, and what may happen to its run."""

    name: str
    agent: Agent[Any, Any]
    fates: tuple[str, ...] = ()  # how attempts may end, besides well
    hooks: tuple[str, ...] = ()  # what hooks may say, besides the truth
    env: tuple[str, ...] = ()  # what people and others may do, once each
    beside: Amounts = NOTHING  # what another run has reserved of the same budget
    drains: bool = False
    crowds: bool = False
    twice: bool = False  # all post is delivered twice
    late_post: bool = False  # ordinarily post is the last that is delivered, and not the first
    ticks: bool = False  # time may pass while other things are due
    patient: bool = True  # the run is never called poison

    @property
    def names(self) -> set[str]:
        """The moves that are made in this scenario, and not in every one."""
        some = {"env": self.env, "drain": self.drains, "crowded": self.crowds}
        return {*self.fates, *self.hooks, *(name for name, is_made in some.items() if is_made)}

    @property
    def key_memory_us(self) -> int:
        """For how long services remember a key."""
        return KEY_WINDOW_S * SECOND + (CLOCK_SLACK_US if any("clock" in what for what in self.env) else KEY_SLACK_US)


# -- tools --------------------------------------------------------------------------------------------------------------
@tool(effect="read", timeout=10.0, retry=_TWICE)
async def look(what: str = "") -> str:
    raise NotImplementedError


@tool(effect="idempotent", timeout=10.0, retry=_TWICE)
async def store(what: str = "") -> str:
    raise NotImplementedError


@tool(effect="keyed", timeout=10.0, retry=_TWICE, key_window=KEY_WINDOW_S)
async def pay(what: str = "") -> str:
    raise NotImplementedError


@tool(effect="keyed", timeout=10.0, retry=_TWICE, key_window=KEY_WINDOW_S)
async def refund(what: str = "") -> str:
    raise NotImplementedError


@tool(timeout=10.0, retry=_TWICE)
async def launch(what: str = "") -> str:
    raise NotImplementedError


@tool(timeout=10.0, retry=_TWICE)
async def order(what: str = "") -> str:
    raise NotImplementedError


@tool(retry=_TWICE)
async def dig(what: str = "") -> str:
    """It has a hook, and no time-out."""
    raise NotImplementedError


@tool(effect="transaction", retry=_TWICE)
def book(what: str = "") -> str:
    raise NotImplementedError


@refund.reconcile
async def _find_refund(what: str) -> Outcome:
    raise NotImplementedError


@order.reconcile
async def _find_order(what: str) -> Outcome:
    raise NotImplementedError


@dig.reconcile
async def _find_hole(what: str) -> Outcome:
    raise NotImplementedError


@tool(timeout=10.0, approval=Approval(by=("bob",), expires=30.0, editable=("what",)))
async def demolish(what: str = "") -> str:
    raise NotImplementedError


@demolish.reconcile
async def _find_rubble(what: str) -> Outcome:
    raise NotImplementedError


@tool(effect="keyed", timeout=10.0, key_window=KEY_WINDOW_S, approval=Approval(by=("bob",)))
async def grant(what: str = "") -> str:
    raise NotImplementedError


@tool(effect="transaction", approval=Approval(by=("bob",), expires=30.0))
def sign(what: str = "") -> str:
    raise NotImplementedError


@tool(effect="keyed", timeout=10.0, key_window=KEY_WINDOW_S, rate=Rate(limit=1, per=20.0))
async def mail(what: str = "") -> str:
    raise NotImplementedError


@tool(effect="idempotent", timeout=10.0, cost=_COST, retry=_TWICE)
async def ask(what: str = "") -> str:
    raise NotImplementedError


@tool(timeout=10.0, cost=_COST, retry=_TWICE)
async def buy(what: str = "") -> str:
    raise NotImplementedError


@buy.reconcile
async def _find_purchase(what: str) -> Outcome:
    raise NotImplementedError


@tool(effect="read", timeout=10.0, cost=_COST, retry=_TWICE)
async def quote(what: str = "") -> str:
    raise NotImplementedError


@tool(effect="transaction", cost=_COST)
def enter(what: str = "") -> str:
    raise NotImplementedError


async def _told(call: Coroutine[Any, Any, Any]) -> str:
    """What came of a call, in a word, so that the run goes on whatever it was."""
    try:
        return str(await call)
    except ToolFailed as failed:
        return failed.kind


# -- agents -------------------------------------------------------------------------------------------------------------
@agent(version="1")
async def in_a_row(run: Run) -> list[str]:
    return [await _told(look()), await _told(order()), await _told(book()), await _told(pay())]


@agent(version="1")
async def one_once(run: Run) -> list[str]:
    return [await _told(launch())]


@agent(version="1")
async def one_order(run: Run) -> list[str]:
    return [await _told(order())]


@agent(version="1")
async def one_pay(run: Run) -> list[str]:
    return [await _told(pay()), await _told(look())]


@agent(version="1")
async def one_refund(run: Run) -> list[str]:
    return [await _told(refund())]


@agent(version="1")
async def one_hole(run: Run) -> list[str]:
    return [await _told(dig())]


@agent(version="1")
async def pair(run: Run) -> list[str]:
    return list(await asyncio.gather(_told(order()), _told(pay())))


@agent(version="1")
async def trio(run: Run) -> list[str]:
    return list(await asyncio.gather(_told(launch()), _told(refund()), _told(store())))


@agent(version="1")
async def three(run: Run) -> list[str]:
    return list(await asyncio.gather(_told(order()), _told(pay()), _told(refund())))


@agent(version="1")
async def books(run: Run) -> list[str]:
    return list(await asyncio.gather(_told(book()), _told(order()), _told(book())))


@agent(version="1")
async def hurry(run: Run) -> list[str]:
    """Stops waiting for a call, and goes on; the other timer never goes off."""
    done = []
    try:
        async with asyncio.timeout(5.0):
            done.append(await _told(order()))
    except TimeoutError:
        done.append("late")
    await asyncio.sleep(30.0)
    return [*done, await _told(pay())]


@agent(version="1")
async def race(run: Run) -> list[str]:
    """Takes the first answer and gives the other call up."""
    tasks = [asyncio.ensure_future(_told(pay())), asyncio.ensure_future(_told(store()))]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    return [await _told(look())]


@agent(version="1")
async def listener(run: Run) -> list[str]:
    heard = [str(await run.receive("go"))]
    heard.append(await _told(order()))
    try:
        heard.append(str(await run.receive("go", timeout=20.0)))
    except TimeoutError:
        heard.append("nothing")
    return heard


@agent(version="1")
async def errand(run: Run) -> list[str]:
    return [str(await run.receive("go")), *await asyncio.gather(_told(order()), _told(pay()))]


@agent(version="1")
async def petition(run: Run) -> list[str]:
    return [await _told(demolish()), await _told(look())]


@agent(version="1")
async def forum(run: Run) -> list[str]:
    """Asks for itself and for two calls at once; stops waiting for one of them."""
    asked = asyncio.ensure_future(_told(grant()))
    signed = asyncio.ensure_future(_told(sign()))
    decision = await run.request_approval("go", {"what": "x"}, expires=60.0)
    if not decision.granted:
        asked.cancel()
    return [decision.outcome, await signed]


@agent(version="1")
async def child(run: Run) -> str:
    raise NotImplementedError


@agent(version="1")
async def parent(run: Run) -> list[str]:
    async def below() -> str:
        try:
            return str(await child())
        except ChildFailed as failed:
            return failed.kind

    try:
        async with asyncio.timeout(60.0):
            return list(await asyncio.gather(below(), below(), _told(order())))
    except TimeoutError:
        return [await _told(store())]


@agent(version="1", budget=Budget(usd="0.0003", calls=5))
async def purse(run: Run) -> list[str]:
    return [*await asyncio.gather(_told(ask()), _told(buy()), _told(quote())), await _told(enter())]


@agent(version="1", budget=Budget(usd="0.0002", on_exceed="fail"))
async def small_purse(run: Run) -> list[str]:
    return list(await asyncio.gather(_told(buy()), _told(ask()), _told(buy())))


@agent(version="1")
async def mailer(run: Run) -> list[str]:
    return list(await asyncio.gather(_told(mail()), _told(mail()), _told(order())))


@agent(version="1")
async def tidy(run: Run) -> list[str]:
    """Cleans up when it is cancelled."""
    try:
        done = list(await asyncio.gather(_told(order()), _told(pay())))
        return [*done, await _told(launch())]
    except asyncio.CancelledError:
        await _told(store())
        raise


@agent(version="1")
async def everything(run: Run) -> list[str]:
    """For long walks."""
    done = [str(await run.receive("go"))]
    done += await asyncio.gather(_told(order()), _told(pay()), _told(book()))
    try:
        async with asyncio.timeout(8.0):
            done.append(await _told(refund()))
    except TimeoutError:
        done.append("late")
    done.append(await _told(demolish()))
    done += await asyncio.gather(_told(mail()), _told(launch()))
    return done


SCENARIOS = [
    Scenario("in a row", in_a_row),
    Scenario("once", one_once, fates=("not_sent", "reset", "busy", "garbage", "stuck"), env=("resolve",)),
    Scenario("once with a hook", one_order, fates=("not_sent", "reset", "timeout", "refused"), hooks=("unknown", "in progress")),
    Scenario("once with a hook, attempts that do not stop", one_order, fates=("stuck", "reset"), env=("resolve",)),
    Scenario("keyed", one_pay, fates=("reset", "timeout", "busy"), env=("later 400", "later 400"), ticks=True),
    Scenario("keyed, and the clock is set", one_pay, fates=("reset",), env=("clock forward", "clock back", "later 300")),
    Scenario("keyed with a hook", one_refund, fates=("reset", "timeout", "not_sent"), hooks=("unknown",), env=("later 650",)),
    Scenario("a person and a hook", one_order, fates=("reset",), env=("resolve",), late_post=True),
    Scenario("without a time-out", one_hole, fates=("reset",), env=("resolve",)),
    Scenario("a pair", pair),
    Scenario("a pair that fails", pair, fates=("reset", "not_sent")),
    Scenario("a trio", trio),
    Scenario("three at once", three),
    Scenario("transactions", books),
    Scenario("timers", hurry, fates=("reset",), ticks=True),
    Scenario("a race", race, fates=("reset",)),
    Scenario("signals", listener, env=("signal a", "signal b", "signal c"), twice=True, ticks=True),
    Scenario("an approval", petition, env=("grant", "reject", "edit"), ticks=True, twice=True),
    Scenario("an approval and another clock", petition, env=("grant", "expire"), ticks=True, late_post=True),
    Scenario("approvals", forum, env=("grant", "reject", "grant"), ticks=True),
    Scenario("children", parent, env=("child ok", "child fails")),
    Scenario("a budget", purse, fates=("reset",), env=("raise",)),
    Scenario("a budget that fails, and another run", small_purse, env=("other",), beside=Amounts(usd_micros=100), crowds=True),
    Scenario("a rate", mailer, fates=("busy",)),
    Scenario("cancelled", tidy, fates=("reset",), env=("cancel",)),
    Scenario("cancelled while it asks", petition, env=("grant", "cancel")),
    Scenario("cancelled with a signal", errand, env=("signal a", "cancel")),
    Scenario("an approval and a drain", petition, env=("grant", "later 40"), drains=True),
    Scenario("paused", pair, env=("pause", "unpause"), fates=("not_sent",)),
    Scenario("drained", pair, drains=True, fates=("reset",)),
]
WALKS = [
    Scenario(
        "everything",
        everything,
        fates=("not_sent", "reset", "timeout", "busy", "refused", "stuck", "garbage"),
        hooks=("unknown", "in progress"),
        env=("signal a", "grant", "pause", "unpause", "resolve", "cancel", "later 700"),
        drains=True,
        ticks=True,
        patient=False,
    ),
]
