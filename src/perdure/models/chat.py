"""The format of OpenAI's chat completions API: requests and streamed answers. Most compatible servers support it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.core import codec
from perdure.models.messages import Answer, Assistant, Message, Request, Stop, Tokens, ToolResult, ToolSpec, ToolUse, User
from perdure.models.wire import NOTHING_SAID, Part, Wanted, WireNames, composed, count, joined, mapping, sendable, text_in, wire_ids

PROVIDER = "chat"
_STOPS: dict[str, Stop] = {"length": "length", "content_filter": "refusal"}


def body(request: Request, *, limit: str) -> dict[str, Any]:
    """The request for chat completions.

    `limit`: the name of the field that max_tokens is sent in. The name differs between servers.
    """
    names = WireNames(request.tools)
    whole: dict[str, Any] = {"model": request.model, "stream_options": {"include_usage": True}}
    if request.max_tokens is not None:
        whole[limit] = request.max_tokens
    if request.temperature is not None:
        whole["temperature"] = request.temperature
    if request.tools:
        whole["tools"] = [{"type": "function", "function": function(tool, names)} for tool in request.tools]
        if request.choice is not None:
            named = {"type": "function", "function": {"name": names.wire(request.choice)}}
            whole["tool_choice"] = "required" if request.choice == "any" else named
    messages = [{"role": "system", "content": request.system}] if request.system.strip() else []
    for message, ids in wire_ids(request.messages):
        messages += _messages(message, ids, names)
    whole["messages"] = messages or [{"role": "user", "content": NOTHING_SAID}]
    whole |= request.options
    clean: dict[str, Any] = sendable(whole)
    return clean


def function(tool: ToolSpec, names: WireNames) -> dict[str, Any]:
    """A tool in the form that both OpenAI APIs share."""
    described = {"description": tool.description} if tool.description else {}
    return {"name": names.wire(tool.name), **described, "parameters": tool.schema}


def arguments_text(use: ToolUse) -> str:
    """The arguments as text. Arguments that were not a JSON object are sent back unchanged."""
    return use.arguments if isinstance(use.arguments, str) else codec.encode(use.arguments).decode("utf-8")


def _messages(message: Message, ids: Mapping[str, str], names: WireNames) -> list[dict[str, Any]]:
    match message:
        case User():
            return [{"role": "user", "content": message.text or NOTHING_SAID}]
        case ToolResult():
            return [{"role": "tool", "tool_call_id": ids[message.id], "content": message.text}]
        case Assistant():
            calls = [
                {"id": ids[use.id], "type": "function", "function": {"name": names.wire(use.name), "arguments": arguments_text(use)}}
                for use in message.uses
            ]
            if not message.text and not calls:
                return []  # servers refuse an empty answer
            return [{"role": "assistant", "content": message.text or None, **({"tool_calls": calls} if calls else {})}]


class ChatAnswer:
    """The part of an answer that was received so far. Malformed chunks are accepted."""

    def __init__(self) -> None:
        self.whole = False
        self.tokens = Tokens()
        self._words: list[str] = []
        self._refused: list[str] = []
        self._calls: dict[str, _Call] = {}
        self._last = ""
        self._stop = ""
        self._model = ""

    def take(self, chunk: Mapping[str, Any]) -> str:
        """Take the next chunk of the stream. Returns the text in the chunk."""
        self._model = text_in(chunk, "model") or self._model
        if chunk.get("usage") is not None:
            self.tokens = _tokens(mapping(chunk["usage"]))
        choices = chunk.get("choices")
        choice = mapping(choices[0]) if isinstance(choices, list) and choices else {}
        delta = mapping(choice.get("delta"))
        said, refused = text_in(delta, "content"), text_in(delta, "refusal")
        self._words.append(said)
        self._refused.append(refused)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            self._grow(mapping(call))
        if stop := text_in(choice, "finish_reason"):
            self._stop, self.whole = stop, True
        return said + refused

    def _grow(self, delta: Mapping[str, Any]) -> None:
        """Add a delta to its tool call.

        All deltas of one call have the same index. If a server sends no indexes, the first delta of a call has an id,
        and deltas without an id belong to the last call.
        """
        index, ident = delta.get("index"), text_in(delta, "id")
        key = self._last if index is None and not ident else f"{index} {ident}" if index is None else str(index)
        known = self._calls.get(key)
        if known is not None and ident and known.id and ident != known.id:
            key = f"{key} {ident}"  # another id: this is a second call with the same index
            known = self._calls.get(key)
        if known is None:
            known = self._calls[key] = _Call()
        self._last = key
        known.id = known.id or ident
        known.name += text_in(delta, "function", "name") if known.name != text_in(delta, "function", "name") else ""
        known.arguments.append(text_in(delta, "function", "arguments"))

    def answer(self, names: WireNames, request_id: str | None) -> Answer:
        refusal = joined(self._refused)
        stop: Stop = "refusal" if refusal else _STOPS.get(self._stop, "end")
        parts: list[Part] = [text for text in (joined(self._words), refusal) if text]
        parts += [Wanted(call.id, joined([call.name]), joined(call.arguments)) for call in self._calls.values()]
        made_of = composed(PROVIDER, parts, names, stop)
        if stop == "end" and made_of.uses:
            stop = "tools"
        return Answer(made_of.text, made_of.uses, stop, self._model, request_id, self.tokens, made_of.raw)


class _Call:
    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments: list[str] = []


def _tokens(usage: Mapping[str, Any]) -> Tokens:
    """The token counts in the form for all providers. `prompt_tokens` includes cached and stored input."""
    details = mapping(usage.get("prompt_tokens_details"))
    asked = count(usage.get("prompt_tokens"))
    cached = min(count(details.get("cached_tokens")), asked)
    stored = min(count(details.get("cache_write_tokens")), asked - cached)
    return Tokens(asked, count(usage.get("completion_tokens")), cached, stored)
