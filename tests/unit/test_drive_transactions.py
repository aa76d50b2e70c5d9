"""effect="transaction" inside a run: what its tool raises, how long it may take, and whom it keeps waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, outline, perdure, run, until
from tests.unit.store_tools import raw

from perdure import Agent, Call, Perdure, Retry, Run, ToolFailed, agent, tool
from perdure.errors import StoreCorrupt, StoreError, StoreUnavailable
from perdure.store.api import RunRow


def booking(book: Any) -> Agent[Any, Any]:
    """An agent with this one call; what the call fails with is its result."""

    @agent(name="booking", version="1")
    async def code(run: Run) -> list[Any]:
        try:
            return ["ok", await book()]
        except ToolFailed as failed:
            return [failed.kind, failed.type, failed.attempts]

    return code


async def driven(path: Path, code: Agent[Any, Any]) -> tuple[RunRow, Any, list[str]]:
    """The run where it rests for good; its clock moves on whenever it waits."""
    clock = ManualClock()
    async with perdure(path, [code], clock) as app:
        handle = await app.start(code, id="r")
        while (row := await app.drive("r", wait=False)).status == "waiting":
            clock.advance(100)
        return row, await handle.result() if row.status == "succeeded" else None, outline(await handle.events())


def tables(path: Path) -> list[str]:
    with raw(path) as other:
        return [name for (name,) in other.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'perdure%'")]


@pytest.mark.parametrize(
    "error", [StoreUnavailable("busy"), StoreCorrupt("bad"), StoreError("odd"), apsw.BusyError("locked"), KeyError("x")]
)
def test_what_a_tool_raises_is_the_calls_failure_and_never_the_stores(tmp_path: Path, error: Exception) -> None:
    """Taken for a failure of the store it would be tried again for ever, or stop the whole run."""
    performed: list[int] = []

    @tool(effect="transaction")
    def book(call: Call) -> str:
        performed.append(call.attempt)
        call.connection.execute("CREATE TABLE booked (a)")
        raise error

    row, output, lines = run(driven(tmp_path / "db", booking(book)), 10)
    assert row.status == "succeeded", row.error
    assert output == ["error", type(error).__name__, 1]
    assert lines[1:3] == ["initiated book 1/1", "failed 1/1 error"]
    assert performed == [1]
    assert tables(tmp_path / "db") == []


def test_a_tool_whose_own_sql_has_rolled_back_has_failed_whatever_it_returns(tmp_path: Path) -> None:
    performed: list[int] = []

    @tool(effect="transaction")
    def book(call: Call) -> str:
        performed.append(call.attempt)
        call.connection.execute("CREATE TABLE booked (a UNIQUE)")
        call.connection.execute("INSERT INTO booked VALUES (1)")
        with pytest.raises(apsw.ConstraintError):
            call.connection.execute("INSERT OR ROLLBACK INTO booked VALUES (1)")
        return "booked"

    row, output, _ = run(driven(tmp_path / "db", booking(book)), 10)
    assert (row.status, output) == ("succeeded", ["error", "StoreError", 1])
    assert performed == [1]
    assert tables(tmp_path / "db") == []


def test_a_transaction_that_took_too_long_is_rolled_back_when_it_returns(tmp_path: Path) -> None:
    performed: list[int] = []

    @tool(effect="transaction", timeout=0.02, retry=Retry(attempts=3, base=0))
    def book(call: Call) -> str:
        performed.append(call.attempt)
        call.connection.execute(f"CREATE TABLE booked_{call.attempt} (a)")
        if call.attempt == 1:
            time.sleep(0.05)
        return "booked"

    row, output, lines = run(driven(tmp_path / "db", booking(book)), 10)
    assert (row.status, output) == ("succeeded", ["ok", "booked"])
    assert lines[1:4] == ["initiated book 1/1", "failing 1/1 timeout", "retry 1/2"]
    assert performed == [1, 2]
    assert tables(tmp_path / "db") == ["booked_2"], "what came too late has not happened"


def test_a_long_transaction_keeps_neither_the_loop_nor_another_runs_agent_from_going_on(tmp_path: Path) -> None:
    """It holds the write lock: whoever commits meanwhile waits for it on the writer's thread, and not on the loop."""
    inside, finish = threading.Event(), threading.Event()
    looked: list[int] = []

    @tool(effect="transaction")
    def book(call: Call) -> str:
        inside.set()
        assert finish.wait(10)
        return "booked"

    @tool(effect="read")
    async def look(at: int) -> int:
        looked.append(at)
        return at

    @tool(effect="idempotent")
    async def act() -> str:
        return "acted"

    @agent(version="1")
    async def looker(run: Run) -> str:
        for at in range(20):
            await look(at)
        return str(await act())

    code = booking(book)

    async def main() -> tuple[list[Any], float]:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [code, looker], settings=SETTINGS) as app:
            for what, run_id in ((code, "r"), (looker, "s")):
                await app.start(what, id=run_id)
            results = [asyncio.create_task(app.handle("r").result())]
            await until(inside.is_set)
            results.append(asyncio.create_task(app.handle("s").result()))
            longest_s, last_s = 0.0, time.monotonic()
            until_s = last_s + 0.6
            while last_s < until_s:
                await asyncio.sleep(0.005)
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
            finish.set()
            return await asyncio.gather(*results), longest_s

    results, longest_s = run(main())
    assert results == [["ok", "booked"], "acted"]
    assert longest_s < 0.4, "the loop stood still"
