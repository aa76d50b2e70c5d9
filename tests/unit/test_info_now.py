"""What a program learns about a run: the agent's status text, the failure, and the calls under way. On both stores."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.unit.drive_tools import SETTINGS, ManualClock, until
from tests.unit.postgres_tools import cleared

from perdure import FailureInfo, Fatal, Perdure, ReAct, Run, agent, sync, tool
from perdure.inspect.view import loader, read_run, run_record
from perdure.models import Scripted
from perdure.models.scripted import use, uses
from perdure.store.api import Current
from perdure.store.open import open_store


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new journal."""
    return cleared(request.getfixturevalue("postgres")) if request.param == "postgres" else f"sqlite:///{tmp_path / 'db'}"


IN_TOOL: list[int] = []
GO_ON: list[asyncio.Event] = []


@tool(effect="idempotent")
async def quick(number: int) -> int:
    return number


@tool(effect="idempotent")
async def slow(number: int) -> int:
    IN_TOOL.append(number)
    await GO_ON[0].wait()
    return number


@tool(effect="once")
async def pay(cents: int) -> str:
    IN_TOOL.append(cents)
    await GO_ON[0].wait()
    return f"paid {cents}"


@agent(version="1")
async def works(run: Run) -> int:
    run.note("two at once will do")
    run.status("counting")
    await quick(1)
    run.status("waiting for two of them")
    run.decide("both", among=["both", "one"], reason="it is quicker")
    return sum(await asyncio.gather(slow(2), slow(3)))


@agent(version="1")
async def fails(run: Run) -> None:
    run.status("about to fail")
    raise Fatal("no such order")


@agent(version="1")
async def silent(run: Run) -> int:
    return await quick(1)


def test_info_and_list_say_what_the_agent_says_how_it_failed_and_what_is_running(where: str) -> None:
    async def main() -> None:
        IN_TOOL.clear()
        GO_ON[:] = [asyncio.Event()]
        async with Perdure(where, [works, fails, silent], settings=SETTINGS, clock=ManualClock()) as app:
            handle = await app.start(works, id="works")
            driving = asyncio.create_task(handle.result())
            await until(lambda: len(IN_TOOL) == 2)
            info = await handle.info()
            assert info.said == "waiting for two of them"
            assert [(one.call, one.tool, one.attempt) for one in info.running] == [(2, "slow", 1), (3, "slow", 1)]
            assert all(one.since == info.created for one in info.running)  # the clock stands still
            assert info.failure is None
            record = run_record(read_run(app.reading, "works"), loader(app.reading))
            assert (record["said"], record["failure"]) == ("waiting for two of them", None)
            assert [(one["call"], one["tool"], one["attempt"]) for one in record["running"]] == [(2, "slow", 1), (3, "slow", 1)]
            GO_ON[0].set()
            assert await driving == 5
            assert (await handle.info()).running == ()

            await app.start(fails, id="fails")
            failed = await app.drive("fails")
            assert failed.failure == FailureInfo("Fatal", "fatal", "no such order")
            assert (failed.said, failed.error) == ("about to fail", "Fatal: no such order")
            assert (await app.handle("fails").info()) == failed
            await app.run(silent, id="silent")
            infos = {info.id: info for info in await app.list()}
            assert structs.replace(infos["fails"], cursor="") == failed
            assert (infos["silent"].said, infos["silent"].failure, infos["silent"].running) == (None, None, ())
            assert infos["works"].said == "waiting for two of them"

    asyncio.run(main())
    with closing(open_store(where)) as store:
        assert store.current(["silent", "nobody"]) == {"silent": Current(), "nobody": Current()}
        assert store.current([]) == {}


def test_show_has_the_thoughts_and_decisions(where: str) -> None:
    async def main() -> None:
        GO_ON[:] = [asyncio.Event()]
        GO_ON[0].set()
        async with Perdure(where, [works, fails], settings=SETTINGS, clock=ManualClock()) as app:
            await app.run(works, id="works")
            await app.start(fails, id="fails")
            await app.drive("fails")

    asyncio.run(main())
    with closing(open_store(where)) as store:
        load = loader(store)
        record = run_record(read_run(store, "works"), load)
        assert [(one["seq"], one["text"]) for one in record["thoughts"]] == [(3, "two at once will do")]
        (decided,) = record["decisions"]
        assert (decided["choice"], decided["among"], decided["reason"]) == ("both", ["both", "one"], "it is quicker")
        assert run_record(read_run(store, "works", 2), load)["thoughts"] == []
        assert run_record(read_run(store, "fails"), load)["failure"] == {"type": "Fatal", "kind": "fatal", "message": "no such order"}


def test_an_attempt_that_was_cut_off_with_its_worker_is_not_running(where: str) -> None:
    async def main() -> None:
        IN_TOOL.clear()
        GO_ON[:] = [asyncio.Event()]
        async with Perdure(where, [works], settings=SETTINGS, clock=ManualClock()) as app:
            await app.start(works, id="works")
            driving = asyncio.create_task(app.drive("works", wait=False))
            await until(lambda: len(IN_TOOL) == 2)
            app.abort()
            await driving

    asyncio.run(main())
    with closing(open_store(where)) as store:
        assert store.current(["works"])["works"].running == ()
        record = run_record(read_run(store, "works"), loader(store))
        assert record["running"] == []
        assert [call["phase"] for call in record["calls"]] == ["completed", "started", "started"]


def test_the_conversation_of_a_run_can_be_read_before_its_end(where: str) -> None:
    payer = ReAct("payer", model=Scripted([uses(use("pay", cents=5)), "done"]), tools=[pay])

    async def main() -> tuple[list[dict[str, Any]], ...]:
        IN_TOOL.clear()
        GO_ON[:] = [asyncio.Event()]
        async with Perdure(where, [payer], settings=SETTINGS, clock=ManualClock()) as app:
            handle = await app.start(payer, "pay it", id="r")
            before = await app.transcript("r")
            driving = asyncio.create_task(handle.result())
            await until(lambda: IN_TOOL)
            during = await app.transcript("r")
            GO_ON[0].set()
            await driving
            return before, during, await app.transcript("r")

    before, during, after = asyncio.run(main())
    assert [one["text"] for one in before] == ["pay it"]
    assert [one["role"] for one in during] == ["user", "assistant", "tool"]
    assert during[-1]["text"] == "pay has no result yet: it is under way"
    assert [one["text"] for one in after[2:]] == ["paid 5", "done"]


def test_the_blocking_app_has_them_too(tmp_path: Path) -> None:
    with sync.Perdure(f"sqlite:///{tmp_path / 'db'}", [fails]) as app:
        app.start(fails, id="fails")
        info = app.drive("fails")
    assert info.failure == FailureInfo("Fatal", "fatal", "no such order")
