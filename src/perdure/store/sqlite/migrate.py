"""The schema's versions: numbered SQL files, each applied in one transaction, each remembered with its checksum."""

from __future__ import annotations

from typing import Any

import apsw

from perdure.errors import StoreCorrupt
from perdure.store.migrations import Migration, check_applied, load
from perdure.store.sqlite.queries import QUERIES

APPLICATION_ID = int.from_bytes(b"perd", "big")  # what `file journal.db` shows
MIGRATIONS = load("sqlite")


def migrate(connection: apsw.Connection, where: str) -> None:
    """Bring the schema up to this perdure's; StoreVersion when a newer perdure has written it."""
    # Looked at without the write lock first: opening a journal that is up to date must not wait for its writers.
    while (applied := _applied(connection, where)) < len(MIGRATIONS):
        connection.execute(QUERIES["begin"])
        try:
            # Looked at again under the lock: of several processes that start at once, one makes the schema.
            if _applied(connection, where) == applied:
                _apply(connection, MIGRATIONS[applied])
            connection.execute(QUERIES["commit"])
        except BaseException:
            if connection.in_transaction:
                connection.execute(QUERIES["rollback"])
            raise


def _applied(connection: apsw.Connection, where: str) -> int:
    owner = connection.pragma("application_id")
    if owner not in (0, APPLICATION_ID):
        raise StoreCorrupt(f"{where} belongs to another program (application id {owner:#x}); choose another file")
    if not connection.execute(QUERIES["has_schema_table"]).fetchall():
        return 0
    applied: list[Any] = connection.execute(QUERIES["applied_migrations"]).fetchall()
    return check_applied(MIGRATIONS, applied, where)


def _apply(connection: apsw.Connection, migration: Migration) -> None:
    connection.execute(migration.sql)
    connection.execute(QUERIES["record_migration"], (migration.version, migration.checksum))
    connection.pragma("application_id", APPLICATION_ID)
