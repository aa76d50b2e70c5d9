"""`perdure migrate`: bring the database's schema up to date."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import apsw
import click

from perdure.cli import common
from perdure.errors import InvalidInput, StoreVersion
from perdure.settings import Settings
from perdure.store.open import is_postgres, sqlite_path
from perdure.store.postgres.driver import require_psycopg
from perdure.store.sqlite.faults import translated
from perdure.store.sqlite.migrate import MIGRATIONS
from perdure.store.sqlite.owner import holds_journal
from perdure.store.sqlite.queries import QUERIES


class _Schema(NamedTuple):
    """The place of a schema, its version, and the version that this perdure uses."""

    where: str
    version: int
    latest: int


@click.command("migrate")
@click.option("--check", is_flag=True, help="Change nothing; code 7 when there is something to migrate.")
@common.url_option
@common.json_option
def command(check: bool, url: str | None, as_json: bool) -> int:
    """Migrate the schema to the version of this perdure. If there is no journal, create it: the file, or the tables.

    perdure also migrates a database when it opens it; this command prints the versions. It also creates again the
    triggers and indexes of the schema that are missing or were changed by hand. Opening a database does not do that.
    """
    settings = common.settings_with(url=url)
    look = _postgres if is_postgres(settings.url) else _sqlite
    before = look(settings)
    if before.version > before.latest:
        raise StoreVersion(
            f"{before.where} has schema version {before.version}, this perdure knows {before.latest}: upgrade perdure, nothing was changed"
        )
    restored: list[str] = []
    if not check or before.version == before.latest:
        # Opening the database migrates it, with one transaction for each version. With --check there is nothing to migrate.
        with closing(common.open_with(settings)) as store:
            restored = store.restore_schema(check=check)
    after = before if check else look(settings)
    up_to_date = after.version == after.latest and not (check and restored)
    if as_json:
        place = "database" if is_postgres(settings.url) else "file"
        versions = {"from": before.version, "to": after.version, "latest": after.latest, "up_to_date": up_to_date}
        common.out_json({place: before.where, **versions, "to_restore" if check else "restored": restored})
    else:
        common.out(common.clean(_line(before, after, current=not restored)))
        for words in restored:
            common.out(common.clean(f"{before.where}: {words}: {'nothing was changed: perdure migrate' if check else 'made again'}"))
        if restored and not check:
            common.note(f"perdure: the database was changed by hand; find out what else was changed: perdure verify{common.url_words(url)}")
    return common.SUCCEEDED if up_to_date else common.DIFFERENT


def _postgres(settings: Settings) -> _Schema:
    require_psycopg()
    from perdure.store.postgres.health import schema_version
    from perdure.store.postgres.migrate import MIGRATIONS as ON_POSTGRES

    return _Schema(*schema_version(settings.url, settings.answer_s), len(ON_POSTGRES))


def _sqlite(settings: Settings) -> _Schema:
    path = sqlite_path(settings.url)
    if path is None:
        raise InvalidInput(f"{settings.url} is a database in memory, which is always new; name a file: --url sqlite:///perdure.db")
    return _Schema(str(path), sqlite_version(path), len(MIGRATIONS))


def sqlite_version(path: Path) -> int:
    """The version of the schema in the file; 0 if there is no file, or no journal in it. The file is only read."""
    if not path.exists() or not holds_journal(path):
        return 0
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            if not connection.execute(QUERIES["has_schema_table"]).fetchall():
                return 0
            return len(connection.execute(QUERIES["applied_migrations"]).fetchall())
        finally:
            connection.close()
    except apsw.Error as error:
        raise translated(error, str(path)) from None


def _line(before: _Schema, after: _Schema, *, current: bool) -> str:
    where, latest = before.where, before.latest
    if before.version == latest:
        return f"{where}: schema version {latest}{', up to date' if current else ''}"
    if before.version == 0:
        made = f"made a journal, schema version {latest}"
        return f"{where}: {made}" if after.version == latest else f"{where}: there is no journal; nothing was changed: perdure migrate"
    if after.version == latest:
        return f"{where}: schema migrated from version {before.version} to {latest}"
    return f"{where}: schema version {before.version}, this perdure uses {latest}; nothing was changed: perdure migrate"
