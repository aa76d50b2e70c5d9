"""The connection pool of a process.

A connection is lent for one statement or transaction. If it is not certain that the connection still works, it is
closed.

If the server cannot be reached, the pool tries it again after a pause, which grows. During the pause, a caller that
wants a connection gets the error at once. So callers do not wait again for the same dead server. The log has one line
when the server goes away, and one line when it is back.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.pq import TransactionStatus

from perdure.errors import StoreError, StoreUnavailable
from perdure.store.postgres.connect import ANSWER_S, Ahead, Connection, connect, parameters, where

log = logging.getLogger("perdure.store")
LIMIT = 10
_IDLE_S = 60.0  # how long an idle connection is kept
_FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0


class Connections:
    """The pool, thread-safe. It has at most `limit` connections; the connection that was used last is reused first."""

    def __init__(self, url: str, limit: int = LIMIT, answer_s: float = ANSWER_S) -> None:
        self._said = parameters(url)
        self.where = where(self._said)
        self.answer_s = answer_s
        self._ahead = Ahead.nothing()
        self.limit = limit
        self._idle: list[tuple[float, Connection]] = []
        self._out = 0
        self._freed = threading.Condition()
        self._closed = False
        self._reached = False
        self._down_since_s: float | None = None
        self._again_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._why: StoreError = StoreUnavailable("has not been reached yet", where=self.where)

    @contextmanager
    def lent(self, *, to_tool: bool = False) -> Iterator[Connection]:
        """A connection for this caller alone. If it comes back outside of a transaction, it is kept for reuse.

        After use by a tool, the session is cleared (DISCARD ALL), and the connection is lent to tools only.
        """
        connection = self._take(to_tool)
        try:
            yield connection
        except psycopg.Error:
            if not connection.closed and connection.pgconn.transaction_status != TransactionStatus.IDLE:
                connection.close()
            raise
        finally:
            self.give_back(connection)

    def take_idle(self) -> Connection | None:
        """An idle connection, for a caller that must not wait. None: no connection is idle.

        Return the connection with `give_back`.
        """
        with self._freed:
            idle = None if self._closed else self._idle_one(to_tool=False)
            if idle is not None:
                self._out += 1
            return idle

    def open(self) -> Connection:
        """A connection outside of the pool: the caller keeps the connection, and closes it."""
        with self._freed:
            self._refuse_if_away()
        return self._connect()

    def lost(self) -> None:
        """Close all idle connections. Call this when a connection broke: the idle connections may be broken too."""
        with self._freed:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def close(self) -> None:
        with self._freed:
            self._closed = True
            self._freed.notify_all()
        self.lost()

    def _take(self, to_tool: bool) -> Connection:
        deadline_s = time.monotonic() + self.answer_s
        with self._freed:
            while True:
                if self._closed:
                    raise StoreError("has been closed by this process; open the store again", where=self.where)
                if (idle := self._idle_one(to_tool)) is not None:
                    self._out += 1
                    return idle
                if self._out < self.limit:
                    self._refuse_if_away()
                    if self._out + len(self._idle) >= self.limit:
                        # To make room, close an idle connection of the other kind (for tools, or not for tools).
                        self._idle.pop(0)[1].close()
                    self._out += 1
                    break
                if not self._freed.wait(deadline_s - time.monotonic()):
                    raise StoreUnavailable(
                        f"cannot be asked: all {self.limit} connections of this process have been busy for {self.answer_s:g} s; "
                        "the server is slow, or transaction tools take their time",
                        where=self.where,
                    )
        try:
            connection = self._connect()
        except BaseException:
            with self._freed:
                self._out -= 1
                self._freed.notify()
            raise
        if to_tool:
            # Do not prepare statements on this connection: DISCARD ALL would drop them.
            connection.for_tools, connection.prepare_threshold = True, None
        return connection

    def _idle_one(self, to_tool: bool) -> Connection | None:
        """The idle connection of this kind (for tools, or not) that was used last and is still usable."""
        for place in range(len(self._idle) - 1, -1, -1):
            since_s, connection = self._idle[place]
            if connection.for_tools is to_tool:
                del self._idle[place]
                if _is_usable(connection) and time.monotonic() - since_s < _IDLE_S:
                    return connection
                connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """Return a connection to the pool. It is kept for reuse if it is open and outside of a transaction."""
        keep = not connection.closed and connection.pgconn.transaction_status == TransactionStatus.IDLE
        if keep and connection.for_tools:
            keep = connection.direct and _emptied(connection)  # behind a proxy the session cannot be cleared
        if not keep:
            connection.close()
        connection.answer_s = self.answer_s
        stale: list[Connection] = []
        with self._freed:
            self._out -= 1
            now_s = time.monotonic()
            if keep and not self._closed:
                self._idle.append((now_s, connection))
                # Close connections that were idle for too long; these are at the front of the list. Otherwise they
                # would stay open for ever after a busy time.
                while self._idle and now_s - self._idle[0][0] > _IDLE_S:
                    stale.append(self._idle.pop(0)[1])
            elif keep:
                stale.append(connection)
            self._freed.notify()
        for old in stale:
            old.close()

    def _refuse_if_away(self) -> None:
        if self._down_since_s is not None and time.monotonic() < self._again_s:
            raise self._why.again(type(self._why))

    def _connect(self) -> Connection:
        try:
            connection = connect(self._said, self.where, self.answer_s)
        except StoreError as error:
            # If this process was connected before, tell the caller to retry: a changed password, or a database that is
            # being restored, must not end the process.
            told = error.again(StoreUnavailable) if self._reached else error
            self._is_away(told)
            raise told from None
        self._is_back(connection)
        return connection

    @property
    def ahead_us(self) -> int:
        """How far the server's clock is ahead of this machine's clock, by the last measurement.

        The result is corrected if this machine's clock was set since then.
        """
        return self._ahead.by_now_us()

    def measured(self, ahead: Ahead) -> None:
        """Store a new measurement of the clocks."""
        self._ahead = ahead

    def _is_away(self, error: StoreError) -> None:
        with self._freed:
            first = self._down_since_s is None
            if first:
                self._down_since_s = time.monotonic()
                self._pause_s = _FIRST_PAUSE_S
            self._why = error
            self._again_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if first and self._reached:  # before the first connection, the caller that opens the store reports the error
            log.warning("%s", error.in_full())

    def _is_back(self, connection: Connection) -> None:
        with self._freed:
            since_s, self._down_since_s, self._reached = self._down_since_s, None, True
        self.measured(connection.ahead)
        if since_s is not None:
            log.warning("%s is back after %.1f s", self.where, time.monotonic() - since_s)


def _emptied(connection: Connection) -> bool:
    try:
        connection.execute(b"DISCARD ALL")
    except psycopg.Error:
        return False
    return True


def _is_usable(connection: Connection) -> bool:
    """Is the connection still open, with nothing to read?

    If the server has closed the connection, the socket has an end of file to read.
    """
    if connection.closed:
        return False
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    return not waiting.poll(0)
