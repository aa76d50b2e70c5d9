"""How long an event loop is blocked by other code, measured on a machine that may be busy."""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType

_TURN_S = 0.01


class Stalls:
    """Measures stalls of a loop. Enter it while the loop runs.

    Time is counted in turns of a thread in the same process. If the machine is too busy for the loop, it is too busy
    for this thread as well, so the work of other processes does not count.
    """

    def __init__(self) -> None:
        self._turns = self._last = self._longest = 0
        self._over = threading.Event()
        self._beside = threading.Thread(target=self._turn, daemon=True)

    def __enter__(self) -> Stalls:
        self._beside.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._beside.join()

    def _turn(self) -> None:
        while not self._over.wait(_TURN_S):
            self._turns += 1

    async def watch(self) -> None:
        """Look, for ever."""
        self.reset()
        while True:
            await asyncio.sleep(_TURN_S / 2)
            self._longest, self._last = max(self._longest, self._turns - self._last), self._turns

    async def watch_for(self, seconds: float) -> None:
        """Look for so long, and longer when the machine is busy."""
        until_s = time.monotonic() + seconds
        watching = asyncio.ensure_future(self.watch())
        begun = self._turns
        while time.monotonic() < until_s or self._turns - begun < seconds / _TURN_S / 4:
            await asyncio.sleep(_TURN_S)
        watching.cancel()

    def reset(self) -> None:
        self._longest, self._last = 0, self._turns

    @property
    def longest_s(self) -> float:
        """The longest stall since the last reset. A stall that is under way counts."""
        return max(self._longest, self._turns - self._last) * _TURN_S
