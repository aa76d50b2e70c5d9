"""The arguments of an MCP tool, checked against its JSON Schema before anything is recorded.

The schema is somebody else's. It refers to nothing outside itself, its references are counted, and its regular expressions are left to
the server: one that takes for ever would hold up every run of the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from perdure.core import codec
from perdure.errors import InvalidInput

MAX_REFERENCES = 10_000  # followed in one check: a few lines of schema can ask for billions
_SEARCHING = ("pattern", "patternProperties", "unevaluatedProperties")
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class BadSchema(Exception):
    """The schema cannot be used; the message says why."""


class Arguments:
    """What one tool takes."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        from jsonschema.validators import validator_for  # type: ignore[import-untyped]
        from referencing import Registry

        if schema.get("type") != "object":
            raise BadSchema("its schema is not that of an object")
        self._followed = 0
        self._schema = dict(schema)
        found: Any = validator_for(self._schema)
        try:
            wrong: Any = next(_of_schemas(found).iter_errors(self._schema), None)
        except RecursionError:
            raise BadSchema("its schema is no JSON Schema: it is nested too deep") from None
        if wrong is not None:
            raise BadSchema(f"its schema is no JSON Schema: {wrong.message:.200}")
        self._validator: Any = self._bounded(found)(self._schema, registry=Registry())

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that the schema names."""
        properties = self._schema.get("properties")
        return tuple(properties) if isinstance(properties, dict) else ()

    def encoded(self, label: str, arguments: Mapping[str, Any]) -> bytes:
        """Canonical JSON of the arguments; InvalidInput names the one that does not fit, and the rule."""
        encoded = codec.encode(dict(arguments))
        self.check(label, codec.decode(encoded))
        return encoded

    def check(self, label: str, arguments: Any) -> None:
        """InvalidInput unless they fit."""
        from jsonschema.exceptions import best_match  # type: ignore[import-untyped]
        from referencing.exceptions import Unresolvable

        self._followed = 0
        try:
            error: Any = best_match(self._validator.iter_errors(arguments))
        except (Unresolvable, RecursionError, BadSchema) as unusable:
            why = unusable if isinstance(unusable, BadSchema) else f"{type(unusable).__name__} in its schema"
            raise InvalidInput(f"{label}: its arguments cannot be checked: {why}") from None
        if error is not None:
            raise InvalidInput(f"{label}: {_words(error)}")

    def _bounded(self, validator: Any) -> Any:
        known: Mapping[str, Any] = validator.VALIDATORS
        changed: dict[str, Any] = dict.fromkeys(_SEARCHING, _left_to_the_server)
        changed |= {name: self._counted(known[name]) for name in ("$ref", "$dynamicRef", "$recursiveRef") if name in known}
        changed["uniqueItems"] = _unique
        changed["additionalProperties"] = _additional(known["additionalProperties"])
        return _extended(validator, changed)

    def _counted(self, follow: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def counted(*given: Any) -> Iterator[Any]:
            self._followed += 1
            if self._followed > MAX_REFERENCES:
                raise BadSchema(f"its schema follows more than {MAX_REFERENCES:,} references")
            yield from follow(*given) or ()

        return counted


@cache
def _of_schemas(validator: Any) -> Any:
    """Checks schemas of this kind; old kinds want the values of an `enum` to differ, so that this must not take for ever either."""
    return _extended(validator, {"uniqueItems": _unique})(validator.META_SCHEMA)


def _extended(validator: Any, changed: Mapping[str, Any]) -> Any:
    """The validator with these rules, which a `$schema` further down, or a reference to one, does not bring back to the old ones."""
    from attrs import evolve
    from jsonschema.validators import extend

    extended: Any = extend(validator, changed)
    extended.evolve = evolve
    return extended


def _left_to_the_server(*_: Any) -> Iterator[Any]:
    """A rule that is not ours to check. None in its place would do for some ways through a schema only."""
    return iter(())


def _unique(validator: Any, wanted: Any, instance: Any, _: Any) -> Iterator[Any]:
    """`uniqueItems` by what the items are written as: each compared with each takes seconds for 2,000 objects."""
    from jsonschema.exceptions import ValidationError

    if wanted is True and validator.is_type(instance, "array") and len({codec.encode(item) for item in instance}) < len(instance):
        yield ValidationError("it has the same item twice")


def _additional(check: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """`additionalProperties` looks at patterns too, where there are some: then it is the server's to check."""

    def additional(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        if "patternProperties" not in schema:
            yield from check(validator, value, instance, schema) or ()

    return additional


def _words(error: Any) -> str:
    """Which argument, and which rule. The value itself is not shown: it may be a secret, and whoever sent it knows it."""
    where = "".join(f"[{step!r}]" if place else str(step) for place, step in enumerate(error.absolute_path))
    at = f"{where}: " if where else ""
    rule, value, instance = error.validator, error.validator_value, error.instance
    match rule:
        case "required":
            missing = next((name for name in value if name not in instance), "something")
            return f"{at}{missing} is missing"
        case "additionalProperties":
            known = error.schema.get("properties", {})
            extra = next((name for name in instance if name not in known), "something")
            return f"{at}there is no {codec.shown(extra)}; it takes {', '.join(known) or 'no arguments'}"
        case "type":
            wanted = value if isinstance(value, str) else " or ".join(map(str, value))
            return f"{at}it must be of type {wanted}, not {_KINDS.get(type(instance), type(instance).__name__)}"
        case _:
            return f"{at}it does not fit {rule}: {codec.shown(value)}"
