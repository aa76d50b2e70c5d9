"""A worker: claims ready runs, drives many at a time on one loop, and hands them over when it is drained.

It wakes up when somebody rings (a commit by any process that leaves something to do), when the next run becomes ready, and when a run
of its own has come to rest; never by asking every run. One run's failure touches no other: each drive guards its own agent, and an error of ours in one
drive ends that drive.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

from msgspec import structs

from perdure import shell
from perdure.agent import Agent
from perdure.core.approval import Judgement
from perdure.core.budget import NOTHING, Amounts
from perdure.core.decide import Patience
from perdure.core.events import CancelRequested, ChildStarted, Event, RunUnpaused
from perdure.core.identity import Sealed
from perdure.core.run_core import RunSettings
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
)
from perdure.settings import Queue, Settings
from perdure.store.api import FINISHED, Append, Appended, ApprovalFilter, Claimed, Committed, InboxRow, RunRow, Served, Store
from perdure.store.url import shown_url
from perdure.store.writer import GroupCommit
from perdure.tool.call import Closer
from perdure.worker import forked, outside
from perdure.worker.asking import Asking
from perdure.worker.clock import Clock
from perdure.worker.courier import TOLD, Courier
from perdure.worker.drive import Drive, Performing
from perdure.worker.ending import disown, end
from perdure.worker.kin import Kin
from perdure.worker.lease import Renewer, Watchdog
from perdure.worker.limits import Debts, OneAtATime, debts_of, may_owe
from perdure.worker.surrender import AGAIN_AFTER_S, surrender
from perdure.worker.threads import Threads

log = logging.getLogger("perdure.worker")
Observer = Callable[[str, Sequence[Event]], None]
T = TypeVar("T")
_READ_HERE = 500  # a journal longer than this is read on a thread, so that the loop goes on meanwhile
_REAP_EVERY_S = 1.0
_COMPLAIN_EVERY_S = 30.0
_TRANSACTIONS = 16  # at a time in one worker
_FIND_KIN_EVERY_S = 2.0
_FLUSH_NOTICES_S = 5.0
_CLOSE_S = 10.0  # for what calls have left open


class Stops:
    """Several events, any of which ends the same thing."""

    def __init__(self, events: Sequence[asyncio.Event]) -> None:
        self._events = events

    def is_set(self) -> bool:
        return any(event.is_set() for event in self._events)


class StoredBlobs(Mapping[str, bytes]):
    """The blobs of a store by their digest, each read when it is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, digest: str) -> bytes:
        return self._store.blob(digest)

    def __iter__(self) -> Iterator[str]:
        raise TypeError("the blobs of a store cannot be listed")

    def __len__(self) -> int:
        raise TypeError("the blobs of a store cannot be counted")


