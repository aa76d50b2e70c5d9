"""Deadlocks, serialization failures and rows that others keep: what was rolled back is done again, and counts once."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.postgres.tools import (
    WAITING,
    Deeds,
    all_ended,
    check_journals,
    create_errand,
    deadlocks,
    insist,
    letter,
    make_notes,
    opened,
    rows,
    send_news,
    until,
    value,
    working,
)
from tests.servers.postgres import Server

from perdure.core.events import RunReleased, ThoughtRecorded
from perdure.errors import StoreUnavailable
from perdure.store.api import Append, Committed, RowChange
from perdure.store.cursor import Gone
from perdure.store.postgres.store import PostgresStore
from perdure.testing.conformance_waiting import Hand, hold


class Opponent:
    """Locks the younger run, waits until somebody who has locked the older one wants it, and then wants the older one."""

    def __init__(self, postgres: Server, url: str, older: str, younger: str) -> None:
        database = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        postgres.execute(f"ALTER DATABASE \"{database}\" SET deadlock_timeout = '50ms'")
        self._server, self._url, self._older, self._younger = postgres, url, older, younger
        # A superuser may be patient: the other one is the first to look for a deadlock, and is the one to be rolled back.
        self._connection = psycopg.connect(postgres.url.replace("/postgres?", f"/{database}?"), options="-c deadlock_timeout=20s")

    def meet(self, work: Callable[[], object]) -> list[BaseException]:
        """What the work raised, after the two have met."""
        before = deadlocks(self._server)
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        with self._connection as connection:
            connection.execute("SELECT 1 FROM perdure_runs WHERE run_id = %s FOR UPDATE", (self._younger,))
            working = threading.Thread(target=run)
            working.start()
            until(lambda: value(self._url, WAITING) >= 1)
            connection.execute("SELECT 1 FROM perdure_runs WHERE run_id = %s FOR UPDATE", (self._older,))
            connection.rollback()
        working.join(60)
        assert not working.is_alive()
        until(lambda: deadlocks(self._server) == before + 1)  # it is told some time after it has happened
        return errors


@pytest.fixture
def two(postgres_url: str) -> Iterator[tuple[PostgresStore, Hand, Hand]]:
    with opened(postgres_url) as store:
        hands = hold(store, "older"), hold(store, "younger")
        until(lambda: value(postgres_url, WAITING) == 0)
        # New connections take the database's setting.
        store._connections.lost()
        yield store, *hands


@pytest.mark.parametrize("path", ["one statement", "common"])
def test_appends_that_a_deadlock_has_rolled_back_are_made_again_and_count_once(postgres, postgres_url, two, path) -> None:
    store, older, younger = two
    opponent = Opponent(postgres, postgres_url, "older", "younger")
    store._connections.lost()
    body, row = (
        (ThoughtRecorded("x"), None) if path == "one statement" else (RunReleased("waiting", "x"), RowChange("waiting", release=True))
    )
    batch = [older.sealed(body, row=row), younger.sealed(body, row=row)]
    answers: list[object] = []
    assert opponent.meet(lambda: answers.extend(store.append(batch))) == []
    assert answers == [Committed(), Committed()]
    assert [len(store.read(run_id)) for run_id in ("older", "younger")] == [3, 3]
    check_journals(postgres_url, whole=False)


def test_a_tools_transaction_that_a_deadlock_has_rolled_back_is_not_made_again_behind_its_back(postgres, postgres_url, two) -> None:
    store, older, _ = two
    make_notes(postgres_url)
    opponent = Opponent(postgres, postgres_url, "older", "younger")
    store._connections.lost()
    head, calls = older.sealed(ThoughtRecorded("intent")), []

    def work(connection: Any) -> tuple[Append, None]:
        calls.append(1)
        connection.execute("INSERT INTO notes VALUES ('paid')")
        if len(calls) == 1:
            connection.execute("UPDATE others SET n = n + 1 WHERE name = 'younger'")
        return Hand(store, older.lease, head.events[-1].event.seq, head.events[-1].hash).sealed(ThoughtRecorded("result")), None

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE others (name text, n int)")
        connection.execute("INSERT INTO others VALUES ('younger', 0)")
    opponent._connection.execute("UPDATE others SET n = 7")
    (error,) = opponent.meet(lambda: store.transact(head, work))
    assert len(calls) == 1
    assert isinstance(error, Gone), "it is not the tool's failure: the call is given back as one that has not happened"
    assert value(postgres_url, "SELECT count(*) FROM notes") == 0
    assert store.transact(head, work)[0] == Committed()
    assert value(postgres_url, "SELECT count(*) FROM notes") == 1
    assert len(store.read("older")) == 4


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_under_another_default_isolation_work_is_done_again_and_counts_once(postgres, postgres_url, isolation) -> None:
    """Single statements run under what the database says: one that meets another's change is rolled back, and made again."""
    database = psycopg.conninfo.conninfo_to_dict(postgres_url)["dbname"]
    postgres.execute(f"ALTER DATABASE \"{database}\" SET default_transaction_isolation = '{isolation}'")
    make_notes(postgres_url)
    with opened(postgres_url) as store:
        hand = hold(store, "by hand")
        answers: list[object] = []
        with psycopg.connect(postgres_url) as other:
            other.execute("UPDATE perdure_runs SET updated_at = updated_at + 1 WHERE run_id = 'by hand'")
            appending = threading.Thread(target=lambda: answers.append(hand.write(ThoughtRecorded("x"))))
            appending.start()
            until(lambda: value(postgres_url, WAITING) == 1)
            other.commit()
        appending.join(60)
        assert answers == [Committed()]
        assert len(store.read("by hand")) == 3
    deeds, names = Deeds(), [f"e{n}" for n in range(6)]

    async def main(store: PostgresStore, outside: PostgresStore) -> None:
        agents = deeds.agents()
        async with working(store, agents):
            await asyncio.gather(*(asyncio.to_thread(create_errand, outside, agents, name) for name in names))
            await asyncio.to_thread(send_news, outside, names, random.Random(2))
            await all_ended(outside)

    rows(postgres_url, "UPDATE perdure_runs SET status = 'succeeded', holder = NULL, nonce = NULL WHERE run_id = 'by hand' RETURNING 1")
    with opened(postgres_url) as store, opened(postgres_url) as outside:
        asyncio.run(main(store, outside))
    deeds.check(postgres_url, len(names))


def test_a_row_that_somebody_has_locked_for_too_long_is_said(postgres_url) -> None:
    with opened(postgres_url, answer_s=1.0) as store:
        hold(store, "r").rest("waiting")
        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT 1 FROM perdure_runs FOR UPDATE")
            began_s = time.monotonic()
            with pytest.raises(StoreUnavailable, match="a row that another transaction has locked for too long"):
                letter(store, "r")
            assert time.monotonic() - began_s < 20.0
        assert insist(lambda: letter(store, "r"))
        assert [event.type for event in store.read("r")].count("signal_received") == 1
