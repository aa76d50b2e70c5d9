"""The Store on SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from perdure.store.bell import Listeners
from perdure.store.liveness import FileLocks, InProcess
from perdure.store.part import Means
from perdure.store.sql import SqlStore
from perdure.store.sqlite import integrity
from perdure.store.sqlite.bell import PipeBell
from perdure.store.sqlite.database import SqliteDatabase
from perdure.store.sqlite.migrate import MIGRATIONS
from perdure.store.sqlite.place import workers_folder


class SqliteStore(SqlStore):
    """A journal in one SQLite file, or in memory if there is no path."""

    schema_version = len(MIGRATIONS)
    _database: SqliteDatabase

    def __init__(self, url: str, path: Path | None, *, synchronous: str = "full", busy_s: float = 10.0) -> None:
        database = SqliteDatabase(path, synchronous, busy_s)
        if path is None:
            super().__init__(Means(url, database, Listeners(), InProcess()))
        else:
            folder = workers_folder(path)
            super().__init__(Means(url, database, PipeBell(folder), FileLocks(folder)))

    def check_open(self) -> None:
        self._database.check_file()
        super().check_open()

    def facts(self) -> dict[str, str]:
        path = self._database.path
        sizes = {} if path is None else {name: f"{_size(path, suffix):,} bytes" for name, suffix in (("size", ""), ("log", "-wal"))}
        pragmas = {
            name: str(self._database.pragma(name)) for name in ("journal_mode", "synchronous", "page_size", "page_count", "freelist_count")
        }
        return {
            "file": self._database.where,
            **sizes,
            **pragmas,
            **self.common_facts(),
            "schema_version": str(len(MIGRATIONS)),
            "sqlite": apsw.sqlite_lib_version(),
            "apsw": apsw.apsw_version(),
        }

    def problems(self) -> list[str]:
        return integrity.problems(self._database)

    @contextmanager
    def snapshot_to(self, file: Path) -> Iterator[bool]:
        self._database.copy_to(file)
        yield True

    def restore_schema(self, *, check: bool = False) -> list[str]:
        return integrity.restore_schema(self._database, check=check)


def _size(path: Path, suffix: str) -> int:
    file = path.with_name(path.name + suffix)
    return file.stat().st_size if file.exists() else 0
