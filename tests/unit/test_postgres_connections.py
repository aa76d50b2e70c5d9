"""Connections to PostgreSQL: few, closed at the first doubt, every wait has a limit, and no message has a password."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest
from tests.servers.pooler import Pooler
from tests.servers.postgres import Server
from tests.servers.proxy import Cut, Proxy
from tests.unit.postgres_tools import empty, opened, raw

from perdure.errors import InvalidInput, StoreCorrupt, StoreError, StoreUnavailable
from perdure.store.cursor import Locked
from perdure.store.open import open_store
from perdure.store.postgres.connect import Connection, connect, parameters, where
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.faults import is_loss, is_rolled_back, translated

SECRET = "geheim"


@pytest.fixture
def url(postgres: Server) -> str:
    return empty(postgres)


@pytest.fixture
def few(url: str) -> Iterator[Connections]:
    connections = Connections(url, limit=2, answer_s=0.5)
    yield connections
    connections.close()


# -- parameters of a URL
# ------------------------------------------------------------------------------------------------
def test_every_wait_has_an_end_unless_the_url_says_otherwise() -> None:
    said = parameters("postgresql://ann@h/db")
    assert (said["connect_timeout"], said["tcp_user_timeout"], said["application_name"]) == (5, "15000", "perdure")
    said = parameters("postgresql://ann@h:1/db?connect_timeout=2&application_name=mine&keepalives_idle=3")
    assert (said["connect_timeout"], said["application_name"], said["keepalives_idle"], said["port"]) == ("2", "mine", "3", "1")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        (f"postgresql://ann:{SECRET}@db.example:5433/journal", "PostgreSQL at db.example:5433/journal"),
        (f"postgresql://ann:{SECRET}@/journal?host=/var/run", "PostgreSQL at /var/run:5432/journal"),
        (f"postgresql:///journal?user=ann&password={SECRET}", "PostgreSQL at the local socket:5432/journal"),
        (f"postgresql://ann:{SECRET}@a,b:5433/journal", "PostgreSQL at a,b:,5433/journal"),
        (f"postgresql://ann:{SECRET}%40%2F@h", "PostgreSQL at h:5432/ann"),
    ],
)
def test_a_database_is_named_without_its_password(url: str, place: str) -> None:
    assert where(parameters(url)) == place


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ann:{SECRET}%zz@h/db",
        f"postgresql://ann:{SECRET}/more@h/db",
        f"postgresql://ann:x@{SECRET}@h/db",
        f"postgresql://ann:1/{SECRET}@h/db",
        f"postgresql://ann:x@h/db?sslmode=require&password={SECRET}&nonsense=1",
        f"postgresql://ann:{SECRET}@h:port/db",
        f"postgresql://ann:{SECRET}@[h/db",
    ],
)
def test_a_password_that_is_not_percent_encoded_is_refused_and_shown_to_nobody(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        open_store(url)
    assert SECRET not in str(caught.value)
    # Otherwise a traceback would show the quoted text.
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_server_that_refuses_us_or_is_not_there_is_named_without_the_password(postgres: Server) -> None:
    for port, error in ((postgres.port, StoreError), (1, StoreUnavailable)):
        with pytest.raises(error) as caught:
            open_store(f"postgresql://nobody:{SECRET}@127.0.0.1:{port}/nowhere?sslmode=disable")
        assert SECRET not in caught.value.in_full()
        assert f"127.0.0.1:{port}/nowhere" in caught.value.in_full()
        assert "127.0.0.1" not in str(caught.value)


# -- checks before the first statement
# ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "rule"),
    [
        ("-c synchronous_commit=off", StoreError, "synchronous_commit is off"),
        ("-c default_transaction_read_only=on", StoreUnavailable, "takes no writes"),
        ("-c search_path=nowhere", StoreError, "no schema for the journal"),
    ],
)
def test_a_session_that_could_not_keep_a_journal_is_refused(url: str, options: str, error: type[StoreError], rule: str) -> None:
    with pytest.raises(error, match=rule):
        open_store(f"{url}&options={options.replace(' ', '%20').replace('=', '%3D')}")


def test_a_database_in_another_encoding_is_refused(postgres: Server) -> None:
    postgres.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    try:
        with pytest.raises(StoreError, match="stores text as LATIN1"):
            open_store(postgres.url.replace("/postgres?", "/latin?"))
    finally:
        postgres.execute("DROP DATABASE latin")


def test_a_connection_knows_whether_somebody_stands_in_between(url: str) -> None:
    connection = connect(parameters(url), "here")
    assert (connection.direct, connection.prepare_threshold, connection.closed) == (True, 1, False)
    connection.close()
    with Proxy(url) as proxy:
        connection = connect(parameters(proxy.url(url)), "here")
        assert (connection.direct, connection.prepare_threshold) == (False, None)
        connection.close()


class _AnyAddress:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_a_proxy_that_happens_to_have_our_own_port_is_still_a_proxy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its side of the connection and ours go to different places, so both may be given the same number on one machine."""
    monkeypatch.setattr("perdure.store.postgres.connect._own_address", lambda _: _AnyAddress())
    with Pooler(url) as pooler:
        connection = connect(parameters(pooler.url(url)), "there")
        assert (connection.direct, connection.prepare_threshold) == (False, None)
        connection.close()


