"""What can be read from the journals of schedules: are they as they were written, and what happened, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec

from perdure import shell
from perdure.core.events import RunCreated
from perdure.core.identity import link
from perdure.core.schedule import (
    AnyScheduleBody,
    ScheduleEvent,
    SchedulePaused,
    ScheduleRemoved,
    ScheduleResumed,
    ScheduleSet,
    ScheduleState,
    Spec,
    StartedNow,
    TicksSkipped,
    TickStarted,
    decode_schedule_body,
    encode_state,
    folded,
    genesis,
    tick_run_id,
)
from perdure.engine.api import Reading
from perdure.engine.schedules import state_of
from perdure.errors import StoreCorrupt
from perdure.inspect.audit import AuditFilter
from perdure.inspect.health import IGNORED_AFTER_US, Check
from perdure.inspect.text import iso, plural, span
from perdure.schedule import when_words
from perdure.store.api import FINISHED, ScheduleRow, Stored, WorkerRow

TYPES = tuple(str(kind.__struct_config__.tag) for kind in get_args(AnyScheduleBody))
_PAGE = 500


# -- verify -----------------------------------------------------------------------------------------------------------
def schedule_problems(store: Reading) -> Iterator[str]:
    """What is wrong with the journals and the rows of schedules, in words."""
    for row in store.schedules():
        problem = _problem(store, row)
        if problem is not None:
            yield f"schedule {row.schedule_id}{problem}"
    for schedule_id, seq in store.unchained_schedules().items():
        yield f"schedule {schedule_id}: its last event, {seq}, is not in the journal-wide chain: the chain was cut, or triggers were switched off"
    for missing in store.missing_schedule_heads():
        if missing.run_id is None:
            name = missing.name or f"schedule number {missing.number}"
            yield f"{name}: the journal-wide chain has it with {missing.last_seq:,} events, and it is gone; restore it from a backup"
        else:
            yield (
                f"schedule {missing.run_id}: the journal-wide chain has its event {missing.last_seq}, and its journal does not: it was cut off, "
                "rolled back or rewritten; restore it from a backup"
            )


def _problem(store: Reading, row: ScheduleRow) -> str | None:
    stored = store.schedule_events(row.schedule_id)
    beyond = stored[row.seq :]
    if beyond:
        later = store.schedule(row.schedule_id)
        if later is None or later.seq < len(stored):
            return f": its row was rolled back: it says event {row.seq}, and the journal ends with event {len(stored)}"
        # A worker has started a tick since `row` was read. The row does not count these events.
        stored = stored[: row.seq]
    state, head = None, genesis(row.schedule_id)
    started: list[str] = []
    for expected, one in enumerate(stored, 1):
        try:
            event = event_of(one)
            if one.seq != expected or link(head, one.seq, event.event_id, one.ts, 0, None, None, one.data) != one.hash:
                return f", event {expected}: it is not what was written, or an event before it is missing"
            state, head = folded(state, one.ts, event.body), one.hash
        except (StoreCorrupt, TypeError) as error:
            return f", event {expected}: {error}"
        if isinstance(event.body, TickStarted | StartedNow):
            started.append(event.body.run_id)
    if len(stored) < row.seq:
        return f": its journal ends with event {len(stored)}, and its row says that there are {row.seq}"
    return _row_problem(row, state, head) or _lost_run(store, started)


def _row_problem(row: ScheduleRow, state: ScheduleState | None, head: bytes) -> str | None:
    if state is None or row.head != head:
        return ": its row has another head than its journal"
    wanted = (state.spec.agent, state.spec.queue, state.due_at, state.waits_for, encode_state(state))
    if (row.agent, row.queue, row.due_at, row.waits_for, row.state) != wanted:
        return ": its row was edited: it is not what its journal says"
    return None


def _lost_run(store: Reading, started: Sequence[str]) -> str | None:
    """A run that was created in the commit of its tick must be there, or its tombstone."""
    for at in range(0, len(started), _PAGE):
        page = started[at : at + _PAGE]
        there = store.watched(page, ())
        gone = next((run_id for run_id in page if run_id not in there and store.tombstone(run_id) is None), None)
        if gone is not None:
            return f": it has started run {gone}, and that run is gone without a tombstone; restore it from a backup"
    return None


def event_of(stored: Stored) -> ScheduleEvent:
    """The event in a stored row. StoreCorrupt if it cannot be decoded."""
    try:
        body = decode_schedule_body(stored.data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise StoreCorrupt(f"it cannot be decoded: {error}") from None
    event_id = stored.event_id.hex() if isinstance(stored.event_id, bytes) else str(stored.event_id)
    return ScheduleEvent(stored.seq, event_id, stored.ts, body, stored.data, stored.hash)


# -- words ------------------------------------------------------------------------------------------------------------
def event_words(body: AnyScheduleBody) -> str:
    """What happened, for people."""
    match body:
        case ScheduleSet(spec=spec, by=by, declared=declared):
            return f"set by {by}: {when_words(spec)}, agent {spec.agent}" + (" (declared in its code)" if declared else "")
        case SchedulePaused(by=by, note=note):
            return f"paused by {by}" + _noted(note)
        case ScheduleResumed(by=by, note=note):
            return f"resumed by {by}" + _noted(note)
        case ScheduleRemoved(by=by, note=note):
            return f"removed by {by}" + _noted(note)
        case TickStarted(tick=tick, run_id=run_id, cancelled=old):
            return f"tick {_second(tick)} started run {run_id}" + ("" if old is None else f", and cancelled run {old}")
        case TicksSkipped(first=first, last=last, why=why):
            ticks = f"tick {_second(first)}" if first == last else f"ticks from {_second(first)} to {_second(last)}"
            return f"{ticks} skipped: {why}"
        case StartedNow(by=by, run_id=run_id, cancelled=old):
            return f"{by} started run {run_id} without a tick" + ("" if old is None else f", and cancelled run {old}")


def _noted(note: str | None) -> str:
    return f": {note}" if note else ""


def _second(us: int) -> str:
    return iso(us).replace(".000000Z", "Z")


def schedule_line(created: RunCreated | None) -> str | None:
    """The line of `perdure why` about the schedule that has started a run. None: no schedule has started it."""
    if created is None or created.schedule is None or created.tick is None:
        return None
    history = shell.command("schedules", "show", created.schedule)
    if created.run_id == tick_run_id(created.schedule, created.tick):
        return f"started by schedule {created.schedule} for its tick {_second(created.tick)}; its history: {history}"
    return f"a person has started it by schedule {created.schedule}, without a tick; its history: {history}"


# -- the audit trail --------------------------------------------------------------------------------------------------
class ScheduleLines:
    """Events of schedules as lines of the audit trail. Each call of `more` yields only the events that are new."""

    def __init__(self, store: Reading, wanted: AuditFilter) -> None:
        self._store = store
        self._wanted = wanted
        self._seen: dict[str, int] = {}
        self._specs: dict[str, Spec] = {}

    def more(self) -> Iterator[dict[str, Any]]:
        if self._wanted.run_id is not None:
            return
        for row in self._store.schedules():
            seen = self._seen.get(row.schedule_id, 0)
            if row.seq <= seen:
                continue
            for stored in self._store.schedule_events(row.schedule_id, seen):
                self._seen[row.schedule_id] = stored.seq
                event = event_of(stored)
                if isinstance(event.body, ScheduleSet):
                    self._specs[row.schedule_id] = event.body.spec
                spec = self._specs[row.schedule_id]
                kind = str(event.body.__struct_config__.tag)
                # A schedule is no run: it has an agent and a tenant, and no run id.
                if self._wanted.has_run("", spec.agent, spec.tenant) and self._wanted.has_line(kind, event.ts):
                    yield _line(row.schedule_id, spec.agent, spec.tenant, event, kind)


def _line(schedule_id: str, agent: str, tenant: str, event: ScheduleEvent, kind: str) -> dict[str, Any]:
    body = event.body
    return {
        "ts": iso(event.ts),
        "run_id": None,
        "schedule": schedule_id,
        "event_id": event.event_id,
        "seq": event.seq,
        "type": kind,
        "call": None,
        "tool": None,
        "caused_by": None,
        "idempotency_key": None,
        "actor": f"schedule:{schedule_id}" if isinstance(body, TickStarted | TicksSkipped) else body.by,
        "error": body.why if isinstance(body, TicksSkipped) else None,
        "context": {"agent": agent, "tenant": tenant, **event_record(body)},
    }


def event_record(body: AnyScheduleBody) -> dict[str, Any]:
    """The fields of the event, with times as ISO 8601. The input of the runs is left out: it may be secret."""
    record: dict[str, Any] = msgspec.to_builtins(body)
    record.pop("type", None)
    record.pop("by", None)
    for name in ("tick", "first", "last", "next_tick", "due_at"):
        if record.get(name) is not None:
            record[name] = iso(record[name])
    if isinstance(body, ScheduleSet):
        record["spec"].pop("input", None)
        record["when"] = when_words(body.spec)
    return record


# -- doctor -----------------------------------------------------------------------------------------------------------
def check_schedules(store: Reading, workers: Sequence[WorkerRow], now: int) -> Check:
    """Are there schedules whose agent no worker serves, whose tick is overdue, or that a stopped run blocks?"""
    active: list[ScheduleRow] = []
    problems: list[str] = []
    paused = 0
    served = {(one.agent, queue) for worker in workers if worker.alive for one in worker.serves for queue in worker.queues or ("",)}
    for row in store.schedules():
        try:
            state = state_of(row)
        except StoreCorrupt as damage:
            problems.append(str(damage))
            continue
        paused += state.status == "paused"
        if state.status != "active":
            continue
        active.append(row)
        last = None if state.last_run is None else store.get(state.last_run)
        is_open = last is not None and last.status not in FINISHED
        if not served.intersection(((row.agent, ""), (row.agent, row.queue))):
            problems.append(f"{row.schedule_id}: no live worker serves agent {row.agent} in queue {row.queue}")
        elif row.due_at is not None and row.due_at < now - IGNORED_AFTER_US and not (is_open and row.waits_for is not None):
            problems.append(f"{row.schedule_id}: its tick is overdue for {span(now - row.due_at)}")
        elif (
            last is not None
            and is_open
            and last.status in ("needs_attention", "paused", "waiting_approval")
            and state.spec.overlap != "allow"
        ):
            problems.append(
                f"{row.schedule_id}: its last run {last.run_id} is {last.status.replace('_', ' ')}, and holds up the next ticks"
            )
    if problems:
        more = f"; and {len(problems) - 3:,} more" if len(problems) > 3 else ""
        return Check("schedules", "warn", "; ".join(problems[:3]) + more, "perdure schedules list; perdure worker FILE.py serves an agent")
    rest = f", {paused:,} paused" if paused else ""
    return Check("schedules", "ok", f"{plural(len(active), 'schedule is', 'schedules are')} active{rest}")
