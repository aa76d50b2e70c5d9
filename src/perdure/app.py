"""Perdure: start runs, wait for them, steer them, and drive them in this process."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from perdure import shell
from perdure.agent import Agent
from perdure.core import codec, keys
from perdure.core.approval import ApprovalStatus, Vote
from perdure.core.codec import Payload, shown
from perdure.core.events import Event, Limits, RunCreated, RunSucceeded
from perdure.core.state import RunState, fold
from perdure.desk import NOTHING, Desk, check_tenant, known_name, plain_text, role_names
from perdure.errors import (
    AlreadyRunning,
    Conflict,
    InvalidInput,
    NeedsAttention,
    NotFound,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    StoreUnavailable,
    UnknownAgent,
)
from perdure.settings import Settings
from perdure.starts import Starts
from perdure.store.api import FINISHED, ApprovalFilter, ApprovalRow, CostRow, NewRun, RunRow, Served, Store
from perdure.store.open import is_postgres, open_store
from perdure.store.url import shown_url
from perdure.undo import Undoer, UndoPlan, undoable
from perdure.worker.asking import Asking
from perdure.worker.attempts import is_inside_call
from perdure.worker.clock import Clock
from perdure.worker.outside import refuse_app
from perdure.worker.worker import Observer, Worker

if TYPE_CHECKING:
    from perdure.inspect.audit import AuditLog

log = logging.getLogger("perdure")
T = TypeVar("T")
CostsBy = Literal["agent", "tenant", "model", "day", "run", "root", "tool"]


class Perdure:
    """A journal and the agents that this process knows. Nothing runs here until `run`, `drive`, `work` or a handle's `result`."""

    def __init__(
        self,
        url: str | None = None,
        agents: Iterable[Agent[Any, Any]] = (),
        *,
        settings: Settings | None = None,
        audit_log: Path | str | None = None,
        observers: Sequence[Observer] = (),
        clock: Clock | None = None,
        queues: Sequence[str] | None = None,
    ) -> None:
        if url is not None and not isinstance(url, str):
            raise InvalidInput(f"Perdure({shown(url)}): a URL is text, such as 'sqlite:///perdure.db'")
        if settings is not None and not isinstance(settings, Settings):
            raise InvalidInput(f"Perdure(settings={shown(settings)}): settings are one object, such as Settings(lease_s=10)")
        self.settings = settings or Settings()
        self.url = url or (self.settings.url if settings else os.environ.get("PERDURE_URL") or self.settings.url)
        self.versions = _by_version(agents)
        self.agents = {agent.name: agent for agent in self.versions.values()}  # of several versions the one given last is started
        self.queues = queues
        is_remote = is_postgres(self.url)  # a server has a clock, which all go by; a file has none
        self.clock = clock or Clock((lambda: 0 if self._store is None else self._store.ahead_us) if is_remote else None)
        self._observers = list(observers)
        self._audit_log = audit_log
        self._audit: AuditLog | None = None
        self._store: Store | None = None
        self._starts = Starts(lambda: self.store)
        self._worker: Worker | None = None
        self._asking = Asking()
        self._opening = asyncio.Lock()
        self._works: list[asyncio.Event] = []  # what ends each `work` under way
        self._ends_next = False  # the next `work` ends at once: it was drained before there was one

    async def __aenter__(self) -> Self:
        self._asking = Asking()
        try:
            self._store = await self._open()
        except BaseException:
            self._asking.close()
            raise
        if self._audit_log is not None:
            from perdure.inspect.audit import AuditLog  # only who wants one pays for its import

            self._audit = AuditLog(self._audit_log, self._store.read)
            self._observers.append(self._audit.committed)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.abort()
            async with self._opening:  # or a worker that takes the place of another one would be left behind
                if self._worker is not None:
                    await self._worker.__aexit__(kind, error, trace)
        finally:
            self._worker = None
            if self._audit is not None:
                self._audit.close()
            if self._store is not None:
                store, self._store = self._store, None
                try:
                    await self._asking.ask(store.close) if store.remote else store.close()
                finally:
                    self._asking.close()

    async def _open(self) -> Store:
        refuse_app()
        options: dict[str, Any] = {"synchronous": self.settings.synchronous, "busy_s": self.settings.answer_s}
        opening = partial(open_store, self.url, connections=self.settings.connections, **options)
        # On a thread where it crosses a network: a server that is just starting is waited for.
        return await self._asking.ask(opening, lambda late: late.close()) if is_postgres(self.url) else opening()

    @property
    def _desk(self) -> Desk:
        return Desk(self.store, self.clock, self.settings)

    @property
    def store(self) -> Store:
        refuse_app()
        if self._store is None:
            raise InvalidInput("the app is not open: use it in an `async with Perdure(…) as app:` block")
        return self._store

    # -- runs ---------------------------------------------------------------------------------------------------------
    async def start(
        self,
        agent: Agent[Any, Any] | str,
        /,
        *args: Any,
        id: str | None = NOTHING,
        tenant: str = NOTHING,
        actor: str | None = NOTHING,
        queue: str | None = NOTHING,
        priority: int = NOTHING,
        not_before: datetime | timedelta | None = NOTHING,
        budget: Limits | None = NOTHING,
        **kwargs: Any,
    ) -> Handle:
        """Create a run; it is durable when this returns. The same id with the same input is the same run; with another, Conflict.

        Of one tenant's runs in a queue the higher `priority` goes first. `not_before` is a time, or how long from now. What is left
        out is as in `start_encoded`.
        """
        found = self._agent(agent)
        given: dict[str, Any] = {"id": id, "tenant": tenant, "actor": actor, "queue": queue, "priority": priority}
        given |= {"not_before": not_before, "budget": budget}
        options = {name: value for name, value in given.items() if value is not NOTHING}
        _check_unambiguous(found, options)
        return await self.start_encoded(found, found.bind(args, kwargs), target=found.target, **options)

    async def start_encoded(
        self,
        agent: Agent[Any, Any],
        encoded_input: bytes,
        *,
        id: str | None = None,
        tenant: str = "default",
        actor: str | None = None,
        target: str | None = None,
        queue: str | None = None,
        priority: int = 0,
        not_before: datetime | timedelta | None = None,
        budget: Limits | None = None,
    ) -> Handle:
        """The same for input that `agent.bind` has made; `target` says where the code is."""
        run_id = keys.check_id(self.clock.new_id() if id is None else id, "the run id")
        tenant = keys.check_id(tenant, "the tenant")
        if actor is not None:
            actor = keys.check_id(actor, "the actor")
        payload, blob = codec.pack(encoded_input, self.settings.inline_bytes)
        now = self.clock.now()
        created = RunCreated(
            run_id=run_id,
            agent=agent.name,
            version=agent.version,
            tenant=tenant,
            input=payload,
            actor=actor,
            target=target,
            queue=keys.check_id((agent.queue or "default") if queue is None else queue, "the queue"),
            priority=_checked_priority(priority),
            not_before=None if not_before is None else _moment(not_before, now),
            budget=_checked_budget(budget) or agent.budget,
            key_scheme=keys.KEY_SCHEME,
            key_namespace=self.settings.key_namespace,
        )
        new = NewRun(run_id, created, self.clock.new_id(), now, codec.digest(encoded_input), () if blob is None else (blob,))
        row, is_new = await self._create(new)
        if not is_new:
            _same_run(row, agent.name, tenant, actor, new.input_digest)
        return Handle(self, run_id)

    async def run(
        self,
        agent: Agent[Any, Any] | str,
        /,
        *args: Any,
        id: str | None = NOTHING,
        tenant: str = NOTHING,
        actor: str | None = NOTHING,
        budget: Limits | None = NOTHING,
        **kwargs: Any,
    ) -> Any:
        """Start a run, drive it and its children in this process and return its result."""
        name = self._agent(agent).name
        if name not in self.agents:
            raise UnknownAgent(f"agent {name} is not served by this app, so that it cannot drive it: Perdure(url, agents=[{name}, …])")
        handle = await self.start(agent, *args, id=id, tenant=tenant, actor=actor, budget=budget, **kwargs)
        return await handle.result()

    def handle(self, run_id: str, *, tenant: str | None = None) -> Handle:
        """A handle on a run that exists, and is the tenant's where one is given; or else NotFound when it is used."""
        check_tenant(tenant)
        return Handle(self, plain_text(run_id, "a run's id"), tenant)

    async def transcript(self, run_id: str, *, tenant: str | None = None) -> list[dict[str, Any]]:
        """The conversation of a ReAct agent's run that has ended, however it did: the `history` of a run that continues it."""
        row = await self.handle(run_id, tenant=tenant).status()
        if row.status not in FINISHED:
            raise Conflict(f"run {run_id} is {row.status.replace('_', ' ')}: its conversation goes on. Wait for its end, or cancel it")
        from perdure.transcript import transcript  # here: a worker that asks no model does not load what is known of models

        return await self.ask(lambda: transcript(run_id, self.store.read(run_id), self.load))

    # -- working ------------------------------------------------------------------------------------------------------
    async def drive(self, run_id: str, *, wait: bool = True, stop: asyncio.Event | None = None, tenant: str | None = None) -> RunRow:
        """Drive one run here until it ends, needs a person, or waits for something from outside. Returns its row then.

        When `stop` is set, it and its children are handed over; beside a `work` they go on there.
        """
        handle = self.handle(run_id, tenant=tenant)
        if tenant is not None:
            await handle.status()
        if is_inside_call() and self._worker is not None and self._worker.draining:
            worker = self._worker  # for a new one the drain has to end, and a tool would wait for its own end
        else:
            worker = await self._working()
        return await worker.drive_one(run_id, wait=wait, stop=stop)

    async def work(self, *, stop: asyncio.Event | None = None) -> None:
        """Serve the queue until `stop` is set or `drain` is called; then hand over what is under way.

        Of several at a time each ends by its own `stop`, and the last one hands over. Afterwards the app can begin anew.
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
        """End every `work` under way, or else the next one: no run is claimed any more, those under way are handed over at their next
        step boundary."""
        # Not refused in an agent, here and in `abort`: a signal's handler calls it, and a signal may strike in an agent's code.
        self._ends_next = not self._works
        for ended in self._works:
            ended.set()

    def abort(self) -> None:
        """Stop driving at once and write nothing more, as a crash would."""
        if self._worker is not None:
            self._worker.abort()

    async def _working(self) -> Worker:
        """The worker; after a drain a new one, which has nothing to do with what the old one could not hand over."""
        refuse_app()
        async with self._opening:
            if self._draining and self._worker is not None:
                await self._worker.until_drained()
                drained, self._worker = self._worker, None
                await drained.__aexit__()
            if self._worker is None:
                if not self.agents:
                    raise UnknownAgent("no agents to drive: pass them, Perdure(url, agents=[…])")
                self._worker = await self._new_worker().__aenter__()
            return self._worker

    @property
    def _draining(self) -> bool:
        return self._worker is not None and self._worker.draining

    def _may_drive(self, before: Worker | None) -> bool:
        """Whether somebody who waits may have the run driven here. Who was there when a drain began does not take up again what it
        hands over; who came later, with that worker already `before` them, does when it is over."""
        return not self._draining or (self._worker is before and before is not None and before.drained)

    def _new_worker(self) -> Worker:
        return Worker(self.store, self.versions.values(), self.settings, self.clock, self._observers, self.queues)

    # -- approvals ----------------------------------------------------------------------------------------------------
    async def approvals(
        self, *, status: ApprovalStatus | None = "pending", tenant: str | None = None, run_id: str | None = None, limit: int = 100
    ) -> list[ApprovalRow]:
        """The inbox: what waits for somebody's yes or no, those that expire first in front. `status=None`: all there ever were."""
        if status is not None and status not in get_args(ApprovalStatus):
            raise InvalidInput(f"approvals(status={shown(status)}): one of {', '.join(get_args(ApprovalStatus))}; None for all")
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit < 1 << 32:
            raise InvalidInput(f"approvals(limit={shown(limit)}): a whole number from 1 on, below 2³²")
        check_tenant(tenant)
        if run_id is not None:
            plain_text(run_id, "a run's id")
        wanted = ApprovalFilter(status=status, tenant=tenant, run_id=run_id, limit=limit)
        return await self.ask(lambda: self.store.approvals(wanted))

    async def approve(
        self,
        approval: str,
        *,
        by: str,
        edit: dict[str, Any] | None = None,
        note: str | None = None,
        roles: Sequence[str] = (),
        digest: str | None = None,
        source: str = "app",
        tenant: str | None = None,
    ) -> ApprovalRow:
        """Say yes, with `edit` to other values of the fields that may be edited. One decision counts: Conflict for whoever is second.

        `roles` are those that the caller knows `by` to have, beside those in the settings. `digest`, where given, is what they have
        seen: Conflict if it is about something else.
        """
        if edit is not None and not isinstance(edit, dict):
            raise InvalidInput(f"edit={shown(edit)}: the fields to change and their values, such as {{'cents': 500}}")
        vote = Vote(by, True, role_names(roles), note, source, digest, edit)
        return await self._write(lambda: self._desk.vote(approval, vote, tenant=tenant))

    async def reject(
        self,
        approval: str,
        *,
        by: str,
        reason: str,
        roles: Sequence[str] = (),
        digest: str | None = None,
        source: str = "app",
        tenant: str | None = None,
    ) -> ApprovalRow:
        """Say no; the agent sees the reason."""
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidInput("reject(reason=…): say why; the agent sees it")
        vote = Vote(by, False, role_names(roles), reason, source, digest)
        return await self._write(lambda: self._desk.vote(approval, vote, tenant=tenant))

    # -- steering -----------------------------------------------------------------------------------------------------
    async def signal(
        self, run_id: str, topic: str, payload: Any = None, *, key: str | None = None, by: str = "app", tenant: str | None = None
    ) -> None:
        """Hand something to a run: in order per topic, kept until its agent asks for it, and once per `key`. RunEnded after its end."""
        await self._write(lambda: self._desk.signal(run_id, topic, payload, by=by, key=key, tenant=tenant))

    async def cancel(
        self, run_id: str, *, by: str = "app", reason: str | None = None, force: bool = False, tenant: str | None = None
    ) -> None:
        """Ask for a run to be cancelled. Its agent sees CancelledError and may clean up; `cancelled` comes when it is done.

        `force` ends a run that nobody drives at once and without its agent: what was in doubt stays so.
        """
        _check_flag(force, "cancel(force=)")
        act = self._desk.end if force else self._desk.cancel
        await self._write(lambda: act(run_id, by=by, reason=reason, tenant=tenant))

    async def pause(self, run_id: str, *, by: str = "app", reason: str | None = None, tenant: str | None = None) -> None:
        """Have a run stand still at its next step; what is under way ends first. Whatever reaches it meanwhile is kept."""
        await self._write(lambda: self._desk.pause(run_id, by=by, reason=reason, tenant=tenant))

    async def unpause(
        self, run_id: str, *, by: str = "app", note: str | None = None, add: Limits | None = None, tenant: str | None = None
    ) -> list[str]:
        """Let a run go on that is paused or needs attention. `add=Budget(usd=5)` adds to the budget that it has used up, and lets
        every run go on that stood still for want of it. Returns the runs that go on."""
        added = _checked_budget(add)
        return await self._write(lambda: self._desk.unpause(run_id, by=by, note=note, add=added, tenant=tenant))

    async def requeue(self, run_id: str, *, by: str = "app", note: str | None = None, tenant: str | None = None) -> None:
        """Send a run that needs attention back to work."""
        await self._write(lambda: self._desk.requeue(run_id, by=by, note=note, tenant=tenant))

    async def adopt(self, run_id: str, *, by: str = "app", note: str | None = None, tenant: str | None = None) -> None:
        """Let the version of the agent that this app has go on with a run that was begun with another one. It is recorded."""
        row = await self.handle(run_id, tenant=tenant).status()
        agent = self._agent(row.agent)
        # On a thread: an agent is replayed, and from CPython 3.14 on its tasks cannot be entered inside a task of ours.
        await self._asking.ask(lambda: self._check_replay(run_id, agent))
        await self._write(lambda: self._desk.adopt(run_id, agent.version, by=by, note=note, tenant=tenant))

    def _check_replay(self, run_id: str, agent: Agent[Any, Any]) -> None:
        """Diverged when this code does not lead where the run has come to: nothing is recorded then."""
        events = self.store.read(run_id)
        state = fold(events)
        state.version = agent.version  # as it will be when it is adopted
        agent.replayed(state, events, self.load, self.settings.max_steps)

    async def resolve(
        self,
        run_id: str,
        call: int,
        *,
        happened: Any = NOTHING,
        did_not_happen: bool = False,
        fail: str | None = None,
        final: bool = False,
        by: str = "app",
        note: str | None = None,
        tenant: str | None = None,
    ) -> None:
        """Settle a call that is in doubt: it happened with this result, it did not happen, or fail it.

        `did_not_happen` is a Conflict while the request may still arrive; `final=True` says that the service has ruled it out.
        """
        answer: dict[str, Any] = {"happened": happened, "did_not_happen": did_not_happen, "fail": fail, "final": final}
        await self._write(lambda: self._desk.resolve(run_id, call, **answer, by=by, note=note, tenant=tenant))

    # -- undoing ------------------------------------------------------------------------------------------------------
    async def plan_undo(self, run_id: str, *, tenant: str | None = None) -> UndoPlan:
        """What `undo` would do about a run that has ended, and what it cannot; nothing is written. Its agent must be known here."""
        found = await self.handle(run_id, tenant=tenant).status()
        row = await self.ask(lambda: undoable(self.store, found.run_id))
        return (await self._undoer.survey(row, self._agent_of(row))).plan

    async def undo(
        self,
        run_id: str,
        *,
        by: str = "app",
        accept: bool = False,
        wait: bool = True,
        stop: asyncio.Event | None = None,
        tenant: str | None = None,
    ) -> RunRow:
        """Call the compensate hooks of the run's completed calls, last one first, in the run RUN/undo; that run's row when it rests.

        Conflict names what cannot be undone, unless you `accept` that it stays. Once more goes on where it stopped, and tries a hook
        that has failed again.
        """
        _check_flag(accept, "undo(accept=)")
        by = known_name(by)
        found = await self.handle(run_id, tenant=tenant).status()
        row = await self.ask(lambda: undoable(self.store, found.run_id))
        return await self._undoer.undo(row, self._agent_of(row), by=by, accept=accept, wait=wait, stop=stop)

    @property
    def _undoer(self) -> Undoer:
        return Undoer(self.store, self.settings, self.clock, self._desk, self._observers)

    def _agent_of(self, row: RunRow) -> Agent[Any, Any]:
        return self.versions.get(Served(row.agent, row.version)) or self._agent(row.agent)

    # -- what it cost -------------------------------------------------------------------------------------------------
    async def costs(self, by: CostsBy = "agent", *, since: datetime | None = None, tenant: str | None = None) -> list[CostRow]:
        """Calls, time, tokens and money by agent, tenant, model, day, run or tool: counted once, whatever was replayed."""
        if by not in get_args(CostsBy):
            raise InvalidInput(f"costs({shown(by)}): one of {', '.join(get_args(CostsBy))}")
        if since is not None and not isinstance(since, datetime):
            raise InvalidInput(f"costs(since={shown(since)}): a datetime with a time zone, such as datetime.now(UTC) - timedelta(days=7)")
        check_tenant(tenant)
        after = 0 if since is None else _moment(since, 0)
        return await self._asking.ask(partial(self.store.costs, by, since=after, tenant=tenant))

    async def ask(self, question: Callable[[], T]) -> T:
        """The store's answer: here, which is quickest; on a thread where it crosses a network, since a server may not answer for long."""
        return await self._asking.ask(question) if self.store.remote else question()

    async def _write(self, work: Callable[[], T]) -> T:
        """As `ask`; and on a thread while a transaction's tool, which may take long, has the write lock."""
        if self._worker is not None and self._worker.transacting:
            return await self._asking.ask(work)
        return await self.ask(work)

    async def _create(self, new: NewRun) -> tuple[RunRow, bool]:
        if self.store.remote or (self._worker is not None and self._worker.transacting):
            return await self._write(lambda: self.store.create_run(new))
        return await self._starts.create(new)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _agent(self, agent: Agent[Any, Any] | str) -> Agent[Any, Any]:
        if isinstance(agent, Agent):
            return agent
        if not isinstance(agent, str):
            raise InvalidInput(f"{shown(agent)} is not an agent: decorate the coroutine function with @agent")
        if agent not in self.agents:
            raise UnknownAgent(f"agent {agent!r} is not known here; known are {', '.join(self.agents) or 'none'}: Perdure(url, agents=[…])")
        return self.agents[agent]

    def load(self, payload: Payload) -> bytes:
        """The JSON of a recorded payload, wherever it lies."""
        inline = payload.inline
        return self.store.blob(str(payload.blob)) if inline is None else inline


