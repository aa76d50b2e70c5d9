"""A short digest of what a tool is to its caller. A run keeps it from its first call of the tool, so that a change is noticed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from perdure.core import codec
from perdure.core.events import Effect
from perdure.errors import NotEncodable
from perdure.tool.describe import properties_of
from perdure.tool.signature import EMPTY, Parameter

PIN_CHARS = 16
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def pin_of(
    name: str, effect: Effect, key_window_s: float, *, reconciles: bool, asks: bool, parameters: Sequence[Parameter], module: str
) -> str:
    """The same in every process that has the same declaration, also where its file is loaded under another module's name."""
    # Only what needs pydantic to be bound anyway is described by it: its fields count, not the name of its class alone.
    structured = [parameter for parameter in parameters if parameter.exact == frozenset()]
    whole = {
        "name": name,
        "effect": effect,
        "key_window_s": key_window_s,
        "reconcile": reconciles,
        "approval": asks,
        "parameters": [[parameter.name, _annotation(parameter, module), _default(parameter)] for parameter in parameters],
        "structured": properties_of(structured, {}) if structured else None,
    }
    return codec.digest(codec.encode(whole))[:PIN_CHARS]


def _annotation(parameter: Parameter, module: str) -> str:
    annotation: Any = parameter.annotation
    text = annotation.__qualname__ if isinstance(annotation, type) else repr(annotation)
    return _ADDRESS.sub("", text).replace(f"{module}.", "")


def _default(parameter: Parameter) -> str | None:
    if parameter.default is EMPTY:
        return None
    try:
        return codec.encode(parameter.default).decode("utf-8", "replace")
    except NotEncodable:
        return type(parameter.default).__qualname__
