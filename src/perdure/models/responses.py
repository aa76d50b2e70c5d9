"""OpenAI's responses API, with nothing stored there: a request as it is sent, an answer as it is heard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.models.chat import arguments_text, function
from perdure.models.messages import Answer, Assistant, Message, Request, Stop, Tokens, ToolResult, ToolUse, User
from perdure.models.streams import reported
from perdure.models.wire import NOTHING_SAID, Names, Part, Wanted, composed, count, in_order, joined, mapping, sendable, text_in, wire_ids

PROVIDER = "openai"
_THOUGHTS = "reasoning.encrypted_content"
_WITHOUT_THOUGHTS = ("gpt-3", "gpt-4", "chatgpt-")  # families that refuse to be asked for theirs


def body(request: Request) -> dict[str, Any]:
    """The request as the responses API takes it. The journal keeps the conversation, thoughts included, and the provider keeps nothing."""
    names = Names(request.tools)
    whole: dict[str, Any] = {"model": request.model, "store": False}
    if not request.model.startswith(_WITHOUT_THOUGHTS):
        whole["include"] = [_THOUGHTS]
    if request.system.strip():
        whole["instructions"] = request.system
    if request.max_tokens is not None:
        whole["max_output_tokens"] = request.max_tokens
    if request.temperature is not None:
        whole["temperature"] = request.temperature
    if request.tools:
        # Not strict: that is a dialect of JSON Schema in which nothing may be left out.
        whole["tools"] = [{"type": "function", **function(tool, names), "strict": False} for tool in request.tools]
        if request.choice is not None:
            whole["tool_choice"] = "required" if request.choice == "any" else {"type": "function", "name": names.wire(request.choice)}
    whole["input"] = [item for message, ids in wire_ids(request.messages) for item in _items(message, ids, names)] or [_said("user", "")]
    whole |= request.options
    clean: dict[str, Any] = sendable(whole)
    return clean


def _items(message: Message, ids: Mapping[str, str], names: Names) -> list[dict[str, Any]]:
    match message:
        case User():
            return [_said("user", message.text)]
        case ToolResult():
            return [{"type": "function_call_output", "call_id": ids[message.id], "output": message.text}]
        case Assistant():
            items: list[dict[str, Any]] = []
            for part in in_order(PROVIDER, message):
                if isinstance(part, ToolUse):
                    call = {"call_id": ids[part.id], "name": names.wire(part.name), "arguments": arguments_text(part)}
                    items.append({"type": "function_call", **call})
                elif isinstance(part, str):
                    items += [_said("assistant", part)] if part else []
                else:
                    items.append(part)
            return items


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text or NOTHING_SAID}


class Heard:
    """What has been heard of an answer so far. Takes events as they come, however they look."""

    def __init__(self) -> None:
        self.whole = False
        self.tokens = Tokens()
        self._items: list[Any] = []
        self._response: Mapping[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> str:
        """Go on by one event; the words in it. An event that reports an error raises it."""
        match event.get("type"):
            case "response.output_text.delta" | "response.refusal.delta":
                return text_in(event, "delta")
            case "response.output_item.done":
                self._items.append(event.get("item"))
            case "response.completed" | "response.incomplete":
                self._response = mapping(event.get("response"))
                self.tokens = _tokens(mapping(self._response.get("usage")))
                self.whole = True
            case "response.failed":
                failed = mapping(event.get("response"))
                self.tokens = _tokens(mapping(failed.get("usage")))
                raise reported(failed.get("error"))
            case "error":
                raise reported(event.get("error") or {name: value for name, value in event.items() if name != "type"})
        return ""

    def answer(self, names: Names, request_id: str | None) -> Answer:
        listed = self._response.get("output")
        items = [mapping(item) for item in (listed if isinstance(listed, list) and listed else self._items)]
        refused = any(text_in(content, "refusal") for item in items for content in _contents(item))
        stop = self._stop(refused)
        parts = [part for item in items for part in _parts(item)]
        made_of = composed(PROVIDER, parts, names, stop)
        if stop == "end" and made_of.uses:
            stop = "tools"
        return Answer(made_of.text, made_of.uses, stop, text_in(self._response, "model"), request_id, self.tokens, made_of.raw)

    def _stop(self, refused: bool) -> Stop:
        why = text_in(self._response, "incomplete_details", "reason")
        if refused or why == "content_filter":
            return "refusal"
        return "length" if why or text_in(self._response, "status") == "incomplete" else "end"


def _parts(item: Mapping[str, Any]) -> list[Part]:
    match item.get("type"):
        case "message":
            text = joined(text_in(content, "text") or text_in(content, "refusal") for content in _contents(item))
            return [text] if text else []
        case "function_call":
            ident = text_in(item, "call_id") or text_in(item, "id")
            return [Wanted(joined([ident]), joined([text_in(item, "name")]), joined([text_in(item, "arguments")]))]
        case str():
            # What is not stored there is known there by its content only, and a status is never taken back.
            return [{name: value for name, value in item.items() if name != "status" and value is not None}]
        case _:
            return []


def _contents(item: Mapping[str, Any]) -> list[Any]:
    found = item.get("content")
    return found if item.get("type") == "message" and isinstance(found, list) else []


def _tokens(usage: Mapping[str, Any]) -> Tokens:
    """`input_tokens` is all of the input, with what was cached and stored."""
    details = mapping(usage.get("input_tokens_details"))
    asked = count(usage.get("input_tokens"))
    cached = min(count(details.get("cached_tokens")), asked)
    stored = min(count(details.get("cache_write_tokens")), asked - cached)
    return Tokens(asked, count(usage.get("output_tokens")), cached, stored)
