"""Plans that a model writes: checked, sent back, approved, journaled, followed, and never written twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.approval_tools import check_replay, the_one
from tests.unit.drive_tools import perdure, run

from perdure import Agent, Approval, InvalidInput, Plan, Run, agent, tool
from perdure.cli.verdict import edited
from perdure.core import codec
from perdure.core.events import ModelCallInitiated, PlanGenerated
from perdure.models import Answer, Request, Scripted, ToolResult, ToolUse, User
from perdure.models.messages import check

DONE: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    DONE.clear()


@tool(effect="once")
async def build(service: str) -> dict[str, str]:
    """Build the service.

    Args:
        service: the one to build
    """
    DONE.append(f"build {service}")
    return {"tag": f"{service}:1"}


@tool(effect="once")
async def release(tag: str, replicas: int = 1) -> str:
    DONE.append(f"release {tag} {replicas}")
    return "live"


@agent(version="1")
async def tell(run: Run, text: str) -> str:
    """Tell everybody."""
    return text.upper()


GOOD: list[dict[str, Any]] = [
    {"name": "build", "tool": "build", "args": {"service": "shop"}},
    {"name": "go", "tool": "release", "args": {"tag": {"$ref": ["build", "tag"]}}},
    {"name": "say", "tool": "tell", "args": {"text": {"$ref": ["go"]}}, "when": [{"ref": ["go"], "is": "live"}]},
]
BAD: list[dict[str, Any]] = [
    {"name": "build", "tool": "biuld", "args": {}},
    {"name": "go", "tool": "release", "args": {"tag": {"$ref": ["nope"]}, "x": 1}},
]


def submit(arguments: Any, ident: str = "u1", **more: Any) -> Answer:
    return Answer(uses=(ToolUse(ident, "submit_plan", arguments),), stop="tools", **more)


class Model(Scripted):
    """A scripted model that keeps its requests."""

    def __init__(self, *lines: Any) -> None:
        self.asked: list[Request] = []

        def line(said: Any) -> Any:
            def answer(request: Request) -> Any:
                check(request.messages)
                self.asked.append(request)
                return said

            return answer

        super().__init__([line(said) for said in lines], name="planner")


async def once(plan: Agent[Any, Any], *args: Any) -> tuple[Any, list[Any]]:
    async with perdure(None, [plan]) as app:
        handle = await app.start(plan, *args, id="r")
        row = await app.engine.drive("r", wait=False)
        check_replay(app, plan)
        output = await handle.result() if row.status == "succeeded" else row.error
        return output, await handle.events()


def planner(model: Model, goal: str | None = "ship shop", **options: Any) -> Any:
    return Plan.from_model(model, [build, release, tell], goal, **options)


def test_a_model_writes_the_plan_which_is_journaled_and_followed() -> None:
    model = Model(submit({"steps": GOOD}))
    output, events = run(once(planner(model)))
    assert output == {"build": {"tag": "shop:1"}, "go": "live", "say": "LIVE"}
    (plan,) = (event.body for event in events if isinstance(event.body, PlanGenerated))
    assert plan.by == "planner"
    assert plan.digest == codec.digest(codec.encode({"name": "plan", "steps": GOOD}))
    assert plan.plan.inline is not None
    assert codec.decode(plan.plan.inline)["steps"] == GOOD
    (request,) = model.asked
    assert request.choice == "submit_plan"
    assert [spec.name for spec in request.tools] == ["submit_plan"]
    assert isinstance(request.messages[0], User)
    assert "ship shop" in request.messages[0].text
    assert '"description": "Build the service."' in request.system
    assert '"Tell everybody."' in request.system  # an agent is a tool like any other


def test_the_goal_can_be_what_the_agent_is_given() -> None:
    model = Model(submit({"steps": GOOD}))
    run(once(planner(model, None), "ship it now"))
    assert isinstance(model.asked[0].messages[0], User)
    assert "ship it now" in model.asked[0].messages[0].text


def test_a_wrong_plan_goes_back_with_all_its_problems_and_nothing_has_begun() -> None:
    model = Model(submit({"steps": BAD}, "u1", text="here"), submit({"steps": GOOD}, "u2"))
    output, _ = run(once(planner(model)))
    assert output["say"] == "LIVE"
    told = model.asked[1].messages[-1]
    assert isinstance(told, ToolResult)
    assert told.error
    for problem in ("there is no tool 'biuld', did you mean build?", "there is no step 'nope'", "the argument x is unknown"):
        assert problem in told.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(text="I would rather talk"), "call submit_plan once, and nothing else; there were 0 calls"),
        (Answer(), "there were 0 calls"),
        (submit("{broken"), "is cut off, or no JSON object"),
        (Answer(uses=(ToolUse("a", "submit_plan", {"steps": GOOD}),), stop="length"), "is cut off"),
        (submit({"steps": [], "why": 1}), "submit_plan takes steps, and no 'why'"),
        (submit({}), "it has no steps"),
        (submit({"steps": [GOOD[0], {**GOOD[2], "args": {"text": {"ref": ["go"]}}}]}), 'did you mean "$ref"?'),
        (submit({"steps": BAD}), "plan plan has 3 problems: step build: there is no tool"),
        (submit({"steps": {"a": 1}}), "it has no steps"),
        (submit({"steps": [{**GOOD[0], "approval": True}]}), "who approves what is not for the plan to say"),
        (
            Answer(uses=(ToolUse("a", "submit_plan", {"steps": GOOD}), ToolUse("b", "build", {})), stop="tools"),
            "there were 2 calls, 1 of them",
        ),
        (Answer(uses=(ToolUse("a", "submit_plan", {}), ToolUse("a", "submit_plan", {})), stop="tools"), "there were 2 calls, 2 of them"),
        (Answer(uses=tuple(ToolUse(f"u{n}", "build", {}) for n in range(500)), stop="tools"), "there were 500 calls"),
        (submit({"steps": [{"name": f"s{n}", "tool": "build", "args": {"service": "x"}} for n in range(1001)]}), "at most 1,000"),
    ],
)
def test_bad_answers_are_sent_back_and_never_followed(answer: Answer, said: str) -> None:
    model = Model(answer, answer)
    output, events = run(once(planner(model, max_attempts=2)))
    assert "model planner has written no plan that can be followed, in 2 attempts; the last: " in output
    assert said in output
    assert DONE == []
    assert len(model.asked) == 2
    assert not any(isinstance(event.body, PlanGenerated) for event in events)


def test_a_refusal_is_not_asked_again() -> None:
    model = Model(Answer(text="I must not", stop="refusal"), submit({"steps": GOOD}))
    output, _ = run(once(planner(model)))
    assert "model planner refused to write the plan: I must not" in output
    assert len(model.asked) == 1


def test_a_plan_that_was_written_is_never_written_again(tmp_path: Path) -> None:
    first = Model(submit({"steps": GOOD}))

    async def main() -> None:
        async with perdure(tmp_path / "db", [planner(first, approval=True)]) as app:
            await app.start("plan", id="r")
            assert (await app.engine.drive("r", wait=False)).status == "waiting_approval"
            assert DONE == []
        silent = Model()  # a request to it would fail
        plan = planner(silent, approval=True)
        async with perdure(tmp_path / "db", [plan]) as app:
            await app.approve(the_one(app), by="ann")
            assert (await app.engine.drive("r", wait=False)).status == "succeeded"
            check_replay(app, plan)
            events = await app.handle("r").events()
            assert sum(isinstance(event.body, ModelCallInitiated) for event in events) == 1
            assert sum(isinstance(event.body, PlanGenerated) for event in events) == 1
        assert silent.asked == []
        assert DONE == ["build shop", "release shop:1 1"]

    run(main())


def test_what_is_approved_is_the_exact_plan_and_an_edit_is_checked_again() -> None:
    wrong = {"steps": BAD}
    right = {"steps": [GOOD[0], {**GOOD[1], "args": {**GOOD[1]["args"], "replicas": 5}}]}
    plan = planner(Model(submit({"steps": GOOD})), approval=True)

    async def main() -> None:
        async with perdure(None, [plan]) as app:
            handle = await app.start(plan, id="r")
            await app.engine.drive("r", wait=False)
            first = the_one(app)
            (row,) = await app.approvals()
            assert "an edited plan is checked when the run goes on" in str(row.standing.request.reason)
            await app.approve(first, by="ann", edit={"plan": wrong})
            assert (await app.engine.drive("r", wait=False)).status == "waiting_approval"
            second = the_one(app)
            assert second != first
            (row,) = await app.approvals()
            assert "the edit of ann was not taken" in str(row.standing.request.reason)
            assert "there is no tool 'biuld'" in str(row.standing.request.reason)
            assert DONE == []
            decided = await app.approve(second, by="bob", edit={"plan": right})
            told = edited(app.store, decided)  # equal parts are not repeated
            assert told.startswith(' with plan.steps[1].args {"tag": {"$ref": ["build", "tag"]}} → ')
            assert '"replicas": 5' in told
            assert "plan.steps[2].name" not in told
            assert "plan.steps[2]" in told
            assert (await app.engine.drive("r", wait=False)).status == "succeeded"
            check_replay(app, plan)
            assert DONE == ["build shop", "release shop:1 5"]
            (body,) = (event.body for event in await handle.events() if isinstance(event.body, PlanGenerated))
            assert body.by == "planner, edited by bob"
            assert codec.decode(app.load(body.plan)) == {"name": "plan", **right}

    run(main())


def test_a_plan_that_is_not_approved_is_not_begun() -> None:
    plan = planner(Model(submit({"steps": GOOD})), approval=Approval(by="ann"))

    async def main() -> None:
        async with perdure(None, [plan]) as app:
            await app.start(plan, id="r")
            await app.engine.drive("r", wait=False)
            with pytest.raises(InvalidInput, match="may not be edited"):
                await app.approve(the_one(app), by="ann", edit={"plan": {"steps": GOOD}})
            await app.reject(the_one(app), by="ann", reason="too bold")
            row = await app.engine.drive("r", wait=False)
            assert "the plan was not approved: rejected by ann: too bold; nothing of it has begun" in (row.error or "")
            assert DONE == []

    run(main())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_attempts": 0}, "a whole number from 1 to 20"),
        ({"goal": " "}, "is no text"),
        ({"approval": Approval(editable="steps")}, 'editable="plan" and nothing else'),
        ({"approval": "ann"}, "neither True nor an Approval"),
        ({"instructions": None}, "instructions=None is no text"),
    ],
)
def test_wrong_options_are_refused_where_they_are_given(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Plan.from_model(Model(), [build], **{"goal": "x", **options})
    with pytest.raises(InvalidInput, match="is no model"):
        Plan.from_model("gpt", [build], "x")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="needs tools"):
        Plan.from_model(Model(), [], "x")


def test_the_version_changes_with_what_decides_the_plan() -> None:
    versions = {planner(Model(), goal).version for goal in ("a", "b", None)}
    versions |= {planner(Model(), "a", instructions="short").version, planner(Model(), "a", approval=True).version}
    assert len(versions) == 5
    assert planner(Model(), "a").version == planner(Model(), "a").version
