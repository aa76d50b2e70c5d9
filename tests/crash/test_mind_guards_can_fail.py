"""Each guard for agents with models has a check that fails without the guard, as in test_guards_can_fail.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.crash import mind_scenarios as scenarios
from tests.crash.mind_mutations import MIND_MUTATIONS
from tests.crash.minds import Mind
from tests.crash.worlds import Worlds
from tests.servers.providers import Provider

# The mutation, the check, and what the check says about perdure without that guard.
GUARDS: dict[str, tuple[Callable[[Mind], None], str]] = {
    "answers_in_the_journal_are_taken_for_failures": (
        scenarios.check_an_answer_in_the_journal_is_not_asked_for_again,
        "was asked for again",
    ),
    "lost_answers_are_not_recorded": (scenarios.check_a_lost_answer_is_told, "0 are told as lost"),
    "requests_are_not_compared": (scenarios.check_another_request_than_the_recorded_one_stops_the_run, "succeeded"),
    "clients_try_again_on_their_own": (scenarios.check_every_request_is_an_attempt_of_ours, "1 requests came to nothing, 0 failed"),
    "what_hangs_at_the_end_of_a_run_is_left_hanging": (scenarios.check_a_cancelled_conversation_can_be_continued, "tool_use"),
    "what_was_not_called_is_not_told": (scenarios.check_a_no_is_told_to_the_model, "tool_use"),
}
SHARED = {"replay_does_not_compare": (scenarios.check_another_plan_stops_the_run, "succeeded")}  # with the guards of all runs


def test_every_mutation_has_its_check() -> None:
    assert GUARDS.keys() == MIND_MUTATIONS.keys()


@pytest.mark.parametrize("dialect", ["sqlite"])  # none of these guards is in a store
@pytest.mark.parametrize("mutation", [*GUARDS, *SHARED])
def test_with_the_guard_in_place_the_check_is_green_and_not(mutation: str, mind: Mind) -> None:
    (GUARDS | SHARED)[mutation][0](mind)


@pytest.mark.parametrize("dialect", ["sqlite"])  # none of these guards is in a store
@pytest.mark.parametrize("mutation", [*GUARDS, *SHARED])
def test_the_check_goes_red_when(mutation: str, worlds: Worlds, thinking_provider: Provider) -> None:
    check, words = (GUARDS | SHARED)[mutation]
    with pytest.raises(AssertionError, match=words):
        check(Mind(worlds.new(mutation), thinking_provider))
