"""What every Store must do about queues: lines, turns, limits, versions, rates and the bell.

Part of StoreConformance.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from typing import Any

import pytest

from perdure.core.codec import encode, pack
from perdure.core.events import AnyBody, ChildStarted, Event, RunAdopted, RunCreated, RunPaused, RunReleased, RunSucceeded, ThoughtRecorded
from perdure.core.identity import seal_all
from perdure.core.rate import Rate
from perdure.core.state import fold
from perdure.errors import AlreadyRunning, Conflict, NotFound, UnknownAgent, WrongVersion
from perdure.settings import Queue
from perdure.store.api import Append, Backlog, Claimed, Committed, NewRun, RowChange, Served, Store

NOW = 1_700_000_000_000_000
SECOND = 1_000_000
A1, A2, B1 = Served("a", "1"), Served("a", "2"), Served("b", "1")


class QueueConformance:
    """Needs a `store` fixture."""

    # -- turns
    # ----------------------------------------------------------------------------------------------------------

    def test_a_tenant_with_a_long_line_delays_anothers_single_run_by_one_place_at_most(self, store: Store) -> None:
        for n in range(40):
            queue_run(store, f"long-{n:02}", tenant="long")
        queue_run(store, "single", tenant="single", ts=NOW + 5)
        sign_on(store, "w")
        names = [row.run_id for row in take(store, 10, now=NOW + 5)]
        assert "single" in names[:2]
        assert [name for name in names if name != "single"] == [f"long-{n:02}" for n in range(9)]

    def test_tenants_take_turns_from_one_claim_to_the_next(self, store: Store) -> None:
        for n in range(6):
            queue_run(store, f"x{n}", tenant="x")
            queue_run(store, f"y{n}", tenant="y", ts=NOW + 1)
        sign_on(store, "w")
        turns = [take(store, 1)[0].run_id for _ in range(3)] + [row.run_id for row in take(store, 5)] + [take(store, 1)[0].run_id]
        assert turns == ["x0", "y0", "x1", "y1", "x2", "y2", "x3", "y3", "x4"]

    def test_a_tenant_that_had_nothing_to_do_is_served_next_and_then_like_all_others(self, store: Store) -> None:
        sign_on(store, "w")
        for n in range(6):
            queue_run(store, f"x{n}", tenant="x")
        assert [row.run_id for row in take(store, 3)] == ["x0", "x1", "x2"]
        for n in range(3):
            queue_run(store, f"y{n}", tenant="y")
        assert [row.run_id for row in take(store, 4)] == ["y0", "x3", "y1", "x4"], "what it did not ask for before it does not get back now"

    def test_turns_are_kept_for_each_queue(self, store: Store) -> None:
        sign_on(store, "w")
        for queue in ("q1", "q2"):
            for tenant in ("x", "y"):
                for n in range(2):
                    queue_run(store, f"{queue}{tenant}{n}", queue=queue, tenant=tenant)
        assert [row.run_id for row in take(store, 1, queues=["q1"])] == ["q1x0"]
        assert [row.run_id for row in take(store, 1, queues=["q2"])] == ["q2x0"], "its turn in the other queue does not count here"
        assert [row.run_id for row in take(store, 2, queues=["q1"])] == ["q1y0", "q1x1"]

    def test_inside_a_tenant_priority_goes_first_then_what_has_been_ready_longest(self, store: Store) -> None:
        queue_run(store, "low", priority=-1, ts=NOW - 9)
        queue_run(store, "second", ts=NOW - 1)
        queue_run(store, "first", agent="b", ts=NOW - 2)
        queue_run(store, "third", ts=NOW - 1)
        queue_run(store, "urgent", priority=5, ts=NOW)
        sign_on(store, "w")
        assert [row.run_id for row in take(store, 9)] == ["urgent", "first", "second", "third", "low"]

    def test_priority_does_not_count_between_tenants(self, store: Store) -> None:
        for n in range(3):
            queue_run(store, f"loud{n}", tenant="loud", priority=100)
        queue_run(store, "quiet", tenant="quiet", ts=NOW + 1)
        sign_on(store, "w")
        assert [row.run_id for row in take(store, 3)] == ["loud0", "quiet", "loud1"]

    def test_what_is_not_ready_yet_does_not_stand_before_what_is(self, store: Store) -> None:
        queue_run(store, "sleeper", priority=9, ts=NOW + 60 * SECOND)
        queue_run(store, "ready")
        sign_on(store, "w")
        assert [row.run_id for row in take(store, 9)] == ["ready"]
        assert store.next_ready([A1]) == NOW + 60 * SECOND

    def test_more_runs_than_a_page_come_each_once_and_in_order(self, store: Store) -> None:
        for n in range(12):
            queue_run(store, f"r{n:02}", agent="ab"[n % 2], priority=-(n // 6), ts=NOW - 100 + n // 3)
        queue_run(store, "other", tenant="other")
        sign_on(store, "w")
        names = [row.run_id for row in take(store, 13)]
        assert [name for name in names if name != "other"] == [f"r{n:02}" for n in range(12)]

    # -- which runs a worker may take ---------------------------------------------------------------------------------

    def test_a_run_without_a_version_takes_that_of_the_worker_in_the_commit_of_the_claim(self, store: Store) -> None:
        queue_run(store, "first", version="")
        queue_run(store, "second", version="", ts=NOW + 1)
        queue_run(store, "pinned", version="1", ts=NOW + 2)
        sign_on(store, "w")
        assert store.next_ready([A2]) == NOW
        assert store.next_ready([B1]) is None, "another agent does not serve it"
        for _ in range(2):  # the first claim makes the line of version 2, the second one finds it
            (row,) = take(store, 1, served=[A2])
            assert (row.version, store.read(row.run_id)[-1].body.version) == ("2", "2")  # type: ignore[union-attr]
            assert store.get(row.run_id) == row
            assert fold(store.read(row.run_id)).version == "2"
        assert take(store, 9, served=[A2]) == []

    def test_the_version_of_the_first_claim_stays(self, store: Store) -> None:
        queue_run(store, "r", version="")
        sign_on(store, "w")
        (claimed,) = claim(store, 1, served=[A2])
        released = append_to(claimed, RunReleased("queued", "another worker"), row=RowChange("queued", release=True, ready_at=NOW + 1))
        assert store.append([released]) == [Committed()]
        assert take(store, 9, served=[A1], now=NOW + 2) == []
        with pytest.raises(WrongVersion, match="begun with version 2"):
            store.claim("w", [A1], 1, NOW + 2, run_id="r")
        (again,) = claim(store, 1, served=[A2], now=NOW + 2)
        assert store.read("r")[-1].body.version == "", "the second claim does not repeat it"  # type: ignore[union-attr]
        assert again.row.version == "2"

    def test_of_several_versions_a_run_without_one_takes_the_last(self, store: Store) -> None:
        sign_on(store, "w")
        for turn, served in enumerate(([A1, A2], [A2, A1], [A1, A2, A2])):
            for n in range(3):
                queue_run(store, f"r{turn}{n}", version="")
            assert [row.version for row in take(store, 9, served=served)] == [served[-1].version] * 3

    def test_a_claim_by_name_and_a_claim_of_children_give_a_version_too(self, store: Store) -> None:
        sign_on(store, "w")
        queue_run(store, "r", version="")
        (by_name,) = store.claim("w", [A1, B1], 1, NOW, run_id="r")
        assert by_name.row.version == "1"
        assert store.append([append_to(by_name, ChildStarted("b", "", "r/1", payload({}), "d"))]) == [Committed()]
        (child,) = store.claim("w", [A1, B1], 1, NOW, below="r")
        assert (child.lease.run_id, child.row.version) == ("r/1", "1")
        queue_run(store, "q", version="")
        with pytest.raises(UnknownAgent):
            store.claim("w", [B1], 1, NOW, run_id="q")

    def test_runs_with_and_without_a_version_are_one_line_for_a_worker(self, store: Store) -> None:
        for n in range(6):
            queue_run(store, f"r{n}", version="" if n % 2 else "1", ts=NOW + n)
        sign_on(store, "w")
        assert [row.run_id for row in take(store, 4, now=NOW + 9)] == ["r0", "r1", "r2", "r3"]
        assert [row.run_id for row in take(store, 4, now=NOW + 9)] == ["r4", "r5"]

    def test_a_worker_takes_only_versions_that_it_serves(self, store: Store) -> None:
        queue_run(store, "old", version="1")
        queue_run(store, "new", version="2", ts=NOW + 1)
        queue_run(store, "crossed", agent="b", version="2", ts=NOW + 2)
        sign_on(store, "w")
        served = [A2, B1]
        assert store.next_ready(served) == NOW + 1
        assert [row.run_id for row in take(store, 9, served=served)] == ["new"]
        assert store.next_ready(served) is None
        with pytest.raises(WrongVersion, match=r"(?s)run old was begun with version 1 .* serves 2\n.*perdure adopt old FILE.py:\S+"):
            store.claim("w", served, 1, NOW, run_id="old")
        with pytest.raises(UnknownAgent, match="agent 'b'"):
            store.claim("w", [A1, A2], 1, NOW, run_id="crossed")

    def test_an_agent_that_is_named_twice_is_served_once(self, store: Store) -> None:
        queue_run(store, "r")
        sign_on(store, "w")
        assert [row.run_id for row in take(store, 9, served=[A1, A1], queues=["default", "default"])] == ["r"]

    def test_a_run_that_another_version_has_adopted_stands_in_that_versions_line(self, store: Store) -> None:
        queue_run(store, "r", version="1")
        sign_on(store, "w")
        assert store.post("r", None, RunAdopted("2", "ann"), event_id=uuid.uuid4().hex, now=NOW, expect=lambda row: None)
        row = store.get("r")
        assert row is not None
        assert row.version == "2"
        assert store.next_ready([A1]) is None
        assert take(store, 9, served=[A1]) == []
        assert [row.run_id for row in take(store, 9, served=[A2])] == ["r"]

    def test_a_worker_takes_only_from_its_queues(self, store: Store) -> None:
        queue_run(store, "r1", queue="q1")
        queue_run(store, "r2", queue="q2", ts=NOW + 1)
        sign_on(store, "w")
        assert store.next_ready([A1], ["q2", "q3"]) == NOW + 1
        assert store.next_ready([A1], ["q3"]) is None
        assert store.next_ready([A1], []) is None
        assert take(store, 9, queues=["q3"]) == []
        assert [row.run_id for row in take(store, 9, queues=["q2", "q3"])] == ["r2"]
        assert [row.run_id for row in take(store, 9)] == ["r1"]

    def test_a_paused_run_is_not_claimed_by_its_id(self, store: Store) -> None:
        queue_run(store, "r")
        sign_on(store, "w")
        store.post("r", None, RunPaused("ann"), event_id=uuid.uuid4().hex, now=NOW, expect=lambda row: None)
        with pytest.raises(Conflict, match="perdure unpause r"):
            store.claim("w", [A1], 1, NOW, run_id="r")
        assert take(store, 9) == []

    # -- limits -------------------------------------------------------------------------------------------------------

    def test_no_more_runs_of_a_queue_are_held_than_its_limit_whoever_holds_them(self, store: Store) -> None:
        limits = {"q": Queue(concurrency=3)}
        for n in range(5):
            queue_run(store, f"r{n}", queue="q", tenant=f"t{n}")
        queue_run(store, "free", queue="other")
        sign_on(store, "w")
        sign_on(store, "w2")
        first = claim(store, 2, queues=["q"], limits=limits)
        assert len(first) == 2
        rest = [row.run_id for row in take(store, 9, worker="w2", limits=limits)]
        assert len(rest) == 2
        assert "free" in rest
        assert take(store, 9, limits=limits) == []
        park(store, first[0])
        assert len(take(store, 9, worker="w2", limits=limits)) == 1
        assert take(store, 9, limits=limits) == []

    def test_no_more_runs_of_a_tenant_are_held_in_a_queue_than_its_limit(self, store: Store) -> None:
        limits = {"q": Queue(per_tenant=2, concurrency=5)}
        for tenant in ("x", "y", "z"):
            for n in range(4):
                queue_run(store, f"{tenant}{n}", queue="q", tenant=tenant)
        queue_run(store, "elsewhere", queue="other", tenant="x")
        sign_on(store, "w")
        assert [row.run_id for row in take(store, 1, queues=["q"], limits=limits)] == ["x0"]
        assert [row.run_id for row in take(store, 9, queues=["q"], limits=limits)] == ["y0", "z0", "x1", "y1"]
        assert [row.run_id for row in take(store, 9, limits=limits)] == ["elsewhere"]

    def test_limits_apply_to_a_run_that_is_asked_for_by_its_id_when_they_are_given(self, store: Store) -> None:
        limits = {"q": Queue(concurrency=1)}
        queue_run(store, "r1", queue="q")
        queue_run(store, "r2", queue="q")
        sign_on(store, "w")
        assert [row.run_id for row in take(store, 9, limits=limits)] == ["r1"]
        before = store.get("r2"), store.read("r2")
        assert store.claim("w", [A1], 1, NOW, run_id="r2", limits=limits) == []
        assert (store.get("r2"), store.read("r2")) == before
        (claimed,) = store.claim("w", [A1], 1, NOW, run_id="r2", queues=["other"], limits={"other": Queue(concurrency=1)})
        assert claimed.lease.run_id == "r2"
        with pytest.raises(AlreadyRunning):
            store.claim("w", [A1], 1, NOW, run_id="r2", limits=limits)

    def test_limits_of_a_tenant_apply_to_a_run_that_is_asked_for_by_its_id_too(self, store: Store) -> None:
        limits = {"q": Queue(per_tenant=1)}
        for run_id, tenant in (("x0", "x"), ("x1", "x"), ("y0", "y")):
            queue_run(store, run_id, queue="q", tenant=tenant)
        sign_on(store, "w")
        (held,) = store.claim("w", [A1], 1, NOW, run_id="x0", limits=limits)
        assert store.claim("w", [A1], 1, NOW, run_id="x1", limits=limits) == []
        assert len(store.claim("w", [A1], 1, NOW, run_id="y0", limits=limits)) == 1
        park(store, held)
        assert len(store.claim("w", [A1], 1, NOW, run_id="x1", limits=limits)) == 1

    def test_a_run_that_is_asked_for_by_its_id_without_limits_has_room(self, store: Store) -> None:
        queue_run(store, "r1", queue="q")
        queue_run(store, "r2", queue="q")
        sign_on(store, "w")
        assert len(take(store, 9, limits={"q": Queue(concurrency=1)})) == 1
        assert len(store.claim("w", [A1], 1, NOW, run_id="r2")) == 1

    # -- what workers say about themselves ----------------------------------------------------------------------------

    def test_workers_are_shown_with_what_they_serve(self, store: Store) -> None:
        store.register("w", "host:1", 1, NOW, [A1, B1], ["q1", "q2"])
        store.register("w2", "host:2", 2, NOW + 1)
        one, two = store.workers(NOW, 30 * SECOND)
        assert (one.serves, one.queues) == ((A1, B1), ("q1", "q2"))
        assert (two.serves, two.queues) == ((), None)

    def test_a_live_worker_that_registers_again_says_what_it_serves_now_and_keeps_its_runs(self, store: Store) -> None:
        queue_run(store, "r")
        store.register("w", "host:1", 1, NOW, [A1], ["q1"])
        store.claim("w", [A1], 1, NOW, run_id="r")
        store.register("w", "host:1", 1, NOW + 5, [A1, A2])
        (row,) = store.workers(NOW + 5, 30 * SECOND)
        assert (row.serves, row.queues, row.runs, row.alive, row.started_at) == ((A1, A2), None, 1, True, NOW)
        assert row.beat_at >= NOW + 5
        assert store.reap("somebody", 30 * SECOND, NOW + 5) == 0

    # -- rates --------------------------------------------------------------------------------------------------------

    def test_starts_under_a_rate_are_spread_after_the_burst(self, store: Store) -> None:
        rate = Rate(limit=10, per=1.0, key="api", burst=3)
        starts = [store.admit(rate, NOW) - NOW for _ in range(6)]
        assert starts == [0, 0, 0, 100_000, 200_000, 300_000]
        assert store.admit(rate, NOW + 5 * SECOND) == NOW + 5 * SECOND
        assert store.admit(Rate(limit=10, key="another"), NOW) == NOW

    def test_a_key_that_is_held_back_starts_nothing_until_then_with_a_limit_or_without(self, store: Store) -> None:
        store.hold_back("api", NOW + 7 * SECOND)
        store.hold_back("api", NOW + 2 * SECOND)
        for rate in (Rate(limit=10, key="api"), Rate(key="api")):
            assert store.admit(rate, NOW) == NOW + 7 * SECOND
            assert store.admit(rate, NOW + 8 * SECOND) == NOW + 8 * SECOND
        assert store.admit(Rate(key="another"), NOW) == NOW

    def test_a_pause_keeps_the_places_of_those_who_came_before(self, store: Store) -> None:
        rate = Rate(limit=1, per=10.0, key="api")
        assert store.admit(rate, NOW) == NOW
        assert store.admit(rate, NOW) == NOW + 10 * SECOND
        store.hold_back("api", NOW + 5 * SECOND)
        assert store.admit(rate, NOW) == NOW + 20 * SECOND

    def test_a_clock_that_was_set_back_keeps_nobody_waiting_for_the_time_that_it_has_lost(self, store: Store) -> None:
        rate = Rate(limit=1, per=10.0, key="api")
        store.admit(rate, NOW)
        store.hold_back("api", NOW + 15 * SECOND)
        hour = 3600 * SECOND
        assert store.admit(rate, NOW - hour) == NOW - hour + 15 * SECOND
        assert store.admit(rate, NOW - hour) == NOW - hour + 25 * SECOND
        assert store.admit(rate, NOW - hour - SECOND) == NOW - hour + 35 * SECOND, "a caller that was late by a second gains nothing"

    # -- the doorbell -------------------------------------------------------------------------------------------------

    def test_whoever_listens_hears_of_a_new_run_and_of_post_and_of_nothing_after_the_end(self, store: Store) -> None:
        rung = threading.Semaphore(0)
        stop = store.listen(rung.release)
        queue_run(store, "r")
        assert rung.acquire(timeout=5)
        store.post("r", None, RunPaused("ann"), event_id=uuid.uuid4().hex, now=NOW, expect=lambda row: None)
        assert rung.acquire(timeout=5)
        stop()
        while rung.acquire(blocking=False):
            pass
        queue_run(store, "r2")
        assert not rung.acquire(timeout=0.05)
        stop()

    def test_ordinary_appends_do_not_ring_and_runs_that_are_handed_over_do(self, store: Store) -> None:
        rung = threading.Semaphore(0)
        for run_id in ("r", "asleep", "parent", "plain"):
            queue_run(store, run_id)
        sign_on(store, "w")
        held = {one.lease.run_id: one for one in claim(store, 9)}
        store.listen(rung.release)

        def rings(run_id: str, *bodies: AnyBody, row: RowChange | None = None) -> bool:
            (answer,) = store.append([append_to(held[run_id], *bodies, row=row)])
            assert answer == Committed()
            return rung.acquire(timeout=0.05)

        assert not rings("plain", ThoughtRecorded("x"), row=RowChange("running"))
        assert not rings(
            "asleep",
            RunReleased("waiting", "a timer", NOW + 60 * SECOND),
            row=RowChange("waiting", ready_at=NOW + 60 * SECOND, release=True),
        )
        assert rings("r", RunReleased("queued", "another worker", NOW), row=RowChange("queued", ready_at=NOW, release=True))
        child = ChildStarted("b", "1", "parent/1", payload(None), hashlib.sha256(b"null").hexdigest())
        assert rings("parent", child, row=RowChange("running"))
        (held["parent/1"],) = store.claim("w", [B1], 1, NOW, run_id="parent/1")
        assert rings("parent/1", RunSucceeded(payload("done")), row=RowChange("succeeded"))

    def test_a_refused_append_rings_nobody(self, store: Store) -> None:
        rung = threading.Semaphore(0)
        queue_run(store, "r")
        sign_on(store, "w")
        (held,) = claim(store, 1)
        handed_over = append_to(held, RunReleased("queued", "another worker", NOW), row=RowChange("queued", ready_at=NOW, release=True))
        store.append([handed_over])
        store.listen(rung.release)
        (answer,) = store.append([handed_over])
        assert answer != Committed()
        assert not rung.acquire(timeout=0.05)

    def test_a_listener_that_raises_harms_nobody(self, store: Store) -> None:
        rung = threading.Semaphore(0)

        def broken() -> None:
            raise RuntimeError("Event loop is closed")

        store.listen(broken)
        store.listen(rung.release)
        queue_run(store, "r")
        assert rung.acquire(timeout=5)

    def test_the_backlog_tells_what_is_ready_since_when_and_what_is_held(self, store: Store) -> None:
        sign_on(store, "w")
        queue_run(store, "held", queue="reports", ts=NOW)
        assert [row.run_id for row in take(store, 1)] == ["held"]
        queue_run(store, "old", queue="reports", ts=NOW + 10)
        queue_run(store, "urgent", queue="reports", priority=5, ts=NOW + 20)  # another line, the same party
        queue_run(store, "theirs", queue="reports", tenant="acme", ts=NOW + 30)
        queue_run(store, "later", tenant="acme", ts=NOW + 1_000)
        assert store.backlog(NOW + 100) == [
            Backlog("reports", "acme", ready=1, since=NOW + 30, held=0),
            Backlog("reports", "default", ready=2, since=NOW + 10, held=1),
        ]

    def test_nobody_claims_without_being_registered(self, store: Store) -> None:
        queue_run(store, "r")
        with pytest.raises(NotFound, match="not registered"):
            take(store, 1)


def payload(value: Any) -> Any:
    return pack(encode(value))[0]


def queue_run(
    store: Store,
    run_id: str,
    *,
    agent: str = "a",
    version: str = "1",
    tenant: str = "default",
    queue: str = "default",
    priority: int = 0,
    ts: int = NOW,
) -> None:
    created = RunCreated(run_id, agent, version, tenant, payload(None), queue=queue, priority=priority)
    _, new = store.create_run(NewRun(run_id, created, uuid.uuid4().hex, ts, hashlib.sha256(b"null").hexdigest()))
    assert new, run_id


def sign_on(store: Store, worker: str) -> None:
    store.register(worker, f"host:{worker}", 1, NOW)


def claim(store: Store, limit: int, *, worker: str = "w", now: int = NOW + 100, served: Any = (A1, B1), **wanted: Any) -> list[Claimed]:
    return store.claim(worker, served, limit, now, **wanted)


def take(store: Store, limit: int, **wanted: Any) -> list[Any]:
    """The rows of the runs that a claim returns, in order."""
    return [claimed.row for claimed in claim(store, limit, **wanted)]


def append_to(claimed: Claimed, *bodies: AnyBody, row: RowChange | None = None) -> Append:
    lease, seq = claimed.lease, claimed.row.seq
    events = [Event(seq + n, uuid.uuid4().hex, NOW, lease.epoch, n, seq, body) for n, body in enumerate(bodies, 1)]
    return Append(lease, seq, tuple(seal_all(claimed.row.head, events)), row=row)


def park(store: Store, claimed: Claimed) -> None:
    """Give the run up until something from outside wakes it."""
    given_up = append_to(claimed, RunReleased("waiting", "a signal"), row=RowChange("waiting", release=True))
    assert store.append([given_up]) == [Committed()]
