"""Asking a contestant: a new process for every question, with a time limit and a complete cleanup.

Output goes to files and not through pipes, so that no process waits for a reader and the last output of a killed process is kept.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.race.lanes import ENVIRONMENTS, RACE, Contestant

_GRACE_S = 15.0
_LOOK_S = 0.005
_REASON_CHARS = 300


class Failed(Exception):
    """The contestant did not answer the question; the text says why."""


class CutOff(Failed):
    """The time limit is over."""


class Absent(Exception):
    """The contestant says that it does not support this workload."""


class Exchange:
    """Starts the processes of contestants and reads their answers; their output is kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        folder.mkdir(exist_ok=True)

    def ask(self, contestant: Contestant, role: str, given: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The answer to one question. Failed, CutOff or Absent when there is none."""
        with self._process(contestant, role, given) as process:
            try:
                code = process.popen.wait(max(limit_s, 0.1))
            except subprocess.TimeoutExpired:
                raise CutOff(f"{role}: cut off after {limit_s:.0f} s") from None
        answer = process.last_line()
        # Some roles have to kill their own process with SIGKILL after the answer.
        if code != 0 and not (code == -signal.SIGKILL and answer is not None and "reached_ns" in answer):
            raise Failed(f"{role}: ended with {code}: {process.complaint()}")
        return _checked(role, answer)

    @contextmanager
    def companion(self, contestant: Contestant, role: str, given: Mapping[str, Any], limit_s: float) -> Iterator[Companion]:
        """A process that stays until the end of the block; it has said that it is ready."""
        with self._process(contestant, role, given) as process:
            companion = Companion(process, _checked(role, process.first_line(role, limit_s)))
            try:
                yield companion
            finally:
                process.end()
                companion.bury()

    @contextmanager
    def _process(self, contestant: Contestant, role: str, given: Mapping[str, Any]) -> Iterator[_Process]:
        stem = self._folder / f"{next(self._numbers):04d}-{contestant.name}-{role}"
        out, err = stem.with_suffix(".out"), stem.with_suffix(".err")
        command = [str(contestant.python), str(contestant.program), role, json.dumps(given)]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            try:
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=given["folder"],
                    env=environment(),
                    start_new_session=True,  # on Ctrl-C the asking process ends all of them
                )
            except OSError as error:
                raise Failed(f"{role}: cannot be started: {error}") from None
        process = _Process(popen, out, err)
        try:
            yield process
        finally:
            process.kill()


class _Process:
    """One process of a contestant, with everything that it starts."""

    def __init__(self, popen: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.popen = popen
        self._out = out
        self._err = err

    def first_line(self, role: str, limit_s: float) -> dict[str, Any] | None:
        """The line that it prints as soon as it is ready."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in (said := self._out.read_bytes()):
            if self.popen.poll() is not None:
                raise Failed(f"{role}: ended with {self.popen.returncode}: {self.complaint()}")
            if time.monotonic() > deadline:
                raise CutOff(f"{role}: not ready after {limit_s:.0f} s")
            time.sleep(_LOOK_S)
        return _object(said.split(b"\n")[0])

    def last_line(self) -> dict[str, Any] | None:
        lines = self._out.read_bytes().strip().splitlines()
        return _object(lines[-1]) if lines else None

    def complaint(self) -> str:
        """The last line of its stderr, which has the exception."""
        lines = [line.strip() for line in self._err.read_text(errors="replace").splitlines()]
        said = [line for line in lines if line.strip(" |+-")]
        return said[-1][:_REASON_CHARS] if said else "and said nothing"

    def end(self) -> None:
        """Ask it to end with SIGTERM, and give it time to end its child processes."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                pass  # kill() follows

    def kill(self) -> None:
        """Kill what is left of it. It has its own session, so this reaches only its children."""
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # no process is left
        self.popen.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()


class Companion:
    """A worker or a server that runs in the background."""

    def __init__(self, process: _Process, said: dict[str, Any]) -> None:
        self._process = process
        self.said = said
        self._pid = int(said.get("pid", process.popen.pid))
        self._began = _began(self._pid)

    def cue(self) -> None:
        """Tell it to begin."""
        stdin = self._process.popen.stdin
        assert stdin is not None
        stdin.write(b"go\n")
        stdin.flush()

    def peak_mb(self) -> float:
        """Its peak memory, with all its child processes."""
        return sum(_peak_kb(pid) for pid in _family(self._pid)) / 1024

    def bury(self) -> None:
        """Kill the process with the printed pid, if it still runs and the pid was not reused."""
        if self._pid != self._process.popen.pid and self._began is not None and _began(self._pid) == self._began:
            os.kill(self._pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    """The environment of a contestant: compiled modules are kept, as on any machine, and no setting of the shell is inherited."""
    dropped = ("PYTHON", "PERDURE_", "PG", "VIRTUAL_ENV", "DBOS", "LANG", "TEMPORAL", "RESTATE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped) or name == "LANG"}
    return kept | {"PYTHONPATH": str(RACE), "PYTHONPYCACHEPREFIX": str(ENVIRONMENTS / "compiled")}


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _checked(role: str, answer: dict[str, Any] | None) -> dict[str, Any]:
    if answer is None:
        raise Failed(f"{role}: its last line is no JSON object")
    if "not" in answer:
        raise Absent(str(answer["not"]))
    return answer


# -- processes, from /proc ---------------------------------------------------------------------------------------
def _status(pid: int) -> dict[str, str]:
    """Empty for one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _peak_kb(pid: int) -> int:
    return int(_status(pid).get("VmHWM", "0 kB").split()[0])


def _began(pid: int) -> str | None:
    """When the process started, in clock ticks; together with the pid this identifies it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _family(pid: int) -> set[int]:
    """A process and all below it."""
    parents = {int(one.name): int(_status(int(one.name)).get("PPid", 0)) for one in Path("/proc").iterdir() if one.name.isdigit()}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found
