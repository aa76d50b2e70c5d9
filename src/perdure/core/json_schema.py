"""Checks a value against a JSON Schema. Only the part of JSON Schema that describes arguments of tools is supported.

The author of a tool declares the schema. The value comes from a person who edits a call and then approves it. A
message about a wrong value states the whole rule ("must be a whole number of at least 1"), not the schema keyword.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from fractions import Fraction
from typing import Any
from uuid import UUID

MAX_DEPTH = 64
MAX_CHECKS = 100_000
MAX_PATTERN_CHARS = 10_000  # the time to match a pattern may grow faster than the length of the text
_SHOWN_CHARS = 60
_SHOWN_CHOICES = 20

_KINDS: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: type(value) is int,  # not True and not 1.0: the journal distinguishes these values from 1
    "number": lambda value: type(value) is int or (type(value) is float and math.isfinite(value)),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


# -- formats --------------------------------------------------------------------------------------------------------------
# These formats must not accept more than a tool accepts when it rebuilds its arguments. Otherwise an edit would be
# approved here and then fail in the tool.
_DAY = r"\d{4}-\d\d-\d\d"
_TIME = r"([01]\d|2[0-3]):\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:\d\d)?"
_DURATION = re.compile(
    r"[+-]?P(?=.)((?P<years>\d{1,6})Y)?((?P<months>\d{1,6})M)?((?P<weeks>\d{1,6})W)?((?P<days>\d{1,9})D)?"
    r"(T(?=.)(\d{1,9}H)?(\d{1,9}M)?(\d{1,9}(\.\d{1,9})?S)?)?",
    re.ASCII,
)
_DAYS_OF = {"years": 365, "months": 30, "weeks": 7, "days": 1}
_MAX_DAYS = timedelta.max.days - 10**6  # minus a margin for hours, minutes and seconds with up to nine digits


def _reads(pattern: str, read: Callable[[str], Any]) -> Callable[[str], bool]:
    shape = re.compile(pattern, re.ASCII)

    def fits(text: str) -> bool:
        try:
            return shape.fullmatch(text) is not None and read(text) is not None
        except ValueError:
            return False

    return fits


def _is_duration(text: str) -> bool:
    found = _DURATION.fullmatch(text)
    return found is not None and sum(int(found[part] or 0) * days for part, days in _DAYS_OF.items()) <= _MAX_DAYS


def _is_uuid_of(version: int | None) -> Callable[[str], bool]:
    shape = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
    return _reads(shape, lambda text: True if version in (None, UUID(text).version) else None)


_FORMATS: dict[str, tuple[Callable[[str], bool], str]] = {
    "date-time": (_reads(f"{_DAY}T{_TIME}", datetime.fromisoformat), "a date and time, such as 2026-01-31T14:00:00Z"),
    "date": (_reads(_DAY, date.fromisoformat), "a date, such as 2026-01-31"),
    "time": (_reads(_TIME, time.fromisoformat), "a time of day, such as 14:00:00"),
    "duration": (_is_duration, "a length of time, such as P1DT12H or PT30S"),
    "uuid": (_is_uuid_of(None), "a UUID, such as 123e4567-e89b-42d3-a456-426614174000"),
    **{f"uuid{version}": (_is_uuid_of(version), f"a UUID of version {version}") for version in range(1, 9)},
}


def problem(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> str | None:
    """What is wrong with the value, in words; None if the value fits. Unknown keywords are ignored."""
    return _Check(defs).fault(value, schema, "", 0)


class _Check:
    def __init__(self, defs: dict[str, Any]) -> None:
        self._defs = defs
        self._checks = 0

    def fault(self, value: Any, schema: Any, place: str, depth: int) -> str | None:
        """The first error at this place or below it."""
        self._checks += 1
        if depth > MAX_DEPTH or self._checks > MAX_CHECKS:
            limit = f"more than {MAX_DEPTH} levels deep" if depth > MAX_DEPTH else f"of more than {MAX_CHECKS:,} parts"
            return _at(place, f"cannot be checked, since it is {limit}")
        if schema is False:
            return _at(place, "must not be there")
        if not isinstance(schema, dict):
            return None
        if not self._fits_here(value, schema):
            return _at(place, f"must be {self._rule(schema)}")
        if isinstance(value, str) and _has_pattern(schema) and len(value) > MAX_PATTERN_CHARS:
            return _at(
                place, f"must be text of at most {MAX_PATTERN_CHARS:,} characters, since longer text is not checked against a pattern"
            )
        below = self._in_object(value, schema, place, depth) if isinstance(value, dict) else None
        if isinstance(value, list):
            below = self._in_list(value, schema, place, depth)
        return below or self._in_combined(value, schema, place, depth)

    # -- the value itself -------------------------------------------------------------------------------------------------
    def _fits_here(self, value: Any, schema: dict[str, Any]) -> bool:
        types = _types(schema)
        if types and not any(_KINDS[name](value) for name in types):
            return False
        if "const" in schema and not _same(value, schema["const"]):
            return False
        choices = schema.get("enum")
        if isinstance(choices, list) and not any(_same(value, choice) for choice in choices):
            return False
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _number_fits(value, schema)
        if isinstance(value, str):
            return _length_fits(len(value), schema, "Length") and _matches(value, schema) and _has_format(value, schema)
        return not isinstance(value, list) or _length_fits(len(value), schema, "Items")

    # -- the items of objects and lists -----------------------------------------------------------------------------------
    def _in_object(self, value: dict[str, Any], schema: dict[str, Any], place: str, depth: int) -> str | None:
        known = schema.get("properties")
        known = known if isinstance(known, dict) else {}
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str) and name not in value:
                return _at(place, f"the field {_shown_name(name)} is missing")
        others = schema.get("additionalProperties", True)
        for name, item in value.items():
            if name not in known and others is False:
                takes = ", ".join(map(_shown_name, list(known)[:_SHOWN_CHOICES])) or "none"
                return _at(place, f"the field {_shown_name(name)} is unknown; there may be {takes}")
            wrong = self.fault(item, known.get(name, others), f"{place}.{_shown_name(name)}", depth + 1)
            if wrong is not None:
                return wrong
        return None

    def _in_list(self, value: list[Any], schema: dict[str, Any], place: str, depth: int) -> str | None:
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        rest = schema.get("items", True)
        for index, item in enumerate(value):
            wrong = self.fault(item, first[index] if index < len(first) else rest, f"{place}[{index}]", depth + 1)
            if wrong is not None:
                return wrong
        return None

    # -- $ref, allOf, anyOf, oneOf ----------------------------------------------------------------------------------------
    def _in_combined(self, value: Any, schema: dict[str, Any], place: str, depth: int) -> str | None:
        for part in (self._referred(schema), *_schemas(schema, "allOf")):
            wrong = self.fault(value, part, place, depth + 1)
            if wrong is not None:
                return wrong
        for word in ("anyOf", "oneOf"):
            choices = _schemas(schema, word)
            wrongs = [self.fault(value, choice, place, depth + 1) for choice in choices]
            if choices and None not in wrongs:
                return self._nearest(value, schema, choices, wrongs, place)
            if word == "oneOf" and wrongs.count(None) > 1:
                return _at(place, "fits more than one of the allowed forms")
        return None

    def _nearest(self, value: Any, schema: dict[str, Any], choices: list[Any], wrongs: list[str | None], place: str) -> str:
        """The most helpful error.

        If exactly one choice has the value's type, this is the error of that choice. If not, this is the whole rule.
        """
        near = [wrong for choice, wrong in zip(choices, wrongs, strict=True) if self._is_of_kind(value, choice)]
        if len(near) == 1 and near[0] is not None:
            return near[0]
        return _at(place, f"must be {self._rule(schema)}")

    def _is_of_kind(self, value: Any, schema: Any) -> bool:
        target = self._resolved(schema)
        return isinstance(target, dict) and any(_KINDS[name](value) for name in _types(target)) and self._tagged_alike(value, target)

    def _tagged_alike(self, value: Any, schema: dict[str, Any]) -> bool:
        """Some fields have only one possible value (the tag of a union).

        Does the value have the right tag in each such field?
        """
        known = schema.get("properties")
        if not isinstance(value, dict) or not isinstance(known, dict):
            return True
        tags = {name: part["const"] for name, part in known.items() if isinstance(part, dict) and "const" in part}
        return all(_same(value.get(name), tag) for name, tag in tags.items())

    def _referred(self, schema: dict[str, Any]) -> Any:
        reference = schema.get("$ref")
        name = reference.removeprefix("#/$defs/") if isinstance(reference, str) else None
        return True if name is None else self._defs.get(name.replace("~1", "/").replace("~0", "~"), True)

    def _resolved(self, schema: Any) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._referred(schema)
        return True

    # -- the rule in words ------------------------------------------------------------------------------------------------
    def _rule(self, schema: Any, depth: int = 0) -> str:
        schema = self._resolved(schema)
        if not isinstance(schema, dict) or depth > 3:
            return "something else"
        if "const" in schema:
            return _shown(schema["const"])
        choices = schema.get("enum")
        if isinstance(choices, list) and choices:
            return _either(map(_shown, choices))
        combined = _schemas(schema, "anyOf") or _schemas(schema, "oneOf")
        if combined and not _types(schema):
            return _either(self._rule(choice, depth + 1) for choice in combined)
        return _either(_with_bounds(name, schema) for name in _types(schema)) or _with_bounds("", schema)


def _types(schema: dict[str, Any]) -> list[str]:
    """The types that the schema names; empty if the schema names no type, or an unknown type."""
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return names if all(isinstance(name, str) and name in _KINDS for name in names) else []


def _schemas(schema: dict[str, Any], word: str) -> list[Any]:
    found = schema.get(word)
    return found if isinstance(found, list) else []


def _limit(schema: dict[str, Any], word: str) -> int | float | None:
    found = schema.get(word)
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) and found == found else None


def _number_fits(value: int | float, schema: dict[str, Any]) -> bool:
    low, high = _limit(schema, "minimum"), _limit(schema, "maximum")
    above, below = _limit(schema, "exclusiveMinimum"), _limit(schema, "exclusiveMaximum")
    step = _limit(schema, "multipleOf")
    if (low is not None and value < low) or (high is not None and value > high):
        return False
    if (above is not None and value <= above) or (below is not None and value >= below):
        return False
    if step is None or not 0 < step < math.inf:
        return True
    return _KINDS["number"](value) and _exact(value) % _exact(step) == 0


def _exact(number: int | float) -> Fraction:
    # The decimal number as it is written, not the nearest binary fraction: so 0.3 is a multiple of 0.1.
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def _length_fits(length: int, schema: dict[str, Any], of: str) -> bool:
    low, high = _limit(schema, f"min{of}"), _limit(schema, f"max{of}")
    return (low is None or length >= low) and (high is None or length <= high)


def _has_pattern(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("pattern"), str)


def _matches(value: str, schema: dict[str, Any]) -> bool:
    if not _has_pattern(schema) or len(value) > MAX_PATTERN_CHARS:
        return True
    try:
        return re.search(schema["pattern"], value) is not None
    except (re.error, OverflowError, RecursionError):
        return True  # the pattern is not valid in Python's dialect: the value is not checked against it


def _format_of(schema: dict[str, Any]) -> tuple[Callable[[str], bool], str] | None:
    named = schema.get("format")
    return _FORMATS.get(named) if isinstance(named, str) else None


def _has_format(value: str, schema: dict[str, Any]) -> bool:
    known = _format_of(schema)
    return known is None or known[0](value)


def _same(one: Any, other: Any) -> bool:
    """Are both values equal in the journal? There 1, 1.0 and True are three different values."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return type(one) is type(other) and bool(one == other)


