"""The base class of the parts of the SQL store.

`SqlStore` is one object made of parts, one part for each concern. Each part is a class that inherits from `Part`, so
a call reaches the part directly, without delegation. A dialect can replace a part by a subclass of that part
(`PostgresJournal` replaces `Journal`).
"""

from __future__ import annotations

from typing import NamedTuple

from perdure.store.bell import Bell
from perdure.store.cursor import Database
from perdure.store.liveness import Liveness


class Means(NamedTuple):
    """The components that every part of a store uses."""

    url: str
    database: Database
    bell: Bell
    liveness: Liveness


class Part:
    """One concern of a store."""

    def __init__(self, means: Means) -> None:
        self.url = means.url
        self._database = means.database
        self._bell = means.bell  # rung after a commit that may leave work for a worker
        self._liveness = means.liveness
        # The database key of every run that this process holds. A claim stores the key here, so that an append need
        # not look the key up.
        self._keys: dict[str, int] = {}
