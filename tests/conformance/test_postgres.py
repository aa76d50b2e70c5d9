"""What every store must do, on PostgreSQL: directly, and through a proxy that pools transactions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.conformance.suite import StoreConformance
from tests.servers.pooler import Pooler
from tests.servers.postgres import Server
from tests.unit.postgres_tools import cleared

from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.store.postgres import bell
from perdure.store.postgres import store as dialect


class OnPostgres(StoreConformance):
    def age(self, store: Store, us: int) -> None:
        """Leases count by the server's clock: every sign of life is set back."""
        with psycopg.connect(store.url, autocommit=True) as other:
            other.execute("UPDATE perdure_workers SET beat_at = beat_at - %s", (us,))

    @pytest.fixture(autouse=True)
    def _looking_by_the_clock_is_never_due(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # `version` moves by itself from time to time, so that somebody looks: a test that compares two of them would fail now and then.
        monkeypatch.setattr(dialect, "_LOOK_S", 1e6)
        monkeypatch.setattr(dialect, "_LOOK_DEAF_S", 1e6)


class TestPostgres(OnPostgres):
    @pytest.fixture
    def make_store(self, postgres: Server) -> Callable[[], Store]:
        return lambda: open_store(cleared(postgres))


@pytest.mark.full
class TestPostgresBehindAPooler(OnPostgres):
    @pytest.fixture
    def make_store(self, postgres: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], Store]]:
        # Lock files are kept by address, and a pooler may get the port that another one had in an earlier test.
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(bell, "_PROBE_S", 0.05)  # the doorbell listens this long in vain, in each of these tests
        url = cleared(postgres)
        with Pooler(url) as pooler:
            yield lambda: open_store(pooler.url(url))
