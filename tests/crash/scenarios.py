"""Crashes and everything that must hold afterwards, as functions. Tests and tests of the guards call them."""

from __future__ import annotations

import os
import signal
from collections import Counter

from tests.crash import victims
from tests.crash.checks import check_attention, check_intent_first, check_journal, check_succeeded
from tests.crash.chores import NOTHINGS
from tests.crash.world import KILLED, World

from perdure.core.events import AttentionNeeded, RunClaimed

SHORT = {"lease_s": 0.4}


def claims(world: World, run_id: str) -> list[RunClaimed]:
    return [event.body for event in world.peek(run_id)[1] if isinstance(event.body, RunClaimed)]


def check_one_effect_each(world: World, run_id: str, expected: list[str]) -> None:
    found = Counter(line["what"] for line in world.ledger.effects(run=run_id))
    assert found == Counter(expected), f"run {run_id} was to have the effects {expected}, and had {dict(found)}"


def check_no_effect_before_its_intent(world: World) -> None:
    world.kill_at("intent", "before", kind="once")
    check_intent_first(world, "once")
    check_succeeded(world, world.resume(kind="once"), "once")


def check_a_hook_is_asked_before_a_call_is_made_again(world: World) -> None:
    world.kill_at("effect", "after", kind="once_reconcile")
    check_succeeded(world, world.resume(kind="once_reconcile"), "once_reconcile")


def check_a_once_call_in_doubt_is_not_made_again(world: World) -> None:
    world.kill_at("effect", "after", kind="once")
    check_attention(world, world.resume(kind="once"), effects=1)


def check_two_identical_calls_are_two_effects(world: World) -> None:
    world.begin(r=[["work", "a", 0], ["work", "a", 0]])
    assert world.finish("r")["r"]["output"] == ["a done", "a done"]
    check_one_effect_each(world, "r", ["a", "a"])


def check_false_results_are_results(world: World) -> None:
    """T3, live and on replay."""
    world.begin(r=[*(["nothing", str(n), 0] for n in range(len(NOTHINGS))), ["work", "last", 0]])
    world.run(victims.drive, run_id="r", report=world.report(), die=["intent", "before", 1, "work"])
    told = world.finish("r")["r"]
    assert told["output"] == [*NOTHINGS, "last done"], told
    check_one_effect_each(world, "r", [*(str(n) for n in range(len(NOTHINGS))), "last"])


def check_a_result_that_cannot_be_recorded_does_not_repeat_the_effect(world: World) -> None:
    """T2."""
    world.begin(r=[["odd", "o", 0]])
    told = world.finish("r")["r"]
    check_one_effect_each(world, "r", ["o"])
    assert told["output"] == ["failed: not_encodable"], told


def check_a_run_whose_code_does_something_else_stops(world: World) -> None:
    """G7."""
    assert world.run(victims.start, runs={"r": []}, agent="fickle") == 0
    assert world.run(victims.drive, run_id="r", report=world.report(), word="yes", die=["intent", "after", 2, "work"]) == KILLED
    report = world.report()
    assert world.run(victims.drive, run_id="r", report=report, word="no") == 0
    told = world.told(report)
    assert told["status"] == "needs_attention", told
    assert "the code asks for call 1" in told["error"], told
    assert [line["what"] for line in world.ledger.effects()] == ["yes"]


def check_completions_are_replayed_in_the_order_in_which_they_came(world: World) -> None:
    assert world.run(victims.start, runs={"r": []}, agent="racing") == 0
    pid = world.start(victims.drive, run_id="r", report=world.report(), die=["effect", "never"])
    world.ledger.wait_for(lambda lines: any(line["what"] == "after slow done" for line in lines))
    os.kill(pid, signal.SIGKILL)
    world.wait(pid)
    told = world.finish("r")["r"]
    assert told["output"] == ["after fast done done", "after slow done done", "last done"], told
    check_one_effect_each(world, "r", ["slow", "fast", "after fast done", "after slow done", "last"])


