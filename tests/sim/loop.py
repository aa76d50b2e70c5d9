"""asyncio's own event loop, on simulated time.

Instead of waiting for sockets, it gives the baton to another strand.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

from tests.sim.kernel import Kernel, Process

TURN_US = 30  # the time of one iteration of the loop


class SimTask(asyncio.Task[Any]):
    """A task whose hash is its number: in asyncio the order of sets is random, and here it must not be."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], loop: SimLoop, **options: Any) -> None:
        self.number = number
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


class SimFuture(asyncio.Future[Any]):
    def __init__(self, number: int, loop: SimLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.BaseEventLoop):
    """One for each process, in its first strand."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        super().__init__()
        self._kernel = kernel
        self._process = process
        self._strand = kernel.current
        self._selector = self
        self._numbers = 0
        self._open: dict[int, SimTask] = {}
        process.keeps.append(self._open)

    def time(self) -> float:
        return self._kernel.now_us / 1e6

    def select(self, timeout: float | None) -> list[Any]:
        """Wait, as a selector does; a turn with something left to do takes its time too, so that others get theirs."""
        kernel = self._kernel
        if timeout is None:
            kernel.block(self)
        elif timeout > 0:
            kernel.block(self, kernel.now_us + math.ceil(timeout * 1e6))
        else:
            kernel.block(None, kernel.now_us + TURN_US)
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        self._kernel.wake(self._strand, self)

    def create_future(self) -> asyncio.Future[Any]:
        self._numbers += 1
        return SimFuture(self._numbers, self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> SimTask:  # type: ignore[override]
        self._numbers += 1
        task = SimTask(self._numbers, coro, self, **options)
        self._open[task.number] = task
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        assert isinstance(task, SimTask)
        self._open.pop(task.number, None)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An error that no code has caught is an error of perdure."""
        error = context.get("exception")
        if not self._process.dead:
            self._kernel.fail(
                error if isinstance(error, Exception) else RuntimeError(context.get("message", "an error that nobody has caught"))
            )


def run(kernel: Kernel, process: Process, main: Coroutine[Any, Any, None]) -> None:
    """Like `asyncio.run`, in its own process."""
    loop = SimLoop(kernel, process)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main)
    finally:
        asyncio.set_event_loop(None)
        for task in loop._open.values():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
