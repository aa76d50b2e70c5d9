"""The report claims no more than was seen.

Hidden effects, untested boundaries, trials that failed, and the exact words.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.lab import wards
from tests.lab.matrices import about, advice, matrix, rules
from tests.lab.test_crashtest_cli import crashtest
from tests.lab.test_rules import TOLD, call, evidence, told, undisturbed

from perdure import Run, agent, tool
from perdure.errors import InvalidInput
from perdure.testing.boundaries import Boundary
from perdure.testing.lab import crash_matrix
from perdure.testing.lab.comparing import differences
from perdure.testing.lab.contents import FileSeen
from perdure.testing.lab.experiment import figures_of
from perdure.testing.lab.facts import TrialFacts
from perdure.testing.lab.judge import judge
from perdure.testing.lab.launch import run_all
from perdure.testing.lab.spec import Kill, Spec
from perdure.testing.lab.table import called, outcome_of, repeated, rows, stacked
from perdure.testing.lab.trials import Planned
from perdure.testing.lab.world import files


# -- out of sight -----------------------------------------------------------------------------------------------------------------
@tool(effect="keyed")
def pay_outside(book: str) -> str:
    with open(book, "a") as file:
        file.write("paid\n")
    return "paid"


@tool(effect="idempotent")
def write_here() -> None:
    Path("here").write_text("x")


@agent(version="1")
async def pays_outside(run: Run, book: str) -> str:
    await write_here()
    return await pay_outside(book)


def test_a_tool_whose_effect_nobody_could_see_is_not_certified(tmp_path: Path) -> None:
    report = matrix(pays_outside, str(tmp_path / "book"), boundaries=["after_tool_effect"])
    assert {seen.name: seen.verdict for seen in report.tools} == {"write_here": "as declared", "pay_outside": "not seen"}
    assert [trial.outcome for trial in report.trials] == ["ok", "not_seen"]
    assert advice(report) == {("not_seen", "pay_outside")}
    assert report.figures.not_seen == 1
    assert "the effect of pay_outside was not seen" in report.table()
    page = report.as_html()
    assert 'class="verdict ok">As declared' not in page
    assert '<span class="not_seen">not seen</span>' in page
    assert "called again, and its effect was not seen" in page


# -- not tried ----------------------------------------------------------------------------------------------------------------------
def test_what_was_not_tried_is_neither_certified_nor_counted() -> None:
    listed = matrix(wards.counts, learn_only=True)
    assert (listed.ok, listed.figures.tried, [seen.verdict for seen in listed.tools]) == (False, 0, ["not tried"])
    report = matrix(wards.says, "overwrite", boundaries=["after_tool_effect: overwrite"])
    assert {seen.name: seen.verdict for seen in report.tools} == {
        "reading_read": "not tried",
        "overwrite": "as declared",
        "writes_down": "not tried",
    }
    every = len(report.baseline.boundaries)
    assert (report.figures.tried, report.figures.boundaries, report.untried) == (1, every, every - 1)
    page = report.as_html()
    assert f'<span class="verdict not_compared">1 of {every} boundaries tried: nothing wrong in these</span>' in page
    assert page.count('<li class="untried">') == every - 1
    assert f"1 kill in 1 trial, at 1 of {every} boundaries" in report.table()


def test_a_wrong_trial_without_its_kill_is_said_to_be_one() -> None:
    one = evidence(structs.replace(TOLD, output='"other"'), reached=0)
    trials = judge([one], undisturbed())
    figures = figures_of(trials, [one], 1, 1, 0.0)
    assert (trials[0].outcome, figures.kills, figures.tried, figures.wrong, figures.unkilled) == ("wrong", 0, 0, 1, 1)


# -- words ----------------------------------------------------------------------------------------------------------------------------
def test_the_table_says_how_often_instead_of_what_and_about_whom() -> None:
    (again,) = judge([evidence()], undisturbed())
    assert (repeated(again), called(again)) == ("pay", "pay 2× instead of 1×")
    both = structs.replace(again, repeated=tuple(structs.replace(again.repeated[0], run=run) for run in ("/1", "/2")))
    assert repeated(both) == "pay (child /1, call 1), pay (child /2, call 1)"
    (asked,) = judge(
        [evidence(structs.replace(told(call(effect="once", phase="in_doubt")), status="needs_attention", attention="in_doubt"))],
        undisturbed(),
    )
    assert asked.asked == ("pay (call 1)",)
    assert outcome_of(structs.replace(again, outcome="doubt", asked=("mail (call 2)",))) == "asks a person about mail (call 2)"


def test_of_pairs_only_those_are_rows_that_are_not_as_declared() -> None:
    report = matrix(wards.counts, pairs=True, boundaries=about("before_tool_effect"), limit=8)
    pairs = [trial for trial in report.trials if len(trial.boundaries) == 2]
    quiet = [trial for trial in pairs if trial.outcome == "ok"]
    assert quiet
    shown = rows(report)
    [(*before, resumed, outcome)] = [row for row in shown if row[0] == f"before_tool_effect → {len(quiet)} more"]
    assert (before[1:], outcome) == (["changing_answer (call 1)", "–", "–", "–"], "as declared")
    assert resumed.endswith(" ms")
    assert len(shown) <= 2 + len(pairs) - len(quiet)
    assert len(list(stacked(report))) == 2 * len(shown)


def test_another_content_is_shown_where_it_is_short(tmp_path: Path) -> None:
    (tmp_path / "count.txt").write_text("2\n")
    now = files(tmp_path, {})
    (tmp_path / "count.txt").write_text("1\n")
    said = differences(TrialFacts(evidence(files=now)), undisturbed(files=files(tmp_path, {})))
    assert [one.words for one in said] == ['count.txt has another content: "2" instead of "1"']


def test_the_page_counts_tools_and_trials_and_begins_with_the_undisturbed_runs() -> None:
    report = matrix(wards.says, "append_twice", boundaries=["after_tool_effect: append_twice", "before_tool_effect: append_twice"])
    page = report.as_html()
    assert "1 tool declared wrongly, shown by 1 of 2 trials" in page
    assert "<tr><td>1</td><td>nowhere: undisturbed</td>" in page
    assert "The intent of every call that is not a <code>read</code> is durable" in page
    assert page.count("<div class='wide'><table>") == page.count("<table>") == 2


def test_the_question_of_an_approval_has_its_name() -> None:
    report = matrix(wards.asks, learn_only=True, signals=[("word", "a"), ("word", "b")])
    assert any(boundary == "before_approval_request_persisted: go (call 1)" for boundary in report.baseline.boundaries)


# -- operations that the system does not permit ----------------------------------------------------------------------
@tool(effect="idempotent")
def tidy_up() -> None:
    if Path.cwd().parent.name not in ("trial-00000", "trial-00001"):
        shutil.rmtree(Path.cwd())


@agent(version="1")
async def tidies_up(run: Run) -> None:
    await tidy_up()


def test_a_folder_that_is_gone_is_the_affair_of_its_trial() -> None:
    report = matrix(tidies_up, boundaries=["tool_effect: tidy_up"])
    assert [trial.outcome for trial in report.trials] == ["not_compared", "not_compared"]
    assert rules(report) == {("not_made", "")}
    (problem,) = report.problems
    assert "this trial could not be made: the working folder is gone; does a tool remove it?" in problem.sentence
    assert problem.boundary == "before_tool_effect: tidy_up (call 1)"


def test_a_process_that_cannot_be_started_ends_its_trial_alone(tmp_path: Path) -> None:
    def trial() -> Generator[Spec, int | None, str]:
        try:
            yield None  # type: ignore[misc]
        except OSError as error:
            return error.strerror or ""
        return "began"

    def begin(spec: Spec) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert [done for _, done in run_all([trial(), trial()], begin, jobs=1, timeout_s=1)] == ["No space left on device"] * 2


def test_a_large_file_is_not_read_into_memory_and_holes_are_not_read_at_all(tmp_path: Path) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 38)
        file.seek((1 << 38) - 1)
        file.write(b"x")
    with (tmp_path / "log").open("wb") as file:
        for _ in range(40):
            file.write(b"line\n" * 200_000)
    tracemalloc.start()
    seen = files(tmp_path, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000
    assert (seen["log"].count, seen["log"].unit, seen["log"].large) == (8_000_000, "lines", True)
    assert (seen["hole"].count, seen["hole"].unit) == (1 << 38, "bytes")
    with (tmp_path / "hole").open("r+b") as file:
        file.seek(1 << 37)
        file.write(b"y")
    os.truncate(tmp_path / "log", 39_999_995)
    changed = files(tmp_path, {})
    assert changed["hole"].digest != seen["hole"].digest
    assert changed["log"].count == 7_999_999


def test_that_a_file_was_too_large_is_in_the_report() -> None:
    from perdure.testing.lab.comparing import loose

    said = list(loose(undisturbed(files={"big": FileSeen("a", 1, large=True)})))
    assert any("big is larger than 16 MB" in one for one in said)


# -- Ctrl-C in the middle of a fork -------------------------------------------------------------------------------------------------
INTERRUPTED = """
import os, signal
from tests.lab import wards

