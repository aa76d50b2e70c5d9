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
from typing import Any, TypeVar

from perdure.worker.forked import GHOST

T = TypeVar("T")
_IDLE_S = 10.0

log = logging.getLogger("perdure.worker")


class Job:
    """A piece of work, waiting for a thread or in one. `work` must not raise; `done` is called on the loop with what it returned."""

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
        """Do the work, in a copy of the context in which it was started, and tell the loop."""
        if self._on_begin is not None:
            self._tell(self._on_begin)
        # A copy: what the work sets there must not be seen by what `done` begins, which runs in the context itself.
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
    """At most `limit` jobs at a time, first come, first served. Everything but `start` may be called from any thread."""

    def __init__(self, limit: int) -> None:
        assert limit >= 1, limit
        self._limit = limit
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._waiting: deque[Job] = deque()
        self._idle = 0
        self._alive = 0  # threads that count against the limit

    def start(self, work: Callable[[], T], done: Callable[[T], None], on_begin: Callable[[], None] | None = None) -> Job:
        """Have the work done as soon as a thread is free. RuntimeError when the system gives us no thread.

        On the loop's thread `on_begin` is called when a thread has begun with it, and `done` with what it returned.
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
        """Take back a job that no thread has begun; False when one has."""
        with self._lock:
            if job.begun:
                return False
            job.begun = True  # nobody else will
            self._waiting.remove(job)
            return True

    def abandon(self, job: Job) -> None:
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
