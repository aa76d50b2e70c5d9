"""The rules of schedules, without a store: what a due tick does, jitter, the input, and what can be declared."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from perdure import Cron, Every, InvalidInput, Run, Schedule, Tick, agent
from perdure.core.schedule import (
    Beat,
    SchedulePaused,
    ScheduleSet,
    ScheduleState,
    Spec,
    TicksSkipped,
    TickStarted,
    due_time,
    folded,
    next_tick,
    steps_due,
    tick_run_id,
)
from perdure.errors import StoreCorrupt
from perdure.schedule import calendar_of, input_at, when_words

MINUTE = 60_000_000
T0 = 1_700_000_040_000_000  # a full minute
BEAT = Beat(60)


def state(first: int = T0, **options: Any) -> ScheduleState:
    spec = Spec("report", every_s=60, **options)
    return ScheduleState(spec, "active", first, due_time("s", spec, first))


def played(start: ScheduleState, now: int, open_run: str | None = None) -> tuple[list[int], list[tuple[int, int]]]:
    """The ticks that started a run and those that were skipped, until nothing is due. Runs end at once, but `open_run`."""
    started: list[int] = []
    skipped: list[tuple[int, int]] = []
    current = start
    for _ in range(1000):
        steps = steps_due("s", current, BEAT, now, open_run)
        if not steps:
            return started, skipped
        for step in steps:
            current = folded(current, now, step)
            if isinstance(step, TickStarted):
                started.append(step.tick)
            else:
                skipped.append((step.first, step.last))
        assert current.next_tick is not None
        assert current.next_tick > now - MINUTE * 1000
    raise AssertionError("it never ends")


def test_nothing_is_due_before_the_tick():
    assert steps_due("s", state(), BEAT, T0 - 1, None) == []


def test_a_tick_starts_one_run_and_the_next_tick_is_recorded():
    (step,) = steps_due("s", state(), BEAT, T0, None)
    assert step == TickStarted(T0, "s@2023-11-14T22:14:00Z", T0 + MINUTE, T0 + MINUTE)
    assert steps_due("s", folded(state(), T0, step), BEAT, T0, None) == []


def test_of_missed_ticks_the_last_one_starts_a_run():
    assert played(state(), T0 + 5 * MINUTE + 1) == ([T0 + 5 * MINUTE], [(T0, T0 + 4 * MINUTE)])


def test_all_missed_ticks_start_runs_up_to_the_limit():
    assert played(state(missed="all"), T0 + 2 * MINUTE) == ([T0, T0 + MINUTE, T0 + 2 * MINUTE], [])
    started, skipped = played(state(missed="all", limit=3), T0 + 9 * MINUTE)
    assert started == [T0 + 7 * MINUTE, T0 + 8 * MINUTE, T0 + 9 * MINUTE]
    assert skipped == [(T0, T0 + 6 * MINUTE)]


def test_missed_ticks_are_not_made_up_for_if_so_declared():
    assert played(state(missed="none"), T0 + 5 * MINUTE) == ([T0 + 5 * MINUTE], [(T0, T0 + 4 * MINUTE)])
    hourly = Beat(3600)
    first = hourly.after(T0) or 0
    spec = Spec("report", every_s=3600, missed="none")
    (step,) = steps_due("s", ScheduleState(spec, "active", first, first), hourly, first + 61_000_000, None)
    assert isinstance(step, TicksSkipped)
    assert "missed" in step.why
    assert step.next_tick == first + 3_600_000_000


def test_a_tick_is_skipped_while_the_run_before_has_not_ended():
    assert played(state(), T0 + MINUTE, "s@old") == ([], [(T0, T0 + MINUTE)])


def test_a_tick_waits_for_the_run_before_and_then_the_last_one_starts():
    waiting = state(overlap="queue")
    assert played(waiting, T0 + 3 * MINUTE, "s@old") == ([], [])
    assert played(waiting, T0 + 3 * MINUTE)[0] == [T0 + 3 * MINUTE]
    assert played(state(overlap="queue", missed="all"), T0 + MINUTE)[0] == [T0, T0 + MINUTE]


def test_a_tick_cancels_the_run_before_if_so_declared():
    (step,) = steps_due("s", state(overlap="cancel"), BEAT, T0, "s@old")
    assert isinstance(step, TickStarted)
    assert step.cancelled == "s@old"
    (step,) = steps_due("s", state(overlap="allow"), BEAT, T0, "s@old")
    assert isinstance(step, TickStarted)
    assert step.cancelled is None


def test_a_schedule_that_is_paused_starts_nothing():
    paused = folded(state(), T0, SchedulePaused("ann"))
    assert (paused.next_tick, paused.due_at) == (None, None)
    assert steps_due("s", paused, BEAT, T0 + MINUTE, None) == []
    # New code changes it, and it stays paused.
    changed = folded(paused, T0, ScheduleSet(Spec("report", every_s=30), "code:report@2", T0, T0, declared=True))
    assert (changed.status, changed.due_at, changed.spec.every_s) == ("paused", None, 30)


def test_no_event_of_a_tick_can_follow_a_pause():
    paused = folded(state(), T0, SchedulePaused("ann"))
    for body in (TickStarted(T0, "r", None, None), TicksSkipped(T0, T0, "w", None, None), SchedulePaused("bob")):
        with pytest.raises(StoreCorrupt, match="cannot follow"):
            folded(paused, T0, body)


@given(st.integers(0, 10_000), st.integers(1, 86_400))
def test_jitter_is_the_same_for_the_same_tick_and_within_its_limit(number, jitter_s):
    spec = Spec("report", every_s=60, jitter_s=jitter_s)
    tick = T0 + number * MINUTE
    due = due_time("s", spec, tick)
    assert due is not None
    assert 0 <= due - tick < jitter_s * 1_000_000
    assert due == due_time("s", spec, tick)
    assert due_time("t", spec, tick) != due or jitter_s < 10


@given(st.integers(1, 600), st.integers(0, 3_600), st.sampled_from(("none", "last", "all")), st.lists(st.integers(1, 900), max_size=20))
@example(1, 7, "all", [1, 842])  # the jitter is longer than the interval: of the last 5 ticks, the first is due after the last
def test_no_tick_starts_twice_and_ticks_start_in_order(every_s, jitter_s, missed, waits):
    spec = Spec("report", every_s=every_s, jitter_s=jitter_s, missed=missed, limit=5)
    calendar, now = calendar_of(spec), T0
    first = next_tick("s", spec, calendar, now)
    current = ScheduleState(spec, "active", first["next_tick"], first["due_at"])
    started: list[int] = []
    for wait in waits:
        now += wait * 1_000_000
        for _ in range(1000):
            steps = steps_due("s", current, calendar, now, None)
            if not steps:
                break
            for step in steps:
                current = folded(current, now, step)
                if isinstance(step, TickStarted):
                    assert (due_time("s", spec, step.tick) or 0) <= now
                    started.append(step.tick)
        else:
            raise AssertionError("it never ends")
    assert started == sorted(set(started))


def test_the_input_of_a_tick_is_in_the_zone_of_the_schedule():
    given_ = {"date": Tick("%Y-%m-%d"), "at": Tick(), "deep": [{"hour": Tick("%H")}], "plain": "%Y"}
    spec = Schedule(Cron("30 23 * * *", tz="America/New_York"), input=given_).spec("report")
    assert input_at(spec, 1_794_976_200_000_000) == (  # 2026-11-18T04:30Z
        b'{"at":"2026-11-17T23:30:00-05:00","date":"2026-11-17","deep":[{"hour":"23"}],"plain":"%Y"}'
    )


def test_the_id_of_a_run_follows_from_schedule_and_tick():
    assert tick_run_id("nightly", 1_794_895_200_000_000) == "nightly@2026-11-17T06:00:00Z"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cron("0 7 * * mo"), "day of week"),
        (lambda: Cron("0 7 * * *", tz="Mars/Base"), "there is no such time zone"),
        (lambda: Cron("0 7 * * *", tz="../etc/passwd"), "there is no such time zone"),
        (lambda: Cron("0 7 * * *", tz=""), "there is no such time zone"),
        (lambda: Cron("0 7 * * *", jitter=-1), "jitter"),
        (lambda: Every(), "from 1 to"),
        (lambda: Every(seconds=1.5), "a whole number"),  # type: ignore[arg-type]
        (lambda: Every(minutes=True), "a whole number"),
        (lambda: Every(seconds=1, jitter=float("nan")), "jitter"),
        (lambda: Tick("%A"), "%A is not usable"),
        (lambda: Tick("%"), "is not usable"),
        (lambda: Schedule("0 7 * * *"), "Cron("),  # type: ignore[arg-type]
        (lambda: Schedule(Every(minutes=1), id="a@b"), "no @"),
        (lambda: Schedule(Every(minutes=1), id="x" * 190), "at most"),
        (lambda: Schedule(Every(minutes=1), overlap="wait"), "one of skip"),  # type: ignore[arg-type]
        (lambda: Schedule(Every(minutes=1), missed="some"), "one of none"),  # type: ignore[arg-type]
        (lambda: Schedule(Every(minutes=1), overlap="queue", missed="none"), "is late"),
        (lambda: Schedule(Every(minutes=1), limit=0), "limit"),
        (lambda: Schedule(Every(minutes=1), priority=5000), "priority"),
        (lambda: Schedule(Every(minutes=1), input=["x"]), "by name"),  # type: ignore[arg-type]
        (lambda: Schedule(Every(minutes=1), input={"x": object()}).spec("a"), "schedule of agent a"),
        (lambda: Schedule(Every(minutes=1), input={"x": "y" * 70_000}).spec("a"), "at most 65,536"),
    ],
)
def test_what_cannot_be_declared_is_invalid_input(make, words):
    with pytest.raises(InvalidInput) as raised:
        make()
    assert words in str(raised.value)


def test_an_input_that_does_not_fit_is_an_error_at_the_declaration():
    with pytest.raises(InvalidInput, match="date"):

        @agent(version="1", schedule=Cron("0 7 * * *"))
        async def report(run: Run, date: str) -> None: ...


def test_where_the_code_lies_does_not_change_a_declaration():
    spec = Spec("report", every_s=60, target="/a/b.py:report")
    assert spec.digest == structs.replace(spec, target="/c/d.py:report").digest
    assert spec.digest != structs.replace(spec, every_s=61).digest


def test_words_for_people():
    assert when_words(Spec("a", every_s=7200)) == "every 2 hours"
    assert when_words(Spec("a", every_s=90, jitter_s=5)) == "every 90 seconds, up to 5 s later"
    assert when_words(Spec("a", cron="0 7 * * *", tz="Europe/Berlin")) == "0 7 * * * (Europe/Berlin)"
