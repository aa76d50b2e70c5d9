"""The PostgreSQL server that the lanes on PostgreSQL share: fsync on, its files on the measured disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from bench.race import machine
from tests.servers.binaries import account
from tests.servers.postgres import Server

# Usual values for a small machine; all other settings, also those for durability, are PostgreSQL's defaults.
_SETTINGS = {"shared_buffers": "128MB", "max_wal_size": "1GB", "min_wal_size": "80MB", "max_connections": "500"}


class OnAnotherDisk(Exception):
    """The files of the server would not be on the measured disk."""


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    folder.chmod(0o711)  # the server's user must be able to enter it
    before = tempfile.tempdir
    tempfile.tempdir = str(place(folder, account().can_enter(folder)))
    try:
        server = Server(**_SETTINGS)
    finally:
        tempfile.tempdir = before
    try:
        server.start()
        yield server
    finally:
        server.close()


def place(folder: Path, may_enter: bool) -> Path:
    """The folder for its files: this one, or the temporary folder if that is on the same disk."""
    if may_enter:
        return folder
    spare = Path(tempfile.gettempdir())
    if spare.stat().st_dev != folder.stat().st_dev:
        raise OnAnotherDisk(
            f"its user may not enter {folder}, and {spare} is on another file system ({machine.file_system(spare)}), "
            "where a commit costs something else; name a folder on the disk to measure that everybody may pass through: --results /var/tmp/race"
        )
    return spare


def facts(server: Server) -> dict[str, str]:
    with psycopg.connect(server.url) as connection:
        row = connection.execute(
            "SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')"
        ).fetchone()
    assert row is not None
    where = machine.file_system(server.data)
    return {"PostgreSQL": f"{row[0]}, fsync {row[1]}, synchronous_commit {row[2]}, its files on {where}"}
