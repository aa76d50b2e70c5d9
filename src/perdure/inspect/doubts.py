"""Calls that a worker's death or a lost answer has left open: which of them nobody knows about, and what would settle them.

A call that may be repeated (`read`, `idempotent`, `transaction`) is never in doubt: it is cut off, and simply run again.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perdure.core.decide import quiet_at
from perdure.core.events import Event, RunClaimed
from perdure.core.state import CallState
from perdure.inspect.scene import Scene
from perdure.inspect.words import EFFECTS, at, called, failed, iso, places, seconds, span

ARGS_SHOWN = 400  # where there is a doubt, what was asked must be seen whole
_HOOK = "its reconcile hook"  # how the recorded words about a doubt begin where the hook has been asked


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
    age_s: float
    why: str
    places: list[str]
    worker: str | None
    meaning: str
    check: str
    too_early: str | None  # why “not found” proves nothing yet
    by_itself: str  # what the next worker does about it
    settles_itself: bool  # False: nothing goes on before a person has spoken
    recorded: bool  # False: its worker died and nobody has looked yet; the next worker decides by effect class
    seq: int


def doubts(scene: Scene) -> list[Doubt]:
    """The open calls that may or may not have happened."""
    return [_doubt(call, scene) for call in _left_open(scene) if call.effect in ("once", "keyed")]


def cut_off(scene: Scene) -> list[CallState]:
    """The open calls that were interrupted and do no harm when they are run again."""
    return [call for call in _left_open(scene) if call.effect not in ("once", "keyed")]


def _left_open(scene: Scene) -> list[CallState]:
    # An intent without a result, and nobody alive who could be performing it.
    opened = scene.reading.state.open.values()
    return [call for call in opened if call.phase == "in_doubt" or (call.phase == "started" and not scene.held)]


def _doubt(call: CallState, scene: Scene) -> Doubt:
    events = scene.reading.events
    asked_at = events[call.intent_seq - 1].ts
    since = next((e.ts for e in events[call.intent_seq :] if e.call == call.number and e.type == "tool_call_in_doubt"), asked_at)
    by_itself, settles_itself = _by_itself(call, scene)
    too_early = _too_early(call, scene)
    return Doubt(
        call=call.number,
        tool=call.tool,
        effect=call.effect,
        asked=called(call.tool, call.args, ARGS_SHOWN),
        key=call.key,
        attempt=call.attempt,
        asked_at=iso(asked_at),
        since=iso(since),
        age=span(scene.now - since),
        age_s=seconds(scene.now - since),
        why=_why_doubt(call, scene),
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
    """What the next worker does about it without anybody's word, and whether that may settle it."""
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
        return "its worker died inside it, and no worker has looked at it since"
    hook = hook_words(call, scene)
    base = _without_hook(call, scene)
    return f"{base}; {hook}" if base and hook else base or hook or "it may or may not have happened"


def hook_words(call: CallState, scene: Scene) -> str:
    """What the reconcile hook has said so far; empty when it was not asked."""
    if call.asks and call.retry_at is not None:
        asked = f"asked {call.asks} of {scene.max_asks} times"
        return f"{_HOOK} says that it is in progress, {asked}, again at {at(call.retry_at, scene.now)}"
    told = call.doubt or ""
    words = told[told.index(_HOOK) :] if _HOOK in told else ""
    return words if scene.held else words.replace("is being asked", "was being asked")


def _without_hook(call: CallState, scene: Scene) -> str:
    if call.failure is not None:
        return f"no answer that would settle it: {failed(call.failure, 120)}"
    claims = [event.body for event in scene.reading.events[call.intent_seq : call.last_seq] if isinstance(event.body, RunClaimed)]
    if any(claim.takeover for claim in claims):
        return "the worker died inside it"
    return (call.doubt or "").partition(_HOOK)[0].rstrip("; ")


def _performer(intent_seq: int, events: Sequence[Event]) -> str | None:
    """The worker that recorded the intent."""
    return next(
        (event.body.name or event.body.worker for event in reversed(events[:intent_seq]) if isinstance(event.body, RunClaimed)), None
    )


def _too_early(call: CallState, scene: Scene) -> str | None:
    until = quiet_at(call, scene.patience)
    if until is None:
        return "its attempt may still be running" if call.quiet_since else "no worker has taken the run over yet"
    return f"its request may still arrive until {at(until, scene.now)}" if until > scene.now else None


def _check(call: CallState, too_early: str | None) -> str:
    counts = f"proves nothing yet, since {too_early}" if too_early else "means that it did not happen"
    return f"look for this key at the service behind {call.tool}. Found: it happened. Not found {counts}"
