"""Creates worlds on one store, and deletes them."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.crash.journals import Databases, Journal, SqliteJournal
from tests.crash.nursery import Nursery
from tests.crash.world import World


class Worlds:
    """On SQLite without databases, on PostgreSQL with."""

    def __init__(self, folder: Path, nursery: Nursery, databases: Databases | None) -> None:
        self._folder = folder
        self._nursery = nursery
        self._databases = databases
        self._made: list[World] = []
        self._numbers = itertools.count(1)

    @property
    def dialect(self) -> str:
        return "sqlite" if self._databases is None else "postgres"

    def elsewhere(self, folder: Path) -> Worlds:
        """Others on the same store, which live as long as it does."""
        return Worlds(folder, self._nursery, self._databases)

    def new(self, mutation: str = "", *, empty: bool = False) -> World:
        """With `empty` the schema does not exist yet; on SQLite it never exists at first."""
        folder = self._folder / f"world-{next(self._numbers)}"
        folder.mkdir()
        self._made.append(World(folder, self._nursery, self._journal(folder, empty), mutation))
        return self._made[-1]

    def copy(self, world: World) -> World:
        self._made.append(world.twin())
        return self._made[-1]

    def _journal(self, folder: Path, empty: bool) -> Journal:
        if self._databases is None:
            return SqliteJournal(folder)
        return self._databases.journal(self._databases.empty() if empty else self._databases.new())

    def close_one(self, world: World) -> None:
        self._made.remove(world)
        world.close()

    def close(self) -> None:
        for world in self._made:
            world.close()
