"""The bell of a database file: every listener has its own named pipe, in the folder of the workers' locks.

To ring the bell, a process writes one byte into each pipe. A pipe that no process has open belongs to a dead process:
the process that rings removes such a pipe.
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

from perdure.errors import StoreUnavailable
from perdure.store.bell import Listeners, Ring, call
from perdure.store.liveness import closed_in_children
from perdure.store.private_folder import FILE_FLAGS, PrivateFolder

log = logging.getLogger("perdure.store")
_SUFFIX = ".bell"
_PIPE_BYTES = 65_536  # the capacity of a pipe: one read empties the pipe, however often the bell was rung
_SETTLED_NS = 1_000_000_000


class PipeBell:
    """Named pipes in a folder."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._own = Listeners()
        self._pipes: dict[str, _Pipe] = {}
        self._complained = False
        self._listed: tuple[int, list[str]] = (-1, [])  # a cache: the folder's mtime, and the pipes at that time

    def listen(self, ring: Ring) -> Ring:
        stop_own = self._own.listen(ring)
        try:
            pipe = _Pipe(self._folder, ring)
        except (OSError, StoreUnavailable) as error:
            if not self._complained:
                self._complained = True
                why = error.strerror if isinstance(error, OSError) else error
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
        try:
            with self._folder.opened() as folder:
                for name in self._others(folder):
                    self._ring_pipe(folder, name)
        except (OSError, StoreUnavailable):
            pass  # if there is no folder, there are no listeners; after any other error the listeners still poll

    def close(self) -> None:
        self._own.close()
        while self._pipes:
            self._pipes.popitem()[1].stop()

    def _others(self, folder: int) -> list[str]:
        """The pipes of other processes, and of other stores in this process."""
        changed_at = os.fstat(folder).st_mtime_ns
        if self._listed[0] == changed_at:
            names = self._listed[1]
        else:
            names = [name for name in os.listdir(folder) if name.endswith(_SUFFIX)]
            # File times are coarse: if a pipe is created right after the last change, the folder may keep the same
            # mtime. So cache the list only some time after the last change, or such a pipe would never be found.
            if abs(time.time_ns() - changed_at) > _SETTLED_NS:
                self._listed = (changed_at, names)
        return [name for name in names if name not in self._pipes]

    def _ring_pipe(self, folder: int, name: str) -> None:
        try:
            descriptor = os.open(name, os.O_WRONLY | FILE_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no process has the pipe open: its owner is dead
                self._folder.remove(name)
            return
        try:
            status = os.fstat(descriptor)
            if stat.S_ISFIFO(status.st_mode) and self._folder.is_trusted(status):
                os.write(descriptor, b"\0")
        except OSError:
            pass  # the pipe is full, so its listener will be rung anyway; or its process has just died
        finally:
            os.close(descriptor)


class _Pipe:
    """One listener's pipe, and the thread that reads from it."""

    def __init__(self, folder: PrivateFolder, ring: Ring) -> None:
        token = uuid.uuid4().hex
        self.name = f"{token}{_SUFFIX}"
        self._folder = folder
        self._ring = ring
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
            # The thread may be awake already, and closes the pipe when it sees `_stopped`. The lock makes it wait
            # until the byte below is written. Otherwise the byte could go into a new file with the same descriptor
            # number.
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
                os.read(self._descriptor, _PIPE_BYTES)
            except BlockingIOError:
                continue
            if not self._stopped:
                call(self._ring)
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
