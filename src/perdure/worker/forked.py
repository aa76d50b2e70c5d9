"""A tool that forks: nothing of ours may go on in the child.

A child of os.fork() is a copy of the whole worker, with its loop, its runs and its open sockets. When the tool's code returns in
it, by mistake or by an exception, the copy would go on with the effects of every run. Children that exec or end by themselves are
unaffected, and so is subprocess.
"""

from __future__ import annotations

import asyncio
import os
import weakref

GHOST = 70  # the exit code of a child that came back
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_installed = False  # a fact about the process: Python has no way to take such a hook back


def guard(loop: asyncio.AbstractEventLoop) -> None:
    """From now on this loop ends, with its process, as soon as it is entered in a forked child."""
    global _installed
    _loops.add(loop)
    if not _installed:
        _installed = True
        os.register_at_fork(after_in_child=_end_loops)


def _end_loops() -> None:
    for loop in list(_loops):
        ready = getattr(loop, "_ready", None)  # what is due in this very turn must not run any more either
        if ready is not None:
            ready.clear()
        loop.call_soon(os._exit, GHOST)
