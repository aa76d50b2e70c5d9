"""Shared code of the providers' formats: valid names and ids, text that can be sent, and an answer from its parts.

Providers are strict about requests, but their own answers do not always follow the rules. So every conversation must
become a request that a provider accepts, and a complete answer must never count as a failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from perdure.core import codec
from perdure.errors import NotEncodable
from perdure.models.messages import Assistant, Message, Stop, ToolResult, ToolSpec, ToolUse

MAX_TOKENS = 10**9  # if a provider reports more tokens than this, the number is not believed
_REFUSED_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
_MAX_NAME = 64
NOTHING_SAID = "(no text)"  # sent instead of an empty turn, which providers refuse

Raw = dict[str, Any]  # a block or an item of an answer that the provider wants back unchanged


class Wanted(Struct, frozen=True):
    """A tool use as received. `arguments` is JSON text, or an object if the provider sent an object."""

    id: str
    name: str
    arguments: str | dict[str, Any]


Part = str | Wanted | Raw


class Composed(Struct, frozen=True):
    """An answer's text, tool uses and raw data, in the form for all providers."""

    text: str
    uses: tuple[ToolUse, ...]
    raw: Any


class WireNames:
    """Maps tool names to names that providers accept, and back. Providers refuse a name with a dot, for example."""

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
        """The name that is sent. `name` may also be a tool that is no longer offered, or that the model invented."""
        if name not in self._wire:
            self._add(name)
        return self._wire[name]

    def own(self, wire: str) -> str:
        return self._own.get(wire, wire)


def wire_ids(messages: Sequence[Message]) -> Iterator[tuple[Message, dict[str, str]]]:
    """Each message, and a dict: id in the message → id that is sent.

    The sent ids are short, plain, and unique in the conversation. Some providers restart their numbering of tool uses
    with every answer, and other providers refuse a conversation with equal ids.
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
    """The value without lone surrogates, which cannot be sent as UTF-8."""
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
    """Join the pieces of a text. A surrogate pair that was split between two pieces becomes one character again."""
    text = "".join(pieces)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return text


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping. If it is not, an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def text_in(value: object, *path: str) -> str:
    """The string at this path. If there is none, an empty string."""
    for name in path:
        value = mapping(value).get(name)
    return value if isinstance(value, str) else ""


def count(value: object) -> int:
    """A number of tokens from a provider. 0 if the value is not a valid number."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else 0


def plain(event: Any) -> Mapping[str, Any]:
    """An event of an SDK as plain JSON, even if the event does not fit the type that the SDK has for it."""
    if hasattr(event, "to_dict"):
        event = event.to_dict(mode="json", warnings=False)
    return mapping(event)


def composed(provider: str, parts: Sequence[Part], names: WireNames, stop: Stop) -> Composed:
    """The text and the tool uses of an answer, and the raw data that the provider wants back.

    An answer that was cut off may end with an incomplete tool use, which is dropped. Of an answer that a filter
    stopped (stop "refusal"), all tool uses are dropped.
    """
    kept = [part for part in parts if not isinstance(part, Wanted) or _is_whole(part, stop)]
    while kept and isinstance(kept[-1], dict):
        kept.pop()  # a provider refuses its own reasoning block if nothing follows the block
    kept = _rejoined(kept)
    text = "".join(part for part in kept if isinstance(part, str))
    uses = tuple(unique([_use(part, names) for part in kept if isinstance(part, Wanted)]))
    layout = [len(part) if isinstance(part, str) else "use" if isinstance(part, Wanted) else part for part in kept]
    return Composed(text, uses, {provider: layout} if any(isinstance(part, dict) for part in kept) and _recordable(layout) else None)


def _rejoined(parts: Sequence[Part]) -> list[Part]:
    """The parts. If a surrogate pair was split between two texts, its second half is moved to the first text."""
    found: list[Part] = []
    last: int | None = None  # the index of the last text in `found`
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
    """The parts of an earlier answer.

    An answer of this provider has its original parts in their original order. An answer of another provider has only
    its text and its tool uses.
    """
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
    """Does the raw layout still fit the message? An agent may have edited the message but not `raw`."""
    lengths = [part for part in layout if isinstance(part, int)]
    return sum(lengths) == len(message.text) and layout.count("use") == len(message.uses)


def _is_whole(part: Wanted, stop: Stop) -> bool:
    if stop == "refusal":
        return False
    # A part of a JSON object is never valid JSON. So if the text can be parsed, it is complete.
    return stop != "length" or isinstance(part.arguments, dict) or (bool(part.arguments) and isinstance(_parsed(part.arguments), dict))


def _use(part: Wanted, names: WireNames) -> ToolUse:
    arguments = part.arguments if isinstance(part.arguments, dict) else _parsed(part.arguments)
    return ToolUse(part.id, names.own(part.name), arguments if _recordable(arguments) else str(part.arguments))


def _parsed(text: str) -> dict[str, Any] | str:
    """The arguments as an object. If the text is not a JSON object: the text itself, to show it to the model."""
    if not text.strip():
        return {}
    try:
        value = codec.parse(text)
    except NotEncodable:
        return text
    return value if isinstance(value, dict) else text


def _recordable(value: Any) -> bool:
    """Can the value be recorded?

    If not, the value is left out: otherwise the whole answer, which was paid for, could not be recorded.
    """
    try:
        codec.encode([[[[[[[[value]]]]]]]])  # as deep as the value is in the input of a run with a `history`
    except NotEncodable:
        return False
    return True


def unique(uses: Sequence[ToolUse]) -> Iterator[ToolUse]:
    """The tool uses, with new ids where an id is empty or occurs twice."""
    seen = {""}
    for at, use in enumerate(uses):
        ident = use.id or f"use_{at}"
        while ident in seen:
            ident = f"{ident}_{at}"
        seen.add(ident)
        yield ToolUse(ident, use.name, use.arguments)
