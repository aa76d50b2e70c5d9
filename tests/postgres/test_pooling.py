"""A proxy that pools transactions: everything works, except the bell and the session's lock, and perdure says so."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest
from tests.conformance.suite import found, new_run
from tests.conformance.suite_waiting import hold
from tests.postgres.tools import (
    Deeds,
    all_ended,
    check_journals,
    create_errand,
    insist,
    make_notes,
    opened,
    rows,
    send_news,
    until,
    value,
    working,
)
from tests.servers.pooler import Pooler

from perdure.store.postgres.store import PostgresStore

HOLDER = """
import sys, time
from tests.postgres.tools import opened
from tests.conformance.suite_waiting import hold
with opened(sys.argv[1]) as store:
    store.listen(lambda: None)
    hold(store, "r", worker="elsewhere")
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def pooler(postgres_url: str) -> Iterator[Pooler]:
    with Pooler(postgres_url, size=3) as started:
        yield started


def test_a_worker_behind_a_pooler_does_its_work_by_looking(pooler, postgres_url, caplog) -> None:
    caplog.set_level(logging.INFO)
    make_notes(postgres_url)
    deeds, names = Deeds(), [f"e{n}" for n in range(8)]

    async def main(store: PostgresStore) -> float:
        agents = deeds.agents()
        with opened(postgres_url) as outside:
            async with working(store, agents):
                assert not store._notify.listening
                await asyncio.sleep(0.2)
                began_s = time.monotonic()
                create_errand(outside, agents, names[0])
                while (await asyncio.to_thread(found, outside, names[0])).epoch == 0:
                    await asyncio.sleep(0.01)
                noticed_s = time.monotonic() - began_s
                for name in names[1:]:
                    await asyncio.to_thread(create_errand, outside, agents, name)
                await asyncio.to_thread(send_news, outside, names, random.Random(3))
                await all_ended(outside)
        return noticed_s

    with opened(pooler.url(postgres_url)) as store:
        noticed_s = asyncio.run(main(store))
        assert store.facts()["doorbell"].startswith("not listening")
    assert noticed_s < 20.0, "a few times a second"
    assert "behind a proxy that pools transactions" in caplog.text
    deeds.check(postgres_url, len(names))
    check_journals(postgres_url)
    # Nothing of ours is left in the sessions that others get next.
    for _ in range(6):
        url = pooler.url(postgres_url)
        assert value(url, "SELECT count(*) FROM pg_prepared_statements") == 0
        assert value(url, "SELECT current_setting('lock_timeout') || current_setting('idle_in_transaction_session_timeout')") == "00"
    assert value(postgres_url, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


def test_a_direct_connection_prepares_its_statements(postgres_url) -> None:
    """Or the test above would show nothing."""
    with opened(postgres_url) as store:
        hold(store, "r")
        for _ in range(3):
            store.get("r")
        with store._connections.lent() as connection:
            assert connection.execute(b"SELECT count(*) > 0 FROM pg_prepared_statements").fetchone() == (True,)


def test_the_pooler_may_restart_its_connections_under_us(pooler, postgres, postgres_url) -> None:
    with opened(pooler.url(postgres_url)) as store:
        for n in range(10):
            rows(
                postgres.url,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND usename = 'app'",
            )
            insist(partial(store.create_run, new_run(f"r{n}")))
    assert value(postgres_url, "SELECT count(*) FROM perdure_runs") == 10


@pytest.mark.parametrize("pooled", [False, True])
def test_the_death_of_a_worker_on_another_machine(pooler, postgres_url, tmp_path, pooled) -> None:
    """The death is noticed by the connection or, behind a pooler, at the end of the lease.

    "Another machine" means: its lock files are not visible here.
    """
    url = pooler.url(postgres_url) if pooled else postgres_url
    environment = {"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        assert (said := process.stdout.readline()) == "held\n", said + process.stdout.read()
        if not pooled:
            until(lambda: value(postgres_url, "SELECT session FROM perdure_workers"))
        with opened(postgres_url) as store:
            store.reap("me", 60_000_000, 1)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            killed_s = time.monotonic()
            if pooled:
                while time.monotonic() - killed_s < 4.0:
                    assert store.reap("me", 60_000_000, 1) == 0, "nothing tells that it is dead"
                    time.sleep(0.25)
                until(lambda: store.reap("me", 2_000_000, 1) == 1)
            else:
                until(lambda: store.reap("me", 60_000_000, 1) == 1)
                assert time.monotonic() - killed_s > 2.5, "it has some seconds to come back"
            assert found(store, "r").holder is None
            assert found(store, "r").ready_at == 1
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()
