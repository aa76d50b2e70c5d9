"""An app that tells of every boundary that its process comes to."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from perdure.app import Perdure
from perdure.store.api import Store
from perdure.testing.boundaries import Moment, Points, Watch, WatchedStore, around
from perdure.tool import Call
from perdure.worker.worker import Worker


class WatchedPerdure(Perdure):
    """Perdure as it is, and `watch` is told of each point that the run `root`, or one below it, has come to."""

    def __init__(self, *args: Any, watch: Watch, root: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.points = Points(watch, root)

    async def _open(self) -> Store:
        return cast(Store, WatchedStore(await super()._open(), self.points))

    def _new_worker(self) -> Worker:
        return Worker(self.store, self.versions.values(), self.settings, self.clock, self._observers, self.queues, self.performing)

    def performing(self, tool: Any) -> Any:
        """What is performed in the place of a tool or of a question to a model."""
        return around(tool, partial(self._effect, "before", tool), lambda call, _: self._effect("after", tool, call))

    def _effect(self, moment: Moment, tool: Any, call: Call) -> None:
        self.points.tell([self.points.of_effect(moment, call, tool)])
