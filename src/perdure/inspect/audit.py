"""The audit trail: one JSON line per event, over all runs, from the journal or live from a worker.

A line says who did what to which call and because of what; `caused_by` is the event_id of its cause, so that lines of many runs in
one file can be joined. Arguments and results are not in it: they are in the journal, under the event_id.

A live log is written after the commit. A worker that dies leaves its last lines out, and the worker that takes the run over writes
that stretch again, so that a line may stand there twice (its event_id tells). The journal itself, and so `perdure audit`, has each once.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perdure.core.events import Event, RunAdopted, RunClaimed, RunCreated, RunReleased, Terminal
from perdure.engine.api import Reading
from perdure.inspect.audit_fields import detail, error, person
from perdure.inspect.timeline import Names
from perdure.inspect.view import PAGE
from perdure.inspect.words import iso
from perdure.store.api import FINISHED, Place

log = logging.getLogger("perdure.audit")
MAX_KNOWN_RUNS = 10_000
# ASCII: whoever looks at the file with cat gets no escape sequence of a tool's making.
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode


class Trail:
    """The lines of one run. Every event must pass through here in order, also those whose line nobody wants."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.seq = 0
        self._event_ids: dict[int, str] = {}
        self._names = Names()
        self._created: RunCreated | None = None
        self._version = ""  # the one that goes on with it

    def line(self, event: Event) -> dict[str, Any]:
        """The event as one line."""
        self._learn(event)
        call, created = event.call, self._created
        return {
            "ts": iso(event.ts),
            "run_id": self.run_id,
            "event_id": event.event_id,
            "seq": event.seq,
            "type": event.type,
            "call": call,
            "tool": None if call is None else self._names.tools.get(call),
            "caused_by": None if event.cause is None else self._event_ids.get(event.cause),
            "idempotency_key": None if call is None else self._names.keys.get(call),
            "actor": person(event) or (created.actor if created else None),
            "error": error(event),
            "context": {**self._about_run(), "epoch": event.epoch, **detail(event)},
        }

    def _about_run(self) -> dict[str, Any]:
        created = self._created
        return {} if created is None else {"agent": created.agent, "version": self._version, "tenant": created.tenant}

    def _learn(self, event: Event) -> None:
        self.seq = event.seq
        self._event_ids[event.seq] = event.event_id
        self._names.learn(event)
        match event.body:
            case RunCreated():
                self._created, self._version = event.body, event.body.version
            case RunAdopted(version=version):
                self._version = version


# -- from the journal -----------------------------------------------------------------------------------------------------
class Audit:
    """The lines of all runs of a store: what is there now in order of time, then what is new at each `more`.

    What it keeps in mind are the runs that have not finished: the others never change.
    """

    def __init__(self, store: Reading, since: int = 0) -> None:
        self._store = store
        self._since = since
        self._newest: Place = (0, 0)  # of the newest run that was ever listed
        self._unfinished: dict[str, tuple[Place, int]] = {}  # runs whose end has not been told: place and created_at, oldest first
        self._trails: dict[str, Trail] = {}

    def more(self) -> Iterator[dict[str, Any]]:
        """Lines that have not been given before. Each run's in its own order; between runs by time, which is for people."""
        grown = self._grown()
        grown.sort(reverse=True)
        # A run's events are read when its time comes: what is in memory are the runs that overlap, not all there are.
        waiting: list[tuple[int, str, int]] = []  # (ts, run, position)
        opened: dict[str, list[Event]] = {}
        while grown or waiting:
            while grown and (not waiting or grown[-1][0] <= waiting[0][0]):
                run_id = grown.pop()[1]
                opened[run_id] = events = self._unseen(run_id)
                if events:
                    heapq.heappush(waiting, (events[0].ts, run_id, 0))
            if not waiting:
                continue
            _, run_id, position = heapq.heappop(waiting)
            events = opened[run_id]
            if position + 1 < len(events):
                heapq.heappush(waiting, (events[position + 1].ts, run_id, position + 1))
            else:
                del opened[run_id]
            line = self._line(run_id, events[position])
            if events[position].ts >= self._since:
                yield line

    def _grown(self) -> list[tuple[int, str]]:
        """(created_at, run) of the runs that have events which were not told yet."""
        grown: list[tuple[int, str]] = []
        # What was unfinished at the last look and is not listed now has ended in between.
        ended = dict(self._unfinished)
        oldest = next(iter(self._unfinished.values()), None)
        newest = after = self._newest
        if oldest is not None:
            (first, second), _ = oldest
            after = (first, second - 1)
        while page := self._store.growing(after, newest, PAGE):
            after = page[-1][0]
            self._newest = max(self._newest, after)
            for place, row in page:
                ended.pop(row.run_id, None)
                if row.updated_at < self._since and row.status in FINISHED:
                    continue
                self._unfinished.setdefault(row.run_id, (place, row.created_at))
                told = self._trails[row.run_id].seq if row.run_id in self._trails else 0
                if row.seq > told and row.updated_at >= self._since:
                    grown.append((row.created_at, row.run_id))
        return grown + [(created_at, run_id) for run_id, (_, created_at) in ended.items()]

    def _unseen(self, run_id: str) -> list[Event]:
        trail = self._trails.setdefault(run_id, Trail(run_id))
        return self._store.read(run_id, trail.seq)

    def _line(self, run_id: str, event: Event) -> dict[str, Any]:
        line = self._trails[run_id].line(event)
        if isinstance(event.body, Terminal):
            del self._trails[run_id], self._unfinished[run_id]
        return line


