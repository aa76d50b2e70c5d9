"""A fork that no Ctrl-C gets lost in.

While a process forks, Python runs hooks of other modules, and swallows whatever they raise: a KeyboardInterrupt that comes just then would
be printed and forgotten. So signals wait until the fork is over.
"""

from __future__ import annotations

import os
import signal
import warnings

_HELD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def fork() -> int:
    """As os.fork. In the child these signals are held until `let_signals_in`; in the parent, what came meanwhile is raised here, without a child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    pid = -1
    try:
        with warnings.catch_warnings():
            # From CPython 3.12 on, of a process with threads: whoever forks here has judged that.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    finally:
        if pid != 0:
            _let_in(before, pid)
    return pid


def _let_in(before: set[signal.Signals | int], child: int) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except BaseException:
        if child > 0:  # nobody will ever know its number
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise


def let_signals_in() -> None:
    """In the child, when it has handlers of its own."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
