"""Processes of the lab: forked from this one, which has imported the target already, or fresh interpreters.

A fork costs milliseconds, and carries only the thread that forks: where the target's import has left threads behind, what they hold
would be held for ever, and fresh interpreters are used. Each process leads a session of its own, so that whatever it starts can be
ended with it, and ends when this one is gone.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol, TypeVar

import msgspec

from perdure.agent import Agent
from perdure.testing.forking import fork, let_signals_in
from perdure.testing.lab.lifeline import Lifeline, hang_on
from perdure.testing.lab.spec import Spec

T = TypeVar("T")
Steps = Generator[Spec, "int | None", T]  # asks for one process after another, is told how each ended: None when it had to be stopped
_POLL_S = 0.003


class Process(Protocol):
    pid: int

    def poll(self) -> int | None:
        """How it ended: its exit code, or minus the signal; None while it lives. Its number stays taken until `reap`."""

    def reap(self) -> None:
        """Give its number back, now that it has ended."""


def has_threads() -> bool:
    """Whether this process has threads besides this one, those that Python knows nothing of among them."""
    try:
        return len(os.listdir("/proc/self/task")) > 1
    except OSError:
        return threading.active_count() > 1


# -- forked -----------------------------------------------------------------------------------------------------------------
class Forked:
    """Forks this process."""

    def __init__(self, work: Callable[[Spec], None], lifeline: Lifeline) -> None:
        self._work = work
        self._lifeline = lifeline

    def begin(self, spec: Spec) -> Process:
        gc.freeze()  # or every collection in a child would touch, and so copy, all that is here
        sys.stdout.flush()
        sys.stderr.flush()
        pid = fork()
        if pid:
            gc.unfreeze()
            return _Child(pid)
        code = 1
        try:
            _settle_in(spec, self._lifeline)
            self._work(spec)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


class _Child:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = _ended(self.pid)
        return self._code

    def reap(self) -> None:
        _reap(self.pid)


def _ended(pid: int) -> int | None:
    """How a child ended, and leave it unreaped: as long as it is, no other group of processes gets its number, and what it has left
    behind can be ended by that."""
    if not hasattr(os, "waitid"):  # macOS, before CPython 3.13
        gone, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if gone else None
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # where the end of a child is only to be learned with that


def _settle_in(spec: Spec, lifeline: Lifeline) -> None:
    lifeline.let_go()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    let_signals_in()
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # Whatever stood in the place of these here, such as what a test runner reads along with, is not for a victim.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    here = os.getcwd()
    sys.path[:] = [os.path.join(here, entry) for entry in sys.path]
    os.chdir(spec.world)
    hang_on(lifeline.reading)


def in_process(agent: Agent[Any, Any], agents: Sequence[Agent[Any, Any]]) -> Callable[[Spec], None]:
    """What a forked process does."""
    from perdure.testing.lab.victim import live

    import_module("perdure.store.sqlite.store")  # here, so that what takes long to import is imported once
    return lambda spec: live(spec, agent, agents)


# -- fresh ------------------------------------------------------------------------------------------------------------------
class Fresh:
    """Starts an interpreter with this command, which reads from its stdin what to do, and is given the lifeline's number.

    A file without a name is its stdin: settings have passwords in them, which are nobody's who finds the folder later (G15).
    """

    def __init__(self, command: Sequence[str], lifeline: Lifeline) -> None:
        self._command = command
        self._lifeline = lifeline

    def begin(self, spec: Spec) -> Process:
        lifeline = self._lifeline.reading
        with tempfile.TemporaryFile(dir=spec.home) as told, open(spec.log, "ab") as log:
            told.write(msgspec.json.encode(spec))
            told.seek(0)
            started = subprocess.Popen(
                [*self._command, str(lifeline)],
                cwd=spec.world,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)},
                stdin=told,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lifeline,),
            )
        return _Started(started)


class _Started:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process  # kept: let go before its end is known to it, it would be reaped by whoever starts the next one
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = _ended(self.pid)
        return self._code

    def reap(self) -> None:
        self._process.wait()


# -- many at a time -----------------------------------------------------------------------------------------------------------
class _Going:
    def __init__(self, index: int, steps: Steps[Any]) -> None:
        self.index = index
        self.steps = steps
        self.process: Process | None = None
        self.until_s = 0.0
        self.begun: list[Process] = []


def run_all(work: Iterable[Steps[T]], begin: Callable[[Spec], Process], *, jobs: int, timeout_s: float) -> Iterator[tuple[int, T]]:
    """Do all of it, so many at a time; each with its place as it is done. Whatever still lives when this ends is killed."""
    waiting = iter(enumerate(work))
    going: list[_Going] = []
    try:
        while True:
            while len(going) < jobs and (found := next(waiting, None)) is not None:
                one = _Going(*found)
                if (done := _next(one, None, begin, timeout_s, first=True)) is not None:
                    yield one.index, done[0]
                else:
                    going.append(one)
            if not going:
                return
            for one in list(going):
                assert one.process is not None
                code = one.process.poll()
                if code is None and time.monotonic() < one.until_s:
                    continue
                if code is None:
                    _end(one.process)
                if (done := _next(one, code, begin, timeout_s)) is not None:
                    going.remove(one)
                    _end_groups(one.begun)
                    yield one.index, done[0]
            time.sleep(_POLL_S)
    finally:
        for one in going:
            if one.process is not None:
                _end(one.process)
            _end_groups(one.begun)


def _next(one: _Going, code: int | None, begin: Callable[[Spec], Process], timeout_s: float, *, first: bool = False) -> tuple[Any] | None:
    """Let it go on; what it comes to, once it has."""
    try:
        spec = next(one.steps) if first else one.steps.send(code)
    except StopIteration as done:
        return (done.value,)
    try:
        one.process = begin(spec)
    except OSError as error:  # a folder that is gone, a full disk: this trial's affair, and nobody else's
        return _broken(one, error)
    one.begun.append(one.process)
    one.until_s = time.monotonic() + timeout_s
    return None


def _broken(one: _Going, error: OSError) -> tuple[Any]:
    try:
        one.steps.throw(error)
    except StopIteration as done:
        return (done.value,)
    raise AssertionError("a trial goes on though no process could be started for it") from error


def _end(process: Process) -> None:
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    while process.poll() is None:
        time.sleep(_POLL_S)


def _end_groups(leaders: Iterable[Process]) -> None:
    """What the processes of a trial have started, and left behind when they were killed. They have ended, and are reaped after this."""
    for leader in leaders:
        try:
            os.killpg(leader.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # nothing was left of it
        leader.reap()
