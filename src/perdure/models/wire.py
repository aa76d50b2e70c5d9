"""What every provider's wire format needs: names and ids that it takes, texts that can be sent, and an answer put together from its parts.

Providers are strict about what is sent to them and lax about what they send. So nothing that stands in a conversation may make a request
that is refused for ever, and nothing that comes back may be a failure unless the answer is not whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from perdure.core import codec
from perdure.errors import NotEncodable
from perdure.models.messages import Assistant, Message, Stop, ToolResult, ToolSpec, ToolUse

MAX_TOKENS = 10**9  # of one answer: more than that is no count
_REFUSED_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
_MAX_NAME = 64
NOTHING_SAID = "(no text)"  # providers refuse an empty turn, and would refuse it for ever

Raw = dict[str, Any]  # a block or item of the provider that it wants back as it was


class Wanted(Struct, frozen=True):
    """A tool use as it came: `arguments` is JSON text, or what the provider has parsed itself."""

    id: str
    name: str
    arguments: str | dict[str, Any]


Part = str | Wanted | Raw


class Composed(Struct, frozen=True):
    """The parts of an answer in the neutral form."""

    text: str
    uses: tuple[ToolUse, ...]
    raw: Any


class Names:
    """The tools' names as providers take them, and back. A name with a dot in it is fine here and refused there."""

    def __init__(self, tools: Iterable[ToolSpec]) -> None:
        self._wire: dict[str, str] = {}
        self._own: dict[str, str] = {}
        for tool in tools:
            self._add(tool.name)

    def _add(self, name: str) -> None:
        plain = wire = _REFUSED_IN_NAMES.sub("_", name)[:_MAX_NAME] or "_"
        again = 2
        while self._own.get(wire, name) != name:
            wire = f"{plain[: _MAX_NAME - 4]}_{again}"
            again += 1
        self._wire[name], self._own[wire] = wire, name

    def wire(self, name: str) -> str:
        """As it is sent; also for a tool that is not offered any more, or that the model has made up."""
        if name not in self._wire:
            self._add(name)
        return self._wire[name]

    def own(self, wire: str) -> str:
        return self._own.get(wire, wire)


def wire_ids(messages: Sequence[Message]) -> Iterator[tuple[Message, dict[str, str]]]:
    """Each message with the ids of its tool uses, or of its result, as they are sent: short, plain, and unique in the conversation.

    Some providers number the uses of every answer anew, and others refuse a conversation in which an id stands twice.
    """
    seen: set[str] = set()
    last: dict[str, str] = {}
    for place, message in enumerate(messages):
        if isinstance(message, Assistant):
            last = {}
            for at, use in enumerate(message.uses):
                ident = use.id if _ID.fullmatch(use.id) and use.id not in seen else f"use_{place}_{at}"
                while ident in seen:
                    ident += "_"
                seen.add(ident)
                last[use.id] = ident
        yield message, last if isinstance(message, (Assistant, ToolResult)) else {}


def sendable(value: Any) -> Any:
    """The value without lone surrogates, which no request can carry."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, dict):
        return {sendable(name): sendable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [sendable(inner) for inner in value]
    return value


def joined(pieces: Iterable[str]) -> str:
    """The pieces of a text. A character that was cut in two between them is one character again."""
    text = "".join(pieces)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return text


def mapping(value: object) -> Mapping[str, Any]:
    """The value where it is an object, and nothing otherwise."""
    return value if isinstance(value, Mapping) else {}


def text_in(value: object, *path: str) -> str:
    """The text that lies there, or none."""
    for name in path:
        value = mapping(value).get(name)
    return value if isinstance(value, str) else ""


def count(value: object) -> int:
    """A number of tokens as a provider gives it; 0 for what is no such number."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else 0


def plain(event: Any) -> Mapping[str, Any]:
    """An event of an SDK as the JSON that it was made of, whether or not that fits its type."""
    if hasattr(event, "to_dict"):
        event = event.to_dict(mode="json", warnings=False)
    return mapping(event)


