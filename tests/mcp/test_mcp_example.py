"""examples/mcp_agent.py, with the commands of its docstring.

A ReAct agent, a real server, and an approval by a person.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.mcp.warehouse import python_path
from tests.servers import forked

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mcp_agent.py"


def perdure(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in python_path().items() if not name.endswith("_API_KEY")}
    command = [sys.executable, "-m", "perdure", *arguments, "--json"]
    return forked.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, brings=("mcp",))


def test_the_librarian_publishes_what_somebody_agrees_to(tmp_path):
    ran = perdure(tmp_path, "run", f"{EXAMPLE}:librarian", "prompt=Sum it up.", "--id", "whales", "--no-wait")
    assert ran.returncode == 3, ran.stderr
    summary = json.loads((tmp_path / "notes.json").read_text())["notes"]["Whales, in short"]
    assert summary.startswith("Blue whale: Up to 30 m long"), "it begins with something to sum up"
    assert "Sperm whale: " in summary
    assert "Octopus" not in summary
    [asked] = [json.loads(line) for line in perdure(tmp_path, "approvals").stdout.splitlines()]
    assert asked["reason"] == "Whales, in short is for the whole world"
    assert perdure(tmp_path, "approve", asked["approval"], "--by", "ann").returncode == 0
    done = perdure(tmp_path, "resume", "whales", f"{EXAMPLE}:librarian")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == "The summary is out."
    assert [each["title"] for each in json.loads((tmp_path / "notes.json").read_text())["published"]] == ["Whales, in short"]
    lines = [json.loads(line) for line in perdure(tmp_path, "audit").stdout.splitlines()]
    tools = {line["tool"] for line in lines if line.get("tool")}
    assert {"notes.tools/list", "notes.find_notes", "notes.write_note", "notes.publish"} <= tools


def test_what_it_leaves_behind_in_a_checkout_is_not_for_git():
    assert "/notes.json" in (EXAMPLE.parents[1] / ".gitignore").read_text().splitlines()
