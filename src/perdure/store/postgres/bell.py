"""The bell on PostgreSQL: one connection per process, which listens, rings, and holds its workers' session locks.

NOTIFY is sent after the commit, in a statement of its own, and once for all commits since the last NOTIFY. If
transactions contained NOTIFY, their commits would wait for each other. Only a write that is one statement may contain
NOTIFY, and only one such statement at a time. The bell is only a hint. Behind a proxy that pools transactions, no bell
is heard and no session lock is held: then every process polls a few times a second, and a dead worker is noticed when
its lease runs out.

Watchers are told about every commit that moves a run, and most such commits do not ring. These messages must cost
nothing while no process watches. So a process that watches says so to all others, again and again (WATCHERS). Only
then the others tell it which runs have moved (MOVED): one message for all commits of some milliseconds.
"""

from __future__ import annotations

import logging
import os
import random
import select
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import psycopg

from perdure.errors import StoreError
from perdure.store.bell import Listeners, Moved, Ring, heard, told
from perdure.store.liveness import closed_in_children
from perdure.store.postgres.connect import Connection, RoundTripClock
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.queries import CHANNEL, PostgresCursor

log = logging.getLogger("perdure.store")
# The channels for rings, for messages of watchers, and for moved runs. Only watchers listen to the last.
WATCHERS, MOVED = "perdure_watchers", "perdure_moved"
_WATCHING, _WHO = "watching", "who?"
_WATCHING_S = 15.0  # how long a process counts as watching after it has said so; it says so every _IDLE_S
_MOVED_EVERY_S = 0.01
_MOVED_BYTES = 7_000  # a notification has less than 8,000 bytes, with the schema's name and the token
_IDLE_S = 5.0  # if there was no notification for this many seconds, the connection is tested
_PROBE_S = 1.0
_PROBES = 3
_TRY_AGAIN_S = 0.1, 1.0
# The random delay after a ring: seconds per other worker, and the maximum. If only one run is ready, the first worker
# claims it, and the others need not all look for it at the same moment.
_SPREAD_S, _MOST_SPREAD_S = 0.001, 0.1
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended(current_schema() || ' ' || $1::text, 0))"
_UNLOCK = "SELECT pg_advisory_unlock(hashtextextended(current_schema() || ' ' || $1::text, 0))"
_NOTIFY = "SELECT pg_notify($1::text, $2::text)"


