"""Cron expressions: what they accept, when they match, and what happens when clocks are changed."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perdure.core.cron import CronExpression
from perdure.core.times import micros_of, utc
from perdure.errors import InvalidInput


def ticks(expression: str, zone: str, start: str, number: int) -> list[str]:
    """The next ticks after a local time. Going back from the last one must find the same ticks."""
    tz, cron = ZoneInfo(zone), CronExpression(expression)
    at = micros_of(datetime.fromisoformat(start).replace(tzinfo=tz))
    found: list[int] = []
    for _ in range(number):
        tick = cron.after(found[-1] if found else at, tz)
        assert tick is not None
        found.append(tick)
    for earlier, later in itertools.pairwise(found):
        assert cron.before(later, tz) == earlier
    return [utc(one).astimezone(tz).isoformat(timespec="minutes") for one in found]


def test_a_skipped_time_comes_at_the_first_moment_after_the_gap():
    assert ticks("30 2 * * *", "Europe/Berlin", "2026-03-28T00:00", 3) == [
        *("2026-03-28T02:30+01:00", "2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00")
    ]


def test_several_skipped_times_come_together_once():
    assert ticks("0,15,30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", 2) == ["2026-03-29T03:00+02:00", "2026-03-30T02:00+02:00"]


def test_a_doubled_time_comes_once_the_first_time():
    assert ticks("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", 2) == ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]


def test_after_the_first_of_two_doubled_times_the_second_is_no_tick():
    zone = ZoneInfo("Europe/Berlin")
    between = micros_of(datetime(2026, 10, 25, 2, 10, tzinfo=zone, fold=1))
    tick = CronExpression("30 2 * * *").after(between, zone)
    assert tick is not None
    assert utc(tick) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


def test_every_so_often_means_each_minute_that_really_comes():
    assert ticks("0,30 * * * *", "Europe/Berlin", "2026-10-25T01:30", 5) == [
        *("2026-10-25T02:00+02:00", "2026-10-25T02:30+02:00", "2026-10-25T02:00+01:00", "2026-10-25T02:30+01:00", "2026-10-25T03:00+01:00")
    ]
    assert ticks("0,30 * * * *", "Europe/Berlin", "2026-03-29T01:00", 2) == ["2026-03-29T01:30+01:00", "2026-03-29T03:00+02:00"]


def test_a_zone_that_changes_by_thirty_minutes():
    assert ticks("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", 2) == ["2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"]
    assert ticks("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", 2) == ["2026-04-05T01:45+11:00", "2026-04-06T01:45+10:30"]


def test_a_zone_whose_clocks_change_at_midnight():
    assert ticks("30 0 * * *", "America/Havana", "2026-03-07T12:00", 2) == ["2026-03-08T01:00-04:00", "2026-03-09T00:30-04:00"]
    assert ticks("30 0 * * *", "America/Havana", "2026-10-31T12:00", 2) == ["2026-11-01T00:30-04:00", "2026-11-02T00:30-05:00"]


def test_a_day_that_a_zone_has_left_out():
    assert ticks("0 12 30 * *", "Pacific/Apia", "2011-11-30T13:00", 2) == ["2011-12-31T00:00+14:00", "2012-01-30T12:00+14:00"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 0 29 2 *", ["2028-02-29", "2032-02-29"]),
        ("0 0 L * *", ["2026-11-30", "2026-12-31"]),
        ("0 0 * * mon#2", ["2026-12-14", "2027-01-11"]),
        ("0 0 * * 5L", ["2026-11-27", "2026-12-25"]),
        ("0 0 * * fri-sun", ["2026-11-20", "2026-11-21"]),
        ("0 0 13 * fri", ["2026-11-20", "2026-11-27"]),  # both days are restricted: one of them is enough
        ("0 0 */13 * fri", ["2026-11-27", "2027-01-01"]),  # one of them begins with a star: both must match
        ("@monthly", ["2026-12-01", "2027-01-01"]),
        ("0 0 1 jan,jul *", ["2027-01-01", "2027-07-01"]),
        ("0 0 * * 7", ["2026-11-22", "2026-11-29"]),
    ],
)
def test_days(expression, expected):
    assert [tick[:10] for tick in ticks(expression, "UTC", "2026-11-17T12:00", 2)] == expected


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("* * * *", "has 4 fields"),
        ("60 * * * *", "field 1 (minute), '60'"),
        ("* 24 * * *", "field 2 (hour), '24'"),
        ("* * 0 * *", "field 3 (day of month), '0'"),
        ("* * * foo *", "field 4 (month), 'foo'"),
        ("* * * * 8", "field 5 (day of week), '8'"),
        ("*/0 * * * *", "field 1 (minute), '*/0'"),
        ("5-1 * * * *", "field 1 (minute), '5-1'"),
        ("* * * * mon#6", "field 5 (day of week), 'mon#6'"),
        ("0 0 31 2 *", "a day that no year has"),
        ("1,,2 * * * *", "field 1 (minute), ''"),
        ("٣ * * * *", "field 1 (minute)"),
    ],
)
def test_an_error_names_the_field(expression, words):
    with pytest.raises(InvalidInput) as raised:
        CronExpression(expression)
    assert words in str(raised.value)


PARTS = st.sampled_from(
    "* */2 */7 0 1 5 10-20 1,2,3 5/3 L 1L mon mon-fri mon#2 jan 59 23 31 12 7 60 - / , # ** 1-1 7-0 0-7 99999999999 \x00 é".split(" ")
)


@given(st.one_of(st.lists(PARTS, min_size=4, max_size=6).map(" ".join), st.text(max_size=30)), st.integers(0, 4_000_000_000))
@settings(max_examples=300, deadline=None)
def test_any_text_is_an_expression_or_invalid_input_and_the_next_tick_is_later(text, second):
    try:
        cron = CronExpression(text)
    except InvalidInput:
        return
    at = second * 1_000_000
    tick = cron.after(at, UTC)
    assert tick is not None
    assert tick > at
    assert cron.matches(utc(tick))
    earlier = cron.before(tick, UTC)
    assert earlier is None or earlier <= at


def numbers(low: int, high: int) -> st.SearchStrategy[str]:
    one = st.integers(low, high)
    return st.one_of(
        st.just("*"),
        one.map(str),
        st.integers(1, 30).map(lambda step: f"*/{step}"),
        st.tuples(one, one).map(lambda pair: f"{min(pair)}-{max(pair)}"),
        st.lists(one, min_size=1, max_size=3).map(lambda many: ",".join(map(str, many))),
    )


def values(text: str, low: int, high: int) -> set[int]:
    """What a field means, computed in another way than the code does it."""
    found: set[int] = set()
    for part in text.split(","):
        base, _, step = part.partition("/")
        first, _, last = base.partition("-") if base != "*" else (str(low), "-", str(high))
        found |= {one for one in range(int(first), int(last or first) + 1) if (one - int(first)) % int(step or 1) == 0}
    return found


@given(st.tuples(numbers(0, 59), numbers(0, 23), numbers(1, 31), numbers(1, 12), numbers(0, 6)), st.integers(0, 3_000_000_000))
@settings(max_examples=100, deadline=None)
def test_the_next_tick_is_the_first_minute_that_a_naive_matcher_finds(fields, second):
    _minute, _hour, day, _month, weekday = fields
    try:
        cron = CronExpression(" ".join(fields))
    except InvalidInput:
        assume(False)
    ranges = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    minutes, hours, days, months, weekdays = (values(text, *span) for text, span in zip(fields, ranges, strict=True))
    both = day.startswith("*") or weekday.startswith("*")

    def naive(when: datetime) -> bool:
        on_day, on_weekday = when.day in days, (when.weekday() + 1) % 7 in weekdays
        is_day = on_day and on_weekday if both else on_day or on_weekday
        return when.minute in minutes and when.hour in hours and when.month in months and is_day

    at = second * 1_000_000
    tick = cron.after(at, UTC)
    assert tick is not None
    when = utc(at).replace(second=0, microsecond=0) + timedelta(minutes=1)
    for _ in range(1440):  # a day, minute by minute
        if naive(when):
            assert tick == micros_of(when)
            return
        assert micros_of(when) != tick
        when += timedelta(minutes=1)
    assert tick >= micros_of(when)
    assert naive(utc(tick))


@given(
    st.integers(1_500_000_000, 2_000_000_000), st.sampled_from(("Europe/Berlin", "Australia/Lord_Howe", "America/Havana", "Asia/Tehran"))
)
@settings(max_examples=100, deadline=None)
def test_a_time_of_day_comes_once_on_each_day_in_every_zone(second, zone):
    tz, cron = ZoneInfo(zone), CronExpression("30 2 * * *")
    at, found = second * 1_000_000, []
    for _ in range(5):
        tick = cron.after(at, tz)
        assert tick is not None
        assert tick > at
        found.append(utc(tick).astimezone(tz).date())
        at = tick
    assert found == [found[0] + timedelta(days=number) for number in range(5)]
