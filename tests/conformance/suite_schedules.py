"""What every store must do with schedules: one change counts, and a tick, its event and its run are one commit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from msgspec import structs
from tests.conformance import suite

from perdure.core.events import CancelRequested, RunSucceeded
from perdure.core.schedule import SchedulePaused, Spec, TickStarted, decode_schedule_body
from perdure.engine.clock import Clock
from perdure.engine.schedules import ScheduleChanges, state_of
from perdure.errors import Conflict, StoreError
from perdure.settings import Settings
from perdure.store.api import Committed, RowChange, ScheduleChange, ScheduleCopy, ScheduleRow, Served, Store
from perdure.store.open import open_store

MINUTE = 60_000_000
FIRST = 1_700_000_040_000_000  # the first full minute after suite.T0: the first tick
CHANGES = ScheduleChanges(Clock(), Settings())
SERVED = [Served("report", "1")]


def add(store: Store, schedule_id: str = "s", **options: Any) -> ScheduleRow:
    change = CHANGES.set(schedule_id, None, Spec("report", every_s=60, **options), "ann", suite.T0)
    assert store.change_schedule(change) == "done"
    return change.row


def tick(store: Store, row: ScheduleRow, now: int) -> ScheduleChange:
    change = CHANGES.due(row, lambda run_id: False, now)
    assert change is not None
    return change


def row_of(store: Store, schedule_id: str = "s") -> ScheduleRow:
    row = store.schedule(schedule_id)
    assert row is not None
    return row


class ScheduleConformance:
    def test_a_schedule_is_stored_with_its_journal(self, store: Store) -> None:
        row = add(store)
        assert store.schedule("s") == row
        assert store.schedules() == [row]
        assert store.schedule("t") is None
        (event,) = store.schedule_events("s")
        assert (event.seq, event.hash, event.ts) == (1, row.head, suite.T0)
        assert decode_schedule_body(event.data).spec == state_of(row).spec
        assert row.due_at == FIRST

    def test_a_tick_its_event_and_its_run_are_one_commit(self, store: Store) -> None:
        change = tick(store, add(store), FIRST)
        assert store.change_schedule(change) == "done"
        run = store.get("s@2023-11-14T22:14:00Z")
        assert run is not None
        assert (run.actor, run.version, run.status) == ("schedule:s", "", "queued")
        assert row_of(store) == change.row
        assert change.row.due_at == FIRST + MINUTE
        assert [one.seq for one in store.schedule_events("s")] == [1, 2]
        assert [one.seq for one in store.schedule_events("s", after=1)] == [2]

    def test_of_two_workers_that_start_the_same_tick_one_does(self, store: Store) -> None:
        row = add(store)
        assert store.change_schedule(tick(store, row, FIRST)) == "done"
        assert store.change_schedule(tick(store, row, FIRST)) == "moved_on"
        assert len(store.schedule_events("s")) == 2
        assert len(store.list()) == 1

    def test_of_many_threads_that_start_the_same_tick_one_does(self, store: Store) -> None:
        row = add(store)
        answers: list[str] = []
        go = threading.Barrier(4)

        def start() -> None:
            change = tick(store, row, FIRST)
            go.wait()
            answers.append(store.change_schedule(change))

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answers) == ["done", "moved_on", "moved_on", "moved_on"]
        assert len(store.list()) == 1

    def test_of_two_workers_that_declare_the_same_schedule_one_does(self, store: Store) -> None:
        add(store)
        again = CHANGES.set("s", None, Spec("report", every_s=30), "bob", suite.T0)
        assert store.change_schedule(again) == "moved_on"
        assert state_of(row_of(store)).spec.every_s == 60

    def test_a_tick_of_a_schedule_that_a_person_has_paused_meanwhile_starts_nothing(self, store: Store) -> None:
        row = add(store)
        late = tick(store, row, FIRST)
        assert store.change_schedule(CHANGES.change("s", row, [SchedulePaused("ann")], FIRST)) == "done"
        assert store.change_schedule(late) == "moved_on"
        assert store.list() == []

    def test_if_the_run_id_is_taken_nothing_is_written(self, store: Store) -> None:
        row = add(store)
        store.create_run(suite.new_run("s@2023-11-14T22:14:00Z"))
        change = tick(store, row, FIRST)
        assert store.change_schedule(change) == "taken"
        assert row_of(store) == row
        assert len(store.schedule_events("s")) == 1
        assert store.change_schedule(CHANGES.taken(row, change, FIRST)) == "done"
        assert "already" in str(state_of(row_of(store)).skipped)
        assert row_of(store).due_at == FIRST + MINUTE

    def test_the_run_before_is_cancelled_in_the_same_commit(self, store: Store) -> None:
        row = add(store, overlap="cancel")
        assert store.change_schedule(tick(store, row, FIRST)) == "done"
        change = CHANGES.due(row_of(store), lambda run_id: True, FIRST + MINUTE)
        assert change is not None
        assert store.change_schedule(change) == "done"
        first = store.read("s@2023-11-14T22:14:00Z")
        assert isinstance(first[-1].body, CancelRequested)
        assert first[-1].body.by == "schedule:s"
        run = store.get("s@2023-11-14T22:15:00Z")
        assert run is not None
        assert run.status == "queued"

    def test_the_next_schedules_are_those_of_served_agents_and_queues(self, store: Store) -> None:
        add(store, "late", queue="other")
        add(store, "soon")
        soon = row_of(store, "soon")
        assert [row.schedule_id for row in store.next_schedules(SERVED)] == ["late", "soon"]
        assert [row.schedule_id for row in store.next_schedules(SERVED, ["default"])] == ["soon"]
        assert store.next_schedules([Served("other", "1")]) == []
        assert store.change_schedule(CHANGES.change("soon", soon, [SchedulePaused("ann")], suite.T0)) == "done"
        assert [row.schedule_id for row in store.next_schedules(SERVED)] == ["late"]

    def test_a_tick_that_waits_for_a_run_is_not_due_before_that_run_has_ended(self, store: Store) -> None:
        row = add(store, overlap="queue")
        assert store.change_schedule(tick(store, row, FIRST)) == "done"
        assert store.next_schedules(SERVED) == []
        run_id = "s@2023-11-14T22:14:00Z"
        suite.register(store, "w")
        (claimed,) = store.claim("w", SERVED, 1, FIRST, run_id=run_id)
        held = suite.Held.of(claimed)
        done = held.append(RunSucceeded(suite.payload("done")), row=RowChange("succeeded", release=True))
        assert store.append([done]) == [Committed()]
        assert [one.schedule_id for one in store.next_schedules(SERVED)] == ["s"]

    def test_schedules_are_taken_in_once_and_another_one_under_the_same_id_is_a_conflict(self, store: Store) -> None:
        row = add(store)
        assert store.change_schedule(tick(store, row, FIRST)) == "done"
        copy = ScheduleCopy(row_of(store), store.schedule_events("s"))
        target = open_store("sqlite://")
        try:
            assert target.take_in_schedules([copy]) == 1
            assert target.take_in_schedules([copy]) == 0
            assert target.schedules() == store.schedules()
            assert target.schedule_events("s") == store.schedule_events("s")
            assert target.missing_schedule_heads() == []
            assert target.unchained_schedules() == {}
            with pytest.raises(Conflict, match="another schedule s"):
                target.take_in_schedules([ScheduleCopy(structs.replace(copy.row, head=b"x" * 32), copy.events)])
        finally:
            target.close()

    def test_a_closed_journal_starts_no_tick(self, store: Store) -> None:
        row = add(store)
        store.close_journal("sqlite:///elsewhere.db", by="ann", now=suite.T0, lease_us=suite.LEASE_US)
        with pytest.raises(StoreError, match="moved"):
            store.change_schedule(tick(store, row, FIRST))
        with pytest.raises(StoreError, match="moved"):
            add(store, "another")
        assert store.schedules() == [row]

    def test_each_change_of_a_schedule_is_in_the_journal_wide_chain(self, store: Store) -> None:
        row = add(store)
        assert store.change_schedule(tick(store, row, FIRST)) == "done"
        entries = [entry for entry in store.chain((-(2**31), 0)) if entry.run < 0]
        assert [(entry.seq, entry.run_id) for entry in sorted(entries, key=lambda one: one.seq)] == [(1, "schedule s"), (2, None)]
        assert store.missing_schedule_heads() == []
        assert store.unchained_schedules() == {}
        assert store.missing_heads() == []

    def test_the_event_of_a_tick_says_which_run_it_started(self, store: Store) -> None:
        assert store.change_schedule(tick(store, add(store), FIRST)) == "done"
        body = decode_schedule_body(store.schedule_events("s")[1].data)
        assert body == TickStarted(FIRST, "s@2023-11-14T22:14:00Z", FIRST + MINUTE, FIRST + MINUTE)
