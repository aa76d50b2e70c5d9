"""The Store on PostgreSQL, and the function that opens it by its URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from perdure.core.events import AnyBody, RunCreated, SignalReceived
from perdure.errors import StoreUnavailable
from perdure.store import queues
from perdure.store.api import Append, Appended, NewRun, RunRow, Status, Store
from perdure.store.archive import Wholes
from perdure.store.creation import first_event
from perdure.store.cursor import Cursor, Row
from perdure.store.delivery import Letter
from perdure.store.journal import concerns_others
from perdure.store.part import Means
from perdure.store.postgres import integrity
from perdure.store.postgres.arrays import Array, Byteas, Int8s, Texts
from perdure.store.postgres.bell import NotifyBell
from perdure.store.postgres.claims import GRACE_S, PostgresClaims
from perdure.store.postgres.connections import LONGEST_PAUSE_S, Connections
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.fast_writes import AnswerLost, LetterLost, create_at_once, signal_at_once
from perdure.store.postgres.journal import PostgresJournal
from perdure.store.postgres.liveness import MachineLocks
from perdure.store.postgres.migrate import MIGRATIONS, migrate, require_journal
from perdure.store.sql import SqlStore

_COLUMNS: tuple[tuple[str, type[Array]], ...] = (
    *(("runs", Int8s), ("seqs", Int8s), ("ids", Byteas), ("times", Int8s), ("epochs", Int8s)),
    *(("calls", Int8s), ("causes", Int8s), ("data", Texts), ("hashes", Byteas)),
)


class PostgresWholes(Wholes):
    """Inserts the events of whole runs in one statement.

    With one statement for each event, each event would cost a trigger call.
    """

    def _take_in_events(self, cursor: Cursor, events: Sequence[Row]) -> None:
        columns = zip(*events, strict=True)
        cursor.change("take_in_events", {name: kind.of(column) for (name, kind), column in zip(_COLUMNS, columns, strict=True)})


# -- the store


# The time between two polls if no bell has rung: the first number if this process can hear the bell, the second if it
# cannot.
_LOOK_S, _LOOK_DEAF_S = 1.0, 0.25


class PostgresStore(PostgresJournal, PostgresClaims, PostgresWholes, SqlStore):
    """A journal in a PostgreSQL database, shared by any number of workers on any number of machines."""

    remote = True
    schema_version = len(MIGRATIONS)
    pause_s = LONGEST_PAUSE_S
    cut_off_after_s = GRACE_S - 1.0  # one second less than GRACE_S, for safety
    _database: PostgresDatabase
    _bell: NotifyBell

    def __init__(self, url: str, connections: Connections, schema: str) -> None:
        self._connections = connections
        self._notify = NotifyBell(connections, schema)
        locks = MachineLocks(self._notify, f"{connections.where} {schema}")
        super().__init__(Means(url, PostgresDatabase(connections, schema), self._notify, locks))
        self.schema = schema

    @property
    def ahead_us(self) -> int:
        return self._connections.ahead_us

    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        try:
            row = create_at_once(self._database, self._notify, new)
        except AnswerLost:
            # If the statement whose answer was lost has created the run, the run counts as created by this call.
            row, created = super().create_run(new)
            self._notify.ring()
            return row, created or self.hash_at(new.run_id, 1) == first_event(new).hash
        return super().create_run(new) if row is None else (row, True)

    def create_run_on(self, connection: Any, new: NewRun) -> tuple[RunRow, bool]:
        self._make_line(new)
        return super().create_run_on(connection, new)

    def _make_line(self, new: NewRun) -> None:
        """Create the line of the run in a transaction of its own.

        If the caller's transaction created it, every other start of this kind would wait until that transaction ends.
        """
        created = new.created
        assert isinstance(created, RunCreated), created
        kind = (created.agent, created.version, created.queue, created.tenant, created.priority)
        if not self._database.read("line", kind):
            self._database.write(lambda cursor: queues.line_of(cursor, *kind), lambda cursor, _: cursor.one("line", kind) is not None)

    def post(
        self,
        run_id: str,
        call: int | None,
        body: AnyBody,
        *,
        event_id: str,
        now: int,
        status: Status | None = None,
        expect: Callable[[RunRow], None] | None = None,
        lost: bool = False,
    ) -> bool:
        try:
            at_once = isinstance(body, SignalReceived) and call is None and status is None and expect is None and not lost
            if at_once and signal_at_once(self._database, self._notify, run_id, Letter(call, body, event_id, now)):
                return True
        except LetterLost:
            return super().post(run_id, call, body, event_id=event_id, now=now, status=status, expect=expect, lost=True)
        return super().post(run_id, call, body, event_id=event_id, now=now, status=status, expect=expect, lost=lost)

    @contextmanager
    def snapshot_to(self, file: Path) -> Iterator[bool]:
        with self._database.frozen():
            yield False

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        answers = super().append(batch)
        if concerns_others(batch, answers):
            self._notify.ring()
        if self._notify.watched:
            self._notify.moved({append.lease.run_id for append in batch})
        return answers

    def version(self) -> int:
        """A number that changes with every commit of this process, with every ring, and also as time passes.

        The server is not asked.
        """
        look_s = _LOOK_S if self._notify.listening else _LOOK_DEAF_S
        return self._database.commits + self._notify.heard + int(time.monotonic() / look_s)

    def facts(self) -> dict[str, str]:
        (row,) = self._database.read("facts")
        names = ("server", "size", "fsync", "synchronous_commit", "max_connections", "connections_used")
        said = dict(zip(names, map(str, row), strict=True))
        return {
            "database": self._database.where,
            "schema": self.schema,
            **said,
            "clock_ahead": f"{self.ahead_us / 1000:.1f} ms",
            "doorbell": "listening" if self._notify.listening else "not listening in this process",
            **self.common_facts(),
            "schema_version": str(len(MIGRATIONS)),
            "psycopg": psycopg.__version__,
        }

    def problems(self) -> list[str]:
        return integrity.problems(self._database)

    def restore_schema(self, *, check: bool = False) -> list[str]:
        return integrity.restore_schema(self._database, check=check)


# -- opening a store by its postgresql: URL


_STARTING_S = 30.0


def open_postgres(url: str, *, create: bool = True, answer_s: float = 10.0, connections: int = 10) -> Store:
    """Open the journal in the URL's database. If needed, create the journal or update its schema."""
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
            # Try again if the message says that the server is starting up or recovering. The caller gets any other
            # error.
            if ("starting up" not in error.in_full() and "recovery" not in error.in_full()) or time.monotonic() > deadline_s:
                pool.close()
                raise
            time.sleep(0.2)
        except BaseException:
            pool.close()
            raise
