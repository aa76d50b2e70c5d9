"""Plans in files, as people use them: real processes, error messages, and kills while several steps run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.servers import forked

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TOOLS = """
import asyncio, os
from pathlib import Path
from perdure import Call, Fatal, Run, agent, tool

HERE = Path(__file__).parent

def note(line):
    with open(HERE / "ledger", "a") as ledger:
        ledger.write(line + "\\n")

@tool(effect="keyed")
async def act(name: str, call: Call, before: list[str] = []) -> dict:
    seen = (HERE / "ledger").read_text() if (HERE / "ledger").exists() else ""
    if call.key not in seen:      # as a service does that knows the key
        note(f"{name} {call.key}")
    with open(HERE / "begun", "a") as begun:
        begun.write(f"{name}\\n")
    while (HERE / "hold").exists():
        await asyncio.sleep(0.01)
    return {"name": name}

@agent(version="1")
async def child(run: Run, text: str) -> str:
    return text.upper()
"""
PLAN = """
[params]
service = "string"

[[steps]]
name = "first"
tool = "act"
args = { name = { "$param" = "service" } }

[[steps]]
name = "left"
tool = "act"
args = { name = "left", before = [{ "$ref" = ["first", "name"] }] }

[[steps]]
name = "right"
tool = "act"
args = { name = "right", before = [{ "$ref" = ["first", "name"] }] }

