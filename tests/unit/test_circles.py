"""When a run goes in circles, and when it only seems to do so."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalRequested,
    CancelRequested,
    ChildFinished,
    ChildStarted,
    DecisionMade,
    Effect,
    Event,
    Failure,
    RunClaimed,
    RunCreated,
    RunRequeued,
    RunUnpaused,
    SignalReceived,
    StatusReported,
    ThoughtRecorded,
    TimerFired,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
    Usage,
)
from perdure.core.loop_detector import Circles, CircleWatch
from perdure.core.state import RunState
from perdure.errors import InvalidInput


def payload(value: Any, inline: int = codec.INLINE_BYTES) -> Payload:
    return codec.pack(codec.encode(value), inline)[0]


class Story:
    """A run that is journaled, folded and watched event by event. `said` has the answers of the watch."""

    def __init__(self, circles: Circles | None = None, **limits: Any) -> None:
        self.circles = circles or Circles(**limits)
        self.state = RunState()
        self.watch = CircleWatch(self.circles)
        self.events: list[Event] = []
        self.said: list[str | None] = []
        self.tell(RunCreated("r", "agent", "1", "", payload([])))
        self.tell(RunClaimed("w"))

    def tell(self, body: AnyBody, call: int | None = None) -> str | None:
        seq = len(self.events) + 1
        event = Event(seq, f"{seq:032x}", seq, 1, call, seq - 1 or None, body)
        self.state.apply(event)
        self.events.append(event)
        self.said.append(self.watch.observe(event, None if call is None else self.state.calls.get(call)))
        return self.said[-1]

    def begin(self, tool: str = "search", args: Any = None, effect: Effect = "read") -> int:
        number = self.state.numbers + 1
        encoded = codec.encode({"q": "x"} if args is None else args)
        self.tell(ToolCallInitiated(tool, effect, f"k{number}", args=codec.pack(encoded)[0], digest=codec.digest(encoded)), number)
        return number

    def call(self, result: Any = "none", *, usage: Usage | None = None, inline: int = codec.INLINE_BYTES, **what: Any) -> str | None:
        return self.tell(ToolCallCompleted(payload(result, inline), usage=usage), self.begin(**what))

    def fail(self, message: str = "no", *, usage: Usage | None = None, **what: Any) -> str | None:
        return self.tell(ToolCallFailed(Failure("error", "Oops", message), final=True, usage=usage), self.begin(**what))


# --- the same answer again and again ------------------------------------------------------------------------------------------------


def test_the_same_call_with_the_same_answer_is_a_circle_at_the_nth_time_and_not_before():
    story = Story(repeats=3)
    assert [story.call({"hits": []}) for _ in range(2)] == [None, None]
    assert story.call({"hits": []}) == (
        'search(q="x") has returned the same result 3 times in a row, calls 1 to 3, and nothing else has changed since event 4: {"hits":[]}'
    )


def test_a_circle_of_several_calls_is_one_too():
    story = Story(repeats=3)
    said = [story.call(args={"q": index % 2}) for index in range(10)]
    # Calls 1 and 2 were new; call 2 and its like have come three times since with call 6.
    assert said.index(next(filter(None, said))) == 5
    assert said[5] == 'search(q=1) has returned the same result 3 times, calls 2 to 6, and nothing else has changed since event 6: "none"'


def test_the_same_failure_again_and_again_is_a_circle():
    story = Story(repeats=2)
    assert story.fail("down") is None
    assert str(story.fail("down")).startswith('search(q="x") has failed in the same way 2 times in a row, calls 1 to 2')
    assert str(story.watch.circling).endswith(": Oops: down")


@pytest.mark.parametrize(
    "others", [{"tool": "find"}, {"args": {"q": "y"}}, {"result": "some"}, {"result": None}, {"result": True, "args": {"q": 1}}]
)
def test_whatever_is_new_is_progress(others):
    story = Story(repeats=2)
    assert story.call() is None
    assert story.call(**others) is None
    assert story.call() is None  # once since the reset
    assert story.call() is not None


def test_what_was_seen_long_ago_is_not_new():
    story = Story(repeats=3)
    for number in range(50):
        assert story.call(number) is None
    assert [story.call(number) is not None for number in (0, 1, 0, 1, 0)] == [False] * 4 + [True]


def test_a_failure_and_an_answer_of_the_same_text_are_two_things():
    story = Story(repeats=2)
    assert story.fail("x") is None
    assert story.call("x") is None


def test_an_answer_is_the_same_in_place_and_in_the_blob_store():
    story = Story(repeats=2)
    long = "x" * 500
    assert story.call(long) is None
    said = story.call(long, inline=10)
    assert said is not None
    assert len(said) < 300


def test_attempts_of_one_call_are_no_circle():
    story = Story(repeats=2)
    number = story.begin(effect="idempotent")
    for attempt in range(1, 6):
        assert story.tell(ToolCallFailed(Failure("timeout", "Timeout", "late"), attempt), number) is None
        again = ToolCallInitiated("search", "idempotent", "k", attempt + 1)
        assert story.tell(again, number) is None
    assert story.tell(ToolCallCompleted(payload(1), attempt=6), number) is None


def ask(story: Story) -> int:
    number = story.state.numbers + 1
    story.tell(ApprovalRequested(f"a{number}", "x", payload({}), "d"), number)
    return number


def child(story: Story) -> int:
    number = story.state.numbers + 1
    story.tell(ChildStarted("c", "1", f"r/{number}", payload([]), "d"), number)
    return number


def arrives(story: Story, what: str) -> None:
    """Something happens that is no answer to a tool's call."""
    match what:
        case "timer":
            story.tell(TimerFired(1))
        case "signal":
            story.tell(SignalReceived("t", payload("go on"), "ann"))
        case "approval":
            number = ask(story)
            story.tell(ApprovalDecided(f"a{number}", True, "ann", "d"), number)
        case "child":
            number = child(story)
            story.tell(ChildFinished(f"r/{number}", "succeeded"), number)
        case "requeue":
            story.tell(RunRequeued("ann"))
        case "unpause":
            story.tell(RunUnpaused("ann"))
        case "cancel":
            story.tell(CancelRequested("ann"))
        case "resolve":
            number = story.begin("pay", effect="once")
            story.tell(ToolCallInDoubt(1, "lost"), number)
            story.tell(ToolCallResolved("did_not_happen", "ann"), number)
        case "thought":
            story.tell(ThoughtRecorded("hm"))
        case "status":
            story.tell(StatusReported(f"working {len(story.events)}"))
        case "old status":
            story.tell(StatusReported("working"))
        case "choice":
            story.tell(DecisionMade(payload(len(story.events))))
        case "old choice":
            story.tell(DecisionMade(payload("left")))
        case "read":
            story.call(len(story.events), tool="look")
        case "effect":
            story.call(len(story.events), tool="write", effect="idempotent")
        case "old effect":
            story.call("done", tool="write", effect="once")
        case "failed effect":
            story.fail(str(len(story.events)), tool="write", effect="once")
        case "claim":
            story.tell(RunClaimed("w2", takeover=True))
        case _:
            raise AssertionError(what)


