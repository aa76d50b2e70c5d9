"""The server fails while a transaction tool uses a connection: what happens to the connection and to the call."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import psycopg
import pytest
from tests.conformance.suite_waiting import Hand, hold
from tests.postgres.tools import check_journals, opened, value

from perdure.core.events import ThoughtRecorded
from perdure.errors import InvalidInput, StoreError, StoreUnavailable
from perdure.store.api import Append, Committed
from perdure.store.cursor import ConnectionGone
from perdure.store.postgres.store import PostgresStore


def tail_of(store: PostgresStore, hand: Hand, head: Append) -> Append:
    return Hand(store, hand.lease, hand.seq + 1, head.events[-1].hash).sealed(ThoughtRecorded("result"))


@pytest.mark.parametrize("swallows", [False, True])
def test_a_server_that_gives_out_under_a_tool_is_not_the_tools_failure(postgres_url: str, swallows: bool) -> None:
    """Otherwise a restart of the server would end a run for ever, although nothing has happened.

    This must hold whatever the tool does with the error.
    """
    _execute(postgres_url, "CREATE TABLE notes (text TEXT)")
    with opened(postgres_url) as store:
        hand = hold(store, "r")
        head = hand.sealed(ThoughtRecorded("intent"))
        cut = [True]

        def work(connection: Any) -> tuple[Append, str]:
            connection.execute("INSERT INTO notes VALUES (?)", ("a",))
            if cut.pop() if cut else False:
                ((pid,),) = connection.execute("SELECT pg_backend_pid()")
                _execute(postgres_url, f"SELECT pg_terminate_backend({pid}, 5000)")
            try:
                connection.execute("INSERT INTO notes VALUES (?)", ("b",))
            except Exception:
                if not swallows:
                    raise
            return tail_of(store, hand, head), "done"

        with pytest.raises(ConnectionGone, match="cannot be reached"):
            store.transact(head, work)
        assert value(postgres_url, "SELECT count(*) FROM notes") == 0
        assert store.transact(head, work) == (Committed(), "done")
        assert value(postgres_url, "SELECT count(*) FROM notes") == 2


def test_an_error_in_the_tools_own_sql_is_the_tools(postgres_url: str) -> None:
    with opened(postgres_url) as store:
        hand = hold(store, "r")
        head = hand.sealed(ThoughtRecorded("intent"))

        def work(connection: Any) -> tuple[Append, str]:
            connection.execute("SELECT 1 / 0")
            return tail_of(store, hand, head), "done"

        with pytest.raises(psycopg.errors.DivisionByZero):
            store.transact(head, work)


def test_what_a_tool_leaves_in_its_session_reaches_nobody_else(postgres_url: str) -> None:
    """A function can change settings that a statement may not.

    Then commits of all callers could be acknowledged too early (G1).
    """
    _execute(
        postgres_url,
        "CREATE FUNCTION careless() RETURNS text LANGUAGE sql AS "
        "$$ SELECT set_config('synchronous_commit', 'off', false) || pg_advisory_lock(42)::text $$",
    )
    with opened(postgres_url) as store:
        hand = hold(store, "r")
        head = hand.sealed(ThoughtRecorded("intent"))

        def work(connection: Any) -> tuple[Append, str]:
            connection.execute("SELECT careless()")
            return tail_of(store, hand, head), "done"

        assert store.transact(head, work)[0] == Committed()
        for to_tool in (True, False):
            with store._connections.lent(to_tool=to_tool) as connection:
                assert connection.execute("SELECT current_setting('synchronous_commit')").fetchone() == ("on",)
        assert value(postgres_url, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 42") == 0


def _execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


def test_a_thread_that_a_tool_has_left_behind_writes_nothing_after_its_end(postgres_url: str) -> None:
    _execute(postgres_url, "CREATE TABLE notes (text TEXT)")
    left: list[threading.Thread] = []
    begun = threading.Event()
    with opened(postgres_url) as store:
        hand = hold(store, "r")

        def work(connection: Any) -> tuple[Append, str]:
            def go_on() -> None:
                begun.set()
                with contextlib.suppress(Exception):
                    connection.executemany("INSERT INTO notes VALUES (?)", [("x",)] * 20_000)

            left.append(threading.Thread(target=go_on))
            left[0].start()
            begun.wait()
            raise ValueError("the tool has failed")

        with pytest.raises(ValueError, match="the tool has failed"):
            store.transact(hand.sealed(ThoughtRecorded("intent")), work)
        left[0].join()
        assert value(postgres_url, "SELECT count(*) FROM notes") == 0


@pytest.mark.parametrize("statement", ["SELECT 1 --\r; COMMIT", "SELECT 1; COMMIT", "COMMIT"])
def test_a_tool_cannot_end_the_transaction_that_it_works_in(postgres_url: str, statement: str) -> None:
    """PostgreSQL's comments end at a carriage return too."""
    with opened(postgres_url) as store:
        hand = hold(store, "r")

        def work(connection: Any) -> tuple[Append, str]:
            connection.execute(statement)
            raise AssertionError("it was let through")

        with pytest.raises(InvalidInput, match="may not run"):
            store.transact(hand.sealed(ThoughtRecorded("intent")), work)


def test_a_transaction_that_was_ended_behind_our_back_is_noticed(postgres_url: str) -> None:
    """Should a way be found: the result is not written into another transaction than the effect."""
    with opened(postgres_url) as store:
        hand = hold(store, "r")
        head = hand.sealed(ThoughtRecorded("intent"))

        def work(connection: Any) -> tuple[Append, str]:
            connection._connection.execute(b"COMMIT; BEGIN")
            return tail_of(store, hand, head), "done"

        with pytest.raises(StoreError, match="has ended its transaction"):
            store.transact(head, work)


@pytest.mark.parametrize("how", ["?client_encoding=LATIN1", "role"])
def test_text_is_kept_as_it_was_hashed_whatever_encoding_is_the_default(postgres_url: str, how: str) -> None:
    if how == "role":
        _execute(postgres_url, "ALTER ROLE CURRENT_USER SET client_encoding = LATIN1")
    joined = postgres_url + how.replace("?", "&" if "?" in postgres_url else "?") if how != "role" else postgres_url
    try:
        with opened(joined) as store:
            one, two = hold(store, "one"), hold(store, "two")
            assert store.append([one.sealed(ThoughtRecorded("é 🎈"))]) == [Committed()]
            one.seq, one.head = one.seq + 1, store.hash_at("one", 3)
            group = [one.sealed(ThoughtRecorded("ü")), two.sealed(ThoughtRecorded("é"))]
            assert store.append(group) == [Committed(), Committed()]
        check_journals(postgres_url, whole=False)
    finally:
        _execute(postgres_url, "ALTER ROLE CURRENT_USER RESET client_encoding")


def test_a_server_that_gives_out_right_after_the_tool_is_not_the_tools_failure_either(postgres_url: str) -> None:
    with opened(postgres_url) as store:
        hand = hold(store, "r")
        head = hand.sealed(ThoughtRecorded("intent"))
        cut = [True]

        def work(connection: Any) -> tuple[Append, str]:
            ((pid,),) = connection.execute("SELECT pg_backend_pid()")
            if cut.pop() if cut else False:
                _execute(postgres_url, f"SELECT pg_terminate_backend({pid}, 5000)")
            return tail_of(store, hand, head), "done"

        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            store.transact(head, work)
        assert store.transact(head, work) == (Committed(), "done")
