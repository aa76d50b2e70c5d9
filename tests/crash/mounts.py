"""Small file systems for one test, which can be full or become read-only.

Only this thread and its children see the mounts. If the test process is killed, its mounts disappear.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

_CLONE_NEWNS = 0x00020000


@functools.cache
def keep_to_ourselves() -> bool:
    """Have mounts of our own from now on; False where this user may not. Children that exist already do not see them."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        return False
    return _run("mount", "--make-rslave", "/")


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """The folder is on a file system of two megabytes. False: mounting is not permitted."""
    mounted = keep_to_ourselves() and _run("mount", "-t", "tmpfs", "-o", "size=2m", "perdure-test", str(folder))
    try:
        yield mounted
    finally:
        if mounted:
            _run("umount", "-l", str(folder))


def remount(folder: Path, option: str) -> None:
    """`ro` or `rw`. The kernel refuses `ro` as long as a process has a file open for writing."""
    assert _run("mount", "-o", f"remount,{option}", str(folder)), f"cannot remount {folder} {option}"


class FailingVolume:
    """A real ext4 in a file.

    After an error it becomes read-only during writes, as disks do; fsck makes it usable again.
    """

    def __init__(self, image: Path, folder: Path) -> None:
        self._image = image
        self._folder = folder

    def make(self) -> bool:
        """False: making or mounting the volume is not permitted."""
        with open(self._image, "wb") as file:
            file.truncate(8 << 20)
        return keep_to_ourselves() and _run("mkfs.ext4", "-q", "-F", str(self._image)) and self.mount()

    def mount(self) -> bool:
        return _run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self._folder))

    def fail(self) -> None:
        """From now on every write to it is refused (EROFS), also to files that are open."""
        number = os.stat(self._folder).st_dev
        name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"))
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("perdure-test")

    def repair(self) -> None:
        """No process may have a file open there."""
        self.unmount()
        code = subprocess.run(["e2fsck", "-f", "-y", str(self._image)], capture_output=True, timeout=60).returncode
        assert code <= 1, code  # 1: there was something to repair
        assert self.mount()

    def unmount(self) -> None:
        _run("umount", str(self._folder)) or _run("umount", "-l", str(self._folder))


class Room(Protocol):
    """What there is to write to, for the process of a worker."""

    def fill(self, pid: int) -> None: ...

    def free(self, pid: int) -> None: ...


class Disk:
    """A file system without a free block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ballast = folder / "ballast"

    def fill(self, pid: int) -> None:
        # Repeat this: space that a checkpoint frees meanwhile is filled too.
        with open(self._ballast, "ab") as ballast:
            while (room := os.statvfs(self._folder)).f_bavail:
                ballast.write(b"x" * (room.f_bavail * room.f_frsize))
                ballast.flush()

    def free(self, pid: int) -> None:
        self._ballast.unlink()


class Limit:
    """A limit on the size of files.

    Weaker than a full disk, because existing blocks can be overwritten; needs no privilege.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def fill(self, pid: int) -> None:
        self._before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (self._log.stat().st_size, resource.RLIM_INFINITY))

    def free(self, pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, self._before)


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False
