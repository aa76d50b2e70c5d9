"""Writes that are one statement, which is one commit and one round trip: a new run, and a signal to a parked run.

A run is created in this way if only the run's row and its first event have to be written.
"""

from __future__ import annotations

import time

import psycopg

from perdure.core.events import RunCreated, SignalReceived, Status, encode_body
from perdure.core.transitions import landing
from perdure.store.api import NewRun, RunRow
from perdure.store.creation import first_event, run_values
from perdure.store.delivery import Letter
from perdure.store.mailbox import stands_for
from perdure.store.postgres.arrays import Texts
from perdure.store.postgres.bell import NotifyBell
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.faults import is_loss
from perdure.store.postgres.queries import PostgresCursor
from perdure.store.rows import run_row


class AnswerLost(Exception):
    """The run may exist, or may still be created.

    To create the run again is safe: its id and its first event are the same.
    """


def create_at_once(database: PostgresDatabase, bell: NotifyBell, new: NewRun) -> RunRow | None:
    """Create the run and ring. None: nothing was written, and the caller must use `Mailbox.create_run`."""
    created = new.created
    assert isinstance(created, RunCreated) and created.run_id == new.run_id, (created, new.run_id)
    if new.blobs or new.artifacts or created.labels or created.budget is not None or created.parent is not None or "/" in new.run_id:
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


# -- a signal to a parked run


_PARKED: tuple[Status, ...] = ("waiting", "waiting_approval")


class LetterLost(Exception):
    """The signal may have arrived, or may still arrive: `Mailbox.post` makes sure that the signal counts once."""


def signal_at_once(database: PostgresDatabase, bell: NotifyBell, run_id: str, letter: Letter) -> bool:
    """Append the signal and ring. False: nothing was written, and the caller must use `Mailbox.post`."""
    values = signal_values(run_id, letter)
    begun_s = time.monotonic()
    try:
        with bell.commit() as ring, database.connections.lent() as connection:
            found = PostgresCursor(connection).one("signal_at_once", {**values, **ring})
    except UnicodeEncodeError:
        return False
    except psycopg.Error as error:
        if not is_loss(error):
            return False  # nothing was written, and `Mailbox.post` will raise the same error
        database.connections.lost()
        raise LetterLost from None
    if found is None:
        return False
    database.committed_since(begun_s)
    bell.rung(elsewhere=found[0])
    return True


def signal_values(run_id: str, letter: Letter) -> dict[str, object]:
    """The parameters of the statement, without the parameters of the bell."""
    body, after = letter.body, "queued"
    assert isinstance(body, SignalReceived), body
    return {
        "run_id": run_id,
        "parked": Texts.of([status for status in _PARKED if landing(status, None, body) == (after, "now")]),
        "status": after,
        "topic": body.topic,
        "has_key": body.key is not None,
        "once": stands_for(letter.event_id) if body.key is None else body.key,
        "event_id": bytes.fromhex(letter.event_id),
        "now": letter.ts,
        "data": encode_body(body).decode(),
    }