def ended(story: Story, agent: str = "c", digest: str = "d", *, output: Any = "none", failure: str | None = None) -> str | None:
    """A child that is started and ends."""
    number = story.state.numbers + 1
    story.tell(ChildStarted(agent, "1", f"r/{number}", payload({"q": "x"}), digest), number)
    if failure is not None:
        why = Failure("cancelled", "RunCancelled", f"run r/{number} was cancelled: {failure}")
        return story.tell(ChildFinished(f"r/{number}", "cancelled", failure=why), number)
    return story.tell(ChildFinished(f"r/{number}", "succeeded", output=payload(output)), number)


def test_the_same_child_with_the_same_result_is_a_circle_as_a_call_is():
    story = Story(repeats=3)
    assert [ended(story, output=[]) for _ in range(2)] == [None, None]
    assert ended(story, output=[]) == (
        'c(q="x") has returned the same result 3 times in a row, calls 1 to 3, and nothing else has changed since event 4: []'
    )


def test_children_that_end_without_success_in_the_same_way_are_a_circle_though_each_has_an_id_of_its_own():
    story = Story(repeats=2)
    assert ended(story, failure="enough") is None
    assert "failed in the same way 2 times" in str(ended(story, failure="enough"))


@pytest.mark.parametrize("other", [{"agent": "k"}, {"digest": "e"}, {"output": "some"}, {"failure": "enough"}])
def test_a_child_that_is_new_in_any_way_is_progress(other):
    story = Story(repeats=2)
    assert ended(story) is None
    assert ended(story, **other) is None
    assert ended(story) is None
    assert ended(story) is not None


