"""The bell: wakes the processes that wait, right after a commit, so that they need not poll all the time.

It has two kinds of listeners. Workers `listen` for commits that leave work; such a commit rings. Callers that wait for
runs `watch`: they are told which runs a commit has moved, also if the commit leaves no work. A commit that rings may
move any run, so a ring reaches the watchers too.

Both are only hints. A hint may come late, twice or never, so a listener also polls from time to time. An error of the
bell never makes a commit fail.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import Protocol

log = logging.getLogger("perdure.store")
Ring = Callable[[], None]
Moved = Callable[[Collection[str] | None], None]  # gets the ids of the runs that have moved; None: any run


class Bell(Protocol):
    def listen(self, ring: Ring) -> Ring:
        """Call `ring`, from any thread, soon after `ring()` was called in any process.

        Returns a function that ends the calls of the listener.
        """

    def watch(self, moved: Moved) -> Ring:
        """Call `moved`, from any thread, soon after `moved(…)` or `ring()` was called in any process.

        Returns a function that ends the calls of the watcher.
        """

    def ring(self) -> None:
        """Wake all listeners and watchers, in this process and in others. Never raises."""

    @property
    def watched(self) -> bool:
        """Is there a watcher, in this process or in another? If not, a commit need not call `moved`. This is cheap."""

    def moved(self, run_ids: Collection[str]) -> None:
        """Tell all watchers, in this process and in others, that these runs have moved. Never raises."""

    def close(self) -> None:
        """End the calls of all listeners and watchers of this object."""


class Listeners:
    """The bell inside one process: it reaches only this process. A database in memory has no other processes."""

    def __init__(self) -> None:
        self._rings: dict[object, Ring] = {}
        self._watchers: dict[object, Moved] = {}
        self._lock = threading.Lock()

    def listen(self, ring: Ring) -> Ring:
        token = object()
        with self._lock:
            self._rings[token] = ring

        def stop() -> None:
            with self._lock:
                self._rings.pop(token, None)

        return stop

    def watch(self, moved: Moved) -> Ring:
        token = object()
        with self._lock:
            self._watchers[token] = moved

        def stop() -> None:
            with self._lock:
                self._watchers.pop(token, None)

        return stop

    def ring(self) -> None:
        with self._lock:
            rings = list(self._rings.values())
        for ring in rings:
            call(ring)
        self.moved(None)

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    def moved(self, run_ids: Collection[str] | None) -> None:
        with self._lock:
            watchers = list(self._watchers.values())
        for watcher in watchers:
            call(watcher, run_ids)

    def close(self) -> None:
        with self._lock:
            self._rings.clear()
            self._watchers.clear()


def call(listener: Callable[..., None], *args: object) -> None:
    """Call one listener. Never raises."""
    try:
        listener(*args)
    except Exception as error:
        # For example, the event loop of the listener is closed. That must not make the commit fail.
        log.debug("a listener could not be rung: %r", error)


# -- the ids of moved runs as text, for other processes. A run's id has no line break.


def told(run_ids: Collection[str], limit: int) -> str:
    """The ids as one text of at most `limit` bytes. If they need more, the text says that any run may have moved."""
    text = "\n".join(run_ids)
    return text if len(text.encode("utf-8", "replace")) <= limit else ""


def heard(text: str) -> list[str] | None:
    """The ids in a text that `told` has written. None: any run may have moved."""
    return None if not text else text.split("\n")
