"""`Scripted`: a model for tests and demos that says what it was told to say. Nothing is asked of anybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perdure.errors import Fatal, InvalidInput
from perdure.models.messages import Answer, Assistant, Request, ToolUse
from perdure.models.model import Model
from perdure.models.prices import Price
from perdure.models.wire import unique
from perdure.tool.call import Call

Line = str | Answer | Exception | Callable[[Request], "str | Answer"]


class Scripted(Model):
    """The nth answer of a conversation is the nth line: text, an Answer, an exception to raise, or a function of the request.

    The place in the script is read from the conversation, not counted: after a crash, in another process, or in several runs at a time
    the script goes on where each conversation is.
    """

    def __init__(self, lines: Sequence[Line], *, name: str = "scripted", **options: Any) -> None:
        super().__init__(name, **{"price": Price(0, 0), **options})
        if isinstance(lines, str) or not all(isinstance(line, (str, Answer, Exception)) or callable(line) for line in lines):
            raise InvalidInput("Scripted takes a list of lines: text, Answer(…), an exception, or a function of the request")
        self._lines = tuple(lines)

    async def answer(self, request: Request, call: Call) -> Answer:
        place = sum(isinstance(message, Assistant) for message in request.messages)
        if place >= len(self._lines):
            raise Fatal(f"the script of model {self.name} has {len(self._lines)} lines, and is asked for one more")
        line = self._lines[place]
        if isinstance(line, Exception):
            raise line
        said = line(request) if callable(line) else line
        answer = Answer(text=said) if isinstance(said, str) else said
        self.say(call, answer.text)
        return answer


def use(name: str, /, **arguments: Any) -> ToolUse:
    """A tool use for a script. Its id is made of what it says."""
    shown = "_".join(str(value) for value in arguments.values())
    return ToolUse(f"use_{name}_{shown}"[:60], name, arguments)


def uses(*wanted: ToolUse, text: str = "") -> Answer:
    """An answer that wants these tools used; two equal uses are two."""
    return Answer(text, tuple(unique(wanted)), stop="tools")