def run_settings(settings: Settings, *, still: bool) -> RunSettings:
    """What the run core has to know. With a clock that stands still a run never waits for a time that will come: it is parked at once."""
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
    """Drives the runs of some agents over one store. Use it as an async context manager on the loop that it is to work on."""

    def __init__(
        self,
        store: Store,
        agents: Iterable[Agent[Any, Any]],
        settings: Settings,
        clock: Clock,
        observers: Sequence[Observer] = (),
        queues: Sequence[str] | None = None,
        performing: Performing | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.clock = clock
        self.threads = Threads(settings.threads)
        self.id = clock.new_id()
        self.agents = {Served(agent.name, agent.version): agent for agent in agents}
        self.queues = queues
        self.performing = performing
        self.run_settings = run_settings(settings, still=clock.still)
        self.ids = clock.ids()
        self.blobs: Mapping[str, bytes] = StoredBlobs(store)
        self.loop: asyncio.AbstractEventLoop
        self.observers: Sequence[Observer] = tuple(observers)
        self._drives: dict[str, Drive] = {}
        self.questions = OneAtATime(self)
        self.commits_here = False  # one run alone: it commits by itself, on the loop's own thread
        self._readers: set[asyncio.Future[Any]] = set()
        self._post_version = -1  # of the store, when the inbox was read last
        self._changes = 0  # how often something has happened that those who wait here should look at
        self._napping: set[asyncio.Future[None]] = set()
        self._beside: dict[str, set[asyncio.Future[None]]] = {}  # those who wait for a run that goes on here, by run
        self.entered: str | None = None  # the run whose agent is running right now
        self._serving: list[Stops] = []  # what ends each of those who serve the queue here
        self._draining = False
        self._callers = 0  # those who serve or drive a run here, and have not left yet
        self._closed = False
        self._lost = False  # nobody knows this worker any more
        self._stop_listening: Callable[[], None] = lambda: None
        self._forget_clock: Callable[[], None] = lambda: None
        self._asking = Asking()
        # Threads of their own: tools that take their time must not keep those waiting that look for work.
        self.closers: dict[Hashable, Closer] = {}  # of what calls have opened and left open: it ends with this worker
        self._transactors = ThreadPoolExecutor(_TRANSACTIONS, "perdure-transaction")
        self._transactions = 0  # under way
        self._last_reap_s = float("-inf")
        self._complained_s: dict[str, float] = {}
        self._wanted = 0  # runs that claims under way have asked for
        self._undriven: set[tuple[str, int]] = set()  # held at the last look under this epoch, and not driven
        self._kin = Kin(store, self.agents, settings.max_steps)
        self._last_kin_s = float("-inf")

    async def __aenter__(self) -> Worker:
        self.loop = asyncio.get_running_loop()
        outside.guard()
        forked.guard(self.loop)
        self.group = GroupCommit(self.store, self.loop, lambda: self.transacting)
        self._renewer = Renewer(self.store, self.id, self.clock, self.settings.lease_s, Watchdog(self.loop, self._inside))
        self._courier = Courier(self.store, self.settings, self.clock, self._asking, busy=lambda: self.transacting)
        self._tasks: list[asyncio.Task[None]] = []
        try:
            await self._ask(self._sign_on, lambda _: self._sign_off())
            self._renewer.start()
            self._stop_listening = await self._ask(lambda: self.store.listen(self._ring), lambda stop: stop())
        except BaseException:
            await self.__aexit__()  # threads that have begun would go on for a worker that nobody has
            raise
        self._tasks = [
            self.loop.create_task(self._watch(), name="perdure post"),
            self.loop.create_task(self._courier.run(), name="perdure notices"),
        ]
        for task in self._tasks:
            disown(task)  # they end when this worker is left, and not by themselves
        self._forget_clock = self.clock.on_jump(self._ring_of_clock)
        return self

    def _ring(self) -> None:
        """Somebody has committed something, in whatever thread or process."""
        self.loop.call_soon_threadsafe(self._rung)

    def _rung(self) -> None:
        self._look_for_post()
        self._courier.poke()
        self._notice()

    def _ring_of_clock(self) -> None:
        self.loop.call_soon_threadsafe(self._jumped)

    def _jumped(self) -> None:
        """The clock was set: what its alarms have been armed for may be due, or lie further away."""
        for drive in list(self._drives.values()):
            drive.look_at_clock()
        self._rung()

    def _inside(self) -> str:
        return "something that is not an agent: a tool, most likely" if self.entered is None else f"the agent of run {self.entered}"

    def abort(self) -> None:
        """Stop every drive at once; nothing more is written, as in a crash."""
        self._draining = True
        for drive in list(self._drives.values()):
            drive.abort()
        self._notice()

    async def __aexit__(self, *_: object) -> None:
        try:
            self.abort()
            self._stop_listening()
            self._forget_clock()
            await end(self._tasks, _CLOSE_S)
            await asyncio.gather(*(self._close(owner) for owner in list(self.closers)), return_exceptions=True)
        finally:
            try:
                await self._ask(self._leave)
            finally:
                self._closed = True
                self._transactors.shutdown(wait=False)
                for reader in self._readers.copy():
                    reader.cancel()  # nobody is left to hear the answer, and the loop may be closed when it comes
                self._asking.close()

    async def _close(self, owner: Hashable) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.closers.pop(owner)()
        except Exception as error:
            log.warning("%s could not be closed: %s: %s", owner, type(error).__name__, error)

    def _leave(self) -> None:
        # In one go: whoever is cancelled while it waits for this leaves nothing half done.
        self._renewer.stop()
        self.group.close()
        self._sign_off()

    def _sign_on(self) -> None:
        self.store.register(self.id, f"{socket.gethostname()}:{os.getpid()}", os.getpid(), self.clock.now(), list(self.agents), self.queues)

    def _sign_off(self) -> None:
        try:
            self.store.unregister(self.id, self.clock.now())
        except StoreError as error:
            log.info("could not sign off: %s; other workers notice it by themselves", error)

    def uncharged_beside(self, run_id: str, budget_of: str) -> Amounts:
        """What the other runs of this worker have recorded under that budget and not committed yet, so that no ledger has it."""
        total = NOTHING
        for other in self._drives.values():
            if other.run_id != run_id:
                total = total + other.uncharged(budget_of)
        return total

    def serve_too(self, agent: Agent[Any, Any]) -> None:
        """A child's agent, which came along with its parent's code."""
        served = Served(agent.name, agent.version)
        if served not in self.agents:
            self.agents[served] = agent
            self.loop.call_soon(self._sign_on_again)

    def is_short_of_room(self, queue: str) -> bool:
        """Whether a run that is held may be what keeps others from being claimed."""
        return len(self._drives) >= self.settings.concurrency or queue in self.settings.queues

    def _sign_on_again(self) -> None:
        def done(answer: Exception | None) -> None:
            if isinstance(answer, StoreError):
                log.info("others do not know yet what else is served here: %s", answer)
            elif answer is not None:
                raise answer

        self.consult(self._sign_on, done)

    # -- serving ------------------------------------------------------------------------------------------------------
    async def serve(self, *stops: asyncio.Event) -> None:
        """Drive whatever is ready until one of `stops` is set; then drain, unless somebody else goes on serving here."""
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
                    await self._claim()
                    await self._wait_for_change(stop, seen)
                except NotFound as lost:
                    log.warning("%s; signing on again", lost)  # somebody took this worker for dead and cleared it away
                    self._lost = True
                except StoreError as error:
                    self._complain("cannot look for runs", error)
                    await asyncio.wait(stopping, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                except Exception:  # an error of ours, or a row that makes no sense: the runs that are under way go on
                    log.exception("cannot look for runs; trying again in 1 s")
                    await asyncio.wait(stopping, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._serving.remove(stop)
            for one in stopping:
                one.cancel()
        if not self._is_served_on():
            await self._drain()

    def _is_served_on(self) -> bool:
        """Whether somebody serves the queue here who was not told to stop: what is under way goes on then."""
        return not all(stop.is_set() for stop in self._serving)

    def _wait_for(self, stop: asyncio.Event, stopped: Callable[[], None]) -> asyncio.Task[Literal[True]]:
        stopping = self.loop.create_task(stop.wait())
        disown(stopping)
        stopping.add_done_callback(lambda waited: None if waited.cancelled() else stopped())
        return stopping

    @property
    def draining(self) -> bool:
        """Whether it takes nothing up any more, and drives nobody's run to its end. That is for good."""
        return self._draining

    @property
    def drained(self) -> bool:
        """Whether that is over: everything is handed over, and everybody has left."""
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
        """Drive one run, and its children, here until it ends, needs a person, or waits for something from outside.

        Set, `stop` hands them over, unless somebody serves the queue here, too, and goes on with them.
        Without `wait` it is enough that it waits for anything but its children. With `by_turn` the limits of its queue count, as for
        any worker; otherwise somebody has asked for it by its name.
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
                await self._hand_over([drive for drive in self._drives.values() if _is_of(run_id, drive.run_id)])
            return await self._row(run_id)
        if self._courier.at_work or ((due := await self._ask(self.store.next_notice)) is not None and due <= self.clock.now()):
            await self._courier.flush(_FLUSH_NOTICES_S)  # whoever is asked for something must hear of it before this process leaves
        return row

    async def _drive_family(self, run_id: str, wait: bool, stop: asyncio.Event, limits: Mapping[str, Queue] | None) -> RunRow:
        seen = self._changes
        row = await self._take_up(run_id, limits)
        while row.status not in FINISHED and not stop.is_set() and not self._draining:
            try:
                if await self._look_after(row, wait, stop, limits, seen):
                    return row
                before = self._changes
                row = row if self._goes_on_here(run_id) else await self._row(run_id)
                seen = before  # not if the row could not be read: then the old one goes with what was seen before it
            except StoreUnavailable as error:
                # Whoever waits for the run goes on waiting: what is under way is kept, and the database will be back.
                self._complain(f"run {run_id}: cannot look after it", error)
                await asyncio.sleep(AGAIN_AFTER_S)
        return row

    def _goes_on_here(self, run_id: str) -> bool:
        drive = self._drives.get(run_id)
        return drive is not None and not drive.state.alive

    async def _look_after(self, row: RunRow, wait: bool, stop: asyncio.Event, limits: Mapping[str, Queue] | None, seen: int) -> bool:
        """Do what there is to do about the run and those below it, and wait for a change; True: there is nothing to wait for here.

        `seen` as in `_doze`, from before the row was read.
        """
        run_id = row.run_id
        if self._goes_on_here(run_id):
            await self._wait_beside(run_id)
            return False
        await self._reap()
        family = await self._ask(lambda: self.store.family(run_id))
        ready = [one for one in (row, *family) if self._is_ready(one)]
        if self._is_ready(row):
            await self._take_up_if_free(run_id, limits)
        elif ready:
            await self._claim_below(run_id)
        given_up = row.holder == self.id  # or about to be: that is written on a thread, and its status is not known before
        if ready or given_up or self._is_driven(row, family) or await self._find_kin():
            await self._doze(_REAP_EVERY_S, stop, seen)
            return False
        wakes = [at for one in (row, *family) if (at := await self._goes_on_at(one)) is not None]
        if row.holder is not None or not wakes or not wait:
            # What was read in between may be newer than the row: the last child may have ended, and the run be ready for that.
            return await self._row(run_id) == row
        await self._doze(min(max((min(wakes) - self.clock.now()) / 1e6, 0.0), 60.0), stop, seen)
        return False

    async def _claim_below(self, run_id: str) -> None:
        free = min(self.settings.concurrency - len(self._drives) - self._wanted, 100)
        if free > 0 and not self.transacting:
            served = list(self.agents)
            await self._take(lambda: self.store.claim(self.id, served, free, self.clock.now(), below=run_id), free)

    async def _goes_on_at(self, row: RunRow) -> int | None:
        """When it goes on by itself. That an approval expires is not that: it waits for a person, who may take that long."""
        if row.ready_at is None or row.holder is not None:
            return None
        if row.status == "waiting_approval":
            expiring = ApprovalFilter(run_id=row.run_id, limit=1)  # the one that expires first
            asked = await self._ask(lambda: self.store.approvals(expiring))
            if asked and asked[0].standing.request.expires_at == row.ready_at:
                return None
        return row.ready_at

    def _is_ready(self, row: RunRow) -> bool:
        ready = row.holder is None and row.ready_at is not None and row.ready_at <= self.clock.now()
        return ready and row.run_id not in self._drives and Served(row.agent, row.version) in self.agents

    def _is_driven(self, row: RunRow, family: Sequence[RunRow]) -> bool:
        """Whether something is being done about it: here, or, for its children, anywhere."""
        return row.run_id in self._drives or any(one.run_id in self._drives or one.holder is not None for one in family)

    async def _take_up(self, run_id: str, limits: Mapping[str, Queue] | None = None) -> RunRow:
        """Claim the run by its name, whether it is ready or not; with limits only if its queue has room."""
        while self.transacting:
            # A claim needs the write lock, which a transaction's tool may hold for long: the loop must not wait for it.
            await self._nap(self.settings.poll_s)
        row = await self._row(run_id)
        self._check_served(row)
        if row.status not in FINISHED and run_id not in self._drives:  # else somebody here drives it already: wait along
            if row.holder is not None:
                self._last_reap_s = float("-inf")  # by somebody who may be dead: looked at now, and not at the next round
                await self._reap()
            served = list(self.agents)
            try:
                claimed = await self._take(lambda: self.store.claim(self.id, served, 1, self.clock.now(), run_id=run_id, limits=limits))
                if claimed:
                    return claimed[0].row
            except RunEnded:
                pass  # somebody else has finished it since we looked
            except AlreadyRunning:
                if (row := await self._row(run_id)).holder not in (None, self.id):
                    raise
                return row  # this worker's claim of it was still on its way back from the store: wait along
        return await self._row(run_id)

    async def _take_up_if_free(self, run_id: str, limits: Mapping[str, Queue] | None) -> None:
        if len(self._drives) >= self.settings.concurrency:
            return
        try:
            await self._take_up(run_id, limits)
        except (AlreadyRunning, Conflict):
            pass  # another worker was faster, or somebody has paused it

    def _check_served(self, row: RunRow) -> None:
        versions = [served.version for served in self.agents if served.agent == row.agent]
        if not versions:
            known = ", ".join(sorted({served.agent for served in self.agents})) or "none"
            raise UnknownAgent(f"run {row.run_id} belongs to agent {row.agent!r}, which is not served here (only {known})")
        if row.version not in versions and row.status not in FINISHED:
            code = f"FILE.py:{row.agent}"
            way_out = f"use the old code, or let this code go on with it: {shell.command('resume', row.run_id, code)} --adopt"
            if any(agent.keeps_its_plan for served, agent in self.agents.items() if served.agent == row.agent):
                plan, tools, file = (row.target or code).partition(" --tools ")
                way_out = (
                    f"a run keeps its plan: use the old plan and tools, or end it ({shell.command('cancel', row.run_id)}) and start anew; "
                    f"only if the plan is the same, and its tools are not, this can go on with it: "
                    f"{shell.command('resume', row.run_id, plan)}{tools}{shell.quote(file) if file else ''} --adopt"
                )
            raise WrongVersion(
                f"run {row.run_id} was begun with version {row.version} of agent {row.agent}, and here is {' and '.join(versions)}; {way_out}"
            )

    async def _row(self, run_id: str) -> RunRow:
        row = await self._ask(lambda: self.store.get(run_id))
        if row is None:
            raise NotFound(f"there is no run {run_id} in {shown_url(self.store.url)}; `perdure list` shows those that there are")
        return row

    async def _drain(self) -> None:
        """Take nothing up any more, and hand every run over."""
        self._draining = True
        self._notice()
        while self._drives:  # a claim that was under way may bring another one
            await self._hand_over(list(self._drives.values()))

    async def _hand_over(self, drives: Sequence[Drive]) -> None:
        """Give these up at a step boundary; what does not get there in time is ended and recorded as what it is."""
        for drive in drives:
            drive.drain()
        for drive in await self._left(drives, self.settings.drain_timeout_s):
            log.warning("run %s: still at work after %.0f s; ending its calls", drive.run_id, self.settings.drain_timeout_s)
            drive.stop_attempts()
        for drive in await self._left(drives, self.settings.cancel_grace_s + 5.0):
            log.error("run %s: could not be handed over cleanly; others take it over as that of a silent worker", drive.run_id)
            drive.abort()
            self._let_go(drive.run_id, drive.lease.epoch)

    def _let_go(self, run_id: str, epoch: int) -> None:
        """Again and again until it is no longer held: this worker lives on, and nobody else may claim what it holds (G6)."""

        def done(answer: int | Exception) -> None:
            if isinstance(answer, Exception):
                self._complain("cannot give runs up", answer if isinstance(answer, StoreError) else StoreError(repr(answer)))
                self.loop.call_later(AGAIN_AFTER_S, self._let_go, run_id, epoch)

        if not self._closed:
            self.consult(lambda: self.store.let_go(self.id, [(run_id, epoch)], self.clock.now()), done)

    async def _left(self, drives: Sequence[Drive], seconds: float) -> list[Drive]:
        """Those that have not come to rest when the time is over; as soon as all have, none."""
        deadline = self.loop.time() + seconds
        # By the drive and not by the run, which somebody here may have taken up again by then.
        for drive in drives:
            while self._drives.get(drive.run_id) is drive and (left_s := deadline - self.loop.time()) > 0:
                await self._nap(left_s)
        return [drive for drive in drives if self._drives.get(drive.run_id) is drive]

    # -- claiming -----------------------------------------------------------------------------------------------------
    async def _ask(self, question: Callable[[], T], unwanted: Callable[[T], None] | None = None) -> T:
        """The store's answer: here, which is quickest; on a thread where it crosses a network, since a server may not answer for long."""
        return await self._asking.ask(question, unwanted) if self.store.remote else question()

    async def _claim(self) -> None:
        await self._claim_ready()
        if await self._reap():  # afterwards: somebody waits for what is ready now, and the dead wait for nobody
            await self._claim_ready()

    async def _claim_ready(self) -> None:
        if self.loop.time() - self._last_kin_s >= _FIND_KIN_EVERY_S:
            await self._find_kin()
        if not self._renewer.is_heard():
            return  # to everybody else this worker is dead: what it claimed now would be taken from it at once, and so on for ever
        served = list(self.agents)
        while (free := self.settings.concurrency - len(self._drives) - self._wanted) > 0 and not self._draining and not self.transacting:
            wanted = min(free, 100)
            if len(await self._take(partial(self._claim_some, served, wanted), wanted)) < wanted:
                return

    def _claim_some(self, served: Sequence[Served], wanted: int) -> Sequence[Claimed]:
        if not self.store.remote:
            ready = self.store.next_ready(served, self.queues)
            if ready is None or ready > self.clock.now():
                return ()  # found out by reading: a claim takes the write lock, which others may need
        limits = self.settings.queues
        return self.store.claim(self.id, served, wanted, self.clock.now(), queues=self.queues, limits=limits)

    async def _take(self, claim: Callable[[], Sequence[Claimed]], wanted: int = 1) -> Sequence[Claimed]:
        """Claim, and begin what was claimed. Whoever is cancelled meanwhile does not stop that: the runs would be held and not driven."""
        if not self.store.remote:
            claimed, post = self._claimed(claim())
            self._begin(claimed, post)
            return claimed
        seen = self.store.version()
        post_is_read = not self._drives or seen == self._post_version
        asked = self._asking.start(lambda: self._claimed(claim()))  # at once, and not when the loop comes to it
        self._wanted += wanted

        async def begin() -> Sequence[Claimed]:
            try:
                claimed, post = await asked
                if post_is_read and claimed and all(one.post is not None for one in claimed):
                    self._post_version = seen + 1  # with the claim itself; whatever else has happened makes it more
                self._begin(claimed, post)
                return claimed
            finally:
                self._wanted -= wanted

        taking = asyncio.ensure_future(begin())
        self._readers.add(taking)
        taking.add_done_callback(self._readers.discard)
        taking.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked, should nobody wait any more
        return await asyncio.shield(taking)

    def _claimed(self, claimed: Sequence[Claimed]) -> tuple[Sequence[Claimed], Sequence[InboxRow]]:
        """With what has arrived for them, read before any is driven: one that came to rest without its post would be ready at once, for ever."""
        if all(one.post is not None for one in claimed):
            return claimed, [row for one in claimed for row in one.post or ()]
        try:
            return claimed, self.store.inbox(self.id)
        except StoreError as error:
            self._complain("cannot look for post", error)
            return claimed, ()

    async def _find_kin(self) -> bool:
        """Whether there are children that only their parents can name; those are asked next, and then it looks again."""
        self._last_kin_s = self.loop.time()
        parents = await self._ask(lambda: self._kin.parents_to_ask(self.clock.now()))
        for run_id in parents:
            self.loop.call_soon(self._meet_kin, run_id)  # a plain callback: an agent is entered there
        return bool(parents)

    def _meet_kin(self, run_id: str) -> None:
        for agent in self._kin.agents_of(run_id):
            self.serve_too(agent)
        self._last_kin_s = float("-inf")  # their own children may be next
        self._notice()

    async def _reap(self) -> bool:
        """Whether runs were taken from workers that are gone, or let go of here."""
        if self.loop.time() - self._last_reap_s < _REAP_EVERY_S:
            return False
        self._last_reap_s = self.loop.time()
        lost = await self._ask(lambda: self.store.reap(self.id, round(self._renewer.silence() * 1e6), self.clock.now()))
        return await self._let_go_of_undriven() or lost > 0

    async def _let_go_of_undriven(self) -> bool:
        """Give up what this worker holds and does not drive (G6): a claim has arrived, and its answer has not. Nobody else ever would."""
        held = await self._ask(lambda: self.store.held(self.id))
        if self._wanted:
            return False
        undriven = {(run_id, epoch) for run_id, epoch in held if run_id not in self._drives}
        # Seen before under the same epoch: the answer is older than the drives, and what comes and goes is held anew each time.
        stranded, self._undriven = sorted(undriven & self._undriven), undriven
        if stranded:
            log.warning("%s: held here and driven by nobody; given up", ", ".join(f"run {run_id}" for run_id, _ in stranded))
            await self._ask(lambda: self.store.let_go(self.id, stranded, self.clock.now()))
        return bool(stranded)

    def _begin(self, claimed: Sequence[Claimed], post: Sequence[InboxRow]) -> None:
        taken_over = [one.lease.run_id for one in claimed if one.row.crashes]
        if taken_over:
            log.info("took over from a worker that is gone: %s", ", ".join(f"run {run_id}" for run_id in taken_over[:10]))
        for one in claimed:
            self._begin_one(one)
            if self._draining:  # it began while the claim was under way
                self._drives[one.lease.run_id].drain()
        self._wake()
        self._hand_out(post)

    def _begin_one(self, claimed: Claimed) -> None:
        run_id = claimed.lease.run_id
        before = self._drives.get(run_id)
        if before is not None:
            before.abort()  # it lost the run while we slept, and has not noticed yet
        drive = self._drives[run_id] = Drive(claimed, self.agents[Served(claimed.row.agent, claimed.row.version)], self)
        self._see_who_commits()
        came_along = claimed.events is not None and not may_owe(claimed.events[0].body)
        if came_along or (claimed.row.seq <= _READ_HERE and not self.store.remote):
            # A plain callback, never inside a task: from CPython 3.14 on an agent's tasks cannot be entered there. And one for each run:
            # a signal that strikes in one of them (Ctrl-C) must not keep the others from beginning, should the loop go on.
            self.loop.call_soon(self._begin_drive, drive, claimed, None)
            return
        reading = self._asking.start(lambda: self._read(claimed))
        self._readers.add(reading)
        reading.add_done_callback(lambda done: self._begin_drive(drive, claimed, done))

    def _read(self, claimed: Claimed) -> tuple[Sequence[Event], Debts]:
        events = self.store.read(claimed.lease.run_id) if claimed.events is None else claimed.events
        return events, debts_of(self.store, events[0].body)

    def _begin_drive(self, drive: Drive, claimed: Claimed, reading: asyncio.Future[tuple[Sequence[Event], Debts]] | None) -> None:
        self._readers.discard(reading)
        if drive.over:
            return
        try:
            drive.begin(*(self._read(claimed) if reading is None else reading.result()))
            self._wake_beside(drive.run_id)  # it may have children from before
        except Exception as error:
            self.broke(drive, error)

    def broke(self, drive: Drive, error: Exception) -> None:
        """An error of ours, or of the store, in one drive: stop it as a crash would, give that run up, and go on with the others."""
        if isinstance(error, Fenced):
            log.warning("%s; this worker stops working on it", error)
        else:
            log.error("run %s: cannot be driven here: %s", drive.run_id, error, exc_info=None if isinstance(error, PerdureError) else error)
        drive.abort()
        self._surrender(drive, error)

    def _surrender(self, drive: Drive, error: Exception) -> None:
        """Give the run up, again and again until it is no longer this worker's: nobody else may claim it as long as it is (G6)."""

        def give_up() -> Appended | None:
            row = self.store.get(drive.run_id)
            if row is None or (row.holder, row.epoch) != (self.id, drive.lease.epoch):
                return None
            (answer,) = self.store.append([surrender(drive.lease, row, error, self.clock)])
            return answer

        def done(answer: Appended | Exception | None) -> None:
            if answer is None:
                return  # somebody else's, or given up before
            if isinstance(answer, Committed):
                log.info("run %s: given up", drive.run_id)
                return
            # Refused as well: an append of ours whose answer was lost may have arrived between the look and the write.
            ours = answer if isinstance(answer, Exception) and not isinstance(answer, PerdureError) else None
            words = "run %s: cannot be given up yet: %s; trying again in %.0f s"
            level = logging.DEBUG if isinstance(answer, StoreUnavailable) and self.store.remote else logging.ERROR
            log.log(level, words, drive.run_id, answer if isinstance(answer, Exception) else answer.why, AGAIN_AFTER_S, exc_info=ours)
            self.loop.call_later(AGAIN_AFTER_S, self._surrender, drive, error)

        if not self._closed:
            self.consult(give_up, done)

    # -- waiting ------------------------------------------------------------------------------------------------------
    async def _wait_for_change(self, stop: Stops | asyncio.Event, seen: int) -> None:
        """Until a run of ours has come to rest, something was committed by another process, or the next run is ready; `seen` as in `_doze`."""
        full = len(self._drives) >= self.settings.concurrency
        served = list(self.agents)
        next_ready = None if full else await self._ask(lambda: self.store.next_ready(served, self.queues))
        left_s = _REAP_EVERY_S if next_ready is None else (next_ready - self.clock.now()) / 1e6
        if left_s <= 0:
            # A run is ready that this worker may not take yet: its queue is full, or it is a suspect and this
            # worker's group of suspects is. Without a real wait here nothing else would ever run.
            left_s = self.settings.poll_s
        await self._doze(min(left_s, _REAP_EVERY_S), stop, seen)

    async def _doze(self, seconds: float, stop: Stops | asyncio.Event, seen: int) -> None:
        """Until `seconds` have passed, a run of ours has come to rest, or the database has changed (asked every poll_s).

        `seen`: how many changes there had been before the caller looked. What comes while it looks must not be slept through, whoever
        else has heard of it.
        """
        until = self.loop.time() + seconds
        version = self.store.version()
        left_s = seconds
        while self._changes == seen and not stop.is_set():
            await self._nap(min(max(left_s, 0.0), self.settings.poll_s))  # at least once, or the loop would not get to anything else
            left_s = until - self.loop.time()
            if self.store.version() != version or left_s <= 0:
                break

    async def _wait_beside(self, run_id: str) -> None:
        """Until that run has come to rest or has a child, or for a while. Of thousands who wait each hears of its own run alone."""
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
        # One future each: several runs are driven by name at the same time, and each of their waits ends by itself.
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
        # They leave the set when they get to it. Many runs may come to rest before that, and nobody is to be woken for each of them.
        while self._napping:
            _end_nap(self._napping.pop())

    def _notice(self) -> None:
        self._changes += 1
        self._wake()

    async def _watch(self) -> None:
        """Hand what arrives from outside to the drives, as long as there are any, should nobody have rung."""
        while True:
            await self._nap(self.settings.poll_s if self._drives else _REAP_EVERY_S)
            try:
                if self._drives and (now := self.store.version()) != self._post_version:
                    self._hand_out(await self._ask(lambda: self.store.inbox(self.id)))
                    self._post_version = now  # not before: post that could not be read is looked for again
            except StoreError as error:
                self._complain("cannot look for post", error)

    def _complain(self, what: str, error: StoreError) -> None:
        """Once in a while, however often it happens; a server that is away says so itself, when it goes and when it is back."""
        now_s = time.monotonic()
        quiet = now_s - self._complained_s.get(what, float("-inf")) < _COMPLAIN_EVERY_S
        if not quiet:
            self._complained_s[what] = now_s
        away = isinstance(error, StoreUnavailable) and self.store.remote
        log.log(logging.DEBUG if quiet or away else logging.ERROR, "%s: %s; trying again", what, error)

    def _look_for_post(self) -> None:
        if not self._drives:
            return
        if self.store.remote:
            self._wake()  # and `_watch` looks, since something has changed
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
        """Durable, then done(answer). One run alone commits right here (most often by itself, see `commits_here`); many share commits."""
        if len(self._drives) > 1 or self.transacting:
            # A transaction's tool may hold the write lock for long: then the writer's thread waits for it, and not the loop.
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
        """Run a transaction on a thread, then done(answer) on the loop."""

        asked_s = time.monotonic()

        def begin() -> tuple[Appended, Any]:
            # All threads may have been busy for long: what that took counts as well, since an approval may have expired meanwhile (G9).
            waited_us = round((time.monotonic() - asked_s) * 1e6)
            return self.store.transact(structs.replace(head, at=head.at + waited_us), work)

        def finish(future: asyncio.Future[Any]) -> None:
            self._transactions -= 1
            self._see_who_commits()
            if future.cancelled():
                return  # the worker has ended, and its drives with it
            error = future.exception()
            done(future.result() if error is None else error if isinstance(error, Exception) else PerdureError(repr(error)))

        self._transactions += 1
        self._see_who_commits()
        future = self.loop.run_in_executor(self._transactors, begin)
        self._readers.add(future)
        future.add_done_callback(self._readers.discard)
        future.add_done_callback(finish)

    def decide(self, approval: str, judgement: Judgement, done: Callable[[Exception | None], None]) -> None:
        """Settle an approval, then done(error or None). What follows reaches the drive through its inbox."""
        event_id, now = self.clock.new_id(), self.clock.now()
        self._write(lambda: self.store.decide(approval, judgement, event_id=event_id, now=now), done)

    def cancel_run(self, run_id: str, by: str, reason: str, done: Callable[[Exception | None], None]) -> None:
        """Ask another run to stop, then done(error or None). One that has ended, or was asked before, is fine."""
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

    def let_go_on(self, run_id: str) -> None:
        """Send a run that has stopped for its budget back to work: there is room in it again."""
        body = RunUnpaused(by="perdure", note="its budget was raised while it stopped")
        event_id, now = self.clock.new_id(), self.clock.now()

        def expect(row: RunRow) -> None:
            if row.status != "needs_attention" or row.attention != "budget":
                raise Conflict(f"run {run_id} is {row.status}: somebody else has let it go on")

        def done(error: Exception | None) -> None:
            match error:
                case StoreError():
                    self.loop.call_later(AGAIN_AFTER_S, self.let_go_on, run_id)
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
        """Short work on the store, then done(answer or error).

        Right here; on a thread while a transaction's tool has the write lock, or where it crosses a network.
        """

        def finish(future: asyncio.Future[T]) -> None:
            self._readers.discard(future)
            if not future.cancelled():
                error = future.exception()
                done(future.result() if error is None else error if isinstance(error, Exception) else PerdureError(repr(error)))

        if self.transacting or self.store.remote:
            working = self._asking.start(work)
            self._readers.add(working)
            working.add_done_callback(finish)
            return
        try:
            answer: T | Exception = work()
        except Exception as error:
            answer = error
        done(answer)

    def _see_who_commits(self) -> None:
        self.commits_here = len(self._drives) == 1 and not self._transactions and not self.store.remote

    @property
    def transacting(self) -> bool:
        """Whether a tool of this process is inside a transaction, and so in possession of the write lock, where there is only one."""
        return self._transactions > 0 and not self.store.remote

    def has_held_since(self, then_s: float) -> bool:
        """Whether nobody can have taken a run from this worker between that moment and now, for want of a sign of life."""
        return self._renewer.has_held_since(then_s)

    def beat(self) -> float:
        """A sign of life of this worker, from any thread; when it was asked for."""
        return self._renewer.beat()

    def committed(self, run_id: str, sealed: Sequence[Sealed]) -> None:
        """These events of a run of ours are durable."""
        for one in sealed:
            kind = type(one.event.body)
            if kind in TOLD:
                self._courier.poke()
            elif kind is ChildStarted:
                self._wake_beside(run_id)
        events = [one.event for one in sealed]
        for observe in self.observers:
            try:
                observe(run_id, events)
            except Exception:
                log.exception("run %s: whoever looks on has failed; the run goes on", run_id)

    def rested(self, drive: Drive) -> None:
        if self._drives.get(drive.run_id) is drive:
            del self._drives[drive.run_id]
            self._see_who_commits()
        self._wake_beside(drive.run_id)
        self._notice()


def _end_nap(nap: asyncio.Future[None]) -> None:
    if not nap.done():
        nap.set_result(None)


def _is_of(run_id: str, other: str) -> bool:
    """Whether the other one is that run, or below it."""
    return other == run_id or other.startswith(f"{run_id}/")
