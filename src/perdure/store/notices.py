"""The outbox: what people should hear of, written in the commit of the event itself (T25) and sent at least once."""

from __future__ import annotations

import logging

from perdure.core.events import AnyBody, ApprovalEscalated, ApprovalRequested, AttentionNeeded, BudgetExceeded, Event
from perdure.errors import StoreCorrupt
from perdure.store.api import NoticeRow
from perdure.store.cursor import Cursor, Row
from perdure.store.part import Part
from perdure.store.rows import event_from, run_row

TOLD = (ApprovalRequested, ApprovalEscalated, AttentionNeeded, BudgetExceeded)  # and the failure of a run that has no parent

log = logging.getLogger("perdure.store")


def is_told(body: AnyBody) -> bool:
    """Whether people should hear of it by itself. That a run stands still for want of money follows from the budget that was used up."""
    return isinstance(body, TOLD) and not (isinstance(body, AttentionNeeded) and body.reason == "budget")


def tell(cursor: Cursor, key: int, event: Event) -> None:
    """Somebody should hear of this event, from now on."""
    cursor.change("insert_notice", (key, event.seq, event.ts))


class Notices(Part):
    """Notices that are due, each for one taker at a time."""

    def take_notices(self, now: int, limit: int, hold_us: int) -> list[NoticeRow]:
        # Looked at without the write lock first: most of the time there is nothing to take.
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
            # Somebody has been at the database: left where it is, it would come up again for ever, and there is nothing to tell.
            log.error(
                "notice %d is about event %d of run number %d, which is not there: somebody has changed the database", notice_id, seq, key
            )
            self.notice_done(notice_id)
            return None
        run_id, *event = found[0]
        try:
            return NoticeRow(notice_id, run_row(self._database.read("run_by_id", (run_id,))[0]), event_from(run_id, tuple(event)), attempts)
        except StoreCorrupt:
            return None  # that notice's trouble alone: it stays in the outbox, and `verify` says what is wrong with its event
