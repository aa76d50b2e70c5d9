"""Waits that cost no time. Nothing that a resumed run waits for by itself (a timer, a retry, the deadline of an attempt that died) is
worth a minute of a test: when a process has nothing in flight, its clock and its event loop go to the next thing that is due.

As long as a tool, a model or a reconcile hook is under way, time is what it is everywhere. So it is while a hook is about to be asked
about an effect that somebody has begun: what is outside of the process takes its time until it can be found, and no clock of ours makes
it faster. The lab has patience for so many seconds of that; a "not found" after it proves nothing.

Where the lab itself decides when something outside happens (a late request), the run's clock stands still until it has happened: `held`.
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

from perdure.worker.clock import Clock

QUIET_S = 0.01  # without any event before time goes on by itself
_SINGLE_STEPS = 5
_ASKING = "reconcile "  # begins the name of the task that waits for a hook's time, and asks it; the rest is the tool's


class Warp:
    """How far this process is ahead of the real time. Kept in a file, so that the next process does not fall behind."""

    def __init__(self, path: Path, *, allowed: bool, patience_s: float = 0.0, begun: Callable[[str], bool] = lambda tool: False) -> None:
        self._path = path
        self.allowed = allowed
        self._patience_s = patience_s
        self._patient_until_s: float | None = None  # by the real clock; from the first time that there is something to wait for
        self._begun = begun  # whether a tool of that name has been called
        self._expected: dict[Hashable, str] = {}  # what may come from outside, with the tool that it belongs to
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
        """How much longer something that is outside is waited for at its own pace."""
        if not self._expected or self._patient_until_s is None:
            return 0.0
        return max(self._patient_until_s - time.monotonic(), 0.0)

    def expect(self, what: Hashable, tool: str) -> None:
        """The effect of this tool may show any moment. One that was never begun cannot."""
        if self.allowed and self._begun(tool):
            self._expected[what] = tool
            if self._patient_until_s is None:
                self._patient_until_s = time.monotonic() + self._patience_s

    def settle(self, what: Hashable) -> None:
        self._expected.pop(what, None)

    def is_hurried(self, tool: str) -> bool:
        """Whether the tool's effect could still have shown when patience was at its end."""
        return self.allowed and tool in self._expected.values() and self.outside_s == 0.0

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

    @contextmanager
    def held(self) -> Iterator[None]:
        """The run's own time stands still, however long this takes."""
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
        """How far the run's own time is ahead of the real one."""
        with self._lock:
            return self.ahead_s - (time.monotonic() - self._held_since_s if self._holds else 0.0)

    @property
    def loop_s(self) -> float:
        """The run's own time, for its event loop."""
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
    """The clock that the run goes by."""

    def __init__(self, warp: Warp) -> None:
        super().__init__()
        self._warp = warp

    def now(self) -> int:
        return super().now() + round(self._warp.offset_s * 1e6)


class WarpedLoop(asyncio.SelectorEventLoop):
    """The event loop of the same time."""

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
        self._jumps = 0  # in a row

    def select(self, timeout: float | None = None) -> list[Any]:
        if not self._warp.idle:
            self._jumps = 0
        if self._warp.is_held and timeout:
            return super().select(max(timeout, QUIET_S))  # timers do not come nearer: no need to look at them all the time
        if (outside_s := self._warp.outside_s) > 0.0:
            return super().select(outside_s if timeout is None else min(timeout, outside_s))
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
