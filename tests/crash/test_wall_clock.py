"""The wall clock of a whole machine is set by an hour, forward or back, while workers live and between two workers.

Clocks only decide when something is due: no run is lost or driven twice, a live worker keeps its lease, and `seq`
gives the order. On SQLite the machine's clock counts; on PostgreSQL the server's clock, which is right all the time.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.checks import check_journal
from tests.crash.nursery import Nursery
from tests.crash.scenarios import check_one_effect_each, claims
from tests.crash.world import KILLED, RUN, World
from tests.crash.worlds import Worlds
from tests.crash.wrong_clock import WallClock, build, nursery

from perdure.core.identity import approval_id

HOUR = 3600.0
FORWARD_AND_BACK = pytest.mark.parametrize("set_by_s", [HOUR, -HOUR], ids=["forward", "back"])


@pytest.fixture(scope="module")
def clockwork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    library = build(tmp_path_factory.mktemp("clock"))
    if library is None:
        pytest.skip("without a C compiler the clock of other processes cannot be set")
    opened = nursery(library)
    yield opened
    opened.close()


@pytest.fixture
def worlds(tmp_path: Path, clockwork: Nursery, dialect: str, request: pytest.FixtureRequest) -> Iterator[Worlds]:
    made = Worlds(tmp_path, clockwork, request.getfixturevalue("databases") if dialect == "postgres" else None)
    yield made
    made.close()


@pytest.fixture
def clock(world: World) -> WallClock:
    return WallClock(world)


@FORWARD_AND_BACK
def test_set_under_two_workers_nobody_takes_a_run_from_the_one_that_lives(world: World, clock: WallClock, set_by_s: float) -> None:
    # With the usual lease: for seconds after the jump, the last heartbeat of every worker is an hour old.
    world.begin(r=[["deed", "first", 0.8], ["deed", "second", 0.8]])
    holder = clock.start("victims:serve", until=["r"])
    world.ledger.wait_for(lambda lines: len(lines) == 1)
    onlooker = clock.start("victims:serve", until=["r"])
    world.wait_until(lambda: _workers(world) == 2, "both are at work")
    clock.set(set_by_s)
    assert (world.wait(holder), world.wait(onlooker)) == (0, 0), world.log()
    assert [claim.takeover for claim in claims(world, "r")] == [False], "it was taken from a worker that lives"
    assert {line["pid"] for line in world.ledger.lines()} == {holder}
    check_one_effect_each(world, "r", ["first", "second"])
    check_journal(world, "r")


@FORWARD_AND_BACK
def test_set_between_two_workers_the_second_goes_on_where_the_first_was_killed(world: World, clock: WallClock, set_by_s: float) -> None:
    world.begin(r=[["step", "before", 0], ["deed", "paid", 30]], s=[["step", "other", 0.2], ["step", "last", 0]])
    victim = clock.start("victims:serve")
    world.ledger.wait_for(lambda lines: {"before", "paid", "other"} <= {line["what"] for line in lines})
    os.kill(victim, signal.SIGKILL)
    assert world.wait(victim) == KILLED
    clock.set(set_by_s)
    report = world.report()
    assert clock.run("victims:serve", until=["r", "s"], report=report) == 0, world.log()
    told = world.told(report)
    # The `once` call was under way: it is in doubt, whatever the clock says. The other run continues at once, even an
    # hour before its start.
    assert told["r"]["status"] == "needs_attention", told
    assert told["s"]["output"] == ["other done", "last done"], told
    assert len(world.ledger.lines("begun", "r")) == 2
    for run_id in ("r", "s"):
        check_journal(world, run_id)


@FORWARD_AND_BACK
def test_set_while_runs_wait_timers_and_approvals_are_early_or_late_and_never_lost(world: World, clock: WallClock, set_by_s: float) -> None:
    """The wait takes half an hour.

    When the clock was set forward, it is over; before that, `why` says what the run waits for.
    """
    assert clock.run("victims:start", runs={"nap": [HOUR / 2]}, agent="sleeper") == 0
    assert clock.run("victims:start", runs={RUN: [1, HOUR / 2, 0.0]}, agent="council") == 0
    worker = clock.start("victims:serve")
    world.wait_until(lambda: _statuses(world) == ["waiting", "waiting_approval"], "both wait")
    clock.set(set_by_s)
    over = set_by_s > 0 and world.dialect == "sqlite"
    if over:
        world.wait_until(lambda: _statuses(world) == ["succeeded", "succeeded"], "their time is over")
        check_one_effect_each(world, "nap", ["woken"])
    report = world.report()
    assert clock.run("people:decide", report=report, approval=approval_id("default", RUN, 1)) == 0, world.log()
    assert world.told(report)["answer"] == ("RunEnded" if over else "counted"), world.told(report)
    world.wait_until(lambda: _statuses(world)[1] == "succeeded", "the decision has been heard")
    if not over:
        assert _statuses(world)[0] == "waiting", "it was woken before its time"
        assert clock.run("wrong_clock:explain", run_id="nap") == 0, world.log()
        left = "1.5 h" if world.dialect == "sqlite" else "(30|29) min"
        assert re.search(rf"waiting since .*: for timer, until .* \(in {left}\)", world.log()), world.log()
        clock.set(set_by_s + HOUR)
    os.kill(worker, signal.SIGTERM)
    assert world.wait(worker) == 0, world.log()
    assert [event.type for event in check_journal(world)].count("approval_expired") == over
    check_journal(world, "nap")


def _statuses(world: World) -> list[str | None]:
    rows = [world.peek(run_id)[0] for run_id in ("nap", RUN)]
    return [None if row is None else row.status for row in rows]


def _workers(world: World) -> int:
    with world.journal.reading() as store:
        return len(store.workers(0, 0))
