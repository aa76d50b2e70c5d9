"""Results that could not be compared get no certificate. Faults of the lab or the system are not blamed on a tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.lab import vagrants
from tests.lab.matrices import about, advice, matrix, rules
from tests.lab.test_rules import CALL, FIRST, SECOND, TOLD, TWICE, evidence, found, line, undisturbed

from perdure.testing.lab import Report
from perdure.testing.lab.comparing import differences
from perdure.testing.lab.contents import FileSeen
from perdure.testing.lab.facts import TrialFacts
from perdure.testing.lab.judge import judge
from perdure.testing.lab.spec import Intent


def verdict(report: Report, tool: str) -> str:
    return next(seen.verdict for seen in report.tools if seen.name == tool)


# -- another number of calls each time ----------------------------------------------------------------------------------------
def test_an_effect_that_shows_twice_is_seen_though_the_agent_reads_another_number_of_times(tmp_path: Path) -> None:
    report = matrix(vagrants.wanders, str(tmp_path / "counter"), "look", boundaries=about("after_tool_effect: charge"))
    assert rules(report) == {("effect_twice", "charge")}
    assert "charges has 2 lines instead of 1" in report.problems[0].sentence


def test_a_tool_is_not_certified_by_trials_that_changed_other_things_than_the_undisturbed_run(tmp_path: Path) -> None:
    report = matrix(vagrants.wanders, str(tmp_path / "counter"), "jot", boundaries=about("after_tool_effect: charge"))
    assert rules(report) == {("not_compared", "charge")}
    assert [problem.severity for problem in report.problems] == ["open"]
    assert [(trial.outcome, trial.compared) for trial in report.trials] == [("not_compared", False)]
    assert (report.ok, report.figures.not_compared, verdict(report, "charge")) == (False, 1, "not compared")
    assert "1 trial could not be compared" in report.table()
    page = report.as_html()
    assert '<span class="verdict doubt">Not shown to be as declared: charge; ' in page
    assert "; 1 trial could not be compared</span>" in page
    assert "What is wrong" not in page


def test_a_tool_whose_effect_was_never_cut_is_not_certified(tmp_path: Path) -> None:
    def wanted(boundary: str) -> bool:
        return boundary.startswith("after_tool_effect") and ("charge" in boundary or "turns" in boundary)

    report = matrix(vagrants.charges_late, str(tmp_path / "counter"), boundaries=wanted)
    assert rules(report) == {("not_reached", "charge")}
    assert [trial.outcome for trial in report.trials] == ["ok", "not_reached"]
    every = len(report.baseline.boundaries)
    assert (report.ok, report.untried, verdict(report, "charge"), verdict(report, "turns")) == (
        False,
        every - 1,
        "not tried",
        "as declared",
    )
    assert report.as_json()["untried"] == every - 1
    assert f"Not shown to be as declared: charge; {every - 1} boundaries were not tried" in report.as_html()


def test_boundaries_that_were_not_drawn_are_in_the_headline() -> None:
    def wanted(boundary: str) -> bool:
        return boundary in ("before_tool_effect: enter_row (call 1)", "after_tool_effect: enter_row (call 1)")

    report = matrix(vagrants.enters, "enter_row", True, boundaries=wanted, limit=1)
    every = len(report.baseline.boundaries)
    assert (report.ok, report.untried) == (True, every - 1)
    assert f"1 of {every} boundaries tried: nothing wrong in these" in report.as_html()
    assert f"{every - 1} boundaries were not tried" in report.table()


# -- files that are not the same each time --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("bill", "2 files with names that always differ, instead of 1"),
        ("enter_json", "sales.json has 2 entries instead of 1"),
        ("enter_count", "count.json has another content in count"),
        ("enter_row", "shop.db has 2 rows instead of 1"),
    ],
)
def test_one_more_of_something_that_differs_by_itself_is_seen(tool: str, words: str) -> None:
    honest = matrix(vagrants.enters, tool, True, boundaries=about(f"after_tool_effect: {tool}"))
    assert (rules(honest), verdict(honest, tool), honest.ok) == (set(), "as declared", True)
    assert [[one.tool for one in trial.repeated] for trial in honest.trials] == [[tool]]
    assert any("of two undisturbed runs" in remark or "between two undisturbed runs" in remark for remark in honest.baseline.remarks)
    report = matrix(vagrants.enters, tool, False, boundaries=about(f"after_tool_effect: {tool}"))
    assert rules(report) == {("effect_twice", tool)}
    assert words in report.problems[0].sentence


def test_where_the_only_witness_cannot_be_read_nothing_is_certified_until_a_ledger_says_what_counts() -> None:
    chosen = about("after_tool_effect: enter_noise")
    report = matrix(vagrants.enters, "enter_noise", True, boundaries=chosen)
    assert rules(report) == {("not_compared", "enter_noise")}
    assert "noise differs by itself between two undisturbed runs: it was not compared" in report.baseline.remarks
    known = matrix(vagrants.enters, "enter_noise", True, boundaries=chosen, ledger=_entries)
    assert (known.ok, verdict(known, "enter_noise")) == (True, "as declared")
    twice = matrix(vagrants.enters, "enter_noise", False, boundaries=chosen, ledger=_entries)
    assert rules(twice) == {("effect_twice", "enter_noise")}


def _entries(folder: Path) -> list[str]:
    return (folder / "entries").read_text().splitlines()


@pytest.mark.parametrize(
    ("now", "second", "words"),
    [
        (FileSeen("c", 1, 100), FileSeen("b", 1, 101), []),
        (FileSeen("c", 1, 200), FileSeen("b", 1, 101), ["f differs by itself, and has 200 bytes instead of 100"]),
        (FileSeen("c", 2, 100), FileSeen("b", 2, 101), ["f differs by itself"]),
        (FileSeen("c", 100, 100, "bytes"), FileSeen("b", 100, 100, "bytes"), ["f differs by itself"]),
    ],
)
def test_a_file_that_differs_by_itself_is_compared_as_far_as_that_goes(now: FileSeen, second: FileSeen, words: list[str]) -> None:
    base = undisturbed(files={"f": FileSeen("a", 1, 100)})
    base.second.evidence = structs.replace(base.first.evidence, files={"f": second})
    assert [one.words for one in differences(TrialFacts(evidence(files={"f": now})), base)] == words


# -- faults that are not the fault of a tool --------------------------------------------------------------------------
def test_the_temporary_file_of_a_write_that_was_cut_off_is_left_behind_and_not_wrong() -> None:
    report = matrix(vagrants.saves, boundaries=about("during_tool_effect"))
    assert report.ok
    assert advice(report) == {("left_behind", "save")}


def test_an_effect_that_is_missing_is_not_said_to_show_twice() -> None:
    report = matrix(vagrants.marks, boundaries=about("during_tool_effect"))
    assert rules(report) == {("effect_lost", "mark_first")}
    (problem,) = report.problems
    assert "does not do what the killed process had not done: payments has 1 lines instead of 2" in problem.sentence
    assert "twice" not in problem.sentence


def test_an_attempt_that_was_never_begun_leaves_nothing_to_be_lost() -> None:
    report = matrix(vagrants.retries, boundaries=lambda boundary: boundary == "before_tool_effect: fails_once (call 1)")
    assert report.ok
    assert [trial.outcome for trial in report.trials] == ["not_compared"]
    assert advice(report) == {("not_compared", "")}
    assert "a function was called less often than in the undisturbed run: attempts has 1 lines instead of 2" in report.notes[0].sentence


# -- answers --------------------------------------------------------------------------------------------------------------------
def test_an_answer_that_differs_between_two_that_are_the_same_is_seen() -> None:
    third = 103
    thrice: Any = (
        *TWICE[:4],
        line("returned", SECOND, 2, result='"other"'),
        line("begun", third, 3),
        line("returned", third, 3, result='"ok"'),
    )
    changed = structs.replace(CALL, intents=(*CALL.intents, Intent(3, third)), completed_by=third)
    wrong = found(structs.replace(TOLD, calls=(changed,)), thrice, pids=(FIRST, SECOND, third))
    assert [rule for rule, _ in wrong] == ["result_differs"]
    assert "returned 'other' after 'ok'" in wrong[0][1]


def test_a_tool_that_did_no_harm_where_nobody_could_look_is_not_innocent() -> None:
    """Two calls were repeated, and the world shows one of them twice.

    A trial that was not compared proves no tool innocent.
    """
    other = structs.replace(CALL, number=2, tool="send", key="s")
    both = structs.replace(TOLD, calls=(CALL, other))
    sends = tuple(structs.replace(entry, tool="send", call=2, key="s") for entry in TWICE if entry.call)
    first = TrialFacts(evidence(both, (*TWICE[:2], *sends[:2]), files={"f": FileSeen("a", 1)}))
    base = type(undisturbed())(first, first)
    harmful = evidence(both, (*TWICE, *sends), files={"f": FileSeen("b", 2)})
    third = structs.replace(CALL, number=3, tool="more", key="m", intents=(Intent(1, SECOND),))
    unseen = evidence(
        structs.replace(both, calls=(CALL, other, third)), (*TWICE, *sends[:2]), planned=structs.replace(harmful.planned, number=3)
    )
    trials = judge([harmful, unseen], base)
    assert sorted(problem.tool for problem in trials[0].problems if problem.rule == "effect_twice") == ["pay", "send"]
    assert trials[1].outcome == "not_compared"
