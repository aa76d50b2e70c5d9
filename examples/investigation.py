"""A ReAct agent that searches in parallel, has another agent (the writer) as a tool, and returns a typed answer.

    perdure run examples/investigation.py:investigate prompt="Why do durable agents need fencing?" --id why-fencing
    perdure show why-fencing               its calls, and what they have cost
    perdure show why-fencing --prompt 5    exactly what the model was asked the second time, byte for byte
    perdure list --agent writer            the writer is a separate run

With ANTHROPIC_API_KEY or OPENAI_API_KEY set, the agents ask a real model; without a key, a script stands for both
models. The library is three texts in this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from perdure import Budget, ReAct, tool
from perdure.models import Answer, Anthropic, Model, OpenAI, Request, Scripted, Tokens, ToolResult, ToolUse

SHELVES = {
    "fencing": "A lease says who should write. A fence says who may: the store refuses an epoch that is not the newest.",
    "leases": "A worker that was paused past its lease does not know it. Its clock is the last to tell.",
    "zombies": "In 2 of 3 published incidents the old process woke up and wrote over the new one's work.",
}


@dataclass
class Report:
    """The result that the caller gets."""

    title: str
    text: str
    sources: list[str]


@tool(effect="read", timeout=20)
async def search(words: str) -> str:
    """What the library has about some words; search for several things at the same time."""
    found = [f"{shelf}: {text}" for shelf, text in SHELVES.items() if shelf in words.lower()]
    return "\n".join(found) or f"nothing about {words!r}"


def chosen_model(*script: Callable[[Request], Answer]) -> Model:
    if os.environ.get("ANTHROPIC_API_KEY"):
        return Anthropic("claude-sonnet-4-5", max_tokens=4_000)
    return OpenAI("gpt-5-mini", max_tokens=4_000) if os.environ.get("OPENAI_API_KEY") else Scripted(script)


def look_around(_: Request) -> Answer:
    wanted = tuple(ToolUse(f"use_{shelf}", "search", {"words": shelf}) for shelf in SHELVES)
    return Answer("Three things to look for.", wanted, "tools", tokens=Tokens(input=300, output=60))


def have_it_written(request: Request) -> Answer:
    notes = "\n".join(message.text for message in request.messages if isinstance(message, ToolResult))
    wanted = ToolUse("use_writer", "writer", {"prompt": f"Write three sentences for an engineer from these notes:\n{notes}"})
    return Answer("That is enough to write from.", (wanted,), "tools", tokens=Tokens(input=900, output=80))


def report(request: Request) -> Answer:
    text = [message for message in request.messages if isinstance(message, ToolResult)][-1].text
    final = {"title": "Why agents need fencing", "text": text, "sources": list(SHELVES)}
    return Answer("", (ToolUse("use_final", "final_answer", final),), "tools", tokens=Tokens(input=1_100, output=120))


def write(request: Request) -> Answer:
    return Answer(f"{SHELVES['fencing']} {SHELVES['leases']} So a lease alone is not enough.", tokens=Tokens(input=420, output=90))


writer = ReAct("writer", model=chosen_model(write), instructions="You write short, exact prose out of notes. No introduction, no list.")

investigate = ReAct(
    "investigate",
    model=chosen_model(look_around, have_it_written, report),
    tools=[search, writer],
    output=Report,
    instructions="Find out what there is with several searches at once, have the writer write it, and hand in a report with its sources.",
    budget=Budget(usd="1.00"),
)
