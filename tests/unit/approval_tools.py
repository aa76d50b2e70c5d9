"""Shared by the tests of approvals: an agent that asks, and the three situations in which a decision can arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tests.unit.drive_tools import ManualClock, outline, perdure, until

from perdure import Agent, Decision, NotApproved, Perdure, Run, agent, tool
from perdure.core.approval import Withdraw
from perdure.core.events import ToolCallInitiated
from perdure.core.machine import Facts
from perdure.core.replay import replay
from perdure.core.state import fold
from perdure.errors import StoreUnavailable
from perdure.store.api import Append, Appended, ApprovalFilter, ApprovalRow, RunRow

# Held: a call of another branch is under way, so the answer comes through the inbox. Parked: the run is not held.
# Restarted: in addition, no process knows the run; a new process continues.
WAYS = ["held", "parked", "restarted"]
HOUR = 3600.0


class Asking:
    """An agent that asks for something while a companion call of it goes on until it is released."""

    def __init__(self, ask: Callable[[Run], Awaitable[Any]]) -> None:
        self.answers: list[Any] = []
        self.release = asyncio.Event()

        @tool(effect="read")
        async def companion() -> None:
            await self.release.wait()

        @agent(version="1")
        async def asker(run: Run) -> Any:
            other = asyncio.ensure_future(companion())
            answer = await ask(run)
            self.answers.append(answer)
            await other
            return answer

        self.agent: Agent[Any, Any] = asker


async def answered(
    where: Path, asking: Asking, way: str, decide: Callable[[Perdure], Awaitable[Any]], **start: Any
) -> tuple[Any, list[str]]:
    """Have the agent ask, decide, and let it go on: its result and its journal."""
    clock = ManualClock()
    async with perdure(where, [asking.agent], clock) as app:
        await app.start(asking.agent, id="r", **start)
        if way == "held":
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: pending(app))
            await decide(app)
            await until(lambda: asking.answers)
            asking.release.set()
            await driving
        else:
            asking.release.set()
            assert (await app.engine.drive("r", wait=False)).status == "waiting_approval"
            if way == "parked":
                await decide(app)
                await app.engine.drive("r", wait=False)
    async with perdure(where, [asking.agent], clock) as app:
        if way == "restarted":
            await decide(app)
            await app.engine.drive("r", wait=False)
        check_replay(app, asking.agent)
        handle = app.handle("r")
        return await handle.result(), outline(await handle.events())


def pending(app: Perdure, run_id: str = "r") -> list[ApprovalRow]:
    """The pending approvals of the run."""
    return [row for row in rows(app, run_id) if row.standing.status == "pending"]


def rows(app: Perdure, run_id: str = "r") -> list[ApprovalRow]:
    return app.store.approvals(ApprovalFilter(status=None, run_id=run_id))


def the_one(app: Perdure, run_id: str = "r") -> str:
    """The id of the only pending approval."""
    (row,) = pending(app, run_id)
    return row.approval


def statuses(app: Perdure, run_id: str = "r") -> list[str]:
    return [row.standing.status for row in sorted(rows(app, run_id), key=lambda row: row.call)]


def check_replay(app: Perdure, code: Agent[Any, Any], run_id: str = "r") -> None:
    """The present journal replays on a fresh machine, which asks for no other calls."""
    events = app.store.read(run_id)
    state = fold(events)
    assert state.created is not None
    machine = code.machine(
        Facts(run_id, state.created.tenant, state.created.actor, code.name, code.version), app.load(state.created.input), 10_000
    )
    try:
        assert replay(machine, events, app.load).pending == []
        assert machine.finished == state.finished
    finally:
        machine.close()


async def withdraw(app: Perdure, approval: str) -> None:
    """The request is withdrawn from outside."""
    app.store.decide(approval, Withdraw(), event_id=app.clock.new_id(), now=app.clock.now())


def told(decision: Decision) -> list[Any]:
    """A Decision as JSON."""
    return [decision.granted, decision.outcome, decision.by, decision.note, decision.input]


def refused(error: NotApproved) -> list[Any]:
    """What the caller of a tool learns, as JSON."""
    return ["not approved", error.outcome, error.by, error.note, error.message]


def clock_of(app: Perdure) -> ManualClock:
    assert isinstance(app.clock, ManualClock)
    return app.clock


async def approve(app: Perdure, by: str = "ann", **more: Any) -> ApprovalRow:
    """Approve the only pending request."""
    return await app.approve(the_one(app), by=by, **more)


async def reject(app: Perdure, by: str = "ann", reason: str = "too dear", **more: Any) -> ApprovalRow:
    return await app.reject(the_one(app), by=by, reason=reason, **more)


async def driven(app: Perdure, run_id: str = "r") -> RunRow:
    return await app.engine.drive(run_id, wait=False)


class Full:
    def __init__(self) -> None:
        self.room = False
        self.refused: list[str] = []  # whose starts


def fills_up(app: Perdure) -> Full:
    """From here on the store takes no intent until there is room again."""
    full = Full()
    append, transact = app.store.append, app.store.transact

    def nothing_sent(batch: Sequence[Append], *_: Any) -> list[Append]:
        return list(batch)  # each of them is appended instead

    def check(*batch: Append) -> None:
        starts = [sealed.event.body for one in batch for sealed in one.events if isinstance(sealed.event.body, ToolCallInitiated)]
        if starts and not full.room:
            full.refused += [start.tool for start in starts]
            raise StoreUnavailable("the disk is full")

    def appended(batch: Any) -> list[Appended]:
        check(*batch)
        return append(batch)

    def transacted(head: Append, work: Any) -> Any:
        check(head)
        return transact(head, work)

    app.store.send = nothing_sent  # type: ignore[attr-defined]
    app.store.append, app.store.transact = appended, transacted  # type: ignore[method-assign]
    return full
