"""From a URL to an engine, or to what can be read of its runs. Nothing above this module knows which engine it has got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perdure.engine.api import Engine, Reading
from perdure.settings import Settings

if TYPE_CHECKING:
    from perdure.agent import Agent
    from perdure.store.api import Served
    from perdure.worker.clock import Clock
    from perdure.worker.worker import Observer


def new_engine(
    url: str,
    agents: Mapping[Served, Agent[Any, Any]],
    settings: Settings,
    clock: Clock,
    observers: Sequence[Observer],
    queues: Sequence[str] | None,
) -> Engine:
    """Not open yet: `async with` opens it."""
    from perdure.engine.local import LocalEngine  # here, because whoever only reads needs no worker

    return LocalEngine(url, agents, settings, clock, observers, queues)


def open_reading(settings: Settings) -> Reading:
    """The runs that are there; NotFound or StoreCorrupt where there are none. Nothing is made, and no file changed."""
    from perdure.store.open import open_store

    return open_store(
        settings.url, synchronous=settings.synchronous, busy_s=settings.answer_s, create=False, connections=settings.connections
    )
