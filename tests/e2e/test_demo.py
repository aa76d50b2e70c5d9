"""`perdure demo` in real processes, killed at every step. Also: its verdict can be negative."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from perdure.cli.demo import STEPS, steps_of

ROOT = Path(__file__).resolve().parents[2]
EFFECTS = ("once", "idempotent", "keyed", "once", "keyed", "read")
SETTLED = ("asked: it happened", "again (same key)", "again (same key)", "asked: it happened", "again (same key)", "again (same key)")


def demo(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")} | extra
    return subprocess.run(
        [sys.executable, "-m", "perdure", "demo", *arguments], env=env, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize("step", STEPS)
def test_killed_inside_any_step_every_effect_happens_exactly_once(tmp_path, step):
    ran = demo("--dir", str(tmp_path / "d"), "--kill-at", step, "--fast", "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    at = STEPS.index(step)

    # The world's own ledgers, not the words of the demo.
    world = tmp_path / "d" / "world"
    for name in STEPS[:-1]:
        assert len((world / "effects" / f"{name}.log").read_text().splitlines()) == 1, name
    asked = {name: len((world / "requests" / f"{name}.log").read_text().splitlines()) for name in STEPS}
    assert asked == {name: 2 if name == step and SETTLED[at].startswith("again") else 1 for name in STEPS}

    assert told["ok"] is True
    assert told["killed"]["code"] == -9
    assert told["killed"]["pid"] != told["resumed"]["pid"]
    assert [found["step"] for found in told["steps"]] == list(STEPS)
    assert [found["effect"] for found in told["steps"]] == list(EFFECTS)
    assert [found["process_1"] for found in told["steps"]] == ["done"] * at + ["killed inside"] + ["–"] * (5 - at)
    assert [found["process_2"] for found in told["steps"]] == ["skipped"] * at + [SETTLED[at]] + ["done"] * (5 - at)
    assert told["status"] == "succeeded"


def test_on_a_pipe_it_is_plain_text_that_says_everything(tmp_path):
    folder = tmp_path / "d"
    ran = demo("--dir", str(folder), "--fast", PERDURE_URL="sqlite:////nowhere/else.db")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\x1b" not in ran.stdout + ran.stderr
    for command in ("run", "why", "resume", "trace", "verify"):
        assert f"$ perdure {command} " in ran.stdout
    assert "kill -9" in ran.stdout
    assert "3 skipped on resume" in ran.stdout
    assert "Every effect happened exactly once, and the journal verifies." in ran.stdout
    assert f"cd {folder}" in ran.stdout
    assert (folder / "perdure.db").exists(), "a PERDURE_URL of the caller must not move the demo's journal"


def test_on_a_terminal_it_shows_the_steps_while_it_waits_and_colours(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "perdure", "demo", "--dir", str(tmp_path / "d"), "--fast"]
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"}
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:
        pass  # Linux says EIO where others say end of file: the last writer has closed the terminal
    finally:
        os.close(ours)
    assert process.wait() == 0
    text = shown.decode()
    assert "process 1 (pid " in text
    assert "it has happened" in text
    assert "\x1b[32m\x1b[1mEvery effect happened exactly once" in text


def test_the_transcript_in_the_documents_is_what_the_demo_prints(tmp_path):
    page = (ROOT / "docs" / "cli.md").read_text()
    printed = demo("--dir", str(tmp_path / "d"), "--fast").stdout
    rows = [line for line in page.splitlines() if line.startswith(STEPS)]
    assert len(rows) == len(STEPS)
    assert [line for line in printed.splitlines() if line.startswith(STEPS)] == rows


def test_the_commands_that_it_tells_to_type_next_work(tmp_path):
    folder = tmp_path / "d"
    told = demo("--dir", str(folder), "--fast").stdout.partition("Type next:")[2]
    typed = re.findall(r"^  (perdure (?!demo)[^#]+?)\s+#", told, re.M)
    assert len(typed) == 3
    for line in typed:
        ran = subprocess.run(
            [sys.executable, "-m", *line.split()],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, line + ran.stderr


def test_a_folder_with_files_in_it_is_refused(tmp_path):
    (tmp_path / "precious").write_text("x")
    ran = demo("--dir", str(tmp_path))
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "new or an empty folder" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


# --- the verdict can say no ------------------------------------------------------------------------------------------------


def call(seq: int, type: str, tool: str, **data: object) -> dict[str, object]:
    return {"seq": seq, "type": type, "tool": tool, "key": f"key of {tool}", "data": {"effect": "once", **data}}


def verdicts(effects: Mapping[str, list[str]], asked_again: str = "") -> dict[str, bool]:
    """exactly_once by step, for a run whose first step was done before the kill and whose others came after it."""
    before = [call(1, "tool_call_initiated", STEPS[0]), call(2, "tool_call_completed", STEPS[0])]
    after = [*before, *(call(3 + at, "tool_call_completed", name) for at, name in enumerate(STEPS[1:]))]
    asked_first = dict.fromkeys(STEPS, 0) | {STEPS[0]: 1}
    asked = {name: 2 if name == asked_again else 1 for name in STEPS}
    return {step.name: step.exactly_once for step in steps_of(before, after, asked_first, asked, effects)}


RIGHT = {name: [f"key of {name}"] for name in STEPS}


def test_one_effect_each_under_the_right_key_is_exactly_once():
    assert all(verdicts(RIGHT).values())


@pytest.mark.parametrize("wrong", [[], ["key of build_image"] * 2, ["another key"]], ids=["none", "twice", "another key"])
def test_an_effect_that_is_missing_doubled_or_under_another_key_is_noticed(wrong):
    found = verdicts(RIGHT | {"build_image": wrong})
    assert [name for name, once in found.items() if not once] == ["build_image"]


def test_a_skipped_step_that_was_asked_again_is_noticed():
    assert [name for name, once in verdicts(RIGHT, asked_again=STEPS[0]).items() if not once] == [STEPS[0]]


# --- the program that it runs ----------------------------------------------------------------------------------------------


def test_the_wheel_carries_the_program_from_examples(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("perdure/cli/deploy.py") == (ROOT / "examples" / "deploy.py").read_bytes()
