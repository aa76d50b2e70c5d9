"""An app that tells of every boundary that its process comes to."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from perdure.app import Perdure
from perdure.engine.api import Engine
from perdure.engine.local import LocalEngine
from perdure.store.api import Store
from perdure.testing.boundaries import Moment, Points, Watch, WatchedStore, around
from perdure.tool import Call
from perdure.worker.worker import Worker


class _WatchedEngine(LocalEngine):
    """The local engine with the store and the tools that the app wants watched."""

    def __init__(self, app: WatchedPerdure) -> None:
        super().__init__(app.url, app.versions, app.settings, app.clock, app._observers, app.queues)
        self._app = app

    async def _open(self) -> Store:
        return self._app.watched(await super()._open())

    def _new_worker(self) -> Worker:
        app = self._app
        return Worker(self.store, app.versions.values(), app.settings, app.clock, app._observers, app.queues, app.performing)


class WatchedPerdure(Perdure):
    """Perdure as it is, and `watch` is told of each point that the run `root`, or one below it, has come to."""

    def __init__(self, *args: Any, watch: Watch, root: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.points = Points(watch, root)

    def _new_engine(self) -> Engine:
        return _WatchedEngine(self)

    def watched(self, store: Store) -> Store:
        """What is used in the place of the app's store."""
        return cast(Store, WatchedStore(store, self.points))

    def performing(self, tool: Any) -> Any:
        """What is performed in the place of a tool or of a question to a model."""
        return around(tool, partial(self._effect, "before", tool), lambda call, _: self._effect("after", tool, call))

    def _effect(self, moment: Moment, tool: Any, call: Call) -> None:
        self.points.tell([self.points.of_effect(moment, call, tool)])
