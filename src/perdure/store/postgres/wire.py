"""One statement straight through libpq, as it is on the way of every commit: psycopg's cursor, which can do more, takes twice as long."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import psycopg
from psycopg import generators
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from perdure.store.postgres.arrays import Array
from perdure.store.postgres.connect import Connection

_INT8 = Struct(">q")
_OIDS = {int: 20, bytes: 17, str: 25, bool: 16}
_MOST = 100  # statements that a connection keeps prepared
_ANSWERS = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


class Statement(NamedTuple):
    sql: bytes
    types: tuple[int, ...]  # of its parameters


def sent(connection: Connection, sql: bytes, values: Sequence[Any]) -> PQGen[PGresult]:
    """Its answer. A generator, as psycopg's own: what it yields says which side of the socket it waits for.

    What cannot be put into bytes is an error before anything is sent.
    """
    statement = Statement(sql, tuple([_oid(value) for value in values]))
    data = [_bytes(value) for value in values]
    name = yield from _prepared(connection, statement)
    if name:
        send(connection, statement, name, data)
        try:
            return (yield from _answer(connection))
        except psycopg.errors.InvalidSqlStatementName:
            connection.statements.clear()  # psycopg lets the server forget all of them when it rolls back; nothing has been done
    send(connection, statement, b"", data)
    return (yield from _answer(connection))


def send(connection: Connection, statement: Statement, name: bytes, data: Sequence[bytes | None]) -> None:
    """Hand it to libpq, under its name or whole."""
    formats = [Format.BINARY] * len(data)
    if name:
        connection.pgconn.send_query_prepared(name, data, formats, Format.BINARY)
    else:
        connection.pgconn.send_query_params(statement.sql, data, statement.types, formats, Format.BINARY)


def count(answer: PGresult) -> int:
    """How many rows it has changed."""
    return answer.command_tuples or 0


def numbers(answer: PGresult) -> list[int]:
    """Its first column, which holds numbers."""
    found = [answer.get_value(row, 0) for row in range(answer.ntuples)]
    return [int.from_bytes(value, "big", signed=True) for value in found if value is not None]


def _prepared(connection: Connection, statement: Statement) -> PQGen[bytes]:
    """Its name on this connection; none where it has to be sent whole."""
    name = connection.statements.get(statement)
    if name is None:
        if not connection.direct or len(connection.statements) >= _MOST:
            return b""
        name = b"perdure_%d" % next(connection.numbers)
        connection.pgconn.send_prepare(name, statement.sql, statement.types)
        yield from _answer(connection)
        connection.statements[statement] = name
    return name


def _answer(connection: Connection) -> PQGen[PGresult]:
    answers: list[PGresult] = yield from generators.execute(connection.pgconn)
    for answer in answers:
        if answer.status not in _ANSWERS:
            error = error_from_result(answer)
            # Without a number it is libpq's own word: the connection broke.
            raise error if error.sqlstate else psycopg.OperationalError(str(error))
    return answers[0]


def _oid(value: Any) -> int:
    if value is None:
        return 0
    return value.oid if isinstance(value, Array) else _OIDS[type(value)]


def _bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return (b"\1" if value else b"\0") if isinstance(value, bool) else _INT8.pack(value)
