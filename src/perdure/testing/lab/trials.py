"""Trials: folders, the processes of each, and what they leave behind as evidence for the judge."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perdure.settings import Settings
from perdure.testing.boundaries import Boundary
from perdure.testing.lab import world as worlds
from perdure.testing.lab.launch import Process, Steps, run_all
from perdure.testing.lab.ledger import Entry, Ledger
from perdure.testing.lab.spec import RUN_ID, VARIABLE, Approve, Kill, Spec, Told, Visit, read_visits
from perdure.testing.lab.victim import DURING
from perdure.testing.lab.world import Aliases, FileSeen

WorldLedger = Callable[[Path], Any]
LONG_EFFECT_S = 0.01  # an effect that takes longer can be cut off in its middle
_LOG_CHARS = 2_000
_KILLED = -9


class Given(Struct, frozen=True):
    """What is the same for every trial."""

    input: bytes
    settings: Settings
    shared: bool  # the journal is one database for all trials, and perhaps for others
    approve: Approve = "all"
    signals: tuple[tuple[str, Any], ...] = ()
    world: Path | None = None
    target: str = ""


class Planned(Struct, frozen=True):
    """A trial to make."""

    number: int
    kills: tuple[Kill, ...]
    also: tuple[str, ...] = ()
    fresh: bool = False


class Evidence(Struct, frozen=True):
    """What one trial has left."""

    planned: Planned
    run_id: str
    reached: int  # how many of its kills have happened
    end: str  # "rested", "timeout", or how its last process ended
    log: str  # the last words of that process
    pids: tuple[int, ...]  # of its processes, in order
    told: Told | None
    entries: tuple[Entry, ...]
    visits: tuple[Visit, ...]  # of the process that began after the first kill; of an undisturbed run, its own
    files: dict[str, FileSeen]
    world: Any  # what the user's ledger says
    known: Aliases
    resume_s: float


class Lab:
    """Makes trials in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        given: Given,
        begin: Callable[[Spec], Process],
        begin_fresh: Callable[[Spec], Process] | None,
        *,
        ledger: WorldLedger | None,
        jobs: int,
        timeout_s: float,
        keep: bool,
    ) -> None:
        self._folder = folder
        self._given = given
        self._begin = begin
        self._begin_fresh = begin_fresh
        self._ledger = ledger
        self._jobs = jobs
        self._timeout_s = timeout_s
        self._keep = keep
        self._token = secrets.token_hex(4)
        self._fresh: set[str] = set()

    def make(self, plan: Iterable[Planned]) -> Iterator[Evidence]:
        """Make these trials; the evidence of each as it is there."""
        for _, evidence in run_all(map(self._trial, plan), self._start, jobs=self._jobs, timeout_s=self._timeout_s):
            yield evidence

    def _start(self, spec: Spec) -> Process:
        if spec.folder in self._fresh and spec.kill is None and self._begin_fresh is not None:
            return self._begin_fresh(spec)
        return self._begin(spec)

    def _trial(self, planned: Planned) -> Steps[Evidence]:
        home = self._prepare(planned)
        run_id = f"{RUN_ID}-{self._token}-{planned.number}" if self._given.shared else RUN_ID
        reached, code, process = 0, 0, 0
        for process, kill in enumerate((*planned.kills, None), 1):
            ended = yield self._spec(home, run_id, process, kill)
            code = -1 if ended is None else ended
            if ended != _KILLED or kill is None:
                break
            reached += 1
        end = "rested" if code == 0 else "timeout" if code == -1 else f"exit code {code}" if code > 0 else f"signal {-code}"
        evidence = self._collect(planned, home, run_id, reached, end, self._spec(home, run_id, process, None))
        if not self._keep:
            shutil.rmtree(home, ignore_errors=True)
        return evidence

    def _prepare(self, planned: Planned) -> Path:
        home = self._folder / f"trial-{planned.number:05}"
        home.mkdir(mode=0o700)
        if planned.fresh:
            self._fresh.add(str(home))
        if self._given.world is None:
            (home / "world").mkdir()
        else:
            shutil.copytree(self._given.world, home / "world", symlinks=True)
        return home

    def _spec(self, home: Path, run_id: str, process: int, kill: Kill | None) -> Spec:
        given = self._given
        url = given.settings.url if given.shared else f"sqlite:///{home}/journal.db"
        return Spec(
            folder=str(home),
            process=process,
            run_id=run_id,
            input=given.input,
            settings=msgspec.structs.replace(given.settings, url=url),
            kill=kill,
            approve=given.approve,
            signals=given.signals,
            # Where others look at the same clock nobody may turn it.
            warp=not given.shared,
            target=given.target,
        )

    def _collect(self, planned: Planned, home: Path, run_id: str, reached: int, end: str, last: Spec) -> Evidence:
        told = msgspec.json.decode(last.told.read_bytes(), type=Told) if end == "rested" else None
        entries = Ledger(home / "ledger").entries()
        known = worlds.aliases(run_id, told.calls if told else ())
        first = 2 if planned.kills else 1
        visits = read_visits(home / f"visits-{first}")
        return Evidence(
            planned=planned,
            run_id=run_id,
            reached=reached,
            end=end,
            log=last.log.read_text(errors="replace")[-_LOG_CHARS:] if last.log.exists() else "",
            pids=tuple(dict.fromkeys(entry.pid for entry in entries)),
            told=told,
            entries=tuple(entries),
            visits=tuple(visits),
            files=worlds.files(last.world, known),
            world=self._look(last.world, known),
            known=known,
            resume_s=_resumed_after_s(told, read_visits(last.visits)),
        )

    def _look(self, folder: Path, known: Aliases) -> Any:
        """What the user's own ledger says."""
        if self._ledger is None:
            return None
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(folder)
        try:
            seen = self._ledger(folder)
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
        return worlds.normal(seen, known)


def _resumed_after_s(told: Told | None, visits: Sequence[Visit]) -> float:
    """Until the first thing that the process did besides taking the run up; if there was none, until it rested."""
    if told is None:
        return 0.0
    new = (visit.at for visit in visits if not any("claim" in name.name or "run_created" in name.name for name in visit.names))
    return max(next(new, told.rested_at) - told.began_at, 0.0)


# -- what there is to be killed at --------------------------------------------------------------------------------------------
class Point(Struct, frozen=True):
    """A point in time at which the run may be killed."""

    kill: Kill
    names: tuple[Boundary, ...]


def points(evidence: Evidence) -> list[Point]:
    """Every point that a process came to, in order, by the first of its names; and the middles of effects that take their time."""
    found = []
    for visit in evidence.visits:
        name = visit.names[0]
        found.append(Point(Kill(name), visit.names))
        took_s = _effect_s(evidence, name) if name.name == "before_tool_effect" else 0.0
        if took_s > LONG_EFFECT_S:
            middle = Boundary(DURING, name.run, name.call, name.tool, name.nth)
            found.append(Point(Kill(middle, took_s / 2), (middle,)))
    return found


def _effect_s(evidence: Evidence, name: Boundary) -> float:
    """How long the nth call of the function took; 0 when it has not returned."""
    run_id = f"{evidence.run_id}{name.run}"
    pids = {entry.pid for entry in evidence.entries if entry.fact == "killed"}
    mine = [entry for entry in evidence.entries if (entry.run, entry.call) == (run_id, name.call) and entry.pid not in pids]
    begun = [entry.at for entry in mine if entry.fact == "begun"]
    ended = [entry.at for entry in mine if entry.fact in ("returned", "raised")]
    return ended[name.nth - 1] - begun[name.nth - 1] if len(begun) >= name.nth <= len(ended) else 0.0
