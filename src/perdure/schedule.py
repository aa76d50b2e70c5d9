"""How a schedule is declared: Cron, Every, Tick and Schedule. Also the calendar of a recorded schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any, NamedTuple, get_args
from zoneinfo import ZoneInfo, available_timezones

from msgspec import Struct

from perdure.core import codec
from perdure.core.budget import Budget, limits_of
from perdure.core.cron import CronExpression
from perdure.core.events import Limits
from perdure.core.identity import check_id
from perdure.core.labels import check_number, checked_labels, with_labels
from perdure.core.schedule import (
    TICK,
    Beat,
    Calendar,
    Missed,
    Overlap,
    Spec,
    check_format,
    check_schedule_id,
    with_tick,
)
from perdure.core.times import utc
from perdure.errors import InvalidInput

MAX_JITTER_S = 86_400
MAX_EVERY_S = 366 * 86_400
MAX_LIMIT = 10_000
MAX_INPUT_BYTES = 64 * 1024
_SAMPLE = utc(1_767_225_600_000_000)  # 2026-01-01: a tick with which the input is checked


class Cron(Struct, frozen=True):
    """Ticks by a cron expression: `Cron("0 7 * * mon-fri", tz="Europe/Berlin")`.

    The fields are minute, hour, day of month, month and day of week. `jitter` (seconds or a timedelta) delays each
    tick by up to that time.
    """

    expression: str
    tz: str = "UTC"
    jitter: float | timedelta = 0

    def __post_init__(self) -> None:
        CronExpression(self.expression)
        zone_of(self.tz)
        _seconds(self.jitter, "Cron(jitter=…)", 0, MAX_JITTER_S)


class Every(Struct, frozen=True, kw_only=True):
    """Ticks at equal distances: `Every(minutes=5)`. They are multiples of the interval since 1970, in UTC.

    `jitter` (seconds or a timedelta) delays each tick by up to that time.
    """

    seconds: int = 0
    minutes: int = 0
    hours: int = 0
    jitter: float | timedelta = 0

    def __post_init__(self) -> None:
        for name in ("seconds", "minutes", "hours"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidInput(f"Every({name}={codec.shown(value)}): a whole number")
        _seconds(self.interval_s, "Every(…): the interval", 1, MAX_EVERY_S)
        _seconds(self.jitter, "Every(jitter=…)", 0, MAX_JITTER_S)

    @property
    def interval_s(self) -> int:
        return self.seconds + 60 * self.minutes + 3600 * self.hours


class Tick(Struct, frozen=True):
    """A placeholder in the input of a schedule: the time of the tick, in the schedule's zone.

    Example: `input={"date": Tick("%Y-%m-%d")}`. Without a format it is ISO 8601 with the offset of the zone.
    """

    format: str = ""

    def __post_init__(self) -> None:
        check_format(self.format)


class Schedule:
    """When runs of an agent start, with which input, and what happens if ticks overlap or were missed.

    `id` is the agent's name unless you name one. `overlap` says what a tick does while the run before it has not
    ended: "skip" (the tick is skipped), "queue" (the tick waits), "cancel" (the old run is cancelled), "allow".
    `missed` says what happens to ticks for which no worker was there: "last" (one run, for the last of them), "all"
    (a run for each of them, but at most for the last `limit`), "none". `queue`, `priority`, `tenant`, `budget` and
    `labels` are those of the runs, as for `app.start`.
    """

    def __init__(
        self,
        when: Cron | Every,
        *,
        id: str | None = None,
        input: Mapping[str, Any] | None = None,
        overlap: Overlap = "skip",
        missed: Missed = "last",
        limit: int = 100,
        queue: str | None = None,
        priority: int = 0,
        tenant: str = "default",
        budget: Budget | Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(when, Cron | Every):
            raise InvalidInput(f"a schedule is Cron('0 7 * * *') or Every(minutes=5), and not {codec.shown(when)}")
        if overlap not in get_args(Overlap):
            raise InvalidInput(f"overlap={codec.shown(overlap)}: one of {', '.join(get_args(Overlap))}")
        if missed not in get_args(Missed):
            raise InvalidInput(f"missed={codec.shown(missed)}: one of {', '.join(get_args(Missed))}")
        if overlap == "queue" and missed == "none":
            raise InvalidInput("overlap='queue' needs missed='last' or 'all': a tick that waits for the run before it is late")
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
            raise InvalidInput(f"limit={codec.shown(limit)}: a whole number from 1 to {MAX_LIMIT:,}")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > 1_000:
            raise InvalidInput(f"priority={codec.shown(priority)}: a whole number from -1,000 to 1,000; higher goes first")
        self.when = when
        self.id = None if id is None else check_schedule_id(id)
        self.input = {} if input is None else _plain(input)
        self.overlap, self.missed, self.limit, self.priority = overlap, missed, limit, priority
        self.queue = None if queue is None else check_id(queue, "the queue")
        self.tenant = check_id(tenant, "the tenant")
        self.budget = limits_of(budget, "budget=")
        self.labels = {} if labels is None else with_labels({}, checked_labels(labels, "labels="))
        check_number(self.labels, "labels=")

    def spec(
        self, agent: str, *, queue: str | None = None, target: str | None = None, bind: Callable[[Mapping[str, Any]], object] | None = None
    ) -> Spec:
        """What is recorded. `bind` checks the arguments, if the code of the agent is known. `queue`: of the agent."""
        try:
            if bind is not None:
                bind(with_tick(self.input, _SAMPLE))
            encoded = codec.encode(self.input)
        except InvalidInput as error:
            raise InvalidInput(f"the schedule of agent {agent}: {error}") from None
        if len(encoded) > MAX_INPUT_BYTES:
            raise InvalidInput(f"the schedule of agent {agent}: its input has {len(encoded):,} bytes, and at most {MAX_INPUT_BYTES:,} fit")
        timed = {"cron": CronExpression(self.when.expression).text, "tz": self.when.tz} if isinstance(self.when, Cron) else {}
        return Spec(
            agent=agent,
            **timed,
            every_s=self.when.interval_s if isinstance(self.when, Every) else 0,
            jitter_s=_seconds(self.when.jitter, "jitter", 0, MAX_JITTER_S),
            input=encoded.decode(),
            overlap=self.overlap,
            missed=self.missed,
            limit=self.limit,
            queue=self.queue or queue or "default",
            priority=self.priority,
            tenant=self.tenant,
            budget=self.budget,
            target=target,
            labels=self.labels,
        )


class Declared(NamedTuple):
    """A schedule that the code of an agent declares."""

    schedule_id: str
    spec: Spec


def schedule_of(given: Schedule | Cron | Every) -> Schedule:
    """A Cron or an Every alone is a schedule without options."""
    return given if isinstance(given, Schedule) else Schedule(given)


def _plain(value: Any) -> Any:
    """The input with placeholders as data: {"$tick": FORMAT}. InvalidInput if it is no mapping."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"input={codec.shown(value)}: the agent's arguments by name, such as {{'date': Tick('%Y-%m-%d')}}")
    return {name: _placed(one) for name, one in value.items()}


