"""Questions to a store that may not answer for long, on threads of our own.

The threads of `asyncio.to_thread` are everybody's: a dozen tools that wait in them would keep the store waiting as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from perdure.errors import StoreError

T = TypeVar("T")
_THREADS = 8


class Asking:
    """Threads that ask, begun when they are needed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "perdure-store")

    async def ask(self, question: Callable[[], T], unwanted: Callable[[T], None] | None = None) -> T:
        """The answer. One that arrives after whoever asked was cancelled goes to `unwanted`, on any thread."""
        asked = self._submit(question)
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            if unwanted is not None:
                asked.add_done_callback(lambda late: None if late.cancelled() or late.exception() else unwanted(late.result()))
            raise

    def start(self, question: Callable[[], T]) -> asyncio.Future[T]:
        """The same where nobody can await it: in a plain callback of the loop."""
        return asyncio.wrap_future(self._submit(question))

    def close(self) -> None:
        """Nothing is asked any more. Waits for nobody: what is under way ends by itself."""
        self._threads.shutdown(wait=False)

    def _submit(self, question: Callable[[], T]) -> Future[T]:
        try:
            return self._threads.submit(question)
        except RuntimeError as error:
            raise StoreError(f"nothing more is asked of the store here: {error}") from None
