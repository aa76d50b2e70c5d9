"""An upload of parts whose worker is killed: the next attempt goes on at the last part that was stored."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.world import World

from perdure.core.codec import decode
from perdure.core.events import ToolCallFailed, ToolCallInDoubt
from perdure.store.open import open_store

OFTEN = {"progress_s": 0.05}


def stored_part(world: World, run_id: str, least: int, within_s: float = 60.0) -> int:
    """The stored part, as soon as it is at least `least`."""
    until_s = time.monotonic() + within_s
    store = open_store(world.journal.url)
    try:
        while time.monotonic() < until_s:
            for row in store.progress([run_id]):
                part: int = decode(row.progress)["part"]
                if part >= least:
                    return part
            time.sleep(0.02)
    finally:
        store.close()
    raise AssertionError(f"no part from {least} on was stored; {world.log()}")


def killed_inside(world: World, tool: str) -> int:
    world.begin(r=[[tool, "film", 0.01]])
    victim = world.start(victims.serve, settings=OFTEN)
    part = stored_part(world, "r", least=5)
    os.kill(victim, signal.SIGKILL)
    world.wait(victim)
    return part


@pytest.mark.parametrize("tool", ["upload_again", "upload_keyed"])
def test_an_upload_that_was_killed_goes_on_at_the_last_stored_part(world: World, tool: str) -> None:
    part = killed_inside(world, tool)
    (outcome,) = world.finish("r", **OFTEN)["r"]["output"]
    first, second = world.ledger.lines("begun", "r")
    assert first["part"] == 0
    assert second["part"] >= part >= 5
    assert outcome == f"from part {second['part']}"
    _, events = world.look("r")
    cut_off = [event.body for event in events if isinstance(event.body, ToolCallFailed | ToolCallInDoubt)]
    assert [decode(body.progress.inline)["part"] for body in cut_off if body.progress and body.progress.inline] == [second["part"]]
    check_journal(world, "r")
    store = open_store(world.journal.url)
    try:
        assert store.progress(["r"]) == []
    finally:
        store.close()


def test_progress_proves_nothing_a_once_upload_is_put_to_its_hook_and_to_a_person(world: World) -> None:
    part = killed_inside(world, "upload_once")
    assert world.finish("r", **OFTEN)["r"]["status"] == "needs_attention"
    assert len(world.ledger.lines("begun", "r")) == 1
    (asked,) = world.ledger.lines("asked", "r")
    assert asked["part"] >= part
    check_journal(world, "r")


def test_an_upload_whose_workers_are_killed_again_and_again_goes_on_while_each_comes_further(world: World) -> None:
    """More deaths in a row than `poison_limit`, and this run is alone in each."""
    world.begin(r=[["upload_long", "film", 5]])
    part = 0
    for _ in range(4):
        victim = world.start(victims.serve, settings={**OFTEN, "poison_limit": 2})
        part = stored_part(world, "r", least=part + 5)
        os.kill(victim, signal.SIGKILL)
        world.wait(victim)
    (outcome,) = world.finish("r", **OFTEN, poison_limit=2)["r"]["output"]
    begun = [line["part"] for line in world.ledger.lines("begun", "r")]
    assert len(begun) == 5
    assert begun == sorted(set(begun)), "each attempt goes on where the one before was"
    assert outcome == f"from part {begun[-1]}"
    check_journal(world, "r")


def test_an_upload_that_kills_its_workers_at_the_same_part_is_poison(world: World) -> None:
    world.begin(r=[["upload_deadly", "film", 7]])
    for _ in range(3):
        world.wait(world.start(victims.serve, settings={**OFTEN, "poison_limit": 2}))
    assert world.finish("r", **OFTEN, poison_limit=2)["r"]["status"] == "needs_attention"
    row, _ = world.look("r")
    assert row is not None
    assert row.attention == "poison"
    assert len(world.ledger.lines("begun", "r")) == 3, "the first part that it reports counts as progress, the same part again does not"
    check_journal(world, "r")
