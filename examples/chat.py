"""A chat that receives the user's messages between two steps. While the run waits for a message, it needs no process.

    perdure worker examples/chat.py:chat &
    perdure run examples/chat.py:chat --id chat-1 --detach
    perdure signal chat-1 user '"read 40 pages"'
    perdure signal chat-1 user '"stop"'                 the agent receives this before its next page
    perdure signal chat-1 user '"bye"'

A function with three rules stands for the model, so that no key is needed; a real model is called in the same place.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from perdure import Run, agent, tool

PAGE_S = float(os.environ.get("CHAT_PAGE_S", "0.2"))
Talk = list[dict[str, Any]]


@tool(effect="read", timeout=60)
async def think(talk: Talk) -> dict[str, Any]:
    """The model: decides what to do next, from the whole conversation. Its answer is recorded, as for any call."""
    wishes = [index for index, line in enumerate(talk) if line["role"] == "user"]
    wish, read = talk[wishes[-1]]["text"], len(talk) - 1 - wishes[-1]
    if wish == "bye":
        return {"end": "goodbye"}
    if wish.startswith("read ") and read < int(wish.split()[1]):
        return {"page": read + 1}
    return {"say": "stopped" if wish == "stop" else f"{wish}: done"}


@tool(effect="read", timeout=10)
async def read_page(page: int) -> str:
    """Something that takes a while."""
    await asyncio.sleep(PAGE_S)
    return f"what page {page} says"


@agent(version="1")
async def chat(run: Run, silence_s: float = 3600.0) -> Talk:
    """Talk until the user says bye, or sends nothing for `silence_s`."""
    talk: Talk = []
    while True:
        run.status("listening")
        try:
            talk.append({"role": "user", "text": await run.receive("user", timeout=silence_s)})  # parked here
        except TimeoutError:
            return talk
        while (move := await think(talk)).get("page"):
            talk.append({"role": "tool", "text": await read_page(move["page"])})
            talk.extend(await said_meanwhile(run))
        talk.append({"role": "agent", "text": move.get("say") or move["end"]})
        if "end" in move:
            return talk


async def said_meanwhile(run: Run) -> Talk:
    """The messages that have arrived since the last call; does not wait."""
    said: Talk = []
    while True:
        try:
            said.append({"role": "user", "text": await run.receive("user", timeout=0)})
        except TimeoutError:
            return said
