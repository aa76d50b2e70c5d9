"""Waiting for runs: one task looks at the store for all callers of this app that wait for a run.

A caller says what it knows of its run, and waits until the run is different. The task asks the store about the runs of
all callers in one statement: after a new caller, after a hint of the bell, and from time to time, because a hint may
be lost. So a thousand callers that wait cost as much as one.

Each look compares the run with what the caller said that it knows. Earlier looks and hints do not matter. So no change
is missed, and no change is reported twice.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from perdure.core.compat import disown
from perdure.core.events import Event
from perdure.engine.api import AskReading, Reading, no_such_run
from perdure.engine.clock import Clock
from perdure.engine.local.task_cleanup import end
from perdure.errors import StoreError, StoreUnavailable
from perdure.store.api import FINISHED, ProgressRow, RunRow, Watched

log = logging.getLogger("perdure")
PAGE = 500  # how many events of a run are read at a time
_SPACING_S = 0.005  # the least time between two looks: the commits of a busy run share a look
_WHOLE_SPACING_S = 0.05  # the least time between two looks at the runs of all callers
_MOST_SHARE = 10  # all looks together take at most one tenth of the time
_REAP_EVERY_S = 1.0
# How long to keep listening after the last caller: a caller that follows a run calls again and again.
_LINGER_S = 5.0
_AGAIN_S = 0.5
_PROGRESS_S = 0.5  # how often to look at the stored progress of calls: to store it rings no bell
_CLOSE_S = 5.0


class News(NamedTuple):
    """The answer to a caller that follows a run: the run's row, and the next events."""

    row: RunRow
    events: list[Event]
    reported: frozenset[ProgressRow] | None = None  # the stored progress of its calls, if the caller wants it and it is new


