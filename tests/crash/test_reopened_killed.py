"""kill -9 around a retry and a rewind, and after them: real processes, and the ledger counts the effects (T35)."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from tests.crash import people, victims
from tests.crash.checks import check_journal
from tests.crash.errands import ORDER, TOOLS
from tests.crash.fate import ANY
from tests.crash.world import KILLED, RUN, World

from perdure.core.events import BudgetRaised, RunReopened
from perdure.core.state import fold

KINDS = [kind for kind in TOOLS if kind not in ("read", "idempotent")]
OUTPUT = {"before": "before seen", "receipt": f"{ORDER} done", "after": "after seen"}


def failed(world: World, kind: str) -> None:
    """The run has failed at its end, and the bug is fixed now."""
    assert world.rest("mishap", kind)["status"] == "failed", world.log()
    world.ledger.path.with_suffix(".fixed").touch()


def reopen(world: World, **how: Any) -> str:
    report = world.report()
    code = world.run(people.reopen, report=report, run_id=RUN, **how)
    if how.get("die"):
        assert code == KILLED, world.log()
        return "killed"
    assert code == 0, world.log()
    return str(world.told(report)["answer"])


def check_once(world: World, told: dict[str, Any], kind: str, reopened: int = 1) -> None:
    """The run has succeeded, and each of its effects has happened once."""
    assert (told["status"], told["output"]) == ("succeeded", OUTPUT), told
    events = check_journal(world)
    assert sum(isinstance(event.body, RunReopened) for event in events) == reopened
    state = fold(events)
    assert [call.tool for call in state.calls.values()] == ["look", kind, "look"]
    if kind != "transaction":
        effects = world.ledger.effects()
        assert len(effects) == 1, effects
        assert effects[0]["key"] == state.calls[2].key
    else:
        assert state.calls[2].attempt == 1


@pytest.mark.parametrize("moment", ["before", "half", "handed", "kept", "after"])
def test_a_person_who_is_killed_while_reopening_a_run_has_reopened_it_or_has_not(world: World, moment: str) -> None:
    failed(world, "once")
    reopen(world, to=2, die=["reopen", moment, 1])
    events = world.look()[1]
    happened = sum(isinstance(event.body, RunReopened) for event in events)
    assert happened in ((0,) if moment in ("before", "half") else (1,) if moment in ("kept", "after") else (0, 1))
    # Another person retries: a run that was reopened already is queued, and cannot be retried.
    assert reopen(world) == ("Conflict" if happened else "done")
    check_once(world, world.rest("mishap", "once"), "once")


@pytest.mark.parametrize("moment", ["before", "half", "handed", "kept", "after"])
def test_a_person_who_is_killed_while_a_budget_is_raised_with_a_retry_has_done_both_or_neither(world: World, moment: str) -> None:
    told = world.rest("allowance", "once")
    assert (told["status"], "the budget of run" in told["error"]) == ("failed", True), told
    reopen(world, add_calls=1, die=["reopen", moment, 1])
    happened = [sum(isinstance(event.body, kind) for event in world.look()[1]) for kind in (RunReopened, BudgetRaised)]
    assert happened in ([[0, 0]] if moment in ("before", "half") else [[1, 1]] if moment in ("kept", "after") else [[0, 0], [1, 1]])
    check_journal(world)
    assert _limit(world) == 2 + happened[1]
    assert reopen(world, add_calls=1) == ("Conflict" if happened[0] else "done")
    told = world.rest("allowance", "once")
    assert (told["status"], told["output"]) == ("succeeded", OUTPUT), told
    check_journal(world)
    assert (_limit(world), len(world.ledger.effects())) == (3, 1)


def _limit(world: World) -> int | None:
    with world.journal.reading() as store:
        return store.ledgers(RUN)[0].limits.calls


@pytest.mark.parametrize(
    ("place", "moment", "nth"),
    [("claim", "half", 1), ("claim", "kept", 1), ("append", "before", 1), ("append", "half", 1), ("append", "kept", 1), ("end", "half", 1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_after_a_rewind_the_run_goes_on_and_makes_no_call_again(world: World, kind: str, place: str, moment: str, nth: int) -> None:
    failed(world, kind)
    assert reopen(world, to=2) == "done"
    world.rest("mishap", kind, die=[place, moment, nth, ANY])
    check_once(world, world.rest("mishap", kind), kind)


def test_a_call_in_doubt_stays_in_doubt_when_the_run_goes_back_behind_it(world: World) -> None:
    """Killed inside the effect. A person rewinds to before the call, and another worker is killed while it makes the call again."""
    world.rest("mishap", "once", die=["effect", "after", 1, "once"])
    world.ledger.path.with_suffix(".fixed").touch()
    assert world.rest("mishap", "once")["status"] == "needs_attention"
    assert reopen(world, to=2) == "done"
    world.rest("mishap", "once", die=["append", "kept", 1, ANY])
    assert world.rest("mishap", "once")["status"] == "needs_attention"
    assert world.run(victims.resolve, run_id=RUN, call=2, happened=f"{ORDER} done") == 0
    check_once(world, world.rest("mishap", "once"), "once")


def test_of_two_people_who_retry_at_the_same_moment_one_wins_and_the_other_is_told(world: World) -> None:
    failed(world, "once")
    barrier = world.folder / "barrier"
    barrier.write_bytes(b"\0\0")
    reports = [world.report(), world.report()]
    processes = [
        world.start(people.reopen, report=report, run_id=RUN, by=by, barrier=str(barrier), mine=mine)
        for mine, (report, by) in enumerate(zip(reports, ("ann", "bob"), strict=True))
    ]
    assert [world.wait(pid) for pid in processes] == [0, 0], world.log()
    assert sorted(world.told(report)["answer"] for report in reports) == ["Conflict", "done"]
    check_once(world, world.rest("mishap", "once"), "once")


def test_a_run_that_a_worker_holds_is_not_reopened(world: World) -> None:
    report = world.report()
    worker = world.start(victims.rest, report=report, agent="mishap", args=["keyed"], run_id=RUN, die=["flight", "never", 1, "keyed"])
    world.ledger.wait_for(lambda lines: any(line["fact"] == "begun" for line in lines))
    assert reopen(world, to=1) == "AlreadyRunning"
    os.kill(worker, signal.SIGKILL)
    assert world.wait(worker) == KILLED
    world.ledger.path.with_suffix(".fixed").touch()
    check_once(world, world.rest("mishap", "keyed"), "keyed", reopened=0)


def test_reopened_again_and_again_each_time_by_a_process_that_dies_then(world: World) -> None:
    """A rewind to each event, the last one first; each worker between is killed at another commit."""
    failed(world, "once")
    world.ledger.path.with_suffix(".fixed").unlink()
    last = len(world.look()[1])
    rewound = 0
    for nth, to in enumerate(range(last - 1, 1, -2), 1):
        report = world.report()
        code = world.run(people.reopen, report=report, run_id=RUN, to=to)
        if code != 0:  # the point is inside of one activation
            continue
        rewound += 1
        world.start(
            victims.rest, report=world.report(), agent="mishap", args=["once"], run_id=RUN, die=["append", "kept", 1 + nth % 2, ANY]
        )
        world.wait(max(world._alive))
        if world.rest("mishap", "once")["status"] != "failed":
            break
    assert rewound > 2
    world.ledger.path.with_suffix(".fixed").touch()
    assert reopen(world) == "done"
    check_once(world, world.rest("mishap", "once"), "once", reopened=rewound + 1)