class Handle:
    """One run, from outside."""

    def __init__(self, app: Perdure, run_id: str, tenant: str | None = None) -> None:
        self.id = run_id
        self._app = app
        self._tenant = tenant

    async def status(self) -> RunRow:
        """The run's row: its status, what it waits for, its last event."""
        return await self._app.ask(self._row)

    def _row(self) -> RunRow:
        row = self._app.store.get(self.id)
        if row is None or self._tenant not in (None, row.tenant):
            raise NotFound(f"there is no run {self.id} in {shown_url(self._app.url)}; `perdure list` shows those that there are")
        return row

    async def result(self, timeout: float | None = None) -> Any:
        """The run's result. Drives the run in this process if its agent is known here and nobody else does; else waits.

        RunFailed, RunCancelled, NeedsAttention; ResultTimeout when the time is over, and the run goes on.
        """
        if timeout is not None and (not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or math.isnan(timeout)):
            raise InvalidInput(f"result(timeout={shown(timeout)}): a number of seconds, or None to wait for ever")
        try:
            async with asyncio.timeout(timeout):
                row = await self._end()
                encoded = await self._output(row.seq) if row.status == "succeeded" else None
        except TimeoutError:
            raise ResultTimeout(self.id, f"no result after {timeout} s; it goes on") from None
        if encoded is not None:
            agent = self._app.versions.get(Served(row.agent, row.version)) or self._app.agents.get(row.agent)
            return codec.decode(encoded) if agent is None else agent.decode_result(encoded)
        if row.status == "failed":
            raise RunFailed(self.id, row.error or "failed")
        if row.status == "cancelled":
            raise RunCancelled(self.id, "cancelled")
        raise NeedsAttention(row.run_id, f"needs attention: {row.error or row.waiting_for}; {shell.command('why', row.run_id)}")

    async def _end(self) -> RunRow:
        """Until the run, or a child that it waits for, has ended or needs a person. Drives it if it is ready, or if its worker has died."""
        app, began = self._app, asyncio.get_running_loop().time()
        drained = app._worker if app._draining else None
        row = await self.status()
        while True:
            if row.status in FINISHED or (row.status == "needs_attention" and row.ready_at is None):
                return row
            if row.status == "waiting" and (stuck := await self._stuck_child()) is not None:
                return stuck
            ready = row.holder is not None or (row.ready_at is not None and row.ready_at <= app.clock.now()) or await self._has_work()
            if Served(row.agent, row.version) in app.versions and ready and app._may_drive(drained):
                try:
                    worker = await app._working()
                    row = await worker.drive_one(self.id, wait=True, by_turn=True)
                    if row.status not in FINISHED:
                        row = await self._patiently(self._row)
                    if not worker.draining:  # else it would come back at once, and without end: the loop would never get to the drain
                        continue
                except (AlreadyRunning, Conflict):
                    pass  # a live worker has it, or was faster: wait for them
                except StoreUnavailable as error:
                    if not app.store.remote:
                        raise
                    log.warning("run %s: cannot be driven here: %s; trying again", self.id, error)
            # Until its time has come, should that be sooner; but a run that is ready and cannot be taken is no reason to ask without end.
            left_s = 0.0 if row.ready_at is None else (row.ready_at - app.clock.now()) / 1e6
            await self._change(min(max(left_s, 0.005), 1.0) if left_s > 0 else 1.0, since=began, due=row.ready_at if left_s > 0 else None)
            row = await self._patiently(self._row)

    async def _output(self, last: int) -> bytes:
        body = (await self._patiently(lambda: self._app.store.read(self.id, last - 1)))[-1].body
        assert isinstance(body, RunSucceeded)
        return await self._patiently(lambda: self._app.load(body.output))

    async def _patiently(self, question: Callable[[], T]) -> T:
        """The answer; when the database is away, as soon as it is back. Whoever waits goes on waiting: the run goes on elsewhere, or will."""
        while True:
            try:
                return await self._app.ask(question)
            except StoreUnavailable as error:
                log.warning("run %s: cannot look how it is: %s; trying again", self.id, error)
                await asyncio.sleep(0.5)

    async def _stuck_child(self) -> RunRow | None:
        """A child that needs a person, when nothing else of the family can bring the run on."""
        family = await self._patiently(lambda: self._app.store.family(self.id))
        moving = any(row.holder is not None or row.ready_at is not None or row.status == "waiting_approval" for row in family)
        return None if moving else next((row for row in family if row.status == "needs_attention"), None)

    async def _has_work(self) -> bool:
        """Whether a child of it is ready and nobody is at it."""
        now = self._app.clock.now()
        family = await self._patiently(lambda: self._app.store.family(self.id))
        return any(row.holder is None and row.ready_at is not None and row.ready_at <= now for row in family)

    async def _change(self, at_most_s: float, *, since: float, due: int | None = None) -> None:
        """Until anything may have been committed, or it is `due`. Looks often at first, and the less often the longer it has waited: an
        answer is late by 2 %, or by 5 % where a look is a question to a server."""
        loop, store = asyncio.get_running_loop(), self._app.store
        share, shortest_s = (20, 0.01) if store.remote else (50, 0.005)
        version, until = store.version(), loop.time() + at_most_s
        while store.version() == version and (now := loop.time()) < until:  # no database rings a bell for everything
            if due is not None and due <= self._app.clock.now():
                return  # a clock may jump
            await asyncio.sleep(min(max((now - since) / share, shortest_s), self._app.settings.poll_s))
            if store.remote:
                return  # what others commit there changes no version here

    async def events(self, after: int = 0) -> list[Event]:
        """The run's journal, from the event after `after` on."""
        _check_after(after)
        await self.status()
        return await self._app.ask(lambda: self._app.store.read(self.id, after))

    async def follow(self, after: int = 0) -> AsyncIterator[Event]:
        """The run's journal as it grows, until the run ends."""
        _check_after(after)
        since = asyncio.get_running_loop().time()
        row = await self.status()
        while True:
            for event in await self._patiently(partial(self._app.store.read, self.id, after)):
                after, since = event.seq, asyncio.get_running_loop().time()
                yield event
            if row.status in FINISHED and after >= row.seq:
                return
            await self._change(0.5, since=since)
            row = await self._patiently(self._row)

    async def state(self, at: int | None = None) -> RunState:
        """The fold of the journal, now or as of event `at`."""
        if at is not None and (not isinstance(at, int) or isinstance(at, bool)):
            raise InvalidInput(f"state(at={shown(at)}): the seq of an event, a whole number, or None for now")
        events = await self.events()
        if at is not None and not 1 <= at <= len(events):
            raise NotFound(f"run {self.id} has events 1 to {len(events)}; there is no event {at}")
        return fold(events[:at])


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_PRIORITY = 1_000


