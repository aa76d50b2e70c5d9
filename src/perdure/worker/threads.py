"""Threads for sync tools: a limited number of them, and none that can keep the process from ending.

Python's own executor joins its threads when the process exits, so that one tool that never returns would keep a worker alive
for ever. These are daemons; one that has been given up does not count against the limit any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from perdure.worker.forked import GHOST

T = TypeVar("T")
_IDLE_S = 10.0

log = logging.getLogger("perdure.worker")


class Job(Generic[T]):
    """A piece of work, waiting for a thread or in one. `work` must not raise; what it returns arrives in `future`."""

    def __init__(self, work: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[T] = loop.create_future()
        self.begun = False
        self.ended = False
        self.abandoned = False
        self.on_begin: Callable[[], None] | None = None
        self._work = work
        self._context = contextvars.copy_context()
        self._pid = os.getpid()

    def run(self) -> None:
        """Do the work, in the context of whoever asked for it, and tell their loop."""
        if self.on_begin is not None:
            self._tell(self.on_begin)
        result: T = self._context.run(self._work)
        if os.getpid() != self._pid:
            os._exit(GHOST)  # the tool has forked, and this is the child
        if not self._tell(self._deliver, result):
            log.warning("a thread has ended after its event loop; its outcome %.200r is dropped", result)

    def _tell(self, callback: Callable[..., None], *args: Any) -> bool:
        try:
            self.future.get_loop().call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False  # the loop was closed meanwhile: nobody is there to be told
        return True

    def _deliver(self, result: T) -> None:
        if not self.future.done():
            self.future.set_result(result)


class Threads:
    """At most `limit` jobs at a time, first come, first served. Everything but `start` may be called from any thread."""

    def __init__(self, limit: int) -> None:
        assert limit >= 1, limit
        self._limit = limit
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._waiting: deque[Job[Any]] = deque()
        self._idle = 0
        self._alive = 0  # threads that count against the limit

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Have the work done as soon as a thread is free. RuntimeError when the system gives us no thread."""
        job = Job(work, asyncio.get_running_loop())
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

    def when_begun(self, job: Job[Any], callback: Callable[[], None]) -> None:
        """Call back, on the loop's thread, when a thread has begun with the job; at once if one has."""
        with self._lock:
            if not job.begun:
                job.on_begin = callback
                return
        callback()

    def withdraw(self, job: Job[Any]) -> bool:
        """Take back a job that no thread has begun; False when one has."""
        with self._lock:
            if job.begun:
                return False
            job.begun = True  # nobody else will
            self._waiting.remove(job)
            return True

    def abandon(self, job: Job[Any]) -> None:
        """Stop counting a job that does not end: its place is free for another one, its thread ends with it."""
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

    def _next(self) -> Job[Any] | None:
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
