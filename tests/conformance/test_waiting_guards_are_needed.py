"""Tests of the tests of waiting: without any one guard, the test with the name of that guard fails."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import apsw
import pytest
from tests.conformance.suite import StoreConformance
from tests.unit import test_store_deciding as deciding

from perdure.core.codec import pack
from perdure.core.events import SignalReceived
from perdure.errors import StoreError
from perdure.store import approvals, delivery, family, journal, notices, queues
from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.store.sqlite.queries import QUERIES

pytestmark = pytest.mark.full

SUITE = StoreConformance()
SIGNAL = SignalReceived("t", pack(b"1")[0], "ann")
Check = Callable[[Store], object]
# (the statement, the guard in it, what stands there instead, the test that must notice)
STATEMENTS: dict[str, tuple[str, str, str, Check]] = {
    "consumed once": (
        "consume_approval",
        "AND status = 'approved'",
        "",
        SUITE.test_an_approval_is_consumed_once,
    ),
    "granted": (
        "consume_approval",
        "AND status = 'approved'",
        "",
        SUITE.test_an_approval_that_nobody_has_granted_starts_nothing,
    ),
    "in time": (
        "consume_approval",
        "AND (expires_at IS NULL OR expires_at > :ts)",
        "AND :ts",
        SUITE.test_an_approval_that_has_expired_starts_nothing,
    ),
    "in time when it is sent": (
        "consume_approval",
        "AND (expires_at IS NULL OR expires_at > :ts)",
        "AND :ts",
        SUITE.test_an_approval_that_expires_while_its_call_waits_for_the_disk_starts_nothing,
    ),
    "the approved arguments": (
        "consume_approval",
        "digest = :digest",
        ":digest IS NOT NULL",
        SUITE.test_an_approval_of_other_arguments_starts_nothing,
    ),
    "the approved tool": (
        "consume_approval",
        "action = :tool",
        ":tool IS NOT NULL",
        SUITE.test_an_approval_of_another_tool_or_call_starts_nothing,
    ),
    "the approved call": (
        "consume_approval",
        "call = :call",
        ":call",
        SUITE.test_an_approval_of_another_tool_or_call_starts_nothing,
    ),
    "the approved run": ("consume_approval", "run = :run", ":run", SUITE.test_an_approval_of_another_run_starts_nothing),
    "a refused append is undone": (
        "undo_append",
        "ROLLBACK TO perdure_append",
        "SELECT 1",
        SUITE.test_a_call_that_may_not_start_does_not_hinder_the_others_of_its_batch,
    ),
    "the decision is stored": (
        "change_approval",
        "status = :status",
        "status = iif(:status = '', '', status)",
        SUITE.test_a_decision_while_the_run_is_held_goes_to_its_holder_and_is_still_the_only_one,
    ),
    "nothing stays pending at the end": (
        "withdraw_approvals",
        "status = 'pending'",
        "status = 'nothing'",
        SUITE.test_what_a_run_has_left_pending_at_its_end_is_asked_of_nobody_any_more,
    ),
    "a key is taken once": (
        "remember_signal",
        "OR IGNORE",
        "OR REPLACE",
        SUITE.test_a_signal_with_a_key_is_taken_once_in_its_topic,
    ),
    "a charge counts above": (
        "charge_budgets",
        "SELECT b.above",
        "SELECT NULL",
        SUITE.test_a_charge_counts_in_every_budget_above_the_run,
    ),
    "a child stands under its parent's budget": (
        "insert_run",
        "(SELECT ledger FROM perdure_runs WHERE run_id = :parent)",
        "NULL",
        SUITE.test_a_charge_counts_in_every_budget_above_the_run,
    ),
    "reservations end with the run": (
        "free_reserved",
        "WHERE run = ?",
        "WHERE run = -?",
        SUITE.test_what_a_run_has_still_reserved_at_its_end_is_given_back,
    ),
    "a taken notice is one taker's": (
        "take_notice",
        "next_at = ?",
        "next_at = min(next_at, ?)",
        SUITE.test_a_notice_is_one_takers_until_its_time_is_over,
    ),
}
# (the name, where it is looked up, what stands there instead, the test that must notice)
FUNCTIONS: dict[str, tuple[ModuleType | type, str, Any, Check]] = {
    "post does not wake a paused run": (
        delivery,
        "landing",
        lambda status, attention, body: ("queued", "now"),
        lambda store: SUITE.test_a_post_lands_as_the_core_says(store, "paused", SIGNAL, ("paused", False)),
    ),
    "a finished parent is left alone": (
        family,
        "_is_over",
        lambda found: False,
        SUITE.test_the_end_of_a_child_leaves_a_paused_parent_paused_and_a_finished_one_alone,
    ),
    "a child's end is told": (
        family,
        "tell_parent",
        lambda *args: None,
        SUITE.test_the_end_of_a_child_goes_to_the_holder_of_its_parent,
    ),
    "who holds a run reads its post": (
        delivery.Delivery,
        "holds",
        lambda self, holder: False,
        SUITE.test_a_decision_while_the_run_is_held_goes_to_its_holder_and_is_still_the_only_one,
    ),
    "what came first is journaled first": (
        delivery,
        "journal_unread",
        lambda cursor, row, now, wanted: row,
        SUITE.test_what_the_last_holder_left_unread_keeps_its_place_before_what_comes_later,
    ),
    "a pause does not forget the time to begin": (
        delivery,
        "_not_before",
        lambda cursor, key, run_id: 0,
        SUITE.test_a_pause_does_not_make_a_run_begin_before_its_time,
    ),
    "limits count for a run that is asked for by name": (
        queues.Room,
        "has",
        lambda self, queue, tenant: True,
        SUITE.test_limits_apply_to_a_run_that_is_asked_for_by_its_id_when_they_are_given,
    ),
    "a transaction rings": (
        journal,
        "concerns_others",
        lambda batch, answers: False,
        SUITE.test_a_child_that_begins_in_a_transaction_is_made_known_like_any_other,
    ),
    "an approval is consumed at all": (
        approvals,
        "consume",
        lambda *args: None,
        SUITE.test_an_approval_is_consumed_by_the_commit_that_starts_its_call,
    ),
    "a notice goes out in the commit": (
        notices,
        "tell",
        lambda *args: None,
        SUITE.test_people_hear_of_what_needs_them_and_of_nothing_else,
    ),
}


def goes_red(check: Check) -> bool:
    """Does the test itself fail? A statement that is no longer valid SQL does not count."""
    store = open_store("sqlite://")
    try:
        check(store)
    except (AssertionError, ValueError, pytest.fail.Exception):
        return True
    except StoreError as error:
        # The triggers of the database are a second guard behind this guard.
        return "takes nothing more" in str(error) or "settled stays so" in str(error)
    finally:
        store.close()
    return False


def without_triggers(check: Check) -> Check:
    """Run the check in a database without its own guards, so that only the guards of the statements count."""

    def bare(store: Store) -> None:
        writer: apsw.Connection = store._database._writer  # type: ignore[attr-defined]
        writer.execute("DROP TRIGGER perdure_approvals_settled")
        check(store)

    return bare


@pytest.mark.parametrize("guard", STATEMENTS)
def test_without_the_guard_in_its_statement(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """… the promise that it is named for is broken, and a test says so."""
    name, predicate, instead, check = STATEMENTS[guard]
    assert not goes_red(without_triggers(check))
    assert predicate in QUERIES[name]
    monkeypatch.setitem(QUERIES, name, QUERIES[name].replace(predicate, instead))
    assert goes_red(without_triggers(check))


@pytest.mark.parametrize("guard", FUNCTIONS)
def test_without_the_code_for(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """… it, a test says so."""
    where, name, instead, check = FUNCTIONS[guard]
    assert not goes_red(check)
    monkeypatch.setattr(where, name, instead)
    assert goes_red(check)


def test_deciders_that_judge_what_they_read_before_the_transaction_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the decision not stored, four deciders all win: the interleavings see it."""
    monkeypatch.setattr(deciding, "RUNS", 4)
    deciding.test_of_all_who_decide_in_any_order_one_wins_and_the_journal_has_one_settlement(0)
    monkeypatch.setattr(approvals, "_change", lambda *args: None)
    with pytest.raises(AssertionError):
        deciding.test_of_all_who_decide_in_any_order_one_wins_and_the_journal_has_one_settlement(0)


def test_the_database_itself_keeps_a_settled_approval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that lets everything pass is stopped by the trigger."""
    monkeypatch.setattr("perdure.core.approval._check_pending", lambda *_: None)
    assert goes_red(SUITE.test_one_decision_counts_and_the_second_one_learns_of_the_first)
    with pytest.raises(Exception, match="settled stays so"):
        deciding.test_of_all_who_decide_in_any_order_one_wins_and_the_journal_has_one_settlement(0)
