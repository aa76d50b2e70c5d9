"""What every Store must do about runs that people reopen. Part of StoreConformance."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from tests.conformance.suite_waiting import NOW, SECOND, Hand, approval, asking, child, end, found, hold, payload, post, starting, vote

from perdure.core.budget import Amounts
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    BudgetRaised,
    CancelRequested,
    Failure,
    Limits,
    OutcomeReused,
    RunAdopted,
    RunCancelled,
    RunCreated,
    RunFailed,
    RunPaused,
    RunReopened,
    RunSucceeded,
    SignalReceived,
    ThoughtRecorded,
    Unsettled,
    Usage,
)
from perdure.core.state import fold
from perdure.errors import AlreadyRunning, Conflict, NotFound, PerdureError, StoreError
from perdure.store.api import NewRun, Reopen, RowChange, Served, Store

FAILED = RunFailed(Failure("error", "ValueError", "a bug"))
LATER = NOW + SECOND


class ReopeningConformance:
    """Needs a `store` fixture."""

    def test_a_failed_run_that_is_reopened_is_ready_and_its_journal_goes_on(self, store: Store) -> None:
        failed(store, "r")
        seen = found(store, "r").seq
        store.reopen([reopening(store, "r", RunReopened("ann", 2), OutcomeReused(2), call=7)], now=LATER)
        row = found(store, "r")
        assert (row.status, row.error, row.attention, row.holder, row.ready_at, row.seq) == ("queued", None, None, None, LATER, seen + 2)
        first, second = store.read("r")[seen:]
        assert (first.body, first.cause, first.call, first.ts) == (RunReopened("ann", 2), seen, None, LATER)
        assert (second.body, second.cause, second.call) == (OutcomeReused(2), first.seq, 7)
        _register(store, "w2")
        (claimed,) = store.claim("w2", [Served("a", "1")], 1, LATER, run_id="r")
        assert claimed.row.seq == seen + 3

    def test_a_run_that_is_reopened_can_go_on_with_another_version(self, store: Store) -> None:
        failed(store, "r")
        one = reopening(store, "r", RunReopened("ann", 2), RunAdopted("2", "ann"), version="2")
        store.reopen([one], now=LATER)
        assert found(store, "r").version == "2"
        _register(store, "w2")
        assert not store.claim("w2", [Served("a", "1")], 1, LATER)
        assert len(store.claim("w2", [Served("a", "2")], 1, LATER)) == 1

    def test_a_run_that_has_succeeded_stays_so(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
        self._is_refused(store, "r", reopening(store, "r", RunReopened("ann", 2)), Conflict)

    def test_a_run_with_newer_events_is_not_reopened(self, store: Store) -> None:
        failed(store, "r")
        stale = reopening(store, "r", RunReopened("ann", 2), seen=found(store, "r").seq - 1)
        self._is_refused(store, "r", stale, Conflict)

    def test_a_held_run_is_not_reopened(self, store: Store) -> None:
        hold(store, "r")
        self._is_refused(store, "r", reopening(store, "r", RunReopened("ann", 1)), AlreadyRunning)

    def test_a_run_that_is_being_undone_is_not_reopened(self, store: Store) -> None:
        failed(store, "r")
        plan = reopening(store, "r", RunReopened("ann", 2))
        assert store.create_run(_undo(store, "r"))[1]
        self._is_refused(store, "r", plan, Conflict)

    def test_an_undo_that_was_planned_before_the_run_was_reopened_is_refused(self, store: Store) -> None:
        failed(store, "r")
        undo = _undo(store, "r")
        store.reopen([reopening(store, "r", RunReopened("ann", 2))], now=LATER)
        with pytest.raises(Conflict, match="reopened since its undo was planned"):
            store.create_run(undo)
        assert store.get("r/undo") is None

    def test_of_an_undo_and_a_reopening_at_once_one_wins(self, store: Store) -> None:
        for round_ in range(25):
            run_id = f"r{round_}"
            failed(store, run_id)
            undo, plan = _undo(store, run_id), reopening(store, run_id, RunReopened("ann", 2))
            refused: list[str] = []
            barrier = threading.Barrier(2)

            def attempt(write: Callable[[], object], barrier: threading.Barrier = barrier, refused: list[str] = refused) -> None:
                barrier.wait()
                try:
                    write()
                except Conflict as error:
                    refused.append(str(error))

            writes: list[Callable[[], object]] = [partial(store.create_run, undo), partial(store.reopen, [plan], now=LATER)]
            threads = [threading.Thread(target=attempt, args=(write,)) for write in writes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(refused) == 1
            assert (store.get(f"{run_id}/undo") is None) == (found(store, run_id).status == "queued")

    def test_a_run_that_does_not_exist_is_not_reopened(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.reopen([Reopen("nothing", 1, [(RunReopened("ann", 1), None, uuid.uuid4().hex)])], now=LATER)

    def test_of_two_people_who_reopen_a_run_at_once_one_wins(self, store: Store) -> None:
        for round_ in range(5):
            run_id = f"r{round_}"
            failed(store, run_id)
            plans = [reopening(store, run_id, RunReopened(who, 2)) for who in ("ann", "bob")]
            heard: list[str] = []
            barrier = threading.Barrier(2)

            def reopen(plan: Reopen, barrier: threading.Barrier = barrier, heard: list[str] = heard) -> None:
                barrier.wait()
                try:
                    store.reopen([plan], now=LATER)
                    heard.append("done")
                except Conflict:
                    heard.append("too late")

            people = [threading.Thread(target=reopen, args=(plan,)) for plan in plans]
            for person in people:
                person.start()
            for person in people:
                person.join()
            assert sorted(heard) == ["done", "too late"]
            assert [event.type for event in store.read(run_id)].count("run_reopened") == 1

    def test_a_family_is_reopened_as_a_whole_or_not_at_all(self, store: Store) -> None:
        parent = hold(store, "r")
        parent.write(child("r/1"))
        parent.rest("waiting")
        _register(store, "w2")
        below = _held(store, "r/1", "w2")
        below.write(FAILED, row=RowChange("failed"))
        parent = _held(store, "r", "w2")
        parent.write(FAILED, row=RowChange("failed"))
        plans = [reopening(store, run_id, RunReopened("ann", 2)) for run_id in ("r/1", "r")]
        stale = reopening(store, "r/1", RunReopened("ann", 2), seen=1)
        with pytest.raises(Conflict):
            store.reopen([plans[1], stale], now=LATER)
        assert [found(store, run_id).status for run_id in ("r", "r/1")] == ["failed", "failed"]
        store.reopen(plans, now=LATER)
        assert [found(store, run_id).status for run_id in ("r", "r/1")] == ["queued", "queued"]

    def test_approvals_that_the_agent_goes_back_behind_are_withdrawn_and_a_used_one_stays_used(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("used"), call=1)
        hand.write(asking("granted"), call=2)
        hand.write(asking("asked"), call=3)
        hand.rest("waiting_approval")
        vote(store, "used", "ann")
        vote(store, "granted", "ann", note="fine")
        hand = _held(store, "r", "w")
        hand.write(starting("used"), call=1)
        hand.rest("waiting_approval")
        store.reopen([reopening(store, "r", RunReopened("ann", 2, withdrawn=(1, 2, 3)))], now=LATER)
        rows = {name: approval(store, name) for name in ("used", "granted", "asked")}
        assert {name: row.standing.status for name, row in rows.items()} == {
            "used": "consumed",
            "granted": "withdrawn",
            "asked": "withdrawn",
        }
        assert (rows["granted"].standing.settled_by, rows["granted"].standing.note, rows["granted"].settled_at) == (None, None, LATER)
        with pytest.raises(Conflict):
            vote(store, "asked", "ann")

    def test_a_cancel_and_a_pause_that_no_worker_has_read_are_dropped_and_a_signal_is_not(self, store: Store) -> None:
        hand = hold(store, "r")
        signal = SignalReceived("go", payload("x"), by="ann")
        for body in (CancelRequested("ann"), RunPaused("ann"), signal):
            post(store, "r", body)
        hand.write(FAILED, row=RowChange("failed"))
        store.reopen([reopening(store, "r", RunReopened("ann", 2))], now=LATER)
        assert [letter.body for letter in store.unread("r")] == [signal]

    def test_what_people_have_posted_and_no_worker_has_read_is_superseded_and_not_lost(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("old", tool=None), call=1)
        hand.write(asking("kept", tool=None), call=2)
        vote(store, "old", "ann")
        vote(store, "kept", "ann")
        post(store, "r", CancelRequested("ann", "fraud"))
        post(store, "r", RunPaused("ann"))
        store.unregister("w", NOW)  # the worker leaves without having read any of this
        assert len(store.unread("r")) == 4
        store.reopen([reopening(store, "r", RunReopened("ann", 2, withdrawn=(1,)))], now=LATER)
        assert [event.type for event in store.read("r")[-4:]] == ["approval_decided", "cancel_requested", "run_paused", "run_reopened"]
        assert [(letter.call, type(letter.body)) for letter in store.unread("r")] == [(2, ApprovalDecided)]
        state = fold(store.read("r"))
        assert (state.status, state.asks[1].outcome, state.cancel, state.paused) == ("queued", "withdrawn", None, None)
        # The next post journals what is unread. Each event must be about an approval that is open.
        post(store, "r", SignalReceived("go", payload("x"), by="ann"))
        state = fold(store.read("r"))
        assert (state.asks[1].outcome, state.asks[2].outcome, found(store, "r").status) == ("withdrawn", "approved", "queued")

    def test_a_decision_that_came_after_the_end_of_the_run_is_deleted(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("old", tool=None), call=1)
        vote(store, "old", "ann")
        hand.write(FAILED, row=RowChange("failed"))
        store.reopen([reopening(store, "r", RunReopened("ann", 2, withdrawn=(1,)))], now=LATER)
        assert store.unread("r") == []
        post(store, "r", SignalReceived("go", payload("x"), by="ann"))
        assert fold(store.read("r")).asks[1].outcome == "withdrawn"

    def test_what_superseded_calls_may_have_cost_is_charged(self, store: Store) -> None:
        hand = hold(store, "r", budget=Limits(usd_micros=1000))
        hand.rest("waiting")
        body = RunReopened("ann", 2, unsettled=(Unsettled(1, 1, Usage(usd_micros=300)),))
        store.reopen([reopening(store, "r", body)], now=LATER)
        (ledger,) = store.ledgers("r")
        assert (ledger.spent, ledger.limits.usd_micros) == (Amounts(usd_micros=300), 1000)

    def test_a_budget_is_raised_in_the_commit_that_reopens_its_run(self, store: Store) -> None:
        hold(store, "r", budget=Limits(usd_micros=1000, calls=3)).write(FAILED, row=RowChange("failed"))
        store.reopen([reopening(store, "r", RunReopened("ann", 2), BudgetRaised(Limits(usd_micros=500), "ann"))], now=LATER)
        (ledger,) = store.ledgers("r")
        assert (ledger.limits.usd_micros, ledger.limits.calls) == (1500, 3)
        assert fold(store.read("r")).budget == ledger.limits

    def test_a_raise_of_a_budget_that_the_run_does_not_have_reopens_no_run_of_its_family(self, store: Store) -> None:
        hand = hold(store, "r", budget=Limits(usd_micros=1000))
        hand.write(child("r/1"))
        hand.rest("waiting")
        _register(store, "w2")
        _held(store, "r/1", "w2").write(FAILED, row=RowChange("failed"))
        _held(store, "r", "w2").write(FAILED, row=RowChange("failed"))
        before = [(found(store, run_id), store.read(run_id)) for run_id in ("r", "r/1")]
        raised = BudgetRaised(Limits(usd_micros=500), "ann")
        both = [reopening(store, "r", RunReopened("ann", 2), raised), reopening(store, "r/1", RunReopened("ann", 2), raised)]
        with pytest.raises(Conflict, match="run r/1 has no budget of its own; the budget of run r applies to it"):
            store.reopen(both, now=LATER)
        assert [(found(store, run_id), store.read(run_id)) for run_id in ("r", "r/1")] == before
        assert store.ledgers("r")[0].limits.usd_micros == 1000

    def test_a_run_that_was_ended_by_force_is_reopened(self, store: Store) -> None:
        hold(store, "r").rest("waiting")
        end(store, "r", RunCancelled("enough", forced_by="ann"))
        store.reopen([reopening(store, "r", RunReopened("ann", 2))], now=LATER)
        assert found(store, "r").status == "queued"

    def test_a_finished_run_changes_in_no_other_way(self, store: Store) -> None:
        """The database itself refuses a change of the row of a finished run that is no reopening."""
        failed(store, "r")
        hold(store, "s").write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
        head = found(store, "r").head
        # A reopening writes events. A row that only changes to 'queued', with the same seq, is no reopening.
        with pytest.raises((StoreError, PerdureError)):
            _change(store, "r", seq=found(store, "r").seq, head=head)
        with pytest.raises((StoreError, PerdureError)):
            _change(store, "s", seq=found(store, "s").seq + 1, head=head)
        assert [found(store, run_id).status for run_id in ("r", "s")] == ["failed", "succeeded"]

    def _is_refused(self, store: Store, run_id: str, plan: Reopen, error: type[Exception]) -> None:
        before = found(store, run_id), store.read(run_id)
        with pytest.raises(error):
            store.reopen([plan], now=LATER)
        assert (found(store, run_id), store.read(run_id)) == before


def failed(store: Store, run_id: str) -> None:
    hand = hold(store, run_id)
    hand.write(ThoughtRecorded("x"))
    hand.write(FAILED, row=RowChange("failed"))


def reopening(
    store: Store, run_id: str, *bodies: AnyBody, call: int | None = None, seen: int | None = None, version: str | None = None
) -> Reopen:
    """The plan to reopen the run with these events. `call` is the call of all but the first."""
    events: Sequence[tuple[AnyBody, int | None, str]] = [
        (body, None if place == 0 else call, uuid.uuid4().hex) for place, body in enumerate(bodies)
    ]
    return Reopen(run_id, found(store, run_id).seq if seen is None else seen, events, version)


def _undo(store: Store, run_id: str) -> NewRun:
    row = found(store, run_id)
    created = RunCreated(f"{run_id}/undo", "a.undo", "undo-1", row.tenant, payload(1))
    return NewRun(f"{run_id}/undo", created, uuid.uuid4().hex, LATER, "0" * 64, undoes=row.seq)


def _register(store: Store, worker: str) -> None:
    store.register(worker, "host:1", 1, NOW)


def _held(store: Store, run_id: str, worker: str) -> Hand:
    row = found(store, run_id)
    (claimed,) = store.claim(worker, [Served(row.agent, row.version)], 1, NOW, run_id=run_id)
    return Hand(store, claimed.lease, claimed.row.seq, claimed.row.head)


def _change(store: Store, run_id: str, *, seq: int, head: bytes) -> None:
    """Write the row of the run with the statement that reopens it, and with these values."""
    database = store._database  # type: ignore[attr-defined]

    def write(cursor):
        (key, *_) = cursor.one("run_key", (run_id,))
        cursor.change("reopen_run", {"id": key, "seq": seq, "head": head, "now": LATER})

    database.write(write, lambda cursor, _: False)
