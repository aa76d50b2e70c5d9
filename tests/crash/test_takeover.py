"""Runs that change their worker: dead workers, workers that wake up late, workers that share, clocks that differ.

Four more cases are in scenarios.py, because test_guards_can_fail.py runs them with and without their guard: a late
write, a run that is held, a loop that is blocked and a run that kills its workers.
"""

from __future__ import annotations

import os
import signal

import pytest
from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.scenarios import SHORT, check_a_sleeping_worker_is_fenced, check_one_effect_each, claims
from tests.crash.world import KILLED, World


def test_a_worker_that_sleeps_past_its_lease_is_fenced_at_its_first_write_and_its_tools_are_stopped(world: World) -> None:
    check_a_sleeping_worker_is_fenced(world)


def test_a_once_call_of_a_sleeping_worker_is_put_to_a_person_and_never_made_twice(world: World) -> None:
    world.begin(r=[["deed", "o", 0.3]])
    zombie = world.start(victims.serve, settings=SHORT)
    world.ledger.wait_for(lambda lines: len(lines) == 1)
    world.freeze(zombie)
    try:
        outcome = world.finish("r", **SHORT)
    finally:
        os.kill(zombie, signal.SIGCONT)
    assert outcome["r"]["status"] == "needs_attention"
    world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
    os.kill(zombie, signal.SIGTERM)
    assert world.wait(zombie) == 0
    check_one_effect_each(world, "r", ["o"])
    row, _ = world.look("r")
    assert row is not None
    assert row.status == "needs_attention"
    check_journal(world, "r")


def test_two_workers_share_runs_and_no_run_is_driven_twice(world: World) -> None:
    runs = {f"r{n}": [["deed", f"a{n}", 0.01], ["deed", f"b{n}", 0.01]] for n in range(12)}
    world.begin(**runs)
    pids = [world.start(victims.serve, until=list(runs), settings={"concurrency": 3}) for _ in range(2)]
    assert [world.wait(pid) for pid in pids] == [0, 0], world.log()
    for n, run_id in enumerate(runs):
        check_one_effect_each(world, run_id, [f"a{n}", f"b{n}"])
        check_journal(world, run_id)
        assert len(claims(world, run_id)) == 1
    assert {line["pid"] for line in world.ledger.lines()} == set(pids)


def test_all_twenty_runs_of_a_killed_worker_are_finished_by_another(world: World) -> None:
    runs = {f"r{n}": [["work", f"a{n}", 0.005 * n], ["step", f"b{n}", 0.01], ["work", f"c{n}", 0.01]] for n in range(20)}
    world.begin(**runs)
    victim = world.start(victims.serve)
    world.ledger.wait_for(lambda lines: sum(line["fact"] == "effect" for line in lines) >= 15)
    os.kill(victim, signal.SIGKILL)
    assert world.wait(victim) == KILLED
    outcome = world.finish(*runs)
    for n, run_id in enumerate(runs):
        assert outcome[run_id]["output"] == [f"a{n} done", f"b{n} done", f"c{n} done"], outcome[run_id]
        keyed = [line["what"] for line in world.ledger.effects(run=run_id) if line["what"][0] != "b"]
        assert sorted(keyed) == [f"a{n}", f"c{n}"]
        check_journal(world, run_id)
    assert any(claim.proven_dead for run_id in runs for claim in claims(world, run_id))


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_a_wall_clock_that_is_wrong_by_an_hour_harms_no_run(world: World, shift_s: float) -> None:
    """On SQLite two workers whose clocks differ by an hour may take runs from each other.

    The guard prevents double effects.

    On PostgreSQL the database judges leases, and no run is taken.
    """
    runs = {f"r{n}": [["work", f"a{n}", 0.02], ["work", f"b{n}", 0.02]] for n in range(6)}
    world.begin(**runs)
    pids = [world.start(victims.serve, until=list(runs), clock=clock, settings={"concurrency": 2}) for clock in ([], [shift_s])]
    assert [world.wait(pid) for pid in pids] == [0, 0], world.log()
    for n, run_id in enumerate(runs):
        row, _ = world.look(run_id)
        assert row is not None
        assert row.status == "succeeded", row
        check_one_effect_each(world, run_id, [f"a{n}", f"b{n}"])
        check_journal(world, run_id)
        if world.dialect == "postgres":
            assert [claim.takeover for claim in claims(world, run_id)] == [False]


@pytest.mark.parametrize("dialect", ["postgres"], indirect=True)
@pytest.mark.parametrize("wrong", ["holder", "onlooker"])
def test_a_wall_clock_that_is_wrong_by_an_hour_takes_nothing_from_a_worker_that_lives(world: World, wrong: str) -> None:
    """By the clock of either its last sign of life is an hour old; by the database's clock, which decides, it is not."""
    world.begin(r=[["deed", "o", 0.6]])
    jump = world.folder / "jump"
    behind, ahead = ([-3600.0, str(jump)], []) if wrong == "holder" else ([], [3600.0])
    holder = world.start(victims.drive, run_id="r", report=world.report(), clock=behind, settings=SHORT)
    world.ledger.wait_for(lambda lines: len(lines) == 1)
    jump.touch()
    onlooker = world.start(victims.serve, until=["r"], clock=ahead, settings=SHORT)
    codes = world.wait(holder), world.wait(onlooker)
    assert codes == (0, 0), world.log()
    assert [claim.takeover for claim in claims(world, "r")] == [False], "it was taken from a worker that lives"
    assert {line["pid"] for line in world.ledger.lines()} == {holder}
    check_one_effect_each(world, "r", ["o"])
    check_journal(world, "r")


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_a_wall_clock_that_jumps_by_an_hour_inside_a_run_loses_nothing(world: World, shift_s: float) -> None:
    world.begin(r=[["deed", "a", 0.1], ["deed", "b", 0], ["work", "c", 0]])
    jump = world.folder / "jump"
    report = world.report()
    pid = world.start(victims.drive, run_id="r", report=report, clock=[shift_s, str(jump)])
    world.ledger.wait_for(lambda lines: len(lines) == 1)
    jump.touch()
    assert world.wait(pid) == 0
    assert world.told(report)["output"] == ["a done", "b done", "c done"]
    check_one_effect_each(world, "r", ["a", "b", "c"])
    check_journal(world, "r")


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_resumed_under_a_wall_clock_that_is_wrong_by_an_hour_a_keyed_call_is_not_doubled(world: World, shift_s: float) -> None:
    world.begin(r=[["work", "a", 0.2]])
    victim = world.start(victims.serve)
    world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
    os.kill(victim, signal.SIGKILL)
    assert world.wait(victim) == KILLED
    report = world.report()
    assert world.run(victims.drive, run_id="r", report=report, clock=[shift_s]) == 0
    # A clock that stands before the first attempt says nothing about the key's age: then a person is asked.
    assert world.told(report)["status"] == ("succeeded" if shift_s > 0 else "needs_attention")
    check_one_effect_each(world, "r", ["a"])
    check_journal(world, "r")
