"""kill -9 around every request to a model: before it, during the answer, before and during the commit of the answer.

An answer in the journal is never requested again. One kill costs at most one request, and it is recorded as lost.
"""

from __future__ import annotations

import os
import signal

import pytest
from tests.crash import thinking, victims
from tests.crash.fate import ANY
from tests.crash.mind_scenarios import check_an_answer_in_the_journal_is_not_asked_for_again
from tests.crash.minds import Mind, ordering
from tests.crash.waiting_checks import check_budget
from tests.crash.world import RUN
from tests.servers.providers import say

COMMIT = ("before", "half", "handed", "kept", "after")
DURABLE = ("handed", "kept", "after")
CLAUDE = "claude-crash"
# Place, moment, which visit, of what; then how many requests the provider has seen for nothing, and how many are recorded as lost.
Boundary = tuple[str, str, int, str, int, int]


def around(question: int) -> list[Boundary]:
    """Every boundary of the first request, or of the second request, which has the result of the tool."""
    return [
        *(("asked", moment, question, CLAUDE, 0, int(moment in DURABLE)) for moment in COMMIT),
        ("start", "before", question, CLAUDE, 0, 1),
        ("stream", "before", 3 if question == 1 else 10, CLAUDE, 1, 1),
        ("arrive", "before", 1 if question == 1 else 3, ANY, 1, 1),
        *(("answered", moment, question, CLAUDE, int(moment not in DURABLE), int(moment not in DURABLE)) for moment in COMMIT),
    ]


@pytest.mark.parametrize(
    ("place", "moment", "nth", "of", "lost", "told"),
    [*around(1), *(one for one in around(2) if one[1] in ("half", "kept") or one[0] in ("stream", "arrive"))],
)
def test_killed_around_a_question_its_answer_is_asked_for_once(
    mind: Mind, place: str, moment: str, nth: int, of: str, lost: int, told: int
) -> None:
    mind.script(*ordering())
    mind.rest(die=[place, moment, nth, of])
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (lost, told, 2), accounts
    assert len(mind.world.ledger.effects("order")) == 1


# -- the three wire formats -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("agent", "dialect"), [("clerk", "sqlite"), ("clerk_chat", "postgres"), ("clerk_responses", "sqlite")])
@pytest.mark.parametrize("after", [None, 0.6])
def test_killed_from_outside_while_the_provider_thinks_or_speaks(mind: Mind, agent: str, after: float | None) -> None:
    mind.script(*ordering())
    mind.fault("hold", after=after)
    mind.kill_while_held(agent)
    accounts = mind.check(mind.rest(agent))
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (1, 1, 2), accounts


@pytest.mark.parametrize(("agent", "dialect"), [("clerk", "postgres"), ("clerk_chat", "sqlite"), ("clerk_responses", "postgres")])
@pytest.mark.parametrize(
    ("place", "moment", "nth", "lost", "told"),
    [("asked", "kept", 2, 0, 1), ("stream", "before", 3, 1, 1), ("answered", "half", 2, 1, 1)],
)
def test_killed_with_signed_thoughts_in_the_conversation_they_go_back_unchanged(
    mind: Mind, agent: str, place: str, moment: str, nth: int, lost: int, told: int
) -> None:
    """The server refuses a thought that was touched, or left out."""
    first, last = ordering()
    mind.script({**first, "thought": "A thought of mine."}, last)
    mind.rest(agent, die=[place, moment, nth, ANY])
    accounts = mind.check(mind.rest(agent))
    assert (accounts.lost_requests, accounts.lost_events) == (lost, told), accounts


# -- trouble of the provider's own -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fault", "place", "moment", "nth", "lost", "told", "failures"),
    [
        ("429", "stumble", "before", 1, 1, 1, 0),  # no process has seen the refusal: the request counts as lost
        ("429", "stumble", "kept", 1, 0, 1, 1),  # it may be asked again at once: the next intent is in the same commit
        ("529", "stumble", "half", 1, 1, 1, 0),
        ("500", "asked", "kept", 2, 0, 1, 1),  # the intent of the next attempt
        ("reset", "stumble", "after", 1, 0, 0, 1),
        ("reset_body", "stumble", "handed", 1, 0, 0, 1),
        ("truncate", "answered", "half", 1, 1, 1, 1),
    ],
)
def test_killed_while_it_tries_again(
    mind: Mind, fault: str, place: str, moment: str, nth: int, lost: int, told: int, failures: int
) -> None:
    mind.script(*ordering())
    mind.fault(fault, **({"retry_after": 0} if fault == "429" else {}))
    mind.rest(die=[place, moment, nth])
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.lost_events, accounts.failures, accounts.answers) == (lost, told, failures, 2), accounts


