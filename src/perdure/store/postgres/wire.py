"""Statements straight through libpq, as they are on the way of every commit: psycopg's cursor, which can do more, takes twice as long."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import psycopg
from psycopg import generators
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, Format
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


def sent(connection: Connection, sql: bytes, values: Sequence[Any], first: tuple[bytes, Sequence[Any]] | None = None) -> PQGen[PGresult]:
    """Its answer. A generator, as psycopg's own: what it yields says which side of the socket it waits for.

    `first` is a statement that goes before it in the same transaction and the same round trip; its answer counts only as an error. Each
    of the two sees what was committed before it began itself. What cannot be put into bytes is an error before anything is sent.
    """
    parts = [_part(*statement) for statement in ((sql, values), first) if statement is not None][::-1]
    names = []
    for statement, _ in parts:
        names.append((yield from _prepared(connection, statement)))
    if all(names):
        try:
            return (yield from _together(connection, parts, names))
        except psycopg.errors.InvalidSqlStatementName:
            connection.statements.clear()  # psycopg lets the server forget all of them when it rolls back; nothing has been done
    return (yield from _together(connection, parts, [b""] * len(parts)))


def _together(connection: Connection, parts: Sequence[tuple[Statement, Sequence[bytes | None]]], names: Sequence[bytes]) -> PQGen[PGresult]:
    """The last one's answer. What stands before one Sync is one transaction, and is sent without waiting in between."""
    if len(parts) == 1:
        send(connection, parts[0][0], names[0], parts[0][1])
        return (yield from _answer(connection))
    pgconn = connection.pgconn
    pgconn.enter_pipeline_mode()
    for (statement, data), name in zip(parts, names, strict=True):
        send(connection, statement, name, data)
    pgconn.pipeline_sync()
    yield from generators.send(pgconn)
    answers: list[PGresult] = []
    # The transaction is committed at its Sync: an answer before that proves nothing.
    while not answers or answers[-1].status != ExecStatus.PIPELINE_SYNC:
        answers += yield from generators.fetch_many(pgconn)
        if pgconn.status == ConnStatus.BAD:
            _checked(answers)
            raise psycopg.OperationalError("the connection broke before the transaction was committed")
    pgconn.exit_pipeline_mode()
    return _checked(answers[:-1])[-1]


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
    return _checked(answers)[0]


def _checked(answers: list[PGresult]) -> list[PGresult]:
    """The answers, if none is an error. The first that is one says why: behind it everything is only cut short."""
    for answer in answers:
        if answer.status not in _ANSWERS:
            error = error_from_result(answer)
            # Without a number it is libpq's own word: the connection broke.
            raise error if error.sqlstate else psycopg.OperationalError(str(error))
    return answers


def _part(sql: bytes, values: Sequence[Any]) -> tuple[Statement, Sequence[bytes | None]]:
    return Statement(sql, tuple([_oid(value) for value in values])), [_bytes(value) for value in values]


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
