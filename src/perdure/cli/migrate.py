"""`perdure migrate`: bring the database's schema up to date."""

from __future__ import annotations

from pathlib import Path

import apsw
import click

from perdure.cli import common
from perdure.errors import InvalidInput, StoreVersion
from perdure.store.open import open_store, sqlite_path
from perdure.store.sqlite.faults import translated
from perdure.store.sqlite.migrate import MIGRATIONS
from perdure.store.sqlite.owner import holds_journal
from perdure.store.sqlite.queries import QUERIES


@click.command("migrate")
@click.option("--check", is_flag=True, help="Only tell; code 7 when there is something to do.")
@common.url_option
@common.json_option
def command(check: bool, url: str | None, as_json: bool) -> int:
    """Bring the schema up to this perdure's version. Opening a database does the same; this says from where to where."""
    settings = common.settings_with(url=url)
    common.require_database(settings.url)
    path = sqlite_path(settings.url)
    if path is None:
        raise InvalidInput(f"{settings.url} is a database in memory, which is always new; name a file: --url sqlite:///perdure.db")
    before, latest = schema_version(path), len(MIGRATIONS)
    if before > latest:
        raise StoreVersion(f"{path} has schema version {before}, this perdure knows {latest}: upgrade perdure, nothing was changed")
    if not check:
        # Opening it migrates it, in one transaction per version.
        open_store(settings.url, synchronous=settings.synchronous).close()
    after = before if check else schema_version(path)
    if as_json:
        common.out_json({"file": str(path), "from": before, "to": after, "latest": latest, "up_to_date": after == latest})
    else:
        common.out(common.clean(_line(path, before, after, latest)))
    return common.SUCCEEDED if after == latest else common.DIFFERENT


def schema_version(path: Path) -> int:
    """The version of the schema in the file, without changing anything; 0 when it has none of ours."""
    if not holds_journal(path):
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


def _line(path: Path, before: int, after: int, latest: int) -> str:
    if before == latest:
        return f"{path}: schema version {latest}, up to date"
    if after == latest:
        return f"{path}: schema migrated from version {before} to {latest}"
    return f"{path}: schema version {before}, this perdure uses {latest}; nothing was changed: perdure migrate"
