"""Stores the progress that attempts report with `call.heartbeat`, so that it outlives this process.

A tool may report thousands of times in a second, on any thread. Only the last progress of an attempt counts. The
progress of all attempts of a worker is written together, at most once every `progress_s` seconds. Nothing waits for
this write. If the write fails, it is repeated later. So after a crash, the stored progress is at most `progress_s`
seconds (plus the time of one write) older than the last heartbeat.

When an attempt ends, the event of its end contains its last progress. After that event is durable, the next write
deletes the stored progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from perdure.core.events import (
    CheckpointTaken,
    Event,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
)
from perdure.core.state import RunState, image_in
from perdure.engine.clock import Clock
from perdure.errors import StoreError
from perdure.store.api import EndedAttempt, KeptProgress, Lease, ProgressRow, Store
from perdure.tool.call import Call

T = TypeVar("T")


_ENDS = frozenset((ToolCallCompleted, ToolCallFailed, ToolCallInDoubt, ToolCallResolved))


def has_cut_off(events: Iterable[Event]) -> bool:
    """Does the journal have an attempt without an end? Then the store may have the progress of that attempt."""
    begun: set[int | None] = set()
    for event in events:
        kind = type(event.body)
        if kind is ToolCallInitiated:
            begun.add(event.call)
        elif kind is CheckpointTaken:
            begun.update(image_in(event.body).open)  # type: ignore[arg-type]
        elif begun and kind in _ENDS:
            begun.discard(event.call)
    return bool(begun)


class Host(Protocol):
    """The part of a worker that this module uses."""

    loop: asyncio.AbstractEventLoop
    store: Store
    clock: Clock

    @property
    def transacting(self) -> bool: ...

    def aside(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None: ...


class ProgressKeeper:
    """The progress of all attempts of one worker. All methods but `hear` and `last_write` run on the worker's loop."""

    def __init__(self, host: Host, every_s: float, complain: Callable[[str, StoreError], None]) -> None:
        self._host = host
        self._every_s = every_s
        self._complain = complain
        self._news: dict[tuple[str, int], tuple[Lease, Call]] = {}  # attempts with a progress that is not stored yet
        self._stored: dict[str, dict[int, int]] = {}  # run → call → the attempt whose progress the store has
        self._ended: list[EndedAttempt] = []
        self._written_s = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._writing = False

    def hear(self, lease: Lease, call: Call) -> None:
        """Note a heartbeat, on any thread. Only the first heartbeat after a write causes any work."""
        if not call.keeps:
            call.keeps = True
            try:
                self._host.loop.call_soon_threadsafe(self._take, lease, call)
            except RuntimeError:
                pass  # the loop is closed: the worker has ended before its tool

    def knows(self, run_id: str, rows: list[ProgressRow]) -> None:
        """Note the stored progress of an earlier worker's attempts. It is deleted when these attempts have ended."""
        if rows:
            self._stored[run_id] = {row.call: row.attempt for row in rows}

    def settle(self, run_id: str, state: RunState) -> None:
        """Delete the stored progress of attempts that have ended. Call this when all events of the run are durable."""
        stored = self._stored.get(run_id)
        if stored is None:
            return
        for number, attempt in list(stored.items()):
            call = state.open.get(number)
            if call is None or (call.phase, call.attempt) != ("started", attempt):
                del stored[number]
                self._ended.append(EndedAttempt(run_id, number, attempt))
                self._set_timer()
        if not stored:
            del self._stored[run_id]

    def rested(self, run_id: str) -> None:
        """Forget the run, which this worker no longer drives. The stored progress of cut-off attempts stays."""
        self._stored.pop(run_id, None)

    def _take(self, lease: Lease, call: Call) -> None:
        self._news[lease.run_id, call.number] = (lease, call)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is None and not self._writing:
            loop = self._host.loop
            self._timer = loop.call_at(max(self._written_s + self._every_s, loop.time()), self._write)

    def _write(self) -> None:
        self._timer, host = None, self._host
        if host.transacting:
            # A tool's transaction has the write lock of the local store. Do not wait for the lock.
            self._written_s = host.loop.time()
            self._set_timer()
            return
        news = list(self._news.values())
        kept, ended = self._collect()
        if not kept and not ended:
            return
        self._writing, now = True, host.clock.now()

        def done(answer: Exception | None) -> None:
            self._writing, self._written_s = False, host.loop.time()
            if isinstance(answer, Exception):
                # Write the progress again later. A row that is not deleted now is deleted when its run is pruned.
                self._complain("cannot store the progress of calls", answer if isinstance(answer, StoreError) else StoreError(repr(answer)))
                for lease, call in news:
                    if not call.over:
                        self.hear(lease, call)
            if self._news or self._ended:
                self._set_timer()

        host.aside(lambda: host.store.keep_progress(kept, ended, now), done)

    def _collect(self) -> tuple[list[KeptProgress], list[EndedAttempt]]:
        kept = []
        for lease, call in self._news.values():
            call.keeps = False  # set this before the progress is read, so that a later heartbeat is stored again
            progress = call.progress_json
            if progress is not None and not call.over:
                kept.append(KeptProgress(lease, call.number, call.attempt, progress))
                self._stored.setdefault(lease.run_id, {})[call.number] = call.attempt
        ended, self._ended = self._ended, []
        self._news.clear()
        return kept, ended

    def stop(self) -> None:
        """Stop the timer, because the worker ends. `last_write` is called next."""
        self._writing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def last_write(self) -> None:
        """Write the rest at the end of the worker, on any thread. Mostly, this deletes progress of ended attempts."""
        kept, ended = self._collect()
        if kept or ended:
            try:
                self._host.store.keep_progress(kept, ended, self._host.clock.now())
            except StoreError as error:
                self._complain("cannot store the progress of calls", error)
