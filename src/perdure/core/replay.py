"""Resume is replay: feed the recorded completions to a fresh machine in recorded order and check that it asks for the same.

An activation is an event that wakes the machine. Everything that the machine states then (intents, thoughts, decisions, the
end) is recorded with that event as its cause and in the same commit, so the comparison is one list against another. An
activation whose statements are missing altogether is the frontier: the process died, or gave the run up, before it recorded
them. Nothing can be recorded beyond the frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    CancelRequested,
    ChildFinished,
    ChildStarted,
    DecisionMade,
    Event,
    Failure,
    ModelCallCompleted,
    ModelCallFailed,
    PatchMarked,
    PlanGenerated,
    RunCancelled,
    RunClaimed,
    RunFailed,
    RunReleased,
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
    encode_body,
    tag_of,
)
from perdure.core.machine import (
    Abandon,
    ApprovalSettled,
    AskApproval,
    Asked,
    CallCompleted,
    CallFailed,
    CallTool,
    CancelAsked,
    Cancelled,
    ChildEnded,
    Command,
    Completion,
    Failed,
    Finish,
    Machine,
    Record,
    SignalArrived,
    StartChild,
    Succeeded,
    TimerDue,
    UnknownCompletion,
)
from perdure.core.prompts import difference, in_short, is_request
from perdure.core.state import refusal
from perdure.errors import Diverged

_ASKED = frozenset((CallTool, AskApproval, StartChild))
_STATED = frozenset(
    (
        ThoughtRecorded,
        DecisionMade,
        PlanGenerated,
        StatusReported,
        PatchMarked,
        ToolCallProposed,
        ChildStarted,
        RunSucceeded,
        RunFailed,
        RunCancelled,
    )
)


class Frontier(Struct):
    """Where a replay has arrived."""

    calls: dict[int, Asked]  # everything numbered that the machine has asked for
    abandoned: set[int]  # those that the agent has stopped waiting for
    pending: list[tuple[int, Command]]  # (cause, command): stated by the machine, not yet in the journal
    activations: int = 0


def completion_of(event: Event, load: Callable[[Payload], bytes]) -> Completion | None:
    """What this event tells the machine; None if it tells nothing."""
    body = event.body
    match body:
        case ToolCallCompleted() if event.call is not None:
            if body.result is None:
                assert body.failure is not None
                return CallFailed(event.call, body.failure, body.attempt)
            inline = body.result.inline
            return CallCompleted(event.call, load(body.result) if inline is None else inline)
        case ToolCallFailed() if event.call is not None and body.final:
            return CallFailed(event.call, body.failure, body.attempt)
        case ToolCallResolved() if event.call is not None:
            if body.outcome == "happened":
                assert body.result is not None
                return CallCompleted(event.call, load(body.result))
            if body.outcome == "failed":
                assert body.failure is not None
                return CallFailed(event.call, body.failure, body.attempt)
            return None
        case TimerFired():
            return TimerDue(body.timer)
        case SignalReceived():
            return SignalArrived(body.topic, load(body.payload))
        case ApprovalDecided() | ApprovalExpired() | ApprovalWithdrawn() if event.call is not None:
            return _settled(event.call, body, load)
        case ChildFinished() if event.call is not None:
            if body.output is not None:
                return ChildEnded(event.call, body.run_id, load(body.output), None)
            cancelled = Failure(kind="cancelled", type="RunCancelled", message=f"run {body.run_id} was cancelled")
            return ChildEnded(event.call, body.run_id, None, body.failure or cancelled)
        case CancelRequested():
            return CancelAsked()
        case _:
            return None


def _settled(number: int, body: ApprovalDecided | ApprovalExpired | ApprovalWithdrawn, load: Callable[[Payload], bytes]) -> ApprovalSettled:
    match body:
        case ApprovalDecided(granted=True):
            return ApprovalSettled(number, "approved", body.by, body.note, None if body.input is None else load(body.input))
        case ApprovalDecided():
            return ApprovalSettled(number, "rejected", body.by, body.note, failure=refusal("rejected", body.by, body.note))
        case ApprovalExpired():
            return ApprovalSettled(number, "expired", failure=refusal("expired", "somebody" if body.lapsed else None, None))
        case ApprovalWithdrawn():
            return ApprovalSettled(number, "withdrawn", failure=refusal("withdrawn", None, None))


def is_stated(event: Event) -> bool:
    """Whether the machine itself stated this event (rather than the world or the worker)."""
    body = event.body
    if isinstance(body, ToolCallInitiated):
        # After a proposal the proposal is what the machine stated, and what a person has edited is theirs.
        return body.attempt == 1 and body.args is not None and body.approval is None
    if isinstance(body, ApprovalRequested):
        return body.tool is None  # a tool's own policy asks in the worker, not in the agent
    if isinstance(body, RunCancelled):
        return body.forced_by is None  # else a person has ended the run without its agent
    return type(body) in _STATED


def replay(machine: Machine, events: Sequence[Event], load: Callable[[Payload], bytes]) -> Frontier:
    """Bring a fresh machine to where the journal ends, or raise Diverged at the first difference."""
    stated: dict[int, list[Event]] = {}
    last = 0
    for event in events:
        if type(event.body) in _PASSES:
            last = event.seq
        elif is_stated(event):
            assert event.cause is not None
            stated.setdefault(event.cause, []).append(event)
    machine.patches = frozenset(event.body.name for some in stated.values() for event in some if isinstance(event.body, PatchMarked))
    frontier = Frontier({}, set(), [])
    with machine.replayed():
        _replay(machine, events, stated, last, frontier, load)
    machine.replaying = False
    if stated:
        first = min(stated.values(), key=lambda some: some[0].seq)[0]
        raise _missing(first)
    return frontier


def _replay(
    machine: Machine,
    events: Sequence[Event],
    stated: dict[int, list[Event]],
    last: int,
    frontier: Frontier,
    load: Callable[[Payload], bytes],
) -> None:
    """Wake the machine with every event that wakes it, and compare what it states then with what was `stated` because of that event."""
    started = False
    for event in events:
        kind = type(event.body)
        if kind in _WAKES:
            completion = completion_of(event, load)
            if completion is None or machine.finished:
                continue
        elif kind is RunClaimed and not started:
            completion = None
        else:
            continue
        seq = event.seq
        recorded = stated.pop(seq, _NOTHING)
        machine.cause, machine.replaying = seq, seq < last or bool(recorded)
        if completion is None:
            started = True
            commands = machine.start(event.ts)
        else:
            try:
                commands = machine.deliver(event.ts, completion)
            except UnknownCompletion as unknown:
                raise _nothing_asked(event, unknown) from None
        frontier.activations += 1
        _compare(frontier, commands, recorded, event, load)


_NOTHING: list[Event] = []
_WAKES = frozenset(
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
        ),
        *(ApprovalDecided, ApprovalExpired, ApprovalWithdrawn),
    )
)
# After the last of these the agent lives, if it has stated nothing yet: whatever it says is new. A failure that is not final counts, since it
# comes before its retry anyway; and whatever woke the agent before the run was given up, it had come past since.
_PASSES = _WAKES | {RunReleased}


def _compare(frontier: Frontier, commands: list[Command], recorded: list[Event], cause: Event, load: Callable[[Payload], bytes]) -> None:
    if len(recorded) > 1 or (recorded and type(recorded[0].body) is PatchMarked):
        recorded = _without_old_marks(recorded, commands)
    at = 0
    for command in commands:
        kind = type(command)
        if kind in _ASKED:
            frontier.calls[command.number] = command  # type: ignore[union-attr, assignment]
        elif isinstance(command, Abandon):
            frontier.abandoned.add(command.number)
            continue
        if at == len(recorded):
            if at:
                raise _beyond(command, cause, recorded[-1])
            frontier.pending.append((cause.seq, command))
            continue
        if not _same(command, recorded[at], load):
            raise _different(command, recorded[at], load)
        at += 1
    if at < len(recorded):
        raise _missing(recorded[at])
    if at and frontier.pending and any(earlier != cause.seq for earlier, _ in frontier.pending):
        earlier, command = frontier.pending[0]
        raise Diverged(
            f"the code asks for {_asked(command)} after event {earlier}, where the journal has nothing; the journal goes on with "
            f"{_recorded(recorded[0].body, recorded[0].call)} at event {recorded[0].seq}",
            seq=earlier,
            call=command.number if isinstance(command, Asked) else None,
        )


def _without_old_marks(recorded: list[Event], commands: list[Command]) -> list[Event]:
    """Without the marks of changes that the code does not ask about any more: it has only the new side of them."""
    asked = {command.body.name for command in commands if isinstance(command, Record) and isinstance(command.body, PatchMarked)}
    return [event for event in recorded if not isinstance(event.body, PatchMarked) or event.body.name in asked]


def _different(command: Command, event: Event, load: Callable[[Payload], bytes]) -> Diverged:
    return Diverged(
        f"at event {event.seq} the journal has {_recorded(event.body, event.call)}; the code asks for {_asked(command)}"
        + _more_about(command, event, load),
        seq=event.seq,
        call=command.number if isinstance(command, Asked) else event.call,
    )


def _more_about(command: Command, event: Event, load: Callable[[Payload], bytes]) -> str:
    """What a reader needs besides where both sides look alike in short: in what they differ, or what to do."""
    if isinstance(event.body, PlanGenerated):
        return "; a run follows the plan that it was begun with: resume it with that one, or start a new run"
    if isinstance(command, CallTool) and isinstance(event.body, ToolCallInitiated | ToolCallProposed) and is_request(event.body.args):
        assert event.body.args is not None
        differs = difference(load(event.body.args), command.args)
        return "" if differs is None else f": {differs}"
    return ""


def _same(command: Command, event: Event, load: Callable[[Payload], bytes]) -> bool:
    body = event.body
    if type(command) is CallTool:  # nearly all are: they do not go through the patterns below
        tool = command.tool
        if not isinstance(body, (ToolCallInitiated, ToolCallProposed)) or event.call != command.number or body.tool != tool.name:
            return False
        assert body.args is not None
        return _same_input(tool, command.args, body.args, load)
    match command:
        case AskApproval(number, action, asked, _, _):
            if not isinstance(body, ApprovalRequested) or event.call != number or body.action != action:
                return False
            return body.digest == codec.digest(asked)
        case StartChild(number, agent, args):
            if not isinstance(body, ChildStarted) or event.call != number or body.agent != agent.name:
                return False
            return _same_input(agent, args, body.input, load)
        case Record(PlanGenerated() as plan):
            # By its digest: where the plan itself lies depends on its size and on the settings of who recorded it.
            return isinstance(body, PlanGenerated) and (body.digest, body.by) == (plan.digest, plan.by)
        case Record(stated):
            return type(stated) is type(body) and encode_body(stated) == encode_body(body)
        case Finish(Succeeded(output)):
            return isinstance(body, RunSucceeded) and load(body.output) == output
        case Finish(Failed(failure)):
            return isinstance(body, RunFailed) and (body.failure.type, body.failure.message) == (failure.type, failure.message)
        case Finish(Cancelled()):
            return isinstance(body, RunCancelled)
        case _:
            return False


def _same_input(callee: Any, args: bytes, recorded: Payload, load: Callable[[Payload], bytes]) -> bool:
    inline = recorded.inline
    if inline is not None:
        return inline == args or _rebound(callee, inline) == args
    return recorded.blob == codec.digest(args) or _rebound(callee, load(recorded)) == args


def _rebound(tool: Any, args: bytes) -> bytes | None:
    """Recorded arguments as today's signature would record them: a parameter added with a default is not a divergence."""
    rebind = getattr(tool, "rebind", None)
    return rebind(args) if rebind is not None else None


