"""How values of variables are shown: cut, without secrets, escaped, and without running any code of the user."""

from __future__ import annotations

import asyncio
import enum
from collections import defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, NoReturn

import pytest
from msgspec import Struct
from pydantic import BaseModel, SecretStr

from perdure.inspect.values import MAX_CHARS, REDACTED, Values, looks_secret

CANARY = "canary-4711-value"


def show(value: Any, name: str = "value", environ: dict[str, str] | None = None) -> str:
    return Values([{name: value}], environ or {}).show(name, value)


class Colour(enum.Enum):
    RED = 1


class Ticket(Struct):
    number: int
    text: str


@dataclass
class Order:
    id: str
    cents: int
    hidden: str = field(default="x", repr=False)


class Slotted:
    __slots__ = ("left", "unset")

    def __init__(self) -> None:
        self.left = 1


class Customer(BaseModel):
    name: str
    plan: str = "gold"
    key: SecretStr = SecretStr(CANARY)


Point = namedtuple("Point", "x y")


class Zone(tzinfo):
    def utcoffset(self, _: datetime | None) -> NoReturn:
        raise SystemExit

    dst = tzname = __repr__ = utcoffset  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (12, "12"),
        (1 << 5000, "<int of 5001 bits>"),
        (1.5, "1.5"),
        ("o-7", "'o-7'"),
        ("two\nlines", "'two\\nlines'"),
        (b"\x00a", "b'\\x00a'"),
        ([1, [2]], "[1, [2]]"),
        ((1,), "(1,)"),
        ({"a": (), 3: None}, "{'a': (), 3: None}"),
        (defaultdict(list, {"a": [1]}), "{'a': [1]}"),
        ({"b", "a"}, "{'a', 'b'}"),
        (frozenset((1,)), "frozenset({1})"),
        (deque([1, 2]), "deque([1, 2])"),
        (Point(1, 2), "Point(x=1, y=2)"),
        (Colour.RED, "Colour.RED"),
        (Decimal("1.50"), "Decimal('1.50')"),
        (datetime(2030, 1, 2, tzinfo=UTC), "datetime.datetime(2030, 1, 2, 0, 0, tzinfo=datetime.timezone.utc)"),
        (datetime(2030, 1, 2, tzinfo=Zone()), "datetime.datetime(2030, 1, 2, 0, 0) in <Zone>"),
        (PurePosixPath("/a"), "PurePosixPath('/a')"),
        (Ticket(1, "t"), "Ticket(number=1, text='t')"),
        (Order("o-1", 5), "Order(id='o-1', cents=5)"),
        (Slotted(), "<Slotted left=1>"),
        (ValueError("no", 3), "ValueError('no', 3)"),
        (len, "<function len>"),
        (Order, "<class Order>"),
        (asyncio, "<module asyncio>"),
        (asyncio.Lock(), "<Lock>"),
        (object(), "<object>"),
    ],
)
def test_a_value_is_shown_by_its_type(value: Any, text: str) -> None:
    assert show(value) == text


def test_a_pydantic_model_shows_its_fields_and_not_its_secrets() -> None:
    shown = show(Customer(name="Ann"))
    assert shown == f"<Customer name='Ann', plan='gold', key={REDACTED}>"


# --- no code of the user runs -------------------------------------------------------------------------------------------------
RAN: list[str] = []


def ran(*_: Any, **__: Any) -> NoReturn:
    RAN.append("ran")
    raise SystemExit("code of the user ran")


class Meta(type):
    __getattribute__ = ran
    __repr__ = __instancecheck__ = __subclasscheck__ = ran


class Hostile:
    def __init__(self) -> None:
        object.__setattr__(self, "inside", 1)

    __getattribute__ = __getattr__ = __repr__ = __str__ = __len__ = __iter__ = __eq__ = __hash__ = __bool__ = __format__ = ran
    __class__ = property(ran)
    __dir__ = __sizeof__ = __reduce__ = ran


