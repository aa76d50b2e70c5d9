"""Creating and claiming in one statement each on PostgreSQL, where there is nothing to weigh: the same as in a transaction, and less of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs
from tests.servers.postgres import Server
from tests.unit.postgres_tools import cleared, opened, raw

from perdure.core.events import RunSucceeded
from perdure.errors import NotFound
from perdure.settings import Queue
from perdure.store.api import Claimed, Committed, RowChange, RunRow
from perdure.store.claims import Claims
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.cursor import PostgresCursor
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.store import PostgresStore
from perdure.store.postgres.taking import Taking, _Lost
from perdure.testing.conformance import RELEASED, T0, claim_one, found, new_run, payload, register, serving

LIMITED = {"default": Queue(concurrency=9)}


@pytest.fixture
def store(postgres: Server) -> Iterator[PostgresStore]:
    store = opened(cleared(postgres))
    register(store, "w")
    store.create_run(new_run("first"))  # makes the line
    claim_one(store, "first")
    yield store
    store.close()


@pytest.fixture
def statements(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all statements from here on; not those of the thread that listens for rings."""
    names: list[str] = []
    plain, here = PostgresCursor._run, threading.get_ident()

    def run(self: PostgresCursor, name: str, params: Any) -> Any:
        names.extend([name] if threading.get_ident() == here else [])
        return plain(self, name, params)

    monkeypatch.setattr(PostgresCursor, "_run", run)
    return names


def ids(claimed: list[Claimed]) -> list[str]:
    return [one.row.run_id for one in claimed]


def test_a_run_is_created_in_one_statement_and_claimed_in_two(store: PostgresStore, statements: list[str]) -> None:
    for run_id in ("r1", "r2", "r3"):
        assert store.create_run(new_run(run_id))[1]
    assert ids(store.claim("w", serving("a"), 9, T0)) == ["r1", "r2", "r3"]
    assert statements == ["create_run"] * 3 + ["first_of_line", "claim_many"]


def test_that_nothing_is_ready_is_seen_in_one_look(store: PostgresStore, statements: list[str]) -> None:
    assert store.claim("w", serving("a"), 9, T0) == []
    assert statements == ["first_of_line"]


def test_what_is_claimed_is_as_it_lies_there_and_comes_with_its_journal(store: PostgresStore) -> None:
    for run_id in ("r1", "r2"):
        store.create_run(new_run(run_id))
    for claimed in store.claim("w", serving("a"), 9, T0):
        assert claimed.row == found(store, claimed.lease.run_id)
        assert claimed.events == tuple(store.read(claimed.lease.run_id))


def test_a_claim_at_once_leaves_the_same_behind_as_one_in_a_transaction(store: PostgresStore) -> None:
    def left_behind(run_id: str) -> tuple[RunRow, list[Any]]:
        row = structs.replace(found(store, run_id), run_id="", head=b"")
        return row, [(event.seq, event.ts, event.epoch, event.cause, event.type) for event in store.read(run_id)]

    store.create_run(new_run("at once"))
    (at_once,) = store.claim("w", serving("a"), 9, T0)
    store.create_run(new_run("weighed"))
    (weighed,) = Claims._claim_by_turns(store, "w", serving("a"), 9, T0, None, {})
    assert [tuple(store.read(one.lease.run_id)) for one in (at_once, weighed)] == [at_once.events, weighed.events]
    assert left_behind("at once") == left_behind("weighed")


def test_a_claim_at_once_counts_as_its_tenants_turn(store: PostgresStore) -> None:
    for number in range(3):
        store.create_run(new_run(f"r{number}"))
    assert len(store.claim("w", serving("a"), 3, T0)) == 3
    store.create_run(new_run("of the same tenant"))
    store.create_run(new_run("of another", tenant="t2", ts=T0 + 1))
    assert ids(store.claim("w", serving("a"), 1, T0 + 1)) == ["of another"]


