"""Schedules: their rows and their journals. What a change means is decided elsewhere (perdure.core.schedule)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from perdure.core.schedule import ScheduleEvent
from perdure.errors import Conflict
from perdure.store.api import FINISHED, MissingHead, ScheduleChange, ScheduleCopy, ScheduleRow, Served, Stored
from perdure.store.creation import insert_run
from perdure.store.cursor import Cursor, Row
from perdure.store.delivery import Delivery, Letter
from perdure.store.part import Means, Part
from perdure.store.queues import which
from perdure.store.rows import run_row

_PAGE = 20  # how many schedules a worker looks at together
_ALL = 2**31 - 1
Answer = Literal["done", "moved_on", "taken"]


class Schedules(Part):
    """Changes schedules under a guard, and reads them."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._delivery = Delivery(means.liveness)

    def schedules(self) -> list[ScheduleRow]:
        return [ScheduleRow(*row) for row in self._database.read("all_schedules", {"schedule_id": None})]

    def schedule(self, schedule_id: str) -> ScheduleRow | None:
        rows = self._database.read("all_schedules", {"schedule_id": schedule_id})
        return ScheduleRow(*rows[0]) if rows else None

    def schedule_events(self, schedule_id: str, after: int = 0) -> list[Stored]:
        wanted = {"schedule_id": schedule_id, "after": after, "limit": _ALL}
        return [Stored(*row) for row in self._database.read("stored_schedule_events", wanted)]

    def missing_schedule_heads(self) -> list[MissingHead]:
        rows = self._database.read("missing_schedule_heads")
        return [MissingHead(number, last, last, name, schedule_id, seq) for number, last, name, schedule_id, seq in rows]

    def unchained_schedules(self) -> dict[str, int]:
        return {str(name): int(seq) for name, seq in self._database.read("unchained_schedules")}

    def next_schedules(self, served: Sequence[Served], queues: Sequence[str] | None = None) -> list[ScheduleRow]:
        return [ScheduleRow(*row) for row in self._database.read("next_schedules", {**which(served, queues), "limit": _PAGE})]

    def change_schedule(self, change: ScheduleChange) -> Answer:
        """The tick's advance, its event and its run are one commit.

        A crash before the commit leaves the tick due, and the next worker starts it. A crash after the commit leaves
        the run ready for any worker. There is no moment between the two.
        """
        try:
            done = self._database.write(lambda cursor: self._change(cursor, change), lambda cursor, _: _has_arrived(cursor, change))
        except _Taken:
            return "taken"
        if not done:
            return "moved_on"
        if change.start is not None:
            self._bell.ring()
        return "done"

    def _change(self, cursor: Cursor, change: ScheduleChange) -> bool:
        values = _values(change.row)
        if change.expected_seq == 0:
            if cursor.change("insert_schedule", values) != 1:
                return False
        elif cursor.change("advance_schedule", {**values, "expected": change.expected_seq}) != 1:
            return False  # another worker has started this tick, or a person has changed the schedule
        cursor.each("insert_schedule_event", [_event_row(change.row.schedule_id, event) for event in change.events])
        if change.start is not None and not insert_run(cursor, change.start):
            raise _Taken  # roll back: a run has this id, or had it before it was pruned
        if change.cancel is not None:
            self._cancel(cursor, change)
        cursor.link_chain()
        return True

    def _cancel(self, cursor: Cursor, change: ScheduleChange) -> None:
        """Ask the run before to stop, unless it has ended or was asked before."""
        assert change.cancel is not None
        run_id, body, event_id = change.cancel
        found = cursor.one("run_to_change", (run_id,))
        if found is None:
            return
        row = run_row(found)
        if row.status in FINISHED or row.status == "cancelling" or row.specimen is not None:
            return
        self._delivery.deliver(cursor, found, Letter(None, body, event_id, change.events[-1].ts))

    def take_in_schedules(self, copies: Sequence[ScheduleCopy]) -> int:
        """Insert the schedules of a journal that moves to this database. Returns how many are new here."""

        def insert(cursor: Cursor) -> int:
            new = 0
            for copy in copies:
                row = copy.row
                if cursor.change("insert_schedule", _values(row)) != 1:
                    found = cursor.one("schedule_event_hash", (row.schedule_id, row.seq))
                    if found is None or found[0] != row.head:
                        raise Conflict(
                            f"there is another schedule {row.schedule_id} already; remove one of the two, under another id if needed"
                        )
                    continue
                events = [(row.schedule_id, one.seq, one.event_id, one.ts, one.data.decode(), one.hash) for one in copy.events]
                cursor.each("insert_schedule_event", events)
                new += 1
            cursor.link_chain()
            return new

        # After a commit with unknown outcome the same work is done again: schedules that are there are left out.
        return self._database.write(insert, lambda cursor, _: False)


class _Taken(Exception):
    """The id of the run to start is taken."""


def _has_arrived(cursor: Cursor, change: ScheduleChange) -> bool:
    last = change.events[-1]
    found = cursor.one("schedule_event_hash", (change.row.schedule_id, last.seq))
    return found is not None and found[0] == last.hash


def _values(row: ScheduleRow) -> dict[str, Any]:
    return {
        "schedule_id": row.schedule_id,
        "agent": row.agent,
        "queue": row.queue,
        "due_at": row.due_at,
        "waits_for": row.waits_for,
        "state": row.state.decode(),
        "seq": row.seq,
        "head": row.head,
    }


def _event_row(schedule_id: str, event: ScheduleEvent) -> Row:
    return (schedule_id, event.seq, bytes.fromhex(event.event_id), event.ts, event.data.decode(), event.hash)
