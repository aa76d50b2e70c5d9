"""Sends statements from the event loop without waiting, straight through libpq.

A statement is a generator that says whether it waits to read from the socket or to write to it. The loop watches the
socket and does other work meanwhile. With a thread that waits for the answer, each statement would cost two thread
switches. If the server is near, that is a tenth of the time of a commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Generic, NamedTuple, TypeVar

import psycopg
from psycopg import generators
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

from perdure.store.postgres.arrays import Array
from perdure.store.postgres.connect import Connection

T = TypeVar("T")


def send_on_loop(
    loop: asyncio.AbstractEventLoop, connection: Connection, statement: PQGen[T], answered: Callable[[T | psycopg.Error], None]
) -> None:
    """Send the statement, without waiting. Later, `answered(answer or error)` is called on the loop.

    If the server does not answer in time, the connection is closed.
    """
    _Sending(loop, connection, statement, answered).go_on()


class _Sending(Generic[T]):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: Connection, statement: PQGen[T], answered: Callable[[T | psycopg.Error], None]
    ) -> None:
        self._loop = loop
        self._connection = connection
        self._statement = statement
        self._answered = answered
        self._socket = connection.fileno()
        self._watched = 0
        self._is_under_way = False
        self._alarm = loop.call_later(connection.answer_s, self._is_late)

    def go_on(self, ready: Ready | None = None) -> None:
        try:
            wanted: int = next(self._statement) if ready is None else self._statement.send(ready)
        except StopIteration as end:
            self._answer_caller(end.value)
        except psycopg.Error as error:
            self._answer_caller(error)
        except Exception as error:
            if self._is_under_way:  # the answer could not be decoded: treat it as lost
                self._lose(f"{type(error).__name__}: {error}")
                return
            # Nothing was sent, and the caller gets the error. So the alarm must not call `answered` later.
            self._alarm.cancel()
            raise
        else:
            self._is_under_way = True
            self._watch(wanted)

    def _watch(self, wanted: int) -> None:
        if wanted == self._watched:
            return
        if self._watched:
            self._unwatch()
        if wanted & Wait.R:
            self._loop.add_reader(self._socket, self.go_on, Ready.R)
        if wanted & Wait.W:
            self._loop.add_writer(self._socket, self.go_on, Ready.W)
        self._watched = wanted

    def _unwatch(self) -> None:
        # Call this before the socket is closed: after that, its descriptor number may belong to another file.
        if self._watched & Wait.R:
            self._loop.remove_reader(self._socket)
        if self._watched & Wait.W:
            self._loop.remove_writer(self._socket)
        self._watched = 0

    def _is_late(self) -> None:
        self._lose(f"no answer within {self._connection.answer_s:g} s")

    def _lose(self, why: str) -> None:
        self._statement.close()
        self._unwatch()
        self._connection.close()
        self._answer_caller(psycopg.OperationalError(why))

    def _answer_caller(self, answer: T | psycopg.Error) -> None:
        self._alarm.cancel()
        self._unwatch()
        if self._is_under_way:
            self._answered(answer)
        else:  # `send_on_loop` has not returned yet: call `answered` later
            self._loop.call_soon(self._answered, answer)


# -- statements straight through libpq: psycopg's cursor takes twice as long, at every commit


_INT8 = Struct(">q")
_OIDS = {int: 20, bytes: 17, str: 25, bool: 16}
_MOST = 100  # how many statements a connection keeps prepared
_ANSWERS = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


class WireStatement(NamedTuple):
    sql: bytes
    types: tuple[int, ...]  # the oids of the parameters' types


def sent(connection: Connection, sql: bytes, values: Sequence[Any], first: tuple[bytes, Sequence[Any]] | None = None) -> PQGen[PGresult]:
    """Send a statement and return its answer.

    This is a generator like those of psycopg: it yields whether it waits to read from the socket or to write to it.

    `first` is a statement that is sent before the main statement, in the same transaction and the same round trip. If
    `first` fails, its error is raised; its answer is not used otherwise. Each of the two statements sees what was
    committed before that statement began. If a value cannot be encoded, an error is raised before anything is sent.
    """
    parts = [_part(*statement) for statement in ((sql, values), first) if statement is not None][::-1]
    names = []
    for statement, _ in parts:
        names.append((yield from _prepared(connection, statement)))
    if all(names):
        try:
            return (yield from _together(connection, parts, names))
        except psycopg.errors.InvalidSqlStatementName:
            # psycopg deallocates all prepared statements when it rolls back. Nothing was executed, so send the
            # statements again as text.
            connection.statements.clear()
    return (yield from _together(connection, parts, [b""] * len(parts)))


def _together(
    connection: Connection, parts: Sequence[tuple[WireStatement, Sequence[bytes | None]]], names: Sequence[bytes]
) -> PQGen[PGresult]:
    """Send the statements in one pipeline, which is one transaction up to its Sync.

    Returns the answer to the last statement.
    """
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
    # The transaction is committed at its Sync: an answer before the Sync does not prove a commit.
    while not answers or answers[-1].status != ExecStatus.PIPELINE_SYNC:
        answers += yield from generators.fetch_many(pgconn)
        if pgconn.status == ConnStatus.BAD:
            _checked(answers)
            raise psycopg.OperationalError("the connection broke before the transaction was committed")
    pgconn.exit_pipeline_mode()
    return _checked(answers[:-1])[-1]


def send(connection: Connection, statement: WireStatement, name: bytes, data: Sequence[bytes | None]) -> None:
    """Pass the statement to libpq: by its prepared name if `name` is not empty, else as text."""
    formats = [Format.BINARY] * len(data)
    if name:
        connection.pgconn.send_query_prepared(name, data, formats, Format.BINARY)
    else:
        connection.pgconn.send_query_params(statement.sql, data, statement.types, formats, Format.BINARY)


def count(answer: PGresult) -> int:
    """How many rows the statement has changed."""
    return answer.command_tuples or 0


def numbers(answer: PGresult) -> list[int]:
    """The numbers in the first column of the answer."""
    found = [answer.get_value(row, 0) for row in range(answer.ntuples)]
    return [int.from_bytes(value, "big", signed=True) for value in found if value is not None]


def _prepared(connection: Connection, statement: WireStatement) -> PQGen[bytes]:
    """The name of the prepared statement on this connection; empty if the statement has to be sent as text."""
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
    """The answers, if no answer is an error.

    Otherwise raise the first error, which is the cause; later errors only follow from the first.
    """
    for answer in answers:
        if answer.status not in _ANSWERS:
            error = error_from_result(answer)
            # An error without an SQLSTATE comes from libpq itself: the connection broke.
            raise error if error.sqlstate else psycopg.OperationalError(str(error))
    return answers


def _part(sql: bytes, values: Sequence[Any]) -> tuple[WireStatement, Sequence[bytes | None]]:
    return WireStatement(sql, tuple([_oid(value) for value in values])), [_bytes(value) for value in values]


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
