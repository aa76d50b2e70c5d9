"""A run gets what it waits for (people, signals, time, children) in the same way in every trial, without delay."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from tests.lab import wards
from tests.lab.matrices import about, matrix, rules

from perdure.testing.lab.experiment import drawn
from perdure.testing.lab.warp import Warp, WarpedClock, WarpedLoop


def test_approvals_signals_and_a_day_of_waiting_are_survived_at_every_boundary() -> None:
    report = matrix(wards.asks, signals=[("word", 7), ("word", 8)])
    assert report.ok
    assert report.baseline.output == "approved [7, 8]"
    names = {boundary.partition(":")[0] for boundary in report.baseline.boundaries}
    assert {
        "before_approval_request_persisted",
        "after_park_persisted",
        "before_timer_set_persisted",
        "after_timer_fired_persisted",
    } <= names
    assert {(trial.outcome, trial.output_equal) for trial in report.trials} == {("ok", True)}


def test_the_lab_says_no_when_it_is_told_to() -> None:
    report = matrix(wards.asks, boundaries=about("approval"), approve="reject", signals=[("word", 7), ("word", 8)])
    assert (report.baseline.output, report.ok) == ("rejected [7, 8]", True)


def test_a_run_that_rests_undisturbed_rests_the_same_way_after_each_kill_and_the_report_says_for_what() -> None:
    report = matrix(wards.asks, boundaries=about("approval"), approve="none")
    assert report.ok
    assert {trial.status for trial in report.trials} == {"waiting_approval"}
    assert "the undisturbed run is waiting approval, for " in report.table()


def test_children_and_retries_are_survived() -> None:
    report = matrix(
        wards.parent, boundaries=lambda words: ("child /" in words and "effect" in words) or "child_" in words or "retry" in words
    )
    assert report.ok, report.table()
    assert report.baseline.output == ["a", "b"]
    assert any("child /" in boundary for trial in report.trials for boundary in trial.boundaries)


def test_a_model_is_asked_again_only_when_its_answer_was_lost() -> None:
    report = matrix(wards.thinker, "hello", boundaries=about("model"))
    assert report.ok
    assert report.baseline.models == {"scripted": 2}
    asked = {trial.boundaries[0]: trial.effects["scripted"] for trial in report.trials}
    assert asked["after_model_effect: scripted (call 1)"] == 3
    assert asked["after_model_answer_persisted: scripted (call 1)"] == 2


def test_an_idle_loop_goes_to_what_is_due_and_the_next_process_does_not_fall_behind(tmp_path: Path) -> None:
    warp = Warp(tmp_path / "ahead", allowed=True)
    clock = WarpedClock(warp)
    before, began_s = clock.now(), time.monotonic()
    with asyncio.Runner(loop_factory=lambda: WarpedLoop(warp)) as runner:
        runner.run(asyncio.sleep(7200))
    assert clock.now() - before >= 7_200_000_000
    assert time.monotonic() - began_s < 3600
    assert Warp(tmp_path / "ahead", allowed=True).ahead_s >= 7199


def test_time_is_what_it_is_while_something_is_in_flight(tmp_path: Path) -> None:
    warp = Warp(tmp_path / "ahead", allowed=True)

    async def work() -> None:
        with warp.real_time():
            await asyncio.sleep(0.1)

    with asyncio.Runner(loop_factory=lambda: WarpedLoop(warp)) as runner:
        runner.run(work())
        assert warp.ahead_s == 0.0


def test_two_kills_are_as_good_as_one() -> None:
    report = matrix(wards.says, "heeds_key", boundaries=about("after_tool_effect: heeds_key"), pairs=True)
    pairs = [trial for trial in report.trials if len(trial.boundaries) == 2]
    assert report.ok
    assert len(pairs) > 8
    assert report.figures.kills == len(report.trials) + len(pairs)
    assert any(one.begun == 3 for trial in pairs for one in trial.repeated)


def test_of_too_many_trials_some_are_drawn_and_the_report_says_how_many() -> None:
    report = matrix(wards.says, "append_twice", boundaries=about("tool_effect: append_twice"), pairs=True, limit=5)
    assert len(report.trials) == 5 < report.figures.planned
    assert f"in 5 trials of {report.figures.planned} possible ones" in report.table()
    assert ("effect_twice", "append_twice") in rules(report)


def test_what_is_drawn_is_a_matter_of_the_seed() -> None:
    once, again, otherwise = (drawn(list(range(100)), 5, random.Random(seed)) for seed in (1, 1, 2))
    assert once == again == sorted(once)
    assert otherwise != once
    assert drawn([1, 2], 5, random.Random(1)) == [1, 2]
