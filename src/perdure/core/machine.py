"""An agent as a machine: the machine takes completions and returns commands.

The machine is pure. Replay, inspection and every engine use the same machine.

    start(now)               → commands      the agent runs until it waits
    deliver(now, completion) → commands      delivers one completion; the agent runs until it waits again

The last command of a machine is `Finish`. The machine returns it when the agent's main coroutine is done, the agent's
other tasks are cancelled and done (as with asyncio.run), and every call of the agent has ended, even if the agent did
not await the call. Or its last command is `TakeCheckpoint`: the agent ends this life, and a new machine begins its next
one (`begin_life`).
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

from msgspec import Struct

from perdure.core import codec
from perdure.core.agent_loop import NO_LIFE, AgentLoop, AgentTask, Timer
from perdure.core.approval import Approval, Decision, Outcome
from perdure.core.codec import Payload
from perdure.core.compat import running_loop, set_current_task, set_running_loop, task_to_leave
from perdure.core.events import OF_MODEL, AnyBody, CallKept, Event, Failure, LabelsChanged, OpenTimer, PatchMarked
from perdure.core.failures import describe
from perdure.core.history import Earlier, Superseded, add_outcome, ends_wait
from perdure.core.labels import check_number, with_labels
from perdure.core.prompt_deltas import LONG_CHARS, Prompts
from perdure.errors import (
    BudgetExceeded,
    ChildFailed,
    InvalidInput,
    NotApproved,
    NotEncodable,
    PerdureError,
    ResultNotEncodable,
    ToolFailed,
)


class Facts(Struct, frozen=True, gc=False):
    """What an agent may know about its run."""

    run_id: str
    tenant: str
    actor: str | None
    agent: str
    version: str
    parent: str | None = None
    depth: int = 0
    origin: str = ""  # only of a fork: the run with which its history began; the same random numbers follow from it
    frames: tuple[tuple[int, bytes], ...] = ()  # `RunState.frames`, with their payloads as JSON
    labels: Mapping[str, str] = {}  # with which the run was started
    tick: int | None = None  # only of a run that a schedule has started


class Callee(Protocol):
    """What the machine needs to know about a tool: the tool's name, and how a recorded result becomes a value."""

    @property
    def name(self) -> str: ...

    def decode_result(self, encoded: bytes) -> Any: ...


# -- commands: what the agent asks for ----------------------------------------------------------------------------------
class CallTool(Struct, frozen=True, gc=False):
    number: int
    tool: Any  # a Callee
    args: bytes


class AskApproval(Struct, frozen=True, gc=False):
    number: int
    action: str
    input: bytes
    policy: Approval
    reason: str | None


class StartChild(Struct, frozen=True, gc=False):
    number: int
    agent: Any  # a Callee
    args: bytes


class Abandon(Struct, frozen=True, gc=False):
    """The agent has stopped waiting for this call, approval or child. The effect of a call may still happen."""

    number: int
    stop: bool = True  # False: do not stop an attempt under way, even if the effect class allows that


class Hold(Struct, frozen=True, gc=False):
    """The agent considers again whether it wants this call: it must not begin, if it needs an approval and has not begun."""

    number: int


class Record(Struct, frozen=True, gc=False):
    """A fact that the agent itself states: a thought, a decision, a status."""

    body: AnyBody


class Succeeded(Struct, frozen=True, gc=False):
    output: bytes


class Failed(Struct, frozen=True, gc=False):
    failure: Failure


class Cancelled(Struct, frozen=True, gc=False):
    pass


class Finish(Struct, frozen=True, gc=False):
    outcome: Succeeded | Failed | Cancelled


class TakeCheckpoint(Struct, frozen=True, gc=False):
    """The agent ends its life. Its next life begins with this state, and with what this life has left."""

    state: bytes
    timers: tuple[OpenTimer, ...] = ()


Asked = CallTool | AskApproval | StartChild
Command = Asked | Abandon | Hold | Record | TakeCheckpoint | Finish


class Inheritance(Struct, frozen=True):
    """What a life of the agent begins with, if it begins at a checkpoint."""

    seq: int  # the seq of the `checkpoint_taken`
    state: bytes
    earlier: Earlier  # the calls that this life may make again: they keep their numbers
    open: Mapping[int, bool]  # the calls, approvals and children that have not ended → is it a tool call?
    signals: Sequence[tuple[str, bytes]] = ()  # (topic, payload) of the signals that were not received
    timers: Sequence[OpenTimer] = ()
    cancelled: bool = False  # a cancel arrived after the life before had ended
    labels: Mapping[str, str] = {}


