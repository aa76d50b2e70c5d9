"""The approvals that a run waits for: what exactly is asked, of whom, until when, and what happens then.

What was asked comes out of the journal; whether somebody has decided, and a worker has not read it yet, out of the approval's row.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from msgspec import Struct

from perdure.core.approval import count_people
from perdure.core.codec import Payload
from perdure.core.state import AskState
from perdure.inspect.scene import Scene
from perdure.inspect.words import at, called, clip, iso, people, plain, plural, span
from perdure.store.api import ApprovalRow

VALUE_SHOWN = 60
INPUT_SHOWN = 1000  # whoever decides must see what they decide about


class Asked(Struct, frozen=True):
    """An approval that nobody has decided, or whose decision has not reached its run."""

    approval: str
    call: int
    asked: str  # action(field=value, …), cut
    whole: bool  # nothing of it was cut
    action: str
    input: object
    digest: str
    tool: bool  # the call itself waits; otherwise the agent asked
    reason: str | None  # in the agent's words, or its tool's
    by: list[str]
    quorum: int
    voters: list[str]
    four_eyes: bool
    acts_for: str | None  # who may not decide, with four_eyes
    editable: list[str]
    asked_at: str
    age: str
    expires_at: str | None
    expired: bool
    then: str  # what happens when its time is over
    status: str  # of its row: "pending", or what somebody has said already
    said_by: str | None
    seq: int


def asked(scene: Scene) -> list[Asked]:
    """The pending approvals of the run, those that expire first in front."""
    if scene.reading.state.finished:
        return []
    pending = list(scene.reading.state.pending.values())
    pending.sort(key=lambda ask: (ask.request.expires_at is None, ask.request.expires_at or 0, ask.number))
    return [_asked(ask, scene) for ask in pending]


def _asked(ask: AskState, scene: Scene) -> Asked:
    row = scene.approvals.get(ask.request.approval)
    # The row is a moment younger than the journal: it has votes and escalations that the run's holder may not have read.
    request = ask.request if row is None else row.standing.request
    words = called(request.action, request.input, INPUT_SHOWN)
    created = scene.reading.state.created
    return Asked(
        approval=request.approval,
        call=ask.number,
        asked=words,
        whole=not words.endswith("…)") and request.input.inline is not None,
        action=request.action,
        input=plain(request.input, scene.load),
        digest=request.digest,
        tool=request.tool is not None,
        reason=request.reason,
        by=list(request.by),
        quorum=request.quorum,
        voters=list(ask.voters if row is None else row.standing.voters),
        four_eyes=request.four_eyes,
        acts_for=created.actor if created else None,
        editable=list(request.editable),
        asked_at=iso(ask.asked_at),
        age=span(scene.now - ask.asked_at),
        expires_at=None if request.expires_at is None else iso(request.expires_at),
        expired=request.expires_at is not None and request.expires_at <= scene.now and request.on_expiry != "wait",
        then=_then(ask, row, scene),
        status="pending" if row is None else row.standing.status,
        said_by=None if row is None else row.standing.settled_by,
        seq=ask.asked_seq,
    )


def _then(ask: AskState, row: ApprovalRow | None, scene: Scene) -> str:
    """When its time is over, and what happens then."""
    request = ask.request if row is None else row.standing.request
    if request.expires_at is None:
        return "it does not expire"
    when = f"until {at(request.expires_at, scene.now)}"
    escalated = ask.escalated if row is None else row.standing.escalated
    if request.on_expiry == "escalate" and not escalated:
        return f"{when}, then {people(request.escalate_to)} will be asked"
    if request.on_expiry == "wait" and not escalated:
        return f"{when}, then they are reminded, and it goes on waiting"
    made = f"{request.action} is not made, and the agent is told so" if request.tool else "the agent is told so"
    return f"{when}, then it counts as expired: {made}"


def deciders(one: Asked) -> str:
    """Who may decide, how many of them must agree, and who has."""
    who = people(tuple(one.by))
    if one.quorum > 1:
        who += f", {one.quorum} of them must agree; {plural(count_people(one.voters), 'has', 'have')} so far" + _names(one.voters)
    if one.four_eyes:
        but = one.acts_for or "… nobody knows who the run acts for, so that nobody can say yes: start it with actor="
        who += f"; not {but}"
    return who


def verdict(ask: AskState, load: Callable[[Payload], bytes]) -> str:
    """How an approval was settled: by whom, with what values where they differ from those proposed, and what was said with it."""
    by = f" by {ask.by}" if ask.by and ask.outcome in ("approved", "rejected") else ""
    note = f"; note: {clip(ask.note, 80)}" if ask.note else ""
    return f"{ask.outcome}{by}{_edits(ask, load) if ask.edited else ''}{note}"


def _edits(ask: AskState, load: Callable[[Payload], bytes]) -> str:
    before, after = plain(ask.request.input, load), plain(ask.input, load)
    changed = [name for name in after if name not in before or before[name] != after[name]]
    return f" with {', '.join(f'{name} {_value(before.get(name))} → {_value(after[name])}' for name in changed)}"


def _value(value: object) -> str:
    return clip(json.dumps(value, ensure_ascii=False), VALUE_SHOWN)


def _names(voters: list[str]) -> str:
    return f" ({', '.join(voters)})" if voters else ""


def in_short(one: Asked) -> str:
    """The approval in half a sentence."""
    if one.status != "pending":
        by = f" by {one.said_by}" if one.said_by else ""
        return f"{one.approval}: {one.status}{by}, and the run has not been told yet"
    return f"{people(tuple(one.by))} to decide {clip(one.asked, 120)} ({one.approval})"
