"""The rules of schedules: what is recorded about a schedule, and what a worker does when a tick is due.

A tick is a moment at which a schedule starts a run. Each schedule has a journal of its own: events that are chained
by hashes. Its row is the fold over that journal, written in the same commit. `steps_due` is the only place where a
tick starts a run or is skipped. It is pure: the clock, the calendar and the status of the last run are arguments.

The events contain the next tick and when it is due. So a row follows from its journal alone, also after the rules of a
time zone have changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Struct, structs

from perdure.core import codec
from perdure.core.events import Limits
from perdure.core.identity import MAX_ID_CHARS, check_id, link
from perdure.core.times import utc
from perdure.errors import InvalidInput, StoreCorrupt

Overlap = Literal["skip", "queue", "cancel", "allow"]
Missed = Literal["none", "last", "all"]
ScheduleStatus = Literal["active", "paused", "removed"]
LATE_US = 60_000_000  # with missed="none", a tick that is later than this was missed
TICK = "$tick"  # {"$tick": FORMAT} in the input stands for the time of the tick
_TICK_CHARS = len("@2026-11-17T06:00:00Z")
# The same on every machine and in every locale.
_DIRECTIVES = frozenset("YmdHMSjGVuz%")


class Spec(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a schedule starts, and when."""

    agent: str
    cron: str = ""  # or …
    every_s: int = 0  # … seconds between two ticks; ticks are multiples of it since 1970
    tz: str = "UTC"
    jitter_s: int = 0  # a tick is due up to so many seconds later, always the same for the same tick
    input: str = "{}"  # JSON of the agent's named arguments, with placeholders
    overlap: Overlap = "skip"
    missed: Missed = "last"
    limit: int = 100  # with missed="all": at most so many missed ticks start a run
    queue: str = "default"
    priority: int = 0
    tenant: str = "default"
    budget: Limits | None = None
    target: str | None = None
    labels: dict[str, str] = {}  # of the runs

    @property
    def digest(self) -> str:
        """The digest of everything that a person can declare. Where the code lies does not count."""
        return codec.digest(msgspec.json.encode(structs.replace(self, target=None)))


# -- events -----------------------------------------------------------------------------------------------------------
class ScheduleBody(Struct, frozen=True, gc=False, omit_defaults=True, tag_field="type"):
    """Base class of the events of a schedule."""


class ScheduleSet(ScheduleBody, frozen=True, tag="schedule_set"):
    """The schedule was added, changed, or added again after its removal."""

    spec: Spec
    by: str
    next_tick: int | None
    due_at: int | None
    declared: bool = False  # by the code of the agent, not by a person


class SchedulePaused(ScheduleBody, frozen=True, tag="schedule_paused"):
    by: str
    note: str | None = None


class ScheduleResumed(ScheduleBody, frozen=True, tag="schedule_resumed"):
    by: str
    next_tick: int | None
    due_at: int | None
    note: str | None = None


class ScheduleRemoved(ScheduleBody, frozen=True, tag="schedule_removed"):
    by: str
    note: str | None = None


class TickStarted(ScheduleBody, frozen=True, tag="tick_started"):
    """A run was created for this tick, in the same commit as this event."""

    tick: int
    run_id: str
    next_tick: int | None
    due_at: int | None
    cancelled: str | None = None  # the run before it, which was asked to stop


class TicksSkipped(ScheduleBody, frozen=True, tag="ticks_skipped"):
    """No run was started for the ticks from `first` to `last`."""

    first: int
    last: int
    why: str
    next_tick: int | None
    due_at: int | None


class StartedNow(ScheduleBody, frozen=True, tag="schedule_started_now"):
    """A person has started a run of the schedule without a tick."""

    by: str
    run_id: str
    cancelled: str | None = None


AnyScheduleBody: TypeAlias = ScheduleSet | SchedulePaused | ScheduleResumed | ScheduleRemoved | TickStarted | TicksSkipped | StartedNow
encode_schedule_body = msgspec.json.Encoder().encode
decode_schedule_body = msgspec.json.Decoder(AnyScheduleBody).decode


class ScheduleEvent(Struct, frozen=True, gc=False):
    """An event in the journal of a schedule, as it is stored."""

    seq: int
    event_id: str
    ts: int
    body: AnyScheduleBody
    data: bytes
    hash: bytes


def genesis(schedule_id: str) -> bytes:
    """The hash before the first event of a schedule. No event can be moved to another schedule or to a run."""
    return hashlib.sha256(b"perdure-schedule-1\0" + schedule_id.encode()).digest()


def sealed(before: bytes, seq: int, event_id: str, ts: int, body: AnyScheduleBody) -> ScheduleEvent:
    """The event, chained onto the hash `before`."""
    data = encode_schedule_body(body)
    return ScheduleEvent(seq, event_id, ts, body, data, link(before, seq, event_id, ts, 0, None, None, data))


