"""Ending tasks when a signal may strike.

The crash window: a cancelled task is woken by a callback of the loop, and Ctrl-C that strikes while that is being entered, or begins to
run, takes it away. Such a task never ends, and `asyncio.run`, which waits for every task that it knows, would not either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task that the loop's owner waits for, unless a signal strikes just now."""
    try:
        task.cancel()
    except BaseException:
        disown(task)
        raise


async def end(tasks: Collection[asyncio.Task[Any]], within_s: float) -> None:
    """Cancel tasks that were disowned, and wait for their end."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks, timeout=within_s)  # not gather, whose own cancel waits for theirs
        for task in ended:
            task.cancelled() or task.exception()  # somebody has looked


def disown(task: asyncio.Task[Any]) -> None:
    """Nobody but us waits for it: whoever ends the loop need not know of it."""
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
