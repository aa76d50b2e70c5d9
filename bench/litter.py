"""What a repeat leaves behind is not the next one's cost: it is collected in between."""

from __future__ import annotations

import gc
import signal
from types import FrameType


def collect() -> None:
    """Collect everything, and lose no Ctrl-C over it: what is raised in a callback of a collected object is printed, and forgotten."""
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
