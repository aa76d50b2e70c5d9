"""A folder that no other user of this machine can write to: workers keep their lock files and bells in it.

A user who can write to the folder could replace the lock file of a live worker: then the worker looks dead, and its
runs are taken over. Such a user could also put a pipe into the folder, which blocks a worker that opens the pipe. So
owner and mode are checked before every use, and all file operations use the descriptor that was checked: the folder
cannot be replaced between the check and the use.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure import shell
from perdure.errors import StoreUnavailable

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a pipe in place of a file must not block the process that opens it.
FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class PrivateFolder:
    """The folder at a path.

    The owner of the folder must be this user, root, or the owner of `journal`, who controls the journal anyway.
    """

    def __init__(self, path: Path, journal: Path | None = None) -> None:
        self.path = path
        self._journal = journal

    def check(self) -> None:
        """Raise StoreUnavailable if the path exists and is not a private folder."""
        try:
            self._require_private(os.lstat(self.path))
        except FileNotFoundError:
            pass

    @contextmanager
    def opened(self, *, create: bool = False) -> Iterator[int]:
        """A descriptor of the folder, for `dir_fd=`.

        StoreUnavailable if the folder is not private, OSError if there is no such folder.
        """
        if create:
            try:
                os.mkdir(self.path, 0o700)
            except FileExistsError:
                pass
        try:
            descriptor = os.open(self.path, _FOLDER)
        except OSError:
            self.check()  # if the path is a link or a file, `check` raises a better error message
            raise
        try:
            self._require_private(os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove the file of that name, if possible."""
        try:
            with self.opened() as folder:
                os.unlink(name, dir_fd=folder)
        except (OSError, StoreUnavailable):
            pass  # if the file stays in the folder, that does no harm

    def strangers(self) -> list[str]:
        """The names in the folder that are not a file or a pipe of a trusted user; for `perdure doctor`."""
        with self.opened() as folder:
            return [name for name in sorted(os.listdir(folder)) if not self._is_known(folder, name)]

    def _is_known(self, folder: int, name: str) -> bool:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return True  # the worker that owns the file has just removed it
        return self.is_trusted(status) and (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode))

    def is_trusted(self, status: os.stat_result) -> bool:
        """Does a file belong to a trusted user: the user of this process, root, or the owner of the journal?"""
        return status.st_uid in (os.geteuid(), 0) or status.st_uid == self._journal_owner()

    def _journal_owner(self) -> int | None:
        try:
            return None if self._journal is None else os.stat(self._journal).st_uid
        except OSError:
            return None

    def _require_private(self, status: os.stat_result) -> None:
        quoted, problem = shell.quote(str(self.path)), None
        if not stat.S_ISDIR(status.st_mode):
            problem = f"is not a folder, and workers keep their lock files in one of that name; move it away: mv {quoted} {quoted}.old"
        elif not self.is_trusted(status):
            problem = (
                f"belongs to another user ({_user(status.st_uid)}), who could make a live worker look dead; workers keep "
                f"their lock files in it, and create it again if it is missing: stop all workers, then rm -r {quoted}"
            )
        elif status.st_mode & _OTHERS_WRITE:
            problem = (
                f"can be written to by other users (mode {stat.S_IMODE(status.st_mode):o}), who could make a live worker "
                f"look dead; only its owner may: chmod 700 {quoted}"
            )
        if problem is not None:
            raise StoreUnavailable("the folder for the workers' lock files cannot be trusted", hint=f"{self.path} {problem}")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
