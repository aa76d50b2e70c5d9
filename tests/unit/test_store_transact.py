"""What a transaction tool may do with the journal's connection, and what SQLite itself refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from tests.conformance.suite import Held, found, hold_one

from perdure.core.events import ThoughtRecorded
from perdure.errors import InvalidInput, StoreError
from perdure.store.api import Append, Committed, Refused, RowChange
from perdure.store.sqlite.queries import QUERIES
from perdure.store.sqlite.store import SqliteStore


@pytest.fixture(params=["in memory", "on disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore("sqlite:", None if request.param == "in memory" else tmp_path / "journal.db")
    yield opened
    opened.close()


class Tool:
    """A run in the middle of an effect="transaction" call."""

    def __init__(self, store: SqliteStore) -> None:
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
def tool(store: SqliteStore) -> Tool:
    return Tool(store)


@pytest.mark.parametrize(
    "sql",
    [
        "COMMIT",
        "ROLLBACK",
        "BEGIN",
        "SAVEPOINT x",
        "ATTACH 'other.db' AS other",
        "DETACH main",
        "PRAGMA synchronous = OFF",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA writable_schema = 1",
        "PRAGMA wal_checkpoint",
        "UPDATE perdure_runs SET status = 'succeeded'",
        "UPDATE PERDURE_RUNS SET status = 'succeeded'",
        "DELETE FROM main.perdure_inbox",
        "INSERT INTO perdure_workers VALUES ('x', 'x', 1, 1, 1)",
        "DROP TABLE perdure_events",
        "DROP TRIGGER perdure_events_no_update",
        "DROP INDEX perdure_runs_line",
        "ALTER TABLE perdure_runs ADD COLUMN x",
        "CREATE INDEX mine ON perdure_events (ts)",
        "CREATE TRIGGER mine AFTER INSERT ON perdure_events BEGIN SELECT 1; END",
        "CREATE TEMP TRIGGER mine AFTER INSERT ON perdure_events BEGIN SELECT 1; END",
        "CREATE TEMP TABLE perdure_runs (id)",
        "CREATE TABLE perdure_mine (id)",
        "CREATE TEMP VIEW perdure_events AS SELECT 1",
        QUERIES["delete_worker"],  # the same text that our own code has prepared: the statement cache must not let it through
    ],
)
def test_a_tool_may_not(tool: Tool, sql: str) -> None:
    """… end the transaction, leave the file, change settings or touch perdure's own tables."""
    tool.store.register("w2", "host:2", 2, 1)
    tool.store.unregister("w2", 1)
    before = found(tool.store, "r")
    with pytest.raises(InvalidInput, match="a transaction tool may not run"):
        tool.run(lambda connection: connection.execute(sql, ("x",) if "?" in sql else ()))
    assert found(tool.store, "r") == before
    assert tool.store.append([tool.held.append(ThoughtRecorded("goes on"))]) == [Committed()]


def test_a_trigger_of_a_tools_own_table_does_not_reach_perdures_tables_either(tool: Tool) -> None:
    def work(connection: Any) -> None:
        connection.execute("CREATE TABLE mine (a)")
        connection.execute("CREATE TRIGGER sly AFTER INSERT ON mine BEGIN DELETE FROM perdure_workers; END")
        connection.execute("INSERT INTO mine VALUES (1)")

    with pytest.raises(InvalidInput, match="may not run"):
        tool.run(work)


def test_a_tool_may_describe_its_own_tables(tool: Tool) -> None:
    def work(connection: Any) -> Any:
        connection.execute("CREATE TABLE IF NOT EXISTS mine (a INTEGER PRIMARY KEY, b TEXT)")
        connection.execute("INSERT INTO mine (b) VALUES (:b)", {"b": "x"})
        return [row[1] for row in connection.execute("PRAGMA table_info(mine)")]

    assert tool.run(work) == (Committed(), ["a", "b"])


def test_a_tool_sees_nothing_of_other_runs(tool: Tool) -> None:
    with pytest.raises(InvalidInput, match="perdure's own tables"):
        tool.run(lambda connection: connection.execute("SELECT status FROM perdure_runs"))


def test_a_temporary_table_cannot_take_the_place_of_one_of_ours(tool: Tool) -> None:
    with pytest.raises(InvalidInput, match="temporary"):
        tool.run(lambda connection: connection.execute("CREATE TEMP TABLE x (a)"))


def test_a_table_of_a_tools_own_cannot_be_renamed_to_a_name_of_ours(tool: Tool) -> None:
    def work(connection: Any) -> None:
        connection.execute("CREATE TABLE mine (a)")
        connection.execute("ALTER TABLE mine ADD COLUMN b")
        connection.execute("ALTER TABLE mine RENAME TO perdure_anything")

    with pytest.raises(InvalidInput, match="no renaming"):
        tool.run(work)


def test_what_the_tools_own_sql_raises_is_the_tools_to_catch(tool: Tool) -> None:
    def work(connection: Any) -> str:
        connection.execute("CREATE TABLE mine (a UNIQUE)")
        connection.execute("INSERT INTO mine VALUES (1)")
        try:
            connection.execute("INSERT INTO mine VALUES (1)")
        except apsw.ConstraintError:
            return "known already"
        return "new"

    assert tool.run(work) == (Committed(), "known already")


def test_an_uncaught_sql_error_goes_up_as_it_is(tool: Tool) -> None:
    with pytest.raises(apsw.SQLError, match="no such table"):
        tool.run(lambda connection: connection.execute("SELECT * FROM nowhere"))


def test_when_the_tools_sql_rolls_back_by_itself_nothing_more_is_written(tool: Tool) -> None:
    def work(connection: Any) -> None:
        connection.execute("CREATE TABLE mine (a UNIQUE)")
        connection.execute("INSERT INTO mine VALUES (1)")
        with pytest.raises(apsw.ConstraintError):
            connection.execute("INSERT OR ROLLBACK INTO mine VALUES (1)")
        with pytest.raises(StoreError, match="rolled back by SQLite"):
            connection.execute("CREATE TABLE alone (a)")

    with pytest.raises(StoreError, match="rolled its transaction back"):
        tool.run(work)
    assert found(tool.store, "r").seq == 2


def test_the_connection_is_dead_once_the_tool_has_returned(tool: Tool) -> None:
    kept: list[Any] = []
    tool.run(kept.append)
    with pytest.raises(StoreError, match="after its tool had returned"):
        kept[0].execute("SELECT 1")


def test_a_result_that_the_guard_refuses_takes_the_effect_back(tool: Tool) -> None:
    tool.tail = Held(tool.held.lease, tool.held.seq + 5, tool.held.head).append(ThoughtRecorded("out of order"))
    answer, value = tool.run(lambda connection: connection.execute("CREATE TABLE mine (a)"))
    assert isinstance(answer, Refused)
    assert value is None
    with pytest.raises(apsw.SQLError, match="no such table"):
        tool.run(lambda connection: connection.execute("SELECT * FROM mine"))
