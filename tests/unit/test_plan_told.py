"""What `show`, `events`, `audit`, `trace` and `why` say about the steps of a plan."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock

from perdure import Agent, InvalidPlan, Perdure, Plan, Run, Step, agent, param, ref, tool
from perdure.core.events import ApprovalRequested, Event
from perdure.inspect.audit import Audit
from perdure.inspect.timeline import PlanStep, Timeline, steps_of
from perdure.inspect.trace import trace
from perdure.inspect.view import loader, read_run, run_record
from perdure.inspect.why.page import why
from perdure.store.api import Store
from perdure.store.open import open_store


@tool(effect="idempotent")
async def build(service: str) -> dict[str, Any]:
    return {"tag": f"{service}:v1"}


@build.compensate(effect="idempotent")
async def _(result: Any) -> None:
    pass


@tool(effect="read")
async def probe(image: str) -> dict[str, Any]:
    return {"failures": 1}


@tool(effect="once")
async def shift(image: str) -> str:
    raise PermissionError("not for you")


@agent(version="1")
async def announce(run: Run, image: str) -> str:
    return f"{image} is there"


def plan_of(**last: Any) -> Plan:
    return Plan(
        "deploy",
        params={"service": str},
        steps=[
            Step("build", build, {"service": param("service")}, description="Build the image of the service"),
            Step("test", probe, {"image": ref("build", "tag")}),
            Step("mail", announce, {"image": ref("build", "tag")}, description="Tell the customers"),
            Step("spare", probe, {"image": ref("build", "tag")}, when=ref("test", "failures") == 0, description="Only if it is sound"),
            Step("shift", shift, {"image": ref("build", "tag")}, after="spare", description="Shift the traffic", **last),
            Step("check", probe, {"image": ref("shift")}, description="Look whether it is up"),
        ],
    )


def told(tmp_path: Path, plan: Agent[..., Any]) -> tuple[Store, list[Event]]:
    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [plan], settings=SETTINGS, clock=ManualClock()) as app:
            await app.start(plan, service="shop", id="r")
            await app.drive("r", wait=False)

    asyncio.run(main())
    store = open_store(f"sqlite:///{tmp_path / 'db'}")
    return store, store.read("r")


@pytest.fixture
def failed(tmp_path: Path) -> Iterator[tuple[Store, list[Event]]]:
    """Its last step but one fails, and the earlier steps are undone."""
    store, events = told(tmp_path, plan_of(on_failure="undo"))
    yield store, events
    store.close()


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[tuple[Store, list[Event]]]:
    """A step waits for its approval."""
    store, events = told(tmp_path, plan_of(approval=True))
    yield store, events
    store.close()


def test_every_call_of_a_step_is_known_by_the_name_and_the_description_of_the_step(failed: tuple[Store, list[Event]]) -> None:
    store, events = failed
    tools = {
        event.call: getattr(event.body, "tool", None) or getattr(event.body, "agent", None) for event in reversed(events) if event.call
    }
    steps = {(step.name, step.undoing): (tools[call], step.description) for call, step in steps_of(events, loader(store)).items()}
    assert steps == {
        ("build", False): ("build", "Build the image of the service"),
        ("test", False): ("probe", None),
        ("mail", False): ("announce", "Tell the customers"),
        ("shift", False): ("shift", "Shift the traffic"),
        ("build", True): ("build.undo", "Build the image of the service"),
    }


def test_show_events_audit_and_trace_name_the_step_of_a_call(failed: tuple[Store, list[Event]]) -> None:
    store, events = failed
    load = loader(store)
    shift_ = next(event for event in events if event.type == "tool_call_failed")
    step = {"name": "shift", "description": "Shift the traffic"}
    record = run_record(read_run(store, "r"), load)
    assert [call["plan_step"] for call in record["calls"] if call["tool"] == "shift"] == [step]
    assert [child["plan_step"]["name"] for child in record["children"]] == ["mail"]
    timeline = Timeline("r", load)
    said = {event.seq: timeline.say(event) for event in events}
    began = next(event for event in events if event.call == shift_.call)
    assert said[began.seq].endswith("[step shift: Shift the traffic]")
    assert said[shift_.seq].endswith("[step shift]"), "it is described once"
    assert timeline.record(shift_, b"")["plan_step"] == step
    lines = {line["seq"]: line for line in Audit(store).more() if line["run_id"] == "r"}
    assert lines[shift_.seq]["context"]["plan_step"] == step
    links = trace("r", events, shift_.seq, load=load)
    assert links[-1].plan_step == PlanStep("shift", "Shift the traffic")
    assert any(one.type == "plan_generated" for link in links for one in link.stated), "the plan is on the way to its steps"


def test_why_says_which_steps_never_started_and_why(failed: tuple[Store, list[Event]]) -> None:
    store, _ = failed
    never = why(store, "r", now=0).never_started
    assert never == [
        "step spare (probe) – Only if it is sound: skipped: its condition does not hold: ref('test', 'failures') is 0",
        "step check (probe) – Look whether it is up: never begun: the plan ended first",
    ]


def test_why_says_which_steps_have_not_started_yet(asking: tuple[Store, list[Event]]) -> None:
    store, events = asking
    (asked,) = [event.body for event in events if isinstance(event.body, ApprovalRequested)]
    never = why(store, "r", now=0).never_started
    assert f"step shift (shift) – Shift the traffic: not begun: approval {asked.approval} is needed" in never
    assert "step check (probe) – Look whether it is up: not begun yet" in never
    assert not [line for line in never if "step build" in line or "step test" in line]
    record = run_record(read_run(store, "r"), loader(store))
    assert [one["plan_step"]["name"] for one in record["approvals"]] == ["shift"]


def test_an_agent_that_only_reports_such_words_follows_no_plan(tmp_path: Path) -> None:
    @agent(version="1")
    async def pretends(run: Run, service: str) -> Any:
        run.status("step build: build")
        return await build(service)

    store, events = told(tmp_path, pretends)
    assert steps_of(events) == {}
    store.close()


def test_a_description_is_part_of_the_plan_and_a_plan_without_one_keeps_its_digest() -> None:
    one, same = Plan("p", [Step("a", build, {"service": "s"})]), Plan("p", [Step("a", build, {"service": "s"}, description=None)])
    assert one.document == {"name": "p", "steps": [{"name": "a", "tool": "build", "args": {"service": "s"}}]}
    assert one.digest == same.digest
    described = Plan("p", [Step("a", build, {"service": "s"}, description="why")])
    assert described.document["steps"][0]["description"] == "why"
    with pytest.raises(InvalidPlan, match="description is a text of at most 500 characters"):
        Plan("p", [Step("a", build, {"service": "s"}, description=7)])  # type: ignore[arg-type]


# -- text that looks like a reference ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("$step_0", "write ref('build'), in a file {'$ref': ['build']}"),
        ("$step0.tag", "write ref('build', 'tag')"),
        ("$step_7", "write ref('NAME')"),
        ("$build", "write ref('build')"),
        ("${build}", "write ref('build')"),
        ("$build.images[0].tag", "write ref('build', 'images', 0, 'tag')"),
        ("$service", "write param('service'), in a file {'$param': ['service']}"),
    ],
)
def test_a_text_that_looks_like_a_reference_is_refused_with_the_reference(text: str, hint: str) -> None:
    steps = [Step("build", build, {"service": "s"}), Step("test", probe, {"image": text})]
    with pytest.raises(InvalidPlan) as caught:
        Plan("p", steps, params={"service": str})
    (problem,) = caught.value.problems
    assert problem.startswith(f"step test: {text!r} is a text, and the tool would get this very text: ")
    assert hint in problem


@pytest.mark.parametrize("text", ["$HOME", "$5.00", "$", "costs $build", "$other", "$$build", "$build or not"])
def test_any_other_text_may_begin_with_a_dollar(text: str) -> None:
    Plan("p", [Step("build", build, {"service": "s"}), Step("test", probe, {"image": text})])
