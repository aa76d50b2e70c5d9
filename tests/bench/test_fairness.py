"""All contestants are measured in the same way: arguments, pauses, settling, and the parts of a queue's figure.

The workers of a contestant end together with the process that started them.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from bench.race import wire
from bench.race.exchange import environment
from bench.race.lanes import NAMES, RACE, Contestant
from bench.race.measurements import MEASUREMENTS
from bench.race.race import Race
from bench.race.results import Cell
from bench.race.sizes import QUICK, WHOLE, Sizes
from bench.race.targets import TARGETS
from tests.bench.contestants import TINY, Silent, ground, lane

_BURNS = "import time\nwhile True: time.perf_counter()"


def _figures(tmp_path: Path, name: str, body: str, roles: str) -> dict[str, float]:
    cells: list[Cell] = []
    measurement = next(one for one in MEASUREMENTS if one.name == name)
    Race(ground(tmp_path), [lane(tmp_path, "one", body, roles)], 1, Silent(), cells).run(measurement)
    assert [cell.failed or cell.absent for cell in cells if cell.failed or cell.absent] == []
    return {key: value for cell in cells for key, value in cell.figures.items()}


@pytest.mark.parametrize(("text_of", "chars"), [(wire.text_of, wire.ARGUMENT_CHARS), (wire.said, wire.SAID_CHARS)])
def test_what_steps_are_given_has_its_length_differs_and_does_not_compress(text_of: Callable[[int], str], chars: int) -> None:
    texts = [text_of(number) for number in range(200)]
    assert {len(text) for text in texts} == {chars}
    assert len(set(texts)) == len(texts)
    # Hex digits hold half a byte each; less than that would be a pattern.
    assert len(zlib.compress("".join(texts).encode(), 9)) > 0.5 * chars * len(texts)


def test_a_queue_that_is_worked_on_when_all_are_enqueued_has_three_figures(tmp_path: Path) -> None:
    body = "def queue(given): return {'enqueue_seconds': 1.0, 'seconds': 4.0}"
    assert _figures(tmp_path, "a queue", body, "queue") == {"W3.runs_per_s": 2.5, "W3.enqueued_per_s": 10.0, "W3.through_per_s": 2.0}


def test_a_queue_that_is_served_while_runs_arrive_has_no_figure_for_work_alone(tmp_path: Path) -> None:
    body = "def queue(given): return {'through_seconds': 5.0}"
    assert _figures(tmp_path, "a queue", body, "queue") == {"W3.through_per_s": 2.0}


def test_restate_which_serves_while_runs_arrive_is_held_against_sends_and_work() -> None:
    assert {target.key for target in TARGETS if target.lane == "restate" and target.key.startswith("W3")} == {"W3.through_per_s"}


def test_the_slowest_start_of_an_idle_system_is_the_slowest(tmp_path: Path) -> None:
    body = "def worker(given):\n    wire.say({'ready': True})\n    time.sleep(60)\ndef idle(given): return {'ms': [1.0, 9.0, 2.0]}"
    assert _figures(tmp_path, "an idle system", body, "worker idle") == {"W3.idle_ms": 2.0, "W3.idle_slowest_ms": 9.0}


def test_the_first_starts_of_an_idle_system_are_not_counted() -> None:
    starts: list[int] = []

    async def start() -> int:
        starts.append(time.monotonic_ns())
        if len(starts) <= wire.UNCOUNTED_STARTS:
            await asyncio.sleep(0.3)  # no contestant has settled yet
        return time.monotonic_ns()

    waits = asyncio.run(wire.idle_ms(5, start))
    assert len(waits) == 5
    assert len(starts) == 5 + wire.UNCOUNTED_STARTS
    assert max(waits) < 200
    assert all(later - earlier > 0.13e9 for earlier, later in itertools.pairwise(starts))


_DIES = """
def build(given):
    open(DIED, "w").write(str(time.monotonic_ns()))
    wire.last_words()
def resume(given):
    with open(WAITED, "a") as waited:
        print(time.monotonic_ns() - int(open(DIED).read()), file=waited)
    build(given)
