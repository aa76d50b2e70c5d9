"""A database of the first release with runs: it is opened, migrated and used."""

from __future__ import annotations

import uuid
from pathlib import Path

import apsw
import pytest
from tests.conformance.suite_waiting import NOW, approval, asking, child, found, hold, payload, post, vote
from tests.unit.store_tools import raw

from perdure.core.codec import digest, encode
from perdure.core.events import (
    AnyBody,
    AttentionNeeded,
    CancelRequested,
    Event,
    RunClaimed,
    RunCreated,
    RunReleased,
    RunRequeued,
    RunSucceeded,
    ThoughtRecorded,
)
from perdure.core.identity import genesis, seal_all
from perdure.inspect.verify import verify_run
from perdure.store.api import Committed, RowChange, Served, Store
from perdure.store.open import open_store
from perdure.store.rows import event_row
from perdure.store.sqlite.migrate import MIGRATIONS
from perdure.store.sqlite.queries import QUERIES

INSERT_RUN = """
INSERT INTO perdure_runs (id, run_id, agent, version, tenant, queue, input_digest, status, waiting_for, error, ready_at,
    seq, head, epoch, created_at, updated_at)
VALUES (?, ?, 'a', '1', 'default', 'default', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
RUNS: dict[str, tuple[str, int | None, list[AnyBody]]] = {
    "ready": ("queued", NOW, []),
    "asleep": ("waiting", None, [RunClaimed("w0"), RunReleased("waiting", "a signal")]),
    "done": ("succeeded", None, [RunClaimed("w0"), RunSucceeded(payload("done"))]),
    "stuck": (
        "needs_attention",
        None,
        [
            RunClaimed("w0"),
            AttentionNeeded("in_doubt", "old"),
            RunReleased("needs_attention", "a person"),
            RunRequeued("ann"),
            RunClaimed("w0"),
            AttentionNeeded("poison", "x"),
            RunReleased("needs_attention", "a person"),
        ],
    ),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file as the first release has left it."""
    file = tmp_path / "journal.db"
    connection = raw(file)
    connection.execute(MIGRATIONS[0].sql)
    connection.execute(QUERIES["record_migration"], (1, MIGRATIONS[0].checksum))
    connection.pragma("application_id", int.from_bytes(b"perd", "big"))
    for key, (run_id, (status, ready_at, bodies)) in enumerate(RUNS.items(), 1):
        insert(connection, key, run_id, status, ready_at, [RunCreated(run_id, "a", "1", "default", payload(1)), *bodies])
    connection.close()
    return file


def insert(connection: apsw.Connection, key: int, run_id: str, status: str, ready_at: int | None, bodies: list[AnyBody]) -> None:
    epochs = [sum(isinstance(one, RunClaimed) for one in bodies[:seq]) for seq in range(1, len(bodies) + 1)]
    events = [Event(seq, uuid.uuid4().hex, NOW, epochs[seq - 1], None, seq - 1 or None, body) for seq, body in enumerate(bodies, 1)]
    sealed = seal_all(genesis(run_id), events)
    error = next((body.detail for body in reversed(bodies) if isinstance(body, AttentionNeeded)), None)
    waiting_for = bodies[-1].waiting_for if isinstance(bodies[-1], RunReleased) else None
    connection.execute(
        INSERT_RUN,
        (key, run_id, digest(encode(1)), status, waiting_for, error, ready_at, len(sealed), sealed[-1].hash, epochs[-1], NOW, NOW),
    )
    connection.executemany(QUERIES["insert_event"], [event_row(key, one) for one in sealed])


@pytest.fixture
def store(path: Path) -> Store:
    return open_store(f"sqlite:///{path}")


def test_its_runs_are_as_they_were_and_nothing_is_missing(store: Store) -> None:
    assert store.facts()["schema_version"] == str(len(MIGRATIONS))
    assert store.problems() == []
    for run_id, (status, ready_at, bodies) in RUNS.items():
        row = found(store, run_id)
        assert (row.status, row.ready_at, row.seq, row.priority, row.parent, row.parent_call) == (
            status,
            ready_at,
            len(bodies) + 1,
            0,
            None,
            None,
        )
        assert verify_run(store, row).problem is None
    store.close()


