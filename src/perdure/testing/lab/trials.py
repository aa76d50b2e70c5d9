"""Trials: the folder and the processes of each trial, the evidence that it leaves, and the points for the kills."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from perdure.errors import InvalidInput, PerdureError
from perdure.settings import Settings
from perdure.store.open import open_store
from perdure.testing.boundaries import Boundary
from perdure.testing.lab import world as worlds
from perdure.testing.lab.launch import Process, Steps, run_all
from perdure.testing.lab.ledger import EffectLedger, Entry
from perdure.testing.lab.likeness import alike, known_as, lines_alike
from perdure.testing.lab.spec import RUN_ID, VARIABLE, Approve, Kill, Spec, TrialTold, Visit, read_visits
from perdure.testing.lab.victim import DURING, LATE
from perdure.testing.lab.world import Aliases, FileSeen

WorldLedger = Callable[[Path], Any]
LONG_EFFECT_S = 0.01  # if an effect takes longer than this, there is also a trial with a kill in its middle
_LOG_CHARS = 2_000
_KILLED = -9
BROKEN = "broken"  # the `end` of a trial that an error of the operating system stopped
_LITTLE = 1_000_000  # if fewer bytes are free, a full disk may be the reason why a process ended


class Given(Struct, frozen=True):
    """What all trials have in common."""

    input: bytes
    settings: Settings
    shared: bool  # True: all trials, and perhaps other programs, use one database
    approve: Approve = "all"
    signals: tuple[tuple[str, Any], ...] = ()
    world: Path | None = None
    target: str = ""


class Planned(Struct, frozen=True):
    """A trial that will be made."""

    number: int
    kills: tuple[Kill, ...]
    also: tuple[str, ...] = ()
    fresh: bool = False


class Evidence(Struct, frozen=True):
    """Everything that one trial has left behind."""

    planned: Planned
    run_id: str  # the alias that stands for the run's id in every trial
    reached: int  # how many of the planned kills have happened
    end: str  # "rested" (the run has ended or parked), "timeout", BROKEN, or how the last process ended
    log: str  # the last part of the last process's log
    pids: tuple[int, ...]  # the pids of the processes that wrote to the ledger, in order
    told: TrialTold | None
    entries: tuple[Entry, ...]
    visits: tuple[Visit, ...]  # the visits of the process after the first kill; without a kill, of the only process
    files: dict[str, FileSeen]
    world: Any  # what the user's ledger function returned
    known: Aliases
    resume_s: float


class Lab:
    """Runs trials. Each trial has its own folder below `folder`."""

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
        self.timeout_s = timeout_s
        self._keep = keep
        self.is_shared = given.shared
        self._token = secrets.token_hex(4)
        self._fresh: set[str] = set()

    def make(self, plan: Iterable[Planned]) -> Iterator[Evidence]:
        """Run these trials. Yields the evidence of each trial as soon as the trial is done."""
        for _, evidence in run_all(map(self._trial, plan), self._start, jobs=self._jobs, timeout_s=self.timeout_s):
            yield evidence

    def _start(self, spec: Spec) -> Process:
        if spec.folder in self._fresh and spec.kill is None and self._begin_fresh is not None:
            return self._begin_fresh(spec)
        return self._begin(spec)

    def _trial(self, planned: Planned) -> Steps[Evidence]:
        # Each trial has a new id: with the same id, a service would drop the calls of a trial as duplicates of the
        # calls of an earlier trial. All ids have the same length, because the size of a file may depend on the length.
        run_id = f"{RUN_ID}-{self._token}-{planned.number:05}"
        home = self._folder / f"trial-{planned.number:05}"
        try:
            self._prepare(planned, home)
            evidence = yield from self._processes(planned, home, run_id)
        except OSError as error:
            evidence = self._broken(planned, error)
        if not self._keep:
            shutil.rmtree(home, ignore_errors=True)
        return evidence

    def _processes(self, planned: Planned, home: Path, run_id: str) -> Steps[Evidence]:
        reached, code, process = 0, 0, 0
        for process, kill in enumerate((*planned.kills, None), 1):
            ended = yield self._spec(home, run_id, process, kill)
            code = -1 if ended is None else ended
            if ended != _KILLED or kill is None:
                break
            reached += 1
        last = self._spec(home, run_id, process, None)
        if not last.world.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the working folder is gone; does a tool remove it?", str(last.world))
        return self._collect(planned, home, run_id, reached, _end(code, last), last)

    def _broken(self, planned: Planned, error: OSError) -> Evidence:
        """The evidence of a trial that an error of the operating system has stopped."""
        why = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        return Evidence(planned, RUN_ID, 0, BROKEN, why.replace(str(self._folder), "…"), (), None, (), (), {}, None, {}, 0.0)

    def _prepare(self, planned: Planned, home: Path) -> None:
        home.mkdir(mode=0o700)
        if planned.fresh:
            self._fresh.add(str(home))
        if self._given.world is None:
            (home / "world").mkdir()
        else:
            _copy(self._given.world, home / "world")

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
            # With a shared database the lab does not skip waits: other processes use the clock of that database, too.
            warp=not given.shared,
            patience_s=self.timeout_s / 2,
            target=given.target,
        )

    def _collect(self, planned: Planned, home: Path, run_id: str, reached: int, end: str, last: Spec) -> Evidence:
        told = msgspec.json.decode(last.told.read_bytes(), type=TrialTold) if end == "rested" else None
        entries = lines_alike(EffectLedger(home / "ledger").entries(), run_id)
        known = known_as(run_id, told)
        first = 2 if planned.kills else 1
        visits = read_visits(home / f"visits-{first}")
        return Evidence(
            planned=planned,
            run_id=RUN_ID,
            reached=reached,
            end=end,
            log=_log(last) + (_waits_for(last) if end == "timeout" else ""),
            pids=tuple(dict.fromkeys(entry.pid for entry in entries)),
            told=None if told is None else alike(told, run_id, known),
            entries=entries,
            visits=tuple(visits),
            files=worlds.files(last.world, known),
            world=self._look(last.world, known),
            known=known,
            resume_s=_resumed_after_s(told, read_visits(last.visits)),
        )

    def _look(self, folder: Path, known: Aliases) -> Any:
        """The result of the user's ledger function."""
        if self._ledger is None:
            return None
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(folder)
        try:
            seen = self._ledger(folder)
        except OSError as error:  # this is an error of the user's function, not of the trial
            raise InvalidInput(f"the ledger: {type(error).__name__}: {error}") from error
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
        return worlds.normal(seen, known)