done = []

def interrupt():
    if not done:
        done.append(1)
        os.kill(os.getpid(), signal.SIGINT)

os.register_at_fork(before=interrupt)
try:
    {use}
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    "use",
    [
        "from perdure.testing import crash_matrix; crash_matrix(wards.counts, boundaries=['after_tool_effect'])",
        "from perdure.testing import stepping\n    with stepping(wards.counts, url='sqlite:///s.db') as run: run.finish()",
    ],
)
def test_ctrl_c_is_not_lost_in_a_fork(tmp_path: Path, use: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", INTERRUPTED.replace("{use}", use)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


# -- arguments that cannot be intended --------------------------------------------------------------------------------
def test_a_string_is_not_a_list_of_arguments() -> None:
    with pytest.raises(InvalidInput, match=r"crash_matrix\(agent, \['xyz'\]\)"):
        crash_matrix(wards.says, "xyz")


LEDGERS = """
async def later(folder): return []
def leaves(folder): raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ledger", "ledgers.py"), "it names no function; write FILE.py:FUNCTION"),
        (("--ledger", "ledgers.py:later"), "it is async"),
        (("--ledger", "ledgers.py:leaves"), "SystemExit: 3"),
        (("--report", "page.txt"), "name a file that ends in .html"),
        (("--report", "mine.html"), "this file is not the page of a crash test"),
        (
            ("--boundary", "tool_effect", "--boundary", "nothing"),
            "none of its boundaries contains 'nothing'; it reaches before_run",
        ),
        (("--url", "postgresql://127.0.0.1:1/nobody"), "127.0.0.1"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anybody_is_killed(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    if "--url" in words:
        pytest.importorskip("psycopg")
    (tmp_path / "ledgers.py").write_text(LEDGERS)
    (tmp_path / "mine.html").write_text("<p>mine")
    done = crashtest(tmp_path, f"{wards.__file__}:counts", *words)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
    assert (tmp_path / "mine.html").read_text() == "<p>mine"


def test_a_page_of_an_earlier_crash_test_is_replaced(tmp_path: Path) -> None:
    report = matrix(wards.counts, learn_only=True)
    (tmp_path / "out.html").write_text(report.as_html())
    done = crashtest(tmp_path, f"{wards.__file__}:counts", "--list", "--report", "out.html")
    assert done.returncode == 0, done.stderr
    assert "the report is in out.html" in done.stderr


def test_a_trial_that_was_not_made_is_not_called_unreached() -> None:
    planned = Planned(2, (Kill(Boundary("after_tool_effect", "", 1, "pay")),))
    broken = evidence(None, (), planned=planned, reached=0, end="broken", log="No space left on device: …/trial-00002")
    (trial,) = judge([broken], undisturbed())
    assert trial.outcome == "not_compared"
    assert [(one.rule, one.severity) for one in trial.problems] == [("not_made", "open")]
    assert "No space left on device" in trial.problems[0].sentence
