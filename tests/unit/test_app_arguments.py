"""Arguments of the wrong kind are refused in our words, where they are given."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perdure import Perdure, Retry, Run, agent
from perdure.core import codec
from perdure.errors import InvalidInput, NotEncodable
from perdure.sync import Perdure as BlockingPerdure

if TYPE_CHECKING:
    from perdure import Run as OnlyForTheTypeChecker

TOO_LONG = 10**5_000


@agent(version="1")
async def echo(run: Run, value: Any = None) -> Any:
    return value


@pytest.mark.parametrize("url", [5, Path("journal.db"), b"sqlite://", True])
def test_a_url_is_text(url: Any) -> None:
    with pytest.raises(InvalidInput, match=r"a URL is text, such as 'sqlite:///perdure\.db'"):
        Perdure(url)


def test_agents_come_in_a_list() -> None:
    with pytest.raises(InvalidInput, match=r"agents=\[…\]"):
        Perdure("sqlite://", agents=echo)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="settings"):
        Perdure("sqlite://", settings={"lease_s": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "argument", "rule"),
    [
        ("state", {"at": "x"}, r"at='x'\): the seq of an event"),
        ("state", {"at": 1.0}, r"at=1\.0\): the seq of an event"),
        ("state", {"at": True}, r"at=True\): the seq of an event"),
        ("result", {"timeout": "x"}, r"timeout='x'\): a number of seconds"),
        ("result", {"timeout": float("nan")}, r"timeout=nan\): a number of seconds"),
        ("result", {"timeout": True}, r"timeout=True\): a number of seconds"),
        ("events", {"after": -5}, r"after=-5: the seq of an event, or 0"),
        ("events", {"after": "x"}, r"after='x': the seq of an event, or 0"),
        ("events", {"after": 2**70}, r"after=\d+: the seq of an event, or 0"),
        ("events", {"after": None}, r"after=None: the seq of an event, or 0"),
        ("follow", {"after": -5}, r"after=-5: the seq of an event, or 0"),
    ],
)
def test_a_handle_refuses_what_is_no_number_of_the_right_kind(method: str, argument: dict[str, Any], rule: str) -> None:
    with BlockingPerdure("sqlite://", [echo]) as app:
        handle = app.start(echo, 1)
        with pytest.raises(InvalidInput, match=rule):
            list(handle.follow(**argument)) if method == "follow" else getattr(handle, method)(**argument)
        assert handle.result(timeout=20) == 1
        assert handle.result(timeout=None) == 1
        assert handle.events(after=2**32 - 1) == []


@pytest.mark.parametrize("wrong", [[5], (ValueError, 5), (int,), (ValueError("x"),), "ValueError", 5, (name for name in ("ValueError",))])
def test_a_retry_is_on_exception_types_or_their_names(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"Retry\(on=…\): exception types or their names"):
        Retry(on=wrong)
    assert Retry(on=[ValueError, "HTTPError"]).on == [ValueError, "HTTPError"]  # type: ignore[arg-type, comparison-overlap]


# -- the first parameter of an agent ----------------------------------------------------------------------------------------
async def _order_first(order: str) -> None: ...
async def _run_second(order: str, run: Run) -> None: ...
async def _no_parameter() -> None: ...
async def _by_name_only(*, run: Run) -> None: ...
async def _optional_order(order: int | None = None) -> None: ...


@pytest.mark.parametrize("fn", [_order_first, _run_second, _no_parameter, _by_name_only, _optional_order])
def test_an_agent_whose_first_parameter_is_not_its_run_is_refused_where_it_is_declared(fn: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"agent {fn.__name__}: its first parameter receives its Run.*{fn.__name__}\(run: Run, …\)"):
        agent(fn)


async def _bare(run) -> None: ...
async def _text(run: "Run") -> None: ...  # noqa: UP037 – a string of a string, with the annotations of this file
async def _unknown_here(run: OnlyForTheTypeChecker) -> None: ...
async def _whatever(run: Any) -> None: ...
async def _maybe(run: Run | None) -> None: ...


@pytest.mark.parametrize("fn", [_bare, _text, _unknown_here, _whatever, _maybe])
def test_an_agent_may_leave_open_what_its_first_parameter_is(fn: Any) -> None:
    declared = agent(fn)
    with BlockingPerdure("sqlite://", [declared]) as app:
        assert app.run(declared) is None


# -- integers that cannot be written down -------------------------------------------------------------------------------------
def test_a_longer_integer_than_python_writes_down_is_refused_by_its_place() -> None:
    with pytest.raises(NotEncodable, match=r"^cents is an integer of 5,001 digits; the limit is 4,300: write it as a string$"):
        codec.encode({"orders": [{"cents": 1}, {"cents": -TOO_LONG}]})
    assert codec.decode(codec.encode(10**4_299)) == 10**4_299
    with pytest.raises(NotEncodable, match="4,301 digits"):
        codec.encode(10**4_300)


def test_the_limit_does_not_follow_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        # Any other process, with the limit that Python has by default, must be able to read what this one records.
        with pytest.raises(NotEncodable, match="5,001 digits"):
            codec.encode([TOO_LONG])
        with pytest.raises(NotEncodable, match="5,001 digits"):
            codec.parse("1" + "0" * 5_000)
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("text", ['{"a": [1, -%s]}', "%s"])
def test_a_long_integer_in_typed_json_is_refused_in_our_words(text: str) -> None:
    with pytest.raises(NotEncodable, match=r"^--input: the integer -?10+… has 5,001 digits; the limit is 4,300: write it as a string$"):
        codec.parse(text % ("1" + "0" * 5_000), "--input")
    assert codec.parse(text % "17", "--input") == json.loads(text % "17")


def test_a_run_is_not_started_with_such_an_integer() -> None:
    async def main() -> None:
        async with Perdure("sqlite://", [echo]) as app:
            with pytest.raises(NotEncodable, match="agent echo: value is an integer of 5,001 digits"):
                await app.start(echo, TOO_LONG, id="r")

    asyncio.run(main())
