"""Model calls as a person on call sees them: the real program, and a run whose process was killed during a request."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.servers import forked

AGENTS = """
import os
from pathlib import Path
from perdure import Run, agent, tool
from perdure.models import Answer, Price, Scripted, Tokens, ToolResult, ToolSpec, User
from perdure.models.scripted import use

HERE = Path(__file__).parent
SPECS = [ToolSpec("lookup", "finds an order", {"type": "object", "properties": {"order": {"type": "string"}}})]

@tool(effect="read")
async def lookup(order: str) -> str:
    return f"order {order}: \\x1b[2J\\u202e broken " + "x" * 300

def last(request):
    if (HERE / "kill").exists():
        (HERE / "kill").unlink()
        os.kill(os.getpid(), 9)
    return Answer("Sorry about \\x1b[31mthat.", tokens=Tokens(2000, 20, cached=1000))

model = Scripted(
    [Answer("Let me see.", (use("lookup", order="o-1"),), "tools", tokens=Tokens(1204, 35)), last], name="claude-x", price=Price(3, 15)
)

@agent(version="1")
async def support(run: Run, prompt: str) -> str:
    messages = [User(prompt)]
    while True:
        answer = await model.ask(messages, system="be kind", tools=SPECS, max_tokens=500)
        messages.append(answer.message)
        if not answer.uses:
            run.decide("end", among=["end", "go on"], reason="all is said")
            if "fail" in prompt:
                raise ValueError("it was to fail")
            return answer.text
        messages += [ToolResult(one.id, one.name, await lookup(**one.arguments)) for one in answer.uses]