# -- completions: what came of the commands, and what arrived from outside ----------------------------------------------
class CallCompleted(Struct, frozen=True, gc=False):
    number: int
    result: bytes


class CallFailed(Struct, frozen=True, gc=False):
    number: int
    failure: Failure
    attempts: int


class ApprovalSettled(Struct, frozen=True, gc=False):
    number: int
    outcome: Outcome
    by: str | None = None
    note: str | None = None
    input: bytes | None = None  # the edited arguments or input, if a person edited them
    failure: Failure | None = None  # the failure of the tool call, if it was not approved


class ChildEnded(Struct, frozen=True, gc=False):
    number: int
    run_id: str
    result: bytes | None
    failure: Failure | None


class SignalArrived(Struct, frozen=True, gc=False):
    topic: str
    payload: bytes


class TimerDue(Struct, frozen=True, gc=False):
    timer: int


class CancelAsked(Struct, frozen=True, gc=False):
    pass


class HoldTaken(Struct, frozen=True, gc=False):
    """The call has not begun, and does not begin before the agent has recorded that it keeps the call."""

    number: int


Completion = CallCompleted | CallFailed | ApprovalSettled | ChildEnded | SignalArrived | TimerDue | CancelAsked | HoldTaken


class _Hearing:
    """What an agent needs that listens while its calls wait for approvals."""

    __slots__ = ("holds", "watching")

    def __init__(self) -> None:
        self.holds: dict[int, WantedHold] = {}
        self.watching: dict[str, list[asyncio.Future[None]]] = {}  # those who wait for a signal, and leave it to `receive`


_NO_HOLDS: Mapping[int, WantedHold] = MappingProxyType({})


class MachineClosed(BaseException):
    """Raised inside a waiting agent when its machine is closed. No `except Exception` catches this exception."""


class UnknownCompletion(PerdureError):
    """A completion for a call that the agent never made, or for a timer that the agent never set."""


class Edit(NamedTuple):
    """A person has changed the arguments of a call before the call began."""

    by: str | None
    before: bytes
    after: bytes


class Standstill(NamedTuple):
    """Where an agent stands between two activations, for inspection. Futures are named by their `id()`."""

    main: AgentTask  # it may be done
    tasks: list[AgentTask]  # the other tasks that are not done
    calls: dict[int, int]  # future → the number of the call, approval or child that the future waits for
    topics: dict[int, str]  # future → the topic of the signal that the future waits for
    timers: list[Timer]
    unread: dict[str, int]  # topic → how many signals have arrived and were not received


class WantedHold(NamedTuple):
    """A call that the agent wants to hold, and that is not held yet."""

    cause: int  # the seq of the event after which the agent wants it
    taken: asyncio.Future[None]


class _Open(Struct):
    kind: Literal["tool", "approval", "child"]
    callee: Any  # the tool or the agent
    future: asyncio.Future[Any]
    input: bytes  # the input of an approval, or the arguments of a tool call
    result: Any  # the coroutine that the agent received