class NotifyBell:
    """The bell, thread-safe.

    Its thread and connection start with the first listener, or with the first worker that needs a session lock.
    """

    def __init__(self, connections: Connections, schema: str) -> None:
        self._connections = connections
        self._schema = schema
        self._own = Listeners()
        self._token = uuid.uuid4().hex
        self._words = {"channel": CHANNEL, "ring": f"{schema} {self._token}"}
        self._committing = 0  # how many statements that may contain a ring are under way in this process
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None
        self._stopping = False
        self._attending = threading.Event()
        self._missed = False  # a ring may have been missed
        self._ringing = False
        self._moved: set[str] = set()  # runs that have moved since the watchers in other processes were last told
        self._next_moved_s = 0.0
        self._watched_until_s = 0.0  # until this time, another process counts as watching
        self._watching = False  # this process has said that it watches, and hears which runs have moved
        self._next_watching_s = 0.0
        self._wanted: set[str] = set()  # workers that need a session lock
        self._held: set[str] = set()
        self._untold: set[str] = set()  # workers that have a session lock, but whose row does not say so yet
        self.worker_count = 1  # how many workers there are
        self.heard = 0  # how many rings from any process were heard
        self.listening = False

    def listen(self, ring: Ring) -> Ring:
        stop = self._own.listen(ring)
        self._start()
        self._attending.wait(_PROBE_S)  # wait for LISTEN, so that no ring after the return of this call is missed
        return stop

    def watch(self, moved: Moved) -> Ring:
        stop = self._own.watch(moved)
        self._start()
        self._poke()
        self._attending.wait(_PROBE_S)

        def end() -> None:
            stop()
            self._poke()

        return end

    @property
    def watched(self) -> bool:
        return self._own.watched or self._watched_until_s > time.monotonic()

    def moved(self, run_ids: Collection[str]) -> None:
        self._own.moved(run_ids)
        if self._watched_until_s > time.monotonic():
            with self._lock:
                first = not self._moved
                self._moved.update(run_ids)
            if first:
                self._poke()

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
        """The parameters for one statement that rings itself.

        `alone`: this process has no other such statement under way.
        """
        with self._lock:
            self._committing += 1
            alone = self._committing == 1
        try:
            yield {**self._words, "alone": alone}
        finally:
            with self._lock:
                self._committing -= 1

    def rung(self, *, elsewhere: bool) -> None:
        """Ring after a commit. `elsewhere`: the statement itself has already rung for other processes."""
        if elsewhere:
            self._ring_here()
        else:
            self.ring()

    def hold(self, worker: str) -> None:
        """Hold a session lock for the worker, so that other machines see whether its connection is alive."""
        with self._lock:
            self._wanted.add(worker)
            self._untold.add(worker)  # do this at every registration: another worker may have removed the row
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
                    pass  # the pipe is full, so the thread is awake already

    def _run(self) -> None:
        pause_s = _TRY_AGAIN_S[0]
        while not self._stopping:
            connection: Connection | None = None
            try:
                connection = self._connections.open()
                pause_s = _TRY_AGAIN_S[0]
                self._attend(connection)
            except (psycopg.Error, StoreError, OSError) as error:
                log.info(
                    "the bell has lost its connection to %s: %s; connecting again", self._connections.where, " ".join(str(error).split())
                )
            except Exception:  # a bug must not end the thread: no listener would ever be woken again
                log.exception("the bell of %s failed; connecting again", self._connections.where)
            finally:
                self.listening = self._watching = False
                self._held.clear()
                if connection is not None:
                    connection.close()
            self._missed = True
            if not self._stopping:
                self._record_no_session()
                self._sleep(random.uniform(pause_s / 2, pause_s))
                pause_s = min(2 * pause_s, _TRY_AGAIN_S[1])
        self._close_wake()

    def _attend(self, connection: Connection) -> None:
        """Listen, ring and hold locks, until the connection breaks."""
        connection.execute(f"LISTEN {WATCHERS}".encode())
        self._say(connection, WATCHERS, _WHO)
        connection.execute(f"LISTEN {CHANNEL}".encode())
        if not connection.direct and not self._is_ours(connection):
            connection.execute(b"UNLISTEN *")  # without this, the proxy's own connection would listen for ever
            connection.close()
            self._ring_without_listening()
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
                if self.worker_count > 1:  # all other workers also wake up at this very moment
                    time.sleep(random.random() * min((self.worker_count - 1) * _SPREAD_S, _MOST_SPREAD_S))
                self._ring_here()
            elif time.monotonic() - quiet_since_s >= _IDLE_S:
                self._ask(connection)
                quiet_since_s = time.monotonic()

    def _ring_without_listening(self) -> None:
        """Behind a proxy that pools transactions: only ring for other processes, and hear nothing."""
        log.info(
            "%s is behind a proxy that pools transactions: no bell; commits of other processes are found by polling",
            self._connections.where,
        )
        self._attending.set()
        while not self._stopping:
            self._record_no_session()
            self._sleep(_IDLE_S)
            if self._ringing:
                self._notify_at_once()

    def _record_no_session(self) -> None:
        """Record that the workers of this process have no session lock now.

        These workers are alive, and without the record a missing lock would count as silence.
        """
        with self._lock:
            told = self._wanted - self._untold
        try:
            for worker in told:
                with self._connections.lent() as other:
                    PostgresCursor(other).change("has_no_session", (worker,))
                with self._lock:
                    self._untold.add(worker)
        except (psycopg.Error, StoreError):
            pass  # the server cannot be reached; the caller tries again later

    def _is_ours(self, connection: Connection) -> bool:
        """Does this connection hear what another connection sends?

        If it does, the session belongs to this connection alone, even through a proxy.
        """
        processes = set()
        # Test several times, and require the same server process each time: behind a proxy, one test may succeed by
        # chance.
        for _ in range(_PROBES):
            token = uuid.uuid4().hex
            with self._connections.lent() as other:
                other.execute(_NOTIFY, (CHANNEL, token))
            # Send no statement on this connection in between: a proxy could by chance send it to the server process
            # that listens. Other processes may ring at the same time, so look for the token.
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
            moved = bool(self._moved)
        now_s = time.monotonic()
        patience_s = 0.5 if undone else _IDLE_S - (now_s - quiet_since_s)
        if moved:
            patience_s = min(patience_s, self._next_moved_s - now_s)
        if self._watching:
            patience_s = min(patience_s, self._next_watching_s - now_s)
        return max(patience_s, 0.0)

    def _serve(self, connection: Connection) -> None:
        """Send a ring, and take or free session locks, if a caller has asked for that meanwhile."""
        with self._lock:
            ringing, self._ringing = self._ringing, False
            wanted, untold = set(self._wanted), set(self._untold)
        if ringing:
            connection.execute(_NOTIFY, tuple(self._words.values()))
        for worker in wanted - self._held:
            # The server refuses the lock until it has noticed that the bell's last connection is gone. Until then, the
            # old lock counts.
            if (connection.execute(_LOCK, (worker,)).fetchone() or (False,))[0]:
                self._held.add(worker)
                if self._missed:  # other workers may have seen this worker without a connection: show that it is back
                    PostgresCursor(connection).change("beat", {"worker": worker, "now": 0})
        for worker in untold & self._held:
            # While the worker is registering, it has no row yet. Then no row is changed, and this is tried again soon.
            if PostgresCursor(connection).change("has_session", (worker,)) == 1:
                with self._lock:
                    self._untold.discard(worker)
        for worker in self._held - wanted:
            connection.execute(_UNLOCK, (worker,))
            self._held.discard(worker)
        self._serve_watchers(connection)

    def _serve_watchers(self, connection: Connection) -> None:
        now_s = time.monotonic()
        if self._own.watched and not self._watching:
            connection.execute(f"LISTEN {MOVED}".encode())
            self._watching, self._next_watching_s = True, now_s
            self._own.moved(None)  # what was committed before this LISTEN was not heard
        elif self._watching and not self._own.watched:
            connection.execute(f"UNLISTEN {MOVED}".encode())
            self._watching = False
        if self._watching and self._next_watching_s <= now_s:
            self._say(connection, WATCHERS, _WATCHING)
            self._next_watching_s = now_s + _IDLE_S
        if self._moved and self._next_moved_s <= now_s:
            with self._lock:
                moved, self._moved = self._moved, set()
            self._say(connection, MOVED, told(moved, _MOVED_BYTES))
            self._next_moved_s = now_s + _MOVED_EVERY_S

    def _say(self, connection: Connection, channel: str, words: str) -> None:
        connection.execute(_NOTIFY, (channel, f"{self._words['ring']} {words}"))

    def _hears(self, connection: Connection, patience_s: float) -> bool:
        """Wait for a ring of another process, or for a call of `_poke`. True: there was a ring."""
        assert self._wake is not None
        # A notification that came with the answer to a statement is in the driver's memory, not in the socket.
        if notes := list(connection.notifies(timeout=0)):
            return self._has_rung(notes)
        waiting = select.poll()
        waiting.register(connection.fileno(), select.POLLIN)
        waiting.register(self._wake[0], select.POLLIN)
        ready = {descriptor for descriptor, _ in waiting.poll(patience_s * 1000)}
        if self._wake[0] in ready:
            self._drain_wake()
        if connection.fileno() not in ready:
            return False
        return self._has_rung(list(connection.notifies(timeout=0)))

    def _has_rung(self, notes: list[psycopg.Notify]) -> bool:
        """Is one of the notifications a ring? Notifications about watchers and moved runs are handled here."""
        rung = False
        for note in notes:
            # A payload is the schema's name, a token of the sender, and the words. Skip payloads of this process, and
            # payloads about another schema.
            if not note.payload.startswith(f"{self._schema} ") or note.payload.startswith(self._words["ring"]):
                continue
            words = note.payload.removeprefix(f"{self._schema} ").partition(" ")[2]
            if note.channel == CHANNEL:
                rung = True
            elif note.channel == MOVED:
                self._own.moved(heard(words))
            elif words == _WATCHING:
                self._watched_until_s = time.monotonic() + _WATCHING_S
            elif words == _WHO:
                self._next_watching_s = 0.0
        return rung

    def _ask(self, connection: Connection) -> None:
        asking = RoundTripClock()
        ((server_us,),) = PostgresCursor(connection).all("clock")
        self._connections.measured(asking.heard(server_us))

    # -- helpers ------------------------------------------------------------------------------------------------------
    def _ring_here(self) -> None:
        self.heard += 1
        self._own.ring()

    def _notify_at_once(self) -> None:
        self._ringing = False
        try:
            with self._connections.lent() as connection:
                connection.execute(_NOTIFY, tuple(self._words.values()))
        except (psycopg.Error, StoreError):
            pass  # the ring is only a hint: listeners that do not hear the ring still poll

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
