"""`verify --repair`.

Rows that contradict a sound journal are written again from the journal, and nothing else changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.suite_moving import ELSEWHERE, LEASE_US
from tests.conformance.suite_waiting import NOW
from tests.unit.inspect_tools import Forge, forging, make_waiting, url_of
from tests.unit.postgres_tools import empty

from perdure.errors import AlreadyRunning, Conflict
from perdure.inspect.repair import plan_repair
from perdure.inspect.verify import verify_run
from perdure.inspect.view import all_rows, require
from perdure.store.api import Served, Store
from perdure.store.open import open_store
from perdure.store.transfer import Copying

# Columns of the row that the journal determines, each with a forged value.
FORGED = {
    "status": "'succeeded'",
    "waiting_for": "'nothing'",
    "ready_at": "1234",
    "seq": "seq - 1",
    "epoch": "epoch + 1",
    "holder": "'nobody'",
    "crashes": "99",
    "error": "'forged'",
    "created_at": "created_at + 1",
    "updated_at": "1",
    "attention": "'error'",
    "agent": "'other'",
    "version": "'9'",
    "tenant": "'rival'",
    "actor": "'mallory'",
    "queue": "'fast'",
    "target": "'/tmp/evil.py:x'",
    "input_digest": "'00'",
    "priority": "priority + 7",
}
APPROVAL = {
    "status": "CASE status WHEN 'rejected' THEN 'approved' ELSE 'rejected' END",
    "deciders": "'[\"mallory\"]'",
    "expires_at": "coalesce(expires_at, 0) + 1",
    "voters": "'[\"mallory\"]'",
    "settled_by": "'mallory'",
    "note": "'forged'",
    "asked_at": "asked_at + 1",
    "call": "call + 1",
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("waiting") / "journal.db"
    make_waiting(path)
    return path


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, zoo: Path, tmp_path: Path) -> Iterator[tuple[Store, Forge]]:
    """Runs that wait and runs that have ended; and a function that switches the triggers off for one statement."""
    path = Path(shutil.copy(zoo, tmp_path / "journal.db"))
    store = open_store(url_of(path))
    url = url_of(path)
    if request.param == "postgres":
        url = empty(request.getfixturevalue("postgres"))
        moved = open_store(url)
        Copying(store, moved, to_url=ELSEWHERE, by="ann").move(now=NOW * 2, lease_us=LEASE_US)
        store.close()
        store = moved
    with forging(url) as forge:
        yield store, forge
    store.close()


def events_of(store: Store) -> dict[str, Any]:
    return {row.run_id: store.stored(row.run_id) for row in all_rows(store)}


def repaired(store: Store, run_id: str) -> tuple[str, ...]:
    planned = plan_repair(store, require(store, run_id))
    assert planned is not None, run_id
    store.repair(planned)
    assert verify_run(store, require(store, run_id)).problem is None, run_id
    assert plan_repair(store, require(store, run_id)) is None, run_id
    return planned.words


def test_what_is_sound_needs_no_repair(journal: tuple[Store, Forge]) -> None:
    store, _ = journal
    for row in all_rows(store):
        if row.holder is None:
            assert plan_repair(store, row) is None, row.run_id


@pytest.mark.parametrize("column", FORGED)
def test_each_forged_column_of_each_row_is_written_again(journal: tuple[Store, Forge], column: str) -> None:
    store, forge = journal
    before, events = {row.run_id: row for row in all_rows(store)}, events_of(store)
    mended = 0
    for run_id, row in before.items():
        if row.holder is not None or row.parent is not None or (column == "ready_at" and row.ready_at is None and row.holder is not None):
            continue
        forge(f"UPDATE perdure_runs SET {column} = {FORGED[column]} WHERE run_id = '{run_id}'")
        if verify_run(store, require(store, run_id)).problem is None:
            continue  # the value was the right one by chance
        words = repaired(store, run_id)
        assert any(line.startswith(f"{column}: ") for line in words), words
        now = require(store, run_id)
        assert getattr(now, column) == getattr(row, column) or column == "updated_at"
        mended += 1
    assert mended >= 3
    assert events_of(store) == events
    assert store.problems() == [], "the triggers are as they were"


@pytest.mark.parametrize("column", APPROVAL)
def test_each_forged_column_of_an_approval_is_written_again(journal: tuple[Store, Forge], column: str) -> None:
    store, forge = journal
    for run_id in ("asks", "bought", "refused"):
        number = f"(SELECT id FROM perdure_runs WHERE run_id = '{run_id}')"
        forge(f"UPDATE perdure_approvals SET {column} = {APPROVAL[column]} WHERE run = {number}")
        assert verify_run(store, require(store, run_id)).projection, run_id
        assert any(line.startswith("approval ap-") for line in repaired(store, run_id))
    assert store.problems() == []


def test_an_approval_that_was_deleted_comes_back(journal: tuple[Store, Forge]) -> None:
    store, forge = journal
    forge("DELETE FROM perdure_approvals WHERE run = (SELECT id FROM perdure_runs WHERE run_id = 'asks')")
    assert any("becomes pending" in line for line in repaired(store, "asks"))


@pytest.mark.parametrize("change", ["limit_usd_micros = 99000000", "spent_usd_micros = 0, spent_calls = 0", "limit_calls = 1234"])
def test_a_forged_budget_is_written_again(journal: tuple[Store, Forge], change: str) -> None:
    store, forge = journal
    forge(f"UPDATE perdure_budgets SET {change}")
    wrong = [row.run_id for row in all_rows(store) if row.holder is None and verify_run(store, row).problem is not None]
    assert wrong
    for run_id in wrong:
        assert any(line.startswith("its budget: ") for line in repaired(store, run_id))


def test_a_run_that_a_worker_holds_is_refused(journal: tuple[Store, Forge]) -> None:
    store, forge = journal
    row = next(row for row in all_rows(store) if row.status == "waiting_approval" and row.parent is None)
    store.register("alive", "host:1", 1, NOW * 2)
    forge(f"UPDATE perdure_runs SET ready_at = 1, status = 'queued' WHERE run_id = '{row.run_id}'")
    assert store.claim("alive", [Served(row.agent, row.version)], 1, NOW * 2, run_id=row.run_id)
    forge(f"UPDATE perdure_runs SET version = '9' WHERE run_id = '{row.run_id}'")
    planned = plan_repair(store, require(store, row.run_id))
    assert planned is not None
    with pytest.raises(AlreadyRunning, match="is held by worker host:1; nothing was changed"):
        store.repair(planned)
    assert require(store, row.run_id).version == "9"
    assert store.problems() == []


def test_a_run_that_has_changed_since_is_refused(journal: tuple[Store, Forge]) -> None:
    store, forge = journal
    forge("UPDATE perdure_runs SET crashes = 99 WHERE run_id = 'asks'")
    planned = plan_repair(store, require(store, "asks"))
    assert planned is not None
    forge("UPDATE perdure_runs SET crashes = 98 WHERE run_id = 'asks'")
    with pytest.raises(Conflict, match="has changed meanwhile"):
        store.repair(planned)
    assert (require(store, "asks").crashes, store.problems()) == (98, [])


def test_a_journal_that_is_damaged_itself_is_never_papered_over(journal: tuple[Store, Forge]) -> None:
    """A row that is made to fit a journal whose end is missing would hide that it is missing."""
    store, forge = journal
    seq = require(store, "asks").seq
    forge(f"DELETE FROM perdure_events WHERE seq = {seq} AND run = (SELECT id FROM perdure_runs WHERE run_id = 'asks')")
    assert plan_repair(store, require(store, "asks")) is None


def test_a_journal_with_an_edited_event_is_not_repaired(journal: tuple[Store, Forge]) -> None:
    store, forge = journal
    forge("UPDATE perdure_runs SET crashes = 99 WHERE run_id = 'asks'")
    assert plan_repair(store, require(store, "asks")) is not None
    forge("UPDATE perdure_events SET ts = ts + 1 WHERE seq = 2 AND run = (SELECT id FROM perdure_runs WHERE run_id = 'asks')")
    assert plan_repair(store, require(store, "asks")) is None
