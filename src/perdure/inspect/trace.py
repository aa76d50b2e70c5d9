"""`perdure trace`: the chain of causes that led to an event, with the agent's statements between them.

The chain comes from the journal: each event names its cause. Between two links are the decisions, the thoughts and the
plan that the agent recorded in that activation. If a model asked for a call, the chain also has the model's answer,
and the messages that the model got before this answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import UnionType
from typing import Any

from msgspec import Struct

from perdure.core.codec import Payload
from perdure.core.events import (
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalVoted,
    ApprovalWithdrawn,
    AttentionNeeded,
    BudgetExceeded,
    BudgetRaised,
    CancelRequested,
    ChildFinished,
    ChildStarted,
    DecisionMade,
    Event,
    FrameChanged,
    ModelCallCompleted,
    ModelCallInitiated,
    PlanGenerated,
    RunAdopted,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunForked,
    RunPaused,
    RunReopened,
    RunRequeued,
    RunRestored,
    RunUnpaused,
    SignalReceived,
    ThoughtRecorded,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
    event_at,
    place_of,
)
from perdure.core.prompt_deltas import Sources, added, is_request
from perdure.core.state import fold
from perdure.errors import NotFound, StoreCorrupt
from perdure.inspect.prompt import sources
from perdure.inspect.text import Load, answer_in, clip, iso, plain, use_words
from perdure.inspect.timeline import PlanStep, Timeline

SHOWN_EACH = 160
MOST_SHOWN = 12


# -- Model calls: which answer of a model asked for a call, and which messages the model got before this answer


class ToldModels:
    """The messages that models got before each answer, from a run's journal."""

    def __init__(self, events: Sequence[Event], load: Load | None) -> None:
        self._events = events
        self._load = load
        self._sources: Sources | None = None

    def before(self, event: Event) -> list[str]:
        """If the event asks a model: the messages since the model's last answer. Empty for any other event."""
        body = event.body
        if (
            self._load is None
            or event.call is None
            or not isinstance(body, ToolCallProposed | ToolCallInitiated)
            or not is_request(body.args)
        ):
            return []
        if self._sources is None:
            self._sources = sources(fold(self._events).calls, self._events, self._load)
        try:
            messages = added(event.call, self._sources)
        except StoreCorrupt as error:
            return [str(error)]
        answers = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
        since = messages[answers[-1] + 1 :] if answers else messages
        skipped = [f"… {len(since) - MOST_SHOWN:,} more"] if len(since) > MOST_SHOWN else []
        return skipped + [_words(message) for message in since[-MOST_SHOWN:]]


def _words(message: dict[str, Any]) -> str:
    text = clip(str(message.get("text", "")), SHOWN_EACH)
    if message.get("role") == "tool":
        return f"{'the error' if message.get('error') else 'the result'} of {message.get('name')}: {text}"
    return f"the user said: “{text}”"


def wanted_by(event: Event, answered: Event | None, load: Load | None) -> str | None:
    """In words: the answer of a model (`answered`) that asked for this call; None if that answer did not ask for it."""
    args: Payload | None
    match event.body:
        case ModelCallInitiated():
            return None
        case ToolCallProposed(tool=name, args=args) | ToolCallInitiated(tool=name, args=args, attempt=1, approval=None):
            pass
        case ChildStarted(agent=name, input=args):
            pass
        case _:
            return None
    answer = answer_in(answered.body.result, load) if answered is not None and isinstance(answered.body, ModelCallCompleted) else None
    if answered is None or answer is None:
        return None
    uses = [use for use in answer.uses if use.name == name]
    if not uses:
        return None
    # The answer may use the tool several times. Name the use with these arguments. If no use has these arguments (a
    # default was added, or a person edited them), name all uses.
    same = [use for use in uses if use.arguments == plain(args, load)]
    return f"the answer in event {answered.seq} wanted it: {', '.join(use_words(use) for use in same[:1] or uses)}"


# -- The chain of causes


class Statement(Struct, frozen=True):
    """A decision, a thought or a plan that the agent recorded in the activation that led to a link of the chain."""

    seq: int
    event_id: str
    type: str
    says: str


class Link(Struct, frozen=True):
    """One link of the chain: an event, and why it followed from the event of the link before."""

    step: int
    seq: int
    event_id: str
    type: str
    ts: str
    call: int | None
    tool: str | None
    plan_step: PlanStep | None  # the step of the run's plan, if the event is about a call of a step
    cause: int | None
    inferred: bool  # True: an older version wrote the event without a cause, and `cause_of` inferred the cause
    says: str
    because: str | None
    stated: list[Statement]  # what the agent stated in the activation that the cause began
    meanwhile: list[str]  # takeovers between the cause and this event
    elsewhere: str | None  # the event in another run's journal that caused this event
    heard: list[str]  # for a model call: the messages since the model's last answer


