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
        """How it ended; the test fails when it does not. If nobody else lives here, what it had sent last is done by then, or undone."""
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
        """SIGSTOP, at a moment when nobody is inside a transaction: one that sleeps there holds up others."""
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
        """Drive the errand until its process dies there. A place that it never comes to is a mistake in the test."""
        report = self.report()
        code = self.run(
            victims.errand, report=report, run_id=run_id, kind=kind, die=[place, moment, nth], settings=settings, nap_s=self.nap_s
        )
        assert code == KILLED, f"{kind} did not die {moment} {place}: code {code}\n{self.log()}"

    def resume(self, *, kind: str, run_id: str = RUN, **settings: Any) -> dict[str, Any]:
        """A new process drives the errand until it ends or needs a person; what it has to say about it."""
        report = self.report()
        code = self.run(victims.errand, report=report, run_id=run_id, kind=kind, settings=settings, nap_s=self.nap_s)
        assert code == 0, f"code {code}\n{self.log()}"
        return self.told(report)

    def rest(self, agent: str, *args: Any, run_id: str = RUN, die: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """A new process starts the run, or finds it started, and drives it until it rests; or dies where it is told to."""
        report = self.report()
        code = self.run(victims.rest, report=report, agent=agent, args=list(args), run_id=run_id, die=list(die), **more)
        assert code == (KILLED if die else 0), f"{agent} with fate {die}: code {code}\n{self.log()}"
        return {} if die else self.told(report)

    def let_go(self) -> None:
        """Have the victim that is held at a place go on."""
        Path(f"{self.ledger.path}.go").touch()

    def begin(self, **runs: list[Any]) -> None:
        """Create runs of `chores` that nobody drives yet."""
        assert self.run(victims.start, runs=runs) == 0, self.log()

    def finish(self, *runs: str, **settings: Any) -> dict[str, Any]:
        """A new worker serves until these runs have ended or need a person; what became of each."""
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
        """The same world once more, as it is now: what is done there does not touch this one. Nobody may be writing."""
        self._copies.append(self.twin())
        return self._copies[-1]

    def twin(self) -> World:
        """A copy that whoever asked for it has to close."""
        folder = self.folder.with_name(f"{self.folder.name}-{time.monotonic_ns()}")
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("*.bell"))  # nobody can copy a pipe
        return World(folder, self._nursery, self.journal.copy(folder), self.mutation)

    def look(self, run_id: str = RUN) -> tuple[RunRow | None, list[Event]]:
        """The run's row and journal. On SQLite read from a copy, so that looking repairs nothing: nobody may be writing."""
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
        """The ids of the events that some process was told are durable."""
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
