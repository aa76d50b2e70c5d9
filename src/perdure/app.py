"""Perdure: start runs, wait for them, steer them, and drive them in this process."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, get_args

from perdure import shell
from perdure.agent import Agent
from perdure.core import codec, identity
from perdure.core.approval import ApprovalStatus, Vote
from perdure.core.codec import Payload, shown
from perdure.core.events import Event, Limits, RunCreated
from perdure.core.state import RunState, fold
from perdure.desk import NOTHING, Desk, check_tenant, known_name, plain_text, role_names
from perdure.engine.api import Engine, Reading, no_such_run
from perdure.engine.open import new_engine
from perdure.errors import (
    Conflict,
    InvalidInput,
    NeedsAttention,
    NotFound,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    UnknownAgent,
)
from perdure.settings import Settings
from perdure.store.api import FINISHED, ApprovalFilter, ApprovalRow, CostRow, NewRun, RunRow, Served
from perdure.undo import Undoer, UndoPlan, undoable
from perdure.worker.asking import Asking
from perdure.worker.clock import Clock
from perdure.worker.outside import refuse_app
from perdure.worker.worker import Observer

if TYPE_CHECKING:
    from perdure.inspect.audit import AuditLog
    from perdure.store.api import Store

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
        self.clock = clock or Clock()
        self._follows_server = clock is None
        self._observers = list(observers)
        self._audit_log = audit_log
        self._audit: AuditLog | None = None
        self._engine = self._new_engine()
        self._opened: Reading | None = None  # for the clock, which may be asked where the app may not
        self._asking = Asking()

    async def __aenter__(self) -> Self:
        refuse_app()
        await self._engine.__aenter__()
        self._asking = Asking()
        self._opened = self._engine.reading
        if self._opened.remote and self._follows_server:
            self.clock.follow(lambda: 0 if self._opened is None else self._opened.ahead_us)  # a server has a clock, which all go by
        if self._audit_log is not None:
            from perdure.inspect.audit import AuditLog  # only who wants one pays for its import

            self._audit = AuditLog(self._audit_log, self._opened.read)
            self._observers.append(self._audit.committed)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self._engine.__aexit__(kind, error, trace)
        finally:
            self._opened = None
            self._asking.close()
            if self._audit is not None:
                self._audit.close()

    def _new_engine(self) -> Engine:
        return new_engine(self.url, self.versions, self.settings, self.clock, self._observers, self.queues)

    @property
    def engine(self) -> Engine:
        refuse_app()
        return self._engine

    @property
    def reading(self) -> Reading:
        """What can be read of the runs; blocking (see `ask`)."""
        return self.engine.reading

    @property
    def store(self) -> Store:
        """The database of a local engine: for tests, and for whoever looks after it. The app itself knows only `reading`."""
        return cast("Store", self.reading)

    @property
    def _desk(self) -> Desk:
        return Desk(self.engine, self.ask, self.clock, self.settings)

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
        run_id = identity.check_id(self.clock.new_id() if id is None else id, "the run id")
        tenant = identity.check_id(tenant, "the tenant")
        if actor is not None:
            actor = identity.check_id(actor, "the actor")
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
            queue=identity.check_id((agent.queue or "default") if queue is None else queue, "the queue"),
            priority=_checked_priority(priority),
            not_before=None if not_before is None else _moment(not_before, now),
            budget=_checked_budget(budget) or agent.budget,
            key_scheme=identity.KEY_SCHEME,
            key_namespace=self.settings.key_namespace,
        )
        new = NewRun(run_id, created, self.clock.new_id(), now, codec.digest(encoded_input), () if blob is None else (blob,))
        row, is_new = await self.engine.start(new)
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

        return await self.ask(lambda: transcript(run_id, self.reading.read(run_id), self.load))

    # -- working ------------------------------------------------------------------------------------------------------
    async def drive(self, run_id: str, *, wait: bool = True, stop: asyncio.Event | None = None, tenant: str | None = None) -> RunRow:
        """Drive one run here until it ends, needs a person, or waits for something from outside. Returns its row then.

        When `stop` is set, it and its children are handed over; beside a `work` they go on there.
        """
        handle = self.handle(run_id, tenant=tenant)
        if tenant is not None:
            await handle.status()
        return await self.engine.drive(run_id, wait=wait, stop=stop)

    async def work(self, *, stop: asyncio.Event | None = None) -> None:
        """Serve the queue until `stop` is set or `drain` is called; then hand over what is under way.

        Of several at a time each ends by its own `stop`, and the last one hands over. Afterwards the app can begin anew.
        """
        await self.engine.work(stop=stop)

    def drain(self) -> None:
        """End every `work` under way, or else the next one: no run is claimed any more, those under way are handed over at their next
        step boundary."""
        # Not refused in an agent, here and in `abort`: a signal's handler calls it, and a signal may strike in an agent's code.
        self._engine.drain()

    def abort(self) -> None:
        """Stop driving at once and write nothing more, as a crash would."""
        self._engine.abort()

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
        return await self.ask(lambda: self.reading.approvals(wanted))

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
        return await self._desk.vote(approval, vote, tenant=tenant)

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
        return await self._desk.vote(approval, vote, tenant=tenant)

    # -- steering -----------------------------------------------------------------------------------------------------
    async def signal(
        self, run_id: str, topic: str, payload: Any = None, *, key: str | None = None, by: str = "app", tenant: str | None = None
    ) -> None:
        """Hand something to a run: in order per topic, kept until its agent asks for it, and once per `key`. RunEnded after its end."""
        await self._desk.signal(run_id, topic, payload, by=by, key=key, tenant=tenant)

    async def cancel(
        self, run_id: str, *, by: str = "app", reason: str | None = None, force: bool = False, tenant: str | None = None
    ) -> None:
        """Ask for a run to be cancelled. Its agent sees CancelledError and may clean up; `cancelled` comes when it is done.

        `force` ends a run that nobody drives at once and without its agent: what was in doubt stays so.
        """
        _check_flag(force, "cancel(force=)")
        act = self._desk.end if force else self._desk.cancel
        await act(run_id, by=by, reason=reason, tenant=tenant)

    async def pause(self, run_id: str, *, by: str = "app", reason: str | None = None, tenant: str | None = None) -> None:
        """Have a run stand still at its next step; what is under way ends first. Whatever reaches it meanwhile is kept."""
        await self._desk.pause(run_id, by=by, reason=reason, tenant=tenant)

    async def unpause(
        self, run_id: str, *, by: str = "app", note: str | None = None, add: Limits | None = None, tenant: str | None = None
    ) -> list[str]:
        """Let a run go on that is paused or needs attention. `add=Budget(usd=5)` adds to the budget that it has used up, and lets
        every run go on that stood still for want of it. Returns the runs that go on."""
        added = _checked_budget(add)
        return await self._desk.unpause(run_id, by=by, note=note, add=added, tenant=tenant)

    async def requeue(self, run_id: str, *, by: str = "app", note: str | None = None, tenant: str | None = None) -> None:
        """Send a run that needs attention back to work."""
        await self._desk.requeue(run_id, by=by, note=note, tenant=tenant)

    async def adopt(self, run_id: str, *, by: str = "app", note: str | None = None, tenant: str | None = None) -> None:
        """Let the version of the agent that this app has go on with a run that was begun with another one. It is recorded."""
        row = await self.handle(run_id, tenant=tenant).status()
        agent = self._agent(row.agent)
        # On a thread: an agent is replayed, and from CPython 3.14 on its tasks cannot be entered inside a task of ours.
        await self._asking.ask(lambda: self._check_replay(run_id, agent))
        await self._desk.adopt(run_id, agent.version, by=by, note=note, tenant=tenant)

    def _check_replay(self, run_id: str, agent: Agent[Any, Any]) -> None:
        """Diverged when this code does not lead where the run has come to: nothing is recorded then."""
        events = self.reading.read(run_id)
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
        await self._desk.resolve(run_id, call, **answer, by=by, note=note, tenant=tenant)

    # -- undoing ------------------------------------------------------------------------------------------------------
    async def plan_undo(self, run_id: str, *, tenant: str | None = None) -> UndoPlan:
        """What `undo` would do about a run that has ended, and what it cannot; nothing is written. Its agent must be known here."""
        found = await self.handle(run_id, tenant=tenant).status()
        row = await self.ask(lambda: undoable(self.reading, found.run_id))
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
        row = await self.ask(lambda: undoable(self.reading, found.run_id))
        return await self._undoer.undo(row, self._agent_of(row), by=by, accept=accept, wait=wait, stop=stop)

    @property
    def _undoer(self) -> Undoer:
        return Undoer(self.engine, self.ask, self.settings, self.clock, self._desk)

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
        return await self._asking.ask(partial(self.reading.costs, by, since=after, tenant=tenant))

    async def ask(self, question: Callable[[], T]) -> T:
        """The answer of `reading`: here, which is quickest; on a thread where it crosses a network, since a server may not answer for long."""
        return await self._asking.ask(question) if self.reading.remote else question()

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
        return self.reading.blob(str(payload.blob)) if inline is None else inline


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
        row = self._app.reading.get(self.id)
        if row is None or self._tenant not in (None, row.tenant):
            raise no_such_run(self.id, self._app.reading)
        return row

    async def result(self, timeout: float | None = None) -> Any:
        """The run's result. Drives the run in this process if its agent is known here and nobody else does; else waits.

        RunFailed, RunCancelled, NeedsAttention; ResultTimeout when the time is over, and the run goes on.
        """
        if timeout is not None and (not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or math.isnan(timeout)):
            raise InvalidInput(f"result(timeout={shown(timeout)}): a number of seconds, or None to wait for ever")
        try:
            async with asyncio.timeout(timeout):
                if self._tenant is not None:
                    await self.status()
                found = await self._app.engine.result(self.id)
        except TimeoutError:
            raise ResultTimeout(self.id, f"no result after {timeout} s; it goes on") from None
        row = found.row
        if found.output is not None:
            agent = self._app.versions.get(Served(row.agent, row.version)) or self._app.agents.get(row.agent)
            return codec.decode(found.output) if agent is None else agent.decode_result(found.output)
        if row.status == "failed":
            raise RunFailed(self.id, row.error or "failed")
        if row.status == "cancelled":
            raise RunCancelled(self.id, "cancelled")
        raise NeedsAttention(row.run_id, f"needs attention: {row.error or row.waiting_for}; {shell.command('why', row.run_id)}")

    async def events(self, after: int = 0) -> list[Event]:
        """The run's journal, from the event after `after` on."""
        _check_after(after)
        await self.status()
        return await self._app.ask(lambda: self._app.reading.read(self.id, after))

    async def follow(self, after: int = 0) -> AsyncIterator[Event]:
        """The run's journal as it grows, until the run ends."""
        _check_after(after)
        await self.status()
        async for event in self._app.engine.follow(self.id, after):
            yield event

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
