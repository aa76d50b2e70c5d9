"""Between Python values and JSON by annotation. The only module that imports pydantic; loaded when a signature first needs it."""

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
    """The annotation has no JSON form, or the value does not fit it; the message says why, without showing the value."""


class Converter:
    """Dumps values of one annotation to JSON's own types and rebuilds them."""

    def __init__(self, annotation: Any) -> None:
        try:
            self.adapter: TypeAdapter[Any] = TypeAdapter(annotation)
            schema = self.adapter.json_schema()
        except (PydanticUserError, NameError) as error:
            raise Unusable(f"its annotation has no JSON form: {str(error).splitlines()[0]}") from None
        self.has_set = "'uniqueItems': True" in repr(schema)

    def coerce(self, value: Any) -> Any:
        """The JSON value that stands for `value`; rebuilding it is known to work."""
        try:
            plain = self._dump(self.adapter.validate_python(value))
            self.adapter.validate_json(encode(plain))
        except ValidationError as error:
            raise Unusable(_first(error)) from None
        except (PydanticSerializationError, NotEncodable) as error:
            raise Unusable(str(error)) from None
        return plain

    def rebuild(self, plain: Any) -> Any:
        """The typed value; ValueError when it does not fit the annotation."""
        return self.adapter.validate_json(encode(plain))

    def encode(self, value: Any) -> bytes:
        """Canonical JSON of a result. One that is not of the annotated type is recorded as it is: it has happened."""
        try:
            return encode(self._dump(self.adapter.validate_python(value)))
        except (ValidationError, PydanticSerializationError, NotEncodable):
            return encode(value)

    def decode(self, encoded: bytes) -> Any:
        """The typed result; the plain JSON value when it does not fit the annotation."""
        try:
            return self.adapter.validate_json(encoded)
        except ValueError:
            return decode(encoded)

    def _dump(self, typed: Any) -> Any:
        return self.adapter.dump_python(typed, mode="json", by_alias=True)


class _Schemas(GenerateJsonSchema):
    """Says of a Decimal in text what it looks like: pydantic does in some versions only, and any text would do then."""

    def decimal_schema(self, schema: DecimalSchema) -> JsonSchemaValue:
        found = super().decimal_schema(schema)
        if not schema.get("allow_inf_nan"):
            for form in found.get("anyOf", [found]):
                if form.get("type") == "string":
                    form.setdefault("pattern", _DECIMAL)
        return found


def json_schemas(annotations: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The JSON Schema of each annotation by its name, and the definitions that they share."""
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
