"""One attempt: started, timed, asked to stop, and always answered for.

Whatever runs – a task of the loop, a thread, a process – the attempt ends once, with an answer, at the latest when its deadline
(or a cancel) and the grace after it have passed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Generic, Literal, Protocol, TypeVar

from msgspec import structs

from perdure.core.events import Failure
from perdure.core.failures import describe
from perdure.interrupts import is_interrupt
from perdure.tool import Call
from perdure.worker.answers import Abandoned, Raised
from perdure.worker.ending import cancel
from perdure.worker.threads import Job, Threads

T = TypeVar("T")
_inside: ContextVar[bool] = ContextVar("perdure_inside_call", default=False)

log = logging.getLogger("perdure.worker")


class Body(Protocol[T]):
    """Something that is running: a task, a thread or a process."""

    @property
    def future(self) -> asyncio.Future[T]:
        """Resolves to an answer, and never to an exception."""

    def when_begun(self, callback: Callable[[], None]) -> None:
        """Call back as soon as it is not waiting for its turn any more."""

    def stop(self) -> bool:
        """Have it end soon; True when it had not even begun and never will."""

    def abandon(self) -> None:
        """Nobody waits for it any more."""


class Attempt(Generic[T]):
    """One attempt. `start` begins it and tells its end once; `cancel` asks it to stop. Both on the loop's own thread."""

    def __init__(self, begin: Callable[[], Body[T | Raised]], call: Call, *, what: str, timeout_s: float | None, grace_s: float) -> None:
        self._begin = begin
        self._call = call
        self._name = what
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._stopped: Literal["timeout", "cancelled"] | None = None
        self._body: Body[T | Raised] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._done: Callable[[T | Raised | Abandoned], None] | None = None

    @property
    def _what(self) -> str:
        call = self._call
        return f"{self._name} (run {call.run_id}, call {call.number}, attempt {call.attempt})"

    def start(self, done: Callable[[T | Raised | Abandoned], None]) -> None:
        """Begin. `done` is called once, from a plain callback of the loop, whatever the tool does."""
        loop = asyncio.get_running_loop()
        self._done = done
        if self._stopped:
            loop.call_soon(self._finish, self._never_began())
            return
        try:
            self._body = body = self._begin()
        except Exception as error:  # the arguments do not fit any more, or there is no thread: nothing was sent
            loop.call_soon(self._finish, Raised(_nothing_sent(_describe(error))))
            return
        except BaseException as error:
            # The crash window: what a signal raises (Ctrl-C) comes between any two lines, also when the tool's thread has begun already.
            if is_interrupt(error):
                raise  # for the process, which ends as in a crash: the intent stands in the journal, without a result
            why = f"{self._what} was interrupted while it was being started, and may be running"
            loop.call_soon(self._finish, Abandoned(Failure(kind="process_died", type=type(error).__name__, message=why)))
            return
        if self._timeout_s is not None:
            body.when_begun(self._begin_to_count)
        body.future.add_done_callback(self._ended)

    def _begin_to_count(self) -> None:
        """The time-out is the tool's: what a sync tool waits for a free thread does not count."""
        if self._done is not None and not self._stopped and self._timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._stop, "timeout")

    def cancel(self) -> None:
        """Ask it to stop. What it answers within the grace still counts: knowledge beats a guess."""
        self._stop("cancelled")

    async def run(self) -> T | Raised | Abandoned:
        """Start it and wait for its end. Always returns: cancelling the task that runs this is the same as `cancel`."""
        answered: asyncio.Future[T | Raised | Abandoned] = asyncio.get_running_loop().create_future()
        self.start(answered.set_result)
        while not answered.done():
            try:
                await asyncio.shield(answered)
            except asyncio.CancelledError:
                # Leaving here would drop an effect that is under way without a word in the journal (T23).
                self.cancel()
        return answered.result()

    def _stop(self, why: Literal["timeout", "cancelled"]) -> None:
        if self._stopped:
            return
        self._stopped = why
        body = self._body
        if body is None or self._done is None or body.future.done():
            return
        self._call.ask_to_stop()
        if body.stop():
            # Not right here: whoever asks it to stop may be in the middle of a turn, and the answer would begin another inside it.
            asyncio.get_running_loop().call_soon(self._finish, self._never_began())
            return
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._give_up)

    def _ended(self, future: asyncio.Future[T | Raised]) -> None:
        if self._done is None:
            return
        if future.cancelled():
            assert self._body is not None
            self._body.abandon()
            self._finish(self._never_began())  # stopped before its first step
            return
        answer = future.result()
        self._finish(Raised(self._interrupted(answer.failure)) if self._stopped and isinstance(answer, Raised) else answer)

    def _give_up(self) -> None:
        assert self._body is not None
        self._body.abandon()
        self._body.future.add_done_callback(self._drop)
        log.warning("%s does not stop; it was given up and may still be running", self._what)
        self._finish(Abandoned(self._stop_failure("and has not stopped since; it may still be running")))

    def _finish(self, answer: T | Raised | Abandoned) -> None:
        done, self._done = self._done, None
        if done is not None:
            self._cancel_timer()
            done(answer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self, future: asyncio.Future[T | Raised]) -> None:
        if not future.cancelled():
            log.warning("%s has ended after it was given up; its outcome is dropped: %.200r", self._what, future.result())

    def _never_began(self) -> Raised:
        return Raised(Failure(kind="not_sent", type="NotSent", message=f"{self._what} was told to stop before it had begun"))

    def _interrupted(self, failure: Failure) -> Failure:
        """The failure of something that we stopped: unless it knows better, the interruption is the reason."""
        if failure.kind in ("cancelled", "process_died"):
            return self._stop_failure("and was stopped")
        if failure.kind == "error":
            assert self._stopped is not None
            return structs.replace(failure, kind=self._stopped)
        return failure

    def _stop_failure(self, after: str) -> Failure:
        if self._stopped == "timeout":
            return Failure(
                kind="timeout", type="TimeoutError", message=f"{self._what} did not answer within {self._timeout_s:g} s, {after}"
            )
        return Failure(kind="cancelled", type="CancelledError", message=f"{self._what} was cancelled {after}")


