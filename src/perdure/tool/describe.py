"""The description of a tool for models and people: its docstring, and the JSON Schema of its arguments."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.tool.signature import EMPTY, Parameter

_MARKS = ("\n", ":", "@")
_SCALARS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    None: "null",
}


def documented(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description in the docstring without its sections, and the description of each parameter."""
    text = inspect.getdoc(fn) or ""
    if not any(mark in text for mark in _MARKS):
        return text, {}  # without such a mark the docstring has no sections, in any docstring style
    from docstring_parser import ParseError, parse

    try:
        parsed = parse(text)
    except ParseError:
        return text, {}
    words = "\n\n".join(part for part in (parsed.short_description, parsed.long_description) if part)
    return words, {found.arg_name: found.description for found in parsed.params if found.description}


def properties_of(parameters: Sequence[Parameter], words: Mapping[str, str]) -> dict[str, Any]:
    """{"properties": …}. If the properties refer to shared definitions, also "$defs"."""
    parameters = [parameter for parameter in parameters if not parameter.is_secret]  # only code fills a secret in
    wanted = {parameter.name: Any if parameter.annotation is EMPTY else parameter.annotation for parameter in parameters}
    plain = {name: plain_schema(annotation) for name, annotation in wanted.items()}
    structured = {name: wanted[name] for name, schema in plain.items() if schema is None}
    schemas, shared = _of_pydantic(structured) if structured else ({}, {})
    properties = {name: schemas[name] if schema is None else schema for name, schema in plain.items()}
    for parameter in parameters:
        described = words.get(parameter.name)
        if described is not None:
            properties[parameter.name].setdefault("description", described)
        if parameter.default is not EMPTY:
            exact = parameter.exact is None or type(parameter.default) in parameter.exact
            properties[parameter.name].setdefault("default", parameter.default if exact else parameter.coerce(parameter.default))
    return {"properties": properties} | ({"$defs": shared} if shared else {})


def plain_schema(annotation: Any) -> dict[str, Any] | None:
    """The schema of an annotation that has only JSON scalars, made without pydantic. None: pydantic is needed."""
    if annotation is Any:
        return {}
    if annotation is None or (isinstance(annotation, type) and annotation in _SCALARS):
        return {"type": _SCALARS[annotation]}
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return None
    members = typing.get_args(annotation)
    nullable = type(None) in members
    schemas = [plain_schema(member) for member in members if member is not type(None)]
    return None if None in schemas or {} in schemas else {"anyOf": [*schemas, {"type": "null"}] if nullable else schemas}


def _of_pydantic(annotations: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    from perdure.tool.convert import json_schemas  # imported late: the module loads pydantic, and many tools need none

    return json_schemas(annotations)


def argument_schema(parameters: Sequence[Parameter], words: Mapping[str, str]) -> dict[str, Any]:
    """The JSON Schema of all arguments as one object."""
    required = [parameter.name for parameter in parameters if parameter.default is EMPTY and not parameter.is_secret]
    schema = {"type": "object", **properties_of(parameters, words), "additionalProperties": False}
    return schema | ({"required": required} if required else {})
