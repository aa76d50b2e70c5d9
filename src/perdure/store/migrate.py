"""The schema's versions: numbered SQL files, each applied in one transaction, each remembered with its checksum."""

from __future__ import annotations

import hashlib
from importlib import resources

import apsw
from msgspec import Struct

from perdure.errors import StoreCorrupt, StoreVersion
from perdure.store.queries import QUERIES

APPLICATION_ID = int.from_bytes(b"perd", "big")  # what `file journal.db` shows


class Migration(Struct, frozen=True):
    version: int
    checksum: str
    sql: str


def load() -> tuple[Migration, ...]:
    """Every schema/NNNN_*.sql of this perdure, in order, without a hole."""
    files = sorted(
        (file for file in resources.files("perdure.store").joinpath("schema").iterdir() if file.name.endswith(".sql")),
        key=lambda file: file.name,
    )
    found = tuple(
        Migration(int(file.name.split("_")[0]), hashlib.sha256(file.read_bytes()).hexdigest(), file.read_text("utf-8")) for file in files
    )
    assert [migration.version for migration in found] == list(range(1, len(found) + 1)), [file.name for file in files]
    return found


MIGRATIONS = load()


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
    applied = connection.execute(QUERIES["applied_migrations"]).fetchall()
    if len(applied) > len(MIGRATIONS):
        raise StoreVersion(
            f"{where} has schema version {len(applied)}, this perdure knows {len(MIGRATIONS)}: upgrade perdure, nothing was changed"
        )
    for migration, (version, checksum) in zip(MIGRATIONS, applied, strict=False):
        if (version, checksum) != (migration.version, migration.checksum):
            raise StoreCorrupt(
                f"{where}: schema version {version} is not the one that perdure releases; it was made or changed by something else"
            )
    return len(applied)


def _apply(connection: apsw.Connection, migration: Migration) -> None:
    connection.execute(migration.sql)
    connection.execute(QUERIES["record_migration"], (migration.version, migration.checksum))
    connection.pragma("application_id", APPLICATION_ID)
