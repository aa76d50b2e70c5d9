"""A transaction that the caller of perdure has begun on a connection of its own, and will end.

perdure's statements run inside a savepoint. If one of them fails, all of them are undone, and the caller's transaction
can go on. Only a connection of apsw can be used: guard.py says why.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from perdure.errors import InvalidInput, StoreUnavailable
from perdure.store.sqlite.faults import translated
from perdure.store.sqlite.tool_connection import ToolConnection


@contextmanager
def joined(theirs: Any, path: Path | None) -> Iterator[apsw.Cursor]:
    """Run statements in the transaction of this connection. InvalidInput if that is not possible."""
    connection = _checked(theirs, path)
    # A cursor of our own class: the caller may have set another class, and tracers that change rows or refuse statements.
    cursor = apsw.Cursor(connection)
    cursor.row_trace = lambda cursor, row: row
    cursor.exec_trace = lambda cursor, sql, params: True
    try:
        cursor.execute("SAVEPOINT perdure_start")
        try:
            yield cursor
        except BaseException:
            _undo(cursor)
            raise
        cursor.execute("RELEASE perdure_start")
    except (apsw.BusyError, apsw.LockedError):
        raise StoreUnavailable(
            "is locked by another connection, and your transaction has not written yet; nothing was written: roll it back and begin it "
            "with BEGIN IMMEDIATE, which waits for the lock, on a connection with a busy time-out",
            where=str(path),
        ) from None


def _undo(cursor: apsw.Cursor) -> None:
    # After a full disk or a fault of the disk, SQLite itself may have rolled the whole transaction back.
    if cursor.connection.in_transaction:
        cursor.execute("ROLLBACK TO perdure_start")
        cursor.execute("RELEASE perdure_start")


def _checked(theirs: Any, path: Path | None) -> apsw.Connection:
    if isinstance(theirs, ToolConnection):
        raise InvalidInput(
            "start(connection=call.connection): a tool cannot start a run in its own transaction; let the agent call the other agent, "
            "`await other(…)`, or start the run in a tool with another effect class and an id of its own"
        )
    if not isinstance(theirs, apsw.Connection):
        raise InvalidInput(
            f"start(connection={type(theirs).__module__.partition('.')[0]}.{type(theirs).__qualname__}): the journal is a SQLite file, and "
            "takes a connection of apsw alone, apsw.Connection(path). The sqlite3 of the standard library is another SQLite library: "
            "in one process, the two would drop each other's locks on the file"
        )
    if path is None:
        raise InvalidInput(
            "start(connection=…): a journal in memory cannot be shared with another connection; use a file: sqlite:///perdure.db"
        )
    try:
        _check(theirs, path)
    except apsw.ConnectionClosedError:
        raise InvalidInput("start(connection=…): the connection is closed; nothing was started") from None
    except apsw.Error as error:
        raise translated(error, str(path)) from None
    return theirs


def _check(connection: apsw.Connection, path: Path) -> None:
    if not _is_same(connection, path):
        raise InvalidInput(f"start(connection=…): the connection is to another file than the journal, {path}; one commit covers one file")
    if not connection.in_transaction:
        # Each statement would be a commit of its own: a crash between two of them would leave half a run.
        raise InvalidInput(
            "start(connection=…): the connection is in no transaction, so the run would not be part of your commit; begin one: BEGIN IMMEDIATE"
        )
    if connection.readonly("main") or connection.pragma("query_only"):
        raise InvalidInput("start(connection=…): the connection is read only; nothing was started")
    if connection.pragma("synchronous") == 0:
        raise InvalidInput(
            "start(connection=…): the connection has PRAGMA synchronous=OFF, so that a power loss can damage the journal; set it to FULL"
        )


def _is_same(connection: apsw.Connection, path: Path) -> bool:
    """Is this file the connection's main database? The file may have been replaced since the connection was opened."""
    moved = ctypes.c_int(0)
    connection.file_control("main", apsw.SQLITE_FCNTL_HAS_MOVED, ctypes.addressof(moved))
    try:
        return not moved.value and os.path.samefile(connection.filename, path)
    except OSError:
        return False
