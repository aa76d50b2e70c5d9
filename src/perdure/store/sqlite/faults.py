"""What SQLite says, in our words: one line that names the thing, the rule and the way out. No apsw error leaves this package."""

from __future__ import annotations

import errno
import os

import apsw

from perdure.errors import StoreCorrupt, StoreError, StoreUnavailable

_UNUSABLE = (apsw.CorruptError, apsw.NotADBError, apsw.FormatError)
_NO_ACCESS = (apsw.ReadOnlyError, apsw.CantOpenError, apsw.PermissionsError)
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
TOO_MANY_FILES = "this process or machine has too many open files; close some, or raise the limit (ulimit -n) and try again"
_FILES_OF_A_STORE = 8  # two connections with a database, a log and shared memory each, closed again by the time we ask; and the folder


def translated(error: apsw.Error, where: str) -> StoreError:
    """The StoreError that tells a caller what to do about it; which type it is says whether trying again makes sense."""
    match error:
        case apsw.BusyError() | apsw.LockedError():
            return StoreUnavailable(
                f"{where} is locked by another process; nothing was written: try again, or find who keeps a transaction open"
            )
        case apsw.FullError():
            return StoreUnavailable(f"{where}: disk full; nothing was written: make room and try again")
        case apsw.IOError():
            return StoreUnavailable(
                f"{where}: the disk reported an error ({error}); nothing was acknowledged: check the disk and try again"
            )
        case apsw.NotADBError():
            return StoreCorrupt(f"{where} is not a SQLite database; choose another file, or restore this one from a backup")
        case _ if isinstance(error, _UNUSABLE):
            return StoreCorrupt(f"{where} is damaged ({error}); do not write to it: restore a backup, or try the sqlite3 shell's .recover")
        case _ if isinstance(error, _NO_ACCESS) and _out_of_files():
            return StoreUnavailable(f"{where} cannot be opened: {TOO_MANY_FILES}")
        case _ if isinstance(error, _NO_ACCESS):
            return StoreUnavailable(f"{where} cannot be opened for writing ({error}); check the permissions of the file and of its folder")
        case apsw.ConnectionClosedError():
            return StoreError(f"{where} has been closed by this process; open the store again")
        case _:
            return StoreError(f"{where}: {error}")


def _out_of_files() -> bool:
    """Whether a database could not be opened for want of descriptors: SQLite says "cannot open" to that as to everything else."""
    taken: list[int] = []
    try:
        for _ in range(_FILES_OF_A_STORE):
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401 – those before a failure must be closed
    except OSError as error:
        return error.errno in OUT_OF_FILES
    finally:
        for descriptor in taken:
            os.close(descriptor)
    return False