def _placed(value: Any) -> Any:
    match value:
        case Tick(format=text):
            return {TICK: text}
        case dict():
            return {name: _placed(one) for name, one in value.items()}
        case list() | tuple():
            return [_placed(one) for one in value]
        case _:
            return value


def _seconds(value: Any, what: str, least: int, most: int) -> int:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds) or not least <= seconds <= most:
        raise InvalidInput(f"{what} is {codec.shown(value)}: from {least} to {most:,} seconds")
    return math.ceil(seconds)


# -- the calendar of a spec -------------------------------------------------------------------------------------------
class _InZone:
    """The ticks of a cron expression in a time zone."""

    def __init__(self, expression: str, zone: tzinfo) -> None:
        self._expression, self._zone = CronExpression(expression), zone

    def after(self, us: int) -> int | None:
        return self._expression.after(us, self._zone)

    def before(self, us: int) -> int | None:
        return self._expression.before(us, self._zone)


@lru_cache(256)
def _calendar(cron: str, tz: str, every_s: int) -> Calendar:
    return Beat(every_s) if every_s else _InZone(cron, zone_of(tz))


def calendar_of(spec: Spec) -> Calendar:
    """The ticks of a recorded schedule. InvalidInput if this machine does not know its time zone."""
    return _calendar(spec.cron, spec.tz, spec.every_s)


def zone_of(name: str) -> tzinfo:
    """The time zone with this IANA name. InvalidInput if this machine does not know it."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError, TypeError):  # ZoneInfoNotFoundError is a KeyError
        known = len(available_timezones()) > 1
        why = "it is a name such as 'Europe/Berlin'" if known else "this machine has no time zones: install the package tzdata"
        raise InvalidInput(f"tz={codec.shown(name)}: there is no such time zone here; {why}") from None


def local_time(spec: Spec, tick: int) -> datetime:
    """The tick in the zone of its schedule."""
    return utc(tick).astimezone(zone_of(spec.tz))


def input_at(spec: Spec, tick: int) -> bytes:
    """Canonical JSON of the arguments of the run that this tick starts."""
    return codec.encode(with_tick(codec.decode(spec.input.encode()), local_time(spec, tick)))


def when_words(spec: Spec) -> str:
    """When the schedule ticks, for people."""
    jitter = f", up to {spec.jitter_s} s later" if spec.jitter_s else ""
    if spec.every_s:
        for size, unit in ((3600, "hour"), (60, "minute"), (1, "second")):
            if spec.every_s % size == 0:
                number = spec.every_s // size
                return f"every {unit}{jitter}" if number == 1 else f"every {number} {unit}s{jitter}"
    return f"{spec.cron} ({spec.tz}){jitter}"
