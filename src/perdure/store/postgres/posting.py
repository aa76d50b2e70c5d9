"""A signal to a parked run in one statement, which is one commit and one round trip."""

from __future__ import annotations

import time

import psycopg

from perdure.core.events import SignalReceived, Status, encode_body
from perdure.core.landing import landing
from perdure.store.delivery import Letter
from perdure.store.mailbox import stands_for
from perdure.store.postgres.arrays import Texts
from perdure.store.postgres.bell import NotifyBell
from perdure.store.postgres.cursor import PostgresCursor
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.faults import is_loss

_PARKED: tuple[Status, ...] = ("waiting", "waiting_approval")


class LetterLost(Exception):
    """The signal may be there, or come yet: see `Mailbox.post`, which makes sure that it is there once."""


def signal_at_once(database: PostgresDatabase, bell: NotifyBell, run_id: str, letter: Letter) -> bool:
    """Whether it is in the journal, and all who listen have heard so. If not, nothing was written, and the common way finds out why."""
    values = signal_values(run_id, letter)
    begun_s = time.monotonic()
    try:
        with bell.commit() as ring, database.connections.lent() as connection:
            found = PostgresCursor(connection).one("signal_at_once", {**values, **ring})
    except UnicodeEncodeError:
        return False
    except psycopg.Error as error:
        if not is_loss(error):
            return False  # nothing was written, and the transaction meets the reason again
        database.connections.lost()
        raise LetterLost from None
    if found is None:
        return False
    database.committed_since(begun_s)
    bell.rung(elsewhere=found[0])
    return True


def signal_values(run_id: str, letter: Letter) -> dict[str, object]:
    """The parameters of the statement, but for how it rings."""
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
