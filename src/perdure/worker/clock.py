"""Time and ids for the shell around the core, which is told both."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable


class Clock:
    """The real clock, as the database has it: workers on several machines go by one time. Tests pass one of their own."""

    still = False  # True: it moves only when it is told to, so that staying for a time that will come is staying for ever

    def __init__(self, ahead_us: Callable[[], int] = lambda: 0) -> None:
        self._ahead_us = ahead_us
        # 48 bits of time and 40 of chance say which clock this is; a counter does the rest, for a tenth of the price of more chance.
        self._prefix = f"{time.time_ns() // 1_000_000 & 0xFFFF_FFFF_FFFF:012x}{os.urandom(5).hex()}"
        self._ids = itertools.count()

    def now(self) -> int:
        """Microseconds since 1970. For people, timers and leases; never for order."""
        return time.time_ns() // 1000 + self._ahead_us()

    def on_jump(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Call `ring`, from any thread, whenever the time is set; returns how to end that. The real one flows, and rings for nobody."""
        return lambda: None

    def new_id(self) -> str:
        """32 hex digits that nobody else has."""
        return f"{self._prefix}{next(self._ids):010x}"
