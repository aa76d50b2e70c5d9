"""Compares a run's row with its journal. The row is a projection of the journal: if the two differ, the row is wrong.

Some columns are not in the journal, and are not checked: the nonce of the claim (`nonce`), how the last worker was
lost (`lost`), and how many other runs that worker held (`lost_with`). For `updated_at`, only a lower bound is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from perdure.core.events import (
    AttentionNeeded,
    CancelRequested,
    CheckpointTaken,
    Event,
    Reason,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunForked,
    RunReleased,
    RunReopened,
    RunRequeued,
    RunRestored,
    RunUnpaused,
    Status,
    ToolCallResolved,
)
from perdure.core.state import RESTORED, RunState, restored_words
from perdure.core.transitions import landing
from perdure.errors import StoreCorrupt
from perdure.store.api import RunRow

ERROR_CHARS = 500


def row_problem(row: RunRow, state: RunState, events: Sequence[Event], input_digest: str, head: bytes) -> str | None:
    """In words: the first column that contradicts the journal; None if all columns agree."""
    for column, expected in _fixed(state, input_digest, head).items():
        if getattr(row, column) != expected:
            return _differs(column, getattr(row, column), expected)
    if row.updated_at < max(event.ts for event in events):
        return _differs("updated_at", row.updated_at, f"at least {max(event.ts for event in events)}")
    takeovers = sum(isinstance(event.body, RunClaimed) and event.body.takeover for event in events)
    if not state.finished and not state.crashes <= row.crashes <= takeovers:
        return _differs("crashes", row.crashes, state.crashes)
    if row.holder is not None:
        return _held_problem(row, state)
    return _resting_problem(row, state, events, takeovers)


def right_row(row: RunRow, state: RunState, events: Sequence[Event], input_digest: str, head: bytes, *, has_post: bool) -> dict[str, Any]:
    """The columns of the row that contradict the journal, with their right values. No worker may hold the run.

    `has_post`: the run has unread post, so if it waits, it is ready at once.
    """
    last = max(event.ts for event in events)
    takeovers = sum(isinstance(event.body, RunClaimed) and event.body.takeover for event in events)
    right = {**_fixed(state, input_digest, head), "holder": None, "updated_at": max(row.updated_at, last)}
    if state.finished or not (state.crashes <= row.crashes <= takeovers):
        right["crashes"] = 0 if state.finished and not forced(events) else state.crashes
    right |= {"waiting_for": None, "attention": None, "error": None, "ready_at": None}
    if state.finished:
        right |= {"status": state.status, "lost": 0}
        right["error"] = f"{state.failure.type}: {state.failure.message}"[:ERROR_CHARS] if state.failure else None
    elif state.worker is not None:
        # The last worker did not release the run, and does not hold it any more. So any worker may take over the run.
        paused = state.paused is not None
        right |= {"status": "paused" if paused else "cancelling" if state.cancel else "queued", "lost": row.lost or 1}
        right["ready_at"] = None if paused else row.ready_at or last
    else:
        resting = _rest(events, row)
        ready_at = resting.ready_at
        if has_post and ready_at is None and resting.status.startswith("waiting"):
            ready_at = last
        right |= {"status": resting.status, "waiting_for": resting.waiting_for, "ready_at": ready_at}
        right |= {"attention": resting.attention, "error": resting.error}
        if isinstance(events[-1].body, RunReleased):
            right["crashes"] = state.crashes
    return {column: value for column, value in right.items() if not same(getattr(row, column), value)}


def specimen_row(run_id: str, state: RunState, events: Sequence[Event], input_digest: str, head: bytes, specimen: str) -> RunRow:
    """The row of a specimen, as of the last event of its journal.

    No worker holds a specimen, and it is never ready.
    """
    rests = row_of(run_id, state, events, input_digest, head, specimen)
    # A worker of the original journal holds the run, or has died. `right_row` computes a row that another worker could
    # take over. A specimen keeps the status of its journal instead.
    held = state.worker is not None and not state.finished
    return replace(rests, ready_at=None, lost=0, status=state.status if held else rests.status)


def row_of(run_id: str, state: RunState, events: Sequence[Event], input_digest: str, head: bytes, specimen: str | None = None) -> RunRow:
    """The row of a run with this journal, if no worker holds it."""
    base = RunRow(
        run_id=run_id,
        **_fixed(state, input_digest, head),
        status=state.status,
        waiting_for=None,
        ready_at=None,
        holder=None,
        crashes=0,
        error=None,
        updated_at=max(event.ts for event in events),
        specimen=specimen,
    )
    return replace(base, **right_row(base, state, events, input_digest, head, has_post=False))


def specimen_problem(row: RunRow, state: RunState, events: Sequence[Event], input_digest: str, head: bytes) -> str | None:
    """Like `row_problem`, for a specimen: its row must not have changed since the import."""
    assert row.specimen is not None
    try:
        row.imported  # noqa: B018
    except StoreCorrupt:
        return _differs("specimen", row.specimen, "where an import came from, or nothing")
    expected = specimen_row(row.run_id, state, events, input_digest, head, row.specimen)
    return _first_difference(row, {column: getattr(expected, column) for column in row.__struct_fields__})


def birth_problem(row: RunRow, created: RunCreated) -> str | None:
    """Like `row_problem`, for the columns that are fixed when the run is created. Needs only the run's first event."""
    return _first_difference(row, _birth(created))


