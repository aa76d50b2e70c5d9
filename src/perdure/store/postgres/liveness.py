"""Who is alive, over several machines. A lock file proves a death on this machine only; elsewhere the database has to tell.

What it tells is never a proof: a connection that is gone may be a process that is gone, or a cable. So it counts as silence, and only
after some seconds in which the worker could have come back.
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
    """The lock files of this machine's workers for one database, and the session locks that others see."""

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
                # Nothing is lost but time: that this worker has died is noticed when its lease runs out.
                log.warning("%s", error)
        self._bell.hold(worker)
        return newly

    def _hold_file(self, worker: str) -> None:
        try:
            self._files.hold(worker)
        except StoreUnavailable:
            self._files.hold(worker)  # another process may have left meanwhile, and removed the folder as the last one

    def refresh(self, worker: str) -> None:
        if worker in self._held:
            try:
                self._files.refresh(worker)
            except StoreUnavailable as error:
                self._held.discard(worker)
                log.warning("%s", error)  # as above: its sign of life goes to the database all the same

    def free(self, worker: str) -> None:
        self._bell.free(worker)
        if worker in self._held:
            self._held.discard(worker)
            self._files.free(worker)

    def cling(self, worker: str) -> None:
        self._held.discard(worker)
        self._files.cling(worker)

    def is_dead(self, worker: str) -> bool:
        return self._files.is_dead(worker)

    def is_alive(self, worker: str) -> bool:
        return self._files.is_alive(worker)

    def forget(self, worker: str) -> None:
        self._files.forget(worker)

    def close(self) -> None:
        self._files.close()
        try:
            self._folder.rmdir()  # the last one; where somebody's lock file still lies, it stays
        except OSError:
            pass
