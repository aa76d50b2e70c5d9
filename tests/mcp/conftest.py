from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.mcp.warehouse import Warehouse


@pytest.fixture(params=["stdio", "http"])
def warehouse(request, tmp_path) -> Iterator[Warehouse]:
    """A server over each of the transports."""
    opened = Warehouse(tmp_path, request.param)
    yield opened
    opened.stop()


@pytest.fixture
def stdio(tmp_path) -> Warehouse:
    """For tests of what is peculiar to a server that is started: each start takes a second for its imports."""
    return Warehouse(tmp_path, "stdio")


@pytest.fixture
def http(tmp_path) -> Iterator[Warehouse]:
    """For tests to which it makes no difference."""
    opened = Warehouse(tmp_path, "http")
    yield opened
    opened.stop()
