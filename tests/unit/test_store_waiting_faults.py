"""A COMMIT that reports an error although it took effect, and workers that die.

Nothing is decided, sent or counted twice, and no waiting run is forgotten.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest
from tests.conformance.suite_waiting import (
    HOUR,
    NOW,
    SECOND,
    approval,
    approved,
    asking,
    child,
    create,
    family,
    found,
    hold,
    payload,
    post,
    starting,
    vote,
)
from tests.conformance.suite_waiting import end as end_run
from tests.unit.store_tools import FaultyDisk, end, first_line, python, raw

from perdure.core.budget import NOTHING, Amounts
from perdure.core.events import (
    ApprovalDecided,
    ApprovalVoted,
    BudgetRaised,
    CancelRequested,
    ChildFinished,
    Event,
    Limits,
    RunCancelled,
    RunPaused,
    RunSucceeded,
    SignalReceived,
)
from perdure.core.identity import seal_all
from perdure.errors import StoreUnavailable
from perdure.settings import Queue
from perdure.store.api import Append, ApprovalFilter, Charge, Committed, Refused, RowChange, Served
from perdure.store.sqlite.store import SqliteStore

HOLDER = """
import sys, time
from perdure.store.api import Served
from perdure.store.open import open_store
store = open_store(f"sqlite:///{sys.argv[1]}")
store.register("doomed", "host:9", 9, int(sys.argv[3]))
store.claim("doomed", [Served("a", "1")], 1, int(sys.argv[3]), run_id=sys.argv[2])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    faulty = FaultyDisk()
    yield faulty
    faulty.unregister()


@pytest.fixture
def store(tmp_path: Path, disk: FaultyDisk) -> Iterator[SqliteStore]:
    opened = SqliteStore("sqlite:", tmp_path / "journal.db")
    yield opened
    opened.close()


def lie_about_the_next_commit(store: SqliteStore) -> None:
    """The commit takes effect, but COMMIT reports an error."""
    writer = store._database._writer
    assert writer is not None
    writer.set_wal_hook(lambda *_: apsw.SQLITE_IOERR)


@pytest.mark.parametrize("held", [False, True])
def test_a_decision_whose_commit_reported_an_error_is_found(store: SqliteStore, held: bool) -> None:
    hand = hold(store, "r")
    hand.write(asking("ap"), call=1)
    if not held:
        hand.rest("waiting_approval")
    lie_about_the_next_commit(store)
    assert vote(store, "ap", "ann").standing.status == "approved"
    assert approval(store, "ap").standing.status == "approved"
    assert len(store.inbox("w")) == held


@pytest.mark.parametrize(
    "write",
    [
        lambda store: post(store, "r", SignalReceived("t", payload(1), "ann", key="k")),
        lambda store: post(store, "r", SignalReceived("t", payload(1), "ann", key="had before")),
        lambda store: post(store, "r", BudgetRaised(Limits(calls=1), "ann")),
        lambda store: end_run(store, "r", RunCancelled(forced_by="ann")),
        lambda store: create(store, "another"),
        lambda store: store.take_notices(NOW, 9, SECOND),
        lambda store: store.notice_failed(1, next_at=NOW + 5, error="x"),
        lambda store: store.notice_done(1),
    ],
)
def test_a_write_whose_commit_reported_an_error_is_found(store: SqliteStore, write: Callable[[SqliteStore], object]) -> None:
    hand = hold(store, "r", budget=Limits(calls=1))
    hand.write(asking("ap"), call=1)
    hand.rest("waiting")
    post(store, "r", SignalReceived("t", payload(1), "ann", key="had before"))
    lie_about_the_next_commit(store)
    write(store)


def test_a_post_whose_commit_reported_an_error_is_found_though_its_holder_has_read_it_meanwhile(store: SqliteStore, tmp_path: Path) -> None:
    holders = SqliteStore("sqlite:", tmp_path / "journal.db")
    hand = hold(holders, "r")
    writer, sent = store._database._writer, uuid.uuid4().hex
    assert writer is not None

    def holder_is_faster(*_: object) -> int:
        """The commit took effect, and before the sender can look the holder has journaled what came and emptied its inbox."""
        (letter,) = holders.inbox("w")
        assert letter.body is not None
        event = Event(hand.seq + 1, letter.event_id, NOW, hand.lease.epoch, letter.call, None, letter.body)
        append = Append(hand.lease, hand.seq, tuple(seal_all(hand.head, [event])), consumed=(letter.inbox_id,))
        assert holders.append([append]) == [Committed()]
        return int(apsw.SQLITE_IOERR)

    writer.set_wal_hook(holder_is_faster)
    signal = SignalReceived("t", payload(1), "ann")
    assert store.post("r", None, signal, event_id=sent, now=NOW, expect=lambda row: None) is False
    assert [(event.event_id, event.body) for event in store.read("r")][-1] == (sent, signal)
    assert store.unread("r") == []
    holders.close()


def test_an_approval_that_expires_while_another_process_has_the_write_lock_starts_nothing(store: SqliteStore, tmp_path: Path) -> None:
    hand = approved(store, expires_at=NOW + HOUR)
    other = raw(tmp_path / "journal.db")
    other.execute("BEGIN IMMEDIATE")
    letting_go = threading.Timer(0.4, lambda: other.execute("COMMIT"))
    letting_go.start()
    (answer,) = store.append([hand.sealed(starting("ap"), call=1, at=NOW + HOUR - 200_000)])
    letting_go.join()
    other.close()
    assert isinstance(answer, Refused)
    assert answer.why.startswith("approval ap has expired")


