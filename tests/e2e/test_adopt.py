"""`perdure start` and `perdure adopt`: new code and new prompts for runs that exist, on both databases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.test_retry import Desk as RetryDesk

CHAT = """
from pathlib import Path
from perdure import Approval, Call, ReAct, tool
from perdure.models import Answer, Scripted, ToolUse

@tool(effect="read")
async def look_up(order: str) -> int:
    return 500

@tool(effect="keyed", approval=Approval())
async def refund(order: str, cents: int, call: Call) -> str:
    with open("paid.txt", "a") as paid:
        paid.write(f"{order} {cents} {call.key}\\n")
    return "paid"

LINES = [
    Answer("", (ToolUse("u1", "look_up", {"order": "o-1"}),), stop="tools"),
    Answer("", (ToolUse("u2", "refund", {"order": "o-1", "cents": 500}),), stop="tools"),
    "all done",
]
support = ReAct("support", model=Scripted(LINES), tools=[look_up, refund], instructions="Be brief.", version="1")
"""


class Desk(RetryDesk):
    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, url)
        newer = CHAT.replace("Be brief.", "Be kind.").replace('version="1"', 'version="2"')
        (folder / "chat.py").write_text(CHAT)
        (folder / "newer.py").write_text(newer)
        (folder / "without.py").write_text(newer.replace("tools=[look_up, refund]", "tools=[look_up]"))

    def parked(self, *run_ids: str) -> None:
        for run_id in run_ids:
            self("run", "chat.py:support", "prompt=go", "--id", run_id, code=3)

    def approve(self, run_id: str) -> None:
        (asked,) = [one for one in self.lines("approvals") if one["run_id"] == run_id]
        self("approve", asked["approval"], "--by", "ben")

    def types(self, run_id: str) -> list[str]:
        return [event["type"] for event in self.lines("events", run_id)]


@pytest.fixture(params=["sqlite", "postgres"])
def desk(tmp_path: Path, request: pytest.FixtureRequest) -> Desk:
    return Desk(tmp_path, "sqlite:///perdure.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url"))


def test_a_parked_conversation_goes_on_with_the_new_prompt(desk: Desk) -> None:
    desk.parked("r")
    refused = desk.refusal("resume", "r", "newer.py:support")
    assert refused.rstrip().endswith("which fits its journal: perdure adopt r newer.py:support")
    assert "its call 4 (refund) is open, and this code has no tool refund" in desk.refusal("resume", "r", "without.py:support")
    assert "this code is version 2 of agent support, not 3" in desk.refusal("adopt", "r", "newer.py:support", "--version", "3")
    assert desk("adopt", "r", "newer.py:support", "--dry-run") == "run r can go on with version 2; nothing was written\n"
    assert "frame_changed" not in desk.types("r")
    said = desk("adopt", "r", "newer.py:support", "--version", "2", "--note", "kinder", "--by", "ann")
    assert said.startswith("run r goes on with version 2; nothing of it has run yet")
    (changed,) = [event for event in desk.lines("events", "r") if event["type"] == "frame_changed"]
    body = changed["data"]
    assert (body["version"], body["by"], body["note"]) == ("2", "ann", "kinder")
    assert "version 2 goes on with it from its next turn or step on: ann says so" in desk("why", "r")
    desk.approve("r")
    assert desk("resume", "r", "newer.py:support") == "all done\n"
    assert (desk.folder / "paid.txt").read_text().count("o-1 500") == 1
    desk("verify", "r")
    desk("replay", "r", "newer.py:support")


def test_many_runs_are_adopted_by_a_query_and_the_pre_flight_knows_them(desk: Desk) -> None:
    desk.parked("a", "b")
    desk("start", "support", "prompt=go", "--id", "later")
    desk("start", "support", "promt=go", "--id", "typo")
    told = desk("replay", "--all", "--live-only", "newer.py:support", code=7)
    assert "adopt it: perdure adopt a" in told
    assert "run typo (queued): has not begun, and would fail with this code" in told
    assert told.endswith("4 unfinished runs: 1 goes on with this code, 2 go on if this version adopts them, 1 diverges\n")
    told = desk("replay", "--all", "--live-only", "without.py:support", code=7)
    assert "its call 4 (refund) is open, and this code has no tool refund" in told
    assert "this is no terminal" in desk.refusal("adopt", "--where", "agent:support", "newer.py:support")
    dry = desk("adopt", "--where", "agent:support", "newer.py:support", "--dry-run")
    assert dry.endswith("2 runs can be adopted\n")
    refused = desk.run("adopt", "--where", "agent:support", "without.py:support", "--yes")
    assert (refused.returncode, refused.stdout) == (1, "0 runs adopted; 2 failed\n")
    done = desk.run("adopt", "--where", "agent:support status:waiting_approval", "newer.py:support", "--yes")
    assert done.stdout.startswith("2 runs adopted; ")
    again = desk.run("adopt", "--where", "agent:support", "newer.py:support", "--yes")
    assert (again.returncode, again.stdout) == (0, "")
    assert "2 left out: runs of this version\n" in again.stderr
    assert again.stderr.endswith("no runs that match\n")
    for run_id in ("a", "b"):
        assert desk.types(run_id).count("frame_changed") == 1
    assert "a run that failed goes on with perdure retry" in desk.refusal("adopt", "--where", "status:failed", "newer.py:support")


def test_a_run_that_is_started_by_name_is_driven_by_a_worker_that_has_the_code(desk: Desk) -> None:
    assert desk("start", "support", "prompt=go", "--id", "r") == "r\n"
    (row,) = desk.lines("list")
    assert (row["agent"], row["version"]) == ("support", "")
    assert "in the version of the worker that begins it" in desk("show", "r")
    assert "has not begun" in desk("adopt", "r", "newer.py:support")
    desk("resume", "r", "newer.py:support", code=3)
    assert desk.lines("list")[0]["version"] == "2"
    desk("start", "support", "--input", json.dumps({"prompt": "go", "extra": 1}), "--id", "wrong")
    failed = desk.run("resume", "wrong", "newer.py:support")
    assert failed.returncode == 1
    assert "the input of the run does not fit agent support in version 2" in failed.stderr
    assert "the argument extra is unknown" in desk("why", "wrong")
    assert desk("start", "support", "prompt=go", "--id", "pinned", "--version", "1") == "pinned\n"
    assert "begun with version 1" in desk.refusal("resume", "pinned", "newer.py:support")
