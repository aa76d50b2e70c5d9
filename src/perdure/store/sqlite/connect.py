"""Opening a connection: every pragma that durability rests on is set, read back and asserted."""

from __future__ import annotations

import time
from pathlib import Path

import apsw

from perdure.errors import InvalidInput, StoreError, StoreUnavailable

SYNCHRONOUS = {"full": 2, "normal": 1}
_FLAGS = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
_CACHED_STATEMENTS = 100
_PAGE_BYTES = 8192
_LOG_PAGES = 320


def check_synchronous(synchronous: str) -> None:
    if synchronous not in SYNCHRONOUS:
        raise InvalidInput(f"synchronous={synchronous!r} is not offered: 'full' survives a power loss, 'normal' only a killed process")


def connect_file(path: Path, synchronous: str, busy_s: float) -> apsw.Connection:
    """A connection to the file in WAL mode."""
    connection = apsw.Connection(str(path), flags=_FLAGS, statementcachesize=_CACHED_STATEMENTS)
    try:
        if connection.readonly("main"):
            raise StoreUnavailable(
                f"{path} is read-only; a journal is written to: change the permissions of the file or remount its file system"
            )
        connection.set_busy_timeout(int(busy_s * 1000))
        # For a new file only. Of events of two kilobytes, which is what people and models say, half of every page of 4 KiB would stay empty.
        connection.pragma("page_size", _PAGE_BYTES)
        _enter_wal(connection, path, busy_s)
        connection.pragma("synchronous", SYNCHRONOUS[synchronous])
        # A commit that makes the log longer costs the disk half as much again as one that writes over an old part of it: it is short,
        # so that it is soon written over.
        connection.wal_autocheckpoint(_LOG_PAGES)
        _harden(connection)
        if connection.pragma("synchronous") != SYNCHRONOUS[synchronous]:
            raise StoreError(f"{path}: SQLite did not accept synchronous={synchronous}; without it nothing can be promised")
    except BaseException:
        connection.close(True)
        raise
    return connection


def connect_memory() -> apsw.Connection:
    """A database of its own that lives as long as the connection."""
    connection = apsw.Connection(":memory:", statementcachesize=_CACHED_STATEMENTS)
    _harden(connection)
    return connection


def _enter_wal(connection: apsw.Connection, path: Path, busy_s: float) -> None:
    # SQLite does not wait here when several processes make the change at once: it says busy, or stays in the old mode.
    deadline = time.monotonic() + busy_s
    while True:
        try:
            mode = connection.pragma("journal_mode", "wal")
            if mode == "wal":
                return
        except apsw.BusyError:
            mode = "busy"
        if time.monotonic() > deadline:
            raise StoreUnavailable(
                f"{path} cannot be put into WAL mode (it says {mode}); close the other programs that have it open and try again"
            )
        time.sleep(0.005)


def _harden(connection: apsw.Connection) -> None:
    connection.pragma("foreign_keys", 1)
    connection.pragma("trusted_schema", 0)  # a file from elsewhere cannot smuggle functions into our statements
    if connection.pragma("foreign_keys") != 1 or connection.pragma("trusted_schema") != 0:
        raise StoreError("SQLite did not accept foreign_keys=1 and trusted_schema=0; this build of it cannot be used")
