"""One attempt: started, timed, asked to stop, and always answered for.

Whatever runs – a task of the loop, a thread, a process – the attempt ends once, with an answer, at the latest when its deadline
(or a cancel) and the grace after it have passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Generic, Literal, Protocol, TypeVar

from msgspec import structs

from perdure.core.events import Failure
from perdure.core.failures import describe
from perdure.tool import Call
from perdure.worker.answers import Abandoned, Raised
from perdure.worker.threads import Job, Threads

T = TypeVar("T")

log = logging.getLogger("perdure.worker")


class Body(Protocol[T]):
    """Something that is running: a task, a thread or a process."""

    @property
    def future(self) -> asyncio.Future[T]:
        """Resolves to an answer, and never to an exception."""

    def stop(self) -> bool:
        """Have it end soon; True when it had not even begun and never will."""

    def abandon(self) -> None:
        """Nobody waits for it any more."""


class Attempt(Generic[T]):
    """One attempt. Await `run` for its end; `cancel` asks it to stop. Both on the loop's own thread."""

    def __init__(self, begin: Callable[[], Body[T | Raised]], call: Call, *, what: str, timeout_s: float | None, grace_s: float) -> None:
        self._begin = begin
        self._call = call
        self._what = what
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._stopped: Literal["timeout", "cancelled"] | None = None
        self._grace_over = False
        self._woken: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """Ask it to stop. What it answers within the grace still counts: knowledge beats a guess."""
        self._stop("cancelled")

    async def run(self) -> T | Raised | Abandoned:
        """Perform it. Always returns: cancelling the task that runs this is the same as `cancel`."""
        if self._stopped:
            return self._never_began()
        try:
            body = self._begin()
        except BaseException as error:  # the arguments do not fit any more, or there is no thread: nothing was sent
            return Raised(_nothing_sent(_describe(error)))
        body.future.add_done_callback(self._wake)
        loop = asyncio.get_running_loop()
        timer = None if self._timeout_s is None else loop.call_later(self._timeout_s, self._stop, "timeout")
        try:
            while not body.future.done() and not self._stopped:
                await self._until_woken()
        finally:
            if timer is not None:
                timer.cancel()
        return body.future.result() if body.future.done() else await self._end(body)

    async def _end(self, body: Body[T | Raised]) -> T | Raised | Abandoned:
        self._call.ask_to_stop()
        if body.stop():
            return self._never_began()
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._end_grace)
        while not body.future.done() and not self._grace_over:
            await self._until_woken()
        timer.cancel()
        if body.future.done():
            answer = body.future.result()
            return Raised(self._interrupted(answer.failure)) if isinstance(answer, Raised) else answer
        body.abandon()
        body.future.add_done_callback(self._drop)
        log.warning("%s does not stop; it was given up and may still be running", self._what)
        return Abandoned(self._stop_failure("and has not stopped since; it may still be running"))

    def _stop(self, why: Literal["timeout", "cancelled"]) -> None:
        self._stopped = self._stopped or why
        self._wake()

    def _end_grace(self) -> None:
        self._grace_over = True
        self._wake()

    def _wake(self, _: object = None) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _until_woken(self) -> None:
        self._woken = asyncio.get_running_loop().create_future()
        try:
            await self._woken
        except asyncio.CancelledError:
            # Leaving here would drop an effect that is under way without a word in the journal (T23).
            self._stop("cancelled")

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
    if is_async:
        return OnLoop(lambda: fn(**kwargs), finish)

    def work() -> T | Raised:
        try:
            value = fn(**kwargs)
        except BaseException as error:  # SystemExit, KeyboardInterrupt and StopIteration of a tool are failures of its call
            return Raised(_describe(error))
        return finish(value)

    return InThread(threads, work, lambda: None)


class OnLoop(Generic[T]):
    """An async tool: a task of this loop."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]], finish: Callable[[Any], T]) -> None:
        self._make = make
        self._finish = finish
        # Not in a TaskGroup: a tool that does not stop must not keep the run, or the worker, from going on.
        self.future: asyncio.Task[T | Raised] = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> bool:
        self.future.cancel()
        return False  # its first step was due before anybody could ask

    def abandon(self) -> None:
        """A task holds no place that another one could need."""

    async def _run(self) -> T | Raised:
        try:
            value = await self._make()
        except BaseException as error:  # a KeyboardInterrupt or SystemExit that left this task would end the loop, unrecorded (T23)
            return Raised(_describe(error))
        return self._finish(value)


class InThread(Generic[T]):
    """A sync tool, or the wait for a process: a job of the threads."""

    def __init__(self, threads: Threads, work: Callable[[], T], on_stop: Callable[[], None]) -> None:
        self._threads = threads
        self._job: Job[T] = threads.start(work)
        self._on_stop = on_stop

    @property
    def future(self) -> asyncio.Future[T]:
        return self._job.future

    def stop(self) -> bool:
        if self._threads.withdraw(self._job):
            return True
        self._on_stop()
        return False

    def abandon(self) -> None:
        self._threads.abandon(self._job)


def _describe(error: BaseException) -> Failure:
    return describe(error, datetime.now(UTC))


def _nothing_sent(failure: Failure) -> Failure:
    return structs.replace(failure, kind="not_sent") if failure.kind == "error" else failure
