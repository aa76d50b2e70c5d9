"""A full disk, and a volume that becomes read-only, under a busy worker (SQLite).

The run stops and claims nothing false: no attempt begins without a durable intent, and no call counts as done without
a record. When there is room again, the same process continues by itself.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
from tests.crash import victims
from tests.crash.checks import check_effects, check_journal
from tests.crash.errands import ORDER, OUTPUT
from tests.crash.mounts import Disk, FailingVolume, Limit, Room
from tests.crash.world import KILLED, RUN, World
from tests.crash.worlds import Worlds

pytestmark = pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)

MET = re.compile("disk full|the disk reported an error")
EFFECTS = {"claim": 0, "intent": 0, "result": 1, "park": 1, "end": 1}  # before each place, and so for as long as there is no room


@pytest.fixture(params=["full", "limited"])
def cramped(request: pytest.FixtureRequest, world: World) -> tuple[World, Room]:
    """A world that can run out of space: a full file system or, if mounting is not permitted, files that may not grow."""
    if request.param == "limited":
        return world, Limit(world.disk / "journal.db-wal")
    small: World = request.getfixturevalue("small")
    return small, Disk(small.disk)


@pytest.mark.parametrize("place", EFFECTS)
def test_without_room_the_run_stops_and_with_room_it_goes_on_by_itself(cramped: tuple[World, Room], place: str) -> None:
    world, room = cramped
    assert world.run(victims.start, runs={RUN: ["once", 0.2]}, agent="errand") == 0
    report = world.report()
    pid = world.start(victims.serve, until=[RUN], report=report, die=[place, "held", 1, "once"])
    world.ledger.wait_for(lambda lines: any(line["fact"] == "held" for line in lines))
    room.fill(pid)
    world.let_go()
    world.wait_until(lambda: MET.search(world.log()) is not None, "the worker has met the end of the disk")
    assert len(world.ledger.effects(ORDER)) == EFFECTS[place]
    assert len(world.ledger.lines("begun")) == EFFECTS[place], "a call has begun that is not on the disk"
    row, _ = world.peek()
    assert row is not None
    assert row.status != "succeeded"
    room.free(pid)
    assert world.wait(pid) == 0, world.log()
    told = world.told(report)[RUN]
    assert told == {"status": "succeeded", "output": OUTPUT, "error": None}, f"{told}\n{world.log()}"
    check_effects(world, "once")
    assert len(world.ledger.lines("begun")) == 1
    check_journal(world)


def test_without_room_for_the_last_checkpoint_a_worker_leaves_in_peace_and_its_log_is_kept(small: World) -> None:
    """The last one out signs off, and copies the log into the database: neither is possible."""
    world, long = small, "x" * 30_000  # so that the database would have to grow
    world.begin(r=[["deed", long, 0]])
    pid = world.start(victims.serve)
    world.wait_until(lambda: (row := world.peek("r")[0]) is not None and row.status == "succeeded", "the run has ended")
    room, log = Disk(world.disk), world.disk / "journal.db-wal"
    room.fill(pid)
    os.kill(pid, signal.SIGTERM)
    assert world.wait(pid) == 0, world.log()
    assert log.stat().st_size > len(long), "the log was emptied: there was room after all"
    room.free(pid)
    assert world.finish("r")["r"]["output"] == [f"{long} done"]
    assert len(world.ledger.effects()) == 1
    check_journal(world, "r")


@pytest.fixture
def volume(worlds: Worlds) -> Iterator[tuple[World, FailingVolume]]:
    world = worlds.new()
    made = FailingVolume(world.folder / "image", world.disk)
    if not made.make():
        pytest.skip("making and mounting a volume needs privileges, loop devices and mkfs.ext4")
    try:
        yield world, made
    finally:
        made.unmount()


@pytest.mark.parametrize(("place", "status"), [("intent", "succeeded"), ("result", "needs_attention")])
def test_on_a_volume_that_turns_read_only_under_a_worker_nothing_is_begun_and_what_was_acknowledged_is_there_after_its_repair(
    volume: tuple[World, FailingVolume], place: str, status: str
) -> None:
    world, disk = volume
    assert world.run(victims.start, runs={RUN: ["once", 0.01]}, agent="errand") == 0
    pid = world.start(victims.serve, until=[RUN], die=[place, "held", 1, "once"])
    world.ledger.wait_for(lambda lines: any(line["fact"] == "held" for line in lines))
    disk.fail()
    world.let_go()
    world.wait_until(lambda: MET.search(world.log()) is not None or "cannot be opened for writing" in world.log(), "it has noticed")
    assert len(world.ledger.lines("begun")) == EFFECTS[place]
    # No process can write to a volume in this state. Processes with open files must end before it is repaired.
    os.kill(pid, signal.SIGKILL)
    assert world.wait(pid) == KILLED
    disk.repair()
    told = world.finish(RUN)[RUN]
    assert told["status"] == status, f"{told}\n{world.log()}"
    assert len(world.ledger.effects(ORDER)) == 1
    check_journal(world)