def _checked_priority(priority: int) -> int:
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
        raise InvalidInput(f"priority={shown(priority)}: a whole number from -{MAX_PRIORITY:,} to {MAX_PRIORITY:,}; higher goes first")
    return priority


def _check_flag(flag: bool, what: str) -> None:
    # Anything that is not empty would count as a yes, the text "no" too.
    if not isinstance(flag, bool):
        raise InvalidInput(f"{what}: {shown(flag)} is neither True nor False")


def _checked_budget(budget: Limits | None) -> Limits | None:
    if budget is not None and not isinstance(budget, Limits):
        raise InvalidInput(f"{shown(budget)} is not a Budget(usd=…)")
    return budget


def _moment(when: datetime | timedelta, now: int) -> int:
    """Microseconds since 1970; a timedelta counts from now. InvalidInput for a time without a zone."""
    if isinstance(when, timedelta):
        micros = now + when // timedelta(microseconds=1)
    elif isinstance(when, datetime) and when.tzinfo is not None:
        micros = (when - _EPOCH) // timedelta(microseconds=1)
    else:
        raise InvalidInput(f"{shown(when)}: a datetime with a time zone, such as datetime.now(UTC) + timedelta(hours=1), or a timedelta")
    if not 0 <= micros <= _LATEST_US:
        raise InvalidInput(f"{shown(when)} lies before 1970 or after 9999")
    return micros


