"""perdure's own lanes, really executed, with sizes that only show that the lanes work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from bench.race import document, page, plot
from bench.race.lanes import ROOT, Contestant, Lane
from bench.race.measurements import MEASUREMENTS, Measurement
from bench.race.race import Race
from bench.race.results import Cell
from bench.race.table import Ground
from tests.bench.contestants import TINY, Silent, ground, heeds_signals
from tests.servers.postgres import Server

_FIRST = [one for one in MEASUREMENTS if one.workloads & {"W1", "W2", "W3"}]
_SECOND = [one for one in MEASUREMENTS if one.workloads & {"W4", "W7", "W8", "T1", "T2"}]


def _run(race: Race, measurements: Sequence[Measurement], cells: list[Cell]) -> dict[str, float]:
    for measurement in measurements:
        race.run(measurement)
    assert [(cell.measurement, cell.failed or cell.absent) for cell in cells if cell.failed or cell.absent] == []
    return {key: value for cell in cells for key, value in cell.figures.items()}


@pytest.mark.parametrize("measurements", [_FIRST, _SECOND], ids=["first", "second"])
def test_perdure_on_its_file_gives_every_figure(tmp_path: Path, measurements: Sequence[Measurement]) -> None:
    cells: list[Cell] = []
    race = Race(ground(tmp_path), [Lane(Contestant.called("perdure"), "sqlite")], 1, Silent(), cells)
    figures = _run(race, measurements, cells)
    assert set(figures) == {key for one in measurements for key in one.gives} - {"W6.server_mb", "W8.server_mb", "W8.server_cpu_percent"}
    assert all(value > 0 for key, value in figures.items() if key != "W8.cpu_percent"), figures


def test_perdure_on_postgresql_is_shared_by_workers_and_resumes(tmp_path: Path, postgres: Server) -> None:
    cells: list[Cell] = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    race = Race(Ground(scratch, postgres, TINY), [Lane(Contestant.called("perdure"), "postgres")], 1, Silent(), cells)
    chosen = [one for one in MEASUREMENTS if one.name in ("workers sharing: 2", "a short run resumes")]
    assert set(_run(race, chosen, cells)) == {"W9.steps_per_s_2", "W4.short_s"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_everything_and_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "bench.race", "--quick", "--with", "", "--only", "W1,W8", "--results", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heeds_signals
    ) as asker:
        assert asker.stderr is not None
        for line in asker.stderr:
            if line.startswith("1/"):
                break
        time.sleep(0.3)  # into the next cell
        os.kill(asker.pid, number)
        told, complaints = asker.communicate(timeout=60)
    assert asker.returncode == 130
    assert "Traceback" not in complaints
    (written,) = tmp_path.glob("race-*.json")
    found = document.read(written)
    assert not found.is_whole
    assert found.cells[0].figures["W1.steps_per_s"] > 0
    assert len(found.cells) < 8
    assert found.interrupted is not None
    # Two of one run; parked runs are prepared for both databases, and measured on both.
    assert (found.interrupted.cells, found.interrupted.planned) == (len(found.cells), 6)
    assert f"**Interrupted after {len(found.cells)} of 6 cells;" in told
    assert f"written: {written}" in complaints
    assert page.page(found).strip() == told.strip()
    assert written.with_suffix(".svg").read_text() == plot.plot(found)
    assert "load after (1, 5, 15 min)" in found.machine
    assert {one.suffix for one in tmp_path.iterdir()} == {".json", ".md", ".svg"}
    assert not [one for one in psutil.process_iter() if str(tmp_path) in " ".join(_command(one))]


def test_a_race_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.race", "--quick", "--with", "", "--only", "W1,W3", "--results", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as asker:
        assert asker.stderr is not None
        while "a queue: perdure/postgres" not in asker.stderr.readline():
            assert asker.poll() is None
        # A worker waits for a caller, and a caller waits for a worker.
        while not [
            one for one in psutil.process_iter() if {"idle", "worker"} & set(_command(one)) and str(tmp_path) in " ".join(_command(one))
        ]:
            time.sleep(0.01)
        asker.kill()
    _wait_until_nobody_works_in(tmp_path)


def _wait_until_nobody_works_in(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while left := [one.pid for one in psutil.process_iter() if str(folder) in " ".join(_command(one))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_the_end_of_its_terminal_ends_everything_and_keeps_what_was_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.race", "--quick", "--with", "", "--only", "W1,W8", "--results", str(tmp_path)]
    terminal = [
        sys.executable,
        "-c",
        "import pty, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); pty.spawn(sys.argv[1:])",
        *command,
    ]
    with subprocess.Popen(terminal, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as shows:
        assert shows.stdout is not None
        while b"one run: perdure/sqlite, repeat 1: steps_per_s" not in shows.stdout.readline():
            assert shows.poll() is None
        shows.kill()
    _wait_until_nobody_works_in(tmp_path)
    (written,) = tmp_path.glob("race-*.json")
    assert document.read(written).cells[0].figures["W1.steps_per_s"] > 0
    assert {one.suffix for one in tmp_path.iterdir()} == {".json", ".md", ".svg"}


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
