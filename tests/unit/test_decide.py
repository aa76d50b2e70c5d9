"""The verdict on every open call without an attempt under way, by phase, effect class and known facts."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from perdure.core.decide import GiveUp, Park, Patience, Perform, Reconcile, Verdict, Wait, about_unknown, decide, quiet_after_s, quiet_at
from perdure.core.events import Effect
from perdure.core.identity import CallKeys
from perdure.core.state import ENDED, CallState, Phase

HOUR_US = 3_600_000_000
EFFECTS: tuple[Effect, ...] = get_args(Effect)
OPEN: tuple[Phase, ...] = tuple(phase for phase in get_args(Phase) if phase not in ENDED and phase != "awaiting_approval")


def call(
    phase: Phase, effect: Effect, *, attempt: int = 1, retry_at: int | None = None, asks: int = 0, doubtful: bool = False
) -> CallState:
    state = CallState(4, "pay", effect, "key", None, first_seq=3, first_ts=0, keys=CallKeys("", ""), phase=phase, attempt=attempt)
    state.retry_at, state.asks, state.doubtful = retry_at, asks, doubtful
    return state


def verdict(about: CallState, *, hook: bool = False, wanted: bool = True, now: int = HOUR_US, window_s: float = 86_400) -> Verdict:
    return decide(about, has_reconcile=hook, key_window_s=window_s, max_asks=3, wanted=wanted, now=now)


@pytest.mark.parametrize("effect", ["read", "idempotent", "transaction"])
@pytest.mark.parametrize("phase", ["started", "in_doubt"])
def test_what_may_be_repeated_is_repeated(effect: Effect, phase: Phase) -> None:
    assert verdict(call(phase, effect, attempt=2)) == Perform(3)
    assert verdict(call(phase, effect), wanted=False) == GiveUp()


@pytest.mark.parametrize("phase", ["started", "in_doubt"])
@pytest.mark.parametrize("wanted", [True, False])
def test_a_once_call_is_never_performed_out_of_a_doubt(phase: Phase, wanted: bool) -> None:
    assert isinstance(verdict(call(phase, "once"), wanted=wanted), Park)
    assert verdict(call(phase, "once"), hook=True, wanted=wanted) == Reconcile()
    exhausted = verdict(call(phase, "once", asks=3), hook=True, wanted=wanted)
    assert isinstance(exhausted, Park)
    assert "3 times" in exhausted.why


def test_a_keyed_call_is_performed_again_inside_its_window_only() -> None:
    assert verdict(call("started", "keyed"), now=24 * HOUR_US) == Perform(2)
    late = verdict(call("started", "keyed"), now=24 * HOUR_US + 1)
    assert isinstance(late, Park)
    assert "past the window of 24 h" in late.why


def test_a_clock_that_went_back_does_not_make_a_key_young() -> None:
    answer = verdict(call("started", "keyed"), now=-3_600_000_000)
    assert isinstance(answer, Park)
    assert "lies in the future" in answer.why
    assert isinstance(verdict(call("started", "keyed"), now=-1_000_000), Perform), "a second is what clocks are off by every day"


def test_a_keyed_call_with_a_hook_is_asked_about_before_it_is_performed_again() -> None:
    assert verdict(call("in_doubt", "keyed"), hook=True) == Reconcile()
    assert isinstance(verdict(call("in_doubt", "keyed", asks=3), hook=True), Park)


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("phase", ["retry_wait", "failing", "idle"])
def test_an_attempt_known_not_to_have_happened_is_followed_by_the_next_when_its_time_has_come(effect: Effect, phase: Phase) -> None:
    assert verdict(call(phase, effect)) == Perform(2)
    assert verdict(call(phase, effect, retry_at=HOUR_US)) == Perform(2)
    assert verdict(call(phase, effect, retry_at=HOUR_US + 1)) == Wait(HOUR_US + 1)
    assert verdict(call(phase, effect, retry_at=HOUR_US + 1), wanted=False) == GiveUp()


@pytest.mark.parametrize("phase", ["retry_wait", "failing", "in_doubt"])
@pytest.mark.parametrize("wanted", [True, False])
def test_a_retry_after_a_doubt_is_decided_like_the_doubt(phase: Phase, wanted: bool) -> None:
    """An earlier attempt may have happened. So the key must still be valid, and the hook is asked first.

    An agent that stops waiting does not settle the doubt.
    """
    young = call(phase, "keyed", retry_at=HOUR_US, doubtful=True)
    assert verdict(young, wanted=wanted) == Perform(2)
    assert verdict(young, hook=True, wanted=wanted) == Reconcile()
    late = verdict(young, wanted=wanted, window_s=60)
    assert isinstance(late, Park)
    assert "past the window" in late.why
    assert verdict(call(phase, "keyed", retry_at=HOUR_US + 1, doubtful=True), wanted=wanted) == Wait(HOUR_US + 1)
    assert isinstance(verdict(call(phase, "once", doubtful=True), wanted=wanted), Park)


def test_a_hook_that_said_in_progress_is_asked_again_later_and_not_now() -> None:
    assert verdict(call("in_doubt", "once", retry_at=HOUR_US + 5, asks=1), hook=True) == Wait(HOUR_US + 5)
    assert verdict(call("in_doubt", "once", retry_at=HOUR_US, asks=1), hook=True) == Reconcile()


def test_there_is_a_verdict_on_every_open_call() -> None:
    for phase, effect, hook, wanted, attempt in itertools.product(OPEN, EFFECTS, (True, False), (True, False), (1, 9)):
        found = verdict(call(phase, effect, attempt=attempt), hook=hook, wanted=wanted)
        assert isinstance(found, (Perform, Wait, Reconcile, Park, GiveUp))
        if isinstance(found, Perform):
            assert found.attempt == attempt + 1
            assert effect != "once" or phase not in ("started", "in_doubt")


@pytest.mark.parametrize("phase", ["awaiting_approval", *sorted(ENDED)])
def test_there_is_nothing_to_decide_about_a_call_that_has_ended_or_waits_for_a_person(phase: Phase) -> None:
    with pytest.raises(AssertionError, match="nothing to decide"):
        verdict(call(phase, "read"))


def test_when_nobody_knows_only_a_young_key_makes_repeating_safe() -> None:
    assert about_unknown(call("in_doubt", "keyed"), 60, 30_000_000) == Perform(2)
    assert isinstance(about_unknown(call("in_doubt", "keyed"), 60, 61_000_000), Park)
    assert about_unknown(call("in_doubt", "once"), 60, 30_000_000, "nobody knows") == Park("nobody knows")


# -- when "not found" is believed ------------------------------------------------------------------------------------------
PATIENCE = Patience(timeout_s=60.0, settle_s=2.0, grace_s=5.0)


def lost(*, timeout_s: float | None = None, settle_s: float | None = None, may_live: bool = False, loose: bool = False) -> CallState:
    state = call("in_doubt", "once")
    state.timeout_s, state.settle_s, state.worker_may_live, state.loose = timeout_s, settle_s, may_live, loose
    state.started_at, state.quiet_since = HOUR_US, 2 * HOUR_US
    return state


@pytest.mark.parametrize(
    ("about", "after_s"),
    [
        (lost(timeout_s=20.0), 22.0),  # as long as its sender would have waited for the answer, and the margin
        (lost(), 62.0),
        (lost(timeout_s=20.0, settle_s=7.0), 27.0),
        (lost(timeout_s=20.0, settle_s=0.0), 20.0),
        (lost(timeout_s=20.0, may_live=True), 47.0),  # it may send until its time-out and the grace after it are over
        (lost(may_live=True), None),  # nothing ends an attempt without a time-out
        (lost(timeout_s=20.0, loose=True), None),
    ],
)
def test_not_found_is_believed_when_nothing_can_be_on_its_way_any_more(about: CallState, after_s: float | None) -> None:
    assert quiet_after_s(about, PATIENCE) == after_s
    assert quiet_at(about, PATIENCE) == (None if after_s is None else 2 * HOUR_US + after_s * 1e6)


def test_nothing_is_known_of_an_attempt_before_a_worker_has_taken_the_run_over() -> None:
    """Its process may be paused inside the call, and send when it wakes up."""
    about = lost(timeout_s=20.0)
    about.quiet_since = 0
    assert quiet_at(about, PATIENCE) is None
