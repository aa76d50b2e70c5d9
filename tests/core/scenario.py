"""The agents that the explorer runs, each with what may happen to it.

Together these agents make every kind of call. Each agent is as short as possible. The tools are declared like the
tools of a user, but never run: the engine of the explorer performs them in its own world.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.core.people import FORKS, REOPENS
from tests.core.world import CLOCK_SLACK_US, KEY_SLACK_US, KEY_WINDOW_S, SECOND

from perdure import Agent, Approval, Budget, Outcome, Rate, Retry, Run, ToolFailed, Usage, agent, tool
from perdure.core.budget import NOTHING, Amounts
from perdure.errors import ChildFailed

_TWICE = Retry(attempts=2, base=2.0, jitter=0.0)
_COST = Usage(usd_micros=100)
_TWO = ("retry", "rewind", "rewind to new code")  # a person reopens the run twice, or thrice


@dataclass(frozen=True)
class Scenario:
    """An agent, and what may happen to its run."""

    name: str
    agent: Agent[Any, Any]
    fates: tuple[str, ...] = ()  # how attempts may end, besides well
    hooks: tuple[str, ...] = ()  # what hooks may say, besides the truth
    env: tuple[str, ...] = ()  # what people and others may do, once each
    beside: Amounts = NOTHING  # the amount that another run has reserved under the same budget
    drains: bool = False
    crowds: bool = False
    twice: bool = False  # all post is delivered twice
    late_post: bool = False  # ordinarily post is the last that is delivered, and not the first
    ticks: bool = False  # time may pass while other things are due
    patient: bool = True  # the run is never called poison
    distinct: bool = False  # no two calls of the agent have the same tool and arguments
    new_code: Agent[Any, Any] | None = None  # a later version of the agent, for a person who lets the run go on with it

    @property
    def is_reopened(self) -> bool:
        return any(what in REOPENS for what in self.env)

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
    """The outcome of a call in one word, so that the run continues after any outcome."""
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
    """Stops waiting for a call, and continues; the other timer never fires."""
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
    """Takes the first answer and abandons the other call."""
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


async def _considered(run: Run, call: asyncio.Future[Any], number: int, model: Callable[[str], Coroutine[Any, Any, str]]) -> list[str]:
    """Waits for the call as ReAct does: a message is considered before the call begins; `b` withdraws the call."""
    done: list[str] = []
    while True:
        message: asyncio.Future[Any] = run.arrival("go")
        await asyncio.wait([call, message], return_when=asyncio.FIRST_COMPLETED)
        message.cancel()
        if not call.done():
            hold: asyncio.Future[Any] = run.hold(number)
            await asyncio.wait([call, hold], return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return [*done, call.result()]
        said = "".join(run.receive_all("go"))
        done.append(await model(said))
        if "b" in said:
            call.cancel()
            return [*done, "withdrawn"]
        run.keep(number)


@agent(version="1")
async def heard(run: Run) -> list[str]:
    call = asyncio.ensure_future(_told(demolish()))
    return [*await _considered(run, call, run.calls, lambda said: _told(look(said))), await _told(store())]


@agent(version="1")
async def heard_twice(run: Run) -> list[str]:
    """Two calls wait for their approvals, one of them a transaction, and a third one is under way."""
    calls = [asyncio.ensure_future(_told(grant())), asyncio.ensure_future(_told(sign()))]
    beside = asyncio.ensure_future(_told(order()))
    numbers = (run.calls - 2, run.calls - 1)
    told = await asyncio.gather(*(_considered(run, call, number, _thought) for call, number in zip(calls, numbers, strict=True)))
    return [*itertools.chain(*told), await beside]


async def _thought(said: str) -> str:
    return await _told(look(said))


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


# -- agents of runs that people reopen
# ------------------------------------------------------------------------------------
#
# Each agent has two versions: the first fails at its end; the second asks for another call on the way, and succeeds.
# Each call has different arguments, and each result names its call, so that the world knows to which call a result
# belongs.
class Bug(Exception):
    """The first version of an agent has it."""


async def _made(tool: Any, what: str) -> str:
    return f"{tool.name}/{what}={await tool(what)}"


def _versions(body: Callable[[Run, bool], Coroutine[Any, Any, list[str]]], **options: Any) -> list[Agent[Any, Any]]:
    async def first(run: Run) -> list[str]:
        raise Bug(", ".join(await body(run, False)))

    async def second(run: Run) -> list[str]:
        return await body(run, True)

    name = body.__name__
    return [agent(name=name, version="1", **options)(first), agent(name=name, version="2", **options)(second)]


async def _twice_launched(run: Run, new: bool) -> list[str]:
    return [await _made(launch, "a"), await _made(launch, "c" if new else "b")]


async def _ordered(run: Run, new: bool) -> list[str]:
    return [await _made(look, "a"), await _made(order, "b"), await _made(order, "d" if new else "c")]


async def _paid(run: Run, new: bool) -> list[str]:
    return [await _made(pay, "a"), *([await _made(store, "new")] if new else []), await _made(pay, "b")]


async def _refunded(run: Run, new: bool) -> list[str]:
    return [await _made(refund, "a"), *([await _made(look, "new")] if new else []), await _made(refund, "b")]


async def _booked(run: Run, new: bool) -> list[str]:
    return [await _made(book, "a"), *([await _made(store, "new")] if new else []), await _made(book, "b"), await _made(store, "c")]


async def _gathered(run: Run, new: bool) -> list[str]:
    done = await asyncio.gather(_made(order, "a"), _made(pay, "b"), _made(store, "c"))
    return [*done, await _made(launch, "e" if new else "d")]


async def _petitioned(run: Run, new: bool) -> list[str]:
    return [await _made(look, "a"), await _made(demolish, "b"), await _made(look, "d" if new else "c")]


async def _reconsidered(run: Run, new: bool) -> list[str]:
    call = asyncio.ensure_future(_made(demolish, "a"))
    done = await _considered(run, call, run.calls, lambda said: _made(look, f"b{said}"))
    return [*done, await _made(store, "d" if new else "c")]


async def _consulted(run: Run, new: bool) -> list[str]:
    granted, decision = await asyncio.gather(_made(grant, "a"), run.request_approval("go", {"what": "x"}, expires=60.0))
    if not decision.granted:
        raise Bug(decision.outcome)
    return [granted, await _made(pay, "c" if new else "b")]


async def _heard(run: Run, new: bool) -> list[str]:
    done = [f"heard={await run.receive('go')}", await _made(order, "a")]
    if new:
        done.append(await _made(store, "new"))
    try:
        done.append(f"heard={await run.receive('go', timeout=20.0)}")
    except TimeoutError:
        done.append("nothing")
    return [*done, await _made(pay, "b")]


async def _hurried(run: Run, new: bool) -> list[str]:
    done = []
    try:
        async with asyncio.timeout(5.0):
            done.append(await _made(order, "a"))
    except TimeoutError:
        done.append("late")
    await asyncio.sleep(30.0)
    return [*done, await _made(pay, "c" if new else "b")]


async def _tidied(run: Run, new: bool) -> list[str]:
    try:
        done = list(await asyncio.gather(_made(order, "a"), _made(pay, "b")))
        return [*done, await _made(launch, "d" if new else "c")]
    except asyncio.CancelledError:
        await _made(store, "tidy")
        raise


@agent(version="1")
async def named_child(run: Run, what: str) -> str:
    raise NotImplementedError


async def _parented(run: Run, new: bool) -> list[str]:
    first = str(await named_child("a"))
    both = await asyncio.gather(named_child("b"), _made(order, "c"))
    return [first, *map(str, both), *([str(await named_child("new"))] if new else [])]


async def _bought(run: Run, new: bool) -> list[str]:
    done = await asyncio.gather(_made(ask, "a"), _made(buy, "b"))
    return [*done, await _made(buy, "d" if new else "c")]


def _reopened(
    name: str, body: Callable[[Run, bool], Coroutine[Any, Any, list[str]]], *env: str, fates: tuple[str, ...] = (), **more: Any
) -> Scenario:
    first, second = _versions(body, **({"budget": more.pop("budget")} if "budget" in more else {}))
    return Scenario(f"reopened: {name}", first, fates=fates, env=env, distinct=True, new_code=second, **more)


REOPENED = [
    _reopened("once", _twice_launched, *_TWO, "resolve", "fail", fates=("not_sent", "reset", "garbage", "refused", "denied")),
    _reopened("once with a hook", _ordered, *_TWO, fates=("not_sent", "reset", "denied"), hooks=("unknown",)),
    _reopened("keyed", _paid, *_TWO, "later 650", fates=("reset", "refused", "denied", "busy")),
    _reopened("keyed with a hook", _refunded, *_TWO, fates=("reset", "not_sent", "garbage")),
    _reopened("transactions", _booked, *_TWO, "rewind fresh", fates=("mistake",)),
    _reopened("gathered", _gathered, *_TWO, fates=("reset", "refused", "not_sent")),
    _reopened("a message while it asks", _reconsidered, *_TWO, "grant", "signal a", "signal b", ticks=True),
    _reopened("an approval", _petitioned, *_TWO, "grant", "reject", "edit", fates=("not_sent", "reset"), ticks=True),
    _reopened("approvals", _consulted, *_TWO, "grant", "reject", fates=("refused",), late_post=True),
    _reopened("signals", _heard, *_TWO, "signal a", "signal b", "signal c", twice=True),
    _reopened("timers", _hurried, *_TWO, fates=("reset",), ticks=True),
    _reopened("cancelled", _tidied, *_TWO, "cancel", "signal a", fates=("reset",)),
    _reopened("paused and drained", _tidied, *_TWO, "pause", drains=True, fates=("not_sent",)),
    _reopened("ended by force", _gathered, *_TWO, "end", "resolve", fates=("reset",)),
    _reopened("an approval, ended by force", _consulted, *_TWO, "end", "grant"),
    _reopened("children", _parented, *_TWO, "child fails", "child ok", "end"),
    _reopened("a budget", _bought, *_TWO, "end", "raise", fates=("reset",), budget=Budget(usd="0.0004", calls=8)),
]


# -- agents that take checkpoints ---------------------------------------------------------------------------------------
# What an agent has in its state is known to its next life, and what another task still waits for is asked for again.
async def _said(tool: Any, what: str) -> str:
    try:
        return await _made(tool, what)
    except ToolFailed as failed:
        return f"{tool.name}/{what} has failed: {failed.kind}"


def _steps(*steps: tuple[Any, str]) -> Callable[[Run, bool], Coroutine[Any, Any, list[str]]]:
    """One call in each life."""

    async def lives(run: Run, new: bool) -> list[str]:
        done: list[str] = run.restored or []
        if len(done) == len(steps):
            return done
        tool, what = steps[len(done)]
        return await run.checkpoint([*done, await _said(tool, what)])

    lives.__name__ = "_lives_of_" + "_".join(tool.name for tool, _ in steps)
    return lives


async def _crossing(run: Run, new: bool) -> list[str]:
    """The second call may be under way when the agent takes a checkpoint."""
    before: dict[str, str] = run.restored or {}
    slow = asyncio.create_task(_said(order, "slow")) if "slow" not in before else None
    if "first" not in before:
        first = await _said(store, "first")
        await run.checkpoint({"first": first, **({"slow": slow.result()} if slow and slow.done() else {})})
    if "second" not in before:
        second = await _said(pay, "new" if new else "second")
        await run.checkpoint({**before, "second": second, **({"slow": slow.result()} if slow and slow.done() else {})})
    return [before["first"], before["second"], before["slow"] if slow is None else await slow]


async def _forgetting(run: Run, new: bool) -> list[str]:
    """The second life does not ask again for what the first one has left open."""
    if run.restored is None:
        left = [asyncio.create_task(_said(one, "left")) for one in (order, launch, pay, book, store)]
        await run.checkpoint([await _said(look, "first"), *(task.result() for task in left if task.done())])
    return [*run.restored, await _said(refund, "second")]


async def _giving_up(run: Run, new: bool) -> list[str]:
    """The first life stops to wait for a call, and the second one makes another call like it."""
    if run.restored is None:
        try:
            async with asyncio.timeout(5.0):
                await run.checkpoint([await _said(pay, "slow")])
        except TimeoutError:
            await run.checkpoint([await _said(look, "late")])
    return [*run.restored, await _said(store, "last")]


async def _asking(run: Run, new: bool) -> list[str]:
    """An approval of its own, one of a call, and a child may be open at a checkpoint."""
    before: list[str] = run.restored or []

    async def below() -> str:
        try:
            return str(await named_child("a"))
        except ChildFailed as failed:
            return failed.kind

    tasks = [asyncio.create_task(_said(demolish, "a")), asyncio.create_task(below())]
    tasks.append(asyncio.create_task(_decided(run)))
    if not before:
        first = await _said(store, "first")
        if not any(task.done() for task in tasks):
            await run.checkpoint([first])
        before = [first]
    return [*before, *await asyncio.gather(*tasks)]


async def _decided(run: Run) -> str:
    return (await run.request_approval("go", {"what": "x"}, expires=60.0, editable="what")).outcome


async def _hearing(run: Run, new: bool) -> list[str]:
    """One signal in each life, and the last one in time."""
    heard: list[str] = run.restored or []
    if len(heard) < 2:
        await run.checkpoint([*heard, f"heard={await run.receive('go')}"])
    try:
        heard.append(f"heard={await run.receive('go', timeout=20.0)}")
    except TimeoutError:
        heard.append("nothing")
    return [*heard, await _said(order, "last")]


async def _waking(run: Run, new: bool) -> list[str]:
    """A timer of another task goes off when it was due, whatever checkpoints are taken meanwhile."""
    done: list[str] = run.restored or []
    bell = asyncio.create_task(_rung(run), name="bell")
    if len(done) < 3:
        await asyncio.sleep(7.0)
        await run.checkpoint([*done, await _said(store, str(len(done)))])
    return [*done, await bell, await _said(order, "last")]


async def _rung(run: Run) -> str:
    await asyncio.sleep(40.0)
    return "rung"


async def _cleaning(run: Run, new: bool) -> list[str]:
    """Cleans up when it is cancelled, in whichever life."""
    done: list[str] = run.restored or []
    try:
        if len(done) < 2:
            await run.checkpoint([*done, await _said((order, pay)[len(done)], "a")])
        return [*done, await _said(launch, "b")]
    except asyncio.CancelledError:
        await _said(store, "tidy")
        raise


async def _spending(run: Run, new: bool) -> list[str]:
    done: list[str] = run.restored or []
    slow = asyncio.create_task(_said(buy, "slow")) if len(done) < 2 else None
    if not done:
        first = await _said(ask, "first")
        await run.checkpoint([first, *([slow.result()] if slow and slow.done() else [])])
    return [*done, *([await slow] if slow else []), await _said(quote, "new" if new else "last")]


def _checkpointed(
    name: str, body: Callable[[Run, bool], Coroutine[Any, Any, list[str]]], *env: str, fates: tuple[str, ...] = (), **more: Any
) -> Scenario:
    """With a person who lets the run go back, or without."""
    first, second = _versions(body, **({"budget": more.pop("budget")} if "budget" in more else {}))
    is_reopened = any(what in REOPENS for what in env)
    return Scenario(
        f"checkpoint: {name}",
        first if is_reopened else second,
        fates=fates,
        env=env,
        distinct=True,
        new_code=second if is_reopened else None,
        **more,
    )


_EFFECTS = _steps((order, "a"), (look, "b"), (pay, "c"), (book, "d"), (launch, "e"), (refund, "f"), (store, "g"))
CHECKPOINTED = [
    _checkpointed("each effect", _EFFECTS, "resolve", fates=("reset", "not_sent")),
    _checkpointed("an open call", _crossing, fates=("reset", "timeout")),
    _checkpointed("an open call, drained", _crossing, "pause", "unpause", fates=("not_sent",), drains=True),
    _checkpointed("calls that are left", _forgetting, "resolve", "resolve", "resolve", fates=("reset",)),
    _checkpointed("calls that are given up", _giving_up, fates=("reset", "timeout"), ticks=True),
    _checkpointed("approvals and a child", _asking, "grant", "edit", "reject", "child ok", ticks=True),
    _checkpointed("approvals, late", _asking, "grant", "expire", "child fails", late_post=True, drains=True),
    _checkpointed("signals", _hearing, "signal a", "signal b", "signal c", twice=True, ticks=True),
    _checkpointed("timers", _waking, fates=("reset",), ticks=True),
    _checkpointed("cancelled", _cleaning, "cancel", fates=("reset",)),
    _checkpointed("a budget", _spending, "raise", fates=("reset",), budget=Budget(usd="0.0003", calls=6)),
    _checkpointed("each effect, reopened", _EFFECTS, *_TWO, "resolve", fates=("reset", "refused")),
    _checkpointed("an open call, reopened", _crossing, *_TWO, fates=("reset", "refused")),
    _checkpointed("calls that are left, reopened", _forgetting, *_TWO, "resolve", "end"),
    _checkpointed("approvals and a child, reopened", _asking, *_TWO, "grant", "edit", "child ok", "end"),
    _checkpointed("signals, reopened", _hearing, *_TWO, "signal a", "signal b", "signal c"),
    _checkpointed("timers, reopened", _waking, *_TWO, fates=("reset",), ticks=True),
    _checkpointed("cancelled and reopened", _cleaning, *_TWO, "cancel", "pause", fates=("reset",)),
    _checkpointed("a budget, reopened", _spending, *_TWO, "raise", fates=("reset",), budget=Budget(usd="0.0004", calls=8)),
]


# -- agents of runs that people fork
# ------------------------------------------------------------------------------------
async def _each_effect(run: Run, new: bool) -> list[str]:
    done = [await _made(look, "a"), await _made(launch, "b"), await _made(store, "c"), await _made(pay, "d"), await _made(book, "e")]
    return [*done, await _made(order, "g" if new else "f")]


def _forked(name: str, body: Callable[[Run, bool], Coroutine[Any, Any, list[str]]], *env: str, **more: Any) -> Scenario:
    first, second = _versions(body, **({"budget": more.pop("budget")} if "budget" in more else {}))
    return Scenario(f"forked: {name}", first, env=env, distinct=True, new_code=second, **more)


FORKED = [
    _forked("each effect", _each_effect, *FORKS, "resolve", fates=("reset", "not_sent", "refused")),
    _forked("once", _twice_launched, *FORKS, "resolve", "fail", fates=("not_sent", "reset", "garbage", "denied")),
    _forked("gathered", _gathered, *FORKS, "resolve", fates=("reset", "refused")),
    _forked("approvals", _petitioned, *FORKS, "grant", "edit", "reject"),
    _forked("the agent asks", _consulted, *FORKS, "grant", "grant", "expire"),
    _forked("signals", _heard, *FORKS, "signal a", "signal b", "cancel"),
    _forked("children", _parented, *FORKS, "child ok", "child fails"),
    _forked("a budget", _bought, *FORKS, "raise", fates=("reset",), budget=Budget(usd="0.0004", calls=8)),
    _forked("and reopened", _paid, "fork", "retry", "rewind", "fork to new code", fates=("reset", "refused")),
]
SCENARIOS = [
    Scenario("in a row", in_a_row),
    Scenario("once", one_once, fates=("not_sent", "reset", "busy", "garbage", "stuck", "denied"), env=("resolve",)),
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
    Scenario("a message while it asks", heard, env=("signal a", "grant", "signal b", "edit"), ticks=True),
    Scenario("a message while it asks, late", heard, env=("signal a", "grant", "cancel"), late_post=True, drains=True, twice=True),
    Scenario("messages while two calls wait", heard_twice, env=("signal a", "grant", "grant", "signal b")),
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
