"""What the parts of the SQL store have in common.

`SqlStore` is one object made of parts by concern, each a class in its own module that inherits from `Part`: nothing stands between a
caller and the part that does the work. A dialect replaces a part by a subclass of it (`PostgresJournal` for `Journal`).
"""

from __future__ import annotations

from typing import NamedTuple

from perdure.store.bell import Bell
from perdure.store.cursor import Database
from perdure.store.liveness import Liveness


class Means(NamedTuple):
    """What a store is made with."""

    url: str
    database: Database
    bell: Bell
    liveness: Liveness


class Part:
    """One concern of a store."""

    def __init__(self, means: Means) -> None:
        self.url = means.url
        self._database = means.database
        self._bell = means.bell  # rung after a commit that a worker may have to act on
        self._liveness = means.liveness
        # The integer key of every run that is being worked on. A claim learns it, so that an append need not look it up.
        self._keys: dict[str, int] = {}
