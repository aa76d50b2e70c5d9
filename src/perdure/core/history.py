"""The history of an agent: which events of a journal the agent states, which wake it, and which it does not know.

For most runs the agent knows the whole journal. But a person may reopen a run at an earlier event. Then the agent goes
back to that event. The world does not go back:

    1 … 20   kept         the agent is replayed up to here
    21 … 40  superseded   the agent does not know these events; their facts about the world stay true
    41       run_reopened(back_to=20)
    42 …     kept         at first the superseded outcomes for which the agent waits (`outcome_reused`)

No effect happens a second time (T35). If the agent makes a superseded call again (the same tool with the same
arguments), perdure treats both as one call: the call keeps its number and its key, and its recorded result is reused.
A call in doubt stays in doubt. A call that failed is attempted again, by the rules of its effect class. Every other
call gets a new number, which is higher than all numbers so far. So it also gets a new key.

An agent may take a checkpoint (`run.checkpoint`). Then it begins a new life, and knows nothing of the events before:

    1 … 90   known to earlier lives
    91       checkpoint_taken     the agent is replayed from here on
    92 …     known

What the life before has left open goes on, and the new life may make these calls again in the same way: the same call
keeps its number.

`core/reopen.py` computes the events that reopen a run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from msgspec import Struct

from perdure.core import codec
from perdure.core.codec import Payload
from perdure.core.events import (
    AnyBody,
    ApprovalDecided,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalWithdrawn,
    BudgetRaised,
    CallAnswered,
    CallHeld,
    CallKept,
    CallRequestedAgain,
    CancelRequested,
    CheckpointTaken,
    ChildFinished,
    ChildStarted,
    DecisionMade,
    Event,
    FrameChanged,
    LabelsChanged,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallInitiated,
    OutcomeReused,
    PatchMarked,
    PlanGenerated,
    RunAdopted,
    RunCancelled,
    RunFailed,
    RunReopened,
    RunSucceeded,
    SignalReceived,
    StatusReported,
    ThoughtRecorded,
    TimerFired,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
)
from perdure.core.prompt_deltas import is_request, request_digest
from perdure.core.state import Image, RunState, image_in, is_certain_end, is_repeatable

_STATED = frozenset(
    (
        ThoughtRecorded,
        DecisionMade,
        PlanGenerated,
        StatusReported,
        LabelsChanged,
        PatchMarked,
        ToolCallProposed,
        ChildStarted,
        CallRequestedAgain,
        CallKept,
        CheckpointTaken,
        RunSucceeded,
        RunFailed,
    )
)
# Of these types, the machine states some events: see `is_stated`.
_SOME_STATED = frozenset((ToolCallInitiated, ModelCallInitiated, ApprovalRequested, RunCancelled))
# An event of one of these types may hold a completion, which wakes the agent.
WAKES = frozenset(
    (
        *(
            ToolCallCompleted,
            ToolCallFailed,
            ModelCallCompleted,
            ModelCallFailed,
            ToolCallResolved,
            TimerFired,
            SignalReceived,
            ChildFinished,
            CancelRequested,
            OutcomeReused,
            CallAnswered,
            CallHeld,
        ),
        *(ApprovalDecided, ApprovalExpired, ApprovalWithdrawn),
    )
)
_ENDS_WAIT = WAKES - {TimerFired, SignalReceived, CancelRequested, OutcomeReused, CallHeld}


def is_stated(event: Event) -> bool:
    """Did the machine itself state this event? Other events come from the worker or from outside."""
    body = event.body
    if type(body) not in _SOME_STATED:
        return type(body) in _STATED
    if isinstance(body, ToolCallInitiated):
        # If the call was proposed, the proposal is the machine's statement. An intent with arguments that a person
        # edited is no statement of the machine.
        return body.attempt == 1 and body.args is not None and body.approval is None
    if isinstance(body, ApprovalRequested):
        return body.tool is None  # the approval of a tool call is requested by the run core, not by the agent
    if isinstance(body, RunCancelled):
        return body.forced_by is None  # otherwise a person ended the run without its agent
    return False


def ends_wait(event: Event, *, of_tool: bool) -> bool:
    """Does this event end the agent's wait for a call, an approval or a child?

    `of_tool`: the wait is for a tool call.
    """
    body = event.body
    if type(body) not in _ENDS_WAIT:  # most events: without the slower pattern matching below
        return False
    match body:
        case ToolCallFailed():
            return body.final
        case ToolCallResolved():
            return body.outcome != "did_not_happen"
        case ApprovalDecided():
            return not (of_tool and body.granted)
        case ToolCallCompleted() | ApprovalExpired() | ApprovalWithdrawn() | ChildFinished() | CallAnswered():
            return True
        case _:
            return False


class Earlier(Struct, frozen=True):
    """The calls that the agent may make again: superseded calls, and calls that its last life has left open."""

    last: int = 0  # the highest number of a call before the run was reopened
    requests: dict[int, Event] = {}  # number → the event that requested the call first
    # Number → the event that ended the call, if the call has ended, and the event with which a person edited its
    # arguments.
    outcomes: dict[int, list[Event]] = {}
    over: frozenset[int] = frozenset()  # approvals that the reopening has withdrawn: nothing more comes of them

    def keep(self, event: Event) -> None:
        """Keep an event about a superseded call, until the agent makes that call again."""
        assert event.call is not None
        add_outcome(self.outcomes, event, of_tool=isinstance(self.requests[event.call].body, ToolCallInitiated | ToolCallProposed))


class Branch(Struct, frozen=True):
    """A `run_reopened` that the agent knows."""

    # The last activation whose statements are kept. After this activation, the agent may ask for other calls than
    # before.
    stated: int
    at: int  # the first activation whose statements are superseded
    reopened: int  # the seq of the `run_reopened`
    after: int  # the seq of the last event in the commit of the `run_reopened`
    earlier: Earlier


class History(Struct, frozen=True):
    """The events that the agent knows, in order."""

    events: Sequence[Event]  # if the agent has taken checkpoints, the first one is the last `checkpoint_taken`
    whole: Sequence[Event]  # the same, with the events that only earlier lives of the agent knew
    branches: Sequence[Branch] = ()
    sources: dict[int, Event] = {}  # seq → event, for each event that an `outcome_reused` names

    @property
    def checkpoint(self) -> Event | None:
        """The `checkpoint_taken` at which the agent's life began."""
        return self.events[0] if self.events and type(self.events[0].body) is CheckpointTaken else None


