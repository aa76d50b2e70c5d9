"""Commits that the event loop sends without waiting.

The same answers as on a thread, even if the connection breaks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Iterator

import psycopg
import pytest
from msgspec import structs
from tests.conformance.suite_waiting import NOW, Hand, found, hold
from tests.postgres.operations import MANY, ONE, types
from tests.postgres.tools import ANSWER_S, behind_proxy, check_journals, make_notes, opened
from tests.servers.proxy import Cut, Moment, Proxy

from perdure.core.events import RunReleased, ThoughtRecorded
from perdure.core.identity import seal_all
from perdure.store.api import Append, Appended, Committed, Refused, RowChange
from perdure.store.postgres.connect import Connection
from perdure.store.postgres.store import PostgresStore
from perdure.store.writer import GroupCommit

LONG = "x" * 2_000_000  # more than a socket takes at once


@pytest.fixture
def cut_off(postgres_url: str) -> Iterator[tuple[PostgresStore, Proxy]]:
    make_notes(postgres_url)
    with behind_proxy(postgres_url, ANSWER_S) as both:
        yield both


def heard(store: PostgresStore, *appends: Append) -> list[Appended | Exception]:
    """The answers of a group that gets these appends in one iteration of its loop."""

    async def main() -> list[Appended | Exception]:
        loop = asyncio.get_running_loop()
        group, answers = GroupCommit(store, loop), [loop.create_future() for _ in appends]
        for append, answer in zip(appends, answers, strict=True):
            group.submit(append, answer.set_result)
        try:
            return list(await asyncio.wait_for(asyncio.gather(*answers), 60))
        finally:
            await asyncio.to_thread(group.close)

    return asyncio.run(main())


def thought(hand: Hand, text: str = "a") -> Append:
    return hand.sealed(ThoughtRecorded(text))


def went_on(store: PostgresStore, hand: Hand, run_id: str) -> bool:
    hand.seq, hand.head = hand.seq + 1, found(store, run_id).head
    return hand.write(ThoughtRecorded("b")) == Committed()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that have waited for an answer of the server, without the thread that listens."""
    real, seen = Connection.wait, list[str]()

    def wait(self: Connection, *args: object, **kwargs: object) -> object:
        if (name := threading.current_thread().name) != "perdure doorbell":
            seen.append(name)
        return real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "wait", wait)
    return seen


@pytest.mark.parametrize("runs", [1, 5])
def test_nobody_waits_for_it(cut_off, waits, runs: int) -> None:
    store, _ = cut_off
    hands = [hold(store, f"r{n}") for n in range(runs)]
    waits.clear()
    assert heard(store, *map(thought, hands)) == [Committed()] * runs
    assert waits == []
    assert [types(store, f"r{n}")[2:] for n in range(runs)] == [["thought_recorded"]] * runs


@pytest.mark.parametrize("moment", ["before", "after", "late", "silent"])
@pytest.mark.parametrize("runs", [1, 5])
def test_one_whose_answer_is_lost_has_happened_once(cut_off, postgres_url, caplog, moment: Moment, runs: int) -> None:
    store, proxy = cut_off
    hands = [hold(store, f"r{n}") for n in range(runs)]
    for attempt in range(3):
        cut = proxy.rule(Cut(ONE if runs == 1 else MANY, moment, seconds=0.1))
        assert heard(store, *map(thought, hands)) == [Committed()] * runs
        cut.wait_done()
        proxy.clear()
        assert [len(types(store, f"r{n}")) for n in range(runs)] == [3 + attempt] * runs
        for n, hand in enumerate(hands):
            hand.seq, hand.head = hand.seq + 1, found(store, f"r{n}").head
    assert f"looking what became of {runs} appends" in caplog.text
    check_journals(postgres_url, whole=False)


