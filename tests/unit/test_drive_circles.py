"""Agents that go in circles are stopped before they spend more. Other agents are not stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import ManualClock, outline, perdure, run, status_of, until

from perdure import Agent, Budget, Call, NeedsAttention, Run, ToolFailed, agent, tool
from perdure.core.events import AttentionNeeded, Event
from perdure.core.loop_detector import Circles
from perdure.store.api import RunRow


@tool(effect="read")
async def search(what: str) -> str:
    return f"nothing about {what}"


@tool(effect="once")
async def order(what: str) -> str:
    return f"ordered {what}"


async def _driven(code: Agent[Any, Any], *args: Any, clock: ManualClock | None = None) -> tuple[RunRow, list[Event]]:
    async with perdure(None, [code], clock) as app:
        handle = await app.start(code, *args, id="r")
        row = await app.engine.drive("r", wait=False)
        return row, await handle.events()


def initiated(events: list[Event]) -> int:
    return sum(event.type == "tool_call_initiated" for event in events)


# -- the same again and again -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("used", [search, order], ids=["read", "once"])
def test_the_same_call_with_the_same_answer_stops_the_run_and_says_why(used: Any) -> None:
    @agent(version="1", circles=Circles(repeats=5))
    async def looping(run: Run) -> None:
        while True:
            await used("perpetual motion")

    row, events = run(_driven(looping))
    assert (row.status, row.attention, row.holder, row.ready_at) == ("needs_attention", "circling", None, None)
    assert "has returned the same result 5 times in a row, calls 1 to 5" in str(row.error)
    assert initiated(events) == 5  # no sixth one has begun
    (said,) = [event.body for event in events if isinstance(event.body, AttentionNeeded)]
    assert (said.reason, said.detail) == ("circling", row.error)


def test_the_same_failure_again_and_again_counts_too() -> None:
    @tool(effect="once")
    async def broken() -> None:
        raise ValueError("no")

    @agent(version="1", circles=Circles(repeats=3))
    async def stubborn(run: Run) -> None:
        while True:
            try:
                await broken()
            except ToolFailed:
                run.note("once more")

    row, events = run(_driven(stubborn))
    assert row.attention == "circling"
    assert "has failed in the same way 3 times" in str(row.error)
    assert initiated(events) == 3


def test_other_arguments_or_other_answers_are_no_circle() -> None:
    answers = iter(range(1000))

    @tool(effect="read")
    async def changing(what: str) -> int:
        return next(answers)

    @agent(version="1", circles=Circles(repeats=3))
    async def busy(run: Run) -> str:
        for number in range(20):
            await search(str(number))
            await changing("same")
        return "done"

    row, events = run(_driven(busy))
    assert (row.status, initiated(events)) == ("succeeded", 40)


def test_two_calls_that_take_turns_are_a_circle_as_well() -> None:
    @agent(version="1", circles=Circles(repeats=4))
    async def back_and_forth(run: Run) -> None:
        while True:
            await search("a")
            await search("b")

    row, events = run(_driven(back_and_forth))
    assert (row.attention, initiated(events)) == ("circling", 8)  # the first of each is new


def test_looking_again_after_a_sleep_is_waiting_and_no_circle() -> None:
    """A poll: the same answer, and time in between."""

    @agent(version="1", circles=Circles(repeats=3))
    async def polling(run: Run) -> str:
        for _ in range(20):
            await search("is it done?")
            await asyncio.sleep(60)
        return "done"

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [polling], clock) as app:
            await app.start(polling, id="r")
            while (row := await app.engine.drive("r", wait=False)).status == "waiting":
                clock.advance(61)
            assert row.status == "succeeded", row.error

    run(main())


def test_a_batch_of_equal_calls_counts_each_of_them() -> None:
    @agent(version="1", circles=Circles(repeats=5))
    async def fanning(run: Run) -> str:
        await asyncio.gather(*(search("same") for _ in range(20)))
        return "done"

    row, _ = run(_driven(fanning))
    assert row.attention == "circling"


# -- spending without progress ------------------------------------------------------------------------------------------
def test_money_spent_without_anything_new_stops_the_run() -> None:
    numbers = iter(range(1000))

    @tool(effect="read")
    async def think(call: Call) -> int:
        call.spend(usd=0.10)
        return next(numbers)

    @agent(version="1", circles=Circles(usd=0.35))
    async def pondering(run: Run) -> None:
        while True:
            await think()

    row, events = run(_driven(pondering))
    assert row.attention == "circling"
    assert "$0.40 spent since event 1 without progress (at most $0.35)" in str(row.error)
    assert initiated(events) == 4


def test_a_new_effect_or_status_is_progress() -> None:
    numbers = iter(range(1000))

    @tool(effect="read")
    async def think(call: Call) -> int:
        call.spend(usd=0.10, tokens_in=10)
        return next(numbers)

    @agent(version="1", circles=Circles(usd=0.25, tokens=25))
    async def pondering(run: Run) -> str:
        for number in range(10):
            await think()
            await think()
            if number % 2:
                await order(str(number))
            else:
                run.status(f"step {number}")
        return "done"

    row, _ = run(_driven(pondering))
    assert row.status == "succeeded", row.error


# -- going on -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["unpause", "cancel"])
def test_a_person_who_sends_the_run_on_sets_the_count_back(how: str) -> None:
    @agent(version="1", circles=Circles(repeats=3))
    async def looping(run: Run) -> str:
        for _ in range(5):
            await search("same")
        return "done"

    async def main() -> None:
        async with perdure(None, [looping]) as app:
            handle = await app.start(looping, id="r")
            assert (await app.engine.drive("r")).attention == "circling"
            if how == "cancel":
                await app.cancel("r")
                assert (await app.engine.drive("r")).status == "cancelled"
                return
            await app.unpause("r")
            assert await handle.result() == "done"  # two more are not three

    run(main())


def test_a_run_that_goes_on_in_the_same_circle_is_stopped_again() -> None:
    @agent(version="1", circles=Circles(repeats=3))
    async def looping(run: Run) -> None:
        while True:
            await search("same")

    async def main() -> None:
        async with perdure(None, [looping]) as app:
            handle = await app.start(looping, id="r")
            for times in (1, 2, 3):
                assert (await app.engine.drive("r")).attention == "circling"
                assert initiated(await handle.events()) == 3 * times
                await app.unpause("r")

    run(main())


def test_a_signal_to_a_run_that_was_stopped_waits_for_the_person_too() -> None:
    @agent(version="1", circles=Circles(repeats=3))
    async def looping(run: Run) -> str:
        while True:
            await search("same")

    async def main() -> None:
        async with perdure(None, [looping]) as app:
            await app.start(looping, id="r")
            await app.engine.drive("r")
            await app.signal("r", "hello")
            assert status_of(app, "r") == "needs_attention"
            with pytest.raises(NeedsAttention, match="same result 3 times"):
                await app.handle("r").result()

    run(main())


@pytest.mark.parametrize("effect", ["read", "idempotent", "once"])
def test_a_crash_right_after_the_circle_was_seen_does_not_let_the_run_go_on(effect: Any, tmp_path: Path) -> None:
    """The run could not stand still yet, since another call was in flight, and then the worker died. Nothing is begun again."""
    begun: list[str] = []

    @tool(effect=effect)
    async def hanging(call: Call) -> None:
        begun.append(f"hanging {call.attempt}")
        await asyncio.Event().wait()

    @tool(effect="idempotent")
    async def look(call: Call) -> str:
        begun.append(f"look {call.number}")
        return "same"

    @agent(version="1", circles=Circles(repeats=3))
    async def looping(run: Run) -> None:
        aside = asyncio.create_task(hanging())
        while not aside.done():
            await look()

    async def main() -> None:
        seen: list[str] = []
        async with perdure(tmp_path / "db", [looping], observers=[lambda _, events: seen.extend(event.type for event in events)]) as app:
            await app.start(looping, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: "attention_needed" in seen)
            app.abort()
            await driving
        before = sorted(begun)
        assert [line.split()[0] for line in before] == ["hanging", "look", "look", "look"]
        async with perdure(tmp_path / "db", [looping]) as app:
            row = await app.engine.drive("r")
            assert (row.status, row.attention) == ("needs_attention", "circling")
            assert outline(await app.handle("r").events())[-1] == "attention_needed"
            assert sorted(begun) == before
            await app.unpause("r")
            working = asyncio.create_task(app.work())
            await until(lambda: len(begun) > 4)  # a person has sent it on
            app.abort()
            app.drain()
            await working

    run(main())


def test_agents_that_are_not_watched_and_ordinary_ones_that_are_go_their_way() -> None:
    async def looping(run: Run) -> str:
        for number in range(30):
            await search("same")
            await order(str(number))
        return "done"

    for circles in (None, Circles(repeats=3, usd=1, tokens=1000)):
        row, _ = run(_driven(Agent(looping, name="looping", version="1", circles=circles)))
        assert row.status == "succeeded", row.error


def test_a_child_that_goes_in_circles_is_stopped_and_its_parent_waits() -> None:
    @agent(version="1", circles=Circles(repeats=3))
    async def looping(run: Run) -> None:
        while True:
            await search("same")

    @agent(version="1", circles=Circles(repeats=3))
    async def parent(run: Run) -> None:
        await looping()

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            await app.start(parent, id="p", budget=Budget(calls=100))
            await app.engine.drive("p")
            child = app.store.get("p/1")
            assert child is not None
            assert (child.attention, status_of(app, "p")) == ("circling", "waiting")

    run(main())
