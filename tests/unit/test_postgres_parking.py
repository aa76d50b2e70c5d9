"""The release of a run, and a signal to a parked run, on PostgreSQL.

The same result as in a transaction, in one round trip.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from msgspec import structs
from tests.conformance.suite import RELEASED, T0, Held, found, hold_one, new_run, payload, register, serving
from tests.servers.postgres import Server
from tests.unit.postgres_tools import cleared, eventually, opened, raw

from perdure.core.events import SignalReceived, ThoughtRecorded
from perdure.errors import NotFound, RunEnded
from perdure.store.api import Append, Committed, RowChange, RunRow
from perdure.store.mailbox import Mailbox
from perdure.store.postgres import journal
from perdure.store.postgres.database import PostgresDatabase
from perdure.store.postgres.journal import PostgresJournal
from perdure.store.postgres.store import PostgresStore

WAITING = RowChange("waiting", waiting_for="a signal", release=True)
SLEEPING = RowChange("waiting", waiting_for="a timer", ready_at=T0 + 50, release=True)


@pytest.fixture
def store(postgres: Server) -> Iterator[PostgresStore]:
    store = opened(cleared(postgres))
    yield store
    store.close()


@pytest.fixture
def transactions(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each transaction of several round trips."""
    begun: list[str] = []
    plain = PostgresDatabase._begin

    def begin(self: PostgresDatabase, *args: Any) -> str:
        begun.append("transaction")
        return plain(self, *args)

    monkeypatch.setattr(PostgresDatabase, "_begin", begin)
    return begun


def signal(store: PostgresStore, run_id: str, value: object = 1, key: str | None = None) -> bool:
    return store.post(run_id, None, SignalReceived("t", payload(value), "ann", key), event_id=uuid.uuid4().hex, now=T0)


def releases(store: PostgresStore, prefix: str) -> list[Append]:
    """One of every kind: it waits, sleeps, has read its post, has not, leaves it, or has something else to do with its journal."""
    held = {
        name: hold_one(store, f"{prefix} {name}") for name in ("waits", "sleeps", "read", "unread", "both", "leaves", "goes on", "reads on")
    }
    for name in ("read", "unread", "both", "leaves", "reads on"):
        for times in range(2 if name == "both" else 1):
            assert not signal(store, f"{prefix} {name}", times)
    post = {name: tuple(row.inbox_id for row in store.unread(f"{prefix} {name}")) for name in held}
    return [
        held["waits"].append(RELEASED, row=WAITING),
        held["sleeps"].append(ThoughtRecorded("x"), RELEASED, row=SLEEPING),
        structs.replace(held["read"].append(RELEASED, row=WAITING), consumed=post["read"]),
        held["unread"].append(RELEASED, row=SLEEPING),
        structs.replace(held["both"].append(RELEASED, row=WAITING), consumed=post["both"][:1]),
        structs.replace(held["leaves"].append(RELEASED, row=WAITING), left=post["leaves"]),
        held["goes on"].append(ThoughtRecorded("x")),
        structs.replace(held["reads on"].append(ThoughtRecorded("x")), consumed=post["reads on"]),
    ]


def left_behind(store: PostgresStore, prefix: str, batch: Sequence[Append]) -> list[tuple[RunRow, int, int]]:
    names = [append.lease.run_id for append in batch]
    rows = [structs.replace(found(store, name), run_id=name.removeprefix(prefix), head=b"") for name in names]
    return [(row, len(store.read(name)), len(store.unread(name))) for row, name in zip(rows, names, strict=True)]


