"""Shared by the tests of ReAct: a scripted model that keeps its requests, and a short way to a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.drive_tools import ManualClock, perdure

from perdure import Perdure, ReAct, tool
from perdure.models import Answer, Message, Request, Scripted, ToolResult, ToolUse
from perdure.models.messages import check
from perdure.store.api import RunRow
from perdure.tool.call import Call


class Model(Scripted):
    """Gives the scripted answers like a provider: it refuses a conversation that is not valid. Keeps every request."""

    def __init__(self, lines: Sequence[Any], **options: Any) -> None:
        super().__init__(lines, **options)
        self.asked: list[Request] = []

    async def answer(self, request: Request, call: Call) -> Answer:
        check(request.messages)
        self.asked.append(request)
        return await super().answer(request, call)

    @property
    def told(self) -> list[str]:
        """The last results that it was given, in order."""
        return [message.text for message in self.asked[-1].messages if isinstance(message, ToolResult)]


class ByTurn(Model):
    """The nth request gets the nth line, whatever is in the conversation."""

    async def answer(self, request: Request, call: Call) -> Answer:
        check(request.messages)
        self.asked.append(request)
        line = self._lines[len(self.asked) - 1]
        if isinstance(line, Exception):
            raise line
        said = line(request) if callable(line) else line
        return said if isinstance(said, Answer) else Answer(str(said))


def wants(*uses: tuple[str, Any], text: str = "") -> Answer:
    """An answer that asks for these tools, with the ids u1, u2, …"""
    return Answer(text, tuple(ToolUse(f"u{at}", name, arguments) for at, (name, arguments) in enumerate(uses, 1)), stop="tools")


@tool(effect="read")
async def lookup(order: str) -> dict[str, Any]:
    """Look an order up.

    Args:
        order: Its number.
    """
    return {"order": order, "cents": 500}


@tool(effect="read")
async def add(a: int, b: int = 1) -> int:
    return a + b


def app_of(where: Path | None, *agents: Any, clock: ManualClock | None = None) -> Perdure:
    return perdure(where, agents, clock)


async def ended(app: Perdure, agent: ReAct, *args: Any, **more: Any) -> RunRow:
    """Start the run `r`, drive it to its end or rest, and return its row."""
    await app.start(agent, *args, id="r", **more)
    return await app.engine.drive("r", wait=False)


def texts(messages: Sequence[Message]) -> list[str]:
    """A conversation in short: `user hi`, `tool! not found`."""
    return [_short(message) for message in messages]


def _short(message: Message) -> str:
    wanted = "".join(f" →{use.name}" for use in getattr(message, "uses", ()))
    role = type(message).__name__.lower().replace("toolresult", "tool") + ("!" if getattr(message, "error", False) else "")
    return f"{role} {message.text}{wanted}"