def _with_bounds(kind: str, schema: dict[str, Any]) -> str:
    """The type in words, with its limits: "a whole number of at least 1 and at most 10"."""
    bounds: list[str] = []
    if kind in ("integer", "number", ""):
        for word, said in (("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"), ("exclusiveMaximum", "below")):
            limit = _limit(schema, word)
            bounds += [f"{said} {_shown(limit)}"] if limit is not None else []
    if kind in ("string", "array"):
        bounds += _sizes(schema, "Length", "character") if kind == "string" else _sizes(schema, "Items", "item")
    words = _WORDS.get(kind, "something" if not bounds else "a number")
    known = _format_of(schema)
    if known is not None and kind in ("string", ""):
        words = known[1]
    if bounds:
        words += (" " if bounds[0].startswith(("above", "below")) else " of ") + " and ".join(bounds)
    if kind in ("integer", "number") and (step := _limit(schema, "multipleOf")) is not None:
        words += f", a multiple of {_shown(step)}"
    if kind == "string" and _has_pattern(schema):
        words += f" that matches {schema['pattern'][:_SHOWN_CHARS]}"
    return words if words != "something" else "something else"


def _sizes(schema: dict[str, Any], of: str, unit: str) -> list[str]:
    low, high = _limit(schema, f"min{of}"), _limit(schema, f"max{of}")
    if low is not None and low == high:
        return [_counted(low, unit)]
    said = [f"at least {_counted(low, unit)}"] if low else []
    return said + ([f"at most {_counted(high, unit)}"] if high is not None else [])


def _counted(count: int | float, unit: str) -> str:
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def _either(words: Iterable[str]) -> str:
    each = list(dict.fromkeys(words))
    if len(each) > _SHOWN_CHOICES:
        each = [*each[:_SHOWN_CHOICES], f"another of {len(each)} things"]
    return " or ".join([", ".join(each[:-1]), each[-1]]) if len(each) > 1 else "".join(each)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return f"a certain {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _shown_name(name: Any) -> str:
    return ascii(name)[1:-1][:_SHOWN_CHARS]


def _at(place: str, what: str) -> str:
    return f"{place.removeprefix('.')}: {what}" if place else what
