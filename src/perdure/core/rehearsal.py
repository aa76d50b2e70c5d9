"""A rehearsal: an agent goes on from a point of a recorded run, and nothing touches the world (T35).

A rehearsal has a machine and no engine: no code here can begin an attempt. The agent's calls are answered from the
recording. A call with the same tool and the same arguments gets the recorded outcome, in recorded order. Every other
call is a question. The owner of the rehearsal answers the question (`answer`), or the rehearsal stops there.

The agent's clock shows recorded times. A timer fires before the first recorded outcome that is later than its due
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, structs

from perdure.core.codec import Payload
from perdure.core.events import OF_MODEL, CallRequestedAgain, Event, OutcomeReused, ToolCallInitiated, ToolCallProposed
from perdure.core.history import History, Superseded, ends_wait, history, is_stated
from perdure.core.machine import (
    ApprovalSettled,
    AskApproval,
    Asked,
    CallCompleted,
    CallTool,
    CancelAsked,
    Cancelled,
    Command,
    Completion,
    Failed,
    Finish,
    Machine,
    StartChild,
    Succeeded,
    TimerDue,
)
from perdure.core.prompt_deltas import digest_in
from perdure.core.replay import completion_of, replay
from perdure.errors import InvalidInput

Source = Literal["recorded", "edited", "answers", "simulated", "read"]
# A busy worker fires a timer late. So an outcome may come before a timer even if the timer was due this much earlier.
_LATE_US = 1_000_000


class Taken(Struct, frozen=True):
    """One call of the agent in a rehearsal, and where its answer came from."""

    number: int
    kind: Literal["tool", "model", "approval", "child"]
    name: str
    args: bytes
    recorded: int | None  # the number of the same call in the recording; None: the recording has no such call
    source: Source | None = None  # None: the call has no answer
    answer: Completion | None = None


class _Outcome(Struct, frozen=True):
    seq: int
    ts: int
    completion: Completion


class Rehearsal:
    """The rehearsal of one agent. The owner calls `close` at the end."""

    def __init__(
        self, machine: Machine, events: Sequence[Event], at: int, load: Callable[[Payload], bytes], edits: Mapping[int, bytes] | None = None
    ) -> None:
        """Replay the recording up to the event `at`.

        `edits`: number of a recorded call → the result to use instead (JSON).

        Raises Diverged if the code asks for other calls up to that event.
        """
        past = history(events)
        kept = [event for event in events if event.seq <= at]  # with superseded events: a replay needs the whole journal
        rest = [event for event in past.whole if event.seq > at]
        self.machine = machine
        self.taken: dict[int, Taken] = {}  # by the number of the call in the rehearsal
        self.outcome: Succeeded | Failed | Cancelled | None = None
        self._asked: dict[int, Asked] = {}
        self._now = kept[-1].ts if kept else 0
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
            found = [_Outcome(end.seq, end.ts, completion) for end in ends if (completion := completion_of(end, load)) is not None]
            self._outcomes.setdefault(number, found)
        pending = [command for _, command in frontier.pending]
        stated_now = {command.number for command in pending if isinstance(command, Asked)}
        for number in machine.waits_for:
            # The call was requested before `at`: if it has ended, its outcome is in the recording.
            if number not in stated_now:
                self._asked[number] = frontier.calls[number]
                self._await(number, number)
        self._obey(pending)
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
                self._ready.append(_Outcome(event.seq, event.ts, completion))
                continue
            if number in self._edits and ends_wait(source, of_tool=number in tools):
                completion = CallCompleted(number, self._edits[number])
            self._outcomes.setdefault(number, []).append(_Outcome(event.seq, event.ts, completion))

    @property
    def questions(self) -> list[Asked]:
        """The calls without an outcome in the recording, in order."""
        return [
            self._asked[number] for number, taken in sorted(self.taken.items()) if taken.source is None and number in self.machine.waits_for
        ]

    def answer(self, number: int, completion: Completion, source: Source) -> None:
        """Answer a question. Then the agent goes on."""
        self.taken[number] = structs.replace(self.taken[number], source=source, answer=completion)
        self._deliver(self._now, completion)
        self.go_on()

    def go_on(self) -> None:
        """Deliver every recorded outcome for which the agent waits, in recorded order."""
        while self.outcome is None and not self.machine.left:  # a rehearsal ends where its agent takes a checkpoint
            timer = self.machine.next_timer()
            first = min(self._ready, key=lambda one: one.seq, default=None)
            if timer is not None and (not self.questions if first is None else timer[0] + _LATE_US <= first.ts):
                self._deliver(max(self._now, timer[0]), TimerDue(timer[1]))
            elif first is not None:
                self._ready.remove(first)
                self._deliver(max(self._now, first.ts), first.completion)
            else:
                return

    def close(self) -> None:
        self.machine.close()

    def _deliver(self, now: int, completion: Completion) -> None:
        self._now = now
        number = getattr(completion, "number", None)
        if self.machine.left or (number is not None and number not in self.machine.waits_for):
            return
        if number is not None and number in self.taken:
            self.taken[number] = structs.replace(self.taken[number], answer=completion)
        self._obey(self.machine.deliver(now, completion))

    def _obey(self, commands: Sequence[Command]) -> None:
        for command in commands:
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
            self._check_edit(command, self._edits[recorded])  # type: ignore[index]
        self._ready += [structs.replace(one, completion=_numbered(one.completion, number)) for one in outcomes]
        ended = any(not (isinstance(command, CallTool) and _is_granted(one.completion)) for one in outcomes)
        source: Source | None = None if not ended else "edited" if edited else "recorded"
        self.taken[number] = Taken(number, *described(command), recorded, source)

    def _check_edit(self, command: Asked, result: bytes) -> None:
        if isinstance(command, AskApproval):
            raise InvalidInput(f"call {command.number} is an approval: its decision cannot be edited")
        callee = command.tool if isinstance(command, CallTool) else command.agent
        if (misfit := callee.result_misfit(result)) is not None:
            raise InvalidInput(f"the edited result of call {command.number} does not fit {callee.name}: {misfit}")

    def _same(self, command: Asked) -> int | None:
        kind, name, args = described(command)
        if kind == "model":
            found = self._recorded.take(kind, "", b"", None, digest_in(args))
        else:
            callee = command.tool if isinstance(command, CallTool) else command.agent if isinstance(command, StartChild) else None
            found = self._recorded.take(kind, name, args, callee, None)
        # If the agent makes a superseded call again, the machine gives that call its old number.
        return command.number if found is None and command.number in self.machine.earlier.requests else found


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


def _numbered(completion: Completion, number: int) -> Completion:
    numbered: Completion = structs.replace(completion, number=number)
    return numbered
