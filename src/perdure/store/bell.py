"""The doorbell: who waits for work hears of a commit at once, without asking for it all the time.

A hint and nothing more. It may come late, twice or never, and whoever listens also looks by itself from time to time, so that nothing
here ever makes a commit fail.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from perdure.core.events import ChildStarted
from perdure.store.api import FINISHED, Append, Appended, Committed

log = logging.getLogger("perdure.store")
Ring = Callable[[], None]


class Bell(Protocol):
    def listen(self, ring: Ring) -> Ring:
        """Call `ring`, from any thread, soon after `ring()` was called in any process; returns how to end that."""

    def ring(self) -> None:
        """Wake all who listen, here and elsewhere. Never raises."""

    def close(self) -> None:
        """End all listening that was begun here."""


class Listeners:
    """Those of this process: for a database in memory, all there are."""

    def __init__(self) -> None:
        self._rings: dict[object, Ring] = {}
        self._lock = threading.Lock()

    def listen(self, ring: Ring) -> Ring:
        token = object()
        with self._lock:
            self._rings[token] = ring

        def stop() -> None:
            with self._lock:
                self._rings.pop(token, None)

        return stop

    def ring(self) -> None:
        with self._lock:
            rings = list(self._rings.values())
        for ring in rings:
            call(ring)

    def close(self) -> None:
        with self._lock:
            self._rings.clear()


def call(ring: Ring) -> None:
    """Ring one listener, whatever it does."""
    try:
        ring()
    except Exception as error:
        log.debug("a listener could not be rung: %r", error)  # its loop has been closed; the commit has nothing to do with it


def concerns_others(batch: Sequence[Append], answers: Sequence[Appended]) -> bool:
    """Whether these appends leave something for another worker to do now: a run that was given up, a child, the end of one."""
    # Lists, here and below: this is asked about every commit, and a generator costs more than what it saves.
    return True in [isinstance(answer, Committed) and leaves_work(append) for append, answer in zip(batch, answers, strict=True)]


def leaves_work(append: Append) -> bool:
    """Whether another worker has to hear of this append, once it is committed."""
    row = append.row
    if row is not None and row.status in FINISHED:
        return "/" in append.lease.run_id  # a child: its parent has heard of it
    if row is not None and row.release and row.ready_at is not None:
        # Whoever sleeps until then looks again long before: only what is ready now is worth a ring.
        return not append.events or row.ready_at <= append.events[-1].event.ts
    return ChildStarted in [type(sealed.event.body) for sealed in append.events]
