"""kill -9 of a child's worker, of its parent's worker, or of both.

When a child begins or ends, and among many children.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import pytest
from tests.crash import people, victims
from tests.crash.checks import check_journal
from tests.crash.clans import BUDGET_CALLS
from tests.crash.scenarios import SHORT, claims
from tests.crash.waiting_checks import check_budget, check_family
from tests.crash.world import KILLED, RUN, World

from perdure.core.events import ToolCallInitiated

COMMIT = ("before", "half", "handed", "kept", "after")
CROWD = 200
HEIRS = 50


def check_clan(world: World, told: dict[str, Any], children: int, busy: bool = False) -> None:
    assert told["output"] == [f"child {place} done" for place in range(children)], f"{told}\n{world.log()}"
    check_family(world, RUN, children)
    effects = Counter(line["what"] for line in world.ledger.effects())
    assert effects == Counter([f"child {place}" for place in range(children)] + ["beside"] * busy), effects


BOUNDARIES = [
    *(("birth", moment, 1) for moment in COMMIT),
    ("effect", "after", 2),
    *(("child end", moment, 1) for moment in COMMIT),
    *(("end", moment, 1) for moment in COMMIT),
]


@pytest.mark.parametrize(("place", "moment", "nth"), BOUNDARIES)
@pytest.mark.parametrize("busy", [False, True])
def test_killed_at_a_boundary_of_parent_or_child_both_end_well(world: World, place: str, moment: str, nth: int, busy: bool) -> None:
    """One process drives the family: its death is the death of the parent's worker and of the child's worker."""
    world.rest("clan", 2, 0.01, busy, die=[place, moment, nth, "toil"])
    check_clan(world, world.rest("clan", 2, 0.01, busy), 2, busy)


@pytest.mark.parametrize("moment", COMMIT)
def test_killed_while_the_parent_journals_what_its_child_has_sent_it(world: World, moment: str) -> None:
    """The parent is held: the child's end is in its inbox, and the worker dies while it reads it."""
    world.rest("clan", 2, 0.01, True, die=["delivery", moment, 1])
    check_clan(world, world.rest("clan", 2, 0.01, True), 2, busy=True)


def test_killed_four_times_in_a_row_the_family_still_ends_well(world: World) -> None:
    for place, moment in (("birth", "kept"), ("effect", "after"), ("child end", "kept"), ("end", "half")):
        world.rest("clan", 2, 0.01, die=[place, moment, 1, "toil"])
    check_clan(world, world.rest("clan", 2, 0.01), 2)


def _two_workers(world: World, **settings: Any) -> tuple[int, int]:
    """One worker for parents, which waits for a child, and another worker for children."""
    assert world.run(victims.start, runs={RUN: [1, 0.4]}, agent="clan") == 0
    parent = world.start(victims.serve, queues=["default"], settings=settings)
    child = world.start(victims.serve, queues=["kin"], settings=settings)
    world.ledger.wait_for(lambda lines: any(line["fact"] == "begun" for line in lines))
    return parent, child


@pytest.mark.parametrize("victims_of", ["child", "parent", "both"])
def test_the_worker_of_one_of_them_is_killed_while_the_child_is_under_way(world: World, victims_of: str) -> None:
    parent, child = _two_workers(world)
    dead = {"child": [child], "parent": [parent], "both": [parent, child]}[victims_of]
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    for pid in dead:
        assert world.wait(pid) == KILLED
    check_clan(world, world.finish(RUN)[RUN], 1)
    _stop(world, [pid for pid in (parent, child) if pid not in dead])


