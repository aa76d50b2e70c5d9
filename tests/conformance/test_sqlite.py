"""What every store must do, on SQLite: in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conformance.suite import StoreConformance

from perdure.store.api import Store
from perdure.store.open import open_store


class TestSqliteInMemory(StoreConformance):
    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        return lambda: open_store("sqlite://")


class TestSqliteOnDisk(StoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: open_store(f"sqlite:///{tmp_path}/journal.db")
