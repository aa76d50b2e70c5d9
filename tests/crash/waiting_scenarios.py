"""Crashes of waiting runs, and everything that must hold afterwards. Tests and tests of the guards call them."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.crash import people, victims
from tests.crash.errands import OUTPUT
from tests.crash.petitions import BRIEF_S, CALL
from tests.crash.waiting_checks import approval_rows, check_approvals, check_budget, check_family, check_not_begun
from tests.crash.world import KILLED, RUN, World

from perdure.core.events import SignalReceived
from perdure.core.identity import approval_id

APPROVAL = approval_id("default", RUN, CALL)
QUESTION = approval_id("default", RUN, 1)
LATER = [BRIEF_S + 1]  # a time after the expiry of the short approvals


def say(world: World, granted: bool = True, approval: str = APPROVAL, **more: Any) -> str:
    """The result of a person's vote."""
    report = world.report()
    assert world.run(people.decide, report=report, approval=approval, granted=granted, **more) == 0, world.log()
    return str(world.told(report)["answer"])


# -- approvals ----------------------------------------------------------------------------------------------------------------
def check_a_decision_is_heard_while_parking(world: World, killed: bool = False) -> None:
    """The worker has looked for post, found none, and is about to give the run up: the decision comes at that very instant."""
    report = world.report()
    args = {"report": report, "agent": "vigil", "args": [1, 0.01], "run_id": RUN}
    worker = world.start(victims.rest, die=["park", "held", 1], **args)
    world.ledger.wait_for(lambda lines: any(line["fact"] == "held" for line in lines))
    assert say(world, approval=QUESTION) == "counted"
    if killed:
        os.kill(worker, signal.SIGKILL)
        assert world.wait(worker) == KILLED
    else:
        world.let_go()
        assert world.wait(worker) == 0, world.log()
    told = world.rest("vigil", 1, 0.01) if killed else world.told(report)
    assert told["status"] == "succeeded", f"the decision was not heard: {told}"
    assert told["output"] == ["approved"]
    assert check_approvals(world) == {QUESTION: "approved"}
    assert len(world.ledger.effects()) == 1


def check_an_approval_that_has_expired_starts_nothing(world: World) -> None:
    """The worker does not look at the time; the commit that starts the call does."""
    _brief_and_granted(world)
    _drive_carelessly(world, "brief", "expiry", clock=LATER)
    check_not_begun(world)
    told = world.rest("petition", "brief", clock=LATER)
    assert told["output"] == {**OUTPUT, "receipt": "not approved: expired"}, told
    assert check_approvals(world) == {APPROVAL: "expired"}


def check_a_worker_ends_what_was_granted_and_has_expired(world: World) -> None:
    """An approval that expired after the grant blocks nothing: the agent learns that it expired, and goes on."""
    _brief_and_granted(world)
    told = world.rest("petition", "brief", clock=LATER)
    assert told["output"] == {**OUTPUT, "receipt": "not approved: expired"}, told
    check_not_begun(world)


def _brief_and_granted(world: World) -> None:
    """Granted, and its worker dies before it can start anything."""
    world.rest("petition", "brief", die=["request", "after", 1])
    assert say(world) == "counted"


def check_other_arguments_than_the_approved_ones_start_nothing(world: World) -> None:
    """The worker is about to start another call than the approved one.

    The commit that starts the call compares the two.
    """
    assert world.rest("petition", "once")["status"] == "waiting_approval"
    assert say(world) == "counted"
    _drive_carelessly(world, "once", "arguments")
    check_not_begun(world)
    assert world.rest("petition", "once")["output"] == OUTPUT
    assert check_approvals(world) == {APPROVAL: "consumed"}


def check_a_rejected_call_starts_nothing(world: World) -> None:
    """The worker takes a no for a yes; the commit that starts the call finds no yes to use up."""
    assert world.rest("petition", "once")["status"] == "waiting_approval"
    assert say(world, granted=False) == "counted"
    _drive_carelessly(world, "once", "verdict")
    check_not_begun(world)
    assert world.rest("petition", "once")["output"] == {**OUTPUT, "receipt": "not approved: rejected"}
    assert check_approvals(world) == {APPROVAL: "rejected"}


