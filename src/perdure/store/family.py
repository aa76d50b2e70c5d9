"""Parents and children: a child is created in its parent's commit, and its last commit posts its end to the parent."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.events import (
    CancelRequested,
    ChildFinished,
    ChildStarted,
    Event,
    Failure,
    RunCancelled,
    RunCreated,
    RunFailed,
    RunSucceeded,
    Terminal,
)
from perdure.store.api import FINISHED, NewRun, Refused
from perdure.store.creation import insert_run
from perdure.store.cursor import Cursor, Row
from perdure.store.delivery import Delivery, Letter
from perdure.store.rows import has_ended, run_row


class Relations(Struct, frozen=True, gc=False):
    """The columns of a run that its parent and its children need."""

    run_id: str
    tenant: str
    actor: str | None
    queue: str
    priority: int
    depth: int
    parent: str | None
    parent_call: int | None
    parent_seq: int | None
    metered: int  # the run has a budget, or a run above it has a budget
    asking: int  # the run has pending approvals


def relations(cursor: Cursor, key: int) -> Relations:
    return Relations(*cursor.all("relations_of_run", (key,))[0])


def start_child(cursor: Cursor, parent: Relations, event: Event, started: ChildStarted) -> Refused | None:
    """Create the child's run, unless the child exists already. Refused if a run that is not this child has the id."""
    found = cursor.one("run_by_id", (started.run_id,))
    if found is None and _insert_child(cursor, parent, event, started):
        return None
    # Another process may have created a run with this id since the query above. Then the next query finds that run.
    row = run_row(found or cursor.all("run_by_id", (started.run_id,))[0])
    if (row.parent, row.parent_call, row.input_digest) == (parent.run_id, event.call, started.digest):
        return None
    return Refused(f"run {parent.run_id}: its call {event.call} would be run {started.run_id}, and there is another run with that id")


def _insert_child(cursor: Cursor, parent: Relations, event: Event, started: ChildStarted) -> bool:
    created = RunCreated(
        started.run_id,
        started.agent,
        started.version,
        parent.tenant,
        started.input,
        actor=parent.actor,
        target=started.target,
        queue=started.queue or parent.queue,
        priority=parent.priority,
        parent=parent.run_id,
        parent_call=event.call,
        depth=parent.depth + 1,
        budget=started.budget,
        key_scheme=started.key_scheme,
        key_namespace=started.key_namespace,
        trace=started.trace,
    )
    return insert_run(cursor, NewRun(started.run_id, created, uuid.uuid4().hex, event.ts, started.digest), parent_seq=event.seq)


def tell_parent(cursor: Cursor, delivery: Delivery, child: Relations, event: Event, end: Terminal) -> None:
    """Post the child's end to its parent, unless the parent has finished."""
    found = cursor.one("run_to_change", (child.parent,))
    if found is None or _is_over(found):
        return
    delivery.deliver(cursor, found, Letter(child.parent_call, _finished(child.run_id, end), uuid.uuid4().hex, event.ts, child.parent_seq))


def cancel_children(cursor: Cursor, delivery: Delivery, run_id: str, below: Sequence[Row], now: int) -> None:
    """Cancel the children of a run that was ended without its agent: no run waits for these children any more.

    Each child then cancels its own children.
    """
    for found in below:
        child = run_row(found)
        if child.parent == run_id and child.status != "cancelling" and not _is_over(found):
            asked = CancelRequested(by=f"run {run_id}", reason="its parent was ended")
            delivery.deliver(cursor, found, Letter(None, asked, uuid.uuid4().hex, now))


def _is_over(found: Row) -> bool:
    """Has the run finished, by its row or by its journal? The two differ if the row was edited, or changed a moment ago."""
    return run_row(found).status in FINISHED or has_ended(found)


def _finished(run_id: str, end: Terminal) -> ChildFinished:
    status: Literal["succeeded", "failed", "cancelled"]
    output: Payload | None = None
    failure: Failure | None = None
    match end:
        case RunSucceeded():
            status, output = "succeeded", end.output
        case RunFailed():
            status, failure = "failed", end.failure
        case RunCancelled():
            why = f": {end.reason}" if end.reason else ""
            status, failure = "cancelled", Failure("cancelled", "RunCancelled", f"run {run_id} was cancelled{why}")
    return ChildFinished(run_id, status, output=output, failure=failure)
