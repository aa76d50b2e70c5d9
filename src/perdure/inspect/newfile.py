"""A new file for something that was asked for by name: there whole or not at all, and never in the place of another one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from perdure.errors import InvalidInput


def require_new(path: Path) -> None:
    """InvalidInput when there is a file of that name, or no folder for it."""
    if os.path.lexists(path):  # a link that leads nowhere is there too
        raise _taken(path)
    if not path.parent.is_dir():
        raise InvalidInput(f"{path}: there is no folder {path.parent}")


def _taken(path: Path) -> InvalidInput:
    return InvalidInput(f"{path} is there already, and nothing is overwritten: delete it, or choose another name")


@contextmanager
def new_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file that is there whole or not at all; of an export for its owner alone, as the database was that has the same."""
    require_new(path)
    part = path.with_name(f"{path.name}.part-{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = _created(part, path, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _name(part, path, mode)
    finally:
        part.unlink(missing_ok=True)


def _name(part: Path, path: Path, mode: int) -> None:
    """Give the file its name, unless one of that name has come meanwhile, whose place a rename would take."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise _taken(path) from None
    except OSError:
        # Not every file system lets a file have two names. There the name is taken first; a crash after that leaves it with nothing in it.
        os.close(_created(path, path, mode))
        part.replace(path)


def _created(new: Path, meant: Path, mode: int) -> int:
    """A descriptor of a file that was not there; errors name the one that was meant."""
    try:
        return os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise _taken(meant) from None
    except OSError as error:
        raise InvalidInput(f"{meant}: {error.strerror}") from None
