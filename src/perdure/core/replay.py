"""Resume is replay: deliver the recorded completions to a new machine in recorded order, and compare its commands.

An activation begins with one event that wakes the machine. All statements that the machine then makes (intents,
thoughts, decisions, the end of the run) are recorded in one commit, with that event as their cause. So replay compares
two lists for each activation. The frontier is the activation whose statements are all missing: the worker died, or
released the run, before it recorded these statements. The journal holds no statement of a later activation.
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
    CallAnswered,
    CallHeld,
    CallRequestedAgain,
    CancelRequested,
    CheckpointTaken,
    ChildFinished,
    ChildStarted,
    Event,
    Failure,
    OutcomeReused,
    PatchMarked,
    PlanGenerated,
    RunCancelled,
    RunClaimed,
    RunFailed,
    RunReleased,
    RunSucceeded,
    SignalReceived,
    TimerFired,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
    encode_body,
    tag_of,
)
from perdure.core.history import WAKES, History, earlier_of, history, inherited, is_stated
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
    Hold,
    HoldTaken,
    Inheritance,
    Machine,
    Record,
    SignalArrived,
    StartChild,
    Succeeded,
    TakeCheckpoint,
    TimerDue,
    UnknownCompletion,
)
from perdure.core.prompt_deltas import difference, in_short, is_request
from perdure.core.state import image_in, refusal
from perdure.errors import Diverged

_ASKED = frozenset((CallTool, AskApproval, StartChild))


class Frontier(Struct):
    """The state at the end of a replay."""

    calls: dict[int, Asked]  # every call, approval and child that the machine has requested
    abandoned: set[int]  # the numbers of calls, approvals and children that the agent no longer waits for
    pending: list[tuple[int, Command]]  # (cause, command): commands of the machine that are not in the journal yet
    activations: int = 0
    in_the_way: str | None = None  # why the agent cannot go on from here with the frame of its code: `Machine.in_the_way`


def completion_of(event: Event, load: Callable[[Payload], bytes]) -> Completion | None:
    """The completion that this event delivers to the machine; None if the event delivers no completion."""
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
            if body.outcome == "did_not_happen":
                return None
            if body.result is None:
                assert body.failure is not None
                return CallFailed(event.call, body.failure, body.attempt)
            return CallCompleted(event.call, load(body.result))
        case CallAnswered() if event.call is not None:
            if body.child is not None:
                return ChildEnded(event.call, body.child, None if body.result is None else load(body.result), body.failure)
            if body.result is not None:
                return CallCompleted(event.call, load(body.result))
            assert body.failure is not None
            return CallFailed(event.call, body.failure, body.attempt)
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
        case CallHeld() if event.call is not None:
            return HoldTaken(event.call)
        case _:
            return None


def _settled(number: int, body: ApprovalDecided | ApprovalExpired | ApprovalWithdrawn, load: Callable[[Payload], bytes]) -> ApprovalSettled:
    match body:
        case ApprovalDecided(granted=True):
            return ApprovalSettled(number, "approved", body.by, body.note, None if body.input is None else load(body.input))
        case ApprovalDecided():
            return ApprovalSettled(number, "rejected", body.by, body.note, failure=refusal("rejected", body.by, body.note))
        case ApprovalExpired():
            return ApprovalSettled(number, "expired", failure=refusal("expired", "a person" if body.lapsed else None, None))
        case ApprovalWithdrawn():
            return ApprovalSettled(number, "withdrawn", failure=refusal("withdrawn", None, None))


def inheritance(checkpoint: Event, load: Callable[[Payload], bytes]) -> Inheritance:
    """What the life that begins at this checkpoint begins with."""
    body = checkpoint.body
    assert isinstance(body, CheckpointTaken), body
    image = image_in(body)
    tools = set(image.open)
    return Inheritance(
        checkpoint.seq,
        load(body.state),
        earlier_of(image),
        {number: number in tools for number in sorted(inherited([checkpoint]))},
        [(signal.topic, load(signal.payload)) for signal in body.signals],
        body.timers,
        cancelled=image.cancel is not None,
        labels=image.labels,
    )


def replay(
    machine: Machine,
    events: Sequence[Event],
    load: Callable[[Payload], bytes],
    begun: Frontier | None = None,
    *,
    until: int | None = None,
    past: History | None = None,
) -> Frontier:
    """Bring a machine to the end of the journal, or raise Diverged at the first difference.

    The machine is new, or it was kept when its run was parked. In the second case `begun` is the frontier at the time
    of parking, and `events` are the events since then. With `until`, no event after the event with this number is
    delivered. Then `events` must still go on to the next `run_reopened`, or to the end: the last statements of the
    agent, and its patches, are compared with the events that follow. `past`: the history of `events`, if the caller
    has it.
    """
    past = past or history(events, until)
    if begun is None and past.checkpoint is not None:
        machine.begin_life(inheritance(past.checkpoint, load), load)
    stated: dict[int, list[Event]] = {}
    last, newest = 0, past.branches[-1] if past.branches else None
    for event in past.events:
        if type(event.body) in WAKES or (type(event.body) is RunReleased and event.body.status in _AT_REST):
            # The commit of the `run_reopened` may hold completions to which the agent has not reacted yet.
            if newest is None or event.seq > newest.after or event.seq < newest.at:
                last = event.seq
        elif is_stated(event) and event is not past.checkpoint:
            assert event.cause is not None
            stated.setdefault(event.cause, []).append(event)
    machine.patches |= {event.body.name for some in stated.values() for event in some if isinstance(event.body, PatchMarked)}
    frontier = Frontier({}, set(), []) if begun is None else begun
    with machine.replayed():
        _replay(machine, past, stated, last, frontier, load, until, started=begun is not None)
    machine.replaying = False
    if stated:
        first = min(stated.values(), key=lambda some: some[0].seq)[0]
        assert first.cause is not None
        if until is None or first.cause <= until:
            raise _missing(first)
        if frontier.pending:
            raise _unrecorded(frontier, first)
    frontier.in_the_way = machine.in_the_way()
    return frontier


def _replay(
    machine: Machine,
    past: History,
    stated: dict[int, list[Event]],
    last: int,
    frontier: Frontier,
    load: Callable[[Payload], bytes],
    until: int | None,
    *,
    started: bool,
) -> None:
    """Deliver each event that wakes the machine, and compare the machine's statements with the recorded ones."""
    branches = list(reversed(past.branches))
    for event in past.events:
        kind, seq = type(event.body), event.seq
        if until is not None and seq > until:
            return
        while branches and seq > branches[-1].stated:
            machine.reopen(branches.pop().earlier, load)
        source = event
        if kind in WAKES:
            if kind is OutcomeReused:
                source = past.sources[event.body.of]  # type: ignore[union-attr]
            completion = completion_of(source, load)
            if completion is None or machine.finished:
                continue
            if (kept := machine.keeps(event)) is not None:
                if kept:
                    _compare(frontier, kept, stated.pop(seq, _NOTHING), event, load)
                continue
            if machine.left:
                machine.keep_for_next_life(event, source, completion)
                continue
        elif (kind is RunClaimed or kind is CheckpointTaken) and not started:
            completion = None
        else:
            continue
        recorded = stated.pop(seq, _NOTHING)
        machine.cause, machine.source, machine.replaying = seq, source.seq, seq < last or bool(recorded)
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
# The replay ends at the last event that wakes the agent, if that has no recorded statements. From then on the agent states
# something new, so `patched` is True. A failure that is not final wakes the agent too, because a retry follows it. A
# release of a run that waits is later than that: the agent had handled everything before it. Any other release may come
# after completions that were recorded while the run was closing, and that no worker has delivered.
_AT_REST = frozenset(("waiting", "waiting_approval"))


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
        elif kind is Hold:
            continue  # `Machine.holds` has it until it is taken
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
        raise _unrecorded(frontier, recorded[0])