def _stop(world: World, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert [world.wait(pid) for pid in pids] == [0] * len(pids), world.log()


@pytest.mark.parametrize("first", ["cancel", "kill"])
def test_the_parent_is_cancelled_while_the_childs_worker_is_being_killed(world: World, first: str) -> None:
    parent, child = _two_workers(world)
    if first == "kill":
        os.kill(child, signal.SIGKILL)
    cancelling = world.start(victims.cancel, run_id=RUN)
    if first == "cancel":
        os.kill(child, signal.SIGKILL)
    assert world.wait(child) == KILLED
    assert world.wait(cancelling) == 0, world.log()
    assert world.run(victims.serve, until=[f"{RUN}/1"]) == 0, world.log()
    row, _ = world.peek()
    child_row, _ = world.peek(f"{RUN}/1")
    assert row is not None
    assert child_row is not None
    # Made again before the cancel arrived, or cut off in the middle: then it is not made again, because the run must
    # end.
    assert child_row.status in ("succeeded", "cancelled", "needs_attention"), child_row
    if child_row.status == "needs_attention":
        assert row.status in ("waiting", "cancelling"), row
        assert world.run(victims.resolve, run_id=f"{RUN}/1", call=1, did_not_happen=True, final=True) == 0, world.log()
    assert world.run(victims.serve, until=[RUN]) == 0, world.log()
    row, _ = world.peek()
    assert row is not None
    assert row.status == "cancelled", row
    assert len(world.ledger.effects("child 0")) <= 1
    check_journal(world, RUN)
    check_journal(world, f"{RUN}/1")
    _stop(world, [parent])


def test_a_worker_that_holds_a_parent_and_sleeps_past_its_lease_is_fenced(world: World) -> None:
    """The parent's worker sleeps while its children end.

    Their ends are not lost, and late writes of the worker are refused (G4).
    """
    assert world.run(victims.start, runs={RUN: [2, 0.1, True]}, agent="clan") == 0
    zombie = world.start(victims.serve, queues=["default"], settings=SHORT)
    children = world.start(victims.serve, queues=["kin"], settings=SHORT)
    world.ledger.wait_for(lambda lines: sum(line["fact"] == "begun" for line in lines) == 3)
    world.freeze(zombie)
    try:
        told = world.finish(RUN, **SHORT)
    finally:
        os.kill(zombie, signal.SIGCONT)
    check_clan(world, told[RUN], 2, busy=True)
    assert any(claim.takeover for claim in claims(world, RUN))
    _stop(world, [zombie, children])
    check_family(world, RUN, 2)


# No worker can take everything. All kills may hit workers that drive the parent, which must not count as poison for that.
SHARE = {"concurrency": 15, "poison_limit": 50}


def _kill_now_and_then(world: World, until: list[str], kills: int, every: int) -> None:
    """Three workers: repeatedly, the worker that began something last is killed, and a new worker replaces it."""
    workers = [world.start(victims.serve, until=until, settings=SHARE) for _ in range(3)]
    for kill in range(1, kills + 1):

        def is_time(lines: list[dict[str, Any]], wanted: int = kill * every) -> bool:
            begun = [line["pid"] for line in lines if line["fact"] == "begun"]
            return len(begun) >= wanted and not set(begun).isdisjoint(workers)

        lines = world.ledger.wait_for(is_time, within_s=60)
        place = workers.index([line["pid"] for line in lines if line["fact"] == "begun" and line["pid"] in workers][-1])
        os.kill(workers[place], signal.SIGKILL)
        world.wait(workers[place])
        workers[place] = world.start(victims.serve, until=until, settings=SHARE)
    assert [world.wait(pid) for pid in workers] == [0, 0, 0], world.log()


def test_two_hundred_children_over_three_workers_that_are_killed_now_and_then_happen_once_each(world: World) -> None:
    assert world.run(victims.start, runs={RUN: [CROWD, 0.01]}, agent="clan") == 0
    _kill_now_and_then(world, [RUN], kills=6, every=25)
    report = world.report()
    assert world.run(victims.drive, run_id=RUN, report=report) == 0
    check_clan(world, world.told(report), CROWD)
    assert any(claim.takeover for place in range(1, CROWD + 1) for claim in claims(world, f"{RUN}/{place}")), "nobody was hit"


def test_a_budget_that_fifty_children_share_is_overspent_by_no_more_than_what_was_under_way(world: World) -> None:
    """Workers are killed now and then; every attempt is counted, and none twice (G14, T24)."""
    assert world.run(victims.start, runs={RUN: [HEIRS, 6]}, agent="spender") == 0
    _kill_now_and_then(world, [f"{RUN}/{place}" for place in range(1, HEIRS + 1)], kills=3, every=16)
    started = sum(isinstance(event.body, ToolCallInitiated) for run in _family(world) for event in world.peek(run)[1])
    assert BUDGET_CALLS <= started <= BUDGET_CALLS + _most_under_way(world), started
    assert len(world.ledger.effects()) <= started
    # A call that a dead worker had begun may have happened: there is no money to make it again, and it is not said to have failed.
    row, _ = world.peek()
    assert row is not None
    if row.status != "succeeded":
        assert world.run(people.top_up, run_id=RUN, calls=300) == 0, world.log()
    made = world.finish(RUN)[RUN]["output"]
    effects = world.ledger.effects()
    assert sum(made) == len(effects) == len({line["key"] for line in effects})
    check_budget(world, RUN)
    check_family(world, RUN, HEIRS)


def _family(world: World) -> list[str]:
    return [RUN, *(f"{RUN}/{place}" for place in range(1, HEIRS + 1))]


def _most_under_way(world: World) -> int:
    """How many calls were under way at the same time, at most.

    Calls of killed workers count until their next attempt.
    """
    open_keys: set[str] = set()
    most = 0
    for line in world.ledger.lines():
        if line["fact"] == "begun":
            open_keys.add(line["key"])
            most = max(most, len(open_keys))
        elif line["fact"] == "ended":
            open_keys.discard(line["key"])
    return most
