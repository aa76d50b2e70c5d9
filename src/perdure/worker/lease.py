"""Signs of life, off the event loop: a tool that blocks the loop for three lease times loses nothing.

An error here never ends the renewer silently (T13): it is logged and the next beat tries again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from perdure.store.api import Store
from perdure.worker.clock import Clock

log = logging.getLogger("perdure.worker")


class Watchdog:
    """Says so when the event loop does not turn: whatever blocks it keeps every run of the worker from going on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inside: Callable[[], str]) -> None:
        self._loop = loop
        self._inside = inside
        self._turned_s = time.monotonic()

    def look(self, patience_s: float) -> None:
        """Asked from another thread, at every beat."""
        stuck_s = time.monotonic() - self._turned_s
        if stuck_s > patience_s:
            log.error("the event loop has not turned for %.0f s, and no run goes on: it is inside %s", stuck_s, self._inside())
        try:
            self._loop.call_soon_threadsafe(self._turn)
        except RuntimeError:
            pass  # the loop has been closed

    def _turn(self) -> None:
        self._turned_s = time.monotonic()


class Renewer:
    """A thread that renews a worker's leases several times per lease."""

    def __init__(self, store: Store, worker: str, clock: Clock, lease_s: float, watchdog: Watchdog) -> None:
        self._store = store
        self._worker = worker
        self._clock = clock
        self._every_s = lease_s / 4
        self._watchdog = watchdog
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure-lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; at most one beat is still under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._watchdog.look(patience_s=2 * self._every_s)
            try:
                self._store.renew(self._worker, self._clock.now())
            except Exception as error:
                log.warning("cannot renew the leases of this worker: %s; trying again in %.1f s", error, self._every_s)
