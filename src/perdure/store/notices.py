"""The outbox: notices for people. A notice is written in the commit of its event, and is sent at least once."""

from __future__ import annotations

import logging

from perdure.core.events import AnyBody, ApprovalEscalated, ApprovalRequested, AttentionNeeded, BudgetExceeded, Event
from perdure.errors import StoreCorrupt
from perdure.store.api import NoticeRow
from perdure.store.cursor import Cursor, Row
from perdure.store.part import Part
from perdure.store.rows import event_from, run_row

# The events that get a notice. The failure of a run without a parent gets a notice as well.
TOLD = (ApprovalRequested, ApprovalEscalated, AttentionNeeded, BudgetExceeded)

log = logging.getLogger("perdure.store")


def is_told(body: AnyBody) -> bool:
    """Does this event get a notice?

    An `attention_needed` because of a budget gets no notice, since its `budget_exceeded` already has one.
    """
    return isinstance(body, TOLD) and not (isinstance(body, AttentionNeeded) and body.reason == "budget")


def tell(cursor: Cursor, key: int, event: Event) -> None:
    """Write a notice about this event. The notice is due at once."""
    cursor.change("insert_notice", (key, event.seq, event.ts))


class Notices(Part):
    """Takes notices, and marks them as sent or failed. A notice belongs to one process at a time."""

    def take_notices(self, now: int, limit: int, hold_us: int) -> list[NoticeRow]:
        # Look first without the write lock: most of the time nothing is due.
        if not self._database.read("due_notices", (now, 1)):
            return []

        def take(cursor: Cursor) -> list[Row]:
            due = cursor.all("notices_to_take", (now, limit))
            cursor.each("take_notice", [(now + hold_us, row[0]) for row in due])
            return due

        def arrived(cursor: Cursor, due: list[Row]) -> bool:
            return any(cursor.one("notice", (row[0],)) == (now + hold_us, row[3] + 1) for row in due)

        taken = [self._notice(*row) for row in self._database.write(take, arrived)]
        return [notice for notice in taken if notice is not None]

    def notice_done(self, notice_id: int) -> None:
        self._database.write(
            lambda cursor: cursor.change("delete_notice", (notice_id,)),
            lambda cursor, _: cursor.one("notice", (notice_id,)) is None,
        )

    def notice_failed(self, notice_id: int, *, next_at: int, error: str) -> None:
        self._database.write(
            lambda cursor: cursor.change("put_notice_off", (next_at, error, notice_id)),
            lambda cursor, _: (cursor.one("notice", (notice_id,)) or (next_at,))[0] == next_at,
        )

    def next_notice(self) -> int | None:
        at: int | None = self._database.read("next_notice")[0][0]
        return at

    def _notice(self, notice_id: int, key: int, seq: int, attempts: int) -> NoticeRow | None:
        found = self._database.read("event_of_notice", (key, seq))
        if not found:
            # The database was edited by hand, and the event is gone. Delete the notice: there is nothing to send, and
            # the notice would be due again for ever.
            log.error(
                "notice %d is about event %d of run number %d, which does not exist: the database was changed by hand", notice_id, seq, key
            )
            self.notice_done(notice_id)
            return None
        run_id, *event = found[0]
        try:
            return NoticeRow(notice_id, run_row(self._database.read("run_by_id", (run_id,))[0]), event_from(run_id, tuple(event)), attempts)
        except StoreCorrupt:
            return None  # only this notice is affected: it stays in the outbox, and `verify` shows the damaged event
