"""What every Store must do about moving to another database and about retention. Part of StoreConformance."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.conformance.suite_waiting import (
    HOUR,
    NOW,
    approval,
    asking,
    child,
    create,
    end,
    found,
    hand_of,
    hold,
    payload,
    post,
    starting,
    tell_all,
    vote,
)

from perdure.core.budget import Amounts
from perdure.core.codec import pack
from perdure.core.events import (
    AttentionNeeded,
    CancelRequested,
    Failure,
    Limits,
    RunCreated,
    RunFailed,
    RunPaused,
    RunSucceeded,
    SignalReceived,
    ThoughtRecorded,
    ToolCallCompleted,
)
from perdure.core.identity import genesis, link
from perdure.core.rate import Rate
from perdure.errors import AlreadyRunning, Conflict, InvalidInput, StoreCorrupt, StoreError
from perdure.store.api import Charge, Committed, NewRun, RowChange, Served, Store, Whole
from perdure.store.open import open_store
from perdure.store.transfer import Copying

ENDED = ("succeeded", "failed", "cancelled")
LEASE_US = 30_000_000
ELSEWHERE = "postgresql://elsewhere/journal"
LONG = b'"' + b"x" * 70_000 + b'"'  # longer than an event may hold
BOOM = Failure("error", "E", "NUL \0, ü and \u202e")


class MovingConformance:
    @pytest.fixture
    def other(self) -> Iterator[Store]:
        opened = open_store("sqlite://")
        yield opened
        opened.close()

    # -- a journal moves ----------------------------------------------------------------------------------------------
    def test_a_journal_arrives_whole_in_another_database(self, store: Store, other: Store) -> None:
        plant(store)
        before = everything(store)
        copied = Copying(store, other, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert (copied.runs, copied.blobs, copied.damaged) == (len(before), 1, ())
        assert everything(other) == before
        assert everything(store) == before
        assert_sound(store)
        assert_sound(other)
        moved = store.moved()
        assert moved is not None
        assert (moved.to_url, moved.by, moved.done) == (ELSEWHERE, "ann", True)

    def test_a_journal_arrives_whole_from_another_database(self, store: Store, other: Store) -> None:
        plant(other)
        before = everything(other)
        Copying(other, store, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert everything(store) == before
        assert_sound(store)
        assert store.blob(hashlib.sha256(LONG).hexdigest()) == LONG

    def test_what_has_arrived_goes_on_where_it_is_now(self, store: Store, other: Store) -> None:
        plant(other)
        Copying(other, store, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert vote(store, "ap", "bob").standing.status == "approved", "ann's vote has come along"
        hand = hold(store, "asks")
        assert hand.write(starting("ap"), call=1) == Committed()
        assert approval(store, "ap").status == "consumed"
        assert post(store, "signalled", SignalReceived("t", payload(1), "ann", key="k"))
        assert found(store, "signalled").seq == found(other, "signalled").seq, "a key that it has had before is no news"
        hold(store, "family/1").write(RunSucceeded(payload(2)), row=RowChange("succeeded"))
        assert "child_finished" in [event.type for event in store.read("family")]
        hand = hold(store, "family")
        hand.write(ThoughtRecorded("x"), charge=Charge(reserved=Amounts(), spent=Amounts(usd_micros=1)))
        (ledger,) = store.ledgers("family")
        assert (ledger.spent, ledger.reserved) == (Amounts(usd_micros=8), Amounts(calls=2))
        hand.write(RunSucceeded(payload(3)), row=RowChange("succeeded"))
        (ledger,) = store.ledgers("family")
        assert ledger.reserved == Amounts(), "what was reserved over there is given back here"
        assert_sound(store)

    def test_ready_runs_keep_their_time_their_line_and_their_crashes(self, store: Store, other: Store) -> None:
        create(other, "later", not_before=NOW + HOUR, priority=3)
        other.register("w", "host:1", 1, NOW)
        hold(other, "lost")
        hand_of(other, "lost")
        other.unregister("w", NOW)
        Copying(other, store, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert (found(store, "later").ready_at, found(store, "later").priority) == (NOW + HOUR, 3)
        assert found(store, "lost").crashes == 1
        store.register("v", "host:1", 1, NOW)
        (claimed,) = store.claim("v", [Served("a", "1")], 9, NOW, queues=["q"])
        assert (claimed.row.run_id, claimed.row.crashes, claimed.row.epoch) == ("lost", 2, 3)
        assert store.next_ready([Served("a", "1")], ["q"]) == NOW + HOUR

    def test_runs_that_were_lost_together_remember_it(self, store: Store, other: Store) -> None:
        for run_id in ("r1", "r2", "r3"):
            hold(other, run_id)
        other.unregister("w", NOW)
        Copying(other, store, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert [found(store, run_id).lost_with for run_id in ("r1", "r2", "r3")] == [2, 2, 2]

    def test_a_second_call_finds_everything_there(self, store: Store, other: Store) -> None:
        plant(store)
        copying = Copying(store, other, to_url=ELSEWHERE, by="ann")
        first = copying.move(now=NOW, lease_us=LEASE_US)
        hold(other, "ready").write(ThoughtRecorded("over there"))
        again = copying.move(now=NOW, lease_us=LEASE_US)
        assert (again.runs, again.there) == (0, first.runs)

    def test_an_id_that_means_another_run_over_there_stops_it_before_anything_is_written(self, store: Store, other: Store) -> None:
        plant(store)
        create(other, "ready", actor="somebody else")
        with pytest.raises(Conflict, match=r"run ready is also in "):
            Copying(store, other, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert store.moved() is None
        assert [row.run_id for row in other.list()] == ["ready"]

    def test_a_family_that_is_there_in_part_stops_it(self, store: Store, other: Store) -> None:
        plant(store)
        other.take_in(lambda: [store.wholes(["family"])])
        with pytest.raises(Conflict, match=r"run family is in .* without family/1 of its family"):
            Copying(store, other, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert store.moved() is None

    def test_history_alone_leaves_the_source_open(self, store: Store, other: Store) -> None:
        plant(store)
        before = everything(store)
        Copying(store, other, to_url=ELSEWHERE, by="ann").history()
        assert {row.run_id for row in other.list()} == {"blob", "failed", "late"}
        assert other.next_notice() is None, "who should hear of it hears of it once"
        assert everything(store) == before
        assert store.moved() is None
        assert_sound(other)

    def test_a_move_that_was_interrupted_can_be_taken_back(self, store: Store, other: Store) -> None:
        plant(store)
        copying = Copying(store, other, to_url=ELSEWHERE, by="ann")
        before = everything(store)
        store.close_journal(ELSEWHERE, by="ann", now=NOW, lease_us=LEASE_US)
        other.take_in(lambda: [store.wholes(["family", "family/1"]), store.wholes(["asks"])])
        assert copying.abandon(now=NOW) > 0
        assert store.moved() is None
        assert other.list() == []
        create(store, "goes on")
        assert everything(store)[:-1] == before
        assert copying.move(now=NOW, lease_us=LEASE_US).runs == len(before) + 1, "the ids of what was taken back are free"
        assert_sound(other)

    def test_a_move_of_which_something_has_gone_on_cannot_be_taken_back(self, store: Store, other: Store) -> None:
        plant(other)
        other.close_journal(ELSEWHERE, by="ann", now=NOW, lease_us=LEASE_US)
        store.take_in(lambda: [other.wholes(["ready"]), other.wholes(["asks"])])
        hold(store, "ready")
        copying = Copying(other, store, to_url=ELSEWHERE, by="ann")
        with pytest.raises(Conflict, match="run ready has continued"):
            copying.abandon(now=NOW)
        assert other.moved() is not None
        gone_on = store.delete_copies(
            [[("asks", found(store, "asks").seq, found(store, "asks").head)], [("ready", 1, b"")]], by="ann", now=NOW
        )
        assert gone_on == ["ready"]
        assert store.get("asks") is not None, "all of it or nothing"

    def test_a_run_that_is_there_by_now_is_not_taken_in_again(self, store: Store, other: Store) -> None:
        plant(other)
        before = everything(other)
        store.take_in(lambda: [other.wholes(["ready"])])
        with pytest.raises(Conflict, match="run ready was created in the target"):
            store.take_in(lambda: [other.wholes(["asks"]), other.wholes(["ready"])])
        assert everything(store) == [whole for whole in before if whole.run_id == "ready"]

    # -- a closed journal ---------------------------------------------------------------------------------------------
    @pytest.mark.parametrize(
        "write",
        [
            lambda store: create(store, "new"),
            lambda store: store.register("v", "host:2", 2, NOW),
            lambda store: post(store, "ready", CancelRequested("ann")),
            lambda store: end(store, "ready", RunFailed(BOOM)),
            lambda store: vote(store, "ap", "bob"),
            lambda store: store.take_notices(NOW + HOUR, 9, 1),
            lambda store: store.take_in(lambda: [[renamed(store.wholes(["ready"])[0], "new")]]),
            lambda store: store.prune(["late"], NOW + HOUR, by="ann", now=NOW),
        ],
        ids=["create", "register", "post", "end", "decide", "take a notice", "take in", "prune"],
    )
    def test_a_closed_journal_refuses_to(self, store: Store, write: Callable[[Store], object]) -> None:
        plant(store)
        store.close_journal(ELSEWHERE, by="ann", now=NOW, lease_us=LEASE_US)
        before = everything(store)
        for state in ("is being moved to", "was moved to"):
            with pytest.raises(StoreError, match=f"this journal {state} {ELSEWHERE}"):
                write(store)
            store.finish_move()
        assert everything(store) == before
        assert_sound(store)

    def test_a_claim_that_was_registered_before_the_journal_was_closed_is_refused(self, store: Store) -> None:
        create(store, "r")
        store.register("w", "host:1", 1, NOW)
        with pytest.raises(AlreadyRunning, match=r"host:1 \(0 runs\)"):
            store.close_journal(ELSEWHERE, by="ann", now=NOW, lease_us=LEASE_US)
        self.age(store, HOUR)
        store.close_journal(ELSEWHERE, by="ann", now=NOW + HOUR, lease_us=LEASE_US)
        with pytest.raises(StoreError, match="this journal is being moved"):
            store.claim("w", [Served("a", "1")], 1, NOW + HOUR)
        assert found(store, "r").holder is None

    def test_a_worker_that_slept_while_the_journal_was_closed_writes_nothing(self, store: Store) -> None:
        hand = hold(store, "r")
        self.age(store, HOUR)
        store.close_journal(ELSEWHERE, by="ann", now=NOW + HOUR, lease_us=LEASE_US)
        assert found(store, "r").holder is None
        before = everything(store)
        assert not goes_through(lambda: hand.write(ThoughtRecorded("late")))
        assert not goes_through(lambda: hand.write(RunSucceeded(payload(1)), row=RowChange("succeeded")))
        assert everything(store) == before

    def test_a_journal_is_closed_once_and_for_one_place(self, store: Store) -> None:
        first = store.close_journal(ELSEWHERE, by="ann", now=NOW, lease_us=LEASE_US)
        assert store.close_journal(ELSEWHERE, by="bob", now=NOW + 1, lease_us=LEASE_US) == first == store.moved()
        with pytest.raises(Conflict, match=r"cannot be moved to sqlite:///b\.db as well"):
            store.close_journal("sqlite:///b.db", by="bob", now=NOW, lease_us=LEASE_US)
        store.reopen_journal()
        assert store.moved() is None
        create(store, "r")
        store.close_journal(ELSEWHERE, by="ann", now=NOW, lease_us=LEASE_US)
        store.finish_move()
        with pytest.raises(Conflict, match="a finished move cannot be undone"):
            store.reopen_journal()

    def test_a_journal_does_not_move_to_itself(self, store: Store) -> None:
        plant(store)
        with pytest.raises(InvalidInput, match="the very journal that is to be moved"):
            Copying(store, store, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert store.moved() is None

    def test_places_in_the_lines_of_rates_come_along(self, store: Store, other: Store) -> None:
        rate = Rate(1, 1.0, key="api")
        for at in (NOW, NOW + 1_000_000):
            assert store.admit(rate, NOW) == at
        Copying(store, other, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert other.admit(rate, NOW) == NOW + 2_000_000
        store.take_in_rates(other.rates())
        store.take_in_rates([])
        assert store.admit(rate, NOW) == NOW + 3_000_000

    # -- retention ----------------------------------------------------------------------------------------------------
    def test_a_family_that_is_over_is_pruned_whole_and_leaves_tombstones(self, store: Store) -> None:
        over(store, "p", notify=False)
        create(store, "stays")
        (row, below) = found(store, "p"), found(store, "p/1")
        (family,) = store.prunable(NOW + HOUR, ENDED)
        assert (family.root, family.runs, family.events) == ("p", 2, row.seq + below.seq)
        pruned = store.prune(["p"], NOW + HOUR, by="ann", now=NOW + 5)
        assert (pruned.families, pruned.runs, pruned.events, pruned.blobs) == (1, 2, row.seq + below.seq, 1)
        assert (store.get("p"), store.get("p/1"), store.read("p"), store.approval("ap-p"), store.ledgers("p")) == (None, None, [], None, [])
        with pytest.raises(StoreCorrupt, match="missing"):
            store.blob(hashlib.sha256(LONG).hexdigest())
        tombstone = store.tombstone("p")
        assert tombstone is not None
        assert (tombstone.agent, tombstone.tenant, tombstone.status, tombstone.events, tombstone.head) == (
            row.agent,
            row.tenant,
            "succeeded",
            row.seq,
            row.head,
        )
        assert (tombstone.created_at, tombstone.finished_at, tombstone.pruned_at, tombstone.by) == (NOW, row.updated_at, NOW + 5, "ann")
        assert {one.run_id for _, one in store.tombstones()} == {"p", "p/1"}
        assert store.facts()["pruned"] == "2"
        assert store.prunable(NOW + HOUR, ENDED) == []
        assert_sound(store)

    def test_what_is_young_or_unfinished_or_not_told_yet_is_not_pruned(self, store: Store) -> None:
        over(store, "young", ts=NOW + HOUR)
        hold(store, "child").write(child("child/1"), RunSucceeded(payload(1)), row=RowChange("succeeded"))
        over(store, "undone")
        store.create_run(undo_of("undone"))
        create(store, "unfinished")
        over(store, "failed", status="failed")
        over(store, "untold", notify=True)
        assert [one.root for one in store.prunable(NOW + HOUR, ["succeeded"])] == []
        roots = ["young", "untold", "child", "undone", "unfinished", "nobody"]
        assert store.prune(roots, NOW + HOUR, by="ann", now=NOW).families == 0
        assert None not in [store.get(root) for root in roots[:-1]]
        tell_all(store)
        assert {one.root for one in store.prunable(NOW + HOUR, ENDED)} == {"untold", "failed"}
        assert [one.root for one in store.prunable(NOW + HOUR, ["failed"])] == ["failed"]

    def test_an_undo_is_of_the_family(self, store: Store) -> None:
        over(store, "r")
        store.create_run(undo_of("r"))
        hand = hold(store, "r/undo")
        hand.write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
        assert store.prune(["r"], NOW + HOUR, by="ann", now=NOW).runs == 2
        assert store.get("r/undo") is None

    def test_the_id_of_a_pruned_run_is_not_used_again(self, store: Store) -> None:
        over(store, "r")
        store.prune(["r"], NOW + HOUR, by="ann", now=NOW)
        for run_id in ("r", "r/undo"):
            with pytest.raises(Conflict, match=r"run r ran \(succeeded, 3 events\) and was pruned on 2023-11-14 by ann"):
                store.create_run(undo_of(run_id.partition("/")[0]) if "/" in run_id else new(run_id))
        with pytest.raises(Conflict, match=r"^the run id r is taken; choose another$"):
            create(store, "r", tenant="rival")
        assert store.list() == []

    def test_what_begins_after_a_prune_has_a_later_place_than_everything_before(self, store: Store) -> None:
        """Otherwise a reader that follows the journal would treat the run as a run that it knows."""
        over(store, "first")
        over(store, "last")
        newest = store.growing()[-1][0]
        store.prune(["last"], NOW + HOUR, by="ann", now=NOW)
        create(store, "new")
        assert [row.run_id for _, row in store.growing(newest, newest)] == ["new"]
        store.prune(["first"], NOW + HOUR, by="ann", now=NOW)
        assert [event.type for event in store.read("new")] == ["run_created"]

    def test_a_blob_that_another_family_has_put_there_too_stays(self, store: Store) -> None:
        digest = hashlib.sha256(LONG).hexdigest()
        over(store, "one", blob=True)
        over(store, "two", blob=True)
        assert store.prune(["one"], NOW + HOUR, by="ann", now=NOW).blobs == 0
        assert store.blob(digest) == LONG
        assert store.prune(["two"], NOW + HOUR, by="ann", now=NOW).blobs == 1
        assert store.missing_blobs([digest]) == [digest]

    def test_tombstones_come_along_and_keep_their_ids_taken(self, store: Store, other: Store) -> None:
        over(other, "r")
        over(other, "s")
        other.prune(["r", "s"], NOW + HOUR, by="ann", now=NOW)
        before = [one for _, one in other.tombstones()]
        for _ in range(2):
            Copying(other, store, to_url=ELSEWHERE, by="ann").move(now=NOW, lease_us=LEASE_US)
        assert [one for _, one in store.tombstones()] == before
        assert [one.run_id for _, one in store.tombstones(store.tombstones()[0][0], 1)] == ["s"]
        with pytest.raises(Conflict, match="run r ran"):
            create(store, "r")

    def test_a_run_that_ends_during_a_copy_of_finished_runs_is_no_damage(self, store: Store, other: Store) -> None:
        """A worker goes on meanwhile: what has ended after its page was read was never sent, and is not missed."""
        over(store, "first")
        hands = [hold(store, "second")]

        def progress(what: str, done: int, whole: int) -> None:
            if what == "copying" and hands:
                hands.pop().write(RunSucceeded(payload(1)), row=RowChange("succeeded"))

        copied = Copying(store, other, to_url=ELSEWHERE, by="ann", progress=progress).history()
        assert (copied.runs, copied.damaged, hands) == (1, (), [])
        assert (found(store, "second").status, other.get("second")) == ("succeeded", None)
        again = Copying(store, other, to_url=ELSEWHERE, by="ann").history()
        assert (again.runs, again.there, again.damaged) == (1, 1, ())
        assert everything(other) == everything(store)

    def test_a_family_that_is_pruned_during_a_copy_is_left_out(self, store: Store, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("perdure.store.transfer.BATCH_EVENTS", 1)  # a transaction for each family
        for run_id in ("first", "p", "third"):
            over(store, run_id)
        tell_all(store)
        left = ["p"]

        def progress(what: str, done: int, whole: int) -> None:
            if what == "copying" and left:
                assert store.prune([left.pop()], NOW + HOUR, by="ann", now=NOW).runs == 2

        copied = Copying(store, other, to_url=ELSEWHERE, by="ann", progress=progress).history()
        assert (copied.runs, copied.damaged, left) == (2, (), [])
        assert [other.get(run_id) is not None for run_id in ("first", "p", "p/1", "third")] == [True, False, False, True]
        assert everything(other) == everything(store)

    def test_a_run_that_was_pruned_after_its_move_is_not_missed(self, store: Store, other: Store) -> None:
        over(other, "r")
        copying = Copying(other, store, to_url=ELSEWHERE, by="ann")
        copying.move(now=NOW, lease_us=LEASE_US)
        store.prune(["r"], NOW + HOUR, by="ann", now=NOW)
        assert (copying.move(now=NOW, lease_us=LEASE_US).there, store.get("r")) == (1, None)

    def age(self, store: Store, us: int) -> None:
        """See StoreConformance."""


def new(run_id: str) -> NewRun:
    return NewRun(run_id, RunCreated(run_id, "a", "1", "default", payload(1)), hashlib.md5(run_id.encode()).hexdigest(), NOW, "d")


def undo_of(run_id: str) -> NewRun:
    return new(f"{run_id}/undo")


def over(store: Store, run_id: str, *, status: str = "succeeded", notify: bool = False, ts: int = NOW, blob: bool = False) -> None:
    """A run that has ended; p has a child, an approval, a budget, a signal with a key and a blob as well."""
    rich = run_id == "p"
    hand = hold(store, run_id, budget=Limits(calls=9) if rich else None)
    packed, long = pack(LONG)
    assert long is not None
    if rich:
        hand.write(asking("ap-p"), child("p/1"), call=1)
        post(store, run_id, SignalReceived("t", payload(1), "ann", key="k"))
        hold(store, "p/1").write(RunSucceeded(packed), row=RowChange("succeeded"), blobs=(long,))
    if blob:
        hand.write(ToolCallCompleted(packed), call=1, blobs=(long,))
    if notify:
        hand.write(AttentionNeeded("stuck", "x"))
    body = RunSucceeded(payload(1)) if status == "succeeded" else RunFailed(BOOM)
    assert hand.write(body, row=RowChange(status), ts=ts) == Committed()  # type: ignore[arg-type]
    if not notify:
        tell_all(store)
    store.unregister("w", NOW)


def plant(store: Store) -> None:
    """Runs of every kind, in a journal without workers."""
    packed, long = pack(LONG)
    assert long is not None
    create(store, "ready", actor="user:17", priority=2)
    asks = hold(store, "asks")
    asks.write(asking("ap", by=("ann", "bob"), quorum=2, expires_at=NOW + HOUR), call=1)
    vote(store, "ap", "ann")
    asks = hand_of(store, "asks")
    asks.rest("waiting_approval", waiting_for="ap \0")
    family = hold(store, "family", budget=Limits(usd_micros=100, calls=9))
    charge = Charge(reserved=Amounts(calls=2), spent=Amounts(usd_micros=7))
    family.write(child("family/1", Limits(calls=3)), child("family/2"), charge=charge)
    family.rest("waiting", waiting_for="children")
    signalled = hold(store, "signalled")
    post(store, "signalled", SignalReceived("t", payload("NUL \0 \ud800"), "ann", key="k"))
    signalled.rest("waiting", ready_at=NOW + HOUR)
    create(store, "paused")
    post(store, "paused", RunPaused("ann"))
    hold(store, "blob").write(RunSucceeded(packed), row=RowChange("succeeded"), blobs=(long,))
    hold(store, "failed").write(RunFailed(BOOM), row=RowChange("failed", error="NUL \0"))
    late = hold(store, "late")
    post(store, "late", CancelRequested("ann"))
    late.write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
    store.unregister("w", NOW)


def everything(store: Store) -> list[Whole]:
    """Every run with all that belongs to it, by age. Some databases hold no NUL in a text, and show it otherwise."""
    wholes = [whole for family in store.families() for whole in store.wholes([member.run_id for member in family.members])]
    return [msgspec.structs.replace(whole, run=tuple(map(shown, whole.run))) for whole in wholes]


def shown(value: object) -> object:
    return value.replace("\0", "\u2400") if isinstance(value, str) else value


def goes_through(write: Callable[[], object]) -> bool:
    try:
        return isinstance(write(), Committed)
    except StoreError:
        return False


def renamed(whole: Whole, run_id: str) -> Whole:
    return msgspec.structs.replace(whole, run=(run_id, *whole.run[1:]), events=[])


def assert_sound(store: Store) -> None:
    """Every chain leads to its run's head, and the database has nothing to complain about."""
    assert store.problems() == []
    for row in store.list():
        head = genesis(row.run_id)
        for seq, stored in enumerate(store.stored(row.run_id), 1):
            head = link(head, seq, stored.event_id.hex(), stored.ts, stored.epoch, stored.call, stored.cause, stored.data)
        assert head == row.head, row.run_id
