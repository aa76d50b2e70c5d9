"""Two SQLite libraries must never open one file in one process.

Closing a handle drops every POSIX lock that the process has on the file, also those of the other library, which goes on writing
without them: a trial corrupted its journal that way. So the standard library's sqlite3 is refused our files while we have them open.
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

# Facts about the process, not about a store: a file lock and an audit hook belong to the process as a whole.
opening = threading.Lock()
_ours: Counter[tuple[int, int]] = Counter()
_hooked = False


def watch(path: Path) -> tuple[int, int]:
    """Refuse this file to other SQLite libraries from now on; the answer is what unwatch takes."""
    global _hooked
    status = os.stat(path)
    identity = (status.st_dev, status.st_ino)
    with opening:
        _ours[identity] += 1
        if not _hooked:
            sys.addaudithook(_audit)  # stays for the life of the process: Python has no way to take one back
            _hooked = True
    return identity


def unwatch(identity: tuple[int, int]) -> None:
    """The file is closed; when nobody else of us has it open, anybody may open it."""
    with opening:
        _ours[identity] -= 1
        if _ours[identity] <= 0:
            del _ours[identity]


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # Called for every audit event of the process: nothing may stand before this test.
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
