"""Runs that are started together share only their commits.

Each is created once, or refused without affecting the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure import Perdure, Run, agent
from perdure.errors import Conflict, StoreError
from perdure.store.api import NewRun, RunRow
from perdure.store.sqlite.database import SqliteDatabase


@agent(version="1")
async def job(run: Run, n: int) -> int:
    return n


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[Perdure]:
    async with Perdure(f"sqlite:///{tmp_path}/journal.db", agents=[job]) as app:
        yield app


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []
    plain = SqliteDatabase.write

    def write(self: SqliteDatabase, *args: Any, **options: Any) -> Any:
        made.append(1)
        return plain(self, *args, **options)

    monkeypatch.setattr(SqliteDatabase, "write", write)
    return made


def test_a_thousand_runs_that_are_started_together_take_one_commit(tmp_path: Path, commits: list[int]) -> None:
    async def main() -> None:
        async with opened(tmp_path) as app:
            await app.start(job, 0, id="warm")
            commits.clear()
            handles = await asyncio.gather(*(app.start(job, n, id=f"r{n}") for n in range(1000)))
            assert len(commits) == 1
            assert [(await handle.row()).status for handle in handles] == ["queued"] * 1000
            assert [await handle.result() for handle in handles[:3]] == [0, 1, 2]

    asyncio.run(main())


def test_one_that_is_refused_does_not_hinder_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as app:
            await app.start(job, 1, id="taken")
            answers = await asyncio.gather(
                app.start(job, 2, id="a"), app.start(job, 99, id="taken"), app.start(job, 3, id="b"), return_exceptions=True
            )
            assert isinstance(answers[1], Conflict)
            assert {row.run_id for row in app.store.list()} == {"taken", "a", "b"}
            assert len(await app.handle("taken").events()) == 1

    asyncio.run(main())


def test_one_that_cannot_be_stored_does_not_hinder_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(tmp_path) as app:
            create_all = app.store.create_runs

            def refuses(new: NewRun) -> tuple[RunRow, bool]:
                if new.run_id == "bad":
                    raise StoreError("no")
                (answer,) = create_all([new])
                return answer

            def refuses_all(news: Sequence[NewRun]) -> list[tuple[RunRow, bool]]:
                raise StoreError("no")

            monkeypatch.setattr(app.store, "create_run", refuses)
            monkeypatch.setattr(app.store, "create_runs", refuses_all)
            answers = await asyncio.gather(*(app.start(job, 1, id=name) for name in ("a", "bad", "b")), return_exceptions=True)
            assert [isinstance(answer, StoreError) for answer in answers] == [False, True, False]
            assert {row.run_id for row in app.store.list()} == {"a", "b"}

    asyncio.run(main())


def test_a_start_that_is_cancelled_before_its_commit_starts_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as app:
            starting = [asyncio.ensure_future(app.start(job, n, id=f"r{n}")) for n in range(3)]
            asyncio.get_running_loop().call_soon(starting[1].cancel)
            await asyncio.gather(*starting, return_exceptions=True)
            assert starting[1].cancelled()
            assert {row.run_id for row in app.store.list()} == {"r0", "r2"}

    asyncio.run(main())


def test_the_same_id_twice_in_one_go_is_one_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as app:
            one, other = await asyncio.gather(app.start(job, 1, id="r"), app.start(job, 1, id="r"))
            assert one.id == other.id == "r"
            assert len(await one.events()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("together", [1, 3])
def test_ctrl_c_in_the_middle_of_the_commit_leaves_nobody_waiting(together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio cancels the caller from a signal handler, so between any two of our lines."""
    starting: list[asyncio.Task[object]] = []
    plain = SqliteDatabase.write
    errors: list[object] = []

    def interrupted(self: SqliteDatabase, *args: Any, **options: Any) -> Any:
        done = plain(self, *args, **options)
        if starting:
            starting[0].cancel()
        return done

    async def main() -> None:
        async with opened(tmp_path) as app:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
            await app.start(job, 0, id="warm")
            monkeypatch.setattr(SqliteDatabase, "write", interrupted)
            starting.extend(asyncio.ensure_future(app.start(job, n, id=f"r{n}")) for n in range(together))
            async with asyncio.timeout(60):
                answers = await asyncio.gather(*starting, return_exceptions=True)
            assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [True, *[False] * (together - 1)]
            assert [(await app.handle(f"r{n}").row()).status for n in range(together)] == ["queued"] * together

    asyncio.run(main())
    assert errors == []