"""


class Desk:
    """A folder with a journal in it, and the program run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bot.py").write_text(AGENTS)

    def raw(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        env = {**os.environ, "PERDURE_URL": "sqlite:///j.db", "NO_COLOR": "1"}
        return forked.run([sys.executable, "-m", "perdure", *words], cwd=self.folder, env=env, capture_output=True, timeout=60)

    def say(self, *words: str, code: int = 0) -> str:
        """The output on both streams; the program must end with this code."""
        done = self.raw(*words)
        said = (done.stdout + done.stderr).decode()
        assert done.returncode == code, said
        return said


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Run r was killed inside its second question, and went on in another process."""
    desk = Desk(tmp_path_factory.mktemp("models"))
    (desk.folder / "kill").touch()
    desk.say("run", "bot.py:support", "prompt=my order is \u202ebroken", "--id", "r", code=-signal.SIGKILL)
    cut_off = desk.say("why", "r")
    assert "cut off, and will be run again" in cut_off
    assert "3 claude-x (3 messages, 2 of them new)" in cut_off
    desk.say("resume", "r")
    return desk


def test_the_journal_tells_the_conversation_and_what_was_lost(desk: Desk) -> None:
    told = desk.say("events", "r")
    for words in (
        "call 1 claude-x is asked (1 message)",
        ': “Let me see.” and wants lookup(order="o-1") (1,204 tokens in, 35 out, $0.004137)',
        "call 3 claude-x is asked (3 messages, 2 of them new)",
        "call 3 claude-x: the answer to attempt 1 was lost with its worker; it counts as what was reserved for it: 0 tokens in, 500 out, $0.0075",
        "call 3 claude-x is asked again (attempt 2)",
        'the agent decided "end" among ["end","go on"], because all is said',
    ):
        assert words in told, words
    shown = desk.say("show", "r")
    assert "1 lost request to models, counted with what was reserved for them" in shown
    for page in (told, shown, desk.say("why", "r"), desk.say("list")):
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert "again_of" not in page
        assert "digest" not in page


def test_a_trace_says_which_answer_wanted_a_tool_and_what_it_had_heard(desk: Desk) -> None:
    events = [json.loads(line) for line in desk.say("events", "r", "--json").splitlines()]
    looked = next(event["seq"] for event in events if event["type"] == "tool_call_completed")
    told = desk.say("trace", "r", str(looked))
    assert 'wanted it: lookup(order="o-1"):' in told
    assert "it had received: the user said: “my order is \\u202ebroken”" in told
    assert "“Let me see.”" in told
    end = desk.say("trace", "r", str(len(events)))
    assert "it had received: the result of lookup: order o-1: \\x1b[2J\\u202e broken xxx" in end


def test_the_exact_request_of_a_call_can_be_had_and_hashed(desk: Desk) -> None:
    exact = desk.raw("show", "r", "--prompt", "3", "--json")
    assert exact.returncode == 0
    request = json.loads(exact.stdout)
    assert [message["role"] for message in request["messages"]] == ["user", "assistant", "tool"]
    assert request["system"] == "be kind"
    shown = desk.say("show", "r", "--prompt", "3")
    assert f"SHA-256 {hashlib.sha256(exact.stdout).hexdigest()}, as recorded" in shown
    args = json.loads(desk.say("show", "r", "--json"))["calls"][2]["args"]
    assert args["digest"] == hashlib.sha256(exact.stdout).hexdigest()
    for words in (
        "system\n  be kind",
        "tool lookup\n  finds an order",
        "1. user\n  my order is \\u202ebroken",
        "wants lookup (use use_lookup_o-1)",
    ):
        assert words in shown, words
    assert "3. result of lookup (use use_lookup_o-1)\n  order o-1: \\x1b[2J\\u202e broken" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("2", 2, "call 2 of run r is one of tool lookup, and no question to a model; its calls to models are 1, 3"),
        ("9", 6, "run r has no call 9; its calls to models are 1, 3"),
        ("0", 2, "0 is not in the range"),
    ],
)
def test_a_wrong_call_is_told(desk: Desk, call: str, code: int, words: str) -> None:
    assert words in desk.say("show", "r", "--prompt", call, code=code)


def test_costs_have_the_model_and_what_was_lost(desk: Desk) -> None:
    table = desk.say("costs", "--by", "model")
    assert "lost" in table.splitlines()[0]
    assert "1 request to models lost with a worker: each counts what was reserved for it, 0 without max_tokens" in table
    (row, _) = [json.loads(line) for line in desk.say("costs", "--by", "model", "--json").splitlines()]
    assert (row["group"], row["calls"], row["tokens_in"], row["tokens_out"], row["lost"]) == ("claude-x", 2, 3204, 555, 1)
    cost = json.loads(desk.say("show", "r", "--json"))["cost"]
    assert (cost["calls"], cost["attempts"], cost["tokens_in"], cost["lost"]) == (3, 4, 3204, 1)


def test_the_other_verbs_take_a_model_call_for_what_it_is(desk: Desk) -> None:
    desk.say("verify")
    desk.say("replay", "r")
    assert "FAIL" not in desk.say("doctor")
    lines: list[dict[str, Any]] = [json.loads(line) for line in desk.say("audit").splitlines()]
    lost = next(line for line in lines if line["type"] == "model_call_failed")
    assert (lost["tool"], lost["error"].partition(":")[0]) == ("claude-x", "AnswerLost")
    desk.say("run", "bot.py:support", "prompt=fail", "--id", "failed", code=1)
    assert "undo" not in desk.say("why", "failed")
    assert "claude-x" not in desk.say("undo", "failed", "--dry-run")


def test_a_journal_that_was_changed_is_told_with_code_7(desk: Desk, tmp_path: Path) -> None:
    other = Desk(tmp_path)
    other.say("run", "bot.py:support", "prompt=hello", "--id", "r")
    with apsw.Connection(str(tmp_path / "j.db")) as prompt:
        prompt.execute("DROP TRIGGER perdure_events_no_update")
        prompt.execute("UPDATE perdure_events SET data = replace(data, 'Let me see', 'Let me bee') WHERE type = 'model_call_completed'")
    said = other.say("show", "r", "--prompt", "3", code=7)
    assert "run r: the request of call 3 cannot be made again as it was: its digest is " in said
    assert "perdure verify" in said
    assert other.raw("show", "r", "--prompt", "3", "--json").stdout == b""
    assert "hello" in other.say("show", "r", "--prompt", "1")
