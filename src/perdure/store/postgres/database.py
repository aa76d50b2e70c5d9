"""One PostgreSQL database: begins and ends every transaction.

If the answer to a COMMIT is lost, this module finds out whether the transaction was committed.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from perdure.errors import InvalidInput, StoreError, StoreUnavailable
from perdure.store.cursor import Cursor, Params, Row, Words
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.faults import is_loss, is_rolled_back, translated, unstorable
from perdure.store.postgres.joined import joined
from perdure.store.postgres.queries import PostgresCursor
from perdure.store.postgres.tool_connection import confined, ours

T = TypeVar("T")
log = logging.getLogger("perdure.store")
_ROUNDS = 6  # the most tries of a transaction that the server rolls back because of other transactions
_SLOW_S = 2.0
# The idle timeout: a worker that is suspended inside a transaction must not keep its rows locked until it wakes.
_BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = {idle}; SET LOCAL lock_timeout = {lock}; "
    "SELECT pg_current_xact_id()::text"
)
_STATUS = "SELECT pg_xact_status($1::text::xid8)"
TOOL_S = 600.0  # how long a tool's own statement may take; the tool's timeout limits it as well


class PostgresDatabase:
    """Runs statements and transactions, each on a connection of its own. Thread-safe."""

    # With COLLATE "C", `lower` changes A to Z only, as SQLite does it.
    words = Words(
        undriven="",
        like="{column} LIKE {value}",
        like_folded='lower({column} COLLATE "C") LIKE {value}',
        escaped="\\%_",
        escape="\\{}",
        any="%",
        one="_",
    )

    def __init__(self, connections: Connections, schema: str) -> None:
        self.connections = connections
        self.schema = schema
        self._alchemy: Any = None
        self.where = connections.where
        self.commits = 0
        self._frozen: Connection | None = None  # see `frozen`

    def write(
        self, work: Callable[[Cursor], T], arrived: Callable[[Cursor, T], bool], *, again: bool = True, patience_s: float | None = None
    ) -> T:
        """Like Database.write.

        `again` is False for work that must not be repeated, even after a rollback.

        `patience_s` is how many seconds to wait for a lock; after that time, Locked is raised.
        """
        for left in range(_ROUNDS - 1, -1, -1):
            try:
                return self._write(work, arrived, patience_s, to_tool=not again)
            except psycopg.Error as error:
                if not (again and left and is_rolled_back(error)):
                    raise translated(error, self.where) from None
                # There was a deadlock, and the server has rolled this transaction back. Wait a little before the next
                # try: without a pause, the two transactions could deadlock again.
                log.info("%s: a transaction was rolled back because of another one; doing it again", self.where)
                time.sleep(random.uniform(0.001, 0.02) * (_ROUNDS - left))
            except UnicodeEncodeError as error:
                raise unstorable(error) from None
        raise AssertionError("unreachable")

    def read(self, name: str, params: Params = ()) -> list[Row]:
        """All rows of a statement that changes nothing.

        If the connection breaks, the statement is repeated once on another connection.
        """
        return self.reading(lambda cursor: cursor.all(name, params))

    def read_beside(self, name: str, params: Params = ()) -> list[Row]:
        """Like `read`: each read has a connection for itself."""
        return self.read(name, params)

    def select(self, sql: str, params: Mapping[str, Any], *, in_order: bool = False) -> list[Row]:
        return self.reading(lambda cursor: cursor.select(sql, params, in_order=in_order))

    def reading(self, look: Callable[[PostgresCursor], T]) -> T:
        """Run statements that change nothing, each statement in a transaction of its own."""
        if self._frozen is not None:
            try:
                return look(PostgresCursor(self._frozen))
            except psycopg.Error as error:
                raise translated(error, self.where) from None
        for last in (False, True):
            try:
                with self.connections.lent() as connection:
                    return look(PostgresCursor(connection))
            except UnicodeEncodeError:
                return look(_Nothing())  # type: ignore[arg-type]  # a lone surrogate in a parameter matches no stored text
            except psycopg.Error as error:
                if last or not (is_loss(error) or is_rolled_back(error)):
                    raise translated(error, self.where) from None
                if is_loss(error):
                    self.connections.lost()
        raise AssertionError("unreachable")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, all reads are one transaction, and see the database as it is at its beginning. For one thread only."""
        try:
            connection = self.connections.open()
            connection.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            # The first statement after BEGIN fixes what the transaction sees. A large copy may rest between two reads.
            connection.execute(b"SET LOCAL idle_in_transaction_session_timeout = 0")
            connection.execute(b"SELECT count(*) FROM perdure_moved")
        except psycopg.Error as error:
            raise translated(error, self.where) from None
        self._frozen = connection
        try:
            yield
        finally:
            self._frozen = None
            connection.close()

    @contextmanager
    def lend(self, cursor: Cursor) -> Iterator[Any]:
        assert isinstance(cursor, PostgresCursor)
        connection = cursor.connection
        connection.answer_s = TOOL_S
        try:
            with confined(connection, self.where, self._sqlalchemy) as handle:
                yield handle
            self._check_still_ours(connection)
        finally:
            connection.answer_s = self.connections.answer_s

    def _sqlalchemy(self) -> Any:
        if self._alchemy is None:
            try:
                from perdure.store.postgres.tool_alchemy import Alchemy  # imported late: SQLAlchemy is the user's choice
            except ImportError as error:
                raise InvalidInput(f"call.sqlalchemy() and call.session() need SQLAlchemy 2: pip install sqlalchemy ({error})") from None
            self._alchemy = Alchemy()
        return self._alchemy

    def _check_still_ours(self, connection: Connection) -> None:
        """Check, after the tool has returned, that the connection is still in the same transaction."""
        ours(connection, self.where, f"SET LOCAL idle_in_transaction_session_timeout = {round(self.connections.answer_s * 1000)}")
        if ours(connection, self.where, "SELECT pg_current_xact_id()::text") != (connection.number,):
            raise StoreError(
                "the tool's SQL has ended its transaction, so its result cannot be recorded in the same commit; remove COMMIT and ROLLBACK from it"
            )

    def join(self, connection: Any) -> AbstractContextManager[Cursor]:
        def is_held(key: int, process: int) -> bool:
            return self.read("is_free", {"key": key, "process": process}) == [(False,)]

        return joined(connection, self.schema, self.where, self.connections.answer_s, is_held)

    @contextmanager
    def unguarded(self, cursor: Cursor) -> Iterator[None]:
        try:
            cursor.change("drop_guards_of_runs")
        except psycopg.errors.InsufficientPrivilege:
            raise StoreError(f"{self.where}: only the owner of the tables can repair rows that triggers keep as they are") from None
        cursor.change("drop_guards_of_approvals")
        yield
        cursor.change("restore_guards_of_runs")
        cursor.change("restore_guards_of_approvals")

    def version(self) -> int:
        return self.commits

    def close(self) -> None:
        self.connections.close()

    def _write(self, work: Callable[[Cursor], T], arrived: Callable[[Cursor, T], bool], patience_s: float | None, to_tool: bool) -> T:
        began_s = time.monotonic()
        lost: psycopg.Error | None = None
        with self._transaction(patience_s, to_tool) as (cursor, xid):
            try:
                done = work(cursor)
            except BaseException:
                _roll_back(cursor.connection)
                raise
            try:
                self._commit(cursor.connection)
            except psycopg.Error as error:
                if not is_loss(error):
                    raise
                lost = error
        if lost is not None:
            # COMMIT was sent, and its answer was lost. First give the dead connection back, then look the transaction
            # up. After a restart of the server, all committing threads come here, and their dead connections would
            # fill the pool.
            self.connections.lost()
            self._clear_up(xid, lost, lambda fresh: arrived(fresh, done))
        self.committed_since(began_s)
        return done

    def committed_since(self, began_s: float) -> None:
        self.commits += 1
        took_s = time.monotonic() - began_s
        if took_s > _SLOW_S:
            log.warning("%s took %.1f s for a commit; the runs wait that long for each commit", self.where, took_s)

    @contextmanager
    def _transaction(self, patience_s: float | None, to_tool: bool) -> Iterator[tuple[PostgresCursor, str]]:
        for last in (False, True):
            with self.connections.lent(to_tool=to_tool) as connection:
                try:
                    xid = self._begin(connection, patience_s)
                except psycopg.Error as error:
                    # Only BEGIN was sent. If the connection broke while it was idle, another connection can be used.
                    if last or not is_loss(error):
                        raise
                    connection.close()
                    self.connections.lost()
                    continue
                yield PostgresCursor(connection), xid
                return

    def _begin(self, connection: Connection, patience_s: float | None) -> str:
        """Begin a transaction. Returns its id."""
        idle_ms = round(self.connections.answer_s * 1000)
        lock_ms = round(self.connections.answer_s * 500) if patience_s is None else round(patience_s * 1000)
        # Send several statements in one message, so that the begin costs one round trip.
        cursor = psycopg.Cursor(connection)
        cursor.execute(_BEGIN.format(idle=idle_ms, lock=lock_ms).encode())
        while cursor.nextset():
            pass
        ((xid,),) = cursor.fetchall()
        assert isinstance(xid, str), xid
        connection.number = xid
        return xid

    def _commit(self, connection: Connection) -> None:
        if connection.execute(b"COMMIT").statusmessage != "COMMIT":
            # If an earlier statement had failed, PostgreSQL answers ROLLBACK to the COMMIT, without an error.
            raise StoreError("rolled the transaction back: one of its statements had failed; nothing was written", where=self.where)

    def _clear_up(self, xid: str, error: psycopg.Error, arrived: Callable[[Cursor], bool]) -> None:
        """Return if the transaction was committed. Raise `error` if it was not, or if the outcome stays unknown.

        The transaction's id tells only whether the transaction has ended. A server that has recovered from a crash, or
        a standby that took over, may have lost the transaction and given its id to another transaction. So only the
        rows of the transaction prove that it was committed (`arrived`).
        """
        # The deadline is later than the server's timeout for idle transactions: by then the transaction has ended.
        deadline_s = time.monotonic() + 1.2 * self.connections.answer_s
        while time.monotonic() < deadline_s:
            try:
                if self.reading(lambda cursor: _status_of(cursor.connection, xid)) != "in progress":
                    break
            except StoreUnavailable:
                pass  # the server cannot be reached yet
            time.sleep(0.05)
        if not self.reading(arrived):
            raise translated(error, self.where)


def _status_of(connection: Connection, xid: str) -> str | None:
    """The server's status of the transaction. None: the server does not know it, or does not have the function."""
    try:
        found = connection.execute(_STATUS, (xid,)).fetchone()
    except psycopg.Error as error:
        if is_loss(error):
            raise
        return None
    return found[0] if found is not None else None


def _roll_back(connection: Connection) -> None:
    try:
        if not connection.closed and connection.pgconn.transaction_status != TransactionStatus.IDLE:
            connection.execute(b"ROLLBACK")
    except psycopg.Error:
        connection.close()  # after that, the server rolls the transaction back


class _Nothing:
    """A cursor that finds no rows, as on an empty database."""

    def all(self, name: str, params: Params = ()) -> list[Row]:
        return []

    def one(self, name: str, params: Params = ()) -> Row | None:
        return None

    def select(self, sql: str, params: Mapping[str, Any], *, in_order: bool = False) -> list[Row]:
        return []