class Machine:
    """One agent that runs on its own loop. The loop does no I/O."""

    def __init__(
        self,
        facts: Facts,
        main: Callable[[Machine], Coroutine[Any, Any, Any]],
        max_steps: int = 1_000_000,
        encode: Callable[[Any], bytes] = codec.encode,
        is_interrupt: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        self.facts = facts
        self.cancel_asked = False
        self.finished = False
        self.cause = 0  # seq of the event that is being delivered; the caller of `deliver` sets it
        # Seq of the event that holds the payload; it differs from `cause` only if a superseded outcome is reused.
        self.source = 0
        # Why the agent cannot go on with the frame of its code; None: it can. An agent that is built from parts sets this.
        self.in_the_way: Callable[[], str | None] = lambda: None
        self._main_factory: Callable[[Machine], Coroutine[Any, Any, Any]] | None = main
        self._encode = encode
        self._main: AgentTask | None = None
        self._loop = AgentLoop(self, max_steps, is_interrupt)  # type: ignore[abstract]  # unsupported methods are defined by a loop
        self.timers = self._loop.timers  # the pending timers, by number
        self._open: dict[int, _Open] = {}
        self._calls = 0  # the highest number in use
        # The number of the newest call; it is lower than `_calls` if the newest call is a superseded call, made again.
        self._newest = 0
        self._commands: list[Command] = []
        self._winding_up = False
        self._children: dict[tuple[str, str], Any] = {}  # agents of the children so far, by name and version
        self._buffered: dict[str, deque[Any]] = {}  # signals that the agent has not received yet, by topic
        self._listening: dict[str, deque[asyncio.Future[Any]]] = {}
        self._hearing: _Hearing | None = None  # made when the agent needs it first: most agents never do
        # A replay sets both: the patches (`patched`) that this run has recorded, and whether more recorded events
        # follow.
        self.patches: frozenset[str] = frozenset()
        self.replaying = False
        self._patched: dict[str, bool] = {}
        self.prompts = Prompts()
        self.edits: dict[int, Edit] = {}  # calls whose arguments a person has edited
        # The calls that the agent may make again: superseded calls, and calls that its last life has left open.
        self.earlier = Earlier()
        self._superseded: Superseded | None = None
        self.life = 0  # the seq of the checkpoint at which this life began; 0: the first life
        self.restored: Any = None  # the state of that checkpoint
        self.labels = facts.labels  # as the agent knows them
        self._inherited: dict[int, bool] = NO_LIFE  # as `Inheritance.open`: those that were not made again
        self.after_life: dict[int, list[Event]] = NO_LIFE  # outcomes of calls that arrived after this life was over
        self._cancel_at_start = False
        self._woken = False  # something has happened in this life: it was woken, or it has received a signal
        self._taking: tuple[bytes, asyncio.Task[Any] | None] | None = None  # (state, task) of `checkpoint`
        self.left = False  # the agent has taken a checkpoint: this life is over
        self.trace_id: str | None = None  # for log records of the agent

    # -- for the run core and replay ----------------------------------------------------------------------------------
    def start(self, now: int) -> list[Command]:
        """Run the agent until it waits."""
        assert self._main is None, "a machine starts once"
        self._loop.advance(now / 1e6)
        self._main = self._loop.start(self._begin())
        if self.cancel_asked:
            self._main.cancel()  # before the first step of the main task: the agent's code never begins
        commands = self._settle()
        if self._cancel_at_start and not self.finished and not self.left:
            self._cancel_at_start = False
            commands += self.deliver(now, CancelAsked())
        return commands

    def deliver(self, now: int, completion: Completion) -> list[Command]:
        """Deliver one completion, and run the agent until it waits again."""
        if self._main is None:
            self._hear_before_start(completion)
            return []
        assert not self.finished and not self.left, "a machine whose agent has ended takes no completions"
        self._woken = True
        self._loop.advance(now / 1e6)
        if type(completion) is CallCompleted:  # the common case, without the slower pattern matching in `_take`
            opened, result = self._close(completion.number), completion.result
            if len(result) > LONG_CHARS:
                self.prompts.recorded(result, self.source)
            if not opened.future.done():
                opened.future.set_result(opened.callee.decode_result(result))
        else:
            self._take(completion)
        return self._settle()

    def reopen(self, earlier: Earlier, load: Callable[[Payload], bytes]) -> None:
        """The run was reopened. From now on, what the agent asks for belongs to a new branch.

        If the agent makes a call of `earlier` again, the call keeps its number. Other calls get new numbers.
        """
        self.earlier, self._superseded, self._calls = earlier, Superseded(earlier.requests, load), earlier.last
        for number, of_tool in list(self._inherited.items()):
            if number in earlier.over or any(ends_wait(end, of_tool=of_tool) for end in earlier.outcomes.get(number, ())):
                del self._inherited[number]

    def begin_life(self, inherited: Inheritance, load: Callable[[Payload], bytes]) -> None:
        """Prepare a new machine for a life that begins at a checkpoint. `start` follows."""
        assert self._main is None, "a life begins with a new machine"
        self.life, self.restored, self.labels = inherited.seq, codec.decode(inherited.state), inherited.labels
        self.reopen(inherited.earlier, load)
        self._inherited, self._cancel_at_start = dict(inherited.open), inherited.cancelled
        for topic, payload in inherited.signals:
            self._buffered.setdefault(topic, deque()).append(codec.decode(payload))
        self._loop.inherited = {}
        for timer in inherited.timers:
            self._loop.inherited.setdefault((timer.task, timer.delay_us), deque()).append(timer.due / 1e6)

    def keeps(self, event: Event) -> list[Command] | None:
        """Is the event about an earlier call that the agent has not made again? Then it is kept for that moment.

        A person may resolve the doubt about a superseded call at any time, and a call of an earlier life goes on.
        Returns None if the event is for the agent. If not: the commands that follow, since the agent may have waited
        for the end of that call alone before its own end.
        """
        number = event.call
        if number is None or number in self._open:
            return None
        if number in self.earlier.requests:
            self.earlier.keep(event)
        elif number not in self._inherited:
            return None
        if number not in self._inherited or not ends_wait(event, of_tool=self._inherited[number]):
            return []
        del self._inherited[number]
        return [] if self._main is None or self.left or self.finished else self._settle()

    def keep_for_next_life(self, event: Event, source: Event, completion: Completion) -> None:
        """Keep what arrives after the agent has taken a checkpoint, and before that checkpoint is recorded."""
        match completion:
            case SignalArrived(topic, payload):
                self._buffered.setdefault(topic, deque()).append(codec.decode(payload))
            case CancelAsked():
                self.cancel_asked = True
            case TimerDue():
                pass
            case _:
                opened = self._open.get(event.call or 0)
                if opened is not None:
                    add_outcome(self.after_life, source, of_tool=opened.kind == "tool")

    @property
    def left_over(self) -> tuple[list[int], list[int]]:
        """What this life leaves to the next one: earlier calls that it has not made again, and calls that it waits for."""
        earlier = [] if self._superseded is None else sorted(self._superseded.left)
        return earlier, [number for number, opened in self._open.items() if not opened.future.cancelled()]

    @property
    def unread(self) -> list[tuple[str, bytes]]:
        """(topic, payload) of the signals that the agent has not received."""
        return [(topic, codec.encode(payload)) for topic, payloads in self._buffered.items() for payload in payloads]

    @property
    def waits_for(self) -> list[int]:
        """The numbers of the calls, approvals and children for which the agent still waits."""
        return list(self._open)

    def is_waiting_for(self, number: int) -> bool:
        return number in self._open

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Install the loop's hooks once for a whole replay, instead of once for each activation."""
        with self._loop.hooked():
            yield

    def _take(self, completion: Completion) -> None:
        match completion:
            case CallFailed(number, failure, attempts):
                opened = self._close(number)
                _fail(opened, _failed(opened.callee, number, failure, attempts))
            case ApprovalSettled():
                self._settle_approval(completion)
            case ChildEnded(number, run_id, output, problem):
                opened = self._close(number)
                if output is not None:
                    self.prompts.recorded(output, self.source)
                if output is not None and not opened.future.done():
                    opened.future.set_result(opened.callee.decode_result(output))
                elif problem is not None:
                    words = {"kind": problem.kind, "type": problem.type, "message": problem.message}
                    _fail(opened, ChildFailed(opened.callee.name, number, run_id=run_id, **words))
            case SignalArrived(topic, payload):
                self.prompts.recorded(payload, self.source)
                self._deliver_signal(topic, codec.decode(payload))
            case TimerDue(timer):
                if not self._loop.fire(timer):
                    raise UnknownCompletion(f"timer {timer}")
            case CancelAsked():
                if not self.cancel_asked:  # a second cancel must not interrupt the cleanup after the first cancel
                    assert self._main is not None
                    self.cancel_asked = True
                    self._main.cancel()
            case HoldTaken(number):
                hold = None if self._hearing is None else self._hearing.holds.pop(number, None)
                if hold is not None and not hold.taken.done():
                    hold.taken.set_result(None)
            case _:
                raise AssertionError(completion)

    def close(self) -> None:
        """End all coroutines of the agent. The owner of the machine calls this when it no longer needs the machine.

        When a coroutine ends, its `finally` blocks run. If the garbage collector ended the coroutine, these blocks
        would run outside of the machine, and a tool that they call would really run without a record. Here the blocks
        run inside the machine, and their commands are dropped. The same is true for the `__del__` of an object to
        which only a pending timer or call of the agent has a reference.
        """
        self._loop.closing = not self.finished
        outer = running_loop()
        outer_task = task_to_leave(outer)
        interrupts: list[BaseException] = []
        try:
            if outer_task is not None:
                set_current_task(outer, None)
            set_running_loop(self._loop)
            self._end_all(interrupts)
        finally:
            try:
                set_running_loop(outer)
            finally:
                if outer_task is not None:
                    set_current_task(outer, outer_task)
        if interrupts:
            raise interrupts[0]

    def _end_all(self, interrupts: list[BaseException]) -> None:
        """End every coroutine of the agent. Exceptions that OS signals raise meanwhile are added to `interrupts`."""
        for _ in range(_CLOSE_TRIES):
            suspended = [task for task in list(self._loop.tasks.values()) if _is_open(task)]
            if not suspended and not self._drop_the_rest(interrupts):
                # This breaks the reference cycle. No code of the agent is left that needs the owner.
                self._loop.owner = None
                return
            for task in suspended:
                # coroutine.close() is not used: if the agent waits in a `finally`, close() fails, and the garbage
                # collector would end the coroutine later. If the agent waits again, the exception is thrown again. The
                # class is thrown and not an instance: an instance and its traceback would form a reference cycle that
                # only the garbage collector frees.
                self._end_one(partial(task.get_coro().throw, MachineClosed), interrupts)
        _UNDYING.append(self._loop)

    def _end_one(self, end: Callable[[], object], interrupts: list[BaseException]) -> None:
        try:
            end()
        except BaseException as error:  # the agent's own exceptions are dropped
            if self._loop.is_interrupt(error):
                interrupts.append(error)

    def _drop_the_rest(self, interrupts: list[BaseException]) -> bool:
        """Drop everything that is left of the agent. Returns False if nothing was left.

        If it returns True, call it again: code of the agent may have run meanwhile and made new calls.
        """
        for opened in self._open.values():
            _close_unawaited(opened)
        for stray in self._loop.strays:
            self._end_one(partial(stray.aclose().send, None), interrupts)
        left = bool(self._open or self._commands or self._main or self._main_factory)
        self._main = self._main_factory = None
        self._hearing = None
        for held in (self._open, self._commands, self._buffered, self._listening):
            held.clear()
        return self._loop.empty() or left

    def __del__(self) -> None:
        if self._loop.owner is not None:
            self.close()

    def next_timer(self) -> tuple[int, int] | None:
        """(due in µs, number) of the timer that is due next, or None."""
        upcoming = self._loop.next_timer()
        return None if upcoming is None else (max(0, round(upcoming[0] * 1e6)), upcoming[1])

    @property
    def timers_set(self) -> int:
        """How many timers the agent has set so far. This is also the number of the last timer."""
        return self._loop.timers_set

    def timer_cause(self, timer: int) -> int:
        """The seq of the event that made the agent set this pending timer."""
        return self._loop.timers[timer].cause

    def standstill(self) -> Standstill:
        """Where the agent stands now. Call it only after `start`, and do not change the objects that it returns."""
        assert self._main is not None, "a machine that has not started stands nowhere"
        return Standstill(
            self._main,
            [task for task in self._loop.tasks.values() if task is not self._main],
            {id(opened.future): number for number, opened in self._open.items()},
            {id(signal): topic for heard in self._heard() for topic, waiting in heard.items() for signal in waiting},
            list(self._loop.timers.values()),
            {topic: len(signals) for topic, signals in self._buffered.items() if signals},
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run code as if the agent ran it, while no other loop is running.

        A tool that this code calls is not performed.

        A person uses this to look at a machine with a debugger. The commands of that code are dropped with the
        machine.
        """
        assert running_loop() is None, "the agent's loop would replace a running loop"
        set_running_loop(self._loop)
        try:
            yield
        finally:
            set_running_loop(None)

    # -- for the agent: tools, models, approvals, children, signals -----------------------------------------------------
    @property
    def now(self) -> int:
        """The recorded time of the completion that woke the agent, in µs."""
        return round(self._loop.time() * 1e6)

    def call_tool(self, tool: Callee, args: bytes) -> Coroutine[Any, Any, Any]:
        """Make a call. To wait for the result, await the returned coroutine.

        When this method returns, the call has its number, and its command is recorded.
        """
        return self._call_tool(tool, args, self._number("tool", tool.name, args, tool))

    def _call_tool(self, tool: Callee, args: bytes, number: int) -> Coroutine[Any, Any, Any]:
        result = self._begin_call(number, "tool", tool, tool.name, args)
        self._commands.append(CallTool(number, tool, args))
        return result

    def ask_model(self, make: Callable[[bytes], Callee], frame: Mapping[str, Any], messages: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        """Ask a model. To wait for the answer, await the returned coroutine.

        `make(packed)` returns the callee. `packed` is the request as it is recorded, and `calls` is the call's number.
        """
        number = 0

        def number_of(digest: str) -> int:
            nonlocal number
            number = self._number("model", "", b"", None, digest)
            return number

        packed = self.prompts.pack(number_of, frame, messages)
        return self._call_tool(make(packed), packed, number)

    def begin_no_more(self, number: int) -> None:
        """Let no further attempt of this call begin.

        An attempt under way continues, and the agent can still await the call.
        """
        if number in self._open:
            self._commands.append(Abandon(number, stop=False))

    def hold(self, number: int) -> asyncio.Future[None]:
        """Let this call not begin, until the agent has recorded that it keeps the call (`CallKept`).

        The future is done when the call is held. Only a call that needs an approval and has not begun can be held: the
        future of any other call is never done, and the call ends.
        """
        hold = self._hearing_now().holds[number] = WantedHold(self.cause, self._loop.create_future())
        self._commands.append(Hold(number))
        return hold.taken

    def keep(self, number: int) -> None:
        """Record that the agent still wants the call that is held."""
        self.record(CallKept(number))

    def arguments(self, number: int) -> bytes:
        """The arguments of a call that has not ended."""
        return self._open[number].input

    @property
    def is_live(self) -> bool:
        """Does the agent do something for the first time? False in a replay, and while the machine is being closed."""
        return not self.replaying and not self._loop.closing

    @property
    def calls(self) -> int:
        """The number of the newest call."""
        return self._newest

    def take_signals(self, topic: str) -> list[Any]:
        """The signals on this topic that have arrived and were not received yet. Does not wait."""
        taken = list(self._buffered.pop(topic, ()))
        self._woken = self._woken or bool(taken)
        return taken

    async def checkpoint(self, state: bytes) -> NoReturn:
        """End this life of the agent. Never returns."""
        self._loop.go_on()
        if self.cancel_asked:
            raise asyncio.CancelledError  # the run is to end: no new life begins, and this one cleans up
        if self._taking is not None:
            raise InvalidInput("run.checkpoint: another task of this agent has just taken a checkpoint")
        if self.life and not self._woken:
            raise InvalidInput(
                "run.checkpoint: nothing has happened since the last checkpoint, so that the agent would take checkpoints for ever; "
                "wait for something first: a call, a signal, a timer"
            )
        self._taking = (state, asyncio.current_task(self._loop))
        await self._loop.create_future()
        raise AssertionError("a life that has ended goes on")

    def ask_approval(self, action: str, encoded: bytes, policy: Approval, reason: str | None) -> Coroutine[Any, Any, Decision]:
        """Ask people for their approval. To wait for the Decision, await the returned coroutine."""
        number = self._number("approval", action, encoded, None)
        result = self._begin_call(number, "approval", None, "run.approve", encoded)
        self._commands.append(AskApproval(number, action, encoded, policy, reason))
        return result

    def start_child(self, agent: Any, args: bytes) -> Coroutine[Any, Any, Any]:
        """Start a child run. To wait for its result, await the returned coroutine."""
        known = self._children.setdefault((agent.name, agent.version), agent)
        if known is not agent:
            raise InvalidInput(
                f"two agents are called {agent.name} (version {agent.version}): only one of them would be run; give one another name or version"
            )
        number = self._number("child", agent.name, args, agent)
        result = self._begin_call(number, "child", agent, agent.name)
        self._commands.append(StartChild(number, agent, args))
        return result

    async def receive(self, topic: str) -> Any:
        """The oldest signal on this topic that was not received yet. If there is none, wait for the next signal."""
        buffered = self._buffered.get(topic)
        if buffered:
            self._woken = True
            return buffered.popleft()
        signal = self._loop.create_future()
        listening = self._listening.setdefault(topic, deque())
        listening.append(signal)
        try:
            return await signal
        except asyncio.CancelledError:
            if signal.done() and not signal.cancelled():
                # The signal arrived in the same activation in which the wait was cancelled: keep the signal for the
                # next `receive`.
                self._buffered.setdefault(topic, deque()).appendleft(signal.result())
            raise
        finally:
            if signal in listening:
                listening.remove(signal)

    def arrival(self, topic: str) -> asyncio.Future[None]:
        """A future that is done when a signal on this topic has arrived and was not received yet. It stays to be received."""
        arrived: asyncio.Future[None] = self._loop.create_future()
        if self._buffered.get(topic):
            arrived.set_result(None)
        else:
            watching = self._hearing_now().watching
            watching[topic] = [*(one for one in watching.get(topic, ()) if not one.done()), arrived]
        return arrived

    @property
    def holds(self) -> Mapping[int, WantedHold]:
        """The holds that the agent wants, and that are not recorded yet, by the numbers of their calls."""
        return _NO_HOLDS if self._hearing is None else self._hearing.holds

    def _hearing_now(self) -> _Hearing:
        self._hearing = self._hearing or _Hearing()
        return self._hearing

    def _heard(self) -> list[Mapping[str, Iterable[asyncio.Future[Any]]]]:
        return [self._listening] if self._hearing is None else [self._listening, self._hearing.watching]

    def patched(self, name: str) -> bool:
        """Does this run use the new code of a code change?

        False if the run passed this point before the change existed. In all other cases True, and `patch_marked` is
        recorded.
        """
        known = self._patched.get(name)
        if known is None:
            known = name in self.patches or not self.replaying
            self._patched[name] = known
            if known:
                self.record(PatchMarked(name))
        return known

    @property
    def topics(self) -> list[str]:
        """The topics of the signals for which the agent waits."""
        # Not those of `arrival`: an agent that uses it waits for a call too, and the call is what its run waits for.
        return [topic for topic, waiting in self._listening.items() if waiting]

    def record(self, body: AnyBody) -> None:
        """Add a `Record` command: the event is to be recorded in the journal."""
        self._loop.go_on()
        self._commands.append(Record(body))

    def label(self, changes: Mapping[str, str | None], what: str) -> None:
        """Set or remove labels of the run. InvalidInput if it would have too many."""
        labels = with_labels(self.labels, changes)
        check_number(labels, what)
        self.labels = labels
        self.record(LabelsChanged(dict(changes)))

    # -- inside -------------------------------------------------------------------------------------------------------
    def _hear_before_start(self, completion: Completion) -> None:
        """Keep a signal or a cancel that arrived before the run was first claimed, until the agent starts."""
        match completion:
            case CancelAsked():
                self.cancel_asked = True
            case SignalArrived(topic, payload):
                self.prompts.recorded(payload, self.source)
                self._deliver_signal(topic, codec.decode(payload))
            case _:
                raise AssertionError(f"{completion} can only answer an agent that has begun")

    async def _begin(self) -> Any:
        assert self._main_factory is not None, "a machine that was closed does not start"
        return await self._main_factory(self)

    def _number(self, kind: str, name: str, args: bytes, callee: Any, digest: str | None = None) -> int:
        """The number of the call that the agent makes now."""
        if self._superseded is not None:
            again = self._superseded.take(kind, name, args, callee, digest)
            if again is not None:
                self._newest = again
                self._inherited.pop(again, None)
                return again
        self._calls = self._newest = self._calls + 1
        return self._newest

    def _begin_call(
        self, number: int, kind: Literal["tool", "approval", "child"], callee: Any, name: str, encoded: bytes = b""
    ) -> Coroutine[Any, Any, Any]:
        if sys.exception() is not None:
            self._loop.go_on()
        future: asyncio.Future[Any] = asyncio.Future(loop=self._loop)
        result = self._result_of(number, future)
        self._open[number] = _Open(kind, callee, future, encoded, result)
        result.__qualname__ = name  # type: ignore[attr-defined]  # shown in "was never awaited"
        return result

    def _settle_approval(self, settled: ApprovalSettled) -> None:
        opened = self._open.get(settled.number)
        if opened is None:
            raise UnknownCompletion(f"call {settled.number}")
        granted = settled.outcome == "approved"
        if opened.kind == "tool":
            if granted and settled.input is not None:
                self.edits[settled.number] = Edit(settled.by, opened.input, settled.input)
            if not granted:
                self._close(settled.number)
                assert settled.failure is not None
                refused = NotApproved(
                    opened.callee.name,
                    settled.number,
                    outcome=settled.outcome,
                    by=settled.by,
                    note=settled.note,
                    message=settled.failure.message,
                )
                _fail(opened, refused)
            return  # the approval was granted: the call continues
        self._close(settled.number)
        if not opened.future.done():
            approved = codec.decode(settled.input or opened.input) if granted else None
            opened.future.set_result(Decision(granted, settled.outcome, settled.by, settled.note, approved))

    def _deliver_signal(self, topic: str, payload: Any) -> None:
        waiting = self._listening.get(topic)
        while waiting:
            signal = waiting.popleft()
            if not signal.done():
                signal.set_result(payload)
                return
        self._buffered.setdefault(topic, deque()).append(payload)
        for arrived in () if self._hearing is None else self._hearing.watching.pop(topic, ()):
            if not arrived.done():
                arrived.set_result(None)

    def _close(self, number: int) -> _Open:
        opened = self._open.pop(number, None)
        if opened is None:
            raise UnknownCompletion(f"call {number}")
        if self._hearing is not None:
            self._hearing.holds.pop(number, None)
        return opened

    async def _result_of(self, number: int, future: asyncio.Future[Any]) -> Any:
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled() and number in self._open:
                self._commands.append(Abandon(number))
            raise

    def _settle(self) -> list[Command]:
        self._loop.run_until_quiet()
        main = self._main
        assert main is not None
        if self._taking is not None:
            self.left, self.after_life = True, {}
            state, taker = self._taking
            self._commands.append(TakeCheckpoint(state, self._open_timers(taker)))
        elif main.done():
            if not self._winding_up:
                self._wind_up(main)
            if not self._loop.tasks and not self._open and not self._inherited:
                self.finished = True
                self._commands.append(Finish(self._outcome(main)))
        commands, self._commands = self._commands, []
        return commands

    def _open_timers(self, taker: asyncio.Task[Any] | None) -> tuple[OpenTimer, ...]:
        """The timers of the other tasks. A timer of the task that takes the checkpoint ends with that task."""
        timers = [timer for _, timer in sorted(self._loop.timers.items()) if timer.task is not None and timer.task is not taker]
        return tuple(OpenTimer(timer.task.get_name(), timer.delay_us, round(timer.when() * 1e6)) for timer in timers if timer.task)

    def _wind_up(self, main: AgentTask) -> None:
        """The agent's main coroutine has ended: cancel the other tasks, and abandon the calls that are not needed."""
        self._winding_up = True
        del self._loop.tasks[main.number]
        if self._loop.tasks:
            for task in list(self._loop.tasks.values()):
                task.cancel()
            self._loop.run_until_quiet()
        for number, opened in self._open.items():
            if self._is_left(opened):
                self._commands.append(Abandon(number))
                _close_unawaited(opened)
        for number in sorted(self._inherited):
            self._commands.append(Abandon(number, stop=False))

    def _is_left(self, opened: _Open) -> bool:
        """Is this call abandoned when the agent's main coroutine ends?

        If the agent succeeded, the calls that it did not await are still made. If it failed or was cancelled, nothing
        more begins. An approval is always abandoned, because nothing waits for its decision.
        """
        assert self._main is not None
        if opened.future.cancelled():
            return False  # the `Abandon` of this call was returned when the wait for the call was cancelled
        if inspect.getcoroutinestate(opened.result) == inspect.CORO_SUSPENDED:
            return False  # a task that is being cancelled awaits this call in its cleanup
        return opened.kind == "approval" or self._main.cancelled() or self._main.exception() is not None

    def _outcome(self, main: AgentTask) -> Succeeded | Failed | Cancelled:
        if main.cancelled():
            if self.cancel_asked:
                return Cancelled()
            return Failed(Failure(kind="error", type="CancelledError", message="the agent cancelled itself"))
        error = main.exception()
        if error is not None:
            return Failed(describe(error))
        try:
            return Succeeded(self._encode(main.result()))
        except NotEncodable as refused:
            return Failed(Failure(kind="not_encodable", type="NotEncodable", message=f"the agent's result cannot be recorded: {refused}"))


def current() -> Machine | None:
    """The machine whose agent is running right now in this thread, or None."""
    loop = running_loop()
    return loop.owner if isinstance(loop, AgentLoop) else None


_CLOSE_TRIES = 1000
# Loops with tasks that did not end when they were closed. These loops are kept for ever: if the garbage collector
# freed a loop, the loop's tasks would run again.
_UNDYING: list[AgentLoop] = []


def _is_open(task: AgentTask) -> bool:
    coroutine = task.get_coro()
    return inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) != inspect.CORO_CLOSED


def _close_unawaited(opened: _Open) -> None:
    """Close the coroutine of a call that was never awaited, so that Python does not warn.

    This is no mistake of the agent: the agent was closed, or ended, before it could await the call.
    """
    if inspect.getcoroutinestate(opened.result) == inspect.CORO_CREATED:
        opened.result.close()


def _fail(opened: _Open, error: ToolFailed) -> None:
    if not opened.future.done():
        opened.future.set_exception(error)
        opened.future.exception()  # marks the exception as retrieved: no warning if the agent never awaits the call


_KINDS = {"not_encodable": ResultNotEncodable, "over_budget": BudgetExceeded}


def _failed(callee: Any, number: int, failure: Failure, attempts: int) -> ToolFailed:
    tool = callee.name
    if failure.type == "NotApproved":
        return NotApproved(tool, number, outcome=failure.kind, by=None, note=None, message=failure.message)
    kind = _KINDS.get(failure.kind, ToolFailed)
    what = "model" if getattr(callee, "events", None) is OF_MODEL else "tool"
    return kind(tool, number, kind=failure.kind, type=failure.type, message=failure.message, attempts=attempts, what=what)
