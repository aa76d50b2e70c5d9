"""Workers with one schedule are killed, and compete: each tick starts exactly one run, on both stores."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers.postgres import Server
from tests.unit.postgres_tools import empty

from perdure.core.schedule import TicksSkipped, TickStarted, decode_schedule_body
from perdure.inspect.schedules import schedule_problems
from perdure.store.api import FINISHED, Store
from perdure.store.open import open_store

SECOND = 1_000_000


class Crew:
    """Worker processes on one journal."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.ledger = folder / "ledger"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.store: Store = open_store(url)

    def start(self, *point: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.crash.scheduled", self.url, str(self.ledger), *point]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self._processes.append(process)
        return process

    def ticks(self) -> list[int]:
        return [body.tick for body in self._bodies() if isinstance(body, TickStarted)]

    def skipped(self) -> list[TicksSkipped]:
        return [body for body in self._bodies() if isinstance(body, TicksSkipped)]

    def _bodies(self) -> list[object]:
        return [decode_schedule_body(one.data) for one in self.store.schedule_events("beat")]

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline_s, (self.ticks(), self.skipped())
            time.sleep(0.05)

    def settle(self) -> None:
        """Start no more ticks, and let a last worker end all runs."""
        self.close_processes(signal.SIGTERM)
        from perdure.core.schedule import SchedulePaused
        from perdure.engine.clock import Clock
        from perdure.engine.schedules import ScheduleChanges
        from perdure.settings import Settings

        row = self.store.schedule("beat")
        assert row is not None
        change = ScheduleChanges(Clock(), Settings()).change("beat", row, [SchedulePaused("test")], time.time_ns() // 1000)
        assert self.store.change_schedule(change) == "done"
        self.start()
        self.until(lambda: all(row.status in FINISHED or row.status == "needs_attention" for row in self.store.list(limit=1000)))
        self.close_processes(signal.SIGTERM)

    def check(self) -> None:
        """One run for each tick, without a gap; no effect twice; and nothing was changed."""
        ticks = self.ticks()
        assert ticks == list(range(ticks[0], ticks[-1] + 1, SECOND)), [tick - ticks[0] for tick in ticks]
        assert self.skipped() == []
        runs = self.store.list(limit=1000)
        assert len(runs) == len(ticks)
        assert {run.run_id for run in runs} == {body.run_id for body in self._bodies() if isinstance(body, TickStarted)}
        paid = Counter(self.ledger.read_text().splitlines())
        assert set(paid.values()) == {1}, paid
        succeeded = sum(run.status == "succeeded" for run in runs)
        assert succeeded <= len(paid) <= len(runs)
        assert list(schedule_problems(self.store)) == []

    def close_processes(self, how: signal.Signals) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(how)
        for process in self._processes:
            process.wait(60)
        self._processes.clear()

    def close(self) -> None:
        self.close_processes(signal.SIGKILL)
        self.store.close()


@pytest.fixture(params=["sqlite", "postgres"])
def crew(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Crew]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/journal.db"
    else:
        server: Server = request.getfixturevalue("postgres")
        url = empty(server)
    opened = Crew(url, tmp_path)
    yield opened
    opened.close()


def test_three_workers_of_one_schedule_start_each_tick_once(crew: Crew) -> None:
    for _ in range(3):
        crew.start()
    crew.until(lambda: len(crew.ticks()) >= 6)
    crew.settle()
    crew.check()


def test_workers_that_are_killed_and_started_again_miss_no_tick_and_start_none_twice(crew: Crew) -> None:
    crew.start()
    victim = crew.start()
    for number in (2, 4, 6):
        crew.until(lambda: len(crew.ticks()) >= number)  # noqa: B023
        victim.kill()
        victim.wait(60)
        victim = crew.start()
    crew.settle()
    crew.check()


@pytest.mark.parametrize("point", ["before", "inside", "after"])
def test_a_worker_that_is_killed_at_the_commit_of_a_tick_leaves_the_tick_or_its_run(crew: Crew, point: str) -> None:
    victim = crew.start(point, "2")
    assert victim.wait(60) == -signal.SIGKILL
    assert len(crew.ticks()) == (2 if point == "after" else 1)
    assert len(crew.store.list()) == len(crew.ticks())
    time.sleep(1.5)  # a tick passes while no worker is there: it is made up for
    crew.start()
    crew.until(lambda: len(crew.ticks()) >= 5)
    crew.settle()
    crew.check()
