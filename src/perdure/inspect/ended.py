"""The calls, approvals and children of a run that have ended: what happened, apart from what did not."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.events import ChildFinished
from perdure.core.prompts import is_request
from perdure.core.state import AskState, CallState, ChildState
from perdure.core.taken_back import taken_back
from perdure.inspect.asks import verdict
from perdure.inspect.children import outcome
from perdure.inspect.models import asked_words, result_words
from perdure.inspect.scene import Scene
from perdure.inspect.words import called, failed, iso, places, used


class Done(Struct, frozen=True):
    """A call, an approval or a child that has ended, with the evidence."""

    call: int
    asked: str
    outcome: str  # "returned …" or "failed: …"
    places: list[str]  # of a failed one: where it was raised
    key: str | None  # of a tool's call
    attempts: int
    at: str
    seq: int
    settled_by: str | None
    approval: str | None
    approved: str | None  # who said yes to a tool's call, and with what values
    undone: str | None  # what has become of it since
    cost: str | None


def ended(scene: Scene) -> tuple[list[Done], list[Done]]:
    """What happened, and what failed, was refused or was given up; each by its number."""
    state = scene.reading.state
    asks = [ask for ask in state.asks.values() if ask.request.tool is None and not ask.pending]
    ends = {event.call: event.seq for event in scene.reading.events if isinstance(event.body, ChildFinished)}
    both: tuple[list[Done], list[Done]] = ([], [])
    undone = taken_back(state, scene.load)
    for call in state.calls.values():
        if call.ended:
            both[call.phase == "failed"].append(_done(call, scene, undone.get(call.number)))
    for ask in asks:
        both[ask.outcome != "approved"].append(_decided(ask, scene))
    for child in state.children.values():
        if child.ended is not None:
            both[child.ended.status != "succeeded"].append(_returned(child, ends[child.number]))
    for some in both:
        some.sort(key=lambda one: one.call)
    return both


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
        asked=called(f"{child.agent}@{child.version}", child.input, 48),
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
