"""What a transaction tool may do with the journal's connection on PostgreSQL.

Only the text of its statements is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.conformance.suite import Held, found, hold_one
from tests.servers.postgres import Server
from tests.unit.postgres_tools import cleared, opened, raw

from perdure.core.events import ThoughtRecorded
from perdure.errors import InvalidInput, StoreError
from perdure.store.api import Append, Committed, Refused, RowChange
from perdure.store.postgres.store import PostgresStore
from perdure.store.postgres.tool_connection import _numbered

FORBIDDEN = [
    *("COMMIT", "commit;", "ROLLBACK", "END", "ABORT", "BEGIN", "START TRANSACTION", "SAVEPOINT x", "RELEASE x", "ROLLBACK TO x"),
    *("PREPARE TRANSACTION 'x'", "COMMIT PREPARED 'x'", "PREPARE x AS SELECT 1", "EXECUTE x", "DEALLOCATE ALL", "DISCARD ALL"),
    *("-- why not\nCOMMIT", "/* SELECT */ COMMIT", "/* a /* nested */ one */ COMMIT", "/**/COMMIT", " \n\t COMMIT", ";COMMIT"),
    *("SET synchronous_commit = off", "SET LOCAL synchronous_commit = off", "RESET ALL", "SHOW all", "SET ROLE admin"),
    *("COPY mine TO STDOUT", "COPY mine FROM STDIN", "DO $$ BEGIN COMMIT; END $$", "CALL anything()", "LISTEN x", "NOTIFY x", "VACUUM"),
    *("GRANT ALL ON mine TO admin", "REVOKE ALL ON mine FROM admin", "EXPLAIN ANALYZE SELECT 1", "LOAD 'x'", "CHECKPOINT", "ANALYZE", ""),
    *("SELECT * FROM perdure_runs", "SELECT * FROM PERDURE_RUNS", 'SELECT * FROM "perdure_runs"', "TABLE perdure_events"),
    *('SELECT * FROM U&"\\0070erdure_runs"', 'SELECT * FROM u&"perdure_runs"', "SELECT * FROM public.perdure_runs"),
    *("WITH x AS (DELETE FROM perdure_inbox RETURNING 1) SELECT * FROM x", "INSERT INTO perdure_workers VALUES (1)"),
    *(
        "TRUNCATE mine, perdure_events",
        "LOCK TABLE perdure_runs",
        "COMMENT ON TABLE perdure_runs IS 'x'",
        "MERGE INTO perdure_runs USING x",
    ),
    *("UPDATE mine SET a = (SELECT seq FROM perdure_runs)", "DELETE FROM mine USING perdure_runs", "DROP TABLE perdure_events"),
    *(
        "SELECT perdure_refuse()",
        "DROP FUNCTION perdure_refuse",
        "ALTER TABLE mine RENAME TO perdure_mine",
        "CREATE TABLE perdure_mine (a int)",
    ),
    *("CREATE INDEX mine ON perdure_events (ts)", "CREATE TRIGGER mine AFTER INSERT ON perdure_events EXECUTE FUNCTION f()"),
    *("CREATE ROLE mallory", "/* x */ CREATE ROLE mallory", "CREATE/**/USER mallory", "ALTER DATABASE x SET synchronous_commit = off"),
    *("ALTER ROLE app SET synchronous_commit = off", "ALTER SYSTEM SET fsync = off", "DROP SCHEMA public CASCADE", "DROP OWNED BY app"),
    *("ALTER SCHEMA public RENAME TO x", "CREATE EXTENSION x", "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'"),
    *("CREATE TEMP TABLE x (a int)", "CREATE TEMPORARY TABLE x (a int)", "CREATE TRIGGER x BEFORE INSERT ON mine EXECUTE FUNCTION f()"),
]
ALLOWED = [
    "SELECT 'perdure_runs; COMMIT' AS said",
    "SELECT $$perdure_runs$$, $x$ perdure_events $$ $x$, E'it\\'s perdure''s', '\\'",
    "SELECT 1 -- perdure_runs",
    "SELECT /* perdure_runs ? :name */ 1",
    "SELECT '?', ':name', $$?$$, E'\\'?'",
    "SELECT 1::bigint, '2'::text::int, ARRAY[1, 2]::int[]",
    "VALUES (1), (2)",
    "TABLE mine",
    "WITH x AS (SELECT 1 AS a) INSERT INTO mine SELECT a FROM x RETURNING a",
    "MERGE INTO mine USING (VALUES (1)) AS v (a) ON mine.a = v.a WHEN NOT MATCHED THEN INSERT VALUES (v.a)",
    'SELECT a AS "commit", a AS "begin" FROM mine',
    "SELECT a AS commit_ FROM mine FOR UPDATE",
    "CREATE TABLE IF NOT EXISTS weather (temp int, set_at timestamptz DEFAULT now())",
    "CREATE UNIQUE INDEX ON mine (a)",
    "CREATE OR REPLACE VIEW seen AS SELECT * FROM mine",
    "ALTER TABLE mine ADD COLUMN role text",
    "DROP TABLE IF EXISTS user_schema_role",
    "LOCK TABLE mine IN SHARE MODE",
    "COMMENT ON TABLE mine IS 'of no role'",
    "TRUNCATE mine",
    "SELECT 1; -- and no more",
]


@pytest.fixture
def store(postgres: Server) -> Iterator[PostgresStore]:
    store = opened(cleared(postgres))
    yield store
    store.close()


class Tool:
    """A run in the middle of an effect="transaction" call."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.held = hold_one(store, "r")
        self.head = self.held.append(ThoughtRecorded("intent"))
        self.tail = Held(self.held.lease, self.held.seq + 1, self.head.events[-1].hash).append(
            ThoughtRecorded("result"), row=RowChange("running")
        )

    def run(self, work: Callable[[Any], Any]) -> Any:
        def both(connection: Any) -> tuple[Append, Any]:
            value = work(connection)
            return self.tail, value

        return self.store.transact(self.head, both)