def check_a_sleeping_worker_is_fenced(world: World) -> None:
    world.begin(r=[[["work", "short", 0.3], ["work", "long", 1.5]], ["work", "last", 0]])
    zombie = world.start(victims.serve, settings=SHORT)
    world.ledger.wait_for(lambda lines: len(lines) == 2)
    world.freeze(zombie)
    heir = world.start(victims.serve, until=["r"], settings=SHORT)
    try:
        # The heir has taken the run and begun its calls again, with the same keys.
        world.ledger.wait_for(lambda lines: sum(line["fact"] == "begun" for line in lines) == 4)
    finally:
        os.kill(zombie, signal.SIGCONT)
    try:
        # Its short call ends, it cannot write that down, and so its long one is stopped.
        lines = world.ledger.wait_for(lambda lines: any(line["fact"] == "cancelled" for line in lines), within_s=20)
        assert [(line["what"], line["pid"]) for line in lines if line["fact"] == "cancelled"] == [("long", zombie)]
        assert world.wait(heir) == 0
        check_one_effect_each(world, "r", ["short", "long", "last"])
        assert [claim.takeover for claim in claims(world, "r")] == [False, True]
        check_journal(world, "r")
        # It lost a run, not its mind: it serves on.
        world.begin(s=[["deed", "later", 0]])
        lines = world.ledger.wait_for(lambda lines: any(line["what"] == "later" and line["fact"] == "effect" for line in lines))
        assert lines[-1]["pid"] == zombie
    except AssertionError:
        os.kill(zombie, signal.SIGKILL)
        os.kill(heir, signal.SIGKILL)
        raise
    os.kill(zombie, signal.SIGTERM)
    assert world.wait(zombie) == 0


def check_a_late_write_is_refused(world: World) -> None:
    """A run was taken from a silent worker, and is not held.

    Its seq has not changed, and still the worker may not write (G4).
    """
    world.begin(r=[["deed", "o", 0.3]])
    # One run at a time: the worker cannot claim the run again before it has finished with it.
    zombie = world.start(victims.serve, until=["r"], settings={**SHORT, "concurrency": 1})
    world.ledger.wait_for(lambda lines: len(lines) == 1)
    world.freeze(zombie)
    try:
        assert world.run(victims.reap) == 0, world.log()
    finally:
        os.kill(zombie, signal.SIGCONT)
    assert world.wait(zombie) == 0, world.log()
    row, events = world.look("r")
    late = [event.type for event in events if event.epoch == 1 and event.type == "tool_call_completed"]
    assert not late, "a worker wrote under a lease that it had lost"
    # The worker claimed the run again, as any worker could: its call under the old lease is in doubt.
    assert row is not None
    assert row.status == "needs_attention", row
    check_one_effect_each(world, "r", ["o"])
    check_journal(world, "r")


def check_a_held_run_is_not_taken(world: World) -> None:
    world.begin(r=[["deed", "o", 0.3]])
    holder = world.start(victims.serve, until=["r"])
    world.ledger.wait_for(lambda lines: len(lines) == 1)
    report = world.report()
    code = world.run(victims.drive, run_id="r", report=report)
    world.wait(holder)
    assert code == 0
    assert world.told(report)["output"] == ["o done"], world.told(report)
    assert {line["pid"] for line in world.ledger.lines()} == {holder}
    assert len(claims(world, "r")) == 1


def check_a_blocked_loop_keeps_its_lease(world: World) -> None:
    world.begin(r=[["block", "b", 2.5], ["deed", "after", 0]])
    blocked = world.start(victims.serve, until=["r"], settings=SHORT)
    world.ledger.wait_for(lambda lines: len(lines) == 1)
    # Another worker looks on, and would take the run if its lease ran out.
    onlooker = world.start(victims.serve, until=["r"], settings=SHORT)
    codes = world.wait(blocked), world.wait(onlooker)
    assert codes == (0, 0), world.log()
    assert len(claims(world, "r")) == 1, "it was taken from a worker that lives"
    check_one_effect_each(world, "r", ["b", "after"])
    assert {line["pid"] for line in world.ledger.lines()} == {blocked}
    check_journal(world, "r")


def check_poison_is_parked(world: World) -> None:
    """T26: the run that kills its workers stops doing so; innocent runs of the same workers finish."""
    limit, deaths = 4, 0
    most = limit + 2  # two more than alone: six runs are a group of six, of three, and then it is alone
    innocent = {f"i{n}": [["work", f"w{n}-{m}", 0.02] for m in range(4)] for n in range(5)}
    world.begin(bad=[["poison", "p", 0]], **innocent)
    while (code := world.run(victims.serve, until=["bad", *innocent], settings={"poison_limit": limit})) != 0:
        assert code == KILLED, world.log()
        deaths += 1
        assert deaths <= most, "nobody stops it"
    row, events = world.look("bad")
    assert row is not None
    assert row.status == "needs_attention"
    assert [event.body.reason for event in events if isinstance(event.body, AttentionNeeded)] == ["poison"]
    assert limit <= len(world.ledger.lines("begun", "bad")) == deaths
    for run_id, todo in innocent.items():
        row, _ = world.look(run_id)
        assert row is not None
        assert row.status == "succeeded", (run_id, row)
        check_one_effect_each(world, run_id, [str(entry[1]) for entry in todo])
        check_journal(world, run_id)
