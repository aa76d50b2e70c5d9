"""Tools that fork, exit, die of signals or leave programs behind.

The worker, the run and the ledger survive all this.
"""

from __future__ import annotations

import os
import signal
import time

from tests.crash import victims
from tests.crash.checks import check_journal
from tests.crash.world import KILLED, World

from perdure.core.events import RunClaimed


def is_running(pid: int) -> bool:
    """Does the process still do anything? A zombie that was not reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):  # it has gone before the file could be opened, or before it could be read
        return False


def child_of(world: World) -> int:
    lines = world.ledger.wait_for(lambda lines: any(line["fact"] == "child" for line in lines))
    child: int = next(line["child"] for line in lines if line["fact"] == "child")
    return child


def test_what_an_isolated_tool_has_started_dies_with_its_worker(world: World) -> None:
    world.begin(r=[["family", "f", 60]])
    worker = world.start(victims.serve)
    grandchild = child_of(world)
    assert is_running(grandchild)
    os.kill(worker, signal.SIGKILL)
    assert world.wait(worker) == KILLED
    world.wait_until(lambda: not is_running(grandchild), "the grandchild has died")
    outcome = world.finish("r")
    assert outcome["r"]["output"] == ["f done"]
    assert len(world.ledger.effects("f")) == 1
    check_journal(world, "r")


def test_a_program_that_outlives_its_worker_does_not_keep_the_run_from_being_claimed(world: World) -> None:
    world.begin(r=[["orphan", "o", 60]])
    worker = world.start(victims.serve)
    program = child_of(world)
    try:
        os.kill(worker, signal.SIGKILL)
        assert world.wait(worker) == KILLED
        assert is_running(program)
        begun = time.monotonic()
        # With the default lease of 30 s: it is the freed lock that proves the death, not the clock.
        outcome = world.finish("r")
        assert time.monotonic() - begun < 29
        assert outcome["r"]["output"] == ["o done"]
        claims = [event.body for event in world.look("r")[1] if isinstance(event.body, RunClaimed)]
        assert [claim.proven_dead for claim in claims] == [False, True]
    finally:
        for line in world.ledger.lines("child"):
            if is_running(line["child"]):
                os.kill(line["child"], signal.SIGKILL)
    check_journal(world, "r")


def test_a_forked_child_that_outlives_its_worker_does_not_keep_it_alive(world: World) -> None:
    world.begin(r=[["breed", "b", 30], ["work", "w", 30]])
    worker = world.start(victims.serve)
    child = child_of(world)
    try:
        world.ledger.wait_for(lambda lines: any(line["fact"] == "begun" and line["what"] == "w" for line in lines))
        os.kill(worker, signal.SIGKILL)
        # The child process keeps the connections to the server open, and the test does not wait for their end.
        assert world.wait(worker, settled=False) == KILLED
        assert is_running(child)
        heir = world.start(victims.serve)
        # Its call is made again although the forked child still has all that its parent had open.
        world.ledger.wait_for(lambda lines: sum(line["fact"] == "begun" and line["what"] == "w" for line in lines) == 2)
        os.kill(heir, signal.SIGKILL)
        assert world.wait(heir, settled=False) == KILLED
    finally:
        os.kill(child, signal.SIGKILL)
    check_journal(world, "r")


def test_a_tool_that_calls_os_exit_is_a_crash_like_any_other(world: World) -> None:
    world.begin(r=[["leave", "x", 0], ["deed", "after", 0]])
    assert world.run(victims.serve, until=["r"]) == 7
    outcome = world.finish("r")
    assert outcome["r"]["output"] == ["x done", "after done"]
    assert len(world.ledger.lines("begun", "r")) == 3
    check_journal(world, "r")


def test_an_isolated_tool_that_segfaults_is_a_failed_call_and_not_a_dead_worker(world: World) -> None:
    world.begin(r=[["segfault", "s", 0]], other=[["deed", "o", 0.2]])
    outcome = world.finish("r", "other")
    assert outcome["r"]["output"] == ["s done"]
    assert outcome["other"]["output"] == ["o done"]
    assert [line["attempt"] for line in world.ledger.lines("begun", "r")] == [1, 2, 3]
    assert len({line["pid"] for line in world.ledger.lines("begun", "r")}) == 3
    # One worker did it all.
    assert sum(isinstance(event.body, RunClaimed) and event.body.takeover for event in world.look("r")[1]) == 0
    check_journal(world, "r")


def test_an_isolated_once_tool_that_segfaults_is_in_doubt_and_not_tried_again(world: World) -> None:
    world.begin(r=[["segfault_once", "s", 0]])
    outcome = world.finish("r")
    assert outcome["r"]["status"] == "needs_attention"
    assert len(world.ledger.effects("s")) == 1
    check_journal(world, "r")