def _without_old_marks(recorded: list[Event], commands: list[Command]) -> list[Event]:
    """The recorded events, without patch marks that the code no longer states because only the new code is left."""
    asked = {command.body.name for command in commands if isinstance(command, Record) and isinstance(command.body, PatchMarked)}
    return [event for event in recorded if not isinstance(event.body, PatchMarked) or event.body.name in asked]


def _different(command: Command, event: Event, load: Callable[[Payload], bytes]) -> Diverged:
    return Diverged(
        f"at event {event.seq} the journal has {_recorded(event.body, event.call)}; the code asks for {asked_words(command)}"
        + _more_about(command, event, load),
        seq=event.seq,
        call=command.number if isinstance(command, Asked) else event.call,
        recorded=_recorded(event.body, event.call),
        asked=asked_words(command) + _more_about(command, event, load),
    )


def _more_about(command: Command, event: Event, load: Callable[[Payload], bytes]) -> str:
    """More words for the message: the exact difference, or what to do. Without them both sides may look the same."""
    if isinstance(event.body, PlanGenerated) and isinstance(command, Record):
        return "; a run follows the plan that it was begun with: resume it with that one, or adopt it as a new version"
    if isinstance(command, CallTool) and isinstance(event.body, ToolCallInitiated | ToolCallProposed) and is_request(event.body.args):
        assert event.body.args is not None
        differs = difference(load(event.body.args), command.args)
        return "" if differs is None else f": {differs}"
    return ""


