"""What tools really did: a file with one line per fact. perdure itself neither writes nor reads it.

A line is either complete or absent. When `note` returns, the kernel has the line, so a later SIGKILL does not lose the
line. The file is not synced: the lab kills processes, not machines.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from perdure.store.liveness import closed_in_children

Fact = Literal["begun", "returned", "raised", "asked", "told", "unwaited", "unseen", "changed", "late", "killed"]


class Entry(Struct, frozen=True, omit_defaults=True):
    """One fact of a trial.

    - `begun`, `returned`, `raised`: about a tool's function.
    - `asked`, `told`: about a reconcile hook: perdure asked the hook, and the hook answered.
    - `unwaited`: the hook did not find the effect, and perdure would have waited longer than the lab does.
    - `unseen`: the tool runs in its own process (isolate=True), where its calls are not counted.
    - `changed`: the call changed the working folder.
    - `late`: the process of the attempt is killed now, and a carrier calls the function later. The carrier writes its
      `returned` or `raised` with the pid of the killed process, because the line belongs to that attempt.
    - `killed`: the process kills itself now.
    """

    fact: Fact
    pid: int
    at: float
    tool: str = ""
    model: bool = False
    run: str = ""  # the id of the run
    call: int = 0
    attempt: int = 0
    key: str = ""
    result: str | None = None  # JSON. For `raised`: the type of the error. For `told`: the kind of outcome
    final: bool = False  # only for the fact `told`: the hook said that this attempt can never happen
    outside: bool = False  # True for a model call that costs money


class EffectLedger:
    """The append-only facts of one trial. Every process of the trial opens the file itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()  # a carrier that is forked from this process later also writes this pid

    def note(self, fact: Fact, **told: object) -> None:
        """Write one line."""
        line = msgspec.json.encode(Entry(fact, self._pid, time.time(), **told)) + b"\n"  # type: ignore[arg-type]
        with self._locked(os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor:
            os.write(descriptor, line)

    def entries(self) -> list[Entry]:
        """All facts so far, in order."""
        if not self.path.exists():
            return []
        whole = self.path.read_bytes().rpartition(b"\n")[0]
        return [msgspec.json.decode(line, type=Entry) for line in whole.splitlines()]

    def has_begun(self, tool: str) -> bool:
        """Was the function of this tool called in this trial? Also true if its calls are not counted (`unseen`).

        A late request does not count: the lab itself lets the request arrive, after the hook was asked once. Then the
        lab waits until the effect can be found, before the hook is asked again.
        """
        entries = self.entries()
        late = {attempt_of(entry) for entry in entries if entry.fact == "late"}
        return any(entry.tool == tool and entry.fact in ("begun", "unseen") and attempt_of(entry) not in late for entry in entries)

    def _locked(self, flags: int) -> _Locked:
        return _Locked(self.path, flags)


class _Locked:
    """The file under an exclusive lock, so that the lines of two processes never mix."""

    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = os.open(path, flags, 0o600)
        # If another thread forks a carrier now, the carrier must not keep the lock.
        closed_in_children.add(self._descriptor)

    def __enter__(self) -> int:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        _cut_half_a_line(self._descriptor)
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        # Unlock explicitly: closing the file is not enough if a process that was forked meanwhile has the file open.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        closed_in_children.discard(self._descriptor)
        os.close(self._descriptor)


def _cut_half_a_line(descriptor: int) -> None:
    """Remove an incomplete last line. Its process was killed while it wrote the line."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        whole = os.pread(descriptor, size, 0)
        os.ftruncate(descriptor, whole.rfind(b"\n") + 1)


def of_call(entries: list[Entry], run: str, call: int) -> Iterator[Entry]:
    return (entry for entry in entries if (entry.run, entry.call) == (run, call))


def attempt_of(entry: Entry) -> tuple[str, int, int, int]:
    """The run, call, attempt and process to which the line belongs."""
    return entry.run, entry.call, entry.attempt, entry.pid
