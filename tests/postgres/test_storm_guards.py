"""The guards against a storm, one at a time: a worker that slept past its lease neither writes nor begins anything."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from tests.crash.nursery import Nursery
from tests.postgres import storm_agents, storm_roles, storm_service
from tests.postgres.storm_weather import wait_until

from perdure import Perdure
from perdure.core.events import Event
from perdure.engine.clock import Clock
from perdure.store.api import FINISHED, RunRow
from perdure.store.open import open_store

_LEASE_US = round(storm_roles.LEASE_S * 1e6)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    opened = Nursery()
    yield opened
    opened.close()


class Scene:
    """A service, a database, and workers that come and go."""

    def __init__(self, folder: Path, url: str, nursery: Nursery) -> None:
        self.folder = folder
        self.url = url
        self._nursery = nursery
        self._alive = [nursery.start(storm_service.serve, folder / "log", url, folder=str(folder))]
        wait_until((folder / "port").exists, 10, "the service has not come up")

    def start(self, tool: str, ms: int) -> None:
        async def main() -> None:
            async with Perdure(self.url) as app:
                await app.start(storm_agents.single, tool, ms, id="r")

        asyncio.run(main())

    def hire(self, machine: int, change: str = "") -> int:
        # One run at a time: the worker cannot claim a run again before it has finished with it.
        log = self.folder / "log"
        pid = self._nursery.start(
            storm_roles.work, log, self.url, folder=str(self.folder), url=self.url, machine=machine, change=change, concurrency=1
        )
        self._alive.append(pid)
        return pid

    def leave(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        assert self._nursery.wait(pid, 20) == 0, (self.folder / "log").read_text()[-2000:]
        self._alive.remove(pid)

    def look(self) -> tuple[RunRow, list[Event]]:
        with closing(open_store(self.url, create=False)) as store:
            row = store.get("r")
            assert row is not None
            return row, store.read("r")

    def effects(self) -> int:
        return sum(fact["fact"] == "effect" for fact in storm_service.facts(self.folder))

    def reap(self) -> None:
        """Notice that a worker has been silent for longer than its lease, and take its run away; claim nothing."""
        clock = Clock()
        with closing(open_store(self.url)) as store:
            store.register("reaper", "reaper", os.getpid(), clock.now())
            wait_until(lambda: store.reap("reaper", _LEASE_US, clock.now()) > 0, 15, "nobody was found silent")
            store.unregister("reaper", clock.now())

    def close(self) -> None:
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)
            self._nursery.wait(pid, 10)


@contextmanager
def asleep(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def scene(tmp_path: Path, postgres_url: str, nursery: Nursery) -> Iterator[Scene]:
    opened = Scene(tmp_path, postgres_url, nursery)
    yield opened
    opened.close()


def is_rested(scene: Scene) -> Callable[[], bool]:
    return lambda: scene.look()[0].status in (*FINISHED, "needs_attention")


def check_a_late_write_is_refused(scene: Scene, change: str = "") -> None:
    """The run was taken from a silent worker, and is not held.

    Its seq has not changed, and still a late write is refused (G4).
    """
    scene.start("mail", 300)
    sleeper = scene.hire(0, change)
    wait_until(lambda: scene.look()[0].status == "running" and len(scene.look()[1]) >= 3, 15, "nobody has begun")
    with asleep(sleeper):
        scene.reap()
        before = scene.look()[0].seq
    wait_until(is_rested(scene), 20, "nobody goes on")
    scene.leave(sleeper)
    row, events = scene.look()
    late = [event.type for event in events if event.epoch == 1 and event.seq > before]
    assert not late, "a worker wrote under a lease that it had lost"
    # The worker claimed the run again, as any worker could: its call under the old lease is in doubt.
    assert row.status == "needs_attention", row
    assert scene.effects() <= 1


def test_a_worker_that_slept_past_its_lease_is_refused_at_its_first_write(scene: Scene) -> None:
    check_a_late_write_is_refused(scene)


def test_the_check_goes_red_when_leases_are_not_looked_at(scene: Scene) -> None:
    with pytest.raises(AssertionError, match="under a lease that it had lost"):
        check_a_late_write_is_refused(scene, "leases_are_not_looked_at")


def test_a_worker_that_slept_past_its_lease_begins_nothing_that_it_had_meant_to_begin(scene: Scene) -> None:
    """Its intent was durable, and the effect one step away: meanwhile another worker has asked the hook, and has done it."""
    scene.start("ship", 0)
    sleeper = scene.hire(0, "sleeps_before_its_first_effect")
    wait_until(lambda: psutil.Process(sleeper).status() == psutil.STATUS_STOPPED, 15, "nobody has fallen asleep")
    heir = scene.hire(1)
    wait_until(is_rested(scene), 30, "nobody has taken the run over")
    assert scene.effects() == 1
    os.kill(sleeper, signal.SIGCONT)
    scene.leave(sleeper)
    scene.leave(heir)
    assert scene.look()[0].status == "succeeded"
    assert scene.effects() == 1


def test_the_delay_that_a_service_is_given_is_no_time_for_a_worker_to_sleep(scene: Scene) -> None:
    """The tool has settle=120. Still, a worker that slept past its lease between intent and effect begins nothing."""
    scene.start("ship_by_a_slow_service", 0)
    sleeper = scene.hire(0, "sleeps_before_its_first_effect")
    wait_until(lambda: psutil.Process(sleeper).status() == psutil.STATUS_STOPPED, 15, "the worker has not fallen asleep")
    heir = scene.hire(1)
    wait_until(lambda: scene.look()[0].epoch == 2, 30, "no worker has taken the run over")
    os.kill(sleeper, signal.SIGCONT)
    scene.leave(sleeper)
    scene.leave(heir)
    assert scene.effects() == 0
