"""Garbage collection between two repeats, so that the garbage of one repeat costs no time in the next repeat."""

from __future__ import annotations

import gc
import signal
from types import FrameType


def collect() -> None:
    """Collect all garbage, and do not lose a Ctrl-C: Python prints an exception in a finalizer, and drops it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        gc.collect()
        return
    interrupts: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)

    signal.signal(signal.SIGINT, keep)
    try:
        gc.collect()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt
