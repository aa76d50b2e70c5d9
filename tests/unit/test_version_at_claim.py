"""A run that has not begun takes the version of the worker that claims it; and a run can be started without its code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, perdure, run, status_of, until

from perdure import Agent, Budget, Conflict, InvalidInput, NotEncodable, Perdure, ReAct, Run, RunFailed, UnknownAgent, agent, tool
from perdure.core.events import BudgetDeclared, RunAdopted, RunClaimed, RunCreated
from perdure.core.events import RunFailed as RunFailedEvent
from perdure.core.state import fold
from perdure.errors import WrongVersion
from perdure.inspect.verify import verify_run
from perdure.models import Scripted


@tool(effect="once")
async def act(what: str) -> str:
    return what


def support(version: str, **options: Any) -> Agent[Any, Any]:
    async def support(run: Run, order: str, cents: int = 5) -> str:
        return f"{await act(order)} {cents} by version {run.version}"

    return Agent(support, version=version, **options)


OLD, NEW = support("1"), support("2")


def is_sound(app: Perdure, run_id: str) -> bool:
    row = app.store.get(run_id)
    assert row is not None
    verdict = verify_run(app.store, row)
    assert verdict.problem is None, verdict
    return True


def bodies(app: Perdure, run_id: str, kind: type) -> list[Any]:
    return [event.body for event in app.store.read(run_id) if isinstance(event.body, kind)]


# -- the version ------------------------------------------------------------------------------------------------------
def test_a_queued_run_goes_on_with_new_code_without_a_word(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", [OLD]) as app:
            handle = await app.start(OLD, "o-1", id="r")
            assert (await handle.info()).version == ""
        async with perdure(tmp_path / "db", [NEW]) as app:
            assert await app.handle("r").result() == "o-1 5 by version 2"
            assert (await app.handle("r").info()).version == "2"
            (created,), (claimed,) = bodies(app, "r", RunCreated), bodies(app, "r", RunClaimed)
            assert (created.version, claimed.version) == ("", "2")
            assert is_sound(app, "r")

    run(main())


def test_a_version_by_name_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", [NEW]) as app:
            await app.start(NEW, "o-1", id="r", version="1")
            with pytest.raises(WrongVersion, match="begun with version 1"):
                await app.drive("r")
            assert (await app.handle("r").info()).version == "1"
        async with perdure(tmp_path / "db", [OLD]) as app:
            assert await app.handle("r").result() == "o-1 5 by version 1"

    run(main())


def test_an_older_version_that_the_app_also_serves_is_meant_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", [OLD, NEW]) as app:
            assert await app.run(OLD, "o-1", id="old") == "o-1 5 by version 1"
            assert await app.run(NEW, "o-1", id="new") == "o-1 5 by version 2"
            assert await app.run("support", "o-1", id="name") == "o-1 5 by version 2"

    run(main())


def test_a_child_has_the_version_that_its_parents_code_means(tmp_path: Path) -> None:
    child = support("1", queue="later")

    @agent(version="1")
    async def parent(run: Run) -> str:
        return str(await child("o-1"))

    async def main() -> None:
        async with Perdure(
            f"sqlite:///{tmp_path}/db", [parent], settings=SETTINGS, clock=ManualClock(), queues=["default"]
        ) as app:  # it does not serve the queue of the child
            await app.start(parent, id="p")
            stop = asyncio.Event()
            working = asyncio.create_task(app.work(stop=stop))
            await until(lambda: app.store.get("p/1") is not None)
            stop.set()
            await working
            assert (await app.handle("p/1").info()).version == "1"
        async with perdure(tmp_path / "db", [NEW, parent]) as app:
            assert await app.handle("p").result() == "o-1 5 by version 1"

    run(main())


# -- started by name --------------------------------------------------------------------------------------------------
def test_a_run_is_started_by_the_agents_name_without_its_code(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", []) as app:
            handle = await app.start("support", order="o-1", id="r", tenant="t", priority=3, actor="ann", queue="q")
            assert (await app.start("support", order="o-1", id="r", tenant="t")).id == handle.id
            with pytest.raises(Conflict, match="another input"):
                await app.start("support", order="o-2", id="r", tenant="t")
            with pytest.raises(UnknownAgent, match="agents="):
                await app.run("support", order="o-1")
        async with perdure(tmp_path / "db", [NEW]) as app:
            assert await app.handle("r").result() == "o-1 5 by version 2"
            info = await app.handle("r").info()
            assert (info.tenant, info.priority, info.actor, info.queue) == ("t", 3, "ann", "q")

    run(main())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "the argument order is missing; it takes order, cents"),
        ({"order": "o-1", "colour": "red"}, "the argument colour is unknown; it takes order, cents"),
        ({"order": "o-1", "cents": "many"}, "parameter cents"),
        ({"order": ["o-1"]}, "parameter order"),
    ],
)
def test_an_input_that_does_not_fit_fails_the_run_with_one_clear_error(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", []) as app:
            await app.start("support", **given, id="r")
        async with perdure(tmp_path / "db", [NEW]) as app:
            with pytest.raises(RunFailed, match=why) as failed:
                await app.handle("r").result()
            assert "the input of the run does not fit agent support in version 2" in str(failed.value)
            (end,) = bodies(app, "r", RunFailedEvent)
            assert (end.failure.type, end.failure.kind) == ("InvalidInput", "refused")
            assert end.failure.traceback is None, "no line of perdure's own code"
            assert fold(app.store.read("r")).attempts == 0

    run(main())


def test_a_run_that_failed_for_its_input_goes_on_with_code_that_takes_it(tmp_path: Path) -> None:
    @agent(name="support", version="3")
    async def newest(run: Run, order: str, colour: str) -> str:
        return f"{order} {colour}"

    async def main() -> None:
        async with perdure(tmp_path / "db", []) as app:
            await app.start("support", order="o-1", colour="red", id="r")
        async with perdure(tmp_path / "db", [NEW]) as app:
            with pytest.raises(RunFailed):
                await app.handle("r").result()
        async with perdure(tmp_path / "db", [newest]) as app:
            await app.retry("r", by="ann")
            assert await app.handle("r").result() == "o-1 red"

    run(main())


def test_code_that_another_version_started_is_checked_too(tmp_path: Path) -> None:
    @agent(name="support", version="3")
    async def renamed(run: Run, number: str) -> str:
        return number

    async def main() -> None:
        async with perdure(tmp_path / "db", [OLD]) as app:
            await app.start(OLD, "o-1", id="r")
        async with perdure(tmp_path / "db", [renamed]) as app:
            with pytest.raises(RunFailed, match=r"does not fit agent support in version 3.*number"):
                await app.handle("r").result()

    run(main())


def test_arguments_by_place_and_values_that_are_no_json_need_the_code(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", []) as app:
            with pytest.raises(InvalidInput, match=r"'support': its code is not known here.*app.start\('support', name=value\)"):
                await app.start("support", "o-1")
            with pytest.raises(NotEncodable, match="have to be JSON values"):
                await app.start("support", order=object())
            with pytest.raises(InvalidInput, match="the agent name"):
                await app.start("no name", order="o-1")
            with pytest.raises(InvalidInput, match="the version"):
                await app.start("support", order="o-1", version="")
            assert await app.list() == []

    run(main())


def test_a_conversation_is_started_by_name_and_checked_like_one_with_the_code(tmp_path: Path) -> None:
    def chat() -> ReAct:
        return ReAct("chat", model=Scripted(["hello"]))

    async def main() -> None:
        async with perdure(tmp_path / "db", []) as app:
            await app.start("chat", prompt="hi", id="good")
            await app.start("chat", prompt=" ", id="empty")
        async with perdure(tmp_path / "db", [chat()]) as app:
            assert await app.handle("good").result() == "hello"
            with pytest.raises(RunFailed, match="nothing is said in it"):
                await app.handle("empty").result()

    run(main())


# -- the budget that the code declares ----------------------------------------------------------------------------------
def test_the_budget_that_the_code_declares_holds_for_a_run_started_by_name(tmp_path: Path) -> None:
    async def greedy(run: Run) -> int:
        done = 0
        for _ in range(5):
            await act("more")
            done += 1
        return done

    declared = Agent(greedy, version="1", budget=Budget(calls=2, on_exceed="fail"))

    async def main() -> None:
        async with perdure(tmp_path / "db", []) as app:
            await app.start("greedy", id="r")
            await app.start("greedy", id="own", budget=Budget(calls=9))
        async with perdure(tmp_path / "db", [declared]) as app:
            with pytest.raises(RunFailed, match="budget"):
                await app.handle("r").result()
            assert fold(app.store.read("r")).attempts == 2
            (told,) = bodies(app, "r", BudgetDeclared)
            assert told.limits.calls == 2
            (ledger,) = app.store.ledgers("r")
            assert (ledger.limits.calls, ledger.spent.calls) == (2, 2)
            assert await app.handle("own").result() == 5, "a budget that the start names replaces that of the code"
            assert bodies(app, "own", BudgetDeclared) == []
            assert [status_of(app, run_id) for run_id in ("r", "own")] == ["failed", "succeeded"]
            for run_id in ("r", "own"):
                assert is_sound(app, run_id)

    run(main())


# -- forks --------------------------------------------------------------------------------------------------------------
def test_a_stored_rehearsal_with_the_code_of_the_run_records_no_adoption(tmp_path: Path) -> None:
    async def main() -> None:
        async with perdure(tmp_path / "db", [OLD]) as app:
            await app.run(OLD, "o-1", id="r")
            await app.fork("r", edits={1: "o-2"}, id="same", by="ann")
        async with perdure(tmp_path / "db", [NEW]) as app:
            await app.fork("r", edits={1: "o-2"}, id="other", by="ann")
            assert bodies(app, "same", RunAdopted) == [], "the run took version 1 with its claim"
            assert [one.version for one in bodies(app, "other", RunAdopted)] == ["2"]

    run(main())
