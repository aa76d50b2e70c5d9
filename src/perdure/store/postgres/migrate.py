"""Migrates the schema: numbered SQL files, applied in one transaction under a lock, recorded with checksums."""

from __future__ import annotations

import psycopg

from perdure.errors import StoreCorrupt
from perdure.store.migrations import Migration, check_applied, load
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.faults import translated
from perdure.store.postgres.queries import PostgresCursor

_PATIENCE_S = 30.0
_LONGEST_S = 3600.0  # the longest time for a migration, because a large table may take long
MIGRATIONS: tuple[Migration, ...] = load("postgres")


def require_journal(connection: Connection, where: str) -> None:
    """Raise StoreCorrupt unless the database has a journal. The database is not changed."""
    if not applied(connection, where):
        raise StoreCorrupt(
            f"has no perdure journal in schema {connection.schema!r} and was left alone",
            where=where,
            hint="name the right database with --url or PERDURE_URL, or let `perdure migrate` make a journal in it",
        )


def migrate(connection: Connection, where: str) -> None:
    """Update the schema to the version of this perdure. StoreVersion if a newer perdure has written the schema."""
    # Check first without a lock: to open a journal that is up to date, a process must not wait for other processes.
    if applied(connection, where) == len(MIGRATIONS):
        return
    connection.answer_s = _LONGEST_S
    try:
        with connection.transaction():
            cursor = PostgresCursor(connection)
            # The lock is held until the commit: if twenty workers start at the same time, one worker creates the
            # schema, and the other workers find that it exists.
            cursor.patience(_PATIENCE_S)  # without it, the server waits even for a client that is gone
            cursor.all("migrating")
            for migration in MIGRATIONS[_applied(cursor, where) :]:
                psycopg.Cursor(connection).execute(migration.sql.encode())
                cursor.change("record_migration", (migration.version, migration.checksum))
    except psycopg.Error as error:
        raise translated(error, where) from None


def applied(connection: Connection, where: str) -> int:
    """How many versions of the schema were applied; 0 if there is no journal."""
    try:
        return _applied(PostgresCursor(connection), where)
    except psycopg.Error as error:
        raise translated(error, where) from None


def _applied(cursor: PostgresCursor, where: str) -> int:
    if cursor.one("has_schema_table") is None:
        return 0
    return check_applied(MIGRATIONS, [(row[0], row[1]) for row in cursor.all("applied_migrations")], where)
