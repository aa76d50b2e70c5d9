"""Waits that cost no time. Nothing that a resumed run waits for by itself (a timer, a retry, the deadline of an attempt that died) is
worth a minute of a test: when a process has nothing in flight, its clock and its event loop go to the next thing that is due.

As long as a tool, a model or a reconcile hook is under way, time is what it is everywhere.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.worker.clock import Clock

QUIET_S = 0.01  # without any event before time goes on by itself
_SINGLE_STEPS = 5


class Warp:
    """How far this process is ahead of the real time. Kept in a file, so that the next process does not fall behind."""

    def __init__(self, path: Path, *, allowed: bool) -> None:
        self._path = path
        self.allowed = allowed
        self.ahead_s = float(path.read_text()) if path.exists() else 0.0
        self._in_flight = 0
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        return self.allowed and self._in_flight == 0

    @contextmanager
    def real_time(self) -> Iterator[None]:
        """Something of the user's is under way."""
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def jump(self, seconds: float) -> None:
        self.ahead_s += seconds
        new = self._path.with_suffix(".new")
        new.write_text(repr(self.ahead_s))
        new.replace(self._path)


class WarpedClock(Clock):
    """The clock that the run goes by."""

    def __init__(self, warp: Warp) -> None:
        super().__init__()
        self._warp = warp

    def now(self) -> int:
        return super().now() + round(self._warp.ahead_s * 1e6)


class WarpedLoop(asyncio.SelectorEventLoop):
    """The event loop of the same time."""

    def __init__(self, warp: Warp) -> None:
        self._warp = warp
        super().__init__(_Selector(warp))

    def time(self) -> float:
        return super().time() + self._warp.ahead_s


class _Selector(selectors.DefaultSelector):
    def __init__(self, warp: Warp) -> None:
        super().__init__()
        self._warp = warp
        self._jumps = 0  # in a row

    def select(self, timeout: float | None = None) -> list[Any]:
        if not self._warp.idle:
            self._jumps = 0
        if timeout is None or timeout <= QUIET_S or not self._warp.idle:
            return super().select(timeout)
        events = super().select(QUIET_S)
        if events or not self._warp.idle:
            self._jumps = 0
        else:
            # Timers that only look whether there is something to do come every second: whoever waits for minutes goes in longer steps.
            self._jumps += 1
            self._warp.jump((timeout - QUIET_S) * 2.0 ** max(self._jumps - _SINGLE_STEPS, 0))
        return events
