"""kill -9 around checkpoints: real processes, and the ledger counts the effects."""

from __future__ import annotations

from typing import Any

import pytest
from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.errands import ORDER, OUTPUT, TOOLS
from tests.crash.fate import ANY
from tests.crash.world import RUN, World

from perdure.core.events import CheckpointTaken
from perdure.core.state import fold

KINDS = [kind for kind in TOOLS if kind not in ("read", "idempotent")]
_ONCE = ("once", "once_reconcile")


def check_once(world: World, told: dict[str, Any], kind: str, checkpoints: int) -> None:
    """The run has ended well, with what its lives have learned, and its effect has happened once under one key."""
    assert (told["status"], told["output"]) == ("succeeded", OUTPUT), (told, world.log())
    events = check_journal(world)
    assert sum(isinstance(event.body, CheckpointTaken) for event in events) == checkpoints
    state = fold(events)
    assert sorted(call.tool for call in state.calls.values()) == sorted(["look", kind, "look"])
    (number,) = [call.number for call in state.calls.values() if call.tool == kind]
    if kind == "transaction":
        assert len(world.paid()) == 1
    else:
        effects = world.ledger.effects()
        assert len(effects) == 1, effects
        assert effects[0]["key"] == state.calls[number].key


@pytest.mark.parametrize("moment", ["before", "half", "handed", "kept", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_a_commit_of_any_life_the_next_worker_goes_on_from_the_last_checkpoint(
    world: World, kind: str, nth: int, moment: str
) -> None:
    report = world.report()
    world.run(victims.rest, report=report, agent="lives", args=[kind], run_id=RUN, die=["append", moment, nth, ANY])
    told = world.rest("lives", kind)
    if told["status"] == "needs_attention":
        told = _resolved(world, "lives", kind)
    check_once(world, told, kind, checkpoints=2)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_inside_an_effect_that_a_checkpoint_crosses_it_happens_once(world: World, kind: str, moment: str) -> None:
    world.rest("crossing", kind, die=["effect", moment, 1, kind])
    told = world.rest("crossing", kind)
    if told["status"] == "needs_attention":
        assert kind == "once"
        told = _resolved(world, "crossing", kind, happened=moment == "after")
    check_once(world, told, kind, checkpoints=1)


@pytest.mark.parametrize("deaths", [3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_worker_is_killed_at_its_first_commit_and_the_run_still_ends(world: World, kind: str, deaths: int) -> None:
    for moment in ("kept", "half", "after")[:deaths]:
        world.run(victims.rest, report=world.report(), agent="crossing", args=[kind], run_id=RUN, die=["append", moment, 1, ANY])
    told = world.rest("crossing", kind)
    if told["status"] == "needs_attention":
        told = _resolved(world, "crossing", kind)
    check_once(world, told, kind, checkpoints=1)


def _resolved(world: World, agent: str, kind: str, happened: bool | None = None) -> dict[str, Any]:
    """A person looks into the ledger, and says what has happened."""
    state = fold(world.look()[1])
    (doubt,) = [call for call in state.open.values() if call.phase == "in_doubt"]
    done = world.ledger.has_happened(doubt.key)
    assert happened in (None, done)
    how: dict[str, Any] = {"happened": f"{ORDER} done"} if done else {"did_not_happen": True}
    assert world.run(victims.resolve, run_id=RUN, call=doubt.number, **how) == 0, world.log()
    return world.rest(agent, kind)
