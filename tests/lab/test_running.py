"""How trials run.

Each trial is a separate run for the services outside, keeps their pace, and is killed where it should be.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.lab.matrices import about, advice, matrix, rules

from perdure import Artifact, Call, Outcome, Run, Settings, agent, tool
from perdure.core.events import OF_MODEL
from perdure.errors import InvalidInput, RunFailed
from perdure.models import Model, OpenAI, Price, Scripted
from perdure.testing.lab.counting import _is_paid
from perdure.testing.lab.warp import Warp, WarpedLoop


def keys_in(service: str) -> list[str]:
    return Path(service).read_text().split() if Path(service).exists() else []


# -- separate runs ----------------------------------------------------------------------------------------------------
@tool
def ship(service: str, call: Call) -> str:
    with open(service, "a") as file:
        file.write(f"{call.key}\n")
    return "shipped"


@ship.reconcile
def _(service: str, call: Call) -> Outcome:
    return Outcome.happened("shipped") if call.key in keys_in(service) else Outcome.not_happened()


@agent(version="1")
async def shipper(run: Run, service: str) -> str:
    return await ship(service)


def test_a_service_outside_has_never_seen_the_keys_of_a_trial_before(tmp_path: Path) -> None:
    service = str(tmp_path / "service")
    report = matrix(shipper, service, boundaries=about("tool_effect: ship"))
    assert report.ok, report.table()
    assert len(report.trials) == 3
    # Twice undisturbed, and once in each trial: no call counted as a repetition of another call.
    assert len(keys_in(service)) == len(set(keys_in(service))) == 5


@tool(effect="idempotent")
def write_down(number: str, what: str, call: Call) -> str:
    Path("note").write_text(f"{number} {what} {call.key}")
    return f"note-{call.key[:8]}"


@agent(version="1")
async def dicey(run: Run) -> list[Any]:
    """Shows everything that is derived from a run's id, and depends on chance."""
    number, chance = run.uuid(), run.random.random()
    notes = [await write_down(str(number), f"{run.id} {number.hex}") for _ in range(1 + int(chance * 20))]
    return [str(number), run.uuid().hex[:8], chance, run.id, *notes]


def test_what_follows_from_the_id_of_a_trial_makes_no_difference() -> None:
    report = matrix(dicey, boundaries=about("after_tool_effect: write_down (call 1)"))
    assert report.ok, report.table()
    assert report.baseline.same_output
    assert not any("different calls" in remark for remark in report.baseline.remarks)
    assert [(trial.outcome, trial.output_equal) for trial in report.trials] == [("ok", True)]


@tool(effect="idempotent")
async def keep(text: str, call: Call) -> Artifact:
    return await call.save(text.encode())


@tool(effect="idempotent")
async def note_size(file: Artifact) -> int:
    size = len(await file.read())
    Path("size").write_text(f"{size}")
    return size


@agent(version="1")
async def keeper(run: Run) -> Artifact:
    file = await keep("large")
    await note_size(file)
    return file


def test_the_random_uris_of_artifacts_make_no_difference() -> None:
    report = matrix(keeper, boundaries=about("after_tool_effect: keep (call 1)"))
    assert report.ok, report.table()
    assert report.baseline.same_output
    assert not any("different calls" in remark for remark in report.baseline.remarks)
    assert [trial.output_equal for trial in report.trials] == [True]


