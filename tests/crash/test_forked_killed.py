"""kill -9 around a fork, and in the first turns of a live fork: real processes, and the ledger counts the effects (T35)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.crash import people, victims
from tests.crash.checks import check_journal
from tests.crash.errands import ORDER, TOOLS
from tests.crash.fate import ANY
from tests.crash.world import KILLED, RUN, World

from perdure.core.events import RunForked
from perdure.core.state import fold

FORK = "fork-1"
KINDS = [kind for kind in TOOLS if kind != "read"]


def parent(world: World, kind: str) -> None:
    """The run has succeeded: two effects."""
    assert world.rest("branch", kind, "mine")["output"] == [f"{ORDER} done", "mine done", "after seen"], world.log()


def fork(world: World, kind: str, *, live: bool = True, die: list[Any] | None = None) -> str:
    report = world.report()
    how = {"input": {"kind": kind, "order": "other"}, "at": 2}
    code = world.run(people.fork, report=report, run_id=RUN, fork_id=FORK, live=live, how=how, die=die or [])
    if die:
        assert code == KILLED, world.log()
        return "killed"
    assert code == 0, world.log()
    return str(world.told(report)["answer"])


def check_effects(world: World, kind: str) -> None:
    """What the parent did happened once, and what the fork did on its own as often as its effect class allows."""
    events = check_journal(world, FORK)
    assert sum(isinstance(event.body, RunForked) for event in events) == 1
    state = fold(events)
    assert [call.tool for call in state.calls.values()] == [kind, kind, "look", kind]
    assert [call.inherited for call in state.calls.values()] == [True, True, True, False]
    if kind == "transaction":
        assert sorted(row[:3] for row in world.paid()) == [("mine", RUN, 2), (ORDER, RUN, 1), ("other", FORK, 4)]
        return
    effects = [(line["what"], line["key"]) for line in world.ledger.effects()]
    assert [what for what, _ in effects].count(ORDER) == 1
    assert [what for what, _ in effects].count("mine") == 1
    others = [key for what, key in effects if what == "other"]
    assert set(others) == {state.calls[4].key}
    assert len(others) == 1 or kind == "idempotent"


@pytest.mark.parametrize("moment", ["before", "half", "handed", "kept", "after"])
@pytest.mark.parametrize("kind", ["live", "stored"])
def test_a_person_who_is_killed_while_making_a_fork_has_made_all_of_it_or_nothing(world: World, kind: str, moment: str) -> None:
    parent(world, "once")
    before = world.look()
    fork(world, "once", live=kind == "live", die=["fork", moment, 1])
    row, _ = world.look(FORK)
    assert (row is not None) in ((False,) if moment in ("before", "half") else (True,) if moment in ("kept", "after") else (True, False))
    assert world.look() == before
    # Another person types the same.
    assert fork(world, "once", live=kind == "live") == ("done" if row is None else "Conflict")
    if kind == "live":
        assert world.rest("branch", "once", "other", run_id=FORK)["output"] == [f"{ORDER} done", "other done", "after seen"]
        check_effects(world, "once")
    else:
        check_journal(world, FORK)
        assert len(world.ledger.effects()) == 2


@pytest.mark.parametrize(
    ("place", "moment", "nth"),
    [
        *(("claim", "half", 1), ("claim", "kept", 1)),
        *(("append", "before", 1), ("append", "half", 1), ("append", "kept", 1), ("append", "kept", 2)),
        *(("effect", "before", 1), ("effect", "after", 1), ("end", "half", 1)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_in_a_live_fork_nothing_of_its_parent_happens_again_and_its_own_call_as_its_class_allows(
    world: World, kind: str, place: str, moment: str, nth: int
) -> None:
    parent(world, kind)
    assert fork(world, kind) == "done"
    report = world.report()
    code = world.run(victims.rest, report=report, agent="branch", args=[kind, "other"], run_id=FORK, die=[place, moment, nth, ANY])
    assert code in (KILLED, 0), world.log()
    told = world.rest("branch", kind, "other", run_id=FORK)
    if told["status"] == "needs_attention":
        # A `once` call without a hook: a person says what has become of it.
        assert kind == "once", told
        happened = any(line["what"] == "other" for line in world.ledger.effects())
        answer: dict[str, Any] = {"happened": "other done"} if happened else {"did_not_happen": True}
        assert world.run(victims.resolve, run_id=FORK, call=4, **answer) == 0
        told = world.rest("branch", kind, "other", run_id=FORK)
    assert told["output"] == [f"{ORDER} done", "other done", "after seen"], (told, world.log())
    check_effects(world, kind)
