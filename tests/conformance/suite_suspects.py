"""What every Store must do about runs whose workers died repeatedly: smaller groups, and a record of each death.

Part of StoreConformance.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.conformance.suite_queues import NOW, append_to, claim, payload, queue_run, sign_on, take

from perdure.core.events import RunClaimed, RunSucceeded, ToolCallCompleted
from perdure.core.state import RunState
from perdure.core.suspects import is_poison
from perdure.settings import Queue
from perdure.store.api import Claimed, Committed, RowChange, RunRow, Store

LIMIT = 5  # of deaths, before a run is called poison


class SuspectConformance:
    """Needs a `store` fixture."""

    def test_suspects_are_taken_together_and_half_of_them_once_their_worker_has_died_again(self, store: Store) -> None:
        runs = [f"r{n:02}" for n in range(20)]
        die(store, runs, "w1", "w2")
        assert names(take_new(store, "w3")) == runs, "two deaths prove nothing against any of them: all go on at once"
        queue_run(store, "new", ts=NOW + 1)
        store.unregister("w3", NOW + 1)
        assert names(take_new(store, "w4")) == ["new", *runs[:10]]
        assert take(store, 99, worker="w4") == [], "its group is full"
        queue_run(store, "newer", ts=NOW + 2)
        assert names(take(store, 99, worker="w4")) == ["newer"], "what is no suspect is taken beside a group"
        assert names(take_new(store, "w5")) == runs[10:], "every worker has a group of its own"
        store.unregister("w4", NOW + 3)
        assert names(take_new(store, "w6")) == ["new", "newer", *runs[:5]]

    def test_a_suspect_that_makes_progress_leaves_its_group(self, store: Store) -> None:
        runs = [f"r{n}" for n in range(8)]
        die(store, runs, "w1", "w2", "w3")
        held = claim_new(store, "w4")
        first = next(one for one in held if one.row.run_id == "r0")
        assert names(take(store, 99, worker="w4")) == []
        progress(store, first)
        assert names(take(store, 99, worker="w4")) == [runs[4]]
        store.unregister("w4", NOW + 1)
        assert [lost_with(store, one) for one in ("r0", "r1", "r4")] == [4, 3, 3], "r0 is no suspect: any of the five may be to blame"
        assert [found.crashes for found in take(store, 1, worker=signed_on(store, "w5"), run_id="r0")] == [1]

    def test_a_group_is_never_larger_than_any_of_its_members_may_be_in(self, store: Store) -> None:
        """A run that was lost in a large group and a run that was lost in a small group do not share a group."""
        die(store, ["x1", "x2", "x3", "x4"], "w1", "w2", "w3")
        die(store, [f"y{n}" for n in range(7)], "v1", "v2", "v3", now=NOW + 50)
        assert names(take_new(store, "w4")) == ["x1", "x2"]
        assert names(take_new(store, "w5")) == ["x3", "x4"]
        store.unregister("w4", NOW + 60)
        assert names(take_new(store, "w6")) == ["y0", "y1", "y2"]
        assert names(take_new(store, "w7")) == ["y3", "y4", "y5"]
        assert names(take_new(store, "w8")) == ["y6"], "x1 and x2 may only be alone by now, and have not been ready for as long"
        assert names(take_new(store, "w9")) == ["x1"]
        assert names(take_new(store, "w10")) == ["x2"]

    @pytest.mark.parametrize("innocent", [0, 1, 2, 19, 100])
    def test_a_run_that_kills_its_workers_is_alone_after_a_logarithm_of_deaths_and_nobody_else_is_blamed(
        self, store: Store, innocent: int
    ) -> None:
        """The poisonous run kills every worker before any other run gets on: the worst case."""
        runs = ["poison", *(f"i{n:03}" for n in range(innocent))]
        for run_id in runs:
            queue_run(store, run_id)
        deaths, left = 0, set(runs)
        while left:
            worker = f"w{deaths}-{len(left)}"
            held = claim_new(store, worker)
            assert held, "somebody must be able to go on with them"
            blamed = [one.row.run_id for one in held if is_blamed(store, one.row.run_id)]
            assert set(blamed) <= {"poison"}
            if "poison" in {one.row.run_id for one in held} - set(blamed):
                deaths += 1
                store.unregister(worker, NOW)
                continue
            for one in held:
                end(store, one)
                left.discard(one.row.run_id)
        assert deaths == LIMIT + (innocent + 1).bit_length() - 1

    def test_limits_and_turns_hold_inside_a_group(self, store: Store) -> None:
        for n in range(6):
            queue_run(store, f"x{n}", tenant="x")
            queue_run(store, f"y{n}", tenant="y")
        for worker in ("w1", "w2", "w3"):
            assert len(take_new(store, worker)) == 12
            store.unregister(worker, NOW)
        assert sorted(names(take_new(store, "w4"))) == ["x0", "x1", "x2", "y0", "y1", "y2"]
        store.unregister("w4", NOW)
        sign_on(store, "w5")
        assert len(take(store, 99, worker="w5", limits={"default": Queue(concurrency=2)})) == 2

    def test_a_suspect_that_is_asked_for_by_its_id_has_to_fit_into_the_group_too(self, store: Store) -> None:
        die(store, ["r1", "r2"], "w1", "w2", "w3")
        sign_on(store, "w4")
        assert names(take(store, 1, worker="w4", run_id="r1")) == ["r1"]
        assert take(store, 1, worker="w4", run_id="r2") == []
        assert names(take(store, 1, worker=signed_on(store, "w5"), run_id="r2")) == ["r2"]

    def test_suspects_below_a_run_are_taken_in_groups_and_keep_no_other_run_below_it_waiting(self, store: Store) -> None:
        below = [f"p/{n}" for n in range(1, 5)]
        die(store, below, "w1", "w2", "w3")
        queue_run(store, "p/9", ts=NOW + 1)
        sign_on(store, "w4")
        assert names(take(store, 2, worker="w4", below="p")) == below[:2]
        assert names(take(store, 2, worker="w4", below="p")) == ["p/9"], "though two suspects have been ready for longer"

    def test_a_claim_tells_how_many_others_may_be_to_blame_for_the_death(self, store: Store) -> None:
        runs = [f"r{n}" for n in range(4)]
        die(store, runs, "w1", "w2")
        queue_run(store, "new")
        assert len(take_new(store, "w3")) == 5
        store.unregister("w3", NOW)
        take_new(store, "w4")
        assert [claim_of(store, "r0", epoch).lost_with for epoch in (1, 2, 3, 4)] == [0, 3, 3, 3], "new is no suspect, and not blamed"
        assert claim_of(store, "new", 2).lost_with == 4

    def test_a_run_that_was_given_up_has_nobody_to_blame(self, store: Store) -> None:
        die(store, ["r1", "r2"], "w1")
        one, _ = sorted(claim_new(store, "w2"), key=lambda held: held.row.run_id)
        given_up = append_to(one, ToolCallCompleted(payload(1)), row=RowChange("queued", ready_at=NOW, release=True, progress=True))
        assert store.append([given_up]) == [Committed()]
        take(store, 1, worker=signed_on(store, "w3"), run_id="r1")
        assert claim_of(store, "r1", 3) == RunClaimed("w3", name="host:w3")

    def test_the_groups_of_all_workers_are_told(self, store: Store) -> None:
        die(store, ["r1", "r2", "r3", "r4"], "w1", "w2", "w3")
        queue_run(store, "new", ts=NOW + 1)
        take_new(store, "w4")
        groups = store.suspects()
        assert {worker: (group.size, group.is_full) for worker, group in groups.items()} == {"w4": (2, True)}


def die(store: Store, runs: Iterable[str], *workers: str, now: int = NOW) -> None:
    """Let one worker after the other hold these runs, and die with all of them. Missing runs are created."""
    wanted = list(runs)
    for run_id in wanted:
        if store.get(run_id) is None:
            queue_run(store, run_id, ts=now)
    for worker in workers:
        sign_on(store, worker)
        for run_id in wanted:
            assert take(store, 1, worker=worker, run_id=run_id), run_id
        store.unregister(worker, now)


def signed_on(store: Store, worker: str) -> str:
    sign_on(store, worker)
    return worker


def claim_new(store: Store, worker: str) -> list[Claimed]:
    """What a new worker gets."""
    return claim(store, 999, worker=signed_on(store, worker))


def take_new(store: Store, worker: str) -> list[RunRow]:
    return [one.row for one in claim_new(store, worker)]


def names(rows: Iterable[RunRow]) -> list[str]:
    return sorted(row.run_id for row in rows)


def progress(store: Store, held: Claimed) -> None:
    """A call of the run has ended."""
    assert store.append([append_to(held, ToolCallCompleted(payload(1)), row=RowChange("running", progress=True))]) == [Committed()]


def end(store: Store, held: Claimed) -> None:
    assert store.append([append_to(held, RunSucceeded(payload("done")), row=RowChange("succeeded", release=True, progress=True))]) == [
        Committed()
    ]


def claim_of(store: Store, run_id: str, epoch: int) -> RunClaimed:
    (found,) = [event.body for event in store.read(run_id) if isinstance(event.body, RunClaimed) and event.epoch == epoch]
    return found


def lost_with(store: Store, run_id: str) -> int:
    row = store.get(run_id)
    assert row is not None, run_id
    return row.lost_with


def is_blamed(store: Store, run_id: str) -> bool:
    """What a worker decides when it claims the run."""
    state = RunState()
    for event in store.read(run_id):
        state.apply(event)
    return is_poison(state.crashes, state.crashes_alone, LIMIT)
