"""The bell of a database file: every listener has its own named pipe, in the folder of the workers' locks.

To ring the bell, a process writes one byte into each pipe. Into the pipe of a watcher, it writes the ids of the runs
that have moved. A pipe that no process has open belongs to a dead process: the process that rings removes such a pipe.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import threading
import time
import uuid
from collections.abc import Callable, Collection

from perdure.errors import StoreUnavailable
from perdure.store.bell import Listeners, Moved, Ring, call, heard, told
from perdure.store.liveness import closed_in_children
from perdure.store.private_folder import FILE_FLAGS, PrivateFolder

log = logging.getLogger("perdure.store")
_BELL, _WATCH = ".bell", ".watch.bell"  # a ring reaches both kinds of pipes
_PIPE_BYTES = 65_536  # the capacity of a pipe: one read empties the pipe, however often the bell was rung
_ATOMIC_BYTES = 4_096  # PIPE_BUF: a write of this size is never split, so messages of two processes never mix
_SETTLED_NS = 1_000_000_000
_LOOK_S = 0.05  # how often a process that commits looks for new watchers: the look costs two system calls


class PipeBell:
    """The bell through named pipes in a folder."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._own = Listeners()
        self._pipes: dict[str, _Pipe] = {}
        self._complained = False
        self._listed: tuple[int, list[str]] = (-1, [])  # a cache: the folder's mtime, and the pipes at that time
        self._watching: list[str] = []  # the pipes of watchers in other processes, as of the last look
        self._look_again_s = 0.0

    def listen(self, ring: Ring) -> Ring:
        return self._with_pipe(self._own.listen(ring), _BELL, lambda _: ring())

    def watch(self, moved: Moved) -> Ring:
        def tell(messages: bytes) -> None:
            # A message ends with a NUL. If a message names no run, any run may have moved. The same is true if the
            # pipe was full: then messages were lost.
            named = [heard(message.decode("utf-8", "replace")) for message in messages.split(b"\0")[:-1]]
            full = len(messages) > _PIPE_BYTES - _ATOMIC_BYTES
            moved(None if full or None in named else {run_id for ids in named for run_id in ids or ()})

        return self._with_pipe(self._own.watch(moved), _WATCH, tell)

    def _with_pipe(self, stop_own: Ring, suffix: str, tell: Callable[[bytes], None]) -> Ring:
        try:
            pipe = _Pipe(self._folder, suffix, tell)
        except (OSError, StoreUnavailable) as error:
            if not self._complained:
                self._complained = True
                why = error.strerror if isinstance(error, OSError) else error.in_full()
                log.warning("no bell in %s (%s): commits of other processes are found by polling", self._folder.path, why)
            return stop_own
        self._pipes[pipe.name] = pipe

        def stop() -> None:
            stop_own()
            self._pipes.pop(pipe.name, None)
            pipe.stop()

        return stop

    def ring(self) -> None:
        self._own.ring()
        self._write(_BELL, b"\0")

    @property
    def watched(self) -> bool:
        return self._own.watched or bool(self._watchers())

    def moved(self, run_ids: Collection[str]) -> None:
        self._own.moved(run_ids)
        if self._watchers():
            self._write(_WATCH, told(run_ids, _ATOMIC_BYTES - 1).encode("utf-8", "replace") + b"\0")

    def close(self) -> None:
        self._own.close()
        while self._pipes:
            self._pipes.popitem()[1].stop()

    def _write(self, suffix: str, message: bytes) -> None:
        try:
            with self._folder.opened() as folder:
                for name in self._others(folder):
                    if name.endswith(suffix):
                        self._write_pipe(folder, name, message)
        except (OSError, StoreUnavailable):
            pass  # if there is no folder, there are no listeners; after any other error the listeners still poll

    def _watchers(self) -> list[str]:
        """The pipes of watchers in other processes. The list may be _LOOK_S old."""
        now_s = time.monotonic()
        if now_s >= self._look_again_s:
            self._look_again_s = now_s + _LOOK_S
            try:
                with self._folder.opened() as folder:
                    self._watching = [name for name in self._others(folder) if name.endswith(_WATCH)]
            except (OSError, StoreUnavailable):
                self._watching = []
        return self._watching

    def _others(self, folder: int) -> list[str]:
        """The pipes of other processes, and of other stores in this process."""
        changed_at = os.fstat(folder).st_mtime_ns
        if self._listed[0] == changed_at:
            names = self._listed[1]
        else:
            names = [name for name in os.listdir(folder) if name.endswith(_BELL)]
            # File times are coarse: if a pipe is created right after the last change, the folder may keep the same
            # mtime. So cache the list only some time after the last change. Otherwise such a pipe is never found.
            if abs(time.time_ns() - changed_at) > _SETTLED_NS:
                self._listed = (changed_at, names)
        return [name for name in names if name not in self._pipes]

    def _write_pipe(self, folder: int, name: str, message: bytes) -> None:
        try:
            descriptor = os.open(name, os.O_WRONLY | FILE_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no process has the pipe open: its owner is dead
                self._folder.remove(name)
            return
        try:
            status = os.fstat(descriptor)
            if stat.S_ISFIFO(status.st_mode) and self._folder.is_trusted(status):
                os.write(descriptor, message)
        except OSError:
            pass  # the pipe is full, so its listener will be rung anyway; or its process has just died
        finally:
            os.close(descriptor)


class _Pipe:
    """One listener's pipe, and the thread that reads from it."""

    def __init__(self, folder: PrivateFolder, suffix: str, tell: Callable[[bytes], None]) -> None:
        token = uuid.uuid4().hex
        self.name = f"{token}{suffix}"
        self._folder = folder
        self._tell = tell
        self._stopped = False
        self._closing = threading.Lock()
        with folder.opened(create=True) as opened:
            self._descriptor = _open_pipe(opened, f"{token}.new", self.name)
        closed_in_children.add(self._descriptor)
        self._thread = threading.Thread(target=self._wait, name="perdure doorbell", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which closes the pipe, and remove the pipe.

        In a forked child, do nothing: the pipe belongs to the parent process.
        """
        if self._stopped or self._descriptor not in closed_in_children:
            return
        with self._closing:
            # The thread may be awake already, and closes the pipe when it sees `_stopped`. The lock makes the thread
            # wait until the byte below is written. Without the lock, the byte could go into a new file with the same
            # descriptor number.
            self._stopped = True
            self._folder.remove(self.name)
            try:
                os.write(self._descriptor, b"\0")
            except BlockingIOError:
                pass  # the pipe is full, so the thread is awake already
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wait(self) -> None:
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        while not self._stopped:
            waiting.poll()
            try:
                messages = os.read(self._descriptor, _PIPE_BYTES)
            except BlockingIOError:
                continue
            if not self._stopped:
                call(self._tell, messages)
        # Close the pipe here, not in `stop`: if it were closed while this thread polls, the descriptor could become
        # another file.
        with self._closing:
            closed_in_children.discard(self._descriptor)
            os.close(self._descriptor)


def _open_pipe(folder: int, new: str, name: str) -> int:
    """Create a pipe that gets its name only once it is open.

    Otherwise a process that rings would remove the pipe, as the pipe of a dead process.
    """
    os.mkfifo(new, 0o600, dir_fd=folder)
    try:
        # O_RDWR opens both ends of the pipe: so the reader never sees an end of file when a writer closes the pipe.
        descriptor = os.open(new, os.O_RDWR | FILE_FLAGS, dir_fd=folder)
        try:
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.close(descriptor)
            raise
    except BaseException:
        try:
            os.unlink(new, dir_fd=folder)
        except FileNotFoundError:
            pass
        raise
    return descriptor
