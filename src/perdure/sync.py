"""The same app for code without asyncio: every method blocks until it is done.

A loop of its own in a thread of its own does the work; there is no second implementation of anything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from perdure import app as asynchronous
from perdure.agent import Agent
from perdure.core.events import Event
from perdure.core.state import RunState
from perdure.errors import InvalidInput
from perdure.settings import Settings
from perdure.store.api import RunRow, Store

T = TypeVar("T")


class Perdure:
    """A journal and the agents that this process knows, for blocking code: `with Perdure(…) as app:`."""

    def __init__(
        self,
        url: str | None = None,
        agents: Iterable[Agent[Any, Any]] = (),
        *,
        settings: Settings | None = None,
        audit_log: Path | str | None = None,
    ) -> None:
        self._make: Callable[[], asynchronous.Perdure] = lambda: asynchronous.Perdure(url, agents, settings=settings, audit_log=audit_log)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asynchronous.Perdure | None = None

    @property
    def _app(self) -> asynchronous.Perdure:
        if self._opened is None:
            raise InvalidInput("the app is not open: use it in a `with Perdure(…) as app:` block")
        return self._opened

    def __enter__(self) -> Self:
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
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise InvalidInput("the app is not open: use it in a `with Perdure(…) as app:` block")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def store(self) -> Store:
        return self._app.store

    def start(self, agent: Agent[Any, Any] | str, /, *args: Any, **options: Any) -> Handle:
        """Create a run; it is durable when this returns."""
        return Handle(self, self._wait(self._app.start(agent, *args, **options)))

    def run(self, agent: Agent[Any, Any] | str, /, *args: Any, **options: Any) -> Any:
        """Start a run, drive it in this process and return its result."""
        return self._wait(self._app.run(agent, *args, **options))

    def handle(self, run_id: str) -> Handle:
        return Handle(self, self._app.handle(run_id))

    def drive(self, run_id: str, *, wait: bool = True) -> RunRow:
        """Drive one run here until it ends, needs a person, or waits for something from outside."""
        return self._wait(self._app.drive(run_id, wait=wait))

    def work(self) -> None:
        """Serve the queue until `drain` is called from another thread."""
        self._wait(self._app.work())

    def drain(self) -> None:
        """End `work`; from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._app.drain)

    def cancel(self, run_id: str, **options: Any) -> None:
        """Ask for a run to be cancelled."""
        self._wait(self._app.cancel(run_id, **options))

    def requeue(self, run_id: str, **options: Any) -> None:
        """Send a run that needs attention back to work."""
        self._wait(self._app.requeue(run_id, **options))

    def resolve(self, run_id: str, call: int, **options: Any) -> None:
        """Settle a call that is in doubt."""
        self._wait(self._app.resolve(run_id, call, **options))


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
