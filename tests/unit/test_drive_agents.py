"""Agents with every kind of mistake: each one stops or fails without affecting other runs, and the error says why."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, outline, perdure, run, until
from tests.unit.store_tools import raw

from perdure import Agent, Call, NeedsAttention, Outcome, Perdure, Run, RunFailed, ToolFailed, agent, tool
from perdure.core.events import RunFailed as RunFailedEvent
from perdure.store.api import RunRow


@tool(effect="read")
async def look(what: Any = None) -> Any:
    return what


async def row_of(code: Agent[Any, Any], *args: Any, clock: ManualClock | None = None) -> tuple[RunRow, list[str]]:
    async with perdure(None, [code], clock) as app:
        handle = await app.start(code, *args, id="r")
        return await app.engine.drive("r", wait=False), outline(await handle.events())


# -- exceptions of agents ---------------------------------------------------------------------------------------------
class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


class Endless(Exception):
    def __str__(self) -> str:
        return "x" * 1_000_000


RAISED: list[tuple[BaseException, str]] = [
    (ValueError("plain"), "ValueError: plain"),
    (SystemExit(3), "SystemExit: 3"),
    (Hostile(), "Hostile: <its message cannot be shown"),
    (Endless(), "Endless: xxx"),
    (ValueError("\ud800 \0"), "ValueError: \\ud800 \0"),
    (ExceptionGroup("both", [ValueError("a"), KeyError("b")]), "ExceptionGroup: both"),
    (asyncio.CancelledError("by hand"), "CancelledError: the agent cancelled itself"),
    (MemoryError(), "MemoryError: "),
    (RecursionError("deep"), "RecursionError: deep"),
    (ToolFailed("t", 9, kind="fatal", type="X", message="made up", attempts=1), "ToolFailed: tool t (call 9)"),
]


@pytest.mark.parametrize(("error", "said"), RAISED, ids=lambda value: type(value).__name__)
def test_what_an_agent_raises_is_recorded_before_and_after_its_first_wait(error: BaseException, said: str) -> None:
    @agent(version="1")
    async def raising(run: Run, wait: bool) -> None:
        if wait:
            await look()
        raise error

    for wait in (False, True):
        row, lines = run(row_of(raising, wait))
        assert row.status == "failed"
        assert (row.error or "").startswith(said), row.error
        assert len(row.error or "") <= 500
        assert lines[-1] == "run_failed"


def test_a_tool_that_raises_something_hostile_is_a_failed_call() -> None:
    @tool(effect="once")
    async def hostile() -> None:
        raise Hostile

    @agent(version="1")
    async def caller(run: Run) -> str:
        try:
            await hostile()
        except ToolFailed as failed:
            return failed.message
        return ""

    async def main() -> str:
        async with perdure(None, [caller]) as app:
            return str(await app.run(caller))

    assert run(main()) == "<its message cannot be shown: __str__ raised RuntimeError>"


def test_a_failed_run_raises_where_its_result_is_wanted() -> None:
    @agent(version="1")
    async def failing(run: Run) -> None:
        raise ValueError("no luck")

    async def main() -> None:
        async with perdure(None, [failing]) as app:
            await app.run(failing, id="r")

    with pytest.raises(RunFailed, match="run r: ValueError: no luck") as failed:
        run(main())
    assert failed.value.run_id == "r"


def test_keyboard_interrupt_in_an_agent_parks_that_run_and_neither_fails_it_nor_ends_the_worker(tmp_path: Path) -> None:
    """Ctrl-C that hits in the middle of an agent, or an agent that raises it: the run is not recorded as failed, and can go on."""
    interrupts = [True]

    @agent(version="1")
    async def interrupted(run: Run) -> str:
        await look()
        if interrupts.pop():
            raise KeyboardInterrupt
        return "done"

    async def main() -> Any:
        async with perdure(tmp_path / "db", [interrupted]) as app:
            await app.start(interrupted, id="r")
            row = await app.engine.drive("r")
            assert (row.status, "KeyboardInterrupt" in str(row.error)) == ("needs_attention", True)
            interrupts.append(False)
            await app.unpause("r")
            return await app.handle("r").result()

    assert run(main()) == "done"


# -- waits of agents --------------------------------------------------------------------------------------------------
def test_an_agent_that_never_rests_is_parked_as_stuck_and_others_go_on() -> None:
    @agent(version="1")
    async def spinning(run: Run) -> None:
        while True:
            await asyncio.sleep(0)

    @agent(version="1")
    async def fine(run: Run) -> str:
        return str(await look("fine"))

    async def main() -> tuple[RunRow, Any]:
        settings = SETTINGS.__class__(poll_s=0.002, max_steps=5000)
        async with perdure(None, [spinning, fine], settings=settings) as app:
            await app.start(spinning, id="bad")
            good = await app.start(fine, id="good")
            working = asyncio.create_task(app.work())
            result = await good.result()
            while (row := await app.handle("bad").row()).status != "needs_attention":
                await asyncio.sleep(0.002)
            app.drain()
            await working
            return row, result

    row, result = run(main())
    assert result == "fine"
    assert "5,000 steps without waiting" in (row.error or "")


@pytest.mark.parametrize("after_a_call", [True, False])
def test_an_agent_that_waits_for_what_nothing_can_bring_about_is_stuck(after_a_call: bool) -> None:
    @agent(version="1")
    async def waiting(run: Run) -> None:
        if after_a_call:
            await look()
        await asyncio.Event().wait()

    row, lines = run(row_of(waiting))
    assert (row.status, row.ready_at) == ("needs_attention", None)
    assert "nothing can bring about" in (row.error or "")
    assert lines[-1] == "attention_needed"


def test_a_stuck_run_can_still_be_cancelled() -> None:
    @agent(version="1")
    async def waiting(run: Run) -> None:
        await asyncio.Event().wait()

    async def main() -> str:
        async with perdure(None, [waiting]) as app:
            await app.start(waiting, id="r")
            await app.engine.drive("r")
            await app.cancel("r")
            return (await app.engine.drive("r")).status

    assert run(main()) == "cancelled"


def test_a_deadlock_between_tasks_is_stuck_too() -> None:
    @agent(version="1")
    async def deadlock(run: Run) -> None:
        locks = [asyncio.Lock(), asyncio.Lock()]

        async def take(first: int) -> None:
            async with locks[first]:
                await look(first)
                async with locks[1 - first]:
                    pass

        await asyncio.gather(take(0), take(1))

    row, _ = run(row_of(deadlock))
    assert row.status == "needs_attention"


def test_an_unawaited_call_is_performed_and_its_failure_troubles_nobody() -> None:
    performed: list[str] = []

    @tool(effect="once")
    async def act(what: str) -> None:
        performed.append(what)
        raise ValueError("nobody asked")

    @agent(version="1")
    async def careless(run: Run) -> str:
        act("never awaited").close()
        task = asyncio.create_task(act("in a task"))
        return f"done, {task.done()}"

    row, lines = run(row_of(careless))
    assert row.status == "succeeded"
    assert performed == ["never awaited", "in a task"] or lines.count("failed 2/1 cancelled") == 1
    assert "failed 1/1 error" in lines


def test_background_tasks_are_stopped_when_the_agent_is_done_and_may_clean_up() -> None:
    cleaned: list[str] = []

    @tool(effect="once")
    async def clean(what: str) -> None:
        cleaned.append(what)

    @agent(version="1")
    async def parent(run: Run) -> str:
        async def child(name: str) -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await clean(name)

        tasks = [asyncio.create_task(child(name)) for name in "ab"]
        await look()
        return f"{len(tasks)} left"

    row, lines = run(row_of(parent))
    assert row.status == "succeeded"
    assert cleaned == ["a", "b"]
    assert lines[-1] == "run_succeeded"


def test_a_timer_that_nobody_awaits_does_not_outlive_the_run() -> None:
    """Both are due at the same moment, and the first one ends the run."""

    @agent(version="1")
    async def leaves_a_timer(run: Run) -> str:
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(asyncio.sleep(5))
        await asyncio.sleep(0)
        loop.call_later(5, run.note, "left over")
        await first
        return "done"

    async def main() -> tuple[str, list[str]]:
        clock = ManualClock()
        async with perdure(None, [leaves_a_timer], clock) as app:
            handle = await app.start(leaves_a_timer)
            await app.engine.drive(handle.id, wait=False)
            clock.advance(9)
            return (await app.engine.drive(handle.id, wait=False)).status, outline(await handle.events())

    status, lines = run(main())
    assert status == "succeeded"
    assert lines[-1] == "run_succeeded"


# -- what happens to an agent that is let go of -------------------------------------------------------------------------
@pytest.mark.parametrize("park", ["sleep", "stuck", "crash"])
def test_an_agent_that_is_let_go_of_performs_nothing_on_its_way_out(tmp_path: Path, park: str) -> None:
    """Closing a coroutine runs its `finally` blocks. A refund there would be performed without a record."""
    performed: list[str] = []

    @tool(effect="once")
    async def refund(who: str) -> None:
        performed.append(who)

    @tool(effect="once")
    def sync_refund(who: str) -> None:
        performed.append(who)

    @tool(effect="once")
    async def hang() -> None:
        await asyncio.sleep(3600)

    @agent(version="1")
    async def careful(run: Run, how: str) -> None:
        async def child() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await sync_refund("child")

        helper = asyncio.create_task(child())
        try:
            if how == "sleep":
                await asyncio.sleep(3600)
            elif how == "stuck":
                await asyncio.Event().wait()
            else:
                await hang()
        except BaseException:
            await refund("except")
            raise
        finally:
            helper.cancel()
            await refund("finally")
            await asyncio.sleep(1)
            await sync_refund("after a wait")
            helper = asyncio.create_task(child())
            run.note("cleaned up")

    async def main() -> None:
        async with perdure(tmp_path / "db", [careful]) as app:
            await app.start(careful, park, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await asyncio.sleep(0.05)
            app.abort()
            await driving
            gc.collect()
            await asyncio.sleep(0.02)

    run(main())
    gc.collect()
    assert performed == []


def test_an_agent_that_refuses_to_be_closed_is_kept_and_performs_nothing() -> None:
    performed: list[int] = []

    @tool(effect="once")
    async def act() -> None:
        performed.append(1)

    @agent(version="1")
    async def undying(run: Run) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
                return
            except BaseException:
                await act()

    row, _ = run(row_of(undying))
    gc.collect()
    assert row.status == "waiting"
    assert performed == []


# -- what cannot be driven at all ---------------------------------------------------------------------------------------
def test_a_validator_that_raises_while_a_result_is_rebuilt_parks_the_run() -> None:
    class Odd(pydantic.BaseModel):
        x: int

        @pydantic.field_validator("x", mode="before")
        @classmethod
        def check(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
            if info.mode == "json":
                raise Hostile
            return value

    @tool(effect="once")
    async def odd() -> Odd:
        return Odd(x=1)

    @agent(version="1")
    async def caller(run: Run) -> None:
        await odd()

    row, lines = run(row_of(caller))
    assert (row.status, row.holder) == ("needs_attention", None)
    assert "Hostile" in (row.error or "")
    assert lines[-2:] == ["completed 1/1", "attention_needed"], "what happened is recorded all the same"


def test_a_damaged_journal_is_given_up_to_a_person_and_not_held_for_ever(tmp_path: Path) -> None:
    """If a live worker held the run without driving it, no other worker could claim it."""

    @agent(version="1")
    async def sleeper(run: Run) -> None:
        await asyncio.sleep(60)

    path = tmp_path / "db"

    async def park() -> None:
        async with perdure(path, [sleeper]) as app:
            await app.start(sleeper, id="r")
            await app.engine.drive("r", wait=False)

    async def again() -> RunRow:
        async with perdure(path, [sleeper]) as app:
            await app.engine.drive("r", wait=False)
            with pytest.raises(NeedsAttention, match="StoreCorrupt"):
                await app.handle("r").result()
            return await app.handle("r").row()

    run(park())
    with raw(path) as other:
        other.execute("DROP TRIGGER IF EXISTS perdure_events_no_delete")
        other.execute("DELETE FROM perdure_events WHERE seq = 2")
    row = run(again())
    assert (row.status, row.holder) == ("needs_attention", None)
    assert "it cannot be driven" in (row.error or "")


def test_the_reason_that_a_run_shows_is_the_one_of_its_last_rest(tmp_path: Path) -> None:
    """It needed a person about a call; then its timer woke it under another version of its code, and it diverged."""

    @tool(effect="once")
    async def lost() -> str:
        raise TimeoutError("no answer")

    def make(version: str) -> Agent[Any, Any]:
        @agent(name="changing", version="1")
        async def changing(run: Run) -> str:
            losing = asyncio.ensure_future(lost())
            await look(version)
            await asyncio.sleep(30)
            return await losing

        return changing

    clock = ManualClock()

    async def drive(version: str) -> RunRow:
        code = make(version)
        async with perdure(tmp_path / "db", [code], clock) as app:
            await app.start(code, id="r")
            return await app.engine.drive("r", wait=False)

    row = run(drive("1"))
    assert (row.waiting_for, row.error) == ("a person: call 1 (lost) in doubt", "call 1 (lost): TimeoutError: no answer")
    clock.advance(31)
    row = run(drive("2"))
    assert (row.status, row.waiting_for) == ("needs_attention", "a person: diverged")
    assert 'the code asks for call 2: look({"what":"2"})' in (row.error or "")


def test_a_run_that_goes_on_after_its_doubt_was_settled_shows_no_old_reason() -> None:
    finish, began = asyncio.Event(), list[int]()

    @tool(effect="once")
    async def lost() -> str:
        raise TimeoutError("no answer")

    @tool(effect="read")
    async def slow() -> None:
        began.append(1)
        await finish.wait()

    @agent(version="1")
    async def patient(run: Run) -> str:
        losing = asyncio.ensure_future(lost())
        await asyncio.sleep(30)
        await slow()
        found = await losing
        await asyncio.sleep(30)
        return found

    async def main() -> tuple[RunRow, RunRow]:
        clock = ManualClock()
        async with perdure(None, [patient], clock) as app:
            await app.start(patient, id="r")
            doubted = await app.engine.drive("r", wait=False)
            clock.advance(31)
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: began)
            await app.resolve("r", 1, happened="found")
            await until(lambda: (found := app.store.read("r")) and "resolved 1/1 happened by app" in outline(found))
            finish.set()
            return doubted, await driving

    doubted, row = run(main())
    assert (doubted.status, bool(doubted.error)) == ("needs_attention", True)
    assert (row.status, row.error) == ("waiting", None)


def test_a_run_whose_input_no_longer_fits_is_parked_until_the_code_is_put_right(tmp_path: Path) -> None:
    @agent(name="shop", version="1")
    async def old(run: Run, order: str) -> str:
        await asyncio.sleep(10)
        return order

    @agent(name="shop", version="1")
    async def new(run: Run, order: str, tenant: int) -> str:
        return order

    clock = ManualClock()

    async def with_code(code: Agent[Any, Any], requeue: bool) -> RunRow:
        async with perdure(tmp_path / "db", [code], clock) as app:
            if requeue:
                await app.unpause("r")
            elif await_first:
                await app.start(code, "o-1", id="r")
            return await app.engine.drive("r", wait=False)

    await_first = True
    assert run(with_code(old, False)).status == "waiting"
    await_first = False
    clock.advance(11)
    row = run(with_code(new, False))
    assert row.status == "needs_attention"
    assert "tenant" in (row.error or "")
    assert run(with_code(old, True)).status == "succeeded"


def test_two_runs_of_one_app_are_driven_at_the_same_time() -> None:
    meet = [asyncio.Event(), asyncio.Event()]

    @tool(effect="read")
    async def rendezvous(me: int) -> int:
        meet[me].set()
        await meet[1 - me].wait()
        return me

    @agent(version="1")
    async def party(run: Run, me: int) -> int:
        return int(await rendezvous(me))

    async def main() -> list[int]:
        async with perdure(None, [party]) as app:
            return list(await asyncio.gather(app.run(party, 0), app.run(party, 1)))

    assert run(main()) == [0, 1]


def test_an_agent_that_prints_and_counts_in_its_own_memory_is_rebuilt_the_same() -> None:
    """State lives in the coroutine; a parked run loses nothing of it."""

    @agent(version="1")
    async def counter(run: Run) -> list[int]:
        seen: list[int] = []
        for at in range(5):
            seen.append(at * len(seen))
            await asyncio.sleep(10)
        return seen

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(None, [counter], clock) as app:
            handle = await app.start(counter)
            while (await app.engine.drive(handle.id, wait=False)).status == "waiting":
                clock.advance(11)
            return await handle.result()

    assert run(main()) == [0, 1, 4, 9, 16]


def test_a_hook_of_a_tool_is_not_called_inside_an_agent() -> None:
    seen: list[Any] = []

    @tool(effect="once")
    async def pay(call: Call) -> None:
        raise TimeoutError

    @pay.reconcile
    async def hook(call: Call) -> Outcome:
        seen.append(type(asyncio.get_running_loop()).__name__)
        return Outcome.happened("x")

    @agent(version="1")
    async def payer(run: Run) -> Any:
        return await pay()

    row, _ = run(row_of(payer))
    assert row.status == "succeeded"
    assert seen != ["AgentLoop"]


def test_the_failure_of_a_run_keeps_where_it_happened() -> None:
    @agent(version="1")
    async def failing(run: Run) -> None:
        raise ValueError("here")

    async def main() -> RunFailedEvent:
        async with Perdure("sqlite://", [failing], settings=SETTINGS) as app:
            handle = await app.start(failing)
            await app.engine.drive(handle.id)
            body = (await handle.events())[-1].body
            assert isinstance(body, RunFailedEvent)
            return body

    failure = run(main()).failure
    assert failure.traceback is not None
    assert "test_drive_agents.py" in failure.traceback
    assert sys.getrecursionlimit() > 0


ABORTING: list[Perdure] = []
BEGUN: list[str] = []


@tool(effect="once")
async def aborts() -> None:
    BEGUN.append("aborts")
    ABORTING[0].abort()


@tool(effect="once")
async def begins_after_it() -> None:
    BEGUN.append("begins_after_it")


@agent(version="1")
async def asks_for_both(run: Run) -> None:
    await asyncio.gather(aborts(), begins_after_it())


def test_after_an_abort_in_the_first_step_of_a_tool_no_other_call_of_that_commit_begins(tmp_path: Path) -> None:
    async def main() -> list[str]:
        BEGUN.clear()
        async with Perdure(f"sqlite:///{tmp_path / 'journal.db'}", [asks_for_both]) as app:
            ABORTING[:] = [app]
            await app.start(asks_for_both, id="r")
            await asyncio.wait([asyncio.create_task(app.engine.drive("r"))], timeout=1.0)
        async with Perdure(f"sqlite:///{tmp_path / 'journal.db'}") as reader:
            return [event.type for event in await reader.handle("r").events()]

    types = run(main())
    assert BEGUN == ["aborts"]
    assert types.count("tool_call_initiated") == 2
    assert "tool_call_completed" not in types
