"""A worker: claims ready runs, drives many at a time on one loop, and releases them when it is drained.

A worker wakes up when the bell rings (a process has committed something that leaves work to do), when the next run
becomes ready, and when one of its own runs rests. It never polls run by run. A failure in one run does not affect
another run: each drive guards its own agent, and a bug in one drive ends only that drive.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from msgspec import structs

from perdure import shell
from perdure.agent import Agent
from perdure.core.approval import Judgement
from perdure.core.budget import NOTHING, Amounts
from perdure.core.compat import disown
from perdure.core.decide import Patience
from perdure.core.events import CancelRequested, ChildStarted, Event, RunUnpaused
from perdure.core.identity import Sealed
from perdure.core.run_core import RunSettings
from perdure.core.steps import ParkedRun, goes_on_from
from perdure.engine import threads
from perdure.engine.api import no_such_run
from perdure.engine.artifacts import Vaults
from perdure.engine.clock import Clock
from perdure.engine.counts import Counts
from perdure.engine.local import sandbox
from perdure.engine.local.child_discovery import ChildAgents
from perdure.engine.local.drive import Drive, Performing
from perdure.engine.local.leases import AGAIN_AFTER_S, Renewer, Watchdog, release_append
from perdure.engine.local.limits import Debts, OneAtATime, debts_of, may_owe
from perdure.engine.local.parked_runs import ParkedRuns
from perdure.engine.local.progress import ProgressKeeper, has_cut_off
from perdure.engine.local.schedules import Ticking
from perdure.engine.local.task_cleanup import end
from perdure.engine.notify.dispatcher import TOLD, Dispatcher
from perdure.engine.threads import ReadingThreads, Threads
from perdure.errors import (
    AlreadyRunning,
    Conflict,
    Fenced,
    NotFound,
    PerdureError,
    RunEnded,
    StoreError,
    StoreUnavailable,
    UnknownAgent,
    WrongVersion,
    in_full,
)
from perdure.settings import Queue, Settings
from perdure.store.api import (
    FINISHED,
    NO_VERSION,
    Append,
    Appended,
    ApprovalFilter,
    Claimed,
    Committed,
    InboxRow,
    ProgressRow,
    RunRow,
    Served,
    Store,
    serves,
)
from perdure.store.writer import GroupCommit
from perdure.tool.call import Closer
from perdure.tool.secret import Resolver, source_of

if TYPE_CHECKING:
    from perdure.otel import Telemetry

log = logging.getLogger("perdure.worker")
Observer = Callable[[str, Sequence[Event]], None]
T = TypeVar("T")
# What a drive begins with. If there is a parked run, the drive continues it; if not, the journal is replayed.
_Read = tuple[Sequence[Event], Debts, list[ProgressRow], ParkedRun | None]
_READ_HERE = 500  # a journal with more events is read on a thread, so that the loop continues meanwhile
_REAP_EVERY_S = 1.0
_COMPLAIN_EVERY_S = 30.0
_TRANSACTIONS = 16  # how many tools of one worker are inside a transaction at a time
_FIND_CHILD_AGENTS_EVERY_S = 2.0
_FLUSH_NOTICES_S = 5.0
_CLOSE_S = 10.0  # how long the worker waits at its end, for its tasks and for each resource that calls have left open


class Stops:
    """Several stop events. This object is set as soon as one of the events is set."""

    def __init__(self, events: Sequence[asyncio.Event]) -> None:
        self._events = events

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._events)


class StoredBlobs(Mapping[str, bytes]):
    """The blobs of a store by digest. A blob is read from the store at each access."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, digest: str) -> bytes:
        return self._store.blob(digest)

    def __iter__(self) -> Iterator[str]:
        raise TypeError("the blobs of a store cannot be listed")

    def __len__(self) -> int:
        raise TypeError("the blobs of a store cannot be counted")


def run_settings(settings: Settings, *, still: bool) -> RunSettings:
    """The settings that the run core needs. If the clock stands still, a run that waits is parked at once."""
    return RunSettings(
        inline_bytes=settings.inline_bytes,
        max_steps=settings.max_steps,
        poison_limit=settings.poison_limit,
        reconcile_asks=settings.reconcile_asks,
        patience=Patience.of(settings),
        park_after_us=0 if still else round(settings.park_after_s * 1e6),
        linger_us=round(settings.linger_s * 1e6),
        flush_us=round(settings.flush_s * 1e6),
    )


