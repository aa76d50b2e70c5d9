"""How a run comes into being: its row, its first event, and its budget, in one commit with whatever asked for it."""

from __future__ import annotations

import apsw

from perdure.core.chain import genesis, seal
from perdure.core.events import Event, RunCreated
from perdure.store import blobs, budgets
from perdure.store.api import NewRun
from perdure.store.lines import line_of
from perdure.store.queries import QUERIES
from perdure.store.rows import Row, event_row


def insert_run(cursor: apsw.Cursor, new: NewRun, *, parent_seq: int | None = None) -> None:
    """Create the run, inside the caller's transaction; parent_seq is where its parent's journal says so."""
    created = new.created
    assert isinstance(created, RunCreated), created
    assert created.run_id == new.run_id, (created.run_id, new.run_id)
    sealed = seal(genesis(new.run_id), Event(1, new.event_id, new.ts, 0, None, None, created))
    values = {
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
        "head": sealed.hash,
        "priority": created.priority,
        "parent": created.parent,
        "parent_call": created.parent_call,
        "parent_seq": parent_seq,
        "depth": created.depth,
        "line": line_of(
            cursor,
            agent=created.agent,
            version=created.version,
            queue=created.queue,
            tenant=created.tenant,
            priority=created.priority,
        ),
    }
    inserted: Row = cursor.execute(QUERIES["insert_run"], values).fetchall()[0]
    key, above = inserted
    cursor.execute(QUERIES["insert_event"], event_row(key, sealed))
    if created.budget is not None:
        budgets.open_ledger(cursor, key, above, created.budget)
    if new.blobs:
        blobs.put(cursor, new.blobs)
