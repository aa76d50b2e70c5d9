"""A bar for a terminal of 80 columns, which what is going on does not fit into beside it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.progress import Progress
from rich.text import Text


class TwoLines(Progress):
    """What is going on, shortened if need be, and below it the bar with all its columns."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from (Text(task.description, no_wrap=True, overflow="ellipsis") for task in self.tasks)
        yield self.make_tasks_table(self.tasks)
