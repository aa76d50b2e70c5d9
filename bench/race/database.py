"""A PostgreSQL of the race's own, which the lanes on PostgreSQL share: fsync on, its files on the disk that everything else is measured on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from bench.race import machine
from tests.servers.binaries import account
from tests.servers.postgres import Server

# Of what is usual on a small machine; the rest, among it what decides about durability, is as PostgreSQL comes.
_SETTINGS = {"shared_buffers": "128MB", "max_wal_size": "1GB", "min_wal_size": "80MB", "max_connections": "500"}


class OnAnotherDisk(Exception):
    """Its files would not lie where everything else is measured."""


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    folder.chmod(0o711)  # its user must be able to pass
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
    """Where its files go: into this folder, or beside everybody's temporary files if those are on the same disk."""
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
