"""Ends what a killed test process leaves behind: a database server, running or stopped, and its folder.

A parent-death signal is not enough: a process that a test has stopped (SIGSTOP) does not handle it, and the folder
would stay.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_LOOK_EVERY_S = 0.2


def processes_in(folder: Path) -> list[psutil.Process]:
    """The server's processes: all of them, and no others, work in its folder or in the data directory below."""
    found = []
    for process in psutil.process_iter():
        try:
            # A zombie has no folder left, which is right: it needs a wait, not a signal.
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or another user's and so not ours
    return found


def send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


def end_processes(folder: Path, number: signal.Signals = signal.SIGKILL, within_s: float = 20.0) -> None:
    """Send the signal to all of them until none is left: a backend that was being forked is found the next time round."""
    deadline = time.monotonic() + within_s
    while left := processes_in(folder):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(left)} processes still work in {folder}, {within_s} s after {number.name}: {left}")
        for process in left:
            send(process, number)
            send(process, signal.SIGCONT)  # a stopped process would handle the signal only later
        time.sleep(0.01)


def bury(folder: Path) -> None:
    """End the processes and remove the folder. SIGQUIT first: a postmaster that is killed leaves its shared memory to the machine."""
    try:
        end_processes(folder, signal.SIGQUIT, within_s=5.0)
    except TimeoutError:
        end_processes(folder)
    shutil.rmtree(folder)


def hire(folder: Path) -> subprocess.Popen[bytes]:
    """A process that outlives this process by a moment.

    It has its own session, so no signal to our group reaches it.
    """
    return subprocess.Popen(
        [sys.executable, __file__, str(os.getpid()), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def _main(parent: int, folder: Path) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    bury(folder)


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
