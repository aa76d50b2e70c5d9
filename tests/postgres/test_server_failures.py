"""Failures of a real server.

It restarts, recovers, ends our connections, has no free connection, or does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
from tests.conformance.suite import new_run
from tests.conformance.suite_waiting import NOW, hold
from tests.postgres.tools import (
    ANSWER_S,
    Deeds,
    all_ended,
    behind_proxy,
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
from tests.servers.postgres import Server
from tests.servers.proxy import Cut, Direction, Proxy
from tests.servers.undertaker import processes_in

from perdure import Agent
from perdure.core.events import ThoughtRecorded
from perdure.errors import StoreUnavailable
from perdure.store.api import Committed
from perdure.store.open import open_store
from perdure.store.postgres.store import PostgresStore

WAYS: list[tuple[Direction, ...]] = [("to server",), ("to client",), ()]
END_OURS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'perdure'"


def end_our_connections(postgres: Server) -> None:
    rows(postgres.url, END_OURS)


# Each so often.
COUNTS = {"immediate": 4, "fast": 1, "connections ended": 4}
BLOWS: dict[str, Callable[[Server], None]] = {
    "immediate": lambda server: server.restart("immediate"),
    "fast": lambda server: server.restart("fast"),
    "connections ended": end_our_connections,
}


@pytest.mark.long
def test_runs_outlive_a_server_that_restarts_and_ends_connections_all_the_time(postgres, postgres_url) -> None:
    chance = random.Random(5)
    make_notes(postgres_url)
    deeds, names = Deeds(), [f"e{n}" for n in range(30)]

    def strike() -> None:
        blows = [blow for blow, count in COUNTS.items() for _ in range(count)]
        for blow in chance.sample(blows, len(blows)):
            time.sleep(chance.uniform(0.05, 0.4))
            BLOWS[blow](postgres)

    def people(store: PostgresStore, agents: list[Agent[Any, Any]]) -> None:
        for name in names:
            create_errand(store, agents, name)
        send_news(store, names, random.Random(6))

    async def main(store: PostgresStore) -> None:
        agents = deeds.agents()
        async with working(store, agents):
            with opened(postgres_url) as outside:
                striking = asyncio.ensure_future(asyncio.to_thread(strike))
                await asyncio.to_thread(people, outside, agents)
                await striking
                await all_ended(outside)

    with opened(postgres_url) as store:
        asyncio.run(main(store))
    deeds.check(postgres_url, len(names))
    check_journals(postgres_url)


def test_what_was_acknowledged_before_the_server_fell_is_there_afterwards(postgres, postgres_url) -> None:
    """Appends until the moment of the fall, with everything that a power cut leaves: SIGKILL for all its processes."""
    with opened(postgres_url, answer_s=1.0) as store:
        hands, acknowledged = [hold(store, f"r{n}") for n in range(3)], [2, 2, 2]
        for _ in range(2):
            falling = threading.Timer(random.uniform(0.02, 0.1), postgres.kill)
            falling.start()
            while falling.is_alive():
                for n, hand in enumerate(hands):
                    append = hand.sealed(ThoughtRecorded("x"))
                    try:
                        assert store.append([append]) == [Committed()]
                    except StoreUnavailable:
                        falling.join()
                        postgres.start()
                        assert insist(partial(store.append, [append])) == [Committed()]
                    acknowledged[n] = hand.seq = append.events[-1].event.seq
                    hand.head = append.events[-1].hash
            if not postgres.is_running:
                postgres.start()
    assert [row[0] for row in rows(postgres_url, "SELECT seq FROM perdure_runs ORDER BY run_id")] == acknowledged
    check_journals(postgres_url, whole=False)


def test_a_store_is_opened_while_its_server_recovers(postgres, postgres_url) -> None:
    with opened(postgres_url) as store:
        store.create_run(new_run("r"))
    # Enough to recover that the moment can be caught.
    postgres.execute("CREATE TABLE bulk AS SELECT repeat('x', 900) AS t FROM generate_series(1, 30000)")
    postgres.stop("immediate")
    postgres.start(wait=False)
    scan = catch_recovery(postgres)
    try:
        with pytest.raises(psycopg.OperationalError, match=r"starting up|not yet accepting connections|recovery"):
            psycopg.connect(postgres_url)
        opening: list[bool] = []
        thread = threading.Thread(target=lambda: opening.append(has_run(postgres_url)))
        thread.start()
        time.sleep(0.5)
        assert thread.is_alive(), "it waits"
    finally:
        scan.send_signal(signal.SIGCONT)
    thread.join(20)
    assert opening == [True]
    postgres.wait_ready()
    postgres.execute("DROP TABLE bulk")


def catch_recovery(postgres: Server):
    """The server's recovery, stopped in the midst of it."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for process in processes_in(postgres.folder):
            if "startup" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGSTOP)
                return process
    raise AssertionError("the server has recovered before anybody could look")


