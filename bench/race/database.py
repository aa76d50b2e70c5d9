"""A PostgreSQL of the race's own, which the lanes on PostgreSQL share: fsync on, its files on the disk that everything else is measured on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from tests.servers.binaries import account
from tests.servers.postgres import Server

# Of what is usual on a small machine; the rest, among it what decides about durability, is as PostgreSQL comes.
_SETTINGS = {"shared_buffers": "128MB", "max_wal_size": "1GB", "min_wal_size": "80MB", "max_connections": "500"}


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    folder.chmod(0o711)  # its user must be able to pass
    before = tempfile.tempdir
    tempfile.tempdir = str(folder) if account().can_enter(folder) else before
    try:
        server = Server(**_SETTINGS)
    finally:
        tempfile.tempdir = before
    try:
        server.start()
        yield server
    finally:
        server.close()


def facts(server: Server) -> dict[str, str]:
    with psycopg.connect(server.url) as connection:
        row = connection.execute(
            "SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit')"
        ).fetchone()
    assert row is not None
    return {"PostgreSQL": f"{row[0]}, fsync {row[1]}, synchronous_commit {row[2]}"}
