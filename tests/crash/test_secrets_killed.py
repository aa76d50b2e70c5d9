"""A worker that is killed while its tool holds a secret: the next worker resolves the secret again (G15)."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.inspect_tools import url_of
from tests.unit.postgres_tools import empty

from perdure.core.events import encode_body
from perdure.store.open import open_store

OLD, NEW = "old-value-of-the-key-17", "new-value-of-the-key-18"


def start(url: str, ledger: Path, isolate: bool, value: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PERDURE_SECRET_HELD": value}
    command = [sys.executable, "-m", "tests.crash.keyholder", url, str(ledger), str(isolate)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_of(ledger: Path, least: int) -> list[str]:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        if len(lines) >= least:
            return lines
        time.sleep(0.02)
    raise AssertionError(f"the tool was not called {least} times")


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_the_worker_that_takes_over_resolves_the_secret_again(
    kind: str, isolate: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = url_of(tmp_path / "k.db") if kind == "sqlite" else empty(request.getfixturevalue("postgres"))
    ledger, hold = tmp_path / "ledger", tmp_path / "ledger.hold"
    hold.touch()
    first = start(url, ledger, isolate, OLD)
    lines_of(ledger, 1)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=60)
    between = b"".join(one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())
    hold.unlink()
    second = start(url, ledger, isolate, NEW)
    said, _ = second.communicate(timeout=120)
    assert said.strip().splitlines()[-1] == "used <secret held>", said
    assert [line.split()[0] for line in lines_of(ledger, 2)] == [hashlib.sha256(value.encode()).hexdigest() for value in (OLD, NEW)]
    after = b"".join(one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())
    store = open_store(url)
    try:
        journal = b"".join(encode_body(event.body) for event in store.read("r"))
        rows = repr((store.get("r"), store.progress(["r"])))
    finally:
        store.close()
    assert b'{"$secret":"held"}' in journal
    for value in (OLD, NEW):
        assert value.encode() not in between + after + journal
        assert value not in rows + said
