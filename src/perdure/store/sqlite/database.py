"""One SQLite file, with one connection for writing and one for reading. Begins and ends every transaction."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import apsw

from perdure.errors import InvalidInput, StoreError, StoreUnavailable
from perdure.store.archive import moved_error, moved_from
from perdure.store.cursor import Cursor, Params, Row, Words
from perdure.store.sqlite.chain import link_chain
from perdure.store.sqlite.connect import check_synchronous, connect_file, connect_memory, fit_log, wait_when_busy
from perdure.store.sqlite.faults import not_text, translated
from perdure.store.sqlite.guard import unwatch, watch
from perdure.store.sqlite.joined import joined
from perdure.store.sqlite.migrate import migrate
from perdure.store.sqlite.place import check_place, create_private
from perdure.store.sqlite.queries import QUERIES
from perdure.store.sqlite.tool_connection import ToolConnection, confined

T = TypeVar("T")
MOVED = "this journal was moved"  # the message of the schema's triggers
_BEGIN, _COMMIT, _ROLLBACK, _DATA_VERSION = (QUERIES[name] for name in ("begin", "commit", "rollback", "data_version"))


_COPIED_PAGES = 10_000  # in one step of a backup


class SqliteCursor:
    """Runs statements. When a method returns, its statement is complete: at most one statement is open at a time."""

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
        """No effect: after BEGIN IMMEDIATE, no other transaction can write."""

    def link_chain(self) -> None:
        link_chain(self._cursor)

    def ring_at_commit(self) -> None:
        """No effect: workers find the commit by polling."""

    def patience(self, seconds: float) -> None:
        """No effect: after BEGIN IMMEDIATE there is no lock left to wait for."""


class SqliteDatabase:
    """A SQLite database, thread-safe.

    A database in memory (path None) has only one connection, so readers wait for the writer.
    """

    words = Words(
        undriven="+",
        like="{column} GLOB {value}",
        like_folded="lower({column}) GLOB {value}",  # SQLite's `lower` changes A to Z only
        escaped="[",
        escape="[{}]",
        any="*",
        one="?",
    )

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
        self._beside_lock = threading.Lock()
        self._beside: apsw.Connection | None = None  # for `read_beside`
        if path is not None:
            check_place(path)
            create_private(path)
        self._writer: apsw.Connection | None = None
        self._log_is_long = False  # see fit_log
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
        """Do the work in one transaction, which holds the write lock from its first statement."""
        with self._write_lock:
            self.check_file()
            try:
                connection = self._connection() if self._writer is None or self._writer.in_transaction else self._writer
                cursor = connection.cursor()
                cursor.execute(_BEGIN)
                changed_before = connection.total_changes()
            except apsw.Error as error:
                raise translated(error, self.where) from None
            try:
                done = work(SqliteCursor(cursor))
                if self.path is not None:
                    self._log_is_long = fit_log(connection, connection.total_changes() - changed_before, is_long=self._log_is_long)
                try:
                    cursor.execute(_COMMIT)
                except apsw.Error as error:
                    self._find_out(error, lambda fresh: arrived(fresh, done))
            except BaseException as error:
                self._rollback(connection)
                if isinstance(error, apsw.FullError):
                    self._empty_log()
                self._explain(error)
                raise
            self._commits += 1
            return done

    def _explain(self, error: BaseException) -> None:
        """Raise the StoreError or InvalidInput for a fault of SQLite inside a transaction. Return for any other error."""
        if isinstance(error, apsw.ConstraintError) and MOVED in str(error):
            raise moved_error(self.where, moved_from(self.read("moved"))) from None
        if isinstance(error, apsw.Error):
            raise translated(error, self.where) from None
        if isinstance(error, UnicodeDecodeError):
            raise not_text(self.where) from None
        if isinstance(error, UnicodeEncodeError):
            raise InvalidInput(f"text with a lone surrogate cannot be stored: {ascii(error.object)[:80]}") from None

    @contextmanager
    def join(self, connection: Any) -> Iterator[Cursor]:
        self.check_file()
        try:
            with joined(connection, self.path) as cursor:
                yield SqliteCursor(cursor)
        except BaseException as error:
            self._explain(error)
            raise

    def check_file(self) -> None:
        """Raise if the file was deleted or replaced.

        Commits into the old file would be lost, and SQLite does not notice.
        """
        if self.path is None or self._file is None:
            return
        try:
            same = os.path.samestat(self._file, os.stat(self.path))
        except OSError:
            same = False
        if not same:
            raise StoreUnavailable(
                "was deleted, moved or replaced while it was in use; put that very file back, or end this process", where=self.where
            )

    def read(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of a statement, by its name in queries.sql."""
        return self._read(QUERIES[name], params)

    def select(self, sql: str, params: Mapping[str, Any], *, in_order: bool = False) -> list[Row]:
        return self._read(sql, params)  # SQLite does so by itself

    def _read(self, sql: str, params: Params) -> list[Row]:
        with self._read_lock:
            return self._rows(self._reader, sql, params)

    def read_beside(self, name: str, params: Params = ()) -> list[Row]:
        """Like `read`, on a connection of its own, which is opened at its first use.

        The event loop of a worker reads through `read`: it must not wait until a long count has ended.
        """
        if self.path is None:
            return self.read(name, params)
        with self._beside_lock:
            if self._closed:
                raise StoreError("has been closed by this process; open the store again", where=self.where)
            try:
                self._beside = self._beside or self._connect_reader()
            except apsw.Error as error:
                raise translated(error, self.where) from None
            return self._rows(self._beside, QUERIES[name], params)

    def _rows(self, connection: apsw.Connection, sql: str, params: Params) -> list[Row]:
        try:
            return connection.execute(sql, params).fetchall()
        except UnicodeEncodeError:
            return []  # a parameter has a lone surrogate: no stored text can match the parameter
        except UnicodeDecodeError:
            raise not_text(self.where) from None
        except apsw.Error as error:
            raise translated(error, self.where) from None

    @contextmanager
    def lend(self, cursor: Cursor) -> Iterator[ToolConnection]:
        """The connection for a tool, until the tool ends. StoreError if the tool's own SQL ended the transaction."""
        assert isinstance(cursor, SqliteCursor), cursor
        with confined(cursor.connection) as connection:
            yield connection
        if not cursor.connection.in_transaction:
            raise StoreError("the tool's SQL rolled its transaction back (OR ROLLBACK); nothing has happened")

    @contextmanager
    def unguarded(self, cursor: Cursor) -> Iterator[None]:
        guards = cursor.all("guards_of_settled_rows")
        for name in ("drop_guard_of_ends", "drop_guard_of_identity", "drop_guard_of_decisions"):
            cursor.change(name)
        yield
        assert isinstance(cursor, SqliteCursor), cursor
        for _, sql in guards:
            cursor.connection.execute(sql)  # with another text than before, `verify` would report a changed trigger

    def version(self) -> int:
        """A number that changes with every commit.

        data_version changes with the commits of other connections, `_commits` with the commits of this object. A
        commit of this object may count in both.
        """
        with self._read_lock:
            try:
                seen: int = self._reader.execute(_DATA_VERSION).get
            except apsw.Error as error:
                raise translated(error, self.where) from None
        return seen + self._commits

    def pragma(self, name: str) -> Any:
        """The value of a pragma on the reading connection; for `perdure doctor`."""
        with self._read_lock:
            try:
                return self._reader.pragma(name)
            except apsw.Error as error:
                raise translated(error, self.where) from None

    def close(self) -> None:
        """Close both connections. With the last connection of all processes, SQLite moves the log into the file."""
        if self._beside is not None and not self._closed:
            self._beside.interrupt()  # a long count must not delay the end of the process
        with self._beside_lock, self._write_lock, self._read_lock:
            if self._closed:
                return
            self._closed = True
            if self._beside is not None:
                self._beside.close(True)
            self._reader.close(True)
            if self._writer is not None:
                self._writer.close(True)
            if self._watched is not None:
                unwatch(self._watched)

    def _connect(self) -> apsw.Connection:
        return connect_memory() if self.path is None else connect_file(self.path, self._synchronous, self._busy_s)

    def copy_to(self, file: Path) -> None:
        """Copy the database to a new file, as it is now. Other processes may write meanwhile.

        The read transaction keeps one state of the database for all steps: without it, every commit of another process
        would make SQLite begin the copy again.
        """
        try:
            source, target = self._connect_reader(), apsw.Connection(str(file))
            try:
                source.execute("BEGIN")
                source.execute("SELECT count(*) FROM perdure_moved").fetchall()
                with target.backup("main", source, "main") as copying:
                    while not copying.done:
                        copying.step(_COPIED_PAGES)
            finally:
                source.close(True)
                target.close(True)
        except apsw.Error as error:
            raise translated(error, self.where) from None

    def _connect_reader(self) -> apsw.Connection:
        reader = self._connect()
        reader.pragma("query_only", 1)
        return reader

    def _connection(self) -> apsw.Connection:
        if self._writer is None:
            if self._closed:
                raise StoreError("has been closed by this process; open the store again", where=self.where)
            self._writer, self._log_is_long = self._connect(), False
        assert not self._writer.in_transaction, "a transaction was begun inside another: a tool's work must not use the store"
        return self._writer

    def _find_out(self, error: apsw.Error, arrived: Callable[[Cursor], bool]) -> None:
        """COMMIT has failed with `error`. Return if the transaction was committed all the same; else raise `error`."""
        if self.path is None:
            raise error
        # The outcome is unknown, and after a failed fsync this connection would show data that is not on the disk.
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
        """The disk is full: empty the log, since the log may use the space.

        SQLite starts a checkpoint only when the log has a certain length, and on a full disk the log cannot grow to
        that length. The write is not repeated here, since a tool may be part of it: the caller retries, and then there
        is room.
        """
        if self.path is None:
            return
        try:
            connection = self._connection()
            connection.set_busy_handler(None)  # do not wait for readers: the next failed write starts another checkpoint
            try:
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            finally:
                wait_when_busy(connection, self._busy_s)
        except (apsw.Error, StoreError):
            pass  # the file would have to grow, or another process uses the file: the caller gets the first error

    def _discard_writer(self) -> None:
        if self.path is None or self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.close(True)

    def _look(self, arrived: Callable[[Cursor], bool]) -> bool:
        try:
            return arrived(SqliteCursor(self._connection().cursor()))
        except (apsw.Error, StoreError):
            return False  # the outcome is still unknown: the caller tries again later, with the same event ids