def test_without_its_mark_one_whose_answer_is_lost_would_be_refused(cut_off, monkeypatch) -> None:
    """So its worker would stop driving a run whose event is there."""

    class Forgetful(set[str]):
        def update(self, *_: object) -> None:
            """Nothing is in doubt."""

    store, proxy = cut_off
    monkeypatch.setattr(store, "_doubtful", Forgetful())
    hand = hold(store, "r")
    proxy.rule(Cut(ONE, "after"))
    assert isinstance(heard(store, thought(hand))[0], Refused)


def test_a_letter_that_another_worker_has_journaled_is_not_taken_for_ones_own(cut_off) -> None:
    """An event from the inbox has the id of its sender, whichever worker appends it, and may have the same seq."""
    store, _ = cut_off
    letter = uuid.uuid4().hex
    lost = hold(store, "r", worker="gone")
    append = with_last_id(lost.sealed(ThoughtRecorded("mine"), ThoughtRecorded("letter")), lost, letter)
    store.unregister("gone", NOW)
    heir = hold(store, "r", worker="another")
    assert store.append([with_last_id(heir.sealed(ThoughtRecorded("letter")), heir, letter)]) == [Committed()]
    assert append.events[-1].event.seq == found(store, "r").seq
    store._doubtful.add(append.events[0].event.event_id)  # its answer was lost
    assert isinstance(store.append([append])[0], Refused)


def with_last_id(append: Append, hand: Hand, event_id: str) -> Append:
    *before, last = [sealed.event for sealed in append.events]
    return structs.replace(append, events=tuple(seal_all(hand.head, [*before, structs.replace(last, event_id=event_id)])))


def test_whoever_lost_the_run_is_refused_and_the_others_are_not_hindered(cut_off) -> None:
    store, _ = cut_off
    lost, fine = hold(store, "lost", worker="gone"), hold(store, "fine")
    store.unregister("gone", NOW)
    hold(store, "lost", worker="another")
    refused, committed = heard(store, thought(lost), thought(fine))
    assert isinstance(refused, Refused)
    assert committed == Committed()
    assert types(store, "lost")[-1] == "run_claimed"


def test_what_more_follows_from_goes_another_way_in_the_same_turn(cut_off) -> None:
    store, _ = cut_off
    plain, resting = hold(store, "plain"), hold(store, "resting")
    given_up = resting.sealed(RunReleased("waiting", "x"), row=RowChange("waiting", release=True))
    assert heard(store, given_up, thought(plain)) == [Committed()] * 2
    assert (types(store, "resting")[-1], types(store, "plain")[-1]) == ("run_released", "thought_recorded")


def test_what_cannot_be_stored_is_said_of_that_one_alone(cut_off) -> None:
    store, _ = cut_off
    bad, fine = hold(store, "bad"), hold(store, "fine")
    wrong = bad.sealed(row=RowChange("running", waiting_for="\ud800"))
    refused, committed = heard(store, wrong, thought(fine))
    assert committed == Committed()
    assert isinstance(refused, (Exception, Committed))  # shown without what cannot be kept, or refused: nothing else fails for it
    assert went_on(store, fine, "fine")


def test_more_than_a_socket_takes_at_once_arrives_whole(postgres_url, waits) -> None:
    with opened(postgres_url) as store:
        hand = hold(store, "r")
        waits.clear()
        assert heard(store, hand.sealed(*(ThoughtRecorded(LONG) for _ in range(8)))) == [Committed()]
        assert waits == []
        assert [len(event.body.text) for event in store.read("r")[2:]] == [len(LONG)] * 8  # type: ignore[union-attr]


def test_a_change_without_an_event_is_left_to_the_thread_which_can_fence_it(cut_off, waits) -> None:
    """If an old change arrives after a new one, the two cannot be distinguished: neither has a seq."""
    store, proxy = cut_off
    hand = hold(store, "r")
    late = proxy.rule(Cut(MANY, "late", seconds=0.3))
    waits.clear()
    assert heard(store, hand.sealed(row=RowChange("running", waiting_for="old"))) == [Committed()]
    assert "perdure-writer" in waits
    assert heard(store, hand.sealed(row=RowChange("running", waiting_for="new"))) == [Committed()]
    late.wait_done()
    assert found(store, "r").waiting_for == "new"


