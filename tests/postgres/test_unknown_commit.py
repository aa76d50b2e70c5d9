"""The answer to a commit is lost, in every way and for every kind of commit.

The caller still learns what has happened, and it happens once.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from functools import partial

import psycopg
import pytest
from msgspec import structs
from tests.conformance.suite import new_run
from tests.conformance.suite_waiting import NOW, SECOND, Hand, approved, asking, found, hold, starting
from tests.postgres.operations import COMMIT, MANY, ONE, OPERATIONS, check_signal, commits, signal, types
from tests.postgres.tools import (
    ANSWER_S,
    Deeds,
    all_ended,
    behind_proxy,
    check_journals,
    create_errand,
    insist,
    make_notes,
    opened,
    send_news,
    until,
    value,
    working,
)
from tests.servers.proxy import Cut, Moment, Proxy

from perdure.core.events import RunReleased, ThoughtRecorded
from perdure.errors import StoreUnavailable
from perdure.store.api import Append, Committed, Refused, RowChange
from perdure.store.postgres import database, journal
from perdure.store.postgres.store import PostgresStore, open_postgres

# The number of rounds of each kind: together more than two hundred. Silence takes the whole time-out of an answer.
ROUNDS: dict[Moment, int] = {"before": 3, "after": 5, "late": 3, "silent": 1}
PATIENT_S = 10.0  # if nothing is silent, for a busy machine
NO_STATUS = "SELECT NULL::text WHERE $1::text <> ''"  # as a server answers that cannot tell
MOMENTS: list[Moment] = ["before", "after", "late", "silent"]
SILENT = (
    *("append_of_one_run", "append_of_many_runs", "release", "transaction", "creation", "creation_at_once"),
    *("signal_to_a_resting_run", "signal_at_once", "decision", "claim", "claim_at_once"),
)


@pytest.fixture
def cut_off(postgres_url: str) -> Iterator[tuple[PostgresStore, Proxy]]:
    make_notes(postgres_url)
    with behind_proxy(postgres_url, PATIENT_S) as both:
        yield both


@pytest.mark.parametrize("moment", ROUNDS)
def test_a_lost_commit_has_happened_once_or_not_at_all_and_the_caller_learns_which(postgres_url, moment) -> None:
    make_notes(postgres_url)
    steps = list(SILENT) if moment == "silent" else list(OPERATIONS) * ROUNDS[moment]
    random.Random(moment).shuffle(steps)
    with behind_proxy(postgres_url, ANSWER_S if moment == "silent" else PATIENT_S) as (store, proxy):
        for number, name in enumerate(steps):
            marker, prepare = OPERATIONS[name]
            do, check = prepare(store, f"{name}-{number}", postgres_url)
            cut = proxy.rule(Cut(marker, moment, seconds=random.uniform(0.0, 0.15)))
            insist(do)
            assert cut.made == 1, f"{name}: {marker} was not seen"
            cut.wait_done()
            proxy.clear()
            check()
        assert proxy.cuts[moment] == len(steps)
    check_journals(postgres_url, whole=False)


def test_that_a_transaction_was_rolled_back_is_said_at_once(postgres_url) -> None:
    with behind_proxy(postgres_url, answer_s=100.0) as (store, proxy):
        proxy.rule(Cut(COMMIT, "before"))
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match="nothing was acknowledged"):
            store.create_run(new_run("r"))
        assert time.monotonic() - began_s < 60.0
        assert store.get("r") is None


def test_a_commit_that_never_arrives_ends_when_the_server_gives_it_up(postgres_url) -> None:
    """The transaction stays open, with the row locked, until the server's own time-out.

    Only then its outcome is certain.
    """
    with behind_proxy(postgres_url, answer_s=1.0) as (store, proxy):
        hold(store, "r").rest("waiting")
        late = proxy.rule(Cut(COMMIT, "late", seconds=2.5))
        first, second = signal(store, "r", key=None), signal(store, "r", key=None)
        with pytest.raises(StoreUnavailable):
            first()
        assert late.done == 0
        insist(second)
        check_signal(store, "r", ["run_created", "run_claimed", "run_released", "signal_received"], 0)
        late.wait_done()
        check_signal(store, "r", ["run_created", "run_claimed", "run_released", "signal_received"], 0)


@pytest.mark.parametrize("first", ["before", "after", "late"])
@pytest.mark.parametrize("second", ["before", "after", "late"])
@pytest.mark.parametrize("can_tell", [True, False])
def test_the_answer_of_the_clearing_up_can_be_lost_too(cut_off, postgres_url, monkeypatch, first, second, can_tell) -> None:
    if not can_tell:
        monkeypatch.setattr(database, "_STATUS", NO_STATUS)
    store, proxy = cut_off
    one, many, resting = hold(store, "one"), [hold(store, f"r{n}") for n in range(3)], hold(store, "resting")
    rest = resting.sealed(asking("ap"), call=1)
    # The last one is written by the clearing up alone: that others of its group are there proves nothing about it.
    for appends in ([one.sealed(ThoughtRecorded("a"))], [*(hand.sealed(ThoughtRecorded("a")) for hand in many), rest]):
        proxy.rule(Cut(f"{ONE}|{MANY}", first, seconds=0.08))
        again = proxy.rule(Cut(COMMIT, second, seconds=0.08))
        insist(commits(store, *appends))
        again.wait_done()
        proxy.clear()
    assert types(store, "resting")[2:] == ["approval_requested"]
    assert [len(types(store, f"r{n}")) for n in range(3)] == [3, 3, 3]
    # Whatever nonces the leases have now, their holders continue with them.
    for hand, run_id in ((one, "one"), (many[0], "r0")):
        hand.seq, hand.head = hand.seq + 1, found(store, run_id).head
        assert hand.write(ThoughtRecorded("b")) == Committed()
        assert len(types(store, run_id)) == 4
    check_journals(postgres_url, whole=False)


def test_a_call_whose_approval_has_expired_before_its_intent_was_written_leaves_the_lease_as_it_is(cut_off) -> None:
    store, proxy = cut_off
    hand = approved(store, expires_at=NOW + SECOND)
    intent = hand.sealed(starting("ap"), call=1, at=NOW)
    proxy.rule(Cut(COMMIT, "before"))
    with pytest.raises(StoreUnavailable):
        store.append([intent])
    (answer,) = store.append([structs.replace(intent, at=NOW + 2 * SECOND)])
    assert isinstance(answer, Refused)
    assert answer.why.startswith("approval ap has expired")
    assert hand.write(ThoughtRecorded("so it does something else")) == Committed()


def test_whoever_gives_up_an_append_that_was_never_cleared_up_may_still_write_something_else(cut_off) -> None:
    """Like a worker that stops driving a run: with a nonce that may not be in the row, the run would be stranded."""
    store, proxy = cut_off
    hand = hold(store, "r")
    proxy.rule(Cut(ONE, "before"))
    proxy.rule(Cut(COMMIT, "before", times=1000))
    with pytest.raises(StoreUnavailable):
        hand.write(ThoughtRecorded("never written"))
    proxy.clear()
    hand.rest("waiting")
    assert types(store, "r") == ["run_created", "run_claimed", "run_released"]


def late_word(store: PostgresStore, proxy: Proxy) -> str | None:
    """The row of a run after an old change has reached the server later than a new change.

    No seq distinguishes the two.
    """
    hand = hold(store, "r")

    def say(waiting_for: str) -> Append:
        return hand.sealed(row=RowChange("running", waiting_for=waiting_for))

    # So that the lease was fenced before: the late append does not have the nonce of the claim.
    proxy.rule(Cut(MANY, "after"))
    assert store.append([say("first")]) == [Committed()]
    late = proxy.rule(Cut(MANY, "late", seconds=3.0))
    assert store.append([say("old")]) == [Committed()]
    assert store.append([say("new")]) == [Committed()]
    assert late.done == 0, "the old one has been executed too early to show anything"
    late.wait_done()
    return found(store, "r").waiting_for


def test_an_append_that_arrives_after_its_sender_has_gone_on_is_refused(cut_off) -> None:
    assert late_word(*cut_off) == "new"


def test_without_a_new_nonce_it_would_not_be(cut_off, monkeypatch) -> None:
    class SameEveryTime:
        @staticmethod
        def token_bytes(count: int) -> bytes:
            return b"\1" * count

    monkeypatch.setattr(journal, "secrets", SameEveryTime)
    assert late_word(*cut_off) == "old"


def test_an_append_that_is_under_way_is_waited_for(cut_off, postgres_url) -> None:
    """The statement waits for a lock when its connection breaks: the fence comes after it, and finds it written."""
    store, proxy = cut_off
    hand = hold(store, "r")
    append = hand.sealed(ThoughtRecorded("a"))
    with psycopg.connect(postgres_url) as blocker:
        blocker.execute("SELECT 1 FROM perdure_runs WHERE run_id = 'r' FOR UPDATE")
        sending = threading.Thread(target=commits(store, append))
        sending.start()
        until(lambda: value(postgres_url, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'") == 1)
        for link in list(proxy._links):
            proxy._listener.call(link.client.reset)  # the server does not hear of it while it waits for the lock
        time.sleep(0.1)
        blocker.rollback()
    sending.join(60)
    assert not sending.is_alive()
    assert [event.event_id for event in store.read("r")][2:] == [sealed.event.event_id for sealed in append.events]


def test_a_worker_that_loses_commits_at_random_does_everything_once(postgres_url) -> None:
    chance = random.Random(4)
    make_notes(postgres_url)
    deeds = Deeds()
    names: list[str] = []

    async def main(store: PostgresStore, proxy: Proxy) -> None:
        agents = deeds.agents()
        with opened(postgres_url) as outside:
            async with working(store, agents):
                lose = asyncio.ensure_future(lose_commits(proxy, chance))
                while sum(proxy.cuts.values()) < 60:
                    wave = [f"e{len(names) + n}" for n in range(3)]
                    names.extend(wave)
                    for name in wave:
                        await asyncio.to_thread(create_errand, outside, agents, name)
                    await asyncio.to_thread(send_news, outside, wave, chance)
                lose.cancel()
                await all_ended(outside)

    with behind_proxy(postgres_url, ANSWER_S) as (store, proxy):
        asyncio.run(main(store, proxy))
    deeds.check(postgres_url, len(names))
    check_journals(postgres_url)


async def lose_commits(proxy: Proxy, chance: random.Random) -> None:
    """One commit after the other, of the next kind each time."""
    while True:
        moment = chance.choices(MOMENTS, [6, 6, 6, 1])[0]
        cut = proxy.rule(Cut(f"{ONE}|{MANY}|{COMMIT}", moment, nth=chance.randint(1, 3), seconds=chance.uniform(0.0, 0.1)))
        while not cut.made:
            await asyncio.sleep(0.001)
        await asyncio.sleep(chance.uniform(0.0, 0.02))
        proxy.clear()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_server_that_cannot_tell_what_became_of_a_transaction_is_asked_for_its_traces(cut_off, postgres_url, monkeypatch, moment) -> None:
    """A server that has recovered, or taken over, may have given the transaction's id to another.

    Only its rows are proof.
    """
    others = {"before": "committed", "after": "aborted"}[moment]
    monkeypatch.setattr(database, "_STATUS", f"SELECT '{others}' WHERE $1::text <> ''")
    store, proxy = cut_off
    for name, (marker, prepare) in OPERATIONS.items():
        if name == "sign_of_life":
            continue  # it leaves no rows, and is repeated anyway
        do, check = prepare(store, name, postgres_url)
        proxy.rule(Cut(marker, moment))
        insist(do)
        assert proxy.cuts[moment], name
        proxy.clear()
        check()
    check_journals(postgres_url, whole=False)


def test_the_last_connection_is_given_back_before_its_commit_is_cleared_up(postgres_url) -> None:
    """Or all who lose their commits at the same moment would wait for each other's connections."""
    with Proxy(postgres_url) as proxy:
        store = open_postgres(proxy.url(postgres_url), answer_s=100.0, connections=1)
        try:
            hold(store, "r").rest("waiting")
            proxy.rule(Cut(COMMIT, "after"))
            began_s = time.monotonic()
            signal(store, "r")()
            assert time.monotonic() - began_s < 60.0
            check_signal(store, "r", ["run_created", "run_claimed", "run_released", "signal_received"], 0)
        finally:
            store.close()


