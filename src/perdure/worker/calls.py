"""The calls of one run that something is being done about: attempts in flight, hooks being asked, waits for a time.

It performs and it judges; it records nothing. What came of an attempt reaches the drive as an `Ended`, in order of arrival, and
`outcome` says which events that makes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol

from msgspec import Struct, structs

from perdure.core import codec
from perdure.core.attempts import Abandoned, Performed, Raised, Returned, Unrecordable
from perdure.core.chain import Sealed
from perdure.core.decide import (
    GiveUp,
    Park,
    Patience,
    Perform,
    Reconcile,
    Verdict,
    Wait,
    about_unknown,
    decide,
    quiet_after_s,
    settle_s,
)
from perdure.core.events import (
    OF_MODEL,
    AnyBody,
    Failure,
    RetryScheduled,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallResolved,
    Usage,
)
from perdure.core.failures import IN_DOUBT_KINDS, clean, describe
from perdure.core.machine import CallTool
from perdure.core.retry import DEFAULT, Again, Doubt, after_failure
from perdure.core.retry import GiveUp as GiveUpRetrying
from perdure.core.state import LOST, NOT_STARTED, CallState, RunState
from perdure.errors import NotEncodable, NotReady
from perdure.settings import Settings
from perdure.store.api import Append
from perdure.tool import Call, Outcome
from perdure.tool.call import Closer
from perdure.worker.attempts import Attempt, attempt, perform_in_transaction, reconcile
from perdure.worker.clock import Clock
from perdure.worker.commits import ToolRaised
from perdure.worker.ending import cancel
from perdure.worker.pen import Pen
from perdure.worker.threads import Threads

log = logging.getLogger("perdure.worker")


def is_not_ready(failure: Failure) -> bool:
    """Whether this process could not even begin, for a reason that somebody has to see to."""
    return failure.kind == "not_sent" and failure.type == NotReady.__name__


# No answer came: the service may have done its work, and may want its money. A service that answered with an error did not.
_UNANSWERED = IN_DOUBT_KINDS - {"server_error"}


def _used(call: CallState, said: Usage | None) -> Usage | None:
    """What an attempt that happened, or may have, is charged: what it said, or its estimate if it said nothing."""
    return call.estimate if said is None else said


def lost_answer(why: str, tool: Any) -> Failure:
    """The failure of an attempt that is simply made again, and whose answer nobody heard."""
    if tool.events is OF_MODEL:
        return Failure("process_died", LOST, f"{why} while the model was asked; an answer that was on its way is lost")
    return Failure("process_died", LOST, f"{why} inside it; an answer that was on its way is lost")


Performing = Callable[[Any], Any]  # from a tool (or a question to a model) to what is performed in its place


def as_it_is(tool: Any) -> Any:
    return tool


def _may_still_run(call: CallState) -> str:
    if call.loose:
        return "an attempt that did not stop may still be running"
    return "the worker that was lost may still be alive, and the tool has no timeout= that would have ended the attempt"


class Ended(Struct, frozen=True, gc=False):
    """An attempt, or a reconcile hook, has come to an end."""

    number: int
    attempt: int
    result: Performed | Outcome
    usage: Usage | None = None


class Driving(Protocol):
    """What is needed of the drive."""

    def arrive(self, ended: Ended) -> None: ...


class Calls:
    """What is under way for the calls of one run."""

    def __init__(
        self,
        drive: Driving,
        state: RunState,
        pen: Pen,
        settings: Settings,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        threads: Threads,
        closers: dict[Hashable, Closer],
        performing: Performing = as_it_is,
    ) -> None:
        self._state = state
        self._settings = settings
        self._patience = Patience.of(settings)
        self._clock = clock
        self._loop = loop
        self._threads = threads
        self._drive = drive
        self._pen = pen
        self._closers = closers
        self._performing = performing
        self._attempts: dict[int, Attempt] = {}
        self._asking: dict[int, asyncio.Task[Outcome]] = {}
        self.waits: dict[int, int] = {}  # calls that go on at a time: number → µs
        self._claimed_s = loop.time()
        self._ended_s: dict[int, float] = {}  # when the last attempt of a call ended here without a result: by the loop's clock

    # -- attempts -----------------------------------------------------------------------------------------------------
    def start(self, call: CallState, asked: CallTool, is_too_late: Callable[[], bool] | None = None) -> None:
        """Begin the effect. Its intent is durable (or need not be). `is_too_late`: asked once more, when a thread is free for it."""
        assert call.phase == "started" and not self.busy(call.number), (call.number, call.phase)
        told = self._told(call, asked.tool.timeout_s)
        tool, grace_s = self._performing(asked.tool), self._settings.cancel_grace_s
        running = attempt(tool, asked.args, told, threads=self._threads, grace_s=grace_s, is_too_late=is_too_late)
        self._attempts[call.number] = running
        self._ended_s.pop(call.number, None)
        starting = True

        def ended(performed: Performed) -> None:
            if starting:  # the drive is in the middle of a turn
                self._loop.call_soon(self._ended, told, performed)
            else:
                self._ended(told, performed)

        running.start(ended)
        starting = False

    def _ended(self, told: Call, performed: Performed) -> None:
        if self._attempts.pop(told.number, None) is not None:
            if isinstance(performed, Raised | Abandoned):
                self._ended_s[told.number] = self._loop.time()
            self._drive.arrive(Ended(told.number, told.attempt, performed, told.usage))

    def _told(self, call: CallState, timeout_s: float | None, connection: Any = None) -> Call:
        created = self._state.created
        assert created is not None
        deadline = None if timeout_s is None else datetime.now(UTC) + timedelta(seconds=timeout_s)
        return Call(
            key=call.recorded_key or (lambda: call.key),
            run_id=created.run_id,
            number=call.number,
            attempt=call.attempt,
            deadline=deadline,
            tenant=created.tenant,
            actor=created.actor,
            connection=connection,
            closers=self._closers,
        )

    def busy(self, number: int) -> bool:
        return number in self._attempts or number in self._asking

    def idle(self) -> bool:
        return not self._attempts and not self._asking

    def unwanted(self, call: CallState, *, cancel_effects: bool) -> None:
        """Nobody waits for the call any more. An effect that is under way is left to end, unless the whole run is cancelled."""
        running = self._attempts.get(call.number)
        if running is not None and (cancel_effects or call.effect in ("read", "idempotent")):
            running.cancel()

    def stop_all(self) -> None:
        """Ask every attempt in flight to stop; each still ends with an `Ended`."""
        for running in list(self._attempts.values()):
            running.cancel()
        self._drop_asking()

    def drop_all(self) -> None:
        """Stop everything and report nothing: the run is not ours any more."""
        attempts, self._attempts = self._attempts, {}
        for running in attempts.values():
            running.cancel()
        self._drop_asking()
        self.waits.clear()

    def _drop_asking(self) -> None:
        asking, self._asking = self._asking, {}
        for task in asking.values():
            cancel(task)

    # -- waits --------------------------------------------------------------------------------------------------------
    def due(self, now: int) -> list[int]:
        """The calls whose wait is over; they are no longer waited for."""
        if not self.waits:
            return []
        over = sorted(number for number, at in self.waits.items() if at <= now)
        for number in over:
            del self.waits[number]
        return over

    def next_due(self) -> int | None:
        return min(self.waits.values(), default=None) if self.waits else None

    def forget(self, number: int) -> None:
        """Whatever was planned for this call is off: a person, or the agent, has settled it."""
        self.waits.pop(number, None)
        task = self._asking.pop(number, None)
        if task is not None:
            task.cancel()

    # -- verdicts -----------------------------------------------------------------------------------------------------
    def consider(self, call: CallState, asked: CallTool, *, wanted: bool) -> Perform | GiveUp | Park | None:
        """The verdict on an open call that nobody is performing; None when it waits or its hook is being asked."""
        verdict: Verdict = decide(
            call,
            has_reconcile=asked.tool.reconciler is not None,
            key_window_s=asked.tool.key_window_s,
            max_asks=self._settings.reconcile_asks,
            wanted=wanted,
            now=self._clock.now(),
        )
        match verdict:
            case Wait(until):
                self.waits[call.number] = until
                return None
            case Reconcile():
                self._ask(call, asked)
                return None
            case Perform() if not wanted and self._state.cancel is not None:
                # The key would keep it from happening twice, but after a cancel it must not happen for the first time either.
                return Park("it may or may not have happened, and the run is being cancelled")
            case _:
                return verdict

    def _ask(self, call: CallState, asked: CallTool) -> None:
        number, which = call.number, call.attempt
        quiet_at_s = self._quiet_at_s(call)

        async def ask() -> Outcome:
            told, tool = self._told(call, None), self._performing(asked.tool)
            ask_hook = partial(reconcile, tool, asked.args, told, threads=self._threads, grace_s=self._settings.cancel_grace_s)
            await asyncio.sleep(min(self.settle_s(call), self._settings.reconcile_margin_s))
            asked_s = self._loop.time()
            outcome = await ask_hook()
            if outcome.kind == "happened" or outcome.final or quiet_at_s is None or asked_s >= quiet_at_s:
                return outcome
            # The old attempt may still be on its way: ask again when it can be no longer.
            left_s = quiet_at_s - self._loop.time()
            words = "run %s: the hook of %s (call %d) found nothing; its request may still arrive, so the hook is asked again in %.0f s"
            log.info(words, told.run_id, call.tool, number, left_s)
            await asyncio.sleep(left_s)
            return await ask_hook()

        def done(task: asyncio.Task[Outcome]) -> None:
            if self._asking.get(number) is not task:
                return  # somebody has settled the doubt meanwhile
            del self._asking[number]
            if not task.cancelled():
                error = task.exception()
                self._drive.arrive(Ended(number, which, task.result() if error is None else Outcome.unknown(f"asking failed: {error}")))

        task = self._loop.create_task(ask(), name=f"reconcile {call.tool}")
        self._asking[number] = task
        task.add_done_callback(done)

    def settle_s(self, call: CallState) -> float:
        return settle_s(call, self._patience)

    def _quiet_at_s(self, call: CallState) -> float | None:
        """From when on "not found" is believed about the call, by our own monotonic clock; None: never.

        What this drive has not seen end is counted from its claim: wall clocks may have been set since then.
        """
        after_s = quiet_after_s(call, self._patience)
        return None if after_s is None else self._ended_s.get(call.number, self._claimed_s) + after_s

    # -- what came of it ----------------------------------------------------------------------------------------------
    def outcome(self, call: CallState, ended: Ended, asked: CallTool, *, wanted: bool, closing: bool) -> list[AnyBody]:
        """The events that an end makes, in order. When the run is being given up nothing is planned any more."""
        match ended.result:
            case Returned(result):
                return [asked.tool.events.completed(result=self._pen.pack(result), attempt=ended.attempt, usage=_used(call, ended.usage))]
            case Unrecordable(failure):
                return [asked.tool.events.completed(failure=failure, attempt=ended.attempt, usage=_used(call, ended.usage))]
            case Raised(failure):
                return self._failed(call, failure, ended.usage, asked, wanted, closing, loose=False)
            case Abandoned(failure):
                return self._failed(call, failure, ended.usage, asked, wanted, closing, loose=True)
            case Outcome():
                return self._reconciled(call, ended.result, asked, wanted)

    def _failed(
        self, call: CallState, failure: Failure, usage: Usage | None, asked: CallTool, wanted: bool, closing: bool, *, loose: bool
    ) -> list[AnyBody]:
        tool = asked.tool
        if is_not_ready(failure) and wanted and not call.doubtful:
            return [tool.events.failed(structs.replace(failure, type=NOT_STARTED), attempt=call.attempt, usage=usage)]
        if closing and wanted and failure.kind == "cancelled":
            # A drain ended it, not the agent: the next worker goes on by effect class. What may have happened is said so.
            if call.effect in ("once", "keyed"):
                return [ToolCallInDoubt(call.attempt, "its worker was stopped inside it", failure, loose, usage)]
            usage = _used(call, usage)
            if tool.events is not OF_MODEL and usage is None:
                return []
            return [tool.events.failed(lost_answer("its worker was stopped", tool), attempt=call.attempt, usage=usage)]
        verdict = after_failure(
            failure,
            effect=call.effect,
            attempt=call.failed + 1,
            retry=tool.retry,
            key=call.key,
            has_reconcile=tool.reconciler is not None,
            wanted=wanted,
            doubtful=call.doubtful,
        )
        doubt = ToolCallInDoubt(call.attempt, f"{failure.type}: {failure.message}"[:500], failure, loose, usage)
        if call.effect in ("read", "idempotent") and failure.kind in _UNANSWERED:
            usage = _used(call, usage)
        match verdict:
            case Again(delay_s, in_doubt):
                at = self._clock.now() + round(delay_s * 1e6)
                return [
                    doubt if in_doubt else tool.events.failed(failure, attempt=call.attempt, usage=usage),
                    RetryScheduled(attempt=call.attempt + 1, at=at),
                ]
            case Doubt():
                return [doubt]
            case GiveUpRetrying():
                self._ended_s.pop(call.number, None)
                return [tool.events.failed(failure, attempt=call.attempt, final=True, usage=usage)]

    def _reconciled(self, call: CallState, outcome: Outcome, asked: CallTool, wanted: bool) -> list[AnyBody]:
        tool = asked.tool
        attempts = (tool.retry or DEFAULT).attempts
        kind, why = outcome.kind, outcome.why
        if kind == "not_happened" and not outcome.final and self._quiet_at_s(call) is None:
            # "Not found" about an attempt that may still be sending proves nothing (T22).
            kind, why = "unknown", f"it found nothing, but {_may_still_run(call)}"
        if kind in ("happened", "not_happened"):
            self._ended_s.pop(call.number, None)
        match kind:
            case "happened":
                try:
                    result = self._pen.pack(tool.encode_result(outcome.result))
                except NotEncodable as refused:
                    failure = Failure(kind="not_encodable", type="NotEncodable", message=str(refused))
                    usage = call.cost_if("failed")
                    return [ToolCallResolved("failed", by="reconcile", attempt=call.attempt, failure=failure, usage=usage)]
                usage = call.cost_if("happened")
                return [ToolCallResolved("happened", by="reconcile", attempt=call.attempt, result=result, usage=usage)]
            case "not_happened":
                settled = ToolCallResolved("did_not_happen", by="reconcile", attempt=call.attempt, final=outcome.final)
                if wanted and call.failed < attempts:
                    return [settled]
                failure = call.failure or Failure(
                    kind="not_sent", type="NotHappened", message="its reconcile hook says that it did not happen"
                )
                return [settled, ToolCallFailed(failure, attempt=call.attempt, final=True)]
            case "in_progress":
                delay_s = min(2.0**call.asks, 60.0)
                at = self._clock.now() + round(delay_s * 1e6)
                return [RetryScheduled(attempt=call.attempt, at=at, reconcile=True)]
            case _:
                return [ToolCallInDoubt(call.attempt, clean(f"its reconcile hook does not know: {why}", 500), call.failure)]

    def after_unknown(self, call: CallState, ended: Ended, asked: CallTool, *, wanted: bool) -> Perform | Park | None:
        """What follows an end that left the call in doubt; None if the ordinary verdict applies."""
        attempts = (asked.tool.retry or DEFAULT).attempts
        if call.phase != "in_doubt" or call.retry_at is not None:
            return None
        if isinstance(ended.result, Outcome):
            why = call.doubt or "it may or may not have happened"
            if call.failed >= attempts or (not wanted and self._state.cancel is not None):
                return Park(why)
            return about_unknown(call, asked.tool.key_window_s, self._clock.now(), why)
        if asked.tool.reconciler is None:
            return Park(call.doubt or "it may or may not have happened")
        return None

    # -- effect="transaction" -----------------------------------------------------------------------------------------
    def transaction(self, call: CallState, asked: CallTool, head: Append, pen: Pen) -> Callable[[Any], tuple[Append, Sealed]]:
        """The work to do inside the store's transaction: the effect, and its result event right behind `head`."""

        def work(connection: Any) -> tuple[Append, Sealed]:
            told = self._told(call, asked.tool.timeout_s, connection)
            result = self._perform_in_time(call, asked, told)
            payload, blob = codec.pack(result, self._settings.inline_bytes)
            body = ToolCallCompleted(result=payload, attempt=call.attempt, usage=_used(call, told.usage))
            after = pen.following(head, body, call=call.number, cause=call.intent_seq, blobs=() if blob is None else (blob,))
            return after, after.events[0]

        return work

    def _perform_in_time(self, call: CallState, asked: CallTool, told: Call) -> bytes:
        """What the tool returns. Whatever it raises, and a result that comes too late, rolls everything back."""
        timeout_s = asked.tool.timeout_s
        begun_s = time.monotonic()
        try:
            result = perform_in_transaction(self._performing(asked.tool), asked.args, told)
            if timeout_s is not None and time.monotonic() - begun_s > timeout_s:
                raise TimeoutError(f"tool {call.tool} took longer than {timeout_s:g} s; its transaction was rolled back")
        except BaseException as error:
            # Wrapped, so that nothing that a tool raises is taken for a failure of the store.
            raise ToolRaised(error) from None
        return result

    @staticmethod
    def rolled_back(call: CallState, error: BaseException) -> Ended:
        """A transaction that raised has not happened."""
        return Ended(call.number, call.attempt, Raised(describe(error)))
