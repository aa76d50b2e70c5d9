"""`perdure show RUN --prompt CALL`: what exactly a model was asked, for people or to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from perdure.cli import common
from perdure.core import codec
from perdure.core.codec import Payload
from perdure.errors import StoreCorrupt
from perdure.inspect.prompt import request_of_call
from perdure.inspect.view import RunView
from perdure.inspect.words import plural

_SHOWN_APART = ("model", "messages", "system", "tools")


def show_prompt(reading: RunView, number: int, load: Callable[[Payload], bytes], *, as_json: bool) -> None:
    """Print the request of that call; whatever in the journal does not lead to its digest ends the program with code 7."""
    try:
        whole = request_of_call(reading, number, load)
    except StoreCorrupt as error:
        raise common.Stop(f"run {reading.row.run_id}: {error}; see what else is damaged: perdure verify", common.DIFFERENT) from None
    if as_json:
        common.out_exact(whole)
        return
    for line in _lines(reading.row.run_id, number, whole):
        common.out(line)


def _lines(run_id: str, number: int, whole: bytes) -> Iterator[str]:
    request: dict[str, Any] = codec.decode(whole)
    yield common.clean(f"run {run_id}, call {number}: {request.get('model')} was asked this, {plural(len(request['messages']), 'message')}")
    yield f"made again from the journal; SHA-256 {codec.digest(whole)}, as recorded"
    options = {name: value for name, value in request.items() if name not in _SHOWN_APART}
    if options:
        yield common.clean("with " + ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in options.items()))
    if request.get("system"):
        yield from _part("system", request["system"])
    for tool in request.get("tools", ()):
        yield from _part(f"tool {tool.get('name')}", str(tool.get("description", "")), *common.json_lines(tool.get("schema")))
    for place, message in enumerate(request["messages"], 1):
        yield from _message(place, message)


def _message(place: int, message: dict[str, Any]) -> Iterator[str]:
    role = str(message.get("role"))
    if role == "tool":
        role = f"{'error' if message.get('error') else 'result'} of {message.get('name')} (use {message.get('id')})"
    uses = (f"wants {use.get('name')} (use {use.get('id')}): {common.to_json(use.get('arguments'))}" for use in message.get("uses", ()))
    raw = [f"and for its provider: {common.to_json(message['raw'])}"] if "raw" in message else []
    yield from _part(f"{place}. {role}", str(message.get("text", "")), *uses, *raw)


def _part(title: str, text: str, *more: str) -> Iterator[str]:
    """A part under its own line. What others have written is indented, so that it cannot pass for a title."""
    yield ""
    yield common.style(common.clean(title), bold=True)
    for line in [*(text.split("\n") if text else ()), *more]:
        yield common.clean(f"  {line}")
