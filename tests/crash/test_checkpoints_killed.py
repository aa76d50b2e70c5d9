"""kill -9 around checkpoints: real processes, and the ledger counts the effects."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from click.testing import CliRunner
from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.errands import ORDER, OUTPUT, TOOLS
from tests.crash.fate import ANY
from tests.crash.world import KILLED, RUN, World

from perdure.cli import cli
from perdure.core.events import AttentionNeeded, CheckpointTaken, RunClaimed
from perdure.core.state import fold
from perdure.inspect.verify import verify_run

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
@pytest.mark.parametrize(
    ("kind", "nth"),
    # With a transaction the run has one commit less: the intent and the result share it.
    [(kind, nth) for kind in KINDS for nth in (1, 2, 3) if (kind, nth) != ("transaction", 3)],
)
def test_killed_at_a_commit_of_any_life_the_next_worker_goes_on_from_the_last_checkpoint(
    world: World, kind: str, nth: int, moment: str
) -> None:
    world.rest("lives", kind, die=["append", moment, nth, ANY])
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
        world.rest("crossing", kind, die=["append", moment, 1, ANY])
    told = world.rest("crossing", kind)
    if told["status"] == "needs_attention":
        told = _resolved(world, "crossing", kind)
    check_once(world, told, kind, checkpoints=1)


def test_a_run_that_kills_its_workers_after_a_checkpoint_is_parked(world: World) -> None:
    limit, deaths = 4, 0
    how: dict[str, Any] = {"agent": "doomed", "args": [2], "run_id": RUN, "settings": {"poison_limit": limit}}
    while (code := world.run(victims.rest, report=world.report(), **how)) != 0:
        assert code == KILLED, world.log()
        deaths += 1
        assert deaths <= limit, "no worker stops it"
    events = check_journal(world)
    with world.journal.reading() as store:
        row, life = store.get(RUN), store.read_life(RUN)
    assert row is not None
    assert (row.status, row.attention, deaths) == ("needs_attention", "poison", limit)
    assert [line["what"] for line in world.ledger.lines("begun")] == ["round 0", "round 1", *["last"] * limit]
    assert [event.body.reason for event in events if isinstance(event.body, AttentionNeeded)] == ["poison"]
    # A worker reads the journal from the checkpoint on, and counts the same deaths.
    assert sum(isinstance(event.body, CheckpointTaken) for event in events) == 2
    assert len(life) < len(events)
    last = max(event.seq for event in events if isinstance(event.body, RunClaimed))
    states = [fold([event for event in some if event.seq <= last]) for some in (events, life)]
    assert [(state.crashes, state.crashes_alone) for state in states] == [(limit, limit)] * 2


def test_deaths_before_a_checkpoint_count_no_more_after_it(world: World) -> None:
    """Each worker dies right after the commit of a checkpoint: more deaths in a row than the limit, and each life comes further."""
    limit = 2
    for _ in range(limit + 2):
        world.rest("doomed", limit + 9, die=["append", "kept", 2, ANY], settings={"poison_limit": limit})
    row, events = world.look()
    assert row is not None
    assert row.attention is None, row
    assert [event.body.takeover for event in events if isinstance(event.body, RunClaimed)] == [False, *[True] * (limit + 1)]
    assert sum(isinstance(event.body, CheckpointTaken) for event in events) > limit
    assert not [event for event in events if isinstance(event.body, AttentionNeeded)]


def test_events_before_a_checkpoint_stay_while_a_worker_holds_the_run(world: World) -> None:
    """The worker is another process, inside a call of its second life. It may still read the events of the first."""

    def prune(*more: str) -> tuple[int, str]:
        told = CliRunner().invoke(cli, ["prune", "--before-checkpoint", *more, "--yes", "--url", world.journal.url])
        return told.exit_code, told.output

    worker = world.start(
        victims.rest, report=world.report(), agent="lives", args=["keyed"], run_id=RUN, die=["flight", "never", 1, "keyed"]
    )
    world.ledger.wait_for(lambda lines: any(line["fact"] == "begun" for line in lines))
    before = world.peek()[1]
    assert sum(isinstance(event.body, CheckpointTaken) for event in before) == 1
    code, said = prune(RUN)
    assert (code, f"run {RUN} is held by a worker; nothing was removed: try again when it rests" in said) == (2, True), said
    code, said = prune("--older-than", "0s")
    assert (code, said.startswith("removed 0 events")) == (0, True), said
    with world.journal.reading() as store:
        assert store.remove_before_checkpoint(RUN, by="ann", now=1).events == 0
    assert world.peek()[1] == before
    os.kill(worker, signal.SIGKILL)
    assert world.wait(worker) == KILLED
    code, said = prune(RUN)
    assert (
        code,
        f"that worker is dead or silent; take the run over, then try again when it rests: perdure resume {RUN} --url" in said,
    ) == (
        2,
        True,
    ), said
    check_once(world, world.rest("lives", "keyed"), "keyed", checkpoints=2)
    code, said = prune(RUN)
    assert (code, said.startswith("removed ")) == (0, True), said
    left = world.peek()[1]
    assert [left[0].seq, type(left[1].body)] == [1, CheckpointTaken]
    with world.journal.reading() as store:
        row = store.get(RUN)
        assert row is not None
        assert verify_run(store, row).problem is None


def _resolved(world: World, agent: str, kind: str, happened: bool | None = None) -> dict[str, Any]:
    """A person looks into the ledger, and says what has happened."""
    state = fold(world.look()[1])
    (doubt,) = [call for call in state.open.values() if call.phase == "in_doubt"]
    done = world.ledger.has_happened(doubt.key)
    assert happened in (None, done)
    how: dict[str, Any] = {"happened": f"{ORDER} done"} if done else {"did_not_happen": True}
    assert world.run(victims.resolve, run_id=RUN, call=doubt.number, **how) == 0, world.log()
    return world.rest(agent, kind)
