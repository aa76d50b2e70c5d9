"""`Anthropic`: the Messages API through the official client. The answer is streamed inside the call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.models.clients import Clients, made, missing, secrets_of
from perdure.models.messages import Answer, Assistant, Request, Stop, Tokens, ToolResult, ToolUse, User
from perdure.models.model import Model
from perdure.models.streams import CONNECT_S, hear, time_left_s
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
    from anthropic import AsyncAnthropic

PROVIDER = "anthropic"
MAX_TOKENS = 8192
_STOPS: dict[str, Stop] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "length",  # the provider's own tools took too long, so the turn is not complete
    "refusal": "refusal",
}
_OPENING = "(You begin.)"  # a user turn that is inserted at the start, because the API wants a user turn first


class Anthropic(Model):
    """A model of Anthropic. If no `client` is given, a client is created with the key in ANTHROPIC_API_KEY.

    `max_tokens`: the longest answer, 8,192 by default. Put thinking and other parameters of the API into `options`:
    options={"thinking": {"type": "adaptive"}}.
    """

    provider = PROVIDER

    def __init__(self, name: str, client: AsyncAnthropic | None = None, **options: Any) -> None:
        super().__init__(name, **{"max_tokens": MAX_TOKENS, **options})
        self._clients = Clients(client, partial(_client, name), "AsyncAPIClient")

    def body(self, request: Request) -> dict[str, Any]:
        """The exact body that is sent for this request."""
        return body(request)

    async def answer(self, request: Request, call: Call) -> Answer:
        client = await self._clients.here()
        heard = AnthropicAnswer()
        opening = self._open(client, request, call)
        request_id = await hear(self, call, opening, heard, id_header="request-id", secrets=secrets_of(client))
        return heard.answer(WireNames(request.tools), request_id)

    def _open(self, client: Any, request: Request, call: Call) -> Any:
        from anthropic import Timeout

        whole = body(request)
        left_s = time_left_s(call, self.timeout_s)
        return client.messages.create(
            model=whole.pop("model"),
            max_tokens=whole.pop("max_tokens"),
            messages=[],  # the messages are in extra_body: the SDK would copy the whole conversation to look for files
            stream=True,
            extra_body=whole,
            extra_headers={"Idempotency-Key": call.key},
            timeout=Timeout(left_s, connect=min(left_s, CONNECT_S)),
        )


def _client(name: str) -> AsyncAnthropic:
    try:
        from anthropic import AsyncAnthropic
    except ImportError:
        raise missing(name, "anthropic") from None
    way_out = "set ANTHROPIC_API_KEY, or give client=AsyncAnthropic(api_key=…)"
    client: AsyncAnthropic = made(lambda: AsyncAnthropic(max_retries=0), name, way_out)
    _ = client.messages  # starts a large import now, in this thread, so that it does not block the loop later
    return client


def body(request: Request) -> dict[str, Any]:
    """The request for the Messages API. The function is pure: the same request always gives the same body."""
    names = WireNames(request.tools)
    whole: dict[str, Any] = {"model": request.model, "max_tokens": request.max_tokens or MAX_TOKENS}
    if request.system.strip():
        whole["system"] = request.system
    if request.tools:
        whole["tools"] = [
            {"name": names.wire(tool.name), **({"description": tool.description} if tool.description else {}), "input_schema": tool.schema}
            for tool in request.tools
        ]
        if request.choice is not None:
            choice = {"type": "any"} if request.choice == "any" else {"type": "tool", "name": names.wire(request.choice)}
            whole["tool_choice"] = choice
    if request.temperature is not None:
        whole["temperature"] = request.temperature
    whole["messages"] = _turns(request, names)
    whole |= request.options
    clean: dict[str, Any] = sendable(whole)
    return clean


def _turns(request: Request, names: WireNames) -> list[dict[str, Any]]:
    """Turns of the user and the assistant, in alternation. Adjacent messages of one role are joined into one turn."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": []}]
    for message, ids in wire_ids(request.messages):
        role = "assistant" if isinstance(message, Assistant) else "user"
        blocks = _blocks(message, ids, names)
        if isinstance(message, Assistant) and not blocks:
            continue  # the API refuses an empty answer
        if turns[-1]["role"] != role:
            turns.append({"role": role, "content": []})
        turns[-1]["content"] += blocks
    for turn in turns:
        if not turn["content"]:
            turn["content"] = [_text(_OPENING if turn is turns[0] and not isinstance(request.messages[0], User) else NOTHING_SAID)]
    last = turns[-1]["content"][-1]
    if turns[-1]["role"] == "assistant" and last.get("type") == "text":
        last["text"] = last["text"].rstrip()  # the API refuses a last assistant turn that ends with white space
    return turns