def forced(events: Sequence[Event]) -> bool:
    """Was the run ended by force, without its agent?"""
    end = events[-1].body
    return isinstance(end, RunCancelled) and end.forced_by is not None


def lost(row: RunRow, state: RunState) -> bool:
    """Did the run's worker die without a release, and has no other worker claimed the run since?"""
    return row.holder is None and state.worker is not None and not state.finished


def _fixed(state: RunState, input_digest: str, head: bytes) -> dict[str, Any]:
    created = state.created
    assert created is not None
    return {
        **_birth(created),
        "version": state.version,
        "input_digest": input_digest,
        "seq": state.seq,
        "head": head,
        "epoch": state.epoch,
        "created_at": state.created_at,
    }


def _birth(created: RunCreated) -> dict[str, Any]:
    return {
        "agent": created.agent,
        "tenant": created.tenant,
        "actor": created.actor,
        "queue": created.queue,
        "priority": created.priority,
        "target": created.target,
        "parent": created.parent,
        "parent_call": created.parent_call,
    }


def _held_problem(row: RunRow, state: RunState) -> str | None:
    """The problem of a row with a holder: the last claim must be by this holder, with no release since."""
    if state.finished or state.worker != row.holder:
        return _differs("holder", row.holder, None if state.finished else state.worker)
    problem = _status_problem(row, {"running", "cancelling"} if state.cancel else {state.status})
    return problem or _first_difference(row, {"ready_at": None, "waiting_for": None, "error": None, "attention": None})


def _resting_problem(row: RunRow, state: RunState, events: Sequence[Event], takeovers: int) -> str | None:
    """The problem of a row without a holder: the run ended, was released, was never claimed, or its worker died."""
    if state.finished:
        error = f"{state.failure.type}: {state.failure.message}"[:ERROR_CHARS] if state.failure else None
        # If a run was ended by force, its row keeps the count of crashes.
        crashes = row.crashes if forced(events) and state.crashes <= row.crashes <= takeovers else 0
        ended = {"status": state.status, "ready_at": None, "waiting_for": None, "attention": None, "error": error, "crashes": crashes}
        return _first_difference(row, ended)
    if lost(row, state):
        return _lost_problem(row, state)
    resting = _rest(events, row)
    expected = {
        "status": resting.status,
        "waiting_for": resting.waiting_for,
        "ready_at": resting.ready_at,
        "attention": resting.attention,
        # The error stays in the row until a worker claims the run.
        "error": resting.error,
    }
    if isinstance(events[-1].body, RunReleased):
        expected["crashes"] = state.crashes
    return _first_difference(row, expected)


def _lost_problem(row: RunRow, state: RunState) -> str | None:
    """The problem of a row whose worker died.

    After the death of its worker, the store makes the run ready without an event. A post may then have paused the run.
    """
    paused = {"paused"} if state.paused is not None else set()
    problem = _status_problem(row, ({"cancelling", "queued"} if state.cancel else {"queued"}) | paused)
    problem = problem or _first_difference(row, {"waiting_for": None, "error": None, "attention": None})
    if problem is None and (row.ready_at is None) != (row.status == "paused"):
        problem = _differs("ready_at", row.ready_at, "a time: no worker holds the run" if row.ready_at is None else None)
    return problem


