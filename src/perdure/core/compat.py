"""Every use of a private name of asyncio, each with its reason. If a new Python breaks something, look here first.

`running_loop` and `set_running_loop` are C functions that asyncio itself calls. The public `asyncio.get_running_loop`
raises an exception if no loop is running, and that exception is slow. There is no public function that sets the
running loop. perdure needs such a function because an agent's loop runs inside a callback of the engine's loop.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
from asyncio.events import _get_running_loop as running_loop
from asyncio.events import _set_running_loop as set_running_loop
from collections.abc import Coroutine, Iterator
from contextvars import Context
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple


def forgo_warning(task: asyncio.Task[Any]) -> None:
    """Do not warn when this task is destroyed while it is pending.

    The tasks of a parked run are destroyed like that.
    """
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def disown(task: asyncio.Task[Any]) -> None:
    """Remove the task from the tasks for which `asyncio.run` waits at its end.

    The owner of the task waits for the task itself, or knows that the task cannot end.
    """
    asyncio.tasks._unregister_task(task)
    forgo_warning(task)


# -- an agent inside of a task --------------------------------------------------------------------------------------------------
# Up to Python 3.13 every loop has its own current task. From 3.14 on every thread has one current task. While a task
# of the outer loop is current, no task of an agent can be entered, and asyncio.current_task() inside an agent returns
# the wrong task. So the caller leaves the outer task, and enters it again at the end. The caller uses only C functions
# for this: an OS signal can raise an exception at the start of every Python function, and the rest of that function
# would not run.
if sys.version_info >= (3, 14):
    set_current_task = asyncio.tasks._swap_current_task

    def task_to_leave(outer: asyncio.AbstractEventLoop | None) -> asyncio.Task[Any] | None:
        """The outer task that has to be left before an agent runs; None if there is no such task."""
        return None if outer is None else asyncio.current_task(outer)

else:

    def set_current_task(loop: asyncio.AbstractEventLoop | None, task: asyncio.Task[Any] | None) -> None:
        """Never called: there is no task to leave."""

    def task_to_leave(outer: asyncio.AbstractEventLoop | None) -> asyncio.Task[Any] | None:
        """The outer task that has to be left before an agent runs; None if there is no such task."""
        return None


# -- the first step of a task -------------------------------------------------------------------------------------------------
# `begun` creates a task and, if possible, runs the task's first step before it returns. This first step sees the same
# as every later step: asyncio.current_task() is the new task, the context is the task's own copy, and a cancel or a
# time-out stops the task.
#
# In two cases the loop runs the first step in its next iteration instead. Inside another task, that task would have to
# be left and entered again. On a loop with a task factory, the factory decides how tasks begin.
if sys.version_info >= (3, 12):

    def begun(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A new task. If possible, its first step has already run."""
        if loop.get_task_factory() is None and asyncio.current_task(loop) is None:
            return asyncio.Task(coroutine, loop=loop, name=name, eager_start=True)
        return loop.create_task(coroutine, name=name)

else:
    _entered: dict[asyncio.AbstractEventLoop, asyncio.Task[Any]] = asyncio.tasks._current_tasks  # type: ignore[attr-defined]

    class _FirstStep:
        """Takes the place of `loop.call_soon` while a task is created, and keeps what would be put into the queue."""

        step: Any = None  # a method of the task

        def __call__(self, step: Any, *, context: Context) -> None:
            self.step, self.context = step, context

    def begun(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A new task. If possible, its first step has already run."""
        # Python 3.11 has no eager_start. There a new task gives its first step to `loop.call_soon`. Take the step there,
        # and call it as the loop would do. A loop with a `call_soon` of its own (uvloop) gets the step. The step must not
        # be taken back from the loop's queue: other threads put callbacks into that queue at any time.
        if type(loop).call_soon is not asyncio.BaseEventLoop.call_soon or loop in _entered or loop.get_task_factory() is not None:
            return loop.create_task(coroutine, name=name)
        first = _FirstStep()
        try:
            try:
                loop.call_soon = first  # type: ignore[assignment, method-assign]
                task: asyncio.Task[None] = asyncio.Task(coroutine, loop=loop, name=name)
            finally:
                del loop.call_soon
            first.context.run(first.step)
        except BaseException:
            # Ctrl-C came before the first step. The step is in no queue, so the task would never end.
            # asyncio.run waits for every task that it knows, and must not wait for this task.
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                if first.step is not None:
                    disown(first.step.__self__)
                coroutine.close()
            raise
        return task


# -- looking at a task that waits ---------------------------------------------------------------------------------------------
# `task.get_stack()` ends at the first async generator and does not say what the task waits for. So these functions
# follow what each coroutine awaits. They only look: no code of the agent runs, and nothing is changed.
_DEEPEST = 10_000
_DRIVEN = (CoroutineType, AsyncGeneratorType, GeneratorType)


def waiting_frames(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of the coroutines of a waiting task: first the task's own coroutine, last the innermost coroutine."""
    awaited: Any = task.get_coro()
    for _ in range(_DEEPEST):
        kind, frame = type(awaited), None
        if kind is CoroutineType:
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif kind is AsyncGeneratorType:
            frame, awaited = awaited.ag_frame, awaited.ag_await
        elif kind is GeneratorType:
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        elif awaited is None:
            return
        else:
            # `async for`, `anext`, `aclose` and `coroutine.__await__` give a C object without attributes. The garbage
            # collector knows which coroutine or generator this object drives.
            awaited = next((one for one in gc.get_referents(awaited) if type(one) in _DRIVEN), None)
        if frame is not None:
            yield frame


def waits_for(task: asyncio.Task[Any]) -> asyncio.Future[Any] | None:
    """The future that wakes this task when it is done."""
    future: asyncio.Future[Any] | None = task._fut_waiter  # type: ignore[attr-defined]
    return future


def gathered(future: asyncio.Future[Any]) -> list[asyncio.Future[Any]] | None:
    """If the future comes from asyncio.gather: the futures and tasks that were gathered."""
    return list(future._children) if isinstance(future, asyncio.tasks._GatheringFuture) else None  # type: ignore[attr-defined]


def shielded(future: asyncio.Future[Any]) -> asyncio.Future[Any] | None:
    """If the future comes from asyncio.shield: the future or task that is shielded."""
    for callback, _ in future._callbacks or ():
        code = getattr(callback, "__code__", None)
        if code is not None and code.co_qualname == "shield.<locals>._outer_done_callback":
            found: asyncio.Future[Any] = inspect.getclosurevars(callback).nonlocals["inner"]
            return found
    return None


class TimerTarget(NamedTuple):
    """What happens when a timer is due: a future is done (asyncio.sleep), or a task runs into its asyncio.timeout."""

    future: Any
    task: asyncio.Task[Any] | None


def timer_target(timer: asyncio.TimerHandle) -> TimerTarget:
    """What happens when this timer is due."""
    owner = getattr(timer._callback, "__self__", None)  # type: ignore[attr-defined]
    args = timer._args
    return TimerTarget(args[0] if args else None, owner._task if isinstance(owner, asyncio.Timeout) else None)  # type: ignore[attr-defined]


def tasks_of_group(group: asyncio.TaskGroup) -> list[asyncio.Task[Any]]:
    """The tasks of the group that are not done."""
    return list(group._tasks)


__all__ = [
    "TimerTarget",
    "begun",
    "disown",
    "forgo_warning",
    "gathered",
    "running_loop",
    "set_current_task",
    "set_running_loop",
    "shielded",
    "task_to_leave",
    "tasks_of_group",
    "timer_target",
    "waiting_frames",
    "waits_for",
]
