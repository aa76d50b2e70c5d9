"""Looking into an agent at a moment of its recorded history: with real runs, and the code that made them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest

from perdure import (
    Agent,
    Approval,
    Diverged,
    Inspection,
    InvalidInput,
    NotFound,
    Perdure,
    Plan,
    ReAct,
    Run,
    Settings,
    Step,
    UnknownAgent,
    WrongVersion,
    agent,
    ref,
    tool,
)
from perdure.inspect.inside import MAX_FRAMES, Awaited
from perdure.models import Answer, Scripted, ToolUse
from perdure.sync import Perdure as BlockingPerdure

EFFECTS: list[str] = []


@tool(effect="read")
async def lookup(order: str) -> dict[str, Any]:
    EFFECTS.append(f"lookup {order}")
    return {"order": order, "cents": 500}


@tool(effect="once", approval=Approval(by="ann"))
async def refund(order: str, cents: int) -> str:
    EFFECTS.append(f"refund {order}")
    return f"r-{order}"


@tool(effect="once")
async def charge(order: str) -> str:
    EFFECTS.append(f"charge {order}")
    raise PermissionError("not for you")


@agent(version="1")
async def support(run: Run, order: str) -> str:
    details = await lookup(order)
    cents = details["cents"] - 100
    try:
        return await refund(order, cents)
    finally:
        await lookup(f"after {order}")


def parked(path: Path | str, code: Agent[Any, Any], *args: Any, at: int | None = None, all_frames: bool = False) -> Inspection:
    """Drive a run of this agent until it waits or ends, and look into it."""

    async def look(app: Perdure) -> Inspection:
        handle = await app.start(code.input(*args), id="r")
        await app.drive("r", wait=False)
        return await handle.inspect(at, all_frames=all_frames)

    found: Inspection = in_app(path, look, code)
    return found


def in_app(path: Path | str, work: Callable[[Perdure], Coroutine[Any, Any, Any]], *agents: Agent[Any, Any]) -> Any:
    async def main() -> Any:
        url = path if isinstance(path, str) else f"sqlite:///{path / 'inside.db'}"
        async with Perdure(url, agents, settings=Settings(inline_bytes=200)) as app:
            return await work(app)

    return asyncio.run(main())


def variables(frame: Any) -> dict[str, str]:
    return {one.name: one.value for one in frame.variables}


def awaited(found: Inspection, task: str) -> Awaited:
    [one] = [one for one in found.tasks if one.name == task]
    assert one.awaits is not None
    return one.awaits


# --- a moment of history --------------------------------------------------------------------------------------------------


def test_a_parked_run_shows_the_line_where_it_waits_its_variables_and_the_call(tmp_path: Path) -> None:
    found = parked(tmp_path, support, "o-7")
    [task] = found.tasks
    assert (task.name, task.state, found.agent, found.version, found.woken_type) == (
        "agent",
        "waiting",
        "support",
        "1",
        "tool_call_completed",
    )
    [frame] = task.frames
    assert (frame.file, frame.function, frame.internal) == (__file__, "support", False)
    assert frame.source[frame.line - frame.first_line] == "        return await refund(order, cents)"
    assert variables(frame) == {"run": "<Run r>", "order": "'o-7'", "details": "{'cents': 500, 'order': 'o-7'}", "cents": "400"}
    assert task.awaits is not None
    assert (task.awaits.kind, task.awaits.call, task.awaits.tool) == ("call", 2, "refund")
    assert task.awaits.approval is not None
    assert task.awaits.words == f"call 2 refund(cents=400, order='o-7'), which waits for {task.awaits.approval}"


def test_an_earlier_event_shows_the_agent_as_it_stood_then(tmp_path: Path) -> None:
    found = parked(tmp_path, support, "o-7", at=2)
    [frame] = found.tasks[0].frames
    assert (found.at, found.woken_by, found.woken_type) == (2, 2, "run_claimed")
    assert variables(frame) == {"run": "<Run r>", "order": "'o-7'"}
    assert awaited(found, "agent").words == "call 1 lookup(order='o-7')"  # its intent is event 3 of the same commit


def test_every_event_is_a_moment_and_what_wakes_nothing_changes_nothing(tmp_path: Path) -> None:
    async def look(app: Perdure) -> None:
        handle = await app.start(support, "o-7", id="r")
        await app.drive("r", wait=False)
        await app.approve((await app.approvals())[0].approval, by="ann")
        assert await handle.result() == "r-o-7"
        events = await handle.events()
        moments = [await handle.inspect(seq) for seq in range(2, len(events) + 1)]
        # The second claim wakes nothing: the agent goes on where it was.
        wakes = [2, *(event.seq for event in events if event.type in ("tool_call_completed", "approval_decided"))]
        assert [one.woken_by for one in moments] == [max(seq for seq in wakes if seq <= one.at) for one in moments]
        assert [one.tasks[0].state for one in moments[-3:]] == ["waiting", "returned", "returned"]
        assert moments[-1].tasks[0].returned == "'r-o-7'"

    in_app(tmp_path, look, support)


def test_a_failed_run_shows_the_frames_of_its_exception(tmp_path: Path) -> None:
    @agent(version="1")
    async def shares(run: Run, order: str) -> float:
        details = await lookup(order)

        def share(cents: int, parts: int) -> float:
            return cents / parts

        try:
            return dict[str, float]()[order]
        except KeyError:
            return share(details["cents"], 0)

    [task] = parked(tmp_path, shares, "o-1").tasks
    assert task.raised is not None
    assert (task.state, task.raised.type, task.raised.message) == ("raised", "ZeroDivisionError", "division by zero")
    assert [frame.function.rpartition(".")[2] for frame in task.raised.frames] == ["shares", "share"]
    inner = task.raised.frames[-1]
    assert inner.source[inner.line - inner.first_line].strip() == "return cents / parts"
    assert variables(inner) == {"cents": "500", "parts": "0"}
    assert task.raised.cause is not None
    assert task.raised.cause.type == "KeyError"


def test_a_failed_task_group_shows_each_of_its_exceptions(tmp_path: Path) -> None:
    @agent(version="1")
    async def both(run: Run) -> None:
        async def buy(order: str) -> None:
            await charge(order)

        async with asyncio.TaskGroup() as group:
            group.create_task(buy("o-1"))

    raised = parked(tmp_path, both).tasks[0].raised
    assert raised is not None
    [member] = raised.members
    assert (raised.type, member.type) == ("ExceptionGroup", "ToolFailed")
    assert [frame.function.rpartition(".")[2] for frame in member.frames] == ["buy"]
    assert variables(member.frames[0]) == {"order": "'o-1'"}


def test_a_cancelled_run_shows_where_the_cancel_came(tmp_path: Path) -> None:
    @agent(version="1")
    async def listens(run: Run) -> None:
        await run.receive("chat")

    async def look(app: Perdure) -> Inspection:
        handle = await app.start(listens, id="r")
        await app.drive("r", wait=False)
        await app.cancel("r")
        await app.drive("r")
        return await handle.inspect()

    [task] = in_app(tmp_path, look, listens).tasks
    assert task.state == "cancelled"
    assert [frame.function.rpartition(".")[2] for frame in task.raised.frames] == ["listens"]


def test_a_run_that_was_ended_by_force_shows_where_it_waited(tmp_path: Path) -> None:
    async def look(app: Perdure) -> Inspection:
        handle = await app.start(support, "o-7", id="r")
        await app.drive("r", wait=False)
        await app.cancel("r", force=True)
        return await handle.inspect()

    assert awaited(in_app(tmp_path, look, support), "agent").call == 2


def test_a_run_that_was_reopened_shows_both_what_it_was_and_what_it_is(tmp_path: Path) -> None:
    @agent(name="sums", version="1")
    async def sums(run: Run) -> int:
        found = await lookup("o-1")
        return int(found["cents"] // 0)

    @agent(name="sums", version="2")
    async def sums_again(run: Run) -> int:
        found = await lookup("o-1")
        await run.receive("go")
        return int(found["cents"])

    failed = parked(tmp_path, sums)

    async def look(app: Perdure) -> tuple[Inspection, Inspection]:
        await app.retry("r", by="ann")
        await app.drive("r", wait=False)
        handle = app.handle("r")
        return await handle.inspect(failed.at), await handle.inspect()

    before, now = in_app(tmp_path, look, sums, sums_again)
    assert (before.version, before.tasks) == ("1", failed.tasks)
    assert (now.version, awaited(now, "agent").words) == ("2", "a signal on 'go'")
    assert now.at > before.at
    with pytest.raises(WrongVersion, match="run r is a run of sums@1, and this code is sums@2"):
        in_app(tmp_path, lambda app: app.handle("r").inspect(failed.at), sums_again)


# --- tasks, and what they wait for
# -------------------------------------------------------------------------------------


async def numbers(stop: int) -> AsyncIterator[int]:
    for number in range(stop):
        await asyncio.sleep(1000 + number)
        yield number


class Wall:
    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def pass_it(self) -> None:
        await self.gate.wait()


@agent(version="1")
async def crowd(run: Run) -> None:
    lock, queue, full = asyncio.Lock(), asyncio.Queue[int](), asyncio.Queue[int](1)
    full.put_nowait(1)

    async def iterates() -> None:
        async for number in numbers(3):
            run.note(str(number))

    async def takes_the_next() -> None:
        await anext(numbers(2), None)

    async def holds() -> None:
        async with lock:
            await run.receive("chat")

    async def timed() -> None:
        async with asyncio.timeout(60):
            await lock.acquire()

    async def gathers() -> None:
        await asyncio.gather(lookup("g"), refund("o-1", 5), asyncio.sleep(9))

    async def waits() -> None:
        await asyncio.wait([asyncio.create_task(run.receive("w"), name="w")])

    async def waits_for() -> None:
        await asyncio.wait_for(run.receive("f"), 50)

    async def completes() -> None:
        for one in asyncio.as_completed([run.receive("c")]):
            await one

    async def shields() -> None:
        await asyncio.shield(asyncio.create_task(run.receive("s"), name="inner"))

    async def asks() -> None:
        await run.request_approval("publish", {"text": "hi"}, by="bob")

    async def with_a_child() -> None:
        await listens_below("x")

    async def bare() -> None:
        await asyncio.get_running_loop().create_future()

    async with asyncio.TaskGroup() as group:
        for work in (iterates, takes_the_next, holds, timed, gathers, waits, waits_for, completes, shields, asks, with_a_child, bare):
            group.create_task(work(), name=work.__name__)
        group.create_task(queue.get(), name="gets")
        group.create_task(full.put(2), name="puts")
        group.create_task(full.join(), name="joins")
        group.create_task(Wall().pass_it(), name="gated")


@agent(version="1")
async def listens_below(run: Run, word: str) -> str:
    await run.receive(word)
    return word


def test_every_task_says_what_it_waits_for(tmp_path: Path) -> None:
    async def look(app: Perdure) -> Inspection:
        handle = await app.start(crowd, id="r")
        await app.drive("r", wait=False)
        return await handle.inspect()

    found = in_app(tmp_path, look, crowd, listens_below)
    words = {task.name: task.awaits.words for task in found.tasks if task.awaits is not None}
    kinds = {task.name: task.awaits.kind for task in found.tasks if task.awaits is not None}
    assert words["agent"].startswith("16 tasks of asyncio.TaskGroup: iterates, takes_the_next, holds, ")
    assert words["iterates"].startswith("timer 1, due at 20")
    assert kinds["takes_the_next"] == "timer"
    assert words["holds"] == "a signal on 'chat'"
    assert words["timed"] == "the Lock lock"
    assert "2 of 3 tasks of asyncio.gather: Task-" in words["gathers"]
    assert words["waits"] == "1 task of asyncio.wait: w"
    assert words["completes"] == "the next of the tasks given to asyncio.as_completed"
    assert words["shields"] == "task inner (shielded)"
    assert words["asks"].startswith("approval ")
    assert awaited(found, "asks").approval is not None
    assert "publish(text='hi')" in words["asks"]
    assert kinds["with_a_child"] == "child"
    assert awaited(found, "with_a_child").run_id == f"r/{awaited(found, 'with_a_child').call}"
    assert words["gets"] == "an item of the Queue, which is empty"
    assert words["puts"] == "room in the Queue, which is full"
    assert words["joins"] == "the end of the work in the Queue"
    assert words["gated"] == "the Event self.gate"
    assert kinds["bare"] == "future"
    assert {name for name, kind in kinds.items() if kind == "signal"} >= {"holds", "w", "inner"}
    [refunding] = [task for task in found.tasks if task.awaits is not None and task.awaits.tool == "refund"]
    assert refunding.frames == ()
    [timed] = [task for task in found.tasks if task.name == "timed"]
    assert len(timed.time_outs) == 1


def test_the_stack_goes_through_async_generators(tmp_path: Path) -> None:
    @agent(version="1")
    async def iterates(run: Run) -> None:
        async def inside() -> None:
            async for number in numbers(3):
                run.note(str(number))

        await inside()

    [task] = parked(tmp_path, iterates).tasks
    assert [frame.function.rpartition(".")[2] for frame in task.frames] == ["iterates", "inside", "numbers"]
    assert variables(task.frames[-1]) == {"stop": "3", "number": "0"}


def test_a_queue_and_its_wait_have_a_name_where_the_code_has_one(tmp_path: Path) -> None:
    @agent(version="1")
    async def gets(run: Run) -> None:
        jobs: asyncio.Queue[int] = asyncio.Queue()
        await jobs.get()

    assert awaited(parked(tmp_path, gets), "agent").words == "an item of the Queue jobs, which is empty"


def test_frames_of_perdure_and_asyncio_are_left_out_unless_all_are_wanted(tmp_path: Path) -> None:
    found = parked(tmp_path, support, "o-7", all_frames=True)
    functions = [(frame.function, frame.internal) for frame in found.tasks[0].frames]
    assert functions[0] == ("Machine._begin", True)
    assert ("support", False) in functions
    assert functions[-1] == ("Machine._result_of", True)


def test_a_very_deep_stack_keeps_its_ends_and_says_what_is_left_out(tmp_path: Path) -> None:
    @agent(version="1")
    async def digs(run: Run, depth: int) -> None:
        async def dig(left: int) -> None:
            await (dig(left - 1) if left else run.receive("go"))

        await dig(depth)

    [task] = parked(tmp_path, digs, 100).tasks
    left = [variables(frame).get("left") for frame in task.frames]
    assert (len(task.frames), left[1], left[-1]) == (MAX_FRAMES, "100", "0")
    assert [frame.left_out for frame in task.frames if frame.left_out] == [102 - MAX_FRAMES]


def test_a_secret_in_the_messages_of_a_conversation_is_redacted_everywhere(tmp_path: Path) -> None:
    uses = (ToolUse("u1", "sign_in", {"password": "canary-4711-value"}), ToolUse("u2", "lookup", {"order": "canary-4711-value"}))
    talker = ReAct("talker", model=Scripted([Answer("", uses=uses), Answer("done")]), tools=[lookup, sign_in], version="1")
    found = parked(tmp_path, talker, "hello", at=4)
    assert "canary" not in repr(found)
    assert "[redacted]" in repr(found.tasks[0].facts)


@tool(effect="once", approval=Approval(by="ann"))
async def sign_in(password: str) -> str:
    return password


def test_a_call_that_no_task_awaits_and_a_signal_that_is_not_received_are_told(tmp_path: Path) -> None:
    @agent(version="1")
    async def distracted(run: Run) -> None:
        later = refund("o-1", 5)
        await run.receive("go")
        await later

    async def look(app: Perdure) -> Inspection:
        handle = await app.start(distracted, id="r")
        await app.signal("r", "other", 1)
        await app.drive("r", wait=False)
        return await handle.inspect()

    found = in_app(tmp_path, look, distracted)
    assert [one.tool for one in found.not_awaited] == ["refund"]
    assert found.unread == {"other": 1}


# --- agents that are built from parts -----------------------------------------------------------------------------------------


def test_a_conversation_shows_its_turn_its_last_message_and_the_open_calls(tmp_path: Path) -> None:
    uses = (ToolUse("u2", "refund", {"order": "o-1", "cents": 5}),)
    model = Scripted([Answer("", uses=(ToolUse("u1", "lookup", {"order": "o-1"}),)), Answer("I pay", uses=uses), Answer("done")])
    talker = ReAct("talker", model=model, tools=[lookup, refund], version="1")
    found = parked(tmp_path, talker, "hello")
    agent_task, call = found.tasks
    facts = {one.name: one.value for one in agent_task.facts}
    assert (facts["turn"], facts["messages"], agent_task.frames) == ("'2 of 50'", "4", ())
    assert facts["last_message"].startswith("Assistant(text='I pay', uses=(ToolUse(id='u2', name='refund'")
    assert call.awaits is not None
    assert (call.awaits.tool, call.awaits.call) == ("refund", 4)
    early = in_app(tmp_path, lambda app: app.handle("r").inspect(2), talker)
    assert (early.tasks[0].awaits.kind, early.tasks[0].awaits.words) == ("model", "call 1 of model scripted")


def test_a_plan_shows_its_steps_and_what_each_of_them_waits_for(tmp_path: Path) -> None:
    steps = [Step("look", lookup, {"order": "o-1"}), Step("pay", refund, {"order": "o-1", "cents": ref("look", "cents")})]
    trip = Plan("trip", [*steps, Step("tell", lookup, {"order": "o-9"}, after=["pay"])])
    main, pay, tell = parked(tmp_path, trip).tasks
    assert [(one.name, one.value) for one in main.facts] == [("steps", "{'look': 'done', 'pay': 'open', 'tell': 'open'}")]
    assert ("arguments", "{'cents': 500, 'order': 'o-1'}") in [(one.name, one.value) for one in pay.facts]
    assert pay.awaits is not None
    assert pay.awaits.tool == "refund"
    assert ("waits_for_step", "'pay'") in [(one.name, one.value) for one in tell.facts]


# --- nothing happens ------------------------------------------------------------------------------------------------------


def rows(path: Path) -> dict[str, list[Any]]:
    with contextlib.closing(apsw.Connection(str(path / "inside.db"))) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name LIKE 'perdure%'")]
        return {table: sorted(map(repr, connection.execute(f"SELECT * FROM {table}"))) for table in tables}


@agent(version="1")
async def cleans_up(run: Run, order: str, file: str) -> None:
    try:
        await refund(order, 1)
    finally:
        EFFECTS.append("finally")
        charge(order).close()
        await charge(order)


def test_a_look_performs_nothing_and_writes_nothing_not_even_in_a_finally_block(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"

    async def start(app: Perdure) -> None:
        await app.start(cleans_up, "o-1", str(ledger), id="r")
        await app.drive("r", wait=False)

    in_app(tmp_path, start, cleans_up)
    before, EFFECTS[:] = rows(tmp_path), []

    async def look(app: Perdure) -> int:
        handle = app.handle("r")
        return len([await handle.inspect(seq) for seq in range(2, (await handle.info()).seq + 1)])

    assert in_app(tmp_path, look, cleans_up) > 3
    gc.collect()
    assert EFFECTS.count("finally") == len(EFFECTS)  # the block ran inside of the machine, and its calls were dropped
    after = rows(tmp_path)
    moved = [table for table in before if before[table] != after[table]]
    assert moved == [], moved


def test_an_agent_that_does_io_when_it_is_looked_at_is_refused(tmp_path: Path) -> None:
    written = tmp_path / "written"
    OUTSIDE.clear()

    async def look(app: Perdure) -> Inspection:
        handle = await app.start(opens, str(written), id="r")
        await app.drive("r", wait=False)
        OUTSIDE.append("now")
        return await handle.inspect()

    raised = in_app(tmp_path, look, opens).tasks[0].raised
    assert (raised.type, written.exists()) == ("NotAllowedInAgent", False)


OUTSIDE: list[str] = []


@agent(version="1")
async def opens(run: Run, file: str) -> None:
    if OUTSIDE:
        open(file, "w").close()
    await run.receive("go")


def test_a_look_warns_of_nothing_and_leaves_no_task(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    @agent(version="1")
    async def untidy(run: Run) -> None:
        async def never() -> None:
            raise AssertionError

        waiting = [lookup("a"), run.receive("x"), never()]
        kept = asyncio.create_task(run.receive("y"))
        with contextlib.suppress(ZeroDivisionError):
            await run.receive("z")
        del kept
        await asyncio.gather(*waiting)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the machine of the parked run is closed with its app
        parked(tmp_path, untidy)
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = in_app(tmp_path, lambda app: app.handle("r").inspect(), untidy)
        gc.collect()
    assert found.tasks[0].state == "waiting"
    assert capfd.readouterr().err == ""


def test_a_look_changes_nothing_for_the_run(tmp_path: Path) -> None:
    async def look(app: Perdure) -> str:
        handle = await app.start(support, "o-7", id="r")
        await app.drive("r", wait=False)
        await handle.inspect()
        await app.approve((await app.approvals())[0].approval, by="ann")
        result: str = await handle.result()
        return result

    assert in_app(tmp_path, look, support) == "r-o-7"


def test_ten_thousand_events_take_less_than_a_second_of_cpu(tmp_path: Path) -> None:
    @agent(version="1")
    async def many(run: Run, calls: int) -> None:
        for number in range(calls):
            await lookup(str(number))
        await run.receive("go")

    async def look(app: Perdure) -> tuple[int, float]:
        handle = await app.start(many, 5_000, id="r")
        await app.drive("r", wait=False)
        began = time.process_time()
        found = await handle.inspect()
        return found.at, time.process_time() - began

    events, seconds = in_app(tmp_path, look, many)
    assert events > 10_000
    assert seconds < 1.0


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "error", "words"),
    [
        (99, NotFound, "run r has the events 1 to 7; there is no event 99"),
        (0, NotFound, "run r has the events 1 to 7; there is no event 0"),
        (1, NotFound, "run r: its agent began at event 2; at event 1 there is nothing to look at"),
        ("2", InvalidInput, "the seq of an event, a whole number"),
        (True, InvalidInput, "the seq of an event, a whole number"),
    ],
)
def test_a_moment_that_does_not_exist_is_refused(tmp_path: Path, at: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        parked(tmp_path, support, "o-7", at=at)


def test_a_run_that_no_worker_has_claimed_has_nothing_to_look_at(tmp_path: Path) -> None:
    async def look(app: Perdure) -> None:
        await (await app.start(support, "o-7", id="r")).inspect()

    with pytest.raises(NotFound, match="run r has not begun"):
        in_app(tmp_path, look, support)


@agent(name="support", version="1")
async def other_support(run: Run, order: str) -> str:
    details = await lookup(order)
    await lookup(details["order"])
    return ""


@agent(name="support", version="2")
async def newer_support(run: Run, order: str) -> str:
    return order


def test_other_code_is_refused_and_told_where_it_parts(tmp_path: Path) -> None:
    parked(tmp_path, support, "o-7")
    with pytest.raises(WrongVersion, match="run r is a run of support@1, and this code is support@2"):
        in_app(tmp_path, lambda app: app.handle("r").inspect(), newer_support)
    with pytest.raises(UnknownAgent, match="agent 'support' is not known here"):
        in_app(tmp_path, lambda app: app.handle("r").inspect(), crowd)
    with pytest.raises(Diverged, match="at event 5 the journal has call 2: refund") as diverged:
        in_app(tmp_path, lambda app: app.handle("r").inspect(), other_support)
    assert diverged.value.hint == "up to event 3 it does the same: perdure inspect r --at 3"
    found = in_app(tmp_path, lambda app: app.handle("r").inspect(3), other_support)
    assert awaited(found, "agent").call == 1


def test_code_that_asks_for_more_than_the_journal_has_before_the_moment_is_refused_there_too(tmp_path: Path) -> None:
    @agent(name="hears", version="1")
    async def hears(run: Run) -> None:
        await run.receive("a")
        await lookup("b")
        await run.receive("c")

    @agent(name="hears", version="1")
    async def hears_more(run: Run) -> None:
        await lookup("a")
        await run.receive("a")

    async def look(app: Perdure) -> None:
        await app.start(hears, id="r")
        await app.drive("r", wait=False)
        await app.signal("r", "a")
        await app.drive("r", wait=False)

    in_app(tmp_path, look, hears)
    with pytest.raises(Diverged, match="after event 2, where the journal has nothing"):
        in_app(tmp_path, lambda app: app.handle("r").inspect(2), hears_more)


def test_another_tenant_sees_nothing(tmp_path: Path) -> None:
    parked(tmp_path, support, "o-7")
    with pytest.raises(NotFound, match="there is no run r"):
        in_app(tmp_path, lambda app: app.handle("r", tenant="acme").inspect(), support)


# --- other ways in ------------------------------------------------------------------------------------------------------------


def test_blocking_code_can_look_too(tmp_path: Path) -> None:
    parked(tmp_path, support, "o-7")
    with BlockingPerdure(f"sqlite:///{tmp_path / 'inside.db'}", [support]) as app:
        assert awaited(app.handle("r").inspect(), "agent").call == 2


def test_a_run_on_postgresql_is_looked_into_in_the_same_way(postgres_url: str) -> None:
    found = parked(postgres_url, support, "o-" + "7" * 500)
    assert awaited(found, "agent").call == 2
    assert variables(found.tasks[0].frames[0])["cents"] == "400"


def test_a_file_that_was_edited_after_it_was_loaded_shows_no_wrong_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_agent.py"
    text = (
        "from perdure import agent\n\n\n@agent(version='1')\nasync def edited(run):\n    words = 'as loaded'\n    await run.receive('go')\n"
    )
    file.write_text(text)
    module = SimpleNamespace(**vars(__import__("edited_agent")))
    [frame] = parked(tmp_path, module.edited).tasks[0].frames
    assert frame.source[frame.line - frame.first_line] == "    await run.receive('go')"
    file.write_text("# a new first line\n" + text)
    [frame] = in_app(tmp_path, lambda app: app.handle("r").inspect(), module.edited).tasks[0].frames
    assert (frame.source, variables(frame)["words"]) == ((), "'as loaded'")
    del sys.modules["edited_agent"]
