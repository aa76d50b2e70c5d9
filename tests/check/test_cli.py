"""`perdure check` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.check.snippets import alone

ROOT = Path(__file__).resolve().parents[2]
FINE = alone("await echo('x')")
GUILTY = alone("time.time()")
NOTED = alone("print('x')")


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "perdure", "check", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_findings_name_the_place_the_way_and_the_way_out_and_the_code_is_7(tmp_path):
    (tmp_path / "app.py").write_text(alone("stamp()", "def stamp():\n    return time.time()"))
    ran = check(tmp_path, "app.py")
    assert ran.returncode == 7
    line = (tmp_path / "app.py").read_text().splitlines().index("    return time.time()") + 1
    assert ran.stdout.splitlines() == [
        f"app.py:{line}:12 clock  agent one → stamp: time.time() reads the wall clock, and a replay comes later.",
        "    error; use run.now(), the recorded time of what woke the agent.",
        "1 file, 1 agent, 1 tool: 1 error, 0 notes",
    ]
    assert ran.stderr == ""


def test_notes_count_only_when_that_is_wanted_and_json_has_one_object_for_each(tmp_path):
    (tmp_path / "app.py").write_text(NOTED)
    ran = check(tmp_path, "app.py", "--json")
    assert ran.returncode == 0
    [finding] = map(json.loads, ran.stdout.splitlines())
    assert (finding["path"], finding["rule"], finding["severity"], finding["where"]) == ("app.py", "print", "note", "agent one")
    assert list(finding) == ["path", "line", "column", "rule", "severity", "where", "message", "way_out"]
    assert check(tmp_path, "app.py", "--strict").returncode == 7


def test_a_folder_is_walked_without_what_is_hidden_or_somebody_elses_and_each_file_counts_once(tmp_path):
    for name in ("a.py", "deep/er/b.py", ".hidden/c.py", ".#a.py", "venv/lib/d.py", "__pycache__/e.py", "notes.txt", "site-packages/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(FINE if name in ("a.py", "deep/er/b.py") else GUILTY)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "round").symlink_to(tmp_path)
    ran = check(tmp_path, ".", "a.py")
    assert (ran.returncode, ran.stdout) == (0, "2 files, 2 agents, 2 tools: nothing found\n")


def test_nothing_of_the_file_is_run_and_nothing_that_it_imports_must_exist(tmp_path):
    (tmp_path / "app.py").write_text(f"import not_installed_anywhere\nopen('traces', 'w')\n{FINE}\nraise SystemExit(9)\n")
    assert check(tmp_path, "app.py").returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["app.py"]


def test_what_cannot_be_read_is_told_after_what_was_found_and_the_code_is_2(tmp_path):
    (tmp_path / "app.py").write_text(GUILTY)
    (tmp_path / "empty").mkdir()
    (tmp_path / "huge.py").write_bytes(b"#" * (4 * 1024 * 1024 + 1))
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "deploy.toml").write_text("name = 1")
    ran = check(tmp_path, "missing.py", "app.py", "empty", "huge.py", "pipe.py", "loop.py", "app.py:one", "/dev/zero", "deploy.toml")
    assert ran.returncode == 2
    assert "1 error" in ran.stdout
    # A program must not take a part of the findings for all findings.
    assert check(tmp_path, "missing.py", "app.py", "--json").stdout == ""
    told = ran.stderr.splitlines()
    assert len(told) == 8
    assert all(line.startswith("perdure: ") for line in told), told
    words = [
        "missing.py: No such file or directory",
        "empty: there is no *.py file below",
        "huge.py: more than 4,194,304 bytes",
        "pipe.py is not a file",
        "loop.py: ",
        "perdure check app.py",
        "/dev/zero is not a file",
        "a plan is checked with its tools: perdure run deploy.toml --tools FILE.py --check",
    ]
    assert [word for word in words if word not in ran.stderr] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_one_may_not_read_is_named(tmp_path):
    (tmp_path / "app.py").write_text(FINE)
    (tmp_path / "app.py").chmod(0)
    ran = check(tmp_path, "app.py")
    assert (ran.returncode, ran.stderr) == (2, "perdure: app.py: Permission denied\n")


def test_what_a_file_says_about_itself_cannot_move_the_cursor(tmp_path):
    (tmp_path / "app\x1b[2J.py").write_text("x = '\x1b[2J' +")
    ran = check(tmp_path, ".")
    assert ran.returncode == 7
    assert "\x1b" not in ran.stdout
    assert "app\\x1b[2J.py:1:" in ran.stdout


def test_an_agent_that_was_put_together_from_parts_counts_as_one(tmp_path):
    made = """
from perdure import Plan, ReAct
from perdure.models import Scripted
bot = ReAct("bot", model=Scripted([]), tools=[echo])
deploy = Plan("deploy", [])
other = Plan.from_file("other.toml", [echo])
"""
    (tmp_path / "app.py").write_text(FINE + made)
    assert check(tmp_path, "app.py").stdout == "1 file, 4 agents, 1 tool: nothing found\n"


def test_without_a_file_it_says_how_it_is_used(tmp_path):
    ran = check(tmp_path)
    assert ran.returncode == 2
    assert "FILE…" in ran.stderr
