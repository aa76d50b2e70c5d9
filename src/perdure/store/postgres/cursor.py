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
        statement = QUERIES[name]
        if many:
            # All of them go out before the first answer is awaited: one round trip.
            self._cursor.executemany(statement.sql, [statement.values(params) for params in many])

    def alone(self, key: str) -> None:
        """A row of its own, locked: works on every database that locks rows."""
        self._run("make_lock", (key,))
        self._run("take_lock", (key,))

    def _run(self, name: str, params: Params) -> psycopg.RawCursor[Any]:
        statement = QUERIES[name]
        return self._cursor.execute(statement.sql, statement.values(params), binary=True)
