"""The connection of an effect="transaction" tool: only for its own tables, in a transaction that perdure ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import apsw

from perdure.errors import InvalidInput, StoreError

_NEVER = {
    apsw.SQLITE_TRANSACTION: "transaction control: the journal ends the transaction, together with the tool's result",
    apsw.SQLITE_SAVEPOINT: "savepoints: the journal owns the transaction",
    apsw.SQLITE_ATTACH: "ATTACH: one commit covers one file",
    apsw.SQLITE_DETACH: "DETACH",
    # A temporary table that is renamed to the name of a perdure table would hide that table on this connection, and
    # SQLite tells the authorizer only the old name.
    **dict.fromkeys(
        (apsw.SQLITE_CREATE_TEMP_TABLE, apsw.SQLITE_CREATE_TEMP_VIEW, apsw.SQLITE_CREATE_TEMP_TRIGGER, apsw.SQLITE_CREATE_TEMP_INDEX),
        "temporary tables: use tables of your own",
    ),
}
_READING_PRAGMAS = frozenset(
    ("table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list", "foreign_key_check")
)
_ALWAYS = frozenset((apsw.SQLITE_SELECT, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE, apsw.SQLITE_REINDEX, apsw.SQLITE_ANALYZE))


class ToolConnection:
    """SQL on the journal's own database.

    What the tool writes is committed together with the call's result, or not at all.
    """

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection: apsw.Connection | None = connection

    def execute(self, sql: str, params: Any = ()) -> list[tuple[Any, ...]]:
        """Run the statement. Returns all rows of the statement."""
        connection = self._open()
        with _explained(sql):
            return connection.execute(sql, params).fetchall()

    def executemany(self, sql: str, params: Iterable[Any]) -> list[tuple[Any, ...]]:
        """Run the statement once for each set of parameters. Returns all rows."""
        connection = self._open()
        with _explained(sql):
            return connection.executemany(sql, params).fetchall()

    def sqlalchemy(self) -> NoReturn:
        raise InvalidInput(
            "call.sqlalchemy() and call.session() need a journal in PostgreSQL: for SQLite, SQLAlchemy has dialects for other SQLite "
            "libraries than the journal's, and two libraries must not open one file in one process; use call.connection.execute(…)"
        )

    session = sqlalchemy

    def _open(self) -> apsw.Connection:
        if self._connection is None:
            raise StoreError("call.connection was used after its tool had returned; do all the work inside the tool")
        # After INSERT OR ROLLBACK or a full disk, SQLite itself has ended the transaction: a further statement would
        # be committed alone.
        if not self._connection.in_transaction:
            raise StoreError(
                "the tool's transaction was rolled back by SQLite (OR ROLLBACK, or a full disk); do not catch the error inside the tool"
            )
        return self._connection


@contextmanager
def confined(connection: apsw.Connection) -> Iterator[ToolConnection]:
    """The connection for the tool. Until the tool ends, SQLite itself refuses what the tool must not do."""
    handle = ToolConnection(connection)
    connection.authorizer = _authorize
    try:
        yield handle
    finally:
        connection.authorizer = None
        handle._connection = None


def _authorize(operation: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    if operation in _NEVER:
        return apsw.SQLITE_DENY
    if operation == apsw.SQLITE_FUNCTION and second == "sqlite_rename_table":
        # SQLite calls this function for ALTER TABLE … RENAME TO, and the authorizer sees nothing else of it. The new name
        # may be the name of a perdure table. So every rename is refused.
        return apsw.SQLITE_DENY
    if operation in _ALWAYS:
        return apsw.SQLITE_OK
    if operation == apsw.SQLITE_PRAGMA:
        return apsw.SQLITE_OK if str(first).lower() in _READING_PRAGMAS else apsw.SQLITE_DENY
    # Every operation names its table (or trigger, view, index) first or second. To read perdure's tables is refused
    # too, since these tables contain the runs of other tenants.
    ours = any(name is not None and name.lower().startswith("perdure_") for name in (first, second))
    return apsw.SQLITE_DENY if ours else apsw.SQLITE_OK


@contextmanager
def _explained(sql: str) -> Iterator[None]:
    """Turns a refusal of the authorizer into an InvalidInput that says what is not allowed."""
    try:
        yield
    except (apsw.AuthError, apsw.SQLError) as refused:
        # SQLite reports a refused function as a plain SQL error with this text.
        if isinstance(refused, apsw.SQLError) and "not authorized" not in str(refused):
            raise
        raise InvalidInput(
            f"a transaction tool may not run {' '.join(sql.split())[:80]!r}: no transaction control, no ATTACH, no PRAGMA that changes "
            "anything, no temporary tables, no renaming of tables, nothing in perdure's own tables; use tables of your own"
        ) from None
