"""Every use of a private name of asyncio, each with its reason. If a new Python breaks something, look here first.

`running_loop` and `set_running_loop` are C functions that asyncio itself calls. The public `asyncio.get_running_loop`
raises an exception if no loop is running, and that exception is slow. There is no public function that sets the
running loop. perdure needs such a function because an agent's loop runs inside a callback of the engine's loop.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from asyncio.events import _get_running_loop as running_loop
from asyncio.events import _set_running_loop as set_running_loop
from collections.abc import Coroutine
from typing import Any


def forgo_warning(task: asyncio.Task[Any]) -> None:
    """Do not warn when this task is destroyed while it is pending. For the task of a parked run that is intended."""
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

    def begun(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A new task. If possible, its first step has already run."""
        task: asyncio.Task[None] = loop.create_task(coroutine, name=name)
        # Python 3.11 has no eager_start. There a new task puts its first step at the end of the loop's queue. Take the
        # step from the queue and call it as the loop would do. That is possible only if the queue exists (uvloop has a
        # different queue) and its last entry is really this step.
        queue = getattr(loop, "_ready", None)
        if not queue or loop in _entered or loop.get_task_factory() is not None:
            return task
        step = queue[-1]._callback
        is_its_step = type(step).__name__ == "TaskStepMethWrapper" and step.__self__ is task
        if not is_its_step:
            return task
        try:
            queue.pop()._context.run(step)
        except BaseException:
            # Ctrl-C came between the two calls. The step is in no queue any more, so the task would never end.
            # asyncio.run waits for every task that it knows, and must not wait for this task.
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                disown(task)
                coroutine.close()
            raise
        return task


__all__ = ["begun", "disown", "forgo_warning", "running_loop", "set_current_task", "set_running_loop", "task_to_leave"]
