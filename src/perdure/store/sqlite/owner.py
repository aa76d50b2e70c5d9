"""Finds out to which program a database file belongs, without taking a lock, creating a log, or changing a byte.

Only the file's header is read, through SQLite's own file layer. Python must not open the file itself: to close the
file would drop the locks of this process's other connections to the file. A SQLite connection cannot be used either:
to leave the log unchanged, it would have to ignore the log. But without the log, a journal looks damaged during a
checkpoint, and also after a kill during a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import apsw

from perdure.errors import StoreCorrupt
from perdure.store.sqlite.faults import translated
from perdure.store.sqlite.migrate import APPLICATION_ID
from perdure.store.sqlite.place import check_place

_FLAGS = apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY
_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_APPLICATION_ID = slice(68, 72)
_FIRST_TABLE = b"CREATE TABLE perdure_schema"  # how SQLite stores the definition of a journal's first table
_CHUNK = 1 << 20


def require_journal(path: Path) -> None:
    """Raise StoreCorrupt unless there is a journal in the file. The file is not changed."""
    if not holds_journal(path):
        raise StoreCorrupt(
            "has no perdure journal in it and was left alone",
            where=str(path),
            hint="name the right file with --url or PERDURE_URL, or let `perdure migrate` make a journal in it",
        )


def holds_journal(path: Path) -> bool:
    """Is there a journal in the file? StoreCorrupt if the file is not a database, or belongs to another program."""
    check_place(path)
    try:
        header = _header(path)
    except apsw.Error as error:
        raise translated(error, str(path)) from None
    owner = int.from_bytes(header[_APPLICATION_ID], "big")
    if owner not in (0, APPLICATION_ID):
        raise StoreCorrupt(
            f"belongs to another program (application id {owner:#x}) and was left alone",
            where=str(path),
            hint="name another file with --url or PERDURE_URL",
        )
    return owner == APPLICATION_ID or _is_announced(path.with_name(f"{path.name}-wal"))


def _header(path: Path) -> bytes:
    """The first bytes of the database; empty if the file is empty."""
    file = apsw.VFSFile("", str(path), [_FLAGS, 0])
    try:
        if file.xFileSize() == 0:
            return b""
        header = file.xRead(_HEADER_BYTES, 0)
    finally:
        file.xClose()
    if not header.startswith(_MAGIC):
        raise apsw.NotADBError
    return header


def _is_announced(log: Path) -> bool:
    """Does the log create a journal?

    The log may not have been moved into the file yet. If the process that wrote it was killed, this can take long.

    SQLite takes no lock on the log, so Python may open and close the log without harm.
    """
    try:
        with log.open("rb") as file:
            tail = b""
            while chunk := file.read(_CHUNK):
                if _FIRST_TABLE in tail + chunk:
                    return True
                tail = chunk[-len(_FIRST_TABLE) :]
    except FileNotFoundError:
        pass
    return False
