"""SQLite's disk is full, read-only or failing, or the process dies at a write.

No acknowledged event is lost, no effect is doubled.
"""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest
from tests.crash import victims
from tests.crash.checks import check_journal, check_succeeded
from tests.crash.errands import ORDER
from tests.crash.mounts import Disk, remount
from tests.crash.world import KILLED, RUN, World

pytestmark = pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)


PARTS = ["keyed", "once_reconcile", "transaction"] * 3


@pytest.mark.long
@pytest.mark.parametrize(("part", "kind"), list(enumerate(PARTS)))
def test_killed_before_any_single_write_or_sync_of_a_whole_run_the_run_ends_well(world: World, part: int, kind: str) -> None:
    """From the first open, which makes the schema, to the last commit: no moment on the disk is special. Each part dies at its own ninth."""
    deaths = 0
    while True:
        shutil.rmtree(world.folder)
        world.disk.mkdir(parents=True)
        nth = 1 + part + deaths * len(PARTS)
        code = world.run(victims.errand, report=world.report(), run_id=RUN, kind=kind, die=["disk", "op", nth])
        if code == 0:
            break
        assert code == KILLED, world.log()
        deaths += 1
        told = world.resume(kind=kind)
        assert told["status"] == "succeeded", (deaths, told, world.log())
        # The complete check runs only at every fourth death, because it takes longer than the crash.
        if deaths % 4 == 0:
            check_succeeded(world, told, kind)
        else:
            check_journal(world)
        assert len(world.ledger.effects(ORDER) or world.paid()) == 1, deaths
    assert deaths > 4, f"only {deaths} writes: the disk was not the one that kills"


def test_a_disk_that_is_full_while_a_result_is_held_loses_nothing_and_goes_on_with_room_again(small: World) -> None:
    world = small
    world.begin(r=[["deed", "paid", 0.3], ["deed", "sent", 0]])
    report = world.report()
    pid = world.start(victims.drive, run_id="r", report=report)
    world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
    room = Disk(world.disk)
    room.fill(pid)
    world.wait_until(lambda: "disk full" in world.log(), "the worker has met the full disk")
    assert [line["what"] for line in world.ledger.effects()] == ["paid"]
    room.free(pid)
    check_went_on(world, pid, report)


def check_went_on(world: World, pid: int, report: str) -> None:
    """The same process has finished the run: every effect once, all of it in the journal."""
    assert world.wait(pid) == 0, world.log()
    assert world.told(report)["output"] == ["paid done", "sent done"]
    assert [line["what"] for line in world.ledger.effects()] == ["paid", "sent"]
    assert len(world.ledger.lines("begun")) == 2
    check_journal(world, "r")


def test_killed_on_a_full_disk_the_held_result_is_a_doubt_and_the_effect_is_not_repeated(small: World) -> None:
    world = small
    world.begin(r=[["deed", "paid", 0.5]])
    pid = world.start(victims.drive, run_id="r", report=world.report())
    world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
    room = Disk(world.disk)
    room.fill(pid)
    world.wait_until(lambda: "disk full" in world.log(), "the worker has met the full disk")
    os.kill(pid, signal.SIGKILL)
    assert world.wait(pid) == KILLED
    room.free(pid)
    assert world.finish("r")["r"]["status"] == "needs_attention"
    assert len(world.ledger.effects()) == 1
    check_journal(world, "r")


def test_on_a_read_only_file_system_nothing_begins_and_the_error_says_why(small: World) -> None:
    world = small
    world.begin(r=[["deed", "paid", 0]])
    remount(world.disk, "ro")
    assert world.run(victims.drive, run_id="r", report=world.report()) == 1
    assert re.search(r"StoreUnavailable: .*(read-only|not writable)", world.log()), world.log()
    assert not world.ledger.lines()
    remount(world.disk, "rw")
    assert world.finish("r")["r"]["output"] == ["paid done"]
    check_journal(world, "r")


@pytest.mark.parametrize("fault", ["not synced", "synced, and said to have failed"])
@pytest.mark.parametrize("fails", ["once", "three times"])
def test_after_a_failed_fsync_the_process_goes_on_with_another_connection_and_nothing_acknowledged_is_lost(
    world: World, fault: str, fails: str
) -> None:
    world.begin(r=[["deed", "paid", 0.5], ["deed", "sent", 0]])
    report, trouble = world.report(), world.folder / "trouble"
    pid = world.start(victims.drive, run_id="r", report=report, disk=[str(trouble), fault == "not synced", False])
    world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
    trouble.write_text("!" * (1 if fails == "once" else 3))
    check_went_on(world, pid, report)
    assert not trouble.exists()
    failures = [line["connection"] for line in world.ledger.lines("sync failed")]
    assert len(failures) == (1 if fails == "once" else 3)
    assert len(set(failures)) == len(failures), "a connection was used again after its fsync had failed"


@pytest.mark.parametrize("fault", ["not synced", "synced, and said to have failed"])
@pytest.mark.parametrize("kind", ["work", "deed"])
def test_killed_right_after_a_failed_fsync_the_run_goes_on_with_whatever_reached_the_disk(world: World, fault: str, kind: str) -> None:
    world.begin(r=[[kind, "paid", 0.5], [kind, "sent", 0]])
    trouble = world.folder / "trouble"
    pid = world.start(victims.drive, run_id="r", report=world.report(), disk=[str(trouble), fault == "not synced", True])
    world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
    trouble.write_text("!")
    assert world.wait(pid) == KILLED
    told = world.finish("r")["r"]
    # The commit that failed held the result of the first call and the intent of the second, and it has come back.
    assert told["status"] == ("succeeded" if kind == "work" else "needs_attention"), told
    whats = [line["what"] for line in world.ledger.effects()]
    assert whats == (["paid", "sent"] if kind == "work" else ["paid"])
    check_journal(world, "r")
