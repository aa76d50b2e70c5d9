"""Looks into an agent at any moment of its recorded history: its tasks, their lines and variables, what they wait for.

The moment is not stored anywhere: it is made again from the journal and the code. A new machine gets the recorded
completions up to the chosen event. Then the new machine stands where the agent stood. Only the machine runs: no
engine, no tool, no write. When the machine is closed afterwards, the commands of its `finally` blocks are dropped.

"At event SEQ" means: after all events up to and including event SEQ were delivered. An agent moves only when an event
wakes it, and then it runs until it waits again. So every SEQ is a well-defined moment, even in the middle of a commit.
The statements that the agent makes after SEQ has woken it may have higher numbers than SEQ.
"""

from __future__ import annotations

import asyncio
import linecache
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, NamedTuple

from msgspec import Struct, structs

from perdure import shell
from perdure.agent import Agent
from perdure.core.agent_loop import AgentTask
from perdure.core.codec import Payload, decode
from perdure.core.compat import gathered, shielded, tasks_of_group, timer_target, waiting_frames, waits_for
from perdure.core.events import (
    OF_MODEL,
    AnyBody,
    ApprovalDecided,
    ApprovalRequested,
    ChildStarted,
    Event,
    RetryScheduled,
    RunClaimed,
    RunReopened,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallProposed,
)
from perdure.core.history import is_stated
from perdure.core.machine import AskApproval, Asked, CallTool, Machine, Standstill, StartChild
from perdure.core.replay import Frontier, replay
from perdure.core.state import RunState, fold
from perdure.core.times import iso, utc_within
from perdure.engine.local.sandbox import guard
from perdure.errors import Diverged, NotFound, WrongVersion
from perdure.inspect.text import UNTIL, plural
from perdure.inspect.values import Values, attributes_of

CONTEXT_LINES = 2  # how many lines are shown before and after the line where a frame stands
MAX_FRAMES = 50  # the most frames of one task; if the stack is deeper, the outermost and the innermost frames are kept
MAX_VARIABLES = 40
_MOST_NAMED = 10
_CHAIN = 10  # how many causes, and how many levels of exception groups, are followed
_LINE_CHARS = 200

_HERE = str(Path(__file__).parents[1]) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_ASYNCIO = str(Path(asyncio.__file__).parent) + os.sep

AwaitedKind = Literal["call", "model", "approval", "child", "signal", "timer", "task", "tasks", "lock", "queue", "event", "future"]


class Variable(Struct, frozen=True):
    """A variable of a frame. `value` is text for people: cut if it is long, with secrets as [redacted]."""

    name: str
    value: str


class InspectedFrame(Struct, frozen=True):
    """A function of the agent that waits, or through which an exception went."""

    function: str
    file: str
    line: int
    # The lines around `line`. The first of these lines has the number `first_line`. Empty if the file cannot be read,
    # or has changed since its code was loaded.
    source: tuple[str, ...]
    first_line: int
    variables: tuple[Variable, ...]
    internal: bool  # True: a function of perdure or of the standard library
    # Only in a very deep stack: how many frames are left out between the frame before and this frame.
    left_out: int = 0


class Awaited(Struct, frozen=True):
    """What a task waits for.

    `words` describes it completely for people; each other field is set only if it applies.
    """

    kind: AwaitedKind
    words: str
    call: int | None = None  # the number of a call, an approval or a child
    tool: str | None = None  # the name of the tool, the model or the child's agent, or the action of an approval
    approval: str | None = None  # the id of the approval that the call waits for
    run_id: str | None = None  # the id of the child's run
    topic: str | None = None
    timer: int | None = None
    due: datetime | None = None
    tasks: tuple[str, ...] = ()  # the names of the tasks that are waited for


class RaisedError(Struct, frozen=True):
    """An exception, and the frames through which it went, the innermost frame last."""

    type: str
    message: str
    frames: tuple[InspectedFrame, ...]
    members: tuple[RaisedError, ...] = ()  # the members, if this is an exception group
    # The exception that caused this exception, or that was being handled when this exception was raised.
    cause: RaisedError | None = None