# -- the fold ---------------------------------------------------------------------------------------------------------
class ScheduleState(Struct, frozen=True, gc=False, omit_defaults=True):
    """What the journal of a schedule says. The schedule's row has this state as JSON."""

    spec: Spec
    status: ScheduleStatus = "active"
    next_tick: int | None = None  # the first tick that has neither started a run nor was skipped
    due_at: int | None = None  # when it is due: the tick and its jitter
    last_tick: int | None = None  # the last tick that has started a run
    last_run: str | None = None  # the last run that was started, by a tick or by a person
    skipped: str | None = None  # why the tick before `next_tick` was skipped; None: it was not
    declared: tuple[str, ...] = ()  # digests of everything that the agent's code has declared, in order
    since: int = 0  # when the spec was set

    @property
    def waits_for(self) -> str | None:
        """The run that must have ended before the next tick may start one."""
        return self.last_run if self.spec.overlap == "queue" else None


encode_state = msgspec.json.Encoder().encode
decode_state = msgspec.json.Decoder(ScheduleState).decode


def folded(state: ScheduleState | None, ts: int, body: AnyScheduleBody) -> ScheduleState:
    """The state after the event. StoreCorrupt if the event cannot follow."""
    match body:
        case ScheduleSet(spec=spec, next_tick=next_tick, due_at=due_at, declared=declared):
            known = () if state is None else state.declared
            if declared:
                known = (*(digest for digest in known if digest != spec.digest), spec.digest)
            if state is None:
                return ScheduleState(spec, "active", next_tick, due_at, declared=known, since=ts)
            # A schedule that a person has paused stays paused, whatever new code declares.
            status: ScheduleStatus = "paused" if state.status == "paused" else "active"
            again = (next_tick, due_at) if status == "active" else (None, None)
            return structs.replace(
                state, spec=spec, status=status, next_tick=again[0], due_at=again[1], skipped=None, declared=known, since=ts
            )
        case _ if state is None:
            raise StoreCorrupt("the journal of a schedule begins with schedule_set")
        case SchedulePaused() if state.status == "active":
            return structs.replace(state, status="paused", next_tick=None, due_at=None)
        case ScheduleResumed(next_tick=next_tick, due_at=due_at) if state.status == "paused":
            return structs.replace(state, status="active", next_tick=next_tick, due_at=due_at, skipped=None)
        case ScheduleRemoved() if state.status != "removed":
            return structs.replace(state, status="removed", next_tick=None, due_at=None)
        case TickStarted(tick=tick, run_id=run_id, next_tick=next_tick, due_at=due_at) if state.status == "active":
            return structs.replace(state, next_tick=next_tick, due_at=due_at, last_tick=tick, last_run=run_id, skipped=None)
        case TicksSkipped(why=why, next_tick=next_tick, due_at=due_at) if state.status == "active":
            return structs.replace(state, next_tick=next_tick, due_at=due_at, skipped=why)
        case StartedNow(run_id=run_id) if state.status != "removed":
            return structs.replace(state, last_run=run_id)
        case _:
            raise StoreCorrupt(f"{body.__struct_config__.tag} cannot follow in the journal of a schedule that is {state.status}")


# -- ticks ------------------------------------------------------------------------------------------------------------
class Calendar(Protocol):
    """The ticks of a spec, in µs since 1970."""

    def after(self, us: int) -> int | None:
        """The first tick later than `us`."""

    def before(self, us: int) -> int | None:
        """The last tick earlier than `us`."""


