"""kill -9 at every boundary of a run, for every effect class. Then another process continues (GUARANTEES 5)."""

from __future__ import annotations

import os
import signal

import pytest
from tests.crash import victims
from tests.crash.checks import check_attention, check_intent_first, check_journal, check_succeeded
from tests.crash.errands import ORDER, OUTPUT, TOOLS
from tests.crash.world import KILLED, RUN, World

COMMIT = ("before", "half", "handed", "kept", "after")
# In the order in which a run reaches them: place, moment, which visit.
BOUNDARIES: list[tuple[str, str, int]] = [
    *(("create", moment, 1) for moment in COMMIT),
    *(("claim", moment, 1) for moment in COMMIT),
    *(("intent", moment, 1) for moment in COMMIT),
    ("start", "before", 1),
    *(("renew", moment, 1) for moment in ("before", "half", "after")),
    ("effect", "before", 1),
    ("effect", "after", 1),
    ("arrive", "before", 1),
    *(("result", moment, 1) for moment in COMMIT),
    *(("handover", moment, 1) for moment in COMMIT),
    *(("park", moment, 1) for moment in COMMIT),
    *(("claim", moment, 2) for moment in ("before", "kept", "after")),
    *(("end", moment, 1) for moment in COMMIT),
]
DURABLE = ("handed", "kept", "after")  # a killed process loses nothing that it has handed to the kernel
# A transaction is one commit with its intent, and has no separate attempt.
NOT_FOR = {"transaction": {("start", "before"), ("arrive", "before"), ("renew", "half"), *(("result", moment) for moment in COMMIT)}}
# Before the call is thought of, and when its result has long been durable, its kind makes no difference; nor does it inside a commit, after
# which all is there or nothing, as before it or after it. There two kinds take turns.
FAR = ("create", "claim", "end")
INSIDE = ("half", "handed")


def kinds_for(number: int, place: str, moment: str) -> list[str]:
    """Whose calls die at this boundary."""
    kinds = list(TOOLS)
    return [kinds[(number + step) % len(kinds)] for step in (0, 3)] if place in FAR or moment in INSIDE else kinds


CASES = [
    (kind, *boundary)
    for number, boundary in enumerate(BOUNDARIES)
    for kind in kinds_for(number, *boundary[:2])
    if boundary[:2] not in NOT_FOR.get(kind, set())
]


def effects_before(place: str, moment: str) -> int:
    """How many effects the world has seen when the process dies there."""
    return int((place, moment) == ("effect", "after") or place in ("arrive", "result", "handover", "park", "end"))


def leaves_doubt(place: str, moment: str, nth: int) -> bool:
    """Whether the journal then has an intent and no result."""
    match place:
        case "intent":
            return moment in DURABLE
        case "start" | "renew" | "effect" | "arrive":
            return True
        case "result" | "handover":
            return moment not in DURABLE
        case _:
            return False


@pytest.mark.parametrize(("kind", "place", "moment", "nth"), CASES)
def test_killed_at_a_boundary_the_run_goes_on_as_its_effect_class_says(world: World, kind: str, place: str, moment: str, nth: int) -> None:
    if place == "park" or nth == 2:
        world.nap_s = 0.4  # a machine that is busy with other things must not come to the timer when it is due already
    world.kill_at(place, moment, nth, kind=kind)
    check_intent_first(world, kind)
    happened = effects_before(place, moment) or nth == 2
    if kind in ("once", "once_reconcile", "keyed", "keyed_reconcile"):
        assert len(world.ledger.effects(ORDER)) == happened
    doubt = leaves_doubt(place, moment, nth)
    if kind == "once" and doubt:
        settle_both_ways(world, happened=bool(happened))
        return
    told = world.resume(kind=kind)
    check_succeeded(world, told, kind)
    if kind in ("keyed_reconcile", "once_reconcile"):
        # Asked before it is sent again, and not sent again when it has happened.
        assert len(world.ledger.lines("asked")) == doubt
        assert not world.ledger.lines("dropped")
    if kind in ("once", "once_reconcile") and not doubt:
        assert len(world.ledger.lines("begun")) == 1


