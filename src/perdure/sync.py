"""The app for code without asyncio: every method blocks until it is done.

The blocking app runs the asynchronous app on an event loop in another thread. There is no second implementation.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, overload

from perdure import app as asynchronous
from perdure.agent import Agent
from perdure.app import RunInfo, RunningCall
from perdure.core.events import Event
from perdure.engine.api import Reading
from perdure.engine.clock import Clock
from perdure.engine.local.sandbox import refuse_app
from perdure.errors import InvalidInput, PerdureError
from perdure.settings import Settings
from perdure.tool.artifact import Artifact
from perdure.tool.secret import Resolver

if TYPE_CHECKING:
    from perdure.otel import Telemetry

P = ParamSpec("P")
T = TypeVar("T")
_END_S = 10.0


def _blocking(method: Callable[Concatenate[asynchronous.Perdure, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Perdure, P], T]:
    """The same method, with its signature and its docstring, for blocking code."""

    @functools.wraps(method)
    def call(self: Perdure, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(method(self._app, *args, **kwargs))

    return call


def _starting(
    method: Callable[Concatenate[asynchronous.Perdure, P], Coroutine[Any, Any, asynchronous.Handle]],
) -> Callable[Concatenate[Perdure, P], Handle]:
    """Like `_blocking`, for a method that returns a handle."""

    @functools.wraps(method)
    def call(self: Perdure, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        return Handle(self, self._wait(method(self._app, *args, **kwargs)))

    return call


def _of_handle(method: Callable[Concatenate[asynchronous.Handle, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Handle, P], T]:
    """Like `_blocking`, for a method of a handle."""

    @functools.wraps(method)
    def call(self: Handle, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(method(self._handle, *args, **kwargs))

    return call


class Perdure:
    """A journal, and the agents of this process, for blocking code: `with Perdure(…) as app:`."""

    def __init__(
        self,
        url: str | None = None,
        agents: Iterable[Agent[Any, Any]] = (),
        *,
        settings: Settings | None = None,
        audit_log: Path | str | None = None,
        clock: Clock | None = None,
        queues: Sequence[str] | None = None,
        artifacts: str | None = None,
        telemetry: Telemetry | None = None,
        secrets: Resolver | None = None,
        batch: str = "",
    ) -> None:
        options: dict[str, Any] = {
            "settings": settings,
            "audit_log": audit_log,
            "clock": clock,
            "queues": queues,
            "artifacts": artifacts,
            "telemetry": telemetry,
            "secrets": secrets,
            "batch": batch,
        }
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
        self._wait(_cancel_remaining_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            refuse_app()  # checked in the caller's thread, because in the app's own thread no agent is visible
            if self._loop is None:
                raise InvalidInput("the app is not open: use it in a `with Perdure(…) as app:` block")
        except PerdureError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def reading(self) -> Reading:
        """The reading side of the engine: rows, journals, costs."""
        return self._app.reading

    start = _starting(asynchronous.Perdure.start)

    def handle(self, run_id: str, *, tenant: str | None = None) -> Handle:
        """A handle on a run that exists. Nothing is read yet.

        With `tenant`, a run of another tenant is NotFound, like a run that does not exist.
        """
        return Handle(self, self._app.handle(run_id, tenant=tenant))

    # `drive`, `undo` and `work` have no `stop` here: an asyncio.Event cannot be set from another thread. `drain` can
    # be called from another thread.
    def drive(self, run_id: str, *, wait: bool = True, tenant: str | None = None) -> RunInfo:
        """Drive one run in this process until it ends, needs a person, or waits for something from outside.

        Returns the info of the run.
        """
        return self._wait(self._app.drive(run_id, wait=wait, tenant=tenant))

    def undo(self, run_id: str, *, by: str = "app", accept: bool = False, wait: bool = True, tenant: str | None = None) -> RunInfo:
        """Call the compensate hooks of the run's completed calls, the last call first, in the run RUN/undo."""
        return self._wait(self._app.undo(run_id, by=by, accept=accept, wait=wait, tenant=tenant))

    def work(self) -> None:
        """Serve the queues until another thread calls `drain`."""
        self._wait(self._app.work())

    def drain(self) -> None:
        """End every `work` that is under way. If no `work` is under way, the next `work` ends at once.

        Any thread may call this.
        """
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._app.drain)

    run = _blocking(asynchronous.Perdure.run)
    schedule = _blocking(asynchronous.Perdure.schedule)
    transcript = _blocking(asynchronous.Perdure.transcript)
    approvals = _blocking(asynchronous.Perdure.approvals)
    approve = _blocking(asynchronous.Perdure.approve)
    reject = _blocking(asynchronous.Perdure.reject)
    signal = _blocking(asynchronous.Perdure.signal)
    cancel = _blocking(asynchronous.Perdure.cancel)
    pause = _blocking(asynchronous.Perdure.pause)
    unpause = _blocking(asynchronous.Perdure.unpause)
    retry = _blocking(asynchronous.Perdure.retry)
    rewind = _blocking(asynchronous.Perdure.rewind)
    fork = _blocking(asynchronous.Perdure.fork)
    live_fork = _blocking(asynchronous.Perdure.live_fork)
    diff = _blocking(asynchronous.Perdure.diff)
    requeue = _blocking(asynchronous.Perdure.requeue)
    adopt = _blocking(asynchronous.Perdure.adopt)
    resolve = _blocking(asynchronous.Perdure.resolve)
    plan_undo = _blocking(asynchronous.Perdure.plan_undo)
    costs = _blocking(asynchronous.Perdure.costs)
    count = _blocking(asynchronous.Perdure.count)
    health = _blocking(asynchronous.Perdure.health)
    list = _blocking(asynchronous.Perdure.list)


class Handle:
    """One run, from outside, for blocking code. `id` is the id of the run."""

    def __init__(self, app: Perdure, handle: asynchronous.Handle) -> None:
        self.id = handle.id
        self._wait = app._wait
        self._handle = handle

    info = _of_handle(asynchronous.Handle.info)
    status = _of_handle(asynchronous.Handle.status)
    result = _of_handle(asynchronous.Handle.result)
    events = _of_handle(asynchronous.Handle.events)
    state = _of_handle(asynchronous.Handle.state)
    inspect = _of_handle(asynchronous.Handle.inspect)

    def artifact(self, pointer: Artifact | dict[str, Any]) -> Artifact:
        """An artifact that this run may open: `with handle.artifact(pointer).open() as file`, or `.read().wait()`."""
        return self._handle.artifact(pointer)

    @overload
    def follow(self, after: int = 0, *, progress: Literal[False] = False) -> Iterator[Event]: ...
    @overload
    def follow(self, after: int = 0, *, progress: bool) -> Iterator[Event | RunningCall]: ...
    def follow(self, after: int = 0, *, progress: bool = False) -> Iterator[Any]:
        """Yields the events of the run as they arrive, until the run has ended: `for event in handle.follow():`.

        With `progress=True`, also a `RunningCall` each time a call under way has reported something.
        """
        stream: AsyncGenerator[Any, None] = self._handle.follow(after, progress=True) if progress else self._handle.follow(after)

        async def following() -> Any:
            return await anext(stream, None)

        while (event := self._wait(following())) is not None:
            yield event


async def _cancel_remaining_tasks() -> None:
    """Cancel the tasks that tools left on the loop, as asyncio.run does.

    So the tasks can close their connections and servers.
    """
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_END_S)  # a task that does not stop must not block the program's exit
