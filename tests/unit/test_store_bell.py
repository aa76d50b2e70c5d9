"""The bell between processes: real pipes, real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.suite_queues import queue_run
from tests.unit.store_tools import end, first_line, output, python

from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.store.private_folder import PrivateFolder
from perdure.store.sqlite.bell import PipeBell

_LISTEN = """
import os, sys, time, threading
from perdure.store.open import open_store
store = open_store(f"sqlite:///{sys.argv[1]}")
rung = threading.Event()
stop = store.listen(rung.set)
print("listening", flush=True)
"""
_CREATE = """
import sys
from perdure.store.open import open_store
from tests.conformance.suite_queues import queue_run
store = open_store(f"sqlite:///{sys.argv[1]}")
for n in range(int(sys.argv[3])):
    queue_run(store, f"{sys.argv[2]}{n}")
store.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{path}", synchronous="normal")
    yield opened
    opened.close()


def bells(path: Path) -> list[Path]:
    return sorted(Path(f"{path}-workers").glob("*"))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "perdure doorbell"]


def test_a_run_that_another_process_creates_rings_within_a_second(store: Store, path: Path) -> None:
    rung = threading.Event()
    stop = store.listen(rung.set)
    output(python(_CREATE, path, "r", 1))
    assert rung.wait(60)
    stop()


def test_the_bell_rings_at_once_and_not_when_somebody_looks(path: Path) -> None:
    """Between two bells on one folder, so that nothing but the bell is measured; the rings of a process reach its own stores directly."""
    rung = threading.Event()
    here, there = PipeBell(PrivateFolder(path.parent / "bells")), PipeBell(PrivateFolder(path.parent / "bells"))
    stop = here.listen(rung.set)
    took = []
    for _ in range(50):
        begun = time.perf_counter()
        there.ring()
        assert rung.wait(60)
        took.append(time.perf_counter() - begun)
        rung.clear()
    stop()
    assert sorted(took)[25] < 0.5, took


def test_a_pipe_is_private_and_goes_with_its_listener(store: Store, path: Path) -> None:
    before = len(threads())
    stop = store.listen(lambda: None)
    (pipe,) = bells(path)
    mode = pipe.stat().st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600
    assert len(threads()) == before + 1
    stop()
    assert bells(path) == []
    assert len(threads()) == before


def test_a_closed_store_leaves_no_pipe_no_thread_and_no_descriptor(path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = len(threads())
    open_store(f"sqlite:///{path}").close()
    files = open_files()
    store = open_store(f"sqlite:///{path}")
    stops = [store.listen(lambda: None) for _ in range(3)]
    store.close()
    assert (bells(path), len(threads()), open_files()) == ([], before, files)
    for stop in stops:
        stop()


def test_a_listener_may_end_itself_when_it_is_rung(path: Path) -> None:
    here, there = PipeBell(PrivateFolder(path.parent / "bells")), PipeBell(PrivateFolder(path.parent / "bells"))
    ended = threading.Event()

    def once() -> None:
        stop()
        ended.set()

    stop = here.listen(once)
    there.ring()
    assert ended.wait(60)
    there.ring()
    here.close()


def test_a_killed_listener_makes_no_trouble_and_its_pipe_goes(store: Store, path: Path) -> None:
    process = python(_LISTEN + "time.sleep(600)", path)
    first_line(process)
    assert len(bells(path)) == 1
    end(process)
    assert len(bells(path)) == 1
    queue_run(store, "r")
    assert bells(path) == []
    rung = threading.Event()
    stop = store.listen(rung.set)
    queue_run(store, "r2")
    assert rung.wait(60)
    stop()


def test_a_stopped_listener_holds_nobody_up_however_often_it_is_rung(path: Path) -> None:
    """A pipe that is full rings already."""
    folder = path.parent / "bells"
    here, there = PipeBell(PrivateFolder(folder)), PipeBell(PrivateFolder(folder))
    stuck, go_on = threading.Event(), threading.Event()
    rings = 0

    def count() -> None:
        nonlocal rings
        rings += 1
        stuck.set()
        go_on.wait(60)

    stop = here.listen(count)
    there.ring()
    assert stuck.wait(60)
    (pipe,) = folder.iterdir()
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, bytes(4096))
    os.close(descriptor)
    for _ in range(10):
        there.ring()
    go_on.set()
    deadline = time.monotonic() + 60
    while rings < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    stop()
    assert 2 <= rings <= 3


def test_two_hundred_rings_are_few_wake_ups(path: Path) -> None:
    here, there = PipeBell(PrivateFolder(path.parent / "bells")), PipeBell(PrivateFolder(path.parent / "bells"))
    rings, first, go_on, last = 0, threading.Event(), threading.Event(), threading.Event()

    def count() -> None:
        nonlocal rings
        rings += 1
        if first.is_set():
            last.set()
        first.set()
        go_on.wait(60)

    stop = here.listen(count)
    there.ring()
    assert first.wait(60)
    for _ in range(200):
        there.ring()
    go_on.set()
    assert last.wait(60), "what is rung while a listener is at work is not lost"
    stop()
    assert rings == 2


