"""Rates hold over all processes: real processes that share a file and a clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.unit.store_tools import output, python

from perdure.core.rate import Rate
from perdure.store.open import open_store

_STARTS = """
import sys, time
from perdure.core.rate import Rate
from perdure.store.open import open_store
store = open_store(f"sqlite:///{sys.argv[1]}")
rate, until = Rate(limit=10, per=1.0, key="api", burst=int(sys.argv[2])), int(sys.argv[3])
while True:
    now = time.time_ns() // 1000
    at = store.admit(rate, now)
    if at >= until:
        break
    time.sleep(max(0, at - now) / 1e6)
    print(at)
"""


def starts(path: Path, burst: int, until: int) -> list[int]:
    """When three processes that want to start things all the time may do so, until then."""
    processes = [python(_STARTS, path, burst, until) for _ in range(3)]
    return sorted(int(line) for process in processes for line in output(process).split())


@pytest.mark.full
@pytest.mark.parametrize("burst", [1, 5])
def test_three_processes_together_never_start_more_than_the_rate_allows(tmp_path: Path, burst: int) -> None:
    path = tmp_path / "journal.db"
    open_store(f"sqlite:///{path}").close()
    until = time.time_ns() // 1000 + 2_500_000
    begun = starts(path, burst, until)
    assert len(begun) > burst + 5, "the rate is used"
    for at in begun:
        window = sum(at <= other < at + 1_000_000 for other in begun)
        assert window <= 9 + burst, (at, window)


def test_one_process_that_is_told_to_wait_stops_all(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    store = open_store(f"sqlite:///{path}")
    now = time.time_ns() // 1000
    store.hold_back("api", now + 60_000_000)
    assert starts(path, 10, now + 30_000_000) == []
    store.close()


def test_a_rate_without_a_limit_writes_nothing(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    store.hold_back("api", 500)
    version = store.version()
    assert [store.admit(Rate(key="api"), now) for now in (100, 499, 700)] == [500, 500, 700]
    assert store.version() == version
    store.close()


def test_a_rate_must_have_its_key_by_the_time_it_is_asked(tmp_path: Path) -> None:
    store = open_store("sqlite://")
    with pytest.raises(AssertionError, match="key"):
        store.admit(Rate(limit=1), 0)
    store.close()
