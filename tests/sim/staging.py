"""Connects the runtime to the simulation.

What it normally takes from the machine is replaced, and restored afterwards.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from tests.sim.threads import Pool, Queues, Threading, Time

from perdure.engine import threads
from perdure.engine.clock import Clock
from perdure.engine.local import drive, engine, leases, worker
from perdure.errors import PerdureError
from perdure.store import approvals, claims, family, journal, writer

if TYPE_CHECKING:
    from tests.sim.kernel import Kernel, Process
    from tests.sim.world import World


class SimClock(Clock):
    """The wall clock of one process, and ids that no other process has."""

    def __init__(self, kernel: Kernel, process: Process, number: int) -> None:
        self._kernel = kernel
        self._process = process
        self._prefix, self._ids = f"{number:022x}", itertools.count(1)

    def now(self) -> int:
        return self._kernel.wall_us + self._process.skew_us


class _JournalTime(Time):
    """The real store counts how long an append, or a vote, had to wait, from when it was asked; that was when the operation began."""

    def __init__(self, world: World) -> None:
        super().__init__(world.kernel)
        self._world = world

    def monotonic(self) -> float:
        asked_us, self._world.asked_us = self._world.asked_us, None
        return (self._kernel.now_us if asked_us is None else asked_us) / 1e6


class _Errors(logging.Handler):
    """An error that is not perdure's own kind is a mistake of ours, however well the worker goes on after it."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(logging.ERROR)
        self._kernel = kernel

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        process = self._kernel.current.process
        if isinstance(error, Exception) and not isinstance(error, PerdureError) and process is not None and not process.dead:
            self._kernel.fail(error)


@contextmanager
def staged(world: World) -> Iterator[None]:
    """While this lasts, what runs here runs on simulated time."""
    kernel = world.kernel
    time, threading = Time(kernel), Threading(kernel)
    world.time = time

    def pool(limit: int, name: str) -> Pool:
        return Pool(kernel, limit)

    def chance(bits: int) -> int:
        return world.ids.getrandbits(bits)

    uuids = SimpleNamespace(uuid4=lambda: UUID(int=chance(128), version=4))
    changes: list[tuple[Any, str, Any]] = [
        (engine, "open_store", lambda url, **_: world.open_store()),
        *((module, "time", time) for module in (leases, writer, worker, drive, claims)),
        *((module, "time", _JournalTime(world)) for module in (journal, approvals)),
        *((module, "threading", threading) for module in (leases, writer, threads)),
        (writer, "queue", Queues(kernel)),
        *((module, "ThreadPoolExecutor", pool) for module in (threads, worker)),
        (worker, "socket", SimpleNamespace(gethostname=lambda: "sim")),
        (worker, "os", SimpleNamespace(getpid=lambda: 1)),
        (claims, "secrets", SimpleNamespace(token_bytes=lambda count: chance(8 * count).to_bytes(count, "big"))),
        *((module, "uuid", uuids) for module in (claims, family)),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    logger = logging.getLogger("perdure")
    errors, level, propagate = _Errors(kernel), logger.level, logger.propagate
    for module, name, value in changes:
        setattr(module, name, value)
    logger.addHandler(errors)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        logger.removeHandler(errors)
        logger.setLevel(level)
        logger.propagate = propagate
