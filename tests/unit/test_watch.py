"""Callers that wait for runs.

One read serves all callers of an app, hints wake them, and each event comes exactly once.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from perdure import Agent, Perdure, Run, agent, tool
from perdure.app import Handle
from perdure.engine.clock import Clock
from perdure.engine.local import watch
from perdure.engine.local.engine import LocalEngine
from perdure.errors import NotFound, StoreCorrupt, StoreError, StoreUnavailable
from perdure.settings import Settings
from perdure.store.api import RunRow
from perdure.store.open import open_store
from perdure.store.pruning import found, prune

SETTINGS = Settings(park_after_s=0.0, lease_s=20.0)
PATIENCE_S = 60.0
MOST_A_SECOND = 20


@tool(effect="read")
async def look(place: int) -> int:
    return place


@tool(effect="read")
async def work_a_little() -> None:
    await asyncio.sleep(0.1)


@agent(version="1")
async def parked(run: Run) -> str:
    return str(await run.receive("go"))


@agent(version="1")
async def counting(run: Run, steps: int) -> int:
    for place in range(steps):
        await look(place)
        if place % 10 == 0:
            await run.receive("more")
    return steps


@agent(version="1")
async def busy(run: Run) -> str:
    while True:
        await work_a_little()


AGENTS: list[Agent[Any, Any]] = [parked, counting]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def park(app: Perdure, *run_ids: str) -> None:
    """Start these runs and let them wait for a signal, which no worker is there to take any more."""
    stop = asyncio.Event()
    working = asyncio.create_task(app.work(stop=stop))
    for run_id in run_ids:
        await app.start(parked, id=run_id)
    async with asyncio.timeout(PATIENCE_S):
        while (await app.count(agent="parked")).get("waiting", 0) < len(run_ids):
            await asyncio.sleep(0.02)
    stop.set()
    await working


async def seqs(handle: Handle, after: int = 0) -> list[int]:
    return [event.seq async for event in handle.follow(after)]


@asynccontextmanager
async def waiting(*waits: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def engine_of(app: Perdure) -> LocalEngine:
    assert isinstance(app.engine, LocalEngine)
    return app.engine


def waiters(app: Perdure) -> int:
    return len(engine_of(app)._watch._all())


def deaf_to_time(app: Perdure, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared poll finds nothing: what wakes a waiter from here on is a hint."""
    monkeypatch.setattr(app.store, "version", lambda: 0)


# -- what waiting costs


