"""Keeps two SQLite libraries from opening one file in one process.

When a process closes a descriptor of a file, the kernel drops every POSIX lock of the process on that file. So when
one library closes the file, the other library loses its locks and writes without them. In a trial this corrupted a
journal. So the standard library's sqlite3 must not open a journal while perdure has that journal open.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from perdure.errors import StoreError

# These are global, not per store, because file locks and audit hooks belong to the whole process.
opening = threading.Lock()
_ours: Counter[tuple[int, int]] = Counter()
_hooked = False


def watch(path: Path) -> tuple[int, int]:
    """From now on, do not let the standard library's sqlite3 open this file. Returns the argument for `unwatch`."""
    global _hooked
    status = os.stat(path)
    identity = (status.st_dev, status.st_ino)
    with opening:
        _ours[identity] += 1
        if not _hooked:
            sys.addaudithook(_audit)  # the hook stays until the process ends: Python cannot remove an audit hook
            _hooked = True
    return identity


def unwatch(identity: tuple[int, int]) -> None:
    """A store has closed the file. If no other store of this process has it open, sqlite3 may open the file again."""
    with opening:
        _ours[identity] -= 1
        if _ours[identity] <= 0:
            del _ours[identity]


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # Python calls this for every audit event of the process: this test must come first, to keep the hook cheap.
    if event != "sqlite3.connect" or not _ours:
        return
    for path in _paths(args[0]):
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            continue
        if (status.st_dev, status.st_ino) in _ours:
            raise StoreError(
                f"{path} is an open perdure journal, and a second SQLite library in this process would drop its locks when it closes the "
                "file, which corrupts it: open it through apsw, or from another process"
            )


def _paths(database: Any) -> list[str]:
    try:
        path = os.fsdecode(database)
    except TypeError:
        return []
    return [path, unquote(urlsplit(path).path)] if path.startswith("file:") else [path]
