"""Shared by the tests of the SQLite store.

Other processes, direct access to the file, and a disk that fails on request.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
from tests.servers import forked


def python(code: str, *args: object) -> subprocess.Popen[str]:
    """Another process that runs the code; its arguments are sys.argv[1:]."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return forked.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    """The first line of its output; its error if there is no output."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.communicate()[1]
    return line


def output(process: subprocess.Popen[str]) -> str:
    """Everything that it says, once it has ended well."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


def end(process: subprocess.Popen[str]) -> None:
    """End it as kill -9 does, and reap it."""
    process.kill()
    process.communicate()


def raw(path: Path) -> apsw.Connection:
    """Direct access to the file, with the same library."""
    return apsw.Connection(str(path))


class FaultyDisk(apsw.VFS):
    """The disk, with faults to order in the log (WAL). Default for connections that are opened while it is in use."""

    def __init__(self) -> None:
        self.fail_syncs = 0
        self.full = False
        self.on_open: Callable[[], None] | None = None
        super().__init__("perdure-faulty", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: Any) -> apsw.VFSFile:
        if self.on_open is not None:
            react, self.on_open = self.on_open, None
            react()
        return _FaultyFile(self, name, flags)


class _FaultyFile(apsw.VFSFile):
    def __init__(self, disk: FaultyDisk, name: Any, flags: Any) -> None:
        super().__init__("unix", name, flags)
        self._disk = disk
        self._is_log = bool(flags[0] & apsw.SQLITE_OPEN_WAL)

    def xSync(self, flags: int) -> None:
        if self._is_log and self._disk.fail_syncs > 0:
            self._disk.fail_syncs -= 1
            raise apsw.IOError("fsync failed, as ordered")
        super().xSync(flags)

    def xWrite(self, data: Any, offset: int) -> None:
        if self._is_log and self._disk.full:
            raise apsw.FullError("no room, as ordered")
        super().xWrite(data, offset)
