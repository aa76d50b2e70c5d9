"""Many processes start on one empty database at once: one of them creates the schema, and the others use it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.conformance.suite import new_run
from tests.postgres.tools import check_journals, opened, rows, value

from perdure.store.postgres.migrate import MIGRATIONS

# One interpreter that has loaded everything, and twenty copies of it: real processes, which begin at the same moment. Each says how it went.
STARTERS = """
import os, sys, time, random
from perdure.store.postgres.store import open_postgres
from tests.conformance.suite import new_run
url, count, killed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
gate, opener = os.pipe()
children = []
for number in range(count):
    child = os.fork()
    if child == 0:
        os.close(opener)
        os.read(gate, 1)
        try:
            store = open_postgres(url)
            store.create_run(new_run(f"r{number}"))
            store.close()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(1)
    children.append(child)
os.close(opener)
for child in children[:killed]:
    time.sleep(random.uniform(0.0, 0.03))
    os.kill(child, 9)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(codes)
sys.exit(any(code != 0 for code in codes[killed:]))
"""


def start_together(url: str, count: int = 20, killed: int = 0) -> None:
    command = [sys.executable, "-c", STARTERS, url, str(count), str(killed)]
    ended = subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def check_one_schema(url: str) -> None:
    assert rows(url, "SELECT version, checksum FROM perdure_schema ORDER BY 1") == [(one.version, one.checksum) for one in MIGRATIONS]
    with opened(url) as store:
        assert store.problems() == []
        store.create_run(new_run("last"))
    check_journals(url, whole=False)


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_twenty_processes_make_one_schema(postgres, postgres_url, isolation) -> None:
    """With any default isolation of the database."""
    database = postgres_url.rpartition("/")[2].partition("?")[0]
    postgres.execute(f"ALTER DATABASE \"{database}\" SET default_transaction_isolation = '{isolation}'")
    start_together(postgres_url)
    assert value(postgres_url, "SELECT count(*) FROM perdure_runs") == 20
    check_one_schema(postgres_url)


def test_those_that_are_killed_meanwhile_leave_nothing_half_made(postgres_url) -> None:
    start_together(postgres_url, count=12, killed=6)
    assert value(postgres_url, "SELECT count(*) FROM perdure_runs") >= 6
    check_one_schema(postgres_url)