def composed(provider: str, parts: Sequence[Part], names: Names, stop: Stop) -> Composed:
    """The answer's text and tool uses, and what has to be given back beside them.

    An answer that was cut off, by its length or by a filter, may end in half a tool use, and half a tool use is none.
    """
    kept = [part for part in parts if not isinstance(part, Wanted) or _is_whole(part, stop)]
    while kept and isinstance(kept[-1], dict):
        kept.pop()  # a thought that nothing follows is refused by those who have thought it
    kept = _rejoined(kept)
    text = "".join(part for part in kept if isinstance(part, str))
    uses = tuple(unique([_use(part, names) for part in kept if isinstance(part, Wanted)]))
    layout = [len(part) if isinstance(part, str) else "use" if isinstance(part, Wanted) else part for part in kept]
    return Composed(text, uses, {provider: layout} if any(isinstance(part, dict) for part in kept) and _recordable(layout) else None)


def _rejoined(parts: Sequence[Part]) -> list[Part]:
    """With no character cut in two between two parts: its second half goes to the first."""
    found: list[Part] = []
    last: int | None = None  # where the last text is
    for part in parts:
        if isinstance(part, str) and part:
            before = found[last] if last is not None else ""
            if isinstance(before, str) and "\ud800" <= before[-1:] <= "\udbff" and "\udc00" <= part[:1] <= "\udfff" and last is not None:
                found[last] = joined([before, part[0]])
                part = part[1:]
            last = len(found)
        found.append(part)
    return found


def in_order(provider: str, message: Assistant) -> Iterator[str | ToolUse | Raw]:
    """The parts of an earlier answer as they came from this provider; for another one its text and its tool uses."""
    layout = mapping(message.raw).get(provider)
    if not isinstance(layout, list) or not _fits(layout, message):
        layout = [len(message.text), *("use" for _ in message.uses)]
    at, uses = 0, iter(message.uses)
    for part in layout:
        if isinstance(part, int):
            yield message.text[at : at + part]
            at += part
        elif part == "use":
            yield next(uses)
        else:
            yield part


def _fits(layout: list[Any], message: Assistant) -> bool:
    """Whoever has edited the message has not edited what lies beside it."""
    lengths = [part for part in layout if isinstance(part, int)]
    return sum(lengths) == len(message.text) and layout.count("use") == len(message.uses)


def _is_whole(part: Wanted, stop: Stop) -> bool:
    if stop == "refusal":
        return False
    # A JSON object is never the beginning of another one: what parses has come to its end.
    return stop != "length" or isinstance(part.arguments, dict) or (bool(part.arguments) and isinstance(_parsed(part.arguments), dict))


def _use(part: Wanted, names: Names) -> ToolUse:
    arguments = part.arguments if isinstance(part.arguments, dict) else _parsed(part.arguments)
    return ToolUse(part.id, names.own(part.name), arguments if _recordable(arguments) else str(part.arguments))


def _parsed(text: str) -> dict[str, Any] | str:
    """The arguments; the text itself where it is no JSON object, for the model to be told so."""
    if not text.strip():
        return {}
    try:
        value = codec.parse(text)
    except NotEncodable:
        return text
    return value if isinstance(value, dict) else text


def _recordable(value: Any) -> bool:
    """An answer that cannot be written down is lost, and has been paid for: better to lose what is odd about it."""
    try:
        codec.encode([[[[[[[[value]]]]]]]])  # as deep as it may come to lie: in an answer, in a conversation, in the input of a run
    except NotEncodable:
        return False
    return True


def unique(uses: Sequence[ToolUse]) -> Iterator[ToolUse]:
    """With ids that tell them apart."""
    seen = {""}
    for at, use in enumerate(uses):
        ident = use.id or f"use_{at}"
        while ident in seen:
            ident = f"{ident}_{at}"
        seen.add(ident)
        yield ToolUse(ident, use.name, use.arguments)
