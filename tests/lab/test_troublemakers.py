"""Difficult agents and tools that the lab must be able to handle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.lab import wards
from tests.lab.matrices import about, matrix, rules
from tests.servers.providers import Provider, say

from perdure import Run, agent
from perdure.errors import InvalidInput, RunFailed
from perdure.models import OpenAI
from perdure.testing.lab.ledger import EffectLedger
from perdure.testing.lab.world import files


def test_a_tool_that_prints_and_reads_finds_an_empty_stdin_and_disturbs_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    report = matrix(wards.talkative, boundaries=about("tool_effect"))
    assert (report.ok, report.baseline.output) == (True, "")
    assert capfd.readouterr() == ("", "")


def test_an_agent_that_goes_another_way_each_time_is_said_to_diverge() -> None:
    report = matrix(wards.fickle, boundaries=about("after_tool_intent_persisted"))
    assert ("diverged", "") in rules(report)
    assert any("two undisturbed runs made different calls" in remark for remark in report.baseline.remarks)


def test_a_boundary_that_is_not_reached_is_no_success() -> None:
    report = matrix(wards.shy, boundaries=about("tool_effect: shows_up"))
    assert {trial.outcome for trial in report.trials} == {"not_reached"}
    assert {problem.rule for problem in report.problems} == {"not_reached"}
    assert (report.ok, report.figures.kills, report.figures.not_reached) == (False, 0, len(report.trials))


def test_an_isolated_tool_is_run_as_it_is() -> None:
    report = matrix(wards.hermit, boundaries=about("before_tool_result_persisted"))
    assert report.ok
    assert [trial.effects for trial in report.trials] == [{"apart": 2}]


def test_what_a_tool_has_started_ends_with_its_trial(tmp_path: Path) -> None:
    report = matrix(wards.breeds, str(tmp_path), boundaries=about("after_tool_effect"))
    assert report.ok
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 4  # two undisturbed runs, one that was killed, one that continued
    deadline = time.monotonic() + 30  # it gets the signal at once, and dies when the system runs it
    while any(map(_is_running, started)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_tool_that_never_returns_fails_the_undisturbed_run_in_time() -> None:
    with pytest.raises(RunFailed, match="neither ended nor parked in time"):
        matrix(wards.hangs, timeout_s=0.5)


def test_a_model_that_costs_money_is_not_asked_in_every_trial_without_a_word() -> None:
    pytest.importorskip("openai")  # here, so that the forked processes need not load it each
    with Provider([say("hello")]) as provider:
        model = OpenAI("gpt-test", base_url=provider.openai_url, api_key=provider.key, api="chat")

        @agent(version="1")
        async def chatting(run: Run) -> str:
            return (await model.ask("hi")).text

        with pytest.raises(InvalidInput, match=r"model gpt-test 1 times.* --allow-models"):
            matrix(chatting)
        assert len(provider.requests()) == 1
        report = matrix(chatting, allow_models=True, learn_only=True)
        assert (report.baseline.output, report.baseline.models) == ("hello", {"gpt-test": 1})


def test_a_ledger_forgets_half_a_line_and_goes_on(tmp_path: Path) -> None:
    ledger = EffectLedger(tmp_path / "ledger")
    ledger.note("begun", tool="pay", run="r", call=1)
    with open(ledger.path, "ab") as file:
        file.write(b'{"fact":"retur')
    assert [entry.fact for entry in ledger.entries()] == ["begun"]
    ledger.note("killed")
    assert [entry.fact for entry in ledger.entries()] == ["begun", "killed"]


def test_two_processes_do_not_mix_their_lines(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from perdure.testing.lab.ledger import EffectLedger\n"
        "for n in range(300): EffectLedger(Path(sys.argv[1])).note('begun', tool='x' * 5000, call=n)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "ledger")]) for _ in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len(EffectLedger(tmp_path / "ledger").entries()) == 600


def test_files_are_compared_without_the_order_of_their_lines_and_what_is_the_runs_own(tmp_path: Path) -> None:
    seen = []
    for run_id, text in (("r-1", "a r-1\nb\n"), ("r-2", "b\na r-2\n"), ("r-3", "b\na r-2\n")):
        (tmp_path / "log").write_text(text)
        seen.append(files(tmp_path, {run_id: "<run>"}))
    assert seen[0] == seen[1] != seen[2]
    assert seen[0]["log"].count == 2


def test_the_folder_to_keep_trials_in_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(InvalidInput, match="must be new or empty"):
        matrix(wards.counts, keep=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_callers_own_process_is_as_it_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before: Any = (os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGINT), sys.path[:], os.listdir("/proc/self/fd"))
    matrix(wards.counts, boundaries=about("after_tool_effect"))
    assert (os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGINT), sys.path[:], os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []
