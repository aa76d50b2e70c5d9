"""What is said to a model and what it says: one form for all providers. Frozen, plain, and canonical in the journal.

A conversation is a sequence of messages in which every tool use of an `Assistant` is answered by a `ToolResult` with its id, in the
messages right behind it. Providers refuse anything else, for ever, so `check` refuses it before anybody is asked (T28).
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
    """Something that a person, or whoever acts for one, has said."""

    text: str


class ToolUse(Struct, frozen=True, omit_defaults=True):
    """The model wants this tool called. `arguments` is the text as it came when that is not a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any] | str


class Assistant(Struct, frozen=True, omit_defaults=True, tag_field="role", tag="assistant"):
    """What the model has said. `raw` is what its provider wants back unchanged beside it: signed thoughts, say."""

    text: str = ""
    uses: tuple[ToolUse, ...] = ()
    raw: Any = None


class ToolResult(Struct, frozen=True, omit_defaults=True, tag_field="role", tag="tool"):
    """What came of a tool use: its result, or why there is none."""

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
    """Everything that decides the answer, apart from the model's own moods."""

    model: str
    messages: tuple[Message, ...]
    system: str = ""
    tools: tuple[ToolSpec, ...] = ()
    choice: str | None = None  # None: as it likes; "any": some tool; otherwise the name of the one that it must use
    max_tokens: int | None = None
    temperature: float | None = None
    options: dict[str, Any] = {}  # passed to the provider as they are


class Tokens(Struct, frozen=True, omit_defaults=True):
    """As the provider counts them: `input` is all of it; `cached` was read from its cache, and `stored` was written to it."""

    input: int = 0
    output: int = 0
    cached: int = 0
    stored: int = 0


class Answer(Struct, frozen=True, omit_defaults=True):
    """A whole answer of a model. What was cut off is no answer."""

    text: str = ""
    uses: tuple[ToolUse, ...] = ()
    stop: Stop = "end"
    model: str = ""  # which one has answered, by its own word
    request_id: str | None = None
    tokens: Tokens = Tokens()
    raw: Any = None

    @property
    def message(self) -> Assistant:
        """As it stands in the conversation from now on."""
        return Assistant(self.text, self.uses, self.raw)


def encoded(value: Request | Answer) -> bytes:
    """Canonical JSON; NotEncodable says why not."""
    return codec.encode(msgspec.to_builtins(value))


def request_of(encoded_request: bytes) -> Request:
    return msgspec.convert(codec.decode(encoded_request), Request)


def answer_of(encoded_answer: bytes) -> Answer:
    return msgspec.convert(codec.decode(encoded_answer), Answer)


def shown_result(encoded_result: bytes) -> str:
    """A recorded result as a model reads it: text as it is, anything else as canonical JSON."""
    value = codec.decode(encoded_result)
    return value if isinstance(value, str) else encoded_result.decode("utf-8")


def check(messages: Sequence[Message]) -> None:
    """InvalidInput when a provider would refuse the conversation: no words to begin with, or a tool use without its result."""
    if not messages or isinstance(messages[0], ToolResult):
        raise InvalidInput("a conversation begins with something said: User(text) or Assistant(text)")
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
