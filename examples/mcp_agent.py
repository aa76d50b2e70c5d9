"""An agent whose tools come from an MCP server in another process. One of the tools needs the approval of a person.

    perdure run examples/mcp_agent.py:librarian prompt="Sum up my notes on whales, and publish." --id whales --no-wait
    perdure approvals                           what the model wants to publish
    perdure approve ID --by ann                 or: perdure reject ID --by ann --reason "not yet"
    perdure resume whales
    perdure events whales                       `notes.tools/list` records which tools the server offered

It needs `pip install 'perdure[mcp]'`. The notes are in notes.json, which has a few notes at the beginning. With
ANTHROPIC_API_KEY or OPENAI_API_KEY set, the agent asks a real model; without a key, a script stands for the model. If
you kill the agent's process, the server ends too, and the next process starts a new server.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from perdure import Budget, ReAct, mcp
from perdure.models import Answer, Anthropic, Model, OpenAI, Request, Scripted, ToolResult, ToolUse

notes = mcp(
    [sys.executable, str(Path(__file__).with_name("mcp_notes.py")), os.environ.get("NOTES", "notes.json")],
    name="notes",
    effects={"publish": "keyed"},  # the server drops duplicates of the key in `_meta`
    approval={"publish": lambda title: f"{title} is for the whole world"},
    timeout=30,
)


def wanting(words: str, name: str, /, **arguments: str) -> Answer:
    return Answer(words, (ToolUse(f"use_{name}", name, dict(arguments)),), "tools")


def sum_up(request: Request) -> Answer:
    found = [message.text for message in request.messages if isinstance(message, ToolResult)]
    known = " ".join(f"{title}: {text}" for title, text in json.loads(found[-1]).items())
    return wanting("I write a summary.", "write_note", title="Whales, in short", text=known or "Nothing is known.")


def close(request: Request) -> str:
    last = [message for message in request.messages if isinstance(message, ToolResult)][-1]
    return f"It was not published: {last.text}" if last.error else "The summary is out."


def chosen_model() -> Model:
    """A real model if there is a key for it; otherwise the script."""
    if os.environ.get("ANTHROPIC_API_KEY"):
        return Anthropic(os.environ.get("NOTES_MODEL", "claude-sonnet-4-5"), max_tokens=2_000)
    if os.environ.get("OPENAI_API_KEY"):
        return OpenAI(os.environ.get("NOTES_MODEL", "gpt-5-mini"), max_tokens=2_000)
    return Scripted(
        [
            wanting("Let me look.", "find_notes", words="whale"),
            sum_up,
            wanting("And now the world shall see it.", "publish", title="Whales, in short"),
            close,
        ]
    )


librarian = ReAct(
    "librarian",
    model=chosen_model(),
    tools=[notes],
    instructions="You look after a person's notes. Search before you write. Publish only what you have written down.",
    budget=Budget(usd="0.50"),
    max_turns=12,
)
