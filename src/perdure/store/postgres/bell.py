"""The doorbell on PostgreSQL: one connection of this process that listens, rings for others, and holds its workers' session locks.

NOTIFY is sent after a commit, by itself, and once for however many commits there were meanwhile: inside a transaction it would have all
that ring wait for each other. Only what is written in one statement may ring inside it, one such statement at a time. It is a hint.
Behind a proxy that pools transactions nothing is heard and no lock is held; then everybody looks by itself a few times a second, and a
dead worker is noticed when its lease runs out.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from perdure.errors import StoreError
from perdure.store.bell import Listeners, Ring
from perdure.store.liveness import closed_in_children
from perdure.store.postgres.clocks import Asking
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.cursor import PostgresCursor

log = logging.getLogger("perdure.store")
CHANNEL = "perdure"
_IDLE_S = 5.0  # after so long without a word the connection is asked whether it is still there
_PROBE_S = 1.0
_PROBES = 3
_TRY_AGAIN_S = 0.1, 1.0
# Per other worker, and at most: of all who hear that one run is ready the first to look takes it; the others need not come at once.
_SPREAD_S, _MOST_SPREAD_S = 0.001, 0.1
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended(current_schema() || ' ' || $1::text, 0))"
_UNLOCK = "SELECT pg_advisory_unlock(hashtextextended(current_schema() || ' ' || $1::text, 0))"
_NOTIFY = "SELECT pg_notify($1::text, $2::text)"


class NotifyBell:
    """Thread-safe. The thread and its connection exist only while somebody listens or is held alive."""

    def __init__(self, connections: Connections, schema: str) -> None:
        self._connections = connections
        self._schema = schema
        self._own = Listeners()
        self._token = uuid.uuid4().hex
        self._words = {"channel": CHANNEL, "ring": f"{schema} {self._token}"}
        self._committing = 0  # statements of this process that may ring by themselves
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None
        self._stopping = False
        self._attending = threading.Event()
        self._missed = False  # something may have been
        self._ringing = False
        self._wanted: set[str] = set()  # workers whose session lock is to be held
        self._held: set[str] = set()
        self._untold: set[str] = set()  # whose row does not say yet that there is a lock
        self.crowd = 1  # how many workers there are
        self.heard = 0  # rings, of whomever
        self.listening = False

    def listen(self, ring: Ring) -> Ring:
        stop = self._own.listen(ring)
        self._start()
        self._attending.wait(_PROBE_S)  # whoever looks after this call has returned misses nothing any more
        return stop

    def ring(self) -> None:
        self._ring_here()
        with self._lock:
            self._ringing = True
            running = self._thread is not None
        if running:
            self._poke()
        else:
            self._notify_at_once()

    @contextmanager
    def commit(self) -> Iterator[dict[str, object]]:
        """For one statement that rings by itself: what it says, where, and whether no other one of this process is under way."""
        with self._lock:
            self._committing += 1
            alone = self._committing == 1
        try:
            yield {**self._words, "alone": alone}
        finally:
            with self._lock:
                self._committing -= 1

    def rung(self, *, elsewhere: bool) -> None:
        """A commit was made, which has rung elsewhere already or has not."""
        if elsewhere:
            self._ring_here()
        else:
            self.ring()

    def hold(self, worker: str) -> None:
        """Others see from now on whether this worker's connection lives."""
        with self._lock:
            self._wanted.add(worker)
            self._untold.add(worker)  # again at every registration: somebody may have cleared its row away meanwhile
        self._start()
        self._poke()

    def free(self, worker: str) -> None:
        with self._lock:
            self._wanted.discard(worker)
            self._untold.discard(worker)
        self._poke()

    def close(self) -> None:
        self._own.close()
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is not None:
            self._poke()
            if thread is not threading.current_thread():
                thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._stopping:
                return
            self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            closed_in_children.update(self._wake)
            self._thread = threading.Thread(target=self._run, name="perdure doorbell", daemon=True)
            self._thread.start()

    def _poke(self) -> None:
        with self._lock:
            if self._wake is not None and self._wake[1] in closed_in_children:
                try:
                    os.write(self._wake[1], b"\0")
                except BlockingIOError:
                    pass  # full: it is awake already

    def _run(self) -> None:
        pause_s = _TRY_AGAIN_S[0]
        while not self._stopping:
            connection: Connection | None = None
            try:
                connection = self._connections.open()
                pause_s = _TRY_AGAIN_S[0]
                self._attend(connection)
            except (psycopg.Error, StoreError, OSError) as error:
                log.info("the doorbell of %s fell silent: %s; connecting again", self._connections.where, " ".join(str(error).split()))
            except Exception:  # an error of ours must not end it for good: nobody would ever be woken up again (T13)
                log.exception("the doorbell of %s fell silent; connecting again", self._connections.where)
            finally:
                self.listening = False
                self._held.clear()
                if connection is not None:
                    connection.close()
            self._missed = True
            if not self._stopping:
                self._disclaim()
                self._sleep(random.uniform(pause_s / 2, pause_s))
                pause_s = min(2 * pause_s, _TRY_AGAIN_S[1])
        self._close_wake()

    def _attend(self, connection: Connection) -> None:
        """Be there for as long as the connection lives."""
        connection.execute(f"LISTEN {CHANNEL}".encode())
        if not connection.direct and not self._is_ours(connection):
            connection.execute(b"UNLISTEN *")  # or the proxy's connection would listen for ever, for nobody
            connection.close()
            self._attend_deaf()
            return
        self.listening = True
        self._attending.set()
        if self._missed:
            self._ring_here()
        quiet_since_s = time.monotonic()
        while not self._stopping:
            self._serve(connection)
            if self._hears(connection, self._patience(quiet_since_s)):
                quiet_since_s = time.monotonic()
                if self.crowd > 1:  # the others wake up at this very moment too
                    time.sleep(random.random() * min((self.crowd - 1) * _SPREAD_S, _MOST_SPREAD_S))
                self._ring_here()
            elif time.monotonic() - quiet_since_s >= _IDLE_S:
                self._ask(connection)
                quiet_since_s = time.monotonic()

    def _attend_deaf(self) -> None:
        """Behind a proxy that pools transactions: only ring for others."""
        log.info("%s is behind a proxy that pools transactions: what others commit is noticed by looking", self._connections.where)
        self._attending.set()
        while not self._stopping:
            self._disclaim()
            self._sleep(_IDLE_S)
            if self._ringing:
                self._notify_at_once()

    def _disclaim(self) -> None:
        """Say that there is no lock to judge us by: we live, and a lock that is missing for long would speak against us."""
        with self._lock:
            told = self._wanted - self._untold
        try:
            for worker in told:
                with self._connections.lent() as other:
                    PostgresCursor(other).change("has_no_session", (worker,))
                with self._lock:
                    self._untold.add(worker)
        except (psycopg.Error, StoreError):
            pass  # nobody is there to hear it; it is said again

    def _is_ours(self, connection: Connection) -> bool:
        """Whether this connection hears what is sent over another one: then the session is ours, whatever stands in between."""
        processes = set()
        # More than once, and each time from the same server process: behind a proxy it can be heard by luck.
        for _ in range(_PROBES):
            token = uuid.uuid4().hex
            with self._connections.lent() as other:
                other.execute(_NOTIFY, (CHANNEL, token))
            # Without a statement of its own meanwhile: with that a proxy could happen to lend us the process that has listened. Others
            # ring at the same time.
            if all(note.payload != token for note in connection.notifies(timeout=_PROBE_S)):
                return False
            processes.add((connection.execute("SELECT pg_backend_pid()").fetchone() or ())[0])
            if len(processes) > 1:
                return False
        self._missed = True
        return True

    def _patience(self, quiet_since_s: float) -> float:
        with self._lock:
            undone = (self._wanted - self._held) | (self._wanted & self._untold)
        return 0.5 if undone else max(_IDLE_S - (time.monotonic() - quiet_since_s), 0.0)

    def _serve(self, connection: Connection) -> None:
        """Do what was asked for meanwhile."""
        with self._lock:
            ringing, self._ringing = self._ringing, False
            wanted, untold = set(self._wanted), set(self._untold)
        if ringing:
            connection.execute(_NOTIFY, tuple(self._words.values()))
        for worker in wanted - self._held:
            # Refused while the server has not noticed yet that our last connection is gone: then the old lock speaks for us.
            if (connection.execute(_LOCK, (worker,)).fetchone() or (False,))[0]:
                self._held.add(worker)
                if self._missed:  # whoever saw it without a connection sees that it is back
                    PostgresCursor(connection).change("beat", {"worker": worker, "now": 0})
        for worker in untold & self._held:
            # Nothing changes while it is only just registering, and its row is not there yet: then once more in a moment.
            if PostgresCursor(connection).change("has_session", (worker,)) == 1:
                with self._lock:
                    self._untold.discard(worker)
        for worker in self._held - wanted:
            connection.execute(_UNLOCK, (worker,))
            self._held.discard(worker)

    def _hears(self, connection: Connection, patience_s: float) -> bool:
        """Wait for a ring from elsewhere, or for something to do; whether it was a ring."""
        assert self._wake is not None
        # What came along with the answer to a statement lies with the driver, and there is nothing in the socket to wait for.
        if notes := list(connection.notifies(timeout=0)):
            return self._is_ring(notes)
        waiting = select.poll()
        waiting.register(connection.fileno(), select.POLLIN)
        waiting.register(self._wake[0], select.POLLIN)
        ready = {descriptor for descriptor, _ in waiting.poll(patience_s * 1000)}
        if self._wake[0] in ready:
            self._drain_wake()
        if connection.fileno() not in ready:
            return False
        return self._is_ring(list(connection.notifies(timeout=0)))

    def _is_ring(self, notes: list[psycopg.Notify]) -> bool:
        return any(note.payload.startswith(f"{self._schema} ") and not note.payload.endswith(self._token) for note in notes)

    def _ask(self, connection: Connection) -> None:
        asking = Asking()
        ((server_us,),) = PostgresCursor(connection).all("clock")
        self._connections.measured(asking.heard(server_us))

    # -- small ones ---------------------------------------------------------------------------------------------------
    def _ring_here(self) -> None:
        self.heard += 1
        self._own.ring()

    def _notify_at_once(self) -> None:
        self._ringing = False
        try:
            with self._connections.lent() as connection:
                connection.execute(_NOTIFY, tuple(self._words.values()))
        except (psycopg.Error, StoreError):
            pass  # a hint: those who did not hear it look by themselves

    def _sleep(self, seconds: float) -> None:
        assert self._wake is not None
        waiting = select.poll()
        waiting.register(self._wake[0], select.POLLIN)
        if waiting.poll(seconds * 1000):
            self._drain_wake()

    def _drain_wake(self) -> None:
        assert self._wake is not None
        try:
            os.read(self._wake[0], 65_536)
        except BlockingIOError:
            pass

    def _close_wake(self) -> None:
        with self._lock:
            wake, self._wake, self._thread = self._wake, None, None
        for descriptor in wake or ():
            if descriptor in closed_in_children:
                closed_in_children.discard(descriptor)
                os.close(descriptor)
