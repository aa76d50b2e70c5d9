"""The checks of `perdure doctor` for a SQLite journal: the library, the file, its WAL, its disk, its integrity."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from perdure import shell
from perdure.cli import common
from perdure.cli.migrate import sqlite_version
from perdure.engine.api import Reading
from perdure.errors import PerdureError, StoreUnavailable
from perdure.inspect.health import Check
from perdure.inspect.text import size
from perdure.settings import Settings
from perdure.store.open import sqlite_path
from perdure.store.sqlite.connect import connect_file
from perdure.store.sqlite.faults import translated
from perdure.store.sqlite.migrate import MIGRATIONS
from perdure.store.sqlite.owner import require_journal
from perdure.store.sqlite.place import workers_folder

LARGE_LOG = 256 << 20
LITTLE_SPACE, NO_SPACE = 1 << 30, 50 << 20
SAFE_SQLITE = (3, 51, 3)  # before this version, two processes that write can corrupt the WAL


def file_checks(settings: Settings, inside: Callable[[Reading], Iterator[Check]]) -> Iterator[Check]:
    """The checks of the library, the file and its journal. `inside` yields the checks for every kind of database."""
    yield _sqlite()
    path = sqlite_path(settings.url)
    if path is None:
        yield Check("database", "ok", f"{settings.url}: in memory, gone with its process")
        return
    if not path.exists():
        yield Check("database", "warn", f"there is no file {path} yet", "perdure run creates it; --url or PERDURE_URL names another")
        return
    yield from _file(path)
    folder = _workers_folder(path)
    yield folder
    if folder.verdict == "FAIL":
        return  # every verb refuses this journal
    try:
        yield from _database(settings, path, inside)
    except PerdureError as error:
        yield Check("database", "FAIL", error.in_full(), "correct this first; nothing else can be checked before")


def _sqlite() -> Check:
    version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")) < SAFE_SQLITE:
        return Check("sqlite", "FAIL", f"{version} can corrupt a journal that two processes write", "pip install --upgrade apsw")
    return Check("sqlite", "ok", f"{version}, apsw {apsw.apsw_version()}")


# -- the file ---------------------------------------------------------------------------------------------------------
def _file(path: Path) -> Iterator[Check]:
    found = path.stat()
    log = path.with_name(path.name + "-wal")
    log_size = log.stat().st_size if log.exists() else 0
    yield Check("file", "ok", f"{path}: {size(found.st_size)}")
    if log_size > LARGE_LOG:
        yield Check("log", "warn", f"{log} has {size(log_size)}", "a reader prevents its clean-up: find the process that reads for so long")
    else:
        yield Check("log", "ok", size(log_size))
    if found.st_mode & 0o077:
        yield Check(
            "permissions", "warn", f"others may read or write {path} ({found.st_mode & 0o777:o})", f"chmod 600 {shell.quote(str(path))}"
        )
    else:
        yield Check(
            "permissions", "ok", f"{found.st_mode & 0o777:o}" + ("" if found.st_uid == os.geteuid() else ", a file of another user")
        )
    yield _space(path.parent)


def _workers_folder(path: Path) -> Check:
    """Can other users change the lock files? A lock file decides if its worker counts as alive or dead."""
    folder = workers_folder(path)
    try:
        folder.check()
        strangers = folder.strangers()
    except StoreUnavailable as error:
        return Check("locks", "FAIL", error.in_full(), "correct this first; nothing else can be checked before")
    except FileNotFoundError:
        return Check("locks", "ok", f"{folder.path} does not exist yet; the first worker creates it")
    except OSError as error:
        return Check("locks", "ok", f"{folder.path} is closed to this user ({error.strerror})")
    if strangers:
        some = ", ".join(strangers[:5])
        way_out = f"workers ignore them; find out who put them there, then: cd {shell.quote(str(folder.path))} && rm -- {' '.join(map(shell.quote, strangers[:5]))}"
        return Check("locks", "warn", f"{folder.path} has files that none of your workers made: {some}", way_out)
    return Check("locks", "ok", f"{folder.path}: no other user can write to it")


def _space(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    if free < NO_SPACE:
        return Check("disk", "FAIL", f"{size(free)} free in {folder}", "free space: when the disk is full, runs stop, and lose nothing")
    if free < LITTLE_SPACE:
        return Check("disk", "warn", f"{size(free)} free in {folder}", "free space soon: runs stop when the disk is full")
    return Check("disk", "ok", f"{size(free)} free")


# -- the database -----------------------------------------------------------------------------------------------------
def _database(settings: Settings, path: Path, inside: Callable[[Reading], Iterator[Check]]) -> Iterator[Check]:
    require_journal(path)
    version, latest = sqlite_version(path), len(MIGRATIONS)
    behind = version < latest
    yield Check("schema", "warn" if behind else "ok", f"version {version} of {latest}", "perdure migrate" if behind else None)
    yield _integrity(path, settings.synchronous)
    with common.existing_runs(settings.url) as store:
        yield from _pragmas(store.facts())
        yield from inside(store)


def _integrity(path: Path, synchronous: str) -> Check:
    try:
        connection = connect_file(path, synchronous, busy_s=5.0)
        try:
            found = connection.pragma("quick_check")
        finally:
            connection.close()
    except apsw.Error as error:
        raise translated(error, str(path)) from None
    if found == "ok":
        return Check("integrity", "ok", "the database is sound; perdure verify checks the journals in it")
    return Check("integrity", "FAIL", str(found)[:300], "stop the workers, copy the file with its -wal, and restore a backup")


def _pragmas(facts: dict[str, str]) -> Iterator[Check]:
    mode, synchronous = facts["journal_mode"], facts["synchronous"]
    changed = "something else has changed the database: restore a backup"
    yield Check("journal_mode", "ok", mode) if mode == "wal" else Check("journal_mode", "FAIL", f"{mode}, not wal", changed)
    match synchronous:
        case "2":
            yield Check("synchronous", "ok", "full: survives a power loss")
        case "1":
            yield Check("synchronous", "warn", "normal: survives a killed process, not a power loss", "set synchronous to full")
        case other:
            yield Check("synchronous", "FAIL", f"{other}: survives nothing", changed)
