"""A folder with a ledger, a journal and victims, and functions that look at what the victims have left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.crash import victims
from tests.crash.journals import Journal
from tests.crash.ledger import Ledger
from tests.crash.nursery import Nursery, Victim

from perdure.core.events import Event
from perdure.store.api import RunRow

KILLED = -signal.SIGKILL
RUN = "run-1"


class World:
    """Where a test takes place. Nothing here writes to the journal."""

    def __init__(self, folder: Path, nursery: Nursery, journal: Journal, mutation: str = "") -> None:
        self.folder = folder
        self.journal = journal
        self.mutation = mutation  # the guard that victims here do without
        self.nap_s = 0.02  # how long an errand waits for its timer
        self.disk = folder / "disk"  # where SQLite has its files
        self.ledger = Ledger(folder / "ledger")
        self._nursery = nursery
        self._reports = 0
        self._alive: set[int] = set()
        self._copies: list[World] = []

    @property
    def dialect(self) -> str:
        return self.journal.dialect

    def close(self) -> None:
        for twin in self._copies:
            twin.close()
        self.journal.close()

    # -- victims ------------------------------------------------------------------------------------------------------
    def start(self, victim: Victim, **args: Any) -> int:
        """A process that runs the victim here; its id."""
        pid = self._nursery.start(victim, self.folder / "log", self.journal.url, self.mutation, folder=str(self.folder), **args)
        self._alive.add(pid)
        return pid

    def wait(self, pid: int, within_s: float = 60.0, *, settled: bool = True) -> int:
        """How the process ended; the test fails if it does not end.

        If no other process lives, its last statements are settled.
        """
        code = self._nursery.wait(pid, within_s)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            self._nursery.wait(pid)
            raise AssertionError(f"process {pid} did not end within {within_s} s\n{self.log()}")
        self._alive.discard(pid)
        if settled and code == KILLED and not self._alive:
            self.journal.settle()
        return code

    def freeze(self, pid: int) -> None:
        """SIGSTOP, while no process is inside a transaction: a process that sleeps there would block others."""
        for _ in range(100):
            os.kill(pid, signal.SIGSTOP)
            # On a busy machine the signal has been sent long before the last thread stands still.
            self.wait_until(lambda: stands_still(pid), "it has stopped")
            if self.journal.is_quiet():
                return
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)
        raise AssertionError("it is always writing")

    def run(self, victim: Victim, **args: Any) -> int:
        return self.wait(self.start(victim, **args))

    def kill_at(self, place: str, moment: str, nth: int = 1, *, kind: str, run_id: str = RUN, **settings: Any) -> None:
        """Drive the run until its process dies at this place. If it never reaches the place, the test is wrong."""
        report = self.report()
        code = self.run(
            victims.errand, report=report, run_id=run_id, kind=kind, die=[place, moment, nth], settings=settings, nap_s=self.nap_s
        )
        assert code == KILLED, f"{kind} did not die {moment} {place}: code {code}\n{self.log()}"

    def resume(self, *, kind: str, run_id: str = RUN, **settings: Any) -> dict[str, Any]:
        """A new process drives the run until it ends or needs a person. Returns its report."""
        report = self.report()
        code = self.run(victims.errand, report=report, run_id=run_id, kind=kind, settings=settings, nap_s=self.nap_s)
        assert code == 0, f"code {code}\n{self.log()}"
        return self.told(report)

    def rest(self, agent: str, *args: Any, run_id: str = RUN, die: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """A new process starts the run, or finds it, and drives it until it rests; or dies at the given place."""
        report = self.report()
        code = self.run(victims.rest, report=report, agent=agent, args=list(args), run_id=run_id, die=list(die), **more)
        assert code == (KILLED if die else 0), f"{agent} with fate {die}: code {code}\n{self.log()}"
        return {} if die else self.told(report)

    def let_go(self) -> None:
        """Have the victim that is held at a place go on."""
        Path(f"{self.ledger.path}.go").touch()

    def begin(self, **runs: list[Any]) -> None:
        """Create runs of `chores` that no worker drives yet."""
        assert self.run(victims.start, runs=runs) == 0, self.log()

    def finish(self, *runs: str, **settings: Any) -> dict[str, Any]:
        """A new worker serves until these runs have ended or need a person. Returns the outcome of each."""
        report = self.report()
        assert self.run(victims.serve, until=runs, settings=settings, report=report) == 0, self.log()
        return self.told(report)

    def report(self) -> str:
        """A new place for a victim's last words."""
        self._reports += 1
        return str(self.folder / f"report-{self._reports}")

    def told(self, report: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(Path(report).read_text())
        return found

    def log(self) -> str:
        log = self.folder / "log"
        return log.read_text()[-6000:] if log.exists() else ""

    # -- looking ------------------------------------------------------------------------------------------------------
    def copy(self) -> World:
        """A copy of this world as it is now: changes there do not affect this one. No process may be writing."""
        self._copies.append(self.twin())
        return self._copies[-1]

    def twin(self) -> World:
        """A copy that the caller has to close."""
        folder = self.folder.with_name(f"{self.folder.name}-{time.monotonic_ns()}")
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("*.bell"))  # a pipe cannot be copied
        return World(folder, self._nursery, self.journal.copy(folder), self.mutation)

    def look(self, run_id: str = RUN) -> tuple[RunRow | None, list[Event]]:
        """The run's row and journal. On SQLite it reads a copy, so that reading repairs nothing.

        No process may be writing.
        """
        if not self.journal.is_there():
            return None, []
        if self.dialect != "sqlite":
            return self.peek(run_id)
        twin = self.copy()
        found = twin.peek(run_id)
        shutil.rmtree(twin.folder)
        return found

    def peek(self, run_id: str = RUN) -> tuple[RunRow | None, list[Event]]:
        """The run's row and journal, read as any process may, at any time."""
        with self.journal.reading() as store:
            row = store.get(run_id)
            return row, store.read(run_id) if row is not None else []

    def paid(self) -> list[tuple[Any, ...]]:
        """What transaction tools have written in the journal's own database."""
        return self.journal.paid()

    def acknowledged(self, run_id: str = RUN) -> set[str]:
        """The ids of the events that were acknowledged to a process as durable."""
        path = self.folder / "ledger.acknowledged"
        lines = path.read_text().splitlines() if path.exists() else []
        return {event_id for found, _, event_id in (line.partition(" ") for line in lines) if found == run_id}

    def wait_until(self, true: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < deadline, f"after {within_s} s still not: {what}\n{self.log()}"
            time.sleep(0.005)


def stands_still(pid: int) -> bool:
    """Whether every thread of the process is stopped."""
    try:
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False  # one of them has ended meanwhile: they still run
