"""Which workers are alive? Lock files show this on the same machine, session locks in the database on other machines.

A lock file proves a death on this machine only. A session lock is never a proof: a connection may be gone because its
process is dead, or because the network is down. So a missing session lock only counts as silence, and only after some
seconds in which the worker could have come back.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from perdure.errors import StoreUnavailable
from perdure.store.liveness import FileLocks
from perdure.store.postgres.bell import NotifyBell
from perdure.store.private_folder import PrivateFolder

log = logging.getLogger("perdure.store")


class MachineLocks:
    """The lock files of this machine's workers for one database, and the session locks that other machines see."""

    def __init__(self, bell: NotifyBell, database: str) -> None:
        self._bell = bell
        name = hashlib.sha256(database.encode()).hexdigest()[:16]
        self._folder = Path(tempfile.gettempdir()) / f"perdure-{os.getuid()}-{name}"
        self._files = FileLocks(PrivateFolder(self._folder))
        self._held: set[str] = set()

    def hold(self, worker: str) -> bool:
        newly = worker not in self._held
        if newly:
            try:
                self._hold_file(worker)
                self._held.add(worker)
            except StoreUnavailable as error:
                # Without the lock file, the death of this worker is noticed later: when its lease runs out.
                log.warning("%s", error.in_full())
        self._bell.hold(worker)
        return newly

    def _hold_file(self, worker: str) -> None:
        try:
            self._files.hold(worker)
        except StoreUnavailable:
            self._files.hold(worker)  # retry: another process may have just removed the empty folder

    def refresh(self, worker: str) -> None:
        if worker in self._held:
            try:
                self._files.refresh(worker)
            except StoreUnavailable as error:
                self._held.discard(worker)
                log.warning("%s", error.in_full())  # as in `hold`; the worker's heartbeat still goes to the database

    def free(self, worker: str) -> None:
        self._bell.free(worker)
        if worker in self._held:
            self._held.discard(worker)
            self._files.free(worker)

    def keep_until_exit(self, worker: str) -> None:
        self._held.discard(worker)
        self._files.keep_until_exit(worker)

    def is_dead(self, worker: str) -> bool:
        return self._files.is_dead(worker)

    def is_alive(self, worker: str) -> bool:
        return self._files.is_alive(worker)

    def forget(self, worker: str) -> None:
        self._files.forget(worker)

    def close(self) -> None:
        self._files.close()
        try:
            self._folder.rmdir()  # succeeds only if no lock file is left
        except OSError:
            pass
