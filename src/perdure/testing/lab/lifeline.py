"""What ends the processes of the lab when the lab itself is gone, by SIGKILL too."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Self


class Lifeline:
    """A pipe that nobody writes to. Its end, when this process is gone, is the end of all that were started with it."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self.reading)
        os.close(self._writing)

    def let_go(self) -> None:
        """In a child: the end that keeps others alive is not ours."""
        os.close(self._writing)


_lifelines: list[int] = []  # that this process hangs on, for one that is forked from it: at most one


def hang_on(lifeline: int) -> None:
    """End this process, and those that it has started, when whoever holds the other end is gone."""
    _lifelines[:] = [lifeline]

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="crash lab", daemon=True).start()


def hang_on_as_before() -> None:
    """In a process that a process of the lab has forked, which has none of its threads."""
    for lifeline in _lifelines.copy():
        hang_on(lifeline)
