"""Calls of which nobody knows whether they happened: what was asked, by whom, and what would settle it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perdure.core.events import Event, RunClaimed
from perdure.core.state import CallState
from perdure.inspect.scene import Scene
from perdure.inspect.words import EFFECTS, called, clock, failed, span

ARGS_SHOWN = 400  # where there is a doubt, what was asked must be seen whole


class Doubt(Struct, frozen=True):
    """A call of which nobody knows whether it happened."""

    call: int
    tool: str
    effect: str
    asked: str
    key: str
    attempt: int
    asked_at: str
    since: str
    age: str
    why: str
    worker: str | None
    meaning: str
    check: str
    recorded: bool  # False: its worker died and nobody has looked yet; the next worker decides by effect class
    seq: int


def doubts(scene: Scene) -> list[Doubt]:
    """The open calls that may or may not have happened."""
    return [_doubt(call, scene) for call in scene.reading.state.open.values() if _is_doubtful(call, scene)]


def _is_doubtful(call: CallState, scene: Scene) -> bool:
    # An intent without a result, and nobody alive who could be performing it.
    return call.phase == "in_doubt" or (call.phase == "started" and not scene.held)


def _doubt(call: CallState, scene: Scene) -> Doubt:
    events = scene.reading.events
    recorded = call.phase == "in_doubt"
    asked_at = events[call.intent_seq - 1].ts
    since = next((e.ts for e in events[call.intent_seq :] if e.call == call.number and e.type == "tool_call_in_doubt"), asked_at)
    return Doubt(
        call=call.number,
        tool=call.tool,
        effect=call.effect,
        asked=called(call.tool, call.args, ARGS_SHOWN),
        key=call.key,
        attempt=call.attempt,
        asked_at=clock(asked_at, scene.now),
        since=clock(since, scene.now),
        age=span(scene.now - since),
        why=_why_doubt(call, scene),
        worker=_performer(call.intent_seq, events),
        meaning=EFFECTS[call.effect],
        check=_check(call) if call.effect in ("once", "keyed") else "nothing: the next worker settles it by itself",
        recorded=recorded,
        seq=call.last_seq,
    )


def _why_doubt(call: CallState, scene: Scene) -> str:
    if call.phase == "started":
        return "its worker died inside it, and no worker has looked at it since"
    if call.failure is not None:
        return f"no answer that would settle it: {failed(call.failure, 120)}"
    claims = [event.body for event in scene.reading.events[call.intent_seq : call.last_seq] if isinstance(event.body, RunClaimed)]
    if any(claim.takeover for claim in claims):
        return "the worker died inside it"
    return call.doubt or "it may or may not have happened"


def _performer(intent_seq: int, events: Sequence[Event]) -> str | None:
    """The worker that recorded the intent."""
    return next(
        (event.body.name or event.body.worker for event in reversed(events[:intent_seq]) if isinstance(event.body, RunClaimed)), None
    )


def _check(call: CallState) -> str:
    return (
        f"look for this key at the service behind {call.tool}. Found: it happened. "
        "Not found counts only once the request can no longer be on its way"
    )
