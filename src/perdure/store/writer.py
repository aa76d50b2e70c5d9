"""Group commit: appends that arrive together, or while a commit is under way, share one.

Where the commit is made depends on what it costs for each of those who share it. While that is little, the loop's own thread makes
it, once for everything that one turn of the loop has submitted: a thread would cost more in hand-overs than the disk takes. Where
the disk is slow for the number of runs that wait for it, a writer thread makes it and the loop goes on meanwhile. A commit that crosses
a network is sent by the loop and not waited for, one at a time; what cannot be sent so is the thread's: a server that does not
answer must not stop the loop.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from msgspec import structs

from perdure.errors import StoreError, StoreUnavailable
from perdure.store.api import Append, Appended, JournalStore
from perdure.store.cursor import Locked

Done = Callable[[Appended | Exception], None]
CHEAP_S = 0.0005  # a commit that costs each append less than this is made on the loop's own thread
_LONG_S = 0.1
_WEIGHT = 0.2  # of the newest commit in what is expected of the next


class Sends(Protocol):
    """What a remote store can do besides: PostgreSQL alone. Nothing but the writer here sends."""

    def send(self, batch: Sequence[Append], loop: asyncio.AbstractEventLoop, done: Callable[[list[Appended | None]], None]) -> list[Append]:
        """Begin to commit on this loop's thread, without waiting for anything; those that must be appended in the ordinary way come back.

        `done` is called later, on the loop, with an answer for each of the others, in order. None: it has to be appended after all,
        and only then is it known whether it was written.
        """


class GroupCommit:
    """A thread that commits whatever has queued up. Answers come back to the event loop, one hop for each commit.

    `locked` says whether somebody in this process may have the write lock for long: then the loop's own thread waits for nothing.
    """

    def __init__(self, store: JournalStore, loop: asyncio.AbstractEventLoop, locked: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._sends = cast(Sends, store) if store.remote else None
        self._loop = loop
        self._locked = locked
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._committing = False
        self.under_way = 0  # appends that the thread has to commit
        self._here: list[_Waiting] = []  # submitted in this turn of the loop, to be committed at its end
        self._sent = False  # a commit is on its way to a remote store
        self._cost_s = 0.0  # what a commit has cost each append lately
        self._thread = threading.Thread(target=self._run, name="perdure-writer", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether a commit made now would share its fsync with nobody."""
        return not self._committing and self._queue.empty()

    def submit(self, append: Append, done: Done) -> None:
        """Commit it with the next group; `done` is called on the event loop with the answer, or with the error of the group.

        Only on the loop's own thread.
        """
        waiting = _Waiting(append, done, None)
        if self._sends is not None:
            self._here.append(waiting)
            if len(self._here) == 1 and not self._sent:
                self._loop.call_soon(self._send_here)
            return
        if self._cost_s > CHEAP_S or self._committing:
            self._put(waiting)
            return
        self._here.append(waiting)
        if len(self._here) == 1:
            self._loop.call_soon(self._commit_here)

    def send_now(self, append: Append, done: Done) -> None:
        """The same for a remote store, without waiting for others in this turn of the loop."""
        self._here.append(_Waiting(append, done, None))
        if not self._sent:
            self._send_here()

    def _send_here(self) -> None:
        """Send what has been submitted meanwhile; what cannot be sent is the thread's."""
        if self._sent:
            return  # one at a time: the next goes when its answer is there
        group = self._take_here()
        if not group:
            return
        assert self._sends is not None
        appends = [waiting.as_of_now() for waiting in group]
        self._sent = True
        try:
            left = {id(append) for append in self._sends.send(appends, self._loop, lambda answers: self._landed(sent, answers))}
        except Exception:  # whatever it is, the thread meets it too, and whoever waits is told; nobody would ever send again otherwise
            left = set(map(id, appends))
        sent = [waiting for waiting, append in zip(group, appends, strict=True) if id(append) not in left]
        self._sent = bool(sent)
        self._leave_to_thread([waiting for waiting, append in zip(group, appends, strict=True) if id(append) in left])

    def _landed(self, sent: list[_Waiting], answers: Sequence[Appended | None]) -> None:
        self._sent = False
        if self._here:
            self._loop.call_soon(self._send_here)
        for waiting, answer in zip(sent, answers, strict=True):
            waiting.answer = answer
        self._leave_to_thread([waiting for waiting in sent if waiting.answer is None])
        self._deliver([waiting for waiting in sent if waiting.answer is not None])

    def _leave_to_thread(self, group: list[_Waiting]) -> None:
        try:
            for waiting in group:
                self._put(waiting)
        except StoreError:
            pass  # closed: whoever submitted it has been stopped as well, and what became of it is for the next one to find out

    def _take_here(self) -> list[_Waiting]:
        with self._closing:  # whoever closes a remote store's does it on another thread
            group, self._here = self._here, []
            return group

    def _commit_here(self) -> None:
        group = self._take_here()
        if self._locked():  # asked as late as here: it may have been taken in the same turn of the loop
            for waiting in group:
                self._put(waiting)
            return
        self._commit(group)
        self._deliver(group)

    def commit_now(self, append: Append) -> Appended:
        """Commit it and wait: on this thread when nothing is queued, else together with what is."""
        if self.idle:
            return self._store.append([append])[0]
        # Not through the loop: the calling thread may be the loop's own, which waits here.
        waiting = _Waiting(append, None, threading.Event())
        self._put(waiting)
        assert waiting.arrived is not None
        waiting.arrived.wait()
        assert waiting.answer is not None
        if isinstance(waiting.answer, Exception):
            raise waiting.answer
        return waiting.answer

    def close(self) -> None:
        """Commit what is queued, then end the thread; answers are still delivered."""
        if self._sends is not None:
            self._leave_to_thread(self._take_here())
        else:
            self._commit_here()
        with self._closing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _put(self, waiting: _Waiting) -> None:
        # Under the lock: what is put after the end mark would wait for ever.
        with self._closing:
            if self._closed:
                raise StoreError("the writer has been closed; nothing more can be appended through it")
            self.under_way += 1
            self._queue.put(waiting)

    def _run(self) -> None:
        open_ = True
        while open_:
            group = [self._queue.get()]
            # From here on a commit_now joins the next group instead of competing for the write lock.
            self._committing = True
            while not self._queue.empty():
                group.append(self._queue.get_nowait())
            open_ = None not in group
            appends = [waiting for waiting in group if waiting is not None]
            self._commit_and_tell(appends)
            self._committing = False
            with self._closing:
                self.under_way -= len(appends)

    def _commit(self, group: list[_Waiting]) -> None:
        if not group:
            return
        answers: Sequence[Appended | Exception]
        begun_s = time.perf_counter()
        try:
            answers = self._store.append([waiting.as_of_now() for waiting in group])
        except Locked as error:  # somebody else has one of them: the others need not wait for that
            answers = [error] if len(group) == 1 else [self._alone(waiting.as_of_now()) for waiting in group]
        except StoreUnavailable as error:  # a full disk ends this group, not the thread: the next group may find room
            answers = [error] * len(group)
        except Exception as error:  # something is wrong with one of them: the others must not fail with it
            answers = [error] if len(group) == 1 else [self._alone(waiting.as_of_now()) for waiting in group]
        cost_s = (time.perf_counter() - begun_s) / len(group)
        self._cost_s += _WEIGHT * (cost_s - self._cost_s)
        for waiting, answer in zip(group, answers, strict=True):
            waiting.answer = answer

    def _alone(self, append: Append) -> Appended | Exception:
        try:
            return self._store.append([append])[0]
        except Exception as error:
            return error

    def _commit_and_tell(self, group: list[_Waiting]) -> None:
        self._commit(group)
        for waiting in group:
            if waiting.arrived is not None:
                waiting.arrived.set()
        try:
            self._loop.call_soon_threadsafe(self._deliver, group)
        except RuntimeError:
            pass  # the loop has been closed: what is committed stays committed, and nobody is left to be told

    def _deliver(self, group: list[_Waiting]) -> None:
        for waiting in group:
            if waiting.done is None:
                continue
            assert waiting.answer is not None
            try:
                waiting.done(waiting.answer)
            except Exception as error:  # one run's callback must not keep the others from their answers
                self._loop.call_exception_handler({"message": "a callback of a commit failed", "exception": error})


class _Waiting:
    __slots__ = ("_since_s", "answer", "append", "arrived", "done")

    def __init__(self, append: Append, done: Done | None, arrived: threading.Event | None) -> None:
        self.append = append
        self.done = done
        self.arrived = arrived
        self.answer: Appended | Exception | None = None
        self._since_s = time.monotonic()

    def as_of_now(self) -> Append:
        """The append with the time at which it leaves the queue: after a long wait an approval that it uses may have expired (G9)."""
        waited_s = time.monotonic() - self._since_s
        return self.append if waited_s <= _LONG_S else structs.replace(self.append, at=self.append.at + round(waited_s * 1e6))
