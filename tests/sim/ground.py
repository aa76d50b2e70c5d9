"""The base of the simulated stores: the real logic over a real database in memory, without faults."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from perdure.store.sql import SqlStore
from perdure.store.sqlite import integrity
from perdure.store.sqlite.database import SqliteDatabase


class Truth(SqlStore):
    """The store that does not go wrong."""

    def facts(self) -> dict[str, str]:
        return {}

    def problems(self) -> list[str]:
        return integrity.problems(self._database)  # type: ignore[arg-type]

    def snapshot_to(self, file: Path) -> AbstractContextManager[bool]:
        raise NotImplementedError("no simulated process takes a backup")

    def restore_schema(self, *, check: bool = False) -> list[str]:
        return integrity.restore_schema(self._database, check=check)  # type: ignore[arg-type]


class Ground:
    """One database for all seeds, reset for each seed: a new database takes as long as a whole seed."""

    _database: SqliteDatabase | None = None
    _empty: bytes = b""

    @classmethod
    def new(cls) -> SqliteDatabase:
        if cls._database is None:
            cls._database = SqliteDatabase(None, "full", 10.0)
            assert cls._database._writer is not None
            cls._database._writer.execute("CREATE TABLE effects (key TEXT, run TEXT, call INTEGER, attempt INTEGER)")
            cls._empty = bytes(cls._database._writer.serialize("main"))
        assert cls._database._writer is not None
        cls._database._writer.deserialize("main", cls._empty)
        return cls._database
