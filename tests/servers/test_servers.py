"""Tests of the servers that other tests use. These tests are not about perdure."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import psycopg
import pytest
from tests.servers.binaries import Account, NoPostgres, binaries
from tests.servers.pooler import Pooler
from tests.servers.postgres import Server, check_ours
from tests.servers.proxy import Cut, Proxy
from tests.servers.undertaker import processes_in

ROOT = Path(__file__).resolve().parents[2]
SHORT_S = 0.3
OWNER = """
import sys, time
from tests.servers.postgres import Server
server = Server()
server.start()
if sys.argv[1] == "True":
    server.pause()
print(server.folder, flush=True)
time.sleep(60)
"""


@pytest.fixture
def proxy(postgres: Server, postgres_url: str) -> Iterator[Proxy]:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE notes (text text PRIMARY KEY)")
    with Proxy(postgres.url) as proxy:
        yield proxy


@pytest.fixture
def pooler(postgres_url: str) -> Iterator[Pooler]:
    with Pooler(postgres_url, size=2) as pooler:
        yield pooler


def connect(url: str, **options: Any) -> psycopg.Connection:
    return psycopg.connect(url, connect_timeout=5, **options)


def notes(url: str) -> list[str]:
    with connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT text FROM notes ORDER BY text")]


def insert(connection: psycopg.Connection, text: str) -> None:
    connection.execute("INSERT INTO notes VALUES (%s)", (text,))


def one(connection: psycopg.Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def in_thread(*steps: Callable[[], object]) -> threading.Thread:
    def take_all() -> None:
        for step in steps:
            step()

    thread = threading.Thread(target=take_all, daemon=True)
    thread.start()
    return thread


def until(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


# ── the server ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_server_is_durable_and_its_databases_belong_to_nobody_special(postgres_url):
    with connect(postgres_url) as connection:
        assert [one(connection, f"SHOW {name}") for name in ("fsync", "synchronous_commit", "full_page_writes")] == ["on"] * 3
        assert one(connection, "SHOW default_transaction_isolation") == "read committed"
        assert one(connection, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
        connection.execute("CREATE TABLE t (n int)")  # it may still create tables


def test_the_server_listens_on_the_loopback_alone_and_never_runs_as_root(postgres):
    with connect(postgres.url) as connection:
        assert one(connection, "SHOW listen_addresses") == "127.0.0.1"
        assert one(connection, "SHOW unix_socket_directories") == ""
    users = {
        process.info["uids"].effective for process in psutil.process_iter(["uids", "cwd"]) if process.info["cwd"] == str(postgres.data)
    }
    assert len(users) == 1
    assert 0 not in users


def test_each_database_is_new_and_dropped_under_whoever_is_connected(postgres):
    first, second = postgres.new_database(), postgres.new_database()
    assert first != second
    with connect(first) as connection:
        postgres.drop(first)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        connect(first)
    postgres.drop(second)


def test_a_database_that_is_given_back_is_the_next_new_one_and_has_nothing_in_it(postgres, postgres_url):
    url = postgres.new_database()
    with connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (n int); CREATE VIEW v AS SELECT n FROM t; CREATE TYPE mood AS ENUM ('good')")
        connection.execute("CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'; GRANT ALL ON SCHEMA public TO PUBLIC")
        postgres.give_back(url)  # whoever is connected
    assert postgres.new_database() == url
    look = """
        SELECT array(SELECT relname FROM pg_class WHERE oid > 16383 AND relnamespace = 'public'::regnamespace),
               array(SELECT proname FROM pg_proc WHERE oid > 16383), array(SELECT typname FROM pg_type WHERE oid > 16383),
               (SELECT (nspacl, nspowner::regrole, obj_description(oid))::text FROM pg_namespace WHERE nspname = 'public')
    """
    with connect(url) as reused, connect(postgres.url) as maintenance:
        assert reused.execute(look).fetchall() == maintenance.execute(look).fetchall()
    postgres.drop(url)


@pytest.mark.parametrize(
    "odd",
    [
        'ALTER DATABASE "{name}" SET search_path = elsewhere',
        "ALTER ROLE app IN DATABASE \"{name}\" SET lock_timeout = '1s'",
        "CREATE SCHEMA elsewhere",
        'REVOKE CONNECT ON DATABASE "{name}" FROM PUBLIC',
        "ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC",
        "SELECT lo_create(0)",
    ],
)
def test_a_database_that_is_not_like_a_new_one_is_dropped_when_it_is_given_back(postgres, postgres_url, odd):
    url = postgres.new_database()
    with connect(url, autocommit=True) as connection:
        connection.execute(odd.format(name=connection.info.dbname))
    postgres.give_back(url)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        connect(url)


def test_what_is_poured_from_one_database_into_another_is_all_there_and_counts_on(postgres, postgres_url):
    source, target = postgres.new_database(), postgres.new_database()
    for url in (source, target):
        with connect(url, autocommit=True) as connection:
            connection.execute(
                "CREATE TABLE t (n BIGINT GENERATED BY DEFAULT AS IDENTITY, words TEXT, bytes BYTEA); CREATE TABLE u (n int)"
            )
            connection.execute("INSERT INTO t (words) VALUES ('one that both have')")
    with connect(source, autocommit=True) as connection:
        connection.execute("INSERT INTO t (words, bytes) VALUES (NULL, '\\x0009'), (E'a\tb\\\\', '')")
    postgres.pour(source, target)
    rows = []
    for url in (source, target):
        with connect(url, autocommit=True) as connection:
            connection.execute("INSERT INTO t (words) VALUES ('afterwards')")
            rows.append(connection.execute("SELECT n, words, bytes FROM t ORDER BY n").fetchall())
        postgres.drop(url)
    assert rows[0] == rows[1]
    assert [row[0] for row in rows[1]] == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_ends_connections_and_keeps_what_was_committed(postgres, postgres_url, mode):
    with connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS n")
        postgres.restart(mode)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with connect(postgres_url) as connection:
        assert one(connection, "SELECT n FROM t") == 7


def test_a_killed_server_recovers_and_a_stopped_one_refuses(postgres, postgres_url):
    with connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS n")
    postgres.kill()
    assert processes_in(postgres.folder) == []
    with pytest.raises(psycopg.OperationalError, match="refused"):
        connect(postgres_url)
    postgres.start(wait=False)
    postgres.wait_ready()
    with connect(postgres_url) as connection:
        assert one(connection, "SELECT n FROM t") == 7


def test_a_paused_server_answers_nobody_until_it_is_resumed(postgres, postgres_url):
    with connect(postgres_url, autocommit=True) as connection:
        postgres.pause()
        answered = threading.Event()
        in_thread(lambda: connection.execute("SELECT 1"), answered.set)
        assert not answered.wait(SHORT_S)
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(postgres_url, connect_timeout=2)
        assert not answered.is_set()
        postgres.resume()
        assert answered.wait(60)


def test_a_paused_server_can_be_stopped_and_revived(postgres, postgres_url):
    postgres.pause()
    postgres.stop("immediate")
    assert not postgres.is_running
    postgres.revive()
    postgres.pause()
    postgres.revive()
    with connect(postgres_url) as connection:
        assert one(connection, "SELECT 1") == 1


def test_a_standby_reads_and_refuses_to_write_until_it_is_revived(postgres, postgres_url):
    postgres.restart_as_standby()
    with connect(postgres_url) as connection:
        assert one(connection, "SELECT pg_is_in_recovery()") is True
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("CREATE TABLE t (n int)")
    postgres.revive()
    with connect(postgres_url) as connection:
        connection.execute("CREATE TABLE t (n int)")


def test_another_server_in_our_place_is_noticed(postgres):
    with pytest.raises(RuntimeError, match="is not ours: its data directory is"):
        check_ours(postgres.url, Path("/somewhere/else"))


def test_a_port_that_somebody_took_meanwhile_is_given_up_before_the_first_start_only(postgres):
    server = Server(max_connections="20")
    try:
        server.port = postgres.port
        server.start()
        assert server.port != postgres.port
        with connect(server.url) as connection:
            assert one(connection, "SHOW max_connections") == "20"
        server.stop("immediate")
        server.port = postgres.port
        with pytest.raises(Exception, match="Address already in use"):
            server.start()
    finally:
        server.close()
    assert not server.folder.exists()


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(postgres):
    postmaster = int((postgres.data / "postmaster.pid").read_text().split()[0])
    assert os.getpgid(postmaster) == postmaster


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_a_server_does_not_outlive_its_killed_test_process(paused):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(paused)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert len(processes_in(folder)) >= 4
        owner.kill()
    deadline = time.monotonic() + 60
    while folder.exists() or processes_in(folder):
        assert time.monotonic() < deadline, f"still there: {folder}, {processes_in(folder)}"
        time.sleep(0.05)


def test_a_missing_postgresql_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.servers.binaries._NAMED", str(tmp_path))
    with pytest.raises(NoPostgres, match="PERDURE_TEST_PG_BIN="):
        binaries(Account(os.geteuid(), os.getegid()), tmp_path)


def test_binaries_that_the_servers_user_cannot_reach_are_copied_and_work_there(postgres, monkeypatch, tmp_path):
    me, spare = Account(os.geteuid(), os.getegid()), tmp_path / "spare"
    monkeypatch.setattr(Account, "can_enter", lambda who, folder: False)
    copied = binaries(me, spare)
    assert copied.is_relative_to(spare)
    version = subprocess.run([copied / "initdb", "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    with connect(postgres.url) as connection:
        assert one(connection, "SHOW server_version") in version


def test_a_folder_behind_a_locked_one_cannot_be_entered_by_others(tmp_path):
    inner = tmp_path / "locked" / "inner"
    inner.mkdir(parents=True)
    assert Account(os.geteuid(), os.getegid()).can_enter(inner)
    inner.parent.chmod(0o700)
    assert not Account(os.geteuid() + 12345, os.getegid() + 12345).can_enter(inner)


# ── the proxy ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_proxy_without_rules_changes_nothing(proxy, postgres_url):
    # Encryption is requested and refused; large rows and copies pass completely.
    url = proxy.url(postgres_url).replace("sslmode=disable", "sslmode=prefer")
    with connect(url) as connection:
        row = connection.execute("SELECT %s", ("x" * 300_000,)).fetchone()
        assert row == ("x" * 300_000,)
        with connection.cursor().copy("COPY notes FROM STDIN") as copy:
            copy.write_row(("copied",))
        with pytest.raises(psycopg.errors.UniqueViolation):
            insert(connection, "copied")
    assert proxy.connections == 1
    assert not proxy.cuts


def test_a_cancel_request_passes_the_proxy(proxy, postgres_url):
    with connect(proxy.url(postgres_url)) as connection:
        # Not cancel(): it waits for the proxy while it keeps the interpreter's lock from it.
        timer = threading.Timer(SHORT_S, connection.cancel_safe)
        timer.start()
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute("SELECT pg_sleep(20)")
        timer.join()


@pytest.mark.parametrize(("moment", "expected"), [("before", []), ("after", ["a"]), ("late", ["a"])])
def test_a_commit_is_lost_before_it_took_effect_after_it_or_arrives_late(proxy, postgres_url, moment, expected):
    cut = proxy.rule(Cut(r"^COMMIT", moment, seconds=SHORT_S))
    connection = connect(proxy.url(postgres_url))
    insert(connection, "a")
    with pytest.raises(psycopg.OperationalError):
        connection.commit()
    if moment == "late":
        assert notes(postgres_url) == [], "the client is told first"
    cut.wait_done()
    assert notes(postgres_url) == expected
    assert (cut.seen, cut.made, cut.done, proxy.cuts[moment]) == (1, 1, 1, 1)
    with connect(proxy.url(postgres_url)) as connection:
        insert(connection, "again")  # once was asked for
    assert notes(postgres_url) == [*expected, "again"]


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize(("moment", "expected"), [("before", ["0", "1"]), ("after", ["0", "1", "2"])])
def test_the_nth_execution_is_cut_however_it_was_prepared(proxy, postgres_url, prepare, moment, expected):
    proxy.rule(Cut("INSERT INTO notes", moment, nth=3))
    connection = connect(proxy.url(postgres_url), autocommit=True)
    for number in (0, 1):
        connection.execute("INSERT INTO notes VALUES (%s)", (str(number),), prepare=prepare)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("INSERT INTO notes VALUES (%s)", ("2",), prepare=prepare)
    assert notes(postgres_url) == expected


def test_every_nth_is_cut_as_often_as_was_asked_over_all_connections(proxy, postgres_url):
    cut = proxy.rule(Cut("INSERT INTO notes", "after", nth=2, times=3))
    lost = []
    for number in range(10):
        try:
            with connect(proxy.url(postgres_url), autocommit=True) as connection:
                insert(connection, str(number))
        except psycopg.OperationalError:
            lost.append(number)
    assert lost == [1, 3, 5]
    assert cut.done == 3
    assert len(notes(postgres_url)) == 10


@pytest.mark.parametrize(("moment", "expected"), [("before", []), ("after", ["a", "b", "c"]), ("late", ["a", "b", "c"])])
def test_a_pipeline_is_cut_as_the_one_batch_that_it_is(proxy, postgres_url, moment, expected):
    cut = proxy.rule(Cut("INSERT INTO notes", moment, nth=2, seconds=0.05))
    connection = connect(proxy.url(postgres_url))

    def write_all() -> None:
        with connection.pipeline():
            for text in ("a", "b", "c"):
                insert(connection, text)
            connection.commit()

    with pytest.raises(psycopg.OperationalError):
        write_all()
    cut.wait_done()
    assert notes(postgres_url) == expected


def test_a_client_without_a_deadline_hangs_on_a_silent_peer_until_its_socket_is_closed(proxy, postgres_url):
    cut = proxy.rule(Cut("INSERT INTO notes", "silent"))
    connection = connect(proxy.url(postgres_url), autocommit=True)
    ended = threading.Event()

    def work() -> None:
        try:
            insert(connection, "a")
        except psycopg.OperationalError:
            ended.set()

    in_thread(work)
    cut.wait_done()
    assert notes(postgres_url) == ["a"], "the server has done it"
    assert not ended.wait(SHORT_S)
    # The client has only its own deadline: it closes its own socket.
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
    assert ended.wait(60)
    connection.close()


@pytest.mark.parametrize("directions", [("to server",), ("to client",), ()])
def test_silence_holds_everything_and_speaking_delivers_it(proxy, postgres_url, directions):
    connection = connect(proxy.url(postgres_url), autocommit=True)
    proxy.silence(*directions)
    answered = threading.Event()
    in_thread(lambda: insert(connection, "a"), answered.set)
    assert not answered.wait(SHORT_S)
    assert notes(postgres_url) == (["a"] if directions == ("to client",) else [])
    proxy.speak()
    assert answered.wait(60)
    assert notes(postgres_url) == ["a"]
    connection.close()


def test_a_new_client_of_a_silent_proxy_is_accepted_and_never_greeted(proxy, postgres_url):
    proxy.silence()
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        psycopg.connect(proxy.url(postgres_url), connect_timeout=2)
    proxy.speak()
    connect(proxy.url(postgres_url)).close()


def test_the_server_does_not_hear_that_a_client_left_in_silence(postgres, proxy, postgres_url):
    connection = connect(proxy.url(postgres_url))
    backend = connection.info.backend_pid
    insert(connection, "a")
    proxy.silence("to server")
    connection.close()
    alive = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {backend}"
    with connect(postgres.url, autocommit=True) as watcher:
        time.sleep(SHORT_S)
        assert one(watcher, alive) == 1
        proxy.speak()
        until(lambda: one(watcher, alive) == 0)
    assert notes(postgres_url) == []


def test_reset_cuts_every_connection_and_latency_slows_each(proxy, postgres_url):
    first, second = connect(proxy.url(postgres_url)), connect(proxy.url(postgres_url))
    proxy.reset()
    for connection in (first, second):
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with connect(proxy.url(postgres_url)) as connection:
        connection.execute("SELECT 1")
        proxy.latency_s = 0.1
        began = time.monotonic()
        connection.execute("SELECT 1")
        assert time.monotonic() - began >= 0.2
        proxy.latency_s = 0.0


def test_the_proxy_refuses_while_the_server_is_down_and_works_again_after(postgres, proxy, postgres_url):
    postgres.stop("immediate")
    with pytest.raises(psycopg.OperationalError):
        connect(proxy.url(postgres_url))
    postgres.start()
    connect(proxy.url(postgres_url)).close()


# ── the pooler ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_transaction_runs_on_another_connection_and_stays_on_it(pooler, postgres_url):
    with connect(pooler.url(postgres_url), prepare_threshold=None) as connection:
        seen = []
        for _ in range(4):
            inside = {one(connection, "SELECT pg_backend_pid()") for _ in range(3)}
            connection.commit()
            assert len(inside) == 1
            seen.append(inside.pop())
    assert seen[0] != seen[1]
    assert seen == seen[:2] * 2


def test_many_clients_share_few_connections(pooler, postgres_url, postgres):
    clients = [connect(pooler.url(postgres_url), autocommit=True) for _ in range(10)]
    pids = {one(client, "SELECT pg_backend_pid()") for client in clients}
    assert len(pids) == 2
    for client in clients:
        client.close()


def test_a_client_waits_while_all_connections_are_inside_transactions(pooler, postgres_url):
    first, second, third = (connect(pooler.url(postgres_url)) for _ in range(3))
    first.execute("SELECT 1")
    second.execute("SELECT 1")
    answered = threading.Event()
    waiting = in_thread(lambda: third.execute("SELECT 1"), third.commit, answered.set)
    assert not answered.wait(SHORT_S)
    first.commit()
    assert answered.wait(60)
    waiting.join()
    for client in (first, second, third):
        client.close()


def test_a_client_that_leaves_inside_a_transaction_is_rolled_back_and_its_place_is_free_again(pooler, postgres_url):
    for _ in range(4):
        client = connect(pooler.url(postgres_url))
        client.execute("CREATE TABLE t (n int)")
        client.close()
    with connect(pooler.url(postgres_url)) as connection:
        assert one(connection, "SELECT to_regclass('t')") is None


def test_notifications_are_lost_behind_the_pooler(pooler, postgres_url):
    def heard_by(url: str) -> int:
        with connect(url, autocommit=True) as listener, connect(postgres_url, autocommit=True) as speaker:
            listener.execute("LISTEN news")
            speaker.execute("NOTIFY news")
            return len(list(listener.notifies(timeout=SHORT_S)))

    assert heard_by(postgres_url) == 1
    assert heard_by(pooler.url(postgres_url)) == 0


def test_named_prepared_statements_break_behind_the_pooler_and_unnamed_ones_do_not(pooler, postgres_url):
    with connect(pooler.url(postgres_url), autocommit=True, prepare_threshold=None) as connection:
        for _ in range(10):
            connection.execute("SELECT %s::int", (1,))
    with connect(pooler.url(postgres_url), autocommit=True) as connection, pytest.raises(psycopg.errors.InvalidSqlStatementName):
        connection.execute("SELECT %s::int", (1,), prepare=True)


@pytest.mark.parametrize("discard", [False, True])
def test_a_sessions_settings_and_locks_are_met_by_the_next_unless_discarded(postgres_url, discard):
    with Pooler(postgres_url, size=1, discard=discard) as pooler:
        url = pooler.url(postgres_url)
        with connect(url, autocommit=True) as first, connect(url, autocommit=True) as second:
            first.execute("SET lock_timeout = '77s'")
            first.execute("SELECT pg_advisory_lock(5)")
            first.close()
            assert one(second, "SHOW lock_timeout") == ("0" if discard else "77s")
            assert one(second, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == (0 if discard else 1)


def test_a_pipeline_of_several_syncs_keeps_its_connection_to_the_end(pooler, postgres_url):
    with connect(pooler.url(postgres_url), autocommit=True, prepare_threshold=None) as connection, connection.pipeline() as pipeline:
        cursors = []
        for number in range(5):
            cursors.append(connection.execute("SELECT %s::int", (number,)))
            pipeline.sync()
        assert [cursor.fetchone() for cursor in cursors] == [(number,) for number in range(5)]


def test_session_parameters_at_the_start_are_refused_as_pgbouncer_does(pooler, postgres_url):
    with pytest.raises(psycopg.OperationalError, match="unsupported startup parameter: options"):
        connect(pooler.url(postgres_url), options="-c lock_timeout=1s")


def test_the_pooler_outlives_a_restart_of_its_server(postgres, pooler, postgres_url):
    url = pooler.url(postgres_url)
    client = connect(url, autocommit=True)
    client.execute("SELECT 1")
    postgres.stop("immediate")
    with pytest.raises(psycopg.OperationalError):
        client.execute("SELECT 1")
    postgres.start()
    for _ in range(4):
        with connect(url) as connection:
            assert one(connection, "SELECT 1") == 1
