"""The approvals and the children that a run waits for.

For an approval: what exactly is to be approved, who may decide, until when, and what happens at this time. The request
comes from the journal. If the approval's row has newer votes that no worker has read yet, these come from the row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from perdure.core.approval import count_people
from perdure.core.codec import Payload
from perdure.core.state import AskState, ChildState
from perdure.inspect.text import at, called, clip, failed, iso, people, plain, plural, shown, span, versioned
from perdure.inspect.why.context import Scene, Shortage
from perdure.store.api import ApprovalRow, RunRow

VALUE_SHOWN = 60
INPUT_SHOWN = 1000  # long, because the approver must see exactly what is to be approved


class Asked(Struct, frozen=True):
    """An approval without a decision in the run's journal. The decision may already be in the approval's row."""

    approval: str
    call: int
    asked: str  # action(field=value, …), cut
    whole: bool  # True: nothing of `asked` was cut
    action: str
    input: object
    digest: str
    tool: bool  # True: a tool call needs this approval. False: the agent asked for it with run.request_approval
    reason: str | None  # the reason that the agent or the tool gave
    by: list[str]
    quorum: int
    voters: list[str]
    four_eyes: bool
    acts_for: str | None  # the run's actor, who may not decide if four_eyes is set
    editable: list[str]
    asked_at: str
    age: str
    expires_at: str | None
    expired: bool
    then: str  # when the approval expires, and what happens then
    status: str  # the status in the approval's row: "pending", or the decision that the run has not read yet
    said_by: str | None
    seq: int


def asked(scene: Scene) -> list[Asked]:
    """The pending approvals of the run, sorted by the time at which they expire."""
    if scene.reading.state.finished:
        return []
    pending = list(scene.reading.state.pending.values())
    pending.sort(key=lambda ask: (ask.request.expires_at is None, ask.request.expires_at or 0, ask.number))
    return [_asked(ask, scene) for ask in pending]


def _asked(ask: AskState, scene: Scene) -> Asked:
    row = scene.approvals.get(ask.request.approval)
    # The row may be newer than the journal: it may have votes and an escalation that the holder has not read yet.
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
    """When the approval expires, and what happens then."""
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
    """Who may decide, how many people must agree, and who has agreed so far."""
    who = people(tuple(one.by))
    if one.quorum > 1:
        who += f", {one.quorum} of them must agree; {plural(count_people(one.voters), 'has', 'have')} so far" + _names(one.voters)
    if one.four_eyes:
        but = one.acts_for or "… the run has no actor, so that no approval can be accepted: start it with actor="
        who += f"; not {but}"
    return who


def verdict(ask: AskState, load: Callable[[Payload], bytes]) -> str:
    """The outcome of an approval: who decided, with which edited values, and with which note."""
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


# -- The children of a run: their status, and which children need a person


CHILDREN_SHOWN = 8
# The order in which children are shown: children that need a person come first.
_URGENCY = {"needs_attention": 0, "paused": 1, "waiting_approval": 2, "cancelling": 3, "queued": 4, "running": 5, "waiting": 6}

_STANDS = {"needs_attention": "needs attention", "waiting_approval": "waits for an approval", "waiting": "waits", "ended": "has ended"}


class Child(Struct, frozen=True):
    """A child that has not ended, or a run below a child that needs a person."""

    run_id: str
    call: int | None  # the call of this run that started the child; None for a child of a child
    asked: str | None
    status: str
    about: str | None  # what the child waits for, or its error


class Children(Struct, frozen=True):
    """The children of a run: how many children have each status, and the children that get a separate line."""

    total: int
    by_status: dict[str, int]
    shown: list[Child]  # without the children that a budget stopped: `short` has one entry for each such budget
    short: list[Shortage]

    @property
    def news(self) -> list[Child]:
        """The children that continue only after a person does something."""
        return [child for child in self.shown if _URGENCY.get(child.status, 9) <= 2]


def children(scene: Scene) -> Children | None:
    """The run's children and their status; None if the run never had a child."""
    state = scene.reading.state
    if not state.children:
        return None
    below = {row.run_id: row for row in scene.below}
    stopped = {run_id for short in scene.short_below for run_id in short.runs}
    counts: Counter[str] = Counter()
    alive = []
    for child in state.children.values():
        row = below.pop(child.run_id, None)
        if child.ended is not None:
            counts[child.ended.status] += 1
            continue
        # If the child is not among the unfinished runs, it has ended, but this journal does not have its end yet.
        status = row.status if row is not None else "ended"
        counts[status] += 1
        if child.run_id in stopped:
            continue
        asked = called(versioned(child.agent, child.version), child.input, 60)
        alive.append(Child(child.run_id, child.number, asked, status, _about(row)))
    urgent = [row for row in below.values() if _URGENCY.get(row.status, 9) <= 2 and row.run_id not in stopped]
    deeper = [Child(row.run_id, None, None, row.status, _about(row)) for row in urgent]
    listed = sorted([*alive, *deeper], key=lambda child: (_URGENCY.get(child.status, 9), child.call or 0))
    return Children(len(state.children), dict(sorted(counts.items())), listed[:CHILDREN_SHOWN], scene.short_below)


def _about(row: RunRow | None) -> str | None:
    if row is None:
        return None
    about = row.error if row.status == "needs_attention" else row.waiting_for
    return clip(about, 200) if about else None


def child_in_short(child: Child) -> str:
    """The child in half a sentence."""
    about = f": {child.about}" if child.about else ""
    return f"child {child.run_id} {_STANDS.get(child.status, f'is {child.status}')}{about}"


def outcome(child: ChildState) -> str:
    """The output or the failure of a child that has ended."""
    ended = child.ended
    assert ended is not None, child
    return f"succeeded with {shown(ended.output, 48)}" if ended.status == "succeeded" else f"{ended.status}: {failed(ended.failure, 100)}"
