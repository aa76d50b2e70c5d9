"""Checks, before SQLite opens a path, whether a journal can be there, so that every error can say what to do."""

from __future__ import annotations

import os
import re
from pathlib import Path

from perdure import shell
from perdure.errors import StoreUnavailable
from perdure.store.descriptors import OUT_OF_FILES, TOO_MANY_FILES
from perdure.store.private_folder import PrivateFolder
from perdure.store.sqlite.guard import opening

_OCTAL = re.compile(r"\\([0-7]{3})")
# File systems whose locks or shared memory do not work between machines; WAL needs both.
NETWORK_FILE_SYSTEMS = frozenset(("nfs", "nfs4", "cifs", "smb", "smbfs", "smb3", "9p", "fuse.sshfs"))


def check_place(path: Path, mounts: str | None = None) -> None:
    """Raise StoreUnavailable if there can be no journal at this path."""
    folder = path.parent
    if not folder.is_dir():
        raise StoreUnavailable("has no folder to be in", where=str(path), hint=f"create it first: mkdir -p {shell.quote(str(folder))}")
    if path.is_dir():
        raise StoreUnavailable("is a folder, and a journal is a file; give the name of a file in it", where=str(path))
    if path.exists() and not path.is_file():
        raise StoreUnavailable("is not a regular file, and a journal is one; give the name of a file on a disk", where=str(path))
    kind = file_system_of(folder, _mounts() if mounts is None else mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreUnavailable(
            f"lies on a network file system ({kind}), where SQLite's locks do not hold; use a local disk or postgresql://", where=str(path)
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreUnavailable(
            "lies in a folder that is not writable, and SQLite keeps its log beside it; change the permissions of the folder",
            where=str(path),
        )
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise StoreUnavailable("is read-only for this user; change its permissions or open it as its owner", where=str(path))
    workers_folder(path).check()


def workers_folder(path: Path) -> PrivateFolder:
    """The folder in which the workers of this journal keep their lock files and bells."""
    return PrivateFolder(path.with_name(f"{path.name}-workers"), journal=path)


def create_private(path: Path) -> None:
    """Create the file, with access for its owner only, unless it exists. SQLite's log gets the same permissions."""
    # With O_EXCL, no existing file is opened: if this process already uses the database, to close a second descriptor
    # would drop SQLite's locks.
    with opening:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                raise StoreUnavailable(f"cannot be created: {TOO_MANY_FILES}", where=str(path)) from None
            raise StoreUnavailable(
                f"cannot be created ({error.strerror}); choose another place or change the folder's permissions", where=str(path)
            ) from None


def file_system_of(folder: Path, mounts: str) -> str:
    """The type of the folder's file system, from the text of /proc/mounts; empty if the text does not list it."""
    found, longest, folder = "", -1, folder.resolve()
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = _OCTAL.sub(lambda escape: chr(int(escape[1], 8)), fields[1])  # \040 is a space
        # Use >=, because if there are two mounts on one point, the later mount is visible.
        if folder.is_relative_to(point) and len(point) >= longest:
            found, longest = fields[2], len(point)
    return found


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""  # the system is not Linux, or the file is hidden: the type of the file system is unknown
