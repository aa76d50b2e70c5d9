"""Where a victim dies. Real methods are wrapped from outside, in the victim's own process, before it starts.

The sources of perdure know nothing of this. A *place* is a step of a run: the commit of an intent, the effect itself,
the claim. For a request to a model, `asked` is the commit of its intent, `answered` the commit of its answer,
`stumble` the commit of a failed attempt, and `stream` a piece of the answer. A *moment* is a point in time at that
place:

    before     the method is about to be called
    half       inside the commit: SQLite has half of its first write to the log on disk; PostgreSQL has all but the COMMIT
    handed     the kernel or the server has it: the log is written and not synced; COMMIT was sent without an answer
    kept       it is durable, and no caller knows: the log is synced; the server's answer has come, and was not read
    after      the method has returned
    held       the method is about to be called, and waits until the test lets it go: meanwhile others can act
    frozen     (PostgreSQL) like `half`, but the process is stopped and not killed, inside its transaction

At the place `disk` the moment is `op`: before the nth write or sync of any of the database's files. At the place
`wire` it is before the nth statement that is sent to the server.

The process dies by a SIGKILL that it sends to itself: no more code of it runs, no handler, no `finally`. With another
*blow*, it sends itself another signal at this moment, and handles that signal as usual.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.crash.dying_disk import DyingDisk
from tests.crash.dying_wire import DyingWire
from tests.crash.ledger import Ledger

from perdure.core.events import (
    AnyBody,
    ApprovalRequested,
    ChildFinished,
    ChildStarted,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallInitiated,
    PlanGenerated,
    RunCancelled,
    RunReleased,
    RunSucceeded,
    SignalReceived,
    ToolCallCompleted,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
)
from perdure.core.steps import HookAnswered, Input
from perdure.engine.local.drive import Drive
from perdure.engine.notify.dispatcher import Dispatcher
from perdure.store.api import Append
from perdure.store.postgres import journal
from perdure.store.postgres.store import PostgresStore
from perdure.store.sql import SqlStore

CALL = 2  # the call under test in every errand; 1 and 3 are looks
ANY = "*"  # every tool is under test


def die() -> None:
    """As kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def wait_for_word(place: str) -> None:
    """Report that this place was reached, and wait until `World.let_go`."""
    ledger = Ledger.here()
    ledger.note("held", place)
    while not os.path.exists(f"{ledger.path}.go"):
        time.sleep(0.002)


