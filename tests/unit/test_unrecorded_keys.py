"""A key that no service can know is not recorded, but stays the same key.

If the arguments are not recorded in an event, their digest is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, Call, Perdure, Run, agent, tool
from perdure.core.codec import digest
from perdure.core.events import Effect, Event, ToolCallInitiated
from perdure.core.identity import CallKeys
from perdure.core.state import fold
from perdure.inspect.audit import Trail
from perdure.inspect.timeline import Timeline
from perdure.tool import Tool

seen: list[str] = []
failed: list[int] = []


async def _quiet(text: str) -> str:
    return text


async def _told(text: str, call: Call) -> str:
    seen.append(call.key)
    return text


def _tool(effect: Effect, *, told: bool) -> Tool[..., Any]:
    return tool(effect=effect, name="step")(_told if told else _quiet)


def _journal(path: Path, step: Tool[..., Any], text: str = "t") -> list[Event]:
    @agent(version="1")
    async def steps(run: Run) -> None:
        await step(text)
        await step(text)

    return _events(path, steps, tenant="acme")


def _events(path: Path, made: Agent[..., Any], **options: Any) -> list[Event]:
    async def run() -> list[Event]:
        async with Perdure(f"sqlite:///{path}", agents=[made]) as app:
            await app.run(made, id="r", **options)
            return list(app.store.read("r"))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("effect", "told", "recorded"),
    [
        ("read", False, False),
        ("idempotent", False, False),
        ("read", True, True),
        ("idempotent", True, True),
        ("keyed", True, True),
        ("once", False, True),
    ],
)
def test_a_key_is_recorded_where_somebody_else_may_know_the_call_by_it(tmp_path: Path, effect: Effect, told: bool, recorded: bool) -> None:
    seen.clear()
    events = _journal(tmp_path / "j.db", _tool(effect, told=told))
    keys = [CallKeys("acme", "r", "steps", scheme=2).key(number, "step") for number in (1, 2)]
    intents = [event.body for event in events if isinstance(event.body, ToolCallInitiated)]
    assert [intent.key for intent in intents] == (keys if recorded else ["", ""])
    assert [call.key for call in fold(events).calls.values()] == keys
    assert seen == (keys if told else [])
    timeline = Timeline("r")
    shown = {line["call"]: line["key"] for line in (timeline.record(event, b"") for event in events) if line["call"]}
    assert shown == {1: keys[0], 2: keys[1]}
    trail = Trail("r")
    audited = {line["call"]: line["idempotency_key"] for line in (trail.line(event) for event in events) if line["call"]}
    assert audited == shown


@pytest.mark.parametrize("text", ["short", "l" * 100_000])
def test_the_digest_of_arguments_is_that_of_what_is_recorded(tmp_path: Path, text: str) -> None:
    """Also of those that lie in a blob."""
    events = _journal(tmp_path / "j.db", _tool("idempotent", told=False), text)
    asked = digest(b'{"text":"' + text.encode() + b'"}')
    assert [call.digest for call in fold(events).calls.values()] == [asked, asked]
    assert [event.body.digest for event in events if isinstance(event.body, ToolCallInitiated)] == [None, None]


def test_an_attempt_again_has_the_key_of_the_first(tmp_path: Path) -> None:
    failed.clear()

    @tool(effect="idempotent")
    async def shaky() -> None:
        failed.append(1)
        if len(failed) == 1:
            raise ConnectionError("once more")

    @agent(version="1")
    async def tries(run: Run) -> None:
        await shaky()

    events = _events(tmp_path / "j.db", tries)
    intents = [event.body for event in events if isinstance(event.body, ToolCallInitiated)]
    assert [(intent.attempt, intent.key) for intent in intents] == [(1, ""), (2, "")]
    assert fold(events).calls[1].key == CallKeys("default", "r", "tries", scheme=2).key(1, "shaky")