def _same(command: Command, event: Event, load: Callable[[Payload], bytes]) -> bool:
    body = event.body
    if type(body) is CallRequestedAgain:
        # The machine has found the superseded call by its tool and arguments, and has given the call its number.
        return type(command) in _ASKED and event.call == command.number  # type: ignore[union-attr]
    if type(command) is CallTool:  # the common case, without the slower pattern matching below
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
            # Plans are compared by digest. The settings of the worker that recorded the plan decide whether the plan
            # is stored inline or as a blob.
            return isinstance(body, PlanGenerated) and (body.digest, body.by) == (plan.digest, plan.by)
        case Record(stated):
            return type(stated) is type(body) and encode_body(stated) == encode_body(body)
        case TakeCheckpoint(state):
            return isinstance(body, CheckpointTaken) and load(body.state) == state
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
    """The recorded arguments in the form that the current signature gives them.

    So a new parameter with a default is no divergence.
    """
    rebind = getattr(tool, "rebind", None)
    return rebind(args) if rebind is not None else None


def asked_words(command: Command) -> str:
    """What the agent asks for with this command, in words."""
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
        case TakeCheckpoint(state):
            return f"a checkpoint with {_short(state.decode('utf-8', 'replace'))}"
        case Finish(outcome):
            return _ending(outcome)
        case Abandon(number):
            return f"the end of its wait for call {number}"
        case Hold(number):
            return f"to hold call {number}"


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
            return f"call {call}: {tool}({args_words(args)})"
        case ApprovalRequested(action=action, input=asked):
            return f"approval {call}: {action} {args_words(asked)}"
        case ChildStarted(agent=agent, input=args):
            return f"child {call}: {agent}({args_words(args)})"
        case PatchMarked(name=name):
            return f"the mark of the change {name!r}"
        case CallRequestedAgain():
            return f"call {call}, made again"
        case PlanGenerated():
            return _plan(body)
        case CheckpointTaken(state=state):
            return f"a checkpoint with {args_words(state)}"
        case RunSucceeded(output=output):
            return f"the run's success with {args_words(output)}"
        case RunFailed(failure=failure):
            return f"the run's failure with {failure.type}: {_short(failure.message)}"
        case _:
            return f"{tag_of(body)} {_short(encode_body(body).decode())}"


def _plan(body: PlanGenerated) -> str:
    return f"the plan {body.digest[:12]} {args_words(body.plan)}"


def args_words(payload: Payload | None) -> str:
    """Arguments as JSON, cut."""
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
        recorded=_recorded(event.body, event.call),
    )


def _beyond(command: Command, cause: Event, last: Event) -> Diverged:
    return Diverged(
        f"after event {cause.seq} the journal ends with {_recorded(last.body, last.call)} at event {last.seq}; the code also asks for {asked_words(command)}",
        seq=last.seq,
        call=command.number if isinstance(command, Asked) else None,
        asked=asked_words(command),
    )


def _unrecorded(frontier: Frontier, then: Event) -> Diverged:
    earlier, command = frontier.pending[0]
    return Diverged(
        f"the code asks for {asked_words(command)} after event {earlier}, where the journal has nothing; the journal goes on with "
        f"{_recorded(then.body, then.call)} at event {then.seq}",
        seq=earlier,
        call=command.number if isinstance(command, Asked) else None,
        asked=asked_words(command),
    )


def _nothing_asked(event: Event, unknown: UnknownCompletion) -> Diverged:
    return Diverged(f"event {event.seq} ({event.type}) is about {unknown}, which the code never asked for", seq=event.seq, call=event.call)
