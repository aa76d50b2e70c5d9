"""SQLAlchemy on the connection of an effect="transaction" tool: the same transaction, and the same limits.

Imported only if a tool asks for it: SQLAlchemy is installed by the user.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import psycopg
import sqlalchemy
from psycopg.adapt import AdaptersMap
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from perdure.errors import InvalidInput
from perdure.store.postgres.connect import Connection, JoinedConnection, around
from perdure.store.postgres.tool_connection import ToolConnection

_ENDS = "the journal ends the transaction, together with the tool's result"


class ToolCursor(psycopg.Cursor[Any]):
    """A cursor that runs only what a tool may run."""

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        with _tool(self).permitted(query):
            return super().execute(query, *args, **kwargs)

    def executemany(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        with _tool(self).permitted(query):
            return super().executemany(query, *args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput("a transaction tool may not stream rows; fetch them")

    def copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput("a transaction tool may not use COPY; use INSERT")


def _tool(cursor: ToolCursor) -> ToolConnection:
    connection = cursor.connection
    assert isinstance(connection, AlchemyConnection), connection
    return connection.tool


class AlchemyConnection(JoinedConnection):
    """What SQLAlchemy takes for a connection of its own: an object around the connection of the tool's transaction."""

    tool: ToolConnection

    def cursor(self, name: str = "", **options: Any) -> Any:
        if name:
            raise InvalidInput("a transaction tool may not open a cursor on the server (stream_results, yield_per); fetch the rows")
        return super().cursor(**options)

    def commit(self) -> None:
        raise InvalidInput(f"a transaction tool may not commit: {_ENDS}; session.flush() sends what is pending")

    def rollback(self) -> None:
        """SQLAlchemy calls this after an error too: an exception here would hide that error. So the call fails later."""
        if self.cursor_factory is ToolCursor:
            self.tool.give_up()

    def close(self) -> None:
        """Not ours to close: SQLAlchemy gives its connection back at the tool's end."""


class ToolSession(Session):
    """A session of the ORM in the tool's transaction. What is pending is sent at the latest when the tool has returned."""

    def commit(self) -> None:
        raise InvalidInput(f"a transaction tool may not commit: {_ENDS}; session.flush() sends what is pending")

    def rollback(self) -> None:
        raise InvalidInput(f"a transaction tool may not roll back: {_ENDS}; raise an exception, and nothing is written")


class Alchemy:
    """One engine of SQLAlchemy for all tools of a database: it asks the server about its version only once."""

    def __init__(self) -> None:
        self._engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=self._lend, poolclass=NullPool, pool_reset_on_return=None)
        self._adapters = self._engine.dialect.create_connect_args(self._engine.url)[1].get("context")
        self._lent = threading.local()

    def connect(self, tool: ToolConnection, connection: Connection) -> sqlalchemy.Connection:
        """A Connection in the transaction of this tool."""
        made = around(AlchemyConnection, connection)
        made.tool = tool
        if self._adapters is not None:
            made._adapters = AdaptersMap(self._adapters)
        self._lent.connection = made
        # Calls `_lend`, in this very thread. The first time, SQLAlchemy asks about the server, with plain cursors, and rolls back.
        opened = self._engine.connect()
        made.cursor_factory = ToolCursor
        opened.begin()
        return opened

    def _lend(self) -> Any:
        return self._lent.connection

    def session(self, connection: sqlalchemy.Connection) -> Session:
        """A Session on this Connection. With this mode, the end of the session leaves the transaction as it is."""
        return ToolSession(connection, join_transaction_mode="rollback_only")
