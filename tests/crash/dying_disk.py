"""A disk under the real SQLite on which a process dies in the middle of a commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import apsw

if TYPE_CHECKING:
    from tests.crash.fate import Fate


class DyingDisk(apsw.VFS):
    """The default from now on. Whoever makes it keeps it: a VFS that nobody holds is gone."""

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
        # A log that begins anew has its header written and synced first, and nothing of the commit is in that.
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
