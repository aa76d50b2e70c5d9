"""The same app for code without asyncio."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS

from perdure import (
    Agent,
    Budget,
    Conflict,
    InvalidInput,
    NotFound,
    NotPermitted,
    ResultTimeout,
    Run,
    RunCancelled,
    RunFailed,
    StoreError,
    WrongVersion,
    agent,
    tool,
)
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


@agent(version="1")
async def asking(run: Run, expires: float | None = None) -> list[Any]:
    decision = await run.request_approval("refund", {"cents": 9}, by="ann", editable="cents", expires=expires)
    if not decision.granted:
        raise ValueError(decision.outcome)
    return [decision.input, await run.receive("chat")]


AGENTS: list[Agent[Any, Any]] = [doubler, sleeper, failing, payer, asking]


def test_a_run_from_blocking_code(tmp_path: Path) -> None:
    with Perdure(f"sqlite:///{tmp_path / 'db'}", AGENTS, settings=SETTINGS) as app:
        assert app.run(doubler, 21, id="r") == 42
        handle = app.handle("r")
        assert handle.status() == "succeeded"
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
        assert app.reading.get(doubt.id) is not None


def test_approvals_signals_and_pauses_from_blocking_code() -> None:
    with Perdure("sqlite://", AGENTS, settings=SETTINGS) as app:
        handle = app.start(asking, id="a")
        assert app.drive("a").status == "waiting_approval"
        (asked,) = app.approvals(run_id="a")
        with pytest.raises(NotPermitted):
            app.approve(asked.approval, by="bob")
        assert app.approve(asked.approval, by="ann", edit={"cents": 7}, note="less").standing.status == "approved"
        with pytest.raises(Conflict, match="approved by ann"):
            app.reject(asked.approval, by="ann", reason="late")
        app.pause("a", reason="lunch")
        assert handle.status() == "paused"
        assert app.unpause("a") == ["a"]
        app.signal("a", "chat", {"more": 1}, key="k")
        app.signal("a", "chat", {"more": 2}, key="k")
        assert handle.result() == [{"cents": 7}, {"more": 1}]
        assert app.approvals() == []


def test_waiting_for_a_person_who_has_an_hour_does_not_take_the_run_up_again_and_again() -> None:
    with Perdure("sqlite://", AGENTS, settings=SETTINGS) as app:
        handle = app.start(asking, id="a", expires=3600)
        with pytest.raises(ResultTimeout):
            handle.result(timeout=0.5)
        assert [event.type for event in handle.events()].count("run_claimed") == 1
        app.approve(app.approvals()[0].approval, by="ann")
        app.signal("a", "chat", 1)
        assert handle.result(timeout=60) == [{"cents": 9}, 1]


def test_rejection_costs_and_top_ups_from_blocking_code() -> None:
    with Perdure("sqlite://", AGENTS, settings=SETTINGS) as app:
        handle = app.start(asking, id="a")
        app.drive("a")
        app.reject(app.approvals()[0].approval, by="ann", reason="no")
        with pytest.raises(RunFailed, match="rejected"):
            handle.result()
        doubles = app.start(doubler, 2, id="d", budget=Budget(calls=0))
        assert app.drive("d").status == "needs_attention"
        assert app.unpause("d", add=Budget(calls=1)) == ["d"]
        assert doubles.result() == 4
        assert [(row.group, row.calls) for row in app.costs("tool")] == [("double", 1)]
        assert [row.group for row in app.costs(tenant="default")] == ["doubler"]


def test_another_version_goes_on_after_it_was_adopted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'db'}"
    with Perdure(url, [doubler], settings=SETTINGS) as app:
        app.start(doubler, 3, id="d", version="1")
    newer = agent(name="doubler", version="2")(doubler.fn)
    with Perdure(url, [newer], settings=SETTINGS) as app:
        with pytest.raises(WrongVersion):
            app.drive("d")
        app.adopt("d", by="ann")
        assert app.handle("d").result() == 6


def test_a_worker_in_a_thread_takes_only_from_its_queues() -> None:
    with Perdure("sqlite://", AGENTS, settings=SETTINGS, queues=["fast"]) as app:
        slow, fast = app.start(doubler, 1, queue="slow"), app.start(doubler, 2, queue="fast")
        worker = threading.Thread(target=app.work)
        worker.start()
        assert [event.type for event in fast.follow()][-1] == "run_succeeded"
        app.drain()
        worker.join(timeout=60)
        assert not worker.is_alive()
        assert slow.status() == "queued"


def test_a_worker_in_a_thread_is_drained_from_another() -> None:
    with Perdure("sqlite://", AGENTS, settings=SETTINGS) as app:
        handle = app.start(doubler, 4)
        worker = threading.Thread(target=app.work)
        worker.start()
        assert [event.type for event in handle.follow()][-1] == "run_succeeded"
        app.drain()
        worker.join(timeout=60)
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
            thread.join(timeout=60)
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