@pytest.mark.parametrize("way", ["together", "each alone"])
def test_runs_are_given_up_in_one_round_trip_and_left_as_after_a_transaction(
    store: PostgresStore, transactions: list[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    at_once, weighed = releases(store, "at once"), releases(store, "weighed")
    transactions.clear()
    for batch in [at_once] if way == "together" else [[append] for append in at_once]:
        assert store.append(batch) == [Committed()] * len(batch)
    assert transactions == []
    monkeypatch.setattr(journal, "_is_plain", lambda append: False)
    assert store.append(weighed) == [Committed()] * len(weighed)
    assert transactions == ["transaction"]
    assert left_behind(store, "at once", at_once) == left_behind(store, "weighed", weighed)
    ready = {append.lease.run_id.removeprefix("at once "): found(store, append.lease.run_id).ready_at for append in at_once}
    none = dict.fromkeys(("waits", "read", "leaves", "goes on", "reads on"))
    assert ready == {**none, "sleeps": T0 + 50, "unread": T0, "both": T0}


def test_a_run_whose_row_somebody_has_locked_is_waited_for_in_a_transaction(store: PostgresStore, transactions: list[str]) -> None:
    held = hold_one(store, "r")
    with psycopg.connect(store.url) as other:
        other.execute("SELECT 1 FROM perdure_runs FOR NO KEY UPDATE")
        transactions.clear()
        threading.Timer(0.05, other.rollback).start()
        assert store.append([held.append(RELEASED, row=WAITING)]) == [Committed()]
    assert transactions == ["transaction"]


def parked(store: PostgresStore, run_id: str) -> None:
    assert store.append([hold_one(store, run_id).append(RELEASED, row=WAITING)]) == [Committed()]


@pytest.mark.parametrize("key", [None, "k"])
def test_a_signal_to_a_parked_run_takes_one_round_trip_and_leaves_the_same_behind_as_a_transaction(
    store: PostgresStore, transactions: list[str], key: str | None
) -> None:
    for run_id in ("at once", "weighed"):
        parked(store, run_id)
    transactions.clear()
    assert signal(store, "at once", key=key)
    assert transactions == []
    body = SignalReceived("t", payload(1), "ann", key)
    assert Mailbox.post(store, "weighed", None, body, event_id=uuid.uuid4().hex, now=T0, status=None)
    assert transactions == ["transaction"]
    rows = [structs.replace(found(store, run_id), run_id="", head=b"") for run_id in ("at once", "weighed")]
    assert rows[0] == rows[1]
    events = [[structs.replace(event, event_id="") for event in store.read(run_id)[-1:]] for run_id in ("at once", "weighed")]
    assert events[0] == events[1]
    with raw(store.url) as other:
        assert other.execute("SELECT topic, key FROM perdure_signals").fetchall() == [("t", "k")] * 2 * (key is not None)


def test_a_signal_with_a_key_is_taken_once(store: PostgresStore) -> None:
    parked(store, "r")
    for _ in range(2):
        assert signal(store, "r", key="k")
        register(store, "w")
        for one in store.claim("w", serving("a"), 9, T0):
            store.append([Held(one.lease, one.row.seq, one.row.head).append(RELEASED, row=WAITING)])
    assert [event.type for event in store.read("r")].count("signal_received") == 1


def test_what_keeps_a_signal_from_being_posted_at_once_is_told_as_before(store: PostgresStore) -> None:
    with pytest.raises(NotFound):
        signal(store, "nobody")
    parked(store, "r")
    with raw(store.url) as other:
        other.execute("UPDATE perdure_runs SET status = 'cancelled'")
    with pytest.raises(RunEnded):
        signal(store, "r")


def test_who_expects_something_is_asked_inside_the_transaction(store: PostgresStore, transactions: list[str]) -> None:
    parked(store, "r")
    transactions.clear()
    seen: list[RunRow] = []
    body = SignalReceived("t", payload(1), "ann")
    assert store.post("r", None, body, event_id=uuid.uuid4().hex, now=T0, expect=seen.append)
    assert (transactions, [row.status for row in seen]) == (["transaction"], ["waiting"])


@pytest.mark.parametrize("what", ["a signal", "a start"])
@pytest.mark.parametrize("crowded", ["", "by another process", "by this process"])
def test_others_hear_of_it_when_it_is_committed(store: PostgresStore, monkeypatch: pytest.MonkeyPatch, what: str, crowded: str) -> None:
    """Also while another transaction rings: only one at a time does it inside, and the others afterwards."""
    inside: list[bool] = []
    rung = store._notify.rung

    def told(*, elsewhere: bool) -> None:
        inside.append(elsewhere)
        rung(elsewhere=elsewhere)

    monkeypatch.setattr(store._notify, "rung", told)
    parked(store, "r")
    elsewhere, rings = opened(store.url), []
    stop = elsewhere.listen(lambda: rings.append(1))
    with psycopg.connect(store.url) as other:
        if crowded == "by another process":
            other.execute("SELECT pg_advisory_xact_lock(hashtextextended('perdure bell', 0))")
        with store._notify.commit() if crowded == "by this process" else nullcontext():
            assert signal(store, "r") if what == "a signal" else store.create_run(new_run("another"))[1]
        assert eventually(lambda: rings)
    assert inside == [not crowded]
    stop()
    elsewhere.close()


@pytest.mark.parametrize("what", ["a signal", "a start"])
def test_one_who_listens_here_hears_it_once(store: PostgresStore, what: str) -> None:
    """Not a second time from the server: a process ignores its own rings."""
    parked(store, "r")
    rings: list[int] = []
    stop = store.listen(lambda: rings.append(1))
    rings.clear()
    assert signal(store, "r") if what == "a signal" else store.create_run(new_run("another"))[1]
    assert rings == [1]
    elsewhere = opened(store.url)
    elsewhere._notify.ring()  # after it in the server's queue
    assert eventually(lambda: len(rings) > 1)
    assert len(rings) == 2
    stop()
    elsewhere.close()


def test_a_signal_that_the_server_refuses_to_ring_for_is_posted_all_the_same(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of notifications that is full, say."""
    parked(store, "r")
    monkeypatch.setattr(store._notify, "_words", {"channel": "", "ring": "x"})  # there is no channel without a name
    assert signal(store, "r")
    assert [event.type for event in store.read("r")][-1] == "signal_received"


def test_a_lost_append_that_gives_a_run_up_is_not_refused_when_it_has_arrived(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold_one(store, "r")
    release = held.append(RELEASED, row=WAITING)
    plain: Callable[..., Any] = PostgresJournal._append_plain

    def lost(self: PostgresJournal, appends: list[Append]) -> set[int]:
        plain(self, appends)
        raise journal._Lost("no answer")

    monkeypatch.setattr(PostgresJournal, "_append_plain", lost)
    assert store.append([release]) == [Committed()]
    assert [event.type for event in store.read("r")].count("run_released") == 1
    assert found(store, "r").holder is None


def test_a_signal_that_was_lost_and_has_ended_its_run_since_has_arrived(store: PostgresStore) -> None:
    """The sender repeats the signal after the run has finished, and must not get the error that the run has ended."""
    parked(store, "r")
    event_id, body = uuid.uuid4().hex, SignalReceived("t", payload(1), "ann")
    assert store.post("r", None, body, event_id=event_id, now=T0)
    with raw(store.url) as other:
        other.execute("UPDATE perdure_runs SET status = 'cancelled'")
    assert Mailbox.post(store, "r", None, body, event_id=event_id, now=T0, status=None, lost=True)
    assert [event.type for event in store.read("r")].count("signal_received") == 1


def test_a_signal_that_was_lost_and_is_there_is_not_posted_again(store: PostgresStore) -> None:
    parked(store, "r")
    event_id, body = uuid.uuid4().hex, SignalReceived("t", payload(1), "ann")
    assert store.post("r", None, body, event_id=event_id, now=T0)
    assert Mailbox.post(store, "r", None, body, event_id=event_id, now=T0, status=None, lost=True)
    assert [event.type for event in store.read("r")].count("signal_received") == 1