def history(events: Sequence[Event], until: int | None = None, state: RunState | None = None) -> History:
    """What the agent knows of a journal: the events of its last life, without those that were superseded.

    `until`: the life that the agent had at this event, instead of its last one. Then `events` has to end before the next
    `run_reopened`, because that supersedes events that the agent knew at this time.
    `state`: the fold of `events`, if the caller has it and `events` ends with the commit of a `run_reopened`.
    The events between the first one and a checkpoint may be left out, if they are not needed or were removed.
    """
    kinds = set(map(type, map(_body, events)))  # a comprehension would take three times as long
    if RunReopened in kinds:
        return _with_branches(events, until, None if CheckpointTaken in kinds else state)
    if CheckpointTaken not in kinds:
        return History(events, events)
    return History(life_at(events, until), events, sources=_sources(events))


def _with_branches(events: Sequence[Event], until: int | None, state: RunState | None) -> History:
    reopened = sum(type(event.body) is RunReopened for event in events)
    # The loop needs the state of the calls, approvals and children at each `run_reopened`. The other events of its commit
    # change none of them. So if the journal ends with the commit of its only `run_reopened`, the given state is the one
    # that the loop needs, and no event has to be folded here.
    folded, state = state is not None and reopened == 1, state if state is not None and reopened == 1 else RunState()
    kept: list[Event] = []
    branches: list[Branch] = []
    requests: dict[int, Event] = {}
    stated: list[Event] = []  # every statement so far, superseded statements too
    begun = 0  # the seq of the last checkpoint in `kept`
    again: set[int | None] = set()  # the superseded calls that the agent has made again since the last `run_reopened`
    for place, event in enumerate(events):
        body = event.body
        if type(body) is RunReopened:
            cut = bisect_right(kept, body.back_to, key=_seq)
            dropped = kept[cut:]
            del kept[cut:]
            branches = [branch for branch in branches if branch.reopened <= body.back_to]
            begun = _last_checkpoint(kept)
            known = {one.seq for one in kept}
            last = max((one.cause or 0 for one in stated if one.seq in known), default=0)
            first = min((one.cause for one in stated if one.cause in known and one.cause > last), default=event.seq)
            again = set()
            life = _life(kept, begun)
            earlier = _earlier(state, kept, requests, events[:place], life, frozenset(body.withdrawn))
            branches.append(Branch(last, first, event.seq, _end_of_commit(events, place), earlier))
            # A call that an earlier life has left, and had stopped to wait for, ends for the new branch as well.
            made = {one.call for one in life if type(one.body) is CallRequestedAgain}
            open_before = inherited(life) - made
            kept += [one for one in dropped if one.call in open_before and one.call not in earlier.requests and not is_stated(one)]
        if not folded:
            state.apply(event)
        if branches and branches[-1].reopened > begun:
            waiting = branches[-1].earlier
            if event.call in waiting.requests and event.call not in again and type(body) is not CallRequestedAgain:
                # The agent has not made this superseded call again. `keep` stores the event until the agent does that.
                waiting.keep(event)
                continue
        kept.append(event)
        if type(body) is CheckpointTaken:
            begun, again = event.seq, set()
            if place == 1 and event.seq > 2:  # the events between are left out
                requests.update(earlier_of(image_in(body)).requests)
        if is_stated(event):
            stated.append(event)
            if type(body) is CallRequestedAgain:
                again.add(event.call)
            elif event.call is not None:
                requests[event.call] = event
    life = life_at(kept, until)
    begun = life[0].seq if life and type(life[0].body) is CheckpointTaken else 0
    return History(life, kept, [branch for branch in branches if branch.reopened > begun], _sources(events))


