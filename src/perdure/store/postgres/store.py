"""The Store on PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psycopg

from perdure.core.events import AnyBody, SignalReceived
from perdure.store.api import Append, Appended, NewRun, RunRow, Status
from perdure.store.creation import first_event
from perdure.store.delivery import Letter
from perdure.store.journal import concerns_others
from perdure.store.part import Means
from perdure.store.postgres import soundness
from perdure.store.postgres.bell import NotifyBell
from perdure.store.postgres.claims import GRACE_S, PostgresClaims
from perdure.store.postgres.connections import LONGEST_PAUSE_S, Connections
from perdure.store.postgres.creation import AnswerLost, create_at_once
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.journal import PostgresJournal
from perdure.store.postgres.liveness import MachineLocks
from perdure.store.postgres.migrate import MIGRATIONS
from perdure.store.postgres.posting import LetterLost, signal_at_once
from perdure.store.postgres.wholes import PostgresWholes
from perdure.store.sql import SqlStore

# How often a look is due although nobody has rung: a bell that is heard makes looking a second net, and without one it is all there is.
_LOOK_S, _LOOK_DEAF_S = 1.0, 0.25


class PostgresStore(PostgresJournal, PostgresClaims, PostgresWholes, SqlStore):
    """A journal in a PostgreSQL database, shared by any number of workers on any number of machines."""

    remote = True
    pause_s = LONGEST_PAUSE_S
    cut_off_after_s = GRACE_S - 1.0  # some of it for what is done at the end of that time
    _database: PostgresDatabase
    _bell: NotifyBell

    def __init__(self, url: str, connections: Connections, schema: str) -> None:
        self._connections = connections
        self._notify = NotifyBell(connections, schema)
        locks = MachineLocks(self._notify, f"{connections.where} {schema}")
        super().__init__(Means(url, PostgresDatabase(connections), self._notify, locks))
        self.schema = schema

    @property
    def ahead_us(self) -> int:
        return self._connections.ahead_us

    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        try:
            row = create_at_once(self._database, self._notify, new)
        except AnswerLost:
            # The crash window: what is there now may have been made by the statement whose answer was lost. It is as new as if we had heard.
            row, created = super().create_run(new)
            self._notify.ring()
            return row, created or self.hash_at(new.run_id, 1) == first_event(new).hash
        return super().create_run(new) if row is None else (row, True)

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

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        answers = super().append(batch)
        if concerns_others(batch, answers):
            self._notify.ring()
        return answers

    def version(self) -> int:
        """Changes when anything was committed here or heard of, and from time to time anyway. Nothing is asked of the server for it."""
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
        return soundness.problems(self._database)
