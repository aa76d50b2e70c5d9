"""A nursery for each process of the test run, and a world for each test.

On both stores, unless the test needs only one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.crash.journals import Databases
from tests.crash.mounts import keep_to_ourselves, small_disk
from tests.crash.nursery import Nursery
from tests.crash.world import World
from tests.crash.worlds import Worlds

if TYPE_CHECKING:
    from tests.crash.minds import Mind
    from tests.servers.postgres import Server
    from tests.servers.providers import Provider


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    keep_to_ourselves()  # before the nursery starts, so that victims see their mounts
    opened = Nursery()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def databases(postgres: Server) -> Iterator[Databases]:
    opened = Databases(postgres)
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "postgres"])
def dialect(request: pytest.FixtureRequest) -> str:
    """The store of the test: each test runs on both, one after the other."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def worlds(tmp_path: Path, nursery: Nursery, dialect: str, request: pytest.FixtureRequest) -> Iterator[Worlds]:
    # Asked for only here: a test on SQLite starts no server.
    made = Worlds(tmp_path, nursery, request.getfixturevalue("databases") if dialect == "postgres" else None)
    yield made
    made.close()


@pytest.fixture
def world(worlds: Worlds) -> World:
    return worlds.new()


@pytest.fixture
def small(worlds: Worlds) -> Iterator[World]:
    """A world whose journal has its own file system, which can be full or read-only."""
    world = worlds.new()
    with small_disk(world.disk) as mounted:
        if not mounted:
            pytest.skip("mounting a small file system needs privileges that this user does not have")
        yield world


@pytest.fixture(scope="session")
def thinking_provider() -> Iterator[Provider]:
    """One for all tests: each knows its own requests by a word in them."""
    from tests.servers.providers import Provider

    with Provider() as opened:
        yield opened


@pytest.fixture
def mind(world: World, thinking_provider: Provider) -> Mind:
    from tests.crash.minds import Mind  # late: it brings the SDKs along, and few tests ask a model

    return Mind(world, thinking_provider)