class HostileList(list[Any]):
    __iter__ = __len__ = __repr__ = __getitem__ = ran


class HostileDict(dict[str, Any]):
    __iter__ = __len__ = __repr__ = items = keys = __getitem__ = ran


class HostileText(str):  # noqa: SLOT000
    __str__ = __repr__ = __len__ = __getitem__ = __iter__ = encode = __contains__ = ran


class HostileNumber(int):
    __repr__ = __str__ = __eq__ = __bool__ = __int__ = __index__ = ran


class HostileError(Exception):
    __str__ = __repr__ = ran


@dataclass
class HostileField:
    inside: int

    __repr__ = ran


class HostileSlots:
    __slots__ = ("inside",)
    inside: int

    __getattribute__ = __repr__ = ran


def made() -> Any:
    return type.__call__(Meta, "Made", (), {})


# Factories: pytest itself looks at the values of parameters.
HOSTILE = {
    "<Hostile inside=1>": Hostile,
    "[1]": lambda: HostileList([1]),
    "{'a': 1}": lambda: HostileDict(a=1),
    "'abc'": lambda: HostileText("abc"),
    "3": lambda: HostileNumber(3),
    "HostileError('abc')": lambda: HostileError("abc"),
    "HostileField(inside=1)": lambda: HostileField(1),
    "<HostileSlots>": HostileSlots,
    "<Made>": lambda: object.__new__(made()),
    "<class Made>": made,
    "[{'a': (<Hostile inside=1>,)}]": lambda: [{"a": (Hostile(),)}],
}


@pytest.mark.parametrize("text", HOSTILE)
def test_no_code_of_the_user_runs(text: str) -> None:
    value = HOSTILE[text]()
    RAN.clear()
    assert show(value) == text
    assert show(value, "password") == REDACTED
    assert RAN == []


def test_the_str_of_an_exception_of_the_user_is_not_called() -> None:
    RAN.clear()
    values = Values([], {})
    assert values.message(HostileError("abc")) == "'abc'"
    assert values.message(ValueError("abc")) == "abc"
    assert values.message(ValueError(Hostile())) == "<Hostile inside=1>"
    assert RAN == []


# --- large and strange values ---------------------------------------------------------------------------------------------------


def test_long_values_are_cut_without_visiting_the_rest() -> None:
    assert len(show("x" * 10_000_000)) == MAX_CHARS
    assert show(list(range(10**6))).endswith("19, … 999980 more]")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "[[[[[[…]]]]]]"
    assert len(show(dict.fromkeys(range(50), "y" * 100))) == MAX_CHARS


def test_a_value_that_contains_itself_is_shown_once() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    assert show(circle) == "[1, …]"


def test_escapes_of_terminals_and_invisible_characters_are_neutralised() -> None:
    shown = show({"\x1b[2J": "\x1b]0;x\x07 \u202e\u200b\u2800"})
    assert "\x1b" not in shown
    assert not any(char in shown for char in "\u202e\u200b\u2800\x07")
    assert Values([], {}).text("a\x1b[2J\r\nb\u202e") == "a\\x1b[2J\\r\\nb\\u202e"


# --- secrets ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    "password PASSWORD db_password dbPassword passwd pwd user_pass passphrase secret clientSecret api_key apiKey API-KEY apikey access_key "
    "private_key stripe_key Authorization auth bearer_token token accessToken authtoken credentials cookie Set-Cookie jwt webhookSecret".split(),
)
def test_names_of_secrets(name: str) -> None:
    assert show(CANARY, name) == REDACTED
    assert show({name: CANARY}) == f"{{{name!r}: {REDACTED}}}"


@pytest.mark.parametrize(
    "name", "key idempotency_key order author passed compass sort_key tokenizer secretary path monkey keys primary_key".split()
)
def test_names_of_other_things(name: str) -> None:
    assert show(CANARY, name) == repr(CANARY)


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 500), ("tokens_in", 3), ("password", None), ("secret", False), ("token", "")])
def test_counts_and_empty_values_are_no_secrets(name: str, value: Any) -> None:
    assert show(value, name) == repr(value)
    assert looks_secret("pin_password", 1234)