# -- live -----------------------------------------------------------------------------------------------------------------
class AuditLog:
    """Appends the lines of committed events to a file. Never raises for what the disk does: the journal has everything already.

    `history` reads a run's journal; with it the log knows the tools and keys of runs that it meets in the middle.
    """

    def __init__(self, path: Path | str, history: Callable[[str], Sequence[Event]] | None = None) -> None:
        self._path = Path(path)
        self._history = history
        self._trails: dict[str, Trail] = {}
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None
        self._torn = False  # the last write ended in the middle of a line
        self._warned = False
        self._lock = threading.Lock()
        self._open()  # a wrong path is the user's mistake and is told at once

    def committed(self, run_id: str, events: Sequence[Event]) -> None:
        """These events are durable: write their lines. Earlier events of the run may come first, and none is written twice."""
        if not events:
            return
        with self._lock:
            lines = self._lines(run_id, events)
            if lines:
                self._write("".join(_encode(line) + "\n" for line in lines).encode())

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    # -- which lines --------------------------------------------------------------------------------------------------
    def _lines(self, run_id: str, events: Sequence[Event]) -> list[dict[str, Any]]:
        trail = self._trails.get(run_id)
        told_before = 0
        if trail is None or events[0].seq > trail.seq + 1:
            trail = self._trails[run_id] = Trail(run_id)
            events = self._with_history(run_id, events)
            told_before = _told_before(events)
        made = [(event.seq, trail.line(event)) for event in events if event.seq > trail.seq]
        if isinstance(events[-1].body, RunReleased | Terminal):
            self._trails.pop(run_id, None)
        elif len(self._trails) > MAX_KNOWN_RUNS:
            self._trails.pop(next(iter(self._trails)))
        return [line for seq, line in made if seq > told_before]

    def _with_history(self, run_id: str, events: Sequence[Event]) -> Sequence[Event]:
        if events[0].seq == 1 or self._history is None:
            return events
        try:
            earlier = [event for event in self._history(run_id) if event.seq < events[0].seq]
        except Exception as error:  # whatever it is: the run goes on, and its lines have less in them
            self._warn(f"cannot read the history of run {run_id}: {error}")
            return events
        return [*earlier, *events]

    # -- the file -----------------------------------------------------------------------------------------------------
    def _write(self, data: bytes) -> None:
        try:
            self._reopen_if_moved()
            assert self._file is not None
            if self._torn:
                data = b"\n" + data
            written = os.write(self._file, data)
            while written < len(data):
                self._torn = True
                written += os.write(self._file, data[written:])
            self._torn = self._warned = False
        except OSError as error:
            self._warn(f"cannot write the audit log {self._path}: {error.strerror}; the runs go on, and `perdure audit` has every line")

    def _reopen_if_moved(self) -> None:
        """A rotated log has another inode, or none; lines go to the file that bears the name."""
        try:
            status = os.stat(self._path)
            moved = (status.st_dev, status.st_ino) != self._identity
        except FileNotFoundError:
            moved = True
        if moved or self._file is None:
            self._open()

    def _open(self) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        status = os.fstat(file)
        if self._file is not None:
            os.close(self._file)
        self._file, self._identity, self._torn = file, (status.st_dev, status.st_ino), False

    def _warn(self, message: str) -> None:
        # Once per trouble, not once per event: a full disk must not fill the other log as well.
        if not self._warned:
            self._warned = True
            log.warning("%s", message)


def _told_before(events: Sequence[Event]) -> int:
    """The seq up to which a worker before has written the lines: the last time that the run was given up in good order.

    After a crash there is no such event since the claim of the dead worker, so all that it did is written again.
    """
    claim = max((event.seq for event in events if isinstance(event.body, RunClaimed)), default=0)
    return max((event.seq for event in events if isinstance(event.body, RunReleased) and event.seq < claim), default=0)
