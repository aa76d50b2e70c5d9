"""Cron expressions: when do they match, in a time zone with daylight saving time?

An expression has five fields: minute, hour, day of month, month, day of week. Two rules say what happens when the
clocks of a zone are changed:

- If the hour field begins with `*`, the expression means "every so often". It matches each minute that really comes:
  the minutes of a doubled hour twice, the minutes of a skipped hour not at all.
- Otherwise the expression names times of day, and each of them comes once on each day: in a doubled hour the first
  time, and instead of a skipped time the first moment after the gap.

If both days are restricted, a day matches that fulfils one of them. If one of the two fields begins with `*`, a day
must fulfil both. This is the rule of Vixie cron.
"""

from __future__ import annotations

import calendar
import re
from bisect import bisect_left, bisect_right
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import NamedTuple

from perdure.core.times import micros_of, utc
from perdure.errors import InvalidInput

_MONTHS = tuple("jan feb mar apr may jun jul aug sep oct nov dec".split())
_DAYS = tuple("sun mon tue wed thu fri sat".split())
_SHORT = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MAX_CHARS = 200
_NUMBER = re.compile(r"[0-9]{1,4}\Z")
_SEARCHED_DAYS = 41 * 366  # the 29th of February on a given day of the week comes at least every 40 years
_DAY = timedelta(days=1)
_MINUTE = timedelta(minutes=1)


class _Field(NamedTuple):
    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()  # the name of `first`, and so on


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of month", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of week", 0, 7, _DAYS),  # 0 and 7 are Sunday
)


