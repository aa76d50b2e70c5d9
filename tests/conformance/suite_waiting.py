"""What every Store must do about waiting: approvals, signals, children, budgets, costs and notices. Part of StoreConformance."""

from __future__ import annotations

import hashlib
import threading
import uuid
from functools import partial
from typing import Any

import msgspec
import pytest

from perdure.core.approval import Expire, Standing, Vote, Withdraw
from perdure.core.budget import NOTHING, Amounts
from perdure.core.codec import decode, digest, encode, pack
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalVoted,
    AttentionNeeded,
    BudgetExceeded,
    BudgetRaised,
    CancelRequested,
    ChildFinished,
    ChildStarted,
    Event,
    Failure,
    Limits,
    ModelCallInitiated,
    Reason,
    RunAdopted,
    RunCancelled,
    RunCreated,
    RunFailed,
    RunPaused,
    RunReleased,
    RunRequeued,
    RunSucceeded,
    RunUnpaused,
    SignalReceived,
    StatusReported,
    ThoughtRecorded,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
    Unsettled,
    Usage,
)
from perdure.core.identity import seal_all
from perdure.errors import AlreadyRunning, Conflict, InvalidInput, NotFound, NotPermitted, RunEnded
from perdure.store.api import (
    Append,
    Appended,
    ApprovalFilter,
    ApprovalRow,
    Charge,
    Committed,
    CostRow,
    Current,
    Lease,
    Ledger,
    NewRun,
    OpenAttempt,
    Refused,
    RowChange,
    RunRow,
    Served,
    Status,
    Store,
)

NOW = 1_700_000_000_000_000
SECOND = 1_000_000
HOUR = 3_600 * SECOND
ARGS = {"order": "o-81", "cents": 500}
ASKED = digest(encode(ARGS))