class Worker:
    """Drives the runs of some agents in one store.

    Use a worker as an async context manager, on the loop where it works.
    """

    def __init__(
        self,
        store: Store,
        agents: Iterable[Agent[Any, Any]],
        settings: Settings,
        clock: Clock,
        observers: Sequence[Observer] = (),
        queues: Sequence[str] | None = None,
        performing: Performing | None = None,
        counts: Counts | None = None,
        telemetry: Telemetry | None = None,
        secrets: Resolver | None = None,
    ) -> None:
        self.store = store
        self.secrets = secrets or source_of(settings.secrets)
        self.counts = counts or Counts()
        self.telemetry = telemetry
        self.settings = settings
        self.clock = clock
        self.threads = Threads(settings.threads)
        self.id = clock.new_id()
        self.agents = {Served(one.name, version): one for one in agents for version in (*one.former_versions, one.version)}
        # The same agents for claims. A run without a version takes the last version here, so agents of children that
        # were found later come first: they never replace a version that this worker was told to serve.
        self.served = list(self.agents)
        for one in self.agents.values():
            # A counter that begins with its first takeover would show no increase at that time.
            self.counts.claims.add((one.name, one.queue or "default"), 0)
            self.counts.takeovers.add((one.name, one.queue or "default"), 0)
        self.queues = queues
        self.performing = performing
        self.run_settings = structs.replace(run_settings(settings, still=clock.still), traced=telemetry is not None)
        self.ids = clock.ids()
        self.blobs: Mapping[str, bytes] = StoredBlobs(store)
        self.loop: asyncio.AbstractEventLoop
        self.observers: Sequence[Observer] = tuple(observers)
        self._drives: dict[str, Drive] = {}
        self._parked = ParkedRuns(settings.cache_runs, settings.cache_mb)
        self.questions = OneAtATime(self)
        self.progress = ProgressKeeper(self, settings.progress_s, self._complain)
        self.commits_here = False  # only one run is driven: its drive commits directly, on the loop's own thread
        self._readers: set[asyncio.Future[Any]] = set()
        self._post_version = -1  # the store's version when the inboxes were last read
        self._changes = 0  # counts the changes after which waiting callers must look again
        self._napping: set[asyncio.Future[None]] = set()
        self._beside: dict[str, set[asyncio.Future[None]]] = {}  # by run id: the waiters for a run that is driven here
        self.entered: str | None = None  # the run whose agent is running right now
        self._serving: list[Stops] = []  # the stop events of each serve() that is active
        self._draining = False
        self._callers = 0  # calls of serve() and drive_one() that have not returned yet
        self._closed = False
        self._lost = False  # the store has no row of this worker any more
        self._stop_listening: Callable[[], None] = lambda: None
        self._forget_clock: Callable[[], None] = lambda: None
        self._asking = ReadingThreads()
        self.vaults = Vaults(store, settings, clock)
        self.closers: dict[Hashable, Closer] = {}  # they close what calls have left open, when this worker ends
        # Transaction tools have their own threads, so that slow tools do not delay the threads that look for work.
        self._transactors = ThreadPoolExecutor(_TRANSACTIONS, "perdure-transaction")
        self._transactions = 0  # how many transactions of tools are under way
        self._last_reap_s = float("-inf")
        self._complained_s: dict[str, float] = {}
        self._wanted = 0  # how many runs the claims under way may return
        self._undriven: set[tuple[str, int]] = set()  # (run, epoch) that were held but not driven at the last look
        self._kin = ChildAgents(store, self.agents, settings.max_steps)
        self._ticking = Ticking(store, clock, settings)
        self._last_child_agents_s = float("-inf")

    async def __aenter__(self) -> Worker:
        self.loop = asyncio.get_running_loop()
        sandbox.guard()
        threads.guard(self.loop)
        self.group = GroupCommit(self.store, self.loop, lambda: self.transacting, self.counts.batch.add)
        self._renewer = Renewer(self.store, self.id, self.clock, self.settings.lease_s, Watchdog(self.loop, self._inside))
        self._dispatcher = Dispatcher(self.store, self.settings, self.clock, self._asking, busy=lambda: self.transacting)
        self._tasks: list[asyncio.Task[None]] = []
        try:
            await self._ask(self._sign_on, lambda _: self._sign_off())
            self._renewer.start()
            self._stop_listening = await self._ask(lambda: self.store.listen(self._ring), lambda stop: stop())
        except BaseException:
            await self.__aexit__()  # the caller gets no worker: end the threads that have begun
            raise
        self._tasks = [
            self.loop.create_task(self._watch(), name="perdure post"),
            self.loop.create_task(self._dispatcher.run(), name="perdure notices"),
        ]
        for task in self._tasks:
            disown(task)  # the loop's owner must not wait for these tasks: `__aexit__` ends them
        self._forget_clock = self.clock.on_jump(self._ring_of_clock)
        return self

    def _ring(self) -> None:
        """The bell calls this, from any thread: a thread or process has committed something."""
        self.loop.call_soon_threadsafe(self._rung)

    def _rung(self) -> None:
        self._look_for_post()
        self._dispatcher.poke()
        self._notice()

    def _ring_of_clock(self) -> None:
        self.loop.call_soon_threadsafe(self._jumped)

    def _jumped(self) -> None:
        """Look at the clock, because the clock was set: alarms may be due now, or later than they were set for."""
        for drive in list(self._drives.values()):
            drive.look_at_clock()
        self._rung()

    def _inside(self) -> str:
        return "something that is not an agent: a tool, most likely" if self.entered is None else f"the agent of run {self.entered}"

    def abort(self) -> None:
        """Stop every drive at once and write nothing more, like a crash."""
        self._draining = True
        for drive in list(self._drives.values()):
            drive.abort()
        self._parked.clear()
        self._notice()

    async def __aexit__(self, *_: object) -> None:
        try:
            self.abort()
            self._stop_listening()
            self._forget_clock()
            await end(self._tasks, _CLOSE_S)
            await asyncio.gather(*(self._close(owner) for owner in list(self.closers)), return_exceptions=True)
        finally:
            self.progress.stop()
            try:
                await self._ask(self._leave)
            finally:
                self._closed = True
                self._transactors.shutdown(wait=False)
                for reader in self._readers.copy():
                    reader.cancel()  # nothing needs the answer any more, and the loop may close before it arrives
                self._asking.close()
                self.vaults.close()

    async def _close(self, owner: Hashable) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.closers.pop(owner)()
        except Exception as error:
            log.warning("%s could not be closed: %s: %s", owner, type(error).__name__, error)

    def _leave(self) -> None:
        # Do all of this in one call on a thread: then a cancel of the caller cannot stop it halfway.
        self._renewer.stop()
        self.group.close()
        self.progress.last_write()
        self._sign_off()

    def _sign_on(self) -> None:
        name, lease_us = f"{socket.gethostname()}:{os.getpid()}", round(self.settings.lease_s * 1e6)
        self.store.register(self.id, name, os.getpid(), self.clock.now(), list(self.agents), self.queues, lease_us)

    def _sign_off(self) -> None:
        try:
            self.store.unregister(self.id, self.clock.now())
        except StoreError as error:
            log.info("could not sign off: %s; other workers notice it by themselves", error.in_full())

    def uncharged_beside(self, run_id: str, budget_of: str) -> Amounts:
        """The amounts that other runs of this worker have recorded under that budget and not committed.

        No ledger contains these amounts yet.
        """
        total = NOTHING
        for other in self._drives.values():
            if other.run_id != run_id:
                total = total + other.uncharged(budget_of)
        return total

    def serve_too(self, agent: Agent[Any, Any]) -> None:
        """Serve the agent of a child as well. The agent was found through the parent's code."""
        served = Served(agent.name, agent.version)
        if served not in self.agents:
            self.agents[served] = agent
            self.served.insert(0, served)
            self.loop.call_soon(self._sign_on_again)

    def is_short_of_room(self, queue: str) -> bool:
        """May the runs that this worker holds be the reason why other runs cannot be claimed?"""
        return len(self._drives) >= self.settings.concurrency or queue in self.settings.queues

    def _sign_on_again(self) -> None:
        def done(answer: Exception | None) -> None:
            if isinstance(answer, StoreError):
                log.info("cannot record yet that this worker serves more agents: %s", answer.in_full())
            elif answer is not None:
                raise answer

        self.consult(self._sign_on, done)

    # -- serving ------------------------------------------------------------------------------------------------------
    async def serve(self, *stops: asyncio.Event) -> None:
        """Drive ready runs until one of `stops` is set; then drain, unless another serve() is still active."""
        with self._entering():
            await self._serve(stops)

    async def _serve(self, stops: Sequence[asyncio.Event]) -> None:
        stop = Stops(stops)
        stopping = [self._wait_for(one, self._notice) for one in stops]
        self._serving.append(stop)
        try:
            while not stop.is_set() and not self._draining:
                try:
                    if self._lost:
                        await self._ask(self._sign_on)
                        self._lost = False
                    seen = self._changes
                    await self._tick()
                    await self._claim()
                    await self._wait_for_change(stop, seen)
                except NotFound as lost:
                    # Another worker has counted this worker as dead, and removed its row.
                    log.warning("%s; signing on again", lost)
                    self._lost = True
                except StoreError as error:
                    self._complain("cannot look for runs", error)
                    await asyncio.wait(stopping, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                except Exception:  # a bug, or a malformed row: the runs under way continue
                    log.exception("cannot look for runs; trying again in 1 s")
                    await asyncio.wait(stopping, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._serving.remove(stop)
            for one in stopping:
                one.cancel()
        if not self._is_served_on():
            await self._drain()

    def _is_served_on(self) -> bool:
        """Is another serve() still active? Then the runs under way continue."""
        return not all(stop.is_set() for stop in self._serving)

    def _wait_for(self, stop: asyncio.Event, stopped: Callable[[], None]) -> asyncio.Task[Literal[True]]:
        stopping = self.loop.create_task(stop.wait())
        disown(stopping)
        stopping.add_done_callback(lambda waited: None if waited.cancelled() else stopped())
        return stopping

    @property
    def draining(self) -> bool:
        """Has this worker begun to drain? After that it claims nothing, and never serves again."""
        return self._draining

    @property
    def driven(self) -> int:
        """How many runs this worker drives now."""
        return len(self._drives)

    @property
    def drained(self) -> bool:
        """Is the drain complete? Then every run is released, and every serve() and drive_one() has returned."""
        return self._draining and not self._callers

    async def until_drained(self) -> None:
        while not self.drained:
            await self._nap(_REAP_EVERY_S)

    @contextmanager
    def _entering(self) -> Iterator[None]:
        self._callers += 1
        try:
            yield
        finally:
            self._callers -= 1
            if self.drained:
                self._wake()

    async def drive_one(self, run_id: str, *, wait: bool, stop: asyncio.Event | None = None, by_turn: bool = False) -> RunRow:
        """Drive one run and its children, until the run ends, needs a person, or waits for something from outside.

        When `stop` is set, the runs are released, unless a serve() of this worker is active and continues them.
        Without `wait`, the call also returns when the run waits for a time. In every case the call waits for the run's
        children. With `by_turn`, the limits of the run's queue apply, as for any worker. Otherwise the run is claimed
        by name, whatever the limits are.
        """
        with self._entering():
            return await self._drive_one(run_id, wait, stop or asyncio.Event(), self.settings.queues if by_turn else None)

    async def _drive_one(self, run_id: str, wait: bool, stop: asyncio.Event, limits: Mapping[str, Queue] | None) -> RunRow:
        def stopped() -> None:
            self._notice()
            self._wake_beside(run_id)

        stopping = self._wait_for(stop, stopped)
        try:
            row = await self._drive_family(run_id, wait, stop, limits)
        finally:
            stopping.cancel()
        if stop.is_set():
            if not self._is_served_on():
                await self._release_drives([drive for drive in self._drives.values() if _is_of(run_id, drive.run_id)])
            return await self._row(run_id)
        if self._dispatcher.at_work or ((due := await self._ask(self.store.next_notice)) is not None and due <= self.clock.now()):
            await self._dispatcher.flush(_FLUSH_NOTICES_S)  # this process may exit next: send the notices that are due
        return row

    async def _drive_family(self, run_id: str, wait: bool, stop: asyncio.Event, limits: Mapping[str, Queue] | None) -> RunRow:
        seen = self._changes
        # If the caller has stopped already, do not even claim the run: the release would make the run ready at once,
        # even a run that must begin later.
        row = await self._row(run_id) if stop.is_set() else await self._take_up(run_id, limits)
        while row.status not in FINISHED and not stop.is_set() and not self._draining:
            try:
                if await self._look_after(row, wait, stop, limits, seen):
                    return row
                before = self._changes
                row = row if self._goes_on_here(run_id) else await self._row(run_id)
                seen = before  # set this only after the row was read: `seen` must be older than the row
            except StoreUnavailable as error:
                # The caller continues to wait: the drives keep their runs, and the database will come back.
                self._complain(f"run {run_id}: cannot look after it", error)
                await asyncio.sleep(AGAIN_AFTER_S)
        return row

    def _goes_on_here(self, run_id: str) -> bool:
        drive = self._drives.get(run_id)
        return drive is not None and not drive.state.alive

    async def _look_after(self, row: RunRow, wait: bool, stop: asyncio.Event, limits: Mapping[str, Queue] | None, seen: int) -> bool:
        """Do what is due for the run and its descendants, then wait for a change.

        True: there is nothing for which this worker could wait.

        `seen` has the same meaning as in `_doze`; the caller took it before it read the row.
        """
        run_id = row.run_id
        if self._goes_on_here(run_id):
            await self._wait_beside(run_id)
            return False
        await self.reap()
        family = await self._ask(lambda: self.store.family(run_id))
        ready = [one for one in (row, *family) if self._is_ready(one)]
        if self._is_ready(row):
            await self._take_up_if_free(run_id, limits)
        elif ready:
            await self._claim_below(run_id)
        # If this worker holds the run here, it does not drive the run any more: the release is under way on a thread,
        # and the run's status is not known before the release is written.
        releasing = row.holder == self.id
        if ready or releasing or self._is_driven(row, family) or await self._find_child_agents():
            await self._doze(_REAP_EVERY_S, stop, seen)
            return False
        wakes = [at for one in (row, *family) if (at := await self._goes_on_at(one)) is not None]
        if row.holder is not None or not wakes or not wait:
            # The family was read after the row. In between, the last child may have ended and made the run ready.
            return await self._row(run_id) == row
        await self._doze(min(max((min(wakes) - self.clock.now()) / 1e6, 0.0), 60.0), stop, seen)
        return False

    async def _claim_below(self, run_id: str) -> None:
        free = min(self.settings.concurrency - len(self._drives) - self._wanted, 100)
        if free > 0 and not self.transacting:
            served = list(self.served)
            await self._take(lambda: self.store.claim(self.id, served, free, self.clock.now(), below=run_id), free)

    async def _goes_on_at(self, row: RunRow) -> int | None:
        """When the run continues by itself; None: it does not.

        The expiry of an approval does not count: until the expiry, the run waits for a person.
        """
        if row.ready_at is None or row.holder is not None:
            return None
        if row.status == "waiting_approval":
            expiring = ApprovalFilter(run_id=row.run_id, limit=1)  # finds the approval that expires first
            asked = await self._ask(lambda: self.store.approvals(expiring))
            if asked and asked[0].standing.request.expires_at == row.ready_at:
                return None
        return row.ready_at

    def _is_ready(self, row: RunRow) -> bool:
        ready = row.holder is None and row.ready_at is not None and row.ready_at <= self.clock.now()
        return ready and row.run_id not in self._drives and serves(self.agents, row)

    def _is_driven(self, row: RunRow, family: Sequence[RunRow]) -> bool:
        """Does this worker drive the run, or does any worker hold a descendant of the run?"""
        return row.run_id in self._drives or any(one.run_id in self._drives or one.holder is not None for one in family)

    async def _take_up(self, run_id: str, limits: Mapping[str, Queue] | None = None) -> RunRow:
        """Claim the run by name, ready or not. With `limits`, the run must be ready, and its queue must have room."""
        while self.transacting:
            # A claim needs the write lock. A tool inside a transaction may have the lock for a long time, and the loop
            # must not wait for it.
            await self._nap(self.settings.poll_s)
        row = await self._row(run_id)
        self._check_served(row)
        if limits is not None and row.holder is None and not self._is_ready(row):
            return row  # the run itself is not ready: a claim would only make its journal longer
        if row.status not in FINISHED and run_id not in self._drives:  # a run that is driven here needs no claim
            if row.holder is not None:
                self._last_reap_s = float("-inf")  # the holder may be dead: reap now, not only after _REAP_EVERY_S
                await self.reap()
            served = list(self.served)
            try:
                claimed = await self._take(lambda: self.store.claim(self.id, served, 1, self.clock.now(), run_id=run_id, limits=limits))
                if claimed:
                    return claimed[0].row
            except RunEnded:
                pass  # another worker has finished the run since the row was read
            except AlreadyRunning:
                if (row := await self._row(run_id)).holder not in (None, self.id):
                    raise
                return row  # this worker itself holds the run: wait until the answer to its own claim arrives
        return await self._row(run_id)

    async def _take_up_if_free(self, run_id: str, limits: Mapping[str, Queue] | None) -> None:
        if len(self._drives) >= self.settings.concurrency:
            return
        try:
            await self._take_up(run_id, limits)
        except (AlreadyRunning, Conflict):
            pass  # another worker was faster, or the run was paused

    def _check_served(self, row: RunRow) -> None:
        versions = [served.version for served in self.agents if served.agent == row.agent]
        if not versions:
            known = ", ".join(sorted({served.agent for served in self.agents})) or "none"
            raise UnknownAgent(f"run {row.run_id} belongs to agent {row.agent!r}, which is not served here (only {known})")
        if row.version not in (NO_VERSION, *versions) and row.status not in FINISHED:
            plan, tools, file = (row.target or "").partition(" --tools ")
            adopt = (
                f"{shell.command('adopt', row.run_id, plan)}{tools}{shell.quote(file)}"
                if tools
                else shell.command("adopt", row.run_id, f"FILE.py:{row.agent}")
            )
            message = f"run {row.run_id} was begun with version {row.version} of agent {row.agent}, and here is {' and '.join(versions)}"
            raise WrongVersion(message, hint=f"use the old code, or let this code go on with it: {adopt}")

    async def _row(self, run_id: str) -> RunRow:
        row = await self._ask(lambda: self.store.get(run_id))
        if row is None:
            raise no_such_run(run_id, self.store)
        return row

    async def _drain(self) -> None:
        """Claim nothing more, and release every run."""
        self.counts.drains += not self._draining
        self._draining = True
        self._notice()
        while self._drives:  # repeat this: a claim that was under way may return another run
            await self._release_drives(list(self._drives.values()))

    async def _release_drives(self, drives: Sequence[Drive]) -> None:
        """Release these runs at a step boundary.

        After a timeout, stop the attempts of these runs, and record how the attempts ended.
        """
        for drive in drives:
            drive.drain()
        for drive in await self._left(drives, self.settings.drain_timeout_s):
            log.warning(
                "run %s: still at work after %.0f s; ending its calls", drive.run_id, self.settings.drain_timeout_s, extra=drive.about
            )
            drive.stop_attempts()
        for drive in await self._left(drives, self.settings.cancel_grace_s + 5.0):
            log.error(
                "run %s: could not be drained in time; it is released like the run of a silent worker", drive.run_id, extra=drive.about
            )
            drive.abort()
            self._release_aborted(drive.run_id, drive.lease.epoch)

    def _release_aborted(self, run_id: str, epoch: int) -> None:
        """Release the run of an aborted drive, and retry until the release is durable.

        While this live worker holds the run, no other worker may claim it.
        """

        def done(answer: int | Exception) -> None:
            if isinstance(answer, Exception):
                self._complain("cannot release runs", answer if isinstance(answer, StoreError) else StoreError(repr(answer)))
                self.loop.call_later(AGAIN_AFTER_S, self._release_aborted, run_id, epoch)

        if not self._closed:
            self.consult(lambda: self.store.release_undriven(self.id, [(run_id, epoch)], self.clock.now()), done)

    async def _left(self, drives: Sequence[Drive], seconds: float) -> list[Drive]:
        """Wait until all these drives rest, at most `seconds`. Returns the drives that do not rest yet."""
        deadline = self.loop.time() + seconds
        # Compare drives, not run ids: meanwhile, a caller in this process may have claimed the same run again.
        for drive in drives:
            while self._drives.get(drive.run_id) is drive and (left_s := deadline - self.loop.time()) > 0:
                await self._nap(left_s)
        return [drive for drive in drives if self._drives.get(drive.run_id) is drive]

    # -- claiming -----------------------------------------------------------------------------------------------------
    async def _ask(self, question: Callable[[], T], unwanted: Callable[[T], None] | None = None) -> T:
        """The store's answer, without blocking the loop for long.

        A local store is asked on this thread, which is fastest. A remote store is asked on another thread, because it
        may be slow.
        """
        return await self._asking.ask(question, unwanted) if self.store.remote else question()

    async def _tick(self) -> None:
        """Start the runs of schedules that are due. Another worker may do it at the same time: each tick starts one run."""
        mono_s = self.loop.time()
        if self._ticking.is_due(mono_s) and not self._draining and not self.transacting:
            served = list(self.served)
            try:
                await self._ask(lambda: self._ticking.look(self.agents, served, self.queues, mono_s))
            finally:  # an error may come after ticks that were started
                for agent, outcome, number in self._ticking.taken_ticks():
                    self.counts.ticks.add((agent, outcome), number)

    async def _claim(self) -> None:
        await self._claim_ready()
        if await self.reap():  # reap after the first claim, because a reap is not urgent
            await self._claim_ready()

    async def _claim_ready(self) -> None:
        if self.loop.time() - self._last_child_agents_s >= _FIND_CHILD_AGENTS_EVERY_S:
            await self._find_child_agents()
        if not self._renewer.is_heard():
            # Other workers count this worker as dead. If it claimed a run now, they would take the run over at once,
            # again and again.
            return
        served = list(self.served)
        while (free := self.settings.concurrency - len(self._drives) - self._wanted) > 0 and not self._draining and not self.transacting:
            wanted = min(free, 100)
            if len(await self._take(partial(self._claim_some, served, wanted), wanted)) < wanted:
                return

    def _claim_some(self, served: Sequence[Served], wanted: int) -> Sequence[Claimed]:
        if not self.store.remote:
            ready = self.store.next_ready(served, self.queues)
            if ready is None or ready > self.clock.now():
                return ()  # no run is ready: a claim would only take the write lock
        limits = self.settings.queues
        return self.store.claim(self.id, served, wanted, self.clock.now(), queues=self.queues, limits=limits)

    async def _take(self, claim: Callable[[], Sequence[Claimed]], wanted: int = 1) -> Sequence[Claimed]:
        """Claim runs and begin to drive them.

        If the caller is cancelled, this continues: otherwise the runs would be held but not driven.
        """
        if not self.store.remote:
            claimed, post = self._claimed(claim())
            self._begin(claimed, post)
            return claimed
        seen = self.store.version()
        post_is_read = not self._drives or seen == self._post_version
        asked = self._asking.start(lambda: self._claimed(claim()))  # start now, not in the loop's next iteration
        self._wanted += wanted

        async def begin() -> Sequence[Claimed]:
            try:
                claimed, post = await asked
                if post_is_read and claimed and all(one.post is not None for one in claimed):
                    self._post_version = seen + 1  # the claim itself is one change; other changes add to it
                self._begin(claimed, post)
                return claimed
            finally:
                self._wanted -= wanted

        taking = asyncio.ensure_future(begin())
        self._readers.add(taking)
        taking.add_done_callback(self._readers.discard)
        # Read the exception. Otherwise asyncio logs it as never retrieved if the caller was cancelled.
        taking.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(taking)

    def _claimed(self, claimed: Sequence[Claimed]) -> tuple[Sequence[Claimed], Sequence[InboxRow]]:
        """The claimed runs and their inbox rows, read before any run is driven.

        If a run rested without having read its inbox, it would be ready again at once, in an endless loop.
        """
        if all(one.post is not None for one in claimed):
            return claimed, [row for one in claimed for row in one.post or ()]
        try:
            return claimed, self.store.inbox(self.id)
        except StoreError as error:
            self._complain("cannot look for post", error)
            return claimed, ()

    async def _find_child_agents(self) -> bool:
        """Replay parents, to find the agents of their children. True: there were parents to replay."""
        self._last_child_agents_s = self.loop.time()
        parents = await self._ask(lambda: self._kin.parents_to_ask(self.clock.now()))
        for run_id in parents:
            # Use a plain callback and not a task, because the callback enters an agent.
            self.loop.call_soon(self._serve_child_agents, run_id)
        return bool(parents)

    def _serve_child_agents(self, run_id: str) -> None:
        for agent in self._kin.agents_of(run_id):
            self.serve_too(agent)
        self._last_child_agents_s = float("-inf")  # look again at once: these agents may have children of their own
        self._notice()

    async def reap(self) -> bool:
        """Make the runs of dead workers claimable, and release the runs that this worker holds and does not drive.

        True: there was such a run.
        """
        if self.loop.time() - self._last_reap_s < _REAP_EVERY_S:
            return False
        self._last_reap_s = self.loop.time()
        lost = await self._ask(lambda: self.store.reap(self.id, round(self._renewer.silence() * 1e6), self.clock.now()))
        return await self._release_undriven() or lost > 0

    async def _release_undriven(self) -> bool:
        """Release the runs that this worker holds and does not drive.

        The claim of these runs was committed, but its answer was lost. No other worker may release them, since this
        worker is alive: without this method, these runs would never continue.
        """
        held = await self._ask(lambda: self.store.held(self.id))
        if self._wanted:
            return False
        undriven = {(run_id, epoch) for run_id, epoch in held if run_id not in self._drives}
        # Release only runs that were found twice under the same epoch. One look proves nothing: `held` is older than
        # `_drives`, and the run may have been released in between. A run that was claimed again has another epoch.
        stranded, self._undriven = sorted(undriven & self._undriven), undriven
        if stranded:
            log.warning("%s: held here and not driven; released", ", ".join(f"run {run_id}" for run_id, _ in stranded))
            await self._ask(lambda: self.store.release_undriven(self.id, stranded, self.clock.now()))
        return bool(stranded)

    def _begin(self, claimed: Sequence[Claimed], post: Sequence[InboxRow]) -> None:
        taken_over = [one.lease.run_id for one in claimed if one.takeover]
        if taken_over:
            log.info("took over from a worker that is gone: %s", ", ".join(f"run {run_id}" for run_id in taken_over[:10]))
        for one in claimed:
            self._begin_one(one)
            if self._draining:  # the drain began while the claim was under way
                self._drives[one.lease.run_id].drain()
        self._wake()
        self._hand_out(post)

    def _begin_one(self, claimed: Claimed) -> None:
        run_id = claimed.lease.run_id
        served = (claimed.row.agent, claimed.row.queue)
        self.counts.claims.add(served)
        if claimed.takeover:
            self.counts.takeovers.add(served)
        before = self._drives.get(run_id)
        if before is not None:
            before.abort()  # the old drive lost its lease while this process slept, and has not noticed this yet
        agent = self.agents[Served(claimed.row.agent, claimed.row.version)]
        parked = self._parked.take(run_id, agent)
        drive = self._drives[run_id] = Drive(claimed, agent, self)
        self._see_who_commits()
        came_along = claimed.events is not None and not may_owe(claimed.events[0].body) and not has_cut_off(claimed.events)
        # The caller may be a tool of another run, which has started this run. Nothing of that tool's context may reach
        # the tools of this run: neither its rights to open artifacts, nor the fact that it is a tool.
        context = contextvars.Context()
        to_read = claimed.row.seq - (0 if parked is None else parked.last.seq)
        if came_along or (to_read <= _READ_HERE and not self.store.remote):
            # Use a plain callback, not a task: inside a task the first step of a tool cannot run at once. Use
            # one callback per run: if a signal (Ctrl-C) arrives in one callback and the loop continues, the other runs
            # must still begin.
            self.loop.call_soon(self._begin_drive, drive, claimed, parked, None, context=context)
            return
        reading = self._asking.start(lambda: self._read(claimed, parked))
        self._readers.add(reading)
        reading.add_done_callback(lambda done: self._begin_drive(drive, claimed, parked, done), context=context)

    def _read(self, claimed: Claimed, parked: ParkedRun | None) -> _Read:
        run_id, events = claimed.lease.run_id, claimed.events
        if parked is not None:
            before = parked.last.seq - 1
            since: Sequence[Event] = self.store.read(run_id, before) if events is None else events[before:]
            if goes_on_from(parked, since):
                assert parked.state.created is not None
                # A call of a parked run may wait for a rate limit or a budget after its last attempt was cut off.
                cut_off = any(call.phase == "started" for call in parked.state.open.values())
                return since[1:], debts_of(self.store, parked.state.created), self._progress_of(run_id, cut_off), parked
        journal = self.store.read_life(run_id) if events is None else events
        return journal, debts_of(self.store, journal[0].body), self._progress_of(run_id, has_cut_off(journal)), None

    def _progress_of(self, run_id: str, cut_off: bool) -> list[ProgressRow]:
        """The stored progress of the run's attempts, if one of them was cut off."""
        return self.store.progress([run_id]) if cut_off else []

    def _begin_drive(self, drive: Drive, claimed: Claimed, parked: ParkedRun | None, reading: asyncio.Future[_Read] | None) -> None:
        self._readers.discard(reading)
        used: ParkedRun | None = None
        try:
            if not drive.over:
                events, debts, progress, used = self._read(claimed, parked) if reading is None else reading.result()
                self.counts.resumes.add(("new" if claimed.row.epoch == 1 else "journal" if used is None else "memory",))
                drive.begin(events, debts, progress, used)
                self._wake_beside(drive.run_id)  # its journal may already name children, for which callers wait
        except Exception as error:
            self.broke(drive, error)
        finally:
            if parked is not None and used is None:
                parked.machine.close()

    def keep_parked(self, run_id: str, run: ParkedRun, agent: Agent[Any, Any]) -> None:
        """Keep the machine of a run that this worker has just parked."""
        self._parked.keep(run_id, run, agent)

    def broke(self, drive: Drive, error: Exception) -> None:
        """Abort a drive after a bug or an error of the store, and release its run. The other runs continue."""
        if isinstance(error, Fenced):
            log.warning("%s; this worker stops working on it", error, extra=drive.about)
        else:
            log.error(
                "run %s: cannot be driven here: %s",
                drive.run_id,
                in_full(error),
                exc_info=None if isinstance(error, PerdureError) else error,
                extra=drive.about,
            )
        drive.abort()
        self._release_broken(drive, error)

    def _release_broken(self, drive: Drive, error: Exception) -> None:
        """Release the run of a broken drive, and retry until this worker does not hold the run any more.

        Until then, no other worker may claim the run.
        """

        def release() -> Appended | None:
            row = self.store.get(drive.run_id)
            if row is None or (row.holder, row.epoch) != (self.id, drive.lease.epoch):
                return None
            (answer,) = self.store.append([release_append(drive.lease, row, error, self.clock)])
            return answer

        def done(answer: Appended | Exception | None) -> None:
            if answer is None:
                return  # another worker holds the run, or it was released before
            if isinstance(answer, Committed):
                log.info("run %s: released", drive.run_id, extra=drive.about)
                return
            # Also try again if the store refused the append. An earlier append of this worker, whose answer was lost, may
            # have been committed after the run's row was read. Then the seq of this append was too old.
            ours = answer if isinstance(answer, Exception) and not isinstance(answer, PerdureError) else None
            words = "run %s: cannot be released yet: %s; trying again in %.0f s"
            level = logging.DEBUG if isinstance(answer, StoreUnavailable) and self.store.remote else logging.ERROR
            why = answer if isinstance(answer, Exception) else answer.why
            log.log(level, words, drive.run_id, why, AGAIN_AFTER_S, exc_info=ours, extra=drive.about)
            self.loop.call_later(AGAIN_AFTER_S, self._release_broken, drive, error)

        if not self._closed:
            self.consult(release, done)

    # -- waiting ------------------------------------------------------------------------------------------------------
    async def _wait_for_change(self, stop: Stops | asyncio.Event, seen: int) -> None:
        """Wait until a run of this worker rests, another process commits, or the next run is ready.

        `seen` has the same meaning as in `_doze`.
        """
        full = len(self._drives) >= self.settings.concurrency
        served = list(self.served)
        next_ready = None if full else await self._ask(lambda: self.store.next_ready(served, self.queues))
        left_s = _REAP_EVERY_S if next_ready is None else (next_ready - self.clock.now()) / 1e6
        left_s = min(left_s, self._ticking.left_s())
        if left_s <= 0:
            # There is a ready run that this worker may not claim yet: the run's queue is full, or the run is a suspect
            # and this worker's group of suspects is full. Or a tick is due while a tool has the write lock. Without a
            # real wait, this would be a busy loop, and nothing else would run.
            left_s = self.settings.poll_s
        await self._doze(min(left_s, _REAP_EVERY_S), stop, seen)

    async def _doze(self, seconds: float, stop: Stops | asyncio.Event, seen: int) -> None:
        """Wait until `seconds` have passed, a run of this worker rests, or the database has changed.

        The database is checked every poll_s. `seen` is the value of `_changes` before the caller read the store. So a
        change during that read ends the wait too, even if it has already woken another waiter.
        """
        until = self.loop.time() + seconds
        version = self.store.version()
        left_s = seconds
        while self._changes == seen and not stop.is_set():
            # Wait at least once, even for 0 s, so that the loop can run its other callbacks.
            await self._nap(min(max(left_s, 0.0), self.settings.poll_s))
            left_s = until - self.loop.time()
            if self.store.version() != version or left_s <= 0:
                break

    async def _wait_beside(self, run_id: str) -> None:
        """Wait until the run rests or has a new child, at most _REAP_EVERY_S seconds.

        Only the waiters of this run wake up, since there may be thousands of waiters.
        """
        beside = self._beside.setdefault(run_id, set())
        try:
            await self._nap(_REAP_EVERY_S, beside)
        finally:
            if not beside and self._beside.get(run_id) is beside:
                del self._beside[run_id]

    def _wake_beside(self, run_id: str) -> None:
        for nap in self._beside.pop(run_id, ()):
            _end_nap(nap)

    async def _nap(self, seconds: float, among: set[asyncio.Future[None]] | None = None) -> None:
        # Each waiter has its own future: several runs are driven by name at the same time, and each wait ends alone.
        nap = self.loop.create_future()
        napping = self._napping if among is None else among
        napping.add(nap)
        alarm = self.loop.call_later(seconds, _end_nap, nap)
        try:
            await nap
        finally:
            alarm.cancel()
            napping.discard(nap)

    def _wake(self) -> None:
        # Empty the set here: many runs may rest before a waiter runs, and each waiter must be woken only once.
        while self._napping:
            _end_nap(self._napping.pop())

    def _notice(self) -> None:
        self._changes += 1
        self._wake()

    async def _watch(self) -> None:
        """Read the inboxes of the runs that are driven here, every poll_s: the bell may not have rung."""
        while True:
            await self._nap(self.settings.poll_s if self._drives else _REAP_EVERY_S)
            try:
                if self._drives and (now := self.store.version()) != self._post_version:
                    self._hand_out(await self._ask(lambda: self.store.inbox(self.id)))
                    self._post_version = now  # set this only after the read: a read that failed is repeated
            except StoreError as error:
                self._complain("cannot look for post", error)

    def _complain(self, what: str, error: StoreError) -> None:
        """Log an error, at most every 30 s.

        An outage of a server is logged here only for debugging: the store logs its beginning and its end.
        """
        now_s = time.monotonic()
        quiet = now_s - self._complained_s.get(what, float("-inf")) < _COMPLAIN_EVERY_S
        if not quiet:
            self._complained_s[what] = now_s
        away = isinstance(error, StoreUnavailable) and self.store.remote
        log.log(logging.DEBUG if quiet or away else logging.ERROR, "%s: %s; trying again", what, error.in_full())

    def _look_for_post(self) -> None:
        if not self._drives:
            return
        if self.store.remote:
            self._wake()  # `_watch` wakes up and reads, since the store's version has changed
            return
        try:
            self._hand_out(self.store.inbox(self.id))
        except StoreError as error:
            self._complain("cannot look for post", error)

    def _hand_out(self, post: Sequence[InboxRow]) -> None:
        for row in post:
            drive = self._drives.get(row.run_id)
            if drive is not None:
                drive.receive(row)

    # -- what drives ask of their host --------------------------------------------------------------------------------
    def commit(self, append: Append, done: Callable[[Appended | Exception], None]) -> None:
        """Commit an append, then call done(answer). Several runs share a group commit; a single run commits alone.

        Most often a single run does not use this method, because its drive appends directly: see `commits_here`.
        """
        if len(self._drives) > 1 or self.transacting:
            # A tool inside a transaction may have the write lock for a long time: the writer's thread waits for the
            # lock, not the loop.
            self.group.submit(append, done)
            return
        if self.store.remote:
            self.group.send_now(append, done)
            return
        try:
            answer: Appended | Exception = self.group.commit_now(append)
        except Exception as error:
            answer = error
        done(answer)

    def transact(
        self, head: Append, work: Callable[[Any], tuple[Append, Any]], done: Callable[[tuple[Appended, Any] | Exception], None]
    ) -> None:
        """Run a transaction on a thread, then call done(answer) on the loop."""

        asked_s = time.monotonic()

        def begin() -> tuple[Appended, Any]:
            # The transaction may have waited long for a free thread. `at` has to include this wait, because an approval may
            # have expired during the wait.
            waited_us = round((time.monotonic() - asked_s) * 1e6)
            return self.store.transact(structs.replace(head, at=head.at + waited_us), work)

        def finish(future: asyncio.Future[Any]) -> None:
            self._transactions -= 1
            self._see_who_commits()
            if future.cancelled():
                return  # the worker and its drives have ended
            error = future.exception()
            done(future.result() if error is None else error if isinstance(error, Exception) else PerdureError(repr(error)))

        self._transactions += 1
        self._see_who_commits()
        future = self.loop.run_in_executor(self._transactors, begin)
        self._readers.add(future)
        future.add_done_callback(self._readers.discard)
        future.add_done_callback(finish)

    def decide(self, approval: str, judgement: Judgement, done: Callable[[Exception | None], None]) -> None:
        """Settle an approval, then call done(error or None). The outcome arrives in the inbox of the run."""
        event_id, now = self.clock.new_id(), self.clock.now()
        self._write(lambda: self.store.decide(approval, judgement, event_id=event_id, now=now), done)

    def cancel_run(self, run_id: str, by: str, reason: str, done: Callable[[Exception | None], None]) -> None:
        """Cancel another run, then call done(error or None).

        It is no error if the other run has ended, or was cancelled before.
        """
        event_id, now, body = self.clock.new_id(), self.clock.now(), CancelRequested(by=by, reason=reason)

        def expect(row: RunRow) -> None:
            if row.status == "cancelling":
                raise RunEnded("asked before")

        def cancel() -> None:
            try:
                self.store.post(run_id, None, body, event_id=event_id, now=now, expect=expect)
            except RunEnded:
                pass

        self._write(cancel, done)

    def unpause_after_raise(self, run_id: str) -> None:
        """Unpause a run that stopped because a budget was used up: the budget has room again."""
        body = RunUnpaused(by="perdure", note="its budget was raised while it stopped")
        event_id, now = self.clock.new_id(), self.clock.now()

        def expect(row: RunRow) -> None:
            if row.status != "needs_attention" or row.attention != "budget":
                raise Conflict(f"run {run_id} is {row.status}: it no longer waits for its budget")

        def done(error: Exception | None) -> None:
            match error:
                case StoreError():
                    self.loop.call_later(AGAIN_AFTER_S, self.unpause_after_raise, run_id)
                case None | Conflict():
                    pass
                case _:
                    raise error

        self._write(lambda: self.store.post(run_id, None, body, event_id=event_id, now=now, expect=expect), done)

    def _write(self, work: Callable[[], Any], done: Callable[[Exception | None], None]) -> None:
        def finish(answer: Any) -> None:
            self._look_for_post()
            done(answer if isinstance(answer, Exception) else None)

        self.consult(work, finish)

    def consult(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Do short work on the store, then call done(answer or error).

        The work runs at once on this thread. If a tool inside a transaction has the write lock, or the store is
        remote, the work runs on another thread.
        """

        if self.transacting or self.store.remote:
            self.aside(work, done)
            return
        try:
            answer: T | Exception = work()
        except Exception as error:
            answer = error
        done(answer)

    def aside(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Do work on another thread, then call done(answer or error) on the loop."""

        def finish(future: asyncio.Future[T]) -> None:
            self._readers.discard(future)
            if not future.cancelled():
                error = future.exception()
                done(future.result() if error is None else error if isinstance(error, Exception) else PerdureError(repr(error)))

        working = self._asking.start(work)
        self._readers.add(working)
        working.add_done_callback(finish)

    def _see_who_commits(self) -> None:
        self.commits_here = len(self._drives) == 1 and not self._transactions and not self.store.remote

    @property
    def transacting(self) -> bool:
        """Is a tool of this worker inside a transaction of a local store, so that the tool has the only write lock?"""
        return self._transactions > 0 and not self.store.remote

    def has_held_since(self, then_s: float) -> bool:
        """Is it certain that no other worker has taken over a run of this worker since `then_s`?

        That could only happen if this worker had sent no heartbeat for too long.
        """
        return self._renewer.has_held_since(then_s)

    def beat(self) -> float:
        """Send a heartbeat of this worker. Returns the time right before it was sent. Call this from any thread."""
        return self._renewer.beat()

    def committed(self, run_id: str, sealed: Sequence[Sealed]) -> None:
        """Events of a run are durable: wake the dispatcher of notices, and the waiters."""
        for one in sealed:
            kind = type(one.event.body)
            if kind in TOLD:
                self._dispatcher.poke()
            elif kind is ChildStarted:
                self._wake_beside(run_id)

    def observe(self, run_id: str, sealed: Sequence[Sealed]) -> None:
        """Events of a run are durable: tell the observers."""
        events = [one.event for one in sealed]
        for observe in self.observers:
            try:
                observe(run_id, events)
            except Exception:
                log.exception("run %s: an observer has failed; the run goes on", run_id)

    def rested(self, drive: Drive) -> None:
        if self._drives.get(drive.run_id) is drive:
            del self._drives[drive.run_id]
            self.progress.rested(drive.run_id)
            self._see_who_commits()
        self._wake_beside(drive.run_id)
        self._notice()


def _end_nap(nap: asyncio.Future[None]) -> None:
    if not nap.done():
        nap.set_result(None)


def _is_of(run_id: str, other: str) -> bool:
    """Is `other` the run itself, or a descendant of the run?"""
    return other == run_id or other.startswith(f"{run_id}/")
