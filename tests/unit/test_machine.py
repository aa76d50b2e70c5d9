"""An agent as a machine: which commands follow from which completions, and when it is finished.

No store, clock or loop.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import InvalidInput, ResultNotEncodable, Run, ToolFailed, agent, tool
from perdure.core.agent_loop import DoesNotRest, Interrupted
from perdure.core.events import Failure, StatusReported, ThoughtRecorded
from perdure.core.machine import (
    Abandon,
    CallCompleted,
    CallFailed,
    CallTool,
    CancelAsked,
    Cancelled,
    Command,
    Facts,
    Failed,
    Finish,
    Machine,
    Record,
    Succeeded,
    TimerDue,
    UnknownCompletion,
    current,
)

FACTS = Facts("run-1", "acme", "user:17", "main", "7")
BROKEN = Failure(kind="fatal", type="Boom", message="it broke")


@tool(effect="read")
async def ask(what: Any = None) -> Any:
    return what


def machine_of(main: Callable[[Run], Coroutine[Any, Any, Any]], max_steps: int = 10_000) -> Machine:
    return agent(version="7")(main).machine(FACTS, b"{}", max_steps)


def words(commands: list[Command]) -> list[str]:
    """The commands in short: `call 1`, `abandon 1`, `succeeded null`."""
    said = []
    for command in commands:
        match command:
            case CallTool(number):
                said.append(f"call {number}")
            case Abandon(number):
                said.append(f"abandon {number}")
            case Record(ThoughtRecorded(text)) | Record(StatusReported(text)):
                said.append(text)
            case Finish(Succeeded(output)):
                said.append(f"succeeded {output.decode()}")
            case Finish(Failed(failure)):
                said.append(f"failed {failure.type}: {failure.message}")
            case Finish(Cancelled()):
                said.append("cancelled")
            case _:
                said.append(repr(command))
    return said


def test_a_call_has_its_number_and_is_on_its_way_before_anybody_awaits_it() -> None:
    async def main(run: Run) -> list[int]:
        second_first = [ask("a"), ask("b")]
        run.note("asked")
        return [await second_first[1], await second_first[0]]

    machine = machine_of(main)
    assert words(machine.start(1)) == ["call 1", "call 2", "asked"]
    assert words(machine.deliver(2, CallCompleted(1, b"1"))) == []
    assert words(machine.deliver(3, CallCompleted(2, b"2"))) == ["succeeded [2,1]"]


def test_a_call_that_nobody_awaits_is_still_a_call_and_the_run_waits_for_its_end() -> None:
    async def main(run: Run) -> str:
        forgotten = ask("a")
        forgotten.close()
        return "done"

    machine = machine_of(main)
    assert words(machine.start(1)) == ["call 1"]
    assert not machine.finished
    assert words(machine.deliver(2, CallFailed(1, BROKEN, 1))) == ['succeeded "done"']


def test_a_call_may_be_awaited_long_after_it_has_ended() -> None:
    async def main(run: Run) -> str:
        early = ask("early")
        await ask("late")
        return str(await early)

    machine = machine_of(main)
    assert words(machine.start(1)) == ["call 1", "call 2"]
    assert words(machine.deliver(2, CallCompleted(1, b'"x"'))) == []
    assert words(machine.deliver(3, CallCompleted(2, b"0"))) == ['succeeded "x"']


def test_a_failed_call_raises_what_was_recorded() -> None:
    async def main(run: Run) -> list[Any]:
        try:
            await ask()
        except ToolFailed as failed:
            return [type(failed).__name__, failed.tool, failed.call, failed.kind, failed.type, failed.message, failed.attempts]
        return []

    machine = machine_of(main)
    machine.start(1)
    assert words(machine.deliver(2, CallFailed(1, BROKEN, 3))) == ['succeeded ["ToolFailed","ask",1,"fatal","Boom","it broke",3]']


def test_a_result_that_could_not_be_recorded_is_its_own_failure() -> None:
    async def main(run: Run) -> None:
        await ask()

    machine = machine_of(main)
    machine.start(1)
    (finish,) = words(machine.deliver(2, CallFailed(1, Failure(kind="not_encodable", type="NotEncodable", message="a set"), 1)))
    assert finish.startswith(f"failed {ResultNotEncodable.__name__}: ")


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (ValueError("x"), "failed ValueError: x"),
        (SystemExit(3), "failed SystemExit: 3"),
        (asyncio.CancelledError(), "failed CancelledError: the agent cancelled itself"),
        (GeneratorExit(), "failed GeneratorExit: "),
        (BaseException("odd"), "failed BaseException: odd"),
        (
            ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
            "failed ExceptionGroup: two (2 sub-exceptions): ValueError: a; KeyError: 'b'",
        ),
        (InvalidInput("bad"), "failed InvalidInput: bad"),
        (StopAsyncIteration(), "failed StopAsyncIteration: "),
        (TimeoutError("late"), "failed TimeoutError: late"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_an_agent_raises_is_how_its_run_fails(main: BaseException, expected: str) -> None:
    async def raising(run: Run) -> None:
        await asyncio.sleep(0)
        raise main

    assert words(machine_of(raising).start(1)) == [expected]


def test_a_hostile_exception_is_recorded_all_the_same() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

        __repr__ = __str__

    async def main(run: Run) -> None:
        raise Hostile

    (finish,) = words(machine_of(main).start(1))
    assert finish == "failed Hostile: <its message cannot be shown: __str__ raised RuntimeError>"


def test_keyboard_interrupt_is_not_recorded_as_the_agents_failure() -> None:
    """Ctrl-C came while the agent ran, or the agent raised it itself.

    The activation ends, and the caller learns this.
    """

    async def main(run: Run) -> None:
        raise KeyboardInterrupt

    machine = machine_of(main)
    with pytest.raises(Interrupted, match="KeyboardInterrupt"):
        machine.start(1)
    assert not machine.finished
    assert current() is None
    machine._main.exception()  # type: ignore[union-attr]  # or asyncio complains that nobody looked


@pytest.mark.parametrize("result", [{1, 2}, b"bytes", float("nan"), object(), {1: "a"}], ids=lambda value: type(value).__name__)
def test_an_agent_whose_result_cannot_be_recorded_has_failed(result: object) -> None:
    async def main(run: Run) -> Any:
        return result

    (finish,) = words(machine_of(main).start(1))
    assert finish.startswith("failed NotEncodable: the agent's result cannot be recorded: ")


def test_cancelling_a_run_raises_cancelled_error_where_the_agent_waits() -> None:
    async def main(run: Run) -> None:
        try:
            await ask("first")
        finally:
            run.note(f"cleaning up, {run.cancelled}")
            await ask("clean up")

    machine = machine_of(main)
    machine.start(1)
    assert words(machine.deliver(2, CancelAsked())) == ["abandon 1", "cleaning up, True", "call 2"]
    assert words(machine.deliver(3, CallCompleted(2, b"0"))) == []
    assert words(machine.deliver(4, CallCompleted(1, b"0"))) == ["cancelled"], "the abandoned call has to end first"


def test_an_agent_may_answer_a_cancel_with_a_result() -> None:
    async def main(run: Run) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
        return str(await ask())

    machine = machine_of(main)
    machine.start(1)
    assert words(machine.deliver(2, CancelAsked())) == ["call 1"]
    assert words(machine.deliver(3, CancelAsked())) == [], "a second cancel does not interrupt what the first one led to"


def test_when_the_main_coroutine_is_done_its_other_tasks_are_cancelled() -> None:
    async def background(run: Run, name: str) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            run.note(f"{name} stopped")
            await ask(name)

    async def main(run: Run) -> str:
        tasks = [asyncio.create_task(background(run, name)) for name in "ab"]
        await asyncio.sleep(0)
        return f"left {len(tasks)}"

    machine = machine_of(main)
    assert words(machine.start(1)) == ["a stopped", "call 1", "b stopped", "call 2"]
    assert words(machine.deliver(2, CallCompleted(2, b"0"))) == []
    assert words(machine.deliver(3, CallCompleted(1, b"0"))) == ['succeeded "left 2"']


def test_a_call_abandoned_by_a_timeout_is_named_and_its_late_result_reaches_nobody() -> None:
    async def main(run: Run) -> str:
        try:
            async with asyncio.timeout(5):
                await ask()
        except TimeoutError:
            run.note("too late")
        return str(await ask())

    machine = machine_of(main)
    machine.start(1_000_000)
    assert words(machine.deliver(6_000_000, TimerDue(1))) == ["abandon 1", "too late", "call 2"]
    assert words(machine.deliver(7_000_000, CallCompleted(1, b'"late"'))) == []
    assert words(machine.deliver(8_000_000, CallCompleted(2, b'"second"'))) == ['succeeded "second"']


@pytest.mark.parametrize("completion", [CallCompleted(2, b"0"), CallFailed(9, BROKEN, 1), TimerDue(1)], ids=lambda c: type(c).__name__)
def test_an_answer_to_a_question_that_was_never_asked_is_refused(completion: Any) -> None:
    async def main(run: Run) -> None:
        await ask()

    machine = machine_of(main)
    machine.start(1)
    with pytest.raises(UnknownCompletion):
        machine.deliver(2, completion)


def test_the_same_answer_twice_is_refused() -> None:
    async def main(run: Run) -> None:
        await ask()
        await ask()

    machine = machine_of(main)
    machine.start(1)
    machine.deliver(2, CallCompleted(1, b"0"))
    with pytest.raises(UnknownCompletion):
        machine.deliver(3, CallCompleted(1, b"0"))


def test_an_agent_that_never_rests_is_stopped() -> None:
    async def main(run: Run) -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(DoesNotRest):
        machine_of(main, max_steps=100).start(1)


def test_now_is_the_recorded_time_and_never_goes_back() -> None:
    seen: list[int] = []

    async def main(run: Run) -> None:
        for _ in range(3):
            seen.append(round(run.now().timestamp() * 1e6))
            await ask()

    machine = machine_of(main)
    machine.start(1_700_000_000_000_001)
    machine.deliver(1_700_000_000_000_777, CallCompleted(1, b"0"))
    machine.deliver(1_600_000_000_000_000, CallCompleted(2, b"0"))
    assert seen == [1_700_000_000_000_001, 1_700_000_000_000_777, 1_700_000_000_000_777]


@given(st.integers(min_value=0, max_value=250_000_000_000_000_000), st.floats(min_value=1e-6, max_value=1e6))
def test_a_timer_is_due_at_the_very_moment_that_was_announced(now: int, delay_s: float) -> None:
    """A driver that wakes up at that moment and finds nothing to do would spin until its clock moves."""

    async def main(run: Run) -> None:
        await asyncio.sleep(delay_s)

    machine = machine_of(main)
    machine.start(now)
    timer = machine.next_timer()
    assert timer is not None
    assert timer[0] >= now
    assert words(machine.deliver(timer[0], TimerDue(timer[1]))) == ["succeeded null"]
    assert machine.next_timer() is None


def test_timers_go_off_in_order_of_time_and_then_of_their_making() -> None:
    async def main(run: Run) -> None:
        loop = asyncio.get_running_loop()
        for name, delay_s in (("c", 3), ("a", 1), ("b", 1), ("d", 2)):
            loop.call_later(delay_s, run.note, name)
        await asyncio.sleep(9)

    machine = machine_of(main)
    machine.start(0)
    said = []
    while (timer := machine.next_timer()) is not None:
        said += words(machine.deliver(timer[0], TimerDue(timer[1])))
    assert said == ["a", "b", "d", "c", "succeeded null"]


def test_a_timer_set_in_the_past_is_due_at_once() -> None:
    async def main(run: Run) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.call_at(float("-inf"), done.set_result, None)
        await done

    machine = machine_of(main)
    machine.start(1_000_000)
    assert machine.next_timer() == (0, 1)
    assert words(machine.deliver(1_000_000, TimerDue(1))) == ["succeeded null"]


def test_code_outside_of_an_activation_is_in_no_run() -> None:
    seen: list[Machine | None] = []

    async def main(run: Run) -> None:
        seen.append(current())
        await ask()

    machine = machine_of(main)
    assert current() is None
    machine.start(1)
    assert seen == [machine]
    assert current() is None


def test_an_activation_inside_of_another_loop_leaves_that_loop_as_it_was() -> None:
    """A worker activates machines from callbacks of its own loop."""

    async def agent_main(run: Run) -> int:
        return 1

    async def worker() -> tuple[list[str], bool]:
        loop = asyncio.get_running_loop()
        activated: asyncio.Future[list[str]] = loop.create_future()
        hooks = sys.get_asyncgen_hooks()
        loop.call_soon(lambda: activated.set_result(words(machine_of(agent_main).start(1))))
        return await activated, asyncio.get_running_loop() is loop and sys.get_asyncgen_hooks() == hooks

    assert asyncio.run(worker()) == (["succeeded 1"], True)


def test_what_an_agent_sees_of_its_run() -> None:
    async def main(run: Run) -> list[Any]:
        return [run.id, run.tenant, run.actor, run.version, run.cancelled]

    assert words(machine_of(main).start(1)) == ['succeeded ["run-1","acme","user:17","7",false]']


def test_chance_is_the_same_on_every_machine_and_never_the_same_twice() -> None:
    async def main(run: Run) -> list[Any]:
        return [run.random.random(), run.random.random(), str(run.uuid()), str(run.uuid())]

    first, second = words(machine_of(main).start(1)), words(machine_of(main).start(99))
    assert first == second
    drawn = first[0].removeprefix("succeeded ").strip("[]").split(",")
    assert len(set(drawn)) == 4


def test_a_machine_with_pending_tasks_is_let_go_without_a_word(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    async def main(run: Run) -> None:
        await asyncio.gather(ask(), asyncio.sleep(60))

    machine = machine_of(main)
    machine.start(1)
    del machine
    gc.collect()
    assert "destroyed" not in caplog.text + "".join(capfd.readouterr())


def test_a_machine_that_is_closed_ends_its_agent_and_nothing_that_the_agent_still_asks_for_gets_out() -> None:
    said: list[str] = []

    async def main(run: Run) -> None:
        async def child() -> None:
            try:
                await ask("child")
            finally:
                said.append("child ends")

        helper = asyncio.create_task(child())
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            said.append("this is no cancel")
        finally:
            said.append(f"main ends, {current() is machine}")
            await ask("too late")
            said.append(f"not reached, {helper}")

    machine = machine_of(main)
    assert words(machine.start(1)) == ["call 1"]
    machine.close()
    assert sorted(said) == ["child ends", "main ends, True"]
    assert current() is None
    machine.close()  # a second time changes nothing
    assert len(said) == 2
