"""Agents that call agents: what a child and its parent exchange, and which worker drives which run."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.garbage import own_garbage
from tests.unit.drive_tools import SETTINGS, ManualClock, local, outline, perdure, run, status_of, until
from tests.unit.postgres_tools import cleared
from tests.unit.store_tools import output, python

from perdure import (
    Agent,
    Approval,
    ChildFailed,
    Conflict,
    InvalidInput,
    NeedsAttention,
    NotAllowedInAgent,
    Perdure,
    Run,
    RunCancelled,
    RunEnded,
    RunFailed,
    Settings,
    agent,
    tool,
)
from perdure.agent import MAX_DEPTH
from perdure.core import codec
from perdure.core.events import ChildFinished, ChildStarted, Event, RunAdopted, RunCreated
from perdure.core.events import RunCancelled as RunCancelledEvent
from perdure.engine.local.child_discovery import ChildAgents
from perdure.errors import StoreUnavailable
from perdure.inspect.why.page import why
from perdure.store.api import NewRun, Served
from perdure.store.open import open_store


@tool(effect="read")
async def look(what: Any = None) -> Any:
    return what


@agent(version="1")
async def square(run: Run, number: int) -> int:
    return int(await look(number)) ** 2


@agent(version="1")
async def patient(run: Run) -> str:
    try:
        return str(await run.receive("go"))
    finally:
        run.note(f"cleaned up, {run.cancelled}")


@asynccontextmanager
async def at_work(app: Perdure) -> AsyncIterator[Perdure]:
    """The app serves its queue meanwhile."""
    stop = asyncio.Event()
    working = asyncio.create_task(app.work(stop=stop))
    try:
        yield app
    finally:
        stop.set()
        await working


def rows_below(app: Perdure, run_id: str) -> dict[str, str]:
    return {row.run_id: row.status for row in app.store.family(run_id)}


# -- what comes back ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("by_worker", [True, False])
def test_a_child_is_a_run_of_its_own_and_its_result_is_the_call_s(by_worker: bool, tmp_path: Path) -> None:
    @agent(version="1")
    async def parent(run: Run, number: int) -> int:
        return await square(number) + 1

    async def main() -> None:
        async with perdure(tmp_path / "db", [parent]) as app:
            handle = await app.start(parent, 3, id="p", tenant="acme", actor="user:17", priority=4)
            if by_worker:
                async with at_work(app):
                    await until(lambda: status_of(app, "p") == "succeeded")
            assert await handle.result() == 10
            child = app.store.get("p/1")
            assert child is not None
            assert (child.agent, child.version, child.tenant, child.actor, child.priority) == ("square", "1", "acme", "user:17", 4)
            assert (child.parent, child.parent_call, child.status) == ("p", 1, "succeeded")
            assert await app.handle("p/1").result() == 9
            assert outline(await handle.events()) == ["run_created", "child_started", "child_finished", "run_succeeded"]

    run(main())


def test_a_parent_that_waits_for_a_child_is_held_by_nobody() -> None:
    @agent(version="1")
    async def parent(run: Run) -> str:
        return await patient()

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            handle = await app.start(parent, id="p")
            row = await app.engine.drive("p")
            assert (row.status, row.holder, row.ready_at, row.waiting_for) == ("waiting", None, None, "child p/1")
            await app.signal("p/1", "go", "now")
            assert await handle.result() == "now"

    run(main())


def test_a_failed_child_raises_in_its_parent_and_the_same_on_replay(tmp_path: Path) -> None:
    seen: list[ChildFailed] = []

    @agent(version="1")
    async def failing(run: Run) -> None:
        raise KeyError("no such order")

    @agent(version="1")
    async def parent(run: Run) -> str:
        try:
            await failing()
        except ChildFailed as failed:
            seen.append(failed)
        return str(await run.receive("go"))

    async def main() -> None:
        for _ in range(2):
            async with perdure(tmp_path / "db", [parent]) as app:
                await app.start(parent, id="p")
                assert (await app.engine.drive("p")).waiting_for == "signal 'go'"
        async with perdure(tmp_path / "db", [parent]) as app:
            await app.signal("p", "go", "on")
            assert await app.run(parent, id="p") == "on"

    run(main())
    assert len(seen) == 3  # live, and twice from the journal
    assert {(one.tool, one.call, one.run_id, one.kind, one.type, one.message) for one in seen} == {
        ("failing", 1, "p/1", "error", "KeyError", "'no such order'")
    }


def test_a_failure_that_nobody_catches_goes_up_through_all_parents_by_name() -> None:
    @agent(version="1")
    async def lowest(run: Run) -> None:
        raise ValueError("deep down")

    @agent(version="1")
    async def middle(run: Run) -> None:
        await lowest()

    @agent(version="1")
    async def top(run: Run) -> None:
        await middle()

    async def main() -> None:
        async with perdure(None, [top]) as app:
            with pytest.raises(RunFailed, match=r"^run t: ChildFailed: child t/1/1 \(lowest\) failed: ValueError: deep down$"):
                await app.run(top, id="t")
            assert [status_of(app, name) for name in ("t", "t/1", "t/1/1")] == ["failed"] * 3

    run(main())


def test_a_child_that_a_person_cancels_fails_its_parent_s_call_as_cancelled() -> None:
    @agent(version="1")
    async def parent(run: Run) -> list[str]:
        try:
            await patient()
        except ChildFailed as failed:
            return [failed.kind, failed.run_id, failed.message, str(run.cancelled)]
        return []

    async def main() -> Any:
        async with perdure(None, [parent]) as app:
            await app.start(parent, id="p")
            await app.engine.drive("p")
            await app.cancel("p/1", by="ann", reason="too slow")
            return await app.handle("p").result()

    assert run(main()) == ["cancelled", "p/1", "run p/1 was cancelled: too slow", "False"]


def test_big_inputs_and_results_go_through_the_blob_store() -> None:
    @agent(version="1")
    async def doubling(run: Run, text: str) -> str:
        return str(await look(text)) * 2

    @agent(version="1")
    async def parent(run: Run, size: int) -> int:
        one, two = await asyncio.gather(doubling("x" * size), doubling("y" * size))
        await run.receive("go")
        return len(one + two)

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            await app.start(parent, 300_000, id="p")
            assert (await app.engine.drive("p")).waiting_for == "signal 'go'"
            bodies = [event.body for event in await app.handle("p").events()]
            assert [body.input.inline for body in bodies if isinstance(body, ChildStarted)] == [None, None]
            assert [body.output and body.output.inline for body in bodies if isinstance(body, ChildFinished)] == [None, None]
            await app.signal("p", "go")
            assert await app.handle("p").result() == 1_200_000

    run(main())


def test_a_result_that_cannot_be_recorded_fails_the_child_and_not_the_parent() -> None:
    @agent(version="1")
    async def odd(run: Run) -> Any:
        return {1, 2}

    @agent(version="1")
    async def parent(run: Run) -> str:
        try:
            await odd()
        except ChildFailed as failed:
            return f"{failed.kind} {failed.type}"
        return ""

    async def main() -> Any:
        async with perdure(None, [parent]) as app:
            return await app.run(parent)

    assert run(main()) == "not_encodable NotEncodable"


def test_wrong_arguments_of_a_child_raise_where_it_is_called_and_nothing_is_recorded() -> None:
    @agent(version="1")
    async def parent(run: Run) -> list[str]:
        said = []
        for args in ((), ("seven",), (1, 2)):
            try:
                square(*args).close()
            except InvalidInput as refused:
                said.append(str(refused))
        return said

    async def main() -> tuple[Any, list[str]]:
        async with perdure(None, [parent]) as app:
            return await app.run(parent, id="p"), outline(await app.handle("p").events())

    said, lines = run(main())
    assert [line.startswith("agent square") for line in said] == [True] * 3
    assert lines == ["run_created", "run_succeeded"]


def test_an_agent_cannot_be_called_outside_an_agent() -> None:
    with pytest.raises(NotAllowedInAgent, match=r"agent square cannot be called directly: start it with app\.start\(square"):
        square(1).close()


@pytest.mark.parametrize("run_id", ["p/1", "/", "a/undo"])
def test_ids_of_children_cannot_be_taken_by_users(run_id: str) -> None:
    async def main() -> None:
        async with perdure(None, [square]) as app:
            with pytest.raises(InvalidInput, match="is not usable"):
                await app.start(square, 1, id=run_id)
            assert app.store.get(run_id) is None

    run(main())


# -- waiting in other ways ----------------------------------------------------------------------------------------------
def test_the_first_child_to_end_wins_and_the_others_are_cancelled() -> None:
    @agent(version="1")
    async def racer(run: Run, name: str) -> str:
        await run.receive("go")
        return name

    @agent(version="1")
    async def parent(run: Run) -> str:
        tasks = [asyncio.create_task(racer(name)) for name in "abc"]
        done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return done.pop().result()

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            handle = await app.start(parent, id="p")
            await app.engine.drive("p")
            await app.signal("p/2", "go")
            assert await handle.result() == "b"
            assert [status_of(app, f"p/{number}") for number in (1, 2, 3)] == ["cancelled", "succeeded", "cancelled"]
            # The run ends only after its children: its end comes last in time.
            ends = [(await app.handle(f"p/{number}").events())[-1].ts for number in (1, 3)]
            assert (await handle.events())[-1].ts >= max(ends)

    run(main())


def test_as_completed_sees_children_in_the_order_in_which_they_end_also_after_a_restart(tmp_path: Path) -> None:
    @agent(version="1")
    async def racer(run: Run, name: str) -> str:
        await run.receive("go")
        return name

    @agent(version="1")
    async def parent(run: Run) -> list[str]:
        return [await one for one in asyncio.as_completed([racer(name) for name in "abc"])]

    async def main() -> Any:
        async with perdure(tmp_path / "db", [parent]) as app:
            await app.start(parent, id="p")
            await app.engine.drive("p")
        for number in (3, 1, 2):
            async with perdure(tmp_path / "db", [parent]) as app:
                await app.signal(f"p/{number}", "go")
                await app.engine.drive("p")
        async with perdure(tmp_path / "db", [parent]) as app:
            return await app.handle("p").result()

    assert run(main()) == ["c", "a", "b"]


def test_a_timeout_around_a_child_cancels_it_and_waits_until_it_is_gone() -> None:
    @agent(version="1")
    async def parent(run: Run) -> str:
        try:
            async with asyncio.timeout(60):
                return await patient()
        except TimeoutError:
            return "gave up"

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [parent], clock) as app:
            handle = await app.start(parent, id="p")
            assert (await app.engine.drive("p", wait=False)).status == "waiting"
            clock.advance(61)
            assert await handle.result() == "gave up"
            assert status_of(app, "p/1") == "cancelled"
            assert "note cleaned up, True" in outline(await app.handle("p/1").events())
            assert outline(await handle.events())[-3:] == ["timer_fired", "child_finished", "run_succeeded"]

    run(main())


def test_a_child_that_nobody_awaits_runs_to_its_end_and_the_parent_waits_for_it() -> None:
    @agent(version="1")
    async def parent(run: Run) -> str:
        started = patient()
        started.close()  # or Python would complain that it was never awaited
        return "done"

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            handle = await app.start(parent, id="p")
            assert (await app.engine.drive("p")).waiting_for == "child p/1"
            await app.signal("p/1", "go", 1)
            assert await handle.result() == "done"
            assert status_of(app, "p/1") == "succeeded"

    run(main())


def test_a_child_called_and_given_up_in_the_same_breath_is_cancelled() -> None:
    @agent(version="1")
    async def parent(run: Run) -> str:
        task = asyncio.create_task(patient())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return "done"

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            assert await app.run(parent, id="p") == "done"
            assert status_of(app, "p/1") == "cancelled"

    run(main())


# -- cancelling ---------------------------------------------------------------------------------------------------------
@agent(version="1")
async def middle(run: Run) -> str:
    try:
        return await patient()
    finally:
        run.note(f"middle cleaned up, {run.cancelled}")


@pytest.mark.parametrize("restarts", [False, True])
def test_cancelling_a_parent_cancels_children_and_grandchildren_and_waits_for_all_of_them(restarts: bool, tmp_path: Path) -> None:
    @agent(version="1")
    async def top(run: Run) -> list[str]:
        return list(await asyncio.gather(middle(), middle(), patient()))

    async def main() -> None:
        async with perdure(tmp_path / "db", [top]) as app:
            await app.start(top, id="t")
            await app.engine.drive("t")
            assert len(rows_below(app, "t")) == 5
            await app.cancel("t", by="ann", reason="not needed")
            if not restarts:
                with pytest.raises(RunCancelled):
                    await app.handle("t").result()
        async with perdure(tmp_path / "db", [top]) as app:
            with pytest.raises(RunCancelled):
                await app.handle("t").result()
            assert rows_below(app, "t") == {}
            for child in ("t/1", "t/2", "t/3", "t/1/1", "t/2/1"):
                events = await app.handle(child).events()
                assert isinstance(events[-1].body, RunCancelledEvent)
                assert any("cleaned up, True" in line for line in outline(events))
                assert events[-1].body.reason == "not needed"
            top_events = await app.handle("t").events()
            assert [event.type for event in top_events if event.type not in ("run_claimed", "run_released")][-4:] == [
                *["child_finished"] * 3,
                "run_cancelled",
            ]

    run(main())


def test_a_parent_is_not_cancelled_before_its_child_has_cleaned_up() -> None:
    """Requested and confirmed are two things: the child still works, and so the parent still is "cancelling"."""
    tidying, finish = asyncio.Event(), asyncio.Event()

    @tool(effect="idempotent")
    async def tidy() -> None:
        tidying.set()
        await finish.wait()

    @agent(version="1")
    async def careful(run: Run) -> None:
        try:
            await run.receive("never")
        finally:
            await tidy()

    @agent(version="1")
    async def parent(run: Run) -> None:
        await careful()

    async def main() -> None:
        async with perdure(None, [parent]) as app, at_work(app):
            await app.start(parent, id="p")
            await until(lambda: rows_below(app, "p") == {"p/1": "waiting"} and status_of(app, "p") == "waiting")
            await app.cancel("p")
            await tidying.wait()
            await asyncio.sleep(0.05)
            assert (status_of(app, "p"), status_of(app, "p/1")) == ("cancelling", "cancelling")
            with pytest.raises(Conflict, match="cancelling"):
                await app.pause("p")  # what shall end is not made to wait
            await app.cancel("p")  # asking twice is asking once
            finish.set()
            await until(lambda: status_of(app, "p") == "cancelled")
            assert [event.type for event in await app.handle("p").events()].count("cancel_requested") == 1

    run(main())


def test_a_parent_may_start_a_child_to_clean_up_while_it_is_cancelled() -> None:
    @agent(version="1")
    async def parent(run: Run) -> None:
        try:
            await patient()
        finally:
            run.note(str(await square(4)))

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            await app.start(parent, id="p")
            await app.engine.drive("p")
            await app.cancel("p")
            with pytest.raises(RunCancelled):
                await app.handle("p").result()
            assert "note 16" in outline(await app.handle("p").events())
            assert status_of(app, "p/2") == "succeeded"

    run(main())


def test_ending_a_parent_by_force_ends_what_it_has_started() -> None:
    """No run waits for the children any more: they are asked to stop, and clean up as usual."""

    @agent(version="1")
    async def top(run: Run) -> str:
        return await middle()

    async def main() -> None:
        async with perdure(None, [top]) as app, at_work(app):
            await app.start(top, id="t")
            await until(lambda: rows_below(app, "t") == {"t/1": "waiting", "t/1/1": "waiting"} and status_of(app, "t") == "waiting")
            await app.cancel("t", force=True, by="ann", reason="its code is gone")
            assert status_of(app, "t") == "cancelled"
            await until(lambda: status_of(app, "t/1") == status_of(app, "t/1/1") == "cancelled")
            assert "note middle cleaned up, True" in outline(await app.handle("t/1").events())
            with pytest.raises(RunEnded):
                await app.cancel("t", force=True)

    run(main())


def test_a_paused_parent_keeps_what_its_children_bring_and_goes_on_with_it() -> None:
    @agent(version="1")
    async def parent(run: Run) -> list[str]:
        return list(await asyncio.gather(patient(), patient()))

    async def main() -> Any:
        async with perdure(None, [parent]) as app, at_work(app):
            await app.start(parent, id="p")
            await until(lambda: len(rows_below(app, "p")) == 2 and status_of(app, "p") == "waiting")
            await app.pause("p", by="ann")
            for number in (1, 2):
                await app.signal(f"p/{number}", "go", number)
            await until(lambda: not rows_below(app, "p"))
            assert status_of(app, "p") == "paused"
            assert outline(await app.handle("p").events())[-2:] == ["child_finished"] * 2
            await app.unpause("p", by="ann")
            await until(lambda: status_of(app, "p") == "succeeded")
            return await app.handle("p").result()

    assert run(main()) == ["1", "2"]


# -- what stops in a child ----------------------------------------------------------------------------------------------
def test_a_child_that_needs_an_approval_waits_for_it_and_the_parent_for_the_child() -> None:
    @tool(effect="once", approval=Approval(by="ann"))
    async def pay(cents: int) -> str:
        return f"paid {cents}"

    @agent(version="1")
    async def buyer(run: Run) -> str:
        return str(await pay(5))

    @agent(version="1")
    async def parent(run: Run) -> str:
        return await buyer()

    async def main() -> Any:
        async with perdure(None, [parent]) as app:
            await app.start(parent, id="p")
            row = await app.engine.drive("p")
            assert (row.status, status_of(app, "p/1")) == ("waiting", "waiting_approval")
            (asked,) = await app.approvals()
            assert (asked.run_id, asked.agent) == ("p/1", "buyer")
            await app.approve(asked.approval, by="ann")
            return await app.handle("p").result()

    assert run(main()) == "paid 5"


def test_a_child_in_doubt_keeps_its_parent_waiting_and_why_says_so() -> None:
    @tool(effect="once")
    async def pay() -> str:
        raise TimeoutError("no answer")

    @agent(version="1")
    async def buyer(run: Run) -> str:
        return str(await pay())

    @agent(version="1")
    async def parent(run: Run) -> str:
        return await buyer()

    async def main() -> Any:
        async with perdure(None, [parent]) as app:
            await app.start(parent, id="p")
            row = await app.engine.drive("p")
            assert (row.status, status_of(app, "p/1")) == ("waiting", "needs_attention")
            with pytest.raises(NeedsAttention):
                await app.handle("p/1").result()
            page = why(app.store, "p", now=app.clock.now())
            assert page.children is not None
            assert [(child.run_id, child.status) for child in page.children.news] == [("p/1", "needs_attention")]
            assert "p/1" in page.sentence
            await app.resolve("p/1", 1, happened="found it", by="ann")
            return await app.handle("p").result()

    assert run(main()) == "found it"


# -- depth and breadth --------------------------------------------------------------------------------------------------
def test_an_agent_that_calls_itself_stops_at_the_depth_limit_with_a_reason() -> None:
    @agent(version="1")
    async def deeper(run: Run, levels: int) -> int:
        if levels == 0:
            return 0
        return 1 + await deeper(levels - 1)

    async def main() -> None:
        async with perdure(None, [deeper]) as app:
            assert await app.run(deeper, MAX_DEPTH, id="fits") == MAX_DEPTH
            with pytest.raises(RunFailed, match="ancestors, the limit; does an agent call itself without end"):
                await app.run(deeper, MAX_DEPTH + 1, id="deep")
            assert app.store.get("deep" + "/1" * (MAX_DEPTH + 1)) is None

    run(main())


async def _fan_out(where: Path, count: int) -> tuple[float, Any, int]:
    @agent(version="1")
    async def leaf(run: Run, number: int) -> int:
        return number

    @agent(version="1")
    async def parent(run: Run, count: int) -> int:
        return sum(await asyncio.gather(*(leaf(number) for number in range(count))))

    settings = Settings(poll_s=0.002, park_after_s=0, flush_s=0.005)
    async with perdure(where, [parent], settings=settings) as app:
        begun = time.process_time()
        total = await app.run(parent, count, id="p")
        claims = sum(event.type == "run_claimed" for event in await app.handle("p").events())
        return time.process_time() - begun, total, claims


@pytest.mark.full
def test_a_thousand_children_work_in_linear_time_and_do_not_wake_their_parent_one_by_one(tmp_path: Path) -> None:
    few_s = 0.0
    with own_garbage():
        for number in range(4):  # as many children in all: one small measurement is spoilt too easily
            took_s, total, _ = run(_fan_out(tmp_path / f"few{number}", 250))
            assert total == sum(range(250))
            few_s += took_s / 4
        many_s, total, claims = run(_fan_out(tmp_path / "many", 1000), seconds=100)
    assert total == sum(range(1000))
    assert many_s < few_s * 12, (few_s, many_s)  # four times as many; the square would be sixteen
    assert claims < 100, claims


# -- who drives ---------------------------------------------------------------------------------------------------------
@agent(version="1")
async def parent_of_two(run: Run) -> list[int]:
    return list(await asyncio.gather(square(2), square(3)))


@pytest.mark.parametrize("generations", [1, 2])
def test_a_worker_that_serves_only_the_parent_finds_the_children_also_after_a_restart(generations: int, tmp_path: Path) -> None:
    """The parent is parked and the child waits for a worker.

    Only a worker with the parent's code can find the child's code.
    """

    @agent(version="1")
    async def grandparent(run: Run) -> list[int]:
        return await parent_of_two()

    top = parent_of_two if generations == 1 else grandparent

    async def main() -> Any:
        async with perdure(tmp_path / "db", [top]) as app:
            await app.start(top, id="p")
            for run_id in ["p", "p/1"][:generations]:
                # One run at a time, driven by this worker: the rest is left to the next worker.
                worker = await local(app)._working()
                await worker._take_up(run_id)
                await until(lambda run_id=run_id: status_of(app, run_id) == "waiting")
        async with perdure(tmp_path / "db", [top]) as app, at_work(app):
            assert set(rows_below(app, "p").values()) >= {"queued"}
            await until(lambda: status_of(app, "p") == "succeeded")
            return await app.handle("p").result()

    assert run(main()) == [4, 9]


def test_one_parent_that_cannot_be_replayed_does_not_strand_the_children_of_others(tmp_path: Path) -> None:
    changed = False

    @agent(version="1")
    async def parent(run: Run, number: int) -> str:
        if changed and number < 13:
            run.note("the code is not what it was")
        return await patient()

    parents = [f"p{number}" for number in range(10, 15)]

    async def main() -> dict[str, str]:
        nonlocal changed
        async with perdure(tmp_path / "db", [parent]) as app:
            for number, run_id in enumerate(parents, 10):
                await app.start(parent, number, id=run_id)
                await app.engine.drive(run_id, wait=False)
                await app.signal(f"{run_id}/1", "go", "on")
        changed = True
        async with perdure(tmp_path / "db", [parent]) as app, at_work(app):
            await until(lambda: all(status_of(app, run_id) in ("succeeded", "needs_attention") for run_id in parents))
            return {run_id: status_of(app, run_id) for run_id in parents}

    stopped = dict.fromkeys(parents[:3], "needs_attention")  # their children have ended, and that woke them
    assert run(main()) == {**stopped, **dict.fromkeys(parents[3:], "succeeded")}


@pytest.mark.parametrize("count", [1, 40])
def test_parents_of_no_use_are_asked_a_few_at_once_and_then_one_at_a_time(count: int, tmp_path: Path) -> None:
    changed = False

    @agent(version="1")
    async def parent(run: Run) -> str:
        if changed:
            run.note("the code is not what it was")
        return await patient()

    async def begin() -> None:
        async with perdure(tmp_path / "db", [parent]) as app:
            for number in range(count):
                await app.start(parent, id=f"p{number}")
                await app.engine.drive(f"p{number}", wait=False)
                await app.signal(f"p{number}/1", "go", "on")

    run(begin())
    changed = True
    asked: list[list[str]] = []
    with closing(open_store(f"sqlite:///{tmp_path / 'db'}")) as store:
        kin = ChildAgents(store, {Served("parent", "1"): parent}, 1000)
        now = ManualClock().now()
        for _ in range(20):
            asked.append(kin.parents_to_ask(now))
            assert all(kin.agents_of(run_id) == [] for run_id in asked[-1])
        assert sum(map(len, asked)) == min(count, 10)
        assert len(kin.parents_to_ask(now + 60_000_000)) == (1 if count > 10 else 0)


def test_a_parent_that_cannot_be_read_now_is_asked_again_later(tmp_path: Path) -> None:
    @agent(version="1")
    async def parent(run: Run) -> str:
        return await patient()

    async def begin() -> None:
        async with perdure(tmp_path / "db", [parent]) as app:
            await app.start(parent, id="p")
            await app.engine.drive("p", wait=False)
            await app.signal("p/1", "go", "on")

    run(begin())
    with closing(open_store(f"sqlite:///{tmp_path / 'db'}")) as store:
        whole, broken = store.read, True

        def read(run_id: str, after: int = 0, limit: int | None = None) -> list[Event]:
            if broken:
                raise StoreUnavailable("the disk is busy")
            return whole(run_id, after, limit)

        store.read = read  # type: ignore[method-assign]
        kin = ChildAgents(store, {Served("parent", "1"): parent}, 1000)
        now = ManualClock().now()
        assert kin.parents_to_ask(now) == ["p"]
        assert kin.agents_of("p") == []
        assert kin.parents_to_ask(now) == []
        broken = False
        assert kin.parents_to_ask(now + 10_000_000) == ["p"]
        assert kin.agents_of("p") == [patient]
        assert kin.parents_to_ask(now + 20_000_000) == [], "what it leads to is known"


def test_children_that_another_worker_has_left_are_found_by_one_that_is_at_work_already(tmp_path: Path) -> None:
    async def main() -> Any:
        async with perdure(tmp_path / "db", [parent_of_two]) as second, at_work(second):
            async with perdure(tmp_path / "db", [parent_of_two]) as first:
                await first.start(parent_of_two, id="p", not_before=timedelta(hours=1))  # or the second one would take it
                await (await local(first)._working())._take_up("p")
                await until(lambda: status_of(first, "p") == "waiting")
            await until(lambda: status_of(second, "p") == "succeeded")
            return await second.handle("p").result()

    assert run(main()) == [4, 9]


def test_driving_a_run_by_name_after_a_restart_drives_everything_below_it(tmp_path: Path) -> None:
    @agent(version="1")
    async def grandparent(run: Run) -> list[int]:
        return await parent_of_two()

    async def main() -> Any:
        async with perdure(tmp_path / "db", [grandparent]) as app:
            await app.start(grandparent, id="p")
            for run_id in ("p", "p/1"):
                await (await local(app)._working())._take_up(run_id)
                await until(lambda run_id=run_id: status_of(app, run_id) == "waiting")
        async with perdure(tmp_path / "db", [grandparent]) as app:
            return await app.run(grandparent, id="p")

    assert run(main()) == [4, 9]


def test_a_child_that_has_begun_waits_for_a_worker_that_has_its_version(tmp_path: Path) -> None:
    def kid(version: str) -> Agent[Any, Any]:
        async def kid(run: Run) -> str:
            await run.receive("go")
            return f"kid {version}"

        return Agent(kid, version=version)

    def parent(child: Agent[Any, Any]) -> Agent[Any, Any]:
        async def parent(run: Run) -> str:
            return str(await child())

        return Agent(parent, version="1")

    old, new = kid("1"), kid("2")

    async def main() -> Any:
        async with perdure(tmp_path / "db", [parent(old)]) as app:
            await app.start("parent", id="p")
            worker = await local(app)._working()
            await worker._take_up("p")
            await until(lambda: status_of(app, "p") == "waiting")
            await worker._take_up("p/1")
            await until(lambda: status_of(app, "p/1") == "waiting")
            await app.signal("p/1", "go")
        async with perdure(tmp_path / "db", [parent(new)]) as app, at_work(app):
            await asyncio.sleep(0.1)
            assert status_of(app, "p/1") == "queued"
            async with perdure(tmp_path / "db", [old]) as other, at_work(other):
                await until(lambda: status_of(app, "p") == "succeeded")
            return await app.handle("p").result()

    assert run(main()) == "kid 1"


def test_a_parent_that_asks_for_another_number_of_children_than_before_has_diverged(tmp_path: Path) -> None:
    count = 3

    @agent(version="1")
    async def parent(run: Run) -> int:
        return sum(await asyncio.gather(*(square(number) for number in range(count)), run.receive("go")))

    async def main() -> None:
        nonlocal count
        async with perdure(tmp_path / "db", [parent]) as app:
            await app.start(parent, id="p")
            await app.engine.drive("p")
        for other, words in ((2, "the code does not ask for it"), (4, "the code also asks for child 4: square")):
            count = other
            async with perdure(tmp_path / "db", [parent]) as app:
                row = await app.engine.drive("p")
                assert (row.status, row.attention) == ("needs_attention", "diverged")
                assert words in str(row.error)
                await app.unpause("p")
        count = 3
        async with perdure(tmp_path / "db", [parent]) as app:
            await app.signal("p", "go", 1)
            assert await app.handle("p").result() == 6

    run(main())


def test_a_run_that_has_taken_a_child_s_id_stops_the_parent_with_a_reason_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """No user can choose such an id; a restored or hand-made database can contain one."""

    @agent(version="1")
    async def parent(run: Run) -> int:
        return await square(2)

    async def main() -> None:
        async with perdure(tmp_path / "db", [parent]) as app:
            encoded = square.bind((5,), {})
            created = RunCreated("p/1", "square", "1", "default", codec.pack(encoded, 65536)[0])
            app.store.create_run(NewRun("p/1", created, app.clock.new_id(), app.clock.now(), codec.digest(encoded)))
            await app.start(parent, id="p")
            async with at_work(app):
                await until(lambda: (status_of(app, "p"), status_of(app, "p/1")) == ("needs_attention", "succeeded"))
            row = await app.handle("p").row()
            assert "there is another run with that id" in str(row.error)
            assert await app.handle("p/1").result() == 25

    run(main())


def test_two_apps_on_one_file_share_the_children(tmp_path: Path) -> None:
    """A free app takes the next child; each child is driven once."""
    performed: list[tuple[int, int]] = []

    @tool(effect="once")
    async def work(number: int, where: int) -> int:
        performed.append((number, where))
        await asyncio.sleep(0.002)
        return number

    @agent(version="1")
    async def leaf(run: Run, number: int) -> int:
        return int(await work(number, 0))

    @agent(version="1")
    async def parent(run: Run) -> int:
        return sum(await asyncio.gather(*(leaf(number) for number in range(40))))

    settings = Settings(poll_s=0.002, park_after_s=0, flush_s=0.005, concurrency=4)

    async def main() -> Any:
        async with (
            perdure(tmp_path / "db", [parent], settings=settings) as one,
            perdure(tmp_path / "db", [parent, leaf], settings=settings) as two,
            at_work(one),
            at_work(two),
        ):
            await one.start(parent, id="p")
            await until(lambda: status_of(one, "p") == "succeeded")
            holders = set()
            for number in range(1, 41):
                holders |= {event.body.worker for event in await one.handle(f"p/{number}").events() if event.type == "run_claimed"}  # type: ignore[union-attr]
            assert len(holders) == 2
            return await one.handle("p").result()

    assert run(main()) == sum(range(40))
    assert sorted(number for number, _ in performed) == list(range(40))


def test_an_adopted_parent_goes_on_with_the_results_of_its_old_children(tmp_path: Path) -> None:
    def parent(version: str) -> Agent[Any, Any]:
        async def parent(run: Run) -> str:
            first = await square(3)
            await run.receive("go")
            return f"{first} in {version}"

        return Agent(parent, version=version)

    async def main() -> Any:
        async with perdure(tmp_path / "db", [parent("1")]) as app:
            await app.start("parent", id="p")
            await app.engine.drive("p")
        async with perdure(tmp_path / "db", [parent("2")]) as app:
            await app.adopt("p", by="ann")
            await app.signal("p", "go")
            assert any(isinstance(event.body, RunAdopted) for event in await app.handle("p").events())
            return await app.handle("p").result()

    assert run(main()) == "9 in 2"


def test_the_settings_of_these_tests_park_every_wait() -> None:
    assert SETTINGS.park_after_s == 0  # otherwise the length of a wait would decide whether the run is held


def test_a_child_that_was_given_up_is_told_while_its_parent_makes_calls_that_answer_at_once(tmp_path: Path) -> None:
    told: list[bool] = []

    @tool(effect="idempotent")
    async def rest() -> None:
        await asyncio.sleep(0.01)

    @agent(version="1", name="endless")
    async def endless(run: Run) -> None:
        while True:
            await rest()

    @tool(effect="idempotent")
    async def child_is_cancelled(n: int) -> bool:
        row = local(apps[0]).store.get("r/1")
        told.append(row is not None and row.status in ("cancelling", "cancelled"))
        return told[-1]

    @agent(version="1", name="parent")
    async def parent(run: Run) -> bool:
        child = asyncio.create_task(endless())
        await asyncio.sleep(0.05)
        child.cancel()
        for n in range(2000):
            if await child_is_cancelled(n):
                return True
        return False

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/db", [parent, endless], settings=Settings(poll_s=0.02)) as app:
            apps.append(app)
            handle = await app.start(parent, id="r")
            assert await handle.result() is True

    apps: list[Perdure] = []
    run(main())
    assert told[-1] is True


# -- a child whose worker was killed --------------------------------------------------------------------------------------
KILLED = """
import asyncio, os, signal, sys
from perdure import Perdure, Run, Settings, agent, tool

@tool(effect="idempotent")
async def put() -> str:
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"

@agent(version="1")
async def child(run: Run) -> str:
    return await put()

@agent(version="1")
async def parent(run: Run) -> str:
    return await child()

async def main() -> None:
    async with Perdure(sys.argv[1], [parent, child], settings=Settings(park_after_s=0, lease_s=2)) as app:
        print(await asyncio.wait_for(app.run(parent, id="r"), 60))

asyncio.run(main())
"""


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_a_caller_that_waits_for_a_parked_run_takes_over_its_child_whose_worker_was_killed(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = cleared(request.getfixturevalue("postgres")) if store == "postgres" else f"sqlite:///{tmp_path / 'db'}"
    dies = python(KILLED, url, "die")
    dies.communicate()
    assert dies.returncode == -signal.SIGKILL
    assert output(python(KILLED, url, "live")) == "done"
