"""The faults of a storm: workers are killed, stopped and drained, the server is restarted, connections are cut."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from tests.crash.nursery import Nursery, Victim
from tests.postgres import storm_roles, storm_service
from tests.postgres.storm_checks import unfinished
from tests.postgres.storm_roles import LEASE_S, SERVER_AWAY
from tests.servers.postgres import Server

MACHINES = 3
_PAUSE_S = (0.2, 1.2)  # between two blows
_DRAINED_WITHIN_S = 25.0


class Storm:
    """Six workers on three machines, a person, a service and a server. The seed decides all faults and their order."""

    def __init__(self, folder: Path, server: Server, url: str, nursery: Nursery, seed: int, workers: int = 6, abreast: int = 60) -> None:
        self.folder = folder
        self.server = server
        self.url = url
        self.blows: Counter[str] = Counter()
        self._nursery = nursery
        self._chance = random.Random(f"storm {seed}")
        self._workers: dict[int, int] = {}  # pid → machine
        self._frozen: dict[int, float] = {}  # pid → when it goes on
        self._draining: dict[int, float] = {}  # pid → when it must have ended
        self._service = self._bear(storm_service.serve)
        wait_until(lambda: (folder / "port").exists(), 10, "the service has not come up")
        for number in range(workers):
            self._hire(number % MACHINES)
        self._person = self._bear(storm_roles.attend, url=url, seed=seed, abreast=abreast)
        self._person_left: int | None = None
        self._bag: list[Callable[[], None]] = []

    @property
    def log_path(self) -> Path:
        return self.folder / "log"

    def rage(self, seconds: float) -> None:
        """One fault after the other, for this time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self._bag:
                # Every kind of fault occurs, in a different order each time.
                self._bag = [*[self._kill] * 4, *[self._freeze] * 3, *[self._drain] * 2, *[self._cut] * 2]
                self._bag += [self._fast, self._immediate, self._stall]
                self._chance.shuffle(self._bag)
            blow = self._bag.pop()
            blow()
            self.blows[blow.__name__.strip("_")] += 1
            self._rest(self._chance.uniform(*_PAUSE_S))

    def silence_one(self, within_s: float) -> None:
        """Stop one worker that holds runs until another has taken one of them over. By chance a storm may have no takeover of this kind."""
        for pid in list(self._frozen):
            self._thaw(pid)
        deadline = time.monotonic() + within_s
        with psycopg.connect(self.url, autocommit=True) as connection:
            while not self._is_silenced(connection):
                assert time.monotonic() < deadline, f"nobody has taken over a run of a silent worker within {within_s} s"
                self._rest(0.05)

    def _is_silenced(self, connection: psycopg.Connection[Any]) -> bool:
        awake = [pid for pid in self._workers if pid not in self._draining]
        held = connection.execute(
            "SELECT pid, worker FROM perdure_runs JOIN perdure_workers ON holder = worker "
            "WHERE pid = ANY(%s) GROUP BY pid, worker ORDER BY count(*) DESC LIMIT 1",
            (awake,),
        ).fetchone()
        if held is None:
            return False
        pid, worker = held
        os.kill(pid, signal.SIGSTOP)
        self._frozen[pid] = time.monotonic() + 60.0
        kept = "SELECT run_id FROM perdure_runs WHERE holder = %s"
        try:
            self._rest(0.3)  # the server executes the statements that were sent
            before = connection.execute(kept, (worker,)).fetchall()
            until = time.monotonic() + 4 * LEASE_S
            while before and time.monotonic() < until:
                if set(before) - set(connection.execute(kept, (worker,)).fetchall()):
                    return True
                self._rest(0.05)
            return False
        finally:
            self._thaw(pid)

    def calm_down(self, within_s: float) -> None:
        """No more faults; all processes continue, and all runs come to their end."""
        (self.folder / "enough").touch()
        for pid in list(self._frozen):
            self._thaw(pid)
        deadline = time.monotonic() + within_s
        while self._person_code() is None:
            self._look_after()
            time.sleep(0.05)
            assert time.monotonic() < deadline, f"{within_s} s after the storm not every run has ended:\n{unfinished(self.url)}"
        for pid in [pid for pid in self._workers if pid not in self._draining]:
            self._end_gently(pid)
        while self._draining:
            self._look_after(hire=False)
            time.sleep(0.05)

    def close(self) -> None:
        """End whoever is still there."""
        for pid in (*self._workers, self._person, self._service):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended, and was waited for
            self._nursery.wait(pid, 10)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of all logs; for a process with an unexpected error, that error."""
        said = self.log_path.read_text().splitlines()
        unexpected = next((number for number, line in enumerate(said) if line.startswith("Traceback")), None)
        shown = said[-lines:] if unexpected is None else said[unexpected : unexpected + 3 * lines]
        return "\n".join(line[:300] for line in shown)

    # -- blows --------------------------------------------------------------------------------------------------------
    def _kill(self) -> None:
        pid = self._chance.choice(list(self._workers))
        os.kill(pid, signal.SIGKILL)
        self._nursery.wait(pid, 10)
        self._forget(pid)

    def _freeze(self) -> None:
        """SIGSTOP, for less than its lease or for far more."""
        awake = [pid for pid in self._workers if pid not in self._frozen and pid not in self._draining]
        if len(self._frozen) < 3 and awake:
            pid = self._chance.choice(awake)
            os.kill(pid, signal.SIGSTOP)
            self._frozen[pid] = time.monotonic() + LEASE_S * self._chance.choice((0.3, 1.2, 1.7, 2.5))

    def _drain(self) -> None:
        awake = [pid for pid in self._workers if pid not in self._frozen and pid not in self._draining]
        if awake:
            self._end_gently(self._chance.choice(awake))

    def _cut(self) -> None:
        """The server ends some of their connections."""
        share = self._chance.choice((0.2, 0.5, 1.0))
        with psycopg.connect(self.server.url, autocommit=True, connect_timeout=10) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'perdure' AND random() < %s", (share,)
            )

    def _fast(self) -> None:
        self.server.restart("fast")

    def _immediate(self) -> None:
        """As after a power cut, and away for a moment."""
        self.server.stop("immediate")
        self._rest(self._chance.choice((0.0, 0.3, 1.5)))
        self.server.start()

    def _stall(self) -> None:
        """The server does not answer for some time, sometimes for longer than every lease."""
        self.server.pause()
        try:
            self._rest(LEASE_S * self._chance.choice((0.2, 0.5, 1.3)))
        finally:
            self.server.resume()

    # -- workers ------------------------------------------------------------------------------------------------------
    def _hire(self, machine: int) -> None:
        self._workers[self._bear(storm_roles.work, url=self.url, machine=machine)] = machine

    def _person_code(self) -> int | None:
        if self._person_left is None:
            self._person_left = self._nursery.wait(self._person, 0)
        return self._person_left

    def _bear(self, role: Victim, **args: Any) -> int:
        return self._nursery.start(role, self.log_path, self.url, folder=str(self.folder), **args)

    def _end_gently(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        self._draining[pid] = time.monotonic() + _DRAINED_WITHIN_S

    def _thaw(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)
        del self._frozen[pid]

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            self._look_after()
            time.sleep(min(left_s, 0.05))

    def _look_after(self, *, hire: bool = True) -> None:
        """Wake the processes that have slept long enough, and replace the processes that have ended."""
        assert not hire or self._person_code() in (None, 0), f"the person has left\n{self.log_tail()}"
        for pid, until in list(self._frozen.items()):
            if time.monotonic() >= until:
                self._thaw(pid)
        for pid, machine in list(self._workers.items()):
            code = self._nursery.wait(pid, 0)
            if code is None:
                late = pid in self._draining and pid not in self._frozen and time.monotonic() > self._draining[pid]
                assert not late, f"worker {pid} has not drained within {_DRAINED_WITHIN_S} s\n{self.log_tail()}"
                continue
            # A worker that gets SIGTERM before it has installed its handler dies by the signal.
            left_well = (0, SERVER_AWAY, -signal.SIGTERM) if pid in self._draining else (SERVER_AWAY,)
            assert code in left_well, f"worker {pid} has ended with code {code}\n{self.log_tail()}"
            self._forget(pid)
            if hire:
                self._hire(machine)
        while hire and len(self._workers) < 6:
            self._hire(self._chance.randrange(MACHINES))

    def _forget(self, pid: int) -> None:
        self._workers.pop(pid)
        self._frozen.pop(pid, None)
        self._draining.pop(pid, None)


def wait_until(done: Callable[[], bool], within_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, f"{otherwise} after {within_s} s"
        time.sleep(0.01)
