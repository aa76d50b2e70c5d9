"""Ends tasks safely, even if a signal arrives meanwhile.

A cancelled task is woken by a callback of the loop. If Ctrl-C arrives while the loop enters that callback, the
callback is lost and the task never ends. Then `asyncio.run`, which waits for every task that it knows, would not end
either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from perdure.core.compat import disown


def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task. If a signal arrives meanwhile, disown the task, so that the loop's owner does not wait for it."""
    try:
        task.cancel()
    except BaseException:
        disown(task)
        raise


async def end(tasks: Collection[asyncio.Task[Any]], within_s: float) -> None:
    """Cancel these tasks, and wait at most `within_s` seconds for their end."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=within_s)  # not gather: if cancelled, gather waits for all tasks
        for task in ended:
            task.cancelled() or task.exception()  # read the exception: otherwise asyncio logs that it was never read
