"""The kernel shows which workers are dead: real processes, real signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conformance.suite import AT_ONCE_US, LEASE_US, T0, Held, claim_event, found, hold_one, new_run, post, serving
from tests.unit.store_tools import end, first_line, python, raw

from perdure.core.events import RunClaimed, RunPaused, ThoughtRecorded
from perdure.errors import AlreadyRunning, Conflict, InvalidInput
from perdure.store.api import Committed, Store
from perdure.store.claims import LONG_AGO
from perdure.store.open import open_store

_HOLD = """
import os, sys, time
from perdure.store.open import open_store
from tests.conformance.suite import serving
store = open_store(f"sqlite:///{sys.argv[1]}")
store.register("victim", f"host:{os.getpid()}", os.getpid(), int(sys.argv[2]))
store.claim("victim", serving("a"), 9, int(sys.argv[2]))
"""
_FAIL_TO_LEAVE = """
from perdure.errors import StoreUnavailable
def fail(*args, **options): raise StoreUnavailable("disk full")
plain, type(store._database).write = type(store._database).write, fail
try:
    store.unregister("victim", int(sys.argv[2]))
except StoreUnavailable:
    type(store._database).write = plain
    store.close()
"""
_WAIT = "print('ready', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{path}")
    opened.register("w", "host:1", 1, T0)
    opened.create_run(new_run("r"))
    yield opened
    opened.close()


def test_a_killed_worker_is_proven_dead_at_once_and_its_lock_file_goes(store: Store, path: Path) -> None:
    process = python(_HOLD + _WAIT, path, T0)
    assert first_line(process) == "ready"
    lock = Path(f"{path}-workers/victim.lock")
    assert store.reap("w", LEASE_US, T0 + 1) == 0
    assert {row.worker: row.alive for row in store.workers(T0, LEASE_US)} == {"victim": True, "w": True}
    assert lock.exists()
    end(process)
    assert {row.worker: row.alive for row in store.workers(T0, LEASE_US)} == {"victim": False, "w": True}
    assert store.reap("w", LEASE_US, T0 + 1) == 1
    assert not lock.exists()
    assert [row.worker for row in store.workers(T0, LEASE_US)] == ["w"]
    (claimed,) = store.claim("w", serving("a"), 1, T0 + 1)
    assert claim_event(store, "r") == RunClaimed("w", name="host:1", takeover=True, proven_dead=True)
    assert (claimed.row.crashes, claimed.lease.epoch) == (1, 2)


def test_what_is_taken_from_a_dead_worker_before_anybody_has_noticed_its_death_knows_what_else_it_held(store: Store, path: Path) -> None:
    for run_id in ("r2", "r3"):
        store.create_run(new_run(run_id))
    process = python(_HOLD + _WAIT, path, T0)
    first_line(process)
    end(process)
    assert post(store, "r") is True, "its holder is dead, so that it is in the journal at once"
    (claimed,) = store.claim("w", serving("a"), 1, T0 + 1, run_id="r2")
    assert (claimed.row.crashes, claimed.row.lost_with, claim_event(store, "r2").lost_with) == (1, 1, 1)
    store.claim("w", serving("a"), 1, T0 + 1, run_id="r")
    assert claim_event(store, "r").lost_with == 2


def test_who_posts_to_a_run_of_a_dead_worker_sees_that_no_worker_holds_it(store: Store, path: Path) -> None:
    """Then post is appended to the journal at once.

    An answer about an older state must not be: see Control.resolve.
    """
    process = python(_HOLD + _WAIT, path, T0)
    first_line(process)
    seen: list[str | None] = []
    say = RunPaused("ann")
    store.post("r", None, say, event_id="0" * 31 + "1", now=T0, expect=lambda row: seen.append(row.holder))
    end(process)
    store.post("r", None, say, event_id="0" * 31 + "2", now=T0, expect=lambda row: seen.append(row.holder))
    assert seen == ["victim", None]


def test_a_lock_file_that_is_gone_proves_nothing_and_the_lease_decides(store: Store, path: Path) -> None:
    process = python(_HOLD + _WAIT, path, T0)
    first_line(process)
    Path(f"{path}-workers/victim.lock").unlink()
    assert store.reap("w", LEASE_US, T0 + 1) == 0, "it lives"
    end(process)
    assert store.reap("w", LEASE_US, T0 + 1) == 0
    assert store.reap("w", AT_ONCE_US, T0 + LEASE_US + 1) == 1
    store.claim("w", serving("a"), 1, T0 + LEASE_US + 1)
    assert claim_event(store, "r").proven_dead is False


def test_a_wall_clock_that_was_set_just_before_the_first_look_takes_no_run_from_a_worker_that_lives(store: Store, path: Path) -> None:
    """By the wall clock the worker has been silent for an hour, and this process has never seen it.

    But its process exists.
    """
    process = python(_HOLD + _WAIT, path, T0)
    first_line(process)
    an_hour_later = T0 + 3_600_000_000
    assert an_hour_later - T0 > LONG_AGO * LEASE_US
    assert store.reap("w", LEASE_US, an_hour_later) == 0, "it lives"
    Path(f"{path}-workers/victim.lock").unlink()  # as after a power loss, when the file had not reached the disk
    assert store.reap("w", LEASE_US, an_hour_later) == 1
    end(process)


def test_a_worker_that_could_not_sign_off_lives_as_long_as_its_process(store: Store, path: Path) -> None:
    """A thread of its tool may still run after the app was closed.

    If the lock became free, it would prove a false death.

    Then "not found" would be believed about the tool's call, and a `once` call would be made again.
    """
    process = python(_HOLD + _FAIL_TO_LEAVE + _WAIT, path, T0)
    first_line(process)
    assert store.reap("w", LEASE_US, T0 + 1) == 0, "its process is there"
    end(process)
    assert store.reap("w", LEASE_US, T0 + 1) == 1


def test_a_worker_whose_lock_file_was_removed_takes_its_lock_again_with_its_next_sign_of_life(store: Store, path: Path) -> None:
    hold_one(store, "r")
    lock = Path(f"{path}-workers/w.lock")
    lock.unlink()
    store.renew("w", T0 + 1)
    assert lock.exists()
    store.register("w2", "host:2", 2, T0)
    assert store.reap("w2", LEASE_US, T0 + 1) == 0


def test_a_worker_that_registers_again_keeps_its_lock_or_takes_it_again(store: Store, path: Path) -> None:
    hold_one(store, "r")
    lock = Path(f"{path}-workers/w.lock")
    with pytest.raises(InvalidInput, match="surrogate"):
        store.register("w", "host:\ud800", 1, T0)
    assert lock.exists(), "what it could not say about itself is no reason to count as dead"
    lock.unlink()
    store.register("w", "host:1", 1, T0 + 1)
    assert lock.exists()
    store.register("w2", "host:2", 2, T0)
    assert store.reap("w2", LEASE_US, T0 + 1) == 0


def test_a_sign_of_life_that_comes_while_the_reaper_waits_for_the_lock_still_counts(store: Store, path: Path) -> None:
    hold_one(store, "r")
    store.register("w2", "host:2", 2, T0)
    now = T0 + LEASE_US + 1
    with ThreadPoolExecutor() as pool:
        with raw(path) as other:
            other.execute("UPDATE perdure_workers SET beat_at = ?", (now,))
            reaped = pool.submit(store.reap, "w2", LEASE_US, now)  # sees the old beat, and waits for the write lock
            time.sleep(0.1)
        assert reaped.result() == 0
    assert found(store, "r").holder == "w"


def test_a_run_of_a_killed_worker_is_taken_over_by_its_id_without_waiting_for_anybody(store: Store, path: Path) -> None:
    process = python(_HOLD + _WAIT, path, T0)
    first_line(process)
    with pytest.raises(AlreadyRunning, match=f"host:{process.pid}"):
        store.claim("w", serving("a"), 1, T0, run_id="r")
    assert post(store, "r") is False
    end(process)
    store.claim("w", serving("a"), 1, T0, run_id="r")
    assert claim_event(store, "r") == RunClaimed("w", name="host:1", takeover=True, proven_dead=True)
    assert [row.run_id for row in store.inbox("w")] == ["r"]  # post to the dead worker's run is not lost


def test_post_to_a_run_of_a_killed_worker_goes_into_its_journal(store: Store, path: Path) -> None:
    process = python(_HOLD + _WAIT, path, T0)
    first_line(process)
    end(process)
    assert post(store, "r", now=T0 + 5) is True
    row = found(store, "r")
    assert (row.holder, row.ready_at, row.seq) == (None, T0 + 5, 3)
    store.claim("w", serving("a"), 1, T0 + 5)
    assert claim_event(store, "r") == RunClaimed("w", name="host:1", takeover=True, proven_dead=True)


def test_a_stopped_worker_keeps_its_lock_loses_its_lease_and_is_refused_when_it_wakes_up(store: Store, path: Path) -> None:
    late = """