def _drive_carelessly(world: World, kind: str, careless: str, **more: Any) -> None:
    """A worker that errs drives the petition until the store has refused it, or the call has begun; then it is killed."""
    args = {"report": world.report(), "agent": "petition", "args": [kind], "run_id": RUN, "careless": careless, **more}
    worker = world.start(victims.rest, **args)
    try:
        world.wait_until(lambda: "may not start" in world.log() or bool(world.ledger.lines("begun")), "it has tried to start")
    finally:
        os.kill(worker, signal.SIGKILL)
        world.wait(worker)


def check_one_of_two_deciders_wins(world: World, rounds: int = 25, held: bool = False) -> None:
    """An approval and a rejection of the same request at the same moment, many times.

    The first counts, and the second is refused (T17).
    """
    report, worker = world.report(), 0
    if held:
        args = {"report": report, "agent": "forum", "args": [rounds, True], "run_id": RUN}
        worker = world.start(victims.rest, **args)
        world.ledger.wait_for(lambda lines: any(line["what"] == "stay" for line in lines))
    else:
        assert world.rest("forum", rounds, False)["status"] == "waiting_approval"
    approvals = [row.approval for row in sorted(approval_rows(world, RUN), key=lambda row: row.call)]
    assert len(approvals) == rounds
    yes, no = _rivals(world, approvals)
    for place, pair in enumerate(zip(yes, no, strict=True)):
        assert sorted(pair) == ["Conflict", "counted"], f"question {place}: {pair}"
    if held:
        world.let_go()
        assert world.wait(worker) == 0, world.log()
        assert len([event for event in world.peek()[1] if event.type == "run_claimed"]) == 1, "nobody held it all the time"
    told = world.told(report) if held else world.rest("forum", rounds, False)
    won = ["approved" if answer == "counted" else "rejected" for answer in yes]
    assert told["output"] == won, told
    assert check_approvals(world) == dict(zip(approvals, won, strict=True))


def _rivals(world: World, approvals: list[str]) -> tuple[list[str], list[str]]:
    """What two processes heard that said yes and no to all of these, each at the same instant."""
    barrier = world.folder / "barrier"
    barrier.write_bytes(b"\0\0")
    reports = [world.report(), world.report()]
    rivals = [
        world.start(people.rival, report=report, barrier=str(barrier), mine=mine, approvals=approvals)
        for mine, report in enumerate(reports)
    ]
    assert [world.wait(rival) for rival in rivals] == [0, 0], world.log()
    yes, no = (world.told(report)["answers"] for report in reports)
    return yes, no


# -- children, budgets, signals -----------------------------------------------------------------------------------------------
def check_a_parent_hears_of_a_child_whose_worker_died_with_it(world: World) -> None:
    """The child's last commit is durable, and every process that knows of it is dead. The parent still goes on."""
    world.rest("clan", 1, 0, die=["child end", "kept", 1])
    told = world.rest("clan", 1, 0)
    assert told["status"] == "succeeded", f"the parent was not told: {told}"
    assert told["output"] == ["child 0 done"]
    check_family(world, RUN, 1)


def check_what_a_dead_worker_has_begun_is_charged(world: World) -> None:
    """The intent is durable, and so is its charge to the budget: three calls, whichever worker makes them."""
    world.rest("purse", 9, die=["intent", "kept", 1, "toil"])
    told = world.rest("purse", 9)
    assert check_budget(world, RUN).calls == 3
    assert told["output"] == 2, told  # the call that was cut off was made again, and was charged again


def check_a_signal_that_is_sent_again_counts_once(world: World) -> None:
    """The sender died after the commit and before it knew: it sends the same again, under the same key."""
    assert world.rest("listener", 2)["status"] == "waiting"
    assert world.run(people.send, run_id=RUN, sender="a", count=2, die=["post", "kept", 1]) == KILLED
    assert world.run(people.send, run_id=RUN, sender="a", count=2) == 0, world.log()
    told = world.rest("listener", 2)
    assert told["output"] == ["a:0", "a:1"], told
    _, events = world.peek()
    assert sum(isinstance(event.body, SignalReceived) for event in events) == 2