class InspectedTask(Struct, frozen=True):
    """A task of the agent. The first task is the agent's own function, and its name is "agent"."""

    name: str
    state: Literal["waiting", "returned", "raised", "cancelled"]
    frames: tuple[InspectedFrame, ...]  # the frames of a waiting task, the innermost frame last
    awaits: Awaited | None
    time_outs: tuple[datetime, ...] = ()  # when each `asyncio.timeout` around the task ends
    # Only for agents that are built from parts: the turn, the last message, the steps.
    facts: tuple[Variable, ...] = ()
    returned: str | None = None
    raised: RaisedError | None = None


class Inspection(Struct, frozen=True):
    """An agent at one moment of its recorded history. `handle.inspect(at=…)` returns it, `perdure inspect` shows it."""

    run_id: str
    agent: str
    version: str
    at: int  # all events up to and including this event were delivered
    woken_by: int  # the last event up to `at` that woke the agent
    woken_type: str
    now: datetime  # the time as the agent saw it
    tasks: tuple[InspectedTask, ...]
    not_awaited: tuple[Awaited, ...]  # open calls for which no task waits
    unread: dict[str, int]  # topic → how many signals had arrived and were not received


class Journal(NamedTuple):
    """The journal of a run up to a moment, and the next statements of the agent, up to the next `run_reopened`."""

    events: Sequence[Event]
    state: RunState
    at: int


class Moment(NamedTuple):
    """A machine that stands where the agent stood. It is closed after the inspection."""

    machine: Machine
    frontier: Frontier
    agent: Agent[Any, Any]
    events: Sequence[Event]
    at: int


def journal_at(run_id: str, events: Sequence[Event], at: int | None) -> Journal:
    """The journal up to event `at`, or the whole journal.

    NotFound if there is no such event or the agent had not begun.
    """
    at = len(events) if at is None else at
    if not 1 <= at <= len(events):
        raise NotFound(f"run {run_id} has the events 1 to {len(events)}; there is no event {at}")
    began = next((event.seq for event in events if isinstance(event.body, RunClaimed)), None)
    if began is None:
        raise NotFound(f"run {run_id} has not begun: no worker has claimed it, so its agent stands nowhere yet")
    if at < began:
        raise NotFound(f"run {run_id}: its agent began at event {began}; at event {at} there is nothing to look at")
    # If a person reopened the run after event `at`, leave out the `run_reopened` and all later events. Reason: the
    # reopening has superseded events that the agent knew at `at`, and may have changed the version of the run.
    reopened = next((event.seq for event in events[at:] if isinstance(event.body, RunReopened)), None)
    known = events if reopened is None else events[: reopened - 1]
    return Journal(known, fold(known), at)


@contextmanager
def moment_of(agent: Agent[Any, Any], journal: Journal, load: Callable[[Payload], bytes], *, max_steps: int) -> Iterator[Moment]:
    """The agent at the end of this journal.

    WrongVersion if the code has another version than the run had; Diverged if the code asks for something else than the
    journal has.
    """
    events, state, at = journal
    assert state.created is not None
    run_id = state.created.run_id
    if agent.version != state.version:
        raise WrongVersion(
            f"run {run_id} is a run of {agent.name}@{state.version}, and this code is {agent.name}@{agent.version}: its lines and variables "
            f"would not be those of the run; name the code of version {state.version}"
        )
    guard()  # an agent must not do I/O here either
    machine = agent.machine_of(state, load, max_steps)
    try:
        try:
            yield Moment(machine, replay(machine, events, load, until=at), agent, events, at)
        except Diverged as diverged:
            raise _with_hint(diverged, run_id, events) from None
    finally:
        with warnings.catch_warnings():
            # At this moment the agent may have created coroutines that it has not awaited yet. That is no mistake.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            machine.close()


def look_inside(moment: Moment, *, all_frames: bool = False) -> Inspection:
    """The tasks of the agent. Frames of perdure and asyncio are left out, unless `all_frames` is True."""
    return _Look(moment, all_frames).inspection()


