"""Leases of a worker: the heartbeat that keeps the leases, and the append that releases a run which cannot be driven.

If a live worker holds a run but does not drive it, the run never continues, since no other worker may claim it. The
release needs only the run's row, because the journal itself may be unreadable.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from perdure.core import identity
from perdure.core.events import AnyBody, AttentionNeeded, Event, RunReleased
from perdure.core.failures import describe
from perdure.engine.clock import Clock
from perdure.errors import Fenced, StoreUnavailable, in_full
from perdure.store.api import Append, Lease, RowChange, RunRow, Store

AGAIN_AFTER_S = 1.0
_DETAIL_CHARS = 500


def release_append(lease: Lease, row: RunRow, error: Exception, clock: Clock) -> Append:
    """The append that releases a run.

    If the store, or a lost lease, was the reason, the run is ready again soon. Else the run waits for a person.
    """
    now = clock.now()
    bodies: list[AnyBody]
    if isinstance(error, StoreUnavailable | Fenced):
        status: Literal["queued", "needs_attention"] = "queued"
        detail, waiting_for, wake = None, "another look at its journal", now + round(AGAIN_AFTER_S * 1e6)
        bodies = [RunReleased(status, waiting_for, wake, abrupt=True)]
    else:
        status, waiting_for, wake = "needs_attention", "a person: error", None
        detail = f"it cannot be driven: {type(error).__name__}: {describe(error).message}"[:_DETAIL_CHARS]
        bodies = [AttentionNeeded("error", detail), RunReleased(status, waiting_for, abrupt=True)]
    # Each event has the event before it as its cause: the run is released because it needs attention.
    events = [
        Event(row.seq + place, clock.new_id(), now, lease.epoch, None, row.seq + place - 1, body) for place, body in enumerate(bodies, 1)
    ]
    attention: Literal["error"] | None = "error" if status == "needs_attention" else None
    change = RowChange(status, waiting_for=waiting_for, ready_at=wake, error=detail, attention=attention, release=True)
    return Append(lease, row.seq, tuple(identity.seal_all(row.head, events)), row=change)


# -- the heartbeat: on a thread of its own, so that the worker loses no run if a tool blocks the event loop for long


log = logging.getLogger("perdure.worker")
_AGAIN_S = 1.0
_FOR_EVER_S = 1e9


class Watchdog:
    """Logs an error when the event loop is blocked, since then no run of the worker continues.

    If the whole process did not run (SIGSTOP, a suspended machine), the heartbeat's thread did not run either. That
    time says nothing about the loop, and is not counted.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, inside: Callable[[], str]) -> None:
        self._loop = loop
        self._inside = inside
        self._asked = False  # a callback is scheduled and has not run yet
        self._stuck_s = 0.0  # for how long the loop did not run while this thread ran
        self._logged_s = 0.0  # the value of _stuck_s that was logged last
        self._looked_s = time.monotonic()

    @property
    def loop_is_closed(self) -> bool:
        return self._loop.is_closed()

    def look(self, patience_s: float) -> None:
        """Check the loop. The heartbeat's thread calls this at every beat: twice in `patience_s`."""
        since_s, self._looked_s = self._looked_s, time.monotonic()
        if self._asked:
            self._stuck_s += min(self._looked_s - since_s, 0.75 * patience_s)
            if self._stuck_s > max(patience_s, 2 * self._logged_s):
                self._logged_s = self._stuck_s
                log.error("the event loop has not turned for %.0f s, and no run goes on: it is inside %s", self._stuck_s, self._inside())
            return
        self._asked, self._stuck_s, self._logged_s = True, 0.0, 0.0
        try:
            self._loop.call_soon_threadsafe(self._turn)
        except RuntimeError:
            pass  # the loop has been closed

    def _turn(self) -> None:
        self._asked = False


