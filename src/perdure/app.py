"""Perdure: start runs, wait for them, steer them, and drive them in this process."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from perdure.agent import Agent
from perdure.core import codec, keys
from perdure.core.codec import Payload
from perdure.core.events import AnyBody, CancelRequested, Event, Failure, RunCreated, RunRequeued, RunSucceeded, ToolCallResolved
from perdure.core.failures import clean
from perdure.core.state import RunState, fold
from perdure.errors import (
    AlreadyRunning,
    Conflict,
    InvalidInput,
    NeedsAttention,
    NotFound,
    ResultTimeout,
    RunCancelled,
    RunEnded,
    RunFailed,
    UnknownAgent,
)
from perdure.settings import Settings
from perdure.store.api import FINISHED, NewRun, RunRow, Status, Store
from perdure.store.open import open_store
from perdure.worker.clock import Clock
from perdure.worker.worker import Observer, Worker

if TYPE_CHECKING:
    from perdure.inspect.audit import AuditLog

T = TypeVar("T")
_NOTHING: Any = object()


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
    ) -> None:
        if url is not None and not isinstance(url, str):
            raise InvalidInput(f"Perdure({url!r:.80}): a URL is text, such as 'sqlite:///perdure.db'")
        if settings is not None and not isinstance(settings, Settings):
            raise InvalidInput(f"Perdure(settings={settings!r:.80}): settings are one object, such as Settings(lease_s=10)")
        self.settings = settings or Settings()
        self.url = url or (self.settings.url if settings else os.environ.get("PERDURE_URL") or self.settings.url)
        self.agents = _by_name(agents)
        self.clock = clock or Clock()
        self._observers = list(observers)
        self._audit_log = audit_log
        self._audit: AuditLog | None = None
        self._store: Store | None = None
        self._worker: Worker | None = None
        self._opening = asyncio.Lock()
        self._drain = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._store = open_store(self.url, synchronous=self.settings.synchronous)
        if self._audit_log is not None:
            from perdure.inspect.audit import AuditLog  # only who wants one pays for its import

            self._audit = AuditLog(self._audit_log, self._store.read)
            self._observers.append(self._audit.committed)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._worker is not None:
                await self._worker.__aexit__(kind, error, trace)
        finally:
            self._worker = None
            if self._audit is not None:
                self._audit.close()
            if self._store is not None:
                self._store.close()
                self._store = None

    @property
    def store(self) -> Store:
        if self._store is None:
            raise InvalidInput("the app is not open: use it in an `async with Perdure(…) as app:` block")
        return self._store

    # -- runs ---------------------------------------------------------------------------------------------------------
    async def start(
        self,
        agent: Agent[Any, Any] | str,
        /,
        *args: Any,
        id: str | None = None,
        tenant: str = "default",
        actor: str | None = None,
        **kwargs: Any,
    ) -> Handle:
        """Create a run; it is durable when this returns. The same id with the same input is the same run; with another, Conflict."""
        found = self._agent(agent)
        return await self.start_encoded(found, found.bind(args, kwargs), id=id, tenant=tenant, actor=actor, target=found.target)

    async def start_encoded(
        self,
        agent: Agent[Any, Any],
        encoded_input: bytes,
        *,
        id: str | None = None,
        tenant: str = "default",
        actor: str | None = None,
        target: str | None = None,
    ) -> Handle:
        """The same for input that `agent.bind` has made; `target` says where the code is."""
        run_id = keys.check_id(self.clock.new_id() if id is None else id, "the run id")
        keys.check_id(tenant, "the tenant")
        if actor is not None:
            keys.check_id(actor, "the actor")
        payload, blob = codec.pack(encoded_input, self.settings.inline_bytes)
        created = RunCreated(
            run_id=run_id, agent=agent.name, version=agent.version, tenant=tenant, input=payload, actor=actor, target=target
        )
        new = NewRun(run_id, created, self.clock.new_id(), self.clock.now(), codec.digest(encoded_input), () if blob is None else (blob,))
        row, is_new = await self._write(lambda: self.store.create_run(new))
        if not is_new:
            _same_run(row, agent.name, tenant, new.input_digest)
        return Handle(self, run_id)

    async def run(
        self,
        agent: Agent[Any, Any] | str,
        /,
        *args: Any,
        id: str | None = None,
        tenant: str = "default",
        actor: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start a run, drive it in this process and return its result."""
        name = self._agent(agent).name
        if name not in self.agents:
            raise UnknownAgent(f"agent {name} is not served by this app, so that it cannot drive it: Perdure(url, agents=[{name}, …])")
        handle = await self.start(agent, *args, id=id, tenant=tenant, actor=actor, **kwargs)
        return await handle.result()

    def handle(self, run_id: str) -> Handle:
        """A handle on a run that exists, or will be NotFound when it is used."""
        return Handle(self, run_id)

    # -- working ------------------------------------------------------------------------------------------------------
    async def drive(self, run_id: str, *, wait: bool = True, stop: asyncio.Event | None = None) -> RunRow:
        """Drive one run here until it ends, needs a person, or waits for something from outside. Returns its row then."""
        return await (await self._working()).drive_one(run_id, wait=wait, stop=stop)

    async def work(self, *, stop: asyncio.Event | None = None) -> None:
        """Serve the queue until `stop` is set or `drain` is called; then hand over what is under way."""
        await (await self._working()).serve(stop or self._drain)

    def drain(self) -> None:
        """End `work`: no run is claimed any more, those under way are handed over at their next step boundary."""
        self._drain.set()

    def abort(self) -> None:
        """Stop driving at once and write nothing more, as a crash would."""
        if self._worker is not None:
            self._worker.abort()

    async def _working(self) -> Worker:
        async with self._opening:
            if self._worker is None:
                if not self.agents:
                    raise UnknownAgent("no agents to drive: pass them, Perdure(url, agents=[…])")
                worker = Worker(self.store, self.agents.values(), self.settings, self.clock, self._observers)
                self._worker = await worker.__aenter__()
        return self._worker

    # -- steering -----------------------------------------------------------------------------------------------------
    async def cancel(self, run_id: str, *, by: str = "app", reason: str | None = None) -> None:
        """Ask for a run to be cancelled. Its agent sees CancelledError and may clean up; `cancelled` comes when it is done."""

        def expect(row: RunRow) -> None:
            if row.status == "cancelling":
                raise _AskedBefore

        try:
            await self._post(run_id, None, CancelRequested(by=clean(by, 200), reason=_cleaned(reason)), "cancelling", expect)
        except _AskedBefore:
            pass  # asking twice is asking once

    async def requeue(self, run_id: str, *, by: str = "app", note: str | None = None) -> None:
        """Send a run that needs attention back to work."""

        def expect(row: RunRow) -> None:
            if row.status != "needs_attention":
                raise Conflict(f"run {run_id} is {row.status}; only a run that needs attention can be sent back to work")

        state = await self.handle(run_id).state()
        body = RunRequeued(by=clean(by, 200), note=_cleaned(note))
        await self._post(run_id, None, body, "cancelling" if state.cancel else "queued", expect)

    async def resolve(
        self,
        run_id: str,
        call: int,
        *,
        happened: Any = _NOTHING,
        did_not_happen: bool = False,
        fail: str | None = None,
        by: str = "app",
        note: str | None = None,
    ) -> None:
        """Settle a call that is in doubt: it happened with this result, it did not happen, or fail it."""
        if (happened is not _NOTHING) + did_not_happen + (fail is not None) != 1:
            raise InvalidInput("say exactly one of: happened=RESULT, did_not_happen=True, fail=TEXT")
        state = await self.handle(run_id).state()
        found = state.calls.get(call)
        if found is None:
            raise NotFound(f"run {run_id} has no call {call}; it has {len(state.calls)}")
        if found.phase != "in_doubt" and not (found.phase == "started" and found.effect in ("once", "keyed")):
            raise Conflict(
                f"call {call} ({found.tool}) of run {run_id} is {found.phase.replace('_', ' ')}; only a call in doubt can be resolved"
            )
        if found.phase == "started" and await self._is_held(run_id):
            raise Conflict(f"call {call} ({found.tool}) of run {run_id} is being performed by a live worker; wait for what it says")
        by, note = clean(by, 200), _cleaned(note)
        if happened is not _NOTHING:
            payload = codec.pack(codec.encode(happened), codec.MAX_BYTES)[0]
            body = ToolCallResolved("happened", by=by, attempt=found.attempt, result=payload, note=note)
        elif did_not_happen:
            body = ToolCallResolved("did_not_happen", by=by, attempt=found.attempt, note=note)
        else:
            failure = Failure(kind="fatal", type="Resolved", message=clean(fail or "", 2000))
            body = ToolCallResolved("failed", by=by, attempt=found.attempt, failure=failure, note=note)

        def expect(row: RunRow) -> None:
            if row.holder is None and row.seq != state.seq:
                raise Conflict(f"run {run_id} has moved on meanwhile (event {row.seq}, not {state.seq}); look again: perdure why {run_id}")

        await self._post(run_id, call, body, "cancelling" if state.cancel else "queued", expect)

    async def _is_held(self, run_id: str) -> bool:
        row = await self.handle(run_id).status()
        alive = {worker.worker for worker in self.store.workers(self.clock.now(), round(self.settings.lease_s * 1e6)) if worker.alive}
        return row.holder in alive

    async def _post(self, run_id: str, call: int | None, body: AnyBody, status: Status, expect: Callable[[RunRow], None]) -> None:
        event_id, now = self.clock.new_id(), self.clock.now()
        await self._write(lambda: self.store.post(run_id, call, body, event_id=event_id, now=now, status=status, expect=expect))

    async def _write(self, work: Callable[[], T]) -> T:
        """Write right here, which is quickest; on a thread while a transaction's tool, which may take long, has the write lock."""
        if self._worker is not None and self._worker.transacting:
            return await asyncio.to_thread(work)
        return work()

    # -- inside -------------------------------------------------------------------------------------------------------
    def _agent(self, agent: Agent[Any, Any] | str) -> Agent[Any, Any]:
        if isinstance(agent, Agent):
            return agent
        if not isinstance(agent, str):
            raise InvalidInput(f"{agent!r:.80} is not an agent: decorate the coroutine function with @agent")
        if agent not in self.agents:
            raise UnknownAgent(f"agent {agent!r} is not known here; known are {', '.join(self.agents) or 'none'}: Perdure(url, agents=[…])")
        return self.agents[agent]

    def load(self, payload: Payload) -> bytes:
        """The JSON of a recorded payload, wherever it lies."""
        inline = payload.inline
        return self.store.blob(str(payload.blob)) if inline is None else inline


