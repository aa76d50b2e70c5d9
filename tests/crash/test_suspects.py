"""Runs whose workers died repeatedly.

Innocent runs continue at once, and halving finds the run that kills (T26, T34).
"""

from __future__ import annotations

import itertools
import os
import signal

from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.scenarios import check_one_effect_each, claims
from tests.crash.world import KILLED, World

from perdure.core.events import AttentionNeeded

RUNS = 20
INNOCENT = 23
LIMIT = 5  # the default of poison_limit


def test_runs_whose_worker_was_killed_twice_are_all_under_way_at_once_in_the_next_one(world: World) -> None:
    """Each is in a call that takes ten minutes: a worker that took them one by one would have one of them under way."""
    runs = {f"r{n}": [["step", f"w{n}", 600]] for n in range(RUNS)}
    world.begin(**runs)
    for _ in range(3):
        worker = world.start(victims.serve)
        world.ledger.wait_for(lambda lines, pid=worker: {line["run"] for line in lines if line["pid"] == pid} == set(runs))  # type: ignore[misc]
        os.kill(worker, signal.SIGKILL)
        assert world.wait(worker) == KILLED
    for run_id in runs:
        assert [claim.takeover for claim in claims(world, run_id)] == [False, True, True]


def test_a_run_that_kills_its_workers_is_found_by_halving_and_the_runs_beside_it_succeed(world: World) -> None:
    """Twice they die together without being suspects, then in groups of at most 24, 12, 6, 3 and 1."""
    innocent = {f"i{n:02}": [["work", f"w{n}", 0.3]] for n in range(INNOCENT)}
    poison_first = {"bad": [["poison", "p", 0]], **innocent}
    world.begin(**poison_first)
    deaths, most = 0, 2 + 4 + (LIMIT - 2)
    while (code := world.run(victims.serve, until=list(poison_first), settings={"poison_limit": LIMIT})) != 0:
        assert code == KILLED, world.log()
        deaths += 1
        assert deaths <= most, f"{deaths} workers have died, and {most} are enough to find one run among {INNOCENT + 1}"
    row, events = world.look("bad")
    assert row is not None
    assert (row.status, row.attention) == ("needs_attention", "poison")
    assert len(world.ledger.lines("begun", "bad")) == deaths
    beside = [claim.lost_with for claim in claims(world, "bad") if claim.takeover]
    assert beside[-1] == 0, "it is blamed only for deaths that no other run can be blamed for"
    assert all(later + 1 <= max((sooner + 1) // 2, 1) for sooner, later in itertools.pairwise(beside[2:])), beside
    check_journal(world, "bad")
    for n, run_id in enumerate(innocent):
        row, events = world.look(run_id)
        assert row is not None
        assert row.status == "succeeded", (run_id, row)
        assert not [event for event in events if isinstance(event.body, AttentionNeeded)], f"{run_id} was blamed"
        check_one_effect_each(world, run_id, [f"w{n}"])
        check_journal(world, run_id)
