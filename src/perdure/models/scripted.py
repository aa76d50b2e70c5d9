"""`Scripted`: a model for tests and demos. Its answers are prepared, and it sends no requests."""

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
    """A model whose nth answer is the nth line of a script.

    A line is text, an Answer, an exception to raise, or a function of the request.

    The model does not count its answers. It finds its position in the script from the number of answers in the
    conversation. So the position is right after a crash, in another process, and for several runs at the same time.
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
    """A tool use for a script. The id of the tool use is made from the name and the arguments."""
    shown = "_".join(str(value) for value in arguments.values())
    return ToolUse(f"use_{name}_{shown}"[:60], name, arguments)


def uses(*wanted: ToolUse, text: str = "") -> Answer:
    """An answer with these tool uses. Two equal uses get different ids."""
    return Answer(text, tuple(unique(wanted)), stop="tools")
