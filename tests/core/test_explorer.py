"""A million crash points of the run core, and the guards that the core needs: see explorer.py."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from tests import figures
from tests.core.explorer import Effort, Found, Tally, explore
from tests.core.guards import GUARDS, Guard
from tests.core.scenario import CHECKPOINTED, FORKED, REOPENED, SCENARIOS, WALKS, Scenario

# All courses of a run that differ in up to eight places from the ordinary one, and a death at each place of each of them.
WIDE: Effort = [(8, 3000)]
# Two deaths, one after the other: the second at each place of the recovery from the first.
DEEP: Effort = [(3, 100), (2, 8)]
DEEP_POINTS = 1_500
# Six deaths in a row, and everything at random.
WALK: Effort = [(99, 3), (99, 2), (99, 2), (99, 1), (99, 1), (99, 1)]
WALK_POINTS = 1_000
# A person reopens the run, up to three times; workers die before, between and after. Some courses, and some at random.
REOPEN: Effort = [(6, 40), (4, 6), (2, 2)]
REOPEN_WALK: Effort = [(99, 3), (99, 2), (99, 2), (99, 1)]
REOPEN_POINTS = 800
# How many crash points of a scenario are tried: many if the same worlds are left behind repeatedly, fewer if each
# world needs a new recovery. A scenario with a smaller number has no more crash points.
POINTS = {
    "in a row": 8_000,
    "once": 6_000,
    "once with a hook": 80_000,
    "once with a hook, attempts that do not stop": 70_000,
    "keyed": 10_000,
    "keyed, and the clock is set": 10_000,
    "keyed with a hook": 40_000,
    "a person and a hook": 70_000,
    "without a time-out": 100_000,
    "a pair": 4_000,
    "a pair that fails": 60_000,
    "a trio": 12_000,
    "three at once": 90_000,
    "transactions": 50_000,
    "timers": 20_000,
    "a race": 12_000,
    "signals": 90_000,
    "an approval": 6_000,
    "an approval and another clock": 55_000,
    "approvals": 12_000,
    "a message while it asks": 5_000,
    "a message while it asks, late": 8_000,
    "messages while two calls wait": 2_500,
    "children": 12_000,
    "a budget": 6_000,
    "a budget that fails, and another run": 8_000,
    "a rate": 5_000,
    "cancelled": 10_000,
    "cancelled while it asks": 30_000,
    "cancelled with a signal": 30_000,
    "an approval and a drain": 60_000,
    "paused": 50_000,
    "drained": 20_000,
}
# What must have happened in a scenario, in addition to what it names itself. Otherwise an empty scenario would pass.
HAPPENS = {
    "once with a hook": {"look", "hook", "arrives", "vanishes", "in doubt", "tick"},
    "transactions": {"tool fails", "rolled back"},
    "timers": {"clock", "tick"},
    "signals": {"deliver", "deliver all"},
    "an approval": {"settle", "deliver"},
    "a rate": {"answer", "not now"},
    "cancelled": {"cancelled"},
    "drained": {"stop all", "cancelled", "in doubt"},
}
SOAK_POINTS = 10_000_000
_IDS = [scenario.name for scenario in SCENARIOS]


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS, ids=_IDS)
def test_every_promise_holds_wherever_a_worker_dies(scenario: Scenario) -> None:
    least = POINTS[scenario.name]
    tally = explore(scenario, WIDE, most_points=least)
    _count(scenario, tally)
    assert tally.points >= least
    assert tally.moves.keys() >= {"read", "commit", "fenced", *scenario.names, *HAPPENS.get(scenario.name, ())}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=_IDS)
def test_every_promise_holds_when_the_next_worker_dies_too(scenario: Scenario) -> None:
    tally = explore(scenario, DEEP, seed=1, most_points=DEEP_POINTS)
    _count(scenario, tally)
    assert tally.points >= DEEP_POINTS


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("scenario", WALKS, ids=[scenario.name for scenario in WALKS])
def test_every_promise_holds_on_long_ways_at_random(scenario: Scenario, seed: int) -> None:
    tally = explore(scenario, WALK, seed=seed, most_points=WALK_POINTS, deep=True)
    _count(scenario, tally)
    assert tally.points >= WALK_POINTS


@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in order", "at random"])
@pytest.mark.parametrize("scenario", REOPENED, ids=[scenario.name for scenario in REOPENED])
def test_every_promise_holds_when_a_person_reopens_the_run(scenario: Scenario, deep: bool) -> None:
    tally = explore(scenario, REOPEN_WALK if deep else REOPEN, seed=3, most_points=REOPEN_POINTS, deep=deep)
    _count(scenario, tally)
    assert tally.points >= REOPEN_POINTS
    assert tally.moves.keys() >= {"rewind", "rewind to new code"}


@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in order", "at random"])
@pytest.mark.parametrize("scenario", CHECKPOINTED, ids=[scenario.name for scenario in CHECKPOINTED])
def test_every_promise_holds_when_the_agent_takes_checkpoints(scenario: Scenario, deep: bool) -> None:
    tally = explore(scenario, REOPEN_WALK if deep else REOPEN, seed=5, most_points=REOPEN_POINTS, deep=deep)
    _count(scenario, tally)
    assert tally.points >= REOPEN_POINTS
    assert tally.moves.keys() >= {"read", "commit"}


@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in order", "at random"])
@pytest.mark.parametrize("scenario", FORKED, ids=[scenario.name for scenario in FORKED])
def test_every_promise_holds_when_a_person_forks_the_run(scenario: Scenario, deep: bool) -> None:
    tally = explore(scenario, REOPEN_WALK if deep else REOPEN, seed=7, most_points=REOPEN_POINTS, deep=deep)
    _count(scenario, tally)
    assert tally.points >= REOPEN_POINTS
    assert tally.moves.keys() >= {"fork", "fork to new code"}


@pytest.mark.parametrize("guard", GUARDS, ids=[guard.off.__name__ for guard in GUARDS])
def test_without_a_guard_a_promise_breaks(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    guard.off(monkeypatch)
    scenario = next(scenario for scenario in (*SCENARIOS, *REOPENED, *CHECKPOINTED, *FORKED) if scenario.name == guard.scenario)
    with pytest.raises(Found) as found:
        explore(scenario, REOPEN if scenario.is_reopened else [(5, 3000), (2, 4)], most_points=25_000)
    assert re.search(guard.breaks, str(found.value).partition("\n")[0]), found.value


def test_the_same_seed_explores_the_same() -> None:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "cancelled")
    tallies = [explore(scenario, DEEP, seed=7, most_points=1_000) for _ in range(2)]
    assert tallies[0] == tallies[1]


def _count(scenario: Scenario, tally: Tally) -> None:
    print(f"{scenario.name}: {tally}")
    figures.seen(figures.CORE_POINTS, tally.points)
    figures.seen(figures.CORE_RECOVERIES, tally.recoveries)


@pytest.mark.soak
def test_soak() -> None:
    """Ten million crash points, with another seed and with more effort for each scenario in each round."""
    points = recoveries = 0
    begun = time.process_time()
    for turn in itertools.count(1):
        for scenario in SCENARIOS:
            wide = explore(scenario, [(8 + turn, 20_000)], seed=turn, most_points=8 * POINTS[scenario.name])
            deep = explore(scenario, [(3, 100 * turn), (3, 20)], seed=turn, most_points=20_000)
            points += wide.points + deep.points
            recoveries += wide.recoveries + deep.recoveries
            took = time.process_time() - begun
            print(f"{points:>10,} of {SOAK_POINTS:,} crash points, {recoveries:,} recoveries, {took:.0f} s: {scenario.name}", flush=True)
        for scenario in (*REOPENED, *FORKED):
            points += explore(scenario, [(6, 60 * turn), (4, 10), (2, 3)], seed=turn, most_points=10_000).points
            points += explore(scenario, REOPEN_WALK, seed=turn, most_points=10_000, deep=True).points
        for scenario in WALKS:
            points += explore(scenario, WALK, seed=1000 + turn, most_points=20_000, deep=True).points
        if points >= SOAK_POINTS:
            break
