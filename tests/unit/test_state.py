"""fold(events) → RunState: the meaning of a journal, and which journals perdure cannot have written."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from msgspec import structs

from perdure.core.codec import Payload, encode, pack
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalRequested,
    ApprovalWithdrawn,
    AttentionNeeded,
    CallHeld,
    CallKept,
    CancelRequested,
    Effect,
    Event,
    Failure,
    RetryScheduled,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunFailed,
    RunReleased,
    RunReopened,
    RunRequeued,
    RunSucceeded,
    StatusReported,
    ThoughtRecorded,
    TimerFired,
    TimerSet,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
)
from perdure.core.state import ENDED, TRANSITIONS, Phase, RunState, fold
from perdure.errors import StoreCorrupt

SOME: Payload = pack(b"1")[0]
BROKEN = Failure(kind="reset", type="Boom", message="it broke")
CREATED = RunCreated(run_id="r", agent="a", version="1", tenant="t", input=SOME)
CLAIMED = RunClaimed("w1")
CRASHED = RunClaimed("w2", takeover=True, proven_dead=True)

# What each event of the table is called there.
MOVES: dict[str, AnyBody] = {
    "initiated": ToolCallInitiated("pay", "keyed", "k", attempt=2),
    "completed": ToolCallCompleted(result=SOME),
    "failed": ToolCallFailed(BROKEN),
    "failed_for_good": ToolCallFailed(BROKEN, final=True),
    "in_doubt": ToolCallInDoubt(1, "who knows", BROKEN),
    "retry": RetryScheduled(attempt=2, at=99),
    "happened": ToolCallResolved("happened", by="ann", result=SOME),
    "did_not_happen": ToolCallResolved("did_not_happen", by="ann"),
    "resolved_failed": ToolCallResolved("failed", by="ann", failure=BROKEN),
    "asked": ApprovalRequested("ap-1", "pay", SOME, "d", tool="pay"),
    "granted": ApprovalDecided("ap-1", True, "ann", "d"),
    "refused": ApprovalWithdrawn("ap-1"),
}
PROPOSED = ToolCallProposed("pay", "keyed", "k", SOME, "d", "approval")
# How a call gets into each phase.
PATHS: dict[Phase, list[str]] = {
    "started": [],
    "failing": ["failed"],
    "retry_wait": ["failed", "retry"],
    "in_doubt": ["in_doubt"],
    "idle": ["in_doubt", "did_not_happen"],
    "completed": ["completed"],
    "failed": ["failed_for_good"],
    "proposed": [],
    "awaiting_approval": ["asked"],
    "approved": ["asked", "granted"],
}
BEFORE_ITS_START: tuple[Phase, ...] = ("proposed", "awaiting_approval", "approved")


def start(effect: Effect = "keyed") -> ToolCallInitiated:
    return ToolCallInitiated("pay", effect, "k", args=SOME, digest="d", timeout_s=5.0)


def journal(*bodies: AnyBody | tuple[int, AnyBody]) -> list[Event]:
    """Created, claimed, and then these; a pair is about that call."""
    events = [Event(1, "0" * 32, 100, 0, None, None, CREATED), Event(2, "0" * 32, 200, 1, None, 1, CLAIMED)]
    for body in bodies:
        number, what = body if isinstance(body, tuple) else (None, body)
        seq = len(events) + 1
        events.append(Event(seq, "0" * 32, seq * 100, 1, number, seq - 1, what))
    return events


def in_phase(phase: Phase) -> RunState:
    first = PROPOSED if phase in BEFORE_ITS_START else start()
    return fold(journal((1, first), *((1, MOVES[move]) for move in PATHS[phase])))


def test_the_paths_of_this_test_lead_to_every_phase() -> None:
    assert set(PATHS) == set(get_args(Phase))
    for phase in PATHS:
        assert in_phase(phase).calls[1].phase == phase


@pytest.mark.parametrize(("phase", "move"), list(itertools.product(PATHS, MOVES)))
def test_a_call_moves_as_the_table_says_and_in_no_other_way(phase: Phase, move: str) -> None:
    state = in_phase(phase)
    event = Event(state.seq + 1, "0" * 32, 9_999, 1, 1, state.seq, MOVES[move])
    expected = TRANSITIONS.get((phase, move))
    if expected is None:
        unasked = move in ("granted", "refused") and phase not in ("awaiting_approval", "approved")
        with pytest.raises(StoreCorrupt, match="call 1, where no approval is open" if unasked else f"call 1 is {phase}"):
            state.apply(event)
        return
    state.apply(event)
    assert state.calls[1].phase == expected
    assert (1 in state.open) == (expected not in ENDED)


def test_no_transition_leads_out_of_the_end_of_a_call() -> None:
    """Only a person can make another attempt of an ended call possible, by reopening the run."""
    assert not [move for phase, move in TRANSITIONS if phase in ENDED and move not in ("again", "again_in_doubt")]


def test_a_journal_without_a_gap_folds_to_what_it_says() -> None:
    state = fold(
        journal(
            StatusReported("working"),
            (1, start("once")),
            (2, start("read")),
            ThoughtRecorded("hm"),
            (2, ToolCallCompleted(result=SOME)),
            (1, ToolCallInDoubt(1, "no answer", BROKEN)),
            AttentionNeeded("in_doubt", "call 1"),
            RunReleased("needs_attention", "a person"),
        )
    )
    assert (state.status, state.seq, state.said, state.worker) == ("needs_attention", 10, "working", None)
    assert (list(state.calls), list(state.open)) == ([1, 2], [1])
    assert (state.calls[1].doubt, state.calls[1].failure, state.calls[1].timeout_s) == ("no answer", BROKEN, 5.0)
    assert (state.created_at, state.updated_at) == (100, 1000)


@pytest.mark.parametrize(
    ("how", "status"),
    [(ToolCallResolved("happened", by="ann", result=SOME), "queued"), (ToolCallResolved("did_not_happen", by="ann"), "queued")],
)
def test_a_persons_answer_to_a_doubt_sends_the_run_back_to_work(how: AnyBody, status: str) -> None:
    state = fold(
        journal(
            (1, start()), (1, ToolCallInDoubt(1, "?")), AttentionNeeded("in_doubt", "call 1"), RunReleased("needs_attention", "p"), (1, how)
        )
    )
    assert (state.status, state.attention) == (status, None)


def test_an_answer_sends_a_run_that_is_being_cancelled_back_to_that() -> None:
    state = fold(
        journal(
            (1, start()),
            CancelRequested("ann"),
            (1, ToolCallInDoubt(1, "?")),
            AttentionNeeded("in_doubt", "call 1"),
            RunReleased("needs_attention", "p"),
            (1, ToolCallResolved("happened", by="ann", result=SOME)),
        )
    )
    assert (state.status, state.attention) == ("cancelling", None)


@pytest.mark.parametrize(
    ("end", "status"),
    [(RunSucceeded(SOME), "succeeded"), (RunFailed(BROKEN), "failed"), (RunCancelled("enough"), "cancelled")],
)
def test_nothing_comes_after_the_end(end: AnyBody, status: str) -> None:
    state = fold(journal(end))
    assert (state.finished, state.status) == (True, status)
    for late in (ThoughtRecorded("one more thing"), RunClaimed("w2"), end):
        with pytest.raises(StoreCorrupt, match="comes after the run's end"):
            state.apply(Event(state.seq + 1, "0" * 32, 1, 1, None, None, late))


@pytest.mark.parametrize("seq", [0, 2, 4, 7])
def test_a_gap_a_repetition_and_a_step_back_are_noticed(seq: int) -> None:
    state = fold(journal())
    with pytest.raises(StoreCorrupt, match=f"event {seq} follows event 2"):
        state.apply(Event(seq, "0" * 32, 1, 1, None, None, ThoughtRecorded("x")))


@pytest.mark.parametrize("move", [move for move in MOVES if move != "initiated"])
def test_an_event_about_a_call_that_was_never_initiated_is_refused(move: str) -> None:
    words = "where no approval is open" if move in ("granted", "refused") else "which was never initiated"
    with pytest.raises(StoreCorrupt, match=f"call 1, {words}"):
        fold(journal((1, MOVES[move])))


def test_calls_are_numbered_without_a_hole() -> None:
    with pytest.raises(StoreCorrupt, match="call 3"):
        fold(journal((1, start()), (3, start())))


@pytest.mark.parametrize("body", [start(), ToolCallCompleted(result=SOME), RetryScheduled(attempt=1, at=1)], ids=lambda b: type(b).__name__)
def test_a_call_event_that_names_no_call_is_refused(body: AnyBody) -> None:
    with pytest.raises(StoreCorrupt, match="names no call"):
        fold(journal(body))


def test_an_event_that_is_not_about_a_call_must_not_name_one() -> None:
    with pytest.raises(StoreCorrupt, match="not about a call"):
        fold(journal((1, start()), (1, ThoughtRecorded("x"))))


def test_crashes_are_counted_until_there_is_progress() -> None:
    state = fold(journal(CRASHED, CRASHED))
    assert state.crashes == 2
    assert fold(journal(CRASHED, CRASHED, (1, start()))).crashes == 2, "an intent is no progress: it is where workers die"
    for progress in ((1, ToolCallCompleted(result=SOME)), (1, ToolCallFailed(BROKEN, final=True))):
        assert fold(journal(CRASHED, (1, start()), progress)).crashes == 0
    assert fold(journal(CRASHED, TimerFired(1))).crashes == 0
    assert fold(journal(CRASHED, RunReleased("waiting", "timer", 5))).crashes == 0
    assert fold(journal(CRASHED, AttentionNeeded("poison", "x"), RunRequeued("ann"))).crashes == 0


@pytest.mark.parametrize("lost", [ToolCallFailed, ToolCallInDoubt])
def test_an_attempt_that_came_further_than_those_before_is_progress(lost: type) -> None:
    def reported(part: int) -> tuple[int, AnyBody]:
        progress = pack(encode({"part": part}))[0]
        return 1, ToolCallFailed(BROKEN, progress=progress) if lost is ToolCallFailed else ToolCallInDoubt(1, "lost", progress=progress)

    again = (1, start())
    assert fold(journal(again, CRASHED, reported(7))).crashes == 0, "the first part that was reported"
    assert fold(journal(again, CRASHED, reported(7), again, CRASHED, reported(9))).crashes == 0
    assert fold(journal(again, CRASHED, reported(7), again, CRASHED, reported(7))).crashes == 1
    back = fold(journal(again, CRASHED, reported(7), again, CRASHED, reported(2), again, CRASHED, reported(5)))
    assert (back.crashes, back.crashes_alone) == (2, 2), "the furthest part counts, not the last one"


def test_deaths_that_no_other_run_can_be_blamed_for_are_counted_apart() -> None:
    beside = RunClaimed("w2", takeover=True, proven_dead=True, lost_with=3)
    state = fold(journal(beside, CRASHED, beside, CRASHED))
    assert (state.crashes, state.crashes_alone) == (4, 2)
    for progress in ((1, ToolCallCompleted(result=SOME)), (1, ToolCallFailed(BROKEN, final=True))):
        assert fold(journal(CRASHED, (1, start()), progress)).crashes_alone == 0
    assert fold(journal(CRASHED, TimerFired(1))).crashes_alone == 0
    assert fold(journal(CRASHED, RunReleased("waiting", "timer", 5))).crashes_alone == 0
    assert fold(journal(CRASHED, AttentionNeeded("poison", "x"), RunRequeued("ann"))).crashes_alone == 0


def test_whoever_takes_a_run_looks_anew_whether_it_needs_a_person() -> None:
    attended = (AttentionNeeded("in_doubt", "call 1"), RunReleased("needs_attention", "a person", wake_at=9))
    assert fold(journal(*attended)).attention == attended[0]
    assert fold(journal(*attended, RunClaimed("w2"))).attention is None, "or its next rest shows a reason that has passed"


def test_a_doubt_about_any_attempt_stays_until_somebody_settles_it() -> None:
    again = ToolCallInitiated("pay", "keyed", "k", attempt=2)
    doubted: list[tuple[int, AnyBody]] = [(1, start()), (1, ToolCallInDoubt(1, "who knows")), (1, again)]
    assert not fold(journal((1, start()))).calls[1].doubtful
    for after in ([], [(1, ToolCallFailed(BROKEN, attempt=2))]):
        assert fold(journal(*doubted, *after)).calls[1].doubtful
    settled = (1, ToolCallResolved("did_not_happen", by="ann", attempt=2))
    assert not fold(journal(*doubted, (1, ToolCallInDoubt(2, "still")), settled)).calls[1].doubtful


def test_attempts_that_a_worker_could_not_wait_for_count_as_still_running_until_somebody_settles_them() -> None:
    abrupt, calm = (RunReleased("queued", "another look", abrupt=how) for how in (True, False))
    assert fold(journal((1, start()), abrupt)).calls[1].loose
    assert not fold(journal((1, start()), calm)).calls[1].loose
    told = ToolCallInDoubt(1, "it did not stop", loose=True)
    assert fold(journal((1, start()), (1, told), (1, ToolCallInDoubt(1, "its hook does not know")))).calls[1].loose
    assert not fold(journal((1, start()), (1, told), (1, ToolCallResolved("did_not_happen", by="ann")))).calls[1].loose
    ended = fold(journal((1, start()), (1, ToolCallCompleted(result=SOME)), (2, start()), abrupt))
    assert [ended.calls[number].loose for number in (1, 2)] == [False, True]


def test_the_first_cancel_counts_and_the_status_stays_cancelling() -> None:
    state = fold(journal(CancelRequested("ann", "too dear"), CancelRequested("bob"), CLAIMED))
    assert state.status == "cancelling"
    assert state.cancel == CancelRequested("ann", "too dear")


def test_timers_that_the_run_is_parked_on_are_known_until_they_go_off() -> None:
    parked = journal(TimerSet(1, 900), TimerSet(2, 950), RunReleased("waiting", "timer", 900))
    state = fold(parked)
    assert (state.timers, state.wake_at, state.waiting_for) == ({1: 900, 2: 950}, 900, "timer")
    state.apply(Event(state.seq + 1, "0" * 32, 1, 2, None, None, CLAIMED))
    assert (state.wake_at, state.waiting_for) == (None, None)
    state.apply(Event(state.seq + 1, "0" * 32, 1, 2, None, None, TimerFired(1)))
    assert state.timers == {2: 950}


def test_folding_event_by_event_is_folding_the_whole() -> None:
    events = journal((1, start()), (1, ToolCallFailed(BROKEN)), (1, RetryScheduled(attempt=2, at=5)), (1, MOVES["initiated"]))
    state = RunState()
    for at, event in enumerate(events, 1):
        state.apply(event)
        assert vars_of(state) == vars_of(fold(events[:at]))
    assert (state.calls[1].attempt, state.calls[1].intent_seq, state.calls[1].retry_at) == (2, 6, None)


def vars_of(state: RunState) -> dict[str, Any]:
    return {**structs.asdict(state), "calls": {number: repr(call) for number, call in state.calls.items()}, "open": sorted(state.open)}


ASKED: list[AnyBody | tuple[int, AnyBody]] = [(1, PROPOSED), (1, MOVES["asked"])]  # events 3 and 4


def test_a_call_that_is_held_begins_only_after_it_was_kept() -> None:
    begins = (1, ToolCallInitiated("pay", "keyed", "k", digest="d", approval="ap-1"))
    for approved in ([], [(1, MOVES["granted"])]):
        held = [*ASKED, *approved, (1, CallHeld())]
        assert fold(journal(*held)).calls[1].held
        if approved:
            with pytest.raises(StoreCorrupt, match="begins call 1, which its agent holds"):
                fold(journal(*held, begins))
            assert fold(journal(*held, CallKept(1), begins)).calls[1].phase == "started"
        assert not fold(journal(*held, CallKept(1))).calls[1].held
        with pytest.raises(StoreCorrupt, match="cannot follow"):
            fold(journal(*held, (1, CallHeld())))
        assert fold(journal(*held, CallKept(1), (1, CallHeld()))).calls[1].held


@pytest.mark.parametrize("phase", ["started", "in_doubt", "idle", "completed", "failed"])
def test_a_call_that_has_begun_or_ended_cannot_be_held(phase: Phase) -> None:
    state = in_phase(phase)
    with pytest.raises(StoreCorrupt, match=f"call 1 is {phase}"):
        state.apply(Event(state.seq + 1, "0" * 32, 9_999, 1, 1, state.seq, CallHeld()))


@pytest.mark.parametrize(("back_to", "held"), [(4, False), (5, True), (6, False), (7, True), (8, False)])
def test_a_run_that_goes_back_holds_what_was_held_there(back_to: int, held: bool) -> None:
    considered = [*ASKED, (1, CallHeld()), CallKept(1), (1, CallHeld()), CallKept(1), RunFailed(BROKEN)]
    assert fold(journal(*considered, RunReopened("ann", back_to))).calls[1].held is held


def test_folding_is_linear() -> None:
    """10,000 calls fold in well under a second; a fold that copied would take minutes."""
    bodies = [pair for number in range(1, 10_001) for pair in ((number, start("read")), (number, ToolCallCompleted(result=SOME)))]
    state = fold(journal(*bodies))
    assert (len(state.calls), state.open) == (10_000, {})


def test_that_the_worker_of_a_cut_off_attempt_is_gone_outlives_a_clean_release_and_ends_with_the_next_attempt() -> None:
    state = RunState()
    ask = ToolCallInitiated("pay", "once", "key", args=None, reconcile=True)
    story: list[tuple[AnyBody, int | None]] = [
        (CREATED, None),
        (CLAIMED, None),
        (ask, 1),
        (CRASHED, None),
        (ToolCallInDoubt(1, "its worker died inside it"), 1),
        (RunReleased("queued", "a drain"), None),
        (CLAIMED, None),
    ]
    for at, (body, call) in enumerate(story, 1):
        state.apply(Event(at, "0" * 32, at, 1, call, None, body))
    assert not state.calls[1].worker_may_live
    assert state.calls[1].quiet_since == 4, "its worker was found dead by that claim"
    assert state.calls[1].failed_at != state.calls[1].attempt, "its end is not on record"
    state.apply(Event(8, "0" * 32, 8, 1, 1, None, ToolCallResolved("did_not_happen", by="ann")))
    state.apply(Event(9, "0" * 32, 9, 1, 1, None, ToolCallInitiated("pay", "once", "key", attempt=2)))
    assert state.calls[1].quiet_since == 0
