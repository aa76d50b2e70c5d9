"""The local engine: a store and a worker in this process. The worker begins when this process drives its first run.

`Starts` creates all runs that are started in the same iteration of the loop in one commit. So a caller that starts a
thousand runs together (`asyncio.gather`) waits for a few disk syncs, not for a thousand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from msgspec import structs

from perdure import shell
from perdure.agent import Agent
from perdure.core.approval import Vote
from perdure.core.codec import Payload
from perdure.core.events import (
    AnyBody,
    Event,
    FrameChanged,
    RunAdopted,
    RunCancelled,
    RunPaused,
    RunRequeued,
    RunSucceeded,
    RunUnpaused,
    SignalReceived,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
)
from perdure.core.state import RunState, fold
from perdure.core.transitions import Reached, is_news
from perdure.engine.api import Activity, Reading, RunResult, no_such_run
from perdure.engine.clock import Clock
from perdure.engine.counts import Counts
from perdure.engine.local.attempts import is_inside_call
from perdure.engine.local.callers_connection import driver_connection, to_the_end
from perdure.engine.local.sandbox import refuse_app
from perdure.engine.local.watch import PAGE, Watch
from perdure.engine.local.worker import Observer, Worker
from perdure.engine.threads import ReadingThreads
from perdure.errors import AlreadyRunning, Conflict, InvalidInput, StoreCorrupt, StoreError, StoreUnavailable, UnknownAgent
from perdure.settings import Settings
from perdure.store.api import (
    FINISHED,
    ApprovalRow,
    JournalStore,
    NewFork,
    NewRun,
    OpenAttempt,
    ProgressRow,
    Reopen,
    RunRow,
    ScheduleChange,
    Served,
    Status,
    Store,
    Watched,
    serves,
)
from perdure.store.open import is_postgres, open_store
from perdure.tool.artifact import ids_in
from perdure.tool.secret import Resolver

if TYPE_CHECKING:
    from perdure.otel import Telemetry

Created = tuple[RunRow, bool]


class Starts:
    """Creates runs in shared commits. It is used only on the loop's own thread, and only with a local store."""

    def __init__(self, store: Callable[[], JournalStore]) -> None:
        self._store = store
        self._waiting: list[tuple[NewRun, asyncio.Future[Created]]] = []

    async def create(self, new: NewRun) -> Created:
        """Like Store.create_run. When this returns, the run is durable.

        If the caller is cancelled before the commit, no run is created.
        """
        loop = asyncio.get_running_loop()
        created: asyncio.Future[Created] = loop.create_future()
        self._waiting.append((new, created))
        if len(self._waiting) == 1:
            loop.call_soon(self._create_all)
        return await created

    def _create_all(self) -> None:
        waiting, self._waiting = [(new, created) for new, created in self._waiting if not created.done()], []
        if len(waiting) > 1:
            try:
                answers = self._store().create_runs([new for new, _ in waiting])
            except Exception:  # no run was created: create the runs one by one, since only one of them may be wrong
                pass
            else:
                for (_, created), answer in zip(waiting, answers, strict=True):
                    _tell(created, answer)
                return
        for new, created in waiting:
            try:
                _tell(created, self._store().create_run(new))
            except Exception as error:
                _tell(created, error)


def _tell(created: asyncio.Future[Created], answer: Created | Exception) -> None:
    if created.done():
        return  # a signal handler (Ctrl-C) has cancelled this caller during the commit: answer the other callers
    if isinstance(answer, Exception):
        created.set_exception(answer)
    else:
        created.set_result(answer)


# -- the engine


log = logging.getLogger("perdure")
T = TypeVar("T")
_TRY_AGAIN_S = 1.0


