"""Checks a database as a whole.

It finds damaged pages, events without a run, runs that no worker finds, and tables, indexes or triggers that are
missing or were changed. Indexes, triggers and views can be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import apsw

from perdure import shell
from perdure.errors import StoreCorrupt
from perdure.store.cursor import Cursor, Row
from perdure.store.sqlite.database import SqliteCursor, SqliteDatabase
from perdure.store.sqlite.migrate import MIGRATIONS
from perdure.store.sqlite.queries import QUERIES


def problems(database: SqliteDatabase) -> list[str]:
    """Each problem in words; empty if there is no problem."""
    return [*_damage(database), *_orphans(database), *_unfindable(database), *_changes(database)]


def _damage(database: SqliteDatabase) -> Iterator[str]:
    found = [str(line).strip().replace("\n", "; ") for (line,) in database.read("damage")]
    if found != ["ok"]:
        yield f"the file is damaged ({found[0]}): do not write to it; restore a backup, or try the sqlite3 shell's .recover"


def _orphans(database: SqliteDatabase) -> Iterator[str]:
    for run, events, run_id in database.read("journals_without_run"):
        # The run id is read as bytes: if the row was deleted by hand, the text may be damaged as well.
        name = f"run number {run}" if run_id is None else f"run {run_id.decode('utf-8', 'backslashreplace')!r}"
        yield f"{name}: its row is gone, and a journal of {events:,} events is left: the row was deleted by hand; restore it from a backup"


def _unfindable(database: SqliteDatabase) -> Iterator[str]:
    count, first = database.read("runs_in_no_line")[0]
    if count:
        yield (
            f"{count:,} {'run that is ready' if count == 1 else 'runs that are ready, the first of them'} ({first}) "
            f"{'stands' if count == 1 else 'stand'} in no line, so no worker finds them: the database was changed by hand; "
            f"each can be resumed by its id: {shell.command('resume', first)}"
        )


def _changes(database: SqliteDatabase) -> Iterator[str]:
    for change in _changed(database.read("schema_objects")):
        way_out = "restore it from a backup" if change.kind == "table" else "`perdure migrate` makes it again"
        yield f"{change.words}: the database was changed by hand; {way_out}, and find out what else was changed"


class _Change(NamedTuple):
    """A table, index, trigger or view that is not as the migrations make it."""

    kind: str
    name: str
    sql: str  # as it must be
    missing: bool

    @property
    def words(self) -> str:
        return f"the {self.kind} {self.name} {'is missing' if self.missing else 'is not the one that perdure makes'}"


def _changed(objects: Sequence[Row]) -> list[_Change]:
    found = {(kind, name): sql for kind, name, sql in objects}
    return [_Change(*place, sql, place not in found) for place, sql in _expected().items() if found.get(place) != sql]


def restore_schema(database: SqliteDatabase, *, check: bool) -> list[str]:
    """See ArchiveStore.restore_schema. StoreCorrupt if a table is missing or was changed: only a backup has its rows."""

    def make(cursor: Cursor) -> list[str]:
        assert isinstance(cursor, SqliteCursor), cursor
        changes = _changed(cursor.all("schema_objects"))
        _check_tables(changes, database.where)
        for change in changes:
            if not change.missing:
                cursor.connection.execute(f"DROP {change.kind} {change.name}")
            cursor.connection.execute(change.sql)
        return [change.words for change in changes]

    changes = _changed(database.read("schema_objects"))
    _check_tables(changes, database.where)
    if check or not changes:
        return [change.words for change in changes]
    return database.write(make, lambda cursor, _: not _changed(cursor.all("schema_objects")))


def _check_tables(changes: Sequence[_Change], where: str) -> None:
    for change in changes:
        if change.kind == "table":
            raise StoreCorrupt(f"{change.words}: nothing was changed", where=where, hint="restore a backup")


@cache
def _expected() -> dict[tuple[str, str], str]:
    """All schema objects that the migrations create, in the form in which SQLite stores them."""
    fresh = apsw.Connection(":memory:")
    for migration in MIGRATIONS:
        fresh.execute(migration.sql)
    made = {(kind, name): sql for kind, name, sql in fresh.execute(QUERIES["schema_objects"])}
    fresh.close()
    return made
