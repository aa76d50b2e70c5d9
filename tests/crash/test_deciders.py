"""Two people decide at the same moment, or a decision meets the expiry: real processes, and one result each (T17)."""

from __future__ import annotations

import os
import signal

import pytest
from tests.crash import people, victims
from tests.crash.waiting_checks import approval_rows, check_approvals
from tests.crash.waiting_scenarios import check_one_of_two_deciders_wins
from tests.crash.world import KILLED, RUN, World

ROUNDS = {"sqlite": 200, "postgres": 100}
QUESTIONS = 40


@pytest.mark.parametrize("held", [False, True])
def test_of_two_deciders_one_wins_and_the_other_is_told(world: World, held: bool) -> None:
    check_one_of_two_deciders_wins(world, ROUNDS[world.dialect], held=held)


@pytest.mark.parametrize("killed", [False, True])
def test_a_yes_that_meets_the_expiry_counts_or_comes_too_late_and_never_both(world: World, killed: bool) -> None:
    """A worker expires an approval while a person approves it; the worker is killed in the middle of that, or not."""
    assert world.run(victims.start, runs={RUN: [QUESTIONS, 6.0, 0.1]}, agent="council") == 0
    worker = world.start(victims.serve, until=[RUN])
    world.wait_until(lambda: len(approval_rows(world, RUN)) == QUESTIONS, "everything has been asked")
    report = world.report()
    late = world.start(people.latecomer, report=report, run_id=RUN, seed=7)
    if killed:
        for settled in (6, 15, 25):
            world.wait_until(lambda settled=settled: _settled(world) >= settled, f"{settled} are settled")  # type: ignore[misc]
            os.kill(worker, signal.SIGKILL)
            assert world.wait(worker) == KILLED
            worker = world.start(victims.serve, until=[RUN])
    assert world.wait(late) == 0, world.log()
    assert world.wait(worker) == 0, world.log()
    answers = world.told(report)
    expected = {approval: "approved" if answer == "counted" else "expired" for approval, answer in answers.items()}
    assert check_approvals(world) == expected
    assert {"approved", "expired"} == set(expected.values()), "they never met"


def _settled(world: World) -> int:
    return sum(row.standing.status != "pending" for row in approval_rows(world, RUN))
