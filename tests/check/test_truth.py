"""The rules are true: code that a rule reports differs on replay, or is refused. Its innocent twin is not reported."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.check.snippets import PAIRS, program

from perdure import Call, InvalidInput, Perdure, Plan, ReAct, Retry, Run, Step, agent, tool
from perdure.check import Finding, look
from perdure.check.finding import RULES
from perdure.core.agent_loop import _REFUSED
from perdure.core.machine import CancelAsked, Cancelled, Facts, Finish, Machine
from perdure.models import Scripted

ROOT = Path(__file__).resolve().parents[2]


def found_in(source: str) -> list[Finding]:
    return look("file.py", source.encode()).findings


def told(folder: Path, what: str, seed: str) -> dict[str, str]:
    """The result of each agent, in a separate process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": seed, "WORLD": f"the world of {what}"}
    (folder / "world.txt").write_text(f"the world of {what}")
    command = [sys.executable, "truth.py", what, "journal.db"]
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    return {name: f"{verdict} {why}" for name, verdict, why in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.long
def test_what_is_reported_truly_differs_on_replay_or_is_refused_and_its_twin_does_not(tmp_path):
    (tmp_path / "truth.py").write_text(program())
    refused = told(tmp_path, "record", "1")
    replayed = told(tmp_path, "replay", "2")

    wrong = [why for why in refused.values() if "NotAllowedInAgent" not in why]
    assert wrong == []  # each agent failed only for the expected reason
    assert [
        pair.name for pair in PAIRS if f"guilty_{pair.name}" not in refused and replayed[f"guilty_{pair.name}"].startswith("same")
    ] == []
    assert {pair.name: refused.get(f"innocent_{pair.name}", replayed[f"innocent_{pair.name}"]) for pair in PAIRS} == {
        pair.name: "same " for pair in PAIRS
    }


def test_the_guilty_are_reported_by_their_rule_and_their_twins_by_none():
    by_agent: dict[str, set[str]] = {}
    for finding in found_in(program()):
        agent_name = finding.where.removeprefix("agent ").partition(" → ")[0]
        by_agent.setdefault(agent_name, set()).add(finding.rule)
    assert by_agent == {f"guilty_{pair.name}": {pair.rule} for pair in PAIRS}


def test_every_rule_that_is_an_error_inside_agents_has_been_shown_true():
    shown = {pair.rule for pair in PAIRS}
    assert shown == {"clock", "random", "io", "global", "thread", "order"}
    assert set(RULES) - shown == {
        "swallow",
        "checkpoint",
        "print",
        "effect",
        "key",
        "reconcile",
        "timeout",
        "undecorated",
        "syntax",
        "ignore",
    }  # below, or notes


def machine_of(source: str) -> Machine:
    """A real machine for the agent `one` of this source."""
    names: dict[str, Any] = {"__name__": "truth"}
    exec(compile(source, "truth.py", "exec", dont_inherit=True), names)
    return names["one"].machine(Facts("r", "default", None, "one", "1"), b"{}", 1000)  # type: ignore[no-any-return]


BLOCKED = "import asyncio, time\nfrom perdure import Run, agent\n@agent(version='1')\nasync def one(run: Run):\n    {}\n"


def test_a_blocking_sleep_is_no_durable_timer():
    guilty, innocent = BLOCKED.format("time.sleep(0.001)"), BLOCKED.format("await asyncio.sleep(0.001)")
    assert [finding.rule for finding in found_in(guilty)] == ["clock"]
    assert found_in(innocent) == []
    blocked, durable = machine_of(guilty), machine_of(innocent)
    blocked.start(1)
    durable.start(1)
    assert (blocked.timers_set, durable.timers_set) == (0, 1)
    durable.close()


WAITING = "import asyncio\nfrom perdure import Run, agent\n@agent(version='1')\nasync def one(run: Run):\n    try:\n        await asyncio.sleep(60)\n    {}\n"


@pytest.mark.parametrize(
    ("handler", "severity"),
    [
        ("except: pass", "error"),
        ("except BaseException: pass", "error"),
        ("except (ValueError, BaseException): pass", "error"),
        ("except asyncio.CancelledError: pass", "note"),
        ("except Exception: pass", None),
        ("except BaseException: raise", None),
        ("except asyncio.CancelledError: raise\n    except BaseException: pass", None),
        # raised, and yet not again, or not on every path
        ("except BaseException as error: raise RuntimeError('converted') from error", "error"),
        ("except BaseException as error: raise ValueError", "error"),
        ("except BaseException:\n        if run is None: raise", "error"),
        ("except BaseException as error:\n        if isinstance(error, ValueError): raise", "error"),
        ("except BaseException as error:\n        if not isinstance(error, asyncio.CancelledError): raise", "error"),
        ("except BaseException:\n        if run: return\n        raise", "error"),
        ("except BaseException:\n        for _ in 'ab': return\n        raise", "error"),
        ("except BaseException:\n        try: int('x')\n        except ValueError: return\n        raise", "error"),
        ("except BaseException as error:\n        match error:\n            case OSError(): raise", "error"),
        ("except asyncio.CancelledError as error: raise RuntimeError('converted') from error", "note"),
        ("except asyncio.CancelledError: pass\n    except BaseException: pass", "note"),
        # and again, on every path that a cancellation takes
        ("except BaseException as error: raise error", None),
        ("except BaseException as error: raise error.with_traceback(None)", None),
        ("except BaseException as error: raise asyncio.CancelledError('stopped') from error", None),
        ("except BaseException as error:\n        if isinstance(error, (ValueError, asyncio.CancelledError)): raise", None),
        ("except BaseException as error:\n        if not isinstance(error, Exception): raise\n        return", None),
        ("except BaseException as error:\n        if isinstance(error, Exception) and run: return\n        raise", None),
        ("except BaseException as error:\n        if isinstance(error, Exception): pass\n        else: raise", None),
        ("except BaseException:\n        try: int('x')\n        except ValueError: pass\n        raise", None),
        ("except BaseException:\n        try: int('1')\n        finally: raise", None),
        ("except BaseException:\n        for _ in 'ab': int('1')\n        else: raise", None),
    ],
)
def test_a_swallowed_cancellation_is_reported_and_the_run_does_not_end_as_cancelled(handler, severity):
    source = WAITING.format(handler)
    found = found_in(source)
    assert [(finding.rule, finding.severity) for finding in found] == ([("swallow", severity)] if severity else [])

    machine = machine_of(source)
    machine.start(1)
    [*_, finish] = machine.deliver(2, CancelAsked())

    assert isinstance(finish, Finish)
    assert isinstance(finish.outcome, Cancelled) is (severity is None)


KEYED = """
from perdure import Call, tool
@tool(effect="keyed")
def pay(call: Call) -> str:
    {}
"""


def test_a_keyed_tool_that_ignores_its_key_acts_twice_and_one_that_sends_it_does_not(tmp_path):
    service: list[str] = []

    @tool(effect="keyed", retry=Retry(attempts=2, base=0.001))
    async def careless(call: Call) -> str:
        service.append("careless")
        if call.attempt == 1:
            raise TimeoutError("the answer is lost")
        return "paid"

    @tool(effect="keyed", retry=Retry(attempts=2, base=0.001))
    async def careful(call: Call) -> str:
        if f"careful {call.key}" not in service:
            service.append(f"careful {call.key}")
        if call.attempt == 1:
            raise TimeoutError("the answer is lost")
        return "paid"

    @agent(version="1")
    async def payer(run: Run) -> None:
        await careless()
        await careful()

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/journal.db", agents=[payer]) as app:
            await app.run(payer, id="payer")

    asyncio.run(main())
    assert [line.split()[0] for line in service] == ["careless", "careless", "careful"]
    assert [finding.rule for finding in found_in(KEYED.format("return send(call.attempt)"))] == ["key"]
    assert [finding.rule for finding in found_in(KEYED.format("print(call)"))] == ["key"]
    assert found_in(KEYED.format("return send(call.key)")) == []


def test_an_unknown_effect_is_refused_by_the_runtime_too():
    assert [(finding.rule, finding.severity) for finding in found_in(KEYED.replace("keyed", "keyd").format("..."))] == [("effect", "error")]
    with pytest.raises(InvalidInput, match="keyd"):
        tool(effect="keyd")(plain)  # type: ignore[call-overload]


def plain() -> None: ...


PLAIN = """
from perdure import ReAct, Step, tool
def plain(): ...
@tool(effect="read")
def fit(): ...
thinker = ReAct("x", model=model, tools=[fit, {0}])
step = Step("x", {0})
"""


def test_a_plain_function_in_place_of_a_tool_is_refused_by_the_runtime_too():
    assert [finding.rule for finding in found_in(PLAIN.format("plain"))] == ["undecorated", "undecorated"]
    assert [finding.rule for finding in found_in(PLAIN.format("lambda: 1"))] == ["undecorated", "undecorated"]
    assert found_in(PLAIN.format("fit")) == []
    with pytest.raises(InvalidInput):
        ReAct("x", model=Scripted(["y"]), tools=[plain])
    with pytest.raises(InvalidInput):
        Plan("x", steps=[Step("one", plain)])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(name for names in _REFUSED.values() for name in names.split()))
def test_whatever_the_agents_loop_refuses_is_reported(name):
    source = BLOCKED.format(f"asyncio.get_running_loop().{name}()")
    assert [(finding.line, finding.severity) for finding in found_in(source)] == [(5, "error")]
