"""Reopening a run: to which events it can go back, to which event a retry goes back, and what is recorded.

`core/history.py` says what a reopened run means for its agent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalExpired,
    ApprovalWithdrawn,
    BudgetExceeded,
    BudgetRaised,
    CancelRequested,
    ChildFinished,
    Event,
    Limits,
    OutcomeReused,
    RunFailed,
    RunReopened,
    SignalReceived,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallResolved,
)
from perdure.core.history import History, ends_wait, history, inherited, is_stated, life_at
from perdure.core.state import (
    CallState,
    ChildState,
    RunState,
    fold,
    is_certain_end,
    is_made_anew,
    is_repeatable,
    is_repeatable_class,
    unsettled,
)
from perdure.errors import Conflict, InvalidInput

_NONE: Mapping[int, ChildFinished] = MappingProxyType({})


class Reopening(Struct, frozen=True):
    """A plan to reopen a run: the events to write, and the facts that a person should know before."""

    run_id: str
    back_to: int
    seen: int  # the run's last event
    # (body, call); the first body is the `run_reopened`, and it causes the others.
    bodies: Sequence[tuple[AnyBody, int | None]]
    kept: Sequence[CallState]  # calls with a result that the agent knew, and still knows
    again: Sequence[CallState]  # failed calls: they are attempted again, or are in doubt if they may have happened
    superseded: Sequence[CallState]  # begun calls that the agent knows only when it makes them again
    superseded_children: Sequence[ChildState]  # the same for children
    children: Sequence[str]  # ids of the children that have to be reopened in the same commit
    withdrawn: Sequence[int]  # approvals after `back_to` that were not used yet: they are withdrawn
    over: BudgetExceeded | None  # the budget that stopped the run, or that did not cover a call after `back_to`


def reopening(
    events: Sequence[Event],
    back_to: int,
    *,
    by: str,
    reason: str | None = None,
    fresh: bool = False,
    ended: Mapping[int, ChildFinished] = _NONE,
    state: RunState | None = None,
    add: Limits | None = None,
) -> Reopening:
    """The events that let the run go back to the event `back_to`. `state`: the fold of `events`, if the caller has it.

    `add` is added to the run's own budget in the same commit.
    `ended`: call → the end of its child, if the run was not told about that end, because the run had ended by force.

    Raises Conflict or InvalidInput if the run cannot go back to that event. The error says why, and to which events it
    can go back.
    """
    past, state = history(events), state or fold(events)
    assert state.created is not None
    _check(past, state, back_to, ended)
    place = _place(past.whole, back_to)
    kept, dropped = past.whole[:place], past.whole[place:]
    life = life_at(kept, None)
    asked_now, waiting = _requests(life, past, state)
    left = inherited(life) - asked_now  # an earlier life has left it, and this one has not asked for it
    asked = (asked_now if len(life) == len(kept) else _asked(kept)) | left
    waits = _waits(events, dropped, past, state, waiting, ended, fresh)
    lost = sorted(_lost_approvals(state) & asked & waits.open)
    if lost:
        why = (
            "was withdrawn when the run ended" if state.forked is None else "is about the run that was forked, and a fork asks for its own"
        )
        raise InvalidInput(
            f"{_cannot(state, back_to)}: the approval of call {lost[0]} {why}; go back to before event {state.asks[lost[0]].asked_seq}"
        )
    withdrawn = sorted(
        number
        for number, ask in state.asks.items()
        if (number not in asked and _is_usable(ask.outcome, number, state)) or (number in left and number in _lost_approvals(state))
    )
    charged = unsettled(call for call in state.open.values() if call.asked_seq > back_to)
    body = RunReopened(by, back_to, reason, tuple(waits.again), tuple(waits.children), tuple(withdrawn), fresh, charged)
    more: list[tuple[AnyBody, int | None]] = [] if add is None else [(BudgetRaised(add, by, reason), None)]
    return Reopening(
        state.created.run_id,
        back_to,
        state.seq,
        [(body, None), *more, *((OutcomeReused(_source(event, past).seq), event.call) for event in waits.reused), *waits.told],
        kept=[call for number, call in sorted(state.calls.items()) if number in asked and call.phase == "completed"],
        again=[state.calls[number] for number in waits.again],
        superseded=[call for number, call in sorted(state.calls.items()) if number not in asked and call.begun],
        superseded_children=[child for number, child in sorted(state.children.items()) if number not in asked],
        children=[state.children[number].run_id for number in waits.children],
        withdrawn=withdrawn,
        over=state.over or _over(dropped),
    )


class _Waits(Struct, frozen=True):
    """What becomes of the calls, approvals and children for which the agent waits at the event to which it goes back."""

    open: set[int]  # they have no outcome yet
    again: list[int]
    children: list[int]
    reused: list[Event]  # their outcomes, and signals: the agent learns them again
    told: list[tuple[AnyBody, int | None]]  # ends of children that the run was not told about


def _waits(
    events: Sequence[Event],
    dropped: Sequence[Event],
    past: History,
    state: RunState,
    waiting: set[int],
    ended: Mapping[int, ChildFinished],
    fresh: bool,
) -> _Waits:
    found = _Waits(waiting, [], [], [], [])
    ends = {event.call: event for event in dropped if ends_wait(_source(event, past), of_tool=event.call in state.calls)}
    for event in dropped:
        number, source = event.call, _source(event, past)
        if number is None:
            if isinstance(source.body, SignalReceived):
                found.reused.append(event)
        elif number in waiting and ends_wait(source, of_tool=number in state.calls):
            if ends[number] is not event:
                continue  # the person who makes a fork has given the call another result
            waiting.discard(number)
            if _is_tried_again_of(state, number, fresh):
                found.again.append(number)
            elif isinstance(source.body, ChildFinished) and _goes_on_too(state, number, source.body):
                found.children.append(number)
            else:
                found.reused.append(event)
        elif number in waiting and isinstance(source.body, ApprovalDecided):
            found.reused.append(event)  # the approval was granted: the agent learns whether a person edited the arguments
    for number in sorted(number for number in waiting if not state.is_open(number)):
        # It ended after an earlier `run_reopened`, in a later life of the agent: no kept event says so.
        of_tool = number in state.calls
        late = [event for event in events if event.call == number and ends_wait(event, of_tool=of_tool)]
        if late and _is_tried_again_of(state, number, fresh):
            found.again.append(number)
        elif late and isinstance(late[-1].body, ChildFinished) and _goes_on_too(state, number, late[-1].body):
            found.children.append(number)
        elif late:
            found.reused.append(late[-1])
    for number, end in sorted(ended.items()):
        if number in waiting and end.status != "succeeded":
            found.children.append(number)
        else:
            found.told.append((end, number))
    return found


def _over(dropped: Sequence[Event]) -> BudgetExceeded | None:
    """The budget that did not cover the last of these calls that failed because of a budget."""
    failures = [event.body.failure for event in reversed(dropped) if isinstance(event.body, ToolCallFailed)]
    return next((failure.over for failure in failures if failure.over is not None), None)


def retry_point(events: Sequence[Event], state: RunState | None = None) -> int:
    """The event to which a retry of a failed or cancelled run goes back. `state`: as for `reopening`.

    If the run failed because calls failed: the event before these failures, so that the calls are attempted again. If
    the agent itself failed: the last event that the agent knew, so that it takes its next step again. If the run was
    cancelled: the event before the cancel. Raises Conflict if the agent reacted to the failure or to the cancel with
    calls that have an effect, perhaps to clean up. Then a person has to choose the event.
    """
    past, state = history(events), state or fold(events)
    assert state.created is not None
    end = past.events[-1]
    requests = [event for event in past.whole if event.call is not None and is_stated(event)]
    if state.status == "cancelled":
        cancel = next((event for event in past.whole if type(event.body) is CancelRequested), None)
        point = end.seq - 1 if cancel is None else cancel.seq - 1
        if cancel is not None:
            _check_nothing_since(state, requests, cancel, "its cancel")
    elif state.status == "failed":
        point = _before_failure(past, state, requests, end)
    else:
        raise Conflict(
            f"run {state.created.run_id} is {state.status.replace('_', ' ')}: only a run that has failed or was cancelled can be retried"
        )
    for number in _lost_approvals(state):
        # When the run ended, this approval was withdrawn. So the agent has to ask for it again.
        cause = next((event.cause for event in requests if event.call == number), None)
        if cause is None:
            raise Conflict(
                f"run {state.created.run_id} cannot be retried: its approval of call {number} was withdrawn when it ended, and the events "
                "from before its checkpoint, with the request, were removed; start a new run"
            )
        point = min(point, cause)
    return settled(past.whole, point)


def _before_failure(past: History, state: RunState, requests: Sequence[Event], end: Event) -> int:
    failures = [event for event in past.events if event.call is not None and _is_failure(_source(event, past))]
    # A request may be recorded after a failure that the agent did not know yet. So the cause of the request is
    # compared with the failure, not the request itself.
    last_request = max((event.cause or 0 for event in requests), default=0)
    failed = [event for event in failures if event.seq > last_request]
    if not failed and failures and _is_of_call(end):
        _check_nothing_since(state, requests, failures[-1], f"the failure of call {failures[-1].call}")
        failed = failures[-1:]
    if not failed:
        assert end.cause is not None
        return end.cause
    point = failed[0].seq - 1
    for event in failed:
        call = state.calls.get(event.call or 0)
        if event.call in state.children or (call is not None and call.begun and call.approval is None):
            continue
        # Nothing of the call has happened, or its approval is used. So the agent makes a new call.
        request = next(one for one in reversed(requests) if one.call == event.call)
        point = min(point, request.cause or point)
    return point


def _check_nothing_since(state: RunState, requests: Sequence[Event], since: Event, what: str) -> None:
    later = [event.call or 0 for event in requests if (event.cause or 0) >= since.seq]
    done = [state.calls[number] for number in later if number in state.calls]
    done = [call for call in done if call.begun and call.effect != "read"]
    if done or any(number in state.children for number in later):
        assert state.created is not None
        names = ", ".join(f"call {call.number} ({call.tool})" for call in done[:3]) or "a child"
        raise Conflict(
            f"run {state.created.run_id} cannot simply be retried: after {what} its agent made {names}, perhaps to clean up; to go back anyway, "
            f"say to which event: {since.seq - 1} is the last one before it"
        )


def _is_of_call(end: Event) -> bool:
    body = end.body
    return isinstance(body, RunFailed) and not {"ToolFailed", "PlanFailed"}.isdisjoint((body.failure.type, *body.failure.lineage))


def _is_failure(event: Event) -> bool:
    body = event.body
    match body:
        case ToolCallFailed():
            return body.final
        case ToolCallResolved():
            return body.result is None and body.outcome != "did_not_happen"
        case ToolCallCompleted():
            return body.result is None
        case ApprovalDecided():
            return not body.granted
        case ChildFinished():
            return body.status != "succeeded"
        case _:
            return isinstance(body, ApprovalExpired | ApprovalWithdrawn)


def _goes_on_too(state: RunState, number: int, end: ChildFinished) -> bool:
    """Is the child reopened too? Not if it is a child of the run that was forked: only its outcome counts."""
    return end.status != "succeeded" and not state.children[number].inherited


def _is_tried_again_of(state: RunState, number: int, fresh: bool) -> bool:
    call = state.calls.get(number)
    return call is not None and _is_tried_again(call, fresh)


def _is_tried_again(call: CallState, fresh: bool) -> bool:
    if call.inherited:
        return is_repeatable_class(call) and call.approval is None and (fresh or call.phase != "completed")
    if call.phase == "completed":
        return is_made_anew(call, fresh)
    # A used approval stays used. So a call with an approval keeps its failure, and the agent may make a new call. But
    # if the call may have happened, it is in doubt, and the doubt must be settled.
    return call.phase == "failed" and call.begun and not is_certain_end(call) and (call.approval is None or not is_repeatable(call))


def _is_usable(outcome: str | None, number: int, state: RunState) -> bool:
    return outcome is None or (outcome == "approved" and number in state.open and state.open[number].phase == "approved")


def _lost_approvals(state: RunState) -> set[int]:
    """The approvals that were pending when the run ended, or was forked: they are withdrawn."""
    inherited = {number for number, ask in state.asks.items() if number <= state.forked_numbers and _is_usable(ask.outcome, number, state)}
    return inherited | (set(state.pending) if state.finished else set())


def _source(event: Event, past: History) -> Event:
    return past.sources[event.body.of] if isinstance(event.body, OutcomeReused) else event


def _asked(kept: Sequence[Event]) -> set[int]:
    return {event.call for event in kept if event.call is not None and is_stated(event)}


def _requests(life: Sequence[Event], past: History, state: RunState) -> tuple[set[int], set[int]]:
    """The calls, approvals and children that the agent has asked for in these events; and those for which it waits then."""
    asked: set[int] = set()
    waiting: set[int] = set()
    tools, sources = state.calls, past.sources
    for event in life:
        number, body = event.call, event.body
        if number is None:
            continue
        if is_stated(event):
            asked.add(number)
            waiting.add(number)
        elif ends_wait(sources[body.of] if type(body) is OutcomeReused else event, of_tool=number in tools):
            waiting.discard(number)
    return asked, waiting


def _place(events: Sequence[Event], seq: int) -> int:
    return bisect_right(events, seq, key=lambda event: event.seq)


def _cannot(state: RunState, back_to: int) -> str:
    assert state.created is not None
    return f"run {state.created.run_id} cannot go back to event {back_to}"


def _check(past: History, state: RunState, back_to: int, ended: Mapping[int, ChildFinished]) -> None:
    assert state.created is not None
    run_id = state.created.run_id
    if state.status == "succeeded":
        raise Conflict(f"run {run_id} has succeeded: its result counts, and it cannot be reopened")
    if not 1 <= back_to <= state.seq:
        raise InvalidInput(f"run {run_id} has no event {back_to}: its events are 1 to {state.seq}")
    if state.finished and back_to == state.seq:
        raise InvalidInput(f"{_cannot(state, back_to)}: that event is its end; go back to event {back_to - 1} or before")
    if back_to < _first_point(past):
        raise InvalidInput(
            f"{_cannot(state, back_to)}: the events before its checkpoint at event {_first_point(past)} were removed; go back to that event or "
            "a later one"
        )
    place = _place(past.whole, back_to)
    if place == 0 or past.whole[place - 1].seq != back_to:
        raise InvalidInput(f"{_cannot(state, back_to)}: that event was superseded when the run was reopened before")
    cancel = next((event.seq for event in past.whole[:place] if type(event.body) is CancelRequested), None)
    if cancel is not None:
        raise InvalidInput(
            f"{_cannot(state, back_to)}: its cancel was requested at event {cancel}; go back to event {cancel - 1} or before"
        )
    split = split_at(past.whole, back_to)
    if split is not None:
        cause, first, last = split
        raise InvalidInput(
            f"{_cannot(state, back_to)}: the agent stated the events {first} to {last} at once; go back to event {cause} or {last}"
        )
    alive = [child.run_id for number, child in state.alive.items() if child.asked_seq > back_to and number not in ended]
    if alive:
        raise Conflict(f"{_cannot(state, back_to)}: its child {alive[0]} was started after that and has not ended; cancel it first")


def _first_point(past: History) -> int:
    """The first event to which the run can go back: its first one, or the checkpoint before which events were removed."""
    return past.whole[1].seq if len(past.whole) > 1 and past.whole[1].seq > 2 else 1


def settled(events: Sequence[Event], point: int) -> int:
    """The last event, not later than `point`, to which the run can go back."""
    while (split := split_at(events, point)) is not None:
        point = split[0]
    return point


def split_at(events: Sequence[Event], point: int) -> tuple[int, int, int] | None:
    """If `point` is between two statements of one activation: (its cause, its first statement, its last statement)."""
    later = events[_place(events, point) :]
    across = {event.cause for event in later if event.cause is not None and event.cause <= point and is_stated(event)}
    spans: dict[int, tuple[int, int]] = {}
    for event in events if across else ():
        if event.cause is not None and is_stated(event):
            first, _ = spans.get(event.cause, (event.seq, 0))
            spans[event.cause] = (first, event.seq)
    return next(((cause, first, last) for cause, (first, last) in spans.items() if first <= point < last), None)
