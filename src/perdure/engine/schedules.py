"""Changes of schedules, ready to be committed: what a worker does at a tick, and what code and people declare.

Every change is computed from a row that was read before, and names the seq of that row. The store commits it only if
the schedule still has that seq. So of any number of workers that see the same tick, one starts it, and the others
read the row again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import structs

from perdure.core import codec, identity
from perdure.core.events import CancelRequested, RunCreated
from perdure.core.schedule import (
    AnyScheduleBody,
    ScheduleEvent,
    ScheduleSet,
    ScheduleState,
    Spec,
    StartedNow,
    TicksSkipped,
    TickStarted,
    decode_state,
    encode_state,
    folded,
    genesis,
    next_tick,
    sealed,
    steps_due,
)
from perdure.engine.clock import Clock
from perdure.errors import InvalidInput, StoreCorrupt
from perdure.schedule import Declared, calendar_of, input_at
from perdure.settings import Settings
from perdure.store.api import NO_VERSION, NewRun, ScheduleChange, ScheduleRow
from perdure.tool.artifact import ids_in, pointers_in


def state_of(row: ScheduleRow) -> ScheduleState:
    """The state in the row. StoreCorrupt if the row was edited or damaged."""
    try:
        return decode_state(row.state)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreCorrupt(f"the row of schedule {row.schedule_id} is damaged ({error})", hint="see what else is: perdure verify") from None


class ScheduleChanges:
    """Makes changes of schedules, with the clock and the settings of this process."""

    def __init__(self, clock: Clock, settings: Settings) -> None:
        self._clock = clock
        self._settings = settings

    def change(self, schedule_id: str, row: ScheduleRow | None, bodies: Sequence[AnyScheduleBody], now: int) -> ScheduleChange:
        """The events with these bodies, and what follows from them. `row` is the schedule before; None: it is new."""
        state = None if row is None else state_of(row)
        seq, head = (0, genesis(schedule_id)) if row is None else (row.seq, row.head)
        events: list[ScheduleEvent] = []
        for body in bodies:
            state = folded(state, now, body)
            events.append(sealed(head, seq + len(events) + 1, self._clock.new_id(), now, body))
            head = events[-1].hash
        assert state is not None, bodies
        after = ScheduleRow(
            schedule_id,
            state.spec.agent,
            state.spec.queue,
            state.due_at,
            state.waits_for,
            encode_state(state),
            seq + len(events),
            head,
        )
        start, cancel = None, None
        match bodies[-1]:
            case TickStarted(tick=tick, run_id=run_id, cancelled=old):
                start = self._run(schedule_id, state.spec, tick, run_id, now)
                cancel = self._cancel(schedule_id, old)
            case StartedNow(run_id=run_id, cancelled=old):
                start = self._run(schedule_id, state.spec, now // 1_000_000 * 1_000_000, run_id, now)
                cancel = self._cancel(schedule_id, old)
        return ScheduleChange(after, seq, tuple(events), start, cancel)

    def _cancel(self, schedule_id: str, run_id: str | None) -> tuple[str, CancelRequested, str] | None:
        if run_id is None:
            return None
        body = CancelRequested(by=f"schedule:{schedule_id}", reason="the next run of the schedule begins")
        return run_id, body, self._clock.new_id()

    def _run(self, schedule_id: str, spec: Spec, tick: int, run_id: str, now: int) -> NewRun:
        encoded = input_at(spec, tick)
        payload, blob = codec.pack(encoded, self._settings.inline_bytes)
        created = RunCreated(
            run_id=run_id,
            agent=spec.agent,
            version=NO_VERSION,
            tenant=spec.tenant,
            input=payload,
            actor=f"schedule:{schedule_id}",
            target=spec.target,
            queue=spec.queue,
            priority=spec.priority,
            budget=spec.budget,
            key_scheme=identity.KEY_SCHEME,
            key_namespace=self._settings.key_namespace,
            # The worker that begins the run has the code: it checks the input, whatever version it has.
            by_name=True,
            schedule=schedule_id,
            tick=tick,
            labels=spec.labels,
        )
        return NewRun(
            run_id,
            created,
            self._clock.new_id(),
            now,
            codec.digest(encoded),
            () if blob is None else (blob,),
            artifacts=tuple(ids_in(encoded)),
            needed_artifacts=tuple(artifact.id for artifact in pointers_in(encoded)),
        )

    def due(self, row: ScheduleRow, is_open: Callable[[str], bool], now: int) -> ScheduleChange | None:
        """What the schedule does now; None: nothing is due. `is_open`: is there such a run, and has it not ended?"""
        state = state_of(row)
        open_run = state.last_run if state.last_run is not None and is_open(state.last_run) else None
        bodies = steps_due(row.schedule_id, state, calendar_of(state.spec), now, open_run)
        if not bodies:
            return None
        try:
            return self.change(row.schedule_id, row, bodies, now)
        except InvalidInput as error:
            # The input was checked when it was declared; a row of an older version may still not fit.
            return self.skipped(row, bodies, f"its run cannot be created: {error}", now)

    def skipped(self, row: ScheduleRow, bodies: Sequence[TicksSkipped | TickStarted], why: str, now: int) -> ScheduleChange:
        """The same change, but the tick starts no run."""
        started = bodies[-1]
        assert isinstance(started, TickStarted), started
        skipped = TicksSkipped(started.tick, started.tick, why, started.next_tick, started.due_at)
        return self.change(row.schedule_id, row, [*bodies[:-1], skipped], now)

    def taken(self, row: ScheduleRow, change: ScheduleChange, now: int) -> ScheduleChange:
        """The change for a tick whose run id is taken: by a run, or by the tombstone of a pruned run."""
        bodies = [event.body for event in change.events]
        assert change.start is not None and all(isinstance(body, TicksSkipped | TickStarted) for body in bodies), bodies
        return self.skipped(row, bodies, f"there is a run {change.start.run_id} already, or there was one", now)  # type: ignore[arg-type]

    def set(self, schedule_id: str, row: ScheduleRow | None, spec: Spec, by: str, now: int, *, declared: bool = False) -> ScheduleChange:
        """Add or change a schedule. If only its input or its policies change, a tick that is due stays due."""
        before = None if row is None else state_of(row)
        if before is not None and before.status == "active" and _times(before.spec) == _times(spec) and before.next_tick is not None:
            ticks: dict[str, int | None] = {"next_tick": before.next_tick, "due_at": before.due_at}
        else:
            ticks = next_tick(schedule_id, spec, calendar_of(spec), now)
        return self.change(schedule_id, row, [ScheduleSet(spec, by, **ticks, declared=declared)], now)

    def declared(self, declared: Declared, row: ScheduleRow | None, by: str, now: int) -> ScheduleChange | None:
        """What a worker records about the schedule in its code; None: this declaration was recorded before.

        A declaration counts once, when a worker first brings it. After that a newer declaration, or a person, may have
        replaced it, paused it or removed it, and that stays. So two versions of the code never fight.
        """
        if row is not None and declared.spec.digest in state_of(row).declared:
            return None
        return self.set(declared.schedule_id, row, declared.spec, by, now, declared=True)


def _times(spec: Spec) -> tuple[str, int, str, int]:
    return spec.cron, spec.every_s, spec.tz, spec.jitter_s


def is_current(row: ScheduleRow, spec: Spec) -> bool:
    """Is this the spec that the schedule has now?"""
    state = state_of(row)
    return structs.replace(state.spec, target=None) == structs.replace(spec, target=None) and state.status != "removed"
