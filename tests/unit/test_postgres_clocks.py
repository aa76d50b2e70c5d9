"""The server's clock and the local clock.

Only the server's clock counts, however and whenever the local clock is set.
"""

from __future__ import annotations

import time

import pytest

from perdure.store.postgres.connect import Ahead, RoundTripClock

HOUR_US = 3_600_000_000
LOOKS = 8  # at a clock, at most, while the server is asked once


class Clocks:
    """A steady clock, a server that is so far ahead of our wall clock, and that wall clock, which is set at its nth look at any clock."""

    def __init__(self, ahead_us: int, set_at: int, set_by_us: int) -> None:
        self._ahead_us, self._set_at, self._set_by_us = ahead_us, set_at, set_by_us
        self.looks = 0
        self.steady_us = 50_000_000

    def server_us(self) -> int:
        return 1_794_000_000_000_000 + self.steady_us + self._ahead_us

    def time_ns(self) -> int:
        self._tick()
        wrong_us = self._set_by_us if self.looks > self._set_at else 0
        return (1_794_000_000_000_000 + self.steady_us + wrong_us) * 1000

    def clock_gettime_ns(self, which: int) -> int:
        self._tick()
        return self.steady_us * 1000

    def _tick(self) -> None:
        self.looks += 1
        self.steady_us += 10


@pytest.mark.parametrize("ahead_us", [0, 5_000_000])
@pytest.mark.parametrize("set_by_us", [HOUR_US, -HOUR_US])
@pytest.mark.parametrize("set_at", range(LOOKS + 1))
def test_our_clock_may_be_set_at_any_moment_of_the_question(
    set_at: int, set_by_us: int, ahead_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(ahead_us, set_at, set_by_us)
    monkeypatch.setattr(time, "time_ns", clocks.time_ns)
    monkeypatch.setattr(time, "clock_gettime_ns", clocks.clock_gettime_ns)
    asking = RoundTripClock()
    ahead = asking.heard(clocks.server_us())
    while clocks.looks <= LOOKS:
        ahead.by_now_us()
    now_us = time.time_ns() // 1000 + ahead.by_now_us()
    assert abs(now_us - clocks.server_us()) < 1000


def test_a_clock_that_is_nearly_the_same_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(90_000, LOOKS, 0)
    monkeypatch.setattr(time, "time_ns", clocks.time_ns)
    monkeypatch.setattr(time, "clock_gettime_ns", clocks.clock_gettime_ns)
    assert RoundTripClock().heard(clocks.server_us()).us == 0
    assert Ahead.nothing().by_now_us() == 0
