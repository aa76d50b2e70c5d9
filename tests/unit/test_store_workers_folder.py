"""The folder of lock files and bells of a SQLite journal: another user who can write to it, or made it, gains nothing.

If the tests run as root, the other user is real: a process of the user `nobody`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.suite import LEASE_US, T0, found, hold_one, new_run, serving
from tests.unit.store_tools import end, first_line, output, python

from perdure.core.events import ThoughtRecorded
from perdure.errors import StoreUnavailable
from perdure.store.api import Committed, Store
from perdure.store.open import open_store

NOBODY = 65534
two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")

_AS_NOBODY = f"import os, sys, time\nos.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})\nfolder, worker = sys.argv[1:]\n"
_SWAP_THE_LOCK = """
os.rename(f"{folder}/{worker}.lock", f"{folder}/{worker}.away")
os.close(os.open(f"{folder}/{worker}.lock", os.O_CREAT | os.O_RDWR, 0o666))
os.chmod(f"{folder}/{worker}.lock", 0o666)
"""
_PLANT_A_PIPE = """
os.rename(f"{folder}/{worker}.lock", f"{folder}/{worker}.away")
os.mkfifo(f"{folder}/{worker}.lock")
os.chmod(f"{folder}/{worker}.lock", 0o666)
"""
_PLANT_A_LINK = """
os.rename(f"{folder}/{worker}.lock", f"{folder}/{worker}.away")
os.close(os.open(f"{folder}/planted", os.O_CREAT | os.O_RDWR, 0o666))
os.symlink(f"{folder}/planted", f"{folder}/{worker}.lock")
"""
_REAP = """
import sys
from perdure.store.open import open_store
from tests.conformance.suite import LEASE_US, T0
store = open_store(f"sqlite:///{sys.argv[1]}")
store.register("second", "host:2", 2, T0)
print(store.reap("second", LEASE_US, T0 + 1))
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """A journal's file in a folder that every user can come to: pytest's own folders are closed to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder / "journal.db"
    shutil.rmtree(folder)


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{path}")
    yield opened
    opened.close()


def workers(path: Path) -> Path:
    return Path(f"{path}-workers")


def attack(code: str, path: Path, worker: str = "w") -> None:
    """What another user does to the lock of a worker in a folder that all users can write to."""
    workers(path).chmod(0o777)
    output(python(_AS_NOBODY + code, workers(path), worker))


def refusal(path: Path) -> str:
    with pytest.raises(StoreUnavailable) as refused:
        open_store(f"sqlite:///{path}").close()
    return refused.value.in_full()


# -- a folder that others can write to -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_can_write_to_is_refused_with_the_way_out(path: Path, store: Store, mode: int) -> None:
    store.register("w", "host:1", 1, T0)
    workers(path).chmod(mode)
    said = refusal(path)
    assert f"{workers(path)} can be written to by other users (mode {mode:o})" in said
    assert said.endswith(f"chmod 700 {workers(path)}")
    workers(path).chmod(0o755)  # to read and to look in is no harm
    open_store(f"sqlite:///{path}").close()


def test_a_folder_with_a_blank_in_its_name_is_quoted_in_the_command_to_type(path: Path) -> None:
    blank = path.with_name("my journal.db")
    workers(blank).mkdir()
    workers(blank).chmod(0o777)
    assert refusal(blank).endswith(f"chmod 700 '{workers(blank)}'")


@two_users
@pytest.mark.parametrize("code", [_SWAP_THE_LOCK, _PLANT_A_LINK], ids=["a file", "a link"])
def test_another_user_who_swaps_a_lock_file_does_not_make_a_live_worker_look_dead(path: Path, store: Store, code: str) -> None:
    held = hold_one(store, "r")
    observer = open_store(f"sqlite:///{path}")
    observer.register("second", "host:2", 2, T0)
    attack(code, path)
    assert observer.reap("second", LEASE_US, T0 + 1) == 0, "a worker that was there before"
    assert "chmod 700" in refusal(path), "a worker that comes now"
    workers(path).chmod(0o700)  # the owner does what the message says; the planted file is still there
    newcomer = open_store(f"sqlite:///{path}")
    newcomer.register("third", "host:3", 3, T0)
    for other, worker in ((observer, "second"), (newcomer, "third")):
        assert other.reap(worker, LEASE_US, T0 + 1) == 0
    store.renew("w", T0 + 2)  # this puts its own lock in the place of the planted file
    for other, worker in ((observer, "second"), (newcomer, "third")):
        assert other.reap(worker, LEASE_US, T0 + 3) == 0
    assert found(store, "r").holder == "w"
    assert store.append([held.append(ThoughtRecorded("x"))]) == [Committed()]
    store._liveness.close()  # type: ignore[attr-defined]  # as the kernel does when the process dies
    assert newcomer.reap("third", LEASE_US, T0 + 4) == 1, "its own lock proves its death again"
    observer.close()
    newcomer.close()


@two_users
def test_a_pipe_in_the_place_of_a_lock_file_holds_no_worker_up(path: Path, store: Store) -> None:
    hold_one(store, "r")
    attack(_PLANT_A_PIPE, path)
    workers(path).chmod(0o700)
    assert output(python(_REAP, path)) == "0"
    store.renew("w", T0 + 1)
    assert stat.S_ISREG(os.lstat(workers(path) / "w.lock").st_mode)
    assert found(store, "r").holder == "w"


def test_what_is_no_regular_file_is_no_lock(path: Path, store: Store) -> None:
    """Even our own: a pipe or a link there by mistake proves nothing and blocks no process."""
    hold_one(store, "r")
    lock, other = workers(path) / "w.lock", workers(path) / "other"
    other.touch(0o600)
    for make in (lambda: os.mkfifo(lock), lambda: lock.symlink_to(other), lambda: lock.symlink_to("/dev/null")):
        lock.unlink()
        make()
        assert output(python(_REAP, path)) == "0"
        store.renew("w", T0 + 1)
        assert stat.S_ISREG(os.lstat(lock).st_mode)
    assert found(store, "r").holder == "w"


def test_a_lock_that_was_let_go_of_after_another_one_took_its_name_proves_nothing(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An observer has opened the lock file; it is removed; the worker locks a new one and closes the old one; the observer finds it free."""
    hold_one(store, "r")
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", flock)
            (workers(path) / "w.lock").unlink()
            store.renew("w", T0 + 1)
        flock(descriptor, operation)

    observer = open_store(f"sqlite:///{path}")
    observer.register("second", "host:2", 2, T0)
    monkeypatch.setattr(fcntl, "flock", late)
    assert observer.reap("second", LEASE_US, T0 + 1) == 0
    assert found(store, "r").holder == "w"
    observer.close()


