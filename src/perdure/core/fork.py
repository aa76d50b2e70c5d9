"""Forks: the journal of a new run, made out of the journal of another one.

A fork begins with copies of the events of the run that was forked, under its own id; then comes `run_forked`. What the
copies say about the world, the other run has done: their calls are never attempted in the fork, and never undone by it.

    a live fork      all events of the run · run_forked · the edits · run_reopened: it goes back to the point (core/history.py)
    a rehearsal      the events up to the point · run_forked · what the agent asked for and got (core/rehearsal.py)

A live fork goes on as a rewound run does: a call that the other run has made, and that the fork makes too, has its recorded
outcome. So nothing that has happened happens again. Every other call has a number above all these, and so a key of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from perdure.core import codec
from perdure.core.codec import Payload, shown
from perdure.core.events import (
    AnyBody,
    CallAnswered,
    CheckpointTaken,
    Event,
    OutcomeReused,
    RunAdopted,
    RunClaimed,
    RunCreated,
    RunForked,
    Terminal,
    ToolCallInitiated,
    ToolCallProposed,
    event_at,
)
from perdure.core.history import ends_wait, history
from perdure.core.identity import approval_id
from perdure.core.prompt_deltas import is_request
from perdure.core.reopen import Reopening, reopening, settled, split_at
from perdure.core.state import RunState, is_repeatable_class
from perdure.errors import Conflict, InvalidInput


class LiveFork(Struct, frozen=True):
    """The journal of a live fork, as far as it is written when the fork is made."""

    events: list[Event]
    state: RunState
    reopening: Reopening


def check_copies(events: Sequence[Event]) -> None:
    """InvalidInput if these events cannot be the first events of a fork that is stored."""
    created = events[0].body
    assert isinstance(created, RunCreated), created
    taken = next((event.seq for event in events if isinstance(event.body, CheckpointTaken)), None)
    if taken is not None:
        # What a checkpoint holds (keys, ids of approvals) is about the run that took it.
        raise InvalidInput(f"run {created.run_id} has taken a checkpoint at event {taken}, and no fork of such a run can be stored")


def copies(
    events: Sequence[Event], run_id: str, *, rehearses: str | None = None, input: Payload | None = None, target: str | None = None
) -> list[Event]:
    """These events of another run, as the first events of the fork `run_id`. They keep their numbers and their times."""
    created = events[0].body
    assert isinstance(created, RunCreated), created
    first = structs.replace(
        created,
        run_id=run_id,
        input=input or created.input,
        target=target or created.target,
        # A fork is a run at the top, and it does not wait for the time that its parent waited for.
        not_before=None,
        parent=None,
        parent_call=None,
        depth=0,
        forked_from=created.forked_from or created.run_id,
        inherited=events[-1].seq,
        rehearses=rehearses,
    )
    return [structs.replace(events[0], body=first), *(_copied(event, created.tenant, run_id) for event in events[1:])]


def _copied(event: Event, tenant: str, run_id: str) -> Event:
    if getattr(event.body, "approval", None) is None:
        return event
    assert event.call is not None
    # The id of an approval is unique in a database, and its row belongs to one run.
    body: AnyBody = structs.replace(event.body, approval=approval_id(tenant, run_id, event.call))
    return structs.replace(event, body=body)


def live_fork(
    events: Sequence[Event],
    state: RunState,
    forked: RunForked,
    edits: Mapping[int, Payload],
    *,
    version: str,
    input: Payload | None,
    target: str | None,
    now: int,
    ids: Iterator[str],
) -> LiveFork:
    """The journal of a live fork. `state`: the fold of `events`; it becomes the state of the fork.

    `ids`: new ids for its own events; copies keep theirs.

    Conflict or InvalidInput if the run cannot be forked there: the error says why.
    """
    _check_settled(forked.parent, state, forked.at)
    for number in edits:
        if _outcome(events, number) <= forked.at:
            raise InvalidInput(
                f"call {number} has no outcome after event {forked.at}, so that nothing can be edited; go back to an earlier event"
            )
    journal = copies(events, forked.run_id, input=input, target=target)
    _become_copy(state, journal[0].body)

    def add(body: AnyBody, call: int | None, cause: int) -> Event:
        event = Event(state.seq + 1, next(ids), now, state.epoch, call, cause, body)
        state.apply(event)
        journal.append(event)
        return event

    made = add(forked, None, state.seq)
    for number, result in sorted(edits.items()):
        add(CallAnswered("edited", result), number, made.seq)
    back = reopening(journal, forked.at, by=forked.by, reason=forked.reason, state=state)
    reopened = add(back.bodies[0][0], None, state.seq)
    if version != state.version:
        add(RunAdopted(version, forked.by, forked.reason), None, reopened.seq)
    for body, call in back.bodies[1:]:
        add(body, call, reopened.seq)
    return LiveFork(journal, state, back)


def _become_copy(state: RunState, created: AnyBody) -> None:
    """Make the state of a run that of a copy of its events, as the fold of the copies would be."""
    assert isinstance(created, RunCreated), created
    state.created, state.inherited = created, created.inherited
    for number, ask in state.asks.items():
        ask.request = structs.replace(ask.request, approval=approval_id(created.tenant, created.run_id, number))
        if number in state.calls:
            state.calls[number].approval = ask.request.approval


def _check_settled(parent: str, state: RunState, at: int) -> None:
    """Conflict if the outcome of a call is not known: with the keys of the fork it could not be found out."""
    for call in state.calls.values():
        if call.begun and not call.ended and not is_repeatable_class(call):
            doubt = call.phase == "in_doubt" or call.doubtful
            raise Conflict(
                f"call {call.number} ({call.tool}) of run {parent} is {'in doubt' if doubt else 'under way'}, so no live fork can be made: "
                f"what became of it is not known; {'resolve it first' if doubt else 'wait until it has ended'}"
            )
    alive = [child.run_id for child in state.alive.values() if child.asked_seq <= at]
    if alive:
        raise Conflict(f"run {parent} waits at event {at} for its child {alive[0]}, which has not ended: fork it when the child has ended")


# -- where a fork begins ----------------------------------------------------------------------------------------------
def fork_point(run_id: str, events: Sequence[Event], at: int | None, edited: Sequence[int]) -> int:
    """The event after which the fork begins. InvalidInput if no fork can begin there."""
    past = history(events).whole
    claim = next((event.seq for event in past if isinstance(event.body, RunClaimed)), None)
    if claim is None:
        raise InvalidInput(f"run {run_id} has not begun: its agent has done nothing that a fork could begin with")
    if at is None:
        outcomes = {number: _outcome(events, number) for number in edited}
        if not all(outcomes.values()):
            raise InvalidInput(f"call {min(outcomes, key=outcomes.__getitem__)} of run {run_id} has no outcome that could be edited")
        return settled(past, min(outcomes.values()) - 1) if outcomes else claim
    if not isinstance(at, int) or isinstance(at, bool) or not 1 <= at <= events[-1].seq:
        raise InvalidInput(f"run {run_id} has no event {shown(at)}: its events are 1 to {events[-1].seq}")
    if at < claim:
        raise InvalidInput(f"run {run_id}: its agent begins at event {claim}; fork it at that event or at a later one")
    if event_at(past, at) is None:
        raise InvalidInput(f"run {run_id} cannot be forked at event {at}: that event was superseded when the run was reopened")
    if (event := event_at(events, at)) is not None and isinstance(event.body, Terminal):
        raise InvalidInput(f"run {run_id} cannot be forked at event {at}: it has ended there; fork it at event {at - 1} or before")
    split = split_at(past, at)
    if split is not None:
        cause, first, last = split
        raise InvalidInput(
            f"run {run_id} cannot be forked at event {at}: its agent stated the events {first} to {last} at once; take {cause} or {last}"
        )
    return at


def _outcome(events: Sequence[Event], number: int) -> int:
    """The event that brought the agent the outcome of this call; 0 if there is none."""
    past = history(events)
    tools = {event.call for event in events if isinstance(event.body, ToolCallInitiated | ToolCallProposed)}
    for event in past.whole:
        source = past.sources[event.body.of] if isinstance(event.body, OutcomeReused) else event
        if event.call == number and ends_wait(source, of_tool=number in tools):
            return event.seq
    return 0


def edited_result(state: RunState, number: int, value: Any) -> bytes:
    """The edited result of a call as canonical JSON. A text is the answer of a model, too."""
    assert state.created is not None
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= state.numbers:
        raise InvalidInput(f"run {state.created.run_id} has no call {shown(number)}: its calls are 1 to {state.numbers}")
    call = state.calls.get(number)
    if call is not None and is_request(call.args) and isinstance(value, str):
        value = {"text": value}
    return codec.encode(value)
