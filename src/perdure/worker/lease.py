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
_AGAIN_S = 1.0
_FOR_EVER_S = 1e9


class Watchdog:
    """Says so when the event loop does not turn: whatever blocks it keeps every run of the worker from going on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inside: Callable[[], str]) -> None:
        self._loop = loop
        self._inside = inside
        self._asked_s: float | None = None  # when the loop was asked to turn and has not yet

    def look(self, patience_s: float) -> None:
        """Asked from another thread, at every beat."""
        asked_s = self._asked_s
        if asked_s is not None:
            stuck_s = time.monotonic() - asked_s
            if stuck_s > patience_s:
                log.error("the event loop has not turned for %.0f s, and no run goes on: it is inside %s", stuck_s, self._inside())
            return
        self._asked_s = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._turn)
        except RuntimeError:
            pass  # the loop has been closed

    def _turn(self) -> None:
        self._asked_s = None


class Renewer:
    """A thread that renews a worker's leases several times per lease."""

    def __init__(self, store: Store, worker: str, clock: Clock, lease_s: float, watchdog: Watchdog) -> None:
        self._store = store
        self._worker = worker
        self._clock = clock
        self._lease_s = lease_s
        # Others take the runs of a worker after this long without a sign of life. Where they see its connection end, it may be sooner.
        self._proof_s = min(lease_s, store.cut_off_after_s)
        self._every_s = lease_s / 4
        self._again_s = min(self._every_s, _AGAIN_S)
        begun_s = time.monotonic()
        self._held = (begun_s, begun_s)  # since when without a gap, and the last sign of life; one object, read by another thread
        self._cut_off_s = float("-inf")  # when this worker last could not reach the database
        self._watchdog = watchdog
        self._lock = threading.Lock()  # one beat at a time
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure-lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; at most one beat is still under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def has_held_since(self, then_s: float) -> bool:
        """Whether the leases cannot have run out between that moment (of the monotonic clock) and this one."""
        since_s, renewed_s = self._held
        return since_s <= then_s and time.monotonic() - renewed_s <= self._proof_s

    def is_heard(self) -> bool:
        """Whether the last sign of life is younger than a lease."""
        return time.monotonic() - self._held[1] <= self._lease_s

    def beat(self) -> float:
        """Give a sign of life, now and from any thread; when it was asked for. Others heard it no earlier."""
        with self._lock:
            asked_s = time.monotonic()
            self._store.renew(self._worker, self._clock.now())
            since_s, renewed_s = self._held
            # It may have arrived as late as now, and been sent as early as it was asked for.
            silent_s = time.monotonic() - renewed_s
            if silent_s > self._lease_s:
                self._cut_off_s = asked_s
            if silent_s > self._proof_s:
                since_s = asked_s
            self._held = (since_s, asked_s)
            return asked_s

    def silence(self) -> float:
        """For how long (s) another worker must have been silent for this one to call it dead.

        After an outage everybody has been silent for as long as it lasted. Whoever is back first must not take the runs of all the others,
        whose calls go on: before it judges anybody it has been in touch for a whole lease, and for as long as another process, which asks
        the database again after a pause of its own, may notice later that it is back.
        """
        now_s = time.monotonic()
        if now_s - self._held[1] > self._lease_s or now_s - self._cut_off_s <= self._lease_s + self._store.pause_s + self._again_s:
            return _FOR_EVER_S
        return self._lease_s

    def _run(self) -> None:
        wait_s = self._every_s
        while not self._stop.wait(wait_s):
            wait_s = self._every_s
            self._watchdog.look(patience_s=2 * self._every_s)
            try:
                self.beat()
            except Exception as error:
                # Sooner than usual: whoever is back must hear of it before somebody takes this worker for dead.
                wait_s = self._again_s
                known = (
                    self._store.remote and time.monotonic() - self._cut_off_s < 3 * _AGAIN_S + self._every_s
                )  # said, and by the store too
                self._cut_off_s = time.monotonic()
                log.log(logging.DEBUG if known else logging.WARNING, "cannot renew the leases of this worker: %s; trying again", error)
