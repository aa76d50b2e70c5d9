"""`perdure doctor`: the database, its file, the workers, the runs and this machine, each with a verdict and the way out."""

from __future__ import annotations

import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import apsw
import click
import msgspec

from perdure.cli import common
from perdure.cli.migrate import schema_version
from perdure.cli.serving import gap, unserved
from perdure.core.keys import undone_by
from perdure.errors import InvalidInput, PerdureError
from perdure.inspect.health import Check, check_guards, check_runs
from perdure.inspect.view import all_rows
from perdure.inspect.words import plural, size
from perdure.settings import Settings
from perdure.store.api import FINISHED, Filter, Status, Store
from perdure.store.open import sqlite_path
from perdure.store.sqlite.connect import connect_file
from perdure.store.sqlite.faults import translated
from perdure.store.sqlite.migrate import MIGRATIONS
from perdure.store.sqlite.owner import require_journal

LARGE_LOG = 256 << 20
LITTLE_SPACE, NO_SPACE = 1 << 30, 50 << 20
SAFE_SQLITE = (3, 51, 3)  # before it two writing processes can corrupt a WAL
_COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "red"}


@click.command("doctor")
@common.url_option
@common.json_option
def command(url: str | None, as_json: bool) -> int:
    """Check the database, its file, the workers, the runs and this machine. Code 1 when something must be set right."""
    settings = common.settings_with(url=url)
    checks = [msgspec.structs.replace(check, way_out=_told(check, url)) for check in _checks(settings, url)]
    for check in checks:
        if as_json:
            common.out_json(msgspec.to_builtins(check))
        else:
            common.out(f"{common.style(f'{check.verdict:<4}', _COLOURS[check.verdict])}  {check.name:<12}  {common.clean(check.found)}")
            if check.way_out is not None:
                common.out(common.clean(f"{'':<20}→ {check.way_out}"))
    return common.FAILED if any(check.verdict == "FAIL" for check in checks) else common.SUCCEEDED


def _told(check: Check, url: str | None) -> str | None:
    return None if check.way_out is None else common.with_url(check.way_out, url)


def _checks(settings: Settings, url: str | None) -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}")
    yield _sqlite()
    yield Check("now", "ok", common.iso(common.now_us()))
    path = sqlite_path(settings.url)
    if path is None:
        yield Check("database", "ok", f"{settings.url}: in memory, gone with its process")
        return
    if not path.exists():
        yield Check("database", "warn", f"there is no file {path} yet", "perdure run makes it; --url or PERDURE_URL names another")
        return
    yield from _file(path)
    try:
        yield from _database(settings, url, path)
    except PerdureError as error:
        yield Check("database", "FAIL", str(error), "nothing else can be looked at before this is set right")


def _sqlite() -> Check:
    version = apsw.sqlite_lib_version()
    if tuple(int(part) for part in version.split(".")) < SAFE_SQLITE:
        return Check("sqlite", "FAIL", f"{version} can corrupt a journal that two processes write", "pip install --upgrade apsw")
    return Check("sqlite", "ok", f"{version}, apsw {apsw.apsw_version()}")


# -- the file ---------------------------------------------------------------------------------------------------------------
def _file(path: Path) -> Iterator[Check]:
    found = path.stat()
    log = path.with_name(path.name + "-wal")
    log_size = log.stat().st_size if log.exists() else 0
    yield Check("file", "ok", f"{path}: {size(found.st_size)}")
    if log_size > LARGE_LOG:
        yield Check(
            "log", "warn", f"{log} has {size(log_size)}", "a reader keeps it from being emptied: find who has the database open for long"
        )
    else:
        yield Check("log", "ok", size(log_size))
    if found.st_mode & 0o077:
        yield Check("permissions", "warn", f"others may read or write {path} ({found.st_mode & 0o777:o})", f"chmod 600 {path}")
    else:
        yield Check(
            "permissions", "ok", f"{found.st_mode & 0o777:o}" + ("" if found.st_uid == os.geteuid() else ", a file of another user")
        )
    yield _space(path.parent)


