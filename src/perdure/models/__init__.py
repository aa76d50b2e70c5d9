"""Models that agents ask. Every answer is recorded with its tokens and cost, so a resumed run does not ask again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.models.messages import Answer, Assistant, Message, Request, Tokens, ToolResult, ToolSpec, ToolUse, User
from perdure.models.model import Model
from perdure.models.prices import Price
from perdure.models.scripted import Scripted

if TYPE_CHECKING:
    from perdure.models.anthropic import Anthropic
    from perdure.models.openai import OpenAI

__all__ = [
    "Answer",
    "Anthropic",
    "Assistant",
    "Message",
    "Model",
    "OpenAI",
    "Price",
    "Request",
    "Scripted",
    "Tokens",
    "ToolResult",
    "ToolSpec",
    "ToolUse",
    "User",
]


def __getattr__(name: str) -> Any:
    """Import an adapter on first use: a program that uses only one adapter does not import the other."""
    if name == "Anthropic":
        from perdure.models.anthropic import Anthropic

        return Anthropic
    if name == "OpenAI":
        from perdure.models.openai import OpenAI

        return OpenAI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
