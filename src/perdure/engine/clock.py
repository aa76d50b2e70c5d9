"""Time and ids for the engine. The core has no clock: it gets both from here."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator


class Clock:
    """The database's clock, so that workers on several machines share one time. Tests use other clocks."""

    still = False  # True: the clock moves only when it is set, so that a wait for a later time would never end

    def __init__(self, ahead_us: Callable[[], int] | None = None) -> None:
        self._ahead_us = ahead_us  # None: the database has no clock of its own
        # 48 bits of time and 40 random bits identify this clock. A counter makes each id unique; this is ten times
        # cheaper than more random bits.
        self._prefix = f"{time.time_ns() // 1_000_000 & 0xFFFF_FFFF_FFFF:012x}{os.urandom(5).hex()}"
        self._ids = itertools.count()

    def follow(self, ahead_us: Callable[[], int]) -> None:
        """Follow a database's clock, which is ahead of this machine's clock by `ahead_us()`."""
        self._ahead_us = ahead_us

    def now(self) -> int:
        """Microseconds since 1970, for people, timers and leases. The order of events never depends on this time."""
        now = time.time_ns() // 1000
        return now if self._ahead_us is None else now + self._ahead_us()

    def on_jump(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Call `ring`, from any thread, whenever the clock is set. Returns a function that ends the calls.

        The real clock never calls `ring`; the clocks of tests do.
        """
        return lambda: None

    def new_id(self) -> str:
        """A globally unique id of 32 hex digits."""
        return f"{self._prefix}{next(self._ids):010x}"

    def ids(self) -> Iterator[str]:
        """An endless iterator over new ids, in the form of new_id."""
        return map(f"{self._prefix}%010x".__mod__, self._ids)
