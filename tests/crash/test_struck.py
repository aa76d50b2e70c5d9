"""Ctrl-C in the middle of any code comes from a person: the run is left as after a crash, and no error is recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash import struck
from tests.unit.drive_tools import SETTINGS, run

from perdure import Perdure
from perdure.core.events import AttentionNeeded, Event
from perdure.store.api import RunRow


@pytest.mark.parametrize("where", ["agent", "tool", "policy"])
@pytest.mark.parametrize("how", ["twice", "bare", "again", "exit"])
def test_a_signal_that_strikes_in_the_code_of_a_run_ends_the_process_and_is_nobodys_error(tmp_path: Path, how: str, where: str) -> None:
    command = [sys.executable, "-m", "tests.crash.struck", str(tmp_path), how, where]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == (struck.EXIT if how == "exit" else -signal.SIGINT), ended.stderr

    async def go_on() -> tuple[list[Event], RunRow]:
        async with Perdure(f"sqlite:///{tmp_path}/db", agents=[struck.payer], settings=SETTINGS) as app:
            left = await app.handle("r").events()
            return left, await app.engine.drive("r")

    struck.folder = tmp_path
    left, row = run(go_on())
    told = [event.type for event in left]
    assert not {"run_failed", "tool_call_failed", "approval_requested"}.intersection(told), told
    # The loop may run once more before the process ends. Then it is known that the tool was cut off.
    assert {event.body.reason for event in left if isinstance(event.body, AttentionNeeded)} <= {"in_doubt"}
    if where == "tool":
        assert (row.status, row.attention) == ("needs_attention", "in_doubt"), row
    else:
        assert row.status == "succeeded", row
    assert (tmp_path / "effects").read_text() == "5\n"


@pytest.mark.parametrize(
    ("whose", "moment"),
    [
        ("perdure notices", "entered"),
        ("perdure notices", "begins"),
        ("perdure post", "entered"),
        ("perdure post", "begins"),
        ("Attempt._run", "entered"),
        ("Event.wait", "entered"),
        ("Event.wait", "begins"),
    ],
)
def test_ctrl_c_while_a_task_of_the_worker_is_being_woken_does_not_keep_the_process_from_ending(
    tmp_path: Path, whose: str, moment: str
) -> None:
    command = [sys.executable, "-m", "tests.crash.swallowed", str(tmp_path), whose, moment]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert "KeyboardInterrupt" in ended.stderr


@pytest.mark.parametrize("how", ["bare", "exit"])
def test_a_signal_that_strikes_while_a_run_is_let_go_of_is_not_swallowed(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-m", "tests.crash.struck", str(tmp_path), how, "letting go"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == (struck.EXIT if how == "exit" else -signal.SIGINT), ended.stderr


def test_ctrl_c_in_one_run_keeps_no_other_from_beginning_if_the_loop_goes_on(tmp_path: Path) -> None:
    """As in `python -m asyncio`: the interrupt ends a line, and not the loop."""
    command = [sys.executable, "-m", "tests.crash.struck", str(tmp_path), "goes on", "first"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, ["succeeded"] * 4), ended.stderr
