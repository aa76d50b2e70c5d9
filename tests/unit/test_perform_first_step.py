"""The first step of an async tool runs when its attempt begins, and the tool sees no difference to later steps."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import sniffio
from tests.unit.test_perform_attempt import GRACE_S, NOTHING, a_call

from perdure.core.outcomes import Performed, Raised, Returned
from perdure.engine.local.attempts import Attempt, attempt
from perdure.engine.threads import Threads
from perdure.tool import Call, Tool, tool

log: list[Any] = []  # what happened, in order
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.fixture(autouse=True)
def nothing_has_happened() -> None:
    log.clear()


def an_attempt(declared: Tool[..., Any], call: Call | None = None) -> Attempt:
    return attempt(declared, NOTHING, call or a_call(), threads=Threads(1), grace_s=GRACE_S)


def in_a_callback(begin: Callable[[Callable[[Performed], None]], None], loop_factory: Any = None) -> Performed:
    """What `begin` makes an attempt answer. It is called as the worker calls it: in a plain callback of the loop, outside any task."""

    async def main() -> Performed:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Performed] = loop.create_future()

        def done(answer: Performed) -> None:
            log.append("answered")
            answered.set_result(answer)

        def callback() -> None:
            assert asyncio.current_task() is None
            begin(done)
            assert asyncio.current_task() is None
            log.append("started")

        loop.call_soon(callback)
        return await answered

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


def performed(declared: Tool[..., Any], loop_factory: Any = None) -> Performed:
    return in_a_callback(an_attempt(declared).start, loop_factory)


# --- when it is made ---------------------------------------------------------------------------------------------------------


def test_a_tool_that_waits_for_nothing_has_answered_when_start_returns():
    @tool
    async def at_once() -> int:
        log.append("runs")
        return 1

    assert performed(at_once) == Returned(b"1")
    assert log == ["runs", "answered", "started"]


@pytest.mark.parametrize(
    "error", [ValueError, StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit], ids=lambda error: error.__name__
)
def test_a_tool_that_raises_at_once_has_answered_when_start_returns(error):
    @tool
    async def fails() -> int:
        raise error

    answer = performed(fails)
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "error"
    assert log == ["answered", "started"]


def test_a_tool_that_waits_has_made_its_first_step_when_start_returns():
    @tool
    async def waits() -> int:
        log.append("first step")
        await asyncio.sleep(0)
        log.append("second step")
        return 1

    assert performed(waits) == Returned(b"1")
    assert log == ["first step", "started", "second step", "answered"]


def test_the_first_steps_are_made_in_the_order_of_the_starts():
    def numbered(number: int) -> Attempt:
        @tool
        async def numbers() -> None:
            log.append(number)
            await asyncio.sleep(0)

        return an_attempt(numbers)

    def begin(done: Callable[[Performed], None]) -> None:
        for number in range(3):
            numbered(number).start(done if number == 2 else log.append)

    in_a_callback(begin)
    assert log[:4] == [0, 1, 2, "started"]


# --- what the tool sees ----------------------------------------------------------------------------------------------


def test_the_first_step_is_in_the_task_that_the_later_ones_are_in():
    @tool
    async def looks() -> str:
        first = asyncio.current_task()
        assert first is not None
        assert first in asyncio.all_tasks() or sys.version_info >= (3, 12)  # an eager task is listed when it waits
        await asyncio.sleep(0)
        assert asyncio.current_task() is first
        assert first in asyncio.all_tasks()
        return first.get_name()

    assert performed(looks) == Returned(b'"looks"')


def test_each_attempt_has_a_context_of_its_own_from_the_first_step_on():
    @tool
    async def changes() -> list[str]:
        before = variable.get()
        variable.set("by the tool")
        await asyncio.sleep(0)
        return [before, variable.get()]

    @tool
    async def changes_at_once() -> str:
        before = variable.get()
        variable.set("by the tool")
        return before

    def begin(done: Callable[[Performed], None]) -> None:
        variable.set("by the caller")

        def told(answer: Performed) -> None:
            log.append(variable.get())
            done(answer)

        an_attempt(changes_at_once).start(log.append)
        log.append(variable.get())
        an_attempt(changes).start(told)
        log.append(variable.get())

    assert in_a_callback(begin) == Returned(b'["by the caller","by the tool"]')
    assert log == [Returned(b'"by the caller"'), "by the caller", "by the caller", "started", "by the caller", "answered"]


def test_a_time_limit_that_the_tool_sets_in_its_first_step_holds():
    @tool
    async def limits() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            return "timed out"
        return "slept"

    @tool
    async def limits_what_is_over_already() -> str:
        try:
            async with asyncio.timeout(-1):
                await asyncio.sleep(60)
        except TimeoutError:
            return "timed out"
        return "slept"

    assert performed(limits) == performed(limits_what_is_over_already) == Returned(b'"timed out"')


def test_a_task_group_in_the_first_step_cancels_and_collects():
    @tool
    async def groups() -> str:
        async def fails() -> None:
            raise ValueError("one of them")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(60))
                group.create_task(fails())
                await asyncio.sleep(60)
        except ExceptionGroup as found:
            return str(found.exceptions[0])
        return "nothing"

    assert performed(groups) == Returned(b'"one of them"')


def test_libraries_that_look_for_their_event_loop_find_it_in_the_first_step():
    @tool
    async def asks() -> list[Any]:
        library = sniffio.current_async_library()
        seen: list[Any] = []
        with anyio.move_on_after(0.01) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep, 60)
                await anyio.sleep(60)
        seen.append(await anyio.to_thread.run_sync(lambda: 5))
        return [library, scope.cancelled_caught, *seen]

    assert performed(asks) == Returned(b'["asyncio",true,5]')


# --- stops -----------------------------------------------------------------------------------------------------------


def test_a_cancel_before_the_start_lets_no_step_be_made():
    @tool
    async def runs() -> None:
        log.append("runs")

    early = an_attempt(runs)
    early.cancel()
    answer = in_a_callback(early.start)
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "not_sent"
    assert "runs" not in log


def test_a_cancel_right_after_the_start_finds_the_tool_in_its_first_wait():
    @tool
    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    running = an_attempt(waits)

    def begin(done: Callable[[Performed], None]) -> None:
        running.start(done)
        running.cancel()

    answer = in_a_callback(begin)
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "cancelled"
    assert log == ["started", "cancelled", "answered"]


def test_a_cancel_by_the_tool_itself_in_its_first_step_takes_effect_at_its_first_wait():
    call = a_call()

    @tool
    async def cancels() -> None:
        running.cancel()
        log.append(call.cancelled)
        await asyncio.sleep(60)

    running = an_attempt(cancels, call)
    answer = in_a_callback(running.start)
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "cancelled"
    assert log == [True, "started", "answered"]


def test_a_tool_that_cancels_itself_and_then_does_not_wait_has_happened():
    @tool
    async def cancels_its_task(later: bool = False) -> str:
        if later:
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "sent"

    assert performed(cancels_its_task) == Returned(b'"sent"')
    late = attempt(cancels_its_task, b'{"later":true}', a_call(), threads=Threads(1), grace_s=GRACE_S)
    assert in_a_callback(late.start) == Returned(b'"sent"')


class Ahead(asyncio.SelectorEventLoop):
    """A loop whose clock can be set forward, as if what runs had blocked it for so long."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def test_the_time_out_counts_from_the_beginning_of_the_first_step():
    @tool(timeout=60)
    async def blocks() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Ahead)
        loop.ahead_s += 100
        await asyncio.sleep(1)
        return "in time"

    answer = performed(blocks, Ahead)
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "timeout"


