"""The speed of the server without perdure: single-row commits over one connection, by psycopg and by pgbench."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import psycopg

_SECONDS = 0.5
_ROW = "x" * 200
_SCRIPT = f"INSERT INTO raw_rows (data) VALUES ('{_ROW}');\n"


def prepare(url: str) -> None:
    """Create the table, and write to the WAL once: creating its first files would slow down the first commits."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE raw_rows (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, data text NOT NULL)")
        connection.execute(b"INSERT INTO raw_rows (data) SELECT repeat('x', 1000) FROM generate_series(1, 40000)")
        connection.execute(b"CHECKPOINT" if _is_superuser(connection) else b"SELECT 1")
        connection.execute(b"TRUNCATE raw_rows")


def _is_superuser(connection: psycopg.Connection) -> bool:
    row = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    return bool(row and row[0])


def commits_per_s(url: str, seconds: float = _SECONDS) -> float:
    """One connection, one prepared INSERT of 200 bytes; each INSERT is one transaction."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=0) as connection:
        cursor = psycopg.RawCursor(connection)
        count, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            cursor.execute(b"INSERT INTO raw_rows (data) VALUES ($1)", (_ROW,))
            count += 1
        return count / elapsed


def pgbench_per_s(binaries: Path, folder: Path, url: str) -> float:
    """The same INSERT by pgbench, one client, prepared, for a second."""
    script = folder / "insert.sql"
    script.write_text(_SCRIPT)
    told = subprocess.run(
        [str(binaries / "pgbench"), "-n", "-f", str(script), "-c", "1", "-T", "1", "-M", "prepared", url],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    found = re.search(r"tps = ([\d.]+)", told)
    assert found is not None, told
    return float(found[1])
