"""What every Store must do, as tests. Your own store passes if this subclass passes:

class TestMyStore(StoreConformance):
    @pytest.fixture
    def make_store(self):
        return lambda: MyStore(...)
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.conformance.suite_artifacts import ArtifactConformance
from tests.conformance.suite_forks import ForkConformance
from tests.conformance.suite_moving import MovingConformance
from tests.conformance.suite_progress import ProgressConformance
from tests.conformance.suite_query import QueryConformance
from tests.conformance.suite_queues import QueueConformance
from tests.conformance.suite_reopening import ReopeningConformance
from tests.conformance.suite_schedules import ScheduleConformance
from tests.conformance.suite_suspects import SuspectConformance
from tests.conformance.suite_waiting import WaitingConformance

from perdure.core.codec import encode, pack
from perdure.core.events import (
    AnyBody,
    CancelRequested,
    Event,
    RunClaimed,
    RunCreated,
    RunReleased,
    RunSucceeded,
    StatusReported,
    ThoughtRecorded,
    ToolCallCompleted,
)
from perdure.core.identity import genesis, link, seal_all
from perdure.core.query import EVERYTHING, Query, Term
from perdure.errors import AlreadyRunning, Conflict, NotFound, RunEnded, StoreCorrupt, UnknownAgent
from perdure.store.api import Append, Claimed, Committed, InboxRow, Lease, NewRun, Refused, RowChange, RunRow, Served, Store

T0 = 1_700_000_000_000_000  # where every test's clock begins, in microseconds
SECOND = 1_000_000
LEASE_US = 30 * SECOND
AT_ONCE_US = 1  # who was seen twice with the same sign of life has been silent for as long
RELEASED = RunReleased("waiting", "a signal")
# The three kinds of append: events alone, with a change of the projection, and with a release of the run.
ROWS = [None, RowChange("running"), RowChange("waiting", release=True)]


class StoreConformance(
    ArtifactConformance,
    QueueConformance,
    SuspectConformance,
    WaitingConformance,
    MovingConformance,
    ProgressConformance,
    QueryConformance,
    ForkConformance,
    ReopeningConformance,
    ScheduleConformance,
):
    """Subclass it with a `make_store` fixture: a function that opens a new, empty store."""

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        raise NotImplementedError("give make_store: a fixture that returns a function which opens a new, empty store")

    def age(self, store: Store, us: int) -> None:
        """Let this many microseconds pass for every worker's lease, as `workers` shows it.

        A store that uses the `now` of these tests has nothing to do. A store with a clock of its own moves every
        heartbeat back by the same time.
        """

    @pytest.fixture
    def store(self, make_store: Callable[[], Store]) -> Iterator[Store]:
        opened = make_store()
        yield opened
        opened.close()

    # -- creating and reading -----------------------------------------------------------------------------------------

    def test_a_created_run_is_queued_ready_and_has_its_first_event(self, store: Store) -> None:
        row, created = store.create_run(new_run("r", actor="user:17"))
        assert created
        assert (row.status, row.seq, row.epoch, row.ready_at, row.holder, row.actor) == ("queued", 1, 0, T0, None, "user:17")
        assert store.get("r") == row
        (event,) = store.read("r")
        assert (event.seq, event.type, event.ts, event.cause, event.epoch) == (1, "run_created", T0, None, 0)
        assert event.body == new_run("r", actor="user:17").created

    def test_the_same_id_twice_gives_the_first_run_and_no_second_event(self, store: Store) -> None:
        first, _ = store.create_run(new_run("r"))
        again, created = store.create_run(new_run("r", agent="other", ts=T0 + 5))
        assert not created
        assert again == first
        assert len(store.read("r")) == 1

    def test_several_runs_are_created_in_one_go_each_once(self, store: Store) -> None:
        store.create_run(new_run("old"))
        news = [new_run("r1"), new_run("old"), new_run("r2"), new_run("r1")]
        answers = store.create_runs(news)
        assert [(row.run_id, created) for row, created in answers] == [("r1", True), ("old", False), ("r2", True), ("r1", False)]
        assert [answers[0][0], answers[2][0]] == [store.get("r1"), store.get("r2")]
        assert [[event.event_id for event in store.read(run_id)] for run_id in ("r1", "r2")] == [[news[0].event_id], [news[2].event_id]]
        assert store.create_runs([]) == []

    def test_of_several_runs_all_are_created_or_none(self, store: Store) -> None:
        store.append([hold_one(store, "gone").append(RunSucceeded(payload("done")), row=RowChange("succeeded"))])
        store.prune(["gone"], T0 + 10**12, by="ann", now=T0)
        with pytest.raises(Conflict, match="gone"):
            store.create_runs([new_run("r1"), new_run("gone")])
        assert store.get("r1") is None

    def test_a_run_that_does_not_exist_is_none_and_has_no_events(self, store: Store) -> None:
        assert store.get("nobody") is None
        assert store.read("nobody") == []

    def test_runs_are_counted_by_status_of_an_agent_and_a_tenant(self, store: Store) -> None:
        assert store.count(EVERYTHING) == {}
        for n in range(3):
            store.create_run(new_run(f"r{n}", agent="shop" if n else "other"))
        store.append([hold_one(store, "done", "w").append(RunSucceeded(payload("x")), row=RowChange("succeeded"))])
        assert store.count(EVERYTHING) == {"queued": 3, "succeeded": 1}
        assert store.count(EVERYTHING.also(agent="shop")) == {"queued": 2}
        assert store.count(EVERYTHING.also(agent="shop", tenant="nobody's")) == store.count(EVERYTHING.also(agent="none")) == {}

    def test_runs_are_listed_newest_first_filtered_and_paged(self, store: Store) -> None:
        for n in range(4):
            store.create_run(new_run(f"r{n}", agent="even" if n % 2 == 0 else "odd", tenant=f"t{n // 2}", ts=T0 + n))
        assert [row.run_id for row in store.list()] == ["r3", "r2", "r1", "r0"]
        assert [row.run_id for row in store.list(EVERYTHING.also(agent="even"))] == ["r2", "r0"]
        assert [row.run_id for row in store.list(EVERYTHING.also(tenant="t0"))] == ["r1", "r0"]
        assert [row.run_id for row in store.list(limit=2)] == ["r3", "r2"]
        assert [row.run_id for row in store.list(Query((Term("created", "<", number=T0 + 2),)))] == ["r1", "r0"]
        claim_one(store, "r1")
        assert [row.run_id for row in store.list(EVERYTHING.also(status="running"))] == ["r1"]

    def test_what_is_read_is_what_was_appended_and_the_chain_holds(self, store: Store) -> None:
        held = hold_one(store, "r")
        bodies: list[AnyBody] = [
            ThoughtRecorded("NUL \0, ü, 🎈 and \u202e"),
            ToolCallCompleted(payload({"a": [1, -0.0, 2**70]})),
            StatusReported(""),
        ]
        append = held.append(*bodies)
        assert store.append([append]) == [Committed()]
        assert [event.body for event in store.read("r")][2:] == bodies
        assert [event.seq for event in store.read("r", after=3)] == [4, 5]
        before = genesis("r")
        for lies in store.stored("r"):
            event_id = lies.event_id.hex() if isinstance(lies.event_id, bytes) else lies.event_id
            assert lies.hash == link(before, lies.seq, event_id, lies.ts, lies.epoch, lies.call, lies.cause, lies.data)
            before = lies.hash
        row = found(store, "r")
        assert (row.seq, row.head) == (5, before) == (5, store.hash_at("r", 5))
        assert store.hash_at("r", 0) == genesis("r")
        with pytest.raises(NotFound, match="no event 6"):
            store.hash_at("r", 6)

    def test_what_may_have_grown_is_what_is_new_or_has_not_finished_in_the_order_of_creation(self, store: Store) -> None:
        for n in range(5):
            store.create_run(new_run(f"r{n}", ts=T0 - n))  # a clock that goes back does not change the order
        store.append([claim_one(store, "r1").append(RunSucceeded(payload("done")), row=RowChange("succeeded"))])
        places = {row.run_id: place for place, row in grown(store, 5)}
        assert list(places) == ["r0", "r1", "r2", "r3", "r4"]
        assert sorted(places.values()) == list(places.values())
        assert places["r0"] > (0, 0)
        assert [row.run_id for _, row in store.growing(newest=places["r3"])] == ["r0", "r2", "r3", "r4"]
        assert [row.run_id for _, row in store.growing(after=places["r0"], newest=places["r3"], limit=2)] == ["r2", "r3"]
        assert store.growing(after=places["r4"]) == []
        ((place, row),) = store.growing(after=places["r3"])
        assert (place, row) == (places["r4"], found(store, "r4"))
        first, second = places["r3"]
        assert [row.run_id for _, row in store.growing(after=(first, second - 1))] == ["r3", "r4"]

    # -- the guard ----------------------------------------------------------------------------------------------------

    def test_an_append_changes_the_row_in_the_same_commit(self, store: Store) -> None:
        held = hold_one(store, "r")
        store.append([held.append(ThoughtRecorded("x"), ts=T0 + 9, row=RowChange("running", waiting_for="retry at noon", error="boom"))])
        row = found(store, "r")
        assert (row.seq, row.status, row.waiting_for, row.error, row.updated_at, row.ready_at) == (
            3,
            "running",
            "retry at noon",
            "boom",
            T0 + 9,
            None,
        )

    def test_an_append_without_events_changes_only_the_row(self, store: Store) -> None:
        held = hold_one(store, "r")
        before = found(store, "r")
        assert store.append([held.append(row=RowChange("running", waiting_for="a timer"))]) == [Committed()]
        assert found(store, "r") == msgspec.structs.replace(before, waiting_for="a timer")

    @pytest.mark.parametrize("row", ROWS)
    @pytest.mark.parametrize("part", ["epoch", "nonce", "worker"])
    def test_a_lease_that_differs_only_in_its(self, store: Store, part: str, row: RowChange | None) -> None:
        """… epoch, nonce or worker is refused, and nothing is written."""
        held = hold_one(store, "r")
        wrong = {"epoch": held.lease.epoch - 1, "nonce": bytes(16), "worker": "somebody"}[part]
        forged = Held(msgspec.structs.replace(held.lease, **{part: wrong}), held.seq, held.head)
        assert_refused(store, forged.append(ThoughtRecorded("from a zombie"), row=row), "r")
        assert store.append([held.append(ThoughtRecorded("the true holder goes on"))]) == [Committed()]

    @pytest.mark.parametrize("row", ROWS)
    @pytest.mark.parametrize("off", [-1, 1])
    def test_an_append_that_expects_another_seq_is_refused(self, store: Store, off: int, row: RowChange | None) -> None:
        held = hold_one(store, "r")
        assert_refused(store, Held(held.lease, held.seq + off, held.head).append(ThoughtRecorded("x"), row=row), "r")

    def test_the_same_append_twice_is_committed_once(self, store: Store) -> None:
        append = hold_one(store, "r").append(ThoughtRecorded("x"))
        assert store.append([append]) == [Committed()]
        assert_refused(store, append, "r")

    def test_an_append_to_a_run_that_does_not_exist_is_refused(self, store: Store) -> None:
        held = hold_one(store, "r")
        forged = Held(msgspec.structs.replace(held.lease, run_id="nobody"), held.seq, held.head)
        (answer,) = store.append([forged.append(ThoughtRecorded("x"))])
        assert isinstance(answer, Refused)
        assert "nobody" in answer.why

    def test_one_refused_append_does_not_hinder_the_others_of_its_batch(self, store: Store) -> None:
        one, two, three = (hold_one(store, run_id) for run_id in ("r1", "r2", "r3"))
        stale = Held(two.lease, two.seq - 1, two.head)
        answers = store.append([held.append(ThoughtRecorded("x")) for held in (one, stale, three)])
        assert [type(answer) for answer in answers] == [Committed, Refused, Committed]
        assert [len(store.read(run_id)) for run_id in ("r1", "r2", "r3")] == [3, 2, 3]

    def test_two_appends_of_one_run_in_one_batch_keep_their_order(self, store: Store) -> None:
        held = hold_one(store, "r")
        first = held.append(ThoughtRecorded("1"))
        second = Held(held.lease, held.seq + 1, first.events[-1].hash).append(ThoughtRecorded("2"))
        assert store.append([first, second]) == [Committed(), Committed()]
        assert [event.seq for event in store.read("r")] == [1, 2, 3, 4]

    def test_events_that_would_leave_a_hole_are_not_written(self, store: Store) -> None:
        held = hold_one(store, "r")
        holey = msgspec.structs.replace(held.append(ThoughtRecorded("1"), ThoughtRecorded("2")), expected_seq=held.seq)
        holey = msgspec.structs.replace(holey, events=holey.events[1:])
        with pytest.raises(AssertionError):
            store.append([holey])
        assert [event.seq for event in store.read("r")] == [1, 2]
        assert store.append([held.append(ThoughtRecorded("1"))]) == [Committed()]

    # -- the end, and giving up ---------------------------------------------------------------------------------------

    def test_a_finished_run_takes_nothing_more(self, store: Store) -> None:
        held = hold_one(store, "r")
        end = held.append(RunSucceeded(payload("done")), row=RowChange("succeeded"))
        assert store.append([end]) == [Committed()]
        row = found(store, "r")
        assert (row.status, row.holder, row.ready_at) == ("succeeded", None, None)
        late = Held(held.lease, held.seq + 1, row.head).append(ThoughtRecorded("after the end"))
        assert_refused(store, late, "r")
        with pytest.raises(RunEnded, match="succeeded"):
            post(store, "r")
        with pytest.raises(RunEnded, match="succeeded"):
            store.claim("w", serving("a"), 1, T0, run_id="r")
        assert store.claim("w", serving("a"), 9, T0 + LEASE_US) == []

    def test_a_released_run_is_claimable_from_ready_at_on(self, store: Store) -> None:
        held = hold_one(store, "r")
        release = held.append(RELEASED, row=RowChange("waiting", waiting_for="a timer", ready_at=T0 + 9, release=True))
        assert store.append([release]) == [Committed()]
        row = found(store, "r")
        assert (row.status, row.holder, row.ready_at, row.waiting_for) == ("waiting", None, T0 + 9, "a timer")
        assert store.next_ready(serving("a")) == T0 + 9
        assert store.claim("w", serving("a"), 1, T0 + 8) == []
        (claimed,) = store.claim("w", serving("a"), 1, T0 + 9)
        assert (claimed.row.status, claimed.row.waiting_for, claimed.lease.epoch) == ("running", None, 2)
        assert claim_event(store, "r").takeover is False

    def test_a_worker_that_gave_a_run_up_is_refused(self, store: Store) -> None:
        held = hold_one(store, "r")
        release = held.append(RELEASED, row=RowChange("waiting", release=True))
        store.append([release])
        assert_refused(store, Held(held.lease, held.seq + 1, release.events[-1].hash).append(ThoughtRecorded("x")), "r")

    def test_a_run_that_is_given_up_with_unread_post_is_ready_at_once(self, store: Store) -> None:
        held = hold_one(store, "r")
        assert post(store, "r") is False
        asleep = RowChange("waiting", ready_at=T0 + 1_000_000_000, release=True)
        assert store.append([held.append(RELEASED, row=asleep)]) == [Committed()]
        assert [claimed.lease.run_id for claimed in store.claim("w", serving("a"), 1, T0 + 1_000_000)] == ["r"]
        assert len(store.inbox("w")) == 1

    def test_a_run_that_is_given_up_when_all_post_was_read_sleeps(self, store: Store) -> None:
        held = hold_one(store, "r")
        post(store, "r")
        (letter,) = store.inbox("w")
        asleep = RowChange("waiting", ready_at=T0 + 1_000_000_000, release=True)
        assert store.append([held.append(read(letter), RELEASED, row=asleep, consumed=(letter.inbox_id,))]) == [Committed()]
        assert store.claim("w", serving("a"), 1, T0 + 1_000_000) == []

    def test_post_that_a_finished_run_never_read_is_in_nobodys_inbox_and_can_be_seen(self, store: Store) -> None:
        held = hold_one(store, "r")
        post(store, "r")
        assert store.append([held.append(RELEASED, row=RowChange("succeeded"))]) == [Committed()]
        assert store.inbox("w") == []
        assert len(store.unread("r")) == 1

    def test_post_that_was_consumed_is_read_once(self, store: Store) -> None:
        held = hold_one(store, "r")
        post(store, "r", "ann")
        post(store, "r", "bob")
        first, second = store.inbox("w")
        assert store.append([held.append(read(first), consumed=(first.inbox_id,))]) == [Committed()]
        assert store.inbox("w") == [second]

    def test_a_fenced_worker_is_refused_even_when_post_waits(self, store: Store) -> None:
        held = hold_one(store, "r")
        post(store, "r")
        forged = Held(msgspec.structs.replace(held.lease, nonce=bytes(16)), held.seq, held.head)
        assert_refused(store, forged.append(RELEASED, row=RowChange("waiting", release=True)), "r")

    # -- from outside -------------------------------------------------------------------------------------------------

    def test_post_to_a_held_run_waits_in_the_inbox_of_its_holder(self, store: Store) -> None:
        hold_one(store, "r")
        hold_one(store, "other", worker="w2")
        assert post(store, "r", "ann") is False
        assert post(store, "r", "bob") is False
        assert [(row.run_id, row.body) for row in store.inbox("w")] == [("r", CancelRequested("ann")), ("r", CancelRequested("bob"))]
        assert store.inbox("w2") == []
        assert found(store, "r").seq == 2

    def test_post_to_an_unheld_run_is_in_its_journal_and_makes_it_ready(self, store: Store) -> None:
        park(store, hold_one(store, "r"))
        head = found(store, "r").head
        assert post(store, "r", now=T0 + 50) is True
        row = found(store, "r")
        assert (row.status, row.ready_at, row.seq, row.epoch, row.waiting_for) == ("cancelling", T0 + 50, 4, 1, None)
        event = store.read("r")[-1]
        assert (event.seq, event.call, event.body, event.epoch) == (4, 7, CancelRequested("ann"), 1)
        assert row.head == link(head, 4, event.event_id, T0 + 50, 1, 7, event.cause, store.stored("r")[-1].data)
        (claimed,) = store.claim("w", serving("a"), 1, T0 + 50)
        assert claimed.row.status == "cancelling"

    def test_post_is_refused_when_the_expectation_does_not_hold(self, store: Store) -> None:
        store.create_run(new_run("r"))

        def expect(row: RunRow) -> None:
            raise Conflict(f"run {row.run_id} is {row.status}")

        with pytest.raises(Conflict, match="run r is queued"):
            post(store, "r", expect=expect)
        assert found(store, "r").seq == 1
        with pytest.raises(NotFound, match="nobody"):
            post(store, "nobody")

    # -- claims -------------------------------------------------------------------------------------------------------

    def test_claims_take_those_who_have_waited_longest_up_to_the_limit(self, store: Store) -> None:
        register(store, "w")
        for run_id, ready_at in (("late", 3), ("early", 1), ("middle", 2), ("future", 1000)):
            store.create_run(new_run(run_id, ts=T0 + ready_at))
        assert [claimed.row.run_id for claimed in store.claim("w", serving("a"), 2, T0 + 10)] == ["early", "middle"]
        assert [claimed.row.run_id for claimed in store.claim("w", serving("a"), 2, T0 + 10)] == ["late"]
        assert store.next_ready(serving("a")) == T0 + 1000

    def test_a_claim_is_a_new_epoch_and_an_event(self, store: Store) -> None:
        register(store, "w")
        store.create_run(new_run("r"))
        (claimed,) = store.claim("w", serving("a"), 1, T0 + 5)
        assert (claimed.lease.run_id, claimed.lease.worker, claimed.lease.epoch) == ("r", "w", 1)
        assert claimed.row == found(store, "r")
        assert (claimed.row.seq, claimed.row.status, claimed.row.holder, claimed.row.ready_at) == (2, "running", "w", None)
        event = store.read("r")[-1]
        assert (event.seq, event.epoch, event.cause, event.body) == (2, 1, 1, RunClaimed("w", name="host:1"))

    def test_a_journal_that_comes_along_with_a_claim_is_the_whole_of_it(self, store: Store) -> None:
        register(store, "w")
        for run_id in ("r1", "r2"):
            store.create_run(new_run(run_id))
        for by_name in (None, "r1"):
            for claimed in store.claim("w", serving("a"), 9, T0, run_id=by_name):
                assert claimed.events in (None, tuple(store.read(claimed.lease.run_id)))
                assert store.release_undriven("w", [(claimed.lease.run_id, claimed.lease.epoch)], T0) == 1

    def test_only_served_agents_are_claimed(self, store: Store) -> None:
        register(store, "w")
        store.create_run(new_run("r1", agent="a"))
        store.create_run(new_run("r2", agent="b"))
        assert store.next_ready(serving("c")) is None
        assert store.claim("w", serving("c"), 9, T0) == []
        assert store.claim("w", [], 9, T0) == []
        assert [claimed.row.run_id for claimed in store.claim("w", serving("b", "c"), 9, T0)] == ["r2"]

    def test_a_held_run_is_not_claimed_by_anybody_else(self, store: Store) -> None:
        hold_one(store, "r")
        store.register("w2", "host:22", 22, T0)
        assert store.claim("w2", serving("a"), 9, T0 + 10 * LEASE_US) == []
        with pytest.raises(AlreadyRunning, match=r"run r is held by another worker\nworker host:1, last seen 20\d\d-"):
            store.claim("w2", serving("a"), 1, T0, run_id="r")

    def test_a_run_is_claimed_by_its_id_whether_it_is_ready_or_not(self, store: Store) -> None:
        park(store, hold_one(store, "r"))
        (claimed,) = store.claim("w", serving("a"), 1, T0, run_id="r")
        assert claimed.lease.epoch == 2
        with pytest.raises(NotFound, match="nobody"):
            store.claim("w", serving("a"), 1, T0, run_id="nobody")

    def test_a_run_of_an_agent_that_is_not_served_is_not_claimed_by_its_id(self, store: Store) -> None:
        register(store, "w")
        store.create_run(new_run("r", agent="b"))
        with pytest.raises(UnknownAgent, match="agent 'b'"):
            store.claim("w", serving("a"), 1, T0, run_id="r")

    def test_a_worker_must_be_registered_to_claim_and_to_renew(self, store: Store) -> None:
        store.create_run(new_run("r"))
        with pytest.raises(NotFound, match="not registered"):
            store.claim("w", serving("a"), 1, T0)
        with pytest.raises(NotFound, match="not registered"):
            store.renew("w", T0)
        assert found(store, "r").holder is None

    # -- death and takeover -------------------------------------------------------------------------------------------

    def test_runs_of_a_silent_worker_are_taken_over_and_the_zombie_is_refused(self, store: Store) -> None:
        zombie = hold_one(store, "r")
        store.register("w2", "host:2", 2, T0)
        now = T0 + LEASE_US + 1
        assert store.reap("w2", LEASE_US, now) == 0, "whoever looks for the first time has not seen anybody be silent"
        assert store.reap("w2", LEASE_US, now) == 0, "nor for as long as that, whatever the clocks say"
        assert store.reap("w2", AT_ONCE_US, now) == 1
        assert_refused(store, zombie.append(ThoughtRecorded("I was only asleep")), "r")
        (claimed,) = store.claim("w2", serving("a"), 1, now)
        assert (claimed.lease.epoch, claimed.row.crashes) == (2, 1)
        assert claim_event(store, "r") == RunClaimed("w2", name="host:2", takeover=True, proven_dead=False)
        assert_refused(store, zombie.append(ThoughtRecorded("I was only asleep")), "r")

    def test_a_run_that_was_taken_over_once_is_no_takeover_the_next_time(self, store: Store) -> None:
        hold_one(store, "r")
        store.unregister("w", T0)
        park(store, claim_one(store, "r", "w2"))
        assert claim_event(store, "r").takeover is True
        claim_one(store, "r", "w2")
        assert claim_event(store, "r") == RunClaimed("w2", name="host:1", takeover=False, proven_dead=False)
        assert found(store, "r").crashes == 1  # until there is progress

    def test_a_worker_that_renews_keeps_its_runs(self, store: Store) -> None:
        held = hold_one(store, "r")
        store.register("w2", "host:2", 2, T0)
        assert store.reap("w2", LEASE_US, T0) == 0
        for _ in range(3):
            store.renew("w", T0)  # by a clock that stands still, or was set back
            assert store.reap("w2", AT_ONCE_US, T0 + 100 * LEASE_US) == 0
        assert store.append([held.append(ThoughtRecorded("x"))]) == [Committed()]

    def test_a_silent_worker_that_wakes_up_counts_as_alive_again(self, store: Store) -> None:
        hold_one(store, "r")
        store.register("w2", "host:2", 2, T0)
        self.age(store, LEASE_US + 1)
        assert [store.reap("w2", lease_us, T0 + LEASE_US + 1) for lease_us in (LEASE_US, AT_ONCE_US)] == [0, 1]
        assert [row.alive for row in store.workers(T0 + LEASE_US + 1, LEASE_US)] == [False, False]
        store.renew("w", T0 + LEASE_US + 2)
        assert [(row.worker, row.alive) for row in store.workers(T0 + LEASE_US + 2, LEASE_US)] == [("w", True), ("w2", False)]
        assert [claimed.row.run_id for claimed in store.claim("w", serving("a"), 1, T0 + LEASE_US + 2)] == ["r"]

    def test_the_lease_of_a_worker_counts_by_its_own_setting(self, store: Store) -> None:
        """A process with a shorter lease neither shows it as silent nor takes its runs; a worker that recorded none counts by that one."""
        store.register("patient", "host:1", 1, T0, lease_us=LEASE_US)
        held = hold_one(store, "r", "patient")
        hold_one(store, "q", "old")
        store.register("w2", "host:2", 2, T0)
        self.age(store, SECOND)
        now = T0 + SECOND
        assert {row.worker: (row.alive, row.lease_us, row.dead) for row in store.workers(now, AT_ONCE_US)} == {
            "patient": (True, LEASE_US, False),
            "old": (False, None, False),
            "w2": (False, None, False),
        }
        assert [store.reap("w2", AT_ONCE_US, now) for _ in range(3)] == [0, 1, 0]
        assert store.append([held.append(ThoughtRecorded("still mine"))]) == [Committed()]
        assert found(store, "q").holder is None

    def test_a_longer_lease_of_the_process_that_looks_counts_too(self, store: Store) -> None:
        store.register("hasty", "host:1", 1, T0, lease_us=AT_ONCE_US)
        hold_one(store, "r", "hasty")
        store.register("w2", "host:2", 2, T0)
        assert [store.reap("w2", LEASE_US, T0) for _ in range(3)] == [0, 0, 0]
        assert store.reap("w2", AT_ONCE_US, T0) == 1

    def test_a_worker_lets_go_of_what_it_holds_and_does_not_drive_and_of_nothing_else(self, store: Store) -> None:
        driven, undriven = hold_one(store, "driven"), hold_one(store, "undriven")
        store.register("w2", "host:2", 2, T0)
        assert sorted(store.held("w")) == [("driven", 1), ("undriven", 1)]
        assert store.held("w2") == []
        assert store.release_undriven("w2", [("undriven", 1)], T0) == 0
        assert store.release_undriven("w", [("undriven", 2)], T0) == 0, "it was claimed anew since"
        assert store.release_undriven("w", [("undriven", 1), ("nobody", 1)], T0) == 1
        assert_refused(store, undriven.append(ThoughtRecorded("late")), "undriven")
        (claimed,) = store.claim("w2", serving("a"), 9, T0)
        assert (claimed.row.run_id, claimed.row.crashes) == ("undriven", 1)
        assert store.append([driven.append(ThoughtRecorded("x"))]) == [Committed()]

    def test_a_worker_does_not_reap_itself(self, store: Store) -> None:
        hold_one(store, "r")
        assert [store.reap("w", AT_ONCE_US, T0 + 10 * LEASE_US) for _ in range(2)] == [0, 0]

    def test_runs_that_a_worker_still_holds_when_it_leaves_are_taken_over(self, store: Store) -> None:
        held = hold_one(store, "r")
        store.unregister("w", T0 + 5)
        assert store.workers(T0 + 5, LEASE_US) == []
        row = found(store, "r")
        assert (row.status, row.ready_at, row.holder) == ("queued", T0 + 5, None)
        assert_refused(store, held.append(ThoughtRecorded("x")), "r")
        store.register("w2", "host:2", 2, T0)
        store.claim("w2", serving("a"), 1, T0 + 5)
        assert claim_event(store, "r").takeover is True

    def test_workers_are_shown_with_what_they_hold(self, store: Store) -> None:
        hold_one(store, "r1")
        hold_one(store, "r2")
        (row,) = store.workers(T0, LEASE_US)
        assert (row.worker, row.name, row.pid, row.alive, row.runs) == ("w", "host:1", 1, True, 2)
        assert row.beat_at >= T0

    def test_crashes_count_takeovers_in_a_row_until_there_is_progress(self, store: Store) -> None:
        store.create_run(new_run("r"))
        counted = [lose(store, "r", f"w{n}") for n in range(3)]
        assert counted == [0, 1, 2]
        register(store, "w")
        (claimed,) = store.claim("w", serving("a"), 1, T0)
        assert claimed.row.crashes == 3
        held = Held.of(claimed)
        first = held.append(ThoughtRecorded("no completion"), row=RowChange("running"))
        store.append([first])
        assert found(store, "r").crashes == 3
        store.append(
            [
                Held(held.lease, held.seq + 1, first.events[-1].hash).append(
                    ToolCallCompleted(payload(1)), row=RowChange("running", progress=True)
                )
            ]
        )
        assert found(store, "r").crashes == 0

    # -- blobs and transactions ---------------------------------------------------------------------------------------

    def test_a_blob_is_there_with_the_event_that_names_it(self, store: Store) -> None:
        held = hold_one(store, "r")
        large = b'"' + b"x" * 100_000 + b'"'
        named, blob = pack(large)
        assert blob == large
        assert store.append([held.append(ToolCallCompleted(named), blobs=(large,))]) == [Committed()]
        assert store.blob(hashlib.sha256(large).hexdigest()) == large
        with pytest.raises(StoreCorrupt, match="missing"):
            store.blob("00" * 32)

    def test_blobs_of_a_refused_append_are_not_stored(self, store: Store) -> None:
        held = hold_one(store, "r")
        stale = Held(held.lease, held.seq - 1, held.head)
        store.append([stale.append(ThoughtRecorded("x"), blobs=(b"secret",))])
        with pytest.raises(StoreCorrupt, match="missing"):
            store.blob(hashlib.sha256(b"secret").hexdigest())

    def test_a_transaction_commits_intent_effect_and_result_together(self, store: Store) -> None:
        held = hold_one(store, "r")
        head = held.append(ThoughtRecorded("intent"))
        tail = Held(held.lease, held.seq + 1, head.events[-1].hash).append(ThoughtRecorded("result"), row=RowChange("running"))

        def work(connection: Any) -> tuple[Append, str]:
            connection.execute("CREATE TABLE accounts (name TEXT PRIMARY KEY, cents INTEGER NOT NULL)")
            connection.executemany("INSERT INTO accounts VALUES (?, ?)", [("ann", 5), ("bob", 7)])
            return tail, connection.execute("SELECT sum(cents) FROM accounts")[0][0]

        assert store.transact(head, work) == (Committed(), 12)
        assert [event.seq for event in store.read("r")] == [1, 2, 3, 4]

    def test_a_transaction_whose_work_raises_leaves_nothing(self, store: Store) -> None:
        held = hold_one(store, "r")
        head = held.append(ThoughtRecorded("intent"))

        def work(connection: Any) -> tuple[Append, None]:
            connection.execute("CREATE TABLE accounts (name TEXT)")
            raise KeyError("no such account")

        with pytest.raises(KeyError, match="no such account"):
            store.transact(head, work)
        assert found(store, "r").seq == 2
        with pytest.raises(Exception, match="accounts"):
            store.transact(head, lambda connection: connection.execute("SELECT * FROM accounts"))
        assert store.append([head]) == [Committed()]

    def test_a_transaction_without_the_lease_does_no_work(self, store: Store) -> None:
        held = hold_one(store, "r")
        forged = Held(msgspec.structs.replace(held.lease, nonce=bytes(16)), held.seq, held.head)
        answer, value = store.transact(forged.append(ThoughtRecorded("x")), lambda connection: pytest.fail("must not be called"))
        assert isinstance(answer, Refused)
        assert value is None

    # -- news ---------------------------------------------------------------------------------------------------------

    def test_version_changes_with_every_commit_and_only_then(self, store: Store) -> None:
        seen = [store.version()]
        store.create_run(new_run("r"))
        seen.append(store.version())
        register(store, "w")
        seen.append(store.version())
        held = Held.of(store.claim("w", serving("a"), 1, T0)[0])
        seen.append(store.version())
        store.append([held.append(ThoughtRecorded("x"))])
        seen.append(store.version())
        post(store, "r")
        seen.append(store.version())
        assert len(set(seen)) == len(seen)
        store.read("r")
        assert store.version() == seen[-1]

    def test_facts_say_what_doctor_shows(self, store: Store) -> None:
        facts = store.facts()
        assert facts
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in facts.items())


class Held:
    """A run that a worker holds, with what a test needs."""

    def __init__(self, lease: Lease, seq: int, head: bytes) -> None:
        self.lease = lease
        self.seq = seq
        self.head = head

    @classmethod
    def of(cls, claimed: Claimed) -> Held:
        return cls(claimed.lease, claimed.row.seq, claimed.row.head)

    def append(
        self, *bodies: AnyBody, ts: int = T0, row: RowChange | None = None, blobs: tuple[bytes, ...] = (), consumed: tuple[int, ...] = ()
    ) -> Append:
        """The bodies sealed onto the head, as the holder would send them."""
        events = [Event(self.seq + n, uuid.uuid4().hex, ts, self.lease.epoch, None, self.seq, body) for n, body in enumerate(bodies, 1)]
        return Append(self.lease, self.seq, tuple(seal_all(self.head, events)), blobs=blobs, row=row, consumed=consumed)


def payload(value: Any) -> Any:
    return pack(encode(value))[0]


def new_run(run_id: str, *, agent: str = "a", tenant: str = "default", actor: str | None = None, ts: int = T0) -> NewRun:
    created = RunCreated(run_id, agent, "1", tenant, payload({"order": "o-81"}), actor=actor)
    return NewRun(run_id, created, uuid.uuid4().hex, ts, hashlib.sha256(b"input").hexdigest())


def grown(store: Store, count: int) -> list[tuple[tuple[int, int], RunRow]]:
    """What has grown, once so many runs can be seen: a store may keep a run back while an older transaction is still under way."""
    deadline_s = time.monotonic() + 10
    while len(rows := store.growing()) < count and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return rows


def found(store: Store, run_id: str) -> RunRow:
    row = store.get(run_id)
    assert row is not None, run_id
    return row


def read(letter: InboxRow) -> AnyBody:
    assert letter.body is not None
    return letter.body


def register(store: Store, worker: str) -> None:
    if worker not in {row.worker for row in store.workers(T0, LEASE_US)}:
        store.register(worker, "host:1", 1, T0)


def serving(*agents: str) -> list[Served]:
    """These agents, in the version that the runs of the tests have."""
    return [Served(agent, "1") for agent in agents]


def claim_one(store: Store, run_id: str, worker: str = "w", now: int = T0) -> Held:
    register(store, worker)
    row = found(store, run_id)
    (claimed,) = store.claim(worker, [Served(row.agent, row.version)], 1, now, run_id=run_id)
    return Held.of(claimed)


def hold_one(store: Store, run_id: str, worker: str = "w", now: int = T0) -> Held:
    """A run with this id, created if need be, held by the worker."""
    store.create_run(new_run(run_id))
    return claim_one(store, run_id, worker, now)


def park(store: Store, held: Held) -> None:
    """Give the run up until something from outside wakes it."""
    assert store.append([held.append(RELEASED, row=RowChange("waiting", waiting_for="a signal", release=True))]) == [Committed()]


def lose(store: Store, run_id: str, worker: str, agent: str = "a") -> int:
    """Have a worker claim the run and vanish; how many crashes its claim counted."""
    store.register(worker, "host:9", os.getpid(), T0)
    (claimed,) = store.claim(worker, serving(agent), 1, T0, run_id=run_id)
    store.unregister(worker, T0)
    return claimed.row.crashes


def post(store: Store, run_id: str, by: str = "ann", *, now: int = T0, expect: Callable[[RunRow], None] = lambda row: None) -> bool:
    return store.post(run_id, 7, CancelRequested(by), event_id=uuid.uuid4().hex, now=now, status="cancelling", expect=expect)


def claim_event(store: Store, run_id: str) -> RunClaimed:
    claims = [event.body for event in store.read(run_id) if isinstance(event.body, RunClaimed)]
    return claims[-1]


def assert_refused(store: Store, append: Append, run_id: str) -> None:
    """The append is refused with a reason that names the run, and has written nothing."""
    row, events = store.get(run_id), store.read(run_id)
    (answer,) = store.append([append])
    assert isinstance(answer, Refused), answer
    assert run_id in answer.why
    assert (store.get(run_id), store.read(run_id)) == (row, events)
