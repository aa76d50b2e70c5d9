"""A rehearsal: an agent goes on from a point of a recorded run, and nothing touches the world (T35).

A rehearsal has a machine and no engine: no code here can begin an attempt. The agent's calls are answered from the
recording. A call with the same tool and the same arguments gets the recorded outcome, in recorded order. Every other
call is a question. The owner of the rehearsal answers the question (`answer`), or the rehearsal stops there.

The agent's clock shows recorded times. A timer fires before the first recorded outcome that is later than its due
time.

The rehearsal writes what the agent asks for and gets as the events of a fork (`journal`, see core/fork.py). A replay of
these events gives the same. A call is only proposed in them: no event says that an attempt has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct, structs

from perdure.core.codec import Payload, digest
from perdure.core.events import (
    OF_MODEL,
    AnswerSource,
    AnyBody,
    ApprovalDecided,
    ApprovalExpired,
    ApprovalRequested,
    ApprovalWithdrawn,
    CallAnswered,
    CallHeld,
    CallRequestedAgain,
    ChildStarted,
    Effect,
    Event,
    OutcomeReused,
    PlanGenerated,
    RunCancelled,
    RunFailed,
    RunReleased,
    RunSucceeded,
    TimerFired,
    ToolCallInitiated,
    ToolCallProposed,
    Usage,
    event_at,
)
from perdure.core.history import History, Superseded, ends_wait, history, is_stated
from perdure.core.identity import approval_id, child_id
from perdure.core.machine import (
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
    HoldTaken,
    Machine,
    Record,
    SignalArrived,
    StartChild,
    Succeeded,
    TimerDue,
)
from perdure.core.prompt_deltas import digest_in
from perdure.core.replay import completion_of, replay
from perdure.errors import InvalidInput

# A busy worker fires a timer late. So an outcome may come before a timer even if the timer was due this much earlier.
_LATE_US = 1_000_000


class Taken(Struct):
    """One call of the agent in a rehearsal, and where its answer came from."""

    number: int
    kind: Literal["tool", "model", "approval", "child"]
    name: str
    args: bytes
    recorded: int | None  # the number of the same call in the recording; None: the recording has no such call
    source: AnswerSource | None = None  # None: the call has no answer
    answer: Completion | None = None
    effect: Effect | None = None  # the effect class, if it is a call of a tool


class _Outcome(Struct, frozen=True):
    seq: int
    ts: int
    completion: Completion
    source: Event  # the recorded event that holds the completion


class ForkJournal:
    """The journal of a fork that is a rehearsal: copies of the recorded events, `run_forked`, and what the rehearsal adds."""

    def __init__(self, events: Sequence[Event], run_id: str, tenant: str, pack: Callable[[bytes], Payload], ids: Iterator[str]) -> None:
        self.events = list(events)
        self._run_id = run_id
        self._tenant = tenant
        self._pack = pack
        self._ids = ids
        self._stated = {event.call: event.seq for event in events if event.call is not None and is_stated(event)}
        self._asked = {event.call: event.seq for event in events if isinstance(event.body, ApprovalRequested)}
        self.forked = self.events[-1].seq + 1  # the seq of `run_forked`, which comes next
        self._numbers = max((event.call for event in events if event.call is not None), default=0)

    @property
    def seq(self) -> int:
        return self.events[-1].seq

    def add(self, body: AnyBody, ts: int, *, call: int | None = None, cause: int | None = None) -> int:
        event = Event(self.seq + 1, next(self._ids), ts, self.events[-1].epoch, call, self.seq if cause is None else cause, body)
        self.events.append(event)
        return event.seq

    # -- what the agent asks for --------------------------------------------------------------------------------------
    def state(self, command: Command, cause: int, now: int) -> None:
        """Write down what the agent asks for or states."""
        if isinstance(command, Asked):
            number = command.number
            again = number <= self._numbers
            self._numbers = max(self._numbers, number)
            body = CallRequestedAgain() if again else self._request(command, now)
            self._stated[number] = self.add(body, now, call=number, cause=cause)
            return
        match command:
            case Record(PlanGenerated(plan=plan) as stated) if plan.inline is not None:
                self.add(structs.replace(stated, plan=self._pack(plan.inline)), now, cause=cause)
            case Record(stated):
                self.add(stated, now, cause=cause)
            case Finish(Succeeded(output)):
                self.add(RunSucceeded(self._pack(output)), now, cause=cause)
            case Finish(Failed(failure)):
                self.add(RunFailed(failure), now, cause=cause)
            case Finish():
                self.add(RunCancelled(), now, cause=cause)
            case _:
                pass  # the agent has stopped waiting for a call: a replay finds that out by itself

    def _request(self, command: Asked, now: int) -> AnyBody:
        match command:
            case CallTool(_, tool, args):
                return ToolCallProposed(tool.name, tool.effect, "", self._pack(args), digest(args), "fork")
            case AskApproval(number, action, asked, policy, reason):
                self._asked[number] = self.seq + 1
                return policy.request(self._approval(number), action, self._pack(asked), asked, now=now, reason=reason)
            case StartChild(number, agent, args):
                run_id = child_id(self._run_id, number)
                return ChildStarted(agent.name, agent.version, run_id, self._pack(args), digest(args), rehearsed=True)

    def _approval(self, number: int) -> str:
        return approval_id(self._tenant, self._run_id, number)

    # -- what the agent gets ------------------------------------------------------------------------------------------
    def bring(
        self,
        completion: Completion,
        now: int,
        answer: AnswerSource,
        source: Event | None,
        asked: Event | None,
        timer_cause: int,
        used: Usage,
    ) -> tuple[int, int]:
        """Write down what the agent gets. Returns the event, and the event that holds its payload.

        `source`: the recorded event; None if the answer is not recorded. `asked`: the recorded request for the approval.
        """
        match completion:
            case CallCompleted(number, result):
                body: AnyBody = CallAnswered(answer, self._pack(result), usage=used if used != Usage() else None)
            case CallFailed(number, failure, attempts):
                body = CallAnswered(answer, failure=failure, attempt=attempts, usage=used if used != Usage() else None)
            case ChildEnded(number, run_id, output, problem):
                body = CallAnswered(answer, None if output is None else self._pack(output), problem, child=run_id)
            case ApprovalSettled(number=number):
                return self._settle(number, now, source, asked)
            case SignalArrived():
                assert source is not None
                seq = self.add(source.body, now)
                return seq, seq
            case TimerDue(timer):
                seq = self.add(TimerFired(timer), now, cause=timer_cause)
                return seq, seq
            case HoldTaken(number):
                seq = self.add(CallHeld(), now, call=number, cause=self._stated[number])
                return seq, seq
            case _:
                raise AssertionError(completion)  # a cancel of the recorded run is left out
        # What a person edited was not caused by the call.
        seq = self.add(body, now, call=number, cause=self.forked if answer == "edited" else self._stated[number])
        return seq, seq

    def _settle(self, number: int, now: int, source: Event | None, asked: Event | None) -> tuple[int, int]:
        assert source is not None and isinstance(source.body, ApprovalDecided | ApprovalExpired | ApprovalWithdrawn), source
        known = event_at(self.events, source.seq)
        if known is not None and known.event_id == source.event_id:
            # It is the decision about a superseded call, which the agent makes again: it is in this journal already.
            return self.add(OutcomeReused(source.seq), now, call=number, cause=self._stated[number]), source.seq
        if number not in self._asked:
            assert asked is not None and isinstance(asked.body, ApprovalRequested), asked
            request = structs.replace(asked.body, approval=self._approval(number))
            self._asked[number] = self.add(request, now, call=number, cause=self._stated[number])
        settled: AnyBody = structs.replace(source.body, approval=self._approval(number))
        seq = self.add(settled, now, call=number, cause=self._asked[number])
        return seq, seq

    def park(self, waiting_for: str, now: int) -> None:
        """The rehearsal can go no further."""
        self.add(RunReleased("waiting", waiting_for), now)


class Rehearsal:
    """The rehearsal of one agent. The owner calls `close` at the end."""

    def __init__(
        self,
        machine: Machine,
        events: Sequence[Event],
        at: int,
        journal: ForkJournal | None,
        load: Callable[[Payload], bytes],
        edits: Mapping[int, bytes] | None = None,
    ) -> None:
        """Replay the recording up to the event `at`.

        `journal` has the copies of these events, and `run_forked`; None: the rehearsal is not stored. `edits`: number of
        a recorded call → the result to use instead (JSON).

        Raises Diverged if the code asks for other calls up to that event.
        """
        past = history(events)
        kept = [event for event in events if event.seq <= at]  # with superseded events: a replay needs the whole journal
        rest = [event for event in past.whole if event.seq > at]
        self.machine = machine
        self.journal = journal
        self._seq = at + 1  # without a journal: the number that its last event would have
        self.taken: dict[int, Taken] = {}  # by the number of the call in the rehearsal
        self.outcome: Succeeded | Failed | Cancelled | None = None
        self._asked: dict[int, Asked] = {}
        self._now = kept[-1].ts if kept else 0
        self._approvals = {event.call: event for event in events if isinstance(event.body, ApprovalRequested)}
        self._recorded = Superseded(_requests(events, rest), load)
        self._outcomes: dict[int, list[_Outcome]] = {}
        self._ready: list[_Outcome] = []  # recorded outcomes of calls for which the agent waits, and signals
        self._edits = dict(edits or {})
        self._load_outcomes(past, rest, load)
        unused = [number for number in self._edits if number not in self._outcomes]
        if unused:
            raise InvalidInput(
                f"call {unused[0]} has no outcome after event {at}, so that nothing can be edited; go back to an earlier event"
            )
        frontier = replay(machine, kept, load)
        for number, ends in machine.earlier.outcomes.items():
            # The run was reopened before `at`. If the agent makes a superseded call again, the call has its recorded
            # outcome.
            found = [_Outcome(end.seq, end.ts, completion, end) for end in ends if (completion := completion_of(end, load)) is not None]
            self._outcomes.setdefault(number, found)
        pending = [command for _, command in frontier.pending]
        # The calls that the agent made before the point, and whose end it knew there.
        self.ended = frontier.calls.keys() - {*machine.waits_for} - {one.number for one in pending if isinstance(one, Asked)}
        stated_now = {command.number for command in pending if isinstance(command, Asked)}
        for number in machine.waits_for:
            # The call was requested before `at`: if it has ended, its outcome is in the recording.
            if number not in stated_now:
                self._asked[number] = frontier.calls[number]
                self._await(number, number)
        self._obey(frontier.pending)
        self.go_on()

    def _load_outcomes(self, past: History, rest: Sequence[Event], load: Callable[[Payload], bytes]) -> None:
        tools = {event.call for event in past.whole if isinstance(event.body, ToolCallInitiated | ToolCallProposed)}
        for event in rest:
            source = past.sources[event.body.of] if isinstance(event.body, OutcomeReused) else event
            completion = completion_of(source, load)
            number = event.call
            if completion is None or isinstance(completion, CancelAsked | TimerDue):
                continue
            if number is None:
                self._ready.append(_Outcome(event.seq, event.ts, completion, source))
                continue
            if number in self._edits and ends_wait(source, of_tool=number in tools):
                completion = CallCompleted(number, self._edits[number])
            self._outcomes.setdefault(number, []).append(_Outcome(event.seq, event.ts, completion, source))

    @property
    def now(self) -> int:
        """The agent's clock."""
        return self._now

    @property
    def questions(self) -> list[Asked]:
        """The calls without an outcome in the recording, in order."""
        return [
            self._asked[number] for number, taken in sorted(self.taken.items()) if taken.source is None and number in self.machine.waits_for
        ]

    def answer(self, number: int, completion: Completion, source: AnswerSource, used: Usage) -> None:
        """Answer a question. Then the agent goes on. `used`: what the answer has really cost."""
        self.taken[number].source = source
        self._deliver(self._now, completion, None, used)
        self.go_on()

    def go_on(self) -> None:
        """Deliver every recorded outcome for which the agent waits, in recorded order."""
        with self.machine.replayed():
            while self.outcome is None and not self.machine.left:  # a rehearsal ends where its agent takes a checkpoint
                timer = self.machine.next_timer()
                first = min(self._ready, key=lambda one: one.seq, default=None)
                if timer is not None and (not self.questions if first is None else timer[0] + _LATE_US <= first.ts):
                    self._deliver(max(self._now, timer[0]), TimerDue(timer[1]), None)
                elif first is not None:
                    self._ready.remove(first)
                    self._deliver(max(self._now, first.ts), first.completion, first.source)
                else:
                    return

    def close(self) -> None:
        self.machine.close()

    def _deliver(self, now: int, completion: Completion, source: Event | None, used: Usage = Usage()) -> None:  # noqa: B008
        self._now = now
        number = getattr(completion, "number", None)
        if self.machine.left or (number is not None and number not in self.machine.waits_for):
            return
        if isinstance(completion, HoldTaken) and number not in self.machine.holds:
            return  # the recorded run has considered the call again, and this one does not
        taken = None if number is None else self.taken.get(number)
        if taken is not None and not isinstance(completion, HoldTaken):
            taken.answer = completion
        asked = None if taken is None or taken.recorded is None else self._approvals.get(taken.recorded)
        timer_cause = self.machine.timer_cause(completion.timer) if isinstance(completion, TimerDue) else 0
        answer: AnswerSource = (taken.source if taken is not None else None) or "recorded"
        if self.journal is None:
            self._seq += 1
            self.machine.cause = self.machine.source = self._seq
        else:
            self.machine.cause, self.machine.source = self.journal.bring(completion, now, answer, source, asked, timer_cause, used)
        seq = self.machine.cause
        self._obey([(seq, command) for command in self.machine.deliver(now, completion)])

    def _obey(self, commands: Sequence[tuple[int, Command]]) -> None:
        for cause, command in commands:
            if self.journal is None:
                self._seq += 1
            else:
                self.journal.state(command, cause, self._now)
            if isinstance(command, Asked):
                self._asked[command.number] = command
                self._await(command.number, self._same(command))
            elif isinstance(command, Finish):
                self.outcome = command.outcome

    def _await(self, number: int, recorded: int | None) -> None:
        """The agent waits for this call. `recorded`: the number of the same call in the recording."""
        command = self._asked[number]
        outcomes = [] if recorded is None else self._outcomes.pop(recorded, [])
        edited = recorded in self._edits
        if edited:
            check_edit(command, command.number, self._edits[recorded])  # type: ignore[index]
        self._ready += [_numbered(one, number) for one in outcomes]
        goes_on = [one for one in outcomes if isinstance(one.completion, HoldTaken)]
        goes_on += [one for one in outcomes if isinstance(command, CallTool) and _is_granted(one.completion)]
        ended = len(goes_on) < len(outcomes)
        source: AnswerSource | None = None if not ended else "edited" if edited else "recorded"
        effect = command.tool.effect if isinstance(command, CallTool) else None
        self.taken[number] = Taken(number, *described(command), recorded, source, effect=effect)

    def _same(self, command: Asked) -> int | None:
        kind, name, args = described(command)
        if kind == "model":
            found = self._recorded.take(kind, "", b"", None, digest_in(args))
        else:
            callee = command.tool if isinstance(command, CallTool) else command.agent if isinstance(command, StartChild) else None
            found = self._recorded.take(kind, name, args, callee, None)
        # If the agent makes a superseded call again, the machine gives that call its old number.
        return command.number if found is None and command.number in self.machine.earlier.requests else found


