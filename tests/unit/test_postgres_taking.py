"""Creating and claiming a run with one statement each on PostgreSQL.

The same result as in a transaction, with less work.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from msgspec import structs
from tests.conformance.suite import RELEASED, T0, Held, claim_one, found, new_run, payload, register, serving
from tests.servers.postgres import Server
from tests.unit.postgres_tools import Gate, cleared, opened, raw

from perdure.core.events import RunClaimed, RunCreated, RunSucceeded, SignalReceived, ThoughtRecorded
from perdure.core.identity import genesis, link
from perdure.errors import NotFound
from perdure.settings import Queue
from perdure.store.api import Claimed, Committed, RowChange, RunRow, Served
from perdure.store.claims import Claims
from perdure.store.postgres import claims
from perdure.store.postgres.claims import Taking, _Lost
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.queries import QUERIES, PostgresCursor
from perdure.store.postgres.store import PostgresStore

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
    """The names of all statements from here on, without the thread that listens for rings."""
    names: list[str] = []
    plain, here = PostgresCursor._run, threading.get_ident()

    def run(self: PostgresCursor, name: str, params: Any) -> Any:
        names.extend([name] if threading.get_ident() == here else [])
        return plain(self, name, params)

    monkeypatch.setattr(PostgresCursor, "_run", run)
    return names


def ids(claimed: list[Claimed]) -> list[str]:
    return [one.row.run_id for one in claimed]


def test_a_run_is_created_in_one_statement_and_claimed_in_one(store: PostgresStore, statements: list[str]) -> None:
    for run_id in ("r1", "r2", "r3"):
        assert store.create_run(new_run(run_id))[1]
    assert ids(store.claim("w", serving("a"), 9, T0)) == ["r1", "r2", "r3"]
    assert statements == ["create_run"] * 3 + ["claim_at_once"]


def test_that_nothing_is_ready_is_seen_in_one_look(store: PostgresStore, statements: list[str]) -> None:
    assert store.claim("w", serving("a"), 9, T0) == []
    assert statements == ["claim_at_once"]


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


def test_a_claim_that_takes_nothing_is_nobodys_turn(store: PostgresStore) -> None:
    with raw(store.url) as other:
        other.execute("INSERT INTO perdure_turns (queue, tenant, turn) VALUES ('default', 't2', 90)")
        turns = "SELECT tenant, turn FROM perdure_turns ORDER BY tenant"
        before = other.execute(turns).fetchall()
        assert store.claim("w", serving("a"), 1, T0) == []
        store.create_run(new_run("r"))
        with psycopg.connect(store.url) as locking:
            locking.execute("SELECT 1 FROM perdure_runs FOR UPDATE")
            assert store.claim("w", serving("a"), 1, T0) == []
        assert other.execute(turns).fetchall() == before


def test_nothing_is_written_by_a_claim_that_takes_nothing(store: PostgresStore) -> None:
    """Or every idle worker would have the disk flushed once a second."""
    with raw(store.url) as other:
        number = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"

        def claim_counts_up() -> bool:
            before = other.execute(number).fetchone()
            assert store.claim("w", serving("a"), 9, T0) == []
            return other.execute(number).fetchone() != before

        # The number is that of the whole server, which has transactions of its own now and then. A claim that writes counts it up always.
        assert not all(claim_counts_up() for _ in range(20))


@pytest.mark.parametrize("what", ["another line", "a limit", "a suspect", "a takeover"])
def test_what_has_to_be_weighed_is_not_claimed_at_once(store: PostgresStore, statements: list[str], what: str) -> None:
    store.create_run(new_run("r"))
    if what == "another line":
        store.create_run(new_run("of another", tenant="t2"))
    if what == "a suspect":
        with raw(store.url) as other:
            other.execute("UPDATE perdure_runs SET crashes = 2 WHERE run_id = 'r'")
    if what == "a takeover":
        with raw(store.url) as other:
            other.execute("UPDATE perdure_runs SET lost = 1 WHERE run_id = 'r'")
    taken = store.claim("w", serving("a"), 9, T0, limits=LIMITED if what == "a limit" else None)
    assert "r" in ids(taken)
    assert [one.events for one in taken] == [tuple(store.read(one.lease.run_id)) for one in taken]
    assert "worker_by_id" in statements, "in a transaction"
    (claim,) = [event.body for event in store.read("r") if isinstance(event.body, RunClaimed)]
    assert claim.takeover is (what == "a takeover")


def test_whoever_was_too_slow_looks_again_before_everything_is_weighed(
    store: PostgresStore, statements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the line is just being taken by another worker when it looks, and is taken when it looks again."""
    for run_id in ("r1", "r2"):
        store.create_run(new_run(run_id))
    plain, locking = Taking._send, psycopg.connect(store.url)
    locking.execute("SELECT 1 FROM perdure_runs WHERE run_id = 'r1' FOR UPDATE")

    def send(self: Taking, values: Any) -> list[Any]:
        rows = plain(self, values)
        locking.execute("UPDATE perdure_runs SET ready_at = NULL WHERE run_id = 'r1'")
        locking.commit()
        return rows

    monkeypatch.setattr(Taking, "_send", send)
    statements.clear()
    assert ids(store.claim("w", serving("a"), 1, T0)) == ["r2"]
    assert statements == ["claim_at_once", "claim_at_once"]
    locking.close()


