"""A connection to the real PostgreSQL on which a process dies in the middle of a commit.

A commit is a COMMIT, or a single statement that writes outside of any transaction. psycopg and our own `wire` are
wrapped at two places: where they give a statement to libpq, and where they begin to wait for the answer, on a thread
or on an event loop. At the second place the kernel has all bytes, and delivers them even if the process dies.
"""

from __future__ import annotations

import re
import select
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from psycopg._cursor_base import BaseCursor
from psycopg._enums import Wait
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus

from perdure.store.postgres import wire
from perdure.store.postgres.connect import Connection

if TYPE_CHECKING:
    from tests.crash.fate import Fate

_WRITES = re.compile(rb"(INSERT INTO|UPDATE|DELETE FROM) perdure_")


class DyingWire:
    """Every connection of this process, from now on."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate
        self._here = threading.local()  # of the statement that this thread is at: a transaction stays on its thread
        self._wrap_cursor("_execute_send")
        self._wrap_cursor("_send_query_prepared")
        self._wrap_wire()
        self._wrap_waiting()

    def _wrap_cursor(self, method: str) -> None:
        real = getattr(BaseCursor, method)

        def sending(cursor: Any, *args: Any, **kwargs: Any) -> None:
            alone = cursor._conn.pgconn.transaction_status == TransactionStatus.IDLE
            self._about_to_send(alone, next(each.query for each in args if hasattr(each, "query")))
            real(cursor, *args, **kwargs)

        setattr(BaseCursor, method, sending)

    def _wrap_wire(self) -> None:
        real = wire.send

        def send(connection: Connection, statement: wire.WireStatement, name: bytes, data: Sequence[bytes | None]) -> None:
            # Never inside a transaction of ours; and of what goes together before one Sync the last one writes, and the Sync commits it.
            self._about_to_send(True, statement.sql)
            real(connection, statement, name, data)

        wire.send = send

    def _about_to_send(self, alone: bool, query: bytes) -> None:
        self._fate.meet("wire", "op")
        self._here.commits = self._commits(alone, query)
        if self._here.commits and self._fate.is_due("half"):
            self._fate.strike()
        if self._here.commits and self._fate.is_due("frozen"):
            self._fate.freeze()

    def _commits(self, alone: bool, query: bytes) -> bool:
        """Whether this statement makes something durable; a transaction that has written nothing does not."""
        if query.startswith(b"BEGIN"):
            self._here.wrote = False
            return False
        if query == b"COMMIT":
            return getattr(self._here, "wrote", False)
        writes = _WRITES.search(query) is not None
        if alone:
            return writes
        self._here.wrote = getattr(self._here, "wrote", False) or writes
        return False

    def _wrap_waiting(self) -> None:
        real = Connection.wait

        def wait(connection: Connection, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            return real(connection, self._watched(connection, gen), interval, timeout)

        Connection.wait = wait  # type: ignore[method-assign,assignment]
        sends = wire.send_on_loop
        wire.send_on_loop = lambda loop, connection, statement, answered: sends(
            loop, connection, self._carried(self._watched(connection, statement)), answered
        )

    def _carried(self, gen: PQGen[Any]) -> PQGen[Any]:
        """Inside the place's method at every step, if it was at the first one: the others are callbacks of the loop."""
        inside, ready = self._fate.is_inside, None
        while True:
            outside, self._fate.is_inside = self._fate.is_inside, inside
            try:
                state = gen.send(ready)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value
            finally:
                self._fate.is_inside = outside
            ready = yield state

    def _watched(self, connection: Connection, gen: PQGen[Any]) -> PQGen[Any]:
        try:
            state = next(gen)
            while True:
                if state == Wait.R and getattr(self._here, "commits", False):
                    self._here.commits = False
                    self._sent(connection)
                state = gen.send((yield state))
        except StopIteration as end:
            return end.value

    def _sent(self, connection: Connection) -> None:
        if self._fate.is_due("handed"):
            self._fate.strike()
        if self._fate.is_due("kept"):
            answered = select.poll()
            answered.register(connection.fileno(), select.POLLIN)
            assert answered.poll(20_000), "the server does not answer"
            self._fate.strike()