# --- Ctrl-C ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c() -> Any:
    """Python's own handler for Ctrl-C, which a process whose parent ignores the signal does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def struck(loop: asyncio.AbstractEventLoop, declared: Tool[..., Any]) -> None:
    loop.call_soon(an_attempt(declared).start, log.append)
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.sleep(60))


def test_ctrl_c_in_the_first_step_ends_the_loop_before_anything_is_told(ctrl_c):
    @tool
    async def works() -> None:
        ctrl_c()

    loop = asyncio.new_event_loop()
    try:
        struck(loop, works)
        assert log == []
        loop.run_until_complete(asyncio.sleep(0))  # as asyncio.run does, to end its tasks
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    (answer,) = log
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "process_died"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there the first step of a task is in no queue")
def test_ctrl_c_between_queue_and_first_step_leaves_no_task_that_never_ends(ctrl_c):
    class Loop(asyncio.SelectorEventLoop):
        def __delattr__(self, name: str) -> None:
            super().__delattr__(name)  # the task is made, and its first step comes next
            ctrl_c()

    @tool
    async def works() -> None:
        log.append("works")

    loop = Loop()
    try:
        struck(loop, works)
        (sleeping,) = asyncio.all_tasks(loop)
        sleeping.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
    assert log == []


# --- where it waits for its turn ---------------------------------------------------------------------------------------------


class WithFactory(asyncio.SelectorEventLoop):
    """A loop that makes its tasks in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(lambda loop, coroutine, **options: asyncio.Task(coroutine, loop=loop, **options))