class Renewer:
    """A thread that renews a worker's leases by heartbeats, four times per lease."""

    def __init__(self, store: Store, worker: str, clock: Clock, lease_s: float, watchdog: Watchdog) -> None:
        self._store = store
        self._worker = worker
        self._clock = clock
        self._lease_s = lease_s
        # Other workers take over the runs of a worker after `lease_s` seconds without a heartbeat. If they can see
        # that its connection has ended, they take the runs over sooner.
        self._proof_s = min(lease_s, store.cut_off_after_s)
        self._every_s = lease_s / 4
        self._again_s = min(self._every_s, _AGAIN_S)
        begun_s = time.monotonic()
        # The time since which the heartbeats had no gap, and the time of the last heartbeat. Both are in one tuple, so
        # that other threads read them together.
        self._held = (begun_s, begun_s)
        self._cut_off_s = float("-inf")  # when this worker last could not reach the database
        self._watchdog = watchdog
        self._lock = threading.Lock()  # only one heartbeat is sent at a time
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perdure-lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. At most one heartbeat is still under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def has_held_since(self, then_s: float) -> bool:
        """Have the leases held without a gap from `then_s` (by the monotonic clock) until now?"""
        since_s, renewed_s = self._held
        return since_s <= then_s and time.monotonic() - renewed_s <= self._proof_s

    def is_heard(self) -> bool:
        """Is the last heartbeat younger than a lease?"""
        return time.monotonic() - self._held[1] <= self._lease_s

    def beat(self) -> float:
        """Send a heartbeat now.

        Returns the time right before the heartbeat was sent: the heartbeat reached the store after that time. Call
        this from any thread.
        """
        with self._lock:
            asked_s = time.monotonic()
            self._store.renew(self._worker, self._clock.now())
            since_s, renewed_s = self._held
            # The heartbeat may have arrived as late as now, so the gap is measured until now. It may also have arrived
            # as early as `asked_s`, so the new lease counts only from `asked_s`.
            silent_s = time.monotonic() - renewed_s
            if silent_s > self._lease_s:
                self._cut_off_s = asked_s
            if silent_s > self._proof_s:
                since_s = asked_s
            self._held = (since_s, asked_s)
            return asked_s

    def silence(self) -> float:
        """How long (s) another worker must have been silent before this worker counts it as dead.

        After an outage, every worker has been silent for as long as the outage lasted. The first worker that is back
        must not take over the runs of all other workers, whose calls continue. So a worker that was cut off counts no
        other worker as dead for some time: one lease, plus the pause after which another process notices that the
        database is back.
        """
        now_s = time.monotonic()
        if now_s - self._held[1] > self._lease_s or now_s - self._cut_off_s <= self._lease_s + self._store.pause_s + self._again_s:
            return _FOR_EVER_S
        return self._lease_s

    def _run(self) -> None:
        wait_s, since_s = self._every_s, time.monotonic()
        while not self._stop.wait(wait_s):
            if (late_s := time.monotonic() - since_s - wait_s) > self._lease_s:
                log.warning("this process did not run for %.0f s (suspended?); other workers may have taken over its runs", late_s)
            wait_s = self._every_s
            if self._watchdog.loop_is_closed:
                # The loop was closed and the worker was not. Its runs cannot go on here: without heartbeats, other
                # workers take them over.
                log.error("the event loop of this worker was closed before the worker was; its leases are no longer renewed")
                return
            self._watchdog.look(patience_s=2 * self._every_s)
            try:
                self.beat()
            except Exception as error:
                # Retry sooner than usual: the next heartbeat must arrive before another worker counts this worker as
                # dead.
                wait_s = self._again_s
                known = (
                    self._store.remote and time.monotonic() - self._cut_off_s < 3 * _AGAIN_S + self._every_s
                )  # this was logged a moment ago, and the store has logged it as well
                self._cut_off_s = time.monotonic()
                log.log(
                    logging.DEBUG if known else logging.WARNING, "cannot renew the leases of this worker: %s; trying again", in_full(error)
                )
            since_s = time.monotonic()
