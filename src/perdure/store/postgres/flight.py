"""One statement on its way, watched by an event loop that does other things meanwhile.

A statement (`wire.py`) is a generator that says which side of the socket it waits for. A thread that waits for one costs two hand-overs,
which is a tenth of what a commit takes where the server is near.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.waiting import Ready, Wait

from perdure.store.postgres.connect import Connection

T = TypeVar("T")


def fly(loop: asyncio.AbstractEventLoop, connection: Connection, statement: PQGen[T], landed: Callable[[T | psycopg.Error], None]) -> None:
    """Let it go; `landed(answer or error)` is called on the loop. A connection that does not answer in time is closed. Never waits."""
    _Flight(loop, connection, statement, landed).go_on()


class _Flight(Generic[T]):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: Connection, statement: PQGen[T], landed: Callable[[T | psycopg.Error], None]
    ) -> None:
        self._loop = loop
        self._connection = connection
        self._statement = statement
        self._landed = landed
        self._socket = connection.fileno()
        self._watched = 0
        self._is_under_way = False
        self._alarm = loop.call_later(connection.answer_s, self._is_late)

    def go_on(self, ready: Ready | None = None) -> None:
        try:
            wanted: int = next(self._statement) if ready is None else self._statement.send(ready)
        except StopIteration as end:
            self._land(end.value)
        except psycopg.Error as error:
            self._land(error)
        except Exception as error:
            if self._is_under_way:  # whatever came back made no sense: it is as good as lost
                self._lose(f"{type(error).__name__}: {error}")
                return
            # Nothing was sent, and whoever let it go hears why: it must not land as well when its time is over.
            self._alarm.cancel()
            raise
        else:
            self._is_under_way = True
            self._watch(wanted)

    def _watch(self, wanted: int) -> None:
        if wanted == self._watched:
            return
        if self._watched:
            self._look_away()
        if wanted & Wait.R:
            self._loop.add_reader(self._socket, self.go_on, Ready.R)
        if wanted & Wait.W:
            self._loop.add_writer(self._socket, self.go_on, Ready.W)
        self._watched = wanted

    def _look_away(self) -> None:
        # Before the socket can be closed: its number may belong to another file the next moment.
        if self._watched & Wait.R:
            self._loop.remove_reader(self._socket)
        if self._watched & Wait.W:
            self._loop.remove_writer(self._socket)
        self._watched = 0

    def _is_late(self) -> None:
        self._lose(f"no answer within {self._connection.answer_s:g} s")

    def _lose(self, why: str) -> None:
        self._statement.close()
        self._look_away()
        self._connection.close()
        self._land(psycopg.OperationalError(why))

    def _land(self, answer: T | psycopg.Error) -> None:
        self._alarm.cancel()
        self._look_away()
        if self._is_under_way:
            self._landed(answer)
        else:  # not before whoever let it go knows that it did
            self._loop.call_soon(self._landed, answer)
