"""Two workers at once, over many runs and over a single run; one of them is killed repeatedly."""

from __future__ import annotations

import os
import signal

from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.scenarios import check_one_effect_each, claims
from tests.crash.world import KILLED, World


def kill(world: World, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert world.wait(pid) == KILLED


def test_two_workers_over_many_runs_of_which_one_is_killed_every_few_effects_lose_and_repeat_nothing(world: World) -> None:
    runs = {f"r{n}": [["work", f"{n}-{m}", 0.01] for m in range(4)] for n in range(8)}
    world.begin(**runs)
    settings = {"concurrency": 3, "poison_limit": 100}
    alive = [world.start(victims.serve, settings=settings) for _ in range(2)]
    for death in range(6):
        world.ledger.wait_for(lambda lines, enough=4 * (death + 1): sum(line["fact"] == "effect" for line in lines) >= enough)  # type: ignore[misc]
        kill(world, alive.pop(0))
        alive.append(world.start(victims.serve, settings=settings))
    outcome = world.finish(*runs)
    for pid in alive:
        os.kill(pid, signal.SIGTERM)
        assert world.wait(pid) == 0, world.log()
    for n, run_id in enumerate(runs):
        whats = [f"{n}-{m}" for m in range(4)]
        assert outcome[run_id]["output"] == [f"{what} done" for what in whats], outcome[run_id]
        check_one_effect_each(world, run_id, whats)
        check_journal(world, run_id)
    assert any(claim.proven_dead for run_id in runs for claim in claims(world, run_id))


def test_two_processes_that_want_the_same_run_drive_it_one_after_the_other_each_until_it_is_killed(world: World) -> None:
    world.begin(r=[["work", str(place), 0.2] for place in range(4)])
    reports = [world.report(), world.report()]
    alive = [world.start(victims.drive, run_id="r", report=report) for report in reports]
    for place in range(2):
        lines = world.ledger.wait_for(lambda lines, what=str(place): any(line["what"] == what for line in lines))  # type: ignore[misc]
        driver = lines[-1]["pid"]
        kill(world, driver)
        reports.append(world.report())
        alive = [pid for pid in alive if pid != driver]
        alive.append(world.start(victims.drive, run_id="r", report=reports[-1]))
    assert [world.wait(pid) for pid in alive] == [0, 0], world.log()
    outputs = [world.told(report)["output"] for report in reports if os.path.exists(report)]
    assert outputs == [["0 done", "1 done", "2 done", "3 done"]] * 2, "both that live know how it has ended"
    check_one_effect_each(world, "r", ["0", "1", "2", "3"])
    assert [claim.takeover for claim in claims(world, "r")] == [False, True, True]
    check_journal(world, "r")
