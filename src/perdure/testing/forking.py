"""A fork that does not lose a Ctrl-C.

During a fork, Python runs the at-fork hooks of other modules, and does not raise their exceptions. A KeyboardInterrupt
in such a hook would be printed and lost. So signals are blocked until the fork is done.
"""

from __future__ import annotations

import os
import signal
import warnings

_HELD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def fork() -> int:
    """Like os.fork, with SIGINT, SIGTERM and SIGHUP blocked.

    In the child these signals stay blocked until `unblock_signals`. If a signal arrived in the parent during the fork
    and its handler raises an exception, the child is killed, and this function raises the exception.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    pid = -1
    try:
        with warnings.catch_warnings():
            # Since 3.12 CPython warns if a process with threads forks. The callers of this function know that danger
            # and handle it.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    finally:
        if pid != 0:
            _unblock(before, pid)
    return pid


def _unblock(before: set[signal.Signals | int], child: int) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except BaseException:
        if child > 0:  # the caller never gets the pid of the child, so end the child here
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise


def unblock_signals() -> None:
    """Unblock the signals in the child, once it has set its own handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
