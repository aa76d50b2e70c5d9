"""Crashes of runs with models, and everything that must hold afterwards. Tests and tests of the guards call them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.crash import victims
from tests.crash.fate import ANY
from tests.crash.minds import DONE, ORDER, Mind, ordering
from tests.crash.waiting_scenarios import say as decide
from tests.crash.world import RUN
from tests.servers.providers import say, use


def check_an_answer_in_the_journal_is_not_asked_for_again(mind: Mind) -> None:
    """One of two requests has its answer in the journal when the process is killed during the other."""
    mind.script(say("left said"), say("Both said."), of=" left")
    mind.script(say("right said"), of=" right")
    mind.fault("hold", when=f"{mind.word} right")
    pid = mind.start("asker")
    mind.provider.wait_for(held=1)
    mind.world.wait_until(lambda: any(event.type == "model_call_completed" for event in mind.world.peek()[1]), "an answer")
    mind.kill(pid)
    told = mind.rest("asker")
    asked = Counter(line.key for line in mind.lines())
    assert sorted(asked.values()) == [1, 1, 2], f"what was answered was asked for again: {asked}"
    accounts = mind.check(told, ["left said", "right said", "Both said."])
    assert (accounts.lost_requests, accounts.lost_events, accounts.answers) == (1, 1, 3), accounts


def check_a_lost_answer_is_told(mind: Mind) -> None:
    mind.script(*ordering())
    mind.rest(die=["arrive", "before", 1, ANY])
    accounts = mind.check(mind.rest())
    assert (accounts.lost_requests, accounts.lost_events) == (1, 1), accounts


def check_every_request_is_an_attempt_of_ours(mind: Mind) -> None:
    mind.script(*ordering())
    mind.fault("500", retry_after_ms=1)
    accounts = mind.check(mind.rest())
    assert (accounts.failures, len(mind.lines())) == (1, 3), accounts


def check_another_request_than_the_recorded_one_stops_the_run(mind: Mind, change: str = "prompt") -> None:
    """T30: the version is declared, so no other check has noticed the change."""
    mind.script(*ordering())
    mind.rest("pinned", die=["effect", "before", 1, "keyed"])
    told = mind.rest("pinned", change=change)
    assert told["status"] == "needs_attention", told
    assert "the code asks for call 1" in told["error"], told
    assert len(mind.lines()) == 1
    assert not mind.world.ledger.effects(ORDER)


def check_a_cancelled_conversation_can_be_continued(
    mind: Mind, die: Sequence[Any] = ("answered", "kept", 1, "keyed"), agent: str = "clerk"
) -> None:
    """T28: whatever the first run has left open, the provider accepts the request of the second run."""
    mind.script(say("Both.", use("keyed", what=ORDER), use("idempotent", what="beside")), say(DONE))
    mind.rest(agent, die=die)
    assert mind.world.run(victims.cancel, run_id=RUN) == 0
    told = mind.rest()
    if told["status"] == "needs_attention":  # a call is in doubt, and after a cancel it is not made again
        assert mind.world.run(victims.resolve, run_id=RUN, call=2, did_not_happen=True, final=True) == 0
        told = mind.rest()
    assert told["status"] == "cancelled", f"{told}\n{mind.world.log()}"
    mind.script(*[say(DONE)] * 3)
    mind.check(mind.rest(agent, "Please go on.", history_of=RUN, run_id="run-2"))
    said = mind.lines()[-1].body
    assert "Please go on." in str(said.get("messages", said.get("input"))[-1])


def check_a_no_is_told_to_the_model(mind: Mind) -> None:
    mind.script(*ordering("asked_once"))
    mind.rest(die=["request", "kept", 1])
    assert decide(mind.world, granted=False) == "counted"
    mind.check(mind.rest())


def check_another_plan_stops_the_run(mind: Mind, die: Sequence[Any] = ("effect", "after", 1, "keyed")) -> None:
    """T8: neither followed nor skipped over."""
    mind.rest("route", args=[], die=die)
    before = mind.world.ledger.effects()
    told = mind.rest("route", args=[], change="plan")
    assert told["status"] == "needs_attention", told
    assert "a run follows the plan that it was begun with" in told["error"], told
    assert mind.world.ledger.effects() == before