_LATEST_US = 253_402_300_799_000_000


def _check_after(after: int) -> None:
    if not isinstance(after, int) or isinstance(after, bool) or not 0 <= after < 1 << 32:
        raise InvalidInput(f"after={shown(after)}: the seq of an event, or 0 for all of them; a whole number below 2³²")


def _by_version(agents: Iterable[Agent[Any, Any]]) -> dict[Served, Agent[Any, Any]]:
    known: dict[Served, Agent[Any, Any]] = {}
    if not isinstance(agents, Iterable):
        raise InvalidInput(f"{shown(agents)} is not a list of agents: Perdure(url, agents=[…])")
    for agent in agents:
        if not isinstance(agent, Agent):
            raise InvalidInput(f"{shown(agent)} is not an agent: decorate the coroutine function with @agent")
        served = Served(agent.name, agent.version)
        if served in known and known[served] is not agent:
            raise InvalidInput(f"two agents are called {agent.name} (version {agent.version}): give one another name, @agent(name=…)")
        known[served] = agent
    return known


def _check_unambiguous(agent: Agent[Any, Any], options: dict[str, Any]) -> None:
    """InvalidInput when an option of the start could as well be meant for the agent, which would never see it."""
    both = next((name for name in options if name in agent.parameter_names), None)
    if both is not None:
        raise InvalidInput(
            f"{both}= is ambiguous: agent {agent.name} takes an argument of that name, and so does the start of a run. Pass the agent's by "
            f"position; or, for both, app.start_encoded({agent.name}, {agent.name}.bind(args, kwargs), {both}=…)"
        )


def _same_run(row: RunRow, agent: str, tenant: str, actor: str | None, input_digest: str) -> None:
    if row.tenant != tenant:
        # That somebody has the id must be told, since ids are shared by all tenants of a database: keys that go to services and the ids
        # of children are made of them. Nothing else is: not whose it is, of which agent, nor whether it still goes on.
        raise Conflict(f"the run id {row.run_id} is taken; choose another")
    if row.agent != agent:
        raise Conflict(f"run {row.run_id} belongs to agent {row.agent}, not {agent}; choose another id")
    if actor is not None and row.actor != actor:
        raise Conflict(f"run {row.run_id} acts for {row.actor or 'nobody named'}, not for {actor}; choose another id")
    if row.input_digest != input_digest:
        resume = shell.command("resume", row.run_id)
        raise Conflict(f"run {row.run_id} exists with another input; choose another id, or resume it as it is: {resume}")