def _blocks(message: User | Assistant | ToolResult, ids: Mapping[str, str], names: WireNames) -> list[dict[str, Any]]:
    if isinstance(message, User):
        return [_text(message.text)] if message.text.strip() else []
    if isinstance(message, ToolResult):
        content = {"content": message.text} if message.text else {}
        failed = {"is_error": True} if message.error else {}
        return [{"type": "tool_result", "tool_use_id": ids[message.id], **content, **failed}]
    blocks: list[dict[str, Any]] = []
    for part in in_order(PROVIDER, message):
        if isinstance(part, ToolUse):
            # The API accepts only an object as arguments. The result of this tool use tells the model that its
            # arguments were not an object.
            arguments = part.arguments if isinstance(part.arguments, dict) else {"not_an_object": part.arguments}
            blocks.append({"type": "tool_use", "id": ids[part.id], "name": names.wire(part.name), "input": arguments})
        elif isinstance(part, str):
            blocks += [_text(part)] if part.strip() else []
        else:
            blocks.append(part)
    return blocks


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class AnthropicAnswer:
    """The part of an answer that was received so far. Malformed events are accepted."""

    def __init__(self) -> None:
        self.whole = False
        self._blocks: dict[str, _Block] = {}
        self._usage: dict[str, int] = {}
        self._stop: str | None = None
        self._model = ""

    def take(self, event: Mapping[str, Any]) -> str:
        """Take the next event of the stream. Returns the text in the event."""
        index = str(event.get("index"))
        match event.get("type"):
            case "message_start":
                self._model = text_in(event, "message", "model")
                self._count(mapping(event.get("message")).get("usage"))
            case "content_block_start":
                block = self._blocks[index] = _Block(mapping(event.get("content_block")))
                return block.begun_with
            case "content_block_delta":
                return self._blocks.setdefault(index, _Block({"type": "text"})).grow(mapping(event.get("delta")))
            case "message_delta":
                self._stop = text_in(event, "delta", "stop_reason") or self._stop
                self._count(event.get("usage"))
            case "message_stop":
                self.whole = self._stop is not None
        return ""

    def _count(self, usage: object) -> None:
        """Keep the reported counts. Each count is a total, so a later count replaces an earlier count."""
        self._usage |= {name: count(value) for name, value in mapping(usage).items() if value is not None}

    @property
    def tokens(self) -> Tokens:
        used = self._usage.get
        cached, stored = used("cache_read_input_tokens", 0), used("cache_creation_input_tokens", 0)
        return Tokens(used("input_tokens", 0) + cached + stored, used("output_tokens", 0), cached, stored)

    def answer(self, names: WireNames, request_id: str | None) -> Answer:
        stop = _STOPS.get(self._stop or "", "end")
        parts = [part for block in self._blocks.values() for part in block.parts()]
        made_of = composed(PROVIDER, parts, names, stop)
        if stop == "end" and made_of.uses:
            stop = "tools"
        return Answer(made_of.text, made_of.uses, stop, self._model, request_id, self.tokens, made_of.raw)


class _Block:
    """A content block that is received in pieces."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._start = dict(start)
        self._kind = text_in(start, "type")
        self.begun_with = text_in(start, "text")
        self._grown: dict[str, list[str]] = {"text": [self.begun_with]}

    def grow(self, delta: Mapping[str, Any]) -> str:
        """Add a delta to the block. Returns the text in the delta."""
        for name in ("text", "partial_json", "thinking", "signature"):
            if more := text_in(delta, name):
                self._grown.setdefault(name, []).append(more)
        return text_in(delta, "text") if self._kind == "text" else ""

    def parts(self) -> list[Part]:
        if self._kind == "text":
            text = joined(self._grown["text"])
            return [text] if text else []
        said = joined(self._grown.get("partial_json", []))
        if self._kind == "tool_use":
            given = self._start.get("input")
            arguments = given if isinstance(given, dict) and given and not said else said
            return [Wanted(joined([text_in(self._start, "id")]), joined([text_in(self._start, "name")]), arguments)]
        return [self._verbatim(said)] if self._kind else []

    def _verbatim(self, said: str) -> dict[str, Any]:
        """A thinking block, or a use of a provider's own tool, unchanged. The API wants such blocks sent back."""
        names = ("thinking", "signature") if self._kind == "thinking" else ()
        whole = self._start | {name: text_in(self._start, name) + joined(self._grown.get(name, [])) for name in names}
        if said:
            use = composed(PROVIDER, [Wanted("", "", said)], WireNames(()), "end").uses[0]
            whole["input"] = use.arguments if isinstance(use.arguments, dict) else {}
        return whole
