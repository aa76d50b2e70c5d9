"""The world outside of perdure, as a file: what tools really did, one line per fact, appended and synced by the tool.

perdure never reads this file. The ledger also acts as the service of a tool: it drops a keyed request that it has seen
before, and a reconcile hook can ask it what has happened.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure import Call

VARIABLE = "CRASH_LEDGER"  # an isolated tool is another process: it finds the file by its environment


class Ledger:
    """Append-only facts. Every process opens the file again; a line is complete or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def here(cls) -> Ledger:
        """The ledger of this process."""
        return cls(Path(os.environ[VARIABLE]))

    def note(self, fact: str, what: str, call: Call | None = None, **more: Any) -> None:
        """Write one line, durable when this returns."""
        told = {} if call is None else {"key": call.key, "run": call.run_id, "number": call.number, "attempt": call.attempt}
        line = json.dumps({"fact": fact, "what": what, "pid": os.getpid(), **told, **more}) + "\n"
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # A write that crosses a page is seen by halves, and a kill may leave it so.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _cut_half_a_line(descriptor)
            os.write(descriptor, line.encode())
            # Unlock before the sync: a process that is stopped during the sync must not block the readers.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def perform(self, what: str, call: Call, *, by_key: bool = False) -> str:
        """Do it: the effect is the line. With `by_key` the service drops a request whose key it knows, and answers as before."""
        with open(f"{self.path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = by_key and self.has_happened(call.key)
            self.note("dropped" if known else "effect", what, call)
        return f"{what} done"

    def has_happened(self, key: str) -> bool:
        return any(line["key"] == key for line in self.effects())

    def lines(self, fact: str | None = None, run: str | None = None) -> list[dict[str, Any]]:
        """The facts so far, in order."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            whole = file.read().rpartition(b"\n")[0]
        found = [json.loads(line) for line in whole.splitlines()]
        return [line for line in found if fact in (None, line["fact"]) and run in (None, line.get("run"))]

    def effects(self, what: str | None = None, run: str | None = None) -> list[dict[str, Any]]:
        """What has happened to the world."""
        return [line for line in self.lines("effect", run) if what in (None, line["what"])]

    def wait_for(self, enough: Callable[[list[dict[str, Any]]], bool], within_s: float = 60.0) -> list[dict[str, Any]]:
        """The lines, once they satisfy the predicate."""
        deadline = time.monotonic() + within_s
        while not enough(lines := self.lines()):
            assert time.monotonic() < deadline, f"after {within_s} s the ledger still has only {lines}"
            time.sleep(0.003)
        return lines


def _cut_half_a_line(descriptor: int) -> None:
    """A process was killed while it wrote this line, so the line does not count."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 4096, max(size - 4096, 0))
    if not tail.endswith(b"\n"):
        os.ftruncate(descriptor, size - len(tail) + tail.rfind(b"\n") + 1)