class CronExpression:
    """A cron expression that was checked. InvalidInput names the field that is wrong."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or len(text) > _MAX_CHARS:
            raise InvalidInput(f"a cron expression is text of at most {_MAX_CHARS} characters, such as '0 7 * * mon-fri'")
        self.text = " ".join(text.split())
        parts = _SHORT.get(self.text.lower(), self.text).lower().split()
        if len(parts) != len(_FIELDS):
            names = ", ".join(field.name for field in _FIELDS)
            raise InvalidInput(f"cron expression {text!r:.80} has {len(parts)} fields, and needs {len(_FIELDS)}: {names}")
        self._minutes, hours, self._days, self._months = (self._plain(place, parts[place]) for place in range(4))
        self._hours, self._every_so_often = hours, parts[1].startswith("*")
        self._sorted_hours, self._sorted_minutes = sorted(hours), sorted(self._minutes)
        self._last_day = "l" in parts[2].split(",")
        self._weekdays, self._nth = self._days_of_week(parts[4])
        self._both_days = parts[2].startswith("*") or parts[4].startswith("*")
        # 2000 to 2041 has every combination of date and day of week that exists, except the 29th of February 2100.
        if self._next_day(date(2000, 1, 1)) is None:
            raise InvalidInput(f"cron expression {self.text!r}: the fields day of month and month name a day that no year has")

    def _bad(self, place: int, part: str, rule: str) -> InvalidInput:
        return InvalidInput(f"cron expression {self.text!r}: field {place + 1} ({_FIELDS[place].name}), {part!r}: {rule}")

    def _plain(self, place: int, text: str) -> frozenset[int]:
        """The values of a field without `#` and days of week."""
        found: set[int] = set()
        for part in text.split(","):
            if place == 2 and part == "l":
                continue  # the last day of the month
            found.update(self._span(place, part))
        return frozenset(found)

    def _days_of_week(self, text: str) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
        """The days, and (day, number in its month) for `mon#2`; the number 0 is the last one, `5L`."""
        days: set[int] = set()
        nth: set[tuple[int, int]] = set()
        for part in text.split(","):
            day, sign, number = part.partition("#")
            if sign:
                if number not in ("1", "2", "3", "4", "5"):
                    raise self._bad(4, part, "after # comes a number from 1 to 5")
                nth.add((self._value(4, day) % 7, int(number)))
            elif part.endswith("l") and len(part) > 1:
                nth.add((self._value(4, part[:-1]) % 7, 0))
            else:
                days.update(value % 7 for value in self._span(4, part))
        return frozenset(days), frozenset(nth)

    def _span(self, place: int, part: str) -> range:
        """The values of `*`, `5`, `1-5`, each with or without `/step`."""
        field = _FIELDS[place]
        base, slash, step_text = part.partition("/")
        if slash and (not _NUMBER.match(step_text) or int(step_text) == 0):
            raise self._bad(place, part, "after / comes a number above 0")
        step = int(step_text) if slash else 1
        low, dash, high = base.partition("-")
        if base == "*":
            first, last = field.first, 6 if place == 4 else field.last
        elif dash:
            first, last = self._value(place, low), self._value(place, high)
            if place == 4 and last == 0 and first > 0:
                last = 7  # fri-sun
            if last < first:
                raise self._bad(place, part, "a range goes from the lower value to the higher one")
        else:
            first = self._value(place, base)
            last = field.last if slash else first
        return range(first, last + 1, step)

    def _value(self, place: int, text: str) -> int:
        field = _FIELDS[place]
        if text in field.names:
            return field.names.index(text) + field.first
        if not _NUMBER.match(text) or not field.first <= int(text) <= field.last:
            names = f", or {field.names[0]} to {field.names[-1]}" if field.names else ""
            raise self._bad(place, text, f"expected a number from {field.first} to {field.last}{names}")
        return int(text)

    # -- days ---------------------------------------------------------------------------------------------------------
    def matches_day(self, day: date) -> bool:
        if day.month not in self._months:
            return False
        last = calendar.monthrange(day.year, day.month)[1]
        of_month = day.day in self._days or (self._last_day and day.day == last)
        weekday = day.isoweekday() % 7
        of_week = (
            weekday in self._weekdays or (weekday, (day.day + 6) // 7) in self._nth or ((weekday, 0) in self._nth and day.day + 7 > last)
        )
        return (of_month and of_week) if self._both_days else (of_month or of_week)

    def matches(self, when: datetime) -> bool:
        """Does this local time match? What happens when clocks are changed is not considered."""
        return when.minute in self._minutes and when.hour in self._hours and self.matches_day(when.date())

    def _next_day(self, day: date, step: timedelta = _DAY) -> date | None:
        """The first day from `day` on that matches."""
        for _ in range(_SEARCHED_DAYS):
            if self.matches_day(day):
                return day
            try:
                day += step
            except OverflowError:
                return None
        return None

    # -- moments ------------------------------------------------------------------------------------------------------
    def after(self, us: int, zone: tzinfo) -> int | None:
        """The first moment (µs since 1970) later than `us` that matches; None: there is none before the year 9999."""
        # Begin a day early: a tick of the day before may come after a gap that ends today.
        day: date | None = _local(us, zone).date() - _DAY
        while day is not None and (day := self._next_day(day)) is not None:
            moments = self._moments(day, zone)
            place = bisect_right(moments, us)
            if place < len(moments):
                return moments[place]
            day = _beside(day, _DAY)
        return None

    def before(self, us: int, zone: tzinfo) -> int | None:
        """The last moment earlier than `us` that matches; None: there is none since 1970."""
        day: date | None = _local(us, zone).date() + _DAY
        while day is not None and day.year >= 1970 and (day := self._next_day(day, -_DAY)) is not None:
            moments = self._moments(day, zone)
            place = bisect_left(moments, us)
            if place > 0:
                return moments[place - 1] if moments[place - 1] >= 0 else None
            day = _beside(day, -_DAY)
        return None

    def _moments(self, day: date, zone: tzinfo) -> list[int]:
        """All ticks of this local day, in order."""
        found: set[int] = set()
        try:
            midnight = datetime.combine(day, time(), zone)
            if midnight.utcoffset() == datetime.combine(day + _DAY, time(), zone).replace(fold=1).utcoffset():
                # The clocks are not changed on this day: plain arithmetic is a hundred times faster.
                first = micros_of(midnight.astimezone(UTC))
                return [first + (hour * 60 + minute) * 60_000_000 for hour in self._sorted_hours for minute in self._sorted_minutes]
            for hour in self._hours:
                for minute in self._minutes:
                    local = datetime.combine(day, time(hour, minute), zone)
                    at = local.astimezone(UTC)
                    back = at.astimezone(zone)
                    if back.replace(tzinfo=None) == local.replace(tzinfo=None):
                        found.add(micros_of(at))
                        if self._every_so_often:
                            found.add(micros_of(local.replace(fold=1).astimezone(UTC)))
                    elif not self._every_so_often:
                        found.add(micros_of(_end_of_gap(local)))
        except OverflowError:
            pass  # the first or the last day that a datetime can have
        return sorted(found)


def _local(us: int, zone: tzinfo) -> datetime:
    # Some days before the last datetime, so that a day can be added in every zone.
    return utc(min(max(us, 0), 253_402_000_000_000_000)).astimezone(zone)


def _beside(day: date, step: timedelta) -> date | None:
    try:
        return day + step
    except OverflowError:
        return None


def _end_of_gap(local: datetime) -> datetime:
    """The first moment after the gap in which this local time lies."""
    zone = local.tzinfo
    # The offset before the gap is that of fold=0, so this moment lies after the gap, by as much as the time lies in it.
    after = local.replace(fold=0).astimezone(UTC)
    low, high = local.replace(fold=1).astimezone(UTC), after  # the gap ends between these two
    offset = high.astimezone(zone).utcoffset()
    while high - low > _MINUTE:
        middle = low + ((high - low) // _MINUTE // 2) * _MINUTE
        if middle.astimezone(zone).utcoffset() == offset:
            high = middle
        else:
            low = middle
    return high
