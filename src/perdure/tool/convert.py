"""Converts between Python values and JSON. The annotation says how.

Only this module imports pydantic. It is loaded when it is first needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticSerializationError
from pydantic_core.core_schema import DecimalSchema

from perdure.core.codec import decode, encode
from perdure.errors import InvalidInput, NotEncodable

_DECIMAL = r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?$"


class Unusable(Exception):
    """The annotation has no JSON form, or the value does not fit the annotation.

    The message says why, and does not contain the value.
    """


class Converter:
    """Converts values of one annotation to JSON types and back."""

    def __init__(self, annotation: Any) -> None:
        try:
            self.adapter: TypeAdapter[Any] = TypeAdapter(annotation)
            schema = self.adapter.json_schema()
        except (PydanticUserError, NameError) as error:
            raise Unusable(f"its annotation has no JSON form: {str(error).splitlines()[0]}") from None
        self.has_set = "'uniqueItems': True" in repr(schema)

    def coerce(self, value: Any) -> Any:
        """`value` as a JSON value. This also checks that `rebuild` accepts that JSON value."""
        try:
            plain = self._dump(self.adapter.validate_python(value))
            self.adapter.validate_json(encode(plain))
        except ValidationError as error:
            raise Unusable(_first(error)) from None
        except (PydanticSerializationError, NotEncodable) as error:
            raise Unusable(str(error)) from None
        return plain

    def rebuild(self, plain: Any) -> Any:
        """The typed value. Raises ValueError if the JSON value does not fit the annotation."""
        return self.adapter.validate_json(encode(plain))

    def misfit(self, encoded: bytes) -> str | None:
        """Why the JSON value does not fit the annotation; None if it fits. Text is not taken for a number here."""
        try:
            self.adapter.validate_json(encoded, strict=True)
        except ValidationError as error:
            return _first(error)
        return None

    def encode(self, value: Any) -> bytes:
        """Canonical JSON of a result.

        If the result does not fit the annotation, it is recorded without conversion, because the call has happened.
        """
        try:
            return encode(self._dump(self.adapter.validate_python(value)))
        except (ValidationError, PydanticSerializationError, NotEncodable):
            return encode(value)

    def decode(self, encoded: bytes) -> Any:
        """The typed result. If the JSON value does not fit the annotation, the plain JSON value."""
        try:
            return self.adapter.validate_json(encoded)
        except ValueError:
            return decode(encoded)

    def _dump(self, typed: Any) -> Any:
        return self.adapter.dump_python(typed, mode="json", by_alias=True)


class _Schemas(GenerateJsonSchema):
    """Adds a pattern for decimal numbers to the schema of a Decimal that is given as text.

    Only some versions of pydantic add this pattern. Other versions allow any text.
    """

    def decimal_schema(self, schema: DecimalSchema) -> JsonSchemaValue:
        found = super().decimal_schema(schema)
        if not schema.get("allow_inf_nan"):
            for form in found.get("anyOf", [found]):
                if form.get("type") == "string":
                    form.setdefault("pattern", _DECIMAL)
        return found


def json_schemas(annotations: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Two results: name → the JSON Schema of its annotation, and the definitions that these schemas share."""
    try:
        inputs: list[tuple[str, Any, TypeAdapter[Any]]] = [
            (name, "validation", TypeAdapter(wanted)) for name, wanted in annotations.items()
        ]
        found, shared = TypeAdapter.json_schemas(inputs, schema_generator=_Schemas)
    except (PydanticUserError, NameError) as error:
        raise InvalidInput(f"an annotation has no JSON form: {str(error).splitlines()[0]}") from None
    return {name: dict(schema) for (name, _), schema in found.items()}, shared.get("$defs", {})


def _first(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    where = "".join(f"[{step!r}]" for step in first["loc"])
    also = f" (and {len(others)} more)" if others else ""
    return f"{where + ': ' if where else ''}{first['msg']}{also}"