def test_a_child_and_a_call_of_the_same_name_are_two_things():
    story = Story(repeats=2)
    assert story.call(tool="c", result="none") is None
    assert ended(story) is None


@pytest.mark.parametrize(("output", "stops"), [("new", False), ("none", True)])
def test_money_spent_between_children_counts_unless_one_of_them_brings_something_new(output, stops):
    story = Story(usd=1)
    ended(story)
    story.call(1, usage=Usage(usd_micros=700_000))
    ended(story, output=output)
    assert (story.call(2, usage=Usage(usd_micros=700_000)) is not None) == stops


FROM_OUTSIDE = ["signal", "approval", "child", "requeue", "unpause", "cancel", "resolve"]


@pytest.mark.parametrize("what", [*FROM_OUTSIDE, "timer", "read", "effect", "failed effect"])
def test_the_count_begins_anew_after(what):
    story = Story(repeats=3)
    for _ in range(2):
        story.call()
    arrives(story, what)
    assert [story.call() is not None for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("what", ["thought", "status", "old status", "choice", "claim"])
def test_the_count_goes_on_over(what):
    story = Story(repeats=3)
    for _ in range(2):
        story.call()
    arrives(story, what)
    assert story.call() is not None


def test_polling_with_a_timer_between_is_no_circle():
    story = Story(repeats=2)
    for _ in range(20):
        assert story.call("pending") is None
        assert story.tell(TimerFired(1)) is None


# --- spending without an effect --------------------------------------------------------------------------------------------------------

CENT = Usage(usd_micros=10_000, tokens_in=90, tokens_out=10, tokens_cached=90)


def test_money_that_is_spent_without_an_effect_is_a_circle_beyond_the_limit_and_not_at_it():
    story = Story(usd=0.05)
    assert [story.call(number, usage=CENT) for number in range(5)] == [None] * 5
    assert story.call(5, usage=CENT) == (
        "$0.06 spent since event 1 without progress (at most $0.05): no new effect, answer from outside, status or choice"
    )


def test_tokens_count_in_and_out():
    story = Story(tokens=250)
    assert [story.call(number, usage=CENT) for number in range(2)] == [None] * 2
    assert str(story.call(2, usage=CENT)).startswith("300 tokens used since event 1 without progress (at most 250)")


def test_whatever_was_spent_counts_also_on_what_failed_or_is_in_doubt():
    story = Story(usd="0.02")
    assert story.fail(usage=CENT) is None
    number = story.begin(effect="once")
    assert story.tell(ToolCallInDoubt(1, "lost", usage=CENT), number) is None
    assert story.fail("other", usage=Usage(usd_micros=1)) is not None
    assert str(story.watch.circling).startswith("$0.020001 spent")


@pytest.mark.parametrize("what", [*FROM_OUTSIDE, "effect", "status", "choice"])
def test_an_effect_begins_the_spending_anew(what):
    story = Story(usd=0.02)
    for number in range(2):
        story.call(number, usage=CENT)
    arrives(story, what)
    since = len(story.events)
    assert [story.call(f"n{number}", usage=CENT) is not None for number in range(3)] == [False, False, True]
    assert f"$0.03 spent since event {since} " in str(story.watch.circling)


@pytest.mark.parametrize("what", ["timer", "read", "old effect", "failed effect", "old status", "old choice", "thought", "claim"])
def test_what_shows_nothing_new_does_not(what):
    story = Story(usd=0.02)
    for before in ("old effect", "old status", "old choice"):
        arrives(story, before)
    for number in range(2):
        story.call(number, usage=CENT)
    arrives(story, what)
    assert story.call("n", usage=CENT) is not None


def test_what_the_effect_itself_has_cost_is_forgiven():
    story = Story(usd=0.02)
    assert story.call("sent", tool="mail", effect="once", usage=Usage(usd_micros=10**9)) is None


# --- saying it once, and again after a crash --------------------------------------------------------------------------------------------


def test_it_is_said_once_and_stays_true_until_a_person_sends_the_run_on():
    story = Story(repeats=2)
    story.call()
    said = story.call()
    assert said is not None
    assert [story.call() for _ in range(3)] == [None] * 3
    arrives(story, "signal")
    assert story.watch.circling == said
    arrives(story, "requeue")
    assert story.watch.circling is None
    assert [story.call() is not None for _ in range(2)] == [False, True]


@pytest.mark.parametrize("what", ["requeue", "unpause", "cancel", "resolve"])
def test_whoever_sends_the_run_on_gives_it_a_new_start_in_every_respect(what):
    story = Story(repeats=2, usd=0.01)
    story.call(usage=CENT)
    assert story.call(usage=CENT) is not None
    arrives(story, what)
    assert story.watch.circling is None
    assert story.call(usage=CENT) is None


def test_an_answer_of_a_reconcile_hook_is_an_answer_and_not_a_person():
    story = Story(repeats=2)
    for expected in (False, True):
        number = story.begin("pay", effect="once")
        story.tell(ToolCallInDoubt(1, "lost"), number)
        said = story.tell(ToolCallResolved("happened", "reconcile", result=payload("paid")), number)
        assert (said is not None) is expected


def test_a_circle_of_both_kinds_is_told_as_the_first_that_shows():
    story = Story(repeats=2, usd=0.01)
    story.call(usage=CENT)
    assert "same result 2 times" in str(story.call(usage=CENT))


THINGS = [
    *FROM_OUTSIDE,
    "timer",
    "thought",
    "status",
    "old status",
    "choice",
    "old choice",
    "read",
    "effect",
    "old effect",
    "failed effect",
    "claim",
]


@given(st.lists(st.sampled_from([*THINGS, *["call"] * 12]), max_size=40), st.integers(2, 4), st.integers(1, 5))
def test_a_replay_says_the_same_at_the_same_events(things, repeats, cents):
    story = Story(repeats=repeats, usd=cents / 100)
    for thing in things:
        if thing == "call":
            story.call(usage=CENT)
        else:
            arrives(story, thing)
    again, state, said = CircleWatch(story.circles), RunState(), []
    for event in story.events:
        state.apply(event)
        said.append(again.observe(event, None if event.call is None else state.calls.get(event.call)))
    assert said == story.said
    assert again.circling == story.watch.circling


def test_it_keeps_digests_and_no_payloads():
    story = Story(repeats=10**6)
    number = story.begin()
    state = story.state.calls[number]
    tracemalloc.start()
    try:
        for seq in range(2_000):
            answer = ToolCallCompleted(payload(f"{seq}" * 2_000))
            story.watch.observe(Event(seq, "", 0, 1, number, None, answer), state)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2_000 * 300


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"say what counts as a circle"),
        *(({"repeats": value}, r"Circles\(repeats=") for value in (0, 1, -1, True, 2.0, "3", 10**16)),
        *(({"tokens": value}, r"Circles\(tokens=") for value in (0, -1, True, 1.0, "3")),
        *(({"usd": value}, r"Circles\(usd=") for value in (0, -1, True, "x", float("nan"), 1e999, 0.0000001)),
    ],
)
def test_limits_that_make_no_sense_are_refused(given, said):
    with pytest.raises(InvalidInput, match=said):
        Circles(**given)


def test_limits_that_make_sense_are_taken():
    assert Circles(repeats=10).usd_micros is None
    assert Circles(usd="0.50").usd_micros == 500_000


@pytest.mark.parametrize("args", [{"q": "x" * 10_000}, {"q\ud800": "\ud800"}, {}, "text"])
def test_whatever_the_arguments_are_the_sentence_stays_short(args):
    story = Story(repeats=2)
    story.call("y" * 70_000, args=args)
    said = story.call("y" * 70_000, args=args)
    assert said is not None
    assert len(said) < 400
