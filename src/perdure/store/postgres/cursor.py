"""Statements on one connection, inside the transaction that it is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from perdure.store.cursor import Params, Row
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.queries import QUERIES


class PostgresCursor:
    """Every statement has run to its end when a method returns."""

    __slots__ = ("_cursor", "connection")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._cursor = psycopg.RawCursor(connection)

    def all(self, name: str, params: Params = ()) -> list[Row]:
        return self._run(name, params).fetchall()

    def one(self, name: str, params: Params = ()) -> Row | None:
        return self._run(name, params).fetchone()

    def change(self, name: str, params: Params = ()) -> int:
        return self._run(name, params).rowcount

    def each(self, name: str, many: Sequence[Params]) -> None:
        if not many:
            return
        statement = QUERIES[name]
        *most, last = [statement.values(params) for params in many]
        if most:
            # All of them go out before the first answer is awaited: one round trip.
            self._cursor.executemany(statement.sql, most)
        # The last one by itself. psycopg ends a pipeline with a Flush, and after that message the server does not measure how long we
        # pause inside the transaction: a worker that is stopped there would keep its rows from everybody.
        self._cursor.execute(statement.sql, last, binary=True)

    def alone(self, key: str) -> None:
        """A row of its own, locked: works on every database that locks rows."""
        self._run("make_lock", (key,))
        self._run("take_lock", (key,))

    def patience(self, seconds: float) -> None:
        self.connection.execute(f"SET LOCAL lock_timeout = {max(round(seconds * 1000), 1)}".encode())

    def _run(self, name: str, params: Params) -> psycopg.RawCursor[Any]:
        statement = QUERIES[name]
        return self._cursor.execute(statement.sql, statement.values(params), binary=True)
