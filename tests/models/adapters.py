"""The adapters with the local provider, and a short function to ask one of them."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from perdure.models import Answer, Anthropic, Message, Model, OpenAI, Request, ToolSpec, User
from perdure.tool.call import Call

Api = Literal["anthropic", "chat", "responses"]
APIS: tuple[Api, ...] = ("anthropic", "chat", "responses")
every_api = pytest.mark.parametrize("api", APIS)
LOOKUP = ToolSpec("lookup", "Look an order up.", {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]})


def model_for(api: Api, **options: Any) -> Anthropic | OpenAI:
    """A model that makes its own clients, which the environment sends to the provider."""
    return Anthropic("claude-test", **options) if api == "anthropic" else OpenAI("gpt-test", api=api, **options)


async def ask(model: Model, *messages: Message, call: Call | None = None, **more: Any) -> Answer:
    """Ask it once, as the worker does."""
    return await model.answer(Request(model.name, messages or (User("hi"),), **more), call or Call.outside())
