"""Canonical JSON: every value that it accepts comes back unchanged; for other values, the error names the problem."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import uuid
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.codec import INLINE_BYTES, MAX_BYTES, MAX_DEPTH, Payload, decode, digest, encode, pack, parse
from perdure.errors import InvalidInput, NotEncodable


def is_joined(text: str) -> bool:
    """Whether no two code points of the text would become one character in JSON."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") == text


any_text = st.text(st.characters(codec=None, categories=None)).filter(is_joined)  # lone surrogates and NUL included
scalars = st.none() | st.booleans() | st.integers() | st.integers(min_value=-(10**4000), max_value=10**4000) | any_text
values = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equality that distinguishes True from 1, 1 from 1.0 and -0.0 from 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return bool(left == right)


@given(values)
def test_every_json_value_comes_back_the_same(value):
    assert same(decode(encode(value)), value)


def written_by_json(value):
    """The canonical form by its definition, which needs no module of ours."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def test_every_character_is_written_as_json_writes_it_and_read_again():
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for first in range(0, len(characters), 100):
        text = "".join(characters[first : first + 100])
        assert encode(text) == written_by_json(text)
        assert decode(encode(text)) == text
        assert encode({text: text}) == written_by_json({text: text})


@pytest.mark.parametrize(
    "value",
    [
        *({"b": 1, "a": None, "é": True, "\uffff": 2, "\U0001f600": 3, "Z": "z"}, {}, {"": ""}),
        *({"much": 1e16}, {"little": 1e-7}, {"none": -0.0}, {"whole": 2.0}, {"deep": {"b": 1e22, "a": [1.5]}}, 1e16),
        *({"large": 2**64}, {"larger": -(10**600)}, 10**4000, "x" * 5000, {"x": "y" * 5000}),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else type(value).__name__,
)
def test_the_form_is_that_of_json_for_every_value(value):
    assert encode(value) == written_by_json(value)


@given(values)
def test_encoding_what_was_decoded_changes_no_byte(value):
    assert encode(decode(encode(value))) == encode(value)


@given(values)
def test_a_payload_survives_the_event_that_holds_it(value):
    payload, blob = pack(encode(value))
    stored = msgspec.json.decode(msgspec.json.encode(payload), type=Payload)
    assert blob is None
    assert stored.inline == encode(value)


@given(st.dictionaries(any_text, st.integers()))
def test_the_order_of_keys_does_not_matter(value):
    assert encode(value) == encode(dict(reversed(value.items())))


@pytest.mark.parametrize(
    "value", ["\0", "\ud800", "a\udfff\0b", "é", "e\u0301", "\u202eevil", "\u200b", 2**53 + 1, 2**63, -(10**4299), -0.0, 5e-324]
)
def test_awkward_values_come_back_the_same(value):
    assert same(decode(encode(value)), value)
    assert same(decode(encode({"k": [value]})), {"k": [value]})


def test_things_that_look_alike_stay_apart():
    alike: list[Any] = [1, 1.0, True, "1", [1], -0.0, 0.0, 0, False, None, "", [], {}]
    assert len({encode(value) for value in alike}) == len(alike)
    assert encode("é") != encode("e\u0301")


# --- the nearest JSON type ---------------------------------------------------------------------------------------------------


class Colour(str, enum.Enum):  # noqa: UP042 – its str() is not its value, unlike a StrEnum's
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int
    y: Any


class Model(pydantic.BaseModel):
    at: datetime


class Record(msgspec.Struct):
    n: int


class Loud(int):
    __slots__ = ()

    def __int__(self) -> int:
        return 99

    def __index__(self) -> int:
        return 99


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ((1, (2,)), [1, [2]]),
        (Colour.RED, "red"),
        ({Colour.RED: 1}, {"red": 1}),
        (Level.HIGH, 3),
        (Loud(4), 4),
        (Point(1, Point(2, None)), {"x": 1, "y": {"x": 2, "y": None}}),
        (Pair(1, 2), {"left": 1, "right": 2}),
        (datetime(2024, 2, 29, 12, tzinfo=UTC), "2024-02-29T12:00:00+00:00"),
        (date(2024, 2, 29), "2024-02-29"),
        (Decimal("1.10"), "1.10"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (PurePosixPath("a/b"), "a/b"),
        (Model(at=datetime(2024, 1, 1, tzinfo=UTC)), {"at": "2024-01-01T00:00:00Z"}),
        (Record(5), {"n": 5}),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
    ],
)
def test_common_types_become_the_nearest_json_type(value, plain):
    assert same(decode(encode(value)), plain)


# --- refusals ----------------------------------------------------------------------------------------------------------------


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Failing(pydantic.BaseModel):
    @pydantic.model_serializer
    def dump(self) -> Any:
        raise ZeroDivisionError("in the serializer")


class Twin(str):
    """Equal to nothing, so that one dict can hold it twice."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def circular() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def iter_of_nothing() -> Iterator[int]:
    yield from ()


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "is nan, which JSON cannot hold"),
        (float("inf"), "is inf, which JSON cannot hold"),
        ({"price": [float("-inf")]}, "price is -inf"),
        ({1: 2}, "keys must be strings"),
        ({(1, 2): 3}, "keys must be strings"),
        ({Hostile(): 3}, "<Hostile>"),
        ({Twin("a"): 1, Twin("a"): 2}, "two keys that are the same"),
        ({1, 2}, "a set has no order"),
        ({"blob": b"x"}, "blob is of type bytes"),
        (Hostile(), "type Hostile"),
        (iter_of_nothing(), "make a list of it"),
        (circular(), "contains itself"),
        (nested(5_000), "nested deeper"),
        (nested(MAX_DEPTH + 1), "nested deeper"),
        (10**5_000, "value is an integer of 5,001 digits; the limit is 4,300: write it as a string"),
        ("\ud83d\ude00", "surrogate pair"),
        (Point(1, Failing()), "cannot be turned into JSON"),
        (object, "type type"),
        ({"k" * 10_000: object()}, "type object"),
        ({"\ud800": object()}, "\\ud800 is of type object"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else type(value).__name__,  # a circle cannot be shown
)
def test_what_json_cannot_hold_is_refused_by_name(value, words):
    with pytest.raises(NotEncodable) as refused:
        encode(value)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 300
    str(refused.value).encode()