def test_why_a_run_needs_attention_is_taken_from_its_journal(store: Store) -> None:
    assert {run_id: found(store, run_id).attention for run_id in RUNS} == {"ready": None, "asleep": None, "done": None, "stuck": "poison"}
    store.close()


def test_its_runs_go_on_with_everything_that_is_new(store: Store) -> None:
    assert post(store, "asleep", CancelRequested("ann")) is True
    assert found(store, "asleep").status == "cancelling"
    hand = hold(store, "ready")
    assert hand.write(asking("ap", tool=None), child("ready/2"), call=1) == Committed()
    assert vote(store, "ap", "ann").standing.status == "approved"
    assert approval(store, "ap").run_id == found(store, "ready/2").parent == "ready"
    stuck = hold(store, "stuck")
    assert stuck.write(ThoughtRecorded("x"), row=RowChange("running")) == Committed()
    with pytest.raises(Exception, match="finished"):
        post(store, "done", CancelRequested("ann"))
    assert [verify_run(store, found(store, run_id)).problem for run_id in (*RUNS, "ready/2")] == [None] * 5
    store.close()


# -- processes of the first release that are still open -------------------------------------------------------------------
def start_as_before(connection: apsw.Connection, run_id: str) -> None:
    """Start a run as the first release does."""
    insert(connection, 90 + len(run_id), run_id, "queued", NOW, [RunCreated(run_id, "a", "1", "default", payload(1))])


def test_a_run_that_an_old_process_starts_after_the_upgrade_is_found(path: Path) -> None:
    old = raw(path)
    store = open_store(f"sqlite:///{path}")
    start_as_before(old, "after")
    assert store.problems() == []
    store.register("w", "host:1", 1, NOW)
    assert store.next_ready([Served("a", "1")]) == NOW
    assert {one.row.run_id for one in store.claim("w", [Served("a", "1")], 9, NOW)} == {"ready", "after"}
    assert verify_run(store, found(store, "after")).problem is None
    old.close()
    store.close()


def test_a_run_that_an_old_process_starts_in_the_middle_of_the_upgrade_is_found(path: Path) -> None:
    old = raw(path)
    for migration in MIGRATIONS[1:3]:
        old.execute(migration.sql)
        old.execute(QUERIES["record_migration"], (migration.version, migration.checksum))
    start_as_before(old, "between")
    old.close()
    store = open_store(f"sqlite:///{path}")
    assert store.problems() == []
    store.register("w", "host:1", 1, NOW)
    assert {one.row.run_id for one in store.claim("w", [Served("a", "1")], 9, NOW)} == {"ready", "between"}
    store.close()


def test_ready_runs_that_nobody_would_find_are_counted(store: Store, path: Path) -> None:
    with raw(path) as other:
        other.execute("UPDATE perdure_runs SET line = NULL")
    (problem,) = store.problems()
    assert problem.startswith("1 run that is ready (ready) stands in no line"), "those that sleep or have ended are not looked for"
    assert "perdure resume ready" in problem
    store.close()


@pytest.mark.parametrize(
    ("sql", "rule"),
    [
        ("UPDATE perdure_approvals SET status = 'pending'", "settled stays so"),
        ("UPDATE perdure_approvals SET status = 'rejected'", "settled stays so"),
        ("DELETE FROM perdure_approvals", "stays with its run"),
        ("UPDATE perdure_runs SET status = 'queued' WHERE run_id = 'done'", "finished run"),
    ],
)
def test_the_upgraded_file_itself_refuses_to(store: Store, path: Path, sql: str, rule: str) -> None:
    """… take a decision back, delete one, or wake what has ended."""
    hold(store, "ready").write(asking("ap"), call=1)
    vote(store, "ap", "ann")
    with raw(path) as other, pytest.raises(apsw.ConstraintError, match=rule):
        other.execute(sql)
    store.close()


@pytest.mark.parametrize(
    "name", ["perdure_approvals_settled", "perdure_approvals_no_delete", "perdure_runs_in_line", "perdure_runs_identity"]
)
def test_a_guard_that_is_gone_is_told(store: Store, path: Path, name: str) -> None:
    with raw(path) as other:
        other.execute(f"DROP TRIGGER {name}")
    assert [problem for problem in store.problems() if name in problem]
    store.close()
