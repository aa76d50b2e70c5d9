"""Model calls in words: how much was said to a model, and what it answered. Packed requests and digests are for programs."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

from perdure.core.codec import Payload
from perdure.core.prompts import is_request, told
from perdure.core.state import LOST, CallState
from perdure.errors import StoreCorrupt
from perdure.inspect.words import called, clip, failed, plural, shown, size
from perdure.models.messages import Answer, ToolUse, answer_of

Load = Callable[[Payload], bytes]
USES_NAMED = 3
_STOPS = {"end": "", "tools": "", "length": "; it was cut off at its limit of tokens", "refusal": "; it refuses to say more"}


def request_words(args: Payload | None, load: Load | None = None) -> str:
    """How much a request says: 12 messages, 3 of them new."""
    encoded = _bytes(args, load)
    if encoded is None:
        return f"{size(args.size)} of what is new" if args is not None and isinstance(args.size, int) else "a request"
    try:
        messages, new = told(encoded)
    except StoreCorrupt:
        return "a request that cannot be read"
    return plural(messages, "message") + ("" if new == messages else f", {new:,} of them new" if new else ", none of them new")


def answer_words(result: Payload | None, load: Load | None = None, width: int = 120) -> str:
    """What a model has answered: “the first of it…” and wants refund(order="o-7"), lookup(…)."""
    answer = answer_in(result, load)
    return shown(result, width) if answer is None else said_words(answer, width)


def said_words(answer: Answer, width: int = 120) -> str:
    """The same of an answer that was read."""
    wanted = ", ".join(use_words(use, width // 2) for use in answer.uses[:USES_NAMED])
    if len(answer.uses) > USES_NAMED:
        wanted += f" and {plural(len(answer.uses) - USES_NAMED, 'more call')}"
    said = f"“{clip(answer.text, width)}”" if answer.text else ""
    parts = [part for part in (said, f"wants {wanted}" if wanted else "") if part]
    return (" and ".join(parts) or "nothing") + _STOPS.get(answer.stop, "")


def use_words(use: ToolUse, width: int = 60) -> str:
    """A tool use as one would write the call."""
    if isinstance(use.arguments, str):
        return f"{use.name}({clip(use.arguments, width)})"
    return (
        f"{use.name}({clip(', '.join(f'{name}={json.dumps(value, ensure_ascii=False)}' for name, value in use.arguments.items()), width)})"
    )


def answer_in(result: Payload | None, load: Load | None = None) -> Answer | None:
    """The recorded answer; None when it lies elsewhere, or is none."""
    encoded = _bytes(result, load)
    try:
        return None if encoded is None else answer_of(encoded)
    except (msgspec.MsgspecError, ValueError, TypeError):
        return None


def asked_words(call: CallState, load: Load | None = None, width: int = 80) -> str:
    """What a call is, of a tool or of a model: refund(order="o-7"), or claude (12 messages, 3 of them new)."""
    if not is_request(call.args):
        return called(call.tool, call.args, width)
    return f"{call.tool} ({request_words(call.args, load)})"


def result_words(call: CallState, load: Load | None = None, width: int = 60) -> str:
    """What has come of a call so far."""
    if call.result is None:
        return failed(call.failure, width) if call.failure is None or call.failure.type != LOST else "the answer was lost with its worker"
    return answer_words(call.result, load, width) if is_request(call.args) else shown(call.result, width)


def _bytes(payload: Payload | None, load: Load | None) -> bytes | None:
    if payload is None:
        return None
    inline = payload.inline
    return inline if inline is not None or load is None else load(payload)