def _end(code: int, last: Spec) -> str:
    """How the last process ended.

    For "rested" there must also be the report file of the process: a tool may have ended the process with code 0.
    """
    if code == 0 and last.told.exists():
        return "rested"
    if code == -1:
        return "timeout"
    full = ", and the disk is full" if shutil.disk_usage(last.home).free < _LITTLE else ""
    return (f"exit code {code}" if code >= 0 else f"signal {-code}") + full


def _log(last: Spec) -> str:
    return last.log.read_text(errors="replace")[-_LOG_CHARS:] if last.log.exists() else ""


def _waits_for(last: Spec) -> str:
    """What the run was waiting for at the timeout, according to the database."""
    try:
        with closing(open_store(last.settings.url, create=False)) as store:
            row = store.get(last.run_id)
    except (PerdureError, OSError):
        return ""
    return "" if row is None or not row.waiting_for else f"\nit waits for {row.waiting_for}"


def _copy(world: Path, to: Path) -> None:
    try:
        shutil.copytree(world, to, symlinks=True)
    except shutil.Error as error:
        if any(str(os.strerror(errno.ENOSPC)) in str(why) for _, _, why in error.args[0]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to)) from None
        source, _, why = error.args[0][0]
        raise InvalidInput(f"the world {world}: {source} cannot be copied: {why}") from None


def _resumed_after_s(told: TrialTold | None, visits: Sequence[Visit]) -> float:
    """Seconds until the process did something other than claim the run. If it did nothing else: until its end."""
    if told is None:
        return 0.0
    new = (visit.at for visit in visits if not any("claim" in name.name or "run_created" in name.name for name in visit.names))
    return max(next(new, told.rested_at) - told.began_at, 0.0)


# -- the points at which to kill --------------------------------------------------------------------------------------
class Point(Struct, frozen=True):
    """A point in time at which the run may be killed."""

    kill: Kill
    names: tuple[Boundary, ...]


def points(evidence: Evidence, again: Evidence | None = None) -> list[Point]:
    """The points for the kills: each point that the process reached, the middles of long effects, and late effects.

    The points are in order. The kill of a point uses the first name of the point. An effect counts as long only if it
    was long in `again` too: a busy machine can make a short effect long once, and then the trial would not reach the
    kill.
    """
    found = []
    # The points for late effects. Each is put into `found` after the next point of the same effect.
    late: dict[tuple[str, int], Point] = {}
    for visit in evidence.visits:
        name = visit.names[0]
        found.append(Point(Kill(name), visit.names))
        if name.name in ("before_tool_effect", "after_tool_effect") and (point := late.pop((name.run, name.call), None)) is not None:
            found.append(point)
        if name.name == "before_tool_effect" and _may_come_late(evidence, name):
            comes_late = Boundary(LATE, name.run, name.call, name.tool, name.nth)
            late[name.run, name.call] = Point(Kill(comes_late), (comes_late,))
        took_s = min(_effect_s(one, name) for one in (evidence, again or evidence)) if name.name == "before_tool_effect" else 0.0
        if took_s > LONG_EFFECT_S:
            middle = Boundary(DURING, name.run, name.call, name.tool, name.nth)
            found.append(Point(Kill(middle, took_s / 2), (middle,)))
    return [*found, *late.values()]


def _may_come_late(evidence: Evidence, name: Boundary) -> bool:
    calls = evidence.told.calls if evidence.told else ()
    return any((call.run, call.number) == (f"{evidence.run_id}{name.run}", name.call) and call.meets_late_effects for call in calls)


def _effect_s(evidence: Evidence, name: Boundary) -> float:
    """How long the nth call of the function took. 0 if the call has not ended."""
    run_id = f"{evidence.run_id}{name.run}"
    pids = {entry.pid for entry in evidence.entries if entry.fact == "killed"}
    mine = [entry for entry in evidence.entries if (entry.run, entry.call) == (run_id, name.call) and entry.pid not in pids]
    begun = [entry.at for entry in mine if entry.fact == "begun"]
    ended = [entry.at for entry in mine if entry.fact in ("returned", "raised")]
    return ended[name.nth - 1] - begun[name.nth - 1] if len(begun) >= name.nth <= len(ended) else 0.0
