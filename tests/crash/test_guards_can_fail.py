"""Each guard has a check that fails without the guard. The other tests use the same checks with the guard in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.crash import scenarios
from tests.crash.mutations import MUTATIONS
from tests.crash.test_races import check_cancel_is_heard_while_parking
from tests.crash.waiting_mutations import a_park_ignores_the_inbox
from tests.crash.world import World
from tests.crash.worlds import Worlds

from perdure.store.postgres import queries as postgres
from perdure.store.sqlite import queries as sqlite

# The mutation, the check, and what the check says about perdure without that guard.
GUARDS: dict[str, tuple[Callable[[World], None], str]] = {
    "effects_start_before_their_intent_is_durable": (scenarios.check_no_effect_before_its_intent, "effects without a durable intent"),
    "keys_do_not_contain_the_call_number": (scenarios.check_two_identical_calls_are_two_effects, r"and had \{'a': 1\}"),
    "falsy_results_are_no_results": (scenarios.check_false_results_are_results, "waits for something that nothing can bring about"),
    "a_result_that_cannot_be_encoded_is_a_failed_call": (
        scenarios.check_a_result_that_cannot_be_recorded_does_not_repeat_the_effect,
        r"and had \{'o': 3\}",
    ),
    "replay_does_not_compare": (scenarios.check_a_run_whose_code_does_something_else_stops, "succeeded"),
    "replay_delivers_in_order_of_calls": (
        scenarios.check_completions_are_replayed_in_the_order_in_which_they_came,
        "the code asks for call 3",
    ),
    "hooks_are_not_asked": (scenarios.check_a_hook_is_asked_before_a_call_is_made_again, "2 effects"),
    "once_is_repeated": (scenarios.check_a_once_call_in_doubt_is_not_made_again, "succeeded"),
    "the_guard_is_off": (scenarios.check_a_late_write_is_refused, "under a lease that it had lost"),
    "locks_prove_nothing": (scenarios.check_a_held_run_is_not_taken, "may or may not have happened"),
    "leases_are_not_renewed": (scenarios.check_a_blocked_loop_keeps_its_lease, "taken from a worker that lives"),
    "poison_is_never_noticed": (scenarios.check_poison_is_parked, "nobody stops it"),
}


def test_every_mutation_has_its_check() -> None:
    assert GUARDS.keys() == MUTATIONS.keys()


@pytest.mark.parametrize("mutation", GUARDS)
def test_with_the_guard_in_place_the_check_is_green_and_not(mutation: str, world: World) -> None:
    GUARDS[mutation][0](world)


@pytest.mark.parametrize("mutation", GUARDS)
def test_the_check_goes_red_when(mutation: str, worlds: Worlds) -> None:
    check, words = GUARDS[mutation]
    with pytest.raises(AssertionError, match=words):
        check(worlds.new(mutation))


def test_the_check_goes_red_when_a_park_ignores_the_inbox(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for queries in (sqlite.QUERIES, postgres.QUERIES):
        for name in queries.keys() & {"unread_inbox_of_run", "advance_and_park", "append_many"}:
            monkeypatch.setitem(queries, name, queries[name])  # unchanged, so that monkeypatch restores it afterwards
    a_park_ignores_the_inbox()
    with pytest.raises(AssertionError, match="was not heard"):
        check_cancel_is_heard_while_parking(world, monkeypatch)