@pytest.mark.parametrize("under_way", [False, True])
def test_what_a_lost_statement_takes_late_is_driven_beside_what_was_taken_since(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, under_way: bool
) -> None:
    """Its rows were locked when the transaction ran, so the transaction skipped them.

    A statement under way is waited for.
    """
    for run_id in ("r1", "r2"):
        store.create_run(new_run(run_id))
    gate = Gate(store.url)
    sending, arrived, statement = Taking._send, Taking._arrived, QUERIES["claim_at_once"]
    slow = statement.sql.replace(
        "CROSS JOIN head LEFT JOIN", f"CROSS JOIN (SELECT head.*, {Gate.HELD_UP} FROM taken CROSS JOIN head) AS head LEFT JOIN"
    )
    assert slow != statement.sql
    threads: list[threading.Thread] = []

    def send(self: Taking, values: Any) -> list[Any]:
        monkeypatch.setitem(QUERIES, "claim_at_once", structs.replace(statement, sql=slow))
        threads.append(threading.Thread(target=sending, args=(self, values)))
        threads[0].start()
        gate.wait()
        if not under_way:
            gate.open()
            threads[0].join()
        raise _Lost

    def arrive(self: Taking, ask: Any, *, wait: bool) -> list[Any]:
        if not wait:
            return []
        threads.append(threading.Timer(0.2, gate.open))  # when it is waited for
        threads[-1].start()
        return arrived(self, ask, wait=True)

    monkeypatch.setattr(Taking, "_send", send)
    monkeypatch.setattr(Taking, "_arrived", arrive)
    claimed = store.claim("w", serving("a"), 1, T0)
    for thread in threads:
        thread.join()
    assert sorted(ids(claimed)) == ["r1", "r2"]
    assert {one.lease.run_id for one in claimed} | {"first"} == {run_id for run_id, _ in store.held("w")}
    for one in claimed:
        assert one.row == found(store, one.lease.run_id)
        assert store.append([Held(one.lease, one.row.seq, one.row.head).append(ThoughtRecorded("mine"))]) == [Committed()]


def test_nothing_is_claimed_at_once_for_a_worker_that_nobody_knows(store: PostgresStore) -> None:
    store.create_run(new_run("r"))
    with pytest.raises(NotFound, match="worker nobody is not registered"):
        store.claim("nobody", serving("a"), 9, T0)
    assert found(store, "r").holder is None


def test_a_run_that_was_worked_on_before_is_claimed_at_once_with_its_journal_and_its_inbox(store: PostgresStore) -> None:
    store.create_run(new_run("r"))
    held = claim_one(store, "r")
    for key in ("one", "two"):
        assert not store.post("r", None, SignalReceived("t", payload(key), "ann"), event_id=uuid.uuid4().hex, now=T0), "into its inbox"
    store.append([held.append(RELEASED, row=RowChange("waiting", release=True))])
    unread = store.unread("r")
    (claimed,) = store.claim("w", serving("a"), 9, T0)
    assert claimed.row == found(store, "r")
    assert claimed.events == tuple(store.read("r"))
    assert claimed.post == tuple(unread)
    assert len(unread) == 2