def check_edit(command: Asked, number: int, result: bytes) -> None:
    """InvalidInput if this cannot be the edited result of the call."""
    if isinstance(command, AskApproval):
        raise InvalidInput(f"call {number} is an approval: its decision cannot be edited")
    callee = command.tool if isinstance(command, CallTool) else command.agent
    if (misfit := callee.result_misfit(result)) is not None:
        raise InvalidInput(f"the edited result of call {number} does not fit {callee.name}: {misfit}")


def described(command: Asked) -> tuple[Literal["tool", "model", "approval", "child"], str, bytes]:
    """(kind, name, arguments) of a call that an agent makes."""
    match command:
        case CallTool(_, tool, args):
            return ("model" if tool.events is OF_MODEL else "tool"), tool.name, args
        case AskApproval(_, action, asked, _, _):
            return "approval", action, asked
        case StartChild(_, agent, args):
            return "child", agent.name, args


def _requests(events: Sequence[Event], rest: Sequence[Event]) -> dict[int, Event]:
    """For each call that was requested in `rest`: its number → the event that has its tool and arguments.

    If the run was reopened, that event may be before `rest`: `call_requested_again` does not repeat tool and
    arguments.
    """
    first: dict[int, Event] = {}
    for event in events:
        if event.call is not None and is_stated(event) and type(event.body) is not CallRequestedAgain:
            first[event.call] = event
    return {event.call: first[event.call] for event in rest if event.call is not None and is_stated(event)}


def _is_granted(completion: Completion) -> bool:
    """Is this a granted approval? After it a tool call goes on. Every other completion ends the wait for its call."""
    return isinstance(completion, ApprovalSettled) and completion.outcome == "approved"


def _numbered(one: _Outcome, number: int) -> _Outcome:
    if getattr(one.completion, "number", None) == number:
        return one
    return structs.replace(one, completion=structs.replace(one.completion, number=number))
