"""What other users of this machine could have changed: files, folders, and what would be imported from them."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from functools import cache
from importlib.machinery import all_suffixes
from pathlib import Path

_ROOT = 0
_SUFFIXES = tuple(all_suffixes())


def changed_by_others(file: Path, top: Path) -> str | None:
    """How another user could change what runs when the file is imported, in words; None when only this user and root can.

    `top` is the folder that goes on sys.path: every module in it can be imported. Both paths are without links.
    """
    for folder in file.parents:
        found = folder.stat()
        if found.st_uid not in (os.geteuid(), _ROOT):
            return f"{folder} belongs to another user"
        # In a sticky folder only the owner of an entry can rename or remove it. Anybody can add one: that matters where we import from.
        if _others_write(folder, found) and (folder.is_relative_to(top) or not found.st_mode & stat.S_ISVTX):
            return f"other users can write to {folder}"
    for path in _importable(top):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue  # a link that leads nowhere, or gone meanwhile
        if found.st_uid not in (os.geteuid(), _ROOT):
            return f"{path}, which it can import, belongs to another user"
        if _others_write(path, found):
            return f"other users can write to {path}, which it can import" if path != file else f"other users can write to {path}"
    return None


def _others_write(path: Path, found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and (not _is_private_group(found.st_gid) or _has_access_list(path))


@cache
def _is_private_group(gid: int) -> bool:
    """Whether this user is the group's only member: with a umask of 002, as many systems have it, every file can be written by such a group."""
    try:
        own = pwd.getpwuid(os.geteuid()).pw_name
        members = grp.getgrgid(gid).gr_mem
    except KeyError:
        return False  # not listed here: then nobody can say who is in it
    return all(name == own for name in members) and all(
        user.pw_uid in (os.geteuid(), _ROOT) for user in pwd.getpwall() if user.pw_gid == gid
    )


def _has_access_list(path: Path) -> bool:
    """Whether the file has an access control list: what looks like the rights of the group may be those of other users then."""
    if not hasattr(os, "getxattr"):
        return False
    try:
        os.getxattr(path, "system.posix_acl_access")
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.ENOTSUP)
    return True


def _importable(top: Path, seen: set[Path] | None = None) -> list[Path]:
    """Every module and package below the folder, and the folders of compiled modules.

    A folder that holds a module, however deep, is a package, with an __init__.py or (a namespace package) without one.
    """
    seen = {top.resolve()} if seen is None else seen
    found: list[Path] = []
    try:
        entries = list(os.scandir(top))
    except PermissionError:
        return []  # this user cannot list it, and has hardly put anything there
    for entry in entries:
        path = Path(entry.path)
        if not entry.is_dir():
            found += [path] if entry.name.endswith(_SUFFIXES) else []
        elif (entry.name.isidentifier() or entry.name == "__pycache__") and path.resolve() not in seen:
            seen.add(path.resolve())
            inside = _importable(path, seen)
            found += [path, *inside] if inside or entry.name == "__pycache__" else []
    return found
