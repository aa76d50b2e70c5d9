"""Which workers are alive? Each worker locks a small file of its own; the kernel frees the lock when the worker dies.

A clock alone can only make it likely that a worker is dead. A lock that has become free proves the death at once. A
lock file that is missing, cannot be opened, is not a regular file, or belongs to another user proves nothing: then
the lease decides.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Protocol

from perdure.core.identity import check_id
from perdure.errors import Conflict, StoreUnavailable
from perdure.store.private_folder import FILE_FLAGS, PrivateFolder


class Liveness(Protocol):
    def hold(self, worker: str) -> bool:
        """Take the worker's lock, until `free` or the end of the process. False: this process already has the lock."""

    def refresh(self, worker: str) -> None:
        """Take the lock again if its file was removed."""

    def free(self, worker: str) -> None:
        """Free the lock: the worker counts as dead."""

    def keep_until_exit(self, worker: str) -> None:
        """Keep the lock until this process ends, even after `close`: attempts may still run in this process."""

    def is_dead(self, worker: str) -> bool:
        """Is it proven that the worker's process is gone? The question does not disturb the worker."""

    def is_alive(self, worker: str) -> bool:
        """Is it proven that the worker's process exists? The process may be suspended."""

    def forget(self, worker: str) -> None:
        """Remove the lock file of a dead worker."""

    def close(self) -> None:
        """Free all locks of this process: its workers count as dead from now on."""


class InProcess:
    """For a database in memory: all workers of the database are in this process, and die with it."""

    def __init__(self) -> None:
        self._alive: set[str] = set()

    def hold(self, worker: str) -> bool:
        known = worker in self._alive
        self._alive.add(worker)
        return not known

    def refresh(self, worker: str) -> None:
        """No effect: there is no file that could be removed."""

    def free(self, worker: str) -> None:
        self._alive.discard(worker)

    def keep_until_exit(self, worker: str) -> None:
        """No effect: the database ends with this process."""

    def is_dead(self, worker: str) -> bool:
        return worker not in self._alive

    def is_alive(self, worker: str) -> bool:
        return worker in self._alive

    def forget(self, worker: str) -> None:
        self._alive.discard(worker)

    def close(self) -> None:
        self._alive.clear()


class FileLocks:
    """One `flock` per worker, in a folder beside the database."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def hold(self, worker: str) -> bool:
        if self._held.get(worker) in closed_in_children:
            self.refresh(worker)
            return False
        self._lock(worker)
        return True

    def _lock(self, worker: str) -> None:
        name = _name(worker)
        try:
            with self._folder.opened(create=True) as folder:
                descriptor = self._locked(folder, worker)
        except OSError as error:
            raise StoreUnavailable(
                f"worker {worker} cannot keep its lock file ({error.strerror})",
                hint=f"{self._folder.path / name}: check the permissions of the folder",
            ) from None
        self._release(worker)
        self._held[worker] = descriptor
        closed_in_children.add(descriptor)

    def _locked(self, folder: int, worker: str) -> int:
        """Create a lock file that is locked before it gets its final name.

        It replaces an older lock file that is not locked.

        A file with the final name must be locked at every moment: an unlocked file would prove that the worker is
        dead.
        """
        name, new = _name(worker), f"{worker}.new"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | FILE_FLAGS, 0o600, dir_fd=folder)
        try:
            # If two processes take the same worker id at the same time, only one process gets this lock. The other
            # process finds a locked file: the new file, or the file with the final name.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_locked_in(folder, worker):
                raise BlockingIOError
            if not self._is_lock(descriptor):
                raise OSError(errno.EINVAL, f"{new} in it is not a file of this user")
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BlockingIOError:
            os.close(descriptor)
            raise Conflict(f"worker {worker} is already registered by a live process; every worker needs an id of its own") from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def refresh(self, worker: str) -> None:
        held = self._held.get(worker)
        if held is not None and held in closed_in_children and not _is_file(held, self._folder.path / _name(worker)):
            self._lock(worker)

    def free(self, worker: str) -> None:
        if self._held.get(worker) in closed_in_children:
            self.forget(worker)
        self._release(worker)

    def _release(self, worker: str) -> None:
        descriptor = self._held.pop(worker, None)
        # In a forked child the set is empty, and the descriptor's number may belong to another file. Then do not close
        # the descriptor.
        if descriptor in closed_in_children:
            assert descriptor is not None
            closed_in_children.discard(descriptor)
            os.close(descriptor)

    def keep_until_exit(self, worker: str) -> None:
        self._held.pop(worker, None)  # the descriptor stays open until the kernel closes it

    def is_dead(self, worker: str) -> bool:
        return self._is_locked(worker) is False

    def is_alive(self, worker: str) -> bool:
        return self._is_locked(worker) is True

    def _is_locked(self, worker: str) -> bool | None:
        try:
            with self._folder.opened() as folder:
                return self._is_locked_in(folder, worker)
        except (OSError, StoreUnavailable):
            return None  # there is no folder, or other users can write to the folder: no proof

    def _is_locked_in(self, folder: int, worker: str) -> bool | None:
        try:
            descriptor = os.open(_name(worker), os.O_RDONLY | FILE_FLAGS, dir_fd=folder)
        except OSError:
            return None  # the lock file was removed, or belongs to another user: no proof
        try:
            if not self._is_lock(descriptor):
                return None  # another user created the file, while other users could write to the folder
            # Try a shared lock: with exclusive locks, two processes that ask at the same moment would each take the
            # other for the worker.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # A worker whose lock file was removed locks a new file and then frees the old file. The descriptor may be
            # the old file: then the free lock proves nothing.
            return False if _is_file(descriptor, _name(worker), folder) else None
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    def _is_lock(self, descriptor: int) -> bool:
        status = os.fstat(descriptor)
        return stat.S_ISREG(status.st_mode) and self._folder.is_trusted(status)

    def forget(self, worker: str) -> None:
        self._folder.remove(_name(worker))

    def close(self) -> None:
        for worker in list(self._held):
            self._release(worker)  # the file stays: its free lock proves to other processes that the worker is gone


def _name(worker: str) -> str:
    return f"{check_id(worker, 'worker id')}.lock"


def _is_file(descriptor: int, path: Path | str, folder: int | None = None) -> bool:
    """Is the file at the path still the open file?"""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, dir_fd=folder, follow_symlinks=False))
    except OSError:
        return False


# The descriptors of the worker's locks and bells. A process that a tool forks inherits all descriptors: without this
# set, it would keep a dead worker's lock and bell until it ends.
closed_in_children: set[int] = set()


def _close_in_child() -> None:
    for descriptor in closed_in_children:
        os.close(descriptor)
    closed_in_children.clear()


os.register_at_fork(after_in_child=_close_in_child)
