"""SIGTERM, a second SIGTERM, and SIGINT between effect and record: with the real command line, in a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.crash import ledger
from tests.crash.checks import check_journal
from tests.crash.world import World

AGENT = "tests.crash.chores:chores"
FASTER = {"PERDURE_PARK_AFTER_S": "0", "PERDURE_CANCEL_GRACE_S": "0.5", "PERDURE_RECONCILE_MARGIN_S": "0"}


class Commands:
    """`perdure` as a program, over one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "perdure", *words, "--url", self.world.journal.url]
        env = {**os.environ, **FASTER, "PYTHONPATH": os.pathsep.join(sys.path), ledger.VARIABLE: str(self.world.ledger.path)}
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.running.append(process)
        return process

    def wait(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        _, err = process.communicate(timeout=60)
        return process.returncode, err


@pytest.fixture
def perdure(world: World) -> Iterator[Commands]:
    commands = Commands(world)
    yield commands
    for process in commands.running:
        if process.poll() is None:
            process.kill()
            process.communicate()


def begun(count: int, fact: str = "begun") -> object:
    return lambda lines: sum(line["fact"] == fact for line in lines) >= count


def check_all(world: World, outcome: dict[str, dict[str, object]]) -> None:
    for run_id, told in outcome.items():
        assert told["status"] == "succeeded", (run_id, told, world.log())
        check_journal(world, run_id)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_worker_what_is_in_flight_ends_and_is_recorded_and_another_worker_goes_on(
    world: World, perdure: Commands, number: int
) -> None:
    runs = {f"r{n}": [["deed", f"a{n}", 2.0], ["deed", f"b{n}", 0]] for n in range(3)}
    world.begin(**runs)
    worker = perdure.start("worker", AGENT)
    world.ledger.wait_for(begun(3))  # type: ignore[arg-type]
    worker.send_signal(number)
    code, err = perdure.wait(worker)
    assert (code, "perdure: drained" in err) == (0, True), err
    # Each first call has ended, and no second one has begun.
    assert [line["what"][0] for line in world.ledger.lines("begun")] == ["a", "a", "a"]
    for run_id in runs:
        row, events = world.look(run_id)
        assert row is not None
        assert (row.status, row.holder) == ("queued", None)
        assert "tool_call_completed" in [event.type for event in events]
    check_all(world, world.finish(*runs))
    assert sorted(line["what"] for line in world.ledger.effects()) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_call_that_outlasts_the_drain_is_ended_and_recorded_as_what_it_is(world: World, perdure: Commands) -> None:
    world.begin(keyed=[["work", "k", 30]], once=[["deed", "o", 30]])
    worker = perdure.start("worker", AGENT, "--drain-timeout", "0.1")
    world.ledger.wait_for(begun(2))  # type: ignore[arg-type]
    worker.send_signal(signal.SIGTERM)
    code, err = perdure.wait(worker)
    assert code == 0, err
    assert len(world.ledger.lines("cancelled")) == 2
    types = {run_id: [event.type for event in world.look(run_id)[1]] for run_id in ("keyed", "once")}
    assert "tool_call_in_doubt" in types["once"]
    assert types["once"][-1] == types["keyed"][-1] == "run_released"
    outcome = world.finish("once", drain_timeout_s=0.1)
    assert outcome["once"]["status"] == "needs_attention"
    assert not world.ledger.effects("o")


def test_a_second_signal_ends_the_worker_at_once_and_nothing_is_lost(world: World, perdure: Commands) -> None:
    world.begin(r=[["work", "first", 0], ["work", "second", 4.0]])
    worker = perdure.start("worker", AGENT)
    world.ledger.wait_for(begun(2))  # type: ignore[arg-type]
    worker.send_signal(signal.SIGTERM)
    assert worker.stderr is not None
    while "draining" not in worker.stderr.readline():
        pass
    worker.send_signal(signal.SIGTERM)
    code, _ = perdure.wait(worker)
    assert code == -signal.SIGTERM
    check_all(world, world.finish("r"))
    assert sorted(line["what"] for line in world.ledger.effects()) == ["first", "second"]


def test_sigint_between_effect_and_record_records_the_effect_before_the_process_ends(world: World, perdure: Commands) -> None:
    process = perdure.start("run", AGENT, "--id", "r", 'todo:=[["deed", "paid", 2.0], ["deed", "sent", 0]]')
    world.ledger.wait_for(begun(1, "effect"))  # type: ignore[arg-type]
    process.send_signal(signal.SIGINT)
    code, err = perdure.wait(process)
    assert code == 3, err
    assert "tool_call_completed" in [event.type for event in world.look("r")[1]]
    resumed = perdure.start("resume", "r", AGENT)
    code, err = perdure.wait(resumed)
    assert code == 0, err
    assert [line["what"] for line in world.ledger.effects()] == ["paid", "sent"]
    verified = perdure.start("verify", "r")
    code, err = perdure.wait(verified)
    assert code == 0, err
