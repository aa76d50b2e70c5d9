"""The calls of a run on the page: calls in doubt, calls that were cut off, that ended, and that never began.

A call that may be repeated (`read`, `idempotent`, `transaction`) is never in doubt here: it was cut off, and is run
again. This module also has the words for what a run waits for, and for its signals and unread post.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.decide import quiet_at
from perdure.core.events import (
    CallAnswered,
    ChildFinished,
    DecisionMade,
    Event,
    PlanGenerated,
    RunClaimed,
    RunReleased,
    SignalReceived,
    ToolCallProposed,
    event_at,
    place_of,
    tag_of,
)
from perdure.core.prompt_deltas import is_request
from perdure.core.state import AskState, CallState, ChildState, happened
from perdure.core.taken_back import taken_back
from perdure.inspect.text import (
    EFFECTS,
    Load,
    asked_words,
    at,
    called,
    clip,
    failed,
    iso,
    places,
    plain,
    plural,
    progress_words,
    result_words,
    seconds,
    shown,
    span,
    used,
    versioned,
)
from perdure.inspect.timeline import steps_in, steps_of
from perdure.inspect.view import RunView
from perdure.inspect.why.context import Scene
from perdure.inspect.why.waiting import Asked, outcome, verdict
from perdure.store.api import InboxRow

STEPS_SHOWN = 20  # a plan may have a thousand steps
ARGS_SHOWN = 400  # long, because a person must know exactly which call is in doubt
_HOOK = "its reconcile hook"  # in the recorded reason of a doubt, these words begin the part about the hook


class CallInDoubt(Struct, frozen=True):
    """A call that may or may not have happened."""

    call: int
    tool: str
    effect: str
    asked: str
    key: str
    keyless: bool  # True: the tool did not get the key, so no service knows it
    attempt: int
    asked_at: str
    since: str
    age: str
    age_s: float
    why: str
    progress: str | None  # the progress that the attempt reported, in words; it proves nothing
    places: list[str]
    worker: str | None
    meaning: str
    check: str
    too_early: str | None  # why “not found” at the service proves nothing yet
    by_itself: str  # what the next worker does about the call without a person
    settles_itself: bool  # False: the call waits until a person has settled the doubt
    recorded: bool  # False: the worker died, and the next worker has not yet recorded that the call is in doubt
    seq: int


def doubts(scene: Scene) -> list[CallInDoubt]:
    """The open calls with the effect `once` or `keyed`: each may or may not have happened."""
    return [_doubt(call, scene) for call in _left_open(scene) if call.effect in ("once", "keyed")]


def cut_off(scene: Scene) -> list[CallState]:
    """The open calls that were cut off and are safe to run again."""
    return [call for call in _left_open(scene) if call.effect not in ("once", "keyed")]


def _left_open(scene: Scene) -> list[CallState]:
    # The call has an intent and no result, and no live worker can be performing the call.
    opened = scene.reading.state.open.values()
    return [call for call in opened if call.phase == "in_doubt" or (call.phase == "started" and not scene.held)]


def _doubt(call: CallState, scene: Scene) -> CallInDoubt:
    events = scene.reading.events
    asked_at = call.started_at
    since = next(
        (e.ts for e in events[place_of(events, call.intent_seq) :] if e.call == call.number and e.type == "tool_call_in_doubt"), asked_at
    )
    by_itself, settles_itself = _by_itself(call, scene)
    too_early = _too_early(call, scene)
    return CallInDoubt(
        call=call.number,
        tool=call.tool,
        effect=call.effect,
        asked=called(call.tool, call.args, ARGS_SHOWN),
        key=call.key,
        keyless=call.keyless,
        attempt=call.attempt,
        asked_at=iso(asked_at),
        since=iso(since),
        age=span(scene.now - since),
        age_s=seconds(scene.now - since),
        why=_why_doubt(call, scene),
        progress=reached(call, scene),
        places=places(call.failure),
        worker=_performer(call.intent_seq, events),
        meaning=EFFECTS[call.effect],
        check=_check(call, too_early),
        too_early=too_early,
        by_itself=by_itself,
        settles_itself=settles_itself,
        recorded=call.phase == "in_doubt",
        seq=call.last_seq,
    )


def _by_itself(call: CallState, scene: Scene) -> tuple[str, bool]:
    """What the next worker does about this call in doubt without a person, in words. And: can that settle the doubt?"""
    if scene.reading.state.finished:
        return "nothing: the run has ended without its agent, and what was in doubt stays so here", False
    if call.has_reconcile and call.asks < scene.max_asks:
        return "resume asks its reconcile hook first; a person is needed only if the hook does not know", True
    if call.has_reconcile:
        return "nothing: its reconcile hook has been asked as often as it may be, so a person has to say", False
    if scene.reading.state.cancel is not None:
        return "nothing: the run is being cancelled, so it is not sent again; a person has to say", False
    if call.effect == "keyed":
        return "the next worker sends it again with the same key, as long as the key is inside its window", True
    return "nothing: it has no reconcile hook, so a person has to say", False


def _why_doubt(call: CallState, scene: Scene) -> str:
    if call.phase == "started":
        return f"its worker {'fell silent' if scene.silent else 'died'} inside it, and no worker has looked at it since"
    hook = hook_words(call, scene)
    base = _without_hook(call, scene)
    return f"{base}; {hook}" if base and hook else base or hook or "it may or may not have happened"


def hook_words(call: CallState, scene: Scene) -> str:
    """The last answer of the reconcile hook, in words; empty if the hook was not asked."""
    if call.asks and call.retry_at is not None:
        asked = f"asked {call.asks} of {scene.max_asks} times"
        return f"{_HOOK} says that it is in progress, {asked}, again at {at(call.retry_at, scene.now)}"
    told = call.doubt or ""
    words = told[told.index(_HOOK) :] if _HOOK in told else ""
    return words if scene.held else words.replace("is being asked", "was being asked")


def _without_hook(call: CallState, scene: Scene) -> str:
    if call.failure is not None:
        return f"no answer that would settle it: {failed(call.failure, 120)}"
    since = [event for event in scene.reading.events if call.intent_seq < event.seq <= call.last_seq]
    claims = [event.body for event in since if isinstance(event.body, RunClaimed)]
    if any(claim.takeover for claim in claims):
        return "the worker died inside it"
    return (call.doubt or "").partition(_HOOK)[0].rstrip("; ")


def reached(call: CallState, scene: Scene) -> str | None:
    """The last progress of the call, in words; None if no attempt of the call has reported progress."""
    stored = scene.progress.get(call.number)
    if stored is not None:
        return f"{progress_words(stored.progress)} (stored {span(scene.now - stored.at)} ago)"
    return None if call.progress is None else progress_words(scene.load(call.progress))


def _performer(intent_seq: int, events: Sequence[Event]) -> str | None:
    """The name of the worker that recorded the intent; None if it is not known."""
    return next(
        (
            event.body.name or event.body.worker
            for event in reversed(events[: place_of(events, intent_seq)])
            if isinstance(event.body, RunClaimed)
        ),
        None,
    )


def _too_early(call: CallState, scene: Scene) -> str | None:
    until = quiet_at(call, scene.patience)
    if until is None:
        return "its attempt may still be running" if call.quiet_since else "no worker has taken the run over yet"
    return f"its request may still arrive until {at(until, scene.now)}" if until > scene.now else None


def _check(call: CallState, too_early: str | None) -> str:
    counts = f"proves nothing yet, since {too_early}" if too_early else "means that it did not happen"
    if call.keyless:
        what = f"the tool was not given the key, so look at the service behind {call.tool} for what this call would have left there"
    else:
        what = f"look for this key at the service behind {call.tool}"
    return f"{what}. Found: it happened. Not found {counts}"


# -- Calls, approvals and children that have ended


class Done(Struct, frozen=True):
    """A call, an approval or a child that has ended."""

    call: int
    asked: str
    outcome: str  # "returned …" or "failed: …"
    places: list[str]  # only for a failed tool call: where the exception was raised
    key: str | None  # only for a tool call
    attempts: int
    at: str
    seq: int
    settled_by: str | None
    approval: str | None
    approved: str | None  # who approved the tool call, and with which edited values
    undone: str | None  # was the call undone later, and by which call?
    cost: str | None


Ended = tuple[int, Callable[[], Done]]


def ended(scene: Scene) -> tuple[list[Ended], list[Ended]]:
    """Two lists of calls, approvals and children, by call number: those that succeeded, and all others.

    Each entry has the number, and a function that describes the entry: if there are very many entries, only a few are
    described.
    """
    state = scene.reading.state
    asks = [ask for ask in state.asks.values() if ask.request.tool is None and not ask.pending]
    ends = {event.call: event.seq for event in scene.reading.events if isinstance(event.body, ChildFinished | CallAnswered)}
    both: tuple[list[Ended], list[Ended]] = ([], [])
    undone = taken_back(state, scene.load)
    past = scene.reading.superseded
    for call in state.calls.values():
        if call.ended and call.number not in past:
            both[call.phase == "failed"].append((call.number, partial(_done, call, scene, undone.get(call.number))))
    for ask in asks:
        if ask.number in past:
            continue
        both[ask.outcome != "approved"].append((ask.number, partial(_decided, ask, scene)))
    for child in state.children.values():
        if child.ended is not None and child.number not in past:
            both[child.ended.status != "succeeded"].append((child.number, partial(_returned, child, ends[child.number])))
    for some in both:
        some.sort(key=itemgetter(0))
    return both


def superseded(scene: Scene) -> list[Done]:
    """Calls that the run made, or may have made, before it was reopened, and that its agent has not made again.

    Calls that change nothing are left out, and so are calls that certainly did not happen.
    """
    state, past = scene.reading.state, scene.reading.superseded - scene.reading.inherited
    undone = taken_back(state, scene.load) if past else {}
    calls = [call for number, call in sorted(state.calls.items()) if number in past and happened(call) != "no"]
    found = [_done(call, scene, undone.get(call.number)) for call in calls]
    ends = {event.call: event.seq for event in scene.reading.events if isinstance(event.body, ChildFinished | CallAnswered)}
    found += [_returned(child, ends[number]) for number, child in state.children.items() if number in past and child.ended is not None]
    return sorted(found, key=lambda one: one.call)


def _done(call: CallState, scene: Scene, undone: int | None) -> Done:
    since = scene.undoing.calls.get(call.number) if scene.undoing is not None else None
    return Done(
        call=call.number,
        asked=asked_words(call, scene.load, 48),
        outcome=_outcome(call, scene),
        places=places(call.failure),
        key=call.key,
        attempts=call.attempt,
        at=iso(call.last_ts),
        seq=call.last_seq,
        settled_by=call.resolved_by,
        approval=call.approval,
        approved=_approved(call, scene),
        undone=since if undone is None else f"undone by call {undone}",
        cost=used(call.used) or None,
    )


def _outcome(call: CallState, scene: Scene) -> str:
    if not call.ended:
        return f"in doubt: {_why_doubt(call, scene)}"
    if call.phase == "failed":
        return f"failed: {failed(call.failure, 100)}" if call.attempt else f"was not made: {failed(call.failure, 100)}"
    if call.result is None:
        return f"happened; its result could not be recorded: {failed(call.failure, 80)}"
    return f"{'answered:' if is_request(call.args) else 'returned'} {result_words(call, scene.load, 48)}"


def _approved(call: CallState, scene: Scene) -> str | None:
    ask = scene.reading.state.asks.get(call.number)
    return None if ask is None or ask.outcome != "approved" else verdict(ask, scene.load)


def _decided(ask: AskState, scene: Scene) -> Done:
    return Done(
        call=ask.number,
        asked=called(ask.request.action, ask.request.input, 48),
        outcome=verdict(ask, scene.load),
        places=[],
        key=None,
        attempts=0,
        at=iso(ask.settled_at),
        seq=ask.settled_seq,
        settled_by=None,
        approval=ask.request.approval,
        approved=None,
        undone=None,
        cost=None,
    )


def _returned(child: ChildState, seq: int) -> Done:
    return Done(
        call=child.number,
        asked=called(versioned(child.agent, child.version), child.input, 48),
        outcome=outcome(child),
        places=[],
        key=None,
        attempts=1,
        at=iso(child.ended_at),
        seq=seq,
        settled_by=None,
        approval=None,
        approved=None,
        undone=None,
        cost=None,
    )


# -- What an unfinished run waits for, which calls never began, and which messages arrived too late


# `core/idle.py` writes the topics that a parked run waits for; this matches its words. A topic has no blank, comma or
# quote.
_SIGNALS = re.compile(r"(?:\A| or )(?:signal |[0-9,]+ signals: )('[^']+'(?:, '[^']+')*)(?:, …)?\Z")


class TopicSignals(Struct, frozen=True):
    """The signals on one topic that the journal has."""

    topic: str
    received: int
    waited_for: bool  # True: the run is or was parked to wait for a signal on this topic
    seq: int  # the seq of the last signal


def topics(scene: Scene) -> list[str]:
    """The signal topics that the parked run waits for."""
    row = scene.reading.row
    return _topics(row.waiting_for) if row.status == "waiting" else []


def _topics(waiting_for: str | None) -> list[str]:
    found = _SIGNALS.search(waiting_for) if waiting_for else None
    return [] if found is None else [topic.strip("'") for topic in found[1].split(", ")]


def heard(reading: RunView) -> list[TopicSignals]:
    """The signals in the journal, by topic. The journal does not say which signals the agent has received."""
    received: dict[str, list[int]] = {}
    waited: set[str] = set()
    for event in reading.events:
        match event.body:
            case SignalReceived(topic=topic):
                received.setdefault(topic, []).append(event.seq)
            case RunReleased(waiting_for=words):
                waited.update(_topics(words))
    return [TopicSignals(topic, len(seqs), topic in waited, seqs[-1]) for topic, seqs in received.items()]


def strays(reading: RunView) -> list[str]:
    """In words: signals to a parked run on topics that the run has never waited for. The sender may have mistyped."""
    if reading.past or reading.row.status not in ("waiting", "waiting_approval", "paused"):
        return []
    return [
        f"{plural(one.received, 'signal')} on {one.topic!r} (event {one.seq}): it has never waited for that topic so far"
        for one in heard(reading)
        if not one.waited_for
    ]


def waiting(scene: Scene, approvals: list[Asked]) -> list[str]:
    """In words: the timers, rate limits, retries and signals that the run waits for. No approvals, no children."""
    row, state, now = scene.reading.row, scene.reading.state, scene.now
    if state.finished:
        return []
    # A timer that the agent no longer waits for is still in the journal, but does not wake the run.
    waits = [f"timer {number} at {at(due, now)}" for number, due in state.timers.items() if due == (row.ready_at or state.wake_at)]
    waits += [_call_waits(call, scene) for call in state.open.values() if call.retry_at is not None]
    waits += [f"a signal on {topic!r}" for topic in topics(scene)]
    told = waits or approvals or state.alive
    if not told and row.waiting_for is not None and row.status in ("waiting", "waiting_approval", "paused"):
        waits.append(row.waiting_for + (f" at {at(row.ready_at, now)}" if row.ready_at is not None else ""))
    elif row.waiting_for is not None and "rate limit" in row.waiting_for and not any("rate limit" in wait for wait in waits):
        waits.append(row.waiting_for)
    return waits


def _call_waits(call: CallState, scene: Scene) -> str:
    assert call.retry_at is not None
    when = at(call.retry_at, scene.now)
    if call.phase in ("proposed", "approved"):
        return f"call {call.number} {call.tool}: its turn under the rate limit, at {when}"
    if call.asks and call.phase == "in_doubt":
        return f"call {call.number} {call.tool}: {hook_words(call, scene)}"
    said = failed(call.failure, 100) or call.doubt
    if is_request(call.args):
        return f"call {call.number} {call.tool}: asked again at {when} (attempt {call.attempt + 1}); the last attempt said: {said}"
    return f"call {call.number} {call.tool}: attempt {call.attempt + 1} at {when}; the last one said: {said}"


def unread_words(unread: Sequence[InboxRow]) -> list[str]:
    """The post that the run did not read before its end: a line with the count, then one line each."""
    if not unread:
        return []
    one = "signal" if all(isinstance(letter.body, SignalReceived) for letter in unread) else "message"
    head = f"{plural(len(unread), one)} arrived as it ended and {'was' if len(unread) == 1 else 'were'} not read:"
    return [head, *(_unread_line(letter) for letter in unread)]


def _unread_line(letter: InboxRow) -> str:
    match letter.body:
        case SignalReceived() as signal:
            return f"signal {signal.topic!r} from {signal.by}: {shown(signal.payload, 200)}"
        case None:
            return f"inbox row {letter.inbox_id}, which a newer perdure has written"
        case body:
            by = getattr(body, "by", None)
            return tag_of(body) + (f" from {by}" if by else "") + (f", about call {letter.call}" if letter.call is not None else "")


def unread_record(letter: InboxRow, load: Callable[[Payload], bytes]) -> dict[str, Any]:
    """One inbox row that was not read, as a JSON object with its whole payload."""
    body = letter.body
    signal = body if isinstance(body, SignalReceived) else None
    return {
        "type": None if body is None else tag_of(body),
        "event_id": letter.event_id,
        "call": letter.call,
        "by": getattr(body, "by", None),
        "topic": None if signal is None else signal.topic,
        "payload": None if signal is None else plain(signal.payload, load),
    }


def never_started(scene: Scene) -> list[str]:
    """In words: the calls that the agent asked for but that never began, and which code has not run."""
    state = scene.reading.state
    if state.started_seq is None:
        return ["the agent has not begun: no line of its code has run"] if not state.finished else ["the agent never began"]
    idle = [
        f"call {call.number}: {asked_words(call, scene.load)}: {_why_not(call, scene)}"
        for call in state.open.values()
        if call.phase in ("idle", "proposed", "failing", "awaiting_approval", "approved")
    ]
    idle += _steps_not_begun(scene)
    if state.finished:
        return idle
    if not state.numbers:
        return [*idle, "no call has been made yet"]
    return [*idle, f"whatever the agent does after event {state.seq} (its last call so far is {_latest(scene)}): that code has not run"]


def _steps_not_begun(scene: Scene) -> list[str]:
    """In words: the steps of the run's plan whose call was never made."""
    reading, state = scene.reading, scene.reading.state
    plan = next((event.body.plan for event in reversed(reading.events) if isinstance(event.body, PlanGenerated)), None)
    if plan is None:
        return []
    begun, asked = set(), {}
    for number, step in steps_of(reading.events, scene.load).items():
        if number in state.calls or number in state.children:
            begun.add(step.name)
        elif number in state.asks:
            asked[step.name] = state.asks[number]
    skipped = _skipped_steps(reading.events, scene.load)
    lines = []
    for name, tool, description in steps_in(plain(plan, scene.load)):
        if name in begun:
            continue
        if name in skipped:
            why = f"skipped: {clip(skipped[name], 200)}"
        elif name in asked and asked[name].pending:
            why = f"not begun: approval {asked[name].request.approval} is needed"
        elif name in asked:
            why = f"not begun: its approval was {asked[name].outcome}"
        else:
            why = "never begun: the plan ended first" if state.finished else "not begun yet"
        said = f" – {clip(description, 100)}" if description else ""
        lines.append(f"step {name} ({tool}){said}: {why}")
    more = len(lines) - STEPS_SHOWN
    return lines if more <= 1 else [*lines[:STEPS_SHOWN], f"and {plural(more, 'more step')} of the plan"]