def has_run(url: str) -> bool:
    store = open_store(url)
    try:
        return store.get("r") is not None
    finally:
        store.close()


def test_a_server_without_a_free_connection_is_said_and_waited_for(postgres, postgres_url, caplog) -> None:
    caplog.set_level(logging.INFO)
    database = psycopg.conninfo.conninfo_to_dict(postgres_url)["dbname"]
    with opened(postgres_url) as store:
        store.create_run(new_run("r"))
        postgres.execute(f'ALTER DATABASE "{database}" CONNECTION LIMIT 2')
        end_our_connections(postgres)
        until(lambda: value(postgres.url, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'perdure'") == 0)
        others = [psycopg.connect(postgres_url) for _ in range(2)]
        try:
            with pytest.raises(StoreUnavailable, match="has no connection left for us; raise max_connections"):
                store.create_run(new_run("r2"))
            with pytest.raises(StoreUnavailable, match="has no connection left for us"):
                open_store(postgres_url)
        finally:
            for other in others:
                other.close()
        insist(lambda: store.create_run(new_run("r2")))
        postgres.execute(f'ALTER DATABASE "{database}" CONNECTION LIMIT -1')
    assert "is back after" in caplog.text


def test_a_process_never_has_more_connections_than_it_may(postgres, postgres_url) -> None:
    """A hundred threads share the few: they wait for each other, and not for the server."""
    with opened(postgres_url) as store:
        threads = [threading.Thread(target=store.create_run, args=(new_run(f"r{n}"),)) for n in range(100)]
        most = 0
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, value(postgres.url, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'perdure'"))
        assert len(store.list(limit=1000)) == 100
    assert 1 <= most <= 10


@pytest.mark.parametrize("directions", WAYS)
def test_no_wait_for_a_silent_peer_is_longer_than_it_may_be(postgres_url, directions: tuple[Direction, ...]) -> None:
    """Everything that is under way when the connection becomes silent ends in time, and so do later calls."""
    with behind_proxy(f"{postgres_url}&connect_timeout=2", ANSWER_S) as (store, proxy):
        hand = hold(store, "r")
        waits: list[float] = []
        over = threading.Event()

        def work(do: Callable[[], object]) -> None:
            while not over.is_set():
                began_s = time.monotonic()
                try:
                    do()
                except StoreUnavailable:
                    time.sleep(0.01)
                waits.append(time.monotonic() - began_s)

        doing = [
            lambda: hand.write(ThoughtRecorded("x")),
            lambda: store.get("r"),
            lambda: store.renew("w", NOW),
            lambda: store.create_run(new_run(f"r{random.random()}")),
        ]
        threads = [threading.Thread(target=work, args=(do,), daemon=True) for do in doing]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        proxy.silence(*directions)
        time.sleep(1.0)
        began_s = time.monotonic()
        over.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "it waits for ever"
        assert time.monotonic() - began_s < 30.0
        assert max(waits) < 30.0, "connecting (2 s), twice for what can be asked again, and an answer"
        proxy.speak()
        insist(lambda: store.renew("w", NOW))
        assert store.get("r") is not None
    check_journals(postgres_url, whole=False)


def test_a_worker_survives_silence_at_any_moment(postgres_url) -> None:
    make_notes(postgres_url)
    chance = random.Random(8)
    deeds, names = Deeds(), [f"e{n}" for n in range(10)]

    async def main(store: PostgresStore, proxy: Proxy) -> None:
        agents = deeds.agents()
        with opened(postgres_url) as outside:
            async with working(store, agents):
                people = asyncio.ensure_future(asyncio.to_thread(tell, outside, agents))
                for _ in range(5):
                    await asyncio.sleep(chance.uniform(0.05, 0.3))
                    proxy.silence(*chance.choice(WAYS))
                    await asyncio.sleep(chance.uniform(0.1, 0.9))
                    proxy.speak()
                await people
                await all_ended(outside)

    def tell(outside: PostgresStore, agents: list[Agent[Any, Any]]) -> None:
        for name in names:
            create_errand(outside, agents, name)
            time.sleep(0.05)
        send_news(outside, names, chance)

    with behind_proxy(postgres_url, ANSWER_S) as (store, proxy):
        asyncio.run(main(store, proxy))
    deeds.check(postgres_url, len(names))
    check_journals(postgres_url)


def test_a_server_that_accepts_us_and_then_says_nothing_is_given_up_in_time(postgres_url) -> None:
    """The first question of all has a deadline too."""
    with behind_proxy(postgres_url, ANSWER_S) as (store, proxy):
        store.create_run(new_run("r"))
        store._connections.lost()
        proxy.rule(Cut("current_setting", "silent"))
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer within"):
            store.create_run(new_run("r2"))
        assert time.monotonic() - began_s < 60.0
        insist(lambda: store.create_run(new_run("r2")))
