"""How it came to an event: the chain of causes from the beginning to it, in words.

Most events carry their cause. What a worker does as such (taking and giving up a run) and what comes from outside carry none;
there the nearest reason that the journal shows is taken, and marked as inferred. Where a cause lies in another run's journal (a
child's end, the call of a parent), that event is shown beside the link. A tool that a model wanted is called because of that answer, and
a question to a model is shown with what it was told since its last answer: results of tools, and what people have said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import UnionType

from msgspec import Struct

from perdure.core.events import (
    ApprovalDecided,
    ApprovalEscalated,
    ApprovalExpired,
    ApprovalVoted,
    ApprovalWithdrawn,
    AttentionNeeded,
    BudgetExceeded,
    BudgetRaised,
    CancelRequested,
    ChildFinished,
    ChildStarted,
    Event,
    RunAdopted,
    RunCancelled,
    RunClaimed,
    RunCreated,
    RunPaused,
    RunRequeued,
    RunUnpaused,
    SignalReceived,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
)
from perdure.errors import NotFound, StoreCorrupt
from perdure.inspect.models import Load
from perdure.inspect.observed import Heard, wanted_by
from perdure.inspect.timeline import Timeline
from perdure.inspect.words import iso


class Link(Struct, frozen=True):
    """One link of the chain: an event, and why it followed from the one before."""

    step: int
    seq: int
    event_id: str
    type: str
    ts: str
    call: int | None
    tool: str | None
    cause: int | None
    inferred: bool  # the event carries no cause: the journal's order and content gave it
    says: str
    because: str | None
    meanwhile: list[str]  # changes of hand between the cause and this event
    elsewhere: str | None  # the event in another run's journal that made this one happen
    heard: list[str]  # of a question to a model: what it was told since its last answer


ReadJournal = Callable[[str], Sequence[Event]]


def trace(run_id: str, events: Sequence[Event], seq: int, read: ReadJournal | None = None, load: Load | None = None) -> list[Link]:
    """The causal chain from the run's first event to event `seq`.

    `read` brings the journals of its parent and its children, and `load` what lies in the blob store.
    """
    if not 1 <= seq <= len(events):
        raise NotFound(f"run {run_id} has the events 1 to {len(events)}; there is no event {seq}")
    chain = _chain(events, seq)
    teller = _Teller(run_id, events, chain, read, load)
    return [teller.link(step, event, chain[: step - 1]) for step, event in enumerate(chain, 1)]


def _chain(events: Sequence[Event], seq: int) -> list[Event]:
    chain = [events[seq - 1]]
    while (cause := cause_of(chain[-1], events)) is not None:
        if cause >= chain[-1].seq:
            raise StoreCorrupt(f"event {chain[-1].seq} names event {cause} as its cause, which came later; `perdure verify` tells more")
        chain.append(events[cause - 1])
    return chain[::-1]


def cause_of(event: Event, events: Sequence[Event]) -> int | None:
    """The seq of what made this event happen; None for the first."""
    if event.cause is not None:
        return event.cause
    if event.seq == 1:
        return None
    earlier = events[: event.seq - 1]
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
    """Says what each link of the chain is, and why it followed."""

    def __init__(self, run_id: str, events: Sequence[Event], chain: Sequence[Event], read: ReadJournal | None, load: Load | None) -> None:
        self._events = events
        self._read = read
        self._load = load
        self._heard = Heard(events, load)
        self._timeline = Timeline(run_id, load)
        self._said: dict[int, str] = {}
        told = {event.seq for event in chain}
        for event in events[: chain[-1].seq]:
            # In order: how long something took is known only right then.
            if event.seq in told:
                self._said[event.seq] = self._timeline.say(event)
            else:
                self._timeline.learn(event)

    def link(self, step: int, event: Event, chain: Sequence[Event]) -> Link:
        """The link for this event, which follows from the last one of the chain before it."""
        before = chain[-1] if chain else None
        return Link(
            step=step,
            seq=event.seq,
            event_id=event.event_id,
            type=event.type,
            ts=iso(event.ts),
            call=event.call,
            tool=None if event.call is None else self._timeline.names.tools.get(event.call),
            cause=before.seq if before else None,
            inferred=before is not None and event.cause is None,
            says=taken_over(event, self._events) or self._said[event.seq],
            because=wanted_by(event, chain, self._load) or _because(event, before),
            meanwhile=[] if before is None else _changes_of_hand(before, event, self._events),
            elsewhere=None if self._read is None else _elsewhere(event, self._read),
            heard=self._heard.before(event),
        )


def _elsewhere(event: Event, read: ReadJournal) -> str | None:
    """The event of another run that this one goes back to: a child's last one, or the call of the parent."""
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
    """Who took the run from whom and why, when this event is a takeover."""
    body = event.body
    if not isinstance(body, RunClaimed) or not body.takeover:
        return None
    before = previous_claim(event.seq, events)
    held = f"worker {before.name or before.worker}" if before else "the worker before"
    why = "its process is gone: the kernel has freed its lock" if body.proven_dead else "it gave no sign of life for longer than its lease"
    return f"worker {body.name or body.worker} took the run over from {held}, which had not given it up: {why}"


def previous_claim(seq: int, events: Sequence[Event]) -> RunClaimed | None:
    """The claim in force just before event `seq`."""
    return next((event.body for event in reversed(events[: seq - 1]) if isinstance(event.body, RunClaimed)), None)


def _because(event: Event, before: Event | None) -> str | None:
    if before is None:
        return None
    match event.body:
        case CancelRequested() | RunRequeued() | RunPaused() | RunUnpaused() | RunAdopted() | BudgetRaised() | SignalReceived():
            return f"{event.body.by}, outside the run, asked for it"
        case RunCancelled(forced_by=str() as by):
            return f"{by}, outside the run, ended it"
        case ApprovalVoted() | ApprovalDecided():
            return f"it was asked for in event {before.seq}, and somebody answered"
        case ApprovalEscalated() | ApprovalExpired():
            return f"it was asked for in event {before.seq}, and nobody answered in time"
        case ApprovalWithdrawn():
            return f"it was asked for in event {before.seq}, and nobody wants it any more"
        case ToolCallInitiated(approval=str() as approval):
            return f"approval {approval} was given (event {before.seq}); this uses it up"
        case ChildFinished():
            return f"the child that began in event {before.seq} has ended"
        case ToolCallResolved(by=by) if by != "reconcile":
            return "somebody outside the run settled the doubt"
        case RunCreated():
            return None
        case RunClaimed(takeover=True):
            return f"the run stood at event {before.seq} when its worker was lost"
        case RunClaimed():
            return f"the run was ready after event {before.seq}"
        case _ if event.cause is None:
            return f"it followed event {before.seq} ({before.type}); the worker did it"
        case _:
            return f"event {before.seq} ({before.type}) led to it"


def _changes_of_hand(before: Event, event: Event, events: Sequence[Event]) -> list[str]:
    """Takeovers between two linked events: without them a second attempt would look as if it came out of nowhere."""
    between = events[before.seq : event.seq - 1]
    told = [(other.seq, taken_over(other, events)) for other in between]
    return [f"event {seq}: {says}" for seq, says in told if says is not None]
