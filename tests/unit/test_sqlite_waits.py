"""A process that waits for SQLite's lock gets it, however busy other processes are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

from perdure.store.sqlite.connect import connect_file

_HELD_S, _FREE_S = 0.2, 0.003
_TURNS = 15


@contextmanager
def a_busy_writer(path: Path) -> Iterator[threading.Event]:
    """Holds the lock nearly all the time, and is over after _TURNS turns. The event is set while it has its first turn."""
    began, stop = threading.Event(), threading.Event()

    def write() -> None:
        connection = connect_file(path, "normal", 5.0)
        for _ in range(_TURNS):
            if stop.is_set():
                break
            connection.execute("BEGIN IMMEDIATE")
            began.set()
            stop.wait(_HELD_S)
            connection.execute("COMMIT")
            time.sleep(_FREE_S)
        connection.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield began
        assert thread.is_alive(), "the writer has had all its turns before the other one had one"
    finally:
        stop.set()
        thread.join()


def test_a_writer_gets_its_turn_beside_one_that_writes_all_the_time(tmp_path):
    path = tmp_path / "busy.db"
    connection = connect_file(path, "normal", 30.0)
    for _ in range(5):
        with a_busy_writer(path) as began:
            assert began.wait(10)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    connection.close()


def test_the_wait_for_a_lock_ends(tmp_path):
    path = tmp_path / "held.db"
    holder, waiter = connect_file(path, "normal", 1.0), connect_file(path, "normal", 0.05)
    holder.execute("BEGIN IMMEDIATE")
    for _ in range(2):  # each wait has the whole time
        began = time.monotonic()
        with pytest.raises(apsw.BusyError):
            waiter.execute("BEGIN IMMEDIATE")
        assert time.monotonic() - began >= 0.05
    holder.execute("ROLLBACK")
    waiter.execute("BEGIN IMMEDIATE")
    holder.close()
    waiter.close(True)