def test_a_new_listener_is_found_however_soon_after_the_folder_was_looked_at(path: Path) -> None:
    folder = path.parent / "bells"
    folder.mkdir(0o700)
    here, there, rung = PipeBell(PrivateFolder(folder)), PipeBell(PrivateFolder(folder)), threading.Event()
    there.ring()
    looked_at = folder.stat().st_mtime_ns
    stop = here.listen(rung.set)
    os.utime(folder, ns=(looked_at, looked_at))  # as where the clock of the disk has not moved on since
    there.ring()
    assert rung.wait(60)
    stop()


def test_a_folder_that_does_not_change_is_not_listed_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = path.parent / "bells"
    here, there = PipeBell(PrivateFolder(folder)), PipeBell(PrivateFolder(folder))
    rung = threading.Event()
    stop = here.listen(rung.set)
    os.utime(folder, ns=(0, time.time_ns() - 10_000_000_000))  # as if nothing had happened there for ten seconds
    there.ring()
    assert rung.wait(60)
    rung.clear()
    monkeypatch.setattr(os, "listdir", lambda _: pytest.fail("listed again"))
    there.ring()
    assert rung.wait(60)
    stop()


def test_a_forked_child_takes_no_ring_away_and_leaves_its_parents_pipe_alone(store: Store, path: Path) -> None:
    rung = threading.Event()
    stop = store.listen(rung.set)
    (pipe,) = bells(path)
    go_on, waiting = os.pipe()
    pid = os.fork()
    if pid == 0:
        stop()
        os.read(go_on, 1)
        os._exit(0)
    try:
        output(python(_CREATE, path, "r", 1))
        assert rung.wait(60)
        assert pipe.exists()
        stop()
        assert bells(path) == []
        with pytest.raises(FileNotFoundError):
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    finally:
        os.write(waiting, b"x")
        os.waitpid(pid, 0)
        os.close(go_on)
        os.close(waiting)


def test_a_child_that_a_killed_listener_had_forked_does_not_keep_its_pipe_alive(store: Store, path: Path) -> None:
    process = python(_LISTEN + "pid = os.fork()\nif pid == 0: time.sleep(600)\nprint(pid, flush=True)\ntime.sleep(600)\n", path)
    first_line(process)
    pid = int(first_line(process))
    try:
        process.kill()
        process.wait()
        deadline, n = time.monotonic() + 60, 0  # a child that was forked a moment ago has the pipe open until it gets to run
        while bells(path) and time.monotonic() < deadline:
            n += 1
            queue_run(store, f"r{n}")
        assert bells(path) == []
    finally:
        os.kill(pid, 9)
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def test_what_only_looks_like_a_bell_is_left_as_it_is(store: Store, path: Path) -> None:
    folder = Path(f"{path}-workers")
    folder.mkdir(0o700)
    (folder / "notes.bell").write_text("important")
    (folder / "outside").write_text("also important")
    (folder / "link.bell").symlink_to(folder / "outside")
    queue_run(store, "r")
    assert (folder / "notes.bell").read_text() == "important"
    assert (folder / "outside").read_text() == "also important"


def test_without_pipes_there_is_no_bell_and_that_is_said_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk without named pipes: the only condition here that cannot be real."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "mkfifo", refuse)
    store = open_store(f"sqlite:///{path}")
    rung = threading.Event()
    stops = [store.listen(rung.set), store.listen(lambda: None)]
    queue_run(store, "r")
    assert rung.is_set(), "this process's own commits need no pipe"
    for stop in stops:
        stop()
    store.close()
    assert [record.getMessage() for record in caplog.records if "bell" in record.getMessage()] == [
        f"no bell in {path}-workers (Operation not permitted): commits of other processes are found by polling"
    ]


def test_waiting_for_the_bell_costs_next_to_nothing(store: Store, record_property: object) -> None:
    stop = store.listen(lambda: None)
    begun, busy = time.perf_counter(), time.process_time()
    time.sleep(1.0)
    share = (time.process_time() - busy) / (time.perf_counter() - begun)
    stop()
    assert callable(record_property)
    record_property("share of a core while nobody rings", f"{share:.4%}")
    assert share < 0.2, "a thread that spins would take all of it"


def test_a_bell_that_is_taken_down_while_others_ring_it_writes_nothing_after_its_pipe_is_closed(tmp_path: Path) -> None:
    """Its number may be the database's by then."""
    ringing, over = PipeBell(PrivateFolder(tmp_path)), threading.Event()

    def ring() -> None:
        while not over.is_set():
            ringing.ring()

    rings = [threading.Thread(target=ring) for _ in range(2)]
    for thread in rings:
        thread.start()
    try:
        for _ in range(300):
            PipeBell(PrivateFolder(tmp_path)).listen(lambda: None)()  # EBADF if no file has that number yet
    finally:
        over.set()
        for thread in rings:
            thread.join()
