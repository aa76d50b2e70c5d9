"""Runs the statements of common.sql and queries.sql on one connection, inside the connection's present transaction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from msgspec import Struct

from perdure.store.cursor import Params, Row, load
from perdure.store.postgres.connect import Connection

CHANNEL = "perdure"  # the channel of NOTIFY for rings
_IN_ORDER = b"BEGIN READ ONLY; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off"


class PostgresCursor:
    """Runs statements. When a method returns, its statement is complete."""

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
            # psycopg sends all these statements before it waits for the first answer: this costs one round trip.
            self._cursor.executemany(statement.sql, most)
        # Send the last statement separately. psycopg ends a pipeline with a Flush, after which the server does not
        # apply its timeout for idle transactions. A worker that is suspended then would keep its rows locked.
        self._cursor.execute(statement.sql, last, binary=True)

    def alone(self, key: str) -> None:
        """Lock a row of the table perdure_locks that has this key."""
        self._run("make_lock", (key,))
        self._run("take_lock", (key,))

    def link_chain(self) -> None:
        """No effect: the trigger that adds an entry also links it."""

    def patience(self, seconds: float) -> None:
        self.connection.execute(f"SET LOCAL lock_timeout = {max(round(seconds * 1000), 1)}".encode())

    def ring_at_commit(self) -> None:
        # No process has sent these words as its own, so every listener takes them for a ring, also in this process.
        self._run("ring", {"channel": CHANNEL, "words": f"{self.connection.schema} start"})

    def select(self, sql: str, params: Mapping[str, Any], *, in_order: bool = False) -> list[Row]:
        statement = numbered(sql)
        if in_order:
            # The planner guesses how many rows match. If it guesses too few, it would rather read and sort the whole table.
            self.connection.execute(_IN_ORDER)
        try:
            # Not prepared: a prepared statement gets one plan for all values, and a query for a rare value needs another one.
            return self._cursor.execute(statement.sql, statement.values(params), binary=True, prepare=False).fetchall()
        finally:
            if in_order and not self.connection.closed:
                self.connection.execute(b"ROLLBACK")

    def _run(self, name: str, params: Params) -> psycopg.RawCursor[Any]:
        statement = QUERIES[name]
        return self._cursor.execute(statement.sql, statement.values(params), binary=True)


# -- the statements of queries.sql by name, with numbered parameters ($1, $2, …)


_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)|\?(\d*)")  # :name, ?, ?3; but not the cast ::type


class Statement(Struct, frozen=True):
    sql: str
    names: tuple[str, ...] = ()  # the parameters' names in the order of their numbers; empty if they have no names

    def values(self, params: Params) -> Sequence[Any]:
        """The parameters in the order of their numbers."""
        if isinstance(params, Mapping):
            return [shown(params[name]) for name in self.names]
        return [shown(value) for value in params]


def numbered(sql: str) -> Statement:
    """The statement with `$1`, `$2` … in place of `:name` and `?`."""
    names: list[str] = []
    count = 0

    def number(found: re.Match[str]) -> str:
        nonlocal count
        if found[1] is None:
            count += 1
            return f"${found[2] or count}"
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return Statement(_PARAMETER.sub(number, sql), tuple(names))


def shown(value: Any) -> Any:
    """The value in a form that PostgreSQL can store."""
    # PostgreSQL's text can contain every character except NUL. NUL can occur in texts for people (an error, a note),
    # but never in the journal's own JSON, where NUL is escaped.
    return value.replace("\0", "\u2400") if type(value) is str and "\0" in value else value


QUERIES: dict[str, Statement] = {name: numbered(sql) for name, sql in load("postgres").items()}
