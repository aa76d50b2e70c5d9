"""Migrates the schema: numbered SQL files, each applied in one transaction and recorded with its checksum."""

from __future__ import annotations

from typing import Any

import apsw

from perdure.errors import StoreCorrupt
from perdure.store.migrations import Migration, check_applied, load
from perdure.store.sqlite.chain import link_chain
from perdure.store.sqlite.queries import QUERIES

APPLICATION_ID = int.from_bytes(b"perd", "big")  # shown by `file journal.db`
MIGRATIONS = load("sqlite")
_CHAIN_VERSION = next(migration.version for migration in MIGRATIONS if "CREATE TABLE perdure_chain" in migration.sql)


def migrate(connection: apsw.Connection, where: str) -> None:
    """Update the schema to the version of this perdure. StoreVersion if a newer perdure has written the schema."""
    # Check first without the write lock: to open a journal that is up to date, a process must not wait for writers.
    while (applied := _applied(connection, where)) < len(MIGRATIONS):
        connection.execute(QUERIES["begin"])
        try:
            # Check again under the lock: if several processes start at the same time, only one creates the schema.
            if _applied(connection, where) == applied:
                _apply(connection, MIGRATIONS[applied])
                if applied + 1 == _CHAIN_VERSION:
                    link_chain(connection.cursor())  # link the entries of the runs that existed before the chain
            connection.execute(QUERIES["commit"])
        except BaseException:
            if connection.in_transaction:
                connection.execute(QUERIES["rollback"])
            raise


def _applied(connection: apsw.Connection, where: str) -> int:
    owner = connection.pragma("application_id")
    if owner not in (0, APPLICATION_ID):
        raise StoreCorrupt(f"belongs to another program (application id {owner:#x}); choose another file", where=where)
    if not connection.execute(QUERIES["has_schema_table"]).fetchall():
        return 0
    applied: list[Any] = connection.execute(QUERIES["applied_migrations"]).fetchall()
    return check_applied(MIGRATIONS, applied, where)


def _apply(connection: apsw.Connection, migration: Migration) -> None:
    connection.execute(migration.sql)
    connection.execute(QUERIES["record_migration"], (migration.version, migration.checksum))
    connection.pragma("application_id", APPLICATION_ID)
