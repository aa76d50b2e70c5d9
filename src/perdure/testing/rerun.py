"""A recorded run, run again: today's agent makes its calls, and the recording has the answers. No tool is called.

Replay stops at the first difference. A rerun continues as long as the recording has an answer to every call: a call
with the same arguments gets the recorded answer, in the recorded order. So a change of the code shows as a diff of all
calls of the agent.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, assert_never

from msgspec import Struct, structs

from perdure.core.codec import Payload
from perdure.core.events import (
    ApprovalRequested,
    ChildStarted,
    Event,
    RunCancelled,
    RunClaimed,
    RunFailed,
    RunSucceeded,
    ToolCallInitiated,
    ToolCallProposed,
)
from perdure.core.history import is_stated
from perdure.core.machine import (
    AskApproval,
    Asked,
    CallTool,
    CancelAsked,
    Cancelled,
    Command,
    Completion,
    Failed,
    Finish,
    Machine,
    SignalArrived,
    StartChild,
    Succeeded,
    TakeCheckpoint,
    TimerDue,
)
from perdure.core.prompt_deltas import in_short
from perdure.core.replay import completion_of
from perdure.inspect.export import Export, ExportedJournal

Kind = Literal["", "approval ", "child "]
_WAITS = "the agent waits, and the recording has no more answers"
_UNANSWERED = "which was not recorded, so there is no answer"
_LONG = 400
# In a busy worker a timer may fire late. So an answer may come before a timer that was due up to this much earlier.
_LATE_US = 1_000_000


class Changed(AssertionError):
    """Today's code does not make the recorded calls."""


class Rerun(Struct, frozen=True):
    """The recorded calls (`recorded`), and the calls that the agent made now (`asked`).

    Both lists have one line per call and one line for the end of the run. Then the lines of each child's run follow.
    """

    recorded: list[str]
    asked: list[str]

    @property
    def same(self) -> bool:
        return self.recorded == self.asked

    @property
    def diff(self) -> str:
        """The difference as a unified diff. Empty if there is no difference."""
        return "\n".join(difflib.unified_diff(self.recorded, self.asked, "recorded", "this code", lineterm="", n=2))

    def check(self) -> None:
        """Raise Changed, with the diff, unless this code has made the recorded calls."""
        __tracebackhide__ = True
        if not self.same:
            raise Changed(f"this code asks for something else than was recorded:\n{self.diff}")


class _Wish(NamedTuple):
    """A call of an agent without its number: the kind, the name and the arguments."""

    kind: Kind
    name: str
    args: bytes

    def __str__(self) -> str:
        words = in_short(self.args) or self.args.decode("utf-8", "replace")
        return f"{self.kind}{self.name}({words[:_LONG]}{'…' if len(words) > _LONG else ''})"


class _Answer(NamedTuple):
    seq: int
    ts: int
    completion: Completion


class Answers:
    """The recorded answers. Each answer is given once."""

    def __init__(self, run: ExportedJournal, export: Export) -> None:
        self.wishes: dict[int, _Wish] = {}  # by the recorded call number
        self.lines: list[str] = []
        self._answers: dict[int, list[_Answer]] = {}
        self._untold: list[_Answer] = []  # signals and cancels that the agent has not got yet; they answer no call
        # Timers that fired, by the event after which the agent set the timer.
        self._firings: dict[int | None, list[_Answer]] = {}
        for event in run.events:
            self._note(event, export)
        if not run.state.finished:
            self.lines.append(_WAITS)

    def _note(self, event: Event, export: Export) -> None:
        completion = completion_of(event, export.load)
        match completion:
            case None:
                pass
            case TimerDue():
                self._firings.setdefault(event.cause, []).append(_Answer(event.seq, event.ts, completion))
            case SignalArrived() | CancelAsked():
                self._untold.append(_Answer(event.seq, event.ts, completion))
            case _:
                self._answers.setdefault(completion.number, []).append(_Answer(event.seq, event.ts, completion))
        if not is_stated(event):
            return
        wish = _recorded_wish(event, export)
        if wish is not None:
            assert event.call is not None
            self.wishes[event.call] = wish
            self.lines.append(str(wish))
        elif (end := _recorded_end(event, export)) is not None:
            self.lines.append(end)

    def take(self, command: Asked) -> list[_Answer] | None:
        """The recorded answers to this call, with its new number. None if the recording has no such call left."""
        wish = _wish(command)
        for number, recorded in self.wishes.items():
            if recorded == wish or (recorded[:2] == wish[:2] and _rebound(command, recorded.args) == wish.args):
                del self.wishes[number]
                given = self._answers.pop(number, [])
                return [answer._replace(completion=_renumbered(answer.completion, command.number)) for answer in given]
        return None

    def before(self, seq: int) -> Iterator[_Answer]:
        """The signals and cancels that reached the run before this event."""
        while self._untold and self._untold[0].seq < seq:
            yield self._untold.pop(0)

    def firing(self, cause: int | None, due: int, timer: int) -> _Answer | None:
        """The recorded firing of the timer that was set after the event `cause`. None if that timer did not fire.

        With today's code the timer may have another number than in the recording.
        """
        firings = self._firings.get(cause, [])
        return firings[0]._replace(completion=TimerDue(timer)) if firings and due <= firings[0].ts else None

    @property
    def next_untold(self) -> _Answer | None:
        return self._untold[0] if self._untold else None

    def told(self, answer: _Answer) -> None:
        for kept in (self._untold, *self._firings.values()):
            if kept and kept[0].seq == answer.seq:
                kept.pop(0)