def test_a_server_that_does_not_answer_costs_its_connection_and_not_more_time_than_was_said(url: str) -> None:
    with Proxy(url) as proxy:
        connections = Connections(proxy.url(url), answer_s=0.3)
        with connections.lent() as connection:
            proxy.silence()
            began_s = time.monotonic()
            with pytest.raises(psycopg.OperationalError, match=r"no answer within 0\.3 s"):
                connection.execute("SELECT 1")
            assert time.monotonic() - began_s < 20
            assert connection.closed
        proxy.speak()
        connections.close()


# -- the few ---------------------------------------------------------------------------------------------------------------------------------
def test_the_one_used_last_is_used_again(few: Connections) -> None:
    with few.lent() as first, few.lent() as second:
        pass
    with few.lent() as again:
        assert again is first
        with few.lent() as other:
            assert other is second


def test_there_are_never_more_than_the_limit_and_who_waits_too_long_hears_why(few: Connections) -> None:
    with few.lent(), few.lent():
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"all 2 connections of this process have been busy for 0\.5 s"), few.lent():
            pytest.fail("a third one")
        assert 0.4 < time.monotonic() - began_s < 20


def test_who_waits_gets_the_next_one_that_comes_back(few: Connections) -> None:
    got: list[int] = []

    def want() -> None:
        with few.lent() as connection:
            got.append(connection.pgconn.backend_pid)

    with few.lent() as kept, few.lent():
        threads = [threading.Thread(target=want) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        assert got == []
        pids = kept.pgconn.backend_pid
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert pids in got


def test_a_connection_that_died_while_it_lay_idle_is_not_handed_out(url: str, few: Connections) -> None:
    with few.lent() as connection:
        pid = connection.pgconn.backend_pid
    with raw(url) as outside:
        outside.execute("SELECT pg_terminate_backend(%s)", (pid,))
    time.sleep(0.1)
    with few.lent() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
        assert connection.pgconn.backend_pid != pid


def end_badly(connections: Connections, how: str) -> Connection:
    with connections.lent() as connection:
        connection.execute("BEGIN")
        match how:
            case "an error of the server":
                with contextlib.suppress(psycopg.Error):
                    connection.execute("SELECT 1/0")
            case "an error of ours":
                raise Unfinished(connection)
            case "nothing said":
                pass
    return connection


class Unfinished(Exception):
    def __init__(self, connection: Connection) -> None:
        self.connection = connection


@pytest.mark.parametrize("how", ["nothing said", "an error of the server", "an error of ours"])
def test_a_connection_that_comes_back_otherwise_than_it_went_is_thrown_away(few: Connections, how: str) -> None:
    try:
        connection = end_badly(few, how)
    except Unfinished as error:
        connection = error.connection
    assert connection.closed
    with few.lent() as another:
        assert another is not connection


def test_a_pool_that_was_closed_says_so(few: Connections) -> None:
    with few.lent() as kept:
        few.close()
    assert kept.closed
    with pytest.raises(StoreError, match="has been closed by this process"), few.lent():
        pytest.fail("it is closed")


def test_a_server_that_is_away_is_not_asked_by_everybody_and_is_told_of_once(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(url) as proxy:
        connections = Connections(proxy.url(url), answer_s=0.3)
        with connections.lent():
            pass
        port = proxy.port
    assert port  # no process listens there any more
    connections.lost()
    caplog.set_level(logging.WARNING, "perdure.store")
    began_s = time.monotonic()
    refused = 0
    while time.monotonic() - began_s < 0.6:
        with pytest.raises(StoreUnavailable, match="cannot be reached"), connections.lent():
            pytest.fail("nobody is there")
        refused += 1
    assert refused > 200  # at once, without trying
    assert len(caplog.records) == 1
    connections._said = parameters(url)
    connections._again_s = 0.0
    with connections.lent() as connection:
        assert not connection.closed
    assert [record.getMessage().split(" after ")[0] for record in caplog.records][1:] == [f"{connections.where} is back"]
    connections.close()


def test_the_pause_before_a_server_is_asked_again_grows_and_ends(url: str) -> None:
    connections = Connections("postgresql://nobody@127.0.0.1:1/nowhere")
    pauses = []
    for _ in range(9):
        connections._again_s = 0.0
        with pytest.raises(StoreUnavailable), connections.lent():
            pytest.fail("nobody is there")
        pauses.append(connections._again_s - time.monotonic())
    assert all(later > 0.9 * sooner for sooner, later in itertools.pairwise(pauses))
    assert pauses[0] < 0.06
    assert 1.5 < pauses[-1] <= 2.0


def test_an_unknown_commit_is_cleared_up_though_the_limit_is_one(url: str) -> None:
    """The old connection is dead, and must not block the connection that looks the transaction up."""
    opened(url).close()
    with Proxy(url) as proxy:
        database = PostgresDatabase(Connections(proxy.url(url), limit=1, answer_s=30.0), "public")
        proxy.rule(Cut("^COMMIT", "after"))
        began_s = time.monotonic()
        database.write(lambda cursor: cursor.change("make_lock", ("x",)), lambda cursor, _: cursor.one("take_lock", ("x",)) is not None)
        assert time.monotonic() - began_s < 20
        proxy.rule(Cut("^COMMIT", "before"))
        with pytest.raises(StoreUnavailable, match="nothing was acknowledged"):
            database.write(lambda cursor: cursor.change("make_lock", ("y",)), lambda cursor, _: cursor.one("take_lock", ("y",)) is not None)
        assert time.monotonic() - began_s < 25
        assert database.read("rate", ("x",)) == []
        database.close()
    with raw(url) as outside:
        assert outside.execute("SELECT key FROM perdure_locks").fetchall() == [("x",)]


# -- messages of the server
# ---------------------------------------------------------------------------------------------
def error_of(state: str, message: str = "it says so\nin two lines") -> psycopg.Error:
    return psycopg.errors.lookup(state)(message)


@pytest.mark.parametrize(
    ("state", "kind", "rule"),
    [
        ("53300", StoreUnavailable, "has no connection left for us; raise max_connections"),
        ("53100", StoreUnavailable, "no room on its disk"),
        ("53200", StoreUnavailable, "out of memory"),
        ("55P03", Locked, "another transaction has locked"),
        ("57014", StoreUnavailable, "cancelled the statement"),
        ("25006", StoreUnavailable, "takes no writes"),
        ("57P01", StoreUnavailable, "cannot be reached"),
        ("57P03", StoreUnavailable, "cannot be reached"),
        ("08006", StoreUnavailable, "cannot be reached"),
        ("58030", StoreUnavailable, "cannot be reached"),
        ("40P01", StoreUnavailable, "because of another one"),
        ("40001", StoreUnavailable, "because of another one"),
        ("28P01", StoreError, "does not let us in"),
        ("3D000", StoreError, "no such database"),
        ("42501", StoreError, "let the owner of the tables migrate and GRANT it"),
        ("42P01", StoreCorrupt, "they were changed by hand"),
        ("42703", StoreCorrupt, "they were changed by hand"),
        ("23505", StoreError, "it says so in two lines"),
    ],
)
def test_what_the_server_says_becomes_one_line_that_says_what_to_do(state: str, kind: type[StoreError], rule: str) -> None:
    told = translated(error_of(state), "HERE")
    assert type(told) is kind
    assert rule in str(told)
    assert "HERE" not in str(told)
    assert told.in_full().startswith("HERE ")
    assert "\n" not in told.in_full()


def test_which_errors_mean_that_nobody_knows_and_which_that_nothing_was_written() -> None:
    assert [state for state in ("08006", "57P01", "57P02", "57P05", "25P03") if not is_loss(error_of(state))] == []
    assert [state for state in ("23505", "40001", "53100", "57014", "55P03", "22003") if is_loss(error_of(state))] == []
    assert is_loss(psycopg.OperationalError("server closed the connection unexpectedly"))
    assert is_loss(psycopg.InterfaceError("the connection is closed"))
    assert not is_loss(psycopg.ProgrammingError("the query has 0 placeholders but 1 parameters were passed"))
    assert [state for state in ("40001", "40P01", "55P03", "23505") if is_rolled_back(error_of(state))] == ["40001", "40P01"]


def test_a_pool_in_a_forked_child_ends_nothing_of_its_parents(few: Connections) -> None:
    with few.lent() as connection:
        pid = connection.pgconn.backend_pid
    child = os.fork()
    if child == 0:
        try:
            few.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.1)
    with few.lent() as connection:
        assert connection.pgconn.backend_pid == pid
