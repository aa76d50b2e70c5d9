"""A worker that is killed in the middle of a call.

Its server ends too, and another process continues by effect class.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.mcp.warehouse import Warehouse, descendants, python_path, until_gone


def victim(folder: Path, effect: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.mcp.victim", str(folder / "journal.db"), str(folder / "ledger"), effect]
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(command, cwd=root, env=python_path(), stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("effect", "ends", "attempts"),
    [
        ("once", "needs_attention", [1]),  # it is not known whether the call happened: a person is asked
        ("keyed", "succeeded", [1, 2]),  # the same key again
    ],
)
def test_a_killed_worker_takes_its_server_along_and_the_run_goes_on_elsewhere(tmp_path, effect, ends, attempts):
    warehouse = Warehouse(tmp_path, "stdio")
    worker = victim(tmp_path, effect)
    until = time.monotonic() + 30
    while not warehouse.ledger("slow"):
        assert worker.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    below = descendants(worker.pid)
    assert len(below) == 3, "the one who cleans up, the server, and the process that the server has started in a session of its own"

    os.kill(worker.pid, signal.SIGKILL)
    worker.communicate()

    for pid in below:
        until_gone(pid, 3.0)
    said, _ = victim(tmp_path, effect).communicate(timeout=60)
    assert said.strip() == ends
    assert len(warehouse.ledger("put")) == 1, "what is recorded is not done again"
    begun = [line["meta"] for line in warehouse.ledger("slow") if line["what"] == "begun"]
    assert [meta["perdure/attempt"] for meta in begun] == attempts
    assert len({meta["perdure/idempotency-key"] for meta in begun}) == 1
