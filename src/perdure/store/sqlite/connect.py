"""Opens a connection. Every pragma that durability needs is set, read back and checked."""

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
_LARGE_COMMIT_ROWS = 150  # an append of one run changes three rows, and one page or two
_CACHE_KIB = 4096
_LOOK_S = 0.001


def check_synchronous(synchronous: str) -> None:
    if synchronous not in SYNCHRONOUS:
        raise InvalidInput(f"synchronous={synchronous!r} is not offered: 'full' survives a power loss, 'normal' only a killed process")


def connect_file(path: Path, synchronous: str, busy_s: float) -> apsw.Connection:
    """A connection to the file in WAL mode."""
    connection = apsw.Connection(str(path), flags=_FLAGS, statementcachesize=_CACHED_STATEMENTS)
    try:
        if connection.readonly("main"):
            raise StoreUnavailable(
                "is read-only; a journal is written to: change the permissions of the file or remount its file system", where=str(path)
            )
        wait_when_busy(connection, busy_s)
        # The page size takes effect in a new file only. With pages of 4 KiB, events of about 2 KiB (a typical size of
        # messages) would leave half of every page empty.
        connection.pragma("page_size", _PAGE_BYTES)
        _enter_wal(connection, path, busy_s)
        connection.pragma("synchronous", SYNCHRONOUS[synchronous])
        # Keep the log short, so that it is soon overwritten: a commit that extends the log costs 1.5 times as much as
        # a commit that overwrites a part of it.
        connection.wal_autocheckpoint(_LOG_PAGES)
        # A commit of 200 concurrent runs changes more than 200 pages. SQLite's default cache (2 MB) has room for 250.
        # With that cache, SQLite would write pages before the commit, and read them again.
        connection.pragma("cache_size", -_CACHE_KIB)
        _harden(connection)
        if connection.pragma("synchronous") != SYNCHRONOUS[synchronous]:
            raise StoreError(
                f"cannot be used: SQLite did not accept synchronous={synchronous}; without it nothing can be promised", where=str(path)
            )
    except BaseException:
        connection.close(True)
        raise
    return connection


def wait_when_busy(connection: apsw.Connection, busy_s: float) -> None:
    """Let statements of the connection wait up to `busy_s` seconds for a lock that another process holds.

    SQLite has no queue of processes that wait for a lock: each looks again and again, and the one that looks at the
    right moment gets the lock. SQLite's own time-out makes the pauses longer and longer (up to 0.1 s). Beside busy
    workers, the process that has waited longest would then have the smallest chance: one decision in 50 took seconds.
    So all processes look at the same short intervals.
    """
    deadline = 0.0

    def look_again(looked: int) -> bool:
        nonlocal deadline
        now = time.monotonic()
        if not looked:
            deadline = now + busy_s
        elif now >= deadline:
            return False
        time.sleep(_LOOK_S)
        return True

    connection.set_busy_handler(look_again)


def fit_log(connection: apsw.Connection, rows: int, *, is_long: bool) -> bool:
    """Choose how long the log may become. Call this before the commit of a transaction that has changed `rows` rows.

    The commits of many runs change the same pages again and again: in a log that is three times as long, a checkpoint
    copies a page once for several commits. SQLite itself still makes the checkpoint after the commit. `is_long`: the
    log of this connection may be long now. Returns whether it may be long from now on.
    """
    wants_long = rows >= _LARGE_COMMIT_ROWS
    if wants_long != is_long:
        connection.wal_autocheckpoint(_LOG_PAGES * 3 if wants_long else _LOG_PAGES)
    return wants_long


def connect_memory() -> apsw.Connection:
    """A private database in memory, which exists until the connection is closed."""
    connection = apsw.Connection(":memory:", statementcachesize=_CACHED_STATEMENTS)
    _harden(connection)
    return connection


def _enter_wal(connection: apsw.Connection, path: Path, busy_s: float) -> None:
    # If several processes change the mode at the same time, SQLite does not wait: it answers that it is busy, or keeps
    # the old mode.
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
                f"cannot be put into WAL mode (it says {mode}); close the other programs that have it open and try again", where=str(path)
            )
        time.sleep(0.005)


def _harden(connection: apsw.Connection) -> None:
    connection.pragma("foreign_keys", 1)
    # The file may come from another machine. Its schema must not be able to call functions in perdure's statements.
    connection.pragma("trusted_schema", 0)
    if connection.pragma("foreign_keys") != 1 or connection.pragma("trusted_schema") != 0:
        raise StoreError("SQLite did not accept foreign_keys=1 and trusted_schema=0; this build of it cannot be used")
