"""A turn of the script in the wire formats of the providers, complete or as the events of a stream.

A turn is what `say` returns: plain JSON, so that it can be sent to the server's process. Hostile content is intended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NotRequired, TypedDict

from tests.servers.provider_rules import signature

PIECES = 8


class Use(TypedDict):
    name: str
    arguments: str
    id: str | None


class Turn(TypedDict):
    text: str
    uses: list[Use]
    stop: str | None
    thought: str | None
    cached: int
    stored: int
    extra: bool
    usage: NotRequired[Any]


class Count(TypedDict):
    input: int
    output: int
    cached: int
    stored: int


def count(body: dict[str, Any], turn: Turn) -> Count:
    """A fixed rule: four bytes of JSON are a token. `input` counts everything, with the cached and stored tokens."""
    asked = {name: body[name] for name in ("system", "instructions", "messages", "input", "tools") if name in body}
    said = [turn["text"], turn["uses"], turn["thought"]]
    return {
        "input": _tokens(asked) + turn["cached"] + turn["stored"],
        "output": _tokens(said),
        "cached": turn["cached"],
        "stored": turn["stored"],
    }


def _tokens(value: Any) -> int:
    return len(json.dumps(value, sort_keys=True, separators=(",", ":"))) // 4 + 1


def _named(uses: list[Use], prefix: str, place: int) -> list[tuple[str, Use]]:
    """Ids that are unique in a conversation, and the same if the same request is repeated."""
    return [(use["id"] if use["id"] is not None else f"{prefix}_{place}_{at}", use) for at, use in enumerate(uses)]


def _pieces(text: str) -> list[str]:
    """Cut by units of UTF-16, as some do: a character outside the basic plane may come in two halves."""
    raw = text.encode("utf-16-le", "surrogatepass")
    size = 2 * max(-(-len(raw) // (2 * PIECES)), 1)
    return [raw[at : at + size].decode("utf-16-le", "surrogatepass") for at in range(0, len(raw), size)]


def _extra(turn: Turn) -> dict[str, Any]:
    return {"surprise": {"from": "the future", "n": [1, 2]}} if turn["extra"] else {}


# -- Anthropic ------------------------------------------------------------------------------------------------------------
_ANTHROPIC_STOPS = {"end": "end_turn", "tools": "tool_use", "length": "max_tokens", "refusal": "refusal"}


def _anthropic_usage(turn: Turn, counted: Count, output: int) -> dict[str, Any]:
    if "usage" in turn:
        return {} if turn["usage"] is None else {"usage": turn["usage"]}
    plain = counted["input"] - counted["cached"] - counted["stored"]
    cache = {"cache_read_input_tokens": counted["cached"], "cache_creation_input_tokens": counted["stored"]}
    return {"usage": {"input_tokens": plain, "output_tokens": output, **cache}}


def _stop_of(turn: Turn) -> str:
    return turn["stop"] or ("tools" if turn["uses"] else "end")


def anthropic_events(turn: Turn, counted: Count, model: str, ident: str, place: int) -> Iterator[tuple[str | None, Any]]:
    start: dict[str, Any] = {
        "id": f"msg_{ident}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
    }
    yield "message_start", {"type": "message_start", "message": start | _anthropic_usage(turn, counted, 1) | _extra(turn)}
    at = -1
    if turn["thought"] is not None:
        at += 1
        yield _block_start(at, {"type": "thinking", "thinking": "", "signature": ""})
        for piece in _pieces(turn["thought"]):
            yield _block_delta(at, {"type": "thinking_delta", "thinking": piece})
        yield _block_delta(at, {"type": "signature_delta", "signature": signature(turn["thought"])})
        yield _block_stop(at)
    if turn["text"]:
        at += 1
        yield _block_start(at, {"type": "text", "text": ""})
        yield "ping", {"type": "ping"}
        for piece in _pieces(turn["text"]):
            yield _block_delta(at, {"type": "text_delta", "text": piece} | _extra(turn))
        yield _block_stop(at)
    for use_id, use in _named(turn["uses"], "toolu", place):
        at += 1
        yield _block_start(at, {"type": "tool_use", "id": use_id, "name": use["name"], "input": {}} | _extra(turn))
        for piece in _pieces(use["arguments"]):
            yield _block_delta(at, {"type": "input_json_delta", "partial_json": piece})
        yield _block_stop(at)
    if turn["extra"]:
        yield "surprise", {"type": "surprise", "index": 77}
    stop = {"stop_reason": _ANTHROPIC_STOPS.get(_stop_of(turn), _stop_of(turn)), "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": stop} | _anthropic_usage(turn, counted, counted["output"])
    yield "message_stop", {"type": "message_stop"}


def _block_start(at: int, block: dict[str, Any]) -> tuple[str, Any]:
    return "content_block_start", {"type": "content_block_start", "index": at, "content_block": block}


def _block_delta(at: int, delta: dict[str, Any]) -> tuple[str, Any]:
    return "content_block_delta", {"type": "content_block_delta", "index": at, "delta": delta}


def _block_stop(at: int) -> tuple[str, Any]:
    return "content_block_stop", {"type": "content_block_stop", "index": at}


def anthropic_whole(turn: Turn, counted: Count, model: str, ident: str, place: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if turn["thought"] is not None:
        content.append({"type": "thinking", "thinking": turn["thought"], "signature": signature(turn["thought"])})
    if turn["text"]:
        content.append({"type": "text", "text": turn["text"]})
    for use_id, use in _named(turn["uses"], "toolu", place):
        content.append({"type": "tool_use", "id": use_id, "name": use["name"], "input": json.loads(use["arguments"] or "{}")})
    return {
        "id": f"msg_{ident}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _ANTHROPIC_STOPS.get(_stop_of(turn), _stop_of(turn)),
        "stop_sequence": None,
        **_anthropic_usage(turn, counted, counted["output"]),
        **_extra(turn),
    }


# -- OpenAI chat completions ----------------------------------------------------------------------------------------------
_CHAT_STOPS = {"end": "stop", "tools": "tool_calls", "length": "length", "refusal": "content_filter"}


def _chat_usage(turn: Turn, counted: Count) -> Any:
    if "usage" in turn:
        return turn["usage"]
    details = {"cached_tokens": counted["cached"], "cache_write_tokens": counted["stored"]}
    total = counted["input"] + counted["output"]
    return {
        "prompt_tokens": counted["input"],
        "completion_tokens": counted["output"],
        "total_tokens": total,
        "prompt_tokens_details": details,
    }


def chat_events(turn: Turn, counted: Count, model: str, ident: str, place: int, with_usage: bool) -> Iterator[tuple[str | None, Any]]:
    def chunk(delta: dict[str, Any], stop: str | None = None) -> tuple[None, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": stop, "logprobs": None}
        return None, head | {"choices": [choice]} | ({"usage": None} if with_usage else {}) | _extra(turn)

    head = {"id": f"chatcmpl-{ident}", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": model}
    yield chunk({"role": "assistant", "content": "" if turn["text"] else None, "refusal": None})
    for piece in _pieces(turn["text"]):
        yield chunk({"content": piece})
    for at, (use_id, use) in enumerate(_named(turn["uses"], "call", place)):
        yield chunk({"tool_calls": [{"index": at, "id": use_id, "type": "function", "function": {"name": use["name"], "arguments": ""}}]})
        for piece in _pieces(use["arguments"]):
            yield chunk({"tool_calls": [{"index": at, "function": {"arguments": piece}}]})
    yield chunk({}, _CHAT_STOPS.get(_stop_of(turn), _stop_of(turn)))
    usage = _chat_usage(turn, counted)
    if with_usage and usage is not None:
        yield None, head | {"choices": [], "usage": usage}
    yield None, "[DONE]"


def chat_whole(turn: Turn, counted: Count, model: str, ident: str, place: int) -> dict[str, Any]:
    calls = [
        {"id": use_id, "type": "function", "function": {"name": use["name"], "arguments": use["arguments"]}}
        for use_id, use in _named(turn["uses"], "call", place)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": turn["text"] or None, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": _CHAT_STOPS.get(_stop_of(turn), _stop_of(turn)), "logprobs": None}
    return {
        "id": f"chatcmpl-{ident}",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": model,
        "choices": [choice],
        "usage": _chat_usage(turn, counted),
        **_extra(turn),
    }


# -- OpenAI responses -----------------------------------------------------------------------------------------------------
def _responses_usage(turn: Turn, counted: Count) -> Any:
    if "usage" in turn:
        return turn["usage"]
    details = {"cached_tokens": counted["cached"], "cache_write_tokens": counted["stored"]}
    return {
        "input_tokens": counted["input"],
        "input_tokens_details": details,
        "output_tokens": counted["output"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["input"] + counted["output"],
    }


def _items(turn: Turn, ident: str, place: int, encrypted: bool) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    status = "incomplete" if turn["stop"] == "length" else "completed"
    if turn["thought"] is not None:
        name = f"rs_{ident}"
        thought = {"id": name, "type": "reasoning", "summary": [{"type": "summary_text", "text": turn["thought"]}]}
        items.append(thought | ({"encrypted_content": signature(name)} if encrypted else {}))
    if turn["text"]:
        said = {"type": "refusal", "refusal": turn["text"]} if turn["stop"] == "refusal" else _output_text(turn["text"])
        items.append({"id": f"msg_{ident}", "type": "message", "role": "assistant", "status": status, "content": [said]})
    for at, (use_id, use) in enumerate(_named(turn["uses"], "call", place)):
        call = {"id": f"fc_{ident}_{at}", "type": "function_call", "call_id": use_id, "name": use["name"], "arguments": use["arguments"]}
        items.append(call | {"status": status} | _extra(turn))
    return items


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def responses_whole(turn: Turn, counted: Count, model: str, ident: str, place: int, encrypted: bool) -> dict[str, Any]:
    cut = turn["stop"] == "length"
    return {
        "id": f"resp_{ident}",
        "object": "response",
        "created_at": 1_700_000_000,
        "model": model,
        "error": None,
        "status": "incomplete" if cut else "completed",
        "output": _items(turn, ident, place, encrypted),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": _responses_usage(turn, counted),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **_extra(turn),
    }


def responses_events(turn: Turn, counted: Count, model: str, ident: str, place: int, encrypted: bool) -> Iterator[tuple[str | None, Any]]:
    for number, event in enumerate(_responses_events(turn, counted, model, ident, place, encrypted)):
        yield event["type"], event | {"sequence_number": number}


def _responses_events(turn: Turn, counted: Count, model: str, ident: str, place: int, encrypted: bool) -> Iterator[dict[str, Any]]:
    whole = responses_whole(turn, counted, model, ident, place, encrypted)
    yield {"type": "response.created", "response": whole | {"status": "in_progress", "output": [], "usage": None}}
    for at, item in enumerate(whole["output"]):
        begun = {name: "" if name == "arguments" else value for name, value in item.items() if name != "content"}
        yield {"type": "response.output_item.added", "output_index": at, "item": begun | ({"content": []} if "content" in item else {})}
        where = {"item_id": item["id"], "output_index": at}
        if item["type"] == "function_call":
            for piece in _pieces(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", "delta": piece} | where
            yield {"type": "response.function_call_arguments.done", "arguments": item["arguments"], "name": item["name"]} | where
        elif item["type"] == "message":
            kind = "refusal" if turn["stop"] == "refusal" else "output_text"
            for piece in _pieces(turn["text"]):
                yield {"type": f"response.{kind}.delta", "content_index": 0, "delta": piece, "logprobs": []} | where
        yield {"type": "response.output_item.done", "output_index": at, "item": item}
    if turn["extra"]:
        yield {"type": "response.surprise", "n": 7}
    yield {"type": f"response.{whole['status']}", "response": whole}
