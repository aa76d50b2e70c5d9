"""Does a value fit a JSON Schema, and what does the message say if it does not?"""

from __future__ import annotations

import time
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from perdure import Approval, tool
from perdure.core import codec
from perdure.core.json_schema import MAX_DEPTH, MAX_PATTERN_CHARS, problem


def wrong(value: Any, schema: dict[str, Any], defs: dict[str, Any] | None = None) -> str | None:
    return problem(value, schema, defs or {})


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        ({"type": "integer"}, [0, -3, 10**400], [True, 1.0, "1", None, [1]]),
        ({"type": "number"}, [1, 1.0, -0.0, 10**400], [True, "1", float("nan"), float("inf")]),
        ({"type": "string"}, ["", "a\x00\ud800"], [1, None, ["a"]]),
        ({"type": "boolean"}, [True, False], [0, 1, "true"]),
        ({"type": "null"}, [None], [0, "", False, [], {}]),
        ({"type": "array"}, [[], [1, "a"]], [{}, "a"]),
        ({"type": "object"}, [{}, {"a": 1}], [[], "a"]),
        ({"type": ["integer", "null"]}, [1, None], [1.5, "a"]),
        ({"const": 1}, [1], [True, 1.0, "1"]),
        ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [True]}, {"a": [1], "b": 2}, {"a": [1, 1]}]),
        ({"enum": [1, "a", None]}, [1, "a", None], [True, 1.0, "b", False]),
        ({"minimum": 1, "maximum": 3}, [1, 3, 2.5, "text is not measured"], [0, 0.99, 4]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 3}, [1.01, 2], [1, 3, 1.0]),
        ({"multipleOf": 0.1}, [0.3, 1, 0.7, 0], [0.35, 1.01]),
        ({"multipleOf": 7}, [14, 7.0, 7 * 10**300], [15, 10**400 + 1]),
        ({"type": "string", "minLength": 1, "maxLength": 3}, ["a", "abc", "äöü"], ["", "abcd"]),
        ({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ab", "ba"]),
        ({"pattern": "b"}, ["abc", 5], ["ac"]),
        ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [[1, "2"], [True]]),
        ({"minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
        ({"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, [[1, "a"], [1], []], [["a", 1], [1, "a", 2]]),
        ({"items": {"type": "integer"}, "prefixItems": [{"type": "string"}]}, [["a", 1, 2]], [["a", "b"], [1]]),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"a": "1"}, {"b": 1}]),
        ({"properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"x": 1}], [{"x": "1"}]),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 1}]}, [1, "a"], ["", 1.5, None]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
        ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, [3], [7]),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, [5], [4, 5.5]),
        ({"minimum": 5, "anyOf": [{"type": "integer"}, {"type": "null"}]}, [5, None], [4, "a"]),
        ({}, [1, None, "a", [], {}], []),
    ],
)
def test_each_keyword_lets_in_what_fits_and_nothing_else(schema, fits, does_not):
    assert [value for value in fits if wrong(value, schema) is not None] == []
    assert [value for value in does_not if wrong(value, schema) is None] == []


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        (0, {"type": "integer", "minimum": 1}, "must be a whole number of at least 1"),
        (True, {"type": "integer"}, "must be a whole number"),
        (11, {"type": "integer", "minimum": 1, "maximum": 10}, "must be a whole number of at least 1 and at most 10"),
        (0, {"type": "number", "exclusiveMinimum": 0}, "must be a number above 0"),
        (5, {"type": "integer", "multipleOf": 10}, "must be a whole number, a multiple of 10"),
        ("", {"type": "string", "minLength": 1}, "must be text of at least 1 character"),
        ("", {"type": "string", "minLength": 2, "maxLength": 2}, "must be text of 2 characters"),
        ("x", {"type": "string", "pattern": "^a$"}, "must be text that matches ^a$"),
        ([1] * 3, {"type": "array", "minItems": 0, "maxItems": 2}, "must be a list of at most 2 items"),
        ("c", {"enum": ["a", "b"]}, 'must be "a" or "b"'),
        (2, {"const": 1}, "must be 1"),
        (1.5, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "must be a whole number or null"),
        # For a union, the error of the choice that was obviously intended.
        (0, {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, "must be a whole number of at least 1"),
        ({}, {"required": ["cents"]}, "the field cents is missing"),
        ({"b": 1}, {"properties": {"a": {}}, "additionalProperties": False}, "the field b is unknown; there may be a"),
        ({"a": [{"b": "x"}]}, {"properties": {"a": {"items": {"properties": {"b": {"type": "null"}}}}}}, "a[0].b: must be null"),
        ([1], {"items": False}, "[0]: must not be there"),
        (7, {"oneOf": [{"type": "integer"}, {"minimum": 5}]}, "fits more than one of the allowed forms"),
    ],
)
def test_what_is_wrong_is_said_in_words_that_a_person_understands(value, schema, said):
    assert wrong(value, schema) == said


