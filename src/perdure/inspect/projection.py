"""What a run's row must say, by its journal. The row is a projection: where the two differ, the row is wrong.

Lease plumbing that is no history (the nonce, how it was lost and with how many others, when the row was last touched) has no counterpart in the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.core.events import (
    AttentionNeeded,
    CancelRequested,
    Event,
    Reason,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunReleased,
    RunRequeued,
    RunUnpaused,
    Status,
    ToolCallResolved,
)
from perdure.core.landing import landing
from perdure.core.state import RunState
from perdure.store.api import RunRow

ERROR_CHARS = 500


def row_problem(row: RunRow, state: RunState, events: Sequence[Event], input_digest: str, head: bytes) -> str | None:
    """The first column that does not say what the journal says, in words; None when all do."""
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


def birth_problem(row: RunRow, created: RunCreated) -> str | None:
    """The first column that does not say what the run's first event says and no later event changes; None when all do."""
    return _first_difference(row, _birth(created))


def forced(events: Sequence[Event]) -> bool:
    """Whether somebody has ended the run without its agent."""
    end = events[-1].body
    return isinstance(end, RunCancelled) and end.forced_by is not None


def lost(row: RunRow, state: RunState) -> bool:
    """Whether the worker that claimed the run last has neither given it up nor holds it: it died, and nobody has taken the run since."""
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
    """A worker holds the run: it must be the one that claimed it last and has not given it up."""
    if state.finished or state.worker != row.holder:
        return _differs("holder", row.holder, None if state.finished else state.worker)
    problem = _status_problem(row, {"running", "cancelling"} if state.cancel else {state.status})
    return problem or _first_difference(row, {"ready_at": None, "waiting_for": None, "error": None, "attention": None})


def _resting_problem(row: RunRow, state: RunState, events: Sequence[Event], takeovers: int) -> str | None:
    """Nobody holds the run: finished, given up, handed something from outside, or lost by a worker that died."""
    if state.finished:
        error = f"{state.failure.type}: {state.failure.message}"[:ERROR_CHARS] if state.failure else None
        # One that was ended without its agent keeps the count of what went before.
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
        # What was wrong stands there until somebody takes the run.
        "error": resting.error,
    }
    if isinstance(events[-1].body, RunReleased):
        expected["crashes"] = state.crashes
    return _first_difference(row, expected)


def _lost_problem(row: RunRow, state: RunState) -> str | None:
    """Whoever noticed that its worker died made it ready, without an event; what was posted since may have paused it."""
    paused = {"paused"} if state.paused is not None else set()
    problem = _status_problem(row, ({"cancelling", "queued"} if state.cancel else {"queued"}) | paused)
    problem = problem or _first_difference(row, {"waiting_for": None, "error": None, "attention": None})
    if problem is None and (row.ready_at is None) != (row.status == "paused"):
        problem = _differs("ready_at", row.ready_at, "a time: nobody holds the run" if row.ready_at is None else None)
    return problem


class _Resting:
    """The row of a run that nobody holds, event by event, as the store projects it."""

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
            self.ready_at = event.ts  # something that arrived while it was given up makes it ready at that very moment
        self.attention = attention.reason if attention is not None and body.status == "needs_attention" else None
        self.error = attention.detail[:ERROR_CHARS] if attention is not None else None

    def landed(self, event: Event, *, cancelled: bool) -> None:
        status, wake = landing(self.status, self.attention, event.body)
        if wake == "never":
            self.ready_at = self.waiting_for = None
        elif wake == "now":
            stays = status == self.status == "queued" and self.ready_at is not None
            # One that nobody has ever taken up does not begin before its time because it was paused meanwhile.
            earliest = self._not_before if isinstance(event.body, RunUnpaused) and event.epoch == 0 else 0
            self.ready_at, self.waiting_for = self.ready_at if stays else max(event.ts, earliest), None
        # A person lets a run go on that somebody has cancelled: it goes on to its end.
        sent_on = isinstance(event.body, RunRequeued | RunUnpaused | ToolCallResolved)
        self.status = "cancelling" if sent_on and cancelled else status
        if self.status != "needs_attention":
            self.attention = None


def _rest(events: Sequence[Event], row: RunRow) -> _Resting:
    resting, attention, cancelled, held = _Resting(events[0]), None, False, False
    for event in events[1:]:
        body = event.body
        match body:
            case RunClaimed():
                held, attention = True, None
            case RunReleased():
                held = False
                resting.released(event, body, attention, row)
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
    """Whether a column says what the journal says. Not every database's text can hold a NUL: there it is shown as ␀."""
    if isinstance(projected, str) and isinstance(journaled, str):
        return projected.replace("\0", "\u2400") == journaled.replace("\0", "\u2400")
    return bool(projected == journaled)


def _differs(column: str, found: Any, expected: Any) -> str:
    return f"the journal is sound, but the run's row (its projection) is not: {column} is {_shown(found)}, and by the journal it is {_shown(expected)}"


def _shown(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)[:120]
