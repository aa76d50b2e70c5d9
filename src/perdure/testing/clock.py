"""A clock that stands still until it is told: three days of waiting take no time, and nothing happens by itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from perdure.core.codec import shown
from perdure.errors import InvalidInput
from perdure.worker.clock import Clock

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def at(now_us: int) -> datetime:
    """This many microseconds after the beginning of 1970, to the microsecond."""
    return _EPOCH + timedelta(microseconds=now_us)


class ManualClock(Clock):
    """A clock for `Perdure(clock=…)`: timers, backoffs, approvals, key windows and `not_before` go by it, and it only moves when it is told.

    What concerns the machine and not the run stays in real time: how long one attempt of a tool may take, leases, and how often the
    database is asked for changes.
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
        """What it shows, in UTC."""
        return at(self.now_us)

    def advance(self, seconds: float = 0.0, *, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0) -> None:
        """Let that much time pass at once. Runs that waited for it go on, in every app that is open on this clock."""
        try:
            step = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        except (TypeError, OverflowError, ValueError) as error:
            raise InvalidInput(f"advance: {error}; give numbers, such as advance(days=3)") from None
        if step < timedelta(0):
            raise InvalidInput(f"advance: {step.total_seconds():g} seconds, and time only passes; set_to(…) sets a clock back")
        self.now_us += step // _MICROSECOND
        self._ring()

    def advance_to(self, when: datetime) -> None:
        """Let time pass until then, if then is not past."""
        self.now_us = max(self.now_us, _microseconds("advance_to", when))
        self._ring()

    def set_to(self, when: datetime) -> None:
        """Show this time, be it past: as when somebody sets the clock of a machine."""
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
    return (when - _EPOCH) // _MICROSECOND
