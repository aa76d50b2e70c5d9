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
        # `version` changes from time to time without a commit, so that processes poll. A test that compares two
        # versions would sometimes fail.
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
        # The path of a lock file depends on the address, and a pooler may get the port of another pooler in an earlier
        # test.
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        # In each of these tests the bell listens for this long without success.
        monkeypatch.setattr(bell, "_PROBE_S", 0.05)
        url = cleared(postgres)
        with Pooler(url) as pooler:
            yield lambda: open_store(pooler.url(url))
