"""What follows from a failed attempt: another attempt, a doubt, or the failure of the call."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Fatal, InvalidInput, NotSent, Retry, RetryLater
from perdure.core.events import Effect, Failure, FailureKind
from perdure.core.failures import IN_DOUBT_KINDS, describe
from perdure.core.retry import LONGEST_DELAY_S, Again, Doubt, RetryGiveUp, after_failure

EFFECTS = get_args(Effect)
KINDS = get_args(FailureKind)


def verdict(
    kind: FailureKind,
    effect: Effect = "idempotent",
    *,
    attempt: int = 1,
    retry: Retry | None = None,
    has_reconcile: bool = False,
    wanted: bool = True,
    doubtful: bool = False,
    after_s: float | None = None,
) -> Again | Doubt | RetryGiveUp:
    failure = Failure(kind=kind, type="SomeError", message="no", retry_after_s=after_s)
    return after_failure(
        failure, effect=effect, attempt=attempt, retry=retry, key="k", has_reconcile=has_reconcile, wanted=wanted, doubtful=doubtful
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *((kind, Again) for kind in ("not_sent", "rate_limited", "timeout", "reset", "server_error", "process_died")),
        *((kind, RetryGiveUp) for kind in ("refused", "fatal", "error", "not_encodable", "cancelled")),
    ],
)
def test_without_a_policy_what_may_pass_is_tried_again(kind: FailureKind, expected: type) -> None:
    assert isinstance(verdict(kind), expected)
    assert isinstance(verdict(kind, "read"), expected)


def test_every_kind_of_failure_has_a_verdict_for_every_effect() -> None:
    for kind, effect, hook, wanted in itertools.product(KINDS, EFFECTS, (True, False), (True, False)):
        assert isinstance(verdict(kind, effect, has_reconcile=hook, wanted=wanted), (Again, Doubt, RetryGiveUp))


@pytest.mark.parametrize("kind", sorted(IN_DOUBT_KINDS))
@pytest.mark.parametrize("retry", [None, Retry(attempts=9), Retry(on=("SomeError",))])
def test_a_once_call_is_never_tried_again_on_a_doubt(kind: FailureKind, retry: Retry | None) -> None:
    for hook, wanted in itertools.product((True, False), (True, False)):
        assert verdict(kind, "once", retry=retry, has_reconcile=hook, wanted=wanted) == Doubt()


def test_a_once_call_is_tried_again_on_proof_that_nothing_was_sent() -> None:
    assert isinstance(verdict("not_sent", "once"), Again)
    assert isinstance(verdict("rate_limited", "once", after_s=7.0), Again)


@pytest.mark.parametrize("retry", [None, Retry(), Retry(attempts=9)])
def test_what_a_once_tool_raises_of_its_own_may_have_come_after_the_effect(retry: Retry | None) -> None:
    for kind in KINDS:
        again = isinstance(verdict(kind, "once", retry=retry), Again)
        assert again == (kind in ("not_sent", "rate_limited")), kind


def test_a_once_tool_is_tried_again_on_an_error_of_its_own_only_when_its_policy_names_that() -> None:
    assert isinstance(verdict("error", "once", retry=Retry(on=("SomeError",))), Again)
    assert verdict("error", "once", retry=Retry(on=("OtherError",))) == RetryGiveUp()


@pytest.mark.parametrize("hook", [True, False])
def test_a_doubt_about_an_attempt_before_is_not_ended_by_the_failure_of_this_one(hook: bool) -> None:
    """Attempt 1 may have happened. That attempt 5 was refused says nothing about attempt 1."""
    for kind, wanted in itertools.product(KINDS, (True, False)):
        assert verdict(kind, "keyed", attempt=5, doubtful=True, has_reconcile=hook, wanted=wanted) == Doubt(), kind
    again = verdict("not_sent", "keyed", attempt=2, doubtful=True, has_reconcile=hook)
    assert again == Doubt() if hook else isinstance(again, Again) and again.in_doubt, "in between the doubt goes along"


def test_a_keyed_call_is_tried_again_with_its_key_unless_somebody_can_be_asked_first() -> None:
    assert isinstance(verdict("timeout", "keyed"), Again)
    assert verdict("timeout", "keyed", has_reconcile=True) == Doubt()
    assert verdict("timeout", "keyed", attempt=5) == Doubt(), "after the last attempt it is still not known"
    assert verdict("timeout", "keyed", wanted=False) == Doubt()


def test_the_number_of_attempts_is_a_limit() -> None:
    assert isinstance(verdict("reset", retry=Retry(attempts=3), attempt=2), Again)
    assert verdict("reset", retry=Retry(attempts=3), attempt=3) == RetryGiveUp()
    assert verdict("reset", retry=Retry(attempts=1)) == RetryGiveUp()


def test_nobody_tries_a_call_again_that_nobody_wants() -> None:
    assert verdict("not_sent", "once", wanted=False) == RetryGiveUp()
    assert verdict("timeout", "read", wanted=False) == RetryGiveUp()


def test_a_policy_without_on_covers_any_error_but_not_a_refusal() -> None:
    assert isinstance(verdict("error", retry=Retry()), Again)
    assert verdict("refused", retry=Retry()) == RetryGiveUp()
    assert verdict("fatal", retry=Retry()) == RetryGiveUp()


def test_on_names_types_their_bases_and_kinds() -> None:
    failure = describe(KeyError("x"))
    assert failure.kind == "error"
    for wanted in (KeyError, LookupError, Exception, "KeyError", "LookupError", "error"):
        assert Retry(on=(wanted,)).covers(failure), wanted
    for other in (ValueError, "ValueError", "timeout"):
        assert not Retry(on=(other,)).covers(failure), other
    assert not Retry(on=()).covers(failure)


def test_on_does_not_forbid_what_provably_did_not_happen() -> None:
    assert Retry(on=(KeyError,)).covers(describe(NotSent("refused")))
    assert Retry(on=(KeyError,)).covers(describe(RetryLater(after=1)))
    assert not Retry(on=(KeyError,)).covers(describe(Fatal("no")))


@pytest.mark.parametrize(("said", "waited"), [(0.0, 0.0), (7.5, 7.5), (-1.0, 0.0), (1e9, LONGEST_DELAY_S)])
def test_what_the_server_says_is_waited_within_reason(said: float, waited: float) -> None:
    assert verdict("rate_limited", after_s=said) == Again(waited)


@given(
    st.integers(min_value=1, max_value=10_000),
    st.floats(min_value=0, max_value=1000),
    st.floats(min_value=1, max_value=1e6),
    st.floats(min_value=0, max_value=1e6),
    st.floats(min_value=0, max_value=1),
)
def test_backoff_stays_within_its_bounds_and_repeats(attempt: int, base: float, factor: float, most: float, jitter: float) -> None:
    policy = Retry(base=base, factor=factor, max_delay=most, jitter=jitter)
    delay_s = policy.delay_s(attempt, "key")
    assert 0 <= delay_s <= most
    assert delay_s == policy.delay_s(attempt, "key")


def test_backoff_grows_by_its_factor_and_differs_between_calls() -> None:
    plain = Retry(base=1, factor=3, max_delay=20, jitter=0)
    assert [plain.delay_s(attempt, "k") for attempt in (1, 2, 3, 4, 5)] == [1, 3, 9, 20, 20]
    assert len({Retry().delay_s(1, f"key {at}") for at in range(20)}) == 20, "or all of them come back at once"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"attempts": value} for value in (0, -1, True, 1.5, "3", None)),
        *({"base": value} for value in (-1, math.nan, math.inf, "1", None)),
        *({"factor": value} for value in (0.5, math.nan, 1e9)),
        *({"max_delay": value} for value in (-1, math.inf, 1e12)),
        *({"jitter": value} for value in (-0.1, 1.1, math.nan)),
        *({"on": value} for value in (KeyError, "KeyError", 7)),
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=rf"^Retry\({next(iter(wrong))}="):
        Retry(**wrong)  # type: ignore[arg-type]