@pytest.mark.parametrize(
    "text",
    [
        "sk-proj-abcdefgh12345678",
        "sk_live_abcdefgh12345678",
        "ghp_abcdefgh12345678abcdefgh",
        "github_pat_abcdefgh12345678",
        "AKIAABCDEFGHIJKLMNOP",
        "xoxb-123456789-abcdefgh",
        "AIzaSyA-abcdefghijklmnopqrstuvwxyz1234",
        "eyJhbGciOi.eyJzdWIiOi.abcdefgh",
        "Bearer abcdefgh12345678",
        "postgresql://app:hunter2@db/x",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_what_looks_like_a_key_is_redacted_wherever_it_stands(text: str) -> None:
    shown = show([f"before {text} after"])
    assert REDACTED in shown
    for word in ("abcdefgh", "hunter2", "\nabc", "BCDEFGHIJ", "zdWIiOi"):
        assert word not in shown


def test_the_value_of_a_secret_is_redacted_everywhere_else() -> None:
    scope = {"settings": {"inner": [{"db_password": CANARY}]}, "header": f"X {CANARY}", "raw": CANARY.encode(), CANARY: 1}
    values = Values([scope], {})
    for name, value in scope.items():
        assert CANARY not in values.show(name, value), name
    assert CANARY not in values.show("", scope)
    assert CANARY not in values.text(f"call({CANARY!r})")
    assert CANARY not in values.call("login", {"password": CANARY, "user": "ann"})
    assert values.call("login", {"password": CANARY, "user": "ann"}) == f"login(password={REDACTED}, user='ann')"


def test_a_secret_at_the_cut_is_not_shown_in_part() -> None:
    for before in range(MAX_CHARS - 30, MAX_CHARS + 2):
        shown = Values([{"password": CANARY}], {}).show("text", "x" * before + CANARY + "y" * 1000)
        assert "canary" not in shown
        assert len(shown) <= MAX_CHARS


def test_secrets_of_the_environment_are_redacted() -> None:
    environ = {"SHOP_API_TOKEN": CANARY, "PWD": "/srv/shop", "DATABASE_PASSWORD": "short"}
    assert show(f"X {CANARY}", environ=environ) == f"'X {REDACTED}'"
    assert show("/srv/shop/x", environ=environ) == "'/srv/shop/x'"


def test_the_attributes_of_an_object_are_redacted_by_name() -> None:
    class Client:
        def __init__(self) -> None:
            self.url, self._api_key = "https://x", CANARY

    client = Client()
    assert show(client) == f"<Client url='https://x', _api_key={REDACTED}>"
    assert CANARY not in Values([{"client": client}], {}).show("text", f"with {CANARY}")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f'    password = "{CANARY}"', f"    password = {REDACTED}"),
        (f"token: str = '{CANARY}'  # for tests", f"token: str = {REDACTED}  # for tests"),
        (f'    login("ann", api_key=f"{CANARY}")', f'    login("ann", api_key={REDACTED})'),
        (f'headers = {{"Authorization": "Basic {CANARY}", "a": "b"}}', f'headers = {{"Authorization": {REDACTED}, "a": "b"}}'),
        (f'settings["db_password"] = "{CANARY}"', f'settings["db_password"] = {REDACTED}'),
        (f'secret = """{CANARY}', f"secret = {REDACTED}"),
        ('order = "o-7"; max_tokens = 5', 'order = "o-7"; max_tokens = 5'),
        ('if token == "x":', 'if token == "x":'),
    ],
)
def test_a_line_of_source_shows_no_secret_that_it_holds_itself(line: str, shown: str) -> None:
    assert Values([], {}).source(line, 200) == shown
