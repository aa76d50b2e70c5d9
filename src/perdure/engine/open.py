"""Opens the engine, or the `Reading`, that a URL names.

The code above this module does not know which implementation it gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perdure.engine.api import Engine, Reading
from perdure.settings import Settings

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.engine.clock import Clock
    from perdure.engine.local.worker import Observer
    from perdure.otel import Telemetry
    from perdure.store.api import Served
    from perdure.tool.secret import Resolver


def new_engine(
    url: str,
    agents: Mapping[Served, Agent[Any, Any]],
    settings: Settings,
    clock: Clock,
    observers: Sequence[Observer],
    queues: Sequence[str] | None,
    telemetry: Telemetry | None = None,
    secrets: Resolver | None = None,
) -> Engine:
    """The engine for the URL. It is not open yet: `async with` opens it."""
    from perdure.engine.local.engine import LocalEngine  # imported late: a process that only reads needs no worker

    return LocalEngine(url, agents, settings, clock, observers, queues, telemetry, secrets)


def open_reading(settings: Settings) -> Reading:
    """The existing journal at the settings' URL; an error if there is no journal. No journal is created."""
    from perdure.store.open import open_store

    return open_store(
        settings.url, synchronous=settings.synchronous, busy_s=settings.answer_s, create=False, connections=settings.connections
    )
