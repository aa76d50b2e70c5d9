"""Runs of models and of plans that are reopened: answers are reused, requests can be unpacked, the conversation is the agent's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tests.unit.drive_tools import perdure, run
from tests.unit.react_tools import ByTurn, app_of, wants

from perdure import Agent, Fatal, Perdure, Plan, ReAct, Retry, Run, Step, agent, ref, tool
from perdure.agents.react.transcript import _Conversation
from perdure.core import prompt_deltas
from perdure.core.events import ModelCallCompleted, ModelCallFailed, ModelCallInitiated
from perdure.core.state import fold
from perdure.errors import InvalidInput
from perdure.models.messages import request_of

LONG = "a long answer, which later requests only refer to. " * 40


def _requests(app: Perdure, events: Any) -> list[list[str]]:
    """The messages of every request in the journal, unpacked."""
    conversation = _Conversation("r", events, app.load)
    numbers = sorted({event.call for event in events if isinstance(event.body, ModelCallInitiated)})
    answer = lambda number: msgspec.to_builtins(conversation._answer(number).message)  # noqa: E731
    whole = [prompt_deltas.unpack(number, conversation._packed, answer, conversation._text) for number in numbers]
    return [[message.text for message in request_of(one).messages] for one in whole]


def _tools(log: list[str]) -> Any:
    @tool(effect="once")
    async def read_page(page: str) -> str:
        """Read a page."""
        log.append(page)
        return f"{page}: {LONG}"

    return read_page


def test_a_request_that_failed_is_made_again_and_the_answers_before_it_are_not():
    log: list[str] = []
    model = ByTurn(
        [wants(("read_page", {"page": "one"}), text="Let me see. " + LONG), Fatal("no credit"), "It says one."], retry=Retry(attempts=1)
    )
    reader = ReAct("reader", model=model, tools=[_tools(log)], version="1")

    async def main() -> None:
        async with app_of(None, reader) as app:
            await app.start(reader, "What does it say?", id="r")
            assert (await app.drive("r")).status == "failed"
            before = await app.handle("r").events()
            done = await app.retry("r")
            failed = next(event for event in before if isinstance(event.body, ModelCallFailed))
            assert (done.back_to, [call.call for call in done.again]) == (failed.seq - 1, [3])
            assert (await app.drive("r")).status == "succeeded"
            assert log == ["one"]
            assert model.asked[1] == model.asked[2]
            said = await app.transcript("r")
            assert [message.get("text", "")[:12] for message in said] == ["What does it", "Let me see. ", "one: a long ", "It says one."]
            events = await app.handle("r").events()
            assert _requests(app, events) == [[message.text for message in one.messages] for one in (model.asked[0], model.asked[2])]

    run(main())


def test_after_a_rewind_to_any_event_answers_are_reused_and_the_conversation_is_right():
    """Each time the model gets only new requests, and no page is read twice."""
    log: list[str] = []
    pages = [wants(("read_page", {"page": page}), text=f"I need {page}. {LONG}") for page in ("one", "two")]
    model = ByTurn([*pages, *[Fatal("no credit") for _ in range(40)]], retry=Retry(attempts=1))
    reader = ReAct("reader", model=model, tools=[_tools(log)], version="1")

    async def main() -> None:
        async with app_of(None, reader) as app:
            await app.start(reader, "What do they say?", id="r")
            assert (await app.drive("r")).status == "failed"
            before = await app.handle("r").events()
            said = await app.transcript("r")
            rewound = 0
            for event in reversed(before[1:-1]):
                try:
                    await app.rewind("r", event.seq)
                except InvalidInput:
                    continue
                await app.transcript("r")  # between: the agent has gone back, and no worker has driven the run
                assert (await app.drive("r")).status == "failed"
                assert await app.transcript("r") == said
                rewound += 1
            assert rewound > 5
            assert log == ["one", "two"]
            asked = [request for request in model.asked if len(request.messages) < 5]
            assert len(asked) == 2, "an answer was not reused"
            model._lines = (*model._lines[: len(model.asked)], "They say one and two.")
            await app.retry("r")
            assert (await app.drive("r")).status == "succeeded"
            events = await app.handle("r").events()
            assert _requests(app, events) == [[m.text for m in one.messages] for one in (*model.asked[:2], model.asked[-1])]
            assert (await app.transcript("r"))[-1]["text"] == "They say one and two."
            assert sum(isinstance(event.body, ModelCallCompleted) for event in events) == 3

    run(main())


def test_with_other_code_the_conversation_is_that_of_the_new_branch():
    log: list[str] = []
    lines = [wants(("read_page", {"page": "one"}), text="First."), Fatal("no credit")]
    model = ByTurn(lines, retry=Retry(attempts=1))
    old = ReAct("reader", model=model, tools=[_tools(log)], version="1")
    after = ByTurn([wants(("read_page", {"page": "three"}), text="Third."), "It says three."])
    new = ReAct("reader", model=after, tools=[_tools(log)], version="2", instructions="Be brief.")

    async def main(path: Path) -> None:
        async with app_of(path, old) as app:
            await app.start(old, "What does it say?", id="r")
            assert (await app.drive("r")).status == "failed"
        async with app_of(path, new) as app:
            await app.rewind("r", 2)
            assert (await app.drive("r")).status == "succeeded"
            said = [message.get("text", "")[:14] for message in await app.transcript("r")]
            assert said == ["What does it s", "Third.", "three: a long ", "It says three."]
            assert log == ["one", "three"]

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run(main(Path(folder) / "db"))


def test_a_plan_goes_on_at_the_step_that_failed():
    log: list[str] = []
    broken = [True]

    @tool(effect="once")
    async def build(what: str) -> str:
        log.append(f"build {what}")
        return f"image of {what}"

    @tool(effect="idempotent", retry=Retry(attempts=1))
    async def deploy(image: str) -> str:
        if broken:
            raise Fatal("no room")
        log.append(f"deploy {image}")
        return "up"

    plan = Plan("p", [Step("build", build, {"what": "x"}), Step("deploy", deploy, {"image": ref("build")})])

    async def main() -> None:
        async with perdure(None, [plan]) as app:
            await app.start(plan, id="r")
            assert (await app.drive("r")).status == "failed"
            broken.clear()
            done = await app.retry("r")
            assert [call.tool for call in done.kept] == ["build"]
            assert [call.tool for call in done.again] == ["deploy"]
            assert (await app.drive("r")).status == "succeeded"
            assert log == ["build x", "deploy image of x"]

    run(main())


def test_an_isolated_tool_is_attempted_again_and_its_neighbour_is_not(tmp_path: Path):
    agent_ = isolated_agent()

    async def main() -> None:
        async with perdure(tmp_path / "db", [agent_]) as app:
            await app.start(agent_, str(tmp_path), id="r")
            assert (await app.drive("r")).status == "failed"
            (tmp_path / "fixed").touch()
            done = await app.retry("r")
            assert [call.tool for call in done.again] == ["second"]
            assert (await app.drive("r")).status == "succeeded"
            assert (tmp_path / "log").read_text() == "first\nsecond\n"
            assert fold(await app.handle("r").events()).calls[2].attempt == 2

    run(main())


@tool(effect="once", isolate=True, timeout=60.0)
def first(folder: str) -> str:
    with (Path(folder) / "log").open("a") as log:
        log.write("first\n")
    return "one"


@tool(effect="idempotent", isolate=True, timeout=60.0, retry=Retry(attempts=1))
def second(folder: str) -> str:
    if not (Path(folder) / "fixed").exists():
        raise Fatal("it is broken")
    with (Path(folder) / "log").open("a") as log:
        log.write("second\n")
    return "two"


def isolated_agent() -> Agent[Any, Any]:
    @agent(name="isolated", version="1")
    async def both(run: Run, folder: str) -> list[str]:
        return [await first(folder), await second(folder)]

    return both
