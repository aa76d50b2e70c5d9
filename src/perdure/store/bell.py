"""The doorbell: who waits for work hears of a commit at once, without asking for it all the time.

A hint and nothing more. It may come late, twice or never, and whoever listens also looks by itself from time to time, so that nothing
here ever makes a commit fail.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

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