"""


def test_a_run_is_resumed_only_when_everybody_has_noticed_the_death_and_the_wait_is_in_no_figure(tmp_path: Path) -> None:
    noticed_s = 1.5
    died, waited = tmp_path / "died", tmp_path / "waited"
    body = _DIES.replace("DIED", repr(str(died))).replace("WAITED", repr(str(waited)))
    cells: list[Cell] = []
    measurement = next(one for one in MEASUREMENTS if one.name == "a short run resumes")
    place = ground(tmp_path, msgspec.structs.replace(TINY, noticed_s=noticed_s))
    Race(place, [lane(tmp_path, "one", body, "build resume")], 2, Silent(), cells).run(measurement)
    resumed_s = [cell.figures["W4.short_s"] for cell in cells if cell.repeat]
    waits_s = [int(line) / 1e9 for line in waited.read_text().split()]
    assert len(waits_s) == len(resumed_s) == 2
    assert all(wait_s >= noticed_s for wait_s in waits_s)
    # Between the two moments that a contestant sees there are only the wait and the measured time, and almost nothing
    # else.
    assert all(0 < one_s < wait_s - noticed_s + 0.2 for one_s, wait_s in zip(resumed_s, waits_s, strict=True))


@pytest.mark.parametrize("sizes", [WHOLE, QUICK], ids=["whole", "quick"])
def test_a_server_that_waits_for_a_heartbeat_has_noticed_the_death_by_then(sizes: Sizes) -> None:
    program = (RACE / "contestants" / "with_temporal_workflows.py").read_text()
    (heartbeat_s,) = re.findall(r'"heartbeat_timeout": timedelta\(seconds=(\d+)\)', program)
    (retry_ms,) = re.findall(r"initial_interval=timedelta\(milliseconds=(\d+)\)", program)
    # A retry waits twice as long as the retry before, and the last of four repeats is the fourth; plus a second for a
    # late server.
    assert sizes.noticed_s >= int(heartbeat_s) + 8 * int(retry_ms) / 1000 + 1


def test_pauses_between_starts_meet_a_poller_at_every_point_of_its_interval() -> None:
    for interval_ms in (10, 20):
        assert {round(1000 * wire.pause_s(number)) % interval_ms for number in range(40)} == set(range(interval_ms))


def test_what_a_process_computes_before_it_has_settled_is_not_its_idle_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SETTLING_S", 0.6)

    async def settle_then_idle() -> dict[str, float]:
        share = asyncio.create_task(wire.idle_cpu({"server": None, "seconds": 0.5}))
        await asyncio.sleep(0.05)
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            pass
        return await share

    told = asyncio.run(settle_then_idle())
    assert told.keys() == {"cpu_percent"}
    assert told["cpu_percent"] < 40


def test_the_share_of_a_server_is_told_with_everything_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SETTLING_S", 0.3)
    parent = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {_BURNS!r}]).wait()"
    with subprocess.Popen([sys.executable, "-c", parent], start_new_session=True) as server:
        try:
            told = asyncio.run(wire.idle_cpu({"server": {"pid": server.pid}, "seconds": 1.0}))
        finally:
            os.killpg(server.pid, signal.SIGKILL)
    assert told["server_cpu_percent"] > 10
    assert told["cpu_percent"] < 50


@pytest.mark.parametrize("name", NAMES)
def test_every_contestant_uses_the_stopwatch_that_all_share(name: str) -> None:
    functions = {
        node.name: ast.unparse(node)
        for node in ast.parse(Contestant.called(name).program.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert "wire.idle_cpu(given)" in functions["parked"]
    assert "process_time" not in functions["parked"]
    if "idle" in functions:
        assert "wire.idle_ms(" in functions["idle"]
        assert "wire.leaving()" in functions["worker"]


@pytest.mark.parametrize("on_cue", [False, True], ids=["at once", "before its cue"])
def test_a_worker_ends_when_nobody_holds_its_stdin(tmp_path: Path, on_cue: bool) -> None:
    given = {"folder": str(tmp_path), "url": None, "server": None, "on_cue": on_cue}
    command = [sys.executable, str(RACE / "contestants" / "with_perdure.py"), "worker", json.dumps(given)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert json.loads(worker.stdout.readline()) == {"ready": True}
        worker.stdin.close()  # as when the race was killed
        try:
            assert worker.wait(30) == 0
        finally:
            worker.kill()