class Rerunning:
    """Runs one machine with the recorded answers."""

    def __init__(self, machine: Machine, run: ExportedJournal, answers: Answers) -> None:
        self._machine = machine
        self._answers = answers
        self._began = next((event for event in run.events if isinstance(event.body, RunClaimed)), run.events[0])
        self._open: dict[int, list[_Answer]] = {}  # number of a call → its answers that are not delivered yet
        self._asked: list[str] = []
        self._now = self._began.ts
        self._over = False

    def run(self) -> list[str]:
        """Run the agent. Returns one line per call, and one line for the end."""
        for early in self._answers.before(self._began.seq):
            self._machine.deliver(early.ts, early.completion)
        self._machine.cause = self._machine.source = self._began.seq
        self._obey(self._machine.start(self._now))
        while not self._over:
            answer = self._next()
            if answer is None:
                self._asked.append(_WAITS)
                break
            self._now = max(self._now, answer.ts)
            self._machine.cause = self._machine.source = answer.seq
            self._obey(self._machine.deliver(self._now, answer.completion))
        return self._asked

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Asked):
                answers = self._answers.take(command)
                if answers is None:
                    self._asked.append(f"{_wish(command)}  [{_UNANSWERED}]")
                    self._over = True
                    return
                self._asked.append(str(_wish(command)))
                self._open[command.number] = answers
            elif isinstance(command, TakeCheckpoint):
                self._asked.append(f"a checkpoint with {command.state.decode('utf-8', 'replace')[:160]}")
                self._over = True
            elif isinstance(command, Finish):
                self._asked.append(_end(command.outcome))
                self._over = True

    def _next(self) -> _Answer | None:
        """The next answer, in recorded order. A timer that did not fire in the recording fires when it is due."""
        timer = self._machine.next_timer()
        firing = None if timer is None else self._answers.firing(self._machine.timer_cause(timer[1]), *timer)
        said = [answers[0] for answers in self._open.values() if answers]
        said += [one for one in (firing, self._answers.next_untold) if one is not None]
        first = min(said, key=lambda answer: answer.seq, default=None)
        if timer is not None and firing is None and (first is None or timer[0] + _LATE_US <= first.ts):
            return _Answer(self._machine.cause, timer[0], TimerDue(timer[1]))
        if first is not None:
            self._answers.told(first)
            for answers in self._open.values():
                if answers and answers[0] is first:
                    answers.pop(0)
        return first


def _wish(command: Asked) -> _Wish:
    match command:
        case CallTool(_, tool, args):
            return _Wish("", tool.name, args)
        case AskApproval(_, action, asked, _, _):
            return _Wish("approval ", action, asked)
        case StartChild(_, agent, args):
            return _Wish("child ", agent.name, args)
        case _:
            assert_never(command)


def _recorded_wish(event: Event, export: Export) -> _Wish | None:
    match event.body:
        case ToolCallInitiated(tool=tool, args=Payload() as args) | ToolCallProposed(tool=tool, args=args):
            return _Wish("", tool, export.load(args))
        case ApprovalRequested(action=action, input=asked):
            return _Wish("approval ", action, export.load(asked))
        case ChildStarted(agent=agent, input=given):
            return _Wish("child ", agent, export.load(given))
        case _:
            return None


def _recorded_end(event: Event, export: Export) -> str | None:
    match event.body:
        case RunSucceeded(output=output):
            return _end(Succeeded(export.load(output)))
        case RunFailed(failure=failure):
            return _end(Failed(failure))
        case RunCancelled():
            return _end(Cancelled())
        case _:
            return None


def _end(outcome: Succeeded | Failed | Cancelled) -> str:
    match outcome:
        case Succeeded(output):
            return f"succeeded with {output.decode('utf-8', 'replace')}"
        case Failed(failure):
            return f"failed with {failure.type}: {failure.message}"
        case Cancelled():
            return "cancelled"


def _rebound(command: Asked, args: bytes) -> bytes | None:
    """The recorded arguments, bound to today's signature. So a new parameter with a default makes no difference."""
    callee: Any = command.tool if isinstance(command, CallTool) else command.agent if isinstance(command, StartChild) else None
    rebind = getattr(callee, "rebind", None)
    bound: bytes | None = None if rebind is None else rebind(args)
    return bound


def _renumbered(completion: Any, number: int) -> Completion:
    renumbered: Completion = structs.replace(completion, number=number)
    return renumbered
