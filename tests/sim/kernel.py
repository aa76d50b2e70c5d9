"""A small operating system with one clock.

Its processes have strands; one strand runs at a time, and time passes when all strands wait.

A strand is a real thread that runs only while it has the baton. A strand that waits gives the baton to the strand that
is due next. The seed alone decides which strand that is, because every wake-up is late by a few random microseconds of
the seed. So the threads of the runtime (its writer, its renewer, those that ask the store) are simulated without a
change of their code, and a whole simulation can be repeated.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

JITTER_US = 40
_LONG_AGO_S = 1_700_000_000


class Killed(BaseException):
    """The process of this strand is dead: it unwinds, and nothing that it does on the way counts."""


class Violation(AssertionError):
    """Something that perdure promises does not hold."""


class TooLittle(Violation):
    """Nothing was violated, since next to nothing has happened."""


class Process:
    """A number of strands that die, and stand still, together."""

    def __init__(self, name: str, kernel: Kernel) -> None:
        self.name = name
        self.kernel = kernel
        self.dead = False
        self.stopped_until_us = 0
        self.stops: list[tuple[int, int]] = []  # when it stood still: from, until
        self.cut_off_until_us = 0
        self.skew_us = 0  # of its wall clock
        self.was_skewed = False
        self.lacks: frozenset[str] = frozenset()  # agents that others have
        self.strands: list[Strand] = []
        self.keeps: list[Any] = []  # objects to keep until the end: the collector would run code of a dead process

    def stop(self, until_us: int) -> None:
        """As SIGSTOP, until then."""
        self.stopped_until_us = max(self.stopped_until_us, until_us)
        self.stops.append((self.kernel.now_us, until_us))

    def stood_still_since(self, then_us: int) -> bool:
        return any(until >= then_us for _, until in self.stops)


class Strand:
    """One thread of a process. `body` is the real thread that lends itself to it."""

    def __init__(self, kernel: Kernel, process: Process | None, work: Callable[[], None], body: _Body | None) -> None:
        self.kernel = kernel
        self.process = process
        self.work = work
        self.body = body
        self.baton = threading.Lock() if body is None else body.baton
        if body is None:
            self.baton.acquire()
        self.turn = 0  # wake-ups of earlier waits are not for this one
        self.waits_on: object | None = None
        self.woken = False
        self.begun = self.ended = self.killed = False
        self.reaper: Strand | None = None


class Kernel:
    """Time, strands, and chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"schedule {seed}")
        self.now_us = 0
        self.failure: BaseException | None = None
        self.switches = 0
        self._due: list[tuple[int, int, Strand | None, Any]] = []
        self._count = itertools.count()
        self.current = self.director = Strand(self, None, _nothing, None)

    # -- time ---------------------------------------------------------------------------------------------------------
    @property
    def now_s(self) -> float:
        return self.now_us / 1e6

    @property
    def wall_us(self) -> int:
        """The time of the database's clock."""
        return _LONG_AGO_S * 1_000_000 + self.now_us

    def sleep(self, us: int) -> None:
        self.block(None, self.now_us + us)

    def at(self, us: int, event: Callable[[], None]) -> None:
        """Schedule an event of the world, whichever processes live. The event must not wait."""
        heapq.heappush(self._due, (us, next(self._count), None, event))

    # -- strands ------------------------------------------------------------------------------------------------------
    def spawn(self, process: Process, work: Callable[[], None]) -> Strand:
        if process.dead:
            raise Killed
        body = _idle.pop() if _idle else _Body()
        strand = Strand(self, process, work, body)
        body.strand = strand
        process.strands.append(strand)
        self._push(self.now_us + self._jitter(), strand)
        return strand

    def block(self, on: object | None, until_us: int | None = None) -> bool:
        """Wait until a strand wakes the waiters of this object, or until this time. Returns whether it was woken."""
        me = self.current
        if me.killed or (me.process is not None and me.process.dead):
            raise Killed
        me.turn += 1
        me.waits_on, me.woken = on, False
        if until_us is not None:
            self._push(until_us, me)
        other = self._next()
        if other is not me:
            self.switches += 1
            self.current = other
            other.baton.release()
            me.baton.acquire()
        me.waits_on = None
        if me.killed:
            raise Killed
        if me is self.director and self.failure is not None:
            raise self.failure
        return me.woken

    def wake(self, strand: Strand, on: object) -> None:
        """Let it go on, if it waits on that."""
        if strand.waits_on is on and not strand.woken and not strand.ended:
            strand.woken = True
            strand.turn += 1
            self._push(self.now_us + self._jitter(), strand)

    def kill(self, process: Process) -> None:
        """End it as kill -9 does. When it is the caller's own, this does not return."""
        process.dead = True
        me = self.current
        for strand in process.strands:
            if strand is me or strand.ended:
                continue
            strand.killed = True
            if not strand.begun:
                strand.ended, strand.work = True, _nothing
                assert strand.body is not None
                _idle.append(strand.body)
                continue
            strand.reaper = me
            self.current = strand
            strand.baton.release()
            me.baton.acquire()
            self.current = me
        if me.process is process:
            me.killed = True
            raise Killed

    def fail(self, failure: BaseException) -> None:
        """Something does not hold: the director hears of it next."""
        self.failure = self.failure or failure

    def forget(self) -> None:
        """The process has ended: cancel its scheduled events."""
        self._due.clear()

    def _jitter(self) -> int:
        return 1 + int(self.chance.random() * JITTER_US)

    def _push(self, at_us: int, strand: Strand) -> None:
        heapq.heappush(self._due, (at_us, next(self._count), strand, strand.turn))

    def _next(self) -> Strand:
        """The strand whose turn it is. Earlier events of the world happen here."""
        due = self._due
        while self.failure is None:
            if not due:
                self.failure = Violation("everybody waits, and nothing will ever happen")
                break
            at_us, _, strand, turn = heapq.heappop(due)
            if strand is None:
                self.now_us = max(self.now_us, at_us)
                try:
                    turn()
                except Exception as error:
                    self.failure = error
                continue
            if strand.turn != turn or strand.ended:
                continue
            if strand.process is not None and strand.process.stopped_until_us > at_us:
                heapq.heappush(due, (strand.process.stopped_until_us, next(self._count), strand, turn))
                continue
            self.now_us = max(self.now_us, at_us)
            return strand
        return self.director

    def _ended(self, strand: Strand) -> None:
        """The last thing that a strand's thread does for it: the baton goes on."""
        strand.ended = True
        strand.work = _nothing  # an idle thread must not keep objects alive
        assert strand.body is not None
        _idle.append(strand.body)
        if strand.reaper is not None:
            strand.reaper.baton.release()
            return
        if strand.process is not None and not strand.process.dead:
            strand.process.strands.remove(strand)
        other = self._next()
        self.current = other
        other.baton.release()


def _nothing() -> None:
    pass


_idle: list[_Body] = []  # real threads without a strand: making one costs more than what most strands do


def dismiss() -> None:
    """End real threads that are not needed now: a process with threads cannot fork safely."""
    bodies = _idle.copy()
    _idle.clear()
    for body in bodies:
        body.strand = None
        body.baton.release()
    for body in bodies:
        body.thread.join()


class _Body:
    """A real thread that runs one strand after another."""

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.strand: Strand | None = None
        self.thread = threading.Thread(target=self._serve, name="sim", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            self.baton.acquire()
            strand = self.strand
            if strand is None:
                return
            strand.begun = True
            try:
                strand.work()
            except Killed:
                pass
            except BaseException as error:
                if strand.process is None or not strand.process.dead:
                    strand.kernel.fail(error)
            strand.kernel._ended(strand)