def test_a_store_that_cannot_even_begin_is_met_by_the_thread_and_the_next_one_is_sent(cut_off, monkeypatch) -> None:
    store, _ = cut_off
    one, other = hold(store, "one"), hold(store, "other")

    def broken(*_: object) -> list[Append]:
        raise KeyError("an error of ours")

    async def main() -> list[Appended | Exception]:
        loop = asyncio.get_running_loop()
        group, answers = GroupCommit(store, loop), [loop.create_future() for _ in range(2)]
        with monkeypatch.context() as patched:
            patched.setattr(store, "send", broken)
            group.send_now(thought(one), answers[0].set_result)
            await asyncio.wait_for(answers[0], 60)
        group.send_now(thought(other), answers[1].set_result)
        try:
            return list(await asyncio.wait_for(asyncio.gather(*answers), 60))
        finally:
            await asyncio.to_thread(group.close)

    assert asyncio.run(main()) == [Committed(), Committed()]


def test_without_a_connection_that_lies_ready_a_thread_makes_one(cut_off, waits) -> None:
    store, _ = cut_off
    hand = hold(store, "r")
    for _ in range(20):
        store._connections.lost()
        waits.clear()
        assert heard(store, thought(hand)) == [Committed()]
        assert "MainThread" not in waits
        if "perdure-writer" in waits:
            return
        hand.seq, hand.head = hand.seq + 1, found(store, "r").head
    raise AssertionError("others have always brought a connection back in the moment between: none was made")


def test_what_is_submitted_while_one_is_on_its_way_shares_the_next(cut_off) -> None:
    store, _ = cut_off
    hands = [hold(store, f"r{n}") for n in range(11)]

    async def main() -> list[float]:
        loop, landed = asyncio.get_running_loop(), list[float]()
        group = GroupCommit(store, loop)
        done = loop.create_future()

        def count(answer: Appended | Exception) -> None:
            assert answer == Committed()
            landed.append(time.monotonic())
            if len(landed) == len(hands):
                done.set_result(None)

        group.send_now(thought(hands[0]), count)
        before = store._database.commits
        for hand in hands[1:]:
            group.submit(thought(hand), count)
        await asyncio.wait_for(done, 60)
        assert store._database.commits - before == 2
        await asyncio.to_thread(group.close)
        return landed

    asyncio.run(main())


def test_a_server_that_takes_long_is_named(cut_off, postgres_url, caplog, monkeypatch) -> None:
    monkeypatch.setattr("perdure.store.postgres.database._SLOW_S", 0.2)
    store, _ = cut_off
    hand = hold(store, "r")
    with psycopg.connect(postgres_url) as other, caplog.at_level(logging.WARNING):
        other.execute("SELECT 1 FROM perdure_runs WHERE run_id = 'r' FOR UPDATE")
        freed = threading.Timer(0.4, other.rollback)
        freed.start()
        assert heard(store, thought(hand)) == [Committed()]
        freed.join()
    assert "s for a commit; the runs wait that long" in caplog.text


def test_a_group_that_is_closed_over_one_on_its_way_ends_quietly(cut_off, caplog) -> None:
    store, proxy = cut_off
    hand = hold(store, "r")

    async def main() -> None:
        loop, answers = asyncio.get_running_loop(), list[object]()
        group = GroupCommit(store, loop)
        store.get("r")  # and its connection is idle: without an idle connection, a thread would send it
        proxy.rule(Cut(ONE, "before"))
        group.send_now(thought(hand), answers.append)
        await asyncio.to_thread(group.close)
        await asyncio.sleep(0.5)
        assert answers == []  # the outcome is unknown; the next worker finds out

    asyncio.run(main())
    assert "Traceback" not in caplog.text
    assert types(store, "r") == ["run_created", "run_claimed"]