def agent_frames(moment: Moment, *, all_frames: bool = False) -> list[tuple[FrameType, int]]:
    """(frame, line) of the agent's own function, the innermost last: where it waits, or the way of its exception."""
    main = moment.machine.standstill().main
    error = _error_of(main)
    frames = [(frame, _line_of(frame)) for frame in waiting_frames(main)] if error is None else list(_traceback(error))
    return [(frame, line) for frame, line in frames if all_frames or not _is_internal(frame)]


def failing_frame(inspection: Inspection) -> InspectedFrame | None:
    """The innermost frame of the agent's code through which the exception of a failed run went."""
    raised = inspection.tasks[0].raised
    while raised is not None:
        if raised.frames and not raised.members:
            return raised.frames[-1]
        raised = raised.members[0] if raised.members else raised.cause
    return None


def _with_hint(diverged: Diverged, run_id: str, events: Sequence[Event]) -> Diverged:
    """The same error with a hint: the last event at which the agent can be inspected."""
    event = events[diverged.seq - 1]
    before = (event.cause if is_stated(event) and event.cause is not None else event.seq) - 1
    began = next(event.seq for event in events if isinstance(event.body, RunClaimed))
    hint = f"up to event {before} it does the same: {shell.command('inspect', run_id)} --at {before}" if before >= began else ""
    words = f"run {run_id}: this code is not the code that the journal was made with: {diverged}"
    return Diverged(words, seq=diverged.seq, call=diverged.call, recorded=diverged.recorded, asked=diverged.asked, hint=hint)


