"""The schema's versions: numbered SQL files, applied in one transaction under a lock, each remembered with its checksum."""

from __future__ import annotations

import psycopg

from perdure.errors import StoreCorrupt
from perdure.store.migrations import Migration, check_applied, load
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.cursor import PostgresCursor
from perdure.store.postgres.faults import translated

_PATIENCE_S = 30.0
_LONGEST_S = 3600.0  # a large table may take its time
MIGRATIONS: tuple[Migration, ...] = load("postgres")


def require_journal(connection: Connection, where: str) -> None:
    """Raise StoreCorrupt unless there is a journal; the database is left alone either way."""
    if not applied(connection, where):
        raise StoreCorrupt(
            f"{where} has no perdure journal in schema {connection.schema!r} and was left alone; name the right database with --url or "
            "PERDURE_URL, or let `perdure migrate` make a journal in it"
        )


def migrate(connection: Connection, where: str) -> None:
    """Bring the schema up to this perdure's; StoreVersion when a newer perdure has written it."""
    # Looked at without a lock first: opening a journal that is up to date must not wait for anybody.
    if applied(connection, where) == len(MIGRATIONS):
        return
    connection.answer_s = _LONGEST_S
    try:
        with connection.transaction():
            cursor = PostgresCursor(connection)
            # Held until the commit: of twenty workers that start at once, one makes the schema and the others find it made.
            cursor.patience(_PATIENCE_S)  # a waiter whose client has left would wait on, and take a connection each
            cursor.all("migrating")
            for migration in MIGRATIONS[_applied(cursor, where) :]:
                psycopg.Cursor(connection).execute(migration.sql.encode())
                cursor.change("record_migration", (migration.version, migration.checksum))
    except psycopg.Error as error:
        raise translated(error, where) from None


def applied(connection: Connection, where: str) -> int:
    """How many versions of the schema are there; 0 when there is no journal."""
    try:
        return _applied(PostgresCursor(connection), where)
    except psycopg.Error as error:
        raise translated(error, where) from None


def _applied(cursor: PostgresCursor, where: str) -> int:
    if cursor.one("has_schema_table") is None:
        return 0
    return check_applied(MIGRATIONS, [(row[0], row[1]) for row in cursor.all("applied_migrations")], where)