def _space(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    if free < NO_SPACE:
        return Check("disk", "FAIL", f"{size(free)} free in {folder}", "make room: runs stop, and lose nothing, when the disk is full")
    if free < LITTLE_SPACE:
        return Check("disk", "warn", f"{size(free)} free in {folder}", "make room soon: runs stop when the disk is full")
    return Check("disk", "ok", f"{size(free)} free")


# -- inside ------------------------------------------------------------------------------------------------------------------
def _database(settings: Settings, url: str | None, path: Path) -> Iterator[Check]:
    require_journal(path)
    version, latest = schema_version(path), len(MIGRATIONS)
    behind = version < latest
    yield Check("schema", "warn" if behind else "ok", f"version {version} of {latest}", "perdure migrate" if behind else None)
    yield _integrity(path, settings.synchronous)
    with common.existing_store(url) as store:
        yield from _pragmas(store.facts())
        yield check_guards(store)
        now, lease_us = common.now_us(), round(settings.lease_s * 1e6)
        yield from check_runs(store, now, lease_us)
        yield from _service(store, now, lease_us)
        yield _undos(store)
        yield _webhook(settings)
        yield _notices(store.facts())


def _service(store: Store, now: int, lease_us: int) -> Iterator[Check]:
    """What the live workers serve, and the runs that none of them can go on with."""
    workers = store.workers(now, lease_us)
    for worker in workers:
        if worker.alive:
            served = ", ".join(f"{one.agent}@{one.version}" for one in worker.serves) or "nothing"
            only = f", of the queues {', '.join(worker.queues)} alone" if worker.queues is not None else ""
            yield Check("serving", "ok", f"{worker.name}: {served}{only}")
    if not any(worker.alive for worker in workers):
        return  # that nobody is up is no gap in what they serve
    stuck = unserved(store, workers, Filter())
    if not stuck:
        yield Check("versions", "ok", "every unfinished run has a worker that can go on with it")
        return
    why = Counter(str(gap(row, workers)) for row in stuck)
    found = "; ".join(f"{words}: {plural(count, 'run')}" for words, count in why.most_common(5))
    yield Check(
        "versions",
        "warn",
        found,
        "perdure list --unserved names them; start a worker with that code, or perdure resume RUN FILE.py:AGENT --adopt",
    )


def _undos(store: Store) -> Check:
    """Undos that have begun and that nobody is at: no worker takes one, the same command goes on with it."""
    open_ = [one for one in get_args(Status) if one not in FINISHED]
    rows = (row for one in open_ for row in all_rows(store, Filter(one)) if row.holder is None)
    left = [undone for row in rows if (undone := undone_by(row.run_id)) is not None]
    if not left:
        return Check("undo", "ok", "no undo has been left half done")
    return Check("undo", "warn", f"{plural(len(left), 'undo')} half done: of {', '.join(left[:5])}", f"perdure undo {left[0]}")


def _webhook(settings: Settings) -> Check:
    """Whether notices can go out, without a word of the secret or of what follows the host in the address."""
    if not settings.webhook_url:
        return Check("webhook", "ok", "none is set: notices go to the workers' log alone")
    from perdure.worker.webhook import Endpoint

    try:
        endpoint = Endpoint(settings.webhook_url, settings.webhook_secret, settings.webhook_hosts)
    except InvalidInput as error:
        return Check("webhook", "FAIL", f"no notice can be sent: {error}", "set it right where the workers run; notices wait until then")
    return Check("webhook", "ok", f"{endpoint.place}, signed; seen from here, the workers have settings of their own")


def _notices(facts: dict[str, str]) -> Check:
    failing = int(facts["notices_failing"])
    if not failing:
        return Check("notices", "ok", "none has failed to go out")
    found = f"{plural(failing, 'notice')} could not be sent yet; the last one: {facts['notice_error']}"
    return Check("notices", "warn", found, "see to the receiver; a worker tries again, with growing pauses")


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
