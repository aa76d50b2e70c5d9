"""Collects facts about a PostgreSQL server. `perdure doctor` judges these facts."""

from __future__ import annotations

import uuid

import psycopg
from msgspec import Struct

from perdure.store.postgres.connect import Connection
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.faults import translated
from perdure.store.postgres.migrate import MIGRATIONS, applied
from perdure.store.postgres.queries import CHANNEL, PostgresCursor

_HEAR_S = 1.0


class DeadRows(Struct, frozen=True):
    """Live and dead rows of a table, by the server's own count."""

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
    version: int | None  # the version of perdure's schema; 0: there is no journal; None: this user may not read it
    latest: int
    server: str
    size: str
    settings: dict[str, str]
    max_connections: int
    connections_used: int
    ahead_us: int
    direct: bool  # there is no proxy between this process and the server
    hears: bool  # LISTEN works
    missing: list[str]  # privileges that a worker needs and this user lacks, such as "UPDATE on perdure_runs"
    # Privileges that a user who decides approvals needs and this user lacks, without the privileges to read.
    missing_to_decide: list[str]
    dead: list[DeadRows]
    oldest: OpenTransaction | None


def look(url: str, answer_s: float) -> Health:
    """The server's state, read over two connections, which are then closed. Nothing is created or changed."""
    connections = Connections(url, 2, answer_s)
    try:
        with connections.lent() as connection:
            return _look(connection, connections)
    except psycopg.Error as error:
        raise translated(error, connections.where) from None
    finally:
        connections.close()


def schema_version(url: str, answer_s: float) -> tuple[str, int]:
    """The name of the database, and the version of perdure's schema in it; 0 if it has no such schema."""
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
    """The privileges that this user lacks, by role. Without a journal there are no tables, and the lists are empty."""
    lacks: dict[str, list[str]] = {"worker": [], "decider": []}
    if cursor.one("has_schema_table") is not None:
        for role, table, privilege in cursor.all("missing_privileges"):
            lacks[role].append(f"{privilege} on {table}")
    return lacks


def _hears(connection: Connection, connections: Connections) -> bool:
    """Does this connection hear what another connection sends? Behind a proxy that pools transactions, it does not."""
    token = uuid.uuid4().hex  # no worker treats this payload as a ring
    connection.execute(f"LISTEN {CHANNEL}".encode())
    with connections.lent() as other:
        other.execute("SELECT pg_notify($1::text, $2::text)", (CHANNEL, token))
    return any(note.payload == token for note in connection.notifies(timeout=_HEAR_S, stop_after=1))
