"""The parts of `threading`, `queue`, `time` and `concurrent.futures` that the runtime uses, on simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tests.sim.kernel import Kernel, Killed, Process, Strand


class Time:
    """In place of the module `time`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.work_us = 0  # the cost of commits that no strand has waited for

    def monotonic(self) -> float:
        return self._kernel.now_us / 1e6

    def perf_counter(self) -> float:
        return (self._kernel.now_us + self.work_us) / 1e6

    def time_ns(self) -> int:
        return self._kernel.wall_us * 1000

    def sleep(self, seconds: float) -> None:
        self._kernel.sleep(round(seconds * 1e6))


def _own(kernel: Kernel) -> Process:
    process = kernel.current.process
    assert process is not None, "only processes have threads"
    return process


class Threading:
    """In place of the module `threading`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def Lock(self) -> Latch:
        return Latch(self._kernel)

    def Event(self) -> Event:
        return Event(self._kernel)

    def Condition(self, lock: Latch) -> Condition:
        return Condition(self._kernel, lock)

    def Thread(self, target: Callable[[], None], name: str, daemon: bool) -> Thread:
        return Thread(self._kernel, target)


class Thread:
    def __init__(self, kernel: Kernel, target: Callable[[], None]) -> None:
        self._kernel = kernel
        self._target = target
        self._strand: Strand | None = None

    def start(self) -> None:
        self._strand = self._kernel.spawn(_own(self._kernel), self._run)

    def _run(self) -> None:
        self._target()
        assert self._strand is not None
        for waiter in _waiters(self._kernel, self._strand):
            self._kernel.wake(waiter, self._strand)

    def is_alive(self) -> bool:
        return self._strand is not None and not self._strand.ended

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            until_us = None if timeout is None else self._kernel.now_us + round(timeout * 1e6)
            self._kernel.block(self._strand, until_us)


def _waiters(kernel: Kernel, on: object) -> list[Strand]:
    return [strand for strand in _own(kernel).strands if strand.waits_on is on]


class Event:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._set = False

    def set(self) -> None:
        self._set = True
        for strand in _waiters(self._kernel, self):
            self._kernel.wake(strand, self)

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._kernel.block(self, None if timeout is None else self._kernel.now_us + round(timeout * 1e6))
        return self._set


class Latch:
    """A real lock would stop the whole world when its owner waits for the store: only one strand runs at a time."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._held = False
        self._waiting: deque[Strand] = deque()

    def acquire(self) -> bool:
        while self._held:
            self._waiting.append(self._kernel.current)
            self._kernel.block(self)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._waiting:
            self._kernel.wake(self._waiting.popleft(), self)

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, kernel: Kernel, lock: Latch) -> None:
        self._kernel = kernel
        self._lock = lock

    def wait(self, timeout: float) -> bool:
        self._lock.release()
        try:
            return self._kernel.block(self, self._kernel.now_us + round(timeout * 1e6))
        finally:
            self._lock.acquire()

    def notify(self) -> None:
        for strand in _waiters(self._kernel, self)[:1]:
            self._kernel.wake(strand, self)


class Queue:
    """In place of `queue.SimpleQueue`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        for strand in _waiters(self._kernel, self)[:1]:
            self._kernel.wake(strand, self)

    def get(self) -> Any:
        while not self._items:
            self._kernel.block(self)
        return self._items.popleft()

    get_nowait = get

    def empty(self) -> bool:
        return not self._items


class Queues:
    """In place of the module `queue`."""

    def __init__(self, kernel: Kernel) -> None:
        self.SimpleQueue = _Made(lambda: Queue(kernel))


class _Made:
    """A class that is called, and written in square brackets by annotations."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        return self._make()

    def __getitem__(self, _: Any) -> _Made:
        return self


class Pool:
    """In place of `concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, kernel: Kernel, limit: int) -> None:
        self._kernel = kernel
        self._limit = limit
        self._busy = 0
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: work(*args)))
        if self._busy < self._limit:
            self._busy += 1
            self._kernel.spawn(_own(self._kernel), self._serve)
        return future

    def shutdown(self, wait: bool = True) -> None:
        self._closed = True

    def _serve(self) -> None:
        while self._waiting:
            future, work = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                answer = work()
            except Killed:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(answer)
        self._busy -= 1
