"""A disk that is full, fails or lies, and a database that another program locks.

No acknowledged write is lost, and no lost write is acknowledged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from tests.conformance.suite import AT_ONCE_US, LEASE_US, T0, Held, found, hold_one, new_run, post, serving
from tests.unit.store_tools import FaultyDisk, raw

from perdure.core.events import Failure, RunFailed, RunReopened, ThoughtRecorded
from perdure.errors import Conflict, StoreCorrupt, StoreUnavailable
from perdure.store.api import Committed, Refused, Reopen, RowChange
from perdure.store.open import open_store
from perdure.store.sqlite.store import SqliteStore


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    faulty = FaultyDisk()
    yield faulty
    faulty.unregister()


@pytest.fixture
def store(tmp_path: Path, disk: FaultyDisk) -> Iterator[SqliteStore]:
    opened = SqliteStore("sqlite:", tmp_path / "journal.db")
    yield opened
    opened.close()


def test_after_a_failed_fsync_the_append_is_not_acknowledged_and_the_same_one_goes_in_later(store: SqliteStore, disk: FaultyDisk) -> None:
    append = hold_one(store, "r").append(ThoughtRecorded("x"))
    disk.fail_syncs = 1
    with pytest.raises(StoreUnavailable, match="the disk reported an error"):
        store.append([append])
    assert disk.fail_syncs == 0
    assert len(store.read("r")) == 2
    assert store.append([append]) == [Committed()]
    assert store.read("r")[-1].event_id == append.events[-1].event.event_id


def test_a_file_whose_last_pages_are_missing_is_damaged_and_another_try_does_not_help(tmp_path: Path) -> None:
    """As after a power loss, on a disk that did not sync a checkpoint. SQLite reads the pages of a long text past its cache: a short read."""
    whole, short = tmp_path / "whole" / "journal.db", tmp_path / "short" / "journal.db"
    whole.parent.mkdir()
    with closing(SqliteStore("sqlite:", whole)) as store:
        store.append([hold_one(store, "r").append(ThoughtRecorded("long" * 100_000))])
        with closing(raw(whole)) as other:
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall() == [(0, 0, 0)]
            other.execute("CREATE TABLE later (x)")  # in the log: page 1, with the size of the database
        shutil.copytree(whole.parent, short.parent)
    (short.parent / "journal.db-shm").unlink()
    os.truncate(short, os.path.getsize(short) - 10 * 8192)
    with (
        pytest.raises(StoreCorrupt, match=r"is damaged .*pages are missing.*restore a backup"),
        closing(SqliteStore("sqlite:", short)) as opened,
    ):
        opened.read("r")


def test_a_connection_whose_commit_failed_is_not_used_again(store: SqliteStore, disk: FaultyDisk) -> None:
    append = hold_one(store, "r").append(ThoughtRecorded("x"))
    opened: list[str] = []
    disk.on_open = lambda: opened.append("fresh")
    disk.fail_syncs = 1
    with pytest.raises(StoreUnavailable):
        store.append([append])
    assert opened == ["fresh"]


def test_a_commit_that_took_effect_but_reported_an_error_is_found_and_acknowledged(store: SqliteStore) -> None:
    held = hold_one(store, "r")
    append = held.append(ThoughtRecorded("x"), row=RowChange("running"))
    writer = store._database._writer
    assert writer is not None
    writer.set_wal_hook(lambda *_: apsw.SQLITE_IOERR)  # called after the commit: SQLite passes its error on to COMMIT
    assert store.append([append]) == [Committed()]
    assert store._database._writer is not writer
    assert len(store.read("r")) == 3


def test_a_claim_and_a_post_whose_commit_reported_an_error_are_found(store: SqliteStore) -> None:
    store.register("w", "host:1", 1, T0)
    store.create_run(new_run("r"))
    writer = store._database._writer
    assert writer is not None
    writer.set_wal_hook(lambda *_: apsw.SQLITE_IOERR)
    (claimed,) = store.claim("w", serving("a"), 1, T0)
    assert store.append([Held.of(claimed).append(ThoughtRecorded("x"))]) == [Committed()]
    for expected in (False, True):
        if expected:
            store.unregister("w", T0)
        assert store._database._writer is not None
        store._database._writer.set_wal_hook(lambda *_: apsw.SQLITE_IOERR)
        assert post(store, "r") is expected


def test_a_reopening_whose_commit_reported_an_error_is_found_or_has_not_happened(store: SqliteStore, disk: FaultyDisk) -> None:
    held = hold_one(store, "r")
    failed = RunFailed(Failure("error", "E", "x"))
    assert store.append([held.append(failed, row=RowChange("failed"))]) == [Committed()]
    plan = Reopen("r", 3, [(RunReopened("ann", 2), None, "a" * 32)])
    disk.fail_syncs = 1
    with pytest.raises(StoreUnavailable):
        store.reopen([plan], now=T0)
    assert len(store.read("r")) == 3
    assert store._database._writer is not None
    store._database._writer.set_wal_hook(lambda *_: apsw.SQLITE_IOERR)  # the commit takes effect, and reports an error
    store.reopen([plan], now=T0)
    assert store.read("r")[-1].event_id == "a" * 32
    row = store.get("r")
    assert row is not None
    assert row.status == "queued"
    with pytest.raises(Conflict):
        store.reopen([plan], now=T0)


def test_when_another_worker_has_taken_the_run_meanwhile_the_append_is_refused(
    store: SqliteStore, disk: FaultyDisk, tmp_path: Path
) -> None:
    other = open_store(f"sqlite:///{tmp_path}/journal.db")
    append = hold_one(store, "r").append(ThoughtRecorded("x"))
    now = T0 + LEASE_US + 1

    def steal() -> None:
        # In the moment between the failed commit and the look: the old connection is closed, the new one not yet open.
        other.register("w2", "host:2", 2, now)
        assert [other.reap("w2", lease_us, now) for lease_us in (LEASE_US, AT_ONCE_US)] == [0, 1]
        other.claim("w2", serving("a"), 1, now)

    disk.on_open = steal
    disk.fail_syncs = 1
    (answer,) = store.append([append])
    assert isinstance(answer, Refused)
    assert "another worker has written event 3" in answer.why
    other.close()


def test_a_full_disk_is_said_nothing_is_lost_and_with_room_again_it_goes_on(store: SqliteStore, disk: FaultyDisk) -> None:
    append = hold_one(store, "r").append(ThoughtRecorded("x"))
    disk.full = True
    with pytest.raises(StoreUnavailable, match="disk full; nothing was written: make room and try again"):
        store.append([append])
    with pytest.raises(StoreUnavailable, match="disk full"):
        store.renew("w", T0 + 1)
    assert len(store.read("r")) == 2
    disk.full = False
    assert store.append([append]) == [Committed()]


def test_a_disk_that_fills_up_in_the_middle_of_a_large_transaction_rolls_it_back(store: SqliteStore, disk: FaultyDisk) -> None:
    # More than SQLite's page cache holds, so that it has to write before COMMIT.
    append = hold_one(store, "r").append(ThoughtRecorded("x"), blobs=tuple(bytes([n]) * 1_000_000 for n in range(8)))
    disk.full = True
    with pytest.raises(StoreUnavailable, match="disk full"):
        store.append([append])
    disk.full = False
    assert store.append([append]) == [Committed()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "perdure-test", str(folder)], capture_output=True).returncode != 0
    ):
        pytest.skip("mounting a small file system needs privileges that this user does not have")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # lazily: after a failure the store is still open there


def test_a_file_system_that_really_is_full_and_has_room_again(small_disk: Path) -> None:
    store = open_store(f"sqlite:///{small_disk}/journal.db")
    held = hold_one(store, "r")
    ballast = small_disk / "ballast"
    room = os.statvfs(small_disk)
    ballast.write_bytes(b"x" * (room.f_bavail * room.f_frsize))
    append = held.append(ThoughtRecorded("x" * 50_000))
    with pytest.raises(StoreUnavailable, match="disk full"):
        store.append([append])
    assert found(store, "r").seq == 2
    ballast.unlink()
    assert store.append([append]) == [Committed()]
    store.close()


def test_a_database_that_somebody_else_keeps_locked_is_unavailable_and_nothing_is_written(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/journal.db", busy_s=0.05)
    append = hold_one(store, "r").append(ThoughtRecorded("x"))
    with raw(tmp_path / "journal.db") as other:
        other.execute("UPDATE perdure_workers SET pid = 2")
        with pytest.raises(StoreUnavailable, match="locked by another process; nothing was written"):
            store.append([append])
    assert store.append([append]) == [Committed()]
    store.close()


def test_a_fault_in_one_part_of_a_transaction_leaves_no_transaction_behind(store: SqliteStore) -> None:
    held = hold_one(store, "r")

    def interrupted(connection: object) -> tuple[object, None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.transact(held.append(ThoughtRecorded("x")), interrupted)  # type: ignore[arg-type]
    assert store.append([held.append(ThoughtRecorded("x"))]) == [Committed()]
