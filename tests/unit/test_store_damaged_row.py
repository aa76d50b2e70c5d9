"""A run with a damaged row does not affect other runs: it is listed, named and not driven, and the others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest
from tests.unit.drive_tools import perdure, run, status_of, until

from perdure import Run, Settings, agent
from perdure.errors import StoreCorrupt
from perdure.inspect.verify import verify_run


@agent(version="1")
async def echo(run: Run, value: int) -> int:
    return value


def damage(path: Path, run_id: str) -> None:
    """Like a flipped bit: a column has a value that a STRICT table never accepts."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA writable_schema = ON")
    ((sql,),) = connection.execute("SELECT sql FROM sqlite_schema WHERE name = 'perdure_runs'").fetchall()
    connection.execute("UPDATE sqlite_schema SET sql = replace(sql, 'STRICT', '') WHERE name = 'perdure_runs'")
    connection.close()
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE perdure_runs SET error = x'ff00' WHERE run_id = ?", (run_id,))
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'perdure_runs'", (sql,))
    connection.close()


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Two queued runs, of which the first is damaged."""
    path = tmp_path / "journal.db"

    async def begin() -> None:
        async with perdure(path, [echo]) as app:
            for name in ("bad", "good"):
                await app.start(echo, 1, id=name)

    run(begin())
    damage(path, "bad")
    return path


def test_a_worker_with_room_for_one_run_goes_on_with_the_other(damaged: Path) -> None:
    async def main() -> None:
        async with perdure(damaged, [echo], settings=Settings(concurrency=1, poll_s=0.01)) as app:
            working = asyncio.create_task(app.work())
            await until(lambda: status_of(app, "good") == "succeeded")
            app.drain()
            await working

    run(main())


def test_it_is_listed_and_whoever_asks_for_it_is_told(damaged: Path) -> None:
    async def main() -> None:
        async with perdure(damaged, [echo]) as app:
            rows = {row.run_id: row for row in app.store.list()}
            assert (rows["bad"].status, rows["good"].status) == ("needs_attention", "queued")
            assert "damaged" in str(rows["bad"].error)
            verdict = verify_run(app.store, rows["bad"])
            assert "the row of run 'bad' is damaged" in str(verdict.problem)
            assert verify_run(app.store, rows["good"]).problem is None
            with pytest.raises(StoreCorrupt, match="row of run 'bad' is damaged"):
                app.store.get("bad")

    run(main())
