"""Shared by the tests of driving: a clock for tests, settings without waits, and a short way to write a journal."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from perdure import Agent, Perdure, Settings
from perdure.core.events import (
    Event,
    RetryScheduled,
    RunReleased,
    ThoughtRecorded,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
)
from perdure.engine.clock import Clock
from perdure.engine.local.engine import LocalEngine
from perdure.engine.local.worker import Worker
from perdure.testing import clock as clocks

T = TypeVar("T")
# Any wait at all parks the run, hooks are asked at once, and a tool that will not stop is given up quickly.
# No machine is kept when a run is parked: these tests look at replays.
SETTINGS = Settings(
    cache_runs=0,
    poll_s=0.002,
    park_after_s=0,
    reconcile_margin_s=0,
    unknown_deadline_s=0,
    cancel_grace_s=0.05,
    flush_s=0.005,
    drain_timeout_s=5.0,
)


class ManualClock(clocks.ManualClock):
    """A clock that only moves when the test moves it.

    `still` is False, because tests check whether a worker parks a run.
    """

    still = False

    def jump(self, seconds: float) -> None:
        """Forward or back, as when the clock of a machine is set."""
        self.set_to(self.time + timedelta(seconds=seconds))


def perdure(
    where: Path | None,
    agents: Iterable[Agent[Any, Any]],
    clock: Clock | None = None,
    settings: Settings = SETTINGS,
    observers: Sequence[Any] = (),
) -> Perdure:
    """An app on this file, or in memory; to be entered."""
    url = "sqlite://" if where is None else f"sqlite:///{where}"
    return Perdure(url, agents, settings=settings, clock=clock or ManualClock(), observers=observers)


def forget_leases(app: Perdure) -> None:
    """From now on, a process with a shorter lease counts the workers so far as silent: as if a release before 0.2 had registered them."""
    database: Any = app.store._database  # type: ignore[attr-defined]
    database.write(lambda cursor: cursor.connection.execute("UPDATE perdure_workers SET lease_us = NULL"), lambda cursor, _: True)


def local(app: Perdure) -> LocalEngine:
    """The app's engine, with its worker and its store."""
    engine = app._engine
    assert isinstance(engine, LocalEngine)
    return engine


def worker_of(app: Perdure) -> Worker:
    """The worker of the app, for an app that drives a run."""
    worker = local(app)._worker
    assert worker is not None
    return worker


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, such as post on SQLite, for code that cannot await."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it has waited for something")


def run(main: Coroutine[Any, Any, T], seconds: float = 100.0) -> T:
    """The coroutine's result, on a new loop. A coroutine that hangs fails the test."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await main

    return asyncio.run(bounded())


async def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def status_of(app: Perdure, run_id: str) -> str:
    """The run's status in the database, without waiting for anything."""
    row = app.store.get(run_id)
    assert row is not None, run_id
    return row.status


def outline(events: Iterable[Event], *, without: Sequence[str] = ("run_claimed", "run_released")) -> list[str]:
    """The journal in short lines, such as `initiated pay 1/2` (call 1, attempt 2)."""
    return [_line(event) for event in events if event.type not in without]


def _line(event: Event) -> str:
    body = event.body
    match body:
        case ToolCallInitiated():
            return f"initiated {body.tool} {event.call}/{body.attempt}"
        case ToolCallCompleted():
            return f"completed {event.call}/{body.attempt}" + (" unrecordable" if body.result is None else "")
        case ToolCallFailed():
            return f"{'failed' if body.final else 'failing'} {event.call}/{body.attempt} {body.failure.kind}"
        case ToolCallInDoubt():
            return f"in_doubt {event.call}/{body.attempt}"
        case ToolCallResolved():
            return f"resolved {event.call}/{body.attempt} {body.outcome} by {body.by}"
        case RetryScheduled():
            return f"{'ask' if body.reconcile else 'retry'} {event.call}/{body.attempt}"
        case RunReleased():
            return f"released {body.status}"
        case ThoughtRecorded():
            return f"note {body.text}"
        case _:
            return event.type