def begin(fn: Callable[..., Any], is_async: bool, kwargs: dict[str, Any], finish: Callable[[Any], T], threads: Threads) -> Body[T | Raised]:
    """Start a function: on the loop if it is async, else in a thread. `finish` makes an answer of what it returned, and must not raise."""
    return OnLoop(fn(**kwargs), finish) if is_async else InThread(threads, lambda: called(fn, kwargs, finish), lambda: None)


def called(fn: Callable[..., Any], kwargs: dict[str, Any], finish: Callable[[Any], T]) -> T | Raised:
    """Call a sync function, here."""
    try:
        value = fn(**kwargs)
    except BaseException as error:  # SystemExit, KeyboardInterrupt and StopIteration of a tool are failures of its call
        return Raised(_describe(error))
    return finish(value)


class OnLoop(Generic[T]):
    """An async tool: a task of this loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], finish: Callable[[Any], T]) -> None:
        self._coroutine = coroutine
        self._finish = finish
        # Not in a TaskGroup: a tool that does not stop must not keep the run, or the worker, from going on.
        self.future: asyncio.Task[T | Raised] = asyncio.get_running_loop().create_task(self._run())

    def when_begun(self, callback: Callable[[], None]) -> None:
        callback()

    def stop(self) -> bool:
        cancel(self.future)
        return False  # its first step was due before anybody could ask

    def abandon(self) -> None:
        """A task holds no place that another one could need; a coroutine that never began is not left to complain."""
        if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED:
            self._coroutine.close()

    async def _run(self) -> T | Raised:
        _inside.set(True)
        try:
            return self._finish(await self._coroutine)
        except BaseException as error:  # a KeyboardInterrupt or SystemExit that left this task would end the loop, unrecorded (T23)
            if is_interrupt(error):
                # A signal's is for the process, and ends the loop from a callback. What the tool has done until then nobody knows.
                asyncio.get_running_loop().call_soon(_end_loop, error)
                return Raised(Failure(kind="process_died", type=type(error).__name__, message="a signal (Ctrl-C) interrupted it"))
            return Raised(_describe(error))


class InThread(Generic[T]):
    """A sync tool, or the wait for a process: a job of the threads."""

    def __init__(self, threads: Threads, work: Callable[[], T], on_stop: Callable[[], None]) -> None:
        self._threads = threads
        self._job: Job[T] = threads.start(work)
        self._on_stop = on_stop

    @property
    def future(self) -> asyncio.Future[T]:
        return self._job.future

    def when_begun(self, callback: Callable[[], None]) -> None:
        self._threads.when_begun(self._job, callback)

    def stop(self) -> bool:
        if self._threads.withdraw(self._job):
            return True
        self._on_stop()
        return False

    def abandon(self) -> None:
        self._threads.abandon(self._job)


def is_inside_call() -> bool:
    """Whether an async tool, or what it has started, asks this."""
    return _inside.get()


def _end_loop(error: BaseException) -> None:
    raise error


def _describe(error: BaseException) -> Failure:
    return describe(error, datetime.now(UTC))


def _nothing_sent(failure: Failure) -> Failure:
    return structs.replace(failure, kind="not_sent") if failure.kind == "error" else failure