def _sources(events: Sequence[Event]) -> dict[int, Event]:
    """The events that an `outcome_reused` names: events of the journal, or events that its first checkpoint holds."""
    found: dict[int, Event] = {}
    before: dict[int, Event] = {}
    for event in events:
        body = event.body
        if type(body) is OutcomeReused:
            at = bisect_right(events, body.of, key=_seq) - 1
            found[body.of] = events[at] if events[at].seq == body.of else before[body.of]
        elif type(body) is CheckpointTaken and not before:
            before = {one.seq: one for one in image_in(body).outcomes}
    return found


def life_at(kept: Sequence[Event], until: int | None) -> Sequence[Event]:
    """Of these events, those of the life that the agent had at the event `until`; None: of its last life.

    The checkpoint that ends a life belongs to it, too: the agent has stated it.
    """
    place = len(kept) if until is None else bisect_right(kept, until, key=_seq)
    begun = _last_checkpoint(kept[:place])
    later = (at for at in range(place, len(kept)) if type(kept[at].body) is CheckpointTaken)
    return kept[bisect_right(kept, begun - 1, key=_seq) : next(later, len(kept)) + 1]


def inherited(life: Sequence[Event]) -> set[int]:
    """The calls, approvals and children that were open when this life began at a checkpoint."""
    if not life or not isinstance(life[0].body, CheckpointTaken):
        return set()
    image = image_in(life[0].body)
    asks = {ask.number for ask in image.asks if ask.pending}
    return set(image.open) | asks | {child.number for child in image.children if child.ended is None}