@pytest.fixture
def tool(store: PostgresStore) -> Tool:
    return Tool(store)


@pytest.mark.parametrize("sql", FORBIDDEN)
def test_a_tool_may_not(sql: str) -> None:
    """A tool may not end the transaction, change settings, use perdure's tables, or create other kinds of objects."""
    with pytest.raises(InvalidInput, match="a transaction tool may not run"):
        _numbered(sql)


def test_a_tool_may_do_everything_with_tables_of_its_own(tool: Tool) -> None:
    def work(connection: Any) -> Any:
        connection.execute("CREATE TABLE mine (a int)")
        return [connection.execute(sql) for sql in ALLOWED]

    answer, results = tool.run(work)
    assert answer == Committed()
    assert results[0] == [("perdure_runs; COMMIT",)]
    assert results[1] == [("perdure_runs", " perdure_events $$ ", "it's perdure's", "\\")]
    assert results[4] == [("?", ":name", "?", "'?")]
    assert results[5] == [(1, 2, [1, 2])]


@pytest.mark.parametrize(
    "sql", ["SELECT 1; COMMIT", "SELECT 1; SELECT 2", "SELECT 1;\n-- x\nROLLBACK", "INSERT INTO mine VALUES (1); COMMIT; SELECT 1"]
)
def test_two_statements_in_one_text_are_refused_and_nothing_has_happened(tool: Tool, sql: str) -> None:
    with pytest.raises(InvalidInput, match="one statement at a time"):
        tool.run(lambda connection: connection.execute(sql))
    assert found(tool.store, "r").seq == 2
    assert tool.store.append([tool.head]) == [Committed()]


def test_a_forbidden_statement_that_the_tool_catches_leaves_the_transaction_as_it_was(tool: Tool) -> None:
    def work(connection: Any) -> Any:
        with pytest.raises(InvalidInput):
            connection.execute("COMMIT")
        return connection.execute("SELECT 7")

    assert tool.run(work) == (Committed(), [(7,)])


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_tool_that_catches_the_servers_error_has_not_succeeded(tool: Tool, goes_on: bool) -> None:
    def work(connection: Any) -> str:
        connection.execute("CREATE TABLE mine (a int UNIQUE)")
        connection.execute("INSERT INTO mine VALUES (1)")
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("INSERT INTO mine VALUES (1)")
        if goes_on:
            with pytest.raises(StoreError, match="do not catch the error inside the tool"):
                connection.execute("SELECT 1")
        return "known already"

    with pytest.raises(StoreError, match="was rolled back; nothing has happened"):
        tool.run(work)
    assert found(tool.store, "r").seq == 2
    with raw(tool.store.url) as other:
        assert other.execute("SELECT to_regclass('mine')").fetchone() == (None,)


