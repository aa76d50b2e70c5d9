"""The same app for code without asyncio."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS

from perdure import Agent, Conflict, InvalidInput, NotFound, ResultTimeout, Run, RunCancelled, RunFailed, StoreError, agent, tool
from perdure.sync import Perdure


@tool(effect="read")
def double(number: int) -> int:
    return number * 2


@tool(effect="once")
def pay() -> str:
    raise TimeoutError("no answer")


@agent(version="1")
async def doubler(run: Run, number: int) -> int:
    return await double(number)


@agent(version="1")
async def sleeper(run: Run, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


@agent(version="1")
async def failing(run: Run) -> None:
    raise ValueError("no")


@agent(version="1")
async def payer(run: Run) -> str:
    return await pay()


AGENTS: list[Agent[Any, Any]] = [doubler, sleeper, failing, payer]


def test_a_run_from_blocking_code(tmp_path: Path) -> None:
    with Perdure(f"sqlite:///{tmp_path / 'db'}", AGENTS, settings=SETTINGS) as app:
        assert app.run(doubler, 21, id="r") == 42
        handle = app.handle("r")
        assert handle.status().status == "succeeded"
        assert handle.result() == 42
        assert [event.seq for event in handle.events()] == [event.seq for event in handle.follow()] == [1, 2, 3, 4, 5]
        assert handle.state().status == "succeeded"
        assert handle.state(at=1).status == "queued"


def test_errors_arrive_as_they_are() -> None:
    with Perdure("sqlite://", AGENTS, settings=SETTINGS) as app:
        with pytest.raises(RunFailed, match="ValueError: no"):
            app.run(failing)
        with pytest.raises(NotFound):
            app.handle("nowhere").status()
        with pytest.raises(InvalidInput, match="number"):
            app.start(doubler, "x")
        app.start(doubler, 1, id="r")
        with pytest.raises(Conflict):
            app.start(doubler, 2, id="r")


def test_steering_from_blocking_code() -> None:
    with Perdure("sqlite://", AGENTS, settings=SETTINGS) as app:
        handle = app.start(sleeper, 3600)
        assert app.drive(handle.id, wait=False).status == "waiting"
        with pytest.raises(ResultTimeout):
            handle.result(timeout=0.02)
        app.cancel(handle.id, reason="enough")
        with pytest.raises(RunCancelled):
            handle.result()
        doubt = app.start(payer)
        assert app.drive(doubt.id).status == "needs_attention"
        app.resolve(doubt.id, 1, happened="receipt")
        assert doubt.result() == "receipt"
        assert app.store.get(doubt.id) is not None


def test_a_worker_in_a_thread_is_drained_from_another() -> None:
    with Perdure("sqlite://", AGENTS, settings=SETTINGS) as app:
        handle = app.start(doubler, 4)
        worker = threading.Thread(target=app.work)
        worker.start()
        assert [event.type for event in handle.follow()][-1] == "run_succeeded"
        app.drain()
        worker.join(timeout=10)
        assert not worker.is_alive()


def test_it_can_be_used_inside_a_running_loop() -> None:
    """Its loop is its own: a notebook, or a handler of a web framework, is no obstacle."""

    async def main() -> int:
        with Perdure("sqlite://", AGENTS, settings=SETTINGS) as app:
            return int(app.run(doubler, 1))

    assert asyncio.run(main()) == 2


def test_many_threads_may_share_one_app() -> None:
    found: list[int] = []
    with Perdure("sqlite://", AGENTS, settings=SETTINGS) as app:
        threads = [threading.Thread(target=lambda at=at: found.append(app.run(doubler, at))) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
    assert sorted(found) == [at * 2 for at in range(8)]


def test_outside_of_its_block_it_says_how_to_use_it() -> None:
    app = Perdure("sqlite://", AGENTS, settings=SETTINGS)
    with pytest.raises(InvalidInput, match="`with Perdure"):
        app.start(doubler, 1)
    with app:
        assert app.run(doubler, 1) == 2
    with pytest.raises(InvalidInput, match="`with Perdure"):
        app.run(doubler, 1)


def test_an_app_that_cannot_be_opened_leaves_no_thread_behind(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(StoreError), Perdure(f"sqlite:///{tmp_path}/no/such/folder/db", AGENTS):
        pass
    assert threading.active_count() == before
