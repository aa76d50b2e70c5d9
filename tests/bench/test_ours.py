"""perdure's own lanes for real, at sizes at which they only show that they work."""

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
from tests.bench.contestants import TINY, Silent, ground
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
    assert set(figures) == {key for one in measurements for key in one.gives} - {"W6.server_mb", "W8.server_mb"}
    assert all(value > 0 for key, value in figures.items() if key != "W8.cpu_percent"), figures


def test_perdure_on_postgresql_is_shared_by_workers_and_resumes(tmp_path: Path, postgres: Server) -> None:
    cells: list[Cell] = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    race = Race(Ground(scratch, postgres, TINY), [Lane(Contestant.called("perdure"), "postgres")], 1, Silent(), cells)
    chosen = [one for one in MEASUREMENTS if one.name in ("workers sharing: 2", "a short run resumes")]
    assert set(_run(race, chosen, cells)) == {"W9.steps_per_s_2", "W4.short_s"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_and_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "bench.race", "--quick", "--with", "perdure", "--only", "W1,W8", "--results", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asker:
        assert asker.stderr is not None
        for line in asker.stderr:
            if line.startswith("1/"):
                break
        time.sleep(0.3)  # into the next cell
        os.kill(asker.pid, number)
        told, _ = asker.communicate(timeout=60)
    assert asker.returncode == 130
    (written,) = tmp_path.glob("race-*.json")
    found = document.read(written)
    assert not found.is_whole
    assert found.cells[0].figures["W1.steps_per_s"] > 0
    assert len(found.cells) < 8
    assert page.page(found).strip() == told.strip()
    assert written.with_suffix(".svg").read_text() == plot.plot(found)
    assert {one.suffix for one in tmp_path.iterdir()} == {".json", ".md", ".svg"}
    assert not [one for one in psutil.process_iter() if str(tmp_path) in " ".join(_command(one))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