class _Waiter:
    """One caller, and what it knows of its run."""

    __slots__ = ("after", "answer", "due", "held", "known", "run_id", "told", "until_s")

    def __init__(
        self,
        run_id: str,
        known: Watched | None,
        after: int | None,
        due: int | None,
        until_s: float | None,
        held: bool,
        told: frozenset[ProgressRow] | None = None,
    ) -> None:
        self.run_id = run_id
        self.known = known  # the run and its family as the caller has seen them; None if the caller follows the run
        self.after = after  # the last event that the caller has; None if the caller waits for a result
        self.due = due  # the time (µs) at which the wait ends, even if nothing has changed
        self.until_s = until_s  # like `due`, by the loop's clock: it moves even if the engine's clock stands still
        self.held = held  # True if a worker holds the run. That worker may die, so dead workers are looked for during the wait
        self.told = told  # the stored progress that the caller has; None: it wants none
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def is_due(self, now: int) -> bool:
        return self.left_s(now) <= 0

    def left_s(self, now: int) -> float:
        """How many more seconds the caller may wait."""
        due_s = float("inf") if self.due is None else (self.due - now) / 1e6
        return due_s if self.until_s is None else min(due_s, self.until_s - self.answer.get_loop().time())

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def tell(self, answer: Watched | News) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Watch:
    """The callers of one app that wait for runs. Its methods are called on the app's loop."""

    def __init__(
        self, reading: Callable[[], Reading], ask: AskReading, clock: Clock, poll_s: float, reap: Callable[[], Awaitable[None]]
    ) -> None:
        self._reading = reading
        self._ask = ask
        self._clock = clock
        self._poll_s = poll_s
        self._reap = reap  # makes the runs of dead workers ready
        # The callers, by the id of their family's root, because a change of one run may concern its whole family.
        self._waiters: dict[str, set[_Waiter]] = {}
        self._timed: set[_Waiter] = set()  # the callers with `due`, `until_s` or `held`
        self._near: set[_Waiter] = set()  # the callers whose runs the next look reads
        self._whole = False  # the next look reads the runs of all callers
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._hints: set[str] | None = set()  # roots of runs that have moved; None: any run may have moved
        self._hinted = False

    async def change(self, run_id: str, known: Watched, *, due: int | None, until_s: float | None, held: bool) -> Watched:
        """Wait until the run or a run below it differs from `known`. Returns the run as it is then.

        The wait also ends when the time `due` has come, or the time `until_s` by the loop's clock. `held`: the run's
        holder may be dead, so reap the runs of dead workers meanwhile.
        """
        found: Watched = await self._wait(_Waiter(run_id, known, None, due, until_s, held))
        return found

    async def news(self, run_id: str, after: int, told: frozenset[ProgressRow] | None = None) -> News:
        """Wait until the run has an event after `after`, or has ended. Returns the run and its next events.

        With `told`, also wait until the stored progress of its calls differs from `told`.
        """
        until_s = None if told is None else asyncio.get_running_loop().time()
        found: News = await self._wait(_Waiter(run_id, None, after, None, until_s, held=False, told=told))
        return found

    async def close(self) -> None:
        """End all waits with a StoreError."""
        task, self._task = self._task, None
        if task is not None:
            await end([task], _CLOSE_S)
        for waiter in self._all():
            waiter.fail(StoreError(f"the app was closed while a caller waited for run {waiter.run_id}; the run itself is not affected"))

    async def _wait(self, waiter: _Waiter) -> Any:
        beside = self._waiters.setdefault(_root(waiter.run_id), set())
        beside.add(waiter)
        if waiter.due is not None or waiter.until_s is not None or waiter.held:
            self._timed.add(waiter)
        # Look at once: the run may have changed since the caller read it.
        self._near.add(waiter)
        self._woken.set()
        if self._task is None:
            # The task belongs to the app, so it gets an empty context: if the caller is a tool, the end of its call
            # must not end the task.
            self._task = asyncio.get_running_loop().create_task(self._run(), name="perdure watch", context=contextvars.Context())
            disown(self._task)
        try:
            return await waiter.answer
        finally:
            self._near.discard(waiter)
            self._timed.discard(waiter)
            beside.discard(waiter)
            if not beside and self._waiters.get(_root(waiter.run_id)) is beside:
                del self._waiters[_root(waiter.run_id)]

    def _all(self) -> list[_Waiter]:
        return [waiter for beside in self._waiters.values() for waiter in beside]

    # -- hints --------------------------------------------------------------------------------------------------------
    def _hint(self, loop: asyncio.AbstractEventLoop, run_ids: Collection[str] | None) -> None:
        """The bell calls this, from any thread: these runs have moved."""
        # A caller that arrives right now may not be in `_waiters` yet. That is harmless: its first look comes later.
        roots = None if run_ids is None else {root for run_id in run_ids if (root := _root(run_id)) in self._waiters}
        if roots is not None and not roots:
            return
        with self._lock:
            self._hints = None if roots is None or self._hints is None else self._hints | roots
            first, self._hinted = not self._hinted, True
        if first:
            loop.call_soon_threadsafe(self._take_hints)

    def _take_hints(self) -> None:
        with self._lock:
            hints, self._hints, self._hinted = self._hints, set(), False
        if hints is None:
            self._whole = True
        for root in hints or ():
            self._near |= self._waiters.get(root, set())
        self._woken.set()

    # -- the task -----------------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        loop, reading = asyncio.get_running_loop(), self._reading()
        stop: Callable[[], None] | None = None

        def jumped() -> None:
            loop.call_soon_threadsafe(self._woken.set)

        forget_clock = self._clock.on_jump(jumped)
        try:
            stop = await self._ask(lambda: reading.watch(lambda run_ids: self._hint(loop, run_ids)))
            await self._look_again_and_again(loop, reading)
        except Exception as error:
            log.exception("waiting for runs has failed")
            for waiter in self._all():
                waiter.fail(error)
        finally:
            if self._task is asyncio.current_task():
                self._task = None
            forget_clock()
            if stop is not None:
                stop()

    async def _look_again_and_again(self, loop: asyncio.AbstractEventLoop, reading: Reading) -> None:
        version: int | None = None
        look_at_s = whole_at_s = reap_at_s = loop.time()
        alone_since_s = loop.time()
        while self._waiters or loop.time() - alone_since_s < _LINGER_S:
            if self._waiters:
                alone_since_s = loop.time()
            at_s = look_at_s if self._near else whole_at_s if self._whole else loop.time() + self._poll_s
            await self._pause(at_s - loop.time())
            try:
                if self._waiters and loop.time() >= reap_at_s:
                    reap_at_s = loop.time() + _REAP_EVERY_S
                    if any(waiter.held for waiter in self._timed):
                        await self._reap_dead()
                if self._waiters and loop.time() >= whole_at_s:
                    before, version = version, reading.version()
                    if self._whole or before != version:
                        self._whole = False
                        self._near.update(self._all())
                now = self._clock.now()
                self._near.update(waiter for waiter in self._timed if waiter.is_due(now))
                if not self._near or loop.time() < look_at_s:
                    continue
                near, self._near, begun_s = self._near, set(), loop.time()
                await self._look(reading, near)
            except StoreUnavailable as error:
                # An outage must not end the waits: the runs continue in other processes, or after the outage.
                log.warning(
                    "cannot look how %d runs are: %s; trying again", len({waiter.run_id for waiter in self._all()}), error.in_full()
                )
                self._whole = True
                look_at_s = whole_at_s = loop.time() + _AGAIN_S
                continue
            took_s = loop.time() - begun_s
            look_at_s = loop.time() + max(_SPACING_S, took_s)
            if len(near) > 1:
                whole_at_s = loop.time() + max(_WHOLE_SPACING_S, _MOST_SHARE * took_s)

    async def _reap_dead(self) -> None:
        try:
            await self._reap()
        except StoreUnavailable:
            raise
        except Exception:
            # The callers only wait: an error about other runs must not end their waits.
            log.exception("cannot look for dead workers; trying again")

    async def _pause(self, at_most_s: float) -> None:
        """Wait until there is a hint or a new caller, or until the next caller is due."""
        now = self._clock.now()
        try:
            # The callers in `_near` wait for the next look, whose time is `at_most_s`. Their own times are not used: a
            # time that is over would make this a busy loop until that look.
            timed = (waiter.left_s(now) for waiter in self._timed if waiter not in self._near)
            async with asyncio.timeout(max(min([at_most_s, *timed]), 0.0)):
                await self._woken.wait()
        except TimeoutError:
            pass
        self._woken.clear()

    async def _look(self, reading: Reading, near: Iterable[_Waiter]) -> None:
        near = [waiter for waiter in near if not waiter.answer.done()]
        try:
            await self._tell(reading, near)
        except StoreUnavailable:
            raise
        except Exception as error:
            # For example, an event of one run is damaged. Only the callers that wait for this run get the error.
            if len({waiter.run_id for waiter in near}) == 1:
                for waiter in near:
                    waiter.fail(error)
                return
            for run_id in {waiter.run_id for waiter in near}:
                await self._look(reading, [waiter for waiter in near if waiter.run_id == run_id])

    async def _tell(self, reading: Reading, near: Collection[_Waiter]) -> None:
        """Answer the callers whose runs have changed."""
        run_ids = {waiter.run_id for waiter in near}
        families = {waiter.run_id for waiter in near if waiter.after is None}
        found = await self._ask(lambda: reading.watched(run_ids, families))
        now = self._clock.now()
        after: dict[str, int] = {}
        for waiter in near:
            seen = found.get(waiter.run_id)
            if seen is None:
                waiter.fail(no_such_run(waiter.run_id, reading))
            elif waiter.after is None:
                if waiter.is_due(now) or waiter.known is None or _standing(seen) != _standing(waiter.known):
                    waiter.tell(seen)
            elif seen.row.seq > waiter.after:
                after[waiter.run_id] = min(after.get(waiter.run_id, waiter.after), waiter.after)
            elif seen.row.status in FINISHED:
                waiter.tell(News(seen.row, []))
        following = [waiter for waiter in near if waiter.told is not None and waiter.run_id in found and waiter.run_id not in after]
        if following:
            await self._tell_progress(reading, found, following)
        if after:
            self._hand_out(near, found, await self._ask(lambda: reading.read_many(after, PAGE)))

    async def _tell_progress(self, reading: Reading, found: Mapping[str, Watched], following: Iterable[_Waiter]) -> None:
        """Answer the callers for whose runs other progress is stored than they know. The others look again soon."""
        held = {waiter.run_id for waiter in following if found[waiter.run_id].row.holder is not None}
        rows = await self._ask(lambda: reading.progress(sorted(held))) if held else []
        for waiter in following:
            reported = frozenset(row for row in rows if row.run_id == waiter.run_id)
            if reported - (waiter.told or frozenset()):
                waiter.tell(News(found[waiter.run_id].row, [], reported))
            # If no worker holds the run, no call is under way, and the next claim is an event.
            waiter.until_s = waiter.answer.get_loop().time() + _PROGRESS_S if waiter.run_id in held else float("inf")

    def _hand_out(self, near: Iterable[_Waiter], found: Mapping[str, Watched], events: Mapping[str, list[Event]]) -> None:
        for waiter in near:
            if waiter.after is None or waiter.run_id not in events or waiter.answer.done():
                continue
            if new := [event for event in events[waiter.run_id] if event.seq > waiter.after]:
                waiter.tell(News(found[waiter.run_id].row, new))
            else:
                # Another caller needs earlier events of this run, and they have filled the page: look again.
                self._near.add(waiter)


def _standing(seen: Watched) -> set[tuple[str, str, int | None, str | None, str]]:
    """The facts that matter to a caller that waits for a result. New events alone do not matter to it."""
    return {(row.run_id, row.status, row.ready_at, row.holder, row.version) for row in (seen.row, *seen.family)}


def _root(run_id: str) -> str:
    return run_id.partition("/")[0]