@pytest.mark.full
def test_a_worker_that_takes_its_lock_again_is_at_no_moment_without_one(path: Path, store: Store) -> None:
    """The crash window: a new lock file that is not locked yet would prove the death of a worker that lives."""
    hold_one(store, "r")
    observer, dead, over = open_store(f"sqlite:///{path}"), [], threading.Event()

    def look() -> None:
        while not over.is_set():
            if observer._liveness.is_dead("w"):  # type: ignore[attr-defined]
                dead.append("w")

    looking = threading.Thread(target=look)
    looking.start()
    for beat in range(500):
        (workers(path) / "w.lock").unlink()
        store.renew("w", T0 + beat)
    over.set()
    looking.join()
    observer.close()
    assert dead == []


# -- a folder of another user --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_folder_that_another_user_made_is_refused_with_the_way_out(path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        path.parent.chmod(0o1777)
        output(python(f"{_AS_NOBODY}\nos.mkdir(folder)\nos.chmod(folder, {mode})", workers(path), "-"))
    else:
        workers(path).mkdir(mode)
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    said = refusal(path)
    assert f"{workers(path)} belongs to another user (" in said
    assert f"rm -r {workers(path)}" in said
    assert not path.exists(), "nothing was made before the folder was looked at"


@pytest.mark.parametrize("target", ["a folder", "nothing"])
def test_a_link_in_the_place_of_the_folder_is_refused(path: Path, target: str) -> None:
    elsewhere = path.parent / "elsewhere"
    if target == "a folder":
        elsewhere.mkdir(0o700)
    workers(path).symlink_to(elsewhere)
    said = refusal(path)
    assert f"{workers(path)} is not a folder" in said
    assert not elsewhere.exists() or list(elsewhere.iterdir()) == []


