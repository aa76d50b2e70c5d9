"""The bell on PostgreSQL: heard soon and once, also after its connection broke.

It is only a hint, and costs little.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.suite import T0, new_run, serving
from tests.servers.pooler import Pooler
from tests.servers.postgres import Server
from tests.unit.postgres_tools import empty, eventually, opened, raw

from perdure.errors import StoreUnavailable
from perdure.store.postgres import bell as bells
from perdure.store.postgres import claims
from perdure.store.postgres.bell import NotifyBell
from perdure.store.postgres.store import PostgresStore


class Ears:
    """Counts what it hears."""

    def __init__(self) -> None:
        self.heard = 0
        self.ringing = threading.Event()

    def __call__(self) -> None:
        self.heard += 1
        self.ringing.set()


@pytest.fixture
def url(postgres: Server) -> str:
    return empty(postgres)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    store = opened(url)
    yield store
    store.close()


@pytest.fixture
def other(store: PostgresStore) -> Iterator[PostgresStore]:
    """The same journal in another process, as far as the doorbell can tell."""
    other = opened(store.url)
    yield other
    other.close()


def listening_backend(url: str) -> list[int]:
    with raw(url) as connection:
        # The connection has run many statements since LISTEN. It holds the locks of workers, or has run nothing else
        # yet.
        rows = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND (query LIKE 'LISTEN%' OR pid IN "
            "(SELECT pid FROM pg_locks WHERE locktype = 'advisory'))"
        ).fetchall()
    return [pid for (pid,) in rows]


def test_a_ring_is_heard_elsewhere_at_once(store: PostgresStore, other: PostgresStore) -> None:
    ears = Ears()
    store.listen(ears)
    other.create_run(new_run("r"))
    assert ears.ringing.wait(60)
    assert store._notify.listening


def test_ones_own_ring_is_heard_once(store: PostgresStore) -> None:
    ears = Ears()
    store.listen(ears)
    for n in range(3):
        store.create_run(new_run(f"r{n}"))
    time.sleep(0.2)  # as long as its own notification would take to come back
    assert ears.heard == 3


def test_a_thousand_rings_are_a_few_notifications(store: PostgresStore) -> None:
    store.listen(Ears())
    with raw(store.url) as outside:
        outside.execute("LISTEN perdure")
        for _ in range(1000):
            store._notify.ring()
        notes = list(outside.notifies(timeout=0.5))
    assert 1 <= len(notes) < 200


def test_a_ring_in_another_schema_of_the_database_is_none_of_ours(postgres: Server, store: PostgresStore) -> None:
    ears = Ears()
    store.listen(ears)
    elsewhere = opened(empty(postgres))
    elsewhere.create_run(new_run("r"))
    elsewhere.close()
    assert not ears.ringing.wait(0.2)


def test_a_ring_that_arrives_together_with_an_answer_is_heard(store: PostgresStore) -> None:
    """The driver puts it aside when it reads the answer: then there is nothing left in the socket to wait for."""
    bell = NotifyBell(store._connections, store.schema)
    bell._wake = os.pipe2(os.O_NONBLOCK)
    connection = store._connections.open()
    try:
        connection.execute("LISTEN perdure")
        with raw(store.url) as outside:
            outside.execute("SELECT pg_notify('perdure', %s)", (f"{store.schema} somebody",))
        eventually(lambda: bool(connection.execute("SELECT 1").fetchall()) and len(connection._notifies_backlog or ()))
        assert bell._hears(connection, 0.0)
        assert not bell._hears(connection, 0.0)
    finally:
        connection.close()
        for descriptor in bell._wake:
            os.close(descriptor)


def test_a_doorbell_whose_connection_was_ended_comes_back_and_rings_for_what_it_may_have_missed(
    store: PostgresStore, other: PostgresStore
) -> None:
    ears = Ears()
    store.listen(ears)
    (pid,) = listening_backend(store.url)
    with raw(store.url) as outside:
        outside.execute("SELECT pg_terminate_backend(%s)", (pid,))
    assert ears.ringing.wait(60)  # no process has rung
    eventually(lambda: store._notify.listening)
    eventually(lambda: [new for new in listening_backend(store.url) if new != pid])
    before = ears.heard
    other.create_run(new_run("r"))
    eventually(lambda: ears.heard > before)


def test_closing_ends_the_thread_and_leaves_no_descriptor(url: str) -> None:
    opened(url).close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        store = opened(url)
        store.listen(Ears())
        store.create_run(new_run("r"))
        store.register("w", "host:1", 1, T0)
        store.unregister("w", T0)
        store.close()
    assert [thread.name for thread in threading.enumerate() if thread.name == "perdure doorbell"] == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    with raw(url) as outside:
        eventually(
            lambda: (
                outside.execute(
                    "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'perdure' AND datname = current_database()"
                ).fetchone()
                == (True,)
            )
        )


def test_a_doorbell_that_nobody_listens_to_has_no_thread_and_rings_all_the_same(store: PostgresStore, other: PostgresStore) -> None:
    ears = Ears()
    other.listen(ears)
    store.create_run(new_run("r"))
    assert ears.ringing.wait(60)
    assert store._notify._thread is None


def test_a_forked_child_closes_nothing_of_its_parents_and_keeps_nothing_of_it(store: PostgresStore, other: PostgresStore) -> None:
    ears = Ears()
    store.listen(ears)
    store.register("w", "host:1", 1, T0)
    eventually(lambda: "w" in store._notify._held)
    (pid,) = listening_backend(store.url)
    sockets = {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if "socket:" in _target(entry)}
    child = os.fork()
    if child == 0:
        try:
            left = {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if "socket:" in _target(entry)}
            store.close()
            os._exit(len(left & sockets))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) <= len(sockets) - 2  # the doorbell's and the idle one's are closed in it
    other.create_run(new_run("r"))
    assert ears.ringing.wait(60)
    assert listening_backend(store.url) == [pid]
    assert store.get("r") is not None


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""


def session_of(url: str, worker: str) -> Any:
    with raw(url) as outside:
        row = outside.execute("SELECT session FROM perdure_workers WHERE worker = %s", (worker,)).fetchone()
    return row and row[0]


def test_a_worker_that_registers_while_the_doorbell_is_there_already_is_seen_by_its_session(store: PostgresStore) -> None:
    """Its lock may be taken before its row is there."""
    store.listen(Ears())
    eventually(lambda: store._notify.listening)
    for n in range(8):
        store.register(f"w{n}", "host:1", 1, T0)
    eventually(lambda: all(session_of(store.url, f"w{n}") for n in range(8)))
    with raw(store.url) as outside:
        held = outside.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()
        assert held == (8,)
        for n in range(8):
            store.unregister(f"w{n}", T0)
        eventually(lambda: outside.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,))


def test_a_worker_whose_row_was_cleared_away_is_seen_by_its_session_again_once_it_has_registered(store: PostgresStore) -> None:
    store.register("w", "host:1", 1, T0)
    eventually(lambda: session_of(store.url, "w"))
    with raw(store.url) as outside:
        outside.execute("DELETE FROM perdure_workers")
    store.register("w", "host:1", 1, T0)
    eventually(lambda: session_of(store.url, "w"))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_behind_a_pooler_no_session_is_taken_for_ours(url: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bells, "_PROBE_S", 0.1)
    opened(url).close()
    with Pooler(url, size=size) as pooler:
        for _ in range(4):
            store = opened(pooler.url(url))
            ears = Ears()
            store.listen(ears)
            store.register("w", "host:1", 1, T0)
            time.sleep(0.05)
            assert not store._notify.listening
            assert session_of(url, "w") is False
            assert store.facts()["doorbell"] == "not listening in this process"
            outside = Ears()
            direct = opened(url)
            direct.listen(outside)
            store.create_run(new_run(f"r{time.monotonic_ns()}"))  # it cannot hear, and is heard
            assert outside.ringing.wait(60)
            direct.close()
            store.unregister("w", T0)
            store.close()
    with raw(url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)


def test_a_worker_that_cannot_have_its_connection_back_says_so_and_is_judged_by_its_lease_alone(
    store: PostgresStore, other: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives and renews: that its lock is missing must not count against it."""
    monkeypatch.setattr(claims, "GRACE_S", 0.3)
    store.create_run(new_run("r"))
    store.register("w", "host:1", 1, T0)
    eventually(lambda: session_of(store.url, "w"))
    assert store.claim("w", serving("a"), 1, T0)
    real = store._connections.open

    def refused() -> Any:
        raise StoreUnavailable("no connection left")

    monkeypatch.setattr(store._connections, "open", refused)
    with raw(store.url) as outside:
        outside.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
    eventually(lambda: session_of(store.url, "w") is False)
    for _ in range(4):
        assert other.reap("x", 30_000_000, T0) == 0
        time.sleep(0.15)
    monkeypatch.setattr(store._connections, "open", real)
    eventually(lambda: session_of(store.url, "w"))


def test_an_error_that_nobody_thought_of_does_not_end_the_doorbell(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """T13: too many open files, say."""
    store.listen(Ears())
    eventually(lambda: store._notify.listening)
    real, failures = store._connections.open, [OSError(24, "Too many open files"), ValueError("an error of ours")]
    monkeypatch.setattr(store._connections, "open", lambda: _raise(failures.pop()) if failures else real())
    with raw(store.url) as outside:
        outside.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        )
    eventually(lambda: not failures and store._notify.listening)


def _raise(error: Exception) -> Any:
    raise error
