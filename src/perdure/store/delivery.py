"""Delivers posts to a run: into the journal if the run is not held, else into the inbox, which the holder reads."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalVoted,
    ApprovalWithdrawn,
    Event,
    RunCreated,
    RunPaused,
    RunUnpaused,
    SignalReceived,
    encode_body,
)
from perdure.core.identity import seal
from perdure.core.transitions import landing
from perdure.store import notices
from perdure.store.api import RunRow, Status
from perdure.store.claims import load_of
from perdure.store.cursor import Cursor, Row
from perdure.store.liveness import Liveness
from perdure.store.rows import body_from, body_or_none, event_row, key_of, run_row

# Events that must be in the journal in order of arrival: signals of a topic, changes of an approval, a pause and the
# end of a pause.
OF_APPROVALS = (ApprovalVoted, ApprovalEscalated, ApprovalDecided, ApprovalExpired, ApprovalWithdrawn)
_IN_ORDER = (SignalReceived, *OF_APPROVALS, RunPaused, RunUnpaused)


class Letter(Struct, frozen=True, gc=False):
    """One event for a run, as it was posted."""

    call: int | None
    body: AnyBody
    event_id: str
    ts: int
    # The seq of the event that caused this event. None: the last event of the call; without a call, of the run.
    cause: int | None = None


class Delivery:
    """Writes posts to an unfinished run, for a process that does not hold the run."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness

    def holds(self, holder: str | None) -> bool:
        """Is there a holder that is not proven dead?"""
        return holder is not None and not self._liveness.is_dead(holder)

    def deliver(self, cursor: Cursor, found: Row, letter: Letter, status: Status | None = None, *, held: bool | None = None) -> bool:
        """Deliver the letter. True: the event is in the journal. False: it is in the inbox, and the holder appends it.

        `held` is the answer of `holds`, if the caller has already asked.
        """
        if self.holds(run_row(found).holder) if held is None else held:
            values = {
                "id": key_of(found),
                "call": letter.call,
                "event_id": bytes.fromhex(letter.event_id),
                "now": letter.ts,
                "data": encode_body(letter.body).decode(),
            }
            cursor.change("insert_inbox", values)
            return False
        if isinstance(letter.body, _IN_ORDER):
            found = journal_unread(cursor, found, letter.ts, lambda body, _: isinstance(body, _IN_ORDER))
        _journal(cursor, found, letter, status)
        return True


def journal_unread(cursor: Cursor, found: Row, now: int, wanted: Callable[[AnyBody, int | None], bool]) -> Row:
    """Append the `wanted` posts (body, call) that the last holder left unread. The caller's events come after them.

    Returns the run's new row.
    """
    for inbox_id, call, event_id, data in cursor.all("unread_of_run", (key_of(found),)):
        body = body_or_none(data, f"inbox row {inbox_id} of run {run_row(found).run_id}")
        if body is not None and wanted(body, call):
            _journal(cursor, found, Letter(call, body, event_id.hex(), now))
            cursor.change("consume_inbox", (inbox_id, key_of(found)))
            found = cursor.all("run_by_id", (run_row(found).run_id,))[0]
    return found


def _journal(cursor: Cursor, found: Row, letter: Letter, status: Status | None = None) -> None:
    row, key = run_row(found), key_of(found)
    cause = letter.cause
    if cause is None and letter.call is not None:
        ((cause,),) = cursor.all("last_event_of_call", {"id": key, "call": letter.call})
    cause = row.seq if cause is None else cause
    event = Event(row.seq + 1, letter.event_id, letter.ts, row.epoch, letter.call, cause, letter.body)
    sealed = seal(row.head, event)
    after, ready_at, waiting_for = _after_post(row, letter)
    if isinstance(letter.body, RunUnpaused) and row.status == "paused" and row.epoch == 0:
        ready_at = max(letter.ts, _not_before(cursor, key, row.run_id))
    moved = {"id": key, "seq": event.seq, "head": sealed.hash, "now": letter.ts, "status": status or after}
    beside = 0 if row.holder is None else load_of(cursor, row.holder).beside(row.crashes)
    cursor.change("post_to_unheld", {**moved, "ready_at": ready_at, "waiting_for": waiting_for, "beside": beside})
    cursor.change("insert_event", event_row(key, sealed))
    if isinstance(letter.body, notices.TOLD):
        notices.tell(cursor, key, event)


def _not_before(cursor: Cursor, key: int, run_id: str) -> int:
    """The time before which the run must not begin, from the run's first event.

    The row does not have this time any more, because the pause has cleared it.
    """
    (first,) = cursor.one("first_event", (key,)) or (b"",)
    created = body_from(first, f"event 1 of run {run_id}")
    assert isinstance(created, RunCreated), created
    return created.not_before or 0


def _after_post(row: RunRow, letter: Letter) -> tuple[Status, int | None, str | None]:
    """The run's new status, ready_at and waiting_for after this letter. The run is not held."""
    status, ready_at = row.status, row.ready_at
    if row.holder is not None:
        # The run's holder is dead, but the run is not reaped yet. This write removes the holder, so `reap` will not
        # find the run later. So make the run ready now.
        status, ready_at = "cancelling" if row.status == "cancelling" else "queued", letter.ts
    after, wake = landing(status, row.attention, letter.body)
    if wake == "keep":
        return after, ready_at, row.waiting_for
    if wake == "never":
        return after, None, None
    # A queued run keeps its place in its line, and a post does not make the run begin before its time.
    return after, ready_at if after == status == "queued" and ready_at is not None else letter.ts, None
