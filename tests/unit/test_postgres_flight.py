"""A statement under way is executed once or not at all, whatever fails.

No caller waits for ever or gets two answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.abc import PQGen
from psycopg.waiting import Ready, Wait
from tests.servers.postgres import Server
from tests.unit.postgres_tools import empty

from perdure.store.postgres.connect import Connection
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.wire import send_on_loop


@pytest.fixture
def connection(postgres: Server) -> Iterator[Connection]:
    connections = Connections(empty(postgres), limit=1, answer_s=0.2)
    with connections.lent() as connection:
        yield connection
    connections.close()


def _landings(connection: Connection, statement: PQGen[Any]) -> tuple[list[psycopg.Error | None], Exception | None]:
    """The answers until well after the time-out, and what the caller that abandoned it was told."""
    answered: list[psycopg.Error | None] = []

    async def main() -> Exception | None:
        told = None
        try:
            send_on_loop(asyncio.get_running_loop(), connection, statement, answered.append)
        except Exception as error:
            told = error
        await asyncio.sleep(0.5)
        return told

    return answered, asyncio.run(main())


def test_what_cannot_even_be_sent_is_told_at_once_and_never_lands(connection: Connection) -> None:
    def statement() -> PQGen[Any]:
        raise ValueError("no such text")
        yield Wait.W

    answered, told = _landings(connection, statement())
    assert answered == []
    assert isinstance(told, ValueError)
    assert not connection.closed


def test_an_answer_that_makes_no_sense_is_a_lost_one(connection: Connection) -> None:
    def statement() -> PQGen[Any]:
        ready = yield Wait.W
        assert ready == Ready.W
        raise ValueError("what is this?")

    (error,), told = _landings(connection, statement())
    assert told is None
    assert isinstance(error, psycopg.OperationalError)
    assert "what is this?" in str(error)
    assert connection.closed


def test_no_answer_in_time_is_a_lost_one(connection: Connection) -> None:
    def statement() -> PQGen[Any]:
        while True:
            yield Wait.R

    (error,), told = _landings(connection, statement())
    assert told is None
    assert "no answer within 0.2 s" in str(error)
    assert connection.closed
