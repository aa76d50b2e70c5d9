"""The place of a world's journal: a SQLite file in its folder, or its own PostgreSQL database.

This module only reads.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import apsw
import psycopg
from tests.crash import paid

from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.store.postgres.store import PostgresStore

if TYPE_CHECKING:
    from tests.servers.postgres import Server

_OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'perdure'"


class Journal(Protocol):
    dialect: str
    url: str

    def is_there(self) -> bool:
        """Does the journal exist?"""

    def reading(self) -> AbstractContextManager[Store]:
        """A store of the test's own, to look with."""

    def paid(self) -> list[tuple[Any, ...]]:
        """What transaction tools have written."""

    def is_quiet(self) -> bool:
        """Is no process inside a transaction?"""

    def settle(self) -> None:
        """Wait until the statements of dead processes are done or rolled back. No other process may be alive."""

    def part(self) -> None:
        """Have the server end every connection of the victims."""

    def copy(self, folder: Path) -> Journal:
        """Copy the journal for a world in another folder, which already has the old files.

        No process may be writing.
        """

    def close(self) -> None:
        """Delete what is outside of the folder."""


class SqliteJournal:
    dialect = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.disk = folder / "disk"
        self.disk.mkdir(exist_ok=True)
        self._path = self.disk / "journal.db"
        self.url = f"sqlite:///{self._path}"

    def is_there(self) -> bool:
        return self._path.exists()

    def reading(self) -> AbstractContextManager[Store]:
        return closing(open_store(self.url))

    def paid(self) -> list[tuple[Any, ...]]:
        with closing(apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'paid'").fetchall():
                return []
            return connection.execute(paid.READ).fetchall()

    def is_quiet(self) -> bool:
        with closing(apsw.Connection(str(self._path))) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE; ROLLBACK")
            except apsw.BusyError:
                return False
        return True

    def settle(self) -> None:
        """Nothing to do: the kernel has everything that a dead process has written."""

    def part(self) -> None:
        """Nothing to do: a file has no other end."""

    def copy(self, folder: Path) -> SqliteJournal:
        return SqliteJournal(folder)

    def close(self) -> None:
        """Nothing to do: everything is in the folder."""


class PostgresJournal:
    dialect = "postgres"

    def __init__(self, databases: Databases, url: str) -> None:
        self.url = url
        self._databases = databases
        self._store: PostgresStore | None = None
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    def is_there(self) -> bool:
        return True

    @contextmanager
    def reading(self) -> Iterator[Store]:
        # Kept open: a connection costs the server a process, and some tests look a hundred times.
        if self._store is None:
            # Use another application name, so that a test that counts the victims' connections does not count this
            # one.
            store = open_store(f"{self.url}&application_name=looking")
            assert isinstance(store, PostgresStore)
            self._store = store
        yield self._store

    def paid(self) -> list[tuple[Any, ...]]:
        return self._ask(paid.READ) if self._ask("SELECT to_regclass('paid') IS NOT NULL") == [(True,)] else []

    def is_quiet(self) -> bool:
        return self._ask(f"{_OTHERS} AND xact_start IS NOT NULL") == [(0,)]

    def settle(self) -> None:
        deadline = time.monotonic() + 60
        while self._ask(_OTHERS) != [(0,)]:
            assert time.monotonic() < deadline, "the server still serves a process that is dead"
            time.sleep(0.002)

    def part(self) -> None:
        assert self._ask(_OTHERS.replace("count(*)", "count(pg_terminate_backend(pid))")) > [(0,)]

    def copy(self, folder: Path) -> PostgresJournal:
        self._stop_looking()
        return self._databases.journal(self._databases.twin(self.url))

    def close(self) -> None:
        # The lock files of killed workers lie where every process of this machine finds them.
        with self.reading():
            assert self._store is not None
            folder = self._store._liveness._folder  # type: ignore[attr-defined]
        self._stop_looking()
        self._databases.drop(self)
        shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = psycopg.connect(self.url, autocommit=True, application_name="looking", connect_timeout=10)
        return self._connection.execute(statement.encode()).fetchall()

    def _stop_looking(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Databases:
    """Databases of one server. Each begins with our schema: a database that was used before and cleared, or a copy.

    A new schema would take longer than many tests.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._template: str | None = None
        self._numbers = itertools.count(1)
        self._open: list[PostgresJournal] = []
        self._with_schema: set[str] = set()
        self._free: list[str] = []

    def journal(self, url: str) -> PostgresJournal:
        self._open.append(PostgresJournal(self, url))
        return self._open[-1]

    def new(self) -> str:
        """With the schema, and with the table of transaction tools: two that make a table at the same time are in each other's way."""
        if self._template is None:
            self._server.revive()
            self._template = self.empty()
            open_store(self._template).close()
            self._make_paid(self._template)
        if self._free:
            return self._free.pop()
        url = self.copy(self._template)
        self._with_schema.add(url)
        return url

    def twin(self, url: str) -> str:
        """One with the same content. Only rows differ between databases with our schema, and to copy those costs a tenth of a new one."""
        if url not in self._with_schema:
            return self.copy(url)
        target = self.new()
        self._server.pour(url, target)
        return target

    def _make_paid(self, url: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(paid.MAKE.encode())

    def empty(self) -> str:
        return self._server.new_database()

    def copy(self, url: str) -> str:
        parts = urlsplit(url)
        name = f"world_{os.getpid()}_{next(self._numbers)}"
        deadline = time.monotonic() + 60
        while True:
            try:
                self._server.execute(f'CREATE DATABASE "{name}" TEMPLATE "{parts.path[1:]}" OWNER {parts.username}')
                break
            except psycopg.errors.ObjectInUse:  # a connection is still being closed
                assert time.monotonic() < deadline, "somebody keeps it open"
                time.sleep(0.005)
        return urlunsplit(parts._replace(path=f"/{name}"))

    def drop(self, journal: PostgresJournal) -> None:
        self._open.remove(journal)
        if journal.url not in self._with_schema:
            self._server.drop(journal.url)
            return
        self._server.revive()
        self._server.reuse(journal.url, paid.MAKE)
        self._free.append(journal.url)

    def close(self) -> None:
        for journal in list(self._open):
            journal.close()
