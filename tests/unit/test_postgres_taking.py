"""Creating and claiming in one statement each on PostgreSQL, where there is nothing to weigh: the same as in a transaction, and less of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs
from tests.servers.postgres import Server
from tests.unit.postgres_tools import cleared, opened, raw

from perdure.errors import NotFound
from perdure.settings import Queue
from perdure.store.api import Claimed, RowChange, RunRow
from perdure.store.claims import Claims
from perdure.store.postgres.cursor import PostgresCursor
from perdure.store.postgres.store import PostgresStore
from perdure.testing.conformance import RELEASED, T0, claim_one, found, new_run, register, serving

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
    """The names of all statements from here on."""
    names: list[str] = []
    plain = PostgresCursor._run

    def run(self: PostgresCursor, name: str, params: Any) -> Any:
        names.append(name)
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
    (weighed,) = Claims.claim(store._claims, "w", serving("a"), 9, T0, None, {})
    assert (at_once.events is None, weighed.events is None) == (False, True)
    assert left_behind("at once") == left_behind("weighed")


def test_a_claim_at_once_counts_as_its_tenants_turn(store: PostgresStore) -> None:
    for number in range(3):
        store.create_run(new_run(f"r{number}"))
    assert len(store.claim("w", serving("a"), 3, T0)) == 3
    store.create_run(new_run("of the same tenant"))
    store.create_run(new_run("of another", tenant="t2", ts=T0 + 1))
    assert ids(store.claim("w", serving("a"), 1, T0 + 1)) == ["of another"]


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
    assert {one.events for one in taken} == {None}
    assert "claim_many" not in statements


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
