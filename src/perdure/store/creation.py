"""Creates a run: its row, its first event and its budget, in the caller's commit."""

from __future__ import annotations

from typing import Any

from perdure.core.events import Event, RunCreated
from perdure.core.identity import Sealed, genesis, seal
from perdure.store import artifacts, blobs, labels, limits
from perdure.store.api import NewRun
from perdure.store.cursor import Cursor
from perdure.store.queues import line_of
from perdure.store.rows import event_row


def first_event(new: NewRun) -> Sealed:
    """The first event of a run's journal, `run_created`."""
    return seal(genesis(new.run_id), Event(1, new.event_id, new.ts, 0, None, None, new.created))


def run_values(new: NewRun, first: Sealed) -> dict[str, Any]:
    """The columns of a new run's row, except the columns for line, parent and root."""
    created = new.created
    assert isinstance(created, RunCreated), created
    return {
        "run_id": new.run_id,
        "agent": created.agent,
        "version": created.version,
        "tenant": created.tenant,
        "actor": created.actor,
        "queue": created.queue,
        "target": created.target,
        "input_digest": new.input_digest,
        "ts": new.ts,
        "ready_at": max(new.ts, created.not_before or 0),
        "head": first.hash,
        "priority": created.priority,
        "depth": created.depth,
    }


def insert_run(cursor: Cursor, new: NewRun, *, parent_seq: int | None = None) -> bool:
    """Create the run inside the caller's transaction. False: the id is taken, or belonged to a pruned run.

    `parent_seq` is the seq of `child_started` in the parent's journal; None if the run has no parent.
    """
    created = new.created
    assert isinstance(created, RunCreated), created
    assert created.run_id == new.run_id, (created.run_id, new.run_id)
    sealed = first_event(new)
    root = new.run_id.partition("/")[0]
    values = {
        **run_values(new, sealed),
        "root": root,
        "parent": created.parent,
        "parent_call": created.parent_call,
        "parent_seq": parent_seq,
        "line": line_of(
            cursor,
            agent=created.agent,
            version=created.version,
            queue=created.queue,
            tenant=created.tenant,
            priority=created.priority,
        ),
    }
    if parent_seq is None and root != new.run_id:
        # An undo run joins a family that has finished, and that another process may prune right now: lock the root. A
        # child needs no such lock, because its parent has not finished.
        cursor.one("run_to_keep", (root,))
    inserted = cursor.all("insert_run", values)
    if not inserted:
        return False
    key, above = inserted[0]
    cursor.change("insert_event", event_row(key, sealed))
    if created.budget is not None:
        limits.open_ledger(cursor, key, above, created.budget)
    if new.blobs:
        blobs.put(cursor, key, new.blobs)
    if created.labels:
        labels.change(cursor, key, created.labels)
    if new.artifacts:
        artifacts.use(cursor, key, created.tenant, new.artifacts, new.needed_artifacts)
    return True
