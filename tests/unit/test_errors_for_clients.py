"""Errors that a service may show to its clients: str() names no database, no host and no command; `hint` has these."""

from __future__ import annotations

import asyncio
import pickle
import re
import traceback
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.servers.postgres import Server

from perdure import Budget, Call, InvalidInput, Perdure, PerdureError, Run, agent, tool
from perdure.errors import NotFound, StoreError, StoreUnavailable
from perdure.settings import Settings
from perdure.store.open import open_store

SECRET = "journal-of-the-shop"  # part of the name of the database
COMMAND = re.compile(r"\bperdure [a-z]+|--[a-z]|PERDURE_URL")


@tool(effect="once")
async def charge(cents: int, call: Call) -> str:
    return f"charged {cents}"


@agent(version="1")
async def buyer(run: Run, cents: int) -> str:
    return await charge(cents)


@agent(version="1", budget=Budget(calls=1))
async def spender(run: Run) -> str:
    await charge(1)
    return await charge(2)


@agent(version="1", name="asker")
async def old_asker(run: Run) -> bool:
    return (await run.request_approval("go on")).granted


@agent(version="2", name="asker")
async def asker(run: Run) -> bool:
    return (await run.request_approval("go on")).granted


Step = Callable[[Perdure], Awaitable[Any]]


async def _exceeded(app: Perdure) -> None:
    await app.handle("spent").result()


async def _approval(app: Perdure) -> str:
    return (await app.approvals())[0].approval


async def _stale_vote(app: Perdure) -> None:
    await app.approve(await _approval(app), by="ann", digest="0" * 64)


REFUSED: dict[str, Step] = {
    "no such run": lambda app: app.handle("nothing").info(),
    "no such run to drive": lambda app: app.drive("nothing"),
    "no such run to signal": lambda app: app.signal("nothing", "t"),
    "no such approval": lambda app: app.approve("ap-0", by="ann"),
    "another tenant": lambda app: app.handle("done", tenant="other").info(),
    "another input": lambda app: app.start(buyer, 8, id="done"),
    "another version": lambda app: app.drive("old"),
    "paused": lambda app: app.drive("paused"),
    "budget used up": _exceeded,
    "budget raised too little": lambda app: app.unpause("spent", add=Budget(usd=1)),
    "undo before the end": lambda app: app.undo("paused"),
    "undo of a stopped run": lambda app: app.undo("spent"),
    "not a call": lambda app: app.resolve("done", "x", did_not_happen=True),  # type: ignore[arg-type]
    "stale vote": _stale_vote,
}


def url_of(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("postgres_url")) if store == "postgres" else f"sqlite:///{tmp_path / SECRET}.db"


async def _prepare(url: str) -> None:
    async with Perdure(url, [buyer, spender, old_asker], settings=Settings()) as app:
        await app.run(buyer, 7, id="done")
        await app.start(buyer, 7, id="paused")
        await app.pause("paused")
        await app.start(spender, id="spent")
        await app.drive("spent")
        await app.start(old_asker, id="old")
        await app.drive("old")


def is_shown(error: PerdureError, url: str) -> None:
    told = str(error)
    assert not COMMAND.search(told), told
    for part in (SECRET, "127.0.0.1", "localhost", "/tmp", url.rpartition("/")[2]):
        assert part not in told, told


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_no_refusal_names_the_database_or_a_command(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = url_of(store, tmp_path, request)
    asyncio.run(_prepare(url))

    async def main() -> None:
        async with Perdure(url, [buyer, spender, asker], settings=Settings()) as app:
            for name, step in REFUSED.items():
                with pytest.raises(PerdureError) as refused:
                    await step(app)
                is_shown(refused.value, url)
                assert refused.value.hint, name
                assert COMMAND.search(refused.value.hint), (name, refused.value.hint)
                assert refused.value.in_full() == f"{refused.value}; {refused.value.hint}"

    asyncio.run(main())


def test_a_traceback_has_the_hint_and_a_copy_keeps_it() -> None:
    error = NotFound("there is no run x", hint="`perdure list` shows the runs")
    assert "`perdure list` shows the runs" in "".join(traceback.format_exception(error))
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.hint, copied.in_full()) == (str(error), error.hint, error.in_full())
    lost = StoreUnavailable("is locked", where="/srv/perdure.db", hint="wait")
    assert str(lost) == "the database is locked"
    assert lost.in_full() == "/srv/perdure.db is locked; wait"
    assert "/srv/perdure.db" in "".join(traceback.format_exception(lost))
    copied = pickle.loads(pickle.dumps(lost))
    assert (str(copied), copied.in_full()) == (str(lost), lost.in_full())
    assert lost.again(StoreError).in_full() == lost.in_full()


# -- health ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_health_is_the_time_of_a_round_trip(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    async def main() -> float:
        async with Perdure(url_of(store, tmp_path, request), settings=Settings()) as app:
            return await app.health()

    assert 0 < asyncio.run(main()) < 5


def test_health_finds_a_server_that_is_gone_or_silent_and_one_that_is_back(postgres: Server, postgres_url: str) -> None:
    async def unhealthy(app: Perdure, timeout: float) -> StoreError:
        with pytest.raises(StoreUnavailable) as refused:
            await app.health(timeout)
        is_shown(refused.value, postgres_url)
        assert str(postgres.port) in refused.value.in_full()
        return refused.value

    async def main() -> None:
        async with Perdure(postgres_url, settings=Settings()) as app:
            await app.health()
            await asyncio.to_thread(postgres.pause)
            assert "has not answered within 0.5 s" in str(await unhealthy(app, 0.5))
            await asyncio.to_thread(postgres.resume)
            await app.health(30)
            await asyncio.to_thread(postgres.stop, "immediate")
            assert "cannot be reached" in str(await unhealthy(app, 10))
            await asyncio.to_thread(postgres.start)
            async with asyncio.timeout(60):
                while True:
                    try:
                        assert await app.health() > 0
                        return
                    except StoreUnavailable:
                        await asyncio.sleep(0.1)

    asyncio.run(main())


def test_health_finds_a_file_that_is_gone_and_a_journal_that_was_moved(tmp_path: Path) -> None:
    file = tmp_path / f"{SECRET}.db"
    url = f"sqlite:///{file}"

    async def main() -> None:
        async with Perdure(url, settings=Settings()) as app:
            await app.health()
            with closing(open_store(url)) as other:
                other.close_journal("postgresql://elsewhere/db", by="ann", now=1, lease_us=1)
            with pytest.raises(StoreError, match="its journal is being moved") as moved:
                await app.health()
            is_shown(moved.value, url)
            assert "elsewhere" not in str(moved.value)
            assert "postgresql://elsewhere/db" in moved.value.in_full()
            file.rename(tmp_path / "away.db")
            with pytest.raises(StoreUnavailable, match="was deleted, moved or replaced") as gone:
                await app.health()
            is_shown(gone.value, url)

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "5", None])
def test_a_wrong_time_out_is_refused(timeout: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path / 'x.db'}", settings=Settings()) as app:
            await app.health(timeout)

    with pytest.raises(InvalidInput, match=r"health\(timeout="):
        asyncio.run(main())
