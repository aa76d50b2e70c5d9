"""Where a victim dies. Real methods are wrapped from outside, in the victim's own process, before it starts; src knows nothing of it.

A *place* is a step of a run: the commit of an intent, the effect itself, the claim. A *moment* is when, at that place:

    before     the method is about to be called
    torn       half of the commit's first write to the log is on the disk
    unsynced   the log is written and not synced
    synced     the log is synced, and nobody has been told
    after      the method has returned
    held       the method is about to be called, and is not until the test says so: what others do meanwhile meets it at that instant

At the place `disk` the moment is `op`: before the nth write or sync of any of the database's files.

The death is SIGKILL, sent by the process to itself: nothing of it runs any further, no handler, no `finally`.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import apsw
from tests.crash.ledger import Ledger

from perdure.core.events import (
    AnyBody,
    ApprovalRequested,
    ChildFinished,
    ChildStarted,
    RunCancelled,
    RunReleased,
    RunSucceeded,
    ToolCallCompleted,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
)
from perdure.store.api import Append
from perdure.store.sqlite.store import SqliteStore
from perdure.worker.calls import Calls
from perdure.worker.courier import Courier
from perdure.worker.drive import Drive

CALL = 2  # the call under test in every errand; 1 and 3 are looks
ANY = "*"  # every tool is under test


def die() -> None:
    """As kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def wait_for_word(place: str) -> None:
    """Say that it has come to this place, and go no further until `World.let_go`."""
    ledger = Ledger.here()
    ledger.note("held", place)
    while not os.path.exists(f"{ledger.path}.go"):
        time.sleep(0.002)


class Fate:
    """The nth time that this process comes to this place, at this moment, it dies."""

    def __init__(self, place: str = "", moment: str = "", nth: int = 1, tool: str = "") -> None:
        self.place = place
        self.moment = moment
        self.tool = tool  # the tool under test: intents and results of others do not count
        self.on_drain: Callable[[], None] = lambda: None
        self._left = nth
        self._inside = threading.local()  # which thread is inside the place's method
        self._lock = threading.Lock()

    def meet(self, place: str, moment: str) -> None:
        if (place, moment) == (self.place, self.moment) and self._is_time():
            die()
        if (place, moment, self.moment) == (self.place, "before", "held") and self._is_time():
            wait_for_word(place)

    def _is_time(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0

    def wrap(self, owner: type, method: str, places: Callable[..., Iterable[str]]) -> None:
        """Have every call of the method be a visit to the places that its arguments tell."""
        real = getattr(owner, method)

        @functools.wraps(real)
        def visiting(this: Any, *args: Any, **kwargs: Any) -> Any:
            here = self.place in places(*args, **kwargs)
            if here:
                self.meet(self.place, "before")
            self._inside.here = here
            try:
                answer = real(this, *args, **kwargs)
            finally:
                self._inside.here = False
            if here:
                self.meet(self.place, "after")
            return answer

        setattr(owner, method, visiting)

    @property
    def is_inside(self) -> bool:
        return getattr(self._inside, "here", False)

    def arm(self) -> None:
        """From now on this process can die."""
        if self.moment in ("torn", "unsynced", "synced", "op"):
            self._disk = DyingDisk(self)  # kept: a VFS that nobody holds is gone
        self.wrap(SqliteStore, "create_run", lambda *_: {"create"})
        self.wrap(SqliteStore, "claim", lambda *_, **__: {"claim"})
        self.wrap(SqliteStore, "renew", lambda *_: {"renew"})
        self.wrap(SqliteStore, "append", self._of_batch)
        self.wrap(SqliteStore, "transact", lambda head, _: self._of_batch([head]))
        self.wrap(Calls, "start", lambda call, *_: {"start"} if self.tool in (call.tool, ANY) else set())
        self.wrap(SqliteStore, "decide", lambda *_, **__: {"decide"})
        self.wrap(SqliteStore, "post", lambda *_, **__: {"post"})
        self.wrap(SqliteStore, "notice_done", lambda *_: {"told"})
        self.wrap(Courier, "_tell", lambda *_: {"taken"})  # a notice is out of the store, and nobody has heard of it
        self.wrap(Courier, "_reading", lambda *_: {"sent"})  # the receiver has answered
        self.wrap(Drive, "arrive", lambda ended: {"arrive"} if ended.number == CALL or self.tool == ANY else set())

    def _of_batch(self, batch: Iterable[Append]) -> set[str]:
        found = {"append"}
        for append in batch:
            calls = {sealed.event.call for sealed in append.events if self._is_intent(sealed.event.body)}
            here: set[str] = set()
            for sealed in append.events:
                here |= self._of_event(sealed.event.body, sealed.event.call, calls)
            found |= {f"child {place}" for place in here} if "/" in append.lease.run_id else here
        return found

    def _of_event(self, body: AnyBody, call: int | None, begun: set[int | None]) -> set[str]:
        match body:
            case ToolCallInitiated() if self._is_intent(body):
                return {"intent"}
            case ToolCallCompleted():
                return {"result"} if call == CALL or call in begun else set()
            case ToolCallInDoubt():
                return {"doubt"}
            case ToolCallResolved():
                return {"resolved"}
            case RunReleased():
                return {"park"} if body.status in ("waiting", "waiting_approval") else {"handover"}
            case ApprovalRequested():
                return {"request"}
            case ChildStarted():
                return {"birth"}
            case ChildFinished():
                return {"delivery"}
            case RunSucceeded() | RunCancelled():
                return {"end"}
            case _:
                return set()

    def _is_intent(self, body: AnyBody) -> bool:
        return isinstance(body, ToolCallInitiated) and body.tool == self.tool


class DyingDisk(apsw.VFS):
    """The disk, on which a process dies in the middle of a commit. It becomes the default of this process."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        super().__init__("dying", "unix", makedefault=True)

    def xOpen(self, name: Any, flags: Any) -> apsw.VFSFile:
        return _DyingFile(self.fate, name, flags)


class _DyingFile(apsw.VFSFile):
    def __init__(self, fate: Fate, name: Any, flags: Any) -> None:
        super().__init__("unix", name, flags)
        self._fate = fate
        self._is_log = bool(flags[0] & apsw.SQLITE_OPEN_WAL)

    def xWrite(self, data: Any, offset: int) -> None:
        self._fate.meet("disk", "op")
        if self._is_log and self._fate.is_inside and self._fate.moment == "torn" and self._fate._is_time():
            super().xWrite(data[: len(data) // 2], offset)
            die()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._fate.meet("disk", "op")
        inside = self._is_log and self._fate.is_inside
        if inside and self._fate.moment == "unsynced" and self._fate._is_time():
            die()
        super().xSync(flags)
        if inside and self._fate.moment == "synced" and self._fate._is_time():
            die()


FATE = Fate()  # of this process; a victim replaces it before it starts anything


def seal(die: Sequence[Any]) -> Fate:
    """Decide this process's fate: place, moment, which visit, the tool under test."""
    global FATE
    FATE = Fate(*die)
    FATE.arm()
    return FATE


def current() -> Fate:
    return FATE
