"""Requests that arrive late: the process that sent one is dead, and the service acts on it when it has been asked about it already.

The process that is to die forks a *carrier* where the tool's function would be called. The carrier has what the function needs: the
arguments, the key, the working folder, and all that the process had prepared, such as clients and variables. It survives the SIGKILL,
and waits. A later process of the trial lets it go on at the worst moment that is still within what was promised: right after the
reconcile hook has looked for the effect for the first time; where no hook is asked, right after the call was made again; and at the
latest when the run rests. So the request always arrives after a truthful "not found", and before `timeout` and `settle` are over.

A carrier belongs to the group of processes of its trial, and ends with it; it never returns to perdure's code.
"""

from __future__ import annotations

import asyncio
import contextvars
import fcntl
import inspect
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from perdure.testing.forking import fork, let_signals_in
from perdure.testing.lab.ledger import Ledger, attempt_of
from perdure.testing.lab.lifeline import hang_on_as_before
from perdure.testing.lab.warp import Warp

_POLL_S = 0.003
_READY_S, _TRIES = 5.0, 3
Perform = Callable[[], Any]  # calls the tool's function; of an async one, it returns the coroutine
Note = Callable[[Literal["returned", "raised"], Any], None]  # writes down what the function returned, or which error it raised


# -- in the process that dies -----------------------------------------------------------------------------------------------
def leave_behind(home: Path, perform: Perform, note: Note) -> None:
    """Fork a carrier. Returns when it is ready, in this process alone."""
    mark = _mark(home, os.getpid())
    for _ in range(_TRIES):
        ready, told = os.pipe()
        try:
            carrier = fork()
            if carrier == 0:
                _carry(mark, told, perform, note)
        except OSError:
            traceback.print_exc()  # no process to be had: nothing arrives, and the report says so
            os.close(told)
            os.close(ready)
            return
        os.close(told)
        heard, _, _ = select.select([ready], [], [], _READY_S)  # a byte, or the end of a carrier that died
        os.close(ready)
        if heard:
            return
        # A tool's function is called in a thread. Another thread may have held a lock of a C library when this one forked; in the
        # carrier nothing ever opens that lock again. The next fork comes at another moment.
        os.kill(carrier, signal.SIGKILL)
        os.waitpid(carrier, 0)


def _carry(mark: Path, told: int, perform: Perform, note: Note) -> None:
    """What the carrier does, from its first line to its end. What the fork has inherited of perdure's own, it has closed by itself."""
    try:
        let_signals_in()
        hang_on_as_before()
        # As long as this lock is held the carrier lives: others wait for its end by it.
        descriptor = os.open(mark, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, str(os.getpid()).encode())
        os.write(told, b"1")
        os.close(told)
        while not _go(mark).exists():
            time.sleep(_POLL_S)
        # In a thread of its own: the thread that was forked may be in the middle of an event loop that must not go on here.
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(_perform, perform, note))
        thread.start()
        thread.join()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _perform(perform: Perform, note: Note) -> None:
    try:
        value = perform()
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
    except BaseException as error:
        traceback.print_exc()
        note("raised", error)
    else:
        note("returned", value)


def _mark(home: Path, pid: int) -> Path:
    return home / f"late-{pid}"


def _go(mark: Path) -> Path:
    return mark.with_suffix(".go")


# -- in the processes after it ------------------------------------------------------------------------------------------------
class Late:
    """The late requests that earlier processes of the trial have left behind."""

    def __init__(self, home: Path, ledger: Ledger, warp: Warp, patience_s: float) -> None:
        self._home = home
        self._ledger = ledger
        self._warp = warp
        self._patience_s = patience_s
        self._sent = [entry for entry in ledger.entries() if entry.fact == "late"]
        self._waiting = list(self._sent)

    def has_sent(self, run: str, call: int) -> bool:
        return any((one.run, one.call) == (run, call) for one in self._sent)

    def is_waiting(self, run: str, call: int) -> bool:
        """Whether a request of this call has not been let go yet."""
        return any((one.run, one.call) == (run, call) for one in self._waiting)

    def arrive(self, run: str, call: int) -> None:
        """Let the requests of this call take effect, and wait until they have. The run's own time stands still meanwhile."""
        for one in [one for one in self._waiting if (one.run, one.call) == (run, call)]:
            with self._warp.held():
                self._let_go(_mark(self._home, one.pid))
            self._waiting.remove(one)

    def arrive_all(self) -> None:
        for one in list(self._waiting):
            self.arrive(one.run, one.call)

    def _let_go(self, mark: Path) -> None:
        if not mark.exists():
            return  # there was no process to be had for it
        _go(mark).touch()
        until_s = time.monotonic() + self._patience_s
        descriptor = os.open(mark, os.O_RDONLY)
        try:
            while not _is_free(descriptor):
                if time.monotonic() > until_s:
                    # Whenever it acted after this, it would be later than was promised. It lives, since it holds the lock: the pid is its own.
                    os.kill(int(os.read(descriptor, 20)), signal.SIGKILL)
                    return
                time.sleep(_POLL_S)
        finally:
            os.close(descriptor)

    def show(self, run: str, call: int, settle_s: float) -> bool:
        """Give what has arrived late `settle_s` real seconds to show before it is looked for. False: the lab had no patience for that."""
        mine = {attempt_of(one) for one in self._sent if (one.run, one.call) == (run, call)}
        arrived = [entry.at for entry in self._ledger.entries() if entry.fact == "returned" and attempt_of(entry) in mine]
        left_s = max(arrived, default=0.0) + settle_s - time.time()
        if left_s > 0.0:
            with self._warp.held():
                time.sleep(min(left_s, self._patience_s))
        return left_s <= self._patience_s


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
