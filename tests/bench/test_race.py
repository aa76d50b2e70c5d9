"""The order of the race, and what happens with contestants that fail, hang or print garbage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]
import pytest
from bench.race.__main__ import described
from bench.race.exchange import Failed
from bench.race.lanes import ROOT
from bench.race.measurements import MEASUREMENTS, Measurement
from bench.race.race import Race
from bench.race.results import Cell
from tests.bench.contestants import Silent, ground, lane

_HANGS = """
def sequential(given):
    os.spawnl(os.P_NOWAIT, sys.executable, sys.executable, "-c", "import time; time.sleep(600)")
    time.sleep(600)
"""


def _named(name: str) -> Measurement:
    return next(one for one in MEASUREMENTS if one.name == name)


def _by_lane(cells: list[Cell]) -> dict[str, Cell]:
    return {cell.lane: cell for cell in cells}


def test_everybody_has_the_first_repeat_before_anybody_has_the_second(tmp_path: Path) -> None:
    cells: list[Cell] = []
    Race(ground(tmp_path), [lane(tmp_path, "one"), lane(tmp_path, "two")], 2, Silent(), cells).run(_named("one run"))
    assert [(cell.repeat, cell.lane) for cell in cells] == [(1, "one/sqlite"), (1, "two/sqlite"), (2, "one/sqlite"), (2, "two/sqlite")]


def test_figures_are_made_of_what_was_answered_less_what_an_empty_store_has(tmp_path: Path) -> None:
    cells: list[Cell] = []
    Race(ground(tmp_path), [lane(tmp_path, "one")], 1, Silent(), cells).run(_named("one run"))
    assert cells[0].figures == {"W1.steps_per_s": 100.0, "W1.p50_us": 10.0, "W1.p99_us": 20.0, "W5.bytes_per_step": 50.0}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def sequential(given): raise RuntimeError('the disk is full')", "ended with 1: RuntimeError: the disk is full"),
        ("def sequential(given):\n    print('{not json', flush=True)\n    sys.exit(0)", "its last line is no JSON object"),
        ("def sequential(given): return {'secondss': 1}", "its answer cannot be used: KeyError: 'seconds'"),
        ("def sequential(given): return {'seconds': 0.0}", "its answer cannot be used: ZeroDivisionError"),
        ("def sequential(given): os.kill(os.getpid(), 9)", "ended with -9: and said nothing"),
    ],
)
def test_a_contestant_that_fails_is_told_and_the_others_go_on(tmp_path: Path, body: str, reason: str) -> None:
    cells: list[Cell] = []
    lanes = [lane(tmp_path, "rogue", body), lane(tmp_path, "good")]
    Race(ground(tmp_path), lanes, 1, Silent(), cells).run(_named("slow tools, one run"))
    found = _by_lane(cells)
    assert reason in str(found["rogue/sqlite"].failed)
    assert not found["rogue/sqlite"].figures
    assert found["good/sqlite"].figures
    assert found["good/sqlite"].failed is None


def test_a_contestant_that_hangs_is_cut_off_with_all_it_has_started_and_not_tried_again(tmp_path: Path) -> None:
    cells: list[Cell] = []
    measurement = msgspec.structs.replace(_named("slow tools, one run"), limit_s=4.0)
    begun = time.monotonic()
    Race(ground(tmp_path), [lane(tmp_path, "rogue", _HANGS), lane(tmp_path, "good")], 2, Silent(), cells).run(measurement)
    rogue = [cell for cell in cells if cell.lane == "rogue/sqlite"]
    assert rogue[0].failed == "sequential: cut off after 4 s"
    assert rogue[1].failed == "not tried again: sequential: cut off after 4 s"
    assert len([cell for cell in cells if cell.lane == "good/sqlite" and cell.figures]) == 2
    assert time.monotonic() - begun < 60
    # A killed one is a zombie until its parent, who is gone too, has looked after it.
    assert not [one for one in psutil.process_iter() if _works_in(one, tmp_path)]


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()).is_relative_to(folder)
    except psutil.Error:
        return False


def test_what_a_contestant_does_not_have_is_absent_and_no_failure(tmp_path: Path) -> None:
    cells: list[Cell] = []
    Race(ground(tmp_path), [lane(tmp_path, "one")], 2, Silent(), cells).run(_named("a queue"))
    assert [(cell.absent, cell.failed) for cell in cells] == [("it has nothing of the kind", None)] * 2


def test_what_cannot_be_prepared_is_not_measured_and_the_others_are(tmp_path: Path) -> None:
    dies = "def build(given): wire.last_words()\ndef resume(given): wire.last_words()"
    fails = "def build(given): raise OSError('no room')\ndef resume(given): wire.last_words()"
    cells: list[Cell] = []
    lanes = [lane(tmp_path, "rogue", fails, "build resume"), lane(tmp_path, "good", dies, "build resume")]
    Race(ground(tmp_path), lanes, 2, Silent(), cells).run(_named("a short run resumes"))
    assert [(cell.lane, cell.repeat, bool(cell.failed)) for cell in cells] == [
        ("rogue/sqlite", 0, True),
        ("good/sqlite", 0, False),
        ("rogue/sqlite", 1, True),
        ("good/sqlite", 1, False),
        ("rogue/sqlite", 2, True),
        ("good/sqlite", 2, False),
    ]
    assert all(0 < cell.figures["W4.short_s"] < 60 for cell in cells if cell.lane == "good/sqlite" and cell.repeat)


def test_a_measurement_leaves_nothing_behind_on_the_disk(tmp_path: Path) -> None:
    cells: list[Cell] = []
    place = ground(tmp_path)
    Race(place, [lane(tmp_path, "one")], 1, Silent(), cells).run(_named("one run"))
    assert [one.name for one in place.folder.iterdir()] == ["said"]


_STAYS = """
def worker(given):
    wire.say({"ready": True})
    sys.stdin.read()
    open("left", "w").close()
    return {}
"""
_ASKS = """
import os, signal, time
from pathlib import Path
from tests.bench.contestants import contestant
from bench.race.exchange import Exchange
folder = Path.cwd()
with Exchange(folder / "said").companion(contestant(folder, "one", BODY, "worker"), "worker", {"folder": str(folder)}, 30.0):
    time.sleep(0.3)
    assert not (folder / "left").exists(), "it left before anything happened"
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_companion_sees_the_end_of_its_stdin_when_the_one_who_asks_is_killed(tmp_path: Path) -> None:
    program = _ASKS.replace("BODY", repr(_STAYS))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 30
    while not (tmp_path / "left").exists():
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.02)


def test_what_says_nothing_of_its_stores_is_no_contestant() -> None:
    about = {"name": "Peer", "version": "1", "durable": "all", "how": "plainly"}
    with pytest.raises(Failed, match="about: it says nothing of stores"):
        described(about)
    assert described(about | {"stores": ["sqlite"]})["stores"] == ["sqlite"]