def test_a_claim_that_takes_nothing_is_nobodys_turn(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_run(new_run("r"))
    plain, asked = Taking._take, []

    def take(self: Taking, values: Any) -> set[int]:
        asked.append((self, values))
        return plain(self, values)

    monkeypatch.setattr(Taking, "_take", take)
    assert ids(store.claim("w", serving("a"), 1, T0)) == ["r"]
    with raw(store.url) as other:
        other.execute("INSERT INTO perdure_turns (queue, tenant, turn) VALUES ('default', 't2', 90)")
        turns = "SELECT tenant, turn FROM perdure_turns ORDER BY tenant"
        before = other.execute(turns).fetchall()
        assert plain(*asked[0]) == set()
        assert other.execute(turns).fetchall() == before


@pytest.mark.parametrize("what", ["another line", "a limit", "a suspect"])
def test_what_has_to_be_weighed_is_not_claimed_at_once(store: PostgresStore, statements: list[str], what: str) -> None:
    store.create_run(new_run("r"))
    if what == "another line":
        store.create_run(new_run("of another", tenant="t2"))
    if what == "a suspect":
        with raw(store.url) as other:
            other.execute("UPDATE perdure_runs SET crashes = 2 WHERE run_id = 'r'")
    taken = store.claim("w", serving("a"), 9, T0, limits=LIMITED if what == "a limit" else None)
    assert "r" in ids(taken)
    assert [one.events for one in taken] == [tuple(store.read(one.lease.run_id)) for one in taken]
    assert "claim_many" not in statements


def test_whoever_was_too_slow_looks_again_before_everything_is_weighed(
    store: PostgresStore, statements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for run_id in ("r1", "r2"):
        store.create_run(new_run(run_id))
    register(store, "faster")
    plain, others = Taking._take, ["r1"]

    def take(self: Taking, values: Any) -> set[int]:
        if others:
            others.pop()
            assert ids(store.claim("faster", serving("a"), 1, T0)) == ["r1"]
        return plain(self, values)

    monkeypatch.setattr(Taking, "_take", take)
    statements.clear()
    assert ids(store.claim("w", serving("a"), 1, T0)) == ["r2"]
    assert statements == ["first_of_line", "first_of_line", "claim_many", "claim_many", "first_of_line", "claim_many"]


def test_what_a_lost_statement_takes_late_is_driven_beside_what_was_taken_since(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows were locked when the transaction looked, and it passed them by."""
    for run_id in ("r1", "r2"):
        store.create_run(new_run(run_id))
    plain, arrived = Taking._take, Taking._arrived

    def take(self: Taking, values: Any) -> set[int]:
        plain(self, values)
        raise _Lost

    monkeypatch.setattr(Taking, "_take", take)
    monkeypatch.setattr(Taking, "_arrived", lambda self, takes, *, wait: arrived(self, takes, wait=wait) if wait else set())
    claimed = store.claim("w", serving("a"), 1, T0)
    assert sorted(ids(claimed)) == ["r1", "r2"]
    assert {one.lease.run_id for one in claimed} | {"first"} == {run_id for run_id, _ in store.held("w")}


def test_nothing_is_claimed_at_once_for_a_worker_that_nobody_knows(store: PostgresStore) -> None:
    store.create_run(new_run("r"))
    with pytest.raises(NotFound, match="worker nobody is not registered"):
        store.claim("nobody", serving("a"), 9, T0)
    assert found(store, "r").holder is None


def test_a_run_that_was_worked_on_before_is_claimed_at_once_and_its_journal_is_read_later(store: PostgresStore) -> None:
    store.create_run(new_run("r"))
    held = claim_one(store, "r")
    store.append([held.append(RELEASED, row=RowChange("queued", ready_at=T0, release=True))])
    (claimed,) = store.claim("w", serving("a"), 9, T0)
    assert (claimed.lease.run_id, claimed.events) == ("r", None)
    assert claimed.row == found(store, "r")


def test_a_first_event_that_cannot_be_read_does_not_keep_others_from_being_claimed(store: PostgresStore) -> None:
    for run_id in ("damaged", "sound"):
        store.create_run(new_run(run_id))
    with raw(store.url) as other:
        other.execute("ALTER TABLE perdure_events DISABLE TRIGGER USER")
        other.execute("UPDATE perdure_events SET data = '{' WHERE run = (SELECT id FROM perdure_runs WHERE run_id = 'damaged')")
    claimed = {one.lease.run_id: one for one in store.claim("w", serving("a"), 9, T0)}
    assert claimed["damaged"].events is None
    assert claimed["sound"].events is not None


def test_an_id_that_is_taken_is_no_new_run(store: PostgresStore) -> None:
    assert store.create_run(new_run("r"))[1]
    row, created = store.create_run(new_run("r"))
    assert (row, created) == (found(store, "r"), False)
    assert len(store.read("r")) == 1


def test_the_id_of_a_run_that_is_just_being_pruned_starts_nothing(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """T14: the prune has deleted the run and not committed; whoever starts it again finds the run, or its tombstone."""
    store.create_run(new_run("r"))
    assert store.append([claim_one(store, "r").append(RunSucceeded(payload("done")), row=RowChange("succeeded"))]) == [Committed()]
    pruner = opened(store.url)
    deleted, committing = threading.Event(), PostgresDatabase._commit

    def late(self: PostgresDatabase, connection: Connection) -> None:
        if threading.current_thread() is pruning:
            deleted.set()
            time.sleep(0.3)  # for the start to wait for it, should it do so
        committing(self, connection)

    monkeypatch.setattr(PostgresDatabase, "_commit", late)
    pruning = threading.Thread(target=lambda: pruner.prune(["r"], T0 + 10**12, by="ann", now=T0))
    pruning.start()
    assert deleted.wait(60)
    assert not store.create_run(new_run("r"))[1]
    pruning.join()
    assert store.get("r") is None
    assert store.tombstone("r") is not None
    pruner.close()
