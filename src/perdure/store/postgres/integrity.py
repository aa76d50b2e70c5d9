"""Checks a database as a whole: events without a run, and triggers, indexes and functions that are missing or changed.

Triggers and indexes can be made again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import psycopg

from perdure.errors import StoreCorrupt, StoreError
from perdure.store.cursor import Cursor, Row
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.migrate import MIGRATIONS
from perdure.store.postgres.queries import PostgresCursor

_TRIGGER = re.compile(r"CREATE TRIGGER (\w+)[^;]*?\bON (perdure_\w+)[^;]*", re.DOTALL)
_INDEX = re.compile(r"CREATE INDEX (\w+) ON (perdure_\w+)[^;]*", re.DOTALL)
_TRIGGER_PARTS = re.compile(
    r"(BEFORE|AFTER) (.+?) ON (?:\S+\.)?perdure_\w+ .*?FOR EACH (\w+) (?:WHEN \((.*)\) )?EXECUTE FUNCTION (?:\S+\.)?(\w+)\((.*?)\)",
    re.DOTALL,
)
_FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION (perdure_\w+)\(.*?AS \$\$(.*?)\$\$", re.DOTALL)


def problems(database: PostgresDatabase) -> list[str]:
    """Each problem in words; empty if there is no problem."""
    return [*_orphans(database), *_changes(database), *_functions(database)]


def _orphans(database: PostgresDatabase) -> Iterator[str]:
    for run, events, data in database.read("journals_without_run"):
        yield (
            f"{_name(run, data)}: its row is gone, and a journal of {events:,} events is left: the row was deleted by hand;  "
            "restore it from a backup"
        )


def _name(run: int, data: bytes | None) -> str:
    try:
        return f"run {msgspec.json.decode(data or b'')['run_id']!r}"
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, KeyError):
        return f"run number {run}"


def _changes(database: PostgresDatabase) -> Iterator[str]:
    for change in _changed(database.read("triggers"), database.read("indexes")):
        yield f"{change.words}: the database was changed by hand; `perdure migrate` makes it again, and find out what else was changed"


class _Change(NamedTuple):
    """A trigger or an index that is not as the migrations make it."""

    kind: Literal["trigger", "index"]
    name: str
    table: str
    sql: str  # as it must be
    what: str

    @property
    def words(self) -> str:
        return f"the {self.kind} {self.name} on {self.table} {self.what}"

    @property
    def drop(self) -> str:
        return f"DROP TRIGGER IF EXISTS {self.name} ON {self.table}" if self.kind == "trigger" else f"DROP INDEX IF EXISTS {self.name}"


def _changed(triggers: Sequence[Row], indexes: Sequence[Row]) -> list[_Change]:
    found = {(table, name): (enabled, made) for table, name, made, enabled in triggers}
    # A later migration may replace a trigger or an index: the last definition counts.
    wanted = {(trigger[2], trigger[1]): trigger[0] for migration in MIGRATIONS for trigger in _TRIGGER.finditer(migration.sql)}
    changes = []
    for (table, name), definition in wanted.items():
        enabled, made = found.get((table, name), (None, ""))
        if enabled is None:
            what = "is missing"
        elif enabled not in ("O", "A"):
            what = "is switched off"
        elif _essence(made) != _essence(definition):
            what = "is not the one that perdure makes"
        else:
            continue
        changes.append(_Change("trigger", name, table, definition, what))
    valid = {(table, name) for table, name in indexes}
    made_by = {index.groups(): index[0] for migration in MIGRATIONS for index in _INDEX.finditer(migration.sql)}
    for (name, table), definition in made_by.items():
        if (table, name) not in valid:
            changes.append(_Change("index", name, table, definition, "is missing"))
    return changes


def restore_schema(database: PostgresDatabase, *, check: bool) -> list[str]:
    """See ArchiveStore.restore_schema. Functions are not restored: the grants on them would be lost."""

    def make(cursor: Cursor) -> list[str]:
        assert isinstance(cursor, PostgresCursor), cursor
        changes = _changed(cursor.all("triggers"), cursor.all("indexes"))
        try:
            for change in changes:
                cursor.connection.execute(change.drop.encode())
                cursor.connection.execute(change.sql.encode())
        except psycopg.errors.InsufficientPrivilege:
            raise StoreError(
                f"{database.where}: {changes[0].words}; only the owner of the tables can make it again: run `perdure migrate` as the owner"
            ) from None
        except psycopg.errors.UndefinedFunction as error:
            raise StoreCorrupt(
                f"{database.where}: {changes[0].words}, and the function that it calls is gone too ({_first_line(error)}); nothing was changed",
                hint="restore a backup",
            ) from None
        return [change.words for change in changes]

    changes = _changed(database.read("triggers"), database.read("indexes"))
    if check or not changes:
        return [change.words for change in changes]
    return database.write(make, lambda cursor, _: not _changed(cursor.all("triggers"), cursor.all("indexes")))


def _first_line(error: psycopg.Error) -> str:
    return str(error).partition("\n")[0]


def _essence(trigger: str) -> object:
    """What a trigger does, in a form that can be compared: PostgreSQL rewrites the text of a trigger's definition."""
    parts = _TRIGGER_PARTS.search(" ".join(trigger.split()))
    if parts is None:
        return trigger
    moment, events, each, condition, function, argument = parts.groups()
    # Compare only the columns and values of the trigger's condition, in order.
    return (
        moment,
        sorted(events.split(" OR ")),
        each,
        re.findall(r"\b(?:old|new)\.\w+|'\w*'", condition.lower() if condition else ""),
        function,
        argument,
    )


def _functions(database: PostgresDatabase) -> Iterator[str]:
    found: dict[str, str] = {row[0]: row[1] for row in database.read("functions")}
    expected = {name: body for migration in MIGRATIONS for name, body in _FUNCTION.findall(migration.sql)}
    for name, body in expected.items():
        if found.get(name) != body:
            what = "is not the one that perdure makes" if name in found else "is missing"
            yield f"the function {name} {what}: the database was changed by hand; find out what else was changed"
