"""Rules for every test: no setting of the developer's shell reaches a test, and the machine may be slow."""

from __future__ import annotations

import compileall
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from tests import sets
from tests.figures import Figures

if TYPE_CHECKING:
    from tests.servers.postgres import Server
    from tests.servers.providers import Provider

# A deadline per example would measure the other tests on the same cores, not our code. The watchdog in pyproject.toml
# limits the whole test.
hypothesis.settings.register_profile("perdure", deadline=None, print_blob=True)
hypothesis.settings.load_profile("perdure")
# Imported modules and collected tests are never freed. To scan them takes a third of the garbage collection, and slows
# down every test.
gc.disable()
# Collected files are compiled once for all processes of this run and for the next run, even if the shell forbids it.
_writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, False
_SOURCES = Path(__file__).parents[1] / "src"
# `make test &` in a script starts us with SIGINT ignored. Every process that a test starts would inherit that, and Python would then
# install no handler for Ctrl-C. pytest-xdist starts its processes after this line, so they inherit the handler's presence instead.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    # Register it here: with pytest-xdist, the process that adds up collects no tests and reads no other conftest.py.
    config.pluginmanager.register(Figures(config), "figures")
    if not hasattr(config, "workerinput"):
        # Compile once, before thousands of interpreters import the sources: compiling takes half of their start.
        compileall.compile_dir(_SOURCES, quiet=2)


def pytest_collection_finish() -> None:
    # From here on tests write modules of their own, which change within the second that a compiled file cannot tell apart.
    sys.dont_write_bytecode = _writes_none
    # Hypothesis registers its random generator at its first example, and warns if gc.get_referrers finds no object that refers to
    # it. gc.get_referrers does not see frozen objects, so the first example runs before the freeze.
    hypothesis.given(hypothesis.strategies.none())(lambda _: None)()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses among them by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first: at the end, one long test would keep a single process busy while the others are idle."""
    sets.mark(items)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PERDURE_", "PG"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """One server for each process of the test run, started by the first test that asks for it."""
    # Here and not above: a quarter of a second that the processes without PostgreSQL need not pay.
    from tests.servers.postgres import Server

    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def postgres_url(postgres: Server) -> Iterator[str]:
    """A fresh database. The server may be stopped, paused or killed: it is back for the next test."""
    postgres.revive()
    url = postgres.new_database()
    yield url
    postgres.revive()
    postgres.give_back(url)


@pytest.fixture
def provider() -> Iterator[Provider]:
    """A model provider in a separate process, with an empty script."""
    from tests.servers.providers import Provider

    with Provider() as opened:
        yield opened
