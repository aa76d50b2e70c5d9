"""What a server answered, as the value of the call: structured content where there is some, otherwise its text.

What is neither – images, sounds, binary resources – is named with its type, its size and its digest and not kept: a journal is no place
for media, and a model reads results as text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perdure.core import codec
from perdure.errors import NotEncodable
from perdure.integrations.mcp_errors import McpToolError, Refused
from perdure.integrations.mcp_secrets import redacted
from perdure.integrations.mcp_stdio import printable

MAX_CHARS = 1_000_000
MAX_STRUCTURED_BYTES = 4 * 1024 * 1024


def value_of(answer: Mapping[str, Any], secrets: Sequence[str] = ()) -> Any:
    """The call's value; McpToolError when the tool says that it failed."""
    if answer.get("resultType") == "input_required":
        raise Refused("the server wants to be told more before it begins, and an agent's call has nobody to ask")
    text = _text(answer.get("content"))
    if answer.get("isError"):
        raise McpToolError(redacted(text, secrets) or "the tool failed, and says nothing about it")
    structured = answer.get("structuredContent")
    if structured is not None and _fits(structured):
        return structured
    return text


def _fits(structured: Any) -> bool:
    try:
        return len(codec.encode(structured)) <= MAX_STRUCTURED_BYTES
    except NotEncodable:
        return False  # it has happened: its text is better than nothing


def _text(content: Any) -> str:
    parts = list(_parts(content)) if isinstance(content, list) else []
    text = "\n".join(parts)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… (cut: {len(text):,} characters)"


def _parts(content: list[Any]) -> Iterator[str]:
    for block in content:
        if not isinstance(block, dict):
            continue
        held = block.get("resource") if isinstance(block.get("resource"), dict) else block
        assert isinstance(held, dict)
        if isinstance(held.get("text"), str):
            yield held["text"]
        elif "uri" in held and "blob" not in held:
            yield f"[a link: {printable(str(held['uri']), 1_000)}]"
        else:
            yield _described(held)


def _described(held: Mapping[str, Any]) -> str:
    kind = printable(str(held.get("mimeType") or held.get("type") or "something"), 100)
    try:
        data = base64.b64decode(held.get("data") or held.get("blob") or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        return f"[{kind}, unreadable]"
    return f"[{kind}, {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}; not kept]"
