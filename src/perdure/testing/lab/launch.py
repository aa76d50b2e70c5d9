"""Starts the processes of the lab: forks of the lab's process, which has imported the target already, or interpreters.

A fork takes only milliseconds, but it copies only the thread that forks. If the import of the target has started
threads, their locks could stay locked for ever in a fork. Then fresh interpreters are used. Each process is the leader
of its own session, so that all processes that it starts can be killed with it. Each process ends when the lab's
process has ended.
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
from perdure.testing.forking import fork, unblock_signals
from perdure.testing.lab.lifeline import Lifeline, end_with_lab
from perdure.testing.lab.spec import Spec

T = TypeVar("T")
# Yields the spec of each process, one after the other. Each yield returns the exit code, or None after a timeout.
Steps = Generator[Spec, "int | None", T]
_POLL_S = 0.003


class Process(Protocol):
    pid: int

    def poll(self) -> int | None:
        """The exit code, or minus the signal. None while the process is alive. Its pid is not reused before `reap`."""

    def reap(self) -> None:
        """Reap the process after its end. From now on its pid may be reused."""


def has_threads() -> bool:
    """Does this process have other threads, including threads that Python does not know?"""
    try:
        return len(os.listdir("/proc/self/task")) > 1
    except OSError:
        return threading.active_count() > 1


# -- forked -----------------------------------------------------------------------------------------------------------
class Forked:
    """Starts a process as a fork of this process."""

    def __init__(self, work: Callable[[Spec], None], lifeline: Lifeline) -> None:
        self._work = work
        self._lifeline = lifeline

    def begin(self, spec: Spec) -> Process:
        gc.freeze()  # without this, every garbage collection in the child would write to all memory, and so copy it
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
    """The exit code of a child, without reaping it. None while the child is alive.

    Until the child is reaped, its pid is not reused as the number of another process group. So the processes that the
    child has left behind can be killed by this number.
    """
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
        pass  # if there is no os.waitid, `_ended` has already reaped the process


def _settle_in(spec: Spec, lifeline: Lifeline) -> None:
    lifeline.close_in_child()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    unblock_signals()
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # Make new file objects: in the parent sys.stdout may be replaced, for example by a test runner that captures it.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    here = os.getcwd()
    sys.path[:] = [os.path.join(here, entry) for entry in sys.path]
    os.chdir(spec.world)
    end_with_lab(lifeline.reading)


def in_process(agent: Agent[Any, Any], agents: Sequence[Agent[Any, Any]]) -> Callable[[Spec], None]:
    """The function that a forked process runs."""
    from perdure.testing.lab.victim import live

    import_module("perdure.store.sqlite.store")  # import it in the parent, so that the slow import happens only once
    return lambda spec: live(spec, agent, agents)


# -- fresh ------------------------------------------------------------------------------------------------------------
class Fresh:
    """Starts an interpreter with this command. The interpreter reads its spec from stdin, and inherits the lifeline.

    Its stdin is an unnamed file: the settings contain passwords, which must not stay in the folder (guarantee G15).
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
        # Keep the object: when Popen starts a process, it reaps older processes whose objects were deleted.
        self._process = process
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = _ended(self.pid)
        return self._code

    def reap(self) -> None:
        self._process.wait()


# -- many at a time ---------------------------------------------------------------------------------------------------
class _Going:
    def __init__(self, index: int, steps: Steps[Any]) -> None:
        self.index = index
        self.steps = steps
        self.process: Process | None = None
        self.until_s = 0.0
        self.begun: list[Process] = []


def run_all(work: Iterable[Steps[T]], begin: Callable[[Spec], Process], *, jobs: int, timeout_s: float) -> Iterator[tuple[int, T]]:
    """Run all work, `jobs` trials at a time. Yields (index, result) as soon as a trial is done.

    At the end, processes that are still alive are killed.
    """
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
    """Start the next process of this work. Returns None, or the result in a tuple if the work is done."""
    try:
        spec = next(one.steps) if first else one.steps.send(code)
    except StopIteration as done:
        return (done.value,)
    try:
        one.process = begin(spec)
    except OSError as error:  # for example a removed folder or a full disk: only this trial is broken
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
    """Kill the processes that a trial's processes have left behind, then reap the trial's processes."""
    for leader in leaders:
        try:
            os.killpg(leader.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # the group is empty
        leader.reap()