class WaitingConformance:
    """Needs a `store` fixture."""

    # -- approvals ----------------------------------------------------------------------------------------------------

    def test_an_approval_that_is_asked_for_is_pending_with_the_run_it_belongs_to(self, store: Store) -> None:
        hand = hold(store, "r", tenant="acme", actor="user:17")
        request = asking("ap", by=("ann", "role:finance"), expires_at=NOW + HOUR, reason="over $50")
        assert hand.write(request, call=4, ts=NOW + 1) == Committed()
        row = approval(store, "ap")
        assert (row.run_id, row.call, row.agent, row.tenant, row.actor, row.asked_at) == ("r", 4, "a", "acme", "user:17", NOW + 1)
        assert (row.standing, row.settled_at) == (Standing(request), None)
        assert store.approval("nothing") is None

    def test_approvals_are_listed_by_what_expires_first_and_filtered(self, store: Store) -> None:
        for run_id, tenant in (("r1", "t1"), ("r2", "t2")):
            hand = hold(store, run_id, tenant=tenant)
            hand.write(asking(f"{run_id}-never"), call=1)
            hand.write(asking(f"{run_id}-late", expires_at=NOW + 2 * HOUR), call=2, ts=NOW + 1)
            hand.write(asking(f"{run_id}-soon", expires_at=NOW + HOUR), call=3, ts=NOW + 2)
        vote(store, "r2-soon", "ann")

        def ids(**wanted: Any) -> list[str]:
            return [row.approval for row in store.approvals(ApprovalFilter(**wanted))]

        assert ids() == ["r1-soon", "r1-late", "r2-late", "r1-never", "r2-never"]
        assert ids(limit=2) == ["r1-soon", "r1-late"]
        assert ids(tenant="t2") == ["r2-late", "r2-never"]
        assert ids(run_id="r1") == ["r1-soon", "r1-late", "r1-never"]
        assert ids(status="approved") == ["r2-soon"]
        assert ids(status=None, tenant="t2") == ["r2-soon", "r2-late", "r2-never"]

    def test_a_decision_is_in_the_journal_and_wakes_the_run_in_the_same_commit(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap"), call=1)
        asked_seq = hand.seq
        hand.rest("waiting_approval", waiting_for="approval ap")
        row = vote(store, "ap", "ann", note="fine", now=NOW + 7)
        assert (row.standing.status, row.standing.digest, row.standing.settled_by, row.settled_at) == ("approved", ASKED, "ann", NOW + 7)
        assert approval(store, "ap") == row
        event = store.read("r")[-1]
        assert event.body == ApprovalDecided("ap", True, "ann", ASKED, note="fine")
        assert (event.call, event.cause, event.ts) == (1, asked_seq, NOW + 7)
        run = found(store, "r")
        assert (run.status, run.ready_at, run.waiting_for, run.seq) == ("queued", NOW + 7, None, event.seq)

    def test_one_decision_counts_and_the_second_one_learns_of_the_first(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap"), call=1)
        hand.rest("waiting_approval")
        vote(store, "ap", "ann", granted=False, note="no")
        before = approval(store, "ap"), store.read("r")
        with pytest.raises(Conflict, match="settled: rejected by ann"):
            vote(store, "ap", "bob")
        assert (approval(store, "ap"), store.read("r")) == before
        assert before[0].standing.status == "rejected"

    def test_a_decision_while_the_run_is_held_goes_to_its_holder_and_is_still_the_only_one(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap"), call=1)
        vote(store, "ap", "ann")
        with pytest.raises(Conflict, match="settled: approved by ann"):
            vote(store, "ap", "bob", granted=False)
        (letter,) = store.inbox("w")
        assert (letter.run_id, letter.call, letter.body) == ("r", 1, ApprovalDecided("ap", True, "ann", ASKED))
        assert found(store, "r").seq == hand.seq
        assert approval(store, "ap").standing.status == "approved"

    def test_a_decision_is_not_found_in_another_tenant_and_refused_after_the_end(self, store: Store) -> None:
        hand = hold(store, "r", tenant="acme")
        hand.write(asking("ap"), call=1)
        with pytest.raises(NotFound, match="no approval ap"):
            vote(store, "ap", "eve", tenant="other")
        with pytest.raises(NotFound, match="no approval nothing"):
            vote(store, "nothing", "ann")
        assert vote(store, "ap", "ann", tenant="acme").standing.status == "approved"
        hand.write(asking("second"), call=2)
        hand.write(RunSucceeded(payload("done")), row=RowChange("succeeded"))
        with pytest.raises(RunEnded, match="run r has finished"):
            vote(store, "second", "ann")

    def test_what_a_run_has_left_pending_at_its_end_is_asked_of_nobody_any_more(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("open"), call=1)
        hand.write(asking("granted"), call=2)
        vote(store, "granted", "ann")
        hand.write(RunCancelled(), ts=NOW + 3, row=RowChange("cancelled"))
        assert store.approvals(ApprovalFilter()) == []
        assert (approval(store, "open").standing.status, approval(store, "open").settled_at) == ("withdrawn", NOW + 3)
        assert approval(store, "granted").standing.status == "approved"

    def test_a_judge_that_refuses_changes_nothing(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap", by=("ann",)), call=1)
        hand.rest("waiting_approval")
        before = approval(store, "ap"), found(store, "r"), store.read("r")
        with pytest.raises(NotPermitted, match="eve is not among them"):
            vote(store, "ap", "eve")
        assert (approval(store, "ap"), found(store, "r"), store.read("r")) == before

    def test_votes_add_up_and_do_not_wake_the_run_before_the_last(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap", quorum=2, expires_at=NOW + HOUR), call=1)
        hand.rest("waiting_approval", waiting_for="approval ap", ready_at=NOW + HOUR)
        first = vote(store, "ap", "ann")
        assert (first.standing.status, first.standing.voters, first.settled_at) == ("pending", ("ann",), None)
        assert store.read("r")[-1].body == ApprovalVoted("ap", "ann", ASKED)
        run = found(store, "r")
        assert (run.status, run.ready_at, run.waiting_for) == ("waiting_approval", NOW + HOUR, "approval ap")
        with pytest.raises(Conflict, match="ann has already approved"):
            vote(store, "ap", "ann")
        assert vote(store, "ap", "bob").standing.voters == ("ann", "bob")
        assert found(store, "r").status == "queued"

    def test_an_escalation_asks_others_and_people_hear_of_it(self, store: Store) -> None:
        hand = hold(store, "r")
        request = asking("ap", by=("ann",), expires_at=NOW + HOUR, on_expiry="escalate", escalate_to=("boss",), escalate_us=HOUR, quorum=1)
        hand.write(request, call=1)
        hand.rest("waiting_approval", ready_at=NOW + HOUR)
        tell_all(store)
        row = expire(store, "ap", NOW + HOUR)
        assert (row.standing.status, row.standing.escalated, row.standing.request.by) == ("pending", True, ("boss",))
        assert row.standing.request.expires_at == NOW + 2 * HOUR
        assert approval(store, "ap") == row
        assert [notice.event.body for notice in store.take_notices(NOW + HOUR, 9, 1)] == [
            ApprovalEscalated("ap", ("boss",), NOW + 2 * HOUR)
        ]
        with pytest.raises(NotPermitted):
            vote(store, "ap", "ann", now=NOW + HOUR)
        assert expire(store, "ap", NOW + 2 * HOUR).standing.status == "expired"
        assert store.read("r")[-1].body == ApprovalExpired("ap")

    def test_an_edited_decision_has_the_digest_of_what_was_approved(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap", editable=("cents",)), call=1)
        edited = encode({**ARGS, "cents": 400})
        row = vote(store, "ap", "ann", edit={"cents": 400})
        assert row.standing.digest == digest(edited)
        assert approval(store, "ap") == row

    def test_an_edit_of_what_lies_in_a_blob_is_judged_by_the_blob(self, store: Store) -> None:
        hand = hold(store, "r")
        long = encode({**ARGS, "note": "x" * 100})
        packed, blob = pack(long, 10)
        assert blob is not None
        asked = msgspec.structs.replace(asking("ap", editable=("cents",)), input=packed, digest=digest(long))
        hand.write(asked, call=1, blobs=(blob,))
        with pytest.raises(InvalidInput, match='cents = "many"'):
            vote(store, "ap", "ann", edit={"cents": "many"})
        row = vote(store, "ap", "ann", edit={"cents": 400})
        assert row.standing.digest == digest(encode({**ARGS, "note": "x" * 100, "cents": 400}))

    def test_a_vote_is_in_time_if_it_is_when_it_is_written(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap", expires_at=NOW + HOUR), call=1)
        with pytest.raises(Conflict, match="has expired"):
            vote(store, "ap", "ann", now=NOW + HOUR - 1)  # one microsecond too early for the transaction to begin in time
        assert vote(store, "ap", "ann", now=NOW).standing.status == "approved"

    # -- the approved bytes, once, in time ----------------------------------------------------------------------------

    def test_an_approval_is_consumed_by_the_commit_that_starts_its_call(self, store: Store) -> None:
        hand = approved(store, expires_at=NOW + HOUR)
        assert hand.write(starting("ap"), call=1, ts=NOW + 5) == Committed()
        assert approval(store, "ap").standing.status == "consumed"

    def test_an_approval_is_consumed_once(self, store: Store) -> None:
        hand = approved(store)
        assert hand.write(starting("ap"), call=1) == Committed()
        assert_not_started(store, hand, starting("ap", attempt=2), "ap is consumed")

    def test_an_approval_that_nobody_has_granted_starts_nothing(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap"), call=1)
        assert_not_started(store, hand, starting("ap", digest=""), "ap is pending")
        assert_not_started(store, hand, starting("nothing"), "nothing does not exist")

    def test_an_approval_that_has_expired_starts_nothing(self, store: Store) -> None:
        hand = approved(store, expires_at=NOW + HOUR)
        assert_not_started(store, hand, starting("ap"), "ap has expired", ts=NOW + HOUR)
        assert hand.write(starting("ap"), call=1, ts=NOW + HOUR - 1) == Committed()

    def test_an_approval_that_expires_while_its_call_waits_for_the_disk_starts_nothing(self, store: Store) -> None:
        hand = approved(store, expires_at=NOW + HOUR)
        intent = hand.sealed(starting("ap"), call=1, ts=NOW + 1)
        before = found(store, "r"), store.read("r")
        (answer,) = store.append([msgspec.structs.replace(intent, at=NOW + HOUR)])
        assert isinstance(answer, Refused)
        assert answer.why.startswith("approval ap has expired"), "the worker tells it from a lease that is lost"
        assert (found(store, "r"), store.read("r"), approval(store, "ap").standing.status) == (*before, "approved")
        assert store.append([msgspec.structs.replace(intent, at=NOW + HOUR // 2)]) == [Committed()]

    def test_a_call_whose_approval_was_found_expired_meanwhile_is_refused_in_the_same_words(self, store: Store) -> None:
        hand = approved(store, expires_at=NOW + HOUR)
        expire(store, "ap", NOW + HOUR)
        answer = hand.write(starting("ap"), call=1)
        assert isinstance(answer, Refused)
        assert answer.why.startswith("approval ap has expired")

    def test_an_approval_of_other_arguments_starts_nothing(self, store: Store) -> None:
        hand = approved(store)
        other = digest(encode({**ARGS, "cents": 999_999}))
        assert_not_started(store, hand, starting("ap", digest=other), f"ap is for the arguments {ASKED[:12]}, not for {other[:12]}")

    def test_an_approval_of_another_tool_or_call_starts_nothing(self, store: Store) -> None:
        hand = approved(store)
        assert_not_started(store, hand, starting("ap", tool="wire_money"), "ap is for refund")
        assert_not_started(store, hand, starting("ap"), "ap is for refund", call=2)

    def test_an_approval_of_another_run_starts_nothing(self, store: Store) -> None:
        approved(store)
        thief = hold(store, "thief")
        assert_not_started(store, thief, starting("ap"), "ap is for refund (call 1 of run r)", run_id="thief")
        assert approval(store, "ap").standing.status == "approved"

    def test_an_append_whose_guard_does_not_hold_consumes_nothing(self, store: Store) -> None:
        hand = approved(store)
        stale = Hand(store, hand.lease, hand.seq - 1, hand.head)
        assert isinstance(stale.write(starting("ap"), call=1), Refused)
        assert approval(store, "ap").standing.status == "approved"

    def test_a_call_that_may_not_start_does_not_hinder_the_others_of_its_batch(self, store: Store) -> None:
        hand, other, third = approved(store, expires_at=NOW + HOUR), hold(store, "other"), hold(store, "third")
        late = hand.sealed(ThoughtRecorded("before"), starting("ap"), call=1, ts=NOW + HOUR)
        answers = store.append([other.sealed(ThoughtRecorded("x")), late, third.sealed(asking("ap3"), call=1)])
        assert [type(answer) for answer in answers] == [Committed, Refused, Committed]
        assert (found(store, "r").seq, len(store.read("r"))) == (hand.seq, hand.seq)
        assert approval(store, "ap3").standing.status == "pending"

    # -- post: what it does to a run that is not held
    # ------------------------------------------------------------------

    def test_who_begins_a_run_before_its_time_is_recorded_and_only_the_claim_begins_it(self, store: Store) -> None:
        create(store, "r", not_before=NOW + HOUR)
        before = found(store, "r")
        assert post(store, "r", RunUnpaused("ann", early=True))
        after = found(store, "r")
        assert (after.status, after.ready_at, after.seq) == ("queued", before.ready_at, 2)
        assert (before.ready_at, store.read("r")[-1].body) == (NOW + HOUR, RunUnpaused("ann", early=True))
        store.register("w", "host:1", 1, NOW)
        assert store.claim("w", [Served("a", "1")], 9, NOW) == []
        assert len(store.claim("w", [Served("a", "1")], 1, NOW, run_id="r")) == 1

    @pytest.mark.parametrize(
        ("status", "body", "after"),
        [
            ("waiting", SignalReceived("t", pack(b"1")[0], "ann"), ("queued", True)),
            ("waiting", RunPaused("ann"), ("paused", False)),
            ("paused", SignalReceived("t", pack(b"1")[0], "ann"), ("paused", False)),
            ("paused", CancelRequested("ann"), ("cancelling", True)),
            ("paused", RunUnpaused("ann"), ("queued", True)),
            ("needs_attention", SignalReceived("t", pack(b"1")[0], "ann"), ("needs_attention", False)),
            ("needs_attention", RunRequeued("ann"), ("queued", True)),
            ("cancelling", SignalReceived("t", pack(b"1")[0], "ann"), ("cancelling", True)),
        ],
    )
    def test_a_post_lands_as_the_core_says(self, store: Store, status: Status, body: AnyBody, after: tuple[Status, bool]) -> None:
        hand = hold(store, "r")
        hand.rest(status, attention="poison" if status == "needs_attention" else None)
        assert post(store, "r", body, now=NOW + 9) is True
        row = found(store, "r")
        assert (row.status, row.ready_at) == (after[0], NOW + 9 if after[1] else None)
        assert row.attention == ("poison" if after[0] == "needs_attention" else None)
        assert store.read("r")[-1].body == body

    def test_a_post_does_not_start_a_run_before_its_time(self, store: Store) -> None:
        create(store, "r", not_before=NOW + HOUR)
        assert found(store, "r").ready_at == NOW + HOUR
        post(store, "r", SignalReceived("t", payload(1), "ann"), now=NOW + 5)
        assert (found(store, "r").status, found(store, "r").ready_at) == ("queued", NOW + HOUR)
        post(store, "r", CancelRequested("ann"), now=NOW + 6)
        assert (found(store, "r").status, found(store, "r").ready_at) == ("cancelling", NOW + 6)

    def test_a_pause_does_not_make_a_run_begin_before_its_time(self, store: Store) -> None:
        for run_id, not_before in (("r", NOW + HOUR), ("plain", None)):
            create(store, run_id, not_before=not_before)
            post(store, run_id, RunPaused("ann"), now=NOW + 5)
            assert found(store, run_id).ready_at is None
            post(store, run_id, RunUnpaused("ann"), now=NOW + 6)
        assert (found(store, "r").status, found(store, "r").ready_at) == ("queued", NOW + HOUR)
        assert (found(store, "plain").status, found(store, "plain").ready_at) == ("queued", NOW + 6)

    def test_a_run_that_has_begun_goes_on_at_once_when_it_is_unpaused_after_its_time(self, store: Store) -> None:
        hold(store, "begun", not_before=NOW + HOUR).rest("paused")
        create(store, "late", not_before=NOW + HOUR)
        post(store, "late", RunPaused("ann"))
        post(store, "begun", RunUnpaused("ann"), now=NOW + 6)
        post(store, "late", RunUnpaused("ann"), now=NOW + 2 * HOUR)
        assert (found(store, "begun").ready_at, found(store, "late").ready_at) == (NOW + 6, NOW + 2 * HOUR)

    def test_why_a_run_needs_attention_is_in_its_row_until_somebody_takes_it(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.rest("needs_attention", attention="circling")
        assert found(store, "r").attention == "circling"
        claimed = hold(store, "r")
        assert found(store, "r").attention is None
        claimed.write(ThoughtRecorded("x"), row=RowChange("needs_attention", attention="budget"))
        assert found(store, "r").attention == "budget"

    def test_a_signal_with_a_key_is_taken_once_in_its_topic(self, store: Store) -> None:
        hold(store, "r").rest("waiting")
        hold(store, "held", worker="w2")

        def signal(run_id: str, topic: str, key: str | None, value: int) -> bool:
            return post(store, run_id, SignalReceived(topic, payload(value), "ann", key=key))

        assert signal("r", "t", "k", 1) is True
        assert signal("r", "t", "k", 2) is True
        assert signal("r", "u", "k", 3) is True
        assert signal("r", "t", "k2", 4) is True
        assert signal("r", "t", None, 5) is signal("r", "t", None, 6) is True
        assert signal("held", "t", "k", 7) is False
        assert signal("held", "t", "k", 8) is True
        assert [decode(raw_of(event.body.payload)) for event in store.read("r") if isinstance(event.body, SignalReceived)] == [
            1,
            3,
            4,
            5,
            6,
        ]
        assert [letter.body for letter in store.inbox("w2")] == [SignalReceived("t", payload(7), "ann", key="k")]

    def test_what_the_last_holder_left_unread_keeps_its_place_before_what_comes_later(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap", quorum=2), call=1)
        arriving: list[AnyBody] = [SignalReceived("t", payload(n), "ann") for n in range(3)]
        assert post(store, "r", CancelRequested("ann")) is False
        assert post(store, "r", arriving[0]) is False
        vote(store, "ap", "ann")
        assert post(store, "r", arriving[1]) is False
        hand.rest("waiting")
        assert post(store, "r", arriving[2], now=NOW + 1) is True
        vote(store, "ap", "bob")
        voted, decided = ApprovalVoted("ap", "ann", ASKED), ApprovalDecided("ap", True, "ann, bob", ASKED)
        tail = store.read("r")[-5:]
        assert [event.body for event in tail] == [arriving[0], voted, *arriving[1:], decided]
        assert [event.call for event in tail] == [None, 1, None, None, 1]
        hold(store, "r")
        assert [letter.body for letter in store.inbox("w")] == [CancelRequested("ann")], "only its holder knows whether that still applies"

    def test_a_pause_that_was_taken_back_does_not_come_back(self, store: Store) -> None:
        """The pause was unread when the holder released the run; the unpause came later."""
        hand = hold(store, "r")
        assert post(store, "r", RunPaused("ann")) is False
        hand.rest("waiting")
        assert post(store, "r", RunUnpaused("ann")) is True
        assert [event.body for event in store.read("r")[-2:]] == [RunPaused("ann"), RunUnpaused("ann")]
        assert store.unread("r") == []

    @pytest.mark.parametrize(("attention", "wakes"), [("error", False), ("in_doubt", True), (None, True)])
    def test_unread_post_wakes_a_run_unless_it_cannot_be_driven_at_all(self, store: Store, attention: Reason | None, wakes: bool) -> None:
        """A run that fails at every claim would otherwise be claimed for ever."""
        hand = hold(store, "r")
        assert post(store, "r", SignalReceived("t", payload(1), "ann")) is False
        hand.rest("waiting" if attention is None else "needs_attention", attention=attention)
        assert (found(store, "r").ready_at is not None) == wakes
        assert len(store.unread("r")) == 1

    def test_a_run_that_somebody_may_still_hold_is_not_adopted(self, store: Store) -> None:
        """Its holder would not journal that, and the row would say another version than the journal."""
        hold(store, "r")
        before = found(store, "r").version
        with pytest.raises(AlreadyRunning, match="stop that process first"):
            post(store, "r", RunAdopted("other", "ann"))
        assert (found(store, "r").version, store.unread("r")) == (before, [])

    def test_post_is_caused_by_the_last_event_of_its_call_and_without_a_call_by_the_last_event_of_the_run(self, store: Store) -> None:
        hand = hold(store, "r")
        for call in (1, 2):
            hand.write(ToolCallInitiated("pay", "once", f"k{call}"), ToolCallInDoubt(1, "x"), call=call)
        doubts = [event.seq for event in store.read("r") if event.type == "tool_call_in_doubt"]
        hand.rest("needs_attention", attention="in_doubt")
        for call in (1, 2):
            answer = ToolCallResolved("happened", "ann", result=payload(call))
            store.post("r", call, answer, event_id=uuid.uuid4().hex, now=NOW, expect=lambda row: None)
        post(store, "r", SignalReceived("t", payload(1), "ann"))
        post(store, "r", CancelRequested("ann"))
        events = store.read("r")
        assert [event.cause for event in events[-4:]] == [*doubts, events[-3].seq, events[-2].seq]

    def test_what_runs_say_and_do_now_is_read_without_their_journals(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(StatusReported("first"), ToolCallInitiated("done", "read"), ToolCallCompleted(payload(1)), call=None)
        assert store.current(["r"])["r"].running == (), "an event without a call is no attempt"
        hand.write(ToolCallInitiated("look", "read"), ToolCallCompleted(payload(1)), call=1)
        hand.write(ToolCallInitiated("pay", "once", "k", attempt=2), call=3, ts=NOW + 5)
        hand.write(ModelCallInitiated("claude", "read"), call=2, ts=NOW + 6)
        hand.write(StatusReported("last"))
        now = store.current(["r", "nobody"])
        assert now["nobody"] == Current()
        assert (now["r"].said, now["r"].failure) == ("last", None)
        assert now["r"].running == (OpenAttempt(2, "claude", 1, NOW + 6), OpenAttempt(3, "pay", 2, NOW + 5))
        hand.rest("waiting")
        assert store.current(["r"])["r"].running == (), "no worker holds it: what it was at was cut off"
        failure = Failure(kind="error", type="ValueError", message="no")
        end(store, "r", RunFailed(failure))
        assert store.current(["r"]) == {"r": Current("last", failure)}
        assert store.current([]) == {}

    def test_what_has_arrived_and_is_not_read_can_be_seen_whoever_holds_the_run(self, store: Store) -> None:
        hand = hold(store, "r")
        hold(store, "other", worker="w2")
        assert store.unread("r") == store.unread("nobody") == []
        ids = [uuid.uuid4().hex for _ in range(2)]
        for number, event_id in enumerate(ids):
            signal = SignalReceived("t", payload(number), "ann")
            store.post("r", None, signal, event_id=event_id, now=NOW, expect=lambda row: None)
        post(store, "other", CancelRequested("ann"))
        assert store.unread("r") == store.inbox("w")
        assert [letter.event_id for letter in store.unread("r")] == ids, "its holder journals them under these"
        hand.write(ThoughtRecorded("read"), consumed=(store.unread("r")[0].inbox_id,))
        hand.rest("waiting")
        assert [(letter.run_id, letter.event_id) for letter in store.unread("r")] == [("r", ids[1])]

    @pytest.mark.parametrize("forced", [False, True])
    def test_what_arrives_as_a_run_ends_is_not_read_and_not_lost(self, store: Store, forced: bool) -> None:
        hand = hold(store, "r")
        signals: list[AnyBody] = [SignalReceived("t", payload(number), "ann") for number in range(3)]
        for signal in signals:
            assert post(store, "r", signal) is False
        read = (store.unread("r")[0].inbox_id,)
        if forced:
            hand.write(signals[0], consumed=read)
            hand.rest("needs_attention")
            end(store, "r", RunCancelled(forced_by="bob"))
        else:
            hand.write(signals[0], RunSucceeded(payload("done")), row=RowChange("succeeded"), consumed=read)
        assert [letter.body for letter in store.unread("r")] == signals[1:]
        assert store.inbox("w") == []

    def test_another_version_may_be_told_to_go_on(self, store: Store) -> None:
        hold(store, "r").rest("waiting")
        assert post(store, "r", RunAdopted("2", "ann")) is True
        assert (found(store, "r").version, found(store, "r").status) == ("2", "waiting")

    def test_a_run_that_nobody_holds_can_be_ended_and_one_that_is_held_cannot(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("ap"), call=1)
        with pytest.raises(AlreadyRunning, match=r"is held by a worker\n.*worker host:1"):
            end(store, "r", RunCancelled(forced_by="ann"))
        hand.rest("needs_attention", attention="diverged")
        end(store, "r", RunCancelled(forced_by="ann"), now=NOW + 4)
        row = found(store, "r")
        assert (row.status, row.ready_at, row.holder, row.attention) == ("cancelled", None, None, None)
        assert store.read("r")[-1].body == RunCancelled(forced_by="ann")
        assert approval(store, "ap").standing.status == "withdrawn"
        for late in (lambda: end(store, "r", RunCancelled()), lambda: post(store, "r", CancelRequested("ann"))):
            with pytest.raises(RunEnded, match="cancelled"):
                late()
        with pytest.raises(NotFound):
            end(store, "nobody", RunCancelled())

    # -- parents and children -----------------------------------------------------------------------------------------

    def test_a_child_is_created_by_the_commit_that_says_so(self, store: Store) -> None:
        parent = hold(store, "p", tenant="acme", actor="user:17", priority=3)
        started = ChildStarted("b", "7", "p/2", payload({"x": 1}), ASKED, target="f.py:b")
        assert parent.write(started, call=2, ts=NOW + 5) == Committed()
        child = found(store, "p/2")
        assert (child.agent, child.version, child.tenant, child.actor, child.queue, child.priority) == ("b", "7", "acme", "user:17", "q", 3)
        assert (child.parent, child.parent_call, child.status, child.ready_at, child.target) == ("p", 2, "queued", NOW + 5, "f.py:b")
        (created,) = store.read("p/2")
        assert created.body == RunCreated(
            "p/2",
            "b",
            "7",
            "acme",
            payload({"x": 1}),
            actor="user:17",
            target="f.py:b",
            queue="q",
            priority=3,
            parent="p",
            parent_call=2,
            depth=1,
        )
        grandchild = hold(store, "p/2")
        grandchild.write(ChildStarted("a", "1", "p/2/1", payload(0), ASKED, queue="elsewhere"), call=1)
        body = store.read("p/2/1")[0].body
        assert isinstance(body, RunCreated)
        assert (body.depth, body.queue) == (2, "elsewhere")

    def test_a_child_that_begins_in_a_transaction_is_made_known_like_any_other(self, store: Store) -> None:
        def work(last: Append, connection: Any) -> tuple[Append, None]:
            return last, None

        rung = threading.Semaphore(0)
        parent = hold(store, "p")
        store.listen(rung.release)
        for first, last, known in (
            (ThoughtRecorded("intent"), ThoughtRecorded("result"), False),
            (child("p/1"), ThoughtRecorded("result"), True),
            (ThoughtRecorded("intent"), child("p/2"), True),
        ):
            head = parent.sealed(first)
            tail = Hand(store, parent.lease, parent.seq + 1, head.events[-1].hash).sealed(last)
            assert store.transact(head, partial(work, tail)) == (Committed(), None)
            parent.seq, parent.head = parent.seq + 2, tail.events[-1].hash
            assert rung.acquire(timeout=5 if known else 0.05) is known
            while rung.acquire(timeout=0.05):
                pass  # a ring may come more than once
        stale = Hand(store, parent.lease, parent.seq - 1, parent.head)
        answer, _ = store.transact(stale.sealed(child("p/3")), lambda connection: pytest.fail("must not be called"))
        assert isinstance(answer, Refused)
        assert not rung.acquire(timeout=0.05)

    def test_a_refused_append_starts_no_child_and_an_id_that_is_taken_is_refused(self, store: Store) -> None:
        parent = hold(store, "p")
        stale = Hand(store, parent.lease, parent.seq - 1, parent.head)
        assert isinstance(stale.write(child("p/1"), call=1), Refused)
        assert store.get("p/1") is None
        create(store, "p/1")
        answer = parent.write(child("p/1"), call=1)
        assert isinstance(answer, Refused)
        assert "another run with that id" in answer.why
        assert parent.write(child("p/2"), call=2) == parent.write(child("p/2"), call=2) == Committed()
        assert len(store.read("p/2")) == 1

    @pytest.mark.parametrize(
        ("body", "status", "told"),
        [
            (RunSucceeded(pack(b'"ok"')[0]), "succeeded", ChildFinished("p/1", "succeeded", output=pack(b'"ok"')[0])),
            (RunFailed(Failure("error", "Boom", "no")), "failed", ChildFinished("p/1", "failed", failure=Failure("error", "Boom", "no"))),
            (
                RunCancelled("enough"),
                "cancelled",
                ChildFinished("p/1", "cancelled", failure=Failure("cancelled", "RunCancelled", "run p/1 was cancelled: enough")),
            ),
        ],
    )
    def test_the_end_of_a_child_wakes_a_parent_that_nobody_holds(self, store: Store, body: AnyBody, status: Status, told: AnyBody) -> None:
        started_seq = family(store, parent="waiting")
        hold(store, "p/1").write(body, ts=NOW + 8, row=RowChange(status))
        row = found(store, "p")
        assert (row.status, row.ready_at) == ("queued", NOW + 8)
        event = store.read("p")[-1]
        assert (event.body, event.call, event.cause, event.ts) == (told, 1, started_seq, NOW + 8)

    def test_the_end_of_a_child_goes_to_the_holder_of_its_parent(self, store: Store) -> None:
        family(store, parent="running")
        hold(store, "p/1", worker="w2").write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
        (letter,) = store.inbox("w")
        assert (letter.run_id, letter.call, letter.body) == ("p", 1, ChildFinished("p/1", "succeeded", output=payload(1)))

    def test_the_end_of_a_child_that_its_holder_gives_up_at_that_moment_is_not_lost(self, store: Store) -> None:
        family(store, parent="running")
        parent, last = hand_of(store, "p"), hold(store, "p/1", worker="w2")
        rest = parent.sealed(RunReleased("waiting", "child"), row=RowChange("waiting", release=True))
        done = last.sealed(RunSucceeded(payload(1)), row=RowChange("succeeded"))
        assert store.append([done, rest]) == [Committed(), Committed()]
        assert found(store, "p").ready_at is not None, "it was given up with unread post"

    def test_the_end_of_a_child_leaves_a_paused_parent_paused_and_a_finished_one_alone(self, store: Store) -> None:
        family(store, parent="paused")
        hold(store, "p/1").write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
        assert (found(store, "p").status, found(store, "p").ready_at) == ("paused", None)
        assert isinstance(store.read("p")[-1].body, ChildFinished)
        family(store, "q", parent="running")
        hand_of(store, "q").write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
        before = found(store, "q"), store.read("q")
        assert hold(store, "q/1").write(RunSucceeded(payload(1)), row=RowChange("succeeded")) == Committed()
        assert (found(store, "q"), store.read("q")) == before

    def test_a_child_that_is_ended_without_its_agent_tells_its_parent_too(self, store: Store) -> None:
        family(store, parent="waiting")
        end(store, "p/1", RunCancelled(forced_by="ann"))
        assert isinstance(store.read("p")[-1].body, ChildFinished)
        assert found(store, "p").status == "queued"

    def test_the_children_of_a_run_that_is_ended_without_its_agent_are_asked_to_stop(self, store: Store) -> None:
        top = hold(store, "p")
        top.write(child("p/1"), child("p/2"))
        hold(store, "p/2", worker="w2").write(child("p/2/1"))
        top.rest("waiting")
        end(store, "p", RunCancelled(forced_by="ann"))
        assert (found(store, "p/1").status, found(store, "p/1").ready_at is not None) == ("cancelling", True)
        (letter,) = store.inbox("w2")
        assert (letter.run_id, type(letter.body)) == ("p/2", CancelRequested)
        assert found(store, "p/2/1").status == "queued", "its own parent asks it"

    def test_children_that_are_not_served_are_found_through_the_parents_that_are(self, store: Store) -> None:
        top = hold(store, "p")
        top.write(ChildStarted("b", "7", "p/1", payload(0), ASKED), call=1, ts=NOW)
        pair = (Served("a", "1"), Served("b", "7"), "p")
        assert store.parents_to_replay([Served("a", "1")], NOW - 1) == []
        assert store.parents_to_replay([Served("a", "1")], NOW) == [pair]
        assert store.parents_to_replay([Served("a", "1")], NOW, but=["p"]) == []
        assert store.parents_to_replay([Served("a", "1"), Served("b", "7")], NOW) == []
        assert store.parents_to_replay([Served("a", "2")], NOW) == []
        middle = hold(store, "p/1", worker="w2")
        middle.write(ChildStarted("c", "1", "p/1/1", payload(0), ASKED), call=1, ts=NOW)
        middle.rest("waiting")
        assert store.parents_to_replay([Served("a", "1")], NOW) == [pair], "through a parent that waits and is not served either"
        assert store.parents_to_replay([Served("b", "7")], NOW) == [(Served("b", "7"), Served("c", "1"), "p/1")]

    def test_the_family_of_a_run_is_what_goes_on_below_it(self, store: Store) -> None:
        top = hold(store, "p")
        top.write(child("p/1"), child("p/2"), child("p/3"))
        middle = hold(store, "p/2", worker="w2")
        middle.write(child("p/2/1"))
        middle.write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
        create(store, "p0")
        assert sorted(store.family("p"), key=lambda row: row.run_id) == [found(store, run_id) for run_id in ("p/1", "p/2/1", "p/3")]
        assert store.family("p/2") == [found(store, "p/2/1")]
        assert store.family("p/1") == store.family("nobody") == []

    # -- budgets ------------------------------------------------------------------------------------------------------

    def test_a_charge_counts_in_every_budget_above_the_run(self, store: Store) -> None:
        top = hold(store, "p", budget=Limits(usd_micros=100, calls=9))
        top.write(child("p/1"), child("p/2", budget=Limits(usd_micros=40, on_exceed="fail")), call=1)
        hold(store, "p/2", worker="w2").write(child("p/2/1"), call=1)
        create(store, "free")
        below = hold(store, "p/2/1", worker="w3")
        below.write(ThoughtRecorded("reserve"), charge=Charge(reserved=Amounts(usd_micros=30, calls=1), spent=NOTHING))
        below.write(ThoughtRecorded("settle"), charge=Charge(-Amounts(usd_micros=30, calls=1), Amounts(25, 7, 1, 2)))
        hold(store, "p/1").write(ThoughtRecorded("x"), charge=Charge(Amounts(usd_micros=5), Amounts(usd_micros=1)))
        inner = Ledger("p/2", Limits(usd_micros=40, on_exceed="fail"), Amounts(25, 7, 1, 2), NOTHING)
        outer = Ledger("p", Limits(usd_micros=100, calls=9), Amounts(26, 7, 1, 2), Amounts(usd_micros=5))
        assert store.ledgers("p/2/1") == store.ledgers("p/2") == [inner, outer]
        assert store.ledgers("p/1") == store.ledgers("p") == [outer]
        assert store.ledgers("free") == store.ledgers("nobody") == []

    def test_a_refused_append_charges_nothing(self, store: Store) -> None:
        hand = hold(store, "p", budget=Limits(usd_micros=100))
        hand.write(asking("ap"), call=1)
        spent = Charge(NOTHING, Amounts(usd_micros=9))
        assert isinstance(Hand(store, hand.lease, hand.seq - 1, hand.head).write(ThoughtRecorded("x"), charge=spent), Refused)
        assert isinstance(hand.write(starting("ap"), call=1, charge=spent), Refused)
        assert store.ledgers("p")[0].spent == NOTHING

    def test_what_a_run_has_still_reserved_at_its_end_is_given_back(self, store: Store) -> None:
        top = hold(store, "p", budget=Limits(usd_micros=100))
        top.write(child("p/1"), child("p/2"), call=1)
        reserve = Charge(Amounts(usd_micros=30, calls=1), NOTHING)
        one, two = hold(store, "p/1", worker="w1"), hold(store, "p/2", worker="w2")
        one.write(ThoughtRecorded("x"), charge=reserve)
        two.write(ThoughtRecorded("x"), charge=reserve)
        one.rest("needs_attention", attention="in_doubt")
        end(store, "p/1", RunCancelled(forced_by="ann"))
        assert store.ledgers("p")[0].reserved == Amounts(usd_micros=30, calls=1)
        two.write(
            RunSucceeded(payload(1)), row=RowChange("succeeded"), charge=Charge(-Amounts(usd_micros=30, calls=1), Amounts(usd_micros=28))
        )
        assert (store.ledgers("p")[0].reserved, store.ledgers("p")[0].spent) == (NOTHING, Amounts(usd_micros=28))

    def test_what_a_forced_end_charges_counts_in_every_budget_above_the_run(self, store: Store) -> None:
        top = hold(store, "p", budget=Limits(usd_micros=100))
        top.write(child("p/1"), call=1)
        one = hold(store, "p/1", worker="w1")
        one.write(started("ask"), call=1, charge=Charge(Amounts(usd_micros=30), Amounts(calls=1)))
        one.rest("needs_attention", attention="in_doubt")
        end(store, "p/1", RunCancelled(forced_by="ann", unsettled=(Unsettled(1, 1, Usage(30)),)))
        assert (store.ledgers("p")[0].reserved, store.ledgers("p")[0].spent) == (NOTHING, Amounts(usd_micros=30, calls=1))
        assert [(row.group, row.usd_micros) for row in store.costs("tool")] == [("ask", 30)]

    def test_a_forced_end_is_refused_when_the_run_has_moved_on(self, store: Store) -> None:
        create(store, "r")

        def expect(row: RunRow) -> None:
            raise Conflict(f"at event {row.seq}")

        with pytest.raises(Conflict, match="at event 1"):
            store.end("r", RunCancelled(forced_by="ann"), event_id=uuid.uuid4().hex, now=NOW, expect=expect)
        assert (found(store, "r").status, len(store.read("r"))) == ("queued", 1)

    def test_what_settles_a_doubt_is_charged_at_once_when_nobody_holds_the_run(self, store: Store) -> None:
        top = hold(store, "p", budget=Limits(usd_micros=100))
        top.write(child("p/1"), call=1)
        one = hold(store, "p/1", worker="w1")
        one.write(started("ask"), call=1, charge=Charge(Amounts(usd_micros=30), Amounts(calls=1)))
        happened = ToolCallResolved("happened", "ann", result=payload(1), usage=Usage(30))
        assert post(store, "p/1", happened) is False
        assert store.ledgers("p")[0].spent == Amounts(calls=1), "whoever holds the run charges it"
        one.rest("needs_attention", attention="in_doubt")
        assert post(store, "p/1", happened) is True
        assert store.ledgers("p")[0].spent == Amounts(usd_micros=30, calls=1)
        create(store, "free")
        assert post(store, "free", happened) is True, "without a budget there is nothing to charge"

    def test_a_raise_goes_to_the_runs_own_budget_whether_it_is_held_or_not(self, store: Store) -> None:
        hand = hold(store, "p", budget=Limits(usd_micros=100, calls=9))
        hand.write(child("p/1"), call=1)
        assert post(store, "p", BudgetRaised(Limits(usd_micros=50, tokens=5), "ann")) is False
        hand.rest("needs_attention", attention="budget")
        assert post(store, "p", BudgetRaised(Limits(calls=1), "ann")) is True
        assert store.ledgers("p")[0].limits == Limits(usd_micros=150, calls=10)
        with pytest.raises(Conflict, match=r"no budget of its own; the budget of run p applies to it"):
            post(store, "p/1", BudgetRaised(Limits(calls=1), "ann"))
        create(store, "free")
        with pytest.raises(Conflict, match="no budget limits it"):
            post(store, "free", BudgetRaised(Limits(calls=1), "ann"))
        assert len(store.read("free")) == 1

    def test_who_stands_still_because_of_a_budget(self, store: Store) -> None:
        top = hold(store, "p", budget=Limits(usd_micros=100))
        top.write(child("p/1"), child("p/2", budget=Limits(usd_micros=40)), child("p/3"), call=1)
        stop(hold(store, "p/1", worker="w1"), budget_of="p")
        stop(hold(store, "p/2", worker="w2"), budget_of="p/2")
        hold(store, "p/3", worker="w3")
        assert store.over_budget("p") == ["p/1"]
        assert store.over_budget("p/2") == ["p/2"]
        stop(top, budget_of="p")
        assert store.over_budget("p") == ["p", "p/1"]
        post(store, "p/1", RunRequeued("ann"))
        assert store.over_budget("p") == ["p"]
        assert store.over_budget("nobody") == []

    # -- costs --------------------------------------------------------------------------------------------------------

    def test_costs_are_added_up_by_group_and_counted_once(self, store: Store) -> None:
        one, two = hold(store, "r1", tenant="t1"), hold(store, "r2", tenant="t2", worker="w2")
        small, large = Usage(10, 100, 20, 5, "small"), Usage(300, 1, 2, 0, "large")
        one.write(started("ask"), call=1, ts=NOW)
        one.write(ToolCallCompleted(payload(1), usage=small), call=1, ts=NOW + 40)
        one.write(started("mail"), call=2, ts=NOW + 50)
        one.write(ToolCallFailed(Failure("reset", "Reset", "x"), usage=Usage(1)), call=2, ts=NOW + 60)
        one.write(ToolCallFailed(Failure("reset", "Reset", "x"), final=True, usage=Usage(1)), call=2, ts=NOW + HOUR)
        two.write(started("ask"), call=1, ts=NOW + 48 * HOUR)
        two.write(ToolCallInDoubt(1, "its worker died"), call=1, ts=NOW + 49 * HOUR)
        two.write(started("ask", attempt=2), call=1, ts=NOW + 50 * HOUR)
        two.write(ToolCallCompleted(payload(1), attempt=2, usage=large), call=1, ts=NOW + 50 * HOUR + 7)
        first = CostRow("r1", 1, 2, 50, 11, 100, 20, 5, wall_us=HOUR)
        second = CostRow("r2", 1, 1, 7, 300, 1, 2, 0, wall_us=50 * HOUR + 7)
        assert store.costs("run") == [second, first]
        assert store.costs("tenant") == [renamed(second, "t2"), renamed(first, "t1")]
        assert store.costs("agent") == [CostRow("a", 2, 3, 57, 311, 101, 22, 5, wall_us=51 * HOUR + 7)]
        assert store.costs("tool") == [CostRow("ask", 2, 2, 47, 310, 101, 22, 5), CostRow("mail", 1, 1, 10, 1, 0, 0, 0)]
        assert [(row.group, row.usd_micros) for row in store.costs("model")] == [("large", 300), ("small", 10), ("no model", 1)]
        assert [(row.group, row.usd_micros) for row in store.costs("day")] == [("2023-11-17", 300), ("2023-11-14", 11), ("2023-11-16", 0)]
        assert store.costs("run", tenant="t1") == [first]
        assert store.costs("run", since=NOW + HOUR) == [second]
        assert store.costs("agent", since=NOW + 99 * HOUR) == []

    def test_costs_have_the_time_that_a_run_took_and_how_much_of_it_no_worker_held_it(self, store: Store) -> None:
        create(store, "r")
        store.register("w", "host:1", 1, NOW)

        def claimed(at: int) -> Hand:
            (claim,) = store.claim("w", [Served("a", "1")], 1, at, run_id="r")
            return Hand(store, claim.lease, claim.row.seq, claim.row.head)

        hand = claimed(NOW + 5)
        hand.write(started("ask"), call=1, ts=NOW + 6)
        parked = RowChange("waiting", waiting_for="x", ready_at=NOW + 100, release=True)
        hand.write(ToolCallCompleted(payload(1)), call=1, ts=NOW + 8)
        hand.write(RunReleased("waiting", "x", NOW + 100), ts=NOW + 8, row=parked)
        claimed(NOW + 100).write(RunSucceeded(payload(1)), ts=NOW + 103, row=RowChange("succeeded"))
        for row in (*store.costs("run"), *store.costs("root"), *store.costs("agent"), *store.costs("tenant")):
            assert (row.wall_us, row.waiting_us, row.busy_us) == (103, 5 + 92, 2), row
        for row in (*store.costs("tool"), *store.costs("model"), *store.costs("day")):  # a run can be in several of these groups
            assert (row.wall_us, row.waiting_us, row.busy_us) == (0, 0, 2), row

    def test_what_is_charged_when_a_doubt_is_settled_comes_on_top_of_what_the_attempt_has_said(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(started("ask"), call=1, ts=NOW)
        hand.write(ToolCallInDoubt(1, "late", Failure("timeout", "Timeout", "x"), usage=Usage(2)), call=1, ts=NOW + 40)
        hand.write(ToolCallResolved("happened", "ann", result=payload(1), usage=Usage(8)), call=1, ts=NOW + HOUR)
        hand.write(started("ask"), call=2, ts=NOW + HOUR)
        hand.write(ToolCallResolved("did_not_happen", "ann"), call=2, ts=NOW + 2 * HOUR)
        assert store.costs("run") == [CostRow("r", 1, 2, 40, 10, 0, 0, 0, wall_us=2 * HOUR)]

    # -- notices ------------------------------------------------------------------------------------------------------

    def test_people_hear_of_what_needs_them_and_of_nothing_else(self, store: Store) -> None:
        hand = hold(store, "r")
        told: list[AnyBody] = [
            asking("ap"),
            AttentionNeeded("circling", "ask(1) three times"),
            BudgetExceeded("r", "usd", 5, 5, 1),
            RunFailed(Failure("error", "Boom", "x")),
        ]
        hand.write(ThoughtRecorded("x"), *told[:2], call=1)
        hand.write(told[2], started("ask"), call=1)
        hand.write(told[3], row=RowChange("failed"))
        family(store, parent="waiting")
        hold(store, "p/1").write(RunFailed(Failure("error", "Boom", "its parent's trouble")), row=RowChange("failed"))
        hold(store, "fine").write(RunSucceeded(payload(1)), row=RowChange("succeeded"))
        notices = store.take_notices(NOW, 99, SECOND)
        assert [notice.event.body for notice in notices] == told
        assert [notice.event for notice in notices] == [event for event in store.read("r") if event.body in told]
        assert {notice.row for notice in notices} == {found(store, "r")}

    def test_a_refused_append_tells_nobody(self, store: Store) -> None:
        hand = hold(store, "r")
        Hand(store, hand.lease, hand.seq - 1, hand.head).write(asking("ap"), call=1)
        assert store.next_notice() is None
        assert store.approval("ap") is None

    def test_a_notice_is_one_takers_until_its_time_is_over(self, store: Store) -> None:
        hand = hold(store, "r")
        hand.write(asking("one"), asking("two"), call=1)
        assert store.next_notice() == NOW
        (first,) = store.take_notices(NOW, 1, SECOND)
        (second,) = store.take_notices(NOW, 9, SECOND)
        assert first.notice_id != second.notice_id
        assert store.take_notices(NOW + SECOND - 1, 9, SECOND) == []
        assert store.next_notice() == NOW + SECOND
        again = store.take_notices(NOW + SECOND, 9, SECOND)
        assert [(notice.notice_id, notice.attempts) for notice in again] == [(first.notice_id, 1), (second.notice_id, 1)]
        assert [notice.event.event_id for notice in again] == [first.event.event_id, second.event.event_id]

    def test_a_notice_that_was_sent_is_gone_and_one_that_failed_comes_again(self, store: Store) -> None:
        hold(store, "r").write(asking("one"), asking("two"), call=1)
        one, two = store.take_notices(NOW, 9, SECOND)
        store.notice_done(one.notice_id)
        store.notice_done(one.notice_id)
        store.notice_failed(two.notice_id, next_at=NOW + HOUR, error="connection refused")
        assert store.next_notice() == NOW + HOUR
        assert store.take_notices(NOW + HOUR - 1, 9, SECOND) == []
        assert [(notice.notice_id, notice.attempts) for notice in store.take_notices(NOW + HOUR, 9, SECOND)] == [(two.notice_id, 1)]


class Hand:
    """A run that a worker holds. It continues after its last append."""

    def __init__(self, store: Store, lease: Lease, seq: int, head: bytes) -> None:
        self.store, self.lease, self.seq, self.head = store, lease, seq, head

    def sealed(self, *bodies: AnyBody, call: int | None = None, ts: int = NOW, **fields: Any) -> Append:
        """The append that the worker would send. Each of several children has its own call."""
        events = [
            Event(
                self.seq + n,
                uuid.uuid4().hex,
                ts,
                self.lease.epoch,
                int(body.run_id[-1]) if isinstance(body, ChildStarted) else call,
                1,
                body,
            )
            for n, body in enumerate(bodies, 1)
        ]
        return Append(self.lease, self.seq, tuple(seal_all(self.head, events)), **fields)

    def write(self, *bodies: AnyBody, **fields: Any) -> Appended:
        append = self.sealed(*bodies, **fields)
        (answer,) = self.store.append([append])
        if isinstance(answer, Committed) and append.events:
            self.seq, self.head = append.events[-1].event.seq, append.events[-1].hash
        return answer

    def rest(self, status: Status, *, waiting_for: str | None = None, ready_at: int | None = None, attention: Reason | None = None) -> None:
        """Give the run up."""
        row = RowChange(status, waiting_for=waiting_for, ready_at=ready_at, attention=attention, release=True)
        assert self.write(RunReleased("waiting", "x"), row=row) == Committed()


def payload(value: Any) -> Any:
    return pack(encode(value))[0]


def raw_of(packed: Any) -> bytes:
    inline: bytes | None = packed.inline
    assert inline is not None
    return inline


def create(store: Store, run_id: str, *, agent: str = "a", tenant: str = "default", actor: str | None = None, **fields: Any) -> None:
    created = RunCreated(run_id, agent, "1", tenant, payload(1), actor=actor, queue="q", **fields)
    store.create_run(NewRun(run_id, created, uuid.uuid4().hex, NOW, hashlib.sha256(b"input").hexdigest()))


def hold(store: Store, run_id: str, *, worker: str = "w", **fields: Any) -> Hand:
    """The run, held by a worker. A missing run is created."""
    create(store, run_id, **fields)
    if worker not in {row.worker for row in store.workers(NOW, HOUR)}:
        store.register(worker, "host:1", 1, NOW)
    row = found(store, run_id)
    (claimed,) = store.claim(worker, [Served(row.agent, row.version)], 1, NOW, run_id=run_id)
    return Hand(store, claimed.lease, claimed.row.seq, claimed.row.head)


def found(store: Store, run_id: str) -> RunRow:
    row = store.get(run_id)
    assert row is not None, run_id
    return row


def approval(store: Store, approval_id: str) -> ApprovalRow:
    row = store.approval(approval_id)
    assert row is not None, approval_id
    return row


def asking(approval_id: str, *, tool: str | None = "refund", **fields: Any) -> ApprovalRequested:
    return ApprovalRequested(approval_id, tool or "refund.issue", payload(ARGS), ASKED, tool=tool, **fields)


def starting(approval_id: str, *, tool: str = "refund", digest: str = ASKED, attempt: int = 1) -> ToolCallInitiated:
    return ToolCallInitiated(tool, "keyed", "key", attempt=attempt, digest=digest, approval=approval_id)


def started(tool: str, attempt: int = 1) -> ToolCallInitiated:
    return ToolCallInitiated(tool, "keyed", "key", attempt=attempt)


def child(run_id: str, budget: Limits | None = None) -> ChildStarted:
    return ChildStarted("a", "1", run_id, payload(1), digest(encode(1)), budget=budget)


def renamed(row: CostRow, group: str) -> CostRow:
    return msgspec.structs.replace(row, group=group)


def approved(store: Store, **fields: Any) -> Hand:
    """Run r, held, whose call 1 asks for approval `ap`, which ann has granted."""
    hand = hold(store, "r")
    hand.write(asking("ap", **fields), call=1)
    hand.rest("waiting_approval")
    vote(store, "ap", "ann")
    return hold(store, "r")


def family(store: Store, run_id: str = "p", *, parent: Status) -> int:
    """A parent in that status whose call 1 is a queued child; the seq of its child_started."""
    hand = hold(store, run_id)
    hand.write(child(f"{run_id}/1"), call=1)
    seq = hand.seq
    if parent != "running":
        hand.rest(parent)
    return seq


def hand_of(store: Store, run_id: str, worker: str = "w") -> Hand:
    """The run as another worker has it after a takeover."""
    store.unregister(worker, NOW)
    return hold(store, run_id, worker=worker)


def stop(hand: Hand, *, budget_of: str) -> None:
    """Park it because that run's budget has no room."""
    hand.write(BudgetExceeded(budget_of, "usd", 1, 1, 1))
    hand.rest("needs_attention", attention="budget")


def vote(
    store: Store,
    approval_id: str,
    by: str,
    *,
    granted: bool = True,
    note: str | None = None,
    edit: dict[str, Any] | None = None,
    now: int = NOW,
    tenant: str | None = None,
) -> ApprovalRow:
    said = Vote(by, granted, note=note, edit=edit)
    return store.decide(approval_id, said, event_id=uuid.uuid4().hex, now=now, tenant=tenant)


def expire(store: Store, approval_id: str, now: int) -> ApprovalRow:
    return store.decide(approval_id, Expire(), event_id=uuid.uuid4().hex, now=now)


def withdraw(store: Store, approval_id: str, now: int = NOW) -> ApprovalRow:
    return store.decide(approval_id, Withdraw(), event_id=uuid.uuid4().hex, now=now)


def post(store: Store, run_id: str, body: AnyBody, *, now: int = NOW) -> bool:
    return store.post(run_id, None, body, event_id=uuid.uuid4().hex, now=now, expect=lambda row: None)


def end(store: Store, run_id: str, body: AnyBody, *, now: int = NOW) -> None:
    store.end(run_id, body, event_id=uuid.uuid4().hex, now=now)


def tell_all(store: Store) -> None:
    """Everything that was due has been sent."""
    for notice in store.take_notices(NOW + HOUR, 99, 1):
        store.notice_done(notice.notice_id)


def assert_not_started(
    store: Store, hand: Hand, body: ToolCallInitiated, why: str, *, call: int = 1, ts: int = NOW, run_id: str = "r"
) -> None:
    """The append is refused for that reason, and has written nothing."""
    before = found(store, run_id), store.read(run_id), store.approvals(ApprovalFilter(status=None))
    answer = hand.write(ThoughtRecorded("about to start"), body, call=call, ts=ts)
    assert isinstance(answer, Refused), answer
    assert why in answer.why
    assert (found(store, run_id), store.read(run_id), store.approvals(ApprovalFilter(status=None))) == before
