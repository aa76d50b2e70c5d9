"""A new run in one statement, which is one commit and one round trip, where nothing but its row and its first event has to be written."""

from __future__ import annotations

import time

import psycopg

from perdure.core.events import RunCreated
from perdure.store.api import NewRun, RunRow
from perdure.store.creation import first_event, run_values
from perdure.store.postgres.bell import NotifyBell
from perdure.store.postgres.cursor import PostgresCursor
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.faults import is_loss
from perdure.store.rows import run_row


class AnswerLost(Exception):
    """The run may be there, or come yet. Its id and its first event are given: whoever makes it again finds it, and it is there once."""


def create_at_once(database: PostgresDatabase, bell: NotifyBell, new: NewRun) -> RunRow | None:
    """The new run, of which all who listen hear; None when there is more to it: then the common way finds out what that is, and does it."""
    created = new.created
    assert isinstance(created, RunCreated) and created.run_id == new.run_id, (created, new.run_id)
    if new.blobs or created.budget is not None or created.parent is not None or "/" in new.run_id:
        return None
    first, begun_s = first_event(new), time.monotonic()
    values = {**run_values(new, first), "event_id": bytes.fromhex(new.event_id), "data": first.data.decode()}
    try:
        with bell.commit() as ring, database.connections.lent() as connection:
            found = PostgresCursor(connection).one("create_run", {**values, **ring})
    except UnicodeEncodeError:
        return None
    except psycopg.Error as error:
        if not is_loss(error):
            return None
        database.connections.lost()
        raise AnswerLost from None
    if found is None:
        return None
    database.committed_since(begun_s)
    bell.rung(elsewhere=found[-1])
    return run_row(found)
