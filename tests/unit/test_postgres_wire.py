"""Statements through libpq directly.

Every value arrives unchanged, and a statement that the server forgot is sent again.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.servers.pooler import Pooler
from tests.servers.postgres import Server
from tests.servers.proxy import Cut, Moment, Proxy
from tests.unit.postgres_tools import Gate, empty, eventually

from perdure.store.postgres import wire
from perdure.store.postgres.arrays import Int8s, Texts
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.faults import is_loss


@pytest.fixture
def url(postgres: Server) -> str:
    return empty(postgres)


@pytest.fixture
def connection(url: str) -> Iterator[Connection]:
    connections = Connections(url, limit=1, answer_s=5.0)
    with connections.lent() as connection:
        yield connection
    connections.close()


def ask(connection: Connection, sql: bytes, *values: Any) -> Any:
    return connection.wait(wire.sent(connection, sql, values))


def texts(connection: Connection, sql: bytes, *values: Any) -> list[bytes | None]:
    answer = ask(connection, sql, *values)
    return [answer.get_value(0, column) for column in range(answer.nfields)]


def test_every_kind_of_value_arrives(connection: Connection) -> None:
    given = [2**62, -1, b"\0\xff", "ä 𝄞", True, False, None, Int8s.of([1, None, 3]), Texts.of(["a", None])]
    said = texts(connection, b"SELECT $1::text, $2::text, $3::bytea, $4, $5::text, $6::text, $7::text, $8::text, $9::text", *given)
    assert said == [b"4611686018427387904", b"-1", b"\0\xff", "ä 𝄞".encode(), b"true", b"false", None, b"{1,NULL,3}", b"{a,NULL}"]


def test_numbers_of_any_width_and_how_many_rows_were_changed(connection: Connection) -> None:
    assert wire.numbers(ask(connection, b"SELECT n FROM unnest($1::bigint[]) AS n", Int8s.of([2**40, -5]))) == [2**40, -5]
    assert wire.numbers(ask(connection, b"SELECT 7::int UNION ALL SELECT -7")) == [7, -7]
    ask(connection, b"CREATE TEMP TABLE t (n int)")
    assert wire.count(ask(connection, b"INSERT INTO t SELECT generate_series(1, $1)", 3)) == 3
    assert wire.count(ask(connection, b"UPDATE t SET n = 0 WHERE n > $1", 9)) == 0


@pytest.mark.parametrize(("value", "error"), [(2**63, struct.error), ("\ud800", UnicodeEncodeError)])
def test_what_cannot_be_put_into_bytes_sends_nothing(connection: Connection, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        ask(connection, b"SELECT $1", value)
    assert texts(connection, b"SELECT $1::text", 1) == [b"1"]


def test_a_statement_is_prepared_once_for_each_kind_of_values(connection: Connection) -> None:
    def prepared() -> list[str]:
        return [row[0] for row in connection.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'perdure%' ORDER BY 1")]

    for value in (1, 2, "3", None):
        ask(connection, b"SELECT $1::text", value)
    assert prepared() == ["perdure_0", "perdure_1", "perdure_2"]


def test_what_the_server_has_forgotten_is_sent_whole_and_prepared_again(connection: Connection) -> None:
    """psycopg lets the server forget everything when it rolls back, if it has prepared something itself."""
    sql = b"SELECT $1::text"
    ask(connection, sql, 1)
    for _ in range(3):
        connection.execute("SELECT 1")
    with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
        connection.execute("SELECT 1 / 0")
    assert [texts(connection, sql, value) for value in (2, 3, 4)] == [[b"2"], [b"3"], [b"4"]]
    ((calls,),) = connection.execute("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'perdure%'").fetchall()
    assert calls == 1


def test_a_connection_keeps_no_more_than_so_many_statements(connection: Connection) -> None:
    for number in range(150):
        assert texts(connection, b"SELECT $1::text || '%d'" % number, "x") == [b"x%d" % number]
    assert len(connection.statements) == 100


def test_behind_a_proxy_that_pools_transactions_nothing_is_prepared(url: str) -> None:
    with Pooler(url) as pooler:
        connections = Connections(pooler.url(url), limit=2, answer_s=5.0)
        with connections.lent() as one, connections.lent() as two:
            assert [texts(each, b"SELECT $1::text", 5) for each in (one, two, one)] == [[b"5"]] * 3
            assert not one.statements
        connections.close()


def test_an_error_is_the_servers_and_the_connection_goes_on(connection: Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero) as told:
        ask(connection, b"SELECT 1 / $1", 0)
    assert not is_loss(told.value)
    assert texts(connection, b"SELECT $1::text", 1) == [b"1"]


def test_a_connection_that_is_cut_off_is_a_loss(postgres: Server, connection: Connection) -> None:
    (process,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
    with psycopg.connect(postgres.url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s, 60000)", (process,))  # and wait until it is gone
    with pytest.raises(psycopg.Error) as told:
        ask(connection, b"SELECT $1::text", 1)
    assert is_loss(told.value)


# -- two statements in one round trip ------------------------------------------------------------------------------------
def both(connection: Connection, first: tuple[bytes, list[Any]], second: tuple[bytes, list[Any]]) -> Any:
    return connection.wait(wire.sent(connection, *second, first))


def test_the_second_of_two_sees_what_the_first_has_done_and_its_answer_is_the_answer(connection: Connection) -> None:
    ask(connection, b"CREATE TEMP TABLE t (n bigint)")
    for times in (1, 2):
        answer = both(connection, (b"INSERT INTO t VALUES ($1)", [times]), (b"SELECT n FROM t ORDER BY n", []))
        assert wire.numbers(answer) == list(range(1, times + 1))
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (2,), "the connection is as it was"


def test_each_of_two_has_a_look_of_its_own(connection: Connection, url: str) -> None:
    """The second statement sees what was committed while the first waited: a single statement would not."""
    connection.execute("CREATE TABLE IF NOT EXISTS looked (n bigint)")
    gate = Gate(url)

    def meanwhile() -> None:
        gate.wait()
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("INSERT INTO looked VALUES (7)")
        gate.open()

    opening = threading.Thread(target=meanwhile)
    opening.start()
    answer = both(connection, (f"SELECT {Gate.HELD_UP}".encode(), []), (b"SELECT n FROM looked", []))
    opening.join()
    assert wire.numbers(answer) == [7]


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_when_one_of_two_fails_neither_has_happened_and_the_first_error_is_told(connection: Connection, wrong: str) -> None:
    ask(connection, b"CREATE TEMP TABLE t (n bigint)")
    statements = [(b"INSERT INTO t VALUES ($1)", [1]), (b"INSERT INTO t SELECT 1 / $1::bigint", [0])]
    first, second = statements if wrong == "second" else statements[::-1]
    for _ in range(2):
        with pytest.raises(psycopg.errors.DivisionByZero):
            both(connection, first, second)
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_two_that_the_server_has_forgotten_are_sent_whole(connection: Connection) -> None:
    ask(connection, b"CREATE TEMP TABLE t (n bigint)")
    pair: Any = (b"INSERT INTO t VALUES ($1)", [1]), (b"SELECT count(*) FROM t", [])
    assert wire.numbers(both(connection, *pair)) == [1]
    connection.execute("DEALLOCATE ALL")
    assert wire.numbers(both(connection, *pair)) == [2], "once, and not twice"


def test_two_whose_commit_fails_are_refused(connection: Connection) -> None:
    """Both statements have answered by then: the constraint is checked at the end of the transaction."""
    ask(connection, b"CREATE TEMP TABLE t (n bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    for _ in range(2):
        with pytest.raises(psycopg.errors.UniqueViolation):
            both(connection, (b"INSERT INTO t VALUES ($1)", [1]), (b"INSERT INTO t VALUES ($1)", [1]))
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_two_whose_connection_breaks_are_lost_together(url: str, moment: Moment) -> None:
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("CREATE TABLE IF NOT EXISTS broken (n bigint)")
        owner.execute("DELETE FROM broken")
    with Proxy(url) as proxy:
        connections = Connections(proxy.url(url), limit=1, answer_s=5.0)
        with connections.lent() as connection:
            proxy.rule(Cut("VALUES .*2", moment))
            with pytest.raises(psycopg.OperationalError) as told:
                both(connection, (b"INSERT INTO broken VALUES (1)", []), (b"INSERT INTO broken VALUES (2)", []))
            connection.close()
        connections.close()
    assert is_loss(told.value)
    with psycopg.connect(url, autocommit=True) as owner:
        assert eventually(lambda: owner.execute("SELECT count(*) FROM broken").fetchone() == ((0 if moment == "before" else 2),))
