"""Which workers are alive, over several machines.

On this machine a lock file proves a death; elsewhere a worker whose connection is lost for long counts as silent.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.suite import LEASE_US, T0, claim_event, found, hold_one, serving
from tests.servers.pooler import Pooler
from tests.servers.postgres import Server
from tests.unit.postgres_tools import empty, eventually, opened, raw

from perdure.core.events import RunClaimed, ThoughtRecorded
from perdure.errors import Conflict
from perdure.store.api import Committed, Refused
from perdure.store.postgres import bell as bells
from perdure.store.postgres import claims
from perdure.store.postgres.liveness import MachineLocks
from perdure.store.postgres.store import PostgresStore


@pytest.fixture
def url(postgres: Server) -> str:
    return empty(postgres)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    store = opened(url)
    yield store
    store.close()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], PostgresStore]]:
    """Opens the journal as a process of another machine does, where the lock files of this one are not seen."""
    made: list[PostgresStore] = []

    def make(url: str) -> PostgresStore:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(folder))
            made.append(opened(url))
        return made[-1]

    yield make
    for each in made:
        each.close()


def folder_of(store: PostgresStore) -> Path:
    locks = store._liveness
    assert isinstance(locks, MachineLocks)
    return locks._folder


# -- lock files ------------------------------------------------------------------------------------------------------------------------------
def test_a_worker_of_this_machine_that_is_gone_is_proven_dead_at_once(store: PostgresStore) -> None:
    zombie = opened(store.url)
    held = hold_one(zombie, "r")
    store.register("w2", "host:2", 2, T0)
    assert store.reap("w2", LEASE_US, T0) == 0
    zombie._liveness.close()  # as the kernel does
    assert store.reap("w2", LEASE_US, T0) == 1
    assert isinstance(zombie.append([held.append(ThoughtRecorded("x"))])[0], Refused)
    store.claim("w2", serving("a"), 1, T0)
    assert claim_event(store, "r") == RunClaimed("w2", name="host:2", takeover=True, proven_dead=True)
    zombie.close()


def test_the_folder_is_of_this_user_alone_and_of_this_database_and_schema(postgres: Server, store: PostgresStore) -> None:
    store.register("w", "host:1", 1, T0)
    folder = folder_of(store)
    assert folder.parent == Path(tempfile.gettempdir())
    assert str(os.getuid()) in folder.name
    assert folder.stat().st_mode & 0o777 == 0o700
    another = opened(empty(postgres))
    assert folder_of(another) != folder
    another.close()


def test_the_same_worker_twice_on_one_machine_is_refused(store: PostgresStore) -> None:
    store.register("w", "host:1", 1, T0)
    other = opened(store.url)
    with pytest.raises(Conflict, match="already registered by a live process"):
        other.register("w", "host:1", 1, T0)
    other.close()


@pytest.mark.parametrize("trouble", ["another user's", "writable for all", "a file", "a link", "no temporary folder"])
def test_a_folder_that_is_not_ours_proves_nothing_and_hinders_nobody(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = opened(url)
    folder = folder_of(store)
    spoil(folder, trouble, monkeypatch)
    caplog.set_level(logging.WARNING, "perdure.store")
    held = hold_one(store, "r")
    assert [record for record in caplog.records if str(folder) in record.getMessage()]
    assert list(folder.glob("*.lock")) == []
    if folder.is_dir():
        (folder / "w.lock").touch()  # a forged sign that the worker has died
    assert not store._liveness.is_dead("w")
    store.renew("w", T0)
    other = opened(url)
    other.register("w2", "host:2", 2, T0)
    assert other.reap("w2", LEASE_US, T0) == 0
    assert store.append([held.append(ThoughtRecorded("x"))]) == [Committed()]
    other.close()
    store.unregister("w", T0)
    store.close()


def spoil(folder: Path, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match trouble:
        case "another user's":
            folder.mkdir(0o700)
            if os.geteuid() == 0:
                os.chown(folder, 65534, 65534)
            else:
                uid = os.geteuid()
                monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        case "writable for all":
            folder.mkdir()
            folder.chmod(0o777)
        case "a file":
            folder.touch()
        case "a link":
            (folder.parent / "aim").mkdir()
            folder.symlink_to(folder.parent / "aim")
        case "no temporary folder":
            folder.parent.rmdir()


def test_lock_files_that_a_cleaner_has_removed_come_back_with_the_next_sign_of_life(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = opened(url)
    store.register("w", "host:1", 1, T0)
    (folder_of(store) / "w.lock").unlink()
    folder_of(store).rmdir()
    assert not store._liveness.is_dead("w")
    store.renew("w", T0)
    assert (folder_of(store) / "w.lock").exists()
    folder_of(store).rename(tmp_path / "away")
    folder_of(store).touch()
    store.renew("w", T0)  # nothing is lost but time
    store.close()


# -- across machines -------------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "GRACE_S", 0.4)


@pytest.mark.usefixtures("short_grace")
def test_a_worker_elsewhere_whose_connection_is_gone_for_long_loses_its_runs_unproven(
    store: PostgresStore, elsewhere: Callable[[str], PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    far = elsewhere(store.url)
    held = hold_one(far, "r")
    store.register("w2", "host:2", 2, T0)
    eventually(lambda: session(store.url, "w"))
    assert store.reap("w2", LEASE_US, T0) == 0
    far._notify.close()  # its process is gone, its row and its lease are there
    eventually(lambda: store.reap("w2", LEASE_US, T0))
    assert isinstance(far.append([held.append(ThoughtRecorded("x"))])[0], Refused)
    row = found(store, "r")
    assert (row.holder, row.status) == (None, "queued")
    store.claim("w2", serving("a"), 1, row.ready_at or 0)
    assert claim_event(store, "r") == RunClaimed("w2", name="host:2", takeover=True, proven_dead=False)


@pytest.mark.usefixtures("short_grace")
def test_a_worker_elsewhere_that_was_cut_off_for_a_moment_or_gives_other_signs_of_life_keeps_its_runs(
    store: PostgresStore, elsewhere: Callable[[str], PostgresStore]
) -> None:
    far = elsewhere(store.url)
    held = hold_one(far, "r")
    store.register("w2", "host:2", 2, T0)
    eventually(lambda: session(store.url, "w"))
    with raw(store.url) as outside:
        outside.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
    for _ in range(12):  # longer than the grace, and it is back before
        assert store.reap("w2", LEASE_US, T0) == 0
        time.sleep(0.06)
    eventually(lambda: "w" in far._notify._held)
    far._notify.close()  # for ever, but the worker continues to send heartbeats
    for _ in range(12):
        far.renew("w", T0)
        assert store.reap("w2", LEASE_US, T0) == 0
        time.sleep(0.06)
    assert far.append([held.append(ThoughtRecorded("x"))]) == [Committed()]


@pytest.mark.usefixtures("short_grace")
def test_a_worker_behind_a_pooler_is_never_judged_by_its_session(
    store: PostgresStore, elsewhere: Callable[[str], PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bells, "_PROBE_S", 0.1)
    with Pooler(store.url) as pooler:
        far = elsewhere(pooler.url(store.url))
        held = hold_one(far, "r")
        far._notify._attending.wait(60)
        store.register("w2", "host:2", 2, T0)
        for _ in range(12):
            assert store.reap("w2", LEASE_US, T0) == 0
            time.sleep(0.06)
        assert session(store.url, "w") is False
        assert far.append([held.append(ThoughtRecorded("x"))]) == [Committed()]
        far.close()


@pytest.mark.usefixtures("short_grace")
def test_a_worker_elsewhere_that_is_gone_and_holds_nothing_costs_nothing(
    store: PostgresStore, elsewhere: Callable[[str], PostgresStore]
) -> None:
    far = elsewhere(store.url)
    far.register("w", "host:1", 1, T0)
    store.register("w2", "host:2", 2, T0)
    eventually(lambda: session(store.url, "w"))
    far._notify.close()
    commits = store._database.commits
    for _ in range(6):  # longer than the grace
        assert store.reap("w2", LEASE_US, T0) == 0
        time.sleep(0.1)
    assert store._database.commits == commits


# -- many workers ----------------------------------------------------------------------------------------------------------------------------
def test_of_many_workers_each_looks_at_the_others_now_and_then(store: PostgresStore, elsewhere: Callable[[str], PostgresStore]) -> None:
    for n in range(11):
        store.register(f"w{n}", "host:1", 1, T0)
    zombie = opened(store.url)
    hold_one(zombie, "r")
    begun_s = time.monotonic()
    assert store.reap("w0", LEASE_US, T0) == 0
    zombie._liveness.close()  # as the kernel does
    eventually(lambda: store.reap("w0", LEASE_US, T0))
    assert time.monotonic() - begun_s >= 12 * 0.05 * 0.5
    newcomer = elsewhere(store.url)
    newcomer.register("new", "host:2", 2, T0)
    with raw(store.url) as outside:
        outside.execute("UPDATE perdure_runs SET holder = 'nobody', ready_at = NULL")
    assert newcomer.reap("new", LEASE_US, T0) == 1  # the first look is at once
    zombie.close()


@pytest.mark.usefixtures("short_grace")
def test_whoever_finds_a_worker_cut_off_looks_again_after_the_grace_however_rare_its_turns_are(
    store: PostgresStore, elsewhere: Callable[[str], PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_SPREAD_S", 100.0)
    far = elsewhere(store.url)
    hold_one(far, "r")
    for n in range(11):
        store.register(f"w{n}", "host:1", 1, T0)
    eventually(lambda: session(store.url, "w"))
    far._notify.close()
    assert store.reap("w0", LEASE_US, T0) == 0
    begun_s = time.monotonic()
    eventually(lambda: store.reap("w0", LEASE_US, T0))
    assert time.monotonic() - begun_s >= 0.3
    assert found(store, "r").holder is None


def test_who_is_alive_is_shown_by_the_clock_of_the_database_and_nobody_is_judged_by_it(
    store: PostgresStore, elsewhere: Callable[[str], PostgresStore]
) -> None:
    """Whatever a worker says about the time."""
    far = elsewhere(store.url)
    hold_one(far, "r")
    store.register("w2", "host:2", 2, T0)
    assert store.reap("w2", LEASE_US, 2 * 10**15) == 0
    assert [(row.worker, row.alive) for row in store.workers(2 * 10**15, LEASE_US)] == [("w", True), ("w2", True)]
    with raw(store.url) as outside:
        outside.execute("UPDATE perdure_workers SET beat_at = beat_at - %s WHERE worker = 'w'", (LEASE_US + 1,))
    assert [(row.worker, row.alive) for row in store.workers(T0, LEASE_US)] == [("w", False), ("w2", True)]
    assert store.reap("w2", LEASE_US, T0) == 0, "a server's clock that was set makes nobody dead"
    assert store.reap("w2", 1, T0) == 1


def test_workers_that_have_been_silent_for_very_long_and_hold_nothing_are_forgotten(
    store: PostgresStore, elsewhere: Callable[[str], PostgresStore]
) -> None:
    far = elsewhere(store.url)
    hold_one(far, "r", worker="holds")
    far.register("idle", "host:1", 1, T0)
    store.register("w", "host:2", 2, T0)
    with raw(store.url) as outside:
        outside.execute("UPDATE perdure_workers SET beat_at = 0 WHERE worker IN ('holds', 'idle')")
        outside.execute("UPDATE perdure_runs SET holder = 'holds'")
    store._count(LEASE_US)
    assert store._notify.worker_count == 1  # a silent worker takes no turns
    assert sorted(row.worker for row in store.workers(T0, LEASE_US)) == ["holds", "w"]


def session(url: str, worker: str) -> Any:
    with raw(url) as outside:
        row = outside.execute("SELECT session FROM perdure_workers WHERE worker = %s", (worker,)).fetchone()
    return row and row[0]
