"""The speed of the machine without perdure: the reference for our own figures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

# Long enough for several checkpoints of the log on a fast disk, short enough for every repeat on a slow disk.
_SECONDS = 0.3
_ROW = "x" * 200
_LOG_BYTES = 5_000_000  # above the 1,000 pages at which SQLite checkpoints the log and starts to overwrite it


@contextmanager
def opened(path: Path) -> Iterator[apsw.Connection]:
    """A database with the pragmas of perdure's own connection."""
    connection = apsw.Connection(str(path))
    try:
        assert connection.pragma("journal_mode", "wal") == "wal"
        connection.pragma("synchronous", 2)
        assert connection.pragma("synchronous") == 2
        yield connection
    finally:
        connection.close()


@contextmanager
def warm(path: Path) -> Iterator[apsw.Connection]:
    """A database whose log (WAL) has reached its full length, like the log of any worker after its first minute.

    While the log still grows, a sync also writes the file system's own journal, which halves the rate. Keep the
    database open as long as the log is needed: closing the last connection deletes the log.
    """
    with opened(path) as connection:
        connection.execute("CREATE TABLE ballast (data BLOB) STRICT")
        connection.execute("INSERT INTO ballast VALUES (zeroblob(?))", (_LOG_BYTES,))
        yield connection


def commits_per_s(folder: Path) -> float:
    """A loop of commits, one row of 200 bytes in each, with the pragmas of perdure's own connection."""
    with warm(folder / f"raw-{time.monotonic_ns()}.db") as connection:
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, data TEXT NOT NULL) STRICT")
        return _rate(lambda: _commit(connection))


def first_commits_per_s(folder: Path, count: int) -> float:
    """The same loop for the first commits of a new file, while its log grows."""
    with opened(folder / f"raw-{time.monotonic_ns()}.db") as connection:
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, data TEXT NOT NULL) STRICT")
        begun = time.perf_counter()
        for _ in range(count):
            _commit(connection)
        return count / (time.perf_counter() - begun)


def _commit(connection: apsw.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO rows (data) VALUES (?)", (_ROW,))
    connection.execute("COMMIT")


def syncs_per_s(folder: Path, *, grow: bool) -> float:
    """A loop that writes and syncs one page, without a database: at the end of a growing file, or in the same place."""
    descriptor = os.open(folder / f"sync-{time.monotonic_ns()}", os.O_CREAT | os.O_WRONLY, 0o600)
    page = b"x" * 4096
    written = 0

    def sync() -> None:
        nonlocal written
        os.pwrite(descriptor, page, written)
        os.fsync(descriptor)
        written += len(page) if grow else 0

    try:
        return _rate(sync)
    finally:
        os.close(descriptor)


def _rate(work: Callable[[], None]) -> float:
    count, begun = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < _SECONDS:
        work()
        count += 1
    return count / elapsed
