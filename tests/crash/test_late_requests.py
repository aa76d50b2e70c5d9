"""A request arrives later than the death or the reset of its sender. “Not found” counts only after that time (T31)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.late import TIMEOUT_S, LateService
from tests.crash.scenarios import SHORT
from tests.crash.world import KILLED, World

SETTINGS = {"reconcile_margin_s": 0.2, "unknown_deadline_s": TIMEOUT_S}


@pytest.fixture
def service() -> Iterator[LateService]:
    opened = LateService()
    yield opened
    opened.close()


@pytest.mark.long
@pytest.mark.parametrize("tool", ["order_isolated", "order_without_timeout"])
def test_a_request_that_arrives_after_its_worker_was_killed_happens_once(world: World, service: LateService, tool: str) -> None:
    assert world.run(victims.start, agent="orderer", runs={"r": [tool, service.orders_port, service.questions_port]}) == 0
    victim = world.start(victims.serve, settings=SETTINGS)
    assert service.queued.wait(60), world.log()
    os.kill(victim, signal.SIGKILL)
    assert world.wait(victim) == KILLED
    _check_happened_once(world, service)


@pytest.mark.long
def test_a_request_that_arrives_after_its_line_broke_happens_once(world: World, service: LateService) -> None:
    args = ["order_over_a_line_that_breaks", service.orders_port, service.questions_port]
    assert world.run(victims.start, agent="orderer", runs={"r": args}) == 0
    _check_happened_once(world, service)


@pytest.mark.long
def test_a_sync_tool_that_waited_for_a_thread_while_its_worker_slept_is_not_begun(world: World) -> None:
    """The worker has one thread, which another tool uses.

    When the worker wakes up, another worker has made the calls.
    """
    free = world.folder / "free"
    service = LateService(in_queue_s=0.0)
    try:
        assert world.run(victims.start, agent="holder", runs={"first": [str(free)]}) == 0
        sleeper = world.start(victims.serve, settings={**SHORT, "threads": 1})
        world.wait_until(lambda: _intents(world, "first") == 1, "the thread is taken")
        calls = {run_id: ["order_in_turn", service.orders_port, service.questions_port] for run_id in ("a", "b")}
        assert world.run(victims.start, agent="orderer", runs=calls) == 0
        world.wait_until(lambda: [_intents(world, run_id) for run_id in calls] == [1, 1], "both calls wait for a thread")
        world.freeze(sleeper)
        free.touch()
        try:
            outcome = world.finish("first", "a", "b", **SHORT)
        finally:
            os.kill(sleeper, signal.SIGCONT)
        assert [outcome[run_id]["output"] for run_id in ("first", "a", "b")] == ["free", "done", "done"], outcome
        os.kill(sleeper, signal.SIGTERM)
        assert world.wait(sleeper) == 0
        assert len(service.done) == len(set(service.done)) == 2
    finally:
        service.close()


def _intents(world: World, run_id: str) -> int:
    return sum(event.type == "tool_call_initiated" for event in world.peek(run_id)[1])


def _check_happened_once(world: World, service: LateService) -> None:
    outcome = world.finish("r", **SETTINGS)
    assert outcome["r"]["output"] == "done", outcome
    assert len(service.done) == 1
    check_journal(world, "r")