class Wrapping(asyncio.SelectorEventLoop):
    """A loop that puts other objects into its queue, and creates tasks in its own way if eager tasks are possible."""

    def __init__(self) -> None:
        super().__init__()
        if sys.version_info >= (3, 12):
            self.set_task_factory(lambda loop, coroutine, **options: asyncio.Task(coroutine, loop=loop, **options))

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return super().call_soon(lambda: callback(*args), context=context)


class Watching(asyncio.SelectorEventLoop):
    """A loop that creates a second task with each task."""

    def create_task(self, coroutine: Any, **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task = super().create_task(coroutine, **options)
        self.beside = super().create_task(self.watch())
        return task

    async def watch(self) -> None:
        log.append("watches")


class Debugging(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.set_debug(True)


@tool
async def tells() -> int:
    log.append("runs")
    task = asyncio.current_task()
    await asyncio.sleep(0)
    assert asyncio.current_task() is task
    return 1


@pytest.mark.parametrize(
    ("loop_factory", "first"),
    [(WithFactory, "started"), (Wrapping, "started"), (Watching, "runs"), (Debugging, "runs")],
)
def test_a_loop_of_another_kind_makes_the_first_step_itself(loop_factory, first):
    assert performed(tells, loop_factory) == Returned(b"1")
    if loop_factory is Watching:
        log.remove("watches")  # the task of this test
    assert log[0] == first


def test_inside_another_task_the_loop_makes_the_first_step():
    async def main() -> Performed:
        mine = asyncio.current_task()
        answered: asyncio.Future[Performed] = asyncio.get_running_loop().create_future()
        an_attempt(tells).start(answered.set_result)
        log.append("started")
        assert asyncio.current_task() is mine
        return await answered

    assert asyncio.run(main()) == Returned(b"1")
    assert log == ["started", "runs"]


def test_a_cancel_before_a_first_step_that_the_loop_makes_lets_nothing_run():
    running = an_attempt(tells)

    async def main() -> Performed:
        answered: asyncio.Future[Performed] = asyncio.get_running_loop().create_future()
        running.start(answered.set_result)
        running.cancel()
        return await answered

    answer = asyncio.run(main())
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "not_sent"
    assert log == []


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there the first step of a task is in no queue")
def test_a_first_step_takes_nothing_back_from_the_queue_of_the_loop():
    # Other threads put callbacks into that queue at any time, such as the answer to a commit. If a first step took such
    # an answer from the queue, the runs of that commit would hang for ever.
    class Queue(deque[Any]):
        def refuse(self, *_: Any) -> Any:
            raise AssertionError("the queue may hold something else by now")

        pop = remove = __getitem__ = __delitem__ = refuse

    class Loop(asyncio.SelectorEventLoop):
        def __init__(self) -> None:
            super().__init__()
            self._ready = Queue()

    assert performed(tells, Loop) == Returned(b"1")
    assert log == ["runs", "started", "answered"]