def transactions(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert found is not None
    return int(found[0])


async def least(count: Callable[[], int], seconds: float = 3.0) -> float:
    """The smallest number per second over several spans: PostgreSQL reports transactions up to ten seconds late."""
    fewest = float("inf")
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(8):
            before, began_s = count(), time.monotonic()
            await asyncio.sleep(seconds)
            fewest = min(fewest, (count() - before) / (time.monotonic() - began_s))
            if fewest <= MOST_A_SECOND:
                break
    return fewest


@pytest.mark.parametrize("served", [False, True], ids=["a client", "a process that could drive them"])
def test_a_thousand_idle_waiters_share_a_look(url: str, served: bool) -> None:
    async def main() -> float:
        run_ids = [f"r-{number}" for number in range(20)]
        async with Perdure(url, AGENTS, settings=SETTINGS) as app:
            await park(app, *run_ids)
        async with Perdure(url, AGENTS if served else [], settings=SETTINGS) as app:
            count: Callable[[], int]
            if app.store.remote:
                count = lambda: transactions(url)  # noqa: E731
            else:
                statements = 0

                def traced(*_: Any) -> bool:
                    nonlocal statements
                    statements += 1
                    return True

                database: Any = app.store
                for connection in (database._database._reader, database._database._writer):
                    connection.exec_trace = traced
                count = lambda: statements  # noqa: E731
            handles = [app.handle(run_ids[number % 20]) for number in range(500)]
            async with waiting(*(seqs(handle) for handle in handles), *(handle.result() for handle in handles)):
                await until(lambda: waiters(app) == 1000)
                return await least(count)

    assert asyncio.run(main()) <= MOST_A_SECOND


def test_callers_that_wait_for_a_run_of_another_live_worker_do_not_all_try_to_take_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[int, int]:
        claims, tries = 0, 0
        async with Perdure(url, [busy], settings=SETTINGS) as other, Perdure(url, [busy], settings=SETTINGS) as app:
            await app.start(busy, id="r")
            working = asyncio.create_task(other.work())
            async with asyncio.timeout(PATIENCE_S):
                while (await app.handle("r").row()).holder is None:
                    await asyncio.sleep(0.02)
            claim = app.store.claim

            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal claims
                claims += 1
                return claim(*args, **kwargs)

            monkeypatch.setattr(app.store, "claim", counted)
            async with waiting(*(app.handle("r").result() for _ in range(50))):
                await until(lambda: waiters(app) == 50)
                tries = claims
                await asyncio.sleep(3)
            other.drain()
            await working
        return tries, claims - tries

    at_first, later = asyncio.run(main())
    assert at_first <= 50
    assert later == 0


# -- hints


def test_a_hint_alone_wakes_whoever_waits_in_another_process(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[list[int], str, int]:
        async with Perdure(url, AGENTS, settings=SETTINGS) as app:
            await park(app, "r")
        async with Perdure(url, settings=SETTINGS) as client:
            deaf_to_time(client, monkeypatch)
            async with waiting(seqs(client.handle("r")), client.handle("r").result()) as (followed, result):
                await until(lambda: waiters(client) == 2)
                await asyncio.sleep(1.0)
                code = (
                    "import asyncio, sys\n"
                    "from perdure import Perdure\n"
                    "from tests.unit.test_watch import AGENTS, SETTINGS\n"
                    "async def main():\n"
                    "    async with Perdure(sys.argv[1], AGENTS, settings=SETTINGS) as app:\n"
                    "        await app.signal('r', 'go', 'on')\n"
                    "        await app.handle('r').result()\n"
                    "        await asyncio.sleep(1)\n"
                    "asyncio.run(main())\n"
                )
                command = [sys.executable, "-c", code, url]
                await asyncio.to_thread(subprocess.run, command, check=True, timeout=PATIENCE_S, cwd=Path(__file__).parents[2])
                async with asyncio.timeout(PATIENCE_S):
                    return await followed, await result, (await client.handle("r").info()).seq

    followed, result, last = asyncio.run(main())
    assert result == "on"
    assert followed == list(range(1, last + 1))


def test_if_every_hint_is_lost_one_shared_poll_finds_what_happened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> str:
        async with Perdure(url, AGENTS, settings=SETTINGS) as app, Perdure(url, settings=SETTINGS) as client:
            await park(app, "r")
            monkeypatch.setattr(engine_of(client)._watch, "_hint", lambda *_: None)
            async with waiting(client.handle("r").result()) as (result,):
                await until(lambda: waiters(client) == 1)
                await app.signal("r", "go", "on")
                assert await app.handle("r").result() == "on"
                async with asyncio.timeout(PATIENCE_S):
                    return str(await result)

    assert asyncio.run(main()) == "on"


def test_a_bell_that_was_cut_off_makes_up_for_what_it_has_missed(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> str:
        async with Perdure(postgres_url, AGENTS, settings=SETTINGS) as app, Perdure(postgres_url, settings=SETTINGS) as client:
            await park(app, "r")
            async with waiting(client.handle("r").result()) as (result,):
                await until(lambda: waiters(client) == 1)
                bell: Any = client.store
                await until(lambda: bool(bell._notify._watching))
                deaf_to_time(client, monkeypatch)
                opened = bell._connections.open

                def late() -> Any:
                    if not (ended.is_set()):
                        raise StoreError("not yet")
                    return opened()

                monkeypatch.setattr(bell._connections, "open", late)
                ended = asyncio.Event()
                with psycopg.connect(postgres_url, autocommit=True) as connection:
                    connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                await until(lambda: not bell._notify.listening)
                await app.signal("r", "go", "on")
                assert await app.handle("r").result() == "on"
                assert not result.done()
                ended.set()
                async with asyncio.timeout(PATIENCE_S):
                    return str(await result)

    assert asyncio.run(main()) == "on"


def test_without_watchers_no_commit_tells_which_runs_have_moved(url: str) -> None:
    async def main() -> tuple[bool, bool, bool]:
        async with Perdure(url, AGENTS, settings=SETTINGS) as app, Perdure(url, settings=SETTINGS) as client:
            bell: Any = app.store
            await park(app, "r")
            working = asyncio.create_task(app.work())
            before = bell._bell.watched
            async with waiting(client.handle("r").result()):
                await until(lambda: bool(bell._bell.watched))
                during = bell._bell.watched
            app.drain()
            await working
            return before, during, bell._bell._own.watched

    assert asyncio.run(main()) == (False, True, False)


# -- nothing missed, nothing twice


@pytest.mark.parametrize("page", [7, 500])
def test_followers_that_come_at_any_time_see_every_event_once(url: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PAGE", page)
    monkeypatch.setattr("perdure.engine.local.engine.PAGE", page)

    async def main() -> tuple[list[list[int]], int]:
        async with Perdure(url, AGENTS, settings=SETTINGS) as app, Perdure(url, settings=SETTINGS) as client:
            working = asyncio.create_task(app.work())
            handle = await app.start(counting, 60, id="r")
            followers: list[asyncio.Task[list[int]]] = []
            for number in range(6):
                await app.signal("r", "more", number)
                for _ in range(5):
                    followers.append(asyncio.create_task(seqs(client.handle("r"), after=3 * number)))
                    followers.append(asyncio.create_task(seqs(handle)))
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(PATIENCE_S):
                found = await asyncio.gather(*followers)
            last = (await handle.info()).seq
            app.drain()
            await working
            return found, last

    found, last = asyncio.run(main())
    for number, events in enumerate(found):
        assert events == list(range(1 if number % 2 else 3 * (number // 10) + 1, last + 1))


def test_a_damaged_journal_fails_its_own_followers_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> tuple[Any, Any]:
        async with Perdure(url, AGENTS, settings=SETTINGS) as app, Perdure(url, settings=SETTINGS) as client:
            await park(app, "bad", "good")
            read_many = client.store.read_many

            def damaged(after: dict[str, int], limit: int) -> Any:
                if "bad" in after:
                    raise StoreCorrupt("event 4 of run bad is missing")
                return read_many(after, limit)

            monkeypatch.setattr(client.store, "read_many", damaged)
            async with waiting(seqs(client.handle("bad")), seqs(client.handle("good"))) as tasks:
                await until(lambda: waiters(client) == 2)
                for run_id in ("bad", "good"):
                    await app.signal(run_id, "go", "on")
                for run_id in ("bad", "good"):
                    await app.handle(run_id).result()
                async with asyncio.timeout(PATIENCE_S):
                    bad, good = await asyncio.gather(*tasks, return_exceptions=True)
            return bad, good

    bad, good = asyncio.run(main())
    assert isinstance(bad, StoreCorrupt)
    assert good == list(range(1, len(good) + 1))


# -- the end of a wait


def test_a_cancelled_waiter_leaves_nothing_behind(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LINGER_S", 0.0)

    async def main() -> None:
        async with Perdure(url, AGENTS, settings=SETTINGS) as app:
            await park(app, "r")
            own = engine_of(app)._watch
            bell: Any = app.store
            async with waiting(*(seqs(app.handle("r")) for _ in range(20)), *(app.handle("r").result() for _ in range(20))):
                await until(lambda: waiters(app) == 40)
                await until(lambda: bool(bell._bell._own.watched))
            assert (own._waiters, own._near, own._timed) == ({}, set(), set())
            await until(lambda: own._task is None)
            assert not bell._bell._own.watched

    asyncio.run(main())


def test_closing_the_app_ends_its_waits_with_an_error(url: str) -> None:
    async def main() -> list[BaseException | None]:
        async with Perdure(url, AGENTS, settings=SETTINGS) as app:
            await park(app, "r")
            waits: list[asyncio.Task[Any]] = [asyncio.create_task(seqs(app.handle("r"))), asyncio.create_task(app.handle("r").result())]
            await until(lambda: waiters(app) == 2)
        await asyncio.wait(waits, timeout=PATIENCE_S)
        return [task.exception() for task in waits]

    for error in asyncio.run(main()):
        assert isinstance(error, StoreError)
        assert "the app was closed while a caller waited for run r" in str(error)


def test_a_tool_that_waits_for_a_run_does_not_end_the_waits_of_others_with_its_call(url: str) -> None:
    apps: list[Perdure] = []

    @tool(effect="read")
    async def wait_a_little(run_id: str) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await apps[0].handle(run_id).result()
        return "waited"

    @agent(version="1")
    async def asking(run: Run) -> str:
        return await wait_a_little("r")

    async def main() -> str:
        async with Perdure(url, [*AGENTS, asking], settings=SETTINGS) as app, Perdure(url, settings=SETTINGS) as client:
            await park(app, "r")
            apps.append(client)
            assert await app.run(asking) == "waited"
            async with waiting(client.handle("r").result()) as (result,):
                await until(lambda: waiters(client) == 1)
                await app.signal("r", "go", "on")
                await app.handle("r").result()
                async with asyncio.timeout(PATIENCE_S):
                    return str(await result)

    assert asyncio.run(main()) == "on"


def test_a_result_of_a_run_that_waits_for_a_timer_comes_when_it_is_due_and_claims_nothing_before(url: str) -> None:
    @agent(version="1")
    async def napping(run: Run) -> str:
        await asyncio.sleep(1.5)
        return "slept well"

    async def main() -> tuple[list[str], list[RunRow]]:
        async with Perdure(url, [napping], settings=SETTINGS) as app:
            handles = [await app.start(napping, id=f"r-{number}") for number in range(20)]
            results = await asyncio.gather(*(handle.result() for handle in handles))
            return results, [await handle.row() for handle in handles]

    results, rows = asyncio.run(main())
    assert results == ["slept well"] * 20
    assert {row.epoch for row in rows} == {2}  # once to begin, once when the timer was due


def test_a_follower_of_a_run_that_is_pruned_meanwhile_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.engine.local.engine.PAGE", 5)

    @agent(version="1")
    async def short(run: Run) -> None:
        for place in range(20):
            await look(place)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), Perdure(url, [short], settings=SETTINGS) as app:
            handle = await app.start(short, id="r")
            await handle.result()
            following = handle.follow()
            assert [(await anext(following)).seq for _ in range(3)] == [1, 2, 3]
            with closing(open_store(url)) as other:
                prune(other, found(other, 1 << 60, ("succeeded",), None), 1 << 60, by="ann", clock=lambda: time.time_ns() // 1000)
            with pytest.raises(NotFound):
                [event async for event in following]

    asyncio.run(main())


class Away:
    """A store that cannot be reached."""

    def watch(self, moved: object) -> Callable[[], None]:
        return lambda: None

    def version(self) -> int:
        return 0

    def watched(self, *_: object) -> None:
        raise StoreUnavailable("the server is away")


def test_callers_whose_time_has_come_do_not_make_the_watch_spin_during_an_outage() -> None:
    async def ask(question: Callable[[], Any]) -> Any:
        return question()

    async def reap() -> None: ...

    async def main() -> int:
        watched, turns = watch.Watch(lambda: cast(Any, Away()), ask, Clock(), 0.1, reap), 0
        pause = watched._pause

        async def counted(at_most_s: float) -> None:
            nonlocal turns
            turns += 1
            await pause(at_most_s)

        watched._pause = counted  # type: ignore[method-assign]
        until_s, known = asyncio.get_running_loop().time() + 0.01, cast(Any, None)
        waiting = asyncio.create_task(watched.change("r", known, due=None, until_s=until_s, held=False))
        await asyncio.sleep(1.5)
        waiting.cancel()
        await asyncio.wait([waiting])
        await watched.close()
        return turns

    assert asyncio.run(main()) < 60
