"""`OpenAI`: the responses API and the chat completions API, through the official client.

The format of the responses API is in this module, the format of chat completions is in chat.py. The provider stores
nothing: the journal keeps the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from perdure.errors import InvalidInput
from perdure.models import chat
from perdure.models.chat import arguments_text, function
from perdure.models.clients import Clients, made, missing, secrets_of
from perdure.models.messages import Answer, Assistant, Message, Request, Stop, Tokens, ToolResult, ToolUse, User
from perdure.models.model import Model
from perdure.models.streams import CONNECT_S, hear, reported, time_left_s
from perdure.models.wire import (
    NOTHING_SAID,
    Part,
    Wanted,
    WireNames,
    composed,
    count,
    in_order,
    joined,
    mapping,
    sendable,
    text_in,
    wire_ids,
)
from perdure.tool.call import Call

if TYPE_CHECKING:
    from openai import AsyncOpenAI

PROVIDER = "openai"
_THOUGHTS = "reasoning.encrypted_content"
_WITHOUT_THOUGHTS = ("gpt-3", "gpt-4", "chatgpt-")  # models that refuse a request for encrypted reasoning


def body(request: Request) -> dict[str, Any]:
    """The request for the responses API.

    The provider stores nothing: the journal keeps the conversation, including the encrypted reasoning.
    """
    names = WireNames(request.tools)
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
        # Do not use strict mode: it makes every property of a JSON Schema required.
        whole["tools"] = [{"type": "function", **function(tool, names), "strict": False} for tool in request.tools]
        if request.choice is not None:
            whole["tool_choice"] = "required" if request.choice == "any" else {"type": "function", "name": names.wire(request.choice)}
    whole["input"] = [item for message, ids in wire_ids(request.messages) for item in _items(message, ids, names)] or [_said("user", "")]
    whole |= request.options
    clean: dict[str, Any] = sendable(whole)
    return clean


def _items(message: Message, ids: Mapping[str, str], names: WireNames) -> list[dict[str, Any]]:
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


class ResponsesAnswer:
    """The part of an answer that was received so far. Malformed events are accepted."""

    def __init__(self) -> None:
        self.whole = False
        self.tokens = Tokens()
        self._items: list[Any] = []
        self._response: Mapping[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> str:
        """Take the next event of the stream. Returns the text in the event. Raises if the event reports an error."""
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

    def answer(self, names: WireNames, request_id: str | None) -> Answer:
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
            # Any other item is sent back whole, because the provider stores nothing. Only `status` is removed: the
            # provider does not accept it as input.
            return [{name: value for name, value in item.items() if name != "status" and value is not None}]
        case _:
            return []


def _contents(item: Mapping[str, Any]) -> list[Any]:
    found = item.get("content")
    return found if item.get("type") == "message" and isinstance(found, list) else []


def _tokens(usage: Mapping[str, Any]) -> Tokens:
    """The token counts in the form for all providers. `input_tokens` includes cached and stored input."""
    details = mapping(usage.get("input_tokens_details"))
    asked = count(usage.get("input_tokens"))
    cached = min(count(details.get("cached_tokens")), asked)
    stored = min(count(details.get("cache_write_tokens")), asked - cached)
    return Tokens(asked, count(usage.get("output_tokens")), cached, stored)


# -- the model --------------------------------------------------------------------------------------------------------
Api = Literal["responses", "chat"]


class OpenAI(Model):
    """A model of OpenAI, or of a compatible server at `base_url`. If no `client` is given, a client is created.

    `api`: which API is used. The default is "responses" for OpenAI itself. With a base_url the default is "chat",
    because most compatible servers support this API. `api_key`: the API key; by default the key in OPENAI_API_KEY. The
    price of a model at a base_url is not known: pass price=Price(…).
    """

    def __init__(
        self,
        name: str,
        client: AsyncOpenAI | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        api: Api | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        if client is not None and (base_url is not None or api_key is not None):
            raise InvalidInput(f"model {name}: give base_url and api_key to the client, or to the model instead of a client")
        if api not in (None, "responses", "chat"):
            raise InvalidInput(f'model {name}: api={api!r:.60}: "responses" or "chat"')
        self.api: Api = api or ("responses" if base_url is None else "chat")
        self.provider = "openai" if base_url is None else ""
        self._base_url = base_url
        self._clients = Clients(client, partial(_client, name, base_url, api_key), "AsyncAPIClient")

    def identity(self) -> list[Any]:
        # The base URL is only the route to the model. None stands in its place, so that the versions of agents with a
        # model without a base URL are the same as in perdure 0.1.
        return [*super().identity(), self.api, None]

    def former_identity(self) -> list[Any]:
        return [*super().identity(), self.api, self._base_url]

    def body(self, request: Request) -> dict[str, Any]:
        """The exact body that is sent for this request."""
        if self.api == "responses":
            return body(request)
        return chat.body(request, limit="max_completion_tokens" if self._base_url is None else "max_tokens")

    async def answer(self, request: Request, call: Call) -> Answer:
        client = await self._clients.here()
        heard = ResponsesAnswer() if self.api == "responses" else chat.ChatAnswer()
        opening = self._open(client, request, call)
        request_id = await hear(self, call, opening, heard, id_header="x-request-id", secrets=secrets_of(client))
        return heard.answer(WireNames(request.tools), request_id)

    def _open(self, client: Any, request: Request, call: Call) -> Any:
        from openai import Timeout

        whole = self.body(request)
        left_s = time_left_s(call, self.timeout_s)
        told: dict[str, Any] = {
            "model": whole.pop("model"),
            "stream": True,
            "extra_body": whole,
            "extra_headers": {"Idempotency-Key": call.key},
            "timeout": Timeout(left_s, connect=min(left_s, CONNECT_S)),
        }
        # The conversation is in extra_body. If it were passed as `input` or `messages`, the SDK would copy it to look
        # for files.
        if self.api == "responses":
            return client.responses.create(input=[], **told)
        return client.chat.completions.create(messages=[], **told)


def _client(name: str, base_url: str | None, api_key: str | None) -> AsyncOpenAI:
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise missing(name, "openai") from None
    way_out = "set OPENAI_API_KEY, or give api_key=… (any text for a server that wants none)"
    client: AsyncOpenAI = made(lambda: AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0), name, way_out)
    # Start two large imports now, in this thread, so that they do not block the loop later.
    _ = client.responses, client.chat.completions
    return client