def test_references_are_followed_into_the_definitions():
    defs = {"Money": {"type": "integer", "minimum": 1}, "a/b": {"type": "null"}}
    assert wrong(1, {"$ref": "#/$defs/Money"}, defs) is None
    assert wrong(0, {"$ref": "#/$defs/Money"}, defs) == "must be a whole number of at least 1"
    assert wrong(0, {"$ref": "#/$defs/a~1b"}, defs) == "must be null"
    assert (
        wrong([0], {"items": {"anyOf": [{"$ref": "#/$defs/Money"}, {"type": "null"}]}}, defs) == "[0]: must be a whole number of at least 1"
    )


def test_what_is_unknown_is_not_refused():
    assert wrong(1, {"type": "integer", "format": "date", "x-mine": False, "uniqueItems": True}) is None
    assert wrong(1, {"$ref": "#/$defs/Nothing"}) is None
    assert wrong("a", {"type": "decimal"}) is None
    assert wrong("a", {"pattern": r"\p{Letter}("}) is None  # a pattern in another dialect


def test_a_schema_that_refers_to_itself_ends():
    assert (
        wrong(1, {"$ref": "#/$defs/A"}, {"A": {"$ref": "#/$defs/A"}}) == f"cannot be checked, since it is more than {MAX_DEPTH} levels deep"
    )
    tree = {"type": "object", "properties": {"left": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]}}, "required": ["left"]}
    assert wrong({"left": {"left": None}}, {"$ref": "#/$defs/Tree"}, {"Tree": tree}) is None
    assert wrong({"left": {"left": 1}}, {"$ref": "#/$defs/Tree"}, {"Tree": tree}) is not None


def test_a_value_that_is_too_deep_for_its_schema_is_refused_and_not_a_crash():
    value: Any = []
    for _ in range(190):
        value = [value]
    assert "levels deep" in str(wrong(value, {"$ref": "#/$defs/L"}, {"L": {"type": "array", "items": {"$ref": "#/$defs/L"}}}))
    assert wrong(value, {"type": "array"}) is None


def test_a_union_that_branches_at_every_level_ends_soon():
    value: Any = 1
    for _ in range(25):
        value = [value]
    twice = {"anyOf": [{"items": {"$ref": "#/$defs/T"}, "type": "array"}] * 2}
    began = time.process_time()
    assert wrong(value, {"$ref": "#/$defs/T"}, {"T": twice}) is not None
    assert time.process_time() - began < 10


def test_text_that_is_too_long_for_a_pattern_is_refused_without_being_matched():
    bad = {"type": "string", "pattern": "^(a+)+$"}  # takes for ever on a's that end with something else
    assert wrong("a" * MAX_PATTERN_CHARS, {"type": "string", "pattern": "^a*$"}) is None
    assert "at most 10,000 characters" in str(wrong("a" * MAX_PATTERN_CHARS + "b", bad))


def test_a_name_or_a_choice_of_any_length_does_not_fill_the_message():
    assert len(str(wrong({"x" * 10_000: 1}, {"additionalProperties": False}))) < 200
    assert len(str(wrong(1, {"enum": ["x" * 10_000, "y"]}))) < 200
    assert len(str(wrong(1, {"enum": [str(number) for number in range(10_000)]}))) < 500
    assert wrong({"a\x1b[31m": 1}, {"additionalProperties": False}) == r"the field a\x1b[31m is unknown; there may be none"


# --- pydantic as the judge ----------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    sku: Annotated[str, Field(min_length=1, max_length=4, pattern="^[a-z]+$")]
    count: Annotated[int, Field(ge=1, lt=5)] = 1
    colour: Colour | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(BaseModel):
    left: Tree | None = None
    value: int


class Part(TypedDict):
    a: int
    b: NotRequired[str]


