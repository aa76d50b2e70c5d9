"""Parses times that a person types: 15m, 2h, 1d, or an ISO time. The results are in µs since 1970."""

from __future__ import annotations

from datetime import UTC, datetime

from perdure.cli import common
from perdure.core.times import LATEST_US, length_us, micros_of
from perdure.errors import InvalidInput


def parse_past(text: str, now: int, option: str) -> int:
    """The time that the option names: a length such as 2h before `now`, or an ISO time. 0 if it is before 1970."""
    length = length_us(text)
    return max(0, _moment(text, option) if length is None else now - length)


def parse_future(text: str, now: int, option: str) -> int:
    """The time that the option names: a length such as 2h after `now`, or an ISO time."""
    length = length_us(text.removeprefix("+"))
    moment = _moment(text, option) if length is None else now + length
    if not 0 <= moment <= LATEST_US:
        raise InvalidInput(f"{option} {text!r:.60} lies before 1970 or after 9999; write 15m, 2h, 1d, or an ISO time in between")
    return moment


def parse_length(text: str, option: str) -> float:
    """The length of time that the option names, such as 15m or 1h, in seconds. At least one second."""
    length = length_us(text)
    if not length:
        raise InvalidInput(f"{option} {text!r:.60} is no length of time; write 30s, 15m, 1h or 1d")
    return length / 1e6


def _moment(text: str, option: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{option} {text!r:.60} is not a time; write 15m, 2h, 1d, or an ISO time such as 2026-01-31T14:00Z") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
        common.note(f"perdure: {option} {text} names no zone, and is taken as UTC: {moment:%Y-%m-%dT%H:%M:%SZ}")
    return micros_of(moment)
