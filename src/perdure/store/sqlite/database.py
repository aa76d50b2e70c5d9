"""One file: a connection that writes, one that reads, and the only place where a transaction begins and ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import apsw

from perdure.errors import InvalidInput, StoreError, StoreUnavailable
from perdure.store.closing import moved_error, moved_from
from perdure.store.cursor import Cursor, Params, Row
from perdure.store.sqlite.confined import ToolConnection, confined
from perdure.store.sqlite.connect import check_synchronous, connect_file, connect_memory
from perdure.store.sqlite.faults import not_text, translated
from perdure.store.sqlite.guard import unwatch, watch
from perdure.store.sqlite.migrate import migrate
from perdure.store.sqlite.place import check_place, create_private
from perdure.store.sqlite.queries import QUERIES

T = TypeVar("T")
MOVED = "this journal was moved"  # as the triggers of the schema say it
_BEGIN, _COMMIT, _ROLLBACK, _DATA_VERSION = (QUERIES[name] for name in ("begin", "commit", "rollback", "data_version"))


class SqliteCursor:
    """Every statement has run to its end when a method returns: nothing stays open beside the next one."""

    __slots__ = ("_cursor", "connection")

    def __init__(self, cursor: apsw.Cursor) -> None:
        self._cursor = cursor
        self.connection: apsw.Connection = cursor.connection

    def all(self, name: str, params: Params = ()) -> list[Row]:
        return self._cursor.execute(QUERIES[name], params).fetchall()

    def one(self, name: str, params: Params = ()) -> Row | None:
        rows = self._cursor.execute(QUERIES[name], params).fetchall()
        return rows[0] if rows else None

    def change(self, name: str, params: Params = ()) -> int:
        self._cursor.execute(QUERIES[name], params)
        return self.connection.changes()

    def each(self, name: str, many: Sequence[Params]) -> None:
        self._cursor.executemany(QUERIES[name], many)

    def alone(self, key: str) -> None:
        """Nothing to do: a transaction that writes is alone from its BEGIN IMMEDIATE on."""

    def patience(self, seconds: float) -> None:
        """Nothing to do: for the same reason there is nothing left to wait for."""


class SqliteDatabase:
    """Thread-safe. In memory (path None) there is one connection, and readers wait for the writer."""

    def __init__(self, path: Path | None, synchronous: str, busy_s: float) -> None:
        check_synchronous(synchronous)
        self.path = path
        self.where = "the database in memory" if path is None else str(path)
        self._synchronous = synchronous
        self._busy_s = busy_s
        self._commits = 0
        self._closed = False
        self._write_lock = threading.RLock()
        self._read_lock = self._write_lock if path is None else threading.RLock()
        if path is not None:
            check_place(path)
            create_private(path)
        self._writer: apsw.Connection | None = None
        try:
            self._writer = self._connect()
            migrate(self._writer, self.where)
            self._reader = self._writer if path is None else self._connect_reader()
        except BaseException as error:
            if self._writer is not None:
                self._writer.close(True)
            if isinstance(error, apsw.Error):
                raise translated(error, self.where) from None
            if isinstance(error, UnicodeDecodeError):
                raise not_text(self.where) from None
            raise
        self._watched = None if path is None else watch(path)
        self._file = None if path is None else os.stat(path)

    def write(self, work: Callable[[Cursor], T], arrived: Callable[[Cursor, T], bool], *, again: bool = True) -> T:
        """Do the work in one transaction, alone with the file from its first statement on."""
        with self._write_lock:
            self._check_file()
            try:
                connection = self._connection() if self._writer is None or self._writer.in_transaction else self._writer
                cursor = connection.cursor()
                cursor.execute(_BEGIN)
            except apsw.Error as error:
                raise translated(error, self.where) from None
            try:
                done = work(SqliteCursor(cursor))
                try:
                    cursor.execute(_COMMIT)
                except apsw.Error as error:
                    self._find_out(error, lambda fresh: arrived(fresh, done))
            except BaseException as error:
                self._rollback(connection)
                if isinstance(error, apsw.FullError):
                    self._empty_log()
                if isinstance(error, apsw.ConstraintError) and MOVED in str(error):
                    raise moved_error(self.where, moved_from(self.read("moved"))) from None
                if isinstance(error, apsw.Error):
                    raise translated(error, self.where) from None
                if isinstance(error, UnicodeDecodeError):
                    raise not_text(self.where) from None
                if isinstance(error, UnicodeEncodeError):
                    raise InvalidInput(f"text with a lone surrogate cannot be stored: {ascii(error.object)[:80]}") from None
                raise
            self._commits += 1
            return done

    def _check_file(self) -> None:
        """A file that was deleted or replaced takes every commit with it, and SQLite does not notice."""
        if self.path is None or self._file is None:
            return
        try:
            same = os.path.samestat(self._file, os.stat(self.path))
        except OSError:
            same = False
        if not same:
            raise StoreUnavailable(
                f"{self.where} was deleted, moved or replaced while it was in use; put that very file back, or end this process"
            )

    def read(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of a statement, by its name in queries.sql."""
        with self._read_lock:
            try:
                return self._reader.execute(QUERIES[name], params).fetchall()
            except UnicodeEncodeError:
                return []  # a lone surrogate: nothing in here can be called that
            except UnicodeDecodeError:
                raise not_text(self.where) from None
            except apsw.Error as error:
                raise translated(error, self.where) from None

    @contextmanager
    def lend(self, cursor: Cursor) -> Iterator[ToolConnection]:
        """The connection, for as long as the tool's transaction lasts; StoreError when the tool's own SQL has ended that."""
        assert isinstance(cursor, SqliteCursor), cursor
        with confined(cursor.connection) as connection:
            yield connection
        if not cursor.connection.in_transaction:
            raise StoreError("the tool's SQL rolled its transaction back (OR ROLLBACK); nothing has happened")

    def version(self) -> int:
        """Grows with every commit: data_version tells those of other connections, the counter our own."""
        with self._read_lock:
            try:
                seen: int = self._reader.execute(_DATA_VERSION).get
            except apsw.Error as error:
                raise translated(error, self.where) from None
        return seen + self._commits

    def pragma(self, name: str) -> Any:
        """What the reading connection answers; for `doctor`."""
        with self._read_lock:
            try:
                return self._reader.pragma(name)
            except apsw.Error as error:
                raise translated(error, self.where) from None

    def close(self) -> None:
        """Close both connections; the last one of all processes empties the log into the file."""
        with self._write_lock, self._read_lock:
            if self._closed:
                return
            self._closed = True
            self._reader.close(True)
            if self._writer is not None:
                self._writer.close(True)
            if self._watched is not None:
                unwatch(self._watched)

    def _connect(self) -> apsw.Connection:
        return connect_memory() if self.path is None else connect_file(self.path, self._synchronous, self._busy_s)

    def _connect_reader(self) -> apsw.Connection:
        reader = self._connect()
        reader.pragma("query_only", 1)
        return reader

    def _connection(self) -> apsw.Connection:
        if self._writer is None:
            if self._closed:
                raise StoreError(f"{self.where} has been closed by this process; open the store again")
            self._writer = self._connect()
        assert not self._writer.in_transaction, "a transaction was begun inside another: a tool's work must not use the store"
        return self._writer

    def _find_out(self, error: apsw.Error, arrived: Callable[[Cursor], bool]) -> None:
        """COMMIT has failed: return if it took effect all the same, and raise its error if it did not."""
        if self.path is None:
            raise error
        # The outcome is unknown, and after a failed fsync this connection would show things that are not on the disk.
        self._discard_writer()
        if not self._look(arrived):
            if isinstance(error, apsw.FullError):
                self._empty_log()
            raise translated(error, self.where) from None

    def _rollback(self, connection: apsw.Connection) -> None:
        try:
            if connection is self._writer and connection.in_transaction:
                connection.execute(_ROLLBACK)
        except apsw.Error:
            self._discard_writer()

    def _empty_log(self) -> None:
        """After a full disk: the log may be what fills it, and short of its usual length nothing else would ever empty it.

        The work is not tried again here, since a transaction's tool may be part of it: whoever asked for it does, and finds room.
        """
        if self.path is None:
            return
        try:
            connection = self._connection()
            connection.set_busy_timeout(0)  # somebody who reads is no reason to wait: the next write comes by here again
            try:
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            finally:
                connection.set_busy_timeout(int(self._busy_s * 1000))
        except (apsw.Error, StoreError):
            pass  # the file would have to grow for it, or somebody is at it: what the caller hears is that the disk is full

    def _discard_writer(self) -> None:
        if self.path is None or self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.close(True)

    def _look(self, arrived: Callable[[Cursor], bool]) -> bool:
        try:
            return arrived(SqliteCursor(self._connection().cursor()))
        except (apsw.Error, StoreError):
            return False  # still unknown: the caller tries again later, with the same event ids