def _asked(command: Command) -> str:
    match command:
        case CallTool(number, tool, args):
            return f"call {number}: {tool.name}({in_short(args) or _short(args.decode('utf-8', 'replace'))})"
        case AskApproval(number, action, asked, _, _):
            return f"approval {number}: {action} {_short(asked.decode('utf-8', 'replace'))}"
        case StartChild(number, agent, args):
            return f"child {number}: {agent.name}({_short(args.decode('utf-8', 'replace'))})"
        case Record(PatchMarked(name=name)):
            return f"the mark of the change {name!r}"
        case Record(PlanGenerated() as body):
            return _plan(body)
        case Record(body):
            return f"{tag_of(body)} {_short(encode_body(body).decode())}"
        case Finish(outcome):
            return _ending(outcome)
        case Abandon(number):
            return f"giving up call {number}"


def _ending(outcome: Succeeded | Failed | Cancelled) -> str:
    match outcome:
        case Succeeded(output):
            return f"the run's success with {_short(output.decode('utf-8', 'replace'))}"
        case Failed(failure):
            return f"the run's failure with {failure.type}: {_short(failure.message)}"
        case Cancelled():
            return "the run's cancellation"


def _recorded(body: AnyBody, call: int | None) -> str:
    match body:
        case ToolCallInitiated(tool=tool, args=args) | ToolCallProposed(tool=tool, args=args):
            return f"call {call}: {tool}({_shown(args)})"
        case ApprovalRequested(action=action, input=asked):
            return f"approval {call}: {action} {_shown(asked)}"
        case ChildStarted(agent=agent, input=args):
            return f"child {call}: {agent}({_shown(args)})"
        case PatchMarked(name=name):
            return f"the mark of the change {name!r}"
        case PlanGenerated():
            return _plan(body)
        case RunSucceeded(output=output):
            return f"the run's success with {_shown(output)}"
        case RunFailed(failure=failure):
            return f"the run's failure with {failure.type}: {_short(failure.message)}"
        case _:
            return f"{tag_of(body)} {_short(encode_body(body).decode())}"


def _plan(body: PlanGenerated) -> str:
    return f"the plan {body.digest[:12]} {_shown(body.plan)}"


def _shown(payload: Payload | None) -> str:
    if payload is None:
        return ""
    inline = payload.inline
    if inline is None:
        return "a long request" if is_request(payload) else _short(f"{payload.preview}…")
    return in_short(inline) or _short(inline.decode("utf-8", "replace"))


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:159] + "…"


def _missing(event: Event) -> Diverged:
    return Diverged(
        f"at event {event.seq} the journal has {_recorded(event.body, event.call)}; the code does not ask for it",
        seq=event.seq,
        call=event.call,
    )


def _beyond(command: Command, cause: Event, last: Event) -> Diverged:
    return Diverged(
        f"after event {cause.seq} the journal ends with {_recorded(last.body, last.call)} at event {last.seq}; the code also asks for {_asked(command)}",
        seq=last.seq,
        call=command.number if isinstance(command, Asked) else None,
    )


def _nothing_asked(event: Event, unknown: UnknownCompletion) -> Diverged:
    return Diverged(f"event {event.seq} ({event.type}) is about {unknown}, which the code never asked for", seq=event.seq, call=event.call)
