"""What tools really did: a file of its own that perdure neither writes nor reads, one line per fact, whole or not there.

A line is in the kernel's hands when `note` returns, so that SIGKILL a moment later does not take it back. It is not synced: the lab
kills processes, not machines.
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
    """One fact. `asked` and `told` are a reconcile hook's.

    `changed`: the working folder was another one after the call; `unwaited`: it did not find the effect, and perdure would have waited longer than the lab does; `unseen`: a tool that runs in a process
    of its own, where nobody counts; `late`: the attempt's process dies now, and a carrier performs its function later. The carrier's
    `returned` or `raised` has the pid of the process that died, since it is that attempt's.
    """

    fact: Fact
    pid: int
    at: float
    tool: str = ""
    model: bool = False
    run: str = ""  # its id
    call: int = 0
    attempt: int = 0
    key: str = ""
    result: str | None = None  # JSON; of `told` the kind of outcome
    final: bool = False  # of `told`: the hook has ruled it out for good
    outside: bool = False  # a model that is asked over a network, and paid for


class Ledger:
    """Append-only facts of one trial. Every process opens it anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()  # a carrier that is forked from this process writes in its name

    def note(self, fact: Fact, **told: object) -> None:
        """Write one line."""
        line = msgspec.json.encode(Entry(fact, self._pid, time.time(), **told)) + b"\n"  # type: ignore[arg-type]
        with self._locked(os.O_RDWR | os.O_APPEND | os.O_CREAT) as descriptor:
            os.write(descriptor, line)

    def entries(self) -> list[Entry]:
        """The facts so far, in order."""
        if not self.path.exists():
            return []
        whole = self.path.read_bytes().rpartition(b"\n")[0]
        return [msgspec.json.decode(line, type=Entry) for line in whole.splitlines()]

    def has_begun(self, tool: str) -> bool:
        """Whether the function of this tool was called in this trial; where nobody counts, whether it may have been.

        A late request does not count: the lab itself lets it arrive, between two questions to the hook, and waits until it has had its
        time to show before the second one.
        """
        entries = self.entries()
        late = {attempt_of(entry) for entry in entries if entry.fact == "late"}
        return any(entry.tool == tool and entry.fact in ("begun", "unseen") and attempt_of(entry) not in late for entry in entries)

    def _locked(self, flags: int) -> _Locked:
        return _Locked(self.path, flags)


class _Locked:
    """The file, in the hands of one process: two of a trial never mix their lines."""

    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = os.open(path, flags, 0o600)
        closed_in_children.add(self._descriptor)  # a carrier that another thread forks meanwhile must not keep the lock

    def __enter__(self) -> int:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        _cut_half_a_line(self._descriptor)
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        # Unlocked by name: a process that was forked between the two lines above has the same lock until it ends.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        closed_in_children.discard(self._descriptor)
        os.close(self._descriptor)


def _cut_half_a_line(descriptor: int) -> None:
    """What somebody was killed over has not been said."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        whole = os.pread(descriptor, size, 0)
        os.ftruncate(descriptor, whole.rfind(b"\n") + 1)


def of_call(entries: list[Entry], run: str, call: int) -> Iterator[Entry]:
    return (entry for entry in entries if (entry.run, entry.call) == (run, call))


def attempt_of(entry: Entry) -> tuple[str, int, int, int]:
    """Which attempt at which call the line is about, and of which process."""
    return entry.run, entry.call, entry.attempt, entry.pid