# -- what goes on to work ------------------------------------------------------------------------------------------------------
_WORK = """
from perdure.store.open import open_store
from tests.conformance.suite import LEASE_US, T0, new_run, serving
store = open_store(f"sqlite:///{folder}")
store.register(worker, "host:1", 1, T0)
store.create_run(new_run("r"))
store.claim(worker, serving("a"), 9, T0)
stop = store.listen(lambda: print("rung", flush=True))
print("ready", flush=True)
time.sleep(600)
"""
# Imported as root: the user `nobody` may not be able to read the sources.
_IMPORTED_FIRST = "import perdure.store.sqlite.store, tests.conformance.suite\n"


@two_users
def test_root_works_on_the_journal_of_another_user(path: Path) -> None:
    path.parent.chmod(0o777)
    process = python(_IMPORTED_FIRST + _AS_NOBODY + _WORK, path, "theirs")
    assert first_line(process) == "ready"
    assert {path.stat().st_uid, workers(path).stat().st_uid} == {NOBODY}
    store = open_store(f"sqlite:///{path}")
    store.register("root", "host:2", 2, T0)
    assert store.reap("root", LEASE_US, T0 + 1) == 0, "it lives"
    store.create_run(new_run("r2"))
    assert first_line(process) == "rung"
    end(process)
    assert store.reap("root", LEASE_US, T0 + 1) == 1
    assert len(store.claim("root", serving("a"), 9, T0 + 2)) == 2
    store.close()


_CREATE_AND_LOOK = """
store = open_store(f"sqlite:///{folder}")
store.create_run(new_run("theirs"))
print(store.get("theirs").status, store.reap(worker, LEASE_US, T0))
"""


@two_users
def test_a_user_who_may_write_the_journal_and_not_its_folder_goes_on_to_decide_and_proves_no_death(path: Path) -> None:
    store = open_store(f"sqlite:///{path}")
    hold_one(store, "r")
    path.parent.chmod(0o777)
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        file.chmod(0o666)
    code = _IMPORTED_FIRST + _AS_NOBODY + _WORK.partition("store =")[0] + _CREATE_AND_LOOK
    assert output(python(code, path, "nobody's")) == "queued 0"
    assert found(store, "r").holder == "w"
    store.close()


# -- bells -----------------------------------------------------------------------------------------------------------------------
@two_users
def test_a_pipe_of_another_user_is_not_rung(path: Path, store: Store) -> None:
    store.register("w", "host:1", 1, T0)
    theirs, ours = workers(path) / "theirs.bell", workers(path) / "ours.bell"
    for pipe in (theirs, ours):
        os.mkfifo(pipe, 0o600)
    os.chown(theirs, NOBODY, NOBODY)
    ends = [os.open(pipe, os.O_RDWR | os.O_NONBLOCK) for pipe in (ours, theirs)]
    store.create_run(new_run("r"))
    assert os.read(ends[0], 10)
    with pytest.raises(BlockingIOError):
        os.read(ends[1], 10)
    for descriptor in ends:
        os.close(descriptor)


def test_a_folder_that_others_can_write_to_has_no_bell_and_hinders_no_commit(
    path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.register("w", "host:1", 1, T0)
    workers(path).chmod(0o777)
    rung = threading.Event()
    stop = store.listen(rung.set)
    store.create_run(new_run("r"))
    assert rung.is_set(), "this process's own commits need no pipe"
    stop()
    assert [file.name for file in workers(path).iterdir()] == ["w.lock"]
    assert "can be written to by other users" in caplog.text
