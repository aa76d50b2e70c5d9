"""Shared by the tests of the PostgreSQL store: fast empty journals, direct queries of the tables, and waits."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict
from tests.servers.postgres import OWNER, Server

from perdure.store.open import open_store
from perdure.store.postgres.store import PostgresStore

T = TypeVar("T")
_shared: WeakKeyDictionary[Server, str] = WeakKeyDictionary()
_kept: WeakKeyDictionary[Server, str] = WeakKeyDictionary()
# As superuser, whose statements can skip the triggers.


def empty(server: Server) -> str:
    """URL of a database with a new, empty schema: dropping a database takes a second, this takes no time."""
    server.revive()
    url = _shared.get(server)
    if url is None:
        url = _shared[server] = server.new_database()
    schema = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(f"CREATE SCHEMA {schema}".encode())
    server.execute(f'ALTER ROLE {OWNER} IN DATABASE "{conninfo_to_dict(url)["dbname"]}" SET search_path = {schema}')
    return url


def cleared(server: Server) -> str:
    """URL of a journal that is there already, without its rows: for tests that change no table, and many times faster still."""
    server.revive()
    url = _kept.get(server)
    if url is None:
        url = _kept[server] = server.new_database()
        opened(url).close()
    server.clear(url)
    return url


def opened(url: str, **settings: Any) -> PostgresStore:
    store = open_store(url, **settings)
    assert isinstance(store, PostgresStore)
    return store


def raw(url: str) -> psycopg.Connection[Any]:
    """A look into the tables, each statement for itself."""
    return psycopg.connect(url, autocommit=True)


def eventually(look: Callable[[], T], timeout_s: float = 60.0) -> T:
    """The result of the query, as soon as it is not empty."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)
    return found


class Gate:
    """Stops a statement on the server, at a place in its text, until the gate is opened. Meanwhile others can act."""

    _KEY = 4711
    HELD_UP = f"pg_advisory_xact_lock_shared({_KEY})"

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(f"SELECT pg_advisory_lock({self._KEY})".encode())

    def wait(self) -> None:
        """Until a statement has come here."""
        deadline_s = time.monotonic() + 60
        waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"
        while self._connection.execute(waiting, (self._KEY,)).fetchone() is None:
            assert time.monotonic() < deadline_s, "no statement has come to the gate"
            time.sleep(0.005)

    def open(self) -> None:
        self._connection.close()
