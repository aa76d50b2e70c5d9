"""Asking a contestant: a process of its own for every question, with a time limit, and nothing of it left behind.

Output goes to files and not through pipes, so that nobody waits for a reader and the last words of a killed process are there.
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
    """The contestant did not do what it was asked for; the text says why."""


class CutOff(Failed):
    """It took longer than it had."""


class Absent(Exception):
    """It has nothing of the kind, and says so."""


class Exchange:
    """Starts the processes of contestants and reads their answers; what they print is kept in `folder` as long as that is."""

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
        # Dying by SIGKILL after its last words is what it was asked for.
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
                    start_new_session=True,  # Ctrl-C is for the one who asks, who then ends them all
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
        """What it says as soon as it is ready."""
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
        """The last line of its stderr, where Python puts what went wrong."""
        lines = [line.strip() for line in self._err.read_text(errors="replace").splitlines()]
        said = [line for line in lines if line.strip(" |+-")]
        return said[-1][:_REASON_CHARS] if said else "and said nothing"

    def end(self) -> None:
        """Ask it to leave, as a service manager does, and give it time to end what it has started."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                pass  # kill() follows

    def kill(self) -> None:
        """End what is left of it: its session is its own, so that this reaches its children and nobody else."""
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nobody is left
        self.popen.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()


class Companion:
    """A worker or a server beside those who are asked."""

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
        """The most that it has held, with everything below it."""
        return sum(_peak_kb(pid) for pid in _family(self._pid)) / 1024

    def bury(self) -> None:
        """End the process that it has named, if that one is still there and no other has its number."""
        if self._pid != self._process.popen.pid and self._began is not None and _began(self._pid) == self._began:
            os.kill(self._pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    """Compiled modules are kept, as they are on any machine after the first start, and no setting of the shell reaches a contestant."""
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


# -- what the system knows of processes ---------------------------------------------------------------------------------------
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
    """When it began, in ticks of the machine: with its number that is who it is."""
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