from perdure.core.events import ThoughtRecorded
from tests.conformance.suite import Held
held = Held.of(store.claim("victim", serving("b"), 1, int(sys.argv[2]))[0])
print("ready", flush=True)
sys.stdin.readline()
print(type(store.append([held.append(ThoughtRecorded("late"))])[0]).__name__, flush=True)
"""
    store.create_run(new_run("r2", agent="b"))
    process = python(_HOLD + late, path, T0)
    first_line(process)
    os.kill(process.pid, signal.SIGSTOP)
    now = T0 + LEASE_US + 1
    store.renew("w", now)
    assert [store.reap("w", lease_us, now) for lease_us in (LEASE_US, AT_ONCE_US)] == [0, 2]
    store.claim("w", serving("a", "b"), 2, now)
    assert claim_event(store, "r2") == RunClaimed("w", name="host:1", takeover=True, proven_dead=False, lost_with=1)
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert first_line(process) == "Refused"
    end(process)


@pytest.mark.parametrize(
    "child", ["pid = os.fork()\nif pid == 0: time.sleep(600)\n", "import subprocess\npid = subprocess.Popen(['sleep', '600']).pid\n"]
)
def test_a_child_of_a_tool_does_not_keep_a_dead_worker_alive(store: Store, path: Path, child: str) -> None:
    process = python(_HOLD + child + "print(pid, flush=True)\ntime.sleep(600)\n", path, T0)
    pid = int(first_line(process))
    try:
        assert store.reap("w", LEASE_US, T0 + 1) == 0
        # Not communicate(): the child has inherited the pipes and would keep us waiting.
        process.kill()
        process.wait()
        os.kill(pid, 0)
        deadline = time.monotonic() + 60  # a child that is between fork and exec still has the lock for a moment
        while store.reap("w", LEASE_US, T0 + 1) == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found(store, "r").holder is None
    finally:
        os.kill(pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def test_a_forked_child_that_leaves_does_not_release_its_parents_lock(store: Store) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert [(row.worker, row.alive) for row in store.workers(T0, LEASE_US)] == [("w", True)]


def test_asking_whether_a_worker_lives_does_not_disturb_it(store: Store, path: Path) -> None:
    other = open_store(f"sqlite:///{path}")
    held = hold_one(store, "r2")
    for _ in range(3):
        assert all(row.alive for row in other.workers(T0, LEASE_US))
    assert store.append([held.append(ThoughtRecorded("x"))]) == [Committed()]
    other.close()


def test_an_id_that_a_live_worker_has_is_not_given_twice(store: Store, path: Path) -> None:
    other = open_store(f"sqlite:///{path}")
    with pytest.raises(Conflict, match="worker w is already registered by a live process"):
        other.register("w", "host:2", 2, T0)
    other.close()


def test_a_worker_id_cannot_leave_its_folder(store: Store) -> None:
    with pytest.raises(InvalidInput, match="worker id"):
        store.register("../../etc/cron.d/x", "host:1", 1, T0)


def test_a_worker_that_leaves_removes_its_lock_file(store: Store, path: Path) -> None:
    held = Held.of(store.claim("w", serving("a"), 1, T0)[0])
    store.unregister("w", T0)
    assert list(Path(f"{path}-workers").iterdir()) == []
    assert [type(answer).__name__ for answer in store.append([held.append(ThoughtRecorded("x"))])] == ["Refused"]
