"""One attempt at a call: begin the attempt, limit its time, stop it, and report exactly one answer.

An attempt runs in one of three places. An async tool is a task of the loop, a sync tool runs in a thread, and a tool
with `isolate=True` runs in a process of its own, for which a thread waits. In every place, the attempt ends exactly
once, with one of the four answers in core/outcomes.py. It ends at the latest after its timeout (or a cancel) plus the
grace period.

The first step of an async tool runs inside `start`: a tool that never waits has its answer in the same iteration of
the loop. From its first step on, the tool is inside a real task with a context of its own (see `core.compat.begun`).

The tool is any object with the attributes of a `Tool` that this module uses: also a model call, or a tool of an MCP
server. Reconcile hooks, and tools inside a transaction, are performed here too.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from msgspec import structs

from perdure.core import codec
from perdure.core.compat import begun
from perdure.core.events import Failure
from perdure.core.failures import describe
from perdure.core.outcomes import Abandoned, Outcome, Performed, Raised, Returned, Unrecordable
from perdure.core.redaction import Scrubber, texts_of
from perdure.engine.local.isolation import Isolated
from perdure.engine.local.task_cleanup import cancel
from perdure.engine.threads import Job, Threads
from perdure.errors import InvalidInput, NotSent
from perdure.interrupts import is_interrupt
from perdure.tool import Call, Hook, Tool
from perdure.tool.artifact import in_call
from perdure.tool.call import recordable
from perdure.tool.secret import resolve

RECONCILE_TIMEOUT_S = 60.0

_inside: ContextVar[bool] = ContextVar("perdure_inside_call", default=False)

log = logging.getLogger("perdure.worker")


class Attempt:
    """One attempt at a call. Use this class on the loop's thread.

    `start` begins the attempt and reports its answer once; `cancel` asks the attempt to stop.
    """

    __slots__ = (
        "_answer",
        "_args",
        "_beats",
        "_begun",
        "_call",
        "_done",
        "_given",
        "_grace_s",
        "_interrupted",
        "_is_too_late",
        "_job",
        "_label",
        "_process",
        "_resolving",
        "_stopped",
        "_task",
        "_threads",
        "_timer",
        "_tool",
    )

    def __init__(
        self,
        tool: Any,
        args: bytes,
        call: Call,
        *,
        threads: Threads,
        grace_s: float,
        is_too_late: Callable[[], bool] | None = None,
        label: str | None = None,
    ) -> None:
        """`is_too_late` is called when a thread is free. If it returns True, the attempt does not begin.

        `label` is the name of the attempt in messages.
        """
        self._tool = tool
        self._given = args
        self._call = call
        self._threads = threads
        self._grace_s = grace_s
        self._is_too_late = is_too_late
        self._label = label
        self._done: Callable[[Performed], None] | None = None  # set from `start` until the answer is reported
        self._answer: Returned | Unrecordable | Raised | None = None  # how an async tool's own code ended
        self._begun = False  # the code of an async tool has begun to run
        self._interrupted = False  # a signal of the operating system (Ctrl-C) interrupted an async tool
        self._stopped: Literal["timeout", "silent", "cancelled"] | None = None
        self._task: asyncio.Task[None] | None = None  # the task of an async tool that did not end in its first step
        self._job: Job | None = None  # the job of a sync tool, or of an isolated tool
        self._process: Isolated | None = None
        self._resolving: asyncio.Task[None] | None = None  # resolves the secrets, before anything else begins
        self._timer: asyncio.TimerHandle | None = None  # the timer of the timeout, and then of the grace period
        self._beats: asyncio.TimerHandle | None = None  # the timer of the heartbeat timeout

    # -- from outside -------------------------------------------------------------------------------------------------
    def start(self, done: Callable[[Performed], None]) -> None:
        """Begin the attempt. `done` is called exactly once, on the loop, possibly before this method returns."""
        self._done = done
        if self._stopped is not None:
            self._finish(self._never_began())
            return
        try:
            self._args, names = clear(self._tool, self._given, self._call), secrets_in(self._tool, self._given)
        except InvalidInput as error:
            asyncio.get_running_loop().call_soon(self._finish, self._not_started(error))
            return
        if not names:
            self._begin(done)
            return
        self._resolving = asyncio.get_running_loop().create_task(self._resolve(names), name=f"secrets of {self._tool.name}")
        # The attempt begins in this callback: a plain callback, and not a task, as `core.compat.begun` needs it.
        self._resolving.add_done_callback(partial(self._resolved, done))

    async def _resolve(self, names: frozenset[str]) -> None:
        self._call.scrubber = await resolve(names, self._call.secrets, redacted_texts(self._tool))
        # A resolver may take long, like the wait for a thread.
        if self._is_too_late is not None and await asyncio.to_thread(self._is_too_late):
            raise NotSent("its secrets were resolved while its worker sent no heartbeat for longer than its lease, and it was not begun")

    def _resolved(self, done: Callable[[Performed], None], resolving: asyncio.Task[None]) -> None:
        self._resolving = None
        error = None if resolving.cancelled() else resolving.exception()
        if self._stopped is not None or resolving.cancelled():
            self._finish(self._never_began())
        elif error is not None:
            self._finish(self._not_started(error))
        else:
            self._begin(done)

    def _begin(self, done: Callable[[Performed], None]) -> None:
        tool = self._tool
        timeout_s = tool.timeout_s
        loop = asyncio.get_running_loop()
        try:
            if not tool.is_async or tool.isolate:
                self._start_in_thread()
                return
            kwargs = _arguments(tool, self._args, self._call)
            begun_s = 0.0 if timeout_s is None else loop.time()
            if tool.heartbeat_timeout_s is not None:
                self._listen(loop)
            task = begun(loop, self._run(kwargs), tool.name)
        except BaseException as error:
            loop.call_soon(self._finish, self._not_started(error))
            return
        answer = self._answer
        if answer is not None and not self._interrupted:
            self._done = None
            self._stop_listening()
            done(answer if self._stopped is None else self._stopped_answer(answer))
            return
        # Do not use a TaskGroup: a tool that does not stop must not block the run or the worker.
        self._task = task
        task.add_done_callback(self._task_ended)
        if self._stopped is not None:
            self._interrupt(loop)  # `cancel` was called by the tool itself, in its first step
        elif timeout_s is not None:
            self._timer = loop.call_at(begun_s + timeout_s, self._stop, "timeout")

    def cancel(self) -> None:
        """Ask the attempt to stop. An answer within the grace period still counts: it says what really happened."""
        self._stop("cancelled")

    async def run(self) -> Performed:
        """Start the attempt and wait for its answer.

        This always returns an answer: a cancel of the waiting task does the same as `cancel`, and the wait continues.
        """
        answered: asyncio.Future[Performed] = asyncio.get_running_loop().create_future()
        self.start(answered.set_result)
        while not answered.done():
            try:
                await asyncio.shield(answered)
            except asyncio.CancelledError:
                # If this method ended now, an effect that is under way would be lost: the journal would not show it.
                self.cancel()
        return answered.result()

    # -- an async tool: a task ----------------------------------------------------------------------------------------
    async def _run(self, kwargs: dict[str, Any]) -> None:
        """The task of an async tool. It raises no exception, and puts the answer into `_answer`.

        The answer is not the task's result, because a tool may cancel its own task and then return. Then the effect
        has happened, but the task counts as cancelled.
        """
        self._begun = True
        _inside.set(True)
        in_call.set(self._call)
        if self._call.on_enter is not None:
            self._call.on_enter(self._call)  # in the context of this task only
        tool = self._tool
        try:
            self._answer = recordable(tool, await tool.fn(**kwargs), self._call)
        except BaseException as error:  # catch KeyboardInterrupt and SystemExit of a tool too: they must be recorded
            if is_interrupt(error):
                # A signal is meant for the process: a callback raises the interrupt again, to end the loop. It is
                # unknown whether the tool has acted.
                self._interrupted = True
                asyncio.get_running_loop().call_soon(_end_loop, error)
                why = "a signal (Ctrl-C) interrupted it"
                self._answer = Raised(Failure(kind="process_died", type=type(error).__name__, message=why))
            else:
                self._answer = Raised(_describe(error, self._call))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if self._answer is not None:
            self._end(self._answer)
        elif self._begun:
            # Ctrl-C arrived in the first lines of `_run`, and has already ended the loop.
            self._end(Raised(Failure(kind="process_died", type="KeyboardInterrupt", message="a signal (Ctrl-C) interrupted it")))
        else:
            self._end(self._never_began())  # the task was cancelled before its first step
        if not task.cancelled():
            task.exception()  # mark the exception as read: the loop's owner has it, and asyncio must not log it

    # -- a sync tool, or an isolated tool: a thread -------------------------------------------------------------------
    def _start_in_thread(self) -> None:
        tool = self._tool
        kwargs: dict[str, Any] = {}
        if tool.isolate:
            limit_s = None if tool.timeout_s is None else tool.timeout_s + self._grace_s
            self._process = Isolated(tool, self._args, self._call, limit_s)
        else:
            kwargs = _arguments(tool, self._args, self._call)
        on_begin = None if tool.timeout_s is None and tool.heartbeat_timeout_s is None else self._begin_to_count
        self._job = self._threads.start(partial(self._in_thread, kwargs), self._end, on_begin)

    def _in_thread(self, kwargs: dict[str, Any]) -> Returned | Unrecordable | Raised:
        """The work of the thread. It raises no exception."""
        # If this process slept for longer than its lease while the call waited for a free thread, another worker may
        # have taken the run over, and made the call.
        if self._is_too_late is not None and self._is_too_late():
            why = "it waited for a thread while its worker sent no heartbeat for longer than its lease, and was not begun"
            return Raised(Failure(kind="not_sent", type="NotSent", message=why))
        if self._process is not None:
            return self._process.run()
        in_call.set(self._call)  # this sets the variable in the context of this job only
        if self._call.on_enter is not None:
            self._call.on_enter(self._call)
        try:
            value = self._tool.fn(**kwargs)
        except BaseException as error:  # an error of the tool makes only its call fail, even SystemExit
            return Raised(_describe(error, self._call))
        return recordable(self._tool, value, self._call)

    def _begin_to_count(self) -> None:
        """Start the timeouts, because a thread has begun the attempt. The wait for a free thread does not count."""
        if self._done is None or self._stopped is not None:
            return
        loop = asyncio.get_running_loop()
        if self._tool.timeout_s is not None:
            self._timer = loop.call_later(self._tool.timeout_s, self._stop, "timeout")
        if self._tool.heartbeat_timeout_s is not None:
            self._listen(loop)

    # -- the heartbeat timeout ----------------------------------------------------------------------------------------
    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to count the time without a heartbeat."""
        self._call.clock = loop.time
        self._call.heard_s = max(self._call.heard_s, loop.time())
        self._beats = loop.call_later(self._tool.heartbeat_timeout_s, self._look_for_heartbeat, loop)

    def _look_for_heartbeat(self, loop: asyncio.AbstractEventLoop) -> None:
        # A heartbeat does not restart the timer, because a tool may send thousands of heartbeats in a second. So when
        # the timer ends, a heartbeat may have arrived meanwhile: then wait for the rest of the time.
        left_s = self._call.heard_s + self._tool.heartbeat_timeout_s - loop.time()
        if left_s > 0:
            self._beats = loop.call_later(left_s, self._look_for_heartbeat, loop)
        else:
            self._stop("silent")

    def _stop_listening(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None

    # -- stopping -----------------------------------------------------------------------------------------------------
    def _stop(self, why: Literal["timeout", "silent", "cancelled"]) -> None:
        if self._stopped is not None or self._answer is not None:
            return  # the attempt was told to stop before; or it has ended, and a callback will report the answer
        self._stopped = why
        if self._done is None:
            return  # the attempt has not started, or its answer was already reported
        self._call.ask_to_stop()
        if self._resolving is not None:
            self._resolving.cancel()
        elif self._task is not None or self._job is not None:
            self._interrupt(asyncio.get_running_loop())
        # If there is no task and no job, the tool itself called `cancel` in its first step. `start` reads `_stopped`
        # after that step.

    def _interrupt(self, loop: asyncio.AbstractEventLoop) -> None:
        self._stop_listening()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            cancel(self._task)
        elif self._job is not None and self._threads.withdraw(self._job):
            # Report the answer in a later callback: the caller of `cancel` may be in the middle of a step of the core,
            # and an answer now would enter the core again.
            loop.call_soon(self._finish, self._never_began())
            return
        elif self._process is not None:
            self._process.stop()
        self._timer = loop.call_later(self._grace_s, self._abandon)

    def _abandon(self) -> None:
        if self._job is not None:
            self._threads.abandon(self._job)
        log.warning("%s does not stop; its worker waits no longer, and it may still be running", self._what, extra=self._about)
        self._finish(Abandoned(self._stop_failure("and has not stopped since; it may still be running")))

    # -- the answer ---------------------------------------------------------------------------------------------------
    def _end(self, answer: Returned | Unrecordable | Raised) -> None:
        """Report the answer of a task or thread that has ended."""
        if self._done is None:
            log.warning(
                "%s has ended after its worker stopped waiting; its outcome is dropped: %.200r", self._what, answer, extra=self._about
            )
        else:
            self._finish(answer if self._stopped is None else self._stopped_answer(answer))

    def _finish(self, answer: Performed) -> None:
        done, self._done = self._done, None
        self._stop_listening()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if done is not None:
            done(answer)

    def _stopped_answer(self, answer: Returned | Unrecordable | Raised) -> Performed:
        """The answer of a tool that was told to stop.

        A failure of the kind "error" gets the reason of the stop as its kind: "timeout" or "cancelled".
        """
        assert self._stopped is not None
        if not isinstance(answer, Raised):
            return answer
        failure = answer.failure
        if failure.kind in ("cancelled", "process_died"):
            return Raised(self._stop_failure("and was stopped"))
        kind: Literal["timeout", "cancelled"] = "cancelled" if self._stopped == "cancelled" else "timeout"
        return Raised(structs.replace(failure, kind=kind)) if failure.kind == "error" else answer

    def _not_started(self, error: BaseException) -> Performed:
        """The answer of an attempt whose start raised an exception."""
        # A signal (Ctrl-C) can raise its exception between any two lines, also after the tool has begun.
        if is_interrupt(error):
            raise error  # this ends the process like a crash: the journal has the intent but no result
        if isinstance(error, Exception) and not self._begun:
            # The arguments do not fit the tool any more, or no thread could be started: nothing was sent.
            failure = _describe(error, self._call)
            return Raised(structs.replace(failure, kind="not_sent") if failure.kind == "error" else failure)
        why = f"{self._what} was interrupted while it was being started, and may be running"
        return Abandoned(Failure(kind="process_died", type=type(error).__name__, message=why))

    def _never_began(self) -> Raised:
        return Raised(Failure(kind="not_sent", type="NotSent", message=f"{self._what} was told to stop before it had begun"))

    def _stop_failure(self, after: str) -> Failure:
        if self._stopped == "timeout":
            message = f"{self._what} did not answer within {self._tool.timeout_s:g} s, {after}"
            return Failure(kind="timeout", type="TimeoutError", message=message)
        if self._stopped == "silent":
            message = f"no heartbeat for {self._tool.heartbeat_timeout_s:g} s: {self._what} did not call call.heartbeat, {after}"
            return Failure(kind="timeout", type="HeartbeatTimeout", message=message, lineage=("TimeoutError", "OSError", "Exception"))
        return Failure(kind="cancelled", type="CancelledError", message=f"{self._what} was cancelled {after}")

    @property
    def _about(self) -> dict[str, Any]:
        call = self._call
        about = {"run": call.run_id, "call": call.number, "attempt": call.attempt, "agent": call.agent, "tenant": call.tenant}
        return about if call.span is None else about | {"trace_id": call.span.trace_id, "span_id": call.span.span_id}

    @property
    def _what(self) -> str:
        call = self._call
        return f"{self._label or f'tool {self._tool.name}'} (run {call.run_id}, call {call.number}, attempt {call.attempt})"


def _arguments(tool: Any, args: bytes, call: Call) -> dict[str, Any]:
    """The arguments for the tool's function. Artifacts in them have the rights of this call.

    The call is set in the context first, because the present context may belong to a tool of another run, which has
    started this run in this process.
    """
    token = in_call.set(call)
    try:
        kwargs: dict[str, Any] = tool.with_call(tool.arguments(args), call)
        return kwargs
    finally:
        in_call.reset(token)


def clear(tool: Any, args: bytes, call: Call) -> bytes:
    """The arguments with the values of their redacted fields. The tool's words are recorded without these values."""
    clearing: Callable[[bytes], bytes] | None = getattr(tool, "clear", None)
    if clearing is None:
        return args
    if getattr(tool, "redacted", None) and (texts := redacted_texts(tool)):
        call.scrubber = Scrubber({}, texts)
    return clearing(args)


def redacted_texts(tool: Any) -> dict[str, str]:
    return texts_of(getattr(tool, "redacted", {}))


def secrets_in(tool: Any, args: bytes) -> frozenset[str]:
    """The names of the secrets that an attempt needs. A model call, for example, has none."""
    names: Callable[[bytes], frozenset[str]] | None = getattr(tool, "secrets_in", None)
    return frozenset() if names is None else names(args)


attempt = Attempt  # an alias for callers: attempt(tool, args, call, threads=…, grace_s=…)


def is_inside_call() -> bool:
    """Does the caller run inside an async tool, or was it started by an async tool?"""
    return _inside.get()


# -- reconcile, and tools inside a transaction ------------------------------------------------------------------------
class _Asked:
    """A reconcile hook with the attributes of a tool, so that `Attempt` can perform it. A hook returns an Outcome."""

    isolate = False
    heartbeat_timeout_s = None

    def __init__(self, tool: Tool[..., Any], hook: Hook, call: Call) -> None:
        self.name = f"the reconcile hook of {tool.name}"
        self.timeout_s = tool.timeout_s or RECONCILE_TIMEOUT_S
        self.arguments = tool.arguments
        self.secrets_in = partial(secrets_in, tool)
        self.clear, self.redacted = partial(clear, tool, call=call), getattr(tool, "redacted", {})
        self._tool = tool
        self._call = call
        self.fn, self.is_async, self.with_call = hook.fn, hook.is_async, hook.with_call
        self.outcome: Outcome | None = None

    def encode_result(self, value: Any) -> bytes:
        """Keep the hook's Outcome. The log shows the returned bytes, if the hook ends after the grace period."""
        if isinstance(value, Outcome) and value.kind in ("happened", "not_happened", "in_progress", "unknown"):
            self.outcome = self._without_secrets(value)
        else:
            expected = "it must return Outcome.happened(…), not_happened(), in_progress() or unknown(…)"
            self.outcome = Outcome.unknown(f"{self.name} returned a {type(value).__name__}; {expected}")
            if inspect.iscoroutine(value):
                value.close()
        # As JSON text, like every result: the attempt removes secrets from it.
        return codec.encode(repr(self.outcome))

    def _without_secrets(self, outcome: Outcome) -> Outcome:
        if self._call.scrubber is None:
            return outcome
        why = self._call.scrub(outcome.why)
        if outcome.kind != "happened":
            return structs.replace(outcome, why=why, result=None)
        ended = recordable(self._tool, outcome.result, self._call)
        if isinstance(ended, Returned):
            return structs.replace(outcome, why=why, result=codec.decode(ended.result))
        return Outcome.unknown(f"it says that the call happened, but its result cannot be recorded: {ended.failure.message}")


async def reconcile(tool: Tool[..., Any], args: bytes, call: Call, *, threads: Threads, grace_s: float) -> Outcome:
    """Ask the tool's reconcile hook what became of the call. If the hook fails, the outcome is `unknown`."""
    assert tool.reconciler is not None, tool
    asked = _Asked(tool, tool.reconciler, call)
    answer = await Attempt(asked, args, call, threads=threads, grace_s=grace_s, label=asked.name).run()
    if isinstance(answer, Returned):
        assert asked.outcome is not None, asked.name
        return asked.outcome
    return Outcome.unknown(f"{asked.name} failed: {answer.failure.type}: {answer.failure.message}")


def perform_in_transaction(tool: Tool[..., Any], args: bytes, call: Call) -> bytes:
    """Run the tool on this thread, inside the journal's transaction. If the tool raises, the caller must roll back."""
    kwargs = _arguments(tool, clear(tool, args, call) if call.scrubber is None else tool.clear(args), call)
    token = in_call.set(call)
    leave = None if call.on_enter is None else call.on_enter(call)
    try:
        value = _stepped(tool, tool.fn(**kwargs)) if tool.is_async else tool.fn(**kwargs)
    except StopIteration as error:
        # A future or a coroutine cannot raise StopIteration, so raise another exception.
        raise RuntimeError(f"tool {tool.name} raised StopIteration") from error
    finally:
        if leave is not None:
            leave()
        in_call.reset(token)
    encoded: bytes = tool.encode_result(value)
    return encoded if call.scrubber is None else call.scrubber.json(encoded)


def _stepped(tool: Tool[..., Any], coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise InvalidInput(
        f"tool {tool.name}: a transaction tool may only use call.connection; it awaited something else, and nothing was written"
    )


def _end_loop(error: BaseException) -> None:
    raise error


def _describe(error: BaseException, call: Call) -> Failure:
    return describe(error, datetime.now(UTC), call.scrub)
