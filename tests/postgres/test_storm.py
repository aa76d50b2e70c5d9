"""Six workers on one PostgreSQL in a storm.

Killed, stopped past their leases, drained, cut off, while the server restarts.

`PERDURE_STORM_S` says how long the storm takes, `PERDURE_STORM_SEED` which storm it is.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.crash.nursery import Nursery
from tests.postgres.storm_checks import check
from tests.postgres.storm_weather import Storm, wait_until
from tests.servers.postgres import Server

# Read when this is imported, since the tests' own fixture takes every PERDURE_ name out of the environment.
_SECONDS = os.environ.get("PERDURE_STORM_S")
_SEED = os.environ.get("PERDURE_STORM_SEED")
_CALM_S = 45.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    opened = Nursery()
    yield opened
    opened.close()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server only for the storm, because it disturbs all its clients."""
    own = Server()
    try:
        own.start()
        yield own
    finally:
        own.close()


def weather(server: Server, nursery: Nursery, folder: Path, seconds: float) -> None:
    """A storm of this many seconds, a calm, and the checks."""
    # It may take longer than any other test, and still not for ever.
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(seconds + 2 * _CALM_S + 90, exit=True, file=sys.__stderr__)
    seed = int(_SEED) if _SEED is not None else random.randrange(1_000_000)
    print(f"PERDURE_STORM_SEED={seed}")
    url = server.new_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE booked (what text, key text, run text, number bigint)")
    began = time.monotonic()
    storm = Storm(folder, server, url, nursery, seed)
    try:
        storm.rage(seconds)
        silence_s = -time.monotonic()
        storm.silence_one(_CALM_S)
        silence_s += time.monotonic()
        storm.calm_down(_CALM_S)
        calm_s = time.monotonic() - began - seconds - silence_s
        found = check(folder, url)
        check_nobody_is_connected(server)
        check_log(storm.log_path)
    except AssertionError as error:
        raise AssertionError(f"PERDURE_STORM_SEED={seed} after {dict(storm.blows)}: {error}\n{storm.log_tail(10)}") from error
    finally:
        storm.close()
    print(f"{dict(storm.blows)}, calm after {calm_s:.1f} s; {found}")
    assert min(storm.blows[name] for name in ("kill", "freeze", "drain", "cut", "fast", "immediate", "stall")) >= 1, storm.blows
    assert storm.blows.total() >= seconds / 3, f"that was no storm: {storm.blows}"
    assert found["takeovers"] > found["of proven dead"] > 0, found


def check_nobody_is_connected(server: Server) -> None:
    def connected() -> int:
        with psycopg.connect(server.url) as connection:
            row = connection.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'perdure'").fetchone()
        assert row is not None
        return int(row[0])

    wait_until(lambda: connected() == 0, 60, "everybody has left, and connections are open")


def check_log(path: Path) -> None:
    """No process met an unexpected error."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        assert "Traceback" not in line, "\n".join(lines[max(number - 3, 0) : number + 40])


@pytest.mark.long
def test_after_a_storm_nothing_is_lost_and_nothing_happened_twice(server: Server, nursery: Nursery, tmp_path: Path) -> None:
    weather(server, nursery, tmp_path, float(_SECONDS or 40))


@pytest.mark.soak
def test_after_a_long_storm_nothing_is_lost_and_nothing_happened_twice(server: Server, nursery: Nursery, tmp_path: Path) -> None:
    weather(server, nursery, tmp_path, float(_SECONDS or 600))
