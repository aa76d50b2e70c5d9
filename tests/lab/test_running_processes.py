"""The processes of the lab: their input, how they are ended, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.lab.test_crashtest_cli import HOSTILE, children_of, crashtest, is_alive

from perdure import Settings
from perdure.testing.lab.launch import Forked, Fresh, Steps, run_all
from perdure.testing.lab.lifeline import Lifeline
from perdure.testing.lab.matrix import _settings
from perdure.testing.lab.spec import Spec

AGENT = """
import os
import sys
from pathlib import Path
from perdure import Run, agent, tool

@tool(effect="read")
def look() -> str:
    Path(os.environ["PERDURE_CRASHTEST_DIR"], "seen").touch()
    return sys.stdin.read()

@agent(version="1")
async def looks(run: Run) -> str:
    return await look()
"""


def spec_in(folder: Path, settings: Settings | None = None) -> Spec:
    (folder / "world").mkdir(parents=True)
    return Spec(str(folder), 1, "crashtest-1", b"{}", settings or Settings())


def test_what_a_fresh_interpreter_is_told_is_nowhere_on_disk(tmp_path: Path) -> None:
    spec = spec_in(tmp_path / "trial", Settings(url="postgresql://ann:topsecret@127.0.0.1/x"))
    said = tmp_path / "said"
    code = f"import sys, time, pathlib; pathlib.Path({str(said)!r}).write_text(sys.stdin.read()); time.sleep(0.2)"
    with Lifeline() as lifeline:
        process = Fresh((sys.executable, "-c", code), lifeline).begin(spec)
        deadline, names = time.monotonic() + 60, set()
        while process.poll() is None:
            names |= {path.name for path in spec.home.rglob("*")}
            assert time.monotonic() < deadline
        process.reap()
    assert "topsecret" in said.read_text()
    assert names == {"world", "log-1"}


def test_no_secret_is_in_what_is_kept_and_a_tool_has_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app.py").write_text(AGENT)
    monkeypatch.setenv("PERDURE_WEBHOOK_SECRET", "whsec_topsecret0123456789abcdef0123456789")
    done = crashtest(tmp_path, "app.py:looks", "--boundary", "after_tool_effect", "--keep", "kept", "--json")
    assert done.returncode == 0, done.stderr
    baseline = json.loads(done.stdout)["baseline"]
    assert (baseline["output"], baseline["same_output"]) == ("", True)  # forked, and in a fresh interpreter
    kept = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert any(path.name == "journal.db" for path in kept)
    assert [path for path in kept if b"topsecret" in path.read_bytes()] == []
    assert _settings(Settings(webhook_secret="topsecret"), None).webhook_secret == ""  # a tool does not come by it either


def test_the_number_of_a_process_is_not_given_away_before_its_group_is_ended(tmp_path: Path) -> None:
    pids: list[int] = []

    def work(spec: Spec) -> None:
        (spec.home / "pid").write_text(str(os.getpid()))

    def steps() -> Steps[int]:
        first = yield spec_in(tmp_path / "1")
        pids.append(int((tmp_path / "1/pid").read_text()))
        assert first == 0
        # The process has ended, and its number is not free yet: a later kill reaches only its own processes.
        assert Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        second = yield spec_in(tmp_path / "2")
        assert second == 0
        return 1

    with Lifeline() as lifeline:
        assert list(run_all([steps()], Forked(work, lifeline).begin, jobs=1, timeout_s=60)) == [(0, 1)]
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_tried(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'loaded')!r}).touch()\n" + AGENT)
    done = crashtest(tmp_path, "app.py:looks", "--report", "nowhere/out.html")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no folder nowhere" in done.stderr
    assert not (tmp_path / "loaded").exists()


def test_sigterm_leaves_neither_processes_nor_folders(tmp_path: Path) -> None:
    began = tmp_path / "began"
    (tmp_path / "app.py").write_text(HOSTILE.replace("{began}", str(began)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "perdure", "crashtest", "app.py:sleeper"], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 60
    while not began.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    victims = children_of(process.pid)
    assert len(victims) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in victims)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("perdure-crashtest")] == []