class _Look:
    """One inspection of a moment."""

    def __init__(self, moment: Moment, all_frames: bool) -> None:
        self._moment = moment
        self._all_frames = all_frames
        self._standstill: Standstill = moment.machine.standstill()
        self._frames = {task.number: list(waiting_frames(task)) for task in self._tasks() if not task.done()}
        self._error = _error_of(self._standstill.main)
        if self._error is not None:
            self._frames[self._standstill.main.number] = [frame for error in _errors(self._error) for frame, _ in _traceback(error)]
        self._facts = {number: self._facts_in(frames) for number, frames in self._frames.items()}
        scopes = [*(frame.f_locals for frames in self._frames.values() for frame in frames), *self._facts.values()]
        self._open = set(self._standstill.calls.values())
        # Number of an open call → the events about it.
        self._about: dict[int, list[AnyBody]] = {number: [] for number in self._open}
        for event in moment.events[: moment.at]:
            if event.call in self._about:
                self._about[event.call].append(event.body)
        arguments = [_arguments(moment.frontier.calls[number]) for number in self._open]
        self._values = Values([*scopes, *(one for one in arguments if type(one) is dict)])
        self._named: set[int] = set()  # the open calls for which a task waits
        targets = [(timer, timer_target(timer)) for timer in self._standstill.timers]
        self._sleeps = {id(target.future): timer for timer, target in targets if target.future is not None}
        self._time_outs: dict[int, list[datetime]] = {}  # number of a task → when its time-outs end
        for timer, target in targets:
            if isinstance(target.task, AgentTask):
                self._time_outs.setdefault(target.task.number, []).append(utc_within(round(timer.when() * 1e6)))
        self._files: dict[str, _File] = {}

    def inspection(self) -> Inspection:
        moment = self._moment
        created = moment.machine.facts
        woken = moment.events[moment.machine.cause - 1]
        tasks = tuple(self._task(task) for task in self._tasks())
        return Inspection(
            run_id=created.run_id,
            agent=created.agent,
            version=created.version,
            at=moment.at,
            woken_by=woken.seq,
            woken_type=woken.type,
            now=utc_within(moment.machine.now),
            tasks=tasks,
            not_awaited=tuple(self._call(number) for number in sorted(self._open - self._named)),
            unread=dict(self._standstill.unread),
        )

    def _tasks(self) -> list[AgentTask]:
        return [self._standstill.main, *self._standstill.tasks]

    # -- one task -----------------------------------------------------------------------------------------------------
    def _task(self, task: AgentTask) -> InspectedTask:
        name = self._values.text(task.get_name(), _LINE_CHARS)
        if task.done():
            return self._done(task, name)
        frames = self._frames[task.number]
        future = waits_for(task)
        return InspectedTask(
            name,
            "waiting",
            self._shown([(frame, _line_of(frame)) for frame in frames]),
            None if future is None else self._awaited(future, frames),
            tuple(sorted(self._time_outs.get(task.number, ()))),
            self._variables(self._facts[task.number]),
        )

    def _done(self, task: AgentTask, name: str) -> InspectedTask:
        if self._error is None:
            return InspectedTask(name, "returned", (), None, returned=self._values.show("", task.result()))
        state: Literal["cancelled", "raised"] = "cancelled" if task.cancelled() else "raised"
        facts = self._variables(self._facts[task.number])
        return InspectedTask(name, state, (), None, facts=facts, raised=self._raised(self._error, _CHAIN))

    def _facts_in(self, frames: Iterable[FrameType]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for frame in frames:
            if frame.f_code.co_filename.startswith(_HERE):
                found |= self._moment.agent.facts_of(frame.f_code, frame.f_locals)
        return found

    def _variables(self, found: Mapping[str, Any]) -> tuple[Variable, ...]:
        # A comprehension has a variable for its iterator. The name of this variable is no identifier.
        named = [(name, value) for name, value in found.items() if name.isidentifier()]
        shown = [Variable(name, self._values.show(name, value)) for name, value in named[:MAX_VARIABLES]]
        more = [Variable("…", f"{len(named) - MAX_VARIABLES} more")] if len(named) > MAX_VARIABLES else []
        return (*shown, *more)

    def _raised(self, error: BaseException, depth: int) -> RaisedError:
        members = error.exceptions if isinstance(error, BaseExceptionGroup) and depth else ()
        cause = error.__cause__ if error.__cause__ is not None or error.__suppress_context__ else error.__context__
        return RaisedError(
            self._values.text(type(error).__name__, _LINE_CHARS),
            self._values.message(error),
            self._shown(list(_traceback(error))),
            tuple(self._raised(member, depth - 1) for member in members[:_MOST_NAMED]),
            self._raised(cause, depth - 1) if cause is not None and depth else None,
        )

    # -- frames -------------------------------------------------------------------------------------------------------
    def _shown(self, frames: list[tuple[FrameType, int]]) -> tuple[InspectedFrame, ...]:
        shown = [one for one in frames if self._all_frames or not _is_internal(one[0])]
        half, left_out = MAX_FRAMES // 2, max(len(shown) - MAX_FRAMES, 0)
        inner = shown[half + left_out :]
        first = [self._frame(frame, line) for frame, line in shown[:half]]
        return (*first, *(self._frame(frame, line, left_out if not place else 0) for place, (frame, line) in enumerate(inner)))

    def _frame(self, frame: FrameType, line: int, left_out: int = 0) -> InspectedFrame:
        code = frame.f_code
        file = self._files.get(code.co_filename)
        if file is None:
            file = self._files[code.co_filename] = _File(code.co_filename, frame.f_globals)
        first, lines = file.around(code, line)
        return InspectedFrame(
            self._values.text(code.co_qualname, _LINE_CHARS),
            self._values.text(code.co_filename),
            line,
            tuple(self._values.source(text.rstrip("\n").expandtabs(4), _LINE_CHARS) for text in lines),
            first,
            self._variables(frame.f_locals),
            _is_internal(frame),
            left_out,
        )

    # -- what a task waits for ----------------------------------------------------------------------------------------
    def _awaited(self, future: asyncio.Future[Any], frames: Sequence[FrameType]) -> Awaited:
        number = self._standstill.calls.get(id(future))
        if number is not None:
            self._named.add(number)
            return self._call(number)
        topic = self._standstill.topics.get(id(future))
        if topic is not None:
            return Awaited("signal", f"a signal on {topic!r}", topic=topic)
        if (children := gathered(future)) is not None:
            return self._several("asyncio.gather", children)
        if isinstance(future, AgentTask):
            return self._several("", [future])
        if (inner := shielded(future)) is not None:
            found = self._awaited(inner, ())
            return structs.replace(found, words=f"{found.words} (shielded)")
        return self._primitive(frames) or self._timer(future) or Awaited("future", "a future that no call of the agent fulfils")

    def _timer(self, future: asyncio.Future[Any]) -> Awaited | None:
        timer = self._sleeps.get(id(future))
        if timer is None:
            return None
        due = round(timer.when() * 1e6)
        return Awaited("timer", f"timer {timer.number}, due at {iso(due)}", timer=timer.number, due=utc_within(due))

    def _primitive(self, frames: Sequence[FrameType]) -> Awaited | None:
        """What the innermost functions of asyncio wait for: a lock, a queue, an event, several tasks."""
        inside = list(frames)
        outer = next((frame for frame in reversed(inside) if not frame.f_code.co_filename.startswith(_ASYNCIO)), None)
        for frame in inside[inside.index(outer) + 1 if outer is not None else 0 :]:
            where = frame.f_locals
            match frame.f_code.co_qualname.rpartition(".<locals>.")[2]:
                case "TaskGroup.__aexit__" | "TaskGroup._aexit":
                    return self._several("asyncio.TaskGroup", tasks_of_group(where["self"]))
                case "_wait":
                    return self._several("asyncio.wait", where["fs"])
                case "wait_for":
                    return self._several("asyncio.wait_for", [where["fut"]])
                case "_wait_for_one" | "_AsCompletedIterator._wait_for_one":
                    return Awaited("tasks", "the next of the tasks given to asyncio.as_completed")
                case "Lock.acquire" | "Semaphore.acquire" | "Condition.wait" | "Barrier._block" | "Barrier._wait":
                    return Awaited("lock", f"the {self._named_object(where['self'], outer)}")
                case "Event.wait":
                    return Awaited("event", f"the {self._named_object(where['self'], outer)}")
                case "Queue.get":
                    return Awaited("queue", f"an item of the {self._named_object(where['self'], outer)}, which is empty")
                case "Queue.put":
                    return Awaited("queue", f"room in the {self._named_object(where['self'], outer)}, which is full")
                case "Queue.join":
                    return Awaited("queue", f"the end of the work in the {self._named_object(where['self'], outer)}")
        return None

    def _named_object(self, found: Any, frame: FrameType | None) -> str:
        """The type of a lock or a queue, and the name of the variable that holds it."""
        kind = type(found).__name__
        scopes: list[tuple[str, Mapping[str, Any]]] = []
        if frame is not None:
            owner = frame.f_locals.get("self")
            scopes = [("", frame.f_locals), ("self.", attributes_of(owner) if owner is not None else {}), ("", frame.f_globals)]
        name = next((f" {prefix}{name}" for prefix, scope in scopes for name, value in scope.items() if value is found), "")
        return self._values.text(f"{kind}{name}", _LINE_CHARS)

    def _several(self, how: str, awaited: Iterable[asyncio.Future[Any]]) -> Awaited:
        every = list(awaited)
        left = [one for one in every if not one.done()]
        left.sort(key=lambda one: one.number if isinstance(one, AgentTask) else 0)
        names = [
            self._values.text(one.get_name(), _LINE_CHARS) if isinstance(one, AgentTask) else self._awaited(one, ()).words for one in left
        ]
        named = ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")
        if not how:
            return Awaited("task", f"task {named}", tasks=tuple(names))
        count = f"{len(left)} of {plural(len(every), 'task')}" if len(left) < len(every) else plural(len(left), "task")
        return Awaited("tasks", f"{count} of {how}: {named}", tasks=tuple(names))

    # -- calls --------------------------------------------------------------------------------------------------------
    def _call(self, number: int) -> Awaited:
        asked, about = self._moment.frontier.calls[number], self._about[number]
        approval = next((body.approval for body in reversed(about) if isinstance(body, ApprovalRequested)), None)
        state = self._values.text(_state_words(about[-1]), _LINE_CHARS) if about else ""
        words = f"{number} {self._asked_words(asked)}{f', {state}' if state else ''}"
        match asked:
            case AskApproval():
                return Awaited("approval", f"approval {words}", number, self._values.text(asked.action, _LINE_CHARS), approval=approval)
            case StartChild():
                child = next((body.run_id for body in about if isinstance(body, ChildStarted)), None)
                return Awaited("child", f"child {words}", number, asked.agent.name, run_id=child)
            case CallTool():
                return Awaited("model" if _is_model(asked) else "call", f"call {words}", number, asked.tool.name, approval=approval)

    def _asked_words(self, asked: Asked) -> str:
        match asked:
            case CallTool() if _is_model(asked):
                return f"of model {self._values.text(asked.tool.name)}"
            case CallTool():
                return self._values.call(asked.tool.name, _arguments(asked))
            case StartChild():
                return self._values.call(asked.agent.name, _arguments(asked))
            case AskApproval():
                return self._values.call(asked.action, _arguments(asked))


def _is_model(asked: CallTool) -> bool:
    return getattr(asked.tool, "events", None) is OF_MODEL


def _arguments(asked: Asked) -> Any:
    return decode(asked.input if isinstance(asked, AskApproval) else asked.args)


def _state_words(body: AnyBody) -> str:
    """The state of the call after the last event about it, in words."""
    match body:
        case ToolCallProposed():
            return f"which waits {UNTIL[body.until]}"
        case ApprovalRequested():
            return f"which waits for {body.approval}"
        case ApprovalDecided():
            return f"decided by {body.by}"
        case ToolCallInitiated():
            return f"attempt {body.attempt} has begun"
        case ToolCallFailed():
            return f"attempt {body.attempt} failed: {body.failure.type}"
        case RetryScheduled(reconcile=True):
            return f"whether it happened is asked again at {iso(body.at)}"
        case RetryScheduled():
            return f"attempt {body.attempt} follows at {iso(body.at)}"
        case ToolCallInDoubt():
            return f"in doubt: {body.why}"
        case ChildStarted():
            return f"run {body.run_id}"
        case _:
            return ""


# -- exceptions and frames --------------------------------------------------------------------------------------------
def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    if not task.done():
        return None
    try:
        return task.exception()
    except asyncio.CancelledError as cancelled:
        return cancelled


def _errors(error: BaseException | None, depth: int = _CHAIN) -> Iterator[BaseException]:
    """The error, the members of an exception group, and the causes of all these errors."""
    if error is None or not depth:
        return
    yield error
    cause = error.__context__ if error.__cause__ is None else error.__cause__
    for other in (*(error.exceptions if isinstance(error, BaseExceptionGroup) else ()), cause):
        yield from _errors(other, depth - 1)


def _traceback(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    step: TracebackType | None = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename != __file__:  # `task.exception()` of a cancelled task raises here
            yield step.tb_frame, step.tb_lineno or step.tb_frame.f_code.co_firstlineno
        step = step.tb_next


def _line_of(frame: FrameType) -> int:
    return frame.f_lineno or frame.f_code.co_firstlineno  # some instructions belong to no line


def _is_internal(frame: FrameType) -> bool:
    """Is this a function of perdure, of asyncio or of another module of the standard library?"""
    file = frame.f_code.co_filename
    return file.startswith(_HERE) or (file.startswith(_STDLIB) and "-packages" not in file)


class _File:
    """A source file, as it is now, and the code that it holds."""

    def __init__(self, name: str, module: dict[str, Any]) -> None:
        linecache.checkcache(name)
        self._lines = linecache.getlines(name, module)
        # Some loaders, such as pytest's, change the code: then the loaded code differs from the compiled file,
        # although the file has not changed. For such a loader, the two are not compared.
        plain = type(getattr(module.get("__spec__"), "loader", None) or module.get("__loader__")) is SourceFileLoader
        self._codes = _codes_in(name, "".join(self._lines)) if plain else None

    def around(self, code: CodeType, line: int) -> tuple[int, list[str]]:
        """(number of the first line, the lines around this line).

        No lines if the file has changed since it was loaded.
        """
        if not 1 <= line <= len(self._lines) or (self._codes is not None and code not in self._codes):
            return line, []
        first = max(line - CONTEXT_LINES, 1)
        return first, self._lines[first - 1 : line + CONTEXT_LINES]


def _codes_in(file: str, text: str) -> set[CodeType]:
    """All functions in this text, compiled. They show whether the file was edited after the process loaded it."""
    try:
        left = [compile(text, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return set()
    found: set[CodeType] = set()
    while left:
        code = left.pop()
        found.add(code)
        left += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found
