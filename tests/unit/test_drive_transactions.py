"""effect="transaction" inside a run: what its tool raises, how long it may take, and which work it delays."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.stalls import Stalls
from tests.unit.drive_tools import SETTINGS, ManualClock, local, outline, perdure, run, until, worker_of
from tests.unit.store_tools import raw

from perdure import Agent, Approval, Call, NotApproved, Perdure, Retry, Run, ToolFailed, agent, tool
from perdure.engine.local.worker import _TRANSACTIONS
from perdure.errors import StoreCorrupt, StoreError, StoreUnavailable
from perdure.store.api import RunRow


def booking(book: Any) -> Agent[Any, Any]:
    """An agent with this one call; if the call fails, the failure is its result."""

    @agent(name="booking", version="1")
    async def code(run: Run) -> list[Any]:
        try:
            return ["ok", await book()]
        except ToolFailed as failed:
            return [failed.kind, failed.type, failed.attempts]

    return code


async def driven(path: Path, code: Agent[Any, Any]) -> tuple[RunRow, Any, list[str]]:
    """Drive the run to its end; the clock moves whenever the run waits."""
    clock = ManualClock()
    async with perdure(path, [code], clock) as app:
        handle = await app.start(code, id="r")
        while (row := await app.engine.drive("r", wait=False)).status == "waiting":
            clock.advance(100)
        return row, await handle.result() if row.status == "succeeded" else None, outline(await handle.events())


def tables(path: Path) -> list[str]:
    other = raw(path)
    names = [name for (name,) in other.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    other.close()
    return [name for name in names if name.startswith("booked")]


@pytest.mark.parametrize(
    "error", [StoreUnavailable("busy"), StoreCorrupt("bad"), StoreError("odd"), apsw.BusyError("locked"), KeyError("x")]
)
def test_what_a_tool_raises_is_the_calls_failure_and_never_the_stores(tmp_path: Path, error: Exception) -> None:
    """If it counted as a failure of the store, it would be tried again for ever, or stop the whole run."""
    performed: list[int] = []

    @tool(effect="transaction")
    def book(call: Call) -> str:
        performed.append(call.attempt)
        call.connection.execute("CREATE TABLE booked (a)")
        raise error

    row, output, lines = run(driven(tmp_path / "db", booking(book)))
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

    row, output, _ = run(driven(tmp_path / "db", booking(book)))
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

    row, output, lines = run(driven(tmp_path / "db", booking(book)))
    assert (row.status, output) == ("succeeded", ["ok", "booked"])
    assert lines[1:4] == ["initiated book 1/1", "failing 1/1 timeout", "retry 1/2"]
    assert performed == [1, 2]
    assert tables(tmp_path / "db") == ["booked_2"], "what came too late has not happened"


def test_a_long_transaction_keeps_the_loop_and_other_runs_going(tmp_path: Path) -> None:
    """The transaction has the write lock.

    Other writes wait for it alone: a commit of another run, a new run, a claim, a cancel.
    """
    inside, finish, gate = threading.Event(), threading.Event(), asyncio.Event()

    @tool(effect="transaction")
    def book(call: Call) -> str:
        inside.set()
        assert finish.wait(60)
        return "booked"

    @tool(effect="read")
    async def look(at: int) -> int:
        await gate.wait()
        return at

    @tool(effect="idempotent")
    async def act() -> str:
        return "acted"

    @agent(version="1")
    async def looker(run: Run) -> str:
        for at in range(20):
            await look(at)
        return str(await act())

    async def others(app: Perdure) -> str:
        handle = await app.start(looker, id="late")
        await app.cancel("late")
        return (await app.engine.drive(handle.id)).status

    code = booking(book)

    async def main() -> tuple[list[Any], float]:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [code, looker], settings=SETTINGS) as app:
            await app.start(looker, id="early")
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(app.run(looker, id="s"))
                booked = group.create_task(app.run(code, id="r"))
                await until(inside.is_set)
                gate.set()
                late = group.create_task(others(app))
                claiming = group.create_task(app.engine.drive("early"))
                with Stalls() as stalls:
                    await stalls.watch_for(0.6)
                ended_early = [task for task in (looking, booked, late, claiming) if task.done()]
                finish.set()
            assert ended_early == [], "all of them need the lock"
            return [looking.result(), booked.result(), late.result(), claiming.result().status], stalls.longest_s

    results, longest_s = run(main())
    assert results == ["acted", ["ok", "booked"], "cancelled", "succeeded"]
    assert longest_s < 0.3, "the loop stood still"


def test_an_approval_that_expires_while_its_transaction_waits_for_a_thread_is_not_used(tmp_path: Path) -> None:
    """All threads for transactions are busy: the waiting time of the last transaction counts (G9)."""
    clock = ManualClock()  # it does not show that time before it is over, so nothing else can notice it
    made: list[str] = []
    may_end = threading.Event()

    @tool(effect="transaction", approval=Approval(expires=1.0))
    def pay(call: Call) -> str:
        made.append(call.run_id)
        return "paid"

    @agent(version="1")
    async def payer(run: Run) -> str:
        try:
            return str(await pay())
        except NotApproved as refused:
            return refused.outcome

    async def main() -> str:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [payer], settings=SETTINGS, clock=clock) as app:
            handle = await app.start(payer, id="r")
            assert (await app.engine.drive("r", wait=False)).status == "waiting_approval"
            assert local(app)._worker is not None
            for _ in range(_TRANSACTIONS):
                worker_of(app)._transactors.submit(may_end.wait, 60)
            try:
                (asked,) = await app.approvals()
                await app.approve(asked.approval, by="ann")
                driving = asyncio.ensure_future(app.engine.drive("r", wait=False))
                await asyncio.sleep(1.2)
                clock.advance(1.2)
            finally:
                may_end.set()
            await driving
            return str(await handle.result(timeout=60))

    assert (run(main()), made) == ("expired", [])
