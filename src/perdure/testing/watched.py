"""An app that reports every boundary that its process reaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

from perdure.agent import Agent
from perdure.app import Perdure
from perdure.engine.api import Engine
from perdure.engine.local.engine import LocalEngine
from perdure.engine.local.worker import Worker
from perdure.store.api import Store
from perdure.testing.boundaries import Moment, Points, Watch, WatchedStore, around
from perdure.tool import Call


class _WatchedEngine(LocalEngine):
    """The local engine, with the app's watched store and watched tools."""

    def __init__(self, app: WatchedPerdure) -> None:
        super().__init__(app.url, app.versions, app.settings, app.clock, app._observers, app.queues, app.telemetry, app.secrets)
        self._app = app

    async def _open(self) -> Store:
        return self._app.watched(await super()._open())

    def _new_worker(self, agents: Iterable[Agent[Any, Any]], queues: Sequence[str] | None) -> Worker:
        app = self._app
        return Worker(
            self.store,
            agents,
            app.settings,
            app.clock,
            app._observers,
            queues,
            app.performing,
            self._counts,
            app.telemetry,
            app.secrets,
        )


class WatchedPerdure(Perdure):
    """Like Perdure, but calls `watch` at each boundary. The boundaries name runs relative to the run `root`."""

    def __init__(self, *args: Any, watch: Watch, root: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.points = Points(watch, root)

    def _new_engine(self) -> Engine:
        return _WatchedEngine(self)

    def watched(self, store: Store) -> Store:
        """The store that the engine uses instead of `store`."""
        return cast(Store, WatchedStore(store, self.points))

    def performing(self, tool: Any) -> Any:
        """The tool or model call that the worker performs instead of `tool`."""
        return around(tool, partial(self._effect, "before", tool), lambda call, _: self._effect("after", tool, call))

    def _effect(self, moment: Moment, tool: Any, call: Call) -> None:
        self.points.tell([self.points.of_effect(moment, call, tool)])