class LocalEngine:
    """The engine for runs in a SQLite file or a PostgreSQL database, which perdure's own workers drive."""

    def __init__(
        self,
        url: str,
        agents: Mapping[Served, Agent[Any, Any]],
        settings: Settings,
        clock: Clock,
        observers: Sequence[Observer],
        queues: Sequence[str] | None,
        telemetry: Telemetry | None = None,
        secrets: Resolver | None = None,
    ) -> None:
        self._url = url
        self._secrets = secrets
        self._agents = agents
        self._settings = settings
        self._clock = clock
        self._observers = observers
        self._queues = queues
        self._telemetry = telemetry
        self._lease_us = round(settings.lease_s * 1e6)
        self._store: Store | None = None
        self._starts = Starts(lambda: self.store)
        self._worker: Worker | None = None
        self._counts = Counts()
        self._asking = ReadingThreads()
        self._watch = Watch(lambda: self.store, self._ask, clock, settings.poll_s, self._reap)
        self._opening = asyncio.Lock()
        self._works: list[asyncio.Event] = []  # the stop event of each `work` under way
        self._ends_next = False  # `drain` was called while no `work` was under way: the next `work` ends at once

    async def __aenter__(self) -> Self:
        self._asking = ReadingThreads()
        try:
            self._store = await self._open()
        except BaseException:
            self._asking.close()
            raise
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await self._watch.close()
            self.abort()
            async with self._opening:  # wait, if a new worker is just replacing another: the new one must end too
                if self._worker is not None:
                    await self._worker.__aexit__(*exc)
        finally:
            self._worker = None
            if self._store is not None:
                store, self._store = self._store, None
                try:
                    await self._asking.ask(store.close) if store.remote else store.close()
                finally:
                    self._asking.close()

    async def _open(self) -> Store:
        refuse_app()
        options: dict[str, Any] = {"synchronous": self._settings.synchronous, "busy_s": self._settings.answer_s}
        opening = partial(open_store, self._url, connections=self._settings.connections, **options)
        # A remote store is opened on a thread, since the open may wait for a server that is just starting.
        return await self._asking.ask(opening, lambda late: late.close()) if is_postgres(self._url) else opening()

    @property
    def reading(self) -> Reading:
        return self.store

    @property
    def store(self) -> Store:
        refuse_app()
        if self._store is None:
            raise InvalidInput("the app is not open: use it in an `async with Perdure(…) as app:` block")
        return self._store

    async def _ask(self, question: Callable[[], T]) -> T:
        """The store's answer, without blocking the loop for long.

        A local store is asked on this thread, which is fastest. A remote store is asked on another thread, because it
        may be slow.
        """
        return await self._asking.ask(question) if self.store.remote else question()

    async def _write(self, work: Callable[[], T]) -> T:
        """Like `_ask`. While a tool's transaction has the write lock, which may take long, always use a thread."""
        return await self._asking.ask(work) if self._is_locked else await self._ask(work)

    @property
    def _is_locked(self) -> bool:
        return self._worker is not None and self._worker.transacting

    # -- runs, from outside -------------------------------------------------------------------------------------------
    async def start(self, new: NewRun, connection: Any = None) -> tuple[RunRow, bool]:
        if connection is not None:
            return await self._start_on(connection, new)
        if self.store.remote or self._is_locked:
            return await self._write(lambda: self.store.create_run(new))
        return await self._starts.create(new)

    async def _start_on(self, connection: Any, new: NewRun) -> tuple[RunRow, bool]:
        store = self.store
        async with driver_connection(connection) as driver:
            if not store.remote:
                # Without a pause: another task that shares the connection cannot end its transaction in the middle.
                return store.create_run_on(driver, new)
            return await to_the_end(self._asking.start(lambda: store.create_run_on(driver, new)))

    async def post(
        self, run_id: str, body: AnyBody, *, call: int | None = None, seen: int | None = None, tenant: str | None = None
    ) -> None:
        event_id = self._clock.new_id()

        def expect(row: RunRow) -> None:
            if tenant not in (None, row.tenant):
                raise no_such_run(run_id)
            if seen is not None and row.holder is None and row.seq != seen:
                raise _moved_on(row, seen)
            if not is_news(self._reached(row, body), body):
                raise _AskedBefore

        def deliver() -> None:
            if tenant is not None and (row := self.store.get(run_id)) is not None and row.tenant != tenant:
                # Check the tenant first: otherwise RunEnded would tell the caller that another tenant has a run with
                # this id.
                raise no_such_run(run_id)
            status: Status | None = None
            if isinstance(body, _GO_ON) and (state := self._state(run_id)).cancel:
                # A call in doubt of a restored run can be settled, but that does not let the run go on.
                status = None if state.is_restored and isinstance(body, ToolCallResolved) else "cancelling"
            if isinstance(body, SignalReceived) and (named := ids_in(body.payload.inline or b"")):
                # Do this before the post: the signal wakes the run, and the run may open the artifacts at once.
                self.store.use_artifacts(run_id, named)
            # A signal is news to every unfinished run, so nothing about the run has to be checked before the post.
            expected = None if isinstance(body, SignalReceived) and tenant is None and seen is None else expect
            self.store.post(run_id, call, body, event_id=event_id, now=self._clock.now(), status=status, expect=expected)

        try:
            await self._write(deliver)
        except _AskedBefore:
            pass  # a repeated request changes nothing

    async def vote(self, approval: str, vote: Vote, *, tenant: str | None = None) -> ApprovalRow:
        event_id = self._clock.new_id()
        return await self._write(lambda: self.store.decide(approval, vote, event_id=event_id, now=self._clock.now(), tenant=tenant))

    async def end(self, run_id: str, body: RunCancelled, *, seen: int | None = None) -> None:
        event_id = self._clock.new_id()

        def expect(row: RunRow) -> None:
            if seen is not None and row.seq != seen:
                raise _moved_on(row, seen)

        await self._write(lambda: self.store.end(run_id, body, event_id=event_id, now=self._clock.now(), expect=expect))
        if self._telemetry is not None:
            try:
                self._telemetry.ended_by_force(await self._ask(lambda: self.store.read_life(run_id)))
            except StoreError as error:  # the run has ended: the caller must not take this for a failure of the end
                log.info("run %s: the span of its end is lost: %s", run_id, error.in_full())

    async def reopen(self, runs: Sequence[Reopen]) -> None:
        await self._write(lambda: self.store.reopen(runs, now=self._clock.now()))

    async def fork(self, new: NewFork) -> None:
        await self._write(lambda: self.store.insert_fork(new))

    async def change_schedule(self, change: ScheduleChange) -> Literal["done", "moved_on", "taken"]:
        return await self._write(lambda: self.store.change_schedule(change))

    def _reached(self, row: RunRow, body: AnyBody) -> Reached:
        """The facts about the run that `is_news` needs.

        Only the facts that the body needs are read, because this runs inside a transaction.
        """
        held = row.holder is not None
        driven = held and isinstance(body, RunAdopted | FrameChanged) and row.holder in self._alive()
        pausing = held and isinstance(body, RunUnpaused) and self._is_pausing(row)
        return Reached(row.run_id, row.status, row.version, driven=driven, pausing=pausing)

    def _alive(self) -> set[str]:
        return {worker.worker for worker in self.store.workers(self._clock.now(), self._lease_us) if worker.alive}

    def _is_pausing(self, row: RunRow) -> bool:
        """Was the run asked to pause, and is it still active because its attempts have to end first?"""
        on_its_way = any(post.run_id == row.run_id and isinstance(post.body, RunPaused) for post in self.store.inbox(str(row.holder)))
        return on_its_way or self._state(row.run_id).paused is not None

    def _state(self, run_id: str) -> RunState:
        if self.store.get(run_id) is None:
            raise no_such_run(run_id)
        return fold(self.store.read(run_id))

    # -- driving runs here --------------------------------------------------------------------------------------------
    async def drive(
        self, run_id: str, *, wait: bool = True, stop: asyncio.Event | None = None, agents: Sequence[Agent[Any, Any]] | None = None
    ) -> RunRow:
        if agents is not None:
            async with self._new_worker(agents, None) as own:
                return await own.drive_one(run_id, wait=wait, stop=stop)
        if is_inside_call() and self._worker is not None and self._worker.draining:
            # A new worker would begin only after the drain, and the drain waits for this very tool: a deadlock.
            worker = self._worker
        else:
            worker = await self._working()
        return await worker.drive_one(run_id, wait=wait, stop=stop)

    async def work(self, *, stop: asyncio.Event | None = None) -> None:
        """Serve until `stop` is set or the engine is drained.

        If there are several calls at a time, each has its own `stop`, and the last call that ends releases the runs.

        After that, `work` can be called again.
        """
        ended = asyncio.Event()
        if self._ends_next:
            ended.set()
        self._ends_next = False
        self._works.append(ended)
        try:
            worker = await self._working()
            await worker.serve(*([ended] if stop is None else [ended, stop]))
        finally:
            self._works.remove(ended)

    def drain(self) -> None:
        self._ends_next = not self._works
        for ended in self._works:
            ended.set()

    def abort(self) -> None:
        if self._worker is not None:
            self._worker.abort()

    async def _working(self) -> Worker:
        """The worker. After a drain it is a new worker, which does not get runs that the old worker still holds."""
        refuse_app()
        async with self._opening:
            if self._draining and self._worker is not None:
                await self._worker.until_drained()
                drained, self._worker = self._worker, None
                await drained.__aexit__()
            if self._worker is None:
                if not self._agents:
                    raise UnknownAgent("no agents to drive: pass them, Perdure(url, agents=[…])")
                self._worker = await self._new_worker(self._agents.values(), self._queues).__aenter__()
            return self._worker

    def _new_worker(self, agents: Iterable[Agent[Any, Any]], queues: Sequence[str] | None) -> Worker:
        return Worker(
            self.store,
            agents,
            self._settings,
            self._clock,
            self._observers,
            queues,
            counts=self._counts,
            telemetry=self._telemetry,
            secrets=self._secrets,
        )

    def activity(self) -> Activity:
        worker = self._worker
        return Activity(self._counts) if worker is None else Activity(self._counts, worker.id, worker.driven, draining=worker.draining)

    @property
    def _draining(self) -> bool:
        return self._worker is not None and self._worker.draining

    def _may_drive(self, before: Worker | None) -> bool:
        """May a caller that waits for a run drive the run in this process?

        A caller that was already waiting when a drain began must not claim again a run that the drain releases. A
        caller that came later may claim it, after the drain. For such a caller, `before` is the draining worker.
        """
        return not self._draining or (self._worker is before and before is not None and before.drained)

    # -- waiting for runs ---------------------------------------------------------------------------------------------
    async def result(self, run_id: str) -> RunResult:
        row = await self._until_rest(run_id)
        if row.status != "succeeded":
            return RunResult(row)
        body = (await self._patiently(run_id, lambda: self.store.read(run_id, row.seq - 1)))[-1].body
        assert isinstance(body, RunSucceeded)
        return RunResult(row, await self._patiently(run_id, lambda: self._load(body.output)))

    async def follow(self, run_id: str, after: int = 0, *, progress: bool = False) -> AsyncGenerator[Event | OpenAttempt, None]:
        under_way = _UnderWay()
        if progress and after:
            # The intents of attempts that are under way may be before `after`.
            current = await self._patiently(run_id, lambda: self.store.current([run_id]))
            under_way.attempts = {one.call: structs.replace(one, progress=None) for one in current[run_id].running}
        row = await self._ask(lambda: self._row(run_id))
        while True:
            while after < row.seq:
                page = await self._patiently(run_id, partial(self.store.read, run_id, after, PAGE))
                for event in page:
                    after = event.seq
                    under_way.see(event)
                    yield event
                if not page:
                    row = await self._ask(lambda: self._row(run_id))  # NotFound: the run was pruned meanwhile
                    if after < row.seq:
                        raise StoreCorrupt(f"event {after + 1} of run {run_id} is missing")
            if row.status in FINISHED or row.specimen is not None:
                return
            row, events, reported = await self._watch.news(run_id, after, under_way.told if progress else None)
            for event in events:
                after = event.seq
                under_way.see(event)
                yield event
            for attempt in under_way.news(reported or frozenset()):
                yield attempt

    async def _until_rest(self, run_id: str) -> RunRow:
        """Wait until the run has ended, or until the run, or a child for which it waits, needs a person.

        If the run is ready, or its worker has died, the run is driven in this process.
        """
        loop, drained = asyncio.get_running_loop(), self._worker if self._draining else None
        refused: str | None = None  # the run's holder, if that worker is alive
        beyond: set[tuple[str, int | None]] = set()  # the ready runs below this run that this process could not drive
        not_before_s = 0.0  # until then (by the loop's clock), do not try again to drive the run
        row, seen = await self._ask(lambda: self._row(run_id)), None
        while True:
            now = self._clock.now()
            if row.status in FINISHED or (row.status == "needs_attention" and row.ready_at is None):
                return row
            row.check_live()  # a specimen that has not ended never will
            served, waiting = serves(self._agents, row), row.status == "waiting"
            ready = served and (row.holder not in (None, refused) or _is_ready(row, now))
            if seen is None and (waiting or not ready or not self._may_drive(drained)):
                # Read the family only here: most often the run is driven at once, and the family is not needed.
                seen = await self._seen(run_id)
                row = seen.row
                continue
            if seen is not None and waiting and (stuck := _stuck_child(seen.family)) is not None:
                return stuck
            ready = ready or (served and seen is not None and not _ready_below(seen, now) <= beyond)
            if ready and loop.time() >= not_before_s and self._may_drive(drained):
                if (row := await self._drive_here(row)).status in FINISHED:
                    return row
                seen = await self._seen(run_id)
                row, now = seen.row, self._clock.now()
                refused, beyond = row.holder, _ready_below(seen, now)
                # If the run is ready and could not be claimed, or the worker drains, an immediate retry would be a
                # busy loop.
                not_before_s = loop.time() + _TRY_AGAIN_S if self._draining or _is_ready(row, now) else 0.0
                continue
            assert seen is not None, run_id
            times = [one.ready_at for one in (row, *seen.family) if one.ready_at is not None and one.ready_at > now]
            due, again_s = min(times, default=None), max(not_before_s, loop.time() + _TRY_AGAIN_S)
            # A worker that has died holds its runs until another worker notices it.
            held = served and any(one.holder is not None for one in (row, *seen.family))
            seen = await self._watch.change(run_id, seen, due=due if served else None, until_s=again_s if ready else None, held=held)
            row = seen.row

    async def _drive_here(self, row: RunRow) -> RunRow:
        """Drive the run, until it ends or waits. Returns at once if another worker holds the run or was faster."""
        try:
            # `wait` is False, because `_watch` waits for the run's timers, together with all other callers.
            return await (await self._working()).drive_one(row.run_id, wait=False, by_turn=True)
        except (AlreadyRunning, Conflict):
            return row
        except StoreUnavailable as error:
            if not self.store.remote:
                raise
            log.warning("run %s: cannot be driven here: %s; trying again", row.run_id, error.in_full())
            return row

    async def _patiently(self, run_id: str, question: Callable[[], T]) -> T:
        """The store's answer. During an outage of the database, ask again and again.

        An outage must not end the wait: the run continues in another process, or after the outage.
        """
        while True:
            try:
                return await self._ask(question)
            except StoreUnavailable as error:
                log.warning("run %s: cannot look how it is: %s; trying again", run_id, error.in_full())
                await asyncio.sleep(0.5)

    async def _seen(self, run_id: str) -> Watched:
        found = (await self._patiently(run_id, lambda: self.store.watched([run_id], [run_id]))).get(run_id)
        if found is None:
            raise no_such_run(run_id, self.store)
        return found

    async def _reap(self) -> None:
        if not self._draining:
            # A caller that waits for a parked run may be the first that needs a worker here: a child's worker may have died.
            await (await self._working()).reap()

    def _row(self, run_id: str) -> RunRow:
        row = self.store.get(run_id)
        if row is None:
            raise no_such_run(run_id, self.store)
        return row

    def _load(self, payload: Payload) -> bytes:
        inline = payload.inline
        return self.store.blob(str(payload.blob)) if inline is None else inline


