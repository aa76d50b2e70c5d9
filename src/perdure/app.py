"""Perdure, the app: start runs, wait for runs, control runs, and drive runs in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, get_args, overload

from msgspec import UNSET, Struct, structs

from perdure import shell
from perdure.agent import Agent, AgentInput
from perdure.config import checked_place, load_settings
from perdure.control import NOTHING, Control, check_tenant, known_name, plain_text, role_names, words
from perdure.core import codec, identity
from perdure.core.approval import ApprovalStatus, Vote
from perdure.core.budget import Budget, limits_of
from perdure.core.codec import Payload, shown
from perdure.core.events import (
    Event,
    FailureKind,
    FrameChanged,
    Limits,
    Reason,
    RunAdopted,
    RunCreated,
    Status,
    TraceContext,
    event_at,
    in_batch,
    place_of,
)
from perdure.core.labels import check_number, checked_labels, with_labels
from perdure.core.query import EVERYTHING, Query, Term, checked_group, parse_query
from perdure.core.state import RunState, fold
from perdure.core.times import LATEST_US, micros_of, utc_within
from perdure.core.trace_context import read_headers
from perdure.engine.api import Engine, Reading, no_such_run
from perdure.engine.artifacts import RunVault
from perdure.engine.clock import Clock
from perdure.engine.local.sandbox import refuse_app
from perdure.engine.local.worker import Observer
from perdure.engine.open import new_engine
from perdure.engine.threads import ReadingThreads
from perdure.errors import (
    Conflict,
    InvalidInput,
    NeedsAttention,
    NotEncodable,
    NotFound,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    StoreUnavailable,
    UnknownAgent,
)
from perdure.reopen import LiveFork, Planner, Reopened
from perdure.schedule import Cron, Every, Schedule, schedule_of
from perdure.scheduling import ScheduleInfo, Scheduling
from perdure.settings import Settings
from perdure.store.api import (
    FINISHED,
    NO_VERSION,
    ApprovalFilter,
    ApprovalRow,
    CostRow,
    Current,
    NewRun,
    OpenAttempt,
    RunRow,
    Served,
)
from perdure.store.url import shown_url
from perdure.tool.artifact import Artifact, ids_in, in_call, pointers_in
from perdure.tool.secret import Resolver, check_resolver
from perdure.undo import Undoer, UndoPlan, undoable

if TYPE_CHECKING:
    from perdure.fork import Fork
    from perdure.inspect.audit import AuditLog
    from perdure.inspect.diff import Diff
    from perdure.inspect.inside import Inspection
    from perdure.otel import Telemetry
    from perdure.store.api import Store

log = logging.getLogger("perdure")
T = TypeVar("T")
CostsBy = Literal["agent", "tenant", "model", "day", "run", "root", "tool"]


_OLD_FIELDS = {"run_id": "id", "holder": "worker", "created_at": "created", "updated_at": "updated", "ready_at": "due"}


class FailureInfo(Struct, frozen=True):
    """Why a run failed: the type of the exception, the kind of failure (such as "timeout"), and the message."""

    type: str
    kind: FailureKind
    message: str


class RunningCall(Struct, frozen=True):
    """An attempt of a call that is under way."""

    call: int  # the number of the call
    tool: str  # the name of the tool or the model
    attempt: int
    since: datetime
    # What the tool last reported with `call.heartbeat`. It is stored every few seconds, so it may be a little old.
    progress: Any = None


class RunInfo(Struct, frozen=True):
    """A run, seen from outside: its status, what it waits for, how it ended. Times are datetimes in UTC."""

    id: str
    agent: str
    version: str  # empty: the version of the worker that will begin the run
    tenant: str
    actor: str | None
    queue: str
    priority: int
    status: Status
    waiting_for: str | None  # in words, such as "timer" or "2 children: …"
    attention: Reason | None  # why the run needs a person
    error: str | None
    parent: str | None  # the id of the parent run, if this run is a child
    parent_call: int | None  # the number of this child in the parent run
    worker: str | None  # the id of the worker that drives the run now
    seq: int  # the number of the run's last event
    created: datetime
    updated: datetime
    # From this time on a worker may claim the run. None: a worker drives the run now, or the run has ended, or only
    # post can wake it.
    due: datetime | None
    said: str | None = None  # the last text that the agent reported with `run.status`
    failure: FailureInfo | None = None  # if the run failed
    running: tuple[RunningCall, ...] = ()  # the attempts that are under way now
    specimen: bool = False  # the run is an imported copy (`perdure import`): no worker drives it, and it takes no post
    labels: dict[str, str] = {}
    cursor: str = ""  # in the answer of `app.list`: `after=` for the runs that follow

    @property
    def finished(self) -> bool:
        """Has the run ended: succeeded, failed or cancelled?"""
        return self.status in FINISHED

    def __getattr__(self, name: str) -> Any:
        new = _OLD_FIELDS.get(name)
        if new is None:
            raise AttributeError(f"RunInfo has no attribute {name!r}")
        warnings.warn(f"RunInfo.{name} is called {new} since 0.2", DeprecationWarning, stacklevel=2)
        value = getattr(self, new)
        return micros_of(value) if isinstance(value, datetime) else value


def _running(one: OpenAttempt) -> RunningCall:
    progress = None if one.progress is None else codec.decode(one.progress)
    return RunningCall(one.call, one.tool, one.attempt, utc_within(one.since), progress)


def info_of(row: RunRow, now: Current = Current()) -> RunInfo:  # noqa: B008
    """What users see of a run: facts from its row and from its journal.

    Other fields of the row, such as the lease, are only for workers.
    """
    failure = now.failure
    return RunInfo(
        id=row.run_id,
        agent=row.agent,
        version=row.version,
        tenant=row.tenant,
        actor=row.actor,
        queue=row.queue,
        priority=row.priority,
        status=row.status,
        waiting_for=row.waiting_for,
        attention=row.attention,
        error=row.error,
        parent=row.parent,
        parent_call=row.parent_call,
        worker=row.holder,
        seq=row.seq,
        created=utc_within(row.created_at),
        updated=utc_within(row.updated_at),
        due=None if row.ready_at is None else utc_within(row.ready_at),
        said=now.said,
        failure=None if failure is None else FailureInfo(failure.type, failure.kind, failure.message),
        running=tuple(_running(one) for one in now.running),
        specimen=row.specimen is not None,
    )


def _infos(reading: Reading, rows: Sequence[RunRow]) -> list[RunInfo]:
    """What users see of these runs. The journals are read with one query, and the labels with another one."""
    run_ids = [row.run_id for row in rows]
    now, labels = reading.current(run_ids), reading.labels(run_ids)
    return [structs.replace(info_of(row, now[row.run_id]), labels=labels[row.run_id]) for row in rows]


def _listed(reading: Reading, found: Sequence[tuple[str, RunRow]]) -> list[RunInfo]:
    infos = _infos(reading, [row for _, row in found])
    return [structs.replace(info, cursor=cursor) for info, (cursor, _) in zip(infos, found, strict=True)]


class RunStatus(str):
    """The status of a run: a `str`, such as "succeeded".

    Until 0.3 this object also has the fields of the object that `status()` returned in 0.1, with a warning.
    """

    __slots__ = ("_info",)
    _info: RunInfo

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        warnings.warn(f"handle.status() returns the status alone since 0.2: (await handle.info()).{name}", DeprecationWarning, stacklevel=2)
        return self._info.status if name == "status" else getattr(self._info, name)


class Perdure:
    """A journal, and the agents whose code this process has.

    Example: `async with Perdure("sqlite:///perdure.db", [support]) as app:`.

    Without `settings` the app reads the same settings as the command line: PERDURE_… in the environment, then
    perdure.toml or [tool.perdure] in the current folder. `url` replaces the URL in the settings. `queues` are the
    queues that `work` serves; None: all queues. `audit_log` is a file that gets a line for each event. After each
    commit of this app's worker, every function in `observers` is called on the event loop with the id of the run and the
    new events; an exception in it is logged, and the run goes on. `clock` is for tests.
    `telemetry` reports spans to OpenTelemetry (docs/tracing.md); without it, the setting `telemetry` decides.
    `artifacts` replaces the place for large artifacts in the settings: file:///folder or s3://bucket/prefix. `secrets`
    replaces the source of secrets in the settings: a function, sync or async, that takes the name of a secret and
    returns its value, or None if there is no such secret. `batch` is an id that is recorded
    with everything that this app tells runs: cancel, pause, unpause, retry, adopt, resolve. No run is
    driven in this process before `run`, `drive`, `undo`, `work` or a handle's `result` is called.
    """

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
        artifacts: str | None = None,
        telemetry: Telemetry | None = None,
        secrets: Resolver | None = None,
        batch: str = "",
    ) -> None:
        if url is not None and not isinstance(url, str):
            raise InvalidInput(f"Perdure({shown(url)}): a URL is text, such as 'sqlite:///perdure.db'")
        if settings is not None and not isinstance(settings, Settings):
            raise InvalidInput(f"Perdure(settings={shown(settings)}): settings are one object, such as Settings(lease_s=10)")
        self.settings = settings or load_settings({}, os.environ, Path.cwd())
        if artifacts is not None:
            self.settings = structs.replace(self.settings, artifacts=checked_place(artifacts, "Perdure(artifacts=…)"))
        if secrets is not None:
            check_resolver(secrets)
        self.secrets = secrets
        self.url = url or self.settings.url
        self.versions = _by_version(agents)
        # If `agents` has several versions of an agent, `start` uses the last version.
        self.agents = {agent.name: agent for agent in self.versions.values()}
        self.queues = queues
        self.clock = clock or Clock()
        self._batch = identity.check_id(batch, "Perdure(batch=…)") if batch else ""
        self._follows_server = clock is None
        self._observers = list(observers)
        self._audit_log = audit_log
        self._audit: AuditLog | None = None
        self.telemetry = _telemetry(telemetry, self.settings)
        self._engine = self._new_engine()
        # The reading side of the engine while the app is open. The clock uses it even while an agent runs. The
        # property `reading` cannot be used then, because it raises an exception.
        self._opened: Reading | None = None
        self._asking = ReadingThreads()

    async def __aenter__(self) -> Self:
        refuse_app()
        await self._engine.__aenter__()
        self._asking = ReadingThreads()
        self._opened = self._engine.reading
        if self._opened.remote and self._follows_server:
            # All workers of a remote database use the clock of its server.
            self.clock.follow(lambda: 0 if self._opened is None else self._opened.ahead_us)
        if self._audit_log is not None:
            from perdure.inspect.audit import AuditLog  # imported only if needed

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
        return new_engine(self.url, self.versions, self.settings, self.clock, self._observers, self.queues, self.telemetry, self.secrets)

    @property
    def engine(self) -> Engine:
        refuse_app()
        return self._engine

    @property
    def reading(self) -> Reading:
        """The reading side of the engine: rows, journals, costs. Its methods block (see `ask`)."""
        return self.engine.reading

    @property
    def store(self) -> Store:
        """The store of a local engine, for tests and maintenance. The app itself uses only `reading`."""
        return cast("Store", self.reading)

    @property
    def _control(self) -> Control:
        return Control(self.engine, self.ask, self.clock, self.settings, self._batch)

    # -- runs ---------------------------------------------------------------------------------------------------------
    async def start(
        self,
        agent: Agent[Any, Any] | AgentInput | str,
        /,
        *args: Any,
        id: str | None = NOTHING,
        tenant: str = NOTHING,
        actor: str | None = NOTHING,
        queue: str | None = NOTHING,
        priority: int = NOTHING,
        not_before: datetime | timedelta | None = NOTHING,
        budget: Budget | None = NOTHING,
        version: str | None = NOTHING,
        labels: Mapping[str, str] = NOTHING,
        trace: Mapping[str, str] | str | None = NOTHING,
        connection: Any = NOTHING,
        **kwargs: Any,
    ) -> Handle:
        """Create a run of an agent (or of the agent with this name). The run is durable when this returns.

        The run takes the version of the worker that begins it, unless `version` names one. An agent's name is enough
        also if this app does not have the agent's code. Then pass all arguments by name, as JSON values: the worker
        that begins the run checks them, and the run fails if they do not fit. Its queue is "default" unless you name
        one, and the budget that the agent declares applies when the run begins.

        A second start with the same `id` and the same input returns the same run. A second start with another input
        raises Conflict. If an argument of the agent has the same name as an option of `start`, pass `agent.input(…)`
        instead of the agent and its arguments.

        Without `tenant` the tenant is "default". `actor` is the person or program for whom the run acts. `priority` is
        from -1,000 to 1,000, and 0 by default. Among the runs of one tenant in one queue, the run with the highest
        priority is claimed first. `not_before` is a time, or a timedelta from now. `budget` replaces the budget of the
        agent. `labels` are short texts by which the run is found, such as {"customer": "c-7"}: `app.list(where=…)`.
        `trace` are the headers of the request that starts the run (or a traceparent): the run then belongs to that
        trace. Without `trace` it belongs to the current span of OpenTelemetry, if there is one; None: to no trace.

        With `connection`, the run is created in the transaction of that connection to the journal's own database, and
        exists when you commit: your rows and the run are one commit. It is a connection of psycopg 3, a Connection or
        Session of SQLAlchemy over psycopg 3 (sync or async), or of apsw if the journal is a SQLite file. Before the
        commit no worker sees the run, and the handle finds no run.
        """
        given: dict[str, Any] = {"id": id, "tenant": tenant, "actor": actor, "queue": queue, "priority": priority}
        given |= {
            "not_before": not_before,
            "budget": budget,
            "version": version,
            "labels": labels,
            "trace": trace,
            "connection": connection,
        }
        options = {name: value for name, value in given.items() if value is not NOTHING}
        if isinstance(agent, str) and agent not in self.agents:
            return await self.start_encoded(agent, named_input(agent, args, kwargs), **options)
        found, encoded = self._with_input(agent, args, kwargs)
        if encoded is None:
            _check_unambiguous(found, options)
            encoded = found.bind(args, kwargs)
        return await self.start_encoded(found, encoded, target=found.target, **options)

    async def start_encoded(
        self,
        agent: Agent[Any, Any] | str,
        encoded_input: bytes,
        *,
        id: str | None = None,
        tenant: str = "default",
        actor: str | None = None,
        target: str | None = None,
        queue: str | None = None,
        priority: int = 0,
        not_before: datetime | timedelta | None = None,
        budget: Budget | Limits | None = None,
        version: str | None = None,
        labels: Mapping[str, str] | None = None,
        trace: Mapping[str, str] | str | None = NOTHING,
        connection: Any = None,
    ) -> Handle:
        """Like `start`, for input that `agent.bind` has encoded. `target`: where the code of the agent is.

        `agent` is a name if its code is not known here; then `named_input` has encoded the input.
        """
        run_id = identity.check_id(self.clock.new_id() if id is None else id, "the run id")
        tenant = identity.check_id(tenant, "the tenant")
        if actor is not None:
            actor = identity.check_id(actor, "the actor")
        payload, blob = codec.pack(encoded_input, self.settings.inline_bytes)
        now = self.clock.now()
        code = None if isinstance(agent, str) else agent
        name = identity.check_id(agent, "the agent name") if isinstance(agent, str) else agent.name
        if version is None:
            # An object that is not the one that this app uses under this name is meant itself: an older version that
            # the app also serves.
            version = NO_VERSION if code is None or self.agents.get(name, code) is code else code.version
        else:
            identity.check_id(version, "the version")
        declared = (None, None) if code is None else (code.queue, code.budget)
        created = RunCreated(
            run_id=run_id,
            agent=name,
            version=version,
            tenant=tenant,
            input=payload,
            actor=actor,
            target=target,
            queue=identity.check_id((declared[0] or "default") if queue is None else queue, "the queue"),
            priority=_checked_priority(priority),
            not_before=None if not_before is None else _moment(not_before, now),
            budget=limits_of(budget, "budget=") or declared[1],
            key_scheme=identity.KEY_SCHEME,
            key_namespace=self.settings.key_namespace,
            by_name=code is None,
            labels=_checked_labels(labels),
            trace=_trace_context(trace, run_id),
        )
        new = NewRun(
            run_id,
            created,
            self.clock.new_id(),
            now,
            codec.digest(encoded_input),
            () if blob is None else (blob,),
            artifacts=tuple(ids_in(encoded_input)),
            needed_artifacts=tuple(artifact.id for artifact in pointers_in(encoded_input)),
        )
        row, is_new = await self.engine.start(new, connection)
        if not is_new:
            _same_run(row, name, tenant, actor, new.input_digest)
        return Handle(self, run_id)

    async def schedule(self, agent: Agent[Any, Any] | str, schedule: Schedule | Cron | Every, *, by: str = "app") -> ScheduleInfo:
        """Start runs of the agent at given times: add the schedule, or change it if there is one with its id.

        Nothing is recorded if it is as it should be. Without `id` in the Schedule, it has the name of the agent. An
        agent's name is enough; then the worker that begins a run checks its input. For a schedule that belongs to the
        code of the agent use `@agent(schedule=…)`: then workers register it.
        """
        declared = schedule_of(schedule)
        code = self.agents.get(agent, agent) if isinstance(agent, str) else agent
        name = identity.check_id(code, "the agent name") if isinstance(code, str) else code.name
        spec = declared.spec(name) if isinstance(code, str) else code.spec_of(declared)
        return await self.schedules.set(declared.id or name, spec, by=by)

    @property
    def schedules(self) -> Scheduling:
        """The schedules of this journal: list, get, next, pause, resume, remove, start_now."""
        return Scheduling(self.engine, self.ask, self.clock, self.settings)

    async def run(
        self,
        agent: Agent[Any, Any] | AgentInput | str,
        /,
        *args: Any,
        id: str | None = NOTHING,
        tenant: str = NOTHING,
        actor: str | None = NOTHING,
        budget: Budget | None = NOTHING,
        version: str | None = NOTHING,
        labels: Mapping[str, str] = NOTHING,
        trace: Mapping[str, str] | str | None = NOTHING,
        **kwargs: Any,
    ) -> Any:
        """Start a run, drive it and its children in this process, and return its result.

        Raises the same errors as `Handle.result`.
        """
        name = self._with_input(agent, args, kwargs)[0].name
        if name not in self.agents:
            raise UnknownAgent(f"this app does not serve agent {name} and cannot drive its runs: Perdure(url, agents=[{name}, …])")
        options: dict[str, Any] = {"id": id, "tenant": tenant, "actor": actor, "budget": budget, "version": version, "labels": labels}
        options["trace"] = trace
        handle = await self.start(agent, *args, **options, **kwargs)
        return await handle.result()

    def handle(self, run_id: str, *, tenant: str | None = None) -> Handle:
        """A handle on a run that exists. Nothing is read yet.

        With `tenant`, a run of another tenant is NotFound, like a run that does not exist.
        """
        check_tenant(tenant)
        return Handle(self, plain_text(run_id, "a run's id"), tenant)

    async def transcript(self, run_id: str, *, tenant: str | None = None) -> list[dict[str, Any]]:
        """The conversation of a run of a ReAct agent, so far.

        If the run has not ended, a call may have no result yet. Then a text in the place of the result says so. To
        continue the conversation of a run that has ended, pass the returned list as `history` to a new run.
        """
        await self.handle(run_id, tenant=tenant).row()
        from perdure.agents.react.transcript import transcript  # imported late: it loads the models

        return await self.ask(lambda: transcript(run_id, self.reading.read(run_id), self.load))

    async def count(
        self, *, where: str | None = None, agent: str | None = None, tenant: str | None = None, by: str = "status"
    ) -> dict[Any, int]:
        """How many runs have each status. A status without runs is not in the result.

        `where` is a query, as in `list`. `by` counts by something else: "agent", "version", "tenant", "queue", "error",
        or a label such as "label.customer". The largest groups come first, at most 1,000 of them. The key None counts
        the runs without an error, or without that label.
        """
        query = self._query(where, None, agent, tenant, "count")
        checked_group(by, "count(by=)")
        return await self._asking.ask(lambda: self.reading.count(query, by))

    def _query(self, where: str | None, status: Status | None, agent: str | None, tenant: str | None, what: str) -> Query:
        """The query with the other conditions added: it finds nothing of another tenant, whatever `where` says."""
        check_tenant(tenant)
        if agent is not None:
            plain_text(agent, "an agent's name")
        query = EVERYTHING if where is None else parse_query(where, self.clock.now(), f"{what}(where=)")
        return query.also(status=status, agent=agent, tenant=tenant)

    async def health(self, timeout: float = 5.0) -> float:
        """Ask the database whether the journal is open. Returns how many seconds the answer took.

        For the readiness check of a service: the question really goes to the file or to the server. Raises
        StoreUnavailable if the database cannot be reached, or has not answered after `timeout` seconds. Raises another
        StoreError if the journal cannot be used: it was moved, or is damaged.
        """
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise InvalidInput(f"health(timeout={shown(timeout)}): a number of seconds above 0")
        reading, began_s = self.reading, time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                await self._asking.ask(reading.check_open)
        except TimeoutError:
            raise StoreUnavailable(f"has not answered within {timeout:g} s", where=shown_url(self.url)) from None
        return time.monotonic() - began_s

    # -- working ------------------------------------------------------------------------------------------------------
    async def drive(self, run_id: str, *, wait: bool = True, stop: asyncio.Event | None = None, tenant: str | None = None) -> RunInfo:
        """Drive one run in this process until it ends, needs a person, or waits for something from outside.

        The run begins now, even if its `not_before` is later. Returns the info of the run. With `wait=False`, this
        also returns when the run waits for anything except its children. When `stop` is set, the run and its children
        are released, and other workers can claim them. Raises AlreadyRunning if another worker holds the run, and
        UnknownAgent or WrongVersion if this app does not have the code of the run.
        """
        handle = self.handle(run_id, tenant=tenant)
        if tenant is not None:
            await handle.row()
        row = await self.engine.drive(run_id, wait=wait, stop=stop)
        return await self.ask(lambda: _infos(self.reading, [row])[0])

    async def work(self, *, stop: asyncio.Event | None = None) -> None:
        """Serve the queues until `stop` is set or `drain` is called.

        Then the runs are released at their next step boundary. Several `work` calls can be under way in one app. Each
        of them ends when its own `stop` is set, and the last one releases the runs. After that, `work` can be called
        again.
        """
        await self.engine.work(stop=stop)

    def drain(self) -> None:
        """End every `work` that is under way. If no `work` is under way, the next `work` ends at once.

        No more runs are claimed, and the runs that this app holds are released at their next step boundary. A signal
        handler may call this.
        """
        # `drain` and `abort` do not refuse calls from inside an agent: a signal handler calls them, and a signal may
        # arrive while the code of an agent runs.
        self._engine.drain()

    def abort(self) -> None:
        """Stop driving at once and write nothing more, as in a crash."""
        self._engine.abort()

    # -- approvals ----------------------------------------------------------------------------------------------------
    async def approvals(
        self, *, status: ApprovalStatus | None = "pending", tenant: str | None = None, run_id: str | None = None, limit: int = 100
    ) -> list[ApprovalRow]:
        """The approvals that wait for a decision, sorted by their expiry.

        `status` selects approvals with another status; None: all approvals.
        """
        if status is not None and status not in get_args(ApprovalStatus):
            raise InvalidInput(f"approvals(status={shown(status)}): one of {', '.join(get_args(ApprovalStatus))}; None for all")
        _check_limit(limit, "approvals")
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
        """Approve in the name of the person `by`. The first decision counts: a later decision raises Conflict.

        `edit` has new values for fields that are editable. `roles` are roles of `by` in addition to the roles in the
        settings; perdure does not check them. `digest` is the digest of the input that the person has seen: if the
        approval is about another input, Conflict is raised. Raises NotPermitted if `by` may not decide about this
        approval.
        """
        if edit is not None and not isinstance(edit, dict):
            raise InvalidInput(f"edit={shown(edit)}: the fields to change and their values, such as {{'cents': 500}}")
        vote = Vote(by, True, role_names(roles), note, source, digest, edit)
        return await self._control.vote(approval, vote, tenant=tenant)

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
        """Reject in the name of the person `by`. The agent sees the reason. The other options are as in `approve`."""
        if not isinstance(reason, str) or not reason.strip():
            raise InvalidInput("reject(reason=…): say why; the agent sees it")
        vote = Vote(by, False, role_names(roles), reason, source, digest)
        return await self._control.vote(approval, vote, tenant=tenant)

    # -- steering -----------------------------------------------------------------------------------------------------
    async def signal(
        self, run_id: str, topic: str, payload: Any = None, *, key: str | None = None, by: str = "app", tenant: str | None = None
    ) -> None:
        """Send a signal to a run. The signal is durable when this returns.

        The agent gets the payload from `run.receive(topic)`. Signals on one topic keep their order, and wait until the
        agent receives them. A second signal with the same `key` on the same topic changes nothing. Raises RunEnded if
        the run has ended.
        """
        await self._control.signal(run_id, topic, payload, by=by, key=key, tenant=tenant)

    async def cancel(
        self, run_id: str, *, by: str = "app", reason: str | None = None, force: bool = False, tenant: str | None = None
    ) -> None:
        """Ask a run to stop. The agent gets a CancelledError and may clean up. Then the status is `cancelled`.

        `force=True` ends a run that no worker holds, at once and without its agent. Calls in doubt stay in doubt.
        """
        _check_flag(force, "cancel(force=)")
        act = self._control.end if force else self._control.cancel
        await act(run_id, by=by, reason=reason, tenant=tenant)

    async def pause(self, run_id: str, *, by: str = "app", reason: str | None = None, tenant: str | None = None) -> None:
        """Stop a run at its next step, until `unpause`. Attempts under way end first.

        Post that arrives while the run is paused is kept.
        """
        await self._control.pause(run_id, by=by, reason=reason, tenant=tenant)

    async def unpause(
        self, run_id: str, *, by: str = "app", note: str | None = None, add: Budget | None = None, tenant: str | None = None
    ) -> list[str]:
        """Continue a run that is paused or needs attention. Returns the ids of the runs that continue.

        `add=Budget(usd=5)` adds to the budget that the run has used up. Then every run that this budget has stopped
        continues.
        """
        added = limits_of(add, "add=")
        return await self._control.unpause(run_id, by=by, note=note, add=added, tenant=tenant)

    async def retry(
        self,
        run_id: str,
        *,
        by: str = "app",
        reason: str | None = None,
        dry_run: bool = False,
        fresh: bool = False,
        add: Budget | None = None,
        tenant: str | None = None,
    ) -> Reopened:
        """Let a run that has failed or was cancelled go on. Returns a description; `dry_run=True` changes nothing.

        Calls that failed are attempted again. Calls that have a result are not made again. If the agent itself failed,
        it takes its last step again, with this app's code. `add=Budget(usd=5)` adds to the budget that the run has used
        up, in the same commit. Raises Diverged, and records nothing, if this code asks for other calls than the journal
        has up to that point.
        """
        return await self._reopen(run_id, None, by=by, reason=reason, dry_run=dry_run, fresh=fresh, add=add, tenant=tenant)

    async def rewind(
        self,
        run_id: str,
        to: int,
        *,
        by: str = "app",
        reason: str | None = None,
        dry_run: bool = False,
        fresh: bool = False,
        add: Budget | None = None,
        tenant: str | None = None,
    ) -> Reopened:
        """Let a run go on from its event `to`. The run must not be running, and must not have succeeded.

        No effect happens a second time: if the agent makes a call again (the same tool with the same arguments), the
        recorded result is used. `fresh=True`: `read` calls and requests to models are made again. Returns a
        description of the change. `dry_run=True` changes nothing. `add` and errors: as for `retry`.
        """
        if not isinstance(to, int) or isinstance(to, bool):
            raise InvalidInput(f"rewind(to={shown(to)}): the number of an event")
        return await self._reopen(run_id, to, by=by, reason=reason, dry_run=dry_run, fresh=fresh, add=add, tenant=tenant)

    async def _reopen(
        self,
        run_id: str,
        to: int | None,
        *,
        by: str,
        reason: str | None,
        dry_run: bool,
        fresh: bool,
        add: Budget | None,
        tenant: str | None,
    ) -> Reopened:
        _check_flag(dry_run, "dry_run")
        _check_flag(fresh, "fresh")
        who, why, more, planner = known_name(by), words(reason, "reason"), limits_of(add, "add="), self._planner()
        plan = await self._asking.ask(lambda: planner.plan(run_id, to, by=who, reason=why, fresh=fresh, add=more, tenant=tenant))
        if not dry_run:
            await self.engine.reopen(plan.runs)
            for owner in plan.raised:  # a child that the budget has stopped, and that did not have to be reopened
                await self._control.unpause_under(owner, by=who, note=why)
        return plan.reopened

    def _planner(self) -> Planner:
        return Planner(
            self.reading,
            self._agent,
            self.load,
            max_steps=self.settings.max_steps,
            max_asks=self.settings.reconcile_asks,
            now=self.clock.now(),
            new_id=self.clock.new_id,
            batch=self._batch,
        )

    # -- forks --------------------------------------------------------------------------------------------------------
    async def live_fork(
        self,
        run_id: str,
        *,
        id: str | None = None,
        at: int | None = None,
        edits: dict[int, Any] | None = None,
        input: dict[str, Any] = NOTHING,
        by: str = "app",
        reason: str | None = None,
        dry_run: bool = False,
        tenant: str | None = None,
    ) -> LiveFork:
        """Make a new run out of the events of another one, and let it go on from its event `at`: with effects.

        Returns what that means; look at `twice` first, with `dry_run=True`, which writes nothing. What the other run has done
        does not happen again: if the fork makes the same call (the same tool with the same arguments), the recorded result
        is used. Every other call has a key of its own, and really happens. `edits`, `input` and `at`: as for `fork`. Raises
        Conflict if a call of the other run is in doubt or under way, or if `id` is taken; Diverged, and nothing is written,
        if this code asks for other calls than the journal has up to `at`.
        """
        _check_flag(dry_run, "dry_run")
        check_tenant(tenant)
        who, why, planner = known_name(by), words(reason, "reason"), self._planner()
        row = await self.handle(run_id, tenant=tenant).row()
        agent, new_id = self._agent(row.agent), identity.check_id(self.clock.new_id() if id is None else id, "the run id")
        plan = await self._asking.ask(
            lambda: planner.fork(
                row.run_id,
                new_id,
                at,
                by=who,
                reason=why,
                edits=edits or {},
                input=UNSET if input is NOTHING else input,
                agent=agent,
                inline_bytes=self.settings.inline_bytes,
            )
        )
        if not dry_run:
            await self.engine.fork(plan.new)
        return plan.fork

    async def fork(
        self,
        run_id: str,
        *,
        at: int | None = None,
        edits: dict[int, Any] | None = None,
        input: dict[str, Any] = NOTHING,
        model: str | None = None,
        answers: Sequence[dict[str, Any]] = (),
        reads: bool = False,
        id: str | None = None,
        by: str = "app",
        reason: str | None = None,
        tenant: str | None = None,
    ) -> Fork:
        """Rehearse a run with this app's code from its event `at` on: what would its agent do?

        Nothing is stored, unless `id` gives the fork an id: then it can be looked at like any run, and no worker drives it.

        No tool touches the world. A call with the same tool and the same arguments as a recorded call gets the
        recorded outcome. For every other call, the answer comes from `answers`, or else from the tool's stand-in
        (`@tool.simulate`). An entry of `answers` is such as `{"tool": "refund", "args": {"order": "o-7"}, "result":
        "done"}`; `args` may name only some of the arguments; with `error` instead of `result`, the call fails. With
        `reads=True`, `read` tools are called and models are asked. At a call without an answer the rehearsal stops,
        and `would_call` has that call.

        `edits`: number of a call → the result to use instead. `input`: other arguments of the agent. `model`: the name
        of another model for a ReAct agent; then models are asked. Without `at`, the fork begins before the outcome of
        the first edited call, or at the beginning. Raises Diverged if this code asks for other calls than the journal
        has up to `at`, and NotReady if a model or a `read` tool cannot be reached.
        """
        _check_flag(reads, "fork(reads=)")
        check_tenant(tenant)
        from perdure.fork import Forks, Keep, stubs_of  # imported only if needed

        row = await self.handle(run_id, tenant=tenant).row()
        agent = self._agent(row.agent)
        if model is not None:
            agent = agent.with_model(model)
        who, why = known_name(by), words(reason, "reason")
        keep = None if id is None else Keep(identity.check_id(id, "the run id"), who, self.clock.now(), self.clock.new_id, why, model)
        if keep is not None and await self._asking.ask(lambda: self.reading.get(keep.id)) is not None:
            raise Conflict(f"run {keep.id} exists; choose another id for the fork")  # before a model is asked
        async with Forks(
            self.reading, self.settings, answers=stubs_of(answers), reads=reads, models=model is not None, resolver=self.secrets
        ) as forks:
            given: Any = UNSET if input is NOTHING else input
            fork, new = await forks.fork(row.run_id, agent, at=at, edits=edits, input=given, keep=keep)
        if new is not None:
            await self.engine.fork(new)
        return fork

    async def diff(self, run_id: str, other: str, *, tenant: str | None = None) -> Diff:
        """Compare two runs: their calls, arguments and results, their outcome and their cost."""
        from perdure.inspect.diff import diff_of, path_of  # imported only if needed

        paths = []
        for one in (run_id, other):
            handle = self.handle(one, tenant=tenant)
            paths.append(path_of(f"run {one}", await handle.events(), self.load))
        return diff_of(*paths)

    async def requeue(self, run_id: str, *, by: str = "app", note: str | None = None, tenant: str | None = None) -> None:
        """Deprecated since 0.2: use `unpause`, which also continues a run that needs attention."""
        warnings.warn("app.requeue is deprecated since 0.2: use app.unpause", DeprecationWarning, stacklevel=2)
        await self.unpause(run_id, by=by, note=note, tenant=tenant)

    async def adopt(
        self, run_id: str, *, by: str = "app", note: str | None = None, dry_run: bool = False, tenant: str | None = None
    ) -> None:
        """Let this app's version of the agent continue a run of another version. The journal records this.

        A run of a ReAct agent keeps its conversation, and goes on with the instructions, tools, model and limits of this
        version from its next turn on. A run that follows a plan keeps the steps that have begun, and goes on with the other
        steps of this version's plan. Raises Diverged, and records nothing, if this code asks for other calls than the
        journal has, and Conflict if an open call of the run, or a step that has begun, is in the way. `dry_run=True` only
        checks that.
        """
        _check_flag(dry_run, "adopt(dry_run=)")
        row = await self.handle(run_id, tenant=tenant).row()
        agent, who, why = self._agent(row.agent), known_name(by), words(note, "note")

        def look() -> tuple[RunAdopted | FrameChanged, int]:
            events = self.reading.read(run_id)
            state = fold(events)
            return agent.adoption(state, events, self.load, self.settings.max_steps, by=who, note=why), state.seq

        # The check runs in a thread, because it reads a whole journal and replays it.
        body, seen = await self._asking.ask(look)
        if dry_run:
            return
        # If the run has moved on since, it may have another turn, or another open call.
        await self.engine.post(run_id, in_batch(body, self._batch), seen=seen, tenant=tenant)

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
        attempt: int | None = None,
        tenant: str | None = None,
    ) -> None:
        """Resolve a call in doubt with one of three answers: `happened=RESULT`, `did_not_happen=True` or `fail="why"`.

        While the request may still arrive at the service, `did_not_happen=True` raises Conflict. With `final=True` you
        say that the request can never take effect, for example because the service has cancelled the key. With `attempt`,
        the answer counts only for this attempt: Conflict if another attempt of the call is in doubt by now.
        """
        answer: dict[str, Any] = {"happened": happened, "did_not_happen": did_not_happen, "fail": fail, "final": final, "attempt": attempt}
        await self._control.resolve(run_id, call, **answer, by=by, note=note, tenant=tenant)

    # -- undoing ------------------------------------------------------------------------------------------------------
    async def plan_undo(self, run_id: str, *, tenant: str | None = None) -> UndoPlan:
        """What `undo` would undo in a run that has ended, and what it cannot undo. Nothing is written.

        This app must have the agent of the run.
        """
        found = await self.handle(run_id, tenant=tenant).row()
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
    ) -> RunInfo:
        """Call the compensate hooks of a run's completed calls, the last call first.

        The hooks are called by another run, RUN/undo. Returns the info of that run. If some calls cannot be undone,
        Conflict names them; with `accept=True` the other calls are undone. A second undo continues where the first
        undo stopped, and calls a failed hook again.
        """
        _check_flag(accept, "undo(accept=)")
        by = known_name(by)
        found = await self.handle(run_id, tenant=tenant).row()
        row = await self.ask(lambda: undoable(self.reading, found.run_id))
        undone = await self._undoer.undo(row, self._agent_of(row), by=by, accept=accept, wait=wait, stop=stop)
        return await self.ask(lambda: _infos(self.reading, [undone])[0])

    @property
    def _undoer(self) -> Undoer:
        return Undoer(self.engine, self.ask, self.settings, self.clock, self._control)

    def _agent_of(self, row: RunRow) -> Agent[Any, Any]:
        return self.versions.get(Served(row.agent, row.version)) or self._agent(row.agent)

    # -- what it cost -------------------------------------------------------------------------------------------------
    async def costs(self, by: CostsBy = "agent", *, since: datetime | None = None, tenant: str | None = None) -> list[CostRow]:
        """Sums of calls, time, tokens and money, by agent, tenant, model, day, run, root or tool.

        A replay adds nothing to these sums.
        """
        if by not in get_args(CostsBy):
            raise InvalidInput(f"costs({shown(by)}): one of {', '.join(get_args(CostsBy))}")
        if since is not None and not isinstance(since, datetime):
            raise InvalidInput(f"costs(since={shown(since)}): a datetime with a time zone, such as datetime.now(UTC) - timedelta(days=7)")
        check_tenant(tenant)
        after = 0 if since is None else _moment(since, 0)
        return await self._asking.ask(partial(self.reading.costs, by, since=after, tenant=tenant))

    async def ask(self, question: Callable[[], T]) -> T:
        """Call a blocking method of `reading`: directly for a local database, in a thread for a remote database."""
        return await self._asking.ask(question) if self.reading.remote else question()

    # -- internal -----------------------------------------------------------------------------------------------------
    def _with_input(
        self, agent: Agent[Any, Any] | AgentInput | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Agent[Any, Any], bytes | None]:
        """The agent. If `agent` is an AgentInput, also the encoded arguments."""
        if not isinstance(agent, AgentInput):
            return self._agent(agent), None
        if args or kwargs:
            raise InvalidInput(f"{agent.agent.name}.input(…) already has the arguments of the agent: pass only options beside it")
        return agent.agent, agent.encoded

    def _agent(self, agent: Agent[Any, Any] | str) -> Agent[Any, Any]:
        if isinstance(agent, Agent):
            return agent
        if not isinstance(agent, str):
            raise InvalidInput(f"{shown(agent)} is not an agent: decorate the coroutine function with @agent")
        if agent not in self.agents:
            raise UnknownAgent(f"agent {agent!r} is not known here; known are {', '.join(self.agents) or 'none'}: Perdure(url, agents=[…])")
        return self.agents[agent]

    def load(self, payload: Payload) -> bytes:
        """The JSON of a recorded payload, which is inline or in a blob."""
        inline = payload.inline
        return self.reading.blob(str(payload.blob)) if inline is None else inline

    # This method comes last: after its definition, the name `list` means this method inside the class.
    async def list(
        self,
        *,
        status: Status | None = None,
        agent: str | None = None,
        tenant: str | None = None,
        limit: int = 100,
        before: datetime | None = None,
        where: str | None = None,
        after: str | None = None,
        oldest_first: bool = False,
    ) -> list[RunInfo]:
        """Runs, the newest run first. For the next page, pass the `cursor` of the last run as `after`.

        `where` is a query such as "status:failed,cancelled label.customer:c-7 -agent:report since:2d" (see
        docs/finding-runs.md). A run must match it and all other arguments. Page by page, each run is found once,
        however many were created at the same time. `before`: only runs that were created before this time.
        """
        _check_status(status, "list")
        _check_limit(limit, "list")
        _check_flag(oldest_first, "list(oldest_first=)")
        query = self._query(where, status, agent, tenant, "list")
        if before is not None:
            query = Query((*query.terms, Term("created", "<", number=_moment(before, 0))))
        if after is not None:
            plain_text(after, "a cursor")
        return await self.ask(lambda: _listed(self.reading, self.reading.find(query, limit, after, oldest_first=oldest_first)))


class Handle:
    """One run, seen from outside. `app.start` and `app.handle` return a Handle. `id` is the id of the run."""

    def __init__(self, app: Perdure, run_id: str, tenant: str | None = None) -> None:
        self.id = run_id
        self._app = app
        self._tenant = tenant

    async def info(self) -> RunInfo:
        """The run now: its status, what it waits for, how it ended. Raises NotFound if there is no such run."""
        return await self._app.ask(lambda: _infos(self._app.reading, [self._row()])[0])

    async def row(self) -> RunRow:
        """The run's row in the store, with its lease. For perdure's own commands; not part of the public API."""
        return await self._app.ask(self._row)

    async def status(self) -> RunStatus:
        """The status of the run as text: "running", "waiting", "succeeded" …"""
        info = info_of(await self.row())
        status = RunStatus(info.status)
        status._info = info
        return status

    def _row(self) -> RunRow:
        row = self._app.reading.get(self.id)
        if row is None or self._tenant not in (None, row.tenant):
            raise no_such_run(self.id, self._app.reading)
        return row

    async def result(self, timeout: float | None = None) -> Any:
        """Wait for the run's result, and return it.

        If this app has the agent and no other worker holds the run, the run is driven in this process. Raises
        RunFailed or RunCancelled if the run failed or was cancelled, NeedsAttention if the run waits for a person, and
        ResultTimeout after `timeout` seconds. After a ResultTimeout the run continues.
        """
        if timeout is not None and (not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or math.isnan(timeout)):
            raise InvalidInput(f"result(timeout={shown(timeout)}): a number of seconds, or None to wait for ever")
        try:
            async with asyncio.timeout(timeout):
                if self._tenant is not None:
                    await self.row()
                found = await self._app.engine.result(self.id)
        except TimeoutError:
            raise ResultTimeout(self.id, f"no result after {timeout} s; the run goes on") from None
        row = found.row
        if found.output is not None:
            agent = self._app.versions.get(Served(row.agent, row.version)) or self._app.agents.get(row.agent)
            token = in_call.set(self._vault())  # artifacts in the result can be opened through this app
            try:
                return codec.decode(found.output) if agent is None else agent.decode_result(found.output)
            finally:
                in_call.reset(token)
        if row.status == "failed":
            raise RunFailed(self.id, row.error or "failed")
        if row.status == "cancelled":
            raise RunCancelled(self.id, "cancelled")
        raise NeedsAttention(
            row.run_id, f"needs attention: {row.error or row.waiting_for}", hint=f"what to do: {shell.command('why', row.run_id)}"
        )

    def artifact(self, pointer: Artifact | dict[str, Any]) -> Artifact:
        """An artifact of this run, so that you can open it here: `await handle.artifact(pointer).read()`.

        `pointer` is an Artifact, or its JSON value. This method is not needed if the agent's return annotation names
        Artifact: then the artifacts in the value of `result` can be opened directly. If this run may not open the artifact, NotFound is
        raised when it is opened.
        """
        fields = pointer if isinstance(pointer, dict) else dataclasses.asdict(pointer)
        token = in_call.set(self._vault())
        try:
            return Artifact(**fields)
        except TypeError:
            raise InvalidInput(f"{shown(pointer)} is not the pointer of an artifact: uri, sha256, size, content_type") from None
        finally:
            in_call.reset(token)

    def _vault(self) -> RunVault:
        return RunVault(self._app.reading, self.id, self._app._asking.ask, self._tenant)

    async def events(self, after: int = 0) -> list[Event]:
        """The events of the run with a number above `after`."""
        _check_after(after)
        await self.row()
        return await self._app.ask(lambda: self._app.reading.read(self.id, after))

    @overload
    def follow(self, after: int = 0, *, progress: Literal[False] = False) -> AsyncGenerator[Event, None]: ...
    @overload
    def follow(self, after: int = 0, *, progress: bool) -> AsyncGenerator[Event | RunningCall, None]: ...
    async def follow(self, after: int = 0, *, progress: bool = False) -> AsyncGenerator[Any, None]:
        """Yields the events of the run until the run has ended: `async for event in handle.follow():`.

        What the agent says with `run.status` is an event (`status_reported`). With `progress=True`, a `RunningCall` is
        yielded, too, each time a call under way has reported something with `call.heartbeat`, also if a worker in
        another process drives the run. Progress is stored every `progress_s` (2) seconds, so a tool that reports more
        often is not heard each time.

        To be able to leave the loop earlier, use `async with contextlib.aclosing(handle.follow()) as events:`.
        """
        _check_after(after)
        await self.row()
        async with aclosing(self._app.engine.follow(self.id, after, progress=progress)) as events:
            async for event in events:
                yield event if isinstance(event, Event) else _running(event)

    async def state(self, at: int | None = None) -> RunState:
        """The state of the run, now or right after event number `at`."""
        if at is not None and (not isinstance(at, int) or isinstance(at, bool)):
            raise InvalidInput(f"state(at={shown(at)}): the seq of an event, a whole number, or None for now")
        events = await self.events()
        if at is not None and event_at(events, at) is None:
            removed = 1 <= at <= events[-1].seq
            raise NotFound(
                f"run {self.id}: event {at} was removed; its checkpoint is event {events[1].seq}"
                if removed
                else f"run {self.id} has events 1 to {events[-1].seq}; there is no event {at}"
            )
        return fold(events if at is None else events[: place_of(events, at)])

    async def inspect(self, at: int | None = None, *, all_frames: bool = False) -> Inspection:
        """Look into the agent: its tasks, the lines where they wait, their variables, and what they wait for.

        The result shows the agent right after event number `at`, or at the end of the journal. For a run that failed,
        it shows the line that failed. The app needs the code of the agent in the version of the run. The recorded
        events are given to this code again, on this event loop; nothing is performed and nothing is written. With
        `all_frames`, the result also has the frames of perdure and of the standard library. Raises NotFound if there
        is no such event or the agent had not begun, UnknownAgent or WrongVersion without the right code, and Diverged
        if the code asks for something else than the journal has.
        """
        if at is not None and (not isinstance(at, int) or isinstance(at, bool)):
            raise InvalidInput(f"inspect(at={shown(at)}): the seq of an event, a whole number, or None for the end of the journal")
        _check_flag(all_frames, "inspect(all_frames=)")
        from perdure.inspect.inside import journal_at, look_inside, moment_of  # imported only if needed

        app, row = self._app, await self.row()
        journal = journal_at(self.id, await app.ask(lambda: app.reading.read(self.id)), at)
        agent = app.versions.get(Served(row.agent, journal.state.version)) or app.agents.get(row.agent)
        if agent is None:
            raise UnknownAgent(f"agent {row.agent!r} is not known here, and its code is needed: Perdure(url, agents=[{row.agent}, …])")
        with moment_of(agent, journal, app.load, max_steps=app.settings.max_steps) as moment:
            return look_inside(moment, all_frames=all_frames)


MAX_PRIORITY = 1_000


def _telemetry(given: Telemetry | None, settings: Settings) -> Telemetry | None:
    if given is None and settings.telemetry == "off":
        return None
    from perdure.otel import Telemetry  # imported only if needed

    if given is not None and not isinstance(given, Telemetry):
        raise InvalidInput(f"Perdure(telemetry={shown(given)}): Telemetry() of perdure.otel, or None for what the settings say")
    return given or Telemetry(payloads=settings.telemetry == "payloads")


def _trace_context(trace: Mapping[str, str] | str | None, run_id: str) -> TraceContext | None:
    """The trace context of the program that starts a run. Without `trace`: the current span, if there is one."""
    if trace is None:
        return None
    if trace is not NOTHING:
        context, complaint = read_headers(trace, "trace=")
        if complaint is not None:
            log.warning("run %s: %s", run_id, complaint, extra={"run": run_id})
        return context
    if "opentelemetry.trace" not in sys.modules:
        return None  # no code of this process has a span
    from perdure.otel import current_span

    span = current_span()
    return None if span is None else span.recorded


def _checked_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    if labels is None:
        return {}
    given = with_labels({}, checked_labels(labels, "labels="))
    check_number(given, "labels=")
    return given


def _checked_priority(priority: int) -> int:
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_PRIORITY:
        raise InvalidInput(f"priority={shown(priority)}: a whole number from -{MAX_PRIORITY:,} to {MAX_PRIORITY:,}; higher goes first")
    return priority


def _check_flag(flag: bool, what: str) -> None:
    # Without this check every non-empty value would count as True, even the text "no".
    if not isinstance(flag, bool):
        raise InvalidInput(f"{what}: {shown(flag)} is neither True nor False")


def _moment(when: datetime | timedelta, now: int) -> int:
    """Microseconds since 1970. A timedelta counts from `now`. Raises InvalidInput for a time without a time zone."""
    if isinstance(when, timedelta):
        micros = now + when // timedelta(microseconds=1)
    elif isinstance(when, datetime) and when.tzinfo is not None:
        micros = micros_of(when)
    else:
        raise InvalidInput(f"{shown(when)}: a datetime with a time zone, such as datetime.now(UTC) + timedelta(hours=1), or a timedelta")
    if not 0 <= micros <= LATEST_US:
        raise InvalidInput(f"{shown(when)} lies before 1970 or after 9999")
    return micros


def _check_limit(limit: int, what: str) -> None:
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit < 1 << 32:
        raise InvalidInput(f"{what}(limit={shown(limit)}): a whole number, at least 1 and below 2³²")


def _check_status(status: Status | None, what: str) -> None:
    if status is not None and status not in get_args(Status):
        raise InvalidInput(f"{what}(status={shown(status)}): one of {', '.join(get_args(Status))}; None for all")


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
    former = {Served(one.name, version): one for one in known.values() for version in one.former_versions}
    # The former versions come first: a run without a version takes the last version of its agent.
    return {**{served: agent for served, agent in former.items() if served not in known}, **known}


def named_input(agent: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Canonical JSON of the arguments for an agent whose code is not known here."""
    if args:
        raise InvalidInput(
            f"agent {agent!r}: its code is not known here, and with it the names of its parameters: pass each argument by name, "
            f"app.start({agent!r}, name=value), or give the code, Perdure(url, agents=[…])"
        )
    try:
        return codec.encode(dict(kwargs))
    except NotEncodable as error:
        raise NotEncodable(f"agent {agent!r}: {error}; its code is not known here, so that its arguments have to be JSON values") from None