[[steps]]
name = "last"
tool = "child"
args = { text = { "$ref" = ["left", "name"] } }
after = ["right"]
"""


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "DEPLOYMENT_"))}
    return {**clean, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def perdure(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perdure", *words]
    return forked.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, check=False)


def written(folder: Path, plan: str = PLAN, name: str = "plan.toml") -> Path:
    (folder / "tools.py").write_text(TOOLS)
    (folder / name).write_text(plan)
    return folder


def ledger(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "ledger").read_text().splitlines()]


def until(condition: Any, seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.01)


def test_a_plan_in_a_file_runs_and_resumes_with_the_code_that_is_recorded(tmp_path: Path) -> None:
    written(tmp_path)
    ran = perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "service=shop", "--id", "r", "--json")
    assert ran.returncode == 0, ran.stderr
    left, right = {"name": "left"}, {"name": "right"}
    assert json.loads(ran.stdout)["output"] == {"first": {"name": "shop"}, "left": left, "right": right, "last": "LEFT"}
    shown = perdure(tmp_path, "events", "r")
    assert "step left: act" in shown.stdout
    assert "plan" in shown.stdout
    again = perdure(tmp_path, "resume", "r", "--json")
    assert json.loads(again.stdout)["output"]["last"] == "LEFT"
    assert sorted(ledger(tmp_path)) == ["left", "right", "shop"]
    replayed = perdure(tmp_path, "replay", "r")
    assert replayed.returncode == 0, replayed.stderr
    assert "same" in replayed.stdout
    typed = perdure(tmp_path, "replay", "r", "plan.toml", "--tools", "tools.py")
    assert typed.returncode == 0, typed.stderr


def test_the_same_plan_as_json(tmp_path: Path) -> None:
    plan = {"name": "hello", "steps": [{"name": "a", "tool": "act", "args": {"name": "json"}}]}
    written(tmp_path, json.dumps(plan), "plan.json")
    ran = perdure(tmp_path, "run", "plan.json", "--tools", "tools.py")
    assert ran.returncode == 0, ran.stderr
    assert ledger(tmp_path) == ["json"]


def test_a_kill_in_the_middle_of_parallel_steps_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "hold").touch()
    command = [sys.executable, "-m", "perdure", "run", "plan.toml", "--tools", "tools.py", "service=shop", "--id", "r"]

    def kill_when(begun: int) -> None:
        running = forked.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            file = tmp_path / "begun"
            until(lambda: file.exists() and len(file.read_text().splitlines()) >= begun)
        finally:
            os.kill(running.pid, signal.SIGKILL)
            running.wait(60)

    kill_when(1)  # inside the first step
    assert ledger(tmp_path) == ["shop"]
    (tmp_path / "begun").unlink()
    (tmp_path / "hold").unlink()
    # The two that run at the same time hold; the first does not, being done with.
    (tmp_path / "tools.py").write_text(
        TOOLS.replace('while (HERE / "hold").exists():', 'while name != "shop" and (HERE / "stay").exists():')
    )
    (tmp_path / "stay").touch()
    kill_when(3)  # the first again, and both of the next
    (tmp_path / "stay").unlink()
    done = perdure(tmp_path, "resume", "r", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"]["last"] == "LEFT"
    assert sorted(ledger(tmp_path)) == ["left", "right", "shop"]
    events = [json.loads(line) for line in perdure(tmp_path, "events", "r", "--json").stdout.splitlines()]
    assert [event["type"] for event in events].count("plan_generated") == 1
    assert sum(event["data"].get("takeover", False) for event in events) == 2


def test_a_worker_serves_a_plan_from_a_file(tmp_path: Path) -> None:
    written(tmp_path)
    started = perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "service=shop", "--id", "r", "--detach")
    assert started.returncode == 0, started.stderr
    command = [sys.executable, "-m", "perdure", "worker", "plan.toml", "--tools", "tools.py"]
    worker = forked.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (tmp_path / "ledger").exists() and len(ledger(tmp_path)) == 3)
        until(lambda: json.loads(perdure(tmp_path, "show", "r", "--json").stdout)["status"] == "succeeded")
    finally:
        worker.send_signal(signal.SIGTERM)
        _, said = worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert "serving plan@" in said
    assert "serving child@1" in said  # the agent that is a step of it


def test_a_plan_whose_begun_steps_have_changed_under_a_run_is_refused_and_names_the_step(tmp_path: Path) -> None:
    asks = PLAN.replace('after = ["right"]', 'after = ["right"]\napproval = true')
    written(tmp_path, asks)
    assert perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "service=shop", "--id", "r").returncode == 3
    (tmp_path / "plan.toml").write_text(
        asks.replace('name = "right"\ntool', 'name = "wrong"\ntool').replace('after = ["right"]', 'after = ["wrong"]')
    )
    refused = perdure(tmp_path, "resume", "r")
    assert refused.returncode == 2
    assert "was begun with version" in refused.stderr
    assert "its step right has begun, and this plan has no such step" in refused.stderr
    assert "perdure adopt" not in refused.stderr  # it would be refused
    again = perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "service=shop", "--id", "r")
    assert again.returncode == 2
    assert "its step right has begun, and this plan has no such step" in again.stderr
    assert "FILE.py" not in again.stderr
    advised = perdure(tmp_path, "why", "r").stdout
    assert "NEW_FILE.py:plan" not in advised
    adopted = perdure(tmp_path, "resume", "r", "plan.toml", "--tools", "tools.py", "--adopt")
    assert adopted.returncode == 2
    assert "its step right has begun, and this plan has no such step" in adopted.stderr
    assert sorted(ledger(tmp_path)) == ["left", "right", "shop"]


def test_a_plan_file_whose_later_steps_have_changed_goes_on_with_a_run_that_it_adopts(tmp_path: Path) -> None:
    asks = PLAN.replace('after = ["right"]', 'after = ["right"]\napproval = true')
    written(tmp_path, asks)
    assert perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "service=shop", "--id", "r").returncode == 3
    more = '\n[[steps]]\nname = "after"\ntool = "act"\nargs = { name = { "$ref" = ["last"] } }\n'
    (tmp_path / "plan.toml").write_text(asks + more)
    refused = perdure(tmp_path, "resume", "r")
    assert refused.returncode == 2
    assert "let this code go on with it, which fits its journal: perdure adopt r" in refused.stderr
    dry = perdure(tmp_path, "adopt", "r", "plan.toml", "--tools", "tools.py", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "nothing was written" in dry.stdout
    adopted = perdure(tmp_path, "adopt", "r", "plan.toml", "--tools", "tools.py", "--by", "ann")
    assert adopted.returncode == 0, adopted.stderr
    assert "goes on with it" in perdure(tmp_path, "why", "r").stdout
    (asked,) = [json.loads(line) for line in perdure(tmp_path, "approvals", "--json").stdout.splitlines()]
    assert perdure(tmp_path, "approve", asked["approval"], "--by", "ben").returncode == 0
    done = perdure(tmp_path, "resume", "r")
    assert done.returncode == 0, done.stderr
    assert sorted(ledger(tmp_path)) == ["LEFT", "left", "right", "shop"]
    assert perdure(tmp_path, "verify", "r").returncode == 0
    same = perdure(tmp_path, "replay", "r", "plan.toml", "--tools", "tools.py")
    assert same.returncode == 0, same.stdout


def test_check_only_prints_the_order_and_makes_no_journal(tmp_path: Path) -> None:
    written(tmp_path)
    checked = perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "--check")
    assert checked.returncode == 0, checked.stderr
    lines = checked.stdout.splitlines()
    assert lines[0].startswith("plan plan@")
    assert [line.split(";")[0].split() for line in lines[1:]] == [
        ["takes", "service:", "string,", "which", "must", "be", "given"],
        ["1.", "first:", "act"],
        ["2.", "left:", "act"],
        ["2.", "right:", "act"],
        ["3.", "last:", "child"],
    ]
    as_json = json.loads(perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "--check", "--json").stdout)
    assert [(step["name"], step["turn"]) for step in as_json["steps"]] == [("first", 1), ("left", 2), ("right", 2), ("last", 3)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["plan.toml", "tools.py"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["servce=x"], "the argument servce is unknown"),
        (["service:=3"], "parameter service"),
        (["--input", "{}"], "the argument service is missing"),
    ],
)
def test_check_looks_at_the_arguments_that_are_given(tmp_path: Path, given: list[str], said: str) -> None:
    written(tmp_path)
    checked = perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "--check", *given)
    assert (checked.returncode, checked.stdout) == (2, "")
    assert said in checked.stderr


def test_check_says_that_the_arguments_are_right(tmp_path: Path) -> None:
    written(tmp_path)
    checked = perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "--check", "service=shop")
    assert checked.returncode == 0, checked.stderr
    assert "no problem in it or its arguments" in checked.stdout


def test_every_problem_of_a_plan_is_a_line_of_its_own(tmp_path: Path) -> None:
    broken = PLAN.replace('service = "string"', 'service = "text"').replace('tool = "child"', 'tool = "chidl"').replace('"left", b', "3, b")
    written(tmp_path, broken)
    checked = perdure(tmp_path, "run", "plan.toml", "--tools", "tools.py", "--check")
    assert checked.returncode == 2
    first, *others = checked.stderr.splitlines()
    assert first == "perdure: plan plan (plan.toml) has 3 problems:"
    assert [line.split(":")[0] for line in others] == ["  - the parameter service", "  - step left", "  - step last"]


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["run", "plan.toml"], "plan.toml is a plan, which names tools; say in which file they are: --tools FILE.py", 2),
        (["run", "none.toml", "--tools", "tools.py"], "there is no file none.toml", 6),
        (["run", "plan.toml", "--tools", "none.py"], "there is no file none.py", 6),
        (["run", "tools.py:child", "--tools", "tools.py", "text=x"], "is not the file of a plan", 2),
        (["run", "tools.py:child", "--check"], "is agent child, and no plan", 2),
        (["run", "plan.toml", "--tools", "tools.py"], "the argument service is missing; it takes service", 2),
        (["run", "plan.toml", "--tools", "tools.py", "servce=x"], "the argument servce is unknown", 2),
        (["resume", "r", "--tools", "tools.py"], "there is no run r", 6),
    ],
)
def test_wrong_usage_is_one_line_with_the_way_out(tmp_path: Path, words: list[str], said: str, code: int) -> None:
    written(tmp_path)
    if words[0] == "resume":
        assert perdure(tmp_path, "run", "tools.py:child", "text=x").returncode == 0  # so that there is a journal
    ran = perdure(tmp_path, *words)
    assert (ran.returncode, said in ran.stderr) == (code, True), ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_recorded_plan_is_loaded_on_a_databases_word_only_where_code_would_be(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "elsewhere").mkdir()
    asks = PLAN.replace('after = ["right"]', 'after = ["right"]\napproval = true')
    written(tmp_path / "code", asks)
    url = f"sqlite:///{tmp_path / 'elsewhere' / 'p.db'}"
    first = perdure(tmp_path / "code", "run", "plan.toml", "--tools", "tools.py", "service=s", "--id", "r", "--url", url)
    assert first.returncode == 3, first.stderr
    refused = perdure(tmp_path / "elsewhere", "resume", "r", "--url", url)
    assert refused.returncode == 2
    plan, tools = tmp_path / "code" / "plan.toml", tmp_path / "code" / "tools.py"
    assert f"look at it, then: perdure resume r {plan} --tools {tools} --url" in refused.stderr
    typed = perdure(tmp_path / "elsewhere", "resume", "r", str(plan), "--tools", str(tools), "--url", url)
    assert typed.returncode == 3, typed.stderr


# -- the example --------------------------------------------------------------------------------------------------------------------
def effects(folder: Path) -> list[str]:
    return [" ".join(line.split()[:2]) for line in (folder / "world" / "effects.log").read_text().splitlines()]


def example(folder: Path, kind: str) -> list[str]:
    file, py = EXAMPLES / "deployment.toml", EXAMPLES / "deployment.py"
    return [str(file), "--tools", str(py)] if kind == "file" else [f"{py}:deployment"]


@pytest.mark.parametrize("kind", ["file", "python"])
@pytest.mark.parametrize("broken", [False, True])
def test_the_deployment_asks_rolls_out_and_undoes(tmp_path: Path, kind: str, broken: bool) -> None:
    target = example(tmp_path, kind)
    if broken:
        (tmp_path / "world").mkdir()
        (tmp_path / "world" / "broken").touch()
    ran = perdure(tmp_path, "run", *target, "service=shop", "--id", "d")
    assert ran.returncode == 3, ran.stderr
    assert effects(tmp_path) == ["built shop"]
    [asked] = [json.loads(line) for line in perdure(tmp_path, "approvals", "--json").stdout.splitlines()]
    assert perdure(tmp_path, "approve", asked["approval"], "--by", "ann", "--edit", '{"replicas": 5}').returncode == 0
    done = perdure(tmp_path, "resume", "d", *target, "--json")
    output = json.loads(done.stdout)
    if broken:
        assert done.returncode == 1
        assert "step roll_out (roll_out) failed: Fatal: the cluster is full" in output["error"]
        assert "undone: build" in output["error"]
        assert effects(tmp_path)[1].startswith("deleted shop:")
        page = perdure(tmp_path, "why", "d").stdout
        assert "perdure undo" not in page
        assert "– undone by call" in page
        assert "/src/perdure/" not in page
        assert "/asyncio/" not in page
    else:
        assert done.returncode == 0, done.stderr
        assert output["output"]["announce"] == "told"
        assert output["output"]["$not_done"]["scan"]["outcome"] == "failed"
        assert "out to 5" in (tmp_path / "world" / "effects.log").read_text()
        assert len(effects(tmp_path)) == 3


def test_the_two_deployments_are_one_plan() -> None:
    program = (
        "from perdure import Plan\nimport deployment\n"
        "tools = [value for value in vars(deployment).values() if hasattr(value, 'effect')]\n"
        "print(Plan.from_file('deployment.toml', tools).digest == deployment.deployment.digest)"
    )
    ran = forked.run(
        [sys.executable, "-c", program], cwd=EXAMPLES, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout.strip() == "True", ran.stderr