class Beat:
    """The ticks of `Every`: all multiples of the interval since 1970. So all workers agree, and a restart moves none."""

    def __init__(self, seconds: int) -> None:
        self._us = seconds * 1_000_000

    def after(self, us: int) -> int | None:
        return (us // self._us + 1) * self._us

    def before(self, us: int) -> int | None:
        return (us - 1) // self._us * self._us


def check_schedule_id(schedule_id: str) -> str:
    """The id itself. With a tick it must be a run id."""
    check_id(schedule_id, "the schedule id")
    if "@" in schedule_id or len(schedule_id) > MAX_ID_CHARS - _TICK_CHARS:
        raise InvalidInput(
            f"the schedule id {schedule_id!r:.60} is not usable: at most {MAX_ID_CHARS - _TICK_CHARS} characters, and no @, "
            "because the ids of its runs are ID@TIME"
        )
    return str.__str__(schedule_id)


def tick_run_id(schedule_id: str, tick: int) -> str:
    """The id of the run of this tick. A second start of the same tick is the same run by construction."""
    return f"{schedule_id}@{utc(tick):%Y-%m-%dT%H:%M:%SZ}"


def due_time(schedule_id: str, spec: Spec, tick: int | None) -> int | None:
    """When the tick is due. The jitter follows from schedule and tick: it is the same for all workers."""
    if tick is None or spec.jitter_s == 0:
        return tick
    digest = hashlib.sha256(f"perdure-tick-jitter-1\0{schedule_id}\0{tick}".encode()).digest()
    return tick + int.from_bytes(digest[:8], "big") % (spec.jitter_s * 1_000_000)


def next_tick(schedule_id: str, spec: Spec, calendar: Calendar, after: int) -> dict[str, int | None]:
    """The fields `next_tick` and `due_at` of an event: the first tick later than `after`."""
    tick = calendar.after(after)
    return {"next_tick": tick, "due_at": due_time(schedule_id, spec, tick)}


# -- what a due tick does ---------------------------------------------------------------------------------------------
def steps_due(
    schedule_id: str, state: ScheduleState, calendar: Calendar, now: int, open_run: str | None
) -> list[TicksSkipped | TickStarted]:
    """The events of the next tick that is due; empty: nothing is due. At most one of them starts a run, the last one.

    `open_run` is the last run of the schedule, if it has not ended. When these events are committed, ask again:
    with missed="all" another tick may be due.
    """
    spec, first = state.spec, state.next_tick
    if state.status != "active" or first is None or state.due_at is None or state.due_at > now:
        return []
    if open_run is not None and spec.overlap == "queue":
        return []  # the tick waits for the end of that run; if more ticks are due by then, `missed` decides
    last = max(first, _last_due(schedule_id, spec, calendar, now) or first)

    def skipped(until: int, why: str) -> TicksSkipped:
        return TicksSkipped(first, until, why, **next_tick(schedule_id, spec, calendar, until))

    if open_run is not None and spec.overlap == "skip":
        return [skipped(last, f"run {open_run} has not ended")]
    late_us = now - (due_time(schedule_id, spec, last) or now)
    if spec.missed == "none" and late_us > LATE_US:
        return [skipped(last, "missed: no worker was there in time")]
    chosen = last
    if spec.missed == "all":
        for _ in range(spec.limit - 1):
            earlier = calendar.before(chosen)
            if earlier is None or earlier < first:
                break
            chosen = earlier
    steps: list[TicksSkipped | TickStarted] = []
    if chosen > first:
        why = f"missed: more than {spec.limit} ticks were due" if spec.missed == "all" else "missed: a later tick was due, too"
        steps.append(skipped(calendar.before(chosen) or first, why))
        if (due_time(schedule_id, spec, chosen) or 0) > now:
            return steps  # the jitter is longer than the interval: a later tick is due, and this one starts at its own time
    cancelled = open_run if spec.overlap == "cancel" else None
    started = TickStarted(chosen, tick_run_id(schedule_id, chosen), **next_tick(schedule_id, spec, calendar, chosen), cancelled=cancelled)
    return [*steps, started]


_MOST_COUNTED = 100_000


def ticks_of(body: AnyScheduleBody, calendar: Calendar) -> tuple[Literal["started", "skipped", "missed"], int] | None:
    """What became of the ticks of this event, and how many they are; None: it is about no tick."""
    match body:
        case TickStarted():
            return "started", 1
        case TicksSkipped(first=first, last=last, why=why):
            number, tick = 1, calendar.after(first)
            while tick is not None and tick <= last and number < _MOST_COUNTED:
                number, tick = number + 1, calendar.after(tick)
            return ("missed" if why.startswith("missed") else "skipped"), number
        case _:
            return None


def _last_due(schedule_id: str, spec: Spec, calendar: Calendar, now: int) -> int | None:
    """The last tick whose time has come, with its jitter."""
    tick = calendar.before(now + 1)
    for _ in range(10_000):  # a jitter that is much longer than the interval
        if tick is None or (due_time(schedule_id, spec, tick) or 0) <= now:
            return tick
        tick = calendar.before(tick)
    return tick


# -- the input --------------------------------------------------------------------------------------------------------
def check_format(text: Any) -> str:
    """The format of a placeholder. InvalidInput if a machine could read it in another way than another machine."""
    if not isinstance(text, str):
        raise InvalidInput(f"Tick({codec.shown(text)}): a format is text, such as '%Y-%m-%d'")
    directives = iter(text)
    for char in directives:
        if char == "%" and (after := next(directives, "")) not in _DIRECTIVES:
            known = " ".join(f"%{one}" for one in sorted(_DIRECTIVES))
            raise InvalidInput(f"Tick({text!r:.60}): %{after} is not usable; use {known}, or no format for ISO 8601")
    return text


def with_tick(value: Any, tick: datetime) -> Any:
    """The JSON value with each placeholder replaced by the tick, which is in the zone of the schedule."""
    match value:
        case dict() if value.keys() == {TICK}:
            text = check_format(value[TICK])
            return tick.strftime(text) if text else tick.isoformat()
        case dict():
            return {name: with_tick(one, tick) for name, one in value.items()}
        case list():
            return [with_tick(one, tick) for one in value]
        case _:
            return value


def fold_all(events: Iterable[ScheduleEvent]) -> ScheduleState | None:
    """The state after all these events, from the first one on."""
    state = None
    for event in events:
        state = folded(state, event.ts, event.body)
    return state
