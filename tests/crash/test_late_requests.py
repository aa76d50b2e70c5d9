"""A request that was sent arrives later than its sender's death or reset. “Not found” is not believed before then (T31)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.late import TIMEOUT_S, LateService
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


def _check_happened_once(world: World, service: LateService) -> None:
    outcome = world.finish("r", **SETTINGS)
    assert outcome["r"]["output"] == "done", outcome
    assert len(service.done) == 1
    check_journal(world, "r")
