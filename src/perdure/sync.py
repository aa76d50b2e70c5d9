"""The same app for code without asyncio: every method blocks until it is done.

A loop of its own in a thread of its own does the work; there is no second implementation of anything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from perdure import app as asynchronous
from perdure.agent import Agent
from perdure.app import CostsBy
from perdure.core.events import Event
from perdure.core.state import RunState
from perdure.engine.api import Reading
from perdure.errors import InvalidInput, PerdureError
from perdure.settings import Settings
from perdure.store.api import ApprovalRow, CostRow, RunRow
from perdure.undo import UndoPlan
from perdure.worker.clock import Clock
from perdure.worker.outside import refuse_app

T = TypeVar("T")
_END_S = 10.0


class Perdure:
    """A journal and the agents that this process knows, for blocking code: `with Perdure(…) as app:`."""

    def __init__(
        self,
        url: str | None = None,
        agents: Iterable[Agent[Any, Any]] = (),
        *,
        settings: Settings | None = None,
        audit_log: Path | str | None = None,
        clock: Clock | None = None,
        queues: Sequence[str] | None = None,
    ) -> None:
        options: dict[str, Any] = {"settings": settings, "audit_log": audit_log, "clock": clock, "queues": queues}
        self._make: Callable[[], asynchronous.Perdure] = lambda: asynchronous.Perdure(url, agents, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asynchronous.Perdure | None = None

    @property
    def _app(self) -> asynchronous.Perdure:
        if self._opened is None:
            raise InvalidInput("the app is not open: use it in a `with Perdure(…) as app:` block")
        return self._opened

    def __enter__(self) -> Self:
        refuse_app()
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="perdure", daemon=True)
        self._thread.start()
        self._loop = loop
        try:
            self._opened = self._wait(self._open())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait(self._app.__aexit__(None, None, None))
        finally:
            self._end_loop()

    async def _open(self) -> asynchronous.Perdure:
        return await self._make().__aenter__()

    def _end_loop(self) -> None:
        assert self._loop is not None
        self._wait(_end_the_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            refuse_app()  # here: on the app's own thread there is no agent to be seen
            if self._loop is None:
                raise InvalidInput("the app is not open: use it in a `with Perdure(…) as app:` block")
        except PerdureError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def reading(self) -> Reading:
        """What can be read of the runs."""
        return self._app.reading

    def start(self, agent: Agent[Any, Any] | str, /, *args: Any, **options: Any) -> Handle:
        """Create a run; it is durable when this returns."""
        return Handle(self, self._wait(self._app.start(agent, *args, **options)))

    def run(self, agent: Agent[Any, Any] | str, /, *args: Any, **options: Any) -> Any:
        """Start a run, drive it and its children in this process and return its result."""
        return self._wait(self._app.run(agent, *args, **options))

    def handle(self, run_id: str, *, tenant: str | None = None) -> Handle:
        return Handle(self, self._app.handle(run_id, tenant=tenant))

    def transcript(self, run_id: str, *, tenant: str | None = None) -> list[dict[str, Any]]:
        """The conversation of a ReAct agent's run that has ended: the `history` of a run that continues it."""
        return self._wait(self._app.transcript(run_id, tenant=tenant))

    def drive(self, run_id: str, *, wait: bool = True, tenant: str | None = None) -> RunRow:
        """Drive one run here until it ends, needs a person, or waits for something from outside."""
        return self._wait(self._app.drive(run_id, wait=wait, tenant=tenant))

    def work(self) -> None:
        """Serve the queue until `drain` is called from another thread."""
        self._wait(self._app.work())

    def drain(self) -> None:
        """End `work`; from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._app.drain)

    def approvals(self, **wanted: Any) -> list[ApprovalRow]:
        """The inbox: what waits for somebody's yes or no, those that expire first in front."""
        return self._wait(self._app.approvals(**wanted))

    def approve(self, approval: str, *, by: str, **options: Any) -> ApprovalRow:
        """Say yes, with `edit=` to other values of the fields that may be edited. One decision counts."""
        return self._wait(self._app.approve(approval, by=by, **options))

    def reject(self, approval: str, *, by: str, reason: str, **options: Any) -> ApprovalRow:
        """Say no; the agent sees the reason."""
        return self._wait(self._app.reject(approval, by=by, reason=reason, **options))

    def signal(self, run_id: str, topic: str, payload: Any = None, **options: Any) -> None:
        """Hand something to a run: in order per topic, kept until its agent asks for it, and once per `key`."""
        self._wait(self._app.signal(run_id, topic, payload, **options))

    def cancel(self, run_id: str, **options: Any) -> None:
        """Ask for a run to be cancelled."""
        self._wait(self._app.cancel(run_id, **options))

    def pause(self, run_id: str, **options: Any) -> None:
        """Have a run stand still at its next step."""
        self._wait(self._app.pause(run_id, **options))

    def unpause(self, run_id: str, **options: Any) -> list[str]:
        """Let a run go on that is paused or needs attention; `add=Budget(usd=5)` adds to the budget that it has used up."""
        return self._wait(self._app.unpause(run_id, **options))

    def requeue(self, run_id: str, **options: Any) -> None:
        """Send a run that needs attention back to work."""
        self._wait(self._app.requeue(run_id, **options))

    def adopt(self, run_id: str, **options: Any) -> None:
        """Let the version of the agent that this app has go on with a run that was begun with another one."""
        self._wait(self._app.adopt(run_id, **options))

    def resolve(self, run_id: str, call: int, **options: Any) -> None:
        """Settle a call that is in doubt."""
        self._wait(self._app.resolve(run_id, call, **options))

    def plan_undo(self, run_id: str, *, tenant: str | None = None) -> UndoPlan:
        """What `undo` would do about a run that has ended, and what it cannot; nothing is written."""
        return self._wait(self._app.plan_undo(run_id, tenant=tenant))

    def undo(self, run_id: str, *, by: str = "app", accept: bool = False, wait: bool = True, tenant: str | None = None) -> RunRow:
        """Call the compensate hooks of the run's completed calls, last one first, in the run RUN/undo; that run's row when it rests."""
        return self._wait(self._app.undo(run_id, by=by, accept=accept, wait=wait, tenant=tenant))

    def costs(self, by: CostsBy = "agent", **wanted: Any) -> list[CostRow]:
        """Calls, time, tokens and money by agent, tenant, model, day, run or tool."""
        return self._wait(self._app.costs(by, **wanted))


class Handle:
    """One run, from outside, for blocking code."""

    def __init__(self, app: Perdure, handle: asynchronous.Handle) -> None:
        self.id = handle.id
        self._wait = app._wait
        self._handle = handle

    def status(self) -> RunRow:
        return self._wait(self._handle.status())

    def result(self, timeout: float | None = None) -> Any:
        """The run's result; drives it in this process if nobody else does."""
        return self._wait(self._handle.result(timeout))

    def events(self, after: int = 0) -> list[Event]:
        return self._wait(self._handle.events(after))

    def follow(self, after: int = 0) -> Iterator[Event]:
        """The run's journal as it grows, until the run ends."""
        stream = self._handle.follow(after)

        async def following() -> Event | None:
            return await anext(stream, None)

        while (event := self._wait(following())) is not None:
            yield event

    def state(self, at: int | None = None) -> RunState:
        return self._wait(self._handle.state(at))


async def _end_the_rest() -> None:
    """What tools have left on the loop ends with it, as it would after asyncio.run: a connection closes, and its server with it."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_END_S)  # one that does not stop must not keep the program
