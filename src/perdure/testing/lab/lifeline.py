"""Ends the processes of the lab when the lab's own process has ended, even if it was killed by SIGKILL."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Self


class Lifeline:
    """A pipe that is never written. When the lab's process ends, all processes that it started read EOF from it."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.reading)
        os.close(self._writing)

    def close_in_child(self) -> None:
        """Call this in a child. It closes the writing end, which must be open only in the lab's process."""
        os.close(self._writing)


_lifelines: list[int] = []  # the lifeline of this process (at most one), kept for processes that are forked from it


def end_with_lab(lifeline: int) -> None:
    """Kill this process and its process group when the process of the lab has ended: the lifeline reads EOF then."""
    _lifelines[:] = [lifeline]

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="crash lab", daemon=True).start()


def end_with_lab_again() -> None:
    """Call `end_with_lab` again after a fork: a forked process does not have the thread that waits."""
    for lifeline in _lifelines.copy():
        end_with_lab(lifeline)
