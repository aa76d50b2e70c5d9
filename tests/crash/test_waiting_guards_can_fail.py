"""Each guard of waiting runs has a check that fails without the guard, as in test_guards_can_fail.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.crash import waiting_scenarios as scenarios
from tests.crash.waiting_mutations import WAITING_MUTATIONS
from tests.crash.world import World
from tests.crash.worlds import Worlds

# The mutation, the check, and what the check says about perdure without that guard.
GUARDS: dict[str, tuple[Callable[[World], None], str]] = {
    "any_answer_is_a_yes": (scenarios.check_a_rejected_call_starts_nothing, "without anybody's yes"),
    "a_start_does_not_look_at_the_expiry": (scenarios.check_an_approval_that_has_expired_starts_nothing, "without anybody's yes"),
    "a_start_does_not_compare_arguments": (
        scenarios.check_other_arguments_than_the_approved_ones_start_nothing,
        "without anybody's yes",
    ),
    "workers_do_not_look_at_the_expiry": (scenarios.check_a_worker_ends_what_was_granted_and_has_expired, "needs_attention"),
    "what_is_settled_is_decided_again": (scenarios.check_one_of_two_deciders_wins, r"'counted', 'counted'"),
    "decisions_are_judged_before_their_transaction": (scenarios.check_one_of_two_deciders_wins, r"'counted', 'counted'"),
    "a_park_ignores_the_inbox": (scenarios.check_a_decision_is_heard_while_parking, "was not heard"),
    "parents_are_told_afterwards": (scenarios.check_a_parent_hears_of_a_child_whose_worker_died_with_it, "the parent was not told"),
    "charges_are_made_afterwards": (scenarios.check_what_a_dead_worker_has_begun_is_charged, "the ledger says"),
    "every_signal_is_news": (scenarios.check_a_signal_that_is_sent_again_counts_once, "'a:0', 'a:0'"),
}


def test_every_mutation_has_its_check() -> None:
    assert GUARDS.keys() == WAITING_MUTATIONS.keys()


@pytest.mark.parametrize("mutation", GUARDS)
def test_with_the_guard_in_place_the_check_is_green_and_not(mutation: str, world: World) -> None:
    GUARDS[mutation][0](world)


@pytest.mark.parametrize("mutation", GUARDS)
def test_the_check_goes_red_when(mutation: str, worlds: Worlds) -> None:
    check, words = GUARDS[mutation]
    with pytest.raises(AssertionError, match=words):
        check(worlds.new(mutation))
