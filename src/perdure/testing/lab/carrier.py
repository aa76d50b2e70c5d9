"""Late requests: the process that sent the request is dead, and the request takes effect after a hook looked for it.

The process that is to be killed forks a *carrier* at the point where the tool's function would be called. The carrier
has everything that the function needs: the arguments, the key, the working folder, and everything that the process had
prepared, such as clients and variables. The carrier survives the SIGKILL and waits. A later process of the trial lets
the carrier call the function, at the first of these moments:

- The reconcile hook has looked for the effect for the first time.
- The call was made again, and no hook was asked.
- The run has ended or parked.

So the request arrives after a truthful "not found", and before `timeout` and `settle` are over: at the worst moment
that the tool's declaration still allows.

A carrier belongs to the process group of its trial, and ends with the group. It never returns to perdure's code.
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

from perdure.testing.forking import fork, unblock_signals
from perdure.testing.lab.ledger import EffectLedger, attempt_of
from perdure.testing.lab.lifeline import end_with_lab_again
from perdure.testing.lab.warp import Warp

_POLL_S = 0.003
_READY_S, _TRIES = 5.0, 3
Perform = Callable[[], Any]  # calls the tool's function. If the function is async, this returns the coroutine
Note = Callable[[Literal["returned", "raised"], Any], None]  # writes the function's result or error to the ledger


# -- in the process that is killed ------------------------------------------------------------------------------------
def leave_behind(home: Path, perform: Perform, note: Note) -> None:
    """Fork a carrier, and return when the carrier is ready. The carrier itself never returns from this function."""
    mark = _mark(home, os.getpid())
    for _ in range(_TRIES):
        ready, told = os.pipe()
        try:
            carrier = fork()
            if carrier == 0:
                _carry(mark, told, perform, note)
        except OSError:
            traceback.print_exc()  # fork failed: no late request will arrive, and the report says so
            os.close(told)
            os.close(ready)
            return
        os.close(told)
        heard, _, _ = select.select([ready], [], [], _READY_S)  # the pipe has a byte, or EOF if the carrier died
        os.close(ready)
        if heard:
            return
        # A tool's function is called in a thread. If another thread held a lock of a C library at the fork, the
        # carrier waits for this lock for ever. Fork again: then the lock is probably free.
        os.kill(carrier, signal.SIGKILL)
        os.waitpid(carrier, 0)


def _carry(mark: Path, told: int, perform: Perform, note: Note) -> None:
    """Everything that the carrier does. perdure's at-fork hooks have closed lock files and event loops here."""
    try:
        unblock_signals()
        end_with_lab_again()
        # The carrier holds this lock until it ends. Other processes see by the lock whether the carrier has ended.
        descriptor = os.open(mark, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, str(os.getpid()).encode())
        os.write(told, b"1")
        os.close(told)
        while not _go(mark).exists():
            time.sleep(_POLL_S)
        # Use a new thread: the forked thread may be inside an event loop, which must not continue here.
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


# -- in the processes after it ----------------------------------------------------------------------------------------
class Late:
    """The late requests of earlier processes of the trial."""

    def __init__(self, home: Path, ledger: EffectLedger, warp: Warp, patience_s: float) -> None:
        self._home = home
        self._ledger = ledger
        self._warp = warp
        self._patience_s = patience_s
        self._sent = [entry for entry in ledger.entries() if entry.fact == "late"]
        self._waiting = list(self._sent)

    def has_sent(self, run: str, call: int) -> bool:
        return any((one.run, one.call) == (run, call) for one in self._sent)

    def is_waiting(self, run: str, call: int) -> bool:
        """Does a carrier of this call still wait?"""
        return any((one.run, one.call) == (run, call) for one in self._waiting)

    def arrive(self, run: str, call: int) -> None:
        """Let the late requests of this call arrive, and wait until they have arrived. Meanwhile the run's clock stands still."""
        for one in [one for one in self._waiting if (one.run, one.call) == (run, call)]:
            with self._warp.held():
                self._let_arrive(_mark(self._home, one.pid))
            self._waiting.remove(one)

    def arrive_all(self) -> None:
        for one in list(self._waiting):
            self.arrive(one.run, one.call)

    def _let_arrive(self, mark: Path) -> None:
        if not mark.exists():
            return  # the fork had failed, so there is no carrier
        _go(mark).touch()
        until_s = time.monotonic() + self._patience_s
        descriptor = os.open(mark, os.O_RDONLY)
        try:
            while not _is_free(descriptor):
                if time.monotonic() > until_s:
                    # Kill the carrier: an effect after this would be later than the tool declares. The pid in the file
                    # still belongs to the carrier: the lock is held, so the carrier is alive.
                    os.kill(int(os.read(descriptor, 20)), signal.SIGKILL)
                    return
                time.sleep(_POLL_S)
        finally:
            os.close(descriptor)

    def show(self, run: str, call: int, settle_s: float) -> bool:
        """Wait until `settle_s` real seconds after the late arrival, so that the effect can be found.

        False if that takes longer than the lab's patience.
        """
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