ANNOTATIONS: tuple[Any, ...] = (
    int,
    bool | None,
    Annotated[float, Field(gt=0, le=2)],
    Annotated[int, Field(multiple_of=3)],
    list[int],
    dict[str, int],
    tuple[int, str],
    Literal["a", 2],  # not 1: pydantic takes True for it, and we do not
    int | str | None,
    Annotated[list[str], Field(min_length=1, max_length=2)],
    Line,
    Annotated[Cat | Dog, Field(discriminator="kind")],
    Tree,
    Part,
)
JUDGES: dict[str, TypeAdapter[Any]] = {str(annotation): TypeAdapter(annotation) for annotation in ANNOTATIONS}
WORDS = st.sampled_from(["a", "b", "red", "cat", "dog", "sku", "count", "colour", "kind", "lives", "name", "left", "value", "abcd", ""])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-2, 6), st.floats(-1, 3), WORDS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)), max_leaves=8
)
NEAR = {
    "Line": st.fixed_dictionaries({"sku": WORDS}, optional={"count": SCALARS, "colour": WORDS}),
    "Cat": st.fixed_dictionaries({"kind": WORDS}, optional={"lives": SCALARS, "name": SCALARS}),
    "Tree": st.fixed_dictionaries({"value": SCALARS}, optional={"left": st.fixed_dictionaries({"value": SCALARS})}),
    "Part": st.fixed_dictionaries({"a": SCALARS}, optional={"b": SCALARS}),
}


@pytest.mark.parametrize("name", JUDGES)
def test_it_accepts_what_pydantic_accepts_and_refuses_what_pydantic_refuses(name):
    adapter = JUDGES[name]
    schema = adapter.json_schema()
    near = next((values for word, values in NEAR.items() if word in name), VALUES)

    @given(st.one_of(near, VALUES))
    def agree(value: Any) -> None:
        try:
            adapter.validate_json(codec.encode(value), strict=True)
            accepted = True
        except ValidationError:
            accepted = False
        assert (problem(value, schema, schema.get("$defs", {})) is None) == accepted, problem(value, schema, schema.get("$defs", {}))

    agree()


def test_of_a_tagged_union_the_tagged_one_says_what_is_wrong():
    schema = JUDGES[str(Annotated[Cat | Dog, Field(discriminator="kind")])].json_schema()
    assert wrong({"kind": "cat", "lives": "nine"}, schema, schema["$defs"]) == "lives: must be a whole number"
    assert wrong({"kind": "cow"}, schema, schema["$defs"]) == "must be an object"


def test_the_schema_of_a_tool_is_understood():
    @tool(effect="once")
    async def refund(order: str, cents: Annotated[int, Field(ge=1)], lines: list[Line] | None = None) -> None: ...

    schema = refund.schema()
    assert problem({"order": "o", "cents": 5, "lines": [{"sku": "a"}]}, schema, schema["$defs"]) is None
    assert problem({"order": "o", "cents": 0}, schema, schema["$defs"]) == "cents: must be a whole number of at least 1"
    assert problem({"order": "o", "cents": 1, "lines": [{"sku": "a", "x": 1}]}, schema, schema["$defs"]) == (
        "lines[0]: the field x is unknown; there may be sku, count, colour"
    )


KEYWORDS = st.sampled_from(
    "type const enum minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength pattern items prefixItems minItems "
    "maxItems properties required additionalProperties anyOf oneOf allOf $ref".split()
)
LEAVES = st.one_of(SCALARS, st.sampled_from(["integer", "string", "object", "array", "#/$defs/a", "(", "a{99999999999}"]), st.floats())
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(KEYWORDS, WORDS), inner, max_size=4)),
    max_leaves=12,
)


@given(value=VALUES, schema=st.dictionaries(KEYWORDS, SCHEMAS, max_size=4), defs=st.dictionaries(WORDS, SCHEMAS, max_size=2))
def test_a_schema_that_makes_no_sense_is_no_crash(value, schema, defs):
    said = problem(value, schema, defs)
    assert said is None or (isinstance(said, str) and said)


# -- formats --------------------------------------------------------------------------------------------------------------
FORMATS: list[tuple[str, type, list[str], list[str]]] = [
    (
        "date-time",
        datetime,
        [
            "2026-02-28T00:00:00Z",
            "2026-02-28T00:00:00",
            "2026-02-28T23:59",
            "2026-02-28T00:00:00.123456+01:00",
            "0001-01-01T00:00:00-23:59",
        ],
        [
            "x",
            "",
            "2026-02-28",
            "2026-02-30T00:00Z",
            "2026-02-28T24:00Z",
            "2026-02-28T00:00:60Z",
            "2026-02-28T00:00+24:00",
            "1700000000",
            "now",
        ],
    ),
    (
        "date",
        date,
        ["2026-02-28", "9999-12-31"],
        ["x", "", "2026-02-30", "2026-2-1", "20260228", "2026-02-28T00:00Z", "0000-01-01", "86400"],
    ),
    ("time", time_of_day, ["10:00", "23:59:59.999999", "10:00:00Z", "10:00:00+01:00"], ["x", "", "24:00", "10", "10:60", "1000"]),
    (
        "duration",
        timedelta,
        ["P1D", "PT30S", "-P1DT12H", "P1Y2M3W4DT5H6M7.5S", "PT0.000001S", "P998999999D"],
        ["x", "", "P", "PT", "P1DT", "1 day", "P1H", "PT1D", "P9999999999D", "P999999Y999999999D", "5"],
    ),
    (
        "uuid",
        UUID,
        ["00000000-0000-0000-0000-000000000000", "123E4567-e89b-42d3-a456-426614174000"],
        [
            "zz",
            "",
            "123e4567",
            "123e4567e89b42d3a456426614174000",
            "{123e4567-e89b-42d3-a456-426614174000}",
            "123e4567-e89b-42d3-a456-42661417400g",
        ],
    ),
]