def test_a_long_journal_does_not_come_along_and_its_inbox_does(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_FEW_EVENTS", 5)
    for run_id, thoughts in (("short", 1), ("long", 2)):
        store.create_run(new_run(run_id))
        held = claim_one(store, run_id)
        store.append([held.append(*[ThoughtRecorded("x")] * thoughts, RELEASED, row=RowChange("queued", ready_at=T0, release=True))])
    claimed = {one.lease.run_id: one for one in store.claim("w", serving("a"), 9, T0)}
    assert claimed["short"].events is not None
    assert (claimed["long"].events, claimed["long"].post) == (None, ())


def test_the_chain_that_a_claim_and_a_signal_write_is_the_one_that_is_verified(store: PostgresStore) -> None:
    for run_id in ("r1", "r2"):
        store.create_run(new_run(run_id))
    for times in range(3):
        for one in store.claim("w", serving("a"), 9, T0 + 9):
            store.append([Held(one.lease, one.row.seq, one.row.head).append(RELEASED, row=RowChange("waiting", release=True))])
            body = SignalReceived("t", payload(f"ä ☃ {times}"), "ann", str(times))
            assert store.post(one.lease.run_id, None, body, event_id=uuid.uuid4().hex, now=T0 + times)
    for run_id in ("r1", "r2"):
        head = genesis(run_id)
        for stored in store.stored(run_id):
            head = link(head, stored.seq, stored.event_id.hex(), stored.ts, stored.epoch, stored.call, stored.cause, stored.data)
            assert stored.hash == head
        assert (found(store, run_id).head, found(store, run_id).seq) == (head, 10)


def test_the_next_ready_run_is_known_from_the_claim_as_long_as_nothing_has_happened(store: PostgresStore, statements: list[str]) -> None:
    stop = store.listen(lambda: None)
    try:
        served = serving("a")
        store.create_run(new_run("later", ts=T0 + 50))
        statements.clear()
        assert store.claim("w", served, 9, T0) == []
        assert store.next_ready(served) == T0 + 50
        assert statements == ["claim_at_once"]
        store.create_run(new_run("now"))
        assert store.next_ready(served) == T0, "something was committed here since"
        assert ids(store.claim("w", served, 9, T0)) == ["now"]
        statements.clear()
        assert store.next_ready(served) == T0 + 50
        assert store.next_ready(serving("another")) is None, "of other lines"
        assert statements == ["next_ready"]
        elsewhere = opened(store.url)
        heard = store._notify.heard
        elsewhere.create_run(new_run("there"))
        while store._notify.heard == heard:
            time.sleep(0.005)
        assert store.next_ready(served) == T0, "something was heard of since"
        elsewhere.close()
    finally:
        stop()


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
    """T14: the prune has deleted the run and not committed; a new start finds the run or its tombstone."""
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


def test_runs_without_a_version_are_claimed_at_once_beside_others_of_their_agent(store: PostgresStore, statements: list[str]) -> None:
    def queued(run_id: str, version: str) -> None:
        new = new_run(run_id)
        assert isinstance(new.created, RunCreated)
        store.create_run(structs.replace(new, created=structs.replace(new.created, version=version)))

    queued("r0", "")
    assert [one.row.version for one in store.claim("w", [Served("a", "2")], 9, T0)] == ["2"]
    assert "worker_by_id" in statements, "the first claim makes the line of the version, in a transaction"
    for run_id, version in (("r1", ""), ("r2", "2"), ("r3", "")):
        queued(run_id, version)
    statements.clear()
    taken = store.claim("w", [Served("a", "2")], 9, T0)
    assert statements == ["claim_at_once"]
    assert [(one.lease.run_id, one.row.version) for one in taken] == [("r1", "2"), ("r2", "2"), ("r3", "2")]
    for one in taken:
        assert one.row == found(store, one.lease.run_id)
        assert one.events == tuple(store.read(one.lease.run_id))
        assert one.events is not None
        assert one.events[-1].body.version == ("" if one.lease.run_id == "r2" else "2")  # type: ignore[union-attr]
        head = genesis(one.lease.run_id)
        for stored in store.stored(one.lease.run_id):
            head = link(head, stored.seq, stored.event_id.hex(), stored.ts, stored.epoch, stored.call, stored.cause, stored.data)
        assert one.row.head == head, "the hash covers the version"
        store.append([Held(one.lease, one.row.seq, one.row.head).append(RELEASED, row=RowChange("queued", release=True, ready_at=T0))])
    assert store.claim("w", serving("a"), 9, T0) == [], "the claim has moved it to the line of its version"
    assert len(store.claim("w", [Served("a", "2")], 9, T0)) == 3
