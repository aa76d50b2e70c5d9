"""The server's clock beside ours, which somebody may set at any moment, also while the server is asked."""

from __future__ import annotations

import time
from typing import NamedTuple

_SAME_US = 100_000  # clocks that differ by less are the same to us
# One that nobody can set, and that goes on while the machine sleeps, where there is such a one: the wall clock does.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Ahead(NamedTuple):
    """By how much the server's clock was ahead of ours when it was asked."""

    us: int
    beyond_us: int  # what our wall clock showed then beyond the steady one

    @classmethod
    def nothing(cls) -> Ahead:
        return cls(0, _beyond_us())

    def by_now_us(self) -> int:
        """The same, also if our clock was set since then."""
        set_us = _beyond_us() - self.beyond_us
        return self.us - set_us if abs(set_us) > _SAME_US else self.us


class Asking:
    """Made right before the server is asked for its time."""

    def __init__(self) -> None:
        self._asked_us = _steady_us()

    def heard(self, server_us: int) -> Ahead:
        """Nothing when it may be nothing: a clock that follows should not tremble."""
        heard_us, beyond_us = _steady_us(), _beyond_us()
        # By the steady clock until here. Against a wall clock that is set between the question and this line everybody's time would be
        # wrong by as much from then on, and whatever sleeps would wake.
        difference_us = server_us - (self._asked_us + heard_us) // 2 - beyond_us
        return Ahead(difference_us if abs(difference_us) > heard_us - self._asked_us + _SAME_US else 0, beyond_us)


def _steady_us() -> int:
    return time.clock_gettime_ns(_STEADY) // 1000


def _beyond_us() -> int:
    return time.time_ns() // 1000 - _steady_us()
