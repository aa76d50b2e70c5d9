"""One race at a time: two races would slow each other down."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NotAlone(Exception):
    """Another race is running from this checkout; the text says which, and what to do."""


@contextmanager
def on_this_machine(lock: Path, *, is_measuring: bool) -> Iterator[None]:
    """Lock out every other race while this one measures, or raise NotAlone. A trial, whose figures do not count, only warns."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        print(f"whether another race is under way cannot be seen: {error}", file=sys.stderr)
        yield
        return
    try:
        _take(descriptor, lock, is_measuring)
        yield
    finally:
        os.close(descriptor)  # this frees the lock, as any end of this process does


def _take(descriptor: int, lock: Path, is_measuring: bool) -> None:
    try:
        # Trials take a shared lock, so that they can run at the same time.
        fcntl.flock(descriptor, (fcntl.LOCK_EX if is_measuring else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        pids = _holders(descriptor)
        other = f"another race is under way ({', '.join(f'pid {pid}' for pid in pids) or lock})"
        if is_measuring:
            way_out = f", or end it: kill {' '.join(pids)}" if pids else ""
            raise NotAlone(f"{other}, and the two would measure each other; wait for its end{way_out}") from None
        print(f"{other}, and this disturbs what it measures", file=sys.stderr)


def _holders(descriptor: int) -> list[str]:
    """The process that holds the lock, from /proc/locks: a pid in the file could belong to another process by now."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return []
    # `1: FLOCK  ADVISORY  WRITE 3756 fe:00:5342078 0 EOF`; an arrow after the number marks a process that waits.
    return [line[4] for line in lines if line[1] == "FLOCK" and line[5] == place]
