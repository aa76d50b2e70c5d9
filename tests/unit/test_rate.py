"""Rate limits: never more starts at once than the burst, and never more on average than the limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.core.rate import Rate, next_start
from perdure.errors import InvalidInput

SECOND = 1_000_000
T0 = 1_700_000_000 * SECOND


class Line:
    """What a store has for one key, and a wall clock that can be set; only real time counts."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.real = 0
        self.offset = T0
        self.due = self.paused_until = 0
        self.waiting: list[int] = []  # wall times
        self.starts: list[int] = []  # real times

    def ask(self) -> None:
        at, self.due = next_start(self.rate, due=self.due, paused_until=self.paused_until, now=self.real + self.offset)
        assert at >= max(self.real + self.offset, self.paused_until)
        self.waiting.append(at)
        self.run(0)

    def run(self, us: int) -> None:
        """Let real time pass; each caller starts exactly at its time."""
        wall = self.real + self.offset
        due = sorted(at for at in self.waiting if at <= wall + us)
        self.starts += [max(at, wall) - self.offset for at in due]
        self.waiting = [at for at in self.waiting if at > wall + us]
        self.real += us


RATES = st.builds(
    Rate, limit=st.integers(1, 20), per=st.sampled_from([0.001, 0.3, 1.0, 7, 60]), burst=st.one_of(st.none(), st.integers(1, 30))
)
STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 30)),
    st.tuples(st.just("pass"), st.integers(0, 120 * SECOND)),
    st.tuples(st.just("pass"), st.integers(0, SECOND // 10)),
    st.tuples(st.just("pause"), st.integers(0, 90 * SECOND)),
    st.tuples(st.just("set_back"), st.integers(0, 3600 * SECOND)),
)


def play(rate: Rate, steps: list[tuple[str, int]]) -> Line:
    line = Line(rate)
    for what, much in steps:
        if what == "ask":
            for _ in range(much):
                line.ask()
        elif what == "pass":
            line.run(much)
        elif what == "pause":
            line.paused_until = max(line.paused_until, line.real + line.offset + much)
        else:
            line.offset -= much
    line.run(10**13)
    assert not line.waiting
    return line


@given(rate=RATES, steps=st.lists(STEPS, max_size=15))
@settings(max_examples=300)
def test_no_span_sees_more_starts_than_the_burst_and_what_the_limit_allows_in_it(rate, steps):
    starts = sorted(play(rate, steps).starts)
    burst, step = rate.burst or rate.limit, rate.step_us
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            assert last - first + 1 <= burst + (starts[last] - starts[first]) / step, (first, last, starts)


@given(rate=RATES, count=st.integers(1, 60))
def test_when_many_come_at_once_the_burst_starts_now_and_the_others_one_by_one(rate, count):
    starts = play(rate, [("ask", count)]).starts
    burst = rate.burst or rate.limit
    assert starts == [max(0, index - burst + 1) * rate.step_us for index in range(count)]


@given(rate=RATES)
def test_after_a_quiet_time_the_whole_burst_is_there_again(rate):
    burst = rate.burst or rate.limit
    starts = play(rate, [("ask", burst), ("pass", burst * rate.step_us), ("ask", burst)]).starts
    assert starts == [0] * burst + [burst * rate.step_us] * burst


@given(rate=RATES, pause=st.integers(1, 100 * SECOND), back=st.integers(0, 3600 * SECOND))
def test_during_a_pause_nobody_starts_also_when_the_clock_is_set_back(rate, pause, back):
    starts = play(rate, [("pause", pause), ("ask", 1), ("set_back", back), ("ask", 1)]).starts
    assert min(starts) >= pause
    assert len(starts) == 2


def test_without_a_limit_only_a_pause_makes_anybody_wait():
    assert next_start(Rate(), due=0, paused_until=0, now=T0) == (T0, 0)
    assert next_start(Rate(), due=5, paused_until=T0 + 7, now=T0) == (T0 + 7, 5)


@pytest.mark.parametrize(
    ("rate", "step"),
    [
        (Rate(10), 100_000),
        (Rate(3), 333_334),
        (Rate(1, per=60), 60 * SECOND),
        (Rate(10**6), 1),
        (Rate(10**6, per=0.1), 1),  # faster than a microsecond apart is not to be had, and not "without limit"
        (Rate(1, per=1e-9), 1),
        (Rate(7, per=86_400), 12_342_857_143),
    ],
)
def test_the_time_between_two_starts_is_never_rounded_down(rate, step):
    assert rate.step_us == step


@pytest.mark.parametrize(
    "given",
    [
        *({"limit": value} for value in (0, -1, True, 1.0, "5", 10**6 + 1, 10**5000, float("nan"))),
        *({"limit": 5, "burst": value} for value in (0, -1, True, 1.5, 10**6 + 1)),
        {"burst": 5},
        *({"limit": 1, "per": value} for value in (0, -1, True, "1", None, float("nan"), 1e999, 86_401, 10**400, 10**5000)),
        *({"limit": 1, "key": value} for value in ("", 5, "x" * 201, "a\x00", "\ud800", b"k")),
    ],
)
def test_a_rate_that_makes_no_sense_is_refused_by_name(given):
    with pytest.raises(InvalidInput, match=rf"Rate\({list(given)[-1]}="):
        Rate(**given)


def test_a_rate_that_makes_sense_is_taken():
    assert Rate(5, per=60, key="openai", burst=1) == Rate(limit=5, per=60, key="openai", burst=1)
    assert Rate(key="schlüssel für alle").limit is None
