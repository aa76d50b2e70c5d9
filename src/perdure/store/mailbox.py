"""What reaches a run from outside: its creation, and what people and other runs hand to it later."""

from __future__ import annotations

from collections.abc import Callable

import apsw

from perdure.core.chain import genesis, seal
from perdure.core.events import AnyBody, Event, RunCreated, encode_body
from perdure.errors import NotFound, RunEnded, StoreCorrupt
from perdure.store import blobs
from perdure.store.api import FINISHED, InboxRow, NewRun, RunRow, Status
from perdure.store.claims import Claims
from perdure.store.database import Database
from perdure.store.queries import QUERIES
from perdure.store.rows import Row, body_from, event_row, run_row


class Mailbox:
    """Writes to a run by somebody who does not hold it: allowed only while nobody does, otherwise left for the holder to read."""

    def __init__(self, database: Database, claims: Claims) -> None:
        self._database = database
        self._claims = claims

    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        def create(cursor: apsw.Cursor) -> tuple[RunRow, bool]:
            found = cursor.execute(QUERIES["run_by_id"], (new.run_id,)).fetchone()
            if found is not None:
                return run_row(found), False
            _insert_run(cursor, new)
            return run_row(cursor.execute(QUERIES["run_by_id"], (new.run_id,)).fetchall()[0]), True

        # After an unknown commit the run is there or it is not; asking for the same id again is safe either way.
        return self._database.write(create, lambda cursor, _: cursor.execute(QUERIES["run_key"], (new.run_id,)).fetchone() is not None)

    def post(
        self, run_id: str, call: int | None, body: AnyBody, *, event_id: str, now: int, status: Status, expect: Callable[[RunRow], None]
    ) -> bool:
        def deliver(cursor: apsw.Cursor) -> bool:
            found: Row | None = cursor.execute(QUERIES["run_by_id"], (run_id,)).fetchone()
            if found is None:
                raise NotFound(f"there is no run {run_id}; `perdure list` shows those that there are")
            row = run_row(found)
            if row.status in FINISHED:
                raise RunEnded(f"run {run_id} has finished ({row.status}) and takes nothing more")
            expect(row)
            if self._claims.holds(row.holder):
                values = {
                    "id": found[19],
                    "call": call,
                    "event_id": bytes.fromhex(event_id),
                    "now": now,
                    "data": encode_body(body).decode(),
                }
                cursor.execute(QUERIES["insert_inbox"], values)
                return False
            sealed = seal(row.head, Event(row.seq + 1, event_id, now, row.epoch, call, row.seq, body))
            cursor.execute(
                QUERIES["post_to_unheld"], {"id": found[19], "seq": row.seq + 1, "head": sealed.hash, "now": now, "status": status}
            )
            cursor.execute(QUERIES["insert_event"], event_row(found[19], sealed))
            return True

        def arrived(cursor: apsw.Cursor, appended: bool) -> bool:
            query = "event_of_run" if appended else "inbox_event_of_run"
            return cursor.execute(QUERIES[query], (run_id, bytes.fromhex(event_id))).fetchone() is not None

        return self._database.write(deliver, arrived)

    def inbox(self, worker: str) -> list[InboxRow]:
        return [
            InboxRow(inbox_id, run_id, call, _body_or_none(data, f"inbox row {inbox_id} of run {run_id}"))
            for inbox_id, run_id, call, data in self._database.read("inbox_of_worker", (worker,))
        ]


def _body_or_none(data: bytes, what: str) -> AnyBody | None:
    try:
        return body_from(data, what)
    except StoreCorrupt:
        return None  # that run's trouble alone: whoever drives it stops it for a person


def _insert_run(cursor: apsw.Cursor, new: NewRun) -> None:
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
        "head": sealed.hash,
    }
    ((key,),) = cursor.execute(QUERIES["insert_run"], values).fetchall()
    assert isinstance(key, int), key
    cursor.execute(QUERIES["insert_event"], event_row(key, sealed))
    if new.blobs:
        blobs.put(cursor, new.blobs)