def test_a_coroutine_is_refused_with_the_likely_reason():
    async def forgotten() -> None: ...

    coroutine = forgotten()
    with pytest.raises(NotEncodable, match="was an await forgotten"):
        encode(coroutine)
    coroutine.close()


def test_the_deepest_allowed_value_comes_back():
    assert decode(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)


@pytest.mark.full
def test_a_million_keys_are_fine_and_too_many_bytes_are_not():
    many = {str(number): number for number in range(1_000_000)}
    assert decode(encode(many)) == many
    with pytest.raises(NotEncodable, match="store it elsewhere"):
        encode("x" * MAX_BYTES)


def test_a_refusal_is_invalid_input_for_the_caller():
    assert issubclass(NotEncodable, InvalidInput)
    assert issubclass(NotEncodable, ValueError)


# --- large values, and values that people type
# -------------------------------------------------------------------------


def test_a_large_value_becomes_a_blob_with_a_preview():
    encoded = encode("é" * INLINE_BYTES)
    payload, blob = pack(encoded)
    assert blob == encoded
    assert (payload.blob, payload.size, payload.inline) == (digest(encoded), len(encoded), None)
    assert str(payload.preview).startswith('"éé')


def test_text_that_only_looks_like_an_escaped_surrogate_lies_in_place():
    payload, _ = pack(encode("\\ud800"))
    assert payload.inline == encode("\\ud800")
    assert payload.text is msgspec.UNSET


@pytest.mark.parametrize(
    ("text", "value"), [('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}), ("\ufeff1", 1), (b'"\xc3\xa9"', "é"), ('"\\u0000"', "\0")]
)
def test_what_people_type_is_parsed(text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"x": {"a": 1, "a": 1}}',
        "NaN",
        "[Infinity]",
        "1e999",
        "{",
        "",
        "1 2",
        b"\xff",
        "[" * 5_000 + "]" * 5_000,
        "9" * 5_000,
    ],
)
def test_what_people_mistype_is_refused(text):
    with pytest.raises(NotEncodable):
        parse(text, "--input")
