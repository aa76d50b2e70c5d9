"""A clock that only the test moves: three days of waiting take no time, and no timer fires without the test."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from perdure.core.codec import shown
from perdure.core.times import micros_of, utc
from perdure.engine.clock import Clock
from perdure.errors import InvalidInput

_MICROSECOND = timedelta(microseconds=1)


def at(now_us: int) -> datetime:
    """The time that is `now_us` microseconds after the beginning of 1970, without rounding."""
    return utc(now_us)


class ManualClock(Clock):
    """A clock for `Perdure(clock=…)` that only moves when the test says so.

    Timers, backoffs, approvals, key windows and `not_before` use this clock. Three things still use real time, because
    they belong to the machine and not to the run: the timeout of an attempt, leases, and the polling of the database.
    """

    still = True

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        super().__init__()
        self.now_us = round(now_s * 1e6)
        self._rings: list[Callable[[], None]] = []

    def now(self) -> int:
        return self.now_us

    @property
    def time(self) -> datetime:
        """The time that the clock shows, in UTC."""
        return at(self.now_us)

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> None:
        """Let this much time pass at once.

        Runs that waited for this time continue, in every open app that uses this clock.
        """
        try:
            step = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        except (TypeError, OverflowError, ValueError) as error:
            raise InvalidInput(f"advance: {error}; give numbers, such as advance(days=3)") from None
        if step < timedelta(0):
            raise InvalidInput(f"advance: {step.total_seconds():g} seconds: it only moves the clock forward; set_to(…) sets it back")
        self.now_us += step // _MICROSECOND
        self._ring()

    def advance_to(self, when: datetime) -> None:
        """Let time pass until `when`. If that time is already past, the clock does not move."""
        self.now_us = max(self.now_us, _microseconds("advance_to", when))
        self._ring()

    def set_to(self, when: datetime) -> None:
        """Set the clock to this time, also to an earlier time, as a person can set the clock of a machine."""
        self.now_us = _microseconds("set_to", when)
        self._ring()

    def on_jump(self, ring: Callable[[], None]) -> Callable[[], None]:
        self._rings.append(ring)
        return lambda: self._rings.remove(ring) if ring in self._rings else None

    def _ring(self) -> None:
        for ring in list(self._rings):
            ring()


def _microseconds(method: str, when: datetime) -> int:
    if not isinstance(when, datetime) or when.tzinfo is None:
        raise InvalidInput(f"{method}({shown(when)}): a datetime with a time zone")
    return micros_of(when)
