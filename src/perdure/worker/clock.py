"""Time and ids for the shell around the core, which is told both."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator


class Clock:
    """The real clock, as the database has it: workers on several machines go by one time. Tests pass one of their own."""

    still = False  # True: it moves only when it is told to, so that staying for a time that will come is staying for ever

    def __init__(self, ahead_us: Callable[[], int] | None = None) -> None:
        self._ahead_us = ahead_us  # None: the database has no clock of its own
        # 48 bits of time and 40 of chance say which clock this is; a counter does the rest, for a tenth of the price of more chance.
        self._prefix = f"{time.time_ns() // 1_000_000 & 0xFFFF_FFFF_FFFF:012x}{os.urandom(5).hex()}"
        self._ids = itertools.count()

    def follow(self, ahead_us: Callable[[], int]) -> None:
        """Go by a database's clock, which is ahead of this machine's by as much as `ahead_us` says."""
        self._ahead_us = ahead_us

    def now(self) -> int:
        """Microseconds since 1970. For people, timers and leases; never for order."""
        now = time.time_ns() // 1000
        return now if self._ahead_us is None else now + self._ahead_us()

    def on_jump(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Call `ring`, from any thread, whenever the time is set; returns how to end that. The real one flows, and rings for nobody."""
        return lambda: None

    def new_id(self) -> str:
        """32 hex digits that nobody else has."""
        return f"{self._prefix}{next(self._ids):010x}"

    def ids(self) -> Iterator[str]:
        """As many of those as anybody wants."""
        return map(f"{self._prefix}%010x".__mod__, self._ids)