ReadJournal = Callable[[str], Sequence[Event]]


def trace(
    run_id: str, events: Sequence[Event], seq: int | None = None, read: ReadJournal | None = None, load: Load | None = None
) -> list[Link]:
    """The causal chain from the run's first event to event `seq`.

    Without `seq`: to the event that stopped the run, if the run needs attention; else to the run's last event.

    `read` reads the journals of the run's parent and children. `load` reads payloads from the blob store.
    """
    seq = to_explain(events) if seq is None else seq
    if not 1 <= seq <= events[-1].seq:
        raise NotFound(f"run {run_id} has the events 1 to {events[-1].seq}; there is no event {seq}")
    if event_at(events, seq) is None:
        raise NotFound(
            f"run {run_id}: event {seq} was removed; the first event after its first one is its checkpoint, event {events[1].seq}"
        )
    chain = _chain(events, seq)
    teller = _Teller(run_id, events, chain, read, load)
    links: list[Link] = []
    before: Event | None = None
    answered: Event | None = None  # the last answer of a model in the chain so far
    for event in chain:
        links.append(teller.link(len(links) + 1, event, before, answered))
        before, answered = event, event if isinstance(event.body, ModelCallCompleted) else answered
    return links


def to_explain(events: Sequence[Event]) -> int:
    """The event that a person asks about first: why the run needs attention, or else the last event of the run."""
    if fold(events).attention is not None:
        return _last(events, AttentionNeeded)
    return events[-1].seq


def _chain(events: Sequence[Event], seq: int) -> list[Event]:
    first = event_at(events, seq)
    assert first is not None, seq
    chain = [first]
    while (cause := cause_of(chain[-1], events)) is not None:
        if cause >= chain[-1].seq:
            raise StoreCorrupt(
                f"event {chain[-1].seq} names event {cause} as its cause, which came later", hint="`perdure verify` tells more"
            )
        before = event_at(events, cause)
        if before is None:
            break  # it was removed: the chain begins at the checkpoint
        chain.append(before)
    return chain[::-1]


def cause_of(event: Event, events: Sequence[Event]) -> int | None:
    """The seq of the event that caused this event; None for the first event of the run.

    perdure 0.1 recorded no cause for releases, nor for some post. Only for such events the cause is inferred here.
    """
    if event.cause is not None:
        return event.cause
    if event.seq == 1:
        return None
    earlier = events[: place_of(events, event.seq - 1)]
    match event.body:
        case ToolCallResolved():
            return _last(earlier, ToolCallInDoubt, event.call)
        case RunRequeued():
            return _last(earlier, AttentionNeeded)
        case RunUnpaused():
            return _last(earlier, RunPaused | AttentionNeeded)
        case BudgetRaised():
            return _last(earlier, BudgetExceeded)
        case CancelRequested() | RunPaused() | SignalReceived() | RunAdopted():
            return 1
        case _:
            return event.seq - 1


def _last(events: Sequence[Event], kind: type | UnionType, call: int | None = None) -> int:
    return next((event.seq for event in reversed(events) if isinstance(event.body, kind) and call in (None, event.call)), 1)


class _Teller:
    """Makes the links of the chain: says what happened in each event, and why."""

    def __init__(self, run_id: str, events: Sequence[Event], chain: Sequence[Event], read: ReadJournal | None, load: Load | None) -> None:
        self._events = events
        self._read = read
        self._load = load
        self._heard = ToldModels(events, load)
        self._timeline = Timeline(run_id, load)
        self._said: dict[int, str] = {}
        told = {event.seq for event in chain}
        self._stated = _stated(chain, events)
        told |= {event.seq for some in self._stated.values() for event in some}
        for event in events[: place_of(events, max(told))]:
            # Go through the events in order: a sentence needs the names and the begin times of the calls so far.
            if event.seq in told:
                self._said[event.seq] = self._timeline.say(event)
            else:
                self._timeline.learn(event)

    def link(self, step: int, event: Event, before: Event | None, answered: Event | None) -> Link:
        """The link for this event. `before` caused it. `answered` is the last answer of a model before it in the chain."""
        return Link(
            step=step,
            seq=event.seq,
            event_id=event.event_id,
            type=event.type,
            ts=iso(event.ts),
            call=event.call,
            tool=None if event.call is None else self._timeline.names.tools.get(event.call),
            plan_step=self._timeline.step(event),
            cause=before.seq if before else None,
            inferred=before is not None and event.cause is None,
            says=taken_over(event, self._events) or self._said[event.seq],
            because=wanted_by(event, answered, self._load) or _because(event, before),
            stated=[Statement(one.seq, one.event_id, one.type, self._said[one.seq]) for one in self._stated.get(event.seq, ())],
            meanwhile=[] if before is None else _takeovers(before, event, self._events),
            elsewhere=None if self._read is None else _elsewhere(event, self._read),
            heard=self._heard.before(event),
        )