def _check_unambiguous(agent: Agent[Any, Any], options: dict[str, Any]) -> None:
    """Raise InvalidInput if an option of `start` has the same name as a parameter of the agent.

    That parameter would never receive the value.
    """
    both = next((name for name in options if name in agent.parameter_names), None)
    if both is not None:
        raise InvalidInput(
            f"{both}= is ambiguous: agent {agent.name} takes an argument of that name, and so does the start of a run. Keep them apart: "
            f"app.start({agent.name}.input({both}=…), {both}=…)"
        )


def _same_run(row: RunRow, agent: str, tenant: str, actor: str | None, input_digest: str) -> None:
    if row.tenant != tenant:
        # All tenants of a database share the run ids, because idempotency keys and the ids of children are derived
        # from run ids. So the message has to say that the id is taken. It must not name the owner, the agent or the
        # status.
        raise Conflict(f"the run id {row.run_id} is taken; choose another")
    if row.agent != agent:
        raise Conflict(f"run {row.run_id} belongs to agent {row.agent}, not {agent}; choose another id")
    if actor is not None and row.actor != actor:
        raise Conflict(f"run {row.run_id} acts for {row.actor or 'no named person'}, not for {actor}; choose another id")
    if row.input_digest != input_digest:
        resume = shell.command("resume", row.run_id)
        raise Conflict(f"run {row.run_id} exists with another input; choose another id", hint=f"or resume it as it is: {resume}")
