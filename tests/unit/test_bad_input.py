"""Bad input gets a clear error and loses nothing (GUARANTEES 7): input through Python, and the files of the journal.

The tests of tools, the codec, the command line and models test bad input of these parts.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
from tests.unit.drive_tools import ManualClock, outline, perdure, run
from tests.unit.store_tools import raw

from perdure import (
    Conflict,
    InvalidInput,
    NotEncodable,
    NotFound,
    Perdure,
    PerdureError,
    Run,
    RunFailed,
    StoreError,
    ToolFailed,
    agent,
    tool,
)


@tool(effect="once")
async def act(value: Any) -> Any:
    return value


@agent(version="1")
async def echo(run: Run, value: Any) -> Any:
    return await act(value)


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


class HostileText(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("no str")

    __repr__ = __str__


def nested(levels: int) -> Any:
    value: Any = "bottom"
    for _ in range(levels):
        value = [value]
    return value


def circular() -> Any:
    ring: dict[str, Any] = {}
    ring["self"] = ring
    return ring


async def coroutine() -> None: ...


# -- values -------------------------------------------------------------------------------------------------------------
GOOD: list[tuple[Any, Any]] = [
    *((text, text) for text in ("", "\0", "\ud800", "\ufeffx", "é", "e\u0301", "\u202eevil\u200b", "'; DROP TABLE perdure_runs; --")),
    *((number, number) for number in (0, -0.0, 2**53 + 1, 2**63, -(2**64), 10**4000, 1e308, 5e-324)),
    (HostileText("plain inside"), "plain inside"),
    ({"a": {"b": [None, True, 1, 1.0]}}, {"a": {"b": [None, True, 1, 1.0]}}),
    ((1, (2,)), [1, [2]]),
    (
        datetime.datetime(2024, 3, 31, 2, 30, fold=1),  # noqa: DTZ001 – a time in a gap, as people write it
        "2024-03-31T02:30:00",
    ),
    (decimal.Decimal("1.10"), "1.10"),
    ("x" * 300_000, "x" * 300_000),
    ({f"key {at}": at for at in range(100_000)}, {f"key {at}": at for at in range(100_000)}),
    (nested(150), nested(150)),
]


@pytest.mark.parametrize(("value", "expected"), GOOD, ids=[f"{type(value).__name__}-{at}" for at, (value, _) in enumerate(GOOD)])
def test_odd_but_honest_input_comes_through_whole(value: Any, expected: Any) -> None:
    async def main() -> Any:
        async with perdure(None, [echo]) as app:
            return await app.run(echo, value)

    found = run(main())
    assert found == expected
    assert isinstance(found, dict) or repr(found) == repr(expected), "1 is not 1.0, and 0.0 is not -0.0; keys come back sorted"


BAD: dict[str, Callable[[], Any]] = {
    "nan": lambda: math.nan,
    "infinity": lambda: math.inf,
    "minus infinity": lambda: {"a": [-math.inf]},
    "overflow": lambda: 1e999,
    "digits": lambda: 10**5000,
    "bytes": lambda: b"raw",
    "bytearray": lambda: bytearray(b"raw"),
    "set": lambda: {1},
    "int keys": lambda: {1: 2},
    "none key": lambda: {None: 1},
    "tuple key": lambda: {(1, 2): 3},
    "object": object,
    "hostile": Hostile,
    "hostile key": lambda: {Hostile(): 1},
    "circular": circular,
    "deep": lambda: nested(5000),
    "generator": lambda: (at for at in (1, 2)),
    "lambda": lambda: print,
    "type": lambda: int,
    "module": lambda: os,
    "decimal nan key": lambda: {decimal.Decimal("NaN"): 1},
    "split surrogates": lambda: "\ud83d\ude00",
    "exception": lambda: ValueError("x"),
    "complex": lambda: 1j,
    "memoryview": lambda: memoryview(b"x"),
    "too large": lambda: "x" * (65 * 1024 * 1024),
}


@pytest.mark.parametrize("name", BAD)
def test_input_that_cannot_be_recorded_is_refused_before_there_is_a_run(name: str) -> None:
    async def main() -> list[Any]:
        async with perdure(None, [echo]) as app:
            with pytest.raises(NotEncodable, match="agent echo") as refused:
                await app.start(echo, BAD[name]())
            assert len(str(refused.value)) < 500
            return list(app.store.list())

    assert run(main()) == []


@pytest.mark.parametrize("name", BAD)
def test_an_argument_that_cannot_be_recorded_is_refused_before_there_is_a_call(name: str) -> None:
    performed: list[Any] = []

    @tool(effect="once")
    async def touch(value: Any) -> None:
        performed.append(value)

    @agent(version="1")
    async def caller(run: Run) -> str:
        try:
            await touch(BAD[name]())
        except NotEncodable as refused:
            return str(refused)[:200]
        return "it was taken"

    async def main() -> tuple[str, list[str]]:
        async with perdure(None, [caller]) as app:
            handle = await app.start(caller)
            return str(await handle.result()), outline(await handle.events())

    said, lines = run(main())
    assert said.startswith("tool touch: ")
    assert lines == ["run_created", "run_succeeded"]
    assert performed == []


def test_a_coroutine_as_an_argument_is_a_forgotten_await() -> None:
    async def main() -> None:
        forgotten = coroutine()
        async with perdure(None, [echo]) as app:
            with pytest.raises(NotEncodable, match="was an await forgotten"):
                await app.start(echo, forgotten)
        forgotten.close()

    run(main())


def test_a_value_that_is_changed_after_it_was_given_has_been_taken_as_it_was() -> None:
    seen: list[Any] = []

    @tool(effect="once")
    async def use(value: list[Any]) -> list[Any]:
        seen.append(list(value))
        value.append("changed by the tool")
        return value

    @agent(version="1")
    async def user(run: Run, value: list[Any]) -> list[Any]:
        value.append("changed by the agent")
        waiting = use(value)
        value.append("changed after the call was made")
        found = await waiting
        found.append("changed after it was returned")
        await asyncio.sleep(10)
        return list(value)

    async def main() -> Any:
        clock, given = ManualClock(), ["given"]
        async with perdure(None, [user], clock) as app:
            handle = await app.start(user, given)
            given.append("changed after start")
            await app.engine.drive(handle.id, wait=False)
            clock.advance(11)
            return await handle.result()

    assert run(main()) == ["given", "changed by the agent", "changed after the call was made"]
    assert seen == [["given", "changed by the agent"]]


def test_input_is_checked_against_the_agents_signature() -> None:
    class Order(pydantic.BaseModel):
        id: str
        cents: int

    @agent(version="1")
    async def shop(run: Run, order: Order, express: bool = False) -> list[Any]:
        return [type(order).__name__, order.cents, express]

    async def main() -> Any:
        async with perdure(None, [shop]) as app:
            wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
                ((), {}, "the argument order is missing"),
                (({"id": "o"},), {}, "cents"),
                (({"id": "o", "cents": "many"},), {}, "cents"),
                (({"id": "o", "cents": 1}, True, 3), {}, "3 positional arguments"),
                (({"id": "o", "cents": 1},), {"expres": True}, "expres is unknown"),
                (({"id": "o", "cents": 1},), {"order": {}}, "order is given twice"),
            ]
            for args, kwargs, words in wrong:
                with pytest.raises(InvalidInput, match=words):
                    await app.start(shop, *args, **kwargs)
            return await app.run(shop, {"id": "o", "cents": "5"}, express=True)

    assert run(main()) == ["Order", 5, True]


def test_one_and_true_and_one_point_zero_are_three_inputs() -> None:
    async def main() -> None:
        async with perdure(None, [echo]) as app:
            await app.start(echo, 1, id="r")
            for other in (True, 1.0, "1", [1]):
                with pytest.raises(Conflict, match="another input"):
                    await app.start(echo, other, id="r")

    run(main())


def test_composed_and_decomposed_text_are_two_inputs() -> None:
    async def main() -> None:
        async with perdure(None, [echo]) as app:
            await app.start(echo, "é", id="r")
            with pytest.raises(Conflict):
                await app.start(echo, "e\u0301", id="r")

    run(main())


# -- identifiers --------------------------------------------------------------------------------------------------------
BAD_IDS = [
    "",
    "x" * 1000,
    "../../etc/passwd",
    "a/b",
    "a%2Fb",
    "a\nb",
    "-x",
    "☃",
    "a b",
    "\0",
    "\ud800",
    "'; DROP TABLE perdure_runs; --",
    7,
    b"x",
]


@pytest.mark.parametrize("bad", BAD_IDS, ids=ascii)
@pytest.mark.parametrize("where", ["id", "tenant", "actor"])
def test_unusable_identifiers_are_refused_and_nothing_is_started(bad: Any, where: str) -> None:
    async def main() -> int:
        async with perdure(None, [echo]) as app:
            with pytest.raises(InvalidInput, match="is not usable") as refused:
                await app.start(echo, 1, **{where: bad})
            assert str(refused.value).isascii()
            return len(app.store.list())

    assert run(main()) == 0


@pytest.mark.parametrize("odd", [*BAD_IDS[:-2], "%", "_", "*"], ids=ascii)
def test_asking_for_an_odd_run_is_asking_for_one_that_is_not_there(odd: str) -> None:
    async def main() -> None:
        async with perdure(None, [echo]) as app:
            await app.start(echo, 1, id="r")
            with pytest.raises(PerdureError) as refused:
                await app.handle(odd).row()
            assert isinstance(refused.value, NotFound)
            with pytest.raises((NotFound, InvalidInput)):
                await app.cancel(odd)

    run(main())


@pytest.mark.parametrize("bad", ["", "a/b", "☃", "x" * 300, None], ids=ascii)
def test_agents_have_usable_names_and_versions(bad: Any) -> None:
    async def code(run: Run) -> None: ...

    if bad is not None:
        with pytest.raises(InvalidInput, match="the agent name"):
            agent(name=bad)(code)
        with pytest.raises(InvalidInput, match="the version"):
            agent(version=bad)(code)
    with pytest.raises(InvalidInput, match="async def"):
        agent(version="1")(lambda run: None)  # type: ignore[arg-type, return-value]


# -- time ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seconds", [0, -1, -1e308, -math.inf, -0.0])
def test_a_sleep_of_no_time_is_a_step_and_no_timer(seconds: float) -> None:
    @agent(version="1")
    async def sleeper(run: Run) -> str:
        await asyncio.sleep(seconds)
        return "awake"

    async def main() -> list[str]:
        async with perdure(None, [sleeper]) as app:
            handle = await app.start(sleeper)
            assert await handle.result() == "awake"
            return outline(await handle.events())

    assert run(main()) == ["run_created", "run_succeeded"]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 1e12, 1e308])
def test_a_sleep_beyond_all_time_is_an_error_in_the_agent(seconds: float) -> None:
    @agent(version="1")
    async def sleeper(run: Run) -> None:
        await asyncio.sleep(seconds)

    async def main() -> None:
        async with perdure(None, [sleeper]) as app:
            await app.run(sleeper)

    with pytest.raises(RunFailed, match=r"year 9999|NaN"):
        run(main())


@pytest.mark.parametrize("seconds", [1e-9, 1e-6, 86_400 * 365 * 1000])
def test_tiny_and_huge_sleeps_are_timers(seconds: float) -> None:
    @agent(version="1")
    async def sleeper(run: Run) -> str:
        await asyncio.sleep(seconds)
        return "awake"

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(None, [sleeper], clock) as app:
            handle = await app.start(sleeper)
            row = await app.engine.drive(handle.id, wait=False)
            while row.status == "waiting":
                assert row.ready_at is not None
                clock.now_us = row.ready_at  # at the very moment that was announced, not later
                row = await app.engine.drive(handle.id, wait=False)
            return await handle.result()

    assert run(main()) == "awake"


def test_a_time_out_of_no_time_is_over_at_once() -> None:
    @agent(version="1")
    async def hasty(run: Run) -> list[str]:
        said = []
        for limit in (0, -5, -math.inf):
            try:
                async with asyncio.timeout(limit):
                    await asyncio.sleep(60)
            except TimeoutError:
                said.append("too late")
        return said

    async def main() -> Any:
        async with perdure(None, [hasty]) as app:
            return await app.run(hasty)

    assert run(main()) == ["too late"] * 3


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf, 1e12, "5", True])
def test_time_outs_of_tools_that_make_no_sense_are_refused(wrong: Any) -> None:
    async def fine() -> None: ...

    with pytest.raises(InvalidInput, match="timeout="):
        tool(effect="read", timeout=wrong)(fine)
    with pytest.raises(InvalidInput, match="key_window="):
        tool(effect="keyed", key_window=wrong)(fine)


def test_a_wake_time_long_past_is_now(tmp_path: Path) -> None:
    @agent(version="1")
    async def sleeper(run: Run) -> str:
        await asyncio.sleep(10)
        return "awake"

    clock = ManualClock()

    async def main() -> str:
        async with perdure(tmp_path / "db", [sleeper], clock) as app:
            await app.start(sleeper, id="r")
            return (await app.engine.drive("r", wait=False)).status

    assert run(main()) == "waiting"
    clock.advance(86_400 * 365 * 50)
    assert run(main()) == "succeeded"


# -- what an agent says -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("say", ["note", "status"])
def test_what_an_agent_says_is_text_of_a_reasonable_length(say: str) -> None:
    @agent(version="1")
    async def talker(run: Run) -> list[str]:
        said = []
        for wrong in (None, 7, b"x", "x" * 100_000):
            try:
                getattr(run, say)(wrong)
            except InvalidInput as refused:
                said.append(str(refused))
        getattr(run, say)("lone \ud800 surrogate, NUL \0, bidi \u202e")
        return said

    async def main() -> Any:
        async with perdure(None, [talker]) as app:
            return await app.run(talker)

    said = run(main())
    assert len(said) == 4
    assert all(words.startswith(f"run.{say}") for words in said)


def test_a_decision_is_among_its_alternatives_and_can_be_recorded() -> None:
    @agent(version="1")
    async def chooser(run: Run) -> list[str]:
        said = []
        for choice, among in (("up", ["left", "right"]), ({1}, None), (math.nan, None), (Hostile(), None), ("x" * 100_000, None)):
            try:
                run.decide(choice, among=among)
            except InvalidInput as refused:
                said.append(type(refused).__name__)
        return said

    async def main() -> Any:
        async with perdure(None, [chooser]) as app:
            return await app.run(chooser)

    assert run(main()) == ["InvalidInput", "NotEncodable", "NotEncodable", "NotEncodable", "InvalidInput"]


def test_hostile_values_inside_exceptions_are_survived() -> None:
    class Odd(Exception):
        def __init__(self) -> None:
            super().__init__(Hostile())

        @property
        def response(self) -> Any:
            raise RuntimeError("no response")

    @tool(effect="once")
    async def odd() -> None:
        raise Odd

    @agent(version="1")
    async def caller(run: Run) -> str:
        try:
            await odd()
        except ToolFailed as failed:
            return failed.type
        return ""

    async def main() -> Any:
        async with perdure(None, [caller]) as app:
            return await app.run(caller)

    assert run(main()) == "Odd"


# -- files --------------------------------------------------------------------------------------------------------------
def _text_file(path: Path) -> None:
    path.write_text("this is not a database\n" * 100)


def _other_database(path: Path) -> None:
    with raw(path) as other:
        other.execute("CREATE TABLE somebody_elses (x)")


def _folder(path: Path) -> None:
    path.mkdir()


FILES: dict[str, Callable[[Path], None]] = {"text": _text_file, "other database": _other_database, "folder": _folder}


@pytest.mark.parametrize("name", ["text", "folder"])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "db"
    FILES[name](path)
    before = path.read_bytes() if path.is_file() else None

    async def main() -> None:
        async with perdure(path, [echo]) as app:
            await app.run(echo, 1)

    with pytest.raises(StoreError, match="db"):
        run(main())
    assert (path.read_bytes() if path.is_file() else None) == before


def test_an_empty_file_becomes_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.touch()

    async def main() -> Any:
        async with perdure(path, [echo]) as app:
            return await app.run(echo, 1)

    assert run(main()) == 1


@pytest.mark.parametrize("url", ["", "mysql://x", "sqlite:/x", "sqlite:///", "http://x", "perdure.db", "sqlite:////no/such/folder/db"])
def test_urls_that_name_no_journal_are_refused(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with Perdure(url, [echo]):
            pass

    if url:
        with pytest.raises(PerdureError):
            run(main())
        assert list(tmp_path.iterdir()) == []
    else:
        run(main())
        assert (tmp_path / "perdure.db").exists(), "no URL is the default one"


# -- sizes --------------------------------------------------------------------------------------------------------------
def test_a_long_journal_is_replayed_quickly(tmp_path: Path) -> None:
    """2,000 recorded steps: too many to be read on the loop's own thread."""

    @tool(effect="read")
    async def step(at: int) -> int:
        return at

    @agent(version="1")
    async def long(run: Run) -> int:
        total = 0
        for at in range(2000):
            total += await step(at)
        await asyncio.sleep(10)
        return total

    clock = ManualClock()

    async def main() -> tuple[str, int]:
        async with perdure(tmp_path / "db", [long], clock) as app:
            await app.start(long, id="r")
            row = await app.engine.drive("r", wait=False)
            return row.status, row.seq

    status, seq = run(main())
    assert status == "waiting"
    assert seq > 4000
    clock.advance(11)
    assert run(main())[0] == "succeeded"
