"""kill -9 of ReAct runs: inside and between the tools of a model's answer, during an approval, and in a child.

After each kill, the effects of the tools are right for their effect class, and the provider accepts every request
(T28).
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.crash import mind_scenarios as scenarios
from tests.crash import thinking, victims
from tests.crash.fate import ANY
from tests.crash.minds import DONE, ORDER, Mind, ordering
from tests.crash.petitions import BRIEF_S
from tests.crash.thinkers import LONG
from tests.crash.waiting_checks import check_family
from tests.crash.waiting_scenarios import say as decide
from tests.crash.world import KILLED, RUN
from tests.servers.providers import say, use

from perdure.core.events import DecisionMade, ModelCallInitiated

COMMIT = ("before", "half", "handed", "kept", "after")
CLAUDE = "claude-crash"


def told_to_model(mind: Mind, kind: str) -> list[dict[str, Any]]:
    """The results of this tool in the newest request that the provider has seen."""
    messages = mind.lines()[-1].body["messages"]
    names = {
        block["id"]: block["name"]
        for message in messages
        if message["role"] == "assistant"
        for block in message["content"]
        if block["type"] == "tool_use"
    }
    blocks = [block for message in messages if message["role"] == "user" for block in message["content"]]
    return [block for block in blocks if block["type"] == "tool_result" and names[block["tool_use_id"]] == kind]


def check_effects(mind: Mind, kind: str, what: str = ORDER) -> None:
    effects = mind.world.ledger.effects(what)
    match kind:
        case "transaction":
            assert [row[0] for row in mind.world.paid()] == [what]
        case "read" | "idempotent":
            assert effects
        case _:
            assert len(effects) == 1, f"{kind}: {effects}"


# -- inside a tool ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *((kind, "after") for kind in ("read", "idempotent", "keyed", "keyed_reconcile", "once_reconcile", "transaction")),
        *((kind, "before") for kind in ("once_reconcile", "transaction")),
    ],
)
def test_killed_inside_a_tool_that_the_model_wanted_it_behaves_as_its_class_says(mind: Mind, kind: str, moment: str) -> None:
    mind.script(*ordering(kind))
    mind.rest(die=["effect", moment, 1, kind])
    accounts = mind.check(mind.rest())
    # The answer of a `transaction` or a `read` is not durable before the tool begins: those two need no intent of their own.
    assert accounts.lost_events == accounts.lost_requests <= int(kind in ("read", "transaction")), accounts
    check_effects(mind, kind)
    (result,) = told_to_model(mind, kind)
    assert result["content"] == f"{ORDER} done"


@pytest.mark.parametrize("answer", [{"happened": "by hand"}, {"did_not_happen": True}, {"fail": "nobody knows"}])
def test_killed_inside_a_once_tool_a_person_says_what_became_of_it_and_the_model_hears_that(mind: Mind, answer: dict[str, Any]) -> None:
    moment = "after" if "happened" in answer else "before"
    mind.script(*ordering("once"))
    mind.rest(die=["effect", moment, 1, "once"])
    assert mind.rest()["status"] == "needs_attention", mind.world.log()
    assert len(mind.lines()) == 1
    assert mind.world.run(victims.resolve, run_id=RUN, call=2, **answer) == 0
    mind.check(mind.rest())
    (result,) = told_to_model(mind, "once")
    words = {"happened": "by hand", "did_not_happen": f"{ORDER} done", "fail": "nobody knows"}[next(iter(answer))]
    assert words in result["content"]
    assert bool(result.get("is_error")) == ("fail" in answer)
    assert len(mind.world.ledger.effects(ORDER)) == int("fail" not in answer)


# -- between the tools of one answer ---------------------------------------------------------------------------------------------
SEVERAL = [("keyed", "a"), ("once_reconcile", "b"), ("idempotent", "c"), ("keyed", "d"), ("dossier", "e")]


@pytest.mark.parametrize(
    ("place", "moment", "nth", "of"),
    [
        ("effect", "after", 1, "keyed"),
        ("effect", "before", 4, "keyed"),
        ("arrive", "before", 3, ANY),
        ("arrive", "before", 6, ANY),
        ("append", "kept", 3, ANY),
        ("asked", "half", 2, CLAUDE),
    ],
)
def test_killed_between_the_tools_of_one_answer_each_is_what_it_would_be_alone(
    mind: Mind, place: str, moment: str, nth: int, of: str
) -> None:
    mind.script(say("All of it.", *(use(kind, what=what) for kind, what in SEVERAL)), say(DONE))
    mind.rest(die=[place, moment, nth, of])
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.answers) == (0, 2), accounts
    for kind, what in SEVERAL[:4]:
        check_effects(mind, kind, what)
    assert [block["content"] for block in told_to_model(mind, "keyed")] == ["a done", "d done"]
    assert told_to_model(mind, "dossier")[0]["content"] == f"e: {LONG}"
    # The model's wish is one decision, and the long result is in the journal once.
    _, events = mind.world.look()
    assert sum(isinstance(event.body, DecisionMade) for event in events) == 1
    asked = [event.body.args for event in events if isinstance(event.body, ModelCallInitiated) and event.body.args is not None]
    assert LONG[:40].encode() not in (asked[1].inline or b"")


# -- a child that thinks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("place", "moment", "nth", "of", "lost"),
    [
        ("birth", "half", 1, CLAUDE, 1),  # with it goes the answer that wanted the child
        ("child asked", "kept", 1, CLAUDE, 0),
        ("child answered", "half", 1, CLAUDE, 1),
        ("effect", "after", 1, "keyed", 0),
        ("child end", "kept", 1, CLAUDE, 0),
        ("answered", "half", 2, CLAUDE, 1),
    ],
)
def test_killed_around_an_agent_that_is_the_tool_of_another_both_end_well(
    mind: Mind, place: str, moment: str, nth: int, of: str, lost: int
) -> None:
    inner = f"{mind.word} inner"
    mind.script(say("The clerk knows.", use("clerk", prompt=inner)), say("As the clerk says."))
    mind.script(*ordering(), of=" inner")
    mind.rest("boss", die=[place, moment, nth, of])
    accounts = mind.check(mind.rest("boss"), "As the clerk says.")
    assert (accounts.lost_requests, accounts.answers) == (lost, 4), accounts
    check_family(mind.world, RUN, 1)
    check_effects(mind, "keyed")
    assert told_to_model(mind, "clerk")[0]["content"] == DONE


def test_killed_inside_a_child_that_does_not_think_the_model_hears_of_its_end(mind: Mind) -> None:
    mind.script(say("", use("kin", name="child", seconds=0.0)), say(DONE))
    mind.rest(die=["effect", "after", 1, "toil"])
    mind.check(mind.rest())
    check_family(mind.world, RUN, 1)
    check_effects(mind, "keyed", "child")


# -- a person is asked -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("granted", [True, False])
@pytest.mark.parametrize("moment", ["half", "kept"])
def test_killed_while_it_asks_a_person_about_a_tool_the_model_hears_what_they_said(mind: Mind, moment: str, granted: bool) -> None:
    mind.script(*ordering("asked_once"))
    mind.rest(die=["request", moment, 1, "asked_once"])
    assert mind.rest()["status"] == "waiting_approval", mind.world.log()
    assert decide(mind.world, granted) == "counted"
    accounts = mind.check(mind.rest())
    # The request for the approval and the model's answer that led to it are one commit.
    assert accounts.lost_requests == int(moment == "half"), accounts
    (result,) = told_to_model(mind, "asked_once")
    assert len(mind.world.ledger.effects(ORDER)) == granted
    assert result["content"] == (f"{ORDER} done" if granted else "asked_once was not called: a person said no: no")


@pytest.mark.parametrize(("place", "moment"), [("claim", "after"), ("intent", "half"), ("asked", "half")])
def test_killed_after_the_person_has_agreed_the_tool_is_used_once(mind: Mind, place: str, moment: str) -> None:
    mind.script(*ordering("asked_keyed"))
    assert mind.rest()["status"] == "waiting_approval", mind.world.log()
    assert decide(mind.world) == "counted"
    mind.rest(die=[place, moment, 1, "asked_keyed"])
    mind.check(mind.rest())
    check_effects(mind, "keyed")


def test_killed_while_it_notices_that_nobody_has_answered_the_model_is_told_that_and_not_a_no(mind: Mind) -> None:
    """T20."""
    mind.script(*ordering("asked_brief"))
    mind.rest(die=["request", "after", 1])
    mind.rest(die=["decide", "half", 1], clock=[BRIEF_S + 1])
    mind.check(mind.rest(clock=[BRIEF_S + 1]))
    (result,) = told_to_model(mind, "asked_brief")
    assert result["content"] == "asked_brief was not called: nobody decided in time", result
    assert not mind.world.ledger.effects(ORDER)


# -- an answer of a type ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("place", "moment", "nth", "lost", "told"),
    [("asked", "half", 2, 1, 1), ("asked", "kept", 2, 0, 1), ("arrive", "before", 2, 1, 1)],
)
def test_killed_while_the_model_is_asked_again_for_an_answer_of_the_right_type(
    mind: Mind, place: str, moment: str, nth: int, lost: int, told: int
) -> None:
    wrong, right = say("", use("final_answer", guilty="perhaps")), say("", use("final_answer", guilty=True, years=3))
    mind.script(wrong, right)
    mind.rest("judge", die=[place, moment, nth, ANY])
    accounts = mind.check(mind.rest("judge"), {"guilty": True, "years": 3})
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (lost, told, 2), accounts
    (result,) = told_to_model(mind, "final_answer")
    assert (result["is_error"], "guilty" in result["content"]) == (True, True), result


# -- a word from outside ---------------------------------------------------------------------------------------------------------
WORD = f"And hurry. {LONG}"


def check_heard_once(mind: Mind) -> None:
    said = [
        block["text"]
        for message in mind.lines()[-1].body["messages"]
        if message["role"] == "user"
        for block in message["content"]
        if block["type"] == "text"
    ]
    assert said == [mind.word, WORD], said
    check_effects(mind, "keyed")


@pytest.mark.parametrize(("place", "moment"), [("asked", "half"), ("asked", "kept"), ("answered", "half")])
def test_killed_between_a_word_and_its_use_the_model_hears_it_once(mind: Mind, place: str, moment: str) -> None:
    mind.script(*ordering())
    mind.rest(die=["effect", "before", 1, "keyed"])
    assert mind.world.run(thinking.say, run_id=RUN, words=WORD) == 0, mind.world.log()
    mind.rest(die=[place, moment, 1, CLAUDE])
    mind.check(mind.rest())
    check_heard_once(mind)


@pytest.mark.parametrize("moment", ["half", "kept"])
def test_whoever_is_killed_over_a_word_says_it_again_and_the_model_hears_it_once(mind: Mind, moment: str) -> None:
    mind.script(*ordering())
    mind.rest(die=["effect", "before", 1, "keyed"])
    assert mind.world.run(thinking.say, run_id=RUN, words=WORD, die=["post", moment, 1]) == KILLED
    assert mind.world.run(thinking.say, run_id=RUN, words=WORD) == 0, mind.world.log()
    mind.check(mind.rest())
    check_heard_once(mind)


@pytest.mark.parametrize("moment", ["before", "kept"])
def test_killed_over_a_word_that_comes_while_the_model_answers(mind: Mind, moment: str) -> None:
    mind.script(*ordering())
    mind.fault("hold", after=0.5)
    pid = mind.start(die=["word", moment, 1])
    mind.provider.wait_for(held=1)
    assert mind.world.run(thinking.say, run_id=RUN, words=WORD) == 0, mind.world.log()
    assert mind.world.wait(pid) == KILLED, mind.world.log()
    mind.kills += 1
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.lost_events) == (1, 1), accounts
    check_heard_once(mind)


# -- a conversation that goes on after its end -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("place", "moment", "nth"),
    [("answered", "kept", 1), ("effect", "after", 2), ("asked", "kept", 2), ("arrive", "before", 1)],
)
def test_killed_and_cancelled_anywhere_the_conversation_can_be_continued(mind: Mind, place: str, moment: str, nth: int) -> None:
    scenarios.check_a_cancelled_conversation_can_be_continued(mind, [place, moment, nth, ANY if place == "arrive" else "keyed"])


@pytest.mark.parametrize(("agent", "dialect"), [("clerk_chat", "sqlite"), ("clerk_responses", "postgres")])
@pytest.mark.parametrize("place", ["answered", "effect"])
def test_killed_and_cancelled_the_conversation_can_be_continued_with_other_providers_too(mind: Mind, agent: str, place: str) -> None:
    scenarios.check_a_cancelled_conversation_can_be_continued(mind, [place, "after", 1, "keyed"], agent)


@pytest.mark.parametrize("moment", ["half", "kept"])
def test_killed_over_a_continuation_it_goes_on_with_the_same_conversation(mind: Mind, moment: str) -> None:
    scenarios.check_a_no_is_told_to_the_model(mind)
    mind.script(*ordering(), say("Then that.", use("keyed", what="again")), say("Gone on."))
    mind.rest("clerk", "Please go on.", history_of=RUN, run_id="run-2", die=["asked", moment, 2, CLAUDE])
    mind.check(mind.rest(run_id="run-2"), "Gone on.")
    check_effects(mind, "keyed", "again")
    assert not mind.world.ledger.effects(ORDER)


# -- another brain under the same run (T30) --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dialect", ["sqlite"])  # the rules of a run do not depend on the store
@pytest.mark.parametrize("change", ["prompt", "model", "schema"])
def test_a_run_that_was_killed_waits_for_the_agent_that_it_began_with(mind: Mind, change: str) -> None:
    mind.script(*ordering())
    mind.rest(die=["effect", "before", 1, "keyed"])
    told = mind.rest(change=change)
    assert (told["status"], "was begun with version" in told["error"]) == ("running", True), told
    assert len(mind.lines()) == 1, "it was asked something by an agent that it had not begun with"
    mind.check(mind.rest())
    check_effects(mind, "keyed")


@pytest.mark.parametrize("dialect", ["sqlite"])  # the rules of a run do not depend on the store
@pytest.mark.parametrize("change", ["prompt", "model", "schema"])
def test_under_the_same_version_another_request_than_the_recorded_one_stops_the_run_and_says_so(mind: Mind, change: str) -> None:
    scenarios.check_another_request_than_the_recorded_one_stops_the_run(mind, change)
