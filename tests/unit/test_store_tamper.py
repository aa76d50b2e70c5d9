"""The journal is append-only; and what happens if a user has changed the file anyway."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.conformance.suite import hold_one, payload
from tests.unit.store_tools import raw

from perdure.core.events import RunSucceeded, ThoughtRecorded
from perdure.errors import StoreCorrupt
from perdure.store.api import RowChange, Store
from perdure.store.open import open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{path}")
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("sql", "rule"),
    [
        ("UPDATE perdure_events SET data = '{}' WHERE seq = 1", "append-only"),
        ("DELETE FROM perdure_events WHERE seq = 2", "append-only"),
        (
            "INSERT OR REPLACE INTO perdure_events SELECT run << 32 | 9, event_id, ts, epoch, call, cause, data, hash FROM perdure_events",
            "seq of its run",
        ),
        ("DELETE FROM perdure_runs", "stay together"),
        ("UPDATE perdure_runs SET target = '/tmp/other.py:x'", "what its first event says of a run stays"),
        ("UPDATE perdure_runs SET run_id = 'mine'", "what its first event says of a run stays"),
        ("UPDATE perdure_runs SET tenant = 'mine'", "what its first event says of a run stays"),
    ],
)
def test_the_file_itself_refuses_to(store: Store, path: Path, sql: str, rule: str) -> None:
    """The file refuses to change, delete or insert events, for every user."""
    hold_one(store, "r")
    before = store.stored("r")
    with raw(path) as other, pytest.raises(apsw.ConstraintError, match=rule):
        other.execute(
            sql.replace(
                "INSERT OR REPLACE INTO perdure_events",
                "INSERT INTO perdure_events (id, event_id, ts, epoch, call, cause, data, hash)",
            )
        )
    assert store.stored("r") == before


@pytest.mark.parametrize(
    "sql", ["UPDATE perdure_runs SET seq = seq + 1", "UPDATE perdure_runs SET status = 'queued'", "UPDATE perdure_runs SET ready_at = 1"]
)
def test_the_file_itself_keeps_a_finished_run_finished(store: Store, path: Path, sql: str) -> None:
    store.append([hold_one(store, "r").append(RunSucceeded(payload(1)), row=RowChange("succeeded"))])
    before = store.get("r")
    with raw(path) as other, pytest.raises(apsw.ConstraintError, match="takes nothing more"):
        other.execute(sql)
    assert store.get("r") == before


def test_the_type_of_an_event_can_be_asked_for_in_sql(store: Store, path: Path) -> None:
    hold_one(store, "r")
    assert raw(path).execute("SELECT type FROM perdure_events ORDER BY seq").fetchall() == [("run_created",), ("run_claimed",)]


def tamper(path: Path, sql: str) -> None:
    with raw(path) as other:
        other.execute("DROP TRIGGER perdure_events_no_update; DROP TRIGGER perdure_events_no_delete")
        other.execute(sql)


@pytest.mark.parametrize(
    "data", ['\'{"type":"no_such_type"}\'', '\'{"type":"thought_recorded","text":7}\'', "CAST(x'7b2274797065223a22ff227d' AS TEXT)"]
)
def test_an_event_that_cannot_be_decoded_is_named(store: Store, path: Path, data: str) -> None:
    held = hold_one(store, "r")
    store.append([held.append(ThoughtRecorded("x"))])
    tamper(path, f"UPDATE perdure_events SET data = {data} WHERE seq = 3")
    with pytest.raises(StoreCorrupt, match="event 3 of run r cannot be decoded"):
        store.read("r")
    assert len(store.stored("r")) == 3  # verify still sees the row as it is stored


def test_an_event_that_is_gone_is_named(store: Store, path: Path) -> None:
    held = hold_one(store, "r")
    store.append([held.append(ThoughtRecorded("x"))])
    tamper(path, "DELETE FROM perdure_events WHERE seq = 2")
    with pytest.raises(StoreCorrupt, match="event 2 of run r is missing"):
        store.read("r")


def test_a_blob_that_was_changed_is_not_handed_out(store: Store, path: Path) -> None:
    held = hold_one(store, "r")
    store.append([held.append(ThoughtRecorded("x"), blobs=(b"the truth",))])
    digest = hashlib.sha256(b"the truth").hexdigest()
    assert store.blob(digest) == b"the truth"
    with raw(path) as other:
        other.execute("UPDATE perdure_blobs SET data = ?", (b"a lie",))
    with pytest.raises(StoreCorrupt, match="does not have the content"):
        store.blob(digest)


# -- the database as a whole -------------------------------------------------------------------------------------------------
def test_nothing_is_wrong_with_a_database_that_nobody_touched(store: Store) -> None:
    assert store.problems() == []
    for number in range(3):
        hold_one(store, f"r{number}", worker=f"w{number}")
    assert store.problems() == []


def test_a_journal_whose_run_is_gone_is_named(store: Store, path: Path) -> None:
    for number in range(4):
        hold_one(store, f"r{number}", worker=f"w{number}")
    with raw(path) as other:
        guard = other.execute("SELECT sql FROM sqlite_schema WHERE name = 'perdure_runs_no_delete'").get
        other.execute("DROP TRIGGER perdure_runs_no_delete")
        other.execute("DELETE FROM perdure_runs WHERE run_id IN ('r0', 'r2', 'r3')")
        other.execute(guard)
    problems = store.problems()
    assert [problem.split(":")[0] for problem in problems] == [f"run 'r{number}'" for number in (0, 2, 3)]
    assert all("its row is gone, and a journal of 2 events is left" in problem for problem in problems), problems


def test_a_journal_whose_run_and_first_event_are_gone_is_named_by_its_number(store: Store, path: Path) -> None:
    hold_one(store, "r")
    with raw(path) as other:
        for name in ("perdure_runs_no_delete", "perdure_events_no_delete"):
            other.execute(f"DROP TRIGGER {name}")
        other.execute("DELETE FROM perdure_runs")
        other.execute("DELETE FROM perdure_events WHERE seq = 1")
    assert any(problem.startswith("run number 1:") for problem in store.problems())


@pytest.mark.parametrize(
    "name",
    ["perdure_events_no_update", "perdure_events_no_delete", "perdure_events_guarded", "perdure_runs_finished", "perdure_runs_no_delete"],
)
def test_a_guard_that_is_missing_or_was_changed_is_named(store: Store, path: Path, name: str) -> None:
    other = raw(path)
    guard = other.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (name,)).get
    other.execute(f"DROP TRIGGER {name}")
    (problem,) = store.problems()
    assert problem.startswith(f"the trigger {name} is missing")
    other.execute(guard.replace("SELECT raise", "SELECT 1 WHERE 0 AND raise"))
    (problem,) = store.problems()
    assert problem.startswith(f"the trigger {name} is not the one that perdure makes")
    assert store.restore_schema(check=True) == [problem.partition(":")[0]]
    assert store.problems() == [problem]
    assert store.restore_schema() == [problem.partition(":")[0]]
    assert (store.problems(), store.restore_schema()) == ([], [])
    other.close()


def test_all_triggers_indexes_and_views_can_be_made_again_and_a_table_cannot(store: Store, path: Path) -> None:
    hold_one(store, "r")
    objects = "SELECT type, name, sql FROM sqlite_schema WHERE name LIKE 'perdure\\_%' ESCAPE '\\' AND type <> 'table' ORDER BY type, name"
    other = raw(path)
    made = other.execute(objects).fetchall()
    assert {kind for kind, _, _ in made} == {"trigger", "index", "view"}
    for kind, name, _ in made:
        other.execute(f"DROP {kind} {name}")
    assert len(store.problems()) == len(made)
    assert all("`perdure migrate` makes it again" in problem for problem in store.problems())
    assert len(store.restore_schema()) == len(made)
    assert other.execute(objects).fetchall() == made
    assert store.problems() == []
    other.execute("DROP TABLE perdure_turns; DROP TRIGGER perdure_runs_finished")
    with pytest.raises(StoreCorrupt, match="the table perdure_turns is missing: nothing was changed"):
        store.restore_schema()
    assert "restore it from a backup" in "".join(store.problems())
    other.close()
