"""What a run's row must say, by its journal. The row is a projection: where the two differ, the row is wrong.

Lease plumbing that is no history (the nonce, who lost it, when the row was last touched) has no counterpart in the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.core.events import AttentionNeeded, Event, RunClaimed, RunReleased
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
    return _resting_problem(row, state, events) if row.holder is None else _held_problem(row, state)


def _fixed(state: RunState, input_digest: str, head: bytes) -> dict[str, Any]:
    created = state.created
    assert created is not None
    return {
        "agent": created.agent,
        "version": created.version,
        "tenant": created.tenant,
        "actor": created.actor,
        "queue": created.queue,
        "target": created.target,
        "input_digest": input_digest,
        "seq": state.seq,
        "head": head,
        "epoch": state.epoch,
        "created_at": state.created_at,
    }


def _held_problem(row: RunRow, state: RunState) -> str | None:
    """A worker holds the run: it must be the one that claimed it last and has not given it up."""
    if state.finished or state.worker != row.holder:
        return _differs("holder", row.holder, None if state.finished else state.worker)
    problem = _status_problem(row, {"running", "cancelling"} if state.cancel else {state.status})
    return problem or _first_difference(row, {"ready_at": None, "waiting_for": None, "error": None})


def _resting_problem(row: RunRow, state: RunState, events: Sequence[Event]) -> str | None:
    """Nobody holds the run: finished, given up, handed something from outside, or lost by a worker that died."""
    last, attention = events[-1], _last_attention(events)
    if state.finished:
        error = f"{state.failure.type}: {state.failure.message}"[:ERROR_CHARS] if state.failure else None
        return _first_difference(row, {"status": state.status, "ready_at": None, "waiting_for": None, "error": error, "crashes": 0})
    if isinstance(last.body, RunReleased):
        error = state.attention.detail[:ERROR_CHARS] if state.attention else None
        # Something that arrived while it was given up makes it ready at that very moment.
        ready_at = last.ts if row.ready_at == last.ts else last.body.wake_at
        return _first_difference(
            row,
            {"status": state.status, "waiting_for": last.body.waiting_for, "ready_at": ready_at, "error": error, "crashes": state.crashes},
        )
    ready = {"cancelling"} if state.cancel else {"queued"}
    if state.worker is None:
        # Created, or handed something after it was given up: ready since that moment. Its last error stands until somebody takes it.
        problem = _status_problem(row, ready) or _first_difference(row, {"waiting_for": None, "ready_at": last.ts})
        return problem or (_differs("error", row.error, attention) if row.error not in (None, attention) else None)
    # Its worker died: whoever noticed made it ready, without an event.
    problem = _status_problem(row, ready) or _first_difference(row, {"waiting_for": None, "error": None})
    return problem or (_differs("ready_at", None, "a time: nobody holds the run") if row.ready_at is None else None)


def _status_problem(row: RunRow, allowed: set[str]) -> str | None:
    return None if row.status in allowed else _differs("status", row.status, " or ".join(sorted(allowed)))


def _last_attention(events: Sequence[Event]) -> str | None:
    return next((event.body.detail[:ERROR_CHARS] for event in reversed(events) if isinstance(event.body, AttentionNeeded)), None)


def _first_difference(row: RunRow, expected: dict[str, Any]) -> str | None:
    return next(
        (_differs(column, getattr(row, column), value) for column, value in expected.items() if getattr(row, column) != value), None
    )


def _differs(column: str, found: Any, expected: Any) -> str:
    return f"the journal is sound, but the run's row (its projection) is not: {column} is {_shown(found)}, and by the journal it is {_shown(expected)}"


def _shown(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)[:120]
