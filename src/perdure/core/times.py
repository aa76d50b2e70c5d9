"""Times. perdure records them as microseconds since 1970 in UTC, and shows them as datetimes or as ISO 8601 text."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LATEST_US = 253_402_300_799_000_000  # the end of the year 9999: there are no datetimes after it
_MICROSECOND = timedelta(microseconds=1)


_LENGTH = re.compile(r"(\d{1,9})([smhd])\Z", re.ASCII)
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def length_us(text: str) -> int | None:
    """The length of time that this text names, such as 15m, 2h or 1d. None if it names none."""
    found = _LENGTH.match(text)
    return int(found[1]) * _UNIT_S[found[2]] * 1_000_000 if found else None


def utc(us: int) -> datetime:
    """The time as a datetime in UTC. Raises OverflowError for times after the year 9999."""
    return _EPOCH + timedelta(microseconds=us)


def utc_within(us: int) -> datetime:
    """Like `utc`, but limited to the years 1970 to 9999. Never raises: a damaged row may hold any number."""
    return utc(min(max(us, 0), LATEST_US))


def micros_of(when: datetime) -> int:
    """Microseconds since 1970 of a datetime that has a time zone."""
    return (when - _EPOCH) // _MICROSECOND


def iso(us: int) -> str:
    """The time as ISO 8601 text in UTC, with microseconds.

    A damaged row may hold a time after the year 9999. No datetime exists for that time, so its number is shown.
    """
    try:
        return utc(us).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:
        return f"{us} µs since 1970"