class _Resting:
    """The columns of a run that is not held. They are folded from the events, with the same rules as in the store."""

    def __init__(self, created: Event) -> None:
        assert isinstance(created.body, RunCreated), created
        self._not_before = created.body.not_before or 0
        self.status: Status = "queued"
        self.waiting_for: str | None = None
        self.ready_at: int | None = max(created.ts, self._not_before)
        self.attention: Reason | None = None
        self.error: str | None = None

    def released(self, event: Event, body: RunReleased, attention: AttentionNeeded | None, row: RunRow) -> None:
        self.status, self.waiting_for, self.ready_at = body.status, body.waiting_for, body.wake_at
        if row.ready_at == event.ts:
            self.ready_at = event.ts  # the run had unread post, so the commit that released the run also made it ready
        self.attention = attention.reason if attention is not None and body.status == "needs_attention" else None
        self.error = attention.detail[:ERROR_CHARS] if attention is not None else None

    def restored(self, body: RunRestored) -> None:
        self.status, self.waiting_for, self.ready_at = "needs_attention", RESTORED, None
        self.attention, self.error = "restored", restored_words(body.taken_at)

    def reopened(self, event: Event) -> None:
        self.status, self.waiting_for, self.ready_at, self.attention, self.error = "queued", None, event.ts, None, None

    def landed(self, event: Event, *, cancelled: bool) -> None:
        status, wake = landing(self.status, self.attention, event.body)
        if wake == "never":
            self.ready_at = self.waiting_for = None
        elif wake == "now":
            stays = status == self.status == "queued" and self.ready_at is not None
            # If a run that was never claimed is unpaused, the run still does not begin before its `not_before`.
            earliest = self._not_before if isinstance(event.body, RunUnpaused) and event.epoch == 0 else 0
            self.ready_at, self.waiting_for = self.ready_at if stays else max(event.ts, earliest), None
        # A run that is being cancelled stays `cancelling`, even if a person lets it continue.
        sent_on = isinstance(event.body, RunRequeued | RunUnpaused | ToolCallResolved)
        self.status = "cancelling" if sent_on and cancelled and status != "needs_attention" else status
        if self.status != "needs_attention":
            self.attention = None


def _rest(events: Sequence[Event], row: RunRow) -> _Resting:
    resting, attention, cancelled, held = _Resting(events[0]), None, False, False
    created = events[0].body
    assert isinstance(created, RunCreated), created
    for event in events[max(created.inherited, 1) :]:  # the copies in a fork say how another run stood
        body = event.body
        match body:
            case RunClaimed() | CheckpointTaken():  # only a worker that holds the run records a checkpoint
                held, attention = True, None
            case RunReleased():
                held = False
                resting.released(event, body, attention, row)
            case RunRestored():
                held, attention = False, None
                resting.restored(body)
            case RunReopened() | RunForked():
                held, cancelled, attention = False, False, None
                resting.reopened(event)
            case _ if not held:
                cancelled = cancelled or isinstance(body, CancelRequested)
                resting.landed(event, cancelled=cancelled)
            case AttentionNeeded():
                attention = body
            case CancelRequested():
                cancelled = True
    return resting


def _status_problem(row: RunRow, allowed: set[str]) -> str | None:
    return None if row.status in allowed else _differs("status", row.status, " or ".join(sorted(allowed)))


def _first_difference(row: RunRow, expected: dict[str, Any]) -> str | None:
    return next(
        (_differs(column, found, value) for column, value in expected.items() if not same(found := getattr(row, column), value)), None
    )


def same(projected: Any, journaled: Any) -> bool:
    """Does a column agree with the journal? A NUL counts as ␀, because some databases cannot store a NUL in text."""
    if isinstance(projected, str) and isinstance(journaled, str):
        return projected.replace("\0", "\u2400") == journaled.replace("\0", "\u2400")
    return bool(projected == journaled)


def _differs(column: str, found: Any, expected: Any) -> str:
    return f"the journal is sound, but the run's row (its projection) is not: {column} is {_shown(found)}, and by the journal it is {_shown(expected)}"


def _shown(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)[:120]
