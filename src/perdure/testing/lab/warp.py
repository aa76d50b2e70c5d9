"""A clock that skips waits: if a process has nothing in flight, its clock and event loop jump to the next due time.

A run waits for timers, for retries, and for the deadline of an attempt whose process was killed. A test need not wait
for these in real time.

While a tool, a model or a reconcile hook is under way, the clock runs in real time. The clock also runs in real time
while perdure waits to ask a hook about an effect that has begun: a service needs real time until the effect can be
found. The lab waits like this for `patience_s` seconds in all. After that a "not found" proves nothing.

For a late request the lab itself decides when the request arrives. Until it has arrived, the run's clock stands still:
see `held`.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.engine.clock import Clock

QUIET_S = 0.01  # the clock jumps after this many seconds without any event
_SINGLE_STEPS = 5
_ASKING = "reconcile "  # a task that waits and then asks a hook has this name, plus the name of the tool


class Warp:
    """How far the clock of this process is ahead of real time. A file keeps this for the next process of the trial."""

    def __init__(self, path: Path, *, allowed: bool, patience_s: float = 0.0, begun: Callable[[str], bool] = lambda tool: False) -> None:
        self._path = path
        self.allowed = allowed
        self._patience_s = patience_s
        self._patient_until_s: float | None = None  # by the real clock; it is set when the first effect is expected
        self._begun = begun  # a function: was the tool with this name called?
        self._expected: dict[Hashable, str] = {}  # effect that may still become visible outside → its tool
        self.ahead_s = float(path.read_text()) if path.exists() else 0.0
        self._in_flight = 0
        self._holds = 0
        self._held_since_s = 0.0  # by the real clock
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        return self.allowed and self._in_flight == 0 and self.outside_s == 0.0

    @property
    def outside_s(self) -> float:
        """How many more seconds of real time the lab waits until effects are visible in outside services."""
        if not self._expected or self._patient_until_s is None:
            return 0.0
        return max(self._patient_until_s - time.monotonic(), 0.0)

    def expect(self, what: Hashable, tool: str) -> None:
        """From now on the effect of this tool may become visible outside. If the tool was never called: no change."""
        if self.allowed and self._begun(tool):
            self._expected[what] = tool
            if self._patient_until_s is None:
                self._patient_until_s = time.monotonic() + self._patience_s

    def settle(self, what: Hashable) -> None:
        self._expected.pop(what, None)

    def is_hurried(self, tool: str) -> bool:
        """Did the lab's patience end while the effect of this tool could still become visible?"""
        return self.allowed and tool in self._expected.values() and self.outside_s == 0.0

    @contextmanager
    def real_time(self) -> Iterator[None]:
        """The clock does not jump in this block: a tool, a model or a hook is under way."""
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """The run's clock stands still in this block."""
        with self._lock:
            if not self._holds:
                self._held_since_s = time.monotonic()
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                if not self._holds:
                    self._go_ahead(self._held_since_s - time.monotonic())

    @property
    def is_held(self) -> bool:
        return self._holds > 0

    @property
    def offset_s(self) -> float:
        """How far the run's clock is ahead of the real clock."""
        with self._lock:
            return self.ahead_s - (time.monotonic() - self._held_since_s if self._holds else 0.0)

    @property
    def loop_s(self) -> float:
        """The time of the run's clock, for the event loop."""
        with self._lock:
            return self.ahead_s + (self._held_since_s if self._holds else time.monotonic())

    def jump(self, seconds: float) -> None:
        with self._lock:
            self._go_ahead(seconds)

    def _go_ahead(self, seconds: float) -> None:
        self.ahead_s += seconds
        new = self._path.with_suffix(".new")
        new.write_text(repr(self.ahead_s))
        new.replace(self._path)


class WarpedClock(Clock):
    """The run's clock: the real clock plus the warp."""

    def __init__(self, warp: Warp) -> None:
        super().__init__()
        self._warp = warp

    def now(self) -> int:
        return super().now() + round(self._warp.offset_s * 1e6)


class WarpedLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers use the run's clock."""

    def __init__(self, warp: Warp) -> None:
        self._warp = warp
        super().__init__(_Selector(warp))

    def time(self) -> float:
        return self._warp.loop_s

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        name = options.get("name") or ""
        if name.startswith(_ASKING):
            self._warp.expect(task, name.removeprefix(_ASKING))
            task.add_done_callback(self._warp.settle)
        return task


class _Selector(selectors.DefaultSelector):
    def __init__(self, warp: Warp) -> None:
        super().__init__()
        self._warp = warp
        self._jumps = 0  # the number of jumps in a row, without an event between them

    def select(self, timeout: float | None = None) -> list[Any]:
        if not self._warp.idle:
            self._jumps = 0
        if self._warp.is_held and timeout:
            return super().select(max(timeout, QUIET_S))  # while the clock stands still, no timer can become due
        if (outside_s := self._warp.outside_s) > 0.0:
            return super().select(outside_s if timeout is None else min(timeout, outside_s))
        if timeout is None or timeout <= QUIET_S or not self._warp.idle:
            return super().select(timeout)
        events = super().select(QUIET_S)
        if events or not self._warp.idle:
            self._jumps = 0
        else:
            # Timers for polling are due every second. Later jumps in a row are longer, so that minutes can be skipped
            # without hundreds of jumps.
            self._jumps += 1
            self._warp.jump((timeout - QUIET_S) * 2.0 ** max(self._jumps - _SINGLE_STEPS, 0))
        return events
