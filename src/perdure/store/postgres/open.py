"""From a postgresql: URL to a store."""

from __future__ import annotations

import time

from perdure.errors import StoreUnavailable
from perdure.store.api import Store
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.migrate import migrate, require_journal
from perdure.store.postgres.store import PostgresStore

_STARTING_S = 30.0


def open_postgres(url: str, *, create: bool = True, answer_s: float = 10.0, connections: int = 10) -> Store:
    """Open the journal that lies in the URL's database; create it, or bring its schema up to date, if need be."""
    pool = Connections(url, connections, answer_s)
    deadline_s = time.monotonic() + _STARTING_S
    while True:
        try:
            with pool.lent() as connection:
                if not create:
                    require_journal(connection, pool.where)
                migrate(connection, pool.where)
                return PostgresStore(url, pool, connection.schema)
        except StoreUnavailable as error:
            # A server that is starting up or recovering says so, and will be there soon; whatever else is wrong is for the caller.
            if ("starting up" not in str(error) and "recovery" not in str(error)) or time.monotonic() > deadline_s:
                pool.close()
                raise
            time.sleep(0.2)
        except BaseException:
            pool.close()
            raise
