"""Every wrong declaration is found with the name of its tool, and no correct declaration is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.lab import wards
from tests.lab.matrices import about, advice, matrix, rules, says


@pytest.mark.parametrize(
    ("tool", "found"),
    [
        ("append_twice", {("effect_twice", "append_twice")}),
        ("ignores_key", {("effect_twice", "ignores_key")}),
        ("writing_read", {("effect_twice", "writing_read")}),
        ("lies_about_it", {("effect_twice", "lies_about_it"), ("reconcile_wrong", "lies_about_it")}),
        ("refuses_twice", {("raises_again", "refuses_twice")}),
    ],
)
def test_a_tool_that_is_not_what_it_declares_is_named(tool: str, found: set[Any]) -> None:
    report = says(tool)
    assert rules(report) == found
    assert not report.ok
    assert {seen.name for seen in report.tools if seen.verdict == "not as declared"} == {tool}
    wrong = [trial for trial in report.trials if trial.outcome == "wrong"]
    # Only where its effect was begun and its result was lost does it show.
    assert 1 <= len(wrong) < len(report.trials)
    assert all(any(one.tool == tool and one.begun == 2 for one in trial.repeated) for trial in wrong)


@pytest.mark.parametrize("tool", ["overwrite", "heeds_key", "reading_read", "looks_for_it", "books"])
def test_a_tool_that_is_what_it_declares_is_not_accused(tool: str) -> None:
    report = says(tool)
    assert report.ok
    assert rules(report) == advice(report) == set()
    assert {trial.outcome for trial in report.trials} == {"ok"}
    assert {trial.output_equal for trial in report.trials} == {True}
    assert report.figures.kills == report.figures.trials == len(report.trials) >= 4
    # Calls that may be repeated were repeated: without any repetition, the lab would have killed no process at the
    # right moment.
    if tool != "looks_for_it":
        assert any(one.tool == tool and one.allowed for trial in report.trials for one in trial.repeated)


def test_a_result_that_differs_is_named() -> None:
    report = matrix(wards.counts, boundaries=about("after_tool_effect"))
    assert ("result_differs", "changing_answer") in rules(report)
    assert "returned 2 after 1" in next(one.sentence for one in report.problems if one.rule == "result_differs")
    assert {trial.output_equal for trial in report.trials if trial.outcome == "wrong"} == {False}


def test_a_once_tool_without_a_hook_leaves_doubts_and_advice_and_is_not_wrong() -> None:
    report = says("nobody_knows")
    assert report.ok
    assert advice(report) == {("no_reconcile", "nobody_knows")}
    doubts = [trial for trial in report.trials if trial.outcome == "doubt"]
    # The lab's ledger knows in each of these cases, and the run came to the same end.
    assert {settled for trial in doubts for settled in trial.settled} == {
        "nobody_knows (call 2): it happened",
        "nobody_knows (call 2): it did not happen",
    }
    assert {(trial.status, trial.output_equal) for trial in doubts} == {("succeeded", True)}
    assert not any(one.tool == "nobody_knows" for trial in report.trials for one in trial.repeated)


def test_what_a_tool_keeps_in_its_process_is_missed_after_the_kill() -> None:
    report = says("remembers")
    assert ("effect_lost", "") in rules(report)


def test_an_effect_cut_off_in_its_middle_is_left_to_a_person_when_nobody_can_know() -> None:
    report = matrix(wards.slow, boundaries=about("during_tool_effect"))
    (trial,) = report.trials
    assert (trial.outcome, trial.status, trial.settled, trial.output_equal) == ("doubt", "needs_attention", (), None)
    assert report.ok


def test_the_users_own_ledger_shows_what_no_file_does(tmp_path: Path) -> None:
    def ledger(folder: Path) -> list[Any]:
        return [json.loads(line) for line in (tmp_path / f"{folder.parent.name}.jsonl").read_text().splitlines()]

    wrong = matrix(wards.posts, str(tmp_path), False, ledger=ledger, boundaries=about("tool_effect"))
    assert rules(wrong) == {("effect_twice", "post")}
    assert "the ledger has 2 entries instead of 1" in wrong.problems[0].sentence
    assert {len(trial.world) for trial in wrong.trials} == {1, 2}
    for file in tmp_path.iterdir():
        file.unlink()
    assert matrix(wards.posts, str(tmp_path), True, ledger=ledger, boundaries=about("tool_effect")).ok
