"""Many processes on one database: every run is claimed once, no wake-up is lost, and no limit is exceeded.

A lock that another process holds only costs time.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import psycopg
import pytest
from tests.conformance.suite import T0, new_run, serving
from tests.conformance.suite_waiting import SECOND, Hand, approval, asking, child, found, hold, payload, vote
from tests.postgres.tools import (
    WAITING,
    at_once,
    check_journals,
    create_plain,
    deadlocks,
    letter,
    opened,
    until,
    value,
)
from tests.servers.postgres import Server

from perdure.core.budget import NOTHING, Amounts
from perdure.core.events import Failure, Limits, RunFailed, RunReleased, RunSucceeded, ThoughtRecorded
from perdure.errors import Conflict
from perdure.settings import Queue
from perdure.store import blobs
from perdure.store.api import Append, Charge, Claimed, Committed, RowChange, Store
from perdure.store.cursor import Cursor
from perdure.store.postgres.queries import QUERIES, PostgresCursor
from perdure.store.postgres.store import PostgresStore


@pytest.fixture
def no_deadlocks(postgres: Server) -> Iterator[None]:
    before = deadlocks(postgres)
    yield
    assert deadlocks(postgres) == before


def gives_up(hand: Hand) -> Append:
    return hand.sealed(RunReleased("waiting", "a signal"), row=RowChange("waiting", waiting_for="a signal", release=True))


# -- claims -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded() -> Iterator[Server]:
    """A server with room for a hundred workers."""
    server = Server(max_connections="330", fsync="off")  # nothing here is about durability
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def crowd(crowded: Server) -> Iterator[list[PostgresStore]]:
    """A hundred workers, each with its own store, like a hundred processes."""
    url = crowded.new_database()
    with ExitStack() as stack:
        stores = [stack.enter_context(opened(url)) for _ in range(100)]
        for number, store in enumerate(stores):
            store.register(f"w{number}", f"host:{number}", number, T0)
        yield stores
    crowded.drop(url)


@pytest.mark.long
def test_a_hundred_claimers_take_five_hundred_runs_once_each_and_a_hundred_listeners_do_not_all_come_for_one(crowd, crowded) -> None:
    create_plain(crowd[0], 500)

    def take(number: int) -> list[Claimed]:
        taken: list[Claimed] = []
        while claimed := crowd[number].claim(f"w{number}", serving("a"), 7, T0 + SECOND):
            taken += claimed
        return taken

    taken = [claimed.lease.run_id for claims in at_once([partial(take, n) for n in range(100)]) for claimed in claims]
    assert Counter(taken) == Counter(f"r{n}" for n in range(500))
    url = crowd[0].url
    assert value(url, "SELECT count(*) FROM perdure_events AS e WHERE e.type = 'run_claimed'") == 500
    assert deadlocks(crowded) == 0
    _herd(crowd)


def _herd(crowd: list[PostgresStore]) -> None:
    """One run becomes ready, and all hear of it: those who look too late must find out by reading."""
    claims: list[int] = []
    looks: list[int] = []

    def look(number: int) -> None:
        # The steps of a worker: see worker._claim.
        store, kind = crowd[number], serving("lonely")
        looks.append(number)
        ready = store.next_ready(kind)
        if ready is not None and ready <= T0 + SECOND:
            claims.append(len(store.claim(f"w{number}", kind, 7, T0 + SECOND)))

    def has_claimed(count: int) -> bool:
        return sum(claims) == count

    for number, store in enumerate(crowd):
        store.reap(f"w{number}", 600 * SECOND, T0)  # as every worker does once a second: it learns how many there are
        store.listen(partial(look, number))
    until(lambda: all(store._notify.listening for store in crowd), within_s=30)
    time.sleep(0.3)
    claims.clear()
    looks.clear()
    for n in range(5):
        crowd[0].create_run(new_run(f"lonely{n}", agent="lonely"))
        until(partial(has_claimed, n + 1))
        time.sleep(0.2)
    assert len(looks) >= 400, "they have not heard of it"
    assert len(claims) <= 5 * 15, f"{len(claims)} claims for 5 runs"


@pytest.fixture
def queue(postgres_url: str) -> Iterator[PostgresStore]:
    with opened(postgres_url) as store:
        for n in range(20):
            store.register(f"w{n}", "host:1", 1, T0)
        create_plain(store, 60)
        yield store


def most_held(store: PostgresStore, limit: int) -> int:
    """The most runs that were held at a time.

    Twenty workers claim from a queue with this limit, and release their runs.
    """
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(12):
            claimed = store.claim(f"w{number}", serving("a"), 2, T0 + SECOND, limits={"default": Queue(concurrency=limit)})
            if claimed:
                with store._connections.lent() as connection:
                    ((held,),) = connection.execute(b"SELECT count(*) FROM perdure_runs WHERE holder IS NOT NULL").fetchall()
                most.append(held)
            for one in claimed:
                hand = Hand(store, one.lease, one.row.seq, one.row.head)
                back = RowChange("queued", ready_at=T0, release=True)
                assert hand.write(RunReleased("queued", "back"), row=back) == Committed()

    at_once([partial(work, n) for n in range(20)])
    return max(most)


@pytest.mark.usefixtures("no_deadlocks")
def test_no_more_than_its_limit_is_ever_held_of_a_queue(queue) -> None:
    assert most_held(queue, 3) == 3


def test_without_one_who_chooses_at_a_time_it_would_be(queue, monkeypatch) -> None:
    monkeypatch.setattr(PostgresCursor, "alone", lambda self, key: None)
    assert most_held(queue, 3) > 3


# -- wake-ups -----------------------------------------------------------------------------------------------------------------------------


def is_awake(store: Store, run_id: str) -> bool:
    """A signal was posted during the release.

    It is in the journal or unread in the inbox, once, and a worker will see it.
    """
    there = sum(event.type == "signal_received" for event in store.read(run_id)) + len(store.unread(run_id))
    assert there == 1, there
    return found(store, run_id).ready_at is not None


@pytest.mark.usefixtures("no_deadlocks")
def test_a_signal_that_comes_while_its_run_is_given_up_always_wakes_it(postgres_url) -> None:
    chance = random.Random(9)
    with opened(postgres_url) as store, opened(postgres_url) as outside:

        def post(run_id: str, pause_s: float) -> object:
            time.sleep(pause_s)
            return letter(outside, run_id)

        def give_up(append: Append, pause_s: float) -> object:
            time.sleep(pause_s)
            return store.append([append])

        journaled = 0
        store.register("w", "host:1", 1, T0)
        create_plain(outside, 300)
        for n, claimed in enumerate(sorted(store.claim("w", serving("a"), 300, T0), key=lambda one: int(one.lease.run_id[1:]))):
            append = gives_up(Hand(store, claimed.lease, claimed.row.seq, claimed.row.head))

            pauses = chance.uniform(0.0, 0.004), chance.uniform(0.0, 0.004)  # so that either may be first, on any machine
            both: list[Callable[[], object]] = [partial(give_up, append, pauses[0]), partial(post, f"r{n}", pauses[1])]
            answers = at_once(both)
            assert answers[0] == [Committed()]
            journaled += bool(answers[1])
            assert is_awake(store, f"r{n}"), f"r{n} sleeps for ever"
        assert 0 < journaled < 300, "always the same one was first"
    check_journals(postgres_url, whole=False)


def signal_in_between(store: PostgresStore, url: str) -> bool:
    """Whether the run is awake after a post that was under way when its holder gave it up."""
    hand = hold(store, "r")
    key = value(url, "SELECT id FROM perdure_runs WHERE run_id = 'r'")
    with psycopg.connect(url) as poster:
        poster.execute("SELECT 1 FROM perdure_runs WHERE id = %s FOR NO KEY UPDATE", (key,))
        poster.execute(
            "INSERT INTO perdure_inbox (run, event_id, ts, data) SELECT %s, %s, 1, %s",
            (key, uuid.uuid4().bytes, '{"type":"signal_received","topic":"t","payload":{"inline":"MQ=="},"by":"ann"}'),
        )
        giving_up = threading.Thread(target=store.append, args=([gives_up(hand)],))
        giving_up.start()
        until(lambda: value(url, WAITING) == 1)
        poster.commit()
    giving_up.join(60)
    return found(store, "r").ready_at is not None


def test_a_post_that_is_under_way_is_waited_for_and_seen(postgres_url) -> None:
    with opened(postgres_url) as store:
        assert signal_in_between(store, postgres_url)


def test_without_the_lock_it_would_be_missed(postgres_url, monkeypatch) -> None:
    unlocked = QUERIES["lock_runs"].sql.replace("FOR NO KEY UPDATE", "")
    monkeypatch.setitem(QUERIES, "lock_runs", type(QUERIES["lock_runs"])(unlocked, QUERIES["lock_runs"].names))
    with opened(postgres_url) as store:
        assert not signal_in_between(store, postgres_url)


@pytest.mark.usefixtures("no_deadlocks")
def test_the_end_of_a_child_meets_its_parents_append_and_both_are_there(postgres_url) -> None:
    chance = random.Random(10)
    with opened(postgres_url) as store, opened(postgres_url) as other:
        for n in range(60):
            parent = hold(store, f"p{n}")
            assert parent.write(child(f"p{n}/1")) == Committed()
            small = hold(other, f"p{n}/1", worker="w2")
            ends = small.sealed(RunSucceeded(payload("done")), row=RowChange("succeeded"))
            # It goes on, or it gives itself up: either way it hears of the end.
            rests = chance.random() < 0.7
            append = gives_up(parent) if rests else parent.sealed(ThoughtRecorded("x"))
            answers = at_once([partial(store.append, [append]), partial(other.append, [ends])])
            assert answers == [[Committed()], [Committed()]]
            told = sum(event.type == "child_finished" for event in store.read(f"p{n}")) + len(store.unread(f"p{n}"))
            assert told == 1
            assert (found(store, f"p{n}").ready_at is not None) == rests, f"p{n} sleeps for ever"
    check_journals(postgres_url, whole=False)


@pytest.mark.usefixtures("no_deadlocks")
def test_of_four_who_decide_at_once_one_wins(postgres_url) -> None:
    with opened(postgres_url) as store, opened(postgres_url) as other:
        for n in range(25):
            hand = hold(store, f"r{n}")
            hand.write(asking(f"ap{n}", tool=None), call=1)
            if n % 2:
                hand.rest("waiting_approval")

            def say(by: str, granted: bool, where: Store, n: int = n) -> bool:
                try:
                    vote(where, f"ap{n}", by, granted=granted)
                except Conflict:
                    return False
                return True

            won = at_once([partial(say, by, by < "c", store if by in "ac" else other) for by in "abcd"])
            assert sum(won) == 1
            assert approval(store, f"ap{n}").standing.status == ("approved" if won[0] or won[1] else "rejected")
            decided = sum(event.type == "approval_decided" for event in store.read(f"r{n}")) + len(store.unread(f"r{n}"))
            assert decided == 1


# -- blobs --------------------------------------------------------------------------------------------------------------------------------

BLOB = b"large" * 10_000
DIGEST = hashlib.sha256(BLOB).digest()


@pytest.fixture
def stored(postgres_url: str) -> Iterator[PostgresStore]:
    """A journal in which there is a blob that run 0 has put there."""
    with opened(postgres_url) as store:
        create_plain(store, 3)
        put_for(store, 0)
        yield store


def put_for(store: PostgresStore, number: int, meanwhile: Callable[[], Any] = lambda: None) -> Any:
    """Store the blob for that run, and do something else before the commit."""

    def work(cursor: Cursor) -> Any:
        blobs.put(cursor, cursor.all("run_key", (f"r{number}",))[0][0], [BLOB])
        return meanwhile()

    return store._database.write(work, lambda cursor, _: False)


def is_there(store: PostgresStore) -> bool:
    return store.blob(DIGEST.hex()) == BLOB


def test_two_who_store_the_same_blob_do_not_wait_for_each_other(stored) -> None:
    with opened(stored.url) as other:
        second = threading.Thread(target=put_for, args=(other, 2))

        def has_ended() -> bool:
            second.start()
            second.join(60)
            return not second.is_alive()

        assert put_for(stored, 1, has_ended)
        second.join(60)


def test_a_blob_that_is_being_stored_again_is_not_pruned_before_it_is_known_who_uses_it(stored) -> None:
    def prunes() -> bool:
        with psycopg.connect(stored.url) as pruner:
            return bool(pruner.execute("SELECT 1 FROM perdure_blobs WHERE digest = %s FOR UPDATE SKIP LOCKED", (DIGEST,)).fetchall())

    assert prunes()
    assert not put_for(stored, 1, prunes)


@pytest.mark.parametrize("moment", ["locked", "deleted"])
def test_a_blob_that_is_pruned_at_the_moment_is_stored_again(stored, moment) -> None:
    with psycopg.connect(stored.url) as pruner:
        pruner.execute("SELECT 1 FROM perdure_blobs WHERE digest = %s FOR UPDATE", (DIGEST,))
        if moment == "deleted":
            pruner.execute("DELETE FROM perdure_blobs WHERE digest = %s", (DIGEST,))
        storing = threading.Thread(target=put_for, args=(stored, 1))
        storing.start()
        until(lambda: value(stored.url, WAITING) == 1)
        pruner.execute("DELETE FROM perdure_blobs WHERE digest = %s", (DIGEST,))
        pruner.commit()
    storing.join(60)
    assert is_there(stored)


# -- the order of locks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_deadlocks")
def test_the_end_of_a_run_from_outside_meets_a_charge_of_its_child_and_both_are_there(postgres_url) -> None:
    with opened(postgres_url) as store:
        parent = hold(store, "p", budget=Limits(calls=9))
        # The reserved and unspent amount is freed at the end of the child: this changes the budget.
        assert parent.write(child("p/1"), charge=Charge(reserved=Amounts(calls=2), spent=NOTHING)) == Committed()
        parent.rest("waiting")
        end = partial(store.end, "p", RunFailed(Failure("error", "X", "x")), event_id=uuid.uuid4().hex, now=T0)
        ending = threading.Thread(target=end)
        with psycopg.connect(postgres_url) as charging:
            # As an append with a charge does: the run, and then its budgets.
            charging.execute("SELECT 1 FROM perdure_runs WHERE run_id = 'p/1' FOR NO KEY UPDATE")
            ending.start()
            until(lambda: value(postgres_url, WAITING) == 1)
            charging.execute("UPDATE perdure_budgets SET spent_calls = spent_calls + 1")
            charging.commit()
        ending.join(60)
        assert found(store, "p").status == "failed"
        assert found(store, "p/1").status == "cancelling"
        (ledger,) = store.ledgers("p")
        assert (ledger.spent.calls, ledger.reserved.calls) == (1, 0)