# -- more than once, and more than one -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("place", "moment", "lost", "told"),
    [
        ("claim", "after", 1, 1),
        ("append", "half", 1, 1),
        ("append", "kept", 1, 2),  # that the first was lost, and the intent of the second, are one commit
        ("stream", "before", 2, 2),
        ("answered", "half", 2, 2),
        ("answered", "kept", 1, 1),
    ],
)
def test_killed_again_while_another_process_resumes_it(mind: Mind, place: str, moment: str, lost: int, told: int) -> None:
    mind.script(*ordering())
    mind.rest(die=["arrive", "before", 1, ANY])
    mind.rest(die=[place, moment, 1, CLAUDE])
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (lost, told, 2), accounts


def test_killed_three_times_over_the_same_answer_it_is_lost_three_times_and_journaled_once(mind: Mind) -> None:
    mind.script(*ordering())
    for _ in range(3):
        mind.rest(die=["arrive", "before", 1, ANY])
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (3, 3, 2), accounts


def test_killed_while_one_of_two_questions_is_answered_only_the_other_is_asked_again(mind: Mind) -> None:
    check_an_answer_in_the_journal_is_not_asked_for_again(mind)


def test_killed_while_two_questions_are_open_both_are_lost(mind: Mind) -> None:
    """One kill, two lost requests: it is one for each question that is open at the time."""
    mind.script(say("left said"), say("Both said."), of=" left")
    mind.script(say("right said"), of=" right")
    mind.fault("hold", times=2)
    mind.kill_while_held("asker", held=2)
    accounts = mind.check(mind.rest("asker"), ["left said", "right said", "Both said."], at_once=2)
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (2, 2, 3), accounts


# -- draining and cancelling -----------------------------------------------------------------------------------------------------
def serve_until_held(mind: Mind, **settings: object) -> int:
    mind.script(*ordering())
    mind.fault("hold", after=0.5)
    assert mind.world.run(thinking.begin, agent="clerk", args=[mind.word], run_id=RUN) == 0, mind.world.log()
    pid = mind.world.start(thinking.serve, env=mind.provider.env, settings=settings)
    mind.provider.wait_for(held=1)
    return pid


def test_a_drain_lets_the_answer_come_and_journals_it(mind: Mind) -> None:
    pid = serve_until_held(mind)
    os.kill(pid, signal.SIGTERM)
    mind.world.wait_until(lambda: "draining" in mind.world.log(), "that it drains")
    mind.provider.release()
    assert mind.world.wait(pid) == 0, mind.world.log()
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (0, 0, 2), accounts


def test_an_answer_that_outlasts_the_drain_is_lost_and_said_so(mind: Mind) -> None:
    pid = serve_until_held(mind, drain_timeout_s=0.05)
    os.kill(pid, signal.SIGTERM)
    assert mind.world.wait(pid) == 0, mind.world.log()
    mind.kills += 1
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (1, 1, 2), accounts


def test_a_second_sigterm_ends_it_at_once_and_nothing_is_asked_twice_for_that(mind: Mind) -> None:
    pid = serve_until_held(mind)
    os.kill(pid, signal.SIGTERM)
    mind.world.wait_until(lambda: "draining" in mind.world.log(), "that it drains")
    os.kill(pid, signal.SIGTERM)
    assert mind.world.wait(pid) == -signal.SIGTERM
    mind.kills += 1
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (1, 1, 2), accounts


def test_cancelled_after_a_kill_nobody_asks_again_and_the_lost_request_is_told(mind: Mind) -> None:
    mind.script(*ordering())
    mind.rest(die=["arrive", "before", 1, ANY])
    assert mind.world.run(victims.cancel, run_id=RUN) == 0
    assert mind.rest()["status"] == "cancelled"
    accounts = mind.check_accounts()
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (1, 1, 0), accounts
    assert len(mind.lines()) == 1


@pytest.mark.parametrize(("place", "moment", "lost"), [("asked", "kept", 0), ("arrive", "before", 1), ("answered", "half", 1)])
def test_killed_inside_a_budget_what_was_lost_is_charged_as_estimated_and_nothing_stays_reserved(
    mind: Mind, place: str, moment: str, lost: int
) -> None:
    mind.script(*ordering())
    mind.rest("thrifty", die=[place, moment, 1, ANY])
    accounts = mind.check(mind.rest("thrifty"))
    assert accounts.lost_requests == lost, accounts
    spent = check_budget(mind.world, RUN)
    answered = [line.tokens for line in mind.lines()[lost:]]
    estimated = accounts.lost_events * 500  # the most that it may say
    assert spent.tokens == sum(tokens["input"] + tokens["output"] for tokens in answered) + estimated, (spent, answered)


def test_a_finished_run_asks_nobody_and_says_the_same(mind: Mind) -> None:
    mind.script(*ordering())
    mind.rest(die=["answered", "kept", 2, CLAUDE])
    before = mind.world.look()[1], len(mind.lines())
    assert mind.rest()["output"] == mind.rest()["output"] == "It is done."
    assert (mind.world.look()[1], len(mind.lines())) == before