# -- the pace of outside services -------------------------------------------------------------------------------------
def later(service: str, key: str, seconds: float) -> None:
    """The service shows the effect after some time, even if the caller is dead by then."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; echo {key} >> {service}"], start_new_session=True)


@tool(timeout=2)
def ship_slowly(service: str, call: Call) -> str:
    later(service, call.key, 0.5)
    return "shipped"


@ship_slowly.reconcile
def _(service: str, call: Call) -> Outcome:
    return Outcome.happened("shipped") if call.key in keys_in(service) else Outcome.not_happened()


@tool  # without a timeout there is the margin alone
def ship_casually(service: str, call: Call) -> str:
    later(service, call.key, 0.3)
    return "shipped"


@ship_casually.reconcile
def _(service: str, call: Call) -> Outcome:
    return Outcome.happened("shipped") if call.key in keys_in(service) else Outcome.not_happened()


@agent(version="1")
async def slow_shipper(run: Run, service: str, casually: bool) -> str:
    return await (ship_casually if casually else ship_slowly)(service)


@pytest.mark.parametrize(("casually", "margin_s"), [(False, 0.1), (True, 2.0)])
def test_an_effect_that_shows_late_is_waited_for_as_perdure_would(tmp_path: Path, casually: bool, margin_s: float) -> None:
    service, settings = str(tmp_path / "service"), Settings(reconcile_margin_s=margin_s)
    report = matrix(slow_shipper, service, casually, boundaries=about("after_tool_effect"), settings=settings)
    assert report.ok, report.table()
    assert [(trial.outcome, sum(trial.effects.values())) for trial in report.trials] == [("ok", 1)]


@tool
def ship_in_steps(service: str, call: Call) -> str:
    later(service, call.key, 0.5)
    return "shipped"


@ship_in_steps.reconcile
def _(service: str, call: Call) -> Outcome:
    return Outcome.happened("shipped") if call.key in keys_in(service) else Outcome.in_progress()


@agent(version="1")
async def patient_shipper(run: Run, service: str) -> str:
    return await ship_in_steps(service)


def test_what_is_in_progress_outside_is_not_hurried(tmp_path: Path) -> None:
    settings = Settings(reconcile_margin_s=0.0, reconcile_asks=3)
    report = matrix(patient_shipper, str(tmp_path / "service"), boundaries=about("after_tool_effect"), settings=settings)
    assert [(trial.outcome, trial.effects["ship_in_steps"]) for trial in report.trials] == [("ok", 1)], report.table()


@tool(timeout=600)
def ship_by_sea() -> str:
    Path("shipped").touch()
    return "shipped"


@ship_by_sea.reconcile
def _() -> Outcome:
    return Outcome.not_happened()  # like a caller that looks too early


@agent(version="1")
async def seafarer(run: Run) -> str:
    return await ship_by_sea()


@pytest.mark.long
def test_a_hook_is_not_accused_of_what_the_lab_did_not_wait_for_and_the_report_says_so() -> None:
    report = matrix(seafarer, boundaries=about("after_tool_effect"), timeout_s=8)
    assert not {rule for rule, _ in rules(report)} & {"reconcile_wrong", "effect_twice"}, report.table()
    assert [trial.effects["ship_by_sea"] for trial in report.trials] == [1]
    assert any("tool ship_by_sea: " in remark and "--timeout" in remark for remark in report.baseline.remarks)
    assert ("reconcile_unsure", "ship_by_sea") in advice(report)


@pytest.mark.parametrize("begun", [True, False])
def test_time_is_real_only_for_an_effect_that_was_begun_and_as_long_as_there_is_patience(tmp_path: Path, begun: bool) -> None:
    warp = Warp(tmp_path / "ahead", allowed=True, patience_s=0.4, begun=lambda name: begun)

    async def look() -> tuple[bool, bool]:
        loop = asyncio.get_running_loop()
        await loop.create_task(asyncio.sleep(0.1), name="reconcile ship")
        jumped = warp.ahead_s > 0.0
        time.sleep(0.5)  # all of its patience
        late = loop.create_task(asyncio.sleep(7200), name="reconcile ship")
        await asyncio.sleep(60)
        hurried = warp.is_hurried("ship")
        await late
        return jumped, hurried

    with asyncio.Runner(loop_factory=lambda: WarpedLoop(warp)) as runner:
        assert runner.run(look()) == (not begun, begun)
    assert warp.ahead_s > 7000


# -- killed where it was to be ---------------------------------------------------------------------------------------------------
@tool(effect="read")
def long_at_first(folder: str) -> None:
    """Takes its time in the two undisturbed runs alone."""
    if len(os.listdir(folder)) < 2:
        Path(folder, f"{os.getpid()}-{time.time_ns()}").touch()
        time.sleep(0.4)


@tool(effect="read")
def long_always() -> None:
    time.sleep(0.6)


@agent(version="1")
async def two_steps(run: Run, folder: str) -> None:
    await long_at_first(folder)
    await long_always()


def test_nobody_is_killed_in_the_middle_of_a_later_effect(tmp_path: Path) -> None:
    report = matrix(two_steps, str(tmp_path), boundaries=about("during_tool_effect: long_at_first"))
    assert len(report.trials) == 1
    assert report.figures.kills == 0
    assert report.trials[0].effects["long_always"] == 1


# -- processes that end by themselves --------------------------------------------------------------------------------------------
@tool(effect="read")
def goes_away(again: bool) -> None:
    if not again or Path("been-here").exists():
        os._exit(0)
    Path("been-here").touch()


@agent(version="1")
async def deserter(run: Run, again: bool) -> None:
    await goes_away(again)


def test_a_process_that_ends_with_code_0_before_the_run_does_has_not_rested() -> None:
    with pytest.raises(RunFailed, match=r"it ended its process \(exit code 0\)"):
        matrix(deserter, False)
    report = matrix(deserter, True, boundaries=about("after_tool_effect"))
    assert [trial.status for trial in report.trials] == ["exit code 0"]
    assert ("died", "") in rules(report)


# -- folders ---------------------------------------------------------------------------------------------------------------------
def test_a_folder_that_would_be_copied_into_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="keep them in another folder"):
        matrix(dicey, world=tmp_path, keep=tmp_path / "deep" / "kept")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InvalidInput, match="set TMPDIR to another folder"):
        matrix(dicey, world=tmp_path)


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match=rf"{tmp_path}/pipe cannot be copied: .*named pipe") as refused:
        matrix(dicey, world=tmp_path)
    assert "[(" not in str(refused.value)


# -- money ------------------------------------------------------------------------------------------------------------------------
class Ours(OpenAI):
    pass


class Own(Model):
    async def answer(self, request: Any, call: Call) -> Any:
        raise AssertionError("nobody asks")


class Listed(Own):
    provider = "openai"


def is_paid(model: Model) -> bool:
    return _is_paid(SimpleNamespace(events=OF_MODEL, model=model))


def test_a_model_costs_money_whoever_has_written_its_class() -> None:
    assert is_paid(Ours("m", api_key="k", base_url="http://127.0.0.1:1"))
    assert is_paid(Own("m", price=Price(0, 1)))
    assert not is_paid(Own("m", price=Price(0, 0)))
    assert not is_paid(Own("m"))
    assert not is_paid(Scripted(["x"]))


def test_a_model_that_is_in_the_price_list_costs_money() -> None:
    pytest.importorskip("genai_prices")
    assert is_paid(Listed("gpt-4o"))
    assert not is_paid(Listed("nobody-has-heard-of-it"))
