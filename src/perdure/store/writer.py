"""Group commit: appends that arrive together, or while a commit is under way, share one commit.

Which thread commits depends on the cost per append. While the cost is low, the loop's own thread commits, once for all
appends of one iteration of the loop: to switch threads would cost more than the disk. If the disk is too slow for
that, a writer thread commits, and the loop continues meanwhile. For a remote store, the loop sends one commit at a
time and does not wait for the answer. Appends that cannot be sent in this way go to the writer thread, since a server
that does not answer must not block the loop.
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
CHEAP_S = 0.0005  # below this cost per append the loop's own thread commits
_LONG_S = 0.1
_WEIGHT = 0.2  # the weight of the newest commit in the moving average of the cost


class Sends(Protocol):
    """The additional method of a remote store (PostgreSQL): send a commit without waiting, for `GroupCommit` only."""

    def send(self, batch: Sequence[Append], loop: asyncio.AbstractEventLoop, done: Callable[[list[Appended | None]], None]) -> list[Append]:
        """Begin a commit on this loop's thread, without waiting. Returns the appends that must use `append` instead.

        `done` is called later, on the loop, with one answer for each append that was sent, in order. None: the outcome
        of the append is unknown. Then the caller must use `append`, which finds out whether the append was written.
        """


class GroupCommit:
    """Commits queued appends in groups. Answers come back to the event loop, in one callback per commit.

    `locked` says whether a tool in this process may hold the write lock for long: then the loop's own thread never
    commits. `committed` is called on the loop after each commit, with the number of its appends.
    """

    def __init__(
        self,
        store: JournalStore,
        loop: asyncio.AbstractEventLoop,
        locked: Callable[[], bool] = lambda: False,
        committed: Callable[[int], None] = lambda appends: None,
    ) -> None:
        self._store = store
        self._sends = cast(Sends, store) if store.remote else None
        self._loop = loop
        self._locked = locked
        self._committed = committed
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._committing = False
        self.under_way = 0  # how many appends were given to the writer thread and are not yet committed
        # Appends that the loop's own thread will commit or send: at the end of this iteration of the loop, or when the
        # commit that was sent before is answered.
        self._here: list[_Waiting] = []
        self._sent = False  # a commit is on its way to a remote store
        self._cost_s = 0.0  # the moving average of a commit's cost per append
        self._thread = threading.Thread(target=self._run, name="perdure-writer", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Has the writer thread no work?"""
        return not self._committing and self._queue.empty()

    def submit(self, append: Append, done: Done) -> None:
        """Commit the append with the next group. Call this only on the loop's own thread.

        `done` is called on the event loop with the answer, or with the error of the commit.
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
        """Like submit, only for a remote store, but do not wait for other appends of this iteration of the loop."""
        self._here.append(_Waiting(append, done, None))
        if not self._sent:
            self._send_here()

    def _send_here(self) -> None:
        """Send the appends that were submitted meanwhile. Appends that cannot be sent go to the writer thread."""
        if self._sent:
            return  # one commit at a time: `_answered` sends the next commit when the answer to the last has arrived
        group = self._take_here()
        if not group:
            return
        assert self._sends is not None
        appends = _as_of_now(group)
        self._sent = True
        try:
            left = {id(append) for append in self._sends.send(appends, self._loop, lambda answers: self._answered(sent, answers))}
        except Exception:
            # The writer thread gets the same error and reports it. If it were raised here, no further commit would be
            # sent.
            left = set(map(id, appends))
        sent = [waiting for waiting, append in zip(group, appends, strict=True) if id(append) not in left]
        self._sent = bool(sent)
        self._leave_to_thread([waiting for waiting, append in zip(group, appends, strict=True) if id(append) in left])

    def _answered(self, sent: list[_Waiting], answers: Sequence[Appended | None]) -> None:
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
            pass  # the writer is closed: the drives were stopped too, and the next worker finds out what was written

    def _take_here(self) -> list[_Waiting]:
        with self._closing:  # with a remote store, `close` runs on another thread
            group, self._here = self._here, []
            return group

    def _commit_here(self) -> None:
        group = self._take_here()
        if self._locked():  # ask only now: a tool may have taken the lock in this very iteration of the loop
            for waiting in group:
                self._put(waiting)
            return
        self._commit(group)
        self._deliver(group)

    def commit_now(self, append: Append) -> Appended:
        """Commit the append and wait for the answer.

        If the writer thread has no work, the calling thread commits. Else the append is committed together with the
        queued appends.
        """
        if self.idle:
            answer = self._store.append([append])[0]
            self._committed(1)
            return answer
        # The answer must not come through the loop: the calling thread may be the loop's own thread, which waits here.
        waiting = _Waiting(append, None, threading.Event())
        self._put(waiting)
        assert waiting.arrived is not None
        waiting.arrived.wait()
        assert waiting.answer is not None
        if isinstance(waiting.answer, Exception):
            raise waiting.answer
        return waiting.answer

    def close(self) -> None:
        """Commit the queued appends, then end the writer thread. The answers are still delivered."""
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
        # Hold the lock: an append that is queued after the end mark (None) would wait for ever.
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
            answers = self._store.append(_as_of_now(group))
        except Locked as error:  # another transaction has locked one of the runs: the other runs need not wait
            answers = [error] if len(group) == 1 else [self._alone(_as_of_now([waiting])[0]) for waiting in group]
        except StoreUnavailable as error:  # for example a full disk: this group fails, the next group may find room
            answers = [error] * len(group)
        except Exception as error:  # one append has caused the error: the other appends must not fail
            answers = [error] if len(group) == 1 else [self._alone(_as_of_now([waiting])[0]) for waiting in group]
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
            pass  # the loop is closed: the commit stands, and no drive waits for the answer any more

    def _deliver(self, group: list[_Waiting]) -> None:
        if durable := sum(not isinstance(waiting.answer, Exception) for waiting in group):
            self._committed(durable)
        for waiting in group:
            if waiting.done is None:
                continue
            assert waiting.answer is not None
            try:
                waiting.done(waiting.answer)
            except Exception as error:  # an error in the callback of one run must not stop the answers to other runs
                self._loop.call_exception_handler({"message": "a callback of a commit failed", "exception": error})


class _Waiting:
    __slots__ = ("answer", "append", "arrived", "done", "since_s")

    def __init__(self, append: Append, done: Done | None, arrived: threading.Event | None) -> None:
        self.append = append
        self.done = done
        self.arrived = arrived
        self.answer: Appended | Exception | None = None
        self.since_s = time.monotonic()


def _as_of_now(group: list[_Waiting]) -> list[Append]:
    """The appends, with `at` moved by the time that each has waited: an approval may have expired meanwhile."""
    now_s = time.monotonic()
    return [
        waiting.append
        if now_s - waiting.since_s <= _LONG_S
        else structs.replace(waiting.append, at=waiting.append.at + round((now_s - waiting.since_s) * 1e6))
        for waiting in group
    ]