def test_a_run_whose_dead_holder_took_the_last_place_of_its_queue_is_claimed_by_its_name(store: SqliteStore, tmp_path: Path) -> None:
    create(store, "r")
    create(store, "another")
    store.register("w", "host:1", 1, NOW)
    limits = {"q": Queue(concurrency=1)}
    holder = python(HOLDER, tmp_path / "journal.db", "r", NOW)
    try:
        assert first_line(holder) == "held"
    finally:
        end(holder)
    assert store.claim("w", [Served("a", "1")], 1, NOW, run_id="another", limits=limits) == []
    assert len(store.claim("w", [Served("a", "1")], 1, NOW, run_id="r", limits=limits)) == 1


def test_a_decision_that_was_not_acknowledged_is_not_there_and_can_be_made_again(store: SqliteStore, disk: FaultyDisk) -> None:
    hand = hold(store, "r")
    hand.write(asking("ap"), call=1)
    hand.rest("waiting_approval")
    disk.fail_syncs = 1
    with pytest.raises(StoreUnavailable):
        vote(store, "ap", "ann")
    assert approval(store, "ap").standing.status == "pending"
    vote(store, "ap", "bob", granted=False)
    assert [event.body for event in store.read("r") if isinstance(event.body, ApprovalDecided)] == [
        ApprovalDecided("ap", False, "bob", approval(store, "ap").standing.request.digest)
    ]


def test_an_append_with_consequences_that_was_not_acknowledged_goes_in_later_with_all_of_them(store: SqliteStore, disk: FaultyDisk) -> None:
    hand = approved(store)
    append = hand.sealed(starting("ap"), child("r/2"), asking("second"), call=1)
    disk.fail_syncs = 1
    with pytest.raises(StoreUnavailable):
        store.append([append])
    assert (approval(store, "ap").standing.status, store.get("r/2"), store.approval("second")) == ("approved", None, None)
    assert store.append([append]) == [Committed()]
    assert (approval(store, "ap").standing.status, found(store, "r/2").parent) == ("consumed", "r")
    assert [row.approval for row in store.approvals(ApprovalFilter())] == ["second"]


def test_an_append_whose_commit_reported_an_error_is_charged_once(store: SqliteStore) -> None:
    hand = hold(store, "r", budget=Limits(usd_micros=9))
    append = hand.sealed(child("r/1"), charge=Charge(NOTHING, Amounts(usd_micros=2)))
    lie_about_the_next_commit(store)
    assert store.append([append]) == [Committed()]
    assert store.ledgers("r/1")[0].spent == Amounts(usd_micros=2)


# -- holders that die --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "ready"),
    [
        (CancelRequested("ann"), "cancelling", True),
        (RunPaused("ann"), "paused", False),
        (BudgetRaised(Limits(calls=1), "ann"), "queued", True),
    ],
)
def test_what_reaches_a_run_whose_worker_was_killed_is_journaled_and_the_run_is_not_forgotten(
    store: SqliteStore, tmp_path: Path, body: CancelRequested | RunPaused | BudgetRaised, status: str, ready: bool
) -> None:
    create(store, "r", budget=Limits(calls=1))
    holder = python(HOLDER, tmp_path / "journal.db", "r", NOW)
    try:
        assert first_line(holder) == "held"
        assert post(store, "r", SignalReceived("t", payload(1), "ann")) is False
    finally:
        end(holder)
    assert post(store, "r", body, now=NOW + 9) is True
    row = found(store, "r")
    assert (row.status, row.ready_at, row.holder) == (status, NOW + 9 if ready else None, None)
    if status == "paused":
        return
    claimed = hold(store, "r")
    assert claimed.lease.epoch == 2
    assert len(store.inbox("w")) == 1, "what the dead one has not read is there for the next"


def test_a_vote_for_a_run_whose_worker_was_killed_makes_it_ready(store: SqliteStore, tmp_path: Path) -> None:
    hold(store, "r").write(asking("ap", quorum=2), call=1)
    store.unregister("w", NOW)
    holder = python(HOLDER, tmp_path / "journal.db", "r", NOW)
    try:
        assert first_line(holder) == "held"
    finally:
        end(holder)
    vote(store, "ap", "ann", now=NOW + 3)
    assert isinstance(store.read("r")[-1].body, ApprovalVoted)
    assert (found(store, "r").status, found(store, "r").ready_at) == ("queued", NOW + 3)


def test_a_child_that_ends_after_its_parents_worker_was_killed_wakes_the_parent(store: SqliteStore, tmp_path: Path) -> None:
    family(store, parent="waiting")
    holder = python(HOLDER, tmp_path / "journal.db", "p", NOW)
    try:
        assert first_line(holder) == "held"
    finally:
        end(holder)
    hold(store, "p/1").write(RunSucceeded(payload(1)), ts=NOW + 4, row=RowChange("succeeded"))
    assert isinstance(store.read("p")[-1].body, ChildFinished)
    assert (found(store, "p").status, found(store, "p").ready_at) == ("queued", NOW + 4)


def test_a_notice_whose_event_was_damaged_does_not_keep_the_others_back(store: SqliteStore, tmp_path: Path) -> None:
    hand = hold(store, "r")
    hand.write(asking("one"), asking("two"), call=1)
    with raw(tmp_path / "journal.db") as other:
        other.execute("DROP TRIGGER perdure_events_no_update")
        other.execute("UPDATE perdure_events SET data = '{}' WHERE seq = 3")
    assert [notice.event.seq for notice in store.take_notices(NOW, 9, SECOND)] == [4]
