"""Several users of one resource: senders of signals, workers of a queue, a drain while everything is pending."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from typing import Any

import pytest
from tests.crash import people, victims
from tests.crash.checks import check_journal
from tests.crash.waiting_checks import approval_rows, check_approvals, check_family, check_waits
from tests.crash.world import KILLED, RUN, World

from perdure.core.events import SignalReceived
from perdure.core.identity import approval_id

SIGNALS = 100  # of each sender
SENDERS = ("a", "b", "c")
LIMIT = 3


def test_signals_of_killed_senders_to_a_run_of_killed_workers_arrive_once_each_and_in_order(world: World) -> None:
    """A sender that dies sends all signals again that may not have arrived, with the same keys (T27.

    None after the end).
    """
    total = SIGNALS * len(SENDERS)
    assert world.run(victims.start, runs={RUN: [total]}, agent="listener") == 0
    chance = random.Random(3)
    worker = world.start(victims.serve, until=[RUN])
    senders = {name: world.start(people.send, run_id=RUN, sender=name, count=SIGNALS, die=_next_death(chance)) for name in SENDERS}
    deaths = 0
    while senders:
        for name, pid in list(senders.items()):
            code = world.wait(pid)
            if code == 0:
                del senders[name]
                continue
            assert code == KILLED, world.log()
            deaths += 1
            senders[name] = world.start(people.send, run_id=RUN, sender=name, count=SIGNALS, die=_next_death(chance))
        if deaths % 3 == 0:
            os.kill(worker, signal.SIGKILL)
            world.wait(worker)
            worker = world.start(victims.serve, until=[RUN])
    assert world.wait(worker) == 0, world.log()
    assert deaths >= 9, f"only {deaths} senders died"
    events = check_journal(world)
    assert sum(isinstance(event.body, SignalReceived) for event in events) == total
    told = world.rest("listener", total)
    heard: dict[str, list[int]] = defaultdict(list)
    for name in told["output"]:
        sender, _, number = name.partition(":")
        heard[sender].append(int(number))
    assert heard == {sender: list(range(SIGNALS)) for sender in SENDERS}
    report = world.report()
    assert world.run(people.refused, run_id=RUN, report=report) == 0
    assert world.told(report) == {"error": "RunEnded"}


def _next_death(chance: random.Random) -> list[Any]:
    """After some signals: before one is sent, in the middle of its commit, or when it has arrived and the sender does not know."""
    return ["post", chance.choice(["before", "half", "handed", "kept", "after"]), chance.randint(10, 35)]


def test_a_queue_that_four_workers_share_never_has_more_than_its_limit_under_way(world: World) -> None:
    """Each run of the queue makes one call after the other; workers are killed in the middle of them."""
    runs = [f"q{place}" for place in range(24)]
    started = {run_id: [run_id, 0.02] for run_id in runs}
    assert world.run(victims.start, runs=started, agent="kin", queue="narrow") == 0
    settings = {"queues": {"narrow": {"concurrency": LIMIT}}, "concurrency": 5}
    workers = [world.start(victims.serve, until=runs, settings=settings) for _ in range(4)]
    chance = random.Random(2)
    for effects in (3, 7, 11, 15):
        world.ledger.wait_for(lambda lines, effects=effects: sum(line["fact"] == "effect" for line in lines) >= effects)  # type: ignore[misc]
        place = chance.randrange(4)
        world.ledger.note("killing", "worker", victim=workers[place])
        os.kill(workers[place], signal.SIGKILL)
        world.wait(workers[place])
        workers[place] = world.start(victims.serve, until=runs, settings=settings)
    assert [world.wait(pid) for pid in workers] == [0] * 4, world.log()
    assert _most_at_a_time(world) == LIMIT
    for run_id in runs:
        assert len(world.ledger.effects(run_id)) == 1
        check_journal(world, run_id)


def _most_at_a_time(world: World) -> int:
    """How many calls of workers that lived were under way at the same time, at most."""
    under_way: set[tuple[int, str]] = set()
    killed: set[int] = set()
    most = 0
    for line in world.ledger.lines():
        if line["fact"] == "killing":
            killed.add(line["victim"])
            under_way = {one for one in under_way if one[0] not in killed}
        elif line["fact"] == "begun" and line["pid"] not in killed:
            under_way.add((line["pid"], line["key"]))
            most = max(most, len(under_way))
        elif line["fact"] == "ended":
            under_way.discard((line["pid"], line["key"]))
    return most


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_is_told_to_stop_loses_nothing_of_what_is_pending(world: World, number: int) -> None:
    """A child, an approval and a timer at the same time.

    After the stop, the run needs no process, and another one continues (G13).
    """
    assert world.run(victims.start, runs={RUN: [0.6]}, agent="household") == 0
    worker = world.start(victims.serve)
    world.ledger.wait_for(lambda lines: any(line["fact"] == "begun" for line in lines))
    world.wait_until(lambda: len(approval_rows(world, RUN)) == 1, "it has asked")
    os.kill(worker, number)
    assert world.wait(worker) == (0 if number == signal.SIGTERM else KILLED), world.log()
    if number == signal.SIGTERM:
        # The child's call had begun, and ends before the worker does; the timer is on record.
        assert len(world.ledger.effects("child")) == 1
        row, _ = world.peek()
        assert row is not None
        assert row.holder is None
    report = world.report()
    assert world.run(people.decide, report=report, approval=approval_id("default", RUN, 2)) == 0
    assert world.told(report)["answer"] == "counted"
    told = world.finish(RUN)[RUN]
    assert told["output"] == {"child": "child done", "decision": "approved", "nap": "rested"}, f"{told}\n{world.log()}"
    assert list(check_approvals(world).values()) == ["approved"]
    check_family(world, RUN, 1)
    assert len(world.ledger.effects("child")) == 1


ENDINGS = [
    ("decide", "before"),
    ("decide", "half"),
    ("decide", "kept"),
    ("child end", "half"),
    ("child end", "kept"),
    ("end", "half"),
    ("end", "kept"),
]


@pytest.mark.parametrize(("place", "moment"), ENDINGS)
def test_a_cancel_with_everything_pending_is_carried_out_once_whoever_dies_over_it(world: World, place: str, moment: str) -> None:
    """The question is withdrawn, the child ends before it has begun anything, and the agent cleans up."""
    assert world.run(victims.start, runs={RUN: [60.0]}, agent="household") == 0
    mine = {"queues": ["default"]}  # no worker serves the child for now
    waiting = world.start(victims.serve, **mine)
    world.wait_until(lambda: _status(world) == "waiting_approval", "it waits")
    _stop(world, waiting)
    check_waits(world)
    assert world.run(victims.cancel, run_id=RUN) == 0
    if place == "decide":
        assert world.run(victims.serve, die=[place, moment, 1], **mine) == KILLED, world.log()
    if _status(world, f"{RUN}/1") != "cancelling":  # the dead process may have told it before
        cancelling = world.start(victims.serve, **mine)
        world.wait_until(lambda: _status(world, f"{RUN}/1") == "cancelling", "the child has been told")
        _stop(world, cancelling)
    if place != "decide":
        assert world.run(victims.serve, die=[place, moment, 1]) == KILLED, world.log()
    assert world.run(victims.serve, until=[RUN]) == 0, world.log()
    for run_id in (RUN, f"{RUN}/1"):
        assert _status(world, run_id) == "cancelled", world.log()
        check_journal(world, run_id)
    assert list(check_approvals(world).values()) == ["withdrawn"]
    assert [line["what"] for line in world.ledger.effects()] == ["cleaned up"]


def _stop(world: World, pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    assert world.wait(pid) == 0, world.log()


def _status(world: World, run_id: str = RUN) -> str | None:
    row, _ = world.peek(run_id)
    return None if row is None else row.status
