"""Imports the SDKs and uses each once, so that every process that is forked later has them loaded and initialized."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anthropic
import httpx2
import openai
from tests.servers.provider_answers import anthropic_events, chat_events, count, responses_events
from tests.servers.providers import say, use

_TURN = say("A word.", use("tool", what="it"), thought="A thought.")
_EVENTS = {
    "/messages": anthropic_events(_TURN, count({}, _TURN), "none", "1", 0),
    "/chat/completions": chat_events(_TURN, count({}, _TURN), "none", "1", 0, True),
    "/responses": responses_events(_TURN, count({}, _TURN), "none", "1", 0, True),
}


def _stream(request: httpx2.Request) -> httpx2.Response:
    events = next(events for path, events in _EVENTS.items() if request.url.path.endswith(path))
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content="".join(_lines(events)))


def _lines(events: Iterator[tuple[str | None, Any]]) -> Iterator[str]:
    for name, data in events:
        yield f"event: {name}\n" if name else ""
        yield f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


async def _warm() -> None:
    """Have each of them read an answer: the first one takes longer than all the others of a test."""
    asked: dict[str, Any] = {"model": "none", "stream": True}
    nobody: dict[str, Any] = {"base_url": "http://nowhere.invalid", "api_key": "none", "max_retries": 0}
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(_stream)) as client:
        claude = anthropic.AsyncAnthropic(http_client=client, **nobody)
        gpt = openai.AsyncOpenAI(http_client=client, **nobody)
        for stream in (
            await claude.messages.create(max_tokens=1, messages=[], **asked),
            await gpt.chat.completions.create(messages=[], **asked),
            await gpt.responses.create(input=[], **asked),
        ):
            assert [event.model_dump() async for event in stream]


async def _fail_to_connect() -> None:
    """Importing what opens connections takes its time, too."""
    async with httpx2.AsyncClient(trust_env=False) as client:
        with suppress(httpx2.ConnectError):
            await client.get("http://127.0.0.1:1")


# Nothing here is encrypted, and still every client reads all certificates there are.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]
asyncio.run(_warm())
asyncio.run(_fail_to_connect())
