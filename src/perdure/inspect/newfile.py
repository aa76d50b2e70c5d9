"""A new file with a name that the user chose. The file appears complete or not at all, and replaces no other file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from perdure.errors import InvalidInput


def require_new(path: Path) -> None:
    """InvalidInput if a file with this name exists already, or if its folder does not exist."""
    if os.path.lexists(path):  # lexists: a symlink to a missing file counts as a file too
        raise _taken(path)
    if not path.parent.is_dir():
        raise InvalidInput(f"{path}: there is no folder {path.parent}")


def _taken(path: Path) -> InvalidInput:
    return InvalidInput(f"{path} is there already, and nothing is overwritten: delete it, or choose another name")


@contextmanager
def new_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Write a file that appears complete or not at all. By default only its owner can read it, like the database."""
    require_new(path)
    part = path.with_name(f"{path.name}.part-{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = _created(part, path, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        give_name(part, path, mode)
    finally:
        part.unlink(missing_ok=True)


def give_name(part: Path, path: Path, mode: int = 0o600) -> None:
    """Give the file its name. If another file has the name by now, os.link fails; a rename would replace that file."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise _taken(path) from None
    except OSError:
        # This file system may have no hard links. So create an empty file with the name first, and then replace it. A
        # crash between these two lines leaves the empty file.
        os.close(_created(path, path, mode))
        part.replace(path)


def _created(new: Path, meant: Path, mode: int) -> int:
    """Create and open the file `new`, which must not exist. An error message names the file `meant`."""
    try:
        return os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise _taken(meant) from None
    except OSError as error:
        raise InvalidInput(f"{meant}: {error.strerror}") from None
