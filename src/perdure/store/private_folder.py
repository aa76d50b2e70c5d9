"""A folder that no other user of this machine can write to: where workers keep their lock files and bells.

A user who can write to it could swap the lock of a live worker, so that it looks dead and its runs are taken over, or plant a pipe
that holds a worker up when it is opened. So owner and mode are checked before every use, and everything is done through the
descriptor that was checked: nothing can be put in its place between the check and the use.
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
# O_NONBLOCK: a pipe in the place of a file would hold up whoever opens it.
FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class PrivateFolder:
    """The folder at a path. Besides this user and root it may belong to the owner of `journal`, who can change all of that anyway."""

    def __init__(self, path: Path, journal: Path | None = None) -> None:
        self.path = path
        self._journal = journal

    def check(self) -> None:
        """Raise StoreUnavailable when something is there and it is not private."""
        try:
            self._require_private(os.lstat(self.path))
        except FileNotFoundError:
            pass

    @contextmanager
    def opened(self, *, create: bool = False) -> Iterator[int]:
        """A descriptor of the folder, for `dir_fd=`. StoreUnavailable when it is not private, OSError when there is none."""
        if create:
            try:
                os.mkdir(self.path, 0o700)
            except FileExistsError:
                pass
        try:
            descriptor = os.open(self.path, _FOLDER)
        except OSError:
            self.check()  # a link, or a file: say so
            raise
        try:
            self._require_private(os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove the file of that name, where that can be done."""
        try:
            with self.opened() as folder:
                os.unlink(name, dir_fd=folder)
        except (OSError, StoreUnavailable):
            pass  # what is left behind proves nothing to anybody

    def strangers(self) -> list[str]:
        """The names in it that are no file and no pipe of a user who may be believed; for `doctor`."""
        with self.opened() as folder:
            return [name for name in sorted(os.listdir(folder)) if not self._is_known(folder, name)]

    def _is_known(self, folder: int, name: str) -> bool:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return True  # its worker has left meanwhile
        return self.is_trusted(status) and (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode))

    def is_trusted(self, status: os.stat_result) -> bool:
        """Whether a file belongs to a user who may be believed: this one, root, or the owner of the journal."""
        return status.st_uid in (os.geteuid(), 0) or status.st_uid == self._journal_owner()

    def _journal_owner(self) -> int | None:
        try:
            return None if self._journal is None else os.stat(self._journal).st_uid
        except OSError:
            return None

    def _require_private(self, status: os.stat_result) -> None:
        quoted = shell.quote(str(self.path))
        if not stat.S_ISDIR(status.st_mode):
            raise StoreUnavailable(
                f"{self.path} is not a folder, and workers keep their lock files in one of that name; move it away: mv {quoted} {quoted}.old"
            )
        if not self.is_trusted(status):
            raise StoreUnavailable(
                f"{self.path} belongs to another user ({_user(status.st_uid)}), who could make a live worker look dead; workers keep "
                f"their lock files in it, and make it anew once it is gone: stop all workers, then rm -r {quoted}"
            )
        if status.st_mode & _OTHERS_WRITE:
            raise StoreUnavailable(
                f"{self.path} can be written to by other users (mode {stat.S_IMODE(status.st_mode):o}), who could make a live worker "
                f"look dead; only its owner may: chmod 700 {quoted}"
            )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
