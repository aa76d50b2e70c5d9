"""Statements on the connection that writes."""

from __future__ import annotations

from collections.abc import Sequence

import apsw

from perdure.store.cursor import Params, Row
from perdure.store.sqlite.queries import QUERIES


class SqliteCursor:
    """Every statement has run to its end when a method returns: nothing stays open beside the next one."""

    __slots__ = ("_cursor", "connection")

    def __init__(self, cursor: apsw.Cursor) -> None:
        self._cursor = cursor
        self.connection: apsw.Connection = cursor.connection

    def all(self, name: str, params: Params = ()) -> list[Row]:
        return self._cursor.execute(QUERIES[name], params).fetchall()

    def one(self, name: str, params: Params = ()) -> Row | None:
        rows = self._cursor.execute(QUERIES[name], params).fetchall()
        return rows[0] if rows else None

    def change(self, name: str, params: Params = ()) -> int:
        self._cursor.execute(QUERIES[name], params)
        return self.connection.changes()

    def each(self, name: str, many: Sequence[Params]) -> None:
        self._cursor.executemany(QUERIES[name], many)

    def alone(self, key: str) -> None:
        """Nothing to do: a transaction that writes is alone from its BEGIN IMMEDIATE on."""

    def patience(self, seconds: float) -> None:
        """Nothing to do: for the same reason there is nothing left to wait for."""
