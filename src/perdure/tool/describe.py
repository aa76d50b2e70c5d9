"""How a tool is described to models and to people: the words of its docstring, and JSON Schema of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.tool.signature import EMPTY, Parameter


def documented(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What the docstring says the function does, without its sections, and what it says about each parameter."""
    from docstring_parser import ParseError, parse

    text = inspect.getdoc(fn) or ""
    try:
        parsed = parse(text)
    except ParseError:
        return text, {}
    words = "\n\n".join(part for part in (parsed.short_description, parsed.long_description) if part)
    return words, {found.arg_name: found.description for found in parsed.params if found.description}


def properties_of(parameters: Sequence[Parameter], words: Mapping[str, str]) -> dict[str, Any]:
    """{"properties": …}, and the "$defs" that they refer to, if they do."""
    from perdure.tool.convert import json_schemas

    wanted = {parameter.name: Any if parameter.annotation is EMPTY else parameter.annotation for parameter in parameters}
    properties, shared = json_schemas(wanted)
    for parameter in parameters:
        described = words.get(parameter.name)
        if described is not None:
            properties[parameter.name].setdefault("description", described)
        if parameter.default is not EMPTY:
            exact = parameter.exact is None or type(parameter.default) in parameter.exact
            properties[parameter.name].setdefault("default", parameter.default if exact else parameter.coerce(parameter.default))
    return {"properties": properties} | ({"$defs": shared} if shared else {})


def argument_schema(parameters: Sequence[Parameter], words: Mapping[str, str]) -> dict[str, Any]:
    """The JSON Schema of all arguments as one object."""
    required = [parameter.name for parameter in parameters if parameter.default is EMPTY]
    schema = {"type": "object", **properties_of(parameters, words), "additionalProperties": False}
    return schema | ({"required": required} if required else {})
