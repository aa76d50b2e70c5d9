"""A row that was edited by hand only affects its own run.

The inbox, the notices, `verify` and `why` work for all others.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.unit.drive_tools import ManualClock, perdure, run, until
from tests.unit.store_tools import raw

from perdure import Approval, NotFound, Perdure, Run, agent, tool
from perdure.core.identity import approval_id
from perdure.errors import StoreCorrupt
from perdure.inspect.verify import verify_run
from perdure.inspect.view import all_rows
from perdure.inspect.why.page import why
from perdure.store.api import ApprovalFilter, Served

FIRST, SECOND = (approval_id("default", name, 1) for name in ("first", "second"))


@agent(version="1")
async def asks(run: Run) -> str:
    return (await run.request_approval("pay", {"cents": 5}, by=["ann", "bob"])).outcome


def edit(path: Path, sql: str, *values: Any) -> None:
    connection = raw(path)
    for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.pragma("ignore_check_constraints", 1)
    connection.execute(sql, values)
    connection.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [("deciders", "nonsense"), ("deciders", "[1,null]"), ("deciders", "{}"), ("voters", "{"), ("voters", '"ann"'), ("seq", 1)],
)
def test_one_approval_that_cannot_be_read_hides_no_other(
    column: str, value: str | int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", [asks]) as app:
            for name in ("first", "second"):
                await app.start(asks, id=name)
                await app.engine.drive(name, wait=False)
            edit(tmp_path / "db", f"UPDATE perdure_approvals SET {column} = ? WHERE approval = ?", value, FIRST)
            assert [row.approval for row in await app.approvals()] == [SECOND]
            assert [(record.levelno, FIRST in record.getMessage()) for record in caplog.records if record.name == "perdure.store"] == [
                (logging.ERROR, True)
            ]
            with pytest.raises(StoreCorrupt, match=FIRST):
                app.store.approval(FIRST)
            with pytest.raises(StoreCorrupt, match=FIRST):
                await app.approve(FIRST, by="ann")
            with pytest.raises(NotFound):
                await app.approve(FIRST, by="ann", tenant="other")
            verdicts = {row.run_id: verify_run(app.store, row) for row in all_rows(app.store)}
            assert FIRST in str(verdicts["first"].problem)
            assert verdicts["second"].problem is None
            await app.approve(SECOND, by="bob")
            assert await app.handle("second").result() == "approved"

    run(main())


def test_a_call_whose_approval_cannot_be_read_does_not_start(tmp_path: Path) -> None:
    paid: list[int] = []

    @tool(effect="once", approval=Approval(by="ann"))
    async def pay() -> None:
        paid.append(1)

    @agent(version="1")
    async def payer(run: Run) -> None:
        await pay()

    async def main() -> None:
        async with perdure(tmp_path / "db", [payer]) as app:
            await app.start(payer, id="first")
            await app.engine.drive("first", wait=False)
            await app.approve(FIRST, by="ann")
            edit(tmp_path / "db", "UPDATE perdure_approvals SET deciders = 'x', status = 'rejected' WHERE approval = ?", FIRST)
            row = await app.engine.drive("first", wait=False)
            assert row.status == "needs_attention"
            assert f"the row of approval {FIRST} of run first was edited" in str(row.error)

    run(main())
    assert paid == []


def test_a_worker_that_says_nonsense_about_what_it_serves_hides_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", [asks]) as app:
            await app.start(asks, id="first")
            await app.engine.drive("first", wait=False)
            insert = "INSERT INTO perdure_workers (worker, name, pid, started_at, beat_at, serves, queues) VALUES (?, 'x', 1, 1, 1, ?, ?)"
            for number, (serves, queues) in enumerate([("nope", None), ("[1]", "nope"), ('[["a"]]', "[5]"), ('[["a","1"]]', '["q"]')]):
                edit(tmp_path / "db", insert, f"w{number}", serves, queues)
            now = app.clock.now()
            found = {one.worker: one for one in app.store.workers(now, 1_000_000)}
            assert len(found) == 5  # the app's own too
            assert [found[f"w{number}"].serves for number in range(4)] == [(), (), (), (Served("a", "1"),)]
            assert [found[f"w{number}"].queues for number in range(4)] == [None, (), (), ("q",)]
            assert why(app.store, "first", now=now).sentence

    run(main())


def test_a_notice_about_nothing_is_dropped_and_the_others_go_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()

    async def main() -> None:
        async with perdure(tmp_path / "db", [asks], clock) as app:
            await app.start(asks, id="first")
            edit(tmp_path / "db", "INSERT INTO perdure_notices (run, seq, next_at) VALUES (1, 999, 0)")
            edit(tmp_path / "db", "INSERT INTO perdure_notices (run, seq, next_at) VALUES (77, 1, 0)")
            stop = asyncio.Event()
            working = asyncio.create_task(app.work(stop=stop))
            await until(lambda: bool(app.store.approvals(ApprovalFilter())) and app.store.next_notice() is None)
            stop.set()
            await working

    with caplog.at_level(logging.INFO):
        run(main())
    said = [record.getMessage() for record in caplog.records if record.name == "perdure.store" and record.levelno == logging.ERROR]
    assert len(said) == 2
    assert "event 999 of run number 1," in said[0]
    assert "event 1 of run number 77," in said[1]
    assert any(FIRST in record.getMessage() or "pay" in record.getMessage() for record in caplog.records if record.name == "perdure.notify")


@agent(version="1")
async def brief(run: Run) -> str:
    return "over"


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
@pytest.mark.parametrize("status", ["queued", "running", "waiting"])
def test_a_run_whose_journal_has_its_end_is_not_claimed_by_its_name_whatever_its_row_says(
    store: str, status: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path / 'db'}" if store == "sqlite" else str(request.getfixturevalue("postgres_url"))

    async def main() -> None:
        async with Perdure(url, [brief]) as app:
            assert await app.run(brief, id="r") == "over"
            before = await app.handle("r").events()
            if store == "sqlite":
                edit(tmp_path / "db", "UPDATE perdure_runs SET status = ?, ready_at = 1", status)
            else:
                with psycopg.connect(url, autocommit=True) as other:
                    other.execute("ALTER TABLE perdure_runs DISABLE TRIGGER USER")
                    other.execute("UPDATE perdure_runs SET status = %s, ready_at = 1", (status,))
            with pytest.raises(
                StoreCorrupt, match=rf"has ended \(event {len(before)}, run_succeeded\), and its row says {status}"
            ) as refused:
                await app.drive("r")
            assert refused.value.hint == "write the row again from the journal: perdure verify r --repair"
            assert await app.handle("r").events() == before

    asyncio.run(main())
