"""What an unfinished run waits for, what of it never began, and what arrived too late for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.events import RunReleased, SignalReceived, ToolCallProposed, tag_of
from perdure.core.prompts import is_request
from perdure.core.state import CallState
from perdure.inspect.asks import Asked
from perdure.inspect.doubts import hook_words
from perdure.inspect.models import asked_words
from perdure.inspect.scene import Scene
from perdure.inspect.view import RunView
from perdure.inspect.words import at, failed, plain, plural, shown
from perdure.store.api import InboxRow

# How `core.rest` says which topics a parked run listens to. No topic has a blank, a comma or a quotation mark in it.
_SIGNALS = re.compile(r"(?:\A| or )(?:signal |[0-9,]+ signals: )('[^']+'(?:, '[^']+')*)(?:, …)?\Z")


class Heard(Struct, frozen=True):
    """Signals on one topic that have reached the run."""

    topic: str
    received: int
    waited_for: bool  # the run has been parked, now or before, to wait for one on this topic
    seq: int  # of the last one


def topics(scene: Scene) -> list[str]:
    """The signal topics that the parked run listens to."""
    row = scene.reading.row
    return _topics(row.waiting_for) if row.status == "waiting" else []


def _topics(waiting_for: str | None) -> list[str]:
    found = _SIGNALS.search(waiting_for) if waiting_for else None
    return [] if found is None else [topic.strip("'") for topic in found[1].split(", ")]


def heard(reading: RunView) -> list[Heard]:
    """The signals that have reached the run, by topic. Which of them its code has read, no journal tells."""
    received: dict[str, list[int]] = {}
    waited: set[str] = set()
    for event in reading.events:
        match event.body:
            case SignalReceived(topic=topic):
                received.setdefault(topic, []).append(event.seq)
            case RunReleased(waiting_for=words):
                waited.update(_topics(words))
    return [Heard(topic, len(seqs), topic in waited, seqs[-1]) for topic, seqs in received.items()]


def strays(reading: RunView) -> list[str]:
    """Signals that a resting run was sent on topics that it has never waited for: perhaps the topic is mistyped."""
    if reading.past or reading.row.status not in ("waiting", "waiting_approval", "paused"):
        return []
    return [
        f"{plural(one.received, 'signal')} on {one.topic!r} (event {one.seq}): it has never waited for that topic so far"
        for one in heard(reading)
        if not one.waited_for
    ]


def waiting(scene: Scene, approvals: list[Asked]) -> list[str]:
    """What has to come or to happen before the run goes on, besides people: timers, turns, retries, signals."""
    row, state, now = scene.reading.row, scene.reading.state, scene.now
    if state.finished:
        return []
    # A timer whose wait was answered otherwise stays in the journal, and wakes nobody.
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
    """What arrived as the run ended and nobody read, counted and then one by one; empty when there is nothing of that kind."""
    if not unread:
        return []
    one = "signal" if all(isinstance(letter.body, SignalReceived) for letter in unread) else "message"
    head = f"{plural(len(unread), one)} arrived as it ended and {'was' if len(unread) == 1 else 'were'} not read:"
    return [head, *(_letter(letter) for letter in unread)]


def _letter(letter: InboxRow) -> str:
    match letter.body:
        case SignalReceived() as signal:
            return f"signal {signal.topic!r} from {signal.by}: {shown(signal.payload, 200)}"
        case None:
            return f"inbox row {letter.inbox_id}, which a newer perdure has written"
        case body:
            by = getattr(body, "by", None)
            return tag_of(body) + (f" from {by}" if by else "") + (f", about call {letter.call}" if letter.call is not None else "")


def unread_record(letter: InboxRow, load: Callable[[Payload], bytes]) -> dict[str, Any]:
    """The same, whole, as one JSON object."""
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
    """The calls that the agent wanted and nobody made, and the code that has not run."""
    state = scene.reading.state
    if state.started_seq is None:
        return ["the agent has not begun: no line of its code has run"] if not state.finished else ["the agent never began"]
    idle = [
        f"call {call.number}: {asked_words(call, scene.load)}: {_why_not(call, scene)}"
        for call in state.open.values()
        if call.phase in ("idle", "proposed", "failing", "awaiting_approval", "approved")
    ]
    if state.finished:
        return idle
    if not state.numbers:
        return [*idle, "no call has been made yet"]
    return [*idle, f"whatever the agent does after event {state.seq} (its last call so far is {_latest(scene)}): that code has not run"]


def _why_not(call: CallState, scene: Scene) -> str:
    state = scene.reading.state
    if call.phase in ("idle", "failing"):
        after = "it follows when a worker has the run" if not state.finished else "the run ended first"
        return f"known not to have happened; {after}"
    if state.finished:
        return "never sent: the run ended first"
    if call.phase == "awaiting_approval":
        return f"not sent: approval {call.approval} is needed"
    if call.phase == "approved":
        ask = state.asks[call.number]
        return f"not sent yet: approved by {ask.by}, and it starts when a worker has the run"
    proposed = scene.reading.events[call.first_seq - 1].body
    until = proposed.until if isinstance(proposed, ToolCallProposed) else "handover"
    return {
        "approval": "not sent: it needs an approval, which the next worker asks for",
        "rate": "not sent: it waits for its turn under the rate limit",
        "budget": "not sent: there is not enough left in the budget",
        "handover": "not sent: its worker gave the run up first; it follows when another has the run",
    }[until]


def _latest(scene: Scene) -> str:
    state = scene.reading.state
    number = state.numbers
    if number in state.calls:
        return f"{number} {state.calls[number].tool}"
    if number in state.children:
        return f"{number}, child {state.children[number].run_id}"
    return f"{number}, approval {state.asks[number].request.approval}"
