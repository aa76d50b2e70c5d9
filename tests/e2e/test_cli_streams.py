"""Output streams that are closed and disks that are full: what a person sees, and that no run is abandoned (G13)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.test_cli_reading import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.end()


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def worker_with_stderr(desk: Desk, stderr: int) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        desk._command(("worker", "shop.py")), cwd=desk.folder, env=desk._env, stdout=subprocess.DEVNULL, stderr=stderr, text=True
    )
    desk.children.append(worker)
    return worker


@pytest.mark.parametrize("reads", ["nothing", "one line", "until the signal"])
def test_a_worker_whose_stderr_nobody_reads_any_more_drains(desk: Desk, reads: str) -> None:
    (desk.folder / "hold").touch()
    desk("run", "shop.py:shop", "order=o-1", "--id", "r", "--detach")
    ours, theirs = os.pipe()
    if reads == "nothing":
        os.close(ours)
    worker = worker_with_stderr(desk, theirs)
    os.close(theirs)
    if reads == "one line":
        os.read(ours, 1)
        os.close(ours)
    until(lambda: (desk.folder / "ledger").exists() or worker.poll() is not None)
    if reads == "until the signal":
        os.close(ours)
    worker.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert worker.poll() is None, "it waits for the step boundary"
    (desk.folder / "hold").unlink()
    assert worker.wait(timeout=60) == 0
    assert [event["type"] for event in desk.lines("events", "r")][-2:] == ["tool_call_completed", "run_released"]


def test_a_worker_whose_stderr_is_full_drains(desk: Desk) -> None:
    (desk.folder / "hold").touch()
    desk("run", "shop.py:shop", "order=o-1", "--id", "r", "--detach")
    with open("/dev/full", "w") as full:
        worker = worker_with_stderr(desk, full.fileno())
    until(lambda: (desk.folder / "ledger").exists() or worker.poll() is not None)
    worker.send_signal(signal.SIGTERM)
    (desk.folder / "hold").unlink()
    assert worker.wait(timeout=60) == 0
    assert desk.lines("events", "r")[-1]["type"] in ("run_released", "run_succeeded")


def test_an_error_that_cannot_be_told_still_has_its_exit_code(desk: Desk) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(desk._command(("list",)), cwd=desk.folder, env=desk._env, stderr=full, timeout=60, check=False)
    assert done.returncode == 6


@pytest.mark.parametrize("verb", [("list",), ("events", "r"), ("show", "r", "--json"), ("resume", "r"), ("--help",), ("list", "--help")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_named(desk: Desk, verb: tuple[str, ...], unbuffered: str) -> None:
    desk("run", "shop.py:many", "calls=1", "--id", "r")
    env = {**desk._env, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            desk._command(verb), cwd=desk.folder, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert (
        done.stderr
        == "perdure: cannot write the output (stdout): No space left on device; free space there, or write it to another place\n"
    )


def test_too_many_open_files_is_not_called_a_matter_of_permissions(desk: Desk) -> None:
    desk("run", "shop.py:many", "calls=1", "--id", "r")
    code = """
import os, resource, sys
from perdure.store.open import open_store
import perdure.store.sqlite.owner, perdure.store.sqlite.store
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for free in range(6):
    for url in sys.argv[1:]:
        try:
            open_store(url).close()
        except Exception as error:
            print(type(error).__name__, error)
        for name in ("new.db", "new.db-wal", "new.db-shm"):
            if os.path.exists(name):
                os.unlink(name)
    os.close(taken.pop())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "sqlite:///perdure.db", "sqlite:///new.db"],
        cwd=desk.folder,
        env=desk._env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) >= 4, (done.stdout, done.stderr)
    for line in lines:
        assert line.startswith("StoreUnavailable"), line
        assert "too many open files" in line, line
        assert "ulimit -n" in line, line
        assert "permission" not in line, line
