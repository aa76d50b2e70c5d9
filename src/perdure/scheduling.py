"""What people and programs do with schedules, checked: add, change, pause, resume, remove, start now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

from msgspec import Struct

from perdure import shell
from perdure.control import known_name, plain_text, words
from perdure.core import codec
from perdure.core.schedule import (
    Missed,
    Overlap,
    SchedulePaused,
    ScheduleRemoved,
    ScheduleResumed,
    ScheduleState,
    ScheduleStatus,
    Spec,
    StartedNow,
    check_schedule_id,
    due_time,
    next_tick,
)
from perdure.core.times import micros_of, utc
from perdure.engine.api import AskReading, Engine
from perdure.engine.clock import Clock
from perdure.engine.schedules import ScheduleChanges, is_current, state_of
from perdure.errors import Conflict, NotFound
from perdure.schedule import calendar_of, local_time, when_words
from perdure.settings import Settings
from perdure.store.api import FINISHED, ScheduleChange, ScheduleRow

_TRIES = 20  # how many times a change is made again because a worker was faster


class ScheduleInfo(Struct, frozen=True):
    """A schedule, seen from outside. Times are datetimes in UTC."""

    id: str
    agent: str
    when: str  # in words, such as "0 7 * * mon-fri (Europe/Berlin)"
    status: ScheduleStatus
    next_tick: datetime | None
    due: datetime | None  # when the next tick is due: the tick and its jitter
    last_tick: datetime | None  # the last tick that has started a run
    last_run: str | None  # the last run that was started, by a tick or by a person
    skipped: str | None  # why the tick before the next one was skipped
    input: dict[str, Any]  # with placeholders, such as {"$tick": "%Y-%m-%d"}
    overlap: Overlap
    missed: Missed
    limit: int
    queue: str
    priority: int
    tenant: str
    labels: dict[str, str] = {}


class TickTime(Struct, frozen=True):
    """A tick that will come."""

    tick: datetime  # in UTC
    local: datetime  # in the zone of the schedule
    due: datetime  # in UTC, with its jitter


def schedule_info(row: ScheduleRow) -> ScheduleInfo:
    """What users see of a schedule."""
    state = state_of(row)
    spec = state.spec
    return ScheduleInfo(
        row.schedule_id,
        spec.agent,
        when_words(spec),
        state.status,
        _time(state.next_tick),
        _time(state.due_at),
        _time(state.last_tick),
        state.last_run,
        state.skipped,
        codec.decode(spec.input.encode()),
        *(spec.overlap, spec.missed, spec.limit, spec.queue, spec.priority, spec.tenant, spec.labels),
    )


def _time(us: int | None) -> datetime | None:
    return None if us is None else utc(us)


def next_ticks(schedule_id: str, spec: Spec, after: int, number: int) -> list[TickTime]:
    """The next ticks later than `after`."""

    def ticks() -> Any:
        tick = calendar_of(spec).after(after)
        while tick is not None:
            due = due_time(schedule_id, spec, tick)
            assert due is not None
            yield TickTime(utc(tick), local_time(spec, tick), utc(due))
            tick = calendar_of(spec).after(tick)

    return list(islice(ticks(), number))


class Scheduling:
    """The schedules of a journal."""

    def __init__(self, engine: Engine, ask: AskReading, clock: Clock, settings: Settings) -> None:
        self._engine = engine
        self._ask = ask
        self._clock = clock
        self._changes = ScheduleChanges(clock, settings)

    async def set(self, schedule_id: str, spec: Spec, *, by: str, replace: bool = True, declared: bool = False) -> ScheduleInfo:
        """Add the schedule, or change it. Nothing is recorded if it is the same. Conflict if it exists, unless `replace`.

        `declared`: it is what the code of the agent declares, so that workers need not register it again.
        """
        schedule_id, who = check_schedule_id(schedule_id), known_name(by)

        def change(row: ScheduleRow | None) -> ScheduleChange | None:
            if row is not None and is_current(row, spec):
                return None
            if row is not None and not replace and state_of(row).status != "removed":
                raise Conflict(
                    f"there is a schedule {schedule_id} already, of agent {row.agent}",
                    hint=f"change it with --replace, or see it: {shell.command('schedules', 'show', schedule_id)}",
                )
            return self._changes.set(schedule_id, row, spec, who, self._clock.now(), declared=declared)

        return schedule_info(await self._change(schedule_id, change))

    async def pause(self, schedule_id: str, *, by: str, note: str | None = None) -> ScheduleInfo:
        """Start no more ticks until it is resumed. A schedule that a person has paused stays paused across deploys."""
        body = SchedulePaused(known_name(by), words(note, "note"))

        def change(row: ScheduleRow, state: ScheduleState) -> ScheduleChange | None:
            return None if state.status == "paused" else self._changes.change(row.schedule_id, row, [body], self._clock.now())

        return await self._steer(schedule_id, change)

    async def resume(self, schedule_id: str, *, by: str, note: str | None = None) -> ScheduleInfo:
        """Go on with the next tick from now on. Ticks of the pause are not made up for."""
        who, said = known_name(by), words(note, "note")

        def change(row: ScheduleRow, state: ScheduleState) -> ScheduleChange | None:
            if state.status == "active":
                return None
            now = self._clock.now()
            ticks = next_tick(row.schedule_id, state.spec, calendar_of(state.spec), now)
            return self._changes.change(row.schedule_id, row, [ScheduleResumed(who, **ticks, note=said)], now)

        return await self._steer(schedule_id, change)

    async def remove(self, schedule_id: str, *, by: str, note: str | None = None) -> ScheduleInfo:
        """End the schedule. Its journal stays, and so do its runs."""
        body = ScheduleRemoved(known_name(by), words(note, "note"))
        return await self._steer(schedule_id, lambda row, state: self._changes.change(row.schedule_id, row, [body], self._clock.now()))

    async def start_now(self, schedule_id: str, *, by: str) -> str:
        """Start a run of the schedule now, beside its ticks. Returns the run's id.

        Conflict if the last run has not ended, and `overlap` is "skip" or "queue".
        """
        who = known_name(by)
        reading = self._engine.reading
        started = ""

        def change(row: ScheduleRow, state: ScheduleState) -> ScheduleChange:
            nonlocal started
            last = None if state.last_run is None else reading.get(state.last_run)
            is_open = last is not None and last.status not in FINISHED
            if is_open and state.spec.overlap in ("skip", "queue"):
                raise Conflict(
                    f"run {state.last_run} of schedule {schedule_id} has not ended, and overlap is {state.spec.overlap!r}: nothing was started",
                    hint=f"see it: {shell.command('why', str(state.last_run))}; or start a run beside it: "
                    f"{shell.command('start', state.spec.agent)}",
                )
            started = f"{schedule_id}@now-{row.seq + 1}"
            old = state.last_run if is_open and state.spec.overlap == "cancel" else None
            return self._changes.change(schedule_id, row, [StartedNow(who, started, old)], self._clock.now())

        await self._steer(schedule_id, change)
        return started

    async def list(self, *, removed: bool = False) -> list[ScheduleInfo]:
        """All schedules by id."""
        infos = map(schedule_info, await self._ask(self._engine.reading.schedules))
        return [info for info in infos if removed or info.status != "removed"]

    async def get(self, schedule_id: str) -> ScheduleInfo:
        """The schedule with this id. NotFound if there never was one."""
        return schedule_info(await self._row(schedule_id))

    async def next(self, schedule_id: str, number: int = 5, *, after: datetime | None = None) -> Sequence[TickTime]:
        """The next ticks of the schedule, whether it is paused or not."""
        row = await self._row(schedule_id)
        return next_ticks(row.schedule_id, state_of(row).spec, self._clock.now() if after is None else micros_of(after), number)

    # -- internal -----------------------------------------------------------------------------------------------------
    async def _row(self, schedule_id: str) -> ScheduleRow:
        schedule_id, reading = plain_text(schedule_id, "a schedule's id"), self._engine.reading
        row = await self._ask(lambda: reading.schedule(schedule_id))
        if row is None:
            raise no_such_schedule(schedule_id)
        return row

    async def _steer(self, schedule_id: str, change: Callable[[ScheduleRow, ScheduleState], ScheduleChange | None]) -> ScheduleInfo:
        await self._row(schedule_id)

        def known(row: ScheduleRow | None) -> ScheduleChange | None:
            assert row is not None, schedule_id  # schedules are never deleted
            state = state_of(row)
            if state.status == "removed":
                raise NotFound(
                    f"schedule {schedule_id} was removed", hint=f"its history: {shell.command('schedules', 'show', schedule_id)}"
                )
            return change(row, state)

        return schedule_info(await self._change(schedule_id, known))

    async def _change(self, schedule_id: str, make: Callable[[ScheduleRow | None], ScheduleChange | None]) -> ScheduleRow:
        """Make the change from the row as it is, and again if a worker was faster. Returns the row after it."""
        reading = self._engine.reading
        for _ in range(_TRIES):

            def made() -> tuple[ScheduleRow | None, ScheduleChange | None]:
                row = reading.schedule(schedule_id)
                return row, make(row)

            row, change = await self._ask(made)
            if change is None:
                assert row is not None, schedule_id
                return row
            answer = await self._engine.change_schedule(change)
            if answer == "done":
                return change.row
            if answer == "taken":
                assert change.start is not None, change
                raise Conflict(f"the run id {change.start.run_id} is taken; try again")
        raise Conflict(f"schedule {schedule_id} is being changed by others all the time; try again")


def no_such_schedule(schedule_id: str) -> NotFound:
    return NotFound(f"there is no schedule {schedule_id}", hint="`perdure schedules list` shows the schedules")
