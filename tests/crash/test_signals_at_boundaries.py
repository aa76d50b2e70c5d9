"""SIGTERM at every boundary of a run, a second one during the release, SIGINT between effect and record (T23, G13).

A drain does less harm than a crash: every attempt that has begun ends and is recorded, and no call is in doubt.
"""

from __future__ import annotations

import signal

import pytest
from tests.crash import victims
from tests.crash.checks import check_attention, check_effects, check_journal
from tests.crash.errands import ORDER, OUTPUT
from tests.crash.test_boundaries import COMMIT
from tests.crash.world import RUN, World

BOUNDARIES = [
    *(("claim", moment) for moment in ("before", "after")),
    *(("intent", moment) for moment in ("before", "half", "after")),
    ("start", "before"),
    ("effect", "before"),
    ("effect", "after"),
    ("arrive", "before"),
    *(("result", moment) for moment in ("kept", "after")),
    *(("park", moment) for moment in ("before", "after")),
    *(("end", moment) for moment in ("before", "after")),
]
BETWEEN = [("effect", "after"), ("arrive", "before"), ("result", "before"), ("result", "after")]


def finish(world: World) -> None:
    """Another process goes on; no effect happens twice and none is missing."""
    told = world.finish(RUN)[RUN]
    assert told == {"status": "succeeded", "output": OUTPUT, "error": None}, f"{told}\n{world.log()}"
    check_effects(world, "once")
    check_journal(world)


@pytest.mark.parametrize(("place", "moment"), BOUNDARIES)
def test_told_to_stop_at_a_boundary_the_run_is_handed_over_without_a_doubt(world: World, place: str, moment: str) -> None:
    nap_s = 0.4 if place == "park" else 0.02
    assert world.run(victims.start, runs={RUN: ["once", nap_s]}, agent="errand") == 0
    code = world.run(victims.serve, die=[place, moment, 1, "once", "SIGTERM"])
    assert code == 0, world.log()
    row, events = world.look()
    assert row is not None
    assert row.holder is None, row
    # A slow process hears of it late, and may have come to the next wait, or to the end, before.
    assert row.status in ("queued", "waiting", "succeeded"), row
    assert "tool_call_in_doubt" not in [event.type for event in events]
    finish(world)
    assert len(world.ledger.lines("begun")) == 1, "a `once` call was begun twice"


@pytest.mark.parametrize("moment", COMMIT)
def test_told_twice_while_it_hands_the_run_over_it_ends_at_once_as_in_a_crash(world: World, moment: str) -> None:
    assert world.run(victims.start, runs={RUN: ["once", 0.02]}, agent="errand") == 0
    code = world.run(victims.serve, die=["handover", moment, 1, "once", "SIGTERM"])
    world.journal.settle()  # its last commit may still be on its way to the server
    row, events = world.look()
    assert row is not None
    # After the commit the process may end before it gets the second signal. A process that handles the first signal
    # late reaches a wait instead.
    assert code == -signal.SIGTERM or (code == 0 and (moment == "after" or row.status in ("waiting", "succeeded"))), world.log()
    assert len(world.ledger.effects(ORDER)) == 1
    if any(event.type == "tool_call_completed" and event.call == 2 for event in events):
        finish(world)
    else:
        assert moment in ("before", "half", "handed"), "what was durable is gone"
        check_attention(world, world.finish(RUN)[RUN], effects=1)


@pytest.mark.parametrize(
    ("program", "place", "moment"), [*(("script", *where) for where in BETWEEN), *(("worker", *where) for where in BETWEEN[:2])]
)
def test_interrupted_between_effect_and_record_the_effect_is_recorded_or_in_doubt_and_never_repeated(
    world: World, program: str, place: str, moment: str
) -> None:
    """A worker drains. A script without a handler ends by its KeyboardInterrupt, at any place."""
    if program == "worker":
        assert world.run(victims.start, runs={RUN: ["once", 0.02]}, agent="errand") == 0
        assert world.run(victims.serve, die=[place, moment, 1, "once", "SIGINT"]) == 0, world.log()
    else:
        die = [place, moment, 1]
        assert world.run(victims.errand, report=world.report(), run_id=RUN, kind="once", die=die, blow="SIGINT") == 1, world.log()
        assert "KeyboardInterrupt" in world.log()
    _, events = world.look()
    recorded = any(event.type == "tool_call_completed" and event.call == 2 for event in events)
    assert recorded or (program == "script" and (place, moment) != ("result", "after")), "a worker that drains records what has happened"
    if recorded:
        finish(world)
    else:
        check_attention(world, world.finish(RUN)[RUN], effects=1)
