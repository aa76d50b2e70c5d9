"""An approval that ends before the commit that starts its call: the start is taken back, and the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.approval_tools import check_replay, fills_up, pending, rows
from tests.unit.drive_tools import SETTINGS, ManualClock, outline, run, until
from tests.unit.postgres_tools import cleared

from perdure import Agent, Approval, Budget, NotApproved, Perdure, Run, agent, tool
from perdure.core.approval import Expire
from perdure.core.events import ApprovalExpired, RunClaimed, RunReleased, ToolCallFailed, ToolCallInDoubt
from perdure.core.state import fold

LATE_S = 61


class Household:
    """An agent that ships and writes, and pays after an approval within a minute.

    Shipping lasts until the test ends it.
    """

    def __init__(self, effect: Any) -> None:
        self.made: list[str] = []
        self.landed = asyncio.Event()

        @tool(effect="once")
        async def ship() -> str:
            self.made.append("ship")
            await self.landed.wait()
            return "shipped"

        async def pay() -> str:
            self.made.append("pay")
            return "paid"

        def pay_here() -> str:
            self.made.append("pay")
            return "paid"

        @tool(effect="once", approval=True)
        async def write() -> str:
            self.made.append("write")
            return "written"

        paying = tool(effect=effect, name="pay", approval=Approval(expires=LATE_S - 1))(pay_here if effect == "transaction" else pay)

        async def paid() -> str:
            try:
                return str(await paying())
            except NotApproved as refused:
                return refused.outcome

        async def written() -> str:
            return str(await write())

        @agent(version="1", budget=Budget(calls=10))
        async def shipping(run: Run) -> list[str]:
            return list(await asyncio.gather(ship(), paid(), written()))

        @agent(version="1", budget=Budget(calls=10))
        async def writing(run: Run) -> list[str]:
            return list(await asyncio.gather(paid(), written()))

        self.shipping: Agent[Any, Any] = shipping
        self.writing: Agent[Any, Any] = writing


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new journal."""
    return cleared(request.getfixturevalue("postgres")) if request.param == "postgres" else f"sqlite:///{tmp_path / 'db'}"


def asked(app: Perdure, action: str) -> str:
    """The id of the approval."""
    (row,) = [row for row in rows(app) if row.standing.request.action == action]
    return row.approval


def expire(app: Perdure, clock: ManualClock, whose: str) -> None:
    """The approval of the payment expires, by the worker's own clock or by the clock of another process that is ahead."""
    if whose == "its own":
        clock.advance(LATE_S)
        return
    later = clock.now() + LATE_S * 1_000_000
    app.store.decide(asked(app, "pay"), Expire(), event_id=clock.new_id(), now=later)


def has_heard(app: Perdure) -> bool:
    """Whether the journal has the end of an approval."""
    return any(isinstance(event.body, ApprovalExpired) for event in app.store.read("r"))


def check(app: Perdure, made: list[str], code: Agent[Any, Any]) -> None:
    """Nothing was cut off, and a call that did not begin is counted nowhere."""
    events = app.store.read("r")
    assert not [event for event in events if isinstance(event.body, RunReleased) and event.body.abrupt], outline(events, without=())
    assert not [event for event in events if isinstance(event.body, ToolCallInDoubt | ToolCallFailed)], outline(events)
    assert fold(events).attempts == len(made), outline(events)
    (ledger,) = app.store.ledgers("r")
    assert (ledger.spent.calls, ledger.reserved.calls) == (len(made), 0)
    check_replay(app, code)


def claims(app: Perdure) -> int:
    return sum(isinstance(event.body, RunClaimed) for event in app.store.read("r"))


@pytest.mark.parametrize("effect", ["read", "once", "transaction"])
@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_a_start_that_comes_too_late_for_its_approval_is_taken_back_and_calls_in_flight_go_on(where: str, effect: Any, whose: str) -> None:
    house, clock = Household(effect), ManualClock()

    async def main() -> None:
        async with Perdure(where, [house.shipping], settings=SETTINGS, clock=clock) as app:
            await app.start(house.shipping, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: house.made and len(pending(app)) == 2, 60)
            full = fills_up(app)
            await app.approve(asked(app, "pay"), by="ann")
            await until(lambda: full.refused, 60)
            expire(app, clock, whose)
            full.room = True
            await until(lambda: has_heard(app), 60)
            await app.approve(asked(app, "write"), by="ann")
            await until(lambda: "write" in house.made, 60)
            house.landed.set()
            await driving
            assert await app.handle("r").result() == ["shipped", "expired", "written"]
            check(app, ["ship", "write"], house.shipping)
            assert claims(app) == 1

    run(main(), 100)
    assert house.made == ["ship", "write"]


@pytest.mark.parametrize("effect", ["read", "once", "transaction"])
@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_what_was_to_start_in_the_same_commit_starts(where: str, effect: Any, whose: str) -> None:
    house, clock = Household(effect), ManualClock()

    async def main() -> None:
        async with Perdure(where, [house.writing], settings=SETTINGS, clock=clock) as app:
            await app.start(house.writing, id="r")
            await app.engine.drive("r", wait=False)
            for action in ("pay", "write"):
                await app.approve(asked(app, action), by="ann")
            full = fills_up(app)
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: full.refused, 60)
            assert full.refused[:2] == ["pay", "write"]
            expire(app, clock, whose)
            full.room = True
            await driving
            assert await app.handle("r").result() == ["expired", "written"]
            check(app, ["write"], house.writing)

    run(main(), 100)
    assert house.made == ["write"]


def test_a_yes_and_its_end_that_are_read_one_right_after_the_other_start_nothing(where: str) -> None:
    """Both come while a commit is under way; the end comes by a clock that is ahead of the worker's."""
    house, clock = Household("once"), ManualClock()

    async def main() -> None:
        async with Perdure(where, [house.shipping], settings=SETTINGS, clock=clock) as app:
            await app.start(house.shipping, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: house.made and len(pending(app)) == 2, 60)
            full = fills_up(app)
            await app.approve(asked(app, "write"), by="ann")
            await until(lambda: full.refused, 60)
            await app.approve(asked(app, "pay"), by="ann")
            expire(app, clock, "another's")
            full.room = True
            await until(lambda: has_heard(app) and "write" in house.made, 60)
            house.landed.set()
            await driving
            assert await app.handle("r").result() == ["shipped", "expired", "written"]
            check(app, ["ship", "write"], house.shipping)
            assert claims(app) == 1

    run(main(), 100)
    assert house.made == ["ship", "write"]
