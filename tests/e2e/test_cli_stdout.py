"""With --json, stdout has only the document, and `replay` changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import forked

PROGRAM = """
import socket, subprocess
from pathlib import Path
from perdure import Run, agent, tool

print("loaded")
HERE = Path(__file__).parent

@tool(effect="read")
def look(n: int) -> int:
    print("in a tool")
    return n

@tool(effect="read", isolate=True)
def look_apart(n: int) -> int:
    print("in a tool of its own process")
    return n

@agent(version="1")
async def chatty(run: Run) -> int:
    print("in the agent")
    return await look(1) + await look_apart(2)

@agent(version="1")
async def careful(run: Run) -> int:
    if (HERE / "changed").exists():
        subprocess.run(["touch", str(HERE / "touched")])
    return await look(1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "chat.py").write_text(PROGRAM)
    return tmp_path


def perdure(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-m", "perdure", *args], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_what_agents_and_tools_print_does_not_get_into_the_json(folder: Path) -> None:
    done = perdure(folder, "run", "chat.py:chatty", "--id", "r", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"run_id": "r", "status": "succeeded", "output": 3, "error": None}
    for words in ("loaded", "in the agent", "in a tool", "in a tool of its own process"):
        assert words in done.stderr
    again = perdure(folder, "replay", "r", "--json")
    assert [json.loads(line)["run_id"] for line in again.stdout.splitlines()] == ["r"]


def test_without_json_it_is_shown_where_it_was_printed(folder: Path) -> None:
    done = perdure(folder, "run", "chat.py:chatty")
    assert "in the agent\nin a tool\n" in done.stdout
    assert done.stdout.endswith("3\n")


def test_a_replayed_agent_that_starts_a_process_is_refused_and_nothing_is_started(folder: Path) -> None:
    assert perdure(folder, "run", "chat.py:careful", "--id", "r").returncode == 0
    (folder / "changed").touch()
    done = perdure(folder, "replay", "r")
    assert done.returncode == 7
    assert "NotAllowedInAgent" in done.stdout + done.stderr
    assert not (folder / "touched").exists()
