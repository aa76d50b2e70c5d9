"""Finds the driver's connection inside the connection or session that a caller passes to `app.start(connection=…)`.

SQLAlchemy is not imported here: an object of SQLAlchemy can exist only if the caller has imported it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

from perdure.errors import InvalidInput

T = TypeVar("T")


@asynccontextmanager
async def driver_connection(given: Any) -> AsyncIterator[Any]:
    """The driver's own connection. Inside this context, no other task uses it, if it is asynchronous."""
    found = await _unwrapped(given)
    turn = getattr(found, "lock", None)
    async with turn if isinstance(turn, asyncio.Lock) else nullcontext():
        yield found


async def to_the_end(work: asyncio.Future[T]) -> T:
    """The result of work on a thread. If the caller is cancelled, the cancel goes on when the thread has ended.

    Otherwise the caller would roll back on a connection that the thread still uses.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # asyncio warns about an exception that no caller has seen
        raise cancelled
    return work.result()


async def _unwrapped(given: Any) -> Any:
    orm, asynchronous = sys.modules.get("sqlalchemy.orm"), sys.modules.get("sqlalchemy.ext.asyncio")
    engine = sys.modules.get("sqlalchemy.engine")
    if asynchronous is not None and isinstance(given, asynchronous.async_scoped_session):
        given = given()
    if asynchronous is not None and isinstance(given, asynchronous.AsyncSession):
        given = await given.connection()
    if asynchronous is not None and isinstance(given, asynchronous.AsyncConnection):
        if given.sync_connection is None:
            raise InvalidInput(
                "start(connection=…): the AsyncConnection is not open; use it in `async with engine.connect() as connection:`"
            )
        return await given.run_sync(_begun)
    if orm is not None and isinstance(given, orm.scoped_session):
        given = given()
    if orm is not None and isinstance(given, orm.Session):
        given = given.connection()
    return _begun(given) if engine is not None and isinstance(given, engine.Connection) else given


def _begun(connection: Any) -> Any:
    """The driver's connection of a Connection of SQLAlchemy, whose transaction has begun."""
    if connection.closed:
        raise InvalidInput("start(connection=…): the connection is closed; nothing was started")
    if not connection.in_transaction():
        # A statement of the caller begins the transaction in this way too. Without it, `connection.commit()` does nothing.
        connection.begin()
    return connection.connection.driver_connection