def _skipped_steps(events: Sequence[Event], load: Load) -> dict[str, str]:
    """Step → why the plan went on without it, from the decision that agents/plan/follow.py records."""
    decided = [(plain(event.body.choice, load), event.body.reason or "") for event in events if isinstance(event.body, DecisionMade)]
    return {
        choice.removeprefix("skip step "): why for choice, why in decided if isinstance(choice, str) and choice.startswith("skip step ")
    }


def _why_not(call: CallState, scene: Scene) -> str:
    state = scene.reading.state
    if call.phase in ("idle", "failing"):
        after = "it follows when a worker has the run" if not state.finished else "the run ended first"
        return f"known not to have happened; {after}"
    if state.finished:
        return "never sent: the run ended first"
    considered = f"; the agent considers since event {call.holds[-1]} whether it still wants it" if call.held else ""
    if call.phase == "awaiting_approval":
        return f"not sent: approval {call.approval} is needed{considered}"
    if considered:
        return f"not sent yet{considered}"
    if call.phase == "approved":
        ask = state.asks[call.number]
        return f"not sent yet: approved by {ask.by}, and it starts when a worker has the run"
    proposed = getattr(event_at(scene.reading.events, call.first_seq), "body", None)
    until = proposed.until if isinstance(proposed, ToolCallProposed) else "handover"
    return {
        "approval": "not sent: it needs an approval, which the next worker asks for",
        "rate": "not sent: it waits for its turn under the rate limit",
        "budget": "not sent: there is not enough left in the budget",
        "handover": "not sent: its worker released the run first; it follows when another has the run",
        "fork": "not sent: this is a rehearsal, which would make this call now",
    }[until]


def _latest(scene: Scene) -> str:
    state = scene.reading.state
    number = state.numbers
    if number in state.calls:
        return f"{number} {state.calls[number].tool}"
    if number in state.children:
        return f"{number}, child {state.children[number].run_id}"
    return f"{number}, approval {state.asks[number].request.approval}"
