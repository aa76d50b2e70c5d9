"""A progress bar for a terminal of 80 columns, with the description on its own line above it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.progress import Progress
from rich.text import Text


class TwoLines(Progress):
    """The description of the current work, shortened if needed, and below it the bar."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from (Text(task.description, no_wrap=True, overflow="ellipsis") for task in self.tasks)
        yield self.make_tasks_table(self.tasks)
