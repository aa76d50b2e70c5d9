"""kill -9 around a plan: before and after it is journaled, between its steps, and while a model writes it (T7, T8, T9)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.crash.fate import ANY
from tests.crash.mind_scenarios import check_another_plan_stops_the_run
from tests.crash.minds import Mind
from tests.crash.waiting_scenarios import say as decide
from tests.crash.world import RUN
from tests.servers.provider_answers import Turn
from tests.servers.providers import say, use

from perdure.core import codec
from perdure.core.events import PlanGenerated
from perdure.core.identity import approval_id

COMMIT = ("before", "half", "handed", "kept", "after")
DURABLE = ("handed", "kept", "after")
ROUTE = {"before": "before seen", "order": "order done", "settle": "order done done", "told": "order done done seen"}


def check_one_plan(mind: Mind) -> dict[str, Any]:
    """The plan of the run: recorded once, however often it was read since."""
    plans = [event.body.plan for event in mind.world.look()[1] if isinstance(event.body, PlanGenerated)]
    assert len(plans) == 1, f"{len(plans)} plans"
    assert plans[0].inline is not None
    found: dict[str, Any] = codec.decode(plans[0].inline)
    return found


# -- a plan that is known beforehand ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("place", "moment", "nth", "of"),
    [
        ("planned", "half", 1, "keyed"),
        ("planned", "kept", 1, "keyed"),
        ("effect", "after", 1, "keyed"),
        ("arrive", "before", 2, ANY),
        ("intent", "kept", 1, "once_reconcile"),
        ("effect", "after", 2, "once_reconcile"),
        ("end", "half", 1, "keyed"),
    ],
)
def test_killed_around_a_step_the_plan_goes_on_and_no_step_is_made_twice(mind: Mind, place: str, moment: str, nth: int, of: str) -> None:
    mind.rest("route", args=[], die=[place, moment, nth, of])
    mind.check(mind.rest("route", args=[]), ROUTE)
    check_one_plan(mind)
    # T9: a step that refers to another step gets exactly the value that the other step has returned.
    assert [line["what"] for line in mind.world.ledger.effects()] == ["order", "order done"]


@pytest.mark.parametrize("dialect", ["sqlite"])
@pytest.mark.parametrize(("place", "moment", "of"), [("planned", "kept", "keyed"), ("effect", "after", "keyed")])
def test_another_plan_under_the_same_run_stops_it_before_anything_is_done(mind: Mind, place: str, moment: str, of: str) -> None:
    check_another_plan_stops_the_run(mind, [place, moment, 1, of])


# -- a plan that a model writes --------------------------------------------------------------------------------------------------
def written(what: str) -> Turn:
    first = {"name": "order", "tool": "keyed", "args": {"what": what}}
    second = {"name": "told", "tool": "look", "args": {"what": {"$ref": ["order"]}}}
    return say("", use("submit_plan", steps=[first, second]))


WRONG = say("", use("submit_plan", steps=[{"name": "order", "tool": "no_such_tool", "args": {}}]))


@pytest.mark.parametrize(
    ("place", "moment", "nth", "of", "lost", "told", "kept"),
    [
        ("answered", "half", 1, ANY, 1, 1, False),
        ("asked", "kept", 2, ANY, 0, 1, False),
        ("arrive", "before", 2, ANY, 1, 1, False),
        *(("planned", moment, 1, ANY, *(2 * [int(moment not in DURABLE)]), moment in DURABLE) for moment in COMMIT),
        ("effect", "after", 1, "keyed", 0, 0, True),
    ],
)
def test_killed_around_a_plan_that_a_model_writes_a_journaled_plan_is_never_written_again(
    mind: Mind, place: str, moment: str, nth: int, of: str, lost: int, told: int, kept: bool
) -> None:
    """T7: after the crash the model would write another plan. It is not asked if a plan is in the journal."""
    mind.script(WRONG, written("order"))
    mind.rest("planner", die=[place, moment, nth, of])
    mind.script(WRONG, written("other"))
    what = "order" if kept else "other"
    accounts = mind.check(mind.rest("planner"), {"order": f"{what} done", "told": f"{what} done seen"})
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (lost, told, 2), accounts
    assert check_one_plan(mind)["steps"][0]["args"] == {"what": what}
    assert [line["what"] for line in mind.world.ledger.effects()] == [what]


@pytest.mark.parametrize(("place", "moment"), [("request", "kept"), ("planned", "half"), ("effect", "after")])
def test_killed_around_the_approval_of_a_plan_what_was_approved_is_followed(mind: Mind, place: str, moment: str) -> None:
    mind.script(written("order"))
    if place == "request":
        mind.rest("careful", die=[place, moment, 1])
    assert mind.rest("careful")["status"] == "waiting_approval", mind.world.log()
    mind.script(written("other"))
    assert decide(mind.world, approval=approval_id("default", RUN, 2)) == "counted"
    if place != "request":
        mind.rest("careful", die=[place, moment, 1, "keyed"])
    accounts = mind.check(mind.rest("careful"), {"order": "order done", "told": "order done seen"})
    assert (accounts.lost_events, accounts.answers) == (0, 1), accounts
    check_one_plan(mind)
    assert [line["what"] for line in mind.world.ledger.effects()] == ["order"]