@pytest.mark.parametrize(("name", "kind", "fits", "does_not"), FORMATS)
def test_text_has_the_format_that_its_tool_reads_it_in(name, kind, fits, does_not):
    schema = TypeAdapter(kind).json_schema()
    assert schema["format"] == name
    assert [text for text in fits if wrong(text, schema) is not None] == []
    assert [text for text in does_not if wrong(text, schema) is None] == []
    assert str(wrong("x", schema)).startswith("must be a ")
    assert wrong("x", schema) == wrong(5, schema)
    assert wrong(5, {"format": name}) is None  # formats apply only to text
    assert wrong(f"{fits[0]}\n", schema) is not None


NEAR_FORMATS = st.one_of(
    st.from_regex(r"\A\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d{1,10})?)?(Z|[+-]\d\d:\d\d)?\Z"),
    st.from_regex(r"\A[01]\d{3}-[01]\d-[0-3]\d\Z"),
    st.from_regex(r"\A[0-2]\d:\d\d(:\d\d(\.\d{1,10})?)?(Z|[+-]\d\d:\d\d)?\Z"),
    st.from_regex(r"\A[+-]?P(\d{1,8}Y)?(\d{1,3}M)?(\d{1,3}W)?(\d{1,10}D)?(T(\d{1,10}H)?(\d{1,10}M)?(\d{1,10}(\.\d{1,10})?S)?)?\Z"),
    st.uuids().map(str),
    st.sampled_from([text for _, _, fits, does_not in FORMATS for text in (*fits, *does_not)]),
    st.datetimes().map(datetime.isoformat),
)


@pytest.mark.parametrize("kind", [kind for _, kind, _, _ in FORMATS])
def test_what_is_let_in_can_be_read_by_the_tool(kind):
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()

    @given(NEAR_FORMATS)
    def reads(text: str) -> None:
        if wrong(text, schema) is None:
            adapter.validate_json(codec.encode(text))

    reads()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (datetime, st.datetimes()),
        (date, st.dates()),
        (time_of_day, st.times()),
        (timedelta, st.timedeltas(min_value=timedelta(days=-9999), max_value=timedelta(days=9999))),
        (UUID, st.uuids()),
    ],
)
def test_what_was_asked_for_may_stay_as_it_was(kind, values):
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()

    @given(values)
    def stays(value: Any) -> None:
        assert wrong(adapter.dump_python(value, mode="json"), schema) is None

    stays()


def test_a_version_of_a_uuid_is_held_to():
    assert wrong("123e4567-e89b-42d3-a456-426614174000", {"format": "uuid4"}) is None
    assert wrong("123e4567-e89b-12d3-a456-426614174000", {"format": "uuid4"}) == "must be a UUID of version 4"


@tool(effect="once", approval=Approval(editable=["price", "prices", "any_number", "word"]))
async def offer(
    price: Decimal,
    prices: list[Decimal] | None = None,
    any_number: Annotated[Decimal, Field(allow_inf_nan=True)] = Decimal(0),
    word: float | str = 1.0,
) -> None: ...


@pytest.mark.parametrize("text", ["NaN", "sNaN", "Infinity", "-inf", "x", "", "1,5", "0x10", "--1", "1e", "."])
def test_a_decimal_in_text_is_a_number(text):
    schema = offer.editable_schema()
    fields = schema["properties"]
    assert str(problem(text, fields["price"], {})).startswith("must be text that matches ")
    assert problem([text], fields["prices"], {}) is not None
    assert problem(text, fields["any_number"], {}) is None  # the tool itself makes the final check
    assert problem(text, fields["word"], {}) is None


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_every_decimal_is_let_in_as_it_is_recorded(value):
    fields = offer.editable_schema()["properties"]
    assert problem(str(value), fields["price"], {}) is None
    assert problem(2, fields["price"], {}) is None
    assert problem(2.5, fields["price"], {}) is None
