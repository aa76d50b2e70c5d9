"""Requests, answers and messages, in one form for all providers. They are frozen and recorded as canonical JSON.

In a conversation every tool use in an `Assistant` message must have a `ToolResult` with the same id, in the messages
directly after the `Assistant`. Providers refuse a conversation that breaks this rule, so `check` refuses it before a
model is asked (threat T28).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from perdure.core import codec
from perdure.errors import InvalidInput

Stop = Literal["end", "tools", "length", "refusal"]


class User(Struct, frozen=True, tag_field="role", tag="user"):
    """A message from the user, or from the agent in the name of the user."""

    text: str


class ToolUse(Struct, frozen=True, omit_defaults=True):
    """The model wants to call this tool. If the arguments are not a JSON object, `arguments` is the original text."""

    id: str
    name: str
    arguments: dict[str, Any] | str


class Assistant(Struct, frozen=True, omit_defaults=True, tag_field="role", tag="assistant"):
    """A message from the model. `raw`: data that the provider wants back unchanged, such as signed thoughts."""

    text: str = ""
    uses: tuple[ToolUse, ...] = ()
    raw: Any = None


class ToolResult(Struct, frozen=True, omit_defaults=True, tag_field="role", tag="tool"):
    """The result of a tool use. With error=True the text says why there is no result."""

    id: str
    name: str
    text: str
    error: bool = False


Message = User | Assistant | ToolResult


class ToolSpec(Struct, frozen=True):
    """A tool as a model sees it."""

    name: str
    description: str
    schema: dict[str, Any]


class Request(Struct, frozen=True, omit_defaults=True):
    """Everything that influences the answer, apart from the randomness of the model."""

    model: str
    messages: tuple[Message, ...]
    system: str = ""
    tools: tuple[ToolSpec, ...] = ()
    # None: the model chooses. "any": the model must use some tool. Otherwise: the name of the tool that it must use.
    choice: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    options: dict[str, Any] = {}  # passed to the provider unchanged


class Tokens(Struct, frozen=True, omit_defaults=True):
    """Tokens as the provider counts them.

    `input` counts all input. It includes `cached`, which was read from the provider's cache, and `stored`, which was
    written to the provider's cache.
    """

    input: int = 0
    output: int = 0
    cached: int = 0
    stored: int = 0


class Answer(Struct, frozen=True, omit_defaults=True):
    """A complete answer of a model. There is no Answer for a stream that was cut off."""

    text: str = ""
    uses: tuple[ToolUse, ...] = ()
    stop: Stop = "end"
    model: str = ""  # the model that answered, according to the provider
    request_id: str | None = None
    tokens: Tokens = Tokens()
    raw: Any = None

    @property
    def message(self) -> Assistant:
        """The answer as a message of the conversation."""
        return Assistant(self.text, self.uses, self.raw)


def encoded(value: Request | Answer) -> bytes:
    """Canonical JSON of the request or answer. NotEncodable says why it cannot be encoded."""
    return codec.encode(msgspec.to_builtins(value))


def request_of(encoded_request: bytes) -> Request:
    return msgspec.convert(codec.decode(encoded_request), Request)


def answer_of(encoded_answer: bytes) -> Answer:
    return msgspec.convert(codec.decode(encoded_answer), Answer)


def shown_result(encoded_result: bytes) -> str:
    """A recorded result as text for a model: strings unchanged, other values as canonical JSON."""
    value = codec.decode(encoded_result)
    return value if isinstance(value, str) else encoded_result.decode("utf-8")


def check(messages: Sequence[Message]) -> None:
    """InvalidInput if providers would refuse the conversation.

    They refuse it if it is empty, begins with a tool result, has a tool use without a result, has a result without a
    tool use, or has two tool uses with the same id in one message.
    """
    if not messages or isinstance(messages[0], ToolResult):
        raise InvalidInput("a conversation begins with User(text) or Assistant(text)")
    open_uses: dict[str, str] = {}
    for place, message in enumerate(messages):
        if isinstance(message, ToolResult):
            if open_uses.pop(message.id, None) is None:
                raise InvalidInput(f"message {place}: a result for {message.id!r:.60}, which the message before has not asked for")
            continue
        _check_answered(open_uses, place)
        if isinstance(message, Assistant):
            open_uses = {use.id: use.name for use in message.uses}
            if len(open_uses) != len(message.uses):
                raise InvalidInput(f"message {place}: two tool uses have the same id")
    _check_answered(open_uses, len(messages))


def _check_answered(open_uses: dict[str, str], place: int) -> None:
    if open_uses:
        ident, name = next(iter(open_uses.items()))
        raise InvalidInput(f"message {place}: the use {ident!r:.60} of tool {name} before it has no result; answer every one of them")
