"""A worker that keeps the machine of a parked run continues exactly as a replay of the journal would."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.core import people
from tests.core.engine import Life
from tests.core.scenario import SCENARIOS, WALKS, Scenario
from tests.core.world import World

from perdure.core.steps import ParkedRun

_WALKS = 40  # of each scenario
_MOST_TURNS = 60
_MOST_MOVES = 120
_WILD = 0.3


def _walk(scenario: Scenario, chance: random.Random, seen: Counter[str]) -> None:
    """One run to its end, with moves and people at random. `Life` compares each use of a kept machine with a replay."""
    world = World(scenario.agent, scenario.env, scenario.beside, patient=scenario.patient)
    kept: ParkedRun | None = None
    try:
        for _ in range(_MOST_TURNS):
            if world.finished:
                seen["ends"] += 1
                return
            acts = [what for what in dict.fromkeys(world.env) if people.can(world, what)]
            if acts and (not world.is_ready or chance.random() < _WILD):
                people.do(world, world.env.index(chance.choice(acts)))
                continue
            if not world.is_ready:
                need = people.next_need(world)
                later = None if world.ready_at is None else f"later {(world.ready_at - world.now) / 1e6}"
                people.act(world, later or need or "nothing")
                continue
            before, kept = kept, None
            life = Life(scenario, world, before, keeps=True)
            seen["kept"] += before is not None
            for _ in range(_MOST_MOVES):
                if life.over is not None:
                    break
                moves = life.moves()
                wild = chance.random() < _WILD
                life.make(chance.choice([one for one in moves if one[0] != "fenced"] or moves) if wild else moves[0])
            life.close()
            if life.over == "left":
                return
            kept, world = life.parked, life.world
            seen["parked"] += kept is not None
    finally:
        if kept is not None:
            kept.machine.close()


@pytest.mark.parametrize("scenario", [*SCENARIOS, *WALKS], ids=lambda scenario: scenario.name)
def test_a_kept_machine_goes_on_as_a_replay_of_its_journal_does(scenario: Scenario) -> None:
    seen: Counter[str] = Counter()
    for seed in range(_WALKS):
        _walk(scenario, random.Random(seed), seen)
    assert seen["ends"], seen


def test_the_walks_really_use_kept_machines() -> None:
    seen: Counter[str] = Counter()
    for scenario in SCENARIOS:
        if scenario.name in ("signals", "children", "approvals", "timers"):
            for seed in range(_WALKS):
                _walk(scenario, random.Random(seed), seen)
    assert seen["kept"] > 100, seen
