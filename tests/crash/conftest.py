"""A nursery for each process of the test run, a world for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crash.nursery import Nursery
from tests.crash.world import World


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    opened = Nursery()
    yield opened
    opened.close()


@pytest.fixture
def world(tmp_path: Path, nursery: Nursery) -> World:
    folder = tmp_path / "world"
    folder.mkdir()
    return World(folder, nursery)
