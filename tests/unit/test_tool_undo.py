"""Hooks that undo a call, and the tool that a hook becomes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.core.machine import CallTool, Facts, Machine
from perdure.core.outcomes import Raised, Returned
from perdure.core.rate import Rate
from perdure.core.retry import Retry
from perdure.engine.local.attempts import attempt
from perdure.engine.threads import Threads
from perdure.errors import InvalidInput
from perdure.tool import Call, Tool, tool

AT = datetime(2030, 1, 1, tzinfo=UTC)


def booking(**options: Any) -> Tool[..., Any]:
    @tool(**{"effect": "keyed", "name": "hotel.book", **options})
    async def book(room: str, nights: int, at: datetime, call: Call) -> tuple[int, datetime]:
        return nights, at

    return book


def compensation(declared: Tool[..., Any]) -> Tool[..., Any]:
    undo = declared.compensation()
    assert undo is not None
    return undo


def test_a_tool_without_a_hook_cannot_be_undone():
    assert booking().compensation() is None


def test_a_hook_is_once_unless_it_says_otherwise():
    first, second = booking(), booking()

    @first.compensate
    async def cancel(room: str) -> None: ...

    @second.compensate(effect="idempotent")
    def cancel_again(room: str) -> None: ...

    assert first.compensator is not None
    assert second.compensator is not None
    assert (first.compensator.fn, first.compensator.effect, first.compensator.is_async) == (cancel, "once", True)
    assert (second.compensator.fn, second.compensator.effect, second.compensator.is_async) == (cancel_again, "idempotent", False)


def test_a_compensation_is_a_tool_with_the_limits_of_the_one_that_it_undoes():
    book = booking(timeout=30, retry=Retry(attempts=2), key_window=60, rate=Rate(3), approval=True, cost=0.5)

    @book.compensate(effect="keyed")
    async def cancel(room: str) -> None: ...

    undo = compensation(book)
    assert (undo.name, undo.effect, undo.timeout_s, undo.retry, undo.key_window_s) == (
        "hotel.book.undo",
        "keyed",
        30.0,
        Retry(attempts=2),
        60.0,
    )
    assert undo.rate == Rate(3, key="hotel.book")  # the same service, so the same line
    assert (undo.approval, undo.estimate, undo.isolate, undo.reconciler) == (None, None, False, None)


@pytest.mark.parametrize("is_async", [True, False])
def test_the_hook_gets_what_it_asks_for_typed_as_the_tool_has_it(is_async):
    book, seen = booking(), []

    async def cancel(nights: int, at: datetime, result: tuple[int, datetime], told: Call) -> str:
        seen.append((nights, at, result, told.key))
        return "cancelled"

    def cancel_sync(nights: int, at: datetime, result: tuple[int, datetime], told: Call) -> str:
        seen.append((nights, at, result, told.key))
        return "cancelled"

    book.compensate(cancel if is_async else cancel_sync)
    undo = compensation(book)
    call = Call(key="k-9", run_id="r", number=1, attempt=1, deadline=None, tenant="t", actor=None)
    args = undo.bind((), {"arguments": {"room": "7", "nights": 2, "at": "2030-01-01T00:00:00Z"}, "result": [2, "2030-01-01T00:00:00Z"]})

    answer = asyncio.run(attempt(undo, args, call, threads=Threads(1), grace_s=1).run())

    assert answer == Returned(b'"cancelled"')
    assert seen == [(2, AT, (2, AT), "k-9")]


def test_a_hook_may_want_nothing():
    book = booking()
    undone: list[bool] = []

    @book.compensate
    def cancel() -> None:
        undone.append(True)

    asyncio.run(compensation(book)(arguments={"room": "7", "nights": 2, "at": "2030-01-01T00:00:00Z"}, result=None))
    assert undone == [True]


def test_arguments_that_do_not_fit_the_tool_any_more_are_refused_before_the_hook_begins():
    book = booking()

    @book.compensate
    def cancel() -> None:
        raise AssertionError("it must not be called")

    undo = compensation(book)
    args = undo.bind((), {"arguments": {"room": "7"}, "result": None})
    answer = asyncio.run(attempt(undo, args, Call.outside(), threads=Threads(1), grace_s=1).run())
    assert isinstance(answer, Raised)
    assert (answer.failure.kind, answer.failure.type) == ("refused", "InvalidInput")
    assert "tool hotel.book, parameter nights" in answer.failure.message


def test_inside_an_agent_undoing_is_a_call_like_any_other():
    book = booking()

    @book.compensate
    async def cancel(room: str) -> None: ...

    undo = compensation(book)

    async def agent(_: Machine) -> Any:
        return await undo(arguments={"room": "7"}, result=3)

    machine = Machine(Facts("r", "t", None, "a", "1"), agent)
    assert machine.start(0) == [CallTool(1, undo, b'{"arguments":{"room":"7"},"result":3}')]


def test_a_tool_with_the_longest_name_can_be_undone():
    book = booking(name="x" * 64)
    book.compensate(nothing)
    assert compensation(book).name == "x" * 64 + ".undo"


def nothing() -> None: ...
def foreign(room: str, reason: str) -> None: ...
def defaulted(room: str, reason: str = "") -> None: ...
def wants_result(result: int) -> None: ...


@pytest.mark.parametrize("hook", [foreign, defaulted])
def test_a_hook_cannot_take_what_the_call_does_not_have(hook):
    words = r"tool hotel.book.compensate: the hook takes reason; it can have the tool's arguments \(room, nights, at\), result, and a Call"
    with pytest.raises(InvalidInput, match=words):
        booking().compensate(hook)


def test_result_is_refused_where_the_tool_has_an_argument_of_that_name():
    @tool
    async def publish(result: int, where: str) -> None: ...

    with pytest.raises(InvalidInput, match=r"tool publish.compensate: the tool has a parameter named result"):
        publish.compensate(wants_result)
    publish.compensate(nothing)  # who does not want it is not refused for it


def test_an_unknown_effect_of_a_hook_is_refused():
    with pytest.raises(InvalidInput, match=r"tool hotel.book.compensate: effect='twice' is unknown; one of read, "):
        booking().compensate(effect="twice")(nothing)  # type: ignore[call-overload]


def test_a_second_hook_is_refused():
    book = booking()
    book.compensate(nothing)
    with pytest.raises(InvalidInput, match="has a compensate hook already: nothing"):
        book.compensate(effect="read")(nothing)
