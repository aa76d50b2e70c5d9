"""Examines a folder after a power loss, with the real store and the real `verify`, on real files."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import apsw
from tests.power.disk import JOURNAL
from tests.power.outage import Image

from perdure.core.events import Event, ToolCallCompleted, ToolCallInitiated
from perdure.errors import PerdureError
from perdure.inspect.consistency import Relatives
from perdure.inspect.verify import verify_run
from perdure.inspect.view import all_rows
from perdure.store.sql import SqlStore
from perdure.store.sqlite.connect import connect_file
from perdure.store.sqlite.store import SqliteStore

BOOKS = "books"  # the table of the transaction tool
Booking = tuple[str, int]  # run and call


@dataclass
class Findings:
    """What was found on the disk."""

    hashes: dict[str, list[bytes]] = field(default_factory=dict)  # by run, in order
    event_ids: set[str] = field(default_factory=set)
    inbox: int = 0  # how many were ever put into one
    intents: dict[str, ToolCallInitiated] = field(default_factory=dict)  # by key
    bookings: set[Booking] = field(default_factory=set)
    booked: set[Booking] = field(default_factory=set)
    tombstones: set[str] = field(default_factory=set)
    statuses: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def lay_out(folder: Path, image: Image) -> Path:
    """The folder as the power loss has left it; the journal's path. Nothing else is in it: shared memory and locks were the kernel's."""
    if folder.exists():
        for entry in os.scandir(folder):
            if entry.is_dir():
                shutil.rmtree(entry.path)
            elif entry.name not in image:
                os.unlink(entry.path)
    else:
        folder.mkdir(parents=True)
    for name, content in image.items():
        _overwrite(folder / name, content)
    return folder / JOURNAL


def _overwrite(path: Path, content: bytes) -> None:
    """With nothing else in it, and in place: to give a file's memory back and to ask for it again costs more than to write to it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        written = os.pwrite(descriptor, content, 0)
        assert written == len(content), path
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


def recovered(path: Path) -> bytes | str:
    """A digest of the whole database, as SQLite recovers it with perdure's own way to connect; or the problem."""
    try:
        connection = connect_file(path, "full", 1.0)
        try:
            # This only saves time: a closer examination uses a new copy of the files.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            return hashlib.sha256(connection.serialize("main")).digest()
        finally:
            connection.close(True)
    except (apsw.Error, PerdureError) as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def opened(path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(f"sqlite:///{path}", path)) as store:
        yield store


def examine(path: Path) -> Findings:
    """Open it as perdure does, and examine everything: every run, the other rows, the guards, every page."""
    found = Findings()
    try:
        with opened(path) as store:
            kin = Relatives(store)
            for row in all_rows(store):
                verdict = verify_run(store, row, kin)
                if verdict.problem is not None:
                    found.problems.append(f"run {row.run_id}, event {verdict.seq}: {verdict.problem}")
                found.statuses[row.run_id] = row.status
                found.hashes[row.run_id] = [stored.hash for stored in store.stored(row.run_id)]
                _read(found, row.run_id, store.read(row.run_id))
            found.inbox = inbox_count(store)
            found.tombstones = {stone.run_id for _, stone in store.tombstones()}
            if BOOKS in store.other_tables():
                reader = store._database._reader
                found.booked = {(str(run_id), int(call)) for run_id, call in reader.execute(f"SELECT run, call FROM {BOOKS}")}
            found.problems += store.problems()
    except (apsw.Error, PerdureError) as error:
        found.problems.append(f"{type(error).__name__}: {error}")
    return found


def _read(found: Findings, run_id: str, events: list[Event]) -> None:
    booking = set()
    for event in events:
        found.event_ids.add(event.event_id)
        match event.body:
            case ToolCallInitiated() as intent:
                found.intents[intent.key] = intent
                if intent.tool == "book":
                    booking.add(event.call)
            case ToolCallCompleted() if event.call is not None and event.call in booking:
                found.bookings.add((run_id, event.call))


def inbox_count(store: SqlStore) -> int:
    """How many rows all inboxes together have ever had; the rows themselves go when their run has journaled them."""
    assert isinstance(store, SqliteStore), store
    count: int | None = store._database._reader.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'perdure_inbox'").get
    return count or 0
