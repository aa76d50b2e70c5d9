"""Runs that are started in the same turn of the loop, created in one commit.

Whoever starts a thousand runs at once (`asyncio.gather`) waits for a few syncs of the disk and not for a thousand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from perdure.store.api import JournalStore, NewRun, RunRow

Created = tuple[RunRow, bool]


class Starts:
    """Only on the loop's own thread, and only where a commit crosses no network."""

    def __init__(self, store: Callable[[], JournalStore]) -> None:
        self._store = store
        self._waiting: list[tuple[NewRun, asyncio.Future[Created]]] = []

    async def create(self, new: NewRun) -> Created:
        """As Store.create_run; the run is durable when this returns. Whoever is cancelled before its commit begins has started nothing."""
        loop = asyncio.get_running_loop()
        created: asyncio.Future[Created] = loop.create_future()
        self._waiting.append((new, created))
        if len(self._waiting) == 1:
            loop.call_soon(self._create_all)
        return await created

    def _create_all(self) -> None:
        waiting, self._waiting = [(new, created) for new, created in self._waiting if not created.done()], []
        if len(waiting) > 1:
            try:
                answers = self._store().create_runs([new for new, _ in waiting])
            except Exception:  # nothing was created: whatever is wrong with one of them is not the others' fault
                pass
            else:
                for (_, created), answer in zip(waiting, answers, strict=True):
                    _tell(created, answer)
                return
        for new, created in waiting:
            try:
                _tell(created, self._store().create_run(new))
            except Exception as error:
                _tell(created, error)


def _tell(created: asyncio.Future[Created], answer: Created | Exception) -> None:
    if created.done():
        return  # a signal handler has cancelled who asked, in the middle of the commit (Ctrl-C): the others want to hear of theirs
    if isinstance(answer, Exception):
        created.set_exception(answer)
    else:
        created.set_result(answer)
