"""With perdure installed, pytest has its fixtures; tests that do not use them are hardly slower."""

from __future__ import annotations

import os
import subprocess
import sys
from textwrap import dedent

import pytest
from tests.testing.plugged import ROOT, entry_points, pytest_in

import perdure.testing

USERS = """
import asyncio
from pathlib import Path
import pytest
from perdure import Call, InvalidInput, Run, agent, tool

@tool(effect="keyed")
async def careful(call: Call) -> str:
    Path(call.key).write_text("paid")
    return "paid"

@tool(effect="idempotent")
async def careless() -> str:
    with open("log", "a") as log:
        log.write("paid\\n")
    return "paid"

@agent(version="1")
async def good(run: Run, n: int) -> str:
    return await careful()

@agent(version="1")
async def bad(run: Run) -> str:
    return await careless()

@agent(version="1")
async def sleeper(run: Run) -> str:
    await asyncio.sleep(86400)
    return "awake"

@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

@agent(version="1")
async def clerk(run: Run, ledger: str) -> str:
    await run.request_approval(ledger, {})
    return await run.receive("go")

def test_accused(crash_matrix):
    crash_matrix(bad)

def test_options(crash_matrix):
    seen = []
    named = crash_matrix.options(ledger=lambda folder: seen.append(folder) or ["seen"])
    report = named(clerk, ledger="2026", approve="none", boundaries=lambda words: "claim" in words)
    assert seen and report.baseline.world == ["seen"]
    assert report.baseline.status == "waiting_approval"

def test_nobodys(crash_matrix):
    with pytest.raises(InvalidInput, match="leger is neither a parameter of the agent nor an option of crash_matrix, which has .*ledger"):
        crash_matrix(clerk, leger="2026")
    with pytest.raises(InvalidInput, match="n is neither"):
        crash_matrix.options(n=1)

def test_unreached(run_until):
    run_until("before_child_start_persisted", good, n=1)

def test_stepping(run_until, stepped, manual_clock):
    assert run_until("after_tool_effect", good, n=1, tool="careful").at[0].call == 1
    run = stepped(sleeper, clock=manual_clock)
    run.rest()
    manual_clock.advance(days=1)
    assert run.finish() == "awake"
"""


@pytest.mark.long
def test_the_fixtures_are_there_and_a_careless_agent_fails_with_the_table(tmp_path):
    (tmp_path / "test_users.py").write_text(USERS)
    ran = pytest_in(tmp_path)
    assert "2 failed, 3 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "NotReached: run" in ran.stdout
    assert "stepped.py" not in ran.stdout
    assert "plugin.py" not in ran.stdout
    assert "FAILED test_users.py::test_accused" in ran.stdout
    assert "tool careless: declared idempotent, and its effect shows twice" in ran.stdout
    assert "killed at" in ran.stdout
    assert "Traceback" not in ran.stdout


def test_the_plugin_brings_nothing_along_but_perdure_itself():
    code = dedent("""
        import sys, pytest, perdure
        before = set(sys.modules)
        for module in sys.argv[1:]:
            __import__(module)
        print(*sorted(name for name in set(sys.modules) - before if not name.startswith("_")))
    """)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run([sys.executable, "-c", code, *entry_points().values()], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["perdure.testing", "perdure.testing.plugin"]


def test_the_public_names_are_there_in_whatever_order_they_are_asked_for():
    for name in sorted(perdure.testing.__all__, reverse=True):
        assert getattr(perdure.testing, name).__name__ == name
    for name in perdure.testing.__all__:
        assert getattr(perdure.testing, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        perdure.testing.nothing  # noqa: B018