def test_an_error_that_the_tool_does_not_catch_goes_up_as_it_is(tool: Tool) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable, match="nowhere"):
        tool.run(lambda connection: connection.execute("SELECT * FROM nowhere"))
    assert tool.store.append([tool.head]) == [Committed()]


def test_the_connection_is_dead_once_the_tool_has_returned(tool: Tool) -> None:
    kept: list[Any] = []
    tool.run(kept.append)
    with pytest.raises(StoreError, match="after its tool had returned"):
        kept[0].execute("SELECT 1")


def test_a_result_that_the_guard_refuses_takes_the_effect_back(tool: Tool) -> None:
    tool.tail = Held(tool.held.lease, tool.held.seq + 5, tool.held.head).append(ThoughtRecorded("out of order"))
    answer, value = tool.run(lambda connection: connection.execute("CREATE TABLE mine (a int)"))
    assert isinstance(answer, Refused)
    assert value is None
    with raw(tool.store.url) as other:
        assert other.execute("SELECT to_regclass('mine')").fetchone() == (None,)


def test_parameters_are_written_as_on_sqlite(tool: Tool) -> None:
    def work(connection: Any) -> list[Any]:
        connection.execute("CREATE TABLE mine (a int, b text, c date, d jsonb, e bigint, f bytea, g boolean, h float8)")
        values = (1, "x'y", "2026-01-02", '{"k": [1]}', 2**62, b"\0\xff", True, 0.5)
        connection.execute("INSERT INTO mine VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        connection.execute("INSERT INTO mine (a, e) VALUES (?2, ?1)", (7, 8))
        connection.executemany("INSERT INTO mine (a, b) VALUES (:a, :b || :b)", [{"a": 2, "b": "z"}, {"a": 3, "b": None, "unused": 1}])
        return [
            connection.execute("SELECT a, b, c::text, d -> 'k', e, f, g, h FROM mine WHERE a = :a", {"a": 1})[0],
            connection.execute("SELECT a, e FROM mine WHERE a = ?", [8])[0],
            connection.execute("SELECT b FROM mine WHERE a IN (?, ?) ORDER BY a", (2, 3)),
        ]

    assert tool.run(work) == (
        Committed(),
        [(1, "x'y", "2026-01-02", [1], 2**62, b"\0\xff", True, 0.5), (8, 7), [("zz",), (None,)]],
    )


@pytest.mark.parametrize(
    ("sql", "params", "rule"),
    [
        ("SELECT ?, :a", (1,), "mixes"),
        ("SELECT :a", (1,), "give a dict"),
        ("SELECT :a, :b", {"a": 1}, "needs a value for :b"),
        ("SELECT ?", {"a": 1}, "has no :name"),
    ],
)
def test_parameters_that_do_not_fit_are_named_before_anything_is_sent(tool: Tool, sql: str, params: Any, rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        tool.run(lambda connection: connection.execute(sql, params))


def test_what_a_tool_prepares_or_sets_is_not_left_for_the_next_one(store: PostgresStore) -> None:
    """The connection goes back to the others: same settings, nothing of the tool's in the session."""
    tool = Tool(store)
    tool.run(lambda connection: connection.execute("CREATE TABLE mine (a int)"))
    with store._connections.lent() as connection:
        assert connection.execute("SELECT current_setting('idle_in_transaction_session_timeout')").fetchone() == ("0",)
        assert connection.execute("SELECT count(*) FROM pg_class WHERE relpersistence = 't'").fetchone() == (0,)
        assert connection.execute("SELECT $1 + 1", (1,)).fetchone() == (2,)  # its numbers are numbers again, not text
