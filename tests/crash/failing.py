"""A disk under the real SQLite whose fsync fails when the test wants it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import apsw
from tests.crash import fate
from tests.crash.ledger import Ledger


class FailingDisk(apsw.VFS):
    """As long as the file `trouble` has characters left, a sync of the log eats one and fails."""

    def __init__(self, trouble: str, skip_sync: bool, die_after: bool) -> None:
        self.trouble = Path(trouble)
        self.skip_sync = skip_sync  # else the data is on the disk, and the error is a lie
        self.die_after = die_after  # when the next connection is opened
        self.failed = False
        self.opened = 0
        super().__init__("failing", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: Any) -> apsw.VFSFile:
        if self.failed and self.die_after:
            fate.die()
        return _FailingFile(self, name, flags)


class _FailingFile(apsw.VFSFile):
    def __init__(self, disk: FailingDisk, name: Any, flags: Any) -> None:
        super().__init__("unix", name, flags)
        disk.opened += 1
        self._disk = disk
        self._number = disk.opened
        self._is_log = bool(flags[0] & apsw.SQLITE_OPEN_WAL)

    def xSync(self, flags: int) -> None:
        disk = self._disk
        left = disk.trouble.read_text() if self._is_log and disk.trouble.exists() else ""
        if not left or not disk.skip_sync:
            super().xSync(flags)
        if not left:
            return
        if left[1:]:
            disk.trouble.write_text(left[1:])
        else:
            os.unlink(disk.trouble)
        disk.failed = True
        Ledger.here().note("sync failed", "log", connection=self._number)
        raise apsw.IOError("fsync failed, as ordered")
