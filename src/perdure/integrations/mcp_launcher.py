"""The program between a worker and its stdio MCP server. Started by mcp_stdio.py, as a file; the standard library only.

It starts the server in a session of its own, gives its own stdin and stdout away, and stays to clean up: when the server has ended, when
it is told to stop, and when the worker has died – by a signal of the kernel's, by the log pipe that nobody reads any more, or by finding
itself adopted – it ends the server and everything that the server has started.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

_ORPHAN_CHECK_S = 1.0
_POLITE_S = 0.5  # between the request to end and the order
_END_S = 2.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOG = 2  # the worker reads the other end
ENDED = b"\0"  # what the line begins with that says how the server ended


def main(worker: int, command: list[str]) -> int:
    # Before anything else: from here on the worker's death is told to us. It may have died already.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: told.append(got))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if os.getppid() != worker:
        return 0
    # Whatever the server's processes leave behind becomes our child, also what has left its session.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _become_server(command)
    # The pipes are the server's alone, or its end would not be seen at their other ends.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    _stay(child, worker, wake, told)
    _report(child)
    _end(child)
    return 0


def _become_server(command: list[str]) -> None:
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the one who cleans up die before us, nobody else would end us
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(_LOG, f"{command[0]}: cannot be started: {error}\n".encode("utf-8", "backslashreplace"))
    finally:
        os._exit(127)


def _stay(child: int, worker: int, wake: int, told: list[int]) -> None:
    """Until the server has ended, somebody says stop, or the worker is gone."""
    watch = select.poll()
    watch.register(wake, select.POLLIN)
    watch.register(_LOG, 0)  # nothing to wait for but its reader's end
    while not _has_ended(child):
        for ready, _ in watch.poll(_ORPHAN_CHECK_S * 1000):
            if ready == _LOG:
                return
            os.read(wake, 4096)
        # A copy of the pipe's other end in a sibling would hide the worker's death; a new parent cannot be hidden.
        if told or os.getppid() != worker:
            return


def _report(child: int) -> None:
    """How the server has ended, if it has: the last line in the log's pipe, begun with a byte that no text has."""
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return
    how = f"exited with code {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"was ended by signal {ended.si_status}"
    room = select.poll()
    room.register(_LOG, select.POLLOUT)
    if not room.poll(_POLITE_S * 1000):
        return  # a worker that reads nothing must not keep us from cleaning up
    try:
        os.write(_LOG, b"\n" + ENDED + how.encode() + b"\n")
    except OSError:
        pass  # nobody reads it any more


def _end(child: int) -> None:
    """Nothing that the server has started is left when this returns."""
    # The child is not reaped yet, so that its number, which is the group's, cannot belong to somebody else.
    _kill(os.killpg, child, signal.SIGTERM)
    until = time.monotonic() + _POLITE_S
    while not _has_ended(child) and time.monotonic() < until:
        time.sleep(0.005)
    _kill(os.killpg, child, signal.SIGKILL)
    _kill(os.kill, child, signal.SIGKILL)  # it may not have come as far as its own group
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended == 0:
            for orphan in _children():
                _kill(os.kill, orphan, signal.SIGKILL)
            time.sleep(0.002)


def _has_ended(child: int) -> bool:
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == child:
            return True
        os.waitpid(ended.si_pid, 0)  # an orphan that we have adopted
    return False


def _children() -> list[int]:
    """Our own children. None of them is reaped while we look, so that each number is still theirs."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return [int(word) for word in listed.read().split()]
    except OSError:
        return []


def _kill(kill: Callable[[int, int], None], number: int, how: signal.Signals) -> None:
    try:
        kill(number, how)
    except (ProcessLookupError, PermissionError):
        pass


def _prctl(option: int, value: int) -> None:
    import ctypes

    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux: there the process group, the log pipe and the parent's number have to do


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