class Handle:
    """One run, from outside."""

    def __init__(self, app: Perdure, run_id: str) -> None:
        self.id = run_id
        self._app = app

    async def status(self) -> RunRow:
        """The run's row: its status, what it waits for, its last event."""
        row = self._app.store.get(self.id)
        if row is None:
            raise NotFound(f"there is no run {self.id} in {self._app.url}; `perdure list` shows those that there are")
        return row

    async def result(self, timeout: float | None = None) -> Any:
        """The run's result. Drives the run in this process if its agent is known here and nobody else does; else waits.

        RunFailed, RunCancelled, NeedsAttention; ResultTimeout when the time is over, and the run goes on.
        """
        if timeout is not None and (not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or math.isnan(timeout)):
            raise InvalidInput(f"result(timeout={timeout!r:.80}): a number of seconds, or None to wait for ever")
        try:
            async with asyncio.timeout(timeout):
                row = await self._end()
        except TimeoutError:
            raise ResultTimeout(self.id, f"no result after {timeout} s; it goes on") from None
        if row.status == "succeeded":
            body = (await self.events())[-1].body
            assert isinstance(body, RunSucceeded)
            encoded = self._app.load(body.output)
            return self._app.agents[row.agent].decode_result(encoded) if row.agent in self._app.agents else codec.decode(encoded)
        if row.status == "failed":
            raise RunFailed(self.id, row.error or "failed")
        if row.status == "cancelled":
            raise RunCancelled(self.id, "cancelled")
        raise NeedsAttention(self.id, f"needs attention: {row.error or row.waiting_for}; perdure why {self.id}")

    async def _end(self) -> RunRow:
        """Until the run has ended or needs a person. Drives it if it is ready, or if the worker that held it has died."""
        app = self._app
        while True:
            row = await self.status()
            if row.status in FINISHED or (row.status == "needs_attention" and row.ready_at is None):
                return row
            if row.agent in app.agents and (row.holder is not None or row.ready_at is not None):
                try:
                    await app.drive(self.id)
                    continue
                except (AlreadyRunning, RunEnded):
                    pass  # a live worker has it, or was faster: wait for them
            await self._change(at_most_s=1.0)

    async def _change(self, at_most_s: float) -> None:
        version = self._app.store.version()
        until = asyncio.get_running_loop().time() + at_most_s
        while self._app.store.version() == version and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110  # no database rings a bell
            await asyncio.sleep(self._app.settings.poll_s)

    async def events(self, after: int = 0) -> list[Event]:
        """The run's journal, from the event after `after` on."""
        _check_after(after)
        await self.status()
        return self._app.store.read(self.id, after)

    async def follow(self, after: int = 0) -> AsyncIterator[Event]:
        """The run's journal as it grows, until the run ends."""
        _check_after(after)
        while True:
            row = await self.status()
            for event in self._app.store.read(self.id, after):
                after = event.seq
                yield event
            if row.status in FINISHED and after >= row.seq:
                return
            await self._change(at_most_s=0.5)

    async def state(self, at: int | None = None) -> RunState:
        """The fold of the journal, now or as of event `at`."""
        if at is not None and (not isinstance(at, int) or isinstance(at, bool)):
            raise InvalidInput(f"state(at={at!r:.80}): the seq of an event, a whole number, or None for now")
        events = await self.events()
        if at is not None and not 1 <= at <= len(events):
            raise NotFound(f"run {self.id} has events 1 to {len(events)}; there is no event {at}")
        return fold(events[:at])


