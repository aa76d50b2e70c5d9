"""Whose database a file is, found out without a lock, a log or a byte changed.

Only the file's header is read, and through SQLite's own file layer: closing a descriptor of ours would drop the locks of whoever has
the database open in this process. Not through a connection: reading past the log, as one would have to that must not touch it, a
sound journal looks damaged for as long as a checkpoint is under way, and for ever after one that was killed.
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
_FIRST_TABLE = b"CREATE TABLE perdure_schema"  # as SQLite writes down the first table that every journal gets
_CHUNK = 1 << 20


def require_journal(path: Path) -> None:
    """Raise StoreCorrupt unless there is a journal in the file; it is left alone either way."""
    if not holds_journal(path):
        raise StoreCorrupt(
            f"{path} has no perdure journal in it and was left alone; name the right file with --url or PERDURE_URL, "
            "or let `perdure run` make a journal in it"
        )


def holds_journal(path: Path) -> bool:
    """Whether there is a journal in the file; StoreCorrupt when it is no database at all, or that of another program."""
    check_place(path)
    try:
        header = _header(path)
    except apsw.Error as error:
        raise translated(error, str(path)) from None
    owner = int.from_bytes(header[_APPLICATION_ID], "big")
    if owner not in (0, APPLICATION_ID):
        raise StoreCorrupt(
            f"{path} belongs to another program (application id {owner:#x}) and was left alone; name another file with --url or PERDURE_URL"
        )
    return owner == APPLICATION_ID or _is_announced(path.with_name(f"{path.name}-wal"))


def _header(path: Path) -> bytes:
    """The first bytes of the database; empty when it has none yet."""
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
    """Whether the log makes a journal: nobody has moved it to the file yet, and if its maker was killed nobody may have for long.

    No lock ever lies on the log, so that a descriptor of ours does no harm here.
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
