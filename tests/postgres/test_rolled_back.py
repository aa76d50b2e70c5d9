"""Deadlocks, serialization failures and locked rows.

A transaction that was rolled back is repeated, and counts once.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.conformance.suite_waiting import Hand, hold
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
from perdure.store.cursor import ConnectionGone, Locked
from perdure.store.postgres.store import PostgresStore


class Opponent:
    """A transaction that locks two rows in the opposite order to perdure."""

    def __init__(self, postgres: Server, url: str) -> None:
        database = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        # Each waiting transaction checks for a deadlock once, a fixed time after its wait began. The one that finds it
        # is rolled back.
        postgres.execute(f"ALTER DATABASE \"{database}\" SET deadlock_timeout = '100ms'")
        self._server, self._url = postgres, url
        # A superuser can set a longer time: it checks long after the other one, and finds nothing.
        self._connection = psycopg.connect(postgres.url.replace("/postgres?", f"/{database}?"), options="-c deadlock_timeout=60s")

    def close(self) -> None:
        self._connection.close()

    def execute(self, statement: str) -> None:
        """Lock something else, before the two meet."""
        self._connection.execute(statement.encode())

    def meets(
        self, work: Callable[[], object], older: str, younger: str, is_in_between: Callable[[], object]
    ) -> list[BaseException] | None:
        """The error of the work after a deadlock with this transaction; None if there was no deadlock.

        This transaction locks the younger run, waits until the work has locked the older run (`is_in_between`), and
        then waits for the older run. On a busy machine the work may have checked for a deadlock before that. Then one
        of the two stops waiting.
        """
        before = deadlocks(self._server)
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        self._connection.execute("SELECT 1 FROM perdure_runs WHERE run_id = %s FOR UPDATE", (younger,))
        self._connection.execute("SET LOCAL lock_timeout = '10s'")
        working = threading.Thread(target=run)
        working.start()
        until(is_in_between)
        try:
            self._connection.execute("SELECT 1 FROM perdure_runs WHERE run_id = %s FOR UPDATE", (older,))
            have_met = True
        except psycopg.errors.LockNotAvailable:
            have_met = False
        self._connection.rollback()
        working.join(60)
        assert not working.is_alive()
        if not have_met or any(isinstance(error, Locked) for error in errors):
            return None
        # The server counts a deadlock some time after it happened.
        until(lambda: deadlocks(self._server) == before + 1)
        return errors


@pytest.fixture
def opponent(postgres: Server, postgres_url: str) -> Iterator[Opponent]:
    made = Opponent(postgres, postgres_url)
    yield made
    made.close()


@pytest.mark.parametrize("path", ["one statement", "common"])
def test_appends_that_a_deadlock_has_rolled_back_are_made_again_and_count_once(opponent: Opponent, postgres_url: str, path: str) -> None:
    body, row = (
        (ThoughtRecorded("x"), None) if path == "one statement" else (RunReleased("waiting", "x"), RowChange("waiting", release=True))
    )
    with opened(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as looking:

        def is_waiting() -> bool:
            return looking.execute(WAITING.encode()).fetchone() != (0,)

        for attempt in range(50):  # until they meet; each time with two new runs
            names = f"older {attempt}", f"younger {attempt}"
            batch = [hold(store, name).sealed(body, row=row) for name in names]
            answers: list[object] = []
            errors = opponent.meets(lambda batch=batch, answers=answers: answers.extend(store.append(batch)), *names, is_waiting)  # type: ignore[misc]
            if errors is not None:
                assert errors == []
                assert answers == [Committed(), Committed()]
                assert [len(store.read(name)) for name in names] == [3, 3]
                break
        else:
            pytest.fail("in fifty attempts there was no deadlock")
    check_journals(postgres_url, whole=False)


def test_a_tools_transaction_that_a_deadlock_has_rolled_back_is_not_made_again_behind_its_back(
    opponent: Opponent, postgres_url: str
) -> None:
    make_notes(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as looking, opened(postgres_url) as store:
        looking.execute("CREATE TABLE others (name text, n int)")
        looking.execute("INSERT INTO others VALUES ('younger', 0)")
        older, _ = hold(store, "older"), hold(store, "younger")
        head, calls = older.sealed(ThoughtRecorded("intent")), []
        is_in_between = threading.Event()

        def work(connection: Any) -> tuple[Append, None]:
            calls.append(1)
            connection.execute("INSERT INTO notes VALUES ('paid')")
            if len(calls) == 1:
                is_in_between.set()
                # When the opponent waits for us, our wait closes the circle, and our transaction checks for the
                # deadlock.
                until(lambda: looking.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() == (1,))
                connection.execute("UPDATE others SET n = n + 1 WHERE name = 'younger'")
            return Hand(store, older.lease, head.events[-1].event.seq, head.events[-1].hash).sealed(ThoughtRecorded("result")), None

        opponent.execute("UPDATE others SET n = 7")
        errors = opponent.meets(lambda: store.transact(head, work), "older", "younger", is_in_between.is_set)
        assert errors is not None, "they did not meet"
        (error,) = errors
        assert len(calls) == 1
        assert isinstance(error, ConnectionGone), "it is not the tool's failure: the call is given back as one that has not happened"
        assert value(postgres_url, "SELECT count(*) FROM notes") == 0
        assert store.transact(head, work)[0] == Committed()
        assert value(postgres_url, "SELECT count(*) FROM notes") == 1
        assert len(store.read("older")) == 4


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_under_another_default_isolation_work_is_done_again_and_counts_once(postgres, postgres_url, isolation) -> None:
    """Single statements use the default isolation of the database.

    After a conflict, a statement is rolled back and repeated.
    """
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
            assert time.monotonic() - began_s < 60.0
        assert insist(lambda: letter(store, "r"))
        assert [event.type for event in store.read("r")].count("signal_received") == 1
