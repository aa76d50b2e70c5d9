"""The bell: wakes the processes that wait for work right after a commit, so that they need not poll all the time.

A ring is only a hint. It may come late, twice or never, so a listener also polls from time to time. An error of the
bell never makes a commit fail.
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
        """Call `ring`, from any thread, soon after `ring()` was called in any process.

        Returns a function that ends the calls of the listener.
        """

    def ring(self) -> None:
        """Wake all listeners, in this process and in others. Never raises."""

    def close(self) -> None:
        """End the calls of all listeners of this object."""


class Listeners:
    """The bell inside one process: it rings only the listeners of this process. A database in memory has no others."""

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
    """Ring one listener. Never raises."""
    try:
        ring()
    except Exception as error:
        # For example, the event loop of the listener is closed. That must not disturb the commit.
        log.debug("a listener could not be rung: %r", error)
