"""A disk under the real SQLite on which a process dies in the middle of a commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import apsw

if TYPE_CHECKING:
    from tests.crash.fate import Fate


class DyingDisk(apsw.VFS):
    """The default VFS from now on. The caller keeps a reference: a VFS without a reference is gone."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        super().__init__("dying", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: Any) -> apsw.VFSFile:
        return _DyingFile(self.fate, name, flags)


class _DyingFile(apsw.VFSFile):
    def __init__(self, fate: Fate, name: Any, flags: Any) -> None:
        super().__init__("unix", name, flags)
        self._fate = fate
        self._is_log = bool(flags[0] & apsw.SQLITE_OPEN_WAL)
        self._at_header = False

    def xWrite(self, data: Any, offset: int) -> None:
        self._fate.meet("disk", "op")
        # The header of a new log is written and synced first, and contains nothing of the commit.
        self._at_header = offset == 0
        if self._counts and self._fate.is_due("half"):
            super().xWrite(data[: len(data) // 2], offset)
            self._fate.strike()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._fate.meet("disk", "op")
        if self._counts and self._fate.is_due("handed"):
            self._fate.strike()
        super().xSync(flags)
        if self._counts and self._fate.is_due("kept"):
            self._fate.strike()

    @property
    def _counts(self) -> bool:
        return self._is_log and not self._at_header
