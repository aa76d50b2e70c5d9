"""The launcher: the program between a worker and its stdio MCP server.

stdio.py starts the launcher as a file, not as a module, so the launcher imports only the standard library.

The launcher starts the server in a new session, gives its own stdin and stdout to the server, and waits. When the
server has ended, when a signal tells the launcher to stop, or when the worker has died, the launcher ends the server
and all processes that the server has started. The launcher notices the worker's death in three ways: the kernel sends
a signal, the log pipe is closed, or the launcher has another parent process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

_ORPHAN_CHECK_S = 1.0
_POLITE_S = 0.5  # the time between SIGTERM and SIGKILL
_END_S = 2.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOG = 2  # stderr, a pipe: the worker reads the other end
ENDED = b"\0"  # the first byte of the line that says how the server ended


def main(worker: int, command: list[str]) -> int:
    # First ask the kernel for a signal when the worker dies. The worker may have died before this line: getppid below
    # shows that.
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
    # Orphans of the server become children of this process, even if they have left the server's session.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _become_server(command)
    # Only the server may hold the two pipes. If the launcher held them too, they would not close when the server ends,
    # and the worker would not notice the end.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    _stay(child, worker, wake, told)
    _report(child)
    _end(child)
    return 0


def _become_server(command: list[str]) -> None:
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # if the launcher dies first, the kernel must end the server
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
    """Wait until the server has ended, a signal to stop arrives, or the worker has died."""
    watch = select.poll()
    watch.register(wake, select.POLLIN)
    watch.register(_LOG, 0)  # 0: poll reports only that the worker has closed the log pipe
    while not _has_ended(child):
        for ready, _ in watch.poll(_ORPHAN_CHECK_S * 1000):
            if ready == _LOG:
                return
            os.read(wake, 4096)
        # If another process holds a copy of the read end of the log pipe, the pipe stays open when the worker dies.
        # Then only the changed parent id shows the worker's death.
        if told or os.getppid() != worker:
            return


def _report(child: int) -> None:
    """Write to the log pipe, as its last line, how the server has ended.

    The line is marked with a byte that occurs in no text.
    """
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return
    how = f"exited with code {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"was ended by signal {ended.si_status}"
    room = select.poll()
    room.register(_LOG, select.POLLOUT)
    if not room.poll(_POLITE_S * 1000):
        return  # the worker does not read the pipe; that must not delay the cleanup
    try:
        os.write(_LOG, b"\n" + ENDED + how.encode() + b"\n")
    except OSError:
        pass  # the worker has closed the pipe


def _end(child: int) -> None:
    """End the server and all processes that the server has started."""
    # The child is not reaped yet, so its process id cannot have been reused. The id of its group is the same number.
    _kill(os.killpg, child, signal.SIGTERM)
    until = time.monotonic() + _POLITE_S
    while not _has_ended(child) and time.monotonic() < until:
        time.sleep(0.005)
    _kill(os.killpg, child, signal.SIGKILL)
    _kill(os.kill, child, signal.SIGKILL)  # the child may not have created its group yet
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
        os.waitpid(ended.si_pid, 0)  # reap another process of the server, which this process has inherited
    return False


def _children() -> list[int]:
    """The children of this process. No child is reaped before the caller is done, so no process id is reused."""
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
        pass  # this is not Linux: the process group, the log pipe and the parent's process id must be enough


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