def _last_checkpoint(kept: Sequence[Event]) -> int:
    return next((event.seq for event in reversed(kept) if type(event.body) is CheckpointTaken), 0)


def _life(kept: Sequence[Event], begun: int) -> Sequence[Event]:
    return kept[bisect_right(kept, begun - 1, key=_seq) :]


def earlier_of(image: Image) -> Earlier:
    """The calls that a life which begins with this image may make again."""
    outcomes: dict[int, list[Event]] = {}
    for event in image.outcomes:
        assert event.call is not None
        outcomes.setdefault(event.call, []).append(event)
    return Earlier(image.numbers, {event.call: event for event in image.requests if event.call is not None}, outcomes)


class Requests:
    """The requests of the calls that a life has made, and how people have edited their arguments.

    A checkpoint holds those of the calls that are still open.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Event] = {}
        self.edits: dict[int, Event] = {}

    def see(self, event: Event) -> None:
        number, body = event.call, event.body
        if number is None:
            if type(body) is CheckpointTaken:
                earlier = earlier_of(image_in(body))
                self.requests.update(earlier.requests)
                edits = [one for some in earlier.outcomes.values() for one in some if isinstance(one.body, ApprovalDecided)]
                self.edits.update((one.call, one) for one in edits if one.call is not None)
        elif number not in self.requests:
            if type(body) in _REQUESTS or isinstance(body, ToolCallInitiated):
                self.requests[number] = event
        elif isinstance(body, ApprovalDecided) and body.granted and body.input is not None:
            self.edits[number] = event

    def forget(self, number: int) -> None:
        self.requests.pop(number, None)
        self.edits.pop(number, None)


_REQUESTS = frozenset((ToolCallProposed, ApprovalRequested, ChildStarted))


_body = attrgetter("body")


def _seq(event: Event) -> int:
    return event.seq


def _end_of_commit(events: Sequence[Event], place: int) -> int:
    """The seq of the last event in the commit of the `run_reopened` at this place."""
    reopened = events[place].seq
    beside = (OutcomeReused, RunAdopted, FrameChanged, BudgetRaised, ChildFinished)
    while place + 1 < len(events) and isinstance(events[place + 1].body, beside) and events[place + 1].cause == reopened:
        place += 1
    return events[place].seq


def _earlier(
    state: RunState,
    kept: Sequence[Event],
    requests: dict[int, Event],
    events: Sequence[Event],
    life: Sequence[Event],
    withdrawn: frozenset[int],
) -> Earlier:
    asked = {event.call for event in kept if event.call is not None and is_stated(event)}
    again = {number: event for number, event in requests.items() if number not in asked and _is_the_same(state, number)}
    outcomes: dict[int, list[Event]] = {}
    if life and isinstance(life[0].body, CheckpointTaken):
        # What the life before has left was not superseded.
        left = earlier_of(image_in(life[0].body))
        made = {event.call for event in life if type(event.body) is CallRequestedAgain}
        again |= {number: event for number, event in left.requests.items() if number not in made and number not in withdrawn}
        outcomes = {number: list(ends) for number, ends in left.outcomes.items() if number in again}
    for event in events:
        if event.call in again:
            add_outcome(outcomes, event, of_tool=event.call in state.calls)
    for number in again:
        call = state.calls.get(number)
        # A new attempt of the call has begun, and has no outcome yet.
        if number in outcomes and call is not None and not call.ended:
            outcomes[number] = [one for one in outcomes[number] if isinstance(one.body, ApprovalDecided)]
    return Earlier(state.numbers, again, outcomes, withdrawn)


def add_outcome(outcomes: dict[int, list[Event]], event: Event, *, of_tool: bool) -> None:
    """If this event ended the call, or edited its arguments, add the event to the outcome of the call."""
    assert event.call is not None
    edits = [one for one in outcomes.get(event.call, ()) if isinstance(one.body, ApprovalDecided) and one.seq != event.seq]
    if ends_wait(event, of_tool=of_tool):
        # A call that was attempted again has ended several times: the last end counts.
        outcomes[event.call] = [*edits, event]
    elif isinstance(event.body, ApprovalDecided) and event.body.input is not None:
        outcomes[event.call] = [event]  # a person edited the arguments, and the agent learns that


def _is_the_same(state: RunState, number: int) -> bool:
    """If the agent makes this superseded call again: does it keep its number and its recorded outcome?

    False: the agent makes a new call.
    """
    call = state.calls.get(number)
    if call is None and number <= state.forked_numbers:
        # The agent of a fork asks for an approval again: the people who decided about the run that was forked did not
        # decide about this one. A child of that run has an outcome, or the fork starts a child of its own.
        return number in state.children and state.children[number].ended is not None
    if call is None:
        return number in state.children or state.asks[number].outcome in ("approved", "rejected")
    if not call.begun:
        return False
    if call.inherited and call.phase == "failed":
        # It is never attempted in a fork. If it may have happened, its failure is its outcome. If not, the agent makes
        # a new call.
        return not is_repeatable(call) or is_certain_end(call)
    # The first attempt of a call uses the approval of the call. So after a failure that proves that nothing happened,
    # the agent makes a new call, and the new call needs a new approval.
    return not (call.phase == "failed" and call.approval is not None and is_repeatable(call) and not is_certain_end(call))


class Superseded:
    """Finds superseded calls by their tool and arguments. Each call is found once, in the order of the numbers."""

    def __init__(self, requests: Mapping[int, Event], load: Callable[[Payload], bytes]) -> None:
        self._load = load
        self._exact: dict[tuple[str, str, str], deque[int]] = {}
        self._inputs: dict[tuple[str, str], dict[int, Payload]] = {}  # (kind, name) → number → arguments
        # (kind, name) → digest of the arguments → numbers. The arguments are in the form that today's signature gives
        # them.
        self._rebound: dict[tuple[str, str], dict[str, deque[int]]] = {}
        self.left = set(requests)  # the calls that were not found yet
        for number, event in sorted(requests.items()):
            kind, name, digest, args = _request_of(event.body)
            self._exact.setdefault((kind, name, digest), deque()).append(number)
            if args is not None:
                self._inputs.setdefault((kind, name), {})[number] = args

    def take(self, kind: str, name: str, args: bytes, callee: Any, digest: str | None) -> int | None:
        """The number of the superseded call with the same name and arguments; None if there is no such call."""
        if not self.left:
            return None
        digest = codec.digest(args) if digest is None else digest
        found = self._first(self._exact.get((kind, name, digest)))
        if found is None and (kind, name) in self._inputs and getattr(callee, "rebind", None) is not None:
            found = self._first(self._rebound_of(kind, name, callee).get(digest))
        if found is not None:
            self.left.remove(found)
        return found

    def _first(self, numbers: deque[int] | None) -> int | None:
        while numbers:
            number = numbers.popleft()
            if number in self.left:
                return number
        return None

    def _rebound_of(self, kind: str, name: str, callee: Any) -> dict[str, deque[int]]:
        known = self._rebound.get((kind, name))
        if known is None:
            known = self._rebound[kind, name] = {}
            for number, args in self._inputs[kind, name].items():
                rebound = callee.rebind(self._load(args))
                if rebound is not None:
                    known.setdefault(codec.digest(rebound), deque()).append(number)
        return known


def _request_of(body: AnyBody) -> tuple[str, str, str, Payload | None]:
    """(kind, name, digest, arguments) of an event that requests a call, an approval or a child."""
    match body:
        case ToolCallInitiated(args=Payload() as args) | ToolCallProposed(args=args):
            if is_request(args):
                return "model", "", request_digest(args), None
            return "tool", body.tool, args.digest, args
        case ApprovalRequested():
            return "approval", body.action, body.digest, None
        case ChildStarted():
            return "child", body.agent, body.digest, body.input
        case _:
            raise AssertionError(body)
