"""What must hold after any crash. Each check is a function that raises AssertionError; test_guards_can_fail.py shows that each can."""

from __future__ import annotations

from typing import Any

from tests.crash.errands import ORDER, OUTPUT
from tests.crash.world import RUN, World

from perdure.core.events import Event, RunClaimed, ToolCallInitiated
from perdure.inspect.verify import verify_run
from perdure.store.api import FINISHED

TERMINAL = ("run_succeeded", "run_failed", "run_cancelled")


def check_journal(world: World, run_id: str = RUN) -> list[Event]:
    """Nothing acknowledged is missing, seq has no gap, epochs never fall, nothing follows the end, `perdure verify` agrees (G1, G3, G10, G11)."""
    with world.journal.reading() as store:
        row = store.get(run_id)
        assert row is not None, f"run {run_id} does not exist"
        verdict = verify_run(store, row)
        assert verdict.problem is None, verdict
        events = store.read(run_id)
    missing = world.acknowledged(run_id) - {event.event_id for event in events}
    assert not missing, f"acknowledged, and not in the journal: {missing}"
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    epochs = [event.epoch for event in events]
    assert epochs == sorted(epochs)
    assert epochs[-1] == sum(isinstance(event.body, RunClaimed) for event in events)
    # After an end comes nothing, unless a person has reopened the run, or forked it.
    ends = [event.seq for event in events if event.type in TERMINAL]
    stay = [seq for seq in ends if seq == len(events) or events[seq].type not in ("run_reopened", "run_forked")]
    assert stay in ([], [len(events)]), f"events after the end: {stay} of {len(events)}"
    assert (row.status in FINISHED) == bool(stay)
    return events


def check_intent_first(world: World, kind: str, run_id: str = RUN) -> None:
    """Every effect in the world has a durable intent at this moment (G2).

    `read` needs no intent, a transaction commits its own.
    """
    if kind in ("read", "transaction"):
        return
    _, events = world.look(run_id)
    intended = {event.body.key for event in events if isinstance(event.body, ToolCallInitiated)}
    loose = [line for line in world.ledger.lines("begun", run_id) if line["key"] not in intended]
    assert not loose, f"effects without a durable intent: {loose}"


def check_effects(world: World, kind: str, run_id: str = RUN) -> None:
    """The world was changed as often as the effect class allows, for a call that has completed (section 2)."""
    effects = world.ledger.effects(ORDER, run_id)
    match kind:
        case "read" | "idempotent":
            assert len(effects) >= 1, effects
        case "keyed" | "keyed_reconcile" | "once" | "once_reconcile":
            assert len(effects) == 1, f"{kind}: {len(effects)} effects: {effects}"
        case "transaction":
            paid = world.paid()
            assert [row[:3] for row in paid] == [(ORDER, run_id, 2)], paid
            assert not effects
        case _:
            raise AssertionError(kind)
    keys = {line["key"] for line in world.ledger.lines("begun", run_id)}
    assert len(keys) == 1, f"one call, several keys: {keys}"


def check_succeeded(world: World, told: dict[str, Any], kind: str, run_id: str = RUN) -> list[Event]:
    """The run has ended well: the right output, the right effects, a sound journal, and it stays finished."""
    assert told == {"status": "succeeded", "output": OUTPUT, "error": None}, f"{told}\n{world.log()}"
    check_effects(world, kind, run_id)
    events = check_journal(world, run_id)
    check_stays_finished(world, kind, events, run_id)
    return events


def check_stays_finished(world: World, kind: str, events: list[Event], run_id: str = RUN) -> None:
    """Another process that asks for the run gets the same answer, and writes nothing (G10)."""
    before = world.ledger.lines()
    again = world.resume(kind=kind, run_id=run_id)
    assert again["output"] == OUTPUT
    assert world.look(run_id)[1] == events
    assert world.ledger.lines() == before


def check_attention(world: World, told: dict[str, Any], effects: int, run_id: str = RUN) -> None:
    """The doubt is shown, a person is asked, and nothing has been tried again (G8)."""
    assert told["status"] == "needs_attention", f"{told}\n{world.log()}"
    assert "in doubt" in told["error"] or "may or may not" in told["error"], told
    assert len(world.ledger.effects(ORDER, run_id)) == effects
    assert len(world.ledger.lines("begun", run_id)) <= 1, "a `once` call was started twice"
    check_journal(world, run_id)
