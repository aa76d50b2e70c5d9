"""A process that can open no more files or get no more memory while it works.

Nothing is lost, no effect is doubled, and the process says why it stops.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.crash import scarce
from tests.crash.checks import check_journal
from tests.crash.mounts import Limit
from tests.crash.scenarios import check_one_effect_each
from tests.crash.world import RUN, World

WITHOUT_FILES = re.compile("too many open files", re.IGNORECASE)


@contextmanager
def out_of_files(pid: int) -> Iterator[None]:
    """Open files stay open; no other file can be opened."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def finish(world: World, *runs: str) -> dict[str, dict[str, object]]:
    report = world.report()
    assert world.run(scarce.serve, until=runs, report=report) == 0, world.log()
    return world.told(report)


def test_a_worker_without_a_free_descriptor_goes_on_with_what_it_has_and_takes_up_new_runs(world: World) -> None:
    assert world.run(scarce.start, runs={"a": [0.3, ["a1", "a2"]]}, agent="thrifty") == 0
    report = world.report()
    pid = world.start(scarce.serve, until=["a", "b"], report=report)
    world.ledger.wait_for(lambda lines: len(lines) == 1)
    with out_of_files(pid):
        assert world.run(scarce.start, runs={"b": [0.01, ["b1"]]}, agent="thrifty") == 0
        world.ledger.wait_for(lambda lines: any((line["fact"], line["what"]) == ("effect", "b1") for line in lines))
    assert world.wait(pid) == 0, world.log()
    assert world.told(report)["a"]["output"] == ["a1 done", "a2 done"]
    for run_id, whats in (("a", ["a1", "a2"]), ("b", ["b1"])):
        check_one_effect_each(world, run_id, whats)
        check_journal(world, run_id)


def test_a_worker_that_cannot_open_its_database_again_keeps_its_result_until_it_can(world: World) -> None:
    """The connection is lost while a result is held: by an error of the disk, or because the server ends it."""
    assert world.run(scarce.start, runs={RUN: [1.0, ["paid", "sent"]]}, agent="thrifty") == 0
    report = world.report()
    # A short lease: the thread that renews it is the first to report the problem.
    pid = world.start(scarce.serve, until=[RUN], report=report, settings={"lease_s": 2.0})
    world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
    with out_of_files(pid):
        if world.dialect == "sqlite":
            limit = Limit(world.disk / "journal.db-wal")
            limit.fill(pid)
            world.wait_until(lambda: "cannot write the journal" in world.log(), "its connection is gone")
            limit.free(pid)
        else:
            world.journal.part()
        world.wait_until(lambda: WITHOUT_FILES.search(world.log()) is not None, "it has tried to open another one")
        assert len(world.ledger.lines("begun")) == 1, "it has begun what is not durable"
    assert world.wait(pid) == 0, world.log()
    assert world.told(report)[RUN]["output"] == ["paid done", "sent done"], world.log()
    check_one_effect_each(world, RUN, ["paid", "sent"])
    assert len(world.ledger.lines("begun")) == 2
    check_journal(world)


def test_a_worker_that_may_not_open_enough_files_to_begin_says_so_and_touches_nothing(world: World) -> None:
    """Three are for its event loop; with the fourth it gets as far as half a connection."""
    assert world.run(scarce.start, runs={RUN: [0, ["paid"]]}, agent="thrifty") == 0
    assert world.run(scarce.serve, until=[RUN], spare=4) == 1, world.log()
    assert re.search(f"StoreUnavailable: .*{WITHOUT_FILES.pattern}", world.log(), re.IGNORECASE), world.log()
    assert not world.ledger.lines()
    assert finish(world, RUN)[RUN]["output"] == ["paid done"]
    check_journal(world)


@pytest.mark.parametrize("spare_mb", [1, 46])
def test_out_of_memory_between_effect_and_record_the_effect_is_recorded_or_in_doubt_and_never_repeated(world: World, spare_mb: int) -> None:
    """With more memory, the result gets further: it is encoded, stored, recorded."""
    assert world.run(scarce.start, runs={RUN: []}, agent="lavish") == 0
    pid = world.start(scarce.serve, until=[RUN])
    world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
    with open(f"/proc/{pid}/statm") as statm:
        size = int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    before = resource.prlimit(pid, resource.RLIMIT_AS, (size + (spare_mb << 20), resource.RLIM_INFINITY))
    world.let_go()
    try:
        world.wait_until(lambda: _rests(world), "it has recorded what has happened, or given the run up")
    finally:
        try:
            resource.prlimit(pid, resource.RLIMIT_AS, before)
        except ProcessLookupError:
            pass  # it did not survive that
    world.wait(pid)
    told = finish(world, RUN)[RUN]
    paid = [line for line in world.ledger.lines("begun") if line["what"] == "paid"]
    assert len(paid) == 1, f"{told}\n{world.log()}"
    if spare_mb == 1:
        assert told["output"] == ["not_encodable", "sent done"], f"{told}\n{world.log()}"
    else:
        # The place of the failure depends on the machine. Either the result is in the journal, or a person is asked.
        recorded = "tool_call_completed" in [event.type for event in world.peek()[1]]
        assert recorded or told["status"] == "needs_attention", told
    check_journal(world)


def _rests(world: World) -> bool:
    row, _ = world.peek()
    return row is not None and row.status in ("succeeded", "failed", "needs_attention")
