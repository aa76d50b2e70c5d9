"""Who is alive: each worker holds a lock on a small file of its own, and the kernel frees it at the worker's death.

A clock can only suspect that a worker is dead. A lock that has become free proves it, at once, and whatever the clock says. A lock
file that is missing, not ours to open, no regular file, or of another user proves nothing: then the lease decides.
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
        """Be alive from now on, until `free` or death; False when it was alive here already."""

    def refresh(self, worker: str) -> None:
        """Take the lock again if somebody has removed what it was held on."""

    def free(self, worker: str) -> None:
        """Be alive no longer."""

    def cling(self, worker: str) -> None:
        """Be alive until this process ends, also when everything is closed: what it has begun may still run here."""

    def is_dead(self, worker: str) -> bool:
        """Whether it is proven that the worker's process is gone; asking does not disturb it."""

    def is_alive(self, worker: str) -> bool:
        """Whether it is proven that the worker's process is there; it may stand still."""

    def forget(self, worker: str) -> None:
        """Remove what a dead worker has left behind."""

    def close(self) -> None:
        """Whoever is still alive here counts as dead from now on."""


class InProcess:
    """For a database in memory: its workers live in this process, and as long as it does."""

    def __init__(self) -> None:
        self._alive: set[str] = set()

    def hold(self, worker: str) -> bool:
        known = worker in self._alive
        self._alive.add(worker)
        return not known

    def refresh(self, worker: str) -> None:
        """Nothing to remove."""

    def free(self, worker: str) -> None:
        self._alive.discard(worker)

    def cling(self, worker: str) -> None:
        """Its database ends with it."""

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
                f"worker {worker} cannot keep its lock file {self._folder.path / name} ({error.strerror}); check the permissions of the folder"
            ) from None
        self._release(worker)
        self._held[worker] = descriptor
        closed_in_children.add(descriptor)

    def _locked(self, folder: int, worker: str) -> int:
        """A new lock file that is locked before it gets its name; it replaces whatever has that name and is nobody's lock.

        The crash window: a file of that name that is not locked, even for a moment, proves the death of a worker that lives.
        """
        name, new = _name(worker), f"{worker}.new"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | FILE_FLAGS, 0o600, dir_fd=folder)
        try:
            # Of two processes that take the same id at once, one gets this lock; the other finds it locked, here or under its name.
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
        # In a forked child the set is empty and the number may belong to another file by now: hands off.
        if descriptor in closed_in_children:
            assert descriptor is not None
            closed_in_children.discard(descriptor)
            os.close(descriptor)

    def cling(self, worker: str) -> None:
        self._held.pop(worker, None)  # open from now on, and nobody's to close: the kernel does

    def is_dead(self, worker: str) -> bool:
        return self._is_locked(worker) is False

    def is_alive(self, worker: str) -> bool:
        return self._is_locked(worker) is True

    def _is_locked(self, worker: str) -> bool | None:
        try:
            with self._folder.opened() as folder:
                return self._is_locked_in(folder, worker)
        except (OSError, StoreUnavailable):
            return None  # there is no folder, or others can write to it: no proof

    def _is_locked_in(self, folder: int, worker: str) -> bool | None:
        try:
            descriptor = os.open(_name(worker), os.O_RDONLY | FILE_FLAGS, dir_fd=folder)
        except OSError:
            return None  # somebody has removed it, or it is another user's: no proof
        try:
            if not self._is_lock(descriptor):
                return None  # another user has put it there, while the folder was open to others
            # Shared: two processes that ask at the same moment do not take each other for the worker.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # A worker whose lock file was removed locks a new one and then lets go of the old one, which may be what we have opened.
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
            self._release(worker)  # the file stays: its lock is what proves to others that nobody is there any more


def _name(worker: str) -> str:
    return f"{check_id(worker, 'worker id')}.lock"


def _is_file(descriptor: int, path: Path | str, folder: int | None = None) -> bool:
    """Whether the path still leads to the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, dir_fd=folder, follow_symlinks=False))
    except OSError:
        return False


# A child that a tool forks inherits our descriptors: it would keep a dead worker's lock and doorbell alive for as long as it runs.
closed_in_children: set[int] = set()


def _close_in_child() -> None:
    for descriptor in closed_in_children:
        os.close(descriptor)
    closed_in_children.clear()


os.register_at_fork(after_in_child=_close_in_child)
