"""The disk under the real SQLite, with a log of everything that reaches it, and faults that a test can request.

The files are real, and SQLite's own file layer does the work: the log has the operations that SQLite requested.
Whether and when SQLite syncs the folder is not visible at that layer. So the system call that opens a folder for this
is watched too. Shared memory (-shm) is left out, because SQLite ignores it after a power loss.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import apsw

JOURNAL = "journal.db"


@dataclass(frozen=True, slots=True)
class Created:
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Found:
    """A file from before the recording, which is certainly on the disk."""

    name: str
    inode: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Written:
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class Synced:
    inode: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Unlinked:
    name: str


@dataclass(frozen=True, slots=True)
class FolderSynced:
    pass


@dataclass(frozen=True, slots=True)
class Noted:
    """Not an operation of the disk: an answer of perdure, or an effect of a tool, at this moment."""

    mark: object


Op = Created | Found | Written | Cut | Synced | Unlinked | FolderSynced | Noted
Fault = Literal["sync fails", "sync is a lie", "disk full", "write fails", "write fails half way"]


@dataclass(slots=True)
class Trouble:
    """From the nth operation that it can strike on, so many times."""

    fault: Fault
    nth: int
    times: float = 1
    struck: int = 0
    place: int = 0  # in the log, where it first did

    def strikes(self, operation: Literal["sync", "write"], place: int) -> bool:
        if operation != ("sync" if self.fault.startswith("sync") else "write"):
            return False
        self.nth -= 1
        if self.nth >= 0 or self.struck >= self.times:
            return False
        self.place = self.place or place
        self.struck += 1
        return True


class RecordingDisk(apsw.VFS):
    """The default for every connection that is opened while it is in use."""

    def __init__(self, log: list[Op], trouble: Trouble | None = None) -> None:
        self.log = log
        self.trouble = trouble
        self.inodes: dict[str, int] = {}  # by name, of the files that are there
        self.born = 0
        super().__init__("perdure-recording", "unix", makedefault=True)

    def already_there(self, path: Path) -> None:
        """A file from before the recording."""
        self.log.append(Found(path.name, self._bear(path.name), path.read_bytes()))

    def find(self, name: str) -> int:
        if name not in self.inodes:
            self.log.append(Created(name, self._bear(name)))
        return self.inodes[name]

    def _bear(self, name: str) -> int:
        self.born += 1
        self.inodes[name] = self.born
        return self.born

    def xOpen(self, name: Any, flags: Any) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        if path is None or not os.path.basename(path).startswith(JOURNAL):
            return apsw.VFSFile("unix", name, flags)  # a temporary file, which no power loss leaves anything of
        return _RecordingFile(self, os.path.basename(path), name, flags)

    def xDelete(self, name: str, syncdir: bool) -> None:
        # Before the call: the sync of the folder, when there is one, is part of it.
        if self.inodes.pop(os.path.basename(name), None) is not None:
            self.log.append(Unlinked(os.path.basename(name)))
        super().xDelete(name, syncdir)


class _RecordingFile(apsw.VFSFile):
    def __init__(self, disk: RecordingDisk, base: str, name: Any, flags: Any) -> None:
        super().__init__("unix", name, flags)
        self._disk = disk
        self._inode = disk.find(base)

    def xWrite(self, data: Any, offset: int) -> None:
        trouble = self._disk.trouble
        if trouble is not None and trouble.strikes("write", len(self._disk.log)):
            if trouble.fault == "write fails half way":
                self._write(bytes(data)[: len(data) // 2], offset)
            raise apsw.FullError("no room, as ordered") if trouble.fault == "disk full" else apsw.IOError("write failed, as ordered")
        self._write(bytes(data), offset)

    def _write(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        self._disk.log.append(Written(self._inode, offset, data))

    def xTruncate(self, size: int) -> None:
        super().xTruncate(size)
        self._disk.log.append(Cut(self._inode, size))

    def xSync(self, flags: int) -> None:
        trouble = self._disk.trouble
        if trouble is not None and trouble.strikes("sync", len(self._disk.log)):
            if trouble.fault == "sync fails":
                self._disk.log.append(Synced(self._inode, failed=True))
                raise apsw.IOError("fsync failed, as ordered")
            return  # a lie: SQLite is told that the sync succeeded
        super().xSync(flags)
        self._disk.log.append(Synced(self._inode))


_OPEN_FOLDER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int))


@contextmanager
def recording(log: list[Op], trouble: Trouble | None = None) -> Iterator[RecordingDisk]:
    """Everything that SQLite does to a disk goes into the log, for as long as this lasts."""
    disk = RecordingDisk(log, trouble)
    # SQLite's own layer opens the folder for one thing only: to sync it.
    address = disk.xGetSystemCall("openDirectory")
    assert address is not None
    really: Callable[..., int] = _OPEN_FOLDER(address)

    def watched(path: bytes, descriptor: Any) -> int:
        if os.path.basename(path).startswith(JOURNAL.encode()) and not _lies(trouble):
            log.append(FolderSynced())
        return really(path, descriptor)

    callback = _OPEN_FOLDER(watched)
    pointer = ctypes.cast(callback, ctypes.c_void_p).value
    assert pointer is not None
    assert disk.xSetSystemCall("openDirectory", pointer)
    try:
        yield disk
    finally:
        disk.xSetSystemCall("openDirectory", address)
        disk.unregister()


def _lies(trouble: Trouble | None) -> bool:
    return trouble is not None and trouble.fault == "sync is a lie"
