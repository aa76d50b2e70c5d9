"""One database: the only place where a transaction begins and ends, and where a COMMIT without an answer is cleared up."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from perdure.errors import StoreError, StoreUnavailable
from perdure.store.cursor import Cursor, Params, Row
from perdure.store.postgres.confined import confined, ours
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.cursor import PostgresCursor
from perdure.store.postgres.faults import is_loss, is_rolled_back, translated, unstorable

T = TypeVar("T")
log = logging.getLogger("perdure.store")
_ROUNDS = 6  # of a transaction that others rolled back
_SLOW_S = 2.0
# A worker that is paused inside a transaction must not keep its rows from everybody for as long as it sleeps.
_BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = {idle}; SET LOCAL lock_timeout = {lock}; "
    "SELECT pg_current_xact_id()::text"
)
_STATUS = "SELECT pg_xact_status($1::text::xid8)"
TOOL_S = 600.0  # a tool's own statements may take as long as its time-out lets it


class PostgresDatabase:
    """Thread-safe: every statement or transaction has a connection to itself for as long as it takes."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.where = connections.where
        self.commits = 0

    def write(
        self, work: Callable[[Cursor], T], arrived: Callable[[Cursor, T], bool], *, again: bool = True, patience_s: float | None = None
    ) -> T:
        """See Database. `again` is False for work that must not be done twice, not even when the first time was rolled back.

        `patience_s` is how long to wait for what others have locked; Locked after that.
        """
        for left in range(_ROUNDS - 1, -1, -1):
            try:
                return self._write(work, arrived, patience_s, to_tool=not again)
            except psycopg.Error as error:
                if not (again and left and is_rolled_back(error)):
                    raise translated(error, self.where) from None
                # Two transactions met in opposite order, and the server has ended ours: whoever comes back at once meets it again.
                log.info("%s: a transaction was rolled back because of another one; doing it again", self.where)
                time.sleep(random.uniform(0.001, 0.02) * (_ROUNDS - left))
            except UnicodeEncodeError as error:
                raise unstorable(error) from None
        raise AssertionError("unreachable")

    def read(self, name: str, params: Params = ()) -> list[Row]:
        """A connection that broke has told us nothing, and reading changes nothing: it is done again, once, on a new one."""
        return self.reading(lambda cursor: cursor.all(name, params))

    def reading(self, look: Callable[[PostgresCursor], T]) -> T:
        """Statements that change nothing, each for itself."""
        for last in (False, True):
            try:
                with self.connections.lent() as connection:
                    return look(PostgresCursor(connection))
            except UnicodeEncodeError:
                return look(_Nothing())  # type: ignore[arg-type]  # a lone surrogate: nothing in here can be called that
            except psycopg.Error as error:
                if last or not (is_loss(error) or is_rolled_back(error)):
                    raise translated(error, self.where) from None
                if is_loss(error):
                    self.connections.lost()
        raise AssertionError("unreachable")

    @contextmanager
    def lend(self, cursor: Cursor) -> Iterator[Any]:
        assert isinstance(cursor, PostgresCursor)
        connection = cursor.connection
        connection.answer_s = TOOL_S
        try:
            with confined(connection, self.where) as handle:
                yield handle
            self._take_back(connection)
        finally:
            connection.answer_s = self.connections.answer_s

    def _take_back(self, connection: Connection) -> None:
        """The tool has returned: what comes now must belong to the transaction that was lent to it."""
        ours(connection, self.where, f"SET LOCAL idle_in_transaction_session_timeout = {round(self.connections.answer_s * 1000)}")
        if ours(connection, self.where, "SELECT pg_current_xact_id()::text") != (connection.number,):
            raise StoreError(
                "the tool's SQL has ended the transaction that it was to work in, so that its result cannot be recorded with it"
            )

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
            # The crash window: COMMIT was sent, and nobody has heard what became of it. Looked up only now that the dead connection has been
            # given back: after a restart of the server everybody who commits is here, and all connections could be theirs.
            self.connections.lost()
            self._clear_up(xid, lost, lambda fresh: arrived(fresh, done))
        self.committed_since(began_s)
        return done

    def committed_since(self, began_s: float) -> None:
        self.commits += 1
        took_s = time.monotonic() - began_s
        if took_s > _SLOW_S:
            log.warning("%s took %.1f s for a commit; everything that waits for it waits as long", self.where, took_s)

    @contextmanager
    def _transaction(self, patience_s: float | None, to_tool: bool) -> Iterator[tuple[PostgresCursor, str]]:
        for last in (False, True):
            with self.connections.lent(to_tool=to_tool) as connection:
                try:
                    xid = self._begin(connection, patience_s)
                except psycopg.Error as error:
                    # Nothing was asked of it yet but to begin: a connection that died while it lay idle costs nothing.
                    if last or not is_loss(error):
                        raise
                    connection.close()
                    self.connections.lost()
                    continue
                yield PostgresCursor(connection), xid
                return

    def _begin(self, connection: Connection, patience_s: float | None) -> str:
        """The transaction's number."""
        idle_ms = round(self.connections.answer_s * 1000)
        lock_ms = round(self.connections.answer_s * 500) if patience_s is None else round(patience_s * 1000)
        # Several statements in one message, so that beginning costs one round trip.
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
            # PostgreSQL answers ROLLBACK, and no error, when a statement before it had failed.
            raise StoreError(f"{self.where} rolled the transaction back: one of its statements had failed; nothing was written")

    def _clear_up(self, xid: str, error: psycopg.Error, arrived: Callable[[Cursor], bool]) -> None:
        """Return when the transaction is there; raise when it is not, or when nobody can tell in time.

        Its number tells only whether it is over. A server that has recovered from a crash, or a standby that took over, may have lost it
        and given the number to somebody else: that it is there is proven by its traces alone.
        """
        # Longer than the server waits for the next word of a transaction: by then it has ended, one way or the other.
        deadline_s = time.monotonic() + 1.2 * self.connections.answer_s
        while time.monotonic() < deadline_s:
            try:
                if self.reading(lambda cursor: _status_of(cursor.connection, xid)) != "in progress":
                    break
            except StoreUnavailable:
                pass  # nobody is there to ask
            time.sleep(0.05)
        if not self.reading(arrived):
            raise translated(error, self.where)


def _status_of(connection: Connection, xid: str) -> str | None:
    """What the server says about the number; None when it cannot tell: it has never heard of it, or it is not quite PostgreSQL."""
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
        connection.close()  # the server rolls back what nobody commits


class _Nothing:
    """A database in which nothing is found."""

    def all(self, name: str, params: Params = ()) -> list[Row]:
        return []

    def one(self, name: str, params: Params = ()) -> Row | None:
        return None