# After these events a run continues. If the run was cancelled, it continues with the status "cancelling".
_GO_ON = (RunRequeued, RunUnpaused, ToolCallResolved)


class _UnderWay:
    """The attempts of a followed run that are under way, and the stored progress that the follower has."""

    def __init__(self) -> None:
        self.attempts: dict[int, OpenAttempt] = {}  # by the number of the call
        self.told: frozenset[ProgressRow] = frozenset()

    def see(self, event: Event) -> None:
        if event.call is None:
            return
        if isinstance(event.body, ToolCallInitiated):
            self.attempts[event.call] = OpenAttempt(event.call, event.body.tool, event.body.attempt, event.ts)
        elif isinstance(event.body, ToolCallCompleted | ToolCallFailed | ToolCallInDoubt | ToolCallResolved):
            self.attempts.pop(event.call, None)

    def news(self, reported: frozenset[ProgressRow]) -> list[OpenAttempt]:
        """The attempts with progress that the follower does not have. Progress of an attempt that has ended does not count."""
        found = []
        for row in sorted(reported - self.told, key=lambda row: row.call):
            attempt = self.attempts.get(row.call)
            if attempt is not None and attempt.attempt == row.attempt:
                found.append(structs.replace(attempt, progress=row.progress))
            elif attempt is not None and attempt.attempt < row.attempt:
                reported -= {row}  # its intent is among the next events
        self.told = reported
        return found


def _is_ready(row: RunRow, now: int) -> bool:
    return row.holder is None and row.ready_at is not None and row.ready_at <= now


def _ready_below(seen: Watched, now: int) -> set[tuple[str, int | None]]:
    """The runs below this run that are ready and not held, each with the time since which it is ready."""
    return {(row.run_id, row.ready_at) for row in seen.family if _is_ready(row, now)}


def _stuck_child(family: Sequence[RunRow]) -> RunRow | None:
    """A child that needs a person, if no run of the family can continue by itself. Else None."""
    moving = any(row.holder is not None or row.ready_at is not None or row.status == "waiting_approval" for row in family)
    return None if moving else next((row for row in family if row.status == "needs_attention"), None)


class _AskedBefore(Exception):
    """The request repeats an earlier request."""


def _moved_on(row: RunRow, seen: int) -> Conflict:
    return Conflict(
        f"run {row.run_id} has moved on meanwhile (event {row.seq}, not {seen})", hint=f"look again: {shell.command('why', row.run_id)}"
    )
