"""Structured answers: how the wanted type is described to a model, and how an answer becomes a value of that type.

Supported types: all types that parameters of tools can have, and all types that msgspec supports. The journal contains
plain canonical JSON.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from perdure.agents.react.turns import FINAL_ANSWER
from perdure.core import codec
from perdure.errors import InvalidInput, NotEncodable
from perdure.models.messages import ToolSpec
from perdure.tool.convert import Converter, Unusable, json_schemas

_FIELD = "answer"  # if the type is not an object, the answer is put into this field: tool arguments are an object
_MOST_ERRORS = 10
_TELLS = "Give your final answer by calling this, once, and with nothing else in the same turn. It ends the conversation."


class Unfit(Exception):
    """The answer is not a value of the wanted type. The message tells the model why."""


class Output:
    """The type of an agent's answer."""

    def __init__(self, owner: str, wanted: Any) -> None:
        if wanted is str:
            raise InvalidInput(f"{owner}: output=str: the answer is text by default; leave output out")
        self._form: _Pydantic | _Msgspec = _form(owner, wanted)
        schema = _inlined(self._form.schema())
        self._wraps = schema.get("type") != "object"
        if self._wraps:
            shared = schema.pop("$defs", None)
            schema = {"type": "object", "properties": {_FIELD: schema}, "required": [_FIELD], "additionalProperties": False}
            schema |= {"$defs": shared} if shared else {}
        self.spec = ToolSpec(FINAL_ANSWER, _TELLS, codec.decode(codec.encode(schema)))

    def of_arguments(self, arguments: dict[str, Any] | str) -> bytes:
        """Canonical JSON of the answer in the arguments of `final_answer`. Unfit says why they do not fit the type."""
        if isinstance(arguments, str):
            raise Unfit("the arguments are not a JSON object")
        if not self._wraps:
            return self._checked(arguments)
        if arguments.keys() != {_FIELD}:
            raise Unfit(f"the one argument is {_FIELD}")
        return self._checked(arguments[_FIELD])

    def of_text(self, text: str) -> bytes:
        """Canonical JSON of an answer that is text. Unfit if the text is not JSON or does not fit the type."""
        words = text.strip()
        if words.startswith("```") and words.endswith("```") and "\n" in words:
            words = words[words.index("\n") : -3]
        try:
            value = codec.parse(words, "the answer")
        except NotEncodable:
            raise Unfit(f"the answer is words, and not JSON of the type that is wanted; call {FINAL_ANSWER} with it") from None
        return self._checked(value)

    def encode(self, value: Any) -> bytes:
        """Canonical JSON of a value that `decode` returned."""
        try:
            return self._form.plain(value)
        except (ValueError, TypeError):
            return codec.encode(value)

    def decode(self, encoded: bytes) -> Any:
        """The answer as a value of the type.

        If the type has changed and the answer does not fit any more, the result is the plain JSON value.
        """
        try:
            return self._form.typed(encoded)
        except ValueError:
            return codec.decode(encoded)

    def misfit(self, encoded: bytes) -> str | None:
        """Why this JSON value is not of the type; None if it is."""
        try:
            self._form.typed(encoded)
        except ValueError as error:
            return _errors(error)
        return None

    def _checked(self, value: Any) -> bytes:
        try:
            said = codec.encode(value)
            first, second = (self._form.plain(self._form.typed(said)) for _ in range(2))
        except (ValueError, Unusable) as error:
            raise Unfit(_errors(error)) from None
        # A default value may be new each time (a UUID, the time), and a replay would get another value. Then keep the
        # model's JSON, without defaults.
        return first if first == second else said


class _Pydantic:
    def __init__(self, owner: str, wanted: Any) -> None:
        self._wanted = wanted
        self._converter = Converter(wanted)
        if self._converter.has_set:
            raise InvalidInput(f"{owner}: output: a set has no order that a replay could repeat; take a list")

    def schema(self) -> dict[str, Any]:
        found, shared = json_schemas({FINAL_ANSWER: self._wanted})
        return found[FINAL_ANSWER] | ({"$defs": shared} if shared else {})

    def typed(self, encoded: bytes) -> Any:
        return self._converter.adapter.validate_json(encoded)

    def plain(self, typed: Any) -> bytes:
        return self._converter.encode(typed)


class _Msgspec:
    def __init__(self, wanted: Any) -> None:
        self._wanted = wanted
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(wanted)

    def schema(self) -> dict[str, Any]:
        return msgspec.json.schema(self._wanted)

    def typed(self, encoded: bytes) -> Any:
        return self._decoder.decode(encoded)

    def plain(self, typed: Any) -> bytes:
        return codec.encode(msgspec.to_builtins(typed))


def _form(owner: str, wanted: Any) -> _Pydantic | _Msgspec:
    try:
        return _Pydantic(owner, wanted)
    except Unusable as unusable:
        try:
            form = _Msgspec(wanted)
            form.schema()
            return form
        except TypeError:
            raise InvalidInput(f"{owner}: output={codec.shown(wanted)}: {unusable}") from None


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with a top-level reference replaced by its definition.

    The schema of a tool must be an object itself, and not a reference to an object.
    """
    reference = schema.get("$ref")
    if reference is None:
        return copy.deepcopy(schema)
    shared = schema["$defs"]
    return {**copy.deepcopy(shared[reference.rpartition("/")[2]]), "$defs": shared}


def _errors(error: Exception) -> str:
    """Up to ten errors with their places, so that the model can correct them in one answer."""
    listed = getattr(error, "errors", None)
    if listed is None:
        return str(error)
    found = listed(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, one['loc'])) or 'the answer'}: {one['msg']}" for one in found[:_MOST_ERRORS]]
    return "; ".join(lines) + (f"; and {len(found) - _MOST_ERRORS} more" if len(found) > _MOST_ERRORS else "")
