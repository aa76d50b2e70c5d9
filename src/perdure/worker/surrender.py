"""A run that this worker cannot drive, given up by somebody who may not even be able to read its journal.

A live worker that holds a run without driving it strands the run: nobody else may claim it (G6). Only the row is needed to write
the two events that say so.
"""

from __future__ import annotations

from typing import Literal

from perdure.core import identity
from perdure.core.events import AnyBody, AttentionNeeded, Event, RunReleased
from perdure.core.failures import describe
from perdure.errors import Fenced, StoreUnavailable
from perdure.store.api import Append, Lease, RowChange, RunRow
from perdure.worker.clock import Clock

AGAIN_AFTER_S = 1.0
_DETAIL_CHARS = 500


def surrender(lease: Lease, row: RunRow, error: Exception, clock: Clock) -> Append:
    """The append that gives the run up: to anybody, a little later, when the store was the reason; otherwise to a person."""
    now = clock.now()
    bodies: list[AnyBody]
    if isinstance(error, StoreUnavailable | Fenced):
        status: Literal["queued", "needs_attention"] = "queued"
        detail, waiting_for, wake = None, "another look at its journal", now + round(AGAIN_AFTER_S * 1e6)
        bodies = [RunReleased(status, waiting_for, wake, abrupt=True)]
    else:
        status, waiting_for, wake = "needs_attention", "a person: error", None
        detail = f"it cannot be driven: {type(error).__name__}: {describe(error).message}"[:_DETAIL_CHARS]
        bodies = [AttentionNeeded("error", detail), RunReleased(status, waiting_for, abrupt=True)]
    events = [Event(row.seq + place, clock.new_id(), now, lease.epoch, None, row.seq, body) for place, body in enumerate(bodies, 1)]
    attention: Literal["error"] | None = "error" if status == "needs_attention" else None
    change = RowChange(status, waiting_for=waiting_for, ready_at=wake, error=detail, attention=attention, release=True)
    return Append(lease, row.seq, tuple(identity.seal_all(row.head, events)), row=change)