def test_what_has_arrived_of_a_group_whose_other_half_has_not_is_not_refused_when_it_is_sent_again(cut_off, postgres_url) -> None:
    """Appends in one statement are committed before the others; the caller gets one answer for the whole group."""
    store, proxy = cut_off
    plain, resting = hold(store, "plain"), hold(store, "resting")
    group = [plain.sealed(ThoughtRecorded("a")), resting.sealed(asking("ap"), call=1)]
    proxy.rule(Cut(COMMIT, "before"))
    with pytest.raises(StoreUnavailable):
        store.append(group)
    assert [len(store.read(run_id)) for run_id in ("plain", "resting")] == [3, 2]
    # Every run sends its own again.
    assert [insist(partial(store.append, [append])) for append in group] == [[Committed()], [Committed()]]
    assert [len(store.read(run_id)) for run_id in ("plain", "resting")] == [3, 3]
    plain.seq, plain.head = plain.seq + 1, group[0].events[-1].hash
    assert store.append([plain.sealed(ThoughtRecorded("b"))]) == [Committed()], "and its lease goes on"


@pytest.mark.parametrize("more", [0, 1])
def test_what_only_begins_like_a_transaction_of_which_nobody_has_heard_is_not_taken_for_it(cut_off, more) -> None:
    """Two answers in a row are lost.

    Of a tool's transaction that happened, and of the append that takes back its call.
    """
    store, proxy = cut_off
    hand = hold(store, "r")
    head = hand.sealed(ThoughtRecorded("intent"))
    after = Hand(store, hand.lease, head.events[-1].event.seq, head.events[-1].hash)
    results = [ThoughtRecorded("result")] * (2 - more)
    assert store.transact(head, lambda _: (after.sealed(*results), None))[0] == Committed()
    given_back = after.sealed(*[ThoughtRecorded("given back")] * (1 + more))
    proxy.rule(Cut(f"{ONE}|{MANY}", "before"))
    (answer,) = store.append([structs.replace(given_back, expected_seq=head.expected_seq, events=head.events + given_back.events)])
    assert isinstance(answer, Refused)
    assert [event.body.text for event in store.read("r")[2:]] == ["intent", *["result"] * (2 - more)]


def test_a_refusal_that_is_about_something_else_leaves_the_lease_as_it_is(cut_off, postgres_url) -> None:
    """The lease has another nonce after the first lost answer.

    The release after the refusal must use the new nonce.
    """
    store, proxy = cut_off
    plain, hand = hold(store, "plain"), hold(store, "r")
    proxy.rule(Cut(f"{ONE}|{MANY}", "before"))
    first, second = store.append([plain.sealed(ThoughtRecorded("a")), hand.sealed(starting("ap-nobody"), call=1)])
    assert proxy.cuts["before"] == 1
    assert first == Committed()
    assert isinstance(second, Refused)
    assert "may not start" in second.why
    given_up = hand.sealed(RunReleased("queued", "x"), row=RowChange("queued", ready_at=NOW, release=True))
    assert store.append([given_up]) == [Committed()]
