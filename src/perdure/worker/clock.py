"""Time and ids for the shell around the core, which is told both."""

from __future__ import annotations

import os
import time


class Clock:
    """The real clock. Tests pass one of their own."""

    def now(self) -> int:
        """Microseconds since 1970. For people, timers and leases; never for order."""
        return time.time_ns() // 1000

    def new_id(self) -> str:
        """32 hex digits that nobody else has, roughly in order of time (UUID version 7)."""
        chance = int.from_bytes(os.urandom(10), "big")
        millis = time.time_ns() // 1_000_000
        whole = (millis & 0xFFFF_FFFF_FFFF) << 80 | chance & ~(0xF << 76) | 0x7 << 76
        return f"{whole & ~(0x3 << 62) | 0x2 << 62:032x}"
