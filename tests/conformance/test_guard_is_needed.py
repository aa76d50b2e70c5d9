"""Tests of the tests of the guard: without any one predicate of the guard, a test fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.conformance.suite import ROWS, StoreConformance

from perdure.store.api import RowChange
from perdure.store.open import open_store
from perdure.store.sqlite.queries import QUERIES

pytestmark = pytest.mark.full

SUITE = StoreConformance()
PREDICATES = {"epoch": "epoch = ?5", "nonce": "nonce = ?6", "worker": "holder = ?7", "seq": "seq = ?8"}
STATEMENTS = dict(zip(("advance", "advance_and_project", "advance_and_release"), ROWS, strict=True))


def goes_red(check: Callable[[], None]) -> bool:
    try:
        check()
    except Exception:
        return True
    return False


@pytest.mark.parametrize("part", PREDICATES)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_without(statement: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """… its epoch, nonce, worker or seq each of the three guarded statements lets a forged append through, and a test says so."""

    def check(row: RowChange | None = STATEMENTS[statement]) -> None:
        store = open_store("sqlite://")
        try:
            if part == "seq":
                SUITE.test_an_append_that_expects_another_seq_is_refused(store, 1, row)
            else:
                SUITE.test_a_lease_that_differs_only_in_its(store, part, row)
        finally:
            store.close()

    assert not goes_red(check)
    predicate = PREDICATES[part]
    before, where, guard = QUERIES[statement].partition("WHERE")
    assert predicate in guard
    number = predicate.split("?")[1]
    mutated = before + where + guard.replace(predicate, f"?{number} = ?{number}")
    monkeypatch.setitem(QUERIES, statement, mutated)
    assert goes_red(check)
