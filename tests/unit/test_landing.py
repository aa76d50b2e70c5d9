"""Which post a run accepts, and what post does to a run that is not held: every status, every body."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from perdure.core.codec import encode, pack
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalVoted,
    ApprovalWithdrawn,
    BudgetRaised,
    CancelRequested,
    ChildFinished,
    Limits,
    Reason,
    RunAdopted,
    RunPaused,
    RunRequeued,
    RunRestored,
    RunUnpaused,
    SignalReceived,
    Status,
    ToolCallResolved,
)
from perdure.core.state import FINISHED
from perdure.core.transitions import Reached, Wake, is_news, landing
from perdure.errors import Conflict

SIGNAL = SignalReceived("t", pack(encode(1))[0], "ann")
NEWS: list[AnyBody] = [  # events that an agent may wait for
    SIGNAL,
    ApprovalDecided("a", True, "ann", "d"),
    ApprovalExpired("a"),
    ApprovalEscalated("a", ("bob",)),
    ApprovalWithdrawn("a"),
    ChildFinished("r/1", "succeeded"),
]
BODIES: list[AnyBody] = [
    *NEWS,
    CancelRequested("ann"),
    RunPaused("ann"),
    RunUnpaused("ann"),
    RunRequeued("ann"),
    RunAdopted("8", "ann"),
    ApprovalVoted("a", "ann", "d"),
    BudgetRaised(Limits(calls=1), "ann"),
    ToolCallResolved("happened", "ann"),
]
# "running" is included: a run whose worker has died, before another process has noticed it.
STATUSES: list[Status] = [status for status in get_args(Status) if status not in FINISHED]
REASONS: list[Reason] = list(get_args(Reason))
STANDING: list[tuple[Status, Reason | None]] = [
    *((status, None) for status in STATUSES if status != "needs_attention"),
    *(("needs_attention", reason) for reason in REASONS),
]


def name(value: Any) -> str:
    return type(value).__name__ if not isinstance(value, str | None) else str(value)


def expected(status: Status, attention: Reason | None, body: AnyBody) -> tuple[Status, Wake]:
    """The table, read line by line; the first that applies counts."""
    kind = type(body)
    table: list[tuple[bool, tuple[Status, Wake]]] = [
        (attention == "restored" and kind not in (RunUnpaused, RunRequeued), ("needs_attention", "keep")),
        (kind is CancelRequested, ("cancelling", "now")),
        (kind in (ApprovalVoted, BudgetRaised, RunAdopted), (status, "keep")),
        (status == "cancelling" and kind is RunPaused, ("cancelling", "keep")),
        (status == "cancelling", ("cancelling", "now")),
        (kind is RunPaused, ("paused", "never")),
        (kind is RunUnpaused, ("queued", "now")),
        (status == "paused", ("paused", "keep")),
        (status == "queued", ("queued", "keep")),
        (status == "needs_attention" and kind in (RunRequeued, ToolCallResolved), ("queued", "now")),
        (status == "needs_attention" and attention != "in_doubt", ("needs_attention", "keep")),
        (True, ("queued", "now")),
    ]
    return next(result for applies, result in table if applies)


@pytest.mark.parametrize("body", BODIES, ids=name)
@pytest.mark.parametrize(("status", "attention"), STANDING)
def test_every_status_and_every_body(status: Status, attention: Reason | None, body: AnyBody):
    assert landing(status, attention, body) == expected(status, attention, body)


def test_a_run_that_waits_is_woken_by_whatever_it_may_wait_for():
    for status in ("waiting", "waiting_approval"):
        assert {landing(status, None, body) for body in NEWS} == {("queued", "now")}


def test_a_cancel_reaches_a_run_wherever_it_stands():
    for status, attention in STANDING:
        if attention != "restored":
            assert landing(status, attention, CancelRequested("ann")) == ("cancelling", "now")


def test_a_run_from_a_backup_rests_until_a_person_lets_it_go_on():
    for status in STATUSES:
        assert landing(status, None, RunRestored("ann", 1)) == ("needs_attention", "never")
    assert {landing("needs_attention", "restored", body) for body in BODIES if type(body) not in (RunUnpaused, RunRequeued)} == {
        ("needs_attention", "keep")
    }
    assert landing("needs_attention", "restored", RunUnpaused("ann")) == ("queued", "now")


def test_only_a_person_sends_a_run_on_that_needs_one():
    for reason in REASONS:
        if reason != "in_doubt":
            assert {landing("needs_attention", reason, body)[0] for body in NEWS} == {"needs_attention"}
        assert landing("needs_attention", reason, RunRequeued("ann")) == ("queued", "now")


def test_a_doubt_about_one_call_does_not_hold_up_the_others():
    assert landing("needs_attention", "in_doubt", SIGNAL) == ("queued", "now")


def test_what_is_paused_stays_so_until_somebody_ends_the_pause():
    assert {landing("paused", None, body) for body in [*NEWS, RunRequeued("ann"), ToolCallResolved("happened", "ann")]} == {
        ("paused", "keep")
    }
    assert landing("paused", None, RunUnpaused("ann")) == ("queued", "now")


def test_what_arrives_does_not_start_a_run_before_its_time():
    assert {landing("queued", None, body) for body in NEWS} == {("queued", "keep")}


def test_nothing_ends_a_cancel():
    assert {landing("cancelling", None, body)[0] for body in BODIES} == {"cancelling"}


def test_nothing_that_lands_ends_a_run_or_claims_it():
    landed = {landing(status, attention, body)[0] for status, attention in STANDING for body in BODIES if status != "running"}
    assert landed.isdisjoint({*FINISHED, "running"})


# --- what may be said ---------------------------------------------------------------------------------------------------------


def said(status: Status, body: AnyBody, **run: bool) -> bool | str:
    """True: the run hears of it. False: it was asked for before. Text: why it may not be said."""
    try:
        return is_news(Reached("r", status, "7", **run), body)
    except Conflict as refused:
        return str(refused)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
@pytest.mark.parametrize("status", STATUSES)
def test_every_body_may_be_said_in_every_status_but_where_a_rule_says_otherwise(status: Status, body: AnyBody) -> None:
    expected: bool | str = True
    match body, status:
        case (CancelRequested(), "cancelling") | (RunPaused(), "paused"):
            expected = False
        case RunPaused(), "cancelling":
            expected = "run r is cancelling; it cannot be paused"
        case RunPaused(), "needs_attention":
            expected = "run r is needs attention; it cannot be paused"
        case RunUnpaused(), status if status not in ("paused", "needs_attention"):
            expected = f"run r is {status}; only a paused run, or one that needs attention, can be unpaused"
        case RunRequeued(), status if status != "needs_attention":
            expected = f"run r is {status}; only a run that needs attention can be requeued"
    assert said(status, body) == expected


def test_a_pause_that_the_run_has_not_come_to_yet_can_be_taken_back() -> None:
    assert said("running", RunUnpaused("ann"), driven=True, pausing=True) is True


def test_a_run_that_is_being_driven_is_not_adopted() -> None:
    assert said("running", RunAdopted("8", "ann"), driven=True) == (
        "run r is being driven in version 7; wait until it rests, or stop that worker"
    )
