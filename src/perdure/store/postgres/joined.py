"""A transaction that the caller of perdure has begun on a connection of its own, and will end.

perdure's statements run inside a savepoint. If one of them fails, all of them are undone, and the caller's transaction
can go on. The caller's settings of the session (search path, lock time-out) are back when the context ends.

The statements do not go through the caller's connection object, which may have other adapters, another row factory,
or be asynchronous. A second object of psycopg is put around the same connection of libpq, for as long as the
statements last. Meanwhile the lock of the caller's object is held, so that no other thread or task uses the connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psycopg
from psycopg.pq import ConnStatus, PipelineStatus, TransactionStatus

from perdure.errors import InvalidInput, StoreError, StoreUnavailable
from perdure.store.postgres.connect import Connection, JoinedConnection, adapt, around
from perdure.store.postgres.faults import translated, unstorable
from perdure.store.postgres.queries import PostgresCursor
from perdure.store.postgres.tool_connection import ToolConnection

_KEY = secrets.randbits(31)  # with the number of a server process, this is the key of an advisory lock: see `_check`
_UTF8 = "UTF8"


@contextmanager
def joined(theirs: Any, schema: str, where: str, answer_s: float, is_held: Callable[[int, int], bool]) -> Iterator[PostgresCursor]:
    """Run statements in the transaction of this connection. InvalidInput if that is not possible.

    `is_held` says whether the advisory lock with this key is held in the journal's database.
    """
    _check_kind(theirs)
    # The lock of an asynchronous connection is an asyncio.Lock: the engine holds it.
    with theirs.lock if isinstance(theirs, psycopg.Connection) else nullcontext():
        _check_status(theirs)
        ours = _around(theirs, schema, answer_s)
        try:
            ours.execute(b"SAVEPOINT perdure_start")
            try:
                before = _check(ours, where, is_held)
                cursor = PostgresCursor(ours)
                yield cursor
                cursor.one("set_for_transaction", before)
            except BaseException:
                _undo(ours)
                raise
            ours.execute(b"RELEASE SAVEPOINT perdure_start")
        except psycopg.Error as error:
            raise _explained(error, where) from None
        except UnicodeEncodeError as error:
            raise unstorable(error) from None


def _explained(error: psycopg.Error, where: str) -> StoreError:
    if error.sqlstate == "55P03":
        return StoreUnavailable(
            "kept us waiting for another transaction, which starts a run with the same id or the same large input and has not ended; "
            "nothing was written to yours: roll it back and try again",
            where=where,
        )
    return translated(error, where)


def _undo(ours: Connection) -> None:
    try:
        if ours.pgconn.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            ours.execute(b"ROLLBACK TO SAVEPOINT perdure_start")
            ours.execute(b"RELEASE SAVEPOINT perdure_start")
    except psycopg.Error:
        ours.close()  # the state of the transaction is not known: the server rolls all of it back


def _around(theirs: Any, schema: str, answer_s: float) -> Connection:
    ours = around(JoinedConnection, theirs)
    ours.schema = schema
    ours.answer_s = answer_s
    if ours.pgconn.transaction_status == TransactionStatus.IDLE:
        # The first statement begins the transaction, as the caller's own object would begin it.
        ours.isolation_level, ours.read_only, ours.deferrable = theirs.isolation_level, theirs.read_only, theirs.deferrable
    adapt(ours.adapters)
    return ours


def _check_kind(theirs: Any) -> None:
    if isinstance(theirs, ToolConnection):
        raise InvalidInput(
            "start(connection=call.connection): a tool cannot start a run in its own transaction; let the agent call the other agent, "
            "`await other(…)`, or start the run in a tool with another effect class and an id of its own"
        )
    if not isinstance(theirs, psycopg.Connection | psycopg.AsyncConnection):
        raise InvalidInput(
            f"start(connection={_name(theirs)}): the journal is in PostgreSQL, and takes a connection of psycopg 3, or a Connection or "
            "Session of SQLAlchemy over psycopg 3 (create_engine('postgresql+psycopg://…'))"
        )


def _name(theirs: Any) -> str:
    return f"{type(theirs).__module__.partition('.')[0]}.{type(theirs).__qualname__}"


def _check_status(theirs: Any) -> None:
    pgconn = theirs.pgconn
    status = pgconn.transaction_status
    if pgconn.status == ConnStatus.BAD:
        raise InvalidInput("start(connection=…): the connection is closed; nothing was started")
    if pgconn.pipeline_status != PipelineStatus.OFF or status == TransactionStatus.ACTIVE:
        raise InvalidInput("start(connection=…): the connection is in use (a pipeline, a COPY, or an open stream); end that first")
    if status == TransactionStatus.INERROR:
        raise InvalidInput("start(connection=…): the transaction has failed, so that nothing can be written in it; roll it back first")
    if status == TransactionStatus.IDLE and theirs.autocommit:
        # Each statement would be a commit of its own: a crash between two of them would leave half a run.
        raise InvalidInput(
            "start(connection=…): the connection is in autocommit mode and in no transaction, so the run would not be part of your "
            "commit; begin a transaction: `with connection.transaction():`"
        )


def _check(ours: Connection, where: str, is_held: Callable[[int, int], bool]) -> tuple[str, str]:
    """Raise InvalidInput unless a run can be started here. Then set what the statements need.

    Returns the settings as they were: the search path, and the lock time-out.
    """
    cursor = PostgresCursor(ours)
    found = cursor.one("look_at_caller", {"key": _KEY, "schema": ours.schema})
    assert found is not None
    isolation, read_only, encoding, path, entered, lock_timeout, lock_ms, process, may_use = found
    if isolation != "read committed":
        # In an older snapshot, a run that was started and pruned meanwhile would not be seen: its id could be used again.
        raise InvalidInput(
            f"start(connection=…): the isolation level of the transaction is {isolation}, and a run can be started in READ COMMITTED alone"
        )
    if read_only:
        raise InvalidInput("start(connection=…): the transaction is read only; nothing was started")
    if encoding != _UTF8:
        raise InvalidInput(f"start(connection=…): the connection has client_encoding {encoding}, and a journal is UTF-8; set it to UTF8")
    # Advisory locks belong to one database of one server. The caller's session holds this lock until its transaction ends, so
    # it is held in the journal's database only if the two are the same.
    if not is_held(_KEY, process):
        raise InvalidInput(
            f"start(connection=…): the connection is to another database than the journal, which is {where}; one commit covers one database"
        )
    if not may_use:
        raise InvalidInput(
            f"start(connection=…): the user of this connection may not use the journal's schema {ours.schema}: GRANT it the rights of a "
            "worker (docs/security.md has the statements)"
        )
    # Without a limit of the caller's own, do not wait for ever for another transaction that starts the same id.
    limit = lock_timeout if lock_ms else f"{round(ours.answer_s * 500)}ms"
    ours.answer_s += lock_ms / 1000
    cursor.one("set_for_transaction", (entered, limit))
    return path, lock_timeout