class Fate:
    """When this process reaches this place for the nth time, at this moment, it dies."""

    def __init__(self, place: str = "", moment: str = "", nth: int = 1, tool: str = "", blow: str = "SIGKILL") -> None:
        self.place = place
        self.moment = moment
        self._blow = signal.Signals[blow]
        self.tool = tool  # the tool under test: intents and results of others do not count
        self.on_drain: Callable[[], None] = lambda: None
        self.in_flight = False  # the effect has begun: renewals before that do not count
        self._left = nth
        self._inside = threading.local()  # which thread is inside the place's method
        self._lock = threading.Lock()

    def meet(self, place: str, moment: str) -> None:
        if (place, moment) == (self.place, self.moment) and self._is_time():
            self.strike()
        if (place, moment, self.moment) == (self.place, "before", "held") and self._is_time():
            wait_for_word(place)

    def _is_time(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0

    def wrap(self, owner: type, method: str, places: Callable[..., Iterable[str]]) -> None:
        """Count every call of the method as a visit to the places that its arguments name."""
        real = getattr(owner, method)

        @functools.wraps(real)
        def visiting(this: Any, *args: Any, **kwargs: Any) -> Any:
            here = self.place in places(*args, **kwargs)
            if here and self.is_inside:
                return real(this, *args, **kwargs)  # one way to do it calls another
            if here:
                self.meet(self.place, "before")
            self.is_inside = here
            try:
                answer = real(this, *args, **kwargs)
            finally:
                self.is_inside = False
            if here:
                self.meet(self.place, "after")
            return answer

        setattr(owner, method, visiting)

    def _wrap_sending(self) -> None:
        """The same for statements that the event loop sends: the visit ends when the answer has arrived."""
        real = PostgresStore.send

        def sending(store: Any, batch: Sequence[Append], loop: Any, done: Callable[[list[Any]], None]) -> list[Append]:
            here = self.place in self._of_batch(list(filter(journal.may_be_sent, batch)))

            def landed(answers: list[Any]) -> None:
                if here and None not in answers:  # else the visit goes on where they are appended after all
                    self.meet(self.place, "after")
                done(answers)

            if here:
                self.meet(self.place, "before")
            self.is_inside = here
            try:
                return real(store, batch, loop, landed)
            finally:
                self.is_inside = False

        PostgresStore.send = sending  # type: ignore[method-assign,assignment]

    @property
    def is_inside(self) -> bool:
        return getattr(self._inside, "here", False)

    @is_inside.setter
    def is_inside(self, here: bool) -> None:
        self._inside.here = here
        self._inside.fresh = here

    def is_due(self, moment: str) -> bool:
        """Whether this is the moment: this thread is inside the place's method, and for the nth time as far as that."""
        if not self.is_inside or moment != self.moment:
            return False
        # A commit is one visit, in however many writes it goes to the disk.
        fresh, self._inside.fresh = self._inside.fresh, False
        return fresh and self._is_time()

    def strike(self) -> None:
        if self._blow == signal.SIGKILL:
            die()
        os.kill(os.getpid(), self._blow)

    def freeze(self) -> None:
        """Like kill -STOP, at exactly this instruction. The process continues when the test sends SIGCONT."""
        # Send the signal to this thread: another thread could get a signal to the process first, and this thread would
        # continue for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def arm(self) -> None:
        """From now on this process can die."""
        if self.moment in ("half", "handed", "kept", "frozen", "op"):
            # Both: which store it opens is its own affair.
            self._ways = DyingDisk(self), DyingWire(self)
        self.wrap(SqlStore, "create_run", lambda *_: {"create"})
        self.wrap(SqlStore, "claim", lambda *_, **__: {"claim"})
        self.wrap(SqlStore, "renew", lambda *_: {"renew"} if self.in_flight else set())
        self.wrap(SqlStore, "append", self._of_batch)
        self.wrap(PostgresStore, "append", self._of_batch)  # its own
        self._wrap_sending()
        self.wrap(SqlStore, "transact", lambda head, _: self._of_batch([head]))
        self.wrap(Drive, "_start", lambda begin, *_: {"start"} if self.tool in (begin.tool.name, ANY) else set())
        self.wrap(SqlStore, "decide", lambda *_, **__: {"decide"})
        self.wrap(SqlStore, "reopen", lambda *_, **__: {"reopen"})
        self.wrap(SqlStore, "insert_fork", lambda *_: {"fork"})
        for store in (SqlStore, PostgresStore):
            self.wrap(store, "post", lambda *_, **__: {"post"})
        self.wrap(SqlStore, "notice_done", lambda *_: {"told"})
        self.wrap(Dispatcher, "_tell", lambda *_: {"taken"})  # a notice was taken from the store, and was not sent
        self.wrap(Dispatcher, "_reading", lambda *_: {"sent"})  # the receiver has answered
        self.wrap(Drive, "_ended", lambda told, _: {"arrive"} if told.number == CALL or self.tool == ANY else set())
        self.wrap(Drive, "_feed", self._of_input)

    def _of_input(self, given: Input) -> set[str]:
        answered = isinstance(given, HookAnswered) and (given.number == CALL or self.tool == ANY)
        return {"arrive"} if answered else set()

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
            case ModelCallInitiated():
                return {"asked"}
            case ModelCallCompleted():
                return {"answered"}
            case ModelCallFailed():
                return {"stumble"}
            case PlanGenerated():
                return {"planned"}
            case SignalReceived():
                return {"word"}
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


FATE = Fate()  # of this process; a victim replaces it before it starts anything


def seal(die: Sequence[Any]) -> Fate:
    """Decide this process's fate: place, moment, which visit, the tool under test, the signal."""
    global FATE
    FATE = Fate(*die)
    FATE.arm()
    return FATE


def current() -> Fate:
    return FATE