def settle_both_ways(world: World, happened: bool) -> None:
    """The doubt is real: the run needs a person. The run continues with any answer of the person."""
    told = world.resume(kind="once")
    check_attention(world, told, effects=int(happened))
    # Asked again, it is still in doubt: nothing new is known.
    check_attention(world, world.resume(kind="once"), effects=int(happened))
    answers = {"happened": "by hand"} if happened else {"did_not_happen": True}
    true, failed = world.copy(), world.copy()
    assert true.run(victims.resolve, run_id=RUN, call=2, **answers) == 0
    told = true.resume(kind="once")
    expected = "by hand" if happened else f"{ORDER} done"
    assert told["output"] == {**OUTPUT, "receipt": expected}, told
    assert len(true.ledger.effects(ORDER)) == 1
    check_journal(true)
    assert failed.run(victims.resolve, run_id=RUN, call=2, fail="nobody knows") == 0
    told = failed.resume(kind="once")
    assert told["output"] == {**OUTPUT, "receipt": "failed: nobody knows"}, told
    assert len(failed.ledger.effects(ORDER)) == happened
    check_journal(failed)


@pytest.mark.parametrize("kind", TOOLS)
def test_killed_from_outside_while_the_tool_is_inside_its_effect(world: World, kind: str) -> None:
    pid = world.start(victims.errand, report=world.report(), run_id=RUN, kind=kind, die=["flight", "never", 1])
    world.ledger.wait_for(lambda lines: any(line["fact"] == "begun" for line in lines))
    os.kill(pid, signal.SIGKILL)
    assert world.wait(pid) == KILLED
    check_intent_first(world, kind)
    if kind == "once":
        settle_both_ways(world, happened=False)
    else:
        check_succeeded(world, world.resume(kind=kind), kind)


SECOND = [
    *((kind, "claim", "after") for kind in TOOLS),
    *((kind, "claim", "half") for kind in ("keyed", "once")),
    *((kind, "append", "before") for kind in TOOLS),
    *((kind, "append", "kept") for kind in TOOLS),
    *((kind, "effect", "after") for kind in ("read", "idempotent", "keyed", "transaction")),
    *((kind, "start", "before") for kind in ("read", "idempotent", "keyed")),
    *((kind, "reconcile", "before") for kind in ("keyed_reconcile", "once_reconcile")),
    *((kind, "resolved", moment) for kind in ("keyed_reconcile", "once_reconcile") for moment in ("before", "kept")),
    *(("once", "doubt", moment) for moment in ("half", "kept")),
]


@pytest.mark.parametrize(("kind", "place", "moment"), SECOND)
def test_killed_again_while_another_process_recovers_the_run(world: World, kind: str, place: str, moment: str) -> None:
    world.kill_at("effect", "after", kind=kind)
    world.kill_at(place, moment, kind=kind)
    if kind == "once":
        settle_both_ways(world, happened=True)
    else:
        check_succeeded(world, world.resume(kind=kind), kind)


@pytest.mark.parametrize("kind", ["idempotent", "keyed", "once_reconcile"])
def test_killed_four_times_in_a_row_the_run_still_ends_well(world: World, kind: str) -> None:
    for place, moment in (("intent", "after"), ("claim", "after"), ("append", "half"), ("append", "before")):
        world.kill_at(place, moment, kind=kind)
    check_succeeded(world, world.resume(kind=kind), kind)


def test_killed_while_it_waits_for_a_timer_the_run_goes_on_when_it_is_due(world: World) -> None:
    # Not parked: the process holds the run for a wait this short.
    pid = world.start(
        victims.errand, report=world.report(), run_id=RUN, kind="keyed", die=["asleep", "never", 1], settings={"park_after_s": 60}
    )
    world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
    os.kill(pid, signal.SIGKILL)
    assert world.wait(pid) == KILLED
    check_succeeded(world, world.resume(kind="keyed"), "keyed")
