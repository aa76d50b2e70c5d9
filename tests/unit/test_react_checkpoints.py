"""ReAct takes a checkpoint by itself when its conversation has grown, and may have a model summarize it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure import Circles, InvalidInput, Perdure, ReAct, tool
from perdure.core.events import CheckpointTaken, ModelCallInitiated
from perdure.core.state import fold
from perdure.models.messages import Answer, Assistant, Message, Request, ToolResult, ToolUse, User, check
from perdure.models.model import Model
from perdure.models.scripted import Scripted

LOOKS: list[int] = []


@tool(effect="read")
async def look(page: int) -> str:
    LOOKS.append(page)
    return f"page {page}: " + "x" * 400


class Reader(Model):
    """Looks at one page after the other, and answers with what it can see of them. It summarizes when it is asked to."""

    def __init__(self, pages: int) -> None:
        super().__init__("reader")
        self.pages = pages
        self.asked: list[Request] = []

    async def answer(self, request: Request, call: Any) -> Answer:
        self.asked.append(request)
        check(request.messages)
        last = request.messages[-1]
        if isinstance(last, User) and last.text.startswith("Summarize"):
            return Answer(text=f"seen up to {_seen(request)}")
        page = _seen(request) + 1
        if page > self.pages:
            return Answer(text=f"read {self.pages} pages")
        return Answer(uses=(ToolUse(f"u{page}", "look", {"page": page}),), stop="tools")


def _seen(request: Request) -> int:
    told = [message.text for message in request.messages if isinstance(message, ToolResult | User)]
    pages = [int(text.split()[1].rstrip(":")) for text in told if text.startswith("page ")]
    pages += [int(text.rpartition("seen up to ")[2]) for text in told if "seen up to " in text]
    return max(pages, default=0)


def run(agent: ReAct, prompt: str = "read it all") -> tuple[str, list[Any], Any]:
    LOOKS.clear()

    async def main() -> tuple[str, list[Any], Any]:
        async with Perdure("sqlite://", agents=[agent]) as app:
            said = await app.run(agent, prompt, id="r")
            return said, await app.handle("r").events(), await app.transcript("r")

    return asyncio.run(main())


def test_a_long_conversation_takes_checkpoints_and_goes_on_where_it_was() -> None:
    model = Reader(40)
    agent = ReAct("reader", model=model, tools=[look], checkpoint_bytes=4_000, max_turns=60)
    said, events, told = run(agent)
    assert said == "read 40 pages"
    assert list(range(1, 41)) == LOOKS
    taken = [event for event in events if isinstance(event.body, CheckpointTaken)]
    assert 2 <= len(taken) <= 4, "each one needs twice the conversation of the one before, so that storage stays linear"
    # No request to a model refers to a request before its checkpoint.
    for event in events:
        if isinstance(event.body, ModelCallInitiated) and event.cause in {one.seq for one in taken}:
            assert event.body.args is not None
            asked = event.body.args.inline or b""
            assert b'"frame"' in asked
            assert b"_of" not in asked
    assert len(model.asked[-1].messages) == 81
    assert len(told) == 82
    assert told[0]["text"] == "read it all"


def test_a_summary_is_a_model_call_and_replaces_old_turns() -> None:
    model = Reader(60)
    agent = ReAct("reader", model=model, tools=[look], checkpoint_bytes=4_000, summarize=True, max_turns=80)
    said, events, told = run(agent)
    assert said == "read 60 pages"
    assert list(range(1, 61)) == LOOKS
    taken = sum(isinstance(event.body, CheckpointTaken) for event in events)
    assert taken >= 4, "the conversation stays small, so that checkpoints come at the same distance"
    summaries = [request for request in model.asked if isinstance(request.messages[-1], User) and "Summarize" in request.messages[-1].text]
    assert len(summaries) == taken
    assert fold(events).numbers == 60 + 61 + taken, "each summary is a call in the journal"
    assert max(len(request.messages) for request in model.asked) < 40
    first = told[0]["text"]
    assert first.startswith("read it all\n\n[What has happened since then, in short:]\nseen up to ")
    for request in model.asked:
        assert not isinstance(request.messages[0], ToolResult)
        check(request.messages)


def test_another_model_summarizes_and_an_empty_summary_changes_nothing() -> None:
    model = Reader(20)
    brief = Scripted([Answer(text="seen up to 9"), *[Answer(text=" ")] * 20])
    agent = ReAct("reader", model=model, tools=[look], checkpoint_bytes=4_000, summarize=brief, max_turns=60)
    said, events, _ = run(agent)
    assert said == "read 20 pages"
    assert any(isinstance(event.body, ModelCallInitiated) and event.body.tool == brief.name for event in events)


def test_a_short_conversation_takes_none_and_the_settings_make_another_version() -> None:
    plain = ReAct("reader", model=Reader(3), tools=[look])
    _, events, _ = run(plain)
    assert not any(isinstance(event.body, CheckpointTaken) for event in events)
    assert plain.version == ReAct("reader", model=Reader(3), tools=[look], checkpoint_bytes=1024 * 1024).version
    others = [{"checkpoint_bytes": 1000}, {"summarize": True}, {"summarize": "in one line"}, {"checkpoint_bytes": None}]
    versions = {ReAct("reader", model=Reader(3), tools=[look], **how).version for how in others}  # type: ignore[arg-type]
    assert len({plain.version, *versions}) == 5


@pytest.mark.parametrize(
    "how", [{"checkpoint_bytes": 0}, {"summarize": 3}, {"summarize": True, "checkpoint_bytes": None}, {"summarize": " "}]
)
def test_settings_that_make_no_sense_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"checkpoint_bytes|summarize"):
        ReAct("reader", model=Reader(1), tools=[look], **how)


def test_a_message_of_a_person_that_was_not_heard_survives() -> None:
    class Asking(Reader):
        async def answer(self, request: Request, call: Any) -> Answer:
            if any(isinstance(message, User) and message.text == "stop now" for message in request.messages):
                return Answer(text="stopped")
            return await super().answer(request, call)

    agent = ReAct("reader", model=Asking(1_000), tools=[look], checkpoint_bytes=2_000, max_turns=2_000)

    async def main() -> str:
        async with Perdure("sqlite://", agents=[agent]) as app:
            handle = await app.start(agent, "read", id="r")
            waiting = asyncio.create_task(handle.result(timeout=20))
            await asyncio.sleep(0.3)
            await app.signal("r", "message", "stop now")
            return str(await waiting)

    assert asyncio.run(main()) == "stopped"


def test_the_conversation_keeps_an_assistant_and_its_results_together() -> None:
    from perdure.agents.react.agent import _Talk

    uses = tuple(ToolUse(f"u{place}", "look", {}) for place in range(3))
    talk: list[Message] = [
        User("go"),
        Assistant("", uses),
        *(ToolResult(use.id, "look", "x" * 5_000) for use in uses),
        Assistant("", uses[:1]),
    ]
    talk.append(ToolResult("u0", "look", "y"))
    conversation = _Talk.__new__(_Talk)
    conversation.messages = talk
    conversation._prompt = "go"
    old = conversation.older()
    check(old)
    conversation.replace(len(old), "in short")
    check(conversation.messages)


# -- circles ------------------------------------------------------------------------------------------------------------
class Stubborn(Model):
    """Looks at the same page again and again."""

    def __init__(self) -> None:
        super().__init__("stubborn")

    async def answer(self, request: Request, call: Any) -> Answer:
        return Answer(uses=(ToolUse("u1", "look_again", {"page": 1}),), stop="tools")


def _stubborn(url: str, leave_at: int | None = None) -> tuple[int, list[int], str]:
    """How often it looked until it was stopped, after how many looks each checkpoint was, and what was said.

    A worker takes it as far as the look `leave_at`, and another one goes on.
    """
    looks, leave = 0, asyncio.Event()

    @tool(effect="read")
    async def look_again(page: int) -> str:
        nonlocal looks
        looks += 1
        if looks == leave_at:
            leave.set()
        return f"page {page}: " + "x" * 400

    agent = ReAct(
        "stubborn", version="1", model=Stubborn(), tools=[look_again], checkpoint_bytes=1_500, max_turns=100, circles=Circles(repeats=6)
    )

    async def main() -> tuple[int, list[int], str]:
        async with Perdure(url, agents=[agent]) as app:
            await app.start(agent, "look", id="r")
            await app.engine.drive("r", wait=False, stop=leave)
        async with Perdure(url, agents=[agent]) as app:
            row = await app.drive("r", wait=False)
            assert (row.status, row.attention) == ("needs_attention", "circling"), row
            done, after = 0, []
            for event in await app.handle("r").events():
                done += event.type == "tool_call_completed"
                if isinstance(event.body, CheckpointTaken):
                    after.append(done)
            return looks, after, str(row.error)

    return asyncio.run(main())


def test_a_circle_is_counted_within_a_life_and_a_resume_counts_the_same(tmp_path: Path) -> None:
    looks, after, said = _stubborn(f"sqlite:///{tmp_path}/whole.db")
    assert after, "it has taken a checkpoint before it was stopped"
    assert looks == after[-1] + 6
    assert "has returned the same result 6 times in a row" in said
    for leave_at in (after[0] - 1, after[0], after[-1] - 1, after[-1], after[-1] + 1, after[-1] + 5):
        assert _stubborn(f"sqlite:///{tmp_path}/{leave_at}.db", leave_at)[:2] == (looks, after), leave_at
