"""What doctor asks of a PostgreSQL server. What of it is well is not judged here."""

from __future__ import annotations

import uuid

import psycopg
from msgspec import Struct

from perdure.store.postgres.bell import CHANNEL
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.cursor import PostgresCursor
from perdure.store.postgres.faults import translated
from perdure.store.postgres.migrate import MIGRATIONS, applied

_HEAR_S = 1.0


class DeadRows(Struct, frozen=True):
    """What is left of changed and deleted rows in a table, by the server's own count."""

    table: str
    live: int
    dead: int
    vacuumed_at: int | None  # µs


class OpenTransaction(Struct, frozen=True):
    pid: int
    program: str
    state: str
    age_us: int


class Health(Struct, frozen=True):
    where: str  # the database, without a password
    schema: str
    version: int | None  # of our schema there; 0: there is no journal; None: this user may not look
    latest: int
    server: str
    size: str
    settings: dict[str, str]
    max_connections: int
    connections_used: int
    ahead_us: int
    direct: bool  # nobody stands between us and the server
    hears: bool  # LISTEN works
    missing: list[str]  # of what a worker needs, such as "UPDATE on perdure_runs"
    missing_to_decide: list[str]  # of what somebody needs who decides approvals, beside reading
    dead: list[DeadRows]
    oldest: OpenTransaction | None


def look(url: str, answer_s: float) -> Health:
    """The server's state, over two connections that are closed afterwards; nothing is made and nothing changed."""
    connections = Connections(url, 2, answer_s)
    try:
        with connections.lent() as connection:
            return _look(connection, connections)
    except psycopg.Error as error:
        raise translated(error, connections.where) from None
    finally:
        connections.close()


def schema_version(url: str, answer_s: float) -> tuple[str, int]:
    """The database in words, and the version of our schema in it: 0 when it has none."""
    connections = Connections(url, 1, answer_s)
    try:
        with connections.lent() as connection:
            return f"{connections.where}, schema {connection.schema}", applied(connection, connections.where)
    finally:
        connections.close()


def _look(connection: Connection, connections: Connections) -> Health:
    cursor = PostgresCursor(connection)
    lacks = _missing(cursor)
    missing = lacks["worker"]
    version = None if "SELECT on perdure_schema" in missing else applied(connection, connections.where)
    ((server, size, _, _, max_connections, used),) = cursor.all("facts")
    oldest = cursor.one("oldest_transaction")
    return Health(
        where=connections.where,
        schema=connection.schema,
        version=version,
        latest=len(MIGRATIONS),
        server=server,
        size=size,
        settings=dict(cursor.all("durability")),
        max_connections=int(max_connections),
        connections_used=used,
        ahead_us=connection.ahead.us,
        direct=connection.direct,
        hears=_hears(connection, connections),
        missing=missing,
        missing_to_decide=lacks["decider"],
        dead=[DeadRows(*row) for row in cursor.all("dead_rows")],
        oldest=None if oldest is None else OpenTransaction(*oldest),
    )


def _missing(cursor: PostgresCursor) -> dict[str, list[str]]:
    """What this user may not do, by the role that must; without a journal there are no tables that anybody could have rights on."""
    lacks: dict[str, list[str]] = {"worker": [], "decider": []}
    if cursor.one("has_schema_table") is not None:
        for role, table, privilege in cursor.all("missing_privileges"):
            lacks[role].append(f"{privilege} on {table}")
    return lacks


def _hears(connection: Connection, connections: Connections) -> bool:
    """Whether this connection hears what is sent over another one: behind a proxy that pools transactions it does not."""
    token = uuid.uuid4().hex  # no worker takes it for a ring
    connection.execute(f"LISTEN {CHANNEL}".encode())
    with connections.lent() as other:
        other.execute("SELECT pg_notify($1::text, $2::text)", (CHANNEL, token))
    return any(note.payload == token for note in connection.notifies(timeout=_HEAR_S, stop_after=1))
