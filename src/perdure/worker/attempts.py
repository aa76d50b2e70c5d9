"""One attempt at a call: performed, timed, told to stop, and always answered for.

An attempt runs in one of three places. An async tool is a task of the loop, a sync tool runs in a thread, and a tool with
`isolate=True` runs in a process of its own for which a thread waits. Wherever it runs, the attempt ends exactly once, with one
of the four answers in core/attempts.py, and at the latest when its time-out (or a cancel) and the grace after it are over.

The first step of an async tool is made inside `start`: a tool that does not wait for anything has its answer in the same turn of
the loop. From that first step on the tool is inside a real task with a context of its own, as `_begun` explains.

The tool is anything with the attributes of a `Tool` that are used here: a question to a model and a tool of an MCP server too.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from msgspec import structs

from perdure.core.attempts import Abandoned, Performed, Raised, Returned, Unrecordable
from perdure.core.events import Failure
from perdure.core.failures import describe
from perdure.core.outcome import Outcome
from perdure.errors import InvalidInput
from perdure.interrupts import is_interrupt
from perdure.tool import Call, Hook, Tool
from perdure.tool.call import recordable
from perdure.worker.ending import cancel, disown
from perdure.worker.isolate import Isolated
from perdure.worker.threads import Job, Threads

RECONCILE_TIMEOUT_S = 60.0

_inside: ContextVar[bool] = ContextVar("perdure_inside_call", default=False)

log = logging.getLogger("perdure.worker")


class Attempt:
    """One effect, performed. `start` begins it and tells its answer once; `cancel` asks it to stop. Both on the loop's thread."""

    __slots__ = (
        "_answer",
        "_args",
        "_begun",
        "_call",
        "_done",
        "_grace_s",
        "_is_too_late",
        "_job",
        "_label",
        "_process",
        "_stopped",
        "_struck",
        "_task",
        "_threads",
        "_timer",
        "_tool",
    )

    def __init__(
        self,
        tool: Any,
        args: bytes,
        call: Call,
        *,
        threads: Threads,
        grace_s: float,
        is_too_late: Callable[[], bool] | None = None,
        label: str | None = None,
    ) -> None:
        """`is_too_late` is asked when a thread is free for the attempt; True: it is not begun. `label` names it in messages."""
        self._tool = tool
        self._args = args
        self._call = call
        self._threads = threads
        self._grace_s = grace_s
        self._is_too_late = is_too_late
        self._label = label
        self._done: Callable[[Performed], None] | None = None  # from `start` until the answer is told
        self._answer: Returned | Unrecordable | Raised | None = None  # what the tool itself came to
        self._begun = False  # the code of an async tool has had the processor
        self._struck = False  # a signal interrupted an async tool
        self._stopped: Literal["timeout", "cancelled"] | None = None
        self._task: asyncio.Task[None] | None = None  # of an async tool that did not end in its first step
        self._job: Job | None = None  # of a sync tool, and of an isolated one
        self._process: Isolated | None = None
        self._timer: asyncio.TimerHandle | None = None  # the time-out, and after it the grace

    # -- from outside -------------------------------------------------------------------------------------------------
    def start(self, done: Callable[[Performed], None]) -> None:
        """Begin. `done` is called exactly once, on the loop, whatever the tool does; it may be called before this returns."""
        self._done = done
        if self._stopped is not None:
            self._finish(self._never_began())
            return
        tool = self._tool
        timeout_s = tool.timeout_s
        loop = asyncio.get_running_loop()
        try:
            if not tool.is_async or tool.isolate:
                self._start_in_thread()
                return
            kwargs = tool.with_call(tool.arguments(self._args), self._call)
            begun_s = 0.0 if timeout_s is None else loop.time()
            task = _begun(loop, self._run(kwargs), tool.name)
        except BaseException as error:
            loop.call_soon(self._finish, self._not_started(error))
            return
        answer = self._answer
        if answer is not None and not self._struck:
            self._done = None
            done(answer if self._stopped is None else self._stopped_answer(answer))
            return
        # Not in a TaskGroup: a tool that does not stop must not keep the run, or the worker, from going on.
        self._task = task
        task.add_done_callback(self._task_ended)
        if self._stopped is not None:
            self._interrupt(loop)  # `cancel` was called by the tool itself, in its first step
        elif timeout_s is not None:
            self._timer = loop.call_at(begun_s + timeout_s, self._stop, "timeout")

    def cancel(self) -> None:
        """Ask it to stop. What it answers within the grace still counts: knowledge is better than a guess."""
        self._stop("cancelled")

    async def run(self) -> Performed:
        """Start it and wait for its answer. Always returns: cancelling the task that awaits this is the same as `cancel`."""
        answered: asyncio.Future[Performed] = asyncio.get_running_loop().create_future()
        self.start(answered.set_result)
        while not answered.done():
            try:
                await asyncio.shield(answered)
            except asyncio.CancelledError:
                # Leaving here would drop an effect that is under way without a word in the journal (T23).
                self.cancel()
        return answered.result()

    # -- an async tool: a task ----------------------------------------------------------------------------------------
    async def _run(self, kwargs: dict[str, Any]) -> None:
        """The task of an async tool. It lets no exception out, and leaves the answer in `_answer`.

        Not as the task's result: a tool that cancels its own task and then returns has happened, and its task counts as cancelled.
        """
        self._begun = True
        _inside.set(True)
        tool = self._tool
        try:
            self._answer = recordable(tool, await tool.fn(**kwargs))
        except BaseException as error:  # a KeyboardInterrupt or SystemExit that left this task would end the loop, unrecorded (T23)
            if is_interrupt(error):
                # A signal is for the process: it ends the loop, from a callback of its own. Whether the tool happened is unknown.
                self._struck = True
                asyncio.get_running_loop().call_soon(_end_loop, error)
                why = "a signal (Ctrl-C) interrupted it"
                self._answer = Raised(Failure(kind="process_died", type=type(error).__name__, message=why))
            else:
                self._answer = Raised(_describe(error))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if self._answer is not None:
            self._end(self._answer)
        elif self._begun:
            # The crash window: Ctrl-C struck in the first line of `_run`, and has ended the loop already.
            self._end(Raised(Failure(kind="process_died", type="KeyboardInterrupt", message="a signal (Ctrl-C) interrupted it")))
        else:
            self._end(self._never_began())  # it was cancelled before its first step
        if not task.cancelled():
            task.exception()  # else asyncio reports what the loop's owner has been told already

    # -- a sync tool, or an isolated one: a thread --------------------------------------------------------------------
    def _start_in_thread(self) -> None:
        tool = self._tool
        kwargs: dict[str, Any] = {}
        if tool.isolate:
            limit_s = None if tool.timeout_s is None else tool.timeout_s + self._grace_s
            self._process = Isolated(tool, self._args, self._call, limit_s)
        else:
            kwargs = tool.with_call(tool.arguments(self._args), self._call)
        on_begin = None if tool.timeout_s is None else self._begin_to_count
        self._job = self._threads.start(partial(self._in_thread, kwargs), self._end, on_begin)

    def _in_thread(self, kwargs: dict[str, Any]) -> Returned | Unrecordable | Raised:
        """What the thread does. It lets no exception out."""
        # The crash window: the call waited for a free thread while this process slept past its lease. Another worker may have the
        # run by now, and may have made the call.
        if self._is_too_late is not None and self._is_too_late():
            why = "it waited for a thread while its worker gave no sign of life for longer than its lease, and was not begun"
            return Raised(Failure(kind="not_sent", type="NotSent", message=why))
        if self._process is not None:
            return self._process.run()
        try:
            value = self._tool.fn(**kwargs)
        except BaseException as error:  # SystemExit, KeyboardInterrupt and StopIteration of a tool are failures of its call
            return Raised(_describe(error))
        return recordable(self._tool, value)

    def _begin_to_count(self) -> None:
        """A thread has begun with it. The time-out is the tool's own: what it waited for a free thread does not count."""
        if self._done is not None and self._stopped is None:
            self._timer = asyncio.get_running_loop().call_later(self._tool.timeout_s, self._stop, "timeout")

    # -- it is told to stop -------------------------------------------------------------------------------------------
    def _stop(self, why: Literal["timeout", "cancelled"]) -> None:
        if self._stopped is not None or self._answer is not None:
            return  # it was told already, or has ended, and the callback that says so is due
        self._stopped = why
        if self._done is None:
            return  # it has not started, or its answer was told
        self._call.ask_to_stop()
        if self._task is not None or self._job is not None:
            self._interrupt(asyncio.get_running_loop())
        # else the tool itself called `cancel`, in its first step; `start` sees it when that step is over

    def _interrupt(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            cancel(self._task)
        elif self._job is not None and self._threads.withdraw(self._job):
            # Not at once: the caller of `cancel` may be in the middle of a turn, and the answer would begin another one inside it.
            loop.call_soon(self._finish, self._never_began())
            return
        elif self._process is not None:
            self._process.stop()
        self._timer = loop.call_later(self._grace_s, self._give_up)

    def _give_up(self) -> None:
        if self._job is not None:
            self._threads.abandon(self._job)
        log.warning("%s does not stop; it was given up and may still be running", self._what)
        self._finish(Abandoned(self._stop_failure("and has not stopped since; it may still be running")))

    # -- its answer ---------------------------------------------------------------------------------------------------
    def _end(self, answer: Returned | Unrecordable | Raised) -> None:
        """The task, or the thread, is over."""
        if self._done is None:
            log.warning("%s has ended after it was given up; its outcome is dropped: %.200r", self._what, answer)
        else:
            self._finish(answer if self._stopped is None else self._stopped_answer(answer))

    def _finish(self, answer: Performed) -> None:
        done, self._done = self._done, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if done is not None:
            done(answer)

    def _stopped_answer(self, answer: Returned | Unrecordable | Raised) -> Performed:
        """The answer of a tool that was told to stop: unless its failure knows better, the interruption is the reason for it."""
        assert self._stopped is not None
        if not isinstance(answer, Raised):
            return answer
        failure = answer.failure
        if failure.kind in ("cancelled", "process_died"):
            return Raised(self._stop_failure("and was stopped"))
        return Raised(structs.replace(failure, kind=self._stopped)) if failure.kind == "error" else answer

    def _not_started(self, error: BaseException) -> Performed:
        """The answer about an attempt whose start raised."""
        # The crash window: what a signal raises (Ctrl-C) comes between any two lines, also when the tool has begun already.
        if is_interrupt(error):
            raise error  # for the process, which ends as in a crash: the intent stands in the journal, without a result
        if isinstance(error, Exception) and not self._begun:
            # The arguments do not fit any more, or there is no thread: nothing was sent.
            failure = _describe(error)
            return Raised(structs.replace(failure, kind="not_sent") if failure.kind == "error" else failure)
        why = f"{self._what} was interrupted while it was being started, and may be running"
        return Abandoned(Failure(kind="process_died", type=type(error).__name__, message=why))

    def _never_began(self) -> Raised:
        return Raised(Failure(kind="not_sent", type="NotSent", message=f"{self._what} was told to stop before it had begun"))

    def _stop_failure(self, after: str) -> Failure:
        if self._stopped == "timeout":
            message = f"{self._what} did not answer within {self._tool.timeout_s:g} s, {after}"
            return Failure(kind="timeout", type="TimeoutError", message=message)
        return Failure(kind="cancelled", type="CancelledError", message=f"{self._what} was cancelled {after}")

    @property
    def _what(self) -> str:
        call = self._call
        return f"{self._label or f'tool {self._tool.name}'} (run {call.run_id}, call {call.number}, attempt {call.attempt})"


attempt = Attempt  # attempt(tool, args, call, threads=…, grace_s=…) reads as what it does


def is_inside_call() -> bool:
    """Whether the code that asks this runs inside an async tool, or was started by one."""
    return _inside.get()


# -- the first step -----------------------------------------------------------------------------------------------------------
# `_begun` makes a task and, where it can, its first step at once, before it returns. Whatever that step looks at is as it would be
# in a later one: asyncio.current_task() is this task, its context is the task's own copy, a cancel or a time-out reaches it.
#
# It is not made at once inside another task, which would have to be left and entered again, and on a loop with a task factory,
# which decides itself how tasks begin. Then the loop makes it in its next turn.
if sys.version_info >= (3, 12):

    def _begun(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        if loop.get_task_factory() is None and asyncio.current_task(loop) is None:
            return asyncio.Task(coroutine, loop=loop, name=name, eager_start=True)
        return loop.create_task(coroutine, name=name)

else:
    _entered: dict[asyncio.AbstractEventLoop, asyncio.Task[Any]] = asyncio.tasks._current_tasks  # type: ignore[attr-defined]

    def _begun(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = loop.create_task(coroutine, name=name)
        # Python 3.11 has no eager_start. A new task has put its first step at the end of the loop's queue: take it from there and
        # call it as the loop would, if it is there (another kind of loop, as uvloop, has another queue) and is really that step.
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
            # The crash window: Ctrl-C struck between the two calls. The step is in no queue any more, and the task would never
            # end: asyncio.run, which waits for every task that it knows, must not wait for this one.
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                disown(task)
                coroutine.close()
            raise
        return task


# -- reconcile, and tools inside a transaction --------------------------------------------------------------------------------
class _Asked:
    """A reconcile hook in the place of its tool: it is performed in the same way, and what it returns is an Outcome."""

    isolate = False

    def __init__(self, tool: Tool[..., Any], hook: Hook) -> None:
        self.name = f"the reconcile hook of {tool.name}"
        self.timeout_s = tool.timeout_s or RECONCILE_TIMEOUT_S
        self.arguments = tool.arguments
        self.fn, self.is_async, self.with_call = hook.fn, hook.is_async, hook.with_call
        self.outcome: Outcome | None = None

    def encode_result(self, value: Any) -> bytes:
        """Keep what it said. The bytes are for the log, if they come after the hook was given up."""
        if isinstance(value, Outcome) and value.kind in ("happened", "not_happened", "in_progress", "unknown"):
            self.outcome = value
        else:
            expected = "it must return Outcome.happened(…), not_happened(), in_progress() or unknown(…)"
            self.outcome = Outcome.unknown(f"{self.name} returned a {type(value).__name__}; {expected}")
            if inspect.iscoroutine(value):
                value.close()
        return repr(self.outcome).encode()


async def reconcile(tool: Tool[..., Any], args: bytes, call: Call, *, threads: Threads, grace_s: float) -> Outcome:
    """Ask the tool's reconcile hook what became of the call. Whatever goes wrong with the hook is `unknown`."""
    assert tool.reconciler is not None, tool
    asked = _Asked(tool, tool.reconciler)
    answer = await Attempt(asked, args, call, threads=threads, grace_s=grace_s, label=asked.name).run()
    if isinstance(answer, Returned):
        assert asked.outcome is not None, asked.name
        return asked.outcome
    return Outcome.unknown(f"{asked.name} failed: {answer.failure.type}: {answer.failure.message}")


def perform_in_transaction(tool: Tool[..., Any], args: bytes, call: Call) -> bytes:
    """Run the tool right here, inside the journal's transaction; when it raises, the transaction has to be rolled back."""
    kwargs = tool.with_call(tool.arguments(args), call)
    try:
        value = _stepped(tool, tool.fn(**kwargs)) if tool.is_async else tool.fn(**kwargs)
    except StopIteration as error:
        raise RuntimeError(f"tool {tool.name} raised StopIteration") from error  # no future and no coroutine can carry it
    return tool.encode_result(value)


def _stepped(tool: Tool[..., Any], coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise InvalidInput(
        f"tool {tool.name}: a transaction tool may only use call.connection; it awaited something else, and nothing was written"
    )


def _end_loop(error: BaseException) -> None:
    raise error


def _describe(error: BaseException) -> Failure:
    return describe(error, datetime.now(UTC))