def _stated(chain: Sequence[Event], events: Sequence[Event]) -> dict[int, list[Event]]:
    """Event of the chain → the agent's statements in the activation that led to it. They have the same recorded cause.

    A ReAct agent records its decision after the calls that follow from it. So the order does not matter here.
    """
    by_cause: dict[int | None, list[Event]] = {}
    for event in events:
        if isinstance(event.body, DecisionMade | ThoughtRecorded | PlanGenerated):
            by_cause.setdefault(event.cause, []).append(event)
    pairs = ((before, event) for before, event in pairwise(chain) if event.cause == before.seq)
    return {event.seq: [one for one in by_cause.get(before.seq, ()) if one is not event] for before, event in pairs}


def _elsewhere(event: Event, read: ReadJournal) -> str | None:
    """In words: the event of another run that caused this event: a child's last event, or the parent's call."""
    match event.body:
        case ChildFinished(run_id=other):
            journal = read(other)
            found = journal[-1] if journal else None
        case RunCreated(parent=str() as other, parent_call=call):
            journal = read(other)
            found = next((one for one in journal if one.call == call and isinstance(one.body, ChildStarted)), None)
        case _:
            return None
    if found is None:
        return f"run {other} has no such event; `perdure verify` tells more"
    timeline = Timeline(other)
    for one in journal[: found.seq - 1]:
        timeline.learn(one)
    return f"run {other}, event {found.seq}: {timeline.say(found)}"


def taken_over(event: Event, events: Sequence[Event]) -> str | None:
    """In words: which worker took over the run from which worker, and why. None if this event is no takeover."""
    body = event.body
    if not isinstance(body, RunClaimed) or not body.takeover:
        return None
    before = previous_claim(event.seq, events)
    held = f"worker {before.name or before.worker}" if before else "the worker before"
    why = "its process is gone: the kernel has freed its lock" if body.proven_dead else "it gave no sign of life for longer than its lease"
    return f"worker {body.name or body.worker} took the run over from {held}, which had not released it: {why}"


def previous_claim(seq: int, events: Sequence[Event]) -> RunClaimed | None:
    """The last claim of the run before event `seq`; None if there is none."""
    return next((event.body for event in reversed(events[: place_of(events, seq - 1)]) if isinstance(event.body, RunClaimed)), None)


def _because(event: Event, before: Event | None) -> str | None:
    if before is None:
        return None
    match event.body:
        case (
            CancelRequested()
            | RunRequeued()
            | RunPaused()
            | RunUnpaused()
            | RunAdopted()
            | FrameChanged()
            | BudgetRaised()
            | SignalReceived()
        ):
            return f"{event.body.by}, outside the run, asked for it"
        case RunForked(by=by, parent=parent):
            return f"run {parent} was copied up to event {before.seq}, and {by}, outside the run, asked for it"
        case RunRestored(by=by):
            return f"the run stood at event {before.seq} ({before.type}) when its backup was taken, and {by} restored it"
        case RunReopened(by=by):
            return f"the run stood at event {before.seq} ({before.type}), and {by}, outside the run, asked for it"
        case RunCancelled(forced_by=str() as by):
            return f"{by}, outside the run, ended it"
        case ApprovalVoted() | ApprovalDecided() if isinstance(before.body, ApprovalRequested):
            return f"it was asked for in event {before.seq}, and a decider answered"
        case ApprovalEscalated() | ApprovalExpired() if isinstance(before.body, ApprovalRequested):
            return f"it was asked for in event {before.seq}, and there was no answer in time"
        case ApprovalWithdrawn() if isinstance(before.body, ApprovalRequested):
            return f"it was asked for in event {before.seq}, and it is not needed any more"
        case ToolCallInitiated(approval=str() as approval):
            return f"approval {approval} was given (event {before.seq}); this uses it up"
        case ChildFinished():
            return f"the child that began in event {before.seq} has ended"
        case ToolCallResolved(by=by) if by != "reconcile":
            return f"{by}, outside the run, settled the doubt"
        case RunCreated():
            return None
        case RunClaimed(takeover=True):
            return f"the run stood at event {before.seq} when its worker was lost"
        case RunClaimed():
            return f"the run was ready after event {before.seq}"
        case _ if event.cause is None:
            return f"it followed event {before.seq} ({before.type}); its cause was not recorded by the older perdure that wrote it"
        case _:
            return f"event {before.seq} ({before.type}) led to it"


def _takeovers(before: Event, event: Event, events: Sequence[Event]) -> list[str]:
    """The takeovers between two linked events. A takeover explains why there was a second attempt."""
    between = events[place_of(events, before.seq) : place_of(events, event.seq - 1)]
    told = [(other.seq, taken_over(other, events)) for other in between]
    return [f"event {seq}: {says}" for seq, says in told if says is not None]
