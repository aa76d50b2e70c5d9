"""Translates SQLite's errors into errors of perdure: one line that says what happened, why, and what to do.

No error of apsw leaves this package.
"""

from __future__ import annotations

import apsw

from perdure.errors import StoreCorrupt, StoreError, StoreUnavailable
from perdure.store.descriptors import TOO_MANY_FILES, are_used_up

_UNUSABLE = (apsw.CorruptError, apsw.NotADBError, apsw.FormatError)
_NO_ACCESS = (apsw.ReadOnlyError, apsw.CantOpenError, apsw.PermissionsError)
# How many files a store may have open: two connections, each with a database, a log and shared memory; and the folder.
_FILES_OF_A_STORE = 8


def translated(error: apsw.Error, where: str) -> StoreError:
    """The StoreError that tells the caller what to do. The type of the error says whether a retry makes sense."""
    match error:
        case apsw.BusyError() | apsw.LockedError():
            return StoreUnavailable(
                "is locked by another process; nothing was written: try again, or find who keeps a transaction open", where=where
            )
        case apsw.FullError():
            return StoreUnavailable("cannot be written: disk full; nothing was written: make room and try again", where=where)
        case apsw.IOError() if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHORT_READ:
            # The end of the file is missing, as after a power loss on a disk that had not synced. Another try would
            # fail in the same way. SQLite raises this error only if the missing page is part of a long value, because
            # it reads such pages without its cache. For other missing pages SQLite says that the file is malformed.
            return StoreCorrupt("is damaged (its last pages are missing); do not write to it: restore a backup", where=where)
        case apsw.IOError():
            return StoreUnavailable(
                f"cannot be used: the disk reported an error ({error}); nothing was acknowledged: check the disk and try again", where=where
            )
        case apsw.NotADBError():
            return StoreCorrupt("is not a SQLite database; choose another file, or restore this one from a backup", where=where)
        case _ if isinstance(error, _UNUSABLE):
            return StoreCorrupt(
                f"is damaged ({error}); do not write to it: restore a backup, or try the sqlite3 shell's .recover", where=where
            )
        case _ if isinstance(error, _NO_ACCESS) and are_used_up(_FILES_OF_A_STORE):
            return StoreUnavailable(f"cannot be opened: {TOO_MANY_FILES}", where=where)
        case _ if isinstance(error, _NO_ACCESS):
            return StoreUnavailable(
                f"cannot be opened for writing ({error}); check the permissions of the file and of its folder", where=where
            )
        case apsw.ConnectionClosedError():
            return StoreError("has been closed by this process; open the store again", where=where)
        case _:
            return StoreError(f"cannot be used: {error}", where=where)


def not_text(where: str) -> StoreCorrupt:
    """The error for text that is not UTF-8. perdure never writes such text, so the file is damaged."""
    return StoreCorrupt("is damaged (it has text that is not UTF-8); do not write to it: restore a backup", where=where)
