"""Tests of guards whose removal no other test had noticed: their mutants survived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.conformance.suite import new_run
from tests.unit.drive_tools import SETTINGS, ManualClock, perdure, run, status_of, worker_of

from perdure import Approval, Budget, Call, NotApproved, Run, Settings, agent, tool
from perdure.core.events import Event, ToolCallFailed, ToolCallInitiated
from perdure.core.machine import Facts
from perdure.core.state import fold
from perdure.errors import StoreUnavailable
from perdure.inspect.replay import Different, Same, compare
from perdure.store.api import Store
from perdure.store.open import open_store

SEEN: list[list[str]] = []  # which intents were durable when a tool began, by the database itself
PAID: list[str] = []


def durable_intents(where: Path, run_id: str) -> list[str]:
    """Read through a separate connection, so that only durable events are visible."""
    store: Store = open_store(f"sqlite:///{where}", create=False)
    try:
        return [event.body.tool for event in store.read(run_id) if isinstance(event.body, ToolCallInitiated)]
    finally:
        store.close()


@tool(effect="transaction")
def book(amount: int, call: Call) -> int:
    return amount


@tool(effect="once")
async def send(where: str, call: Call) -> None:
    SEEN.append(durable_intents(Path(where), call.run_id))


@tool(effect="read")
async def look(where: str, call: Call) -> None:
    SEEN.append(durable_intents(Path(where), call.run_id))


@tool(effect="idempotent")
async def put(text: str) -> None:
    pass


@tool(effect="once", approval=Approval(expires=60))
async def pay() -> None:
    PAID.append("paid")


@agent
async def pays(run: Run) -> str:
    try:
        await pay()
    except NotApproved as refused:
        return refused.outcome
    return "paid"


@agent
async def books_and_sends(run: Run, where: str) -> None:
    await book(1)
    await send(where)


@agent(budget=Budget(calls=5))
async def looks(run: Run, where: str) -> None:
    await look(where)


@agent(name="signalled", version="1")
async def waits_and_puts(run: Run) -> None:
    await put("a")
    await run.receive("go")
    await put("b")


@agent(name="signalled", version="1")
async def puts(run: Run) -> None:
    await put("a")


@agent(name="large", version="1")
async def puts_much(run: Run) -> None:
    await put("a" * 500)
    await asyncio.sleep(60)


@agent(name="large", version="1")
async def puts_as_much(run: Run) -> None:
    await put("b" * 500)
    await asyncio.sleep(60)


async def drive(where: Path, one: Any, *args: Any, settings: Settings = SETTINGS) -> None:
    async with perdure(where, [one], settings=settings) as app:
        await app.start(one, *args, id="r")
        await app.engine.drive("r", wait=False)


@pytest.mark.parametrize(("one", "intent"), [(books_and_sends, "send"), (looks, "look")])
def test_a_call_begins_when_its_own_intent_is_durable(one: Any, intent: str, tmp_path: Path) -> None:
    """Also if the result of a transaction caused the call, whose intent is not in that commit; also a read that is charged (G2, G14)."""
    SEEN.clear()
    where = tmp_path / "j.db"
    run(drive(where, one, str(where)))
    assert len(SEEN) == 1
    assert intent in SEEN[0]


def test_an_intent_that_was_withdrawn_does_not_begin_after_its_approval_has_expired(tmp_path: Path) -> None:
    """The intent used up the approval, and its worker was drained before the call began: the approval still expires (G9)."""
    PAID.clear()

    async def main() -> str:
        clock = ManualClock()

        def drained_at_the_intent(run_id: str, events: Sequence[Event]) -> None:
            if any(isinstance(event.body, ToolCallInitiated) and event.body.attempt == 1 for event in events):
                worker_of(app)._drives[run_id].drain()
                clock.advance(61)

        async with perdure(tmp_path / "j.db", [pays], clock, observers=[drained_at_the_intent]) as app:
            handle = await app.start(pays, id="r")
            await app.engine.drive("r", wait=False)
            (asked,) = await app.approvals()
            await app.approve(asked.approval, by="ann")
            await app.engine.drive("r", wait=False)
            assert any(isinstance(event.body, ToolCallFailed) for event in app.store.read("r")), "the intent was not withdrawn"
            outcome: str = await handle.result()
            return outcome

    assert run(main()) == "expired"
    assert PAID == []


def test_code_that_ends_before_a_recorded_step_stops_the_run(tmp_path: Path) -> None:
    """The activation in which the code differs recorded no statement; the missing step is recorded with a later activation (T8)."""

    async def main() -> Same | Different:
        async with perdure(tmp_path / "j.db", [waits_and_puts]) as app:
            await app.start(waits_and_puts, id="r")
            await app.engine.drive("r", wait=False)
            await app.signal("r", "go")
            assert (await app.engine.drive("r", wait=False)).status == "succeeded"
            events = app.store.read("r")
            facts = Facts("r", "default", None, "signalled", "1", None, 0)
            return compare("r", events, fold(events), lambda _: puts.machine(facts, b"{}", 1000), app.load)

    found = run(main())
    assert isinstance(found, Different)
    assert "put" in found.difference


def test_a_file_that_was_replaced_is_not_written_to(tmp_path: Path) -> None:
    where = tmp_path / "j.db"
    store = open_store(f"sqlite:///{where}")
    try:
        store.create_run(new_run("before"))
        where.rename(tmp_path / "away.db")
        where.touch()
        with pytest.raises(StoreUnavailable, match="replaced"):
            store.create_run(new_run("after"))
    finally:
        store.close()


def test_large_arguments_are_compared_too(tmp_path: Path) -> None:
    """Arguments in a blob are compared by their digest: the recorded result is not used for other arguments."""
    where = tmp_path / "j.db"
    run(drive(where, puts_much, settings=structs.replace(SETTINGS, inline_bytes=100)))
    clock = ManualClock()
    clock.advance(61)

    async def again() -> str:
        async with perdure(where, [puts_as_much], clock) as app:
            await app.engine.drive("r", wait=False)
            return status_of(app, "r")

    assert run(again()) == "needs_attention"
