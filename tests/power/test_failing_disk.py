"""A disk whose sync or write fails, once or always, at any operation (section 4).

What perdure reports is true, and stays true if the power fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import pytest
from tests import figures
from tests.power import agents
from tests.power.agents import World
from tests.power.autopsy import examine
from tests.power.disk import Noted, Op, Trouble
from tests.power.lab import Lab, check_effects
from tests.power.scenarios import SCENARIOS, record, resume
from tests.power.told import Told

Failure = Literal["sync fails", "disk full", "write fails", "write fails half way"]
AFTER = 14  # operations: the failed commit, and its repetition


def told_by(log: list[Op]) -> Told:
    """Everything that was said up to the end."""
    told = Told()
    for op in log:
        if isinstance(op, Noted):
            told.note(op.mark)
    return told


@pytest.mark.parametrize("fault", get_args(Failure))
@pytest.mark.parametrize("name", ["one run, with checkpoints", "several runs in one commit"])
def test_a_disk_that_fails_once_costs_nothing_but_time_whether_the_power_goes_or_not(name: str, fault: Failure, folder: Path) -> None:
    scenario, faults = SCENARIOS[name], 0
    lab = Lab(folder / "state", scenario, seed=f"{name} {fault}")
    nth, stride = get_args(Failure).index(fault), 3 if fault == "sync fails" else 23
    while True:
        path = folder / str(nth) / "journal.db"
        path.parent.mkdir()
        trouble = Trouble(fault, nth)
        log = record(scenario, path, trouble)
        if not trouble.struck:
            break
        found = examine(path)
        told_by(log).hold_against(found)
        assert set(found.statuses.values()) == {"succeeded"}, (nth, found.statuses)
        check_effects(agents.WORLD[0], found, f"{fault} at {nth}")
        lab.survey(log, each=1, between=(trouble.place, trouble.place + AFTER))
        faults, nth = faults + 1, nth + stride
    figures.seen("disk faults, once", faults)
    figures.seen(figures.STATES, lab.distinct)
    assert faults >= 10, faults


@pytest.mark.parametrize("fault", get_args(Failure))
def test_a_disk_that_fails_for_ever_is_told_as_it_is_and_the_run_goes_on_on_a_sound_one(fault: Failure, folder: Path) -> None:
    scenario, faults = SCENARIOS["one run, with checkpoints"], 0
    lab = Lab(folder / "state", scenario, seed=fault)
    for nth in range(2 + get_args(Failure).index(fault), 50 if fault == "sync fails" else 330, 6 if fault == "sync fails" else 41):
        path = folder / str(nth) / "journal.db"
        path.parent.mkdir()
        trouble = Trouble(fault, nth, times=float("inf"))
        log = record(scenario, path, trouble)
        assert trouble.struck, nth
        told = told_by(log)
        told.hold_against(examine(path))
        lab.survey(log, each=1, resume_every=40, between=(trouble.place, trouble.place + AFTER))
        # The machine continues, with another disk.
        world = World(before=told.effects)
        assert resume(scenario, path, world) == {run_id: start.output for run_id, start in scenario.runs.items()}
        found = examine(path)
        told.hold_against(found)
        check_effects(world, found, f"{fault} at {nth}")
        faults += 1
    figures.seen("disk faults, for ever", faults)
    figures.seen(figures.STATES, lab.distinct)
    figures.seen("resumed to the end", lab.resumed)
