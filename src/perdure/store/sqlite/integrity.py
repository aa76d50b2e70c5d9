"""Checks a database as a whole.

It finds damaged pages, events without a run, runs that no worker finds, and tables, indexes or triggers that are
missing or were changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import apsw

from perdure import shell
from perdure.store.sqlite.database import SqliteDatabase
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
    found = {(kind, name): sql for kind, name, sql in database.read("schema_objects")}
    for (kind, name), sql in _expected().items():
        if found.get((kind, name)) == sql:
            continue
        what = "is not the one that perdure makes" if (kind, name) in found else "is missing"
        yield f"the {kind} {name} {what}: the database was changed by hand; restore it from a backup, or find out what else was changed"


@cache
def _expected() -> dict[tuple[str, str], str]:
    """All schema objects that the migrations create, in the form in which SQLite stores them."""
    fresh = apsw.Connection(":memory:")
    for migration in MIGRATIONS:
        fresh.execute(migration.sql)
    made = {(kind, name): sql for kind, name, sql in fresh.execute(QUERIES["schema_objects"])}
    fresh.close()
    return made
