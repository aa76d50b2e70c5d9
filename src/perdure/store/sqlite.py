"""The Store on SQLite: each part of the protocol in its own module, joined here over one database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from perdure.core.events import AnyBody, Event
from perdure.store import blobs, soundness
from perdure.store.api import (
    Append,
    Appended,
    Claimed,
    Filter,
    InboxRow,
    NewRun,
    RunRow,
    Status,
    Stored,
    WorkerRow,
)
from perdure.store.claims import Claims
from perdure.store.database import Database
from perdure.store.journal import Journal
from perdure.store.liveness import FileLocks, InProcess
from perdure.store.mailbox import Mailbox
from perdure.store.migrate import MIGRATIONS
from perdure.store.rows import run_row


class SqliteStore:
    """A journal in one SQLite file, or in memory when there is no path."""

    def __init__(self, url: str, path: Path | None, *, synchronous: str = "full", busy_s: float = 10.0) -> None:
        self.url = url
        self._database = Database(path, synchronous, busy_s)
        self._liveness = InProcess() if path is None else FileLocks(path.with_name(f"{path.name}-workers"))
        self._journal = Journal(self._database)
        self._claims = Claims(self._database, self._journal, self._liveness)
        self._mailbox = Mailbox(self._database, self._claims)

    def create_run(self, new: NewRun) -> tuple[RunRow, bool]:
        return self._mailbox.create_run(new)

    def get(self, run_id: str) -> RunRow | None:
        rows = self._database.read("run_by_id", (run_id,))
        return run_row(rows[0]) if rows else None

    def append(self, batch: Sequence[Append]) -> list[Appended]:
        return self._journal.append(batch)

    def transact(self, head: Append, work: Callable[[Any], tuple[Append, Any]]) -> tuple[Appended, Any]:
        return self._journal.transact(head, work)

    def read(self, run_id: str, after: int = 0) -> list[Event]:
        return self._journal.read(run_id, after)

    def stored(self, run_id: str) -> list[Stored]:
        return self._journal.stored(run_id)

    def hash_at(self, run_id: str, seq: int) -> bytes:
        return self._journal.hash_at(run_id, seq)

    def growing(self, after: int = 0, newest: int = 0, limit: int = 1000) -> list[tuple[int, RunRow]]:
        rows = self._database.read("growing_runs", {"after": after, "newest": newest, "limit": limit})
        return [(row[19], run_row(row)) for row in rows]

    def blob(self, digest: str) -> bytes:
        return blobs.get(self._database, digest)

    def register(self, worker: str, name: str, pid: int, now: int) -> None:
        self._claims.register(worker, name, pid, now)

    def unregister(self, worker: str, now: int) -> None:
        self._claims.unregister(worker, now)

    def renew(self, worker: str, now: int) -> None:
        self._claims.renew(worker, now)

    def claim(self, worker: str, served: Sequence[str], limit: int, now: int, *, run_id: str | None = None) -> list[Claimed]:
        return self._claims.claim(worker, served, limit, now, run_id)

    def reap(self, worker: str, lease_us: int, now: int) -> int:
        return self._claims.reap(worker, lease_us, now)

    def workers(self, now: int, lease_us: int) -> list[WorkerRow]:
        return self._claims.workers(now, lease_us)

    def post(
        self, run_id: str, call: int | None, body: AnyBody, *, event_id: str, now: int, status: Status, expect: Callable[[RunRow], None]
    ) -> bool:
        return self._mailbox.post(run_id, call, body, event_id=event_id, now=now, status=status, expect=expect)

    def inbox(self, worker: str) -> list[InboxRow]:
        return self._mailbox.inbox(worker)

    def next_ready(self, served: Sequence[str]) -> int | None:
        rows = self._database.read("next_ready", (msgspec.json.encode(list(served)).decode(),))
        return rows[0][0] if rows else None

    def version(self) -> int:
        return self._database.version()

    def facts(self) -> dict[str, str]:
        path = self._database.path
        sizes = {} if path is None else {name: f"{_size(path, suffix):,} bytes" for name, suffix in (("size", ""), ("log", "-wal"))}
        pragmas = {
            name: str(self._database.pragma(name)) for name in ("journal_mode", "synchronous", "page_size", "page_count", "freelist_count")
        }
        return {
            "file": self._database.where,
            **sizes,
            **pragmas,
            "schema_version": str(len(MIGRATIONS)),
            "sqlite": apsw.sqlite_lib_version(),
            "apsw": apsw.apsw_version(),
        }

    def problems(self) -> list[str]:
        return soundness.problems(self._database)

    def close(self) -> None:
        self._database.close()
        self._liveness.close()

    # Last, because inside the class the name `list` means this method from here on.
    def list(self, wanted: Filter) -> list[RunRow]:
        return [run_row(row) for row in self._database.read("list_runs", msgspec.structs.asdict(wanted))]


def _size(path: Path, suffix: str) -> int:
    file = path.with_name(path.name + suffix)
    return file.stat().st_size if file.exists() else 0
