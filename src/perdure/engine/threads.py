"""The engine's own threads: for questions to a slow store, and for sync tools. Also a guard for tools that fork.

The threads of `asyncio.to_thread` are shared by the whole process: if a dozen tools blocked there, they would also
block the questions to the store.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from perdure.errors import StoreError

T = TypeVar("T")
_THREADS = 8


class ReadingThreads:
    """Asks the store on threads. A thread is started when it is needed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "perdure-store")

    async def ask(self, question: Callable[[], T], unwanted: Callable[[T], None] | None = None) -> T:
        """The answer. If the caller is cancelled first, `unwanted` gets the late answer, on any thread."""
        asked = self._submit(question)
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            if unwanted is not None:
                asked.add_done_callback(lambda late: None if late.cancelled() or late.exception() else unwanted(late.result()))
            raise

    def start(self, question: Callable[[], T]) -> asyncio.Future[T]:
        """Like ask, for a plain callback of the loop, which cannot await."""
        return asyncio.wrap_future(self._submit(question))

    def close(self) -> None:
        """Refuse new questions. This does not wait: questions under way end by themselves."""
        self._threads.shutdown(wait=False)

    def _submit(self, question: Callable[[], T]) -> Future[T]:
        try:
            return self._threads.submit(question)
        except RuntimeError as error:
            raise StoreError(f"this worker or app is closed and asks the store nothing more: {error}") from None


# -- threads for sync tools: their number is limited, and they are daemons, so that the process can end without them

_IDLE_S = 10.0

log = logging.getLogger("perdure.worker")


class Job:
    """One piece of work, which waits for a thread or runs in a thread.

    `work` must not raise an exception; `done` gets the result of `work`, on the loop.
    """

    __slots__ = ("_context", "_done", "_loop", "_on_begin", "_pid", "_work", "abandoned", "begun", "ended")

    def __init__(self, work: Callable[[], T], done: Callable[[T], None], on_begin: Callable[[], None] | None) -> None:
        self.begun = False
        self.ended = False
        self.abandoned = False
        self._work: Callable[[], Any] = work
        self._done: Callable[[Any], None] = done
        self._on_begin = on_begin
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._pid = os.getpid()

    def run(self) -> None:
        """Do the work, in a copy of the context in which the job was created, and give the result to the loop."""
        if self._on_begin is not None:
            self._tell(self._on_begin)
        # Use a copy of the context: `done` runs in the context itself, and must not see variables that the work sets.
        result = self._context.copy().run(self._work)
        if os.getpid() != self._pid:
            os._exit(GHOST)  # the tool has forked, and this is the child
        if not self._tell(self._done, result):
            log.warning("a thread has ended after its event loop; its outcome %.200r is dropped", result)

    def _tell(self, callback: Callable[..., None], *args: Any) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *args, context=self._context)
        except RuntimeError:
            return False  # the loop has been closed meanwhile
        return True


class Threads:
    """Runs at most `limit` jobs at a time, in the order in which they were started.

    Every method except `start` may be called from any thread.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 1, limit
        self._limit = limit
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._waiting: deque[Job] = deque()
        self._idle = 0
        self._alive = 0  # threads that count against the limit

    def start(self, work: Callable[[], T], done: Callable[[T], None], on_begin: Callable[[], None] | None = None) -> Job:
        """Do the work as soon as a thread is free. RuntimeError if the system cannot start a thread.

        On the loop's thread, `on_begin` is called when a thread has begun the work, and `done` with the result.
        """
        job = Job(work, done, on_begin)
        with self._lock:
            self._waiting.append(job)
            if self._idle >= len(self._waiting):
                self._arrived.notify()
            elif self._alive < self._limit:
                try:
                    self._add_thread()
                except RuntimeError:
                    if not self._alive:
                        self._waiting.remove(job)
                        raise
        return job

    def withdraw(self, job: Job) -> bool:
        """Remove a job that no thread has begun. False: a thread has begun the job, or it was withdrawn before."""
        with self._lock:
            if job.begun:
                return False
            job.begun = True  # so that a second `withdraw` returns False
            self._waiting.remove(job)
            return True

    def abandon(self, job: Job) -> None:
        """Stop counting a job that does not end: another thread takes its place. Its own thread ends after the job."""
        with self._lock:
            if not job.begun or job.ended or job.abandoned:
                return
            job.abandoned = True
            self._alive -= 1
            if self._waiting:
                self._add_thread()

    def _add_thread(self) -> None:
        threading.Thread(target=self._serve, name="perdure-tool", daemon=True).start()
        self._alive += 1

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._lock:
                job.ended = True
                if job.abandoned:
                    return

    def _next(self) -> Job | None:
        with self._lock:
            while not self._waiting:
                self._idle += 1
                woken = self._arrived.wait(_IDLE_S)
                self._idle -= 1
                if not woken and not self._waiting:
                    self._alive -= 1
                    return None
            job = self._waiting.popleft()
            job.begun = True
            return job


# -- tools that fork: the event loop must not continue in the child process


GHOST = 70  # the exit code of a forked child process whose tool returned into perdure's code
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_installed = False  # global, since a fork hook belongs to the process and cannot be removed


def guard(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, a forked child process exits as soon as this loop runs in it."""
    global _installed
    _loops.add(loop)
    if not _installed:
        _installed = True
        os.register_at_fork(after_in_child=_end_loops)


def _end_loops() -> None:
    for loop in list(_loops):
        ready = getattr(loop, "_ready", None)  # the callbacks of the present iteration must not run either
        if ready is not None:
            ready.clear()
        loop.call_soon(os._exit, GHOST)
