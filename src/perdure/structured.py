"""Answers of a type: how a model is told which, and what it said as a value of it.

The types are those that tools take, and those of msgspec. What the journal gets is plain canonical JSON.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from perdure.core import codec
from perdure.errors import InvalidInput, NotEncodable
from perdure.models.messages import ToolSpec
from perdure.tool.convert import Converter, Unusable, json_schemas
from perdure.turns import FINAL_ANSWER

_FIELD = "answer"  # what stands for a type that is no object: models call tools with objects alone
_MOST_ERRORS = 10
_TELLS = "Give your final answer by calling this, once, and with nothing else in the same turn. It ends the conversation."


class Unfit(Exception):
    """What the model said is no value of the type; the message tells it why."""


class Output:
    """The type of an agent's answer."""

    def __init__(self, owner: str, wanted: Any) -> None:
        if wanted is str:
            raise InvalidInput(f"{owner}: output=str: text is what it answers anyway; leave output out")
        self._form: _Pydantic | _Msgspec = _form(owner, wanted)
        schema = _inlined(self._form.schema())
        self._wraps = schema.get("type") != "object"
        if self._wraps:
            shared = schema.pop("$defs", None)
            schema = {"type": "object", "properties": {_FIELD: schema}, "required": [_FIELD], "additionalProperties": False}
            schema |= {"$defs": shared} if shared else {}
        self.spec = ToolSpec(FINAL_ANSWER, _TELLS, codec.decode(codec.encode(schema)))

    def of_arguments(self, arguments: dict[str, Any] | str) -> bytes:
        """Canonical JSON of what the model has called `final_answer` with; Unfit says what is wrong with it."""
        if isinstance(arguments, str):
            raise Unfit("the arguments are not a JSON object")
        if not self._wraps:
            return self._checked(arguments)
        if arguments.keys() != {_FIELD}:
            raise Unfit(f"the one argument is {_FIELD}")
        return self._checked(arguments[_FIELD])

    def of_text(self, text: str) -> bytes:
        """The same for an answer in words, where those are JSON."""
        words = text.strip()
        if words.startswith("```") and words.endswith("```") and "\n" in words:
            words = words[words.index("\n") : -3]
        try:
            value = codec.parse(words, "the answer")
        except NotEncodable:
            raise Unfit(f"the answer is words, and not JSON of the type that is wanted; call {FINAL_ANSWER} with it") from None
        return self._checked(value)

    def encode(self, value: Any) -> bytes:
        """Canonical JSON of what `decode` has given."""
        try:
            return self._form.plain(value)
        except (ValueError, TypeError):
            return codec.encode(value)

    def decode(self, encoded: bytes) -> Any:
        """The answer as a value of its type; the plain JSON value where the type has changed since."""
        try:
            return self._form.typed(encoded)
        except ValueError:
            return codec.decode(encoded)

    def _checked(self, value: Any) -> bytes:
        try:
            said = codec.encode(value)
            first, second = (self._form.plain(self._form.typed(said)) for _ in range(2))
        except (ValueError, Unusable) as error:
            raise Unfit(_errors(error)) from None
        # A default that is made anew each time, a uuid or the time, would come out differently on replay: the model's own words stand.
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
    """The schema itself, where it is only the name of one of its definitions: what a tool takes has to be an object at first sight."""
    reference = schema.get("$ref")
    if reference is None:
        return copy.deepcopy(schema)
    shared = schema["$defs"]
    return {**copy.deepcopy(shared[reference.rpartition("/")[2]]), "$defs": shared}


def _errors(error: Exception) -> str:
    """All that is wrong, place by place, so that the model can put it right at once."""
    listed = getattr(error, "errors", None)
    if listed is None:
        return str(error)
    found = listed(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, one['loc'])) or 'the answer'}: {one['msg']}" for one in found[:_MOST_ERRORS]]
    return "; ".join(lines) + (f"; and {len(found) - _MOST_ERRORS} more" if len(found) > _MOST_ERRORS else "")