class _AskedBefore(Exception):
    """The same has been asked for already."""


def _cleaned(text: str | None) -> str | None:
    return None if text is None else clean(text, 2000)


def _check_after(after: int) -> None:
    if not isinstance(after, int) or isinstance(after, bool) or not 0 <= after < 1 << 32:
        raise InvalidInput(f"after={after!r:.80}: the seq of an event, or 0 for all of them; a whole number below 2³²")


def _by_name(agents: Iterable[Agent[Any, Any]]) -> dict[str, Agent[Any, Any]]:
    known: dict[str, Agent[Any, Any]] = {}
    if not isinstance(agents, Iterable):
        raise InvalidInput(f"{agents!r:.80} is not a list of agents: Perdure(url, agents=[…])")
    for agent in agents:
        if not isinstance(agent, Agent):
            raise InvalidInput(f"{agent!r:.80} is not an agent: decorate the coroutine function with @agent")
        if agent.name in known:
            raise InvalidInput(f"two agents are called {agent.name}: give one another name, @agent(name=…)")
        known[agent.name] = agent
    return known


def _same_run(row: RunRow, agent: str, tenant: str, input_digest: str) -> None:
    if row.tenant != tenant:
        raise Conflict(f"the run id {row.run_id} is taken; choose another")
    if row.agent != agent:
        raise Conflict(f"run {row.run_id} belongs to agent {row.agent}, not {agent}; choose another id")
    if row.input_digest != input_digest:
        raise Conflict(f"run {row.run_id} exists with another input; choose another id, or resume it as it is: perdure resume {row.run_id}")
