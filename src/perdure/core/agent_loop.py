"""The deterministic event loop: asyncio without I/O.

Tasks, futures, locks, queues, gather, TaskGroup and timeout work as usual, because they only need call_soon, call_at
and a clock. The caller sets the clock to the recorded time of the completion that woke the agent. Timers have numbers,
and the caller fires them. Methods that would use a socket, a thread or a process raise NotAllowedInAgent.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import logging
import math
import sys
from asyncio import events as asyncio_events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from types import FrameType
from typing import Any, NoReturn

from perdure.core.compat import forgo_warning, set_current_task, task_to_leave
from perdure.errors import InvalidInput, NotAllowedInAgent, PerdureError

log = logging.getLogger("perdure.agent")
LATEST_S = 253_402_300_799.0  # the end of the year 9999


# What a machine has of an earlier life: nothing, for most machines. They share this dict, which is never written, so that
# the garbage collector has fewer objects of each run to walk.
NO_LIFE: dict[Any, Any] = {}


class DoesNotRest(PerdureError):
    """The agent ran `max_steps` steps without waiting for anything."""


class Interrupted(PerdureError):
    """The agent's own code raised a KeyboardInterrupt, which cut the activation short."""


class AgentTask(asyncio.Task[Any]):
    """A task whose hash is its number. So sets of tasks (asyncio.wait, TaskGroup) have the same order on replay."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], loop: AgentLoop, name: str, context: Context | None) -> None:
        # asyncio keeps the tasks of all loops in one set. If only the numbers were the hashes, task 1 of every run
        # would collide in that set. So during __init__ the hash includes the loop's id. The low bits of this hash,
        # which decide the order of a set, are still the low bits of the number.
        self.number = number + (id(loop) << 12)
        super().__init__(coro, loop=loop, name=name, context=context)
        self.number = number
        forgo_warning(self)  # a parked run is closed while its tasks are pending, so a warning would be wrong

    def __hash__(self) -> int:
        return self.number


class AgentFuture(asyncio.Future[Any]):
    """A future whose hash is its number, for the same reason as in AgentTask."""

    def __init__(self, number: int, loop: AgentLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class Timer(asyncio.TimerHandle):
    """A timer with a number. The journal names the timer by this number."""

    __slots__ = ("cause", "delay_us", "number", "task")
    cause: int  # the seq of the event that had woken the agent when the agent set the timer
    number: int
    task: asyncio.Task[Any] | None  # the task that set the timer
    delay_us: int  # how long the task wanted to wait


class AgentLoop(asyncio.AbstractEventLoop):
    """Runs callbacks until no callback is ready. The loop never waits, and it is deterministic."""

    def __init__(self, owner: Any, max_steps: int, is_interrupt: Callable[[BaseException], bool] = lambda _: False) -> None:
        self.owner = owner
        self.is_interrupt = is_interrupt
        self.tasks: dict[int, AgentTask] = {}  # tasks that are not done, by number
        # Coroutine → task. `_start_in_order` has started these tasks; asyncio.as_completed has not asked for them.
        self._early: dict[Coroutine[Any, Any, Any], AgentTask] = {}
        # Async generators that the garbage collector found. The time at which the collector finds a generator is not
        # deterministic. If the generator were closed at that time, as asyncio does, the calls of a run would depend on
        # the collector. So these generators are closed together with the machine.
        self.strays: list[AsyncGenerator[Any, Any]] = []
        self.timers: dict[int, Timer] = {}  # pending timers, by number
        # A heap of (when, number). A cancelled timer stays in the heap until it is at the top.
        self._upcoming: list[tuple[float, int]] = []
        # (name of a task, delay in µs) → when timers of the life before are due: see Machine.begin_life.
        self.inherited: dict[tuple[str, int], deque[float]] = NO_LIFE
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._max_steps = max_steps
        self._task_count = 0
        self._future_count = 0
        self.timers_set = 0
        self._running = False
        self._hooked = False  # `hooked` has set the hooks of async generators for a whole replay
        self.closing = False  # the machine is being closed: do not report unhandled errors any more
        self._exception_handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    # -- driven from outside ------------------------------------------------------------------------------------------
    def advance(self, now_s: float) -> None:
        """Set the clock. This clock never goes back, even if the wall clock was set back."""
        if now_s > self._now_s:
            self._now_s = now_s

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Set the hooks of async generators once for many activations.

        Between the activations only code of perdure runs, and that code creates no async generators.
        """
        hooks = sys.get_asyncgen_hooks()
        self._hooked = True
        try:
            sys.set_asyncgen_hooks(None, self._close_stray)
            yield
        finally:
            self._hooked = False
            sys.set_asyncgen_hooks(*hooks)

    def run_until_quiet(self) -> None:
        """Run all callbacks until no callback is ready. Raises DoesNotRest after max_steps callbacks."""
        outer = asyncio_events._get_running_loop()
        outer_task = task_to_leave(outer)
        hooks = None if self._hooked else sys.get_asyncgen_hooks()
        ready = self._ready
        steps = 0
        # An OS signal can raise an exception after every call of a function. So each change is made inside a `try`
        # block, and its `finally` block undoes the change. Then the exception goes to the outer loop as if no agent
        # had run.
        try:
            if outer_task is not None:
                set_current_task(outer, None)
            asyncio_events._set_running_loop(self)
            if hooks is not None:
                sys.set_asyncgen_hooks(None, self._close_stray)
            self._running = True
            while ready:
                handle = ready.popleft()
                steps += 1
                if steps > self._max_steps:
                    raise DoesNotRest(
                        f"the agent took {self._max_steps:,} steps without waiting for anything: is there a loop that only yields?"
                    )
                if not handle._cancelled:
                    try:
                        handle._run()
                    except (KeyboardInterrupt, SystemExit) as error:
                        if self.is_interrupt(error):
                            raise  # an OS signal raised this exception: it is for the process, not for the agent
                        if isinstance(error, KeyboardInterrupt):
                            raise Interrupted("KeyboardInterrupt was raised inside the agent; nothing more of it was run") from None
                        # sys.exit() in an agent ends only that task, with SystemExit as its exception.
        finally:
            self._running = False
            try:
                if hooks is not None:
                    sys.set_asyncgen_hooks(*hooks)
            finally:
                try:
                    asyncio_events._set_running_loop(outer)
                finally:
                    if outer_task is not None:
                        set_current_task(outer, outer_task)

    def go_on(self) -> None:
        """If the agent is handling the exception of an OS signal right now, raise that exception again.

        This is called before anything is recorded. A signal may make code in an `except` or `finally` block run. That
        code must record nothing, because a replay would not run it.
        """
        error = sys.exc_info()[1]
        while error is not None:
            if self.is_interrupt(error):
                raise error
            error = error.__context__

    def empty(self) -> bool:
        """Drop all tasks, timers and callbacks that are left. Returns False if nothing was left."""
        left = bool(self.tasks or self.timers or self._ready or self._early or self.strays or self._exception_handler)
        self._exception_handler = None
        for held in (self.tasks, self.timers, self._ready, self._early, self.strays):
            held.clear()
        return left

    def fire(self, number: int) -> bool:
        """Fire a timer. Returns False if no timer with this number is pending."""
        timer = self.timers.pop(number, None)
        if timer is None:
            return False
        self._ready.append(timer)
        return True

    def next_timer(self) -> tuple[float, int] | None:
        """(when, number) of the timer that is due next, or None."""
        upcoming = self._upcoming
        while upcoming and upcoming[0][1] not in self.timers:
            heapq.heappop(upcoming)
        return upcoming[0] if upcoming else None

    # -- the interface of an asyncio loop -------------------------------------------------------------------------------
    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if math.isnan(when) or when > LATEST_S:
            raise InvalidInput(f"a timer at {when!r} s lies beyond the year 9999; to wait for ever, await an asyncio.Event or a call")
        self.go_on()
        when = max(when, 0.0)  # -inf means the same as any other time in the past
        self.timers_set += 1
        task, delay_us = asyncio.current_task(self), round((when - self._now_s) * 1e6)
        if self.inherited and task is not None and (due := self.inherited.get((task.get_name(), delay_us))):
            when = due.popleft()
        timer = Timer(when, callback, args, self, context)
        timer.number, timer.task, timer.delay_us = self.timers_set, task, delay_us
        timer.cause = self.owner.cause
        timer._scheduled = True  # type: ignore[attr-defined]
        self.timers[timer.number] = timer
        heapq.heappush(self._upcoming, (when, timer.number))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        assert isinstance(handle, Timer)
        self.timers.pop(handle.number, None)

    def create_future(self) -> asyncio.Future[Any]:
        self._future_count += 1
        return AgentFuture(self._future_count, self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: object = None, context: Context | None = None, **_: Any
    ) -> AgentTask:
        given = _given_to_as_completed()
        if given is not None and coro not in self._early:
            self._start_in_order(coro, given)
        return self._early.pop(coro, None) or self._new_task(coro, name, context)

    def _start_in_order(self, coro: Coroutine[Any, Any, Any], given: Iterable[Any]) -> None:
        """Start the tasks of asyncio.as_completed in the order of its argument.

        asyncio.as_completed itself would start these tasks in the order of a set.
        """
        if not isinstance(given, (set, frozenset)) and iter(given) is not given:
            for one in given:
                if asyncio.iscoroutine(one) and one not in self._early:
                    self._early[one] = self._new_task(one, None, None)
        if coro not in self._early:
            raise NotAllowedInAgent("asyncio.as_completed starts the items of a set or an iterator in a random order; give it a list")

    def start(self, main: Coroutine[Any, Any, Any]) -> AgentTask:
        """Start the agent's main task. When the task is done, the caller removes it from `tasks`."""
        return self._add_task(main, "agent", None)

    def _new_task(self, coro: Coroutine[Any, Any, Any], name: object, context: Context | None) -> AgentTask:
        task = self._add_task(coro, name, context)
        task.add_done_callback(self._forget)
        return task

    def _add_task(self, coro: Coroutine[Any, Any, Any], name: object, context: Context | None) -> AgentTask:
        self._task_count += 1
        number = self._task_count
        task = self.tasks[number] = AgentTask(number, coro, self, str(name) if name is not None else f"Task-{number}", context)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        assert isinstance(task, AgentTask)
        self.tasks.pop(task.number, None)

    def _close_stray(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close an async generator that is no longer iterated, as asyncio does.

        This is done only if the agent's own code dropped the generator. If the garbage collector found the generator,
        it is kept in `strays`.
        """
        if self._running and not _collecting:
            self.call_soon(lambda: self.create_task(generator.aclose()))
        else:
            self.strays.append(generator)

    def get_task_factory(self) -> None:
        return None

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    # Always False, because debug mode reads the real clock. The built-in `bool` is used because asyncio calls
    # get_debug for every future and every handle: a Python function would be slower than the rest of that work.
    get_debug = bool

    def set_debug(self, enabled: bool) -> None:
        """Does nothing: an agent has no debug mode."""

    def get_exception_handler(self) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        return self._exception_handler

    def set_exception_handler(self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None) -> None:
        self._exception_handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.closing:
            return
        if self._exception_handler is not None:
            self._exception_handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        log.warning("%s", context.get("message", "unhandled error in an agent"), exc_info=context.get("exception"))


_as_completed = getattr(asyncio.tasks, "_AsCompletedIterator", None)  # a class from 3.13 on
_AS_COMPLETED = (asyncio.as_completed if _as_completed is None else _as_completed.__init__).__code__
_GIVEN = _AS_COMPLETED.co_varnames[0 if _as_completed is None else 1]


def _given_to_as_completed() -> Any:
    """The argument of asyncio.as_completed, if as_completed is creating a task right now. If not, None."""
    frame: FrameType | None = sys._getframe(2)
    if frame is None or not frame.f_code.co_name.endswith("ensure_future"):
        return None
    for _ in range(4):
        if frame is None:
            return None
        if frame.f_code is _AS_COMPLETED:
            return frame.f_locals[_GIVEN]
        frame = frame.f_back
    return None


_collecting = False  # is the garbage collector running, in any thread?


def _note_collection(phase: str, _: dict[str, int]) -> None:
    global _collecting
    _collecting = phase == "start"


gc.callbacks.append(_note_collection)


def _refuse(name: str, what: str) -> Callable[..., NoReturn]:
    def refused(self: AgentLoop, *_: Any, **__: Any) -> NoReturn:
        raise NotAllowedInAgent(
            f"an agent may not {what} (loop.{name}): agents are replayed, so whatever touches the world belongs in a tool"
        )

    refused.__name__ = name
    return refused


_REFUSED = {
    "use a thread or an executor": "run_in_executor set_default_executor call_soon_threadsafe shutdown_default_executor",
    "use the network": (
        "getaddrinfo getnameinfo create_connection create_server create_unix_connection create_unix_server create_datagram_endpoint "
        "connect_accepted_socket start_tls sendfile sock_accept sock_connect sock_recv sock_recv_into sock_recvfrom sock_recvfrom_into "
        "sock_sendall sock_sendfile sock_sendto add_reader remove_reader add_writer remove_writer"
    ),
    "use processes, pipes or signals": (
        "subprocess_exec subprocess_shell connect_read_pipe connect_write_pipe add_signal_handler remove_signal_handler"
    ),
    "run or stop the loop by itself": "run_forever run_until_complete stop close shutdown_asyncgens set_task_factory",
}
for _what, _names in _REFUSED.items():
    for _name in _names.split():
        setattr(AgentLoop, _name, _refuse(_name, _what))
AgentLoop.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
