"""What to do next about a call, also when the outcome of an attempt is unknown. The effect class decides (G5).

Only this module decides about unknown outcomes. `RunCore` calls it in three cases:

    `decide`: no attempt is under way. The phase of the call decides.
        proposed, approved                perform; give up if the agent no longer waits
        retry_wait, failing, idle         wait, then perform; give up if the agent no longer waits
                                          (if an earlier attempt is in doubt: as for in_doubt)
        started, in_doubt                 the worker died inside the attempt, or the outcome is unknown:
          read, idempotent, transaction     perform again; give up if the agent no longer waits
          keyed without a hook              perform with the same key while the key is valid; after that, a person
          once, keyed with a hook           ask the hook; without a hook, a person

    `after_failed_attempt`: an attempt has failed. The kind of failure and the effect class decide (`after_failure`):
        try again, record a doubt, or give up.

    `after_hook`: the reconcile hook has answered.
        happened                          the call is completed
        not happened                      another attempt; if none is allowed, the call has failed
        in progress                       ask the hook again later
        unknown                           perform with the same key while the key is valid; if not, a person

"Not happened" counts only when the request can no longer arrive at the service: see `quiet_after_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct, structs

from perdure.core.codec import Payload
from perdure.core.events import (
    OF_MODEL,
    AnyBody,
    CallEvents,
    Failure,
    RetryScheduled,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallResolved,
    Usage,
)
from perdure.core.failures import IN_DOUBT_KINDS, clean
from perdure.core.outcomes import Outcome
from perdure.core.retry import DEFAULT, Again, Doubt, Retry, after_failure
from perdure.core.retry import RetryGiveUp as GiveUpRetrying
from perdure.core.state import LOST, NOT_STARTED, CallState
from perdure.errors import NotEncodable, NotReady


class Perform(Struct, frozen=True):
    """Begin this attempt once its intent is durable."""

    attempt: int


class Wait(Struct, frozen=True):
    until: int


class Reconcile(Struct, frozen=True):
    """Ask the tool's reconcile hook what became of the last attempt."""


class Park(Struct, frozen=True):
    """The call stays in doubt: a person has to find out what happened."""

    why: str


class GiveUp(Struct, frozen=True):
    """Fail the call: the agent no longer waits for it, and no effect is in doubt."""


_CLOCK_SLACK_S = 60.0  # if the clock was set back by at most this, the age of a key is still known well enough
# The result of a transaction is in the same commit as its effect: an intent without a result proves that the effect
# did not happen.
_REPEATABLE = frozenset(("read", "idempotent", "transaction"))
Verdict = Perform | Wait | Reconcile | Park | GiveUp


def decide(
    call: CallState, *, has_reconcile: bool, key_window_s: float, max_asks: int, wanted: bool, now: int, cancelling: bool = False
) -> Verdict:
    """The verdict on an open call without an attempt under way. `wanted`: the agent still waits for the call.

    `cancelling`: a person has asked to cancel the run.
    """
    verdict = _by_phase(call, has_reconcile, key_window_s, max_asks, wanted, now)
    if isinstance(verdict, Perform) and not wanted and cancelling:
        # The key prevents a second effect. But perhaps the effect has not happened at all, and after a cancel it must
        # not happen any more.
        return Park("it may or may not have happened, and the run is being cancelled")
    return verdict


def _by_phase(call: CallState, has_reconcile: bool, key_window_s: float, max_asks: int, wanted: bool, now: int) -> Verdict:
    match call.phase:
        case "retry_wait" | "failing" | "idle" | "proposed" | "approved" if not call.doubtful:
            # Each attempt so far certainly did not happen, or may be repeated. So the effect class does not matter
            # here.
            if not wanted:
                return GiveUp()
            if call.retry_at is not None and call.retry_at > now:
                return Wait(call.retry_at)
            return Perform(call.attempt + 1)
        case "in_doubt" | "retry_wait" | "failing" if call.retry_at is not None and call.retry_at > now:
            return Wait(call.retry_at)
        case "started" | "in_doubt" | "retry_wait" | "failing" | "idle":
            if not wanted and call.effect in _REPEATABLE:
                return GiveUp()
            return _about_doubt(call, has_reconcile, key_window_s, max_asks, now)
        case _:
            raise AssertionError(f"call {call.number} is {call.phase}: nothing to decide")


def _about_doubt(call: CallState, has_reconcile: bool, key_window_s: float, max_asks: int, now: int) -> Verdict:
    if call.effect in _REPEATABLE:
        return Perform(call.attempt + 1)
    if has_reconcile and call.asks < max_asks:
        return Reconcile()
    if call.effect == "keyed" and not has_reconcile:
        return about_unknown(call, key_window_s, now)
    if has_reconcile:
        return Park(f"its reconcile hook has said “in progress” {call.asks} times")
    return Park("it may or may not have happened, and the tool has no reconcile hook")


class Patience(Struct, frozen=True):
    """Defaults for the waits after a lost attempt, for tools that do not declare these waits."""

    timeout_s: float
    settle_s: float
    grace_s: float  # how long an attempt may take to stop after its time-out

    @classmethod
    def of(cls, settings: _Waits) -> Patience:
        return cls(settings.unknown_deadline_s, settings.reconcile_margin_s, settings.cancel_grace_s)


class _Waits(Protocol):
    @property
    def unknown_deadline_s(self) -> float: ...
    @property
    def reconcile_margin_s(self) -> float: ...
    @property
    def cancel_grace_s(self) -> float: ...


def quiet_after_s(call: CallState, patience: Patience) -> float | None:
    """How many seconds after `quiet_since` a "not found" proves that no attempt will take effect; None: never.

    When an attempt or its process is stopped, a request that was sent already is not cancelled. The request may stay
    in a queue of the network or of the service for as long as its sender would have waited. So the wait is the
    time-out of the attempt plus `settle`. The wait begins at the last moment when the attempt could have sent a
    request (T22, T31). That moment is the recorded end of the attempt, or the recorded end of its worker. If neither
    end is recorded, the worker may still be alive. Then it may perform the attempt until the attempt's time-out or,
    without a time-out, for ever.
    """
    if never_quiet(call):
        return None
    timeout_s = patience.timeout_s if call.timeout_s is None else call.timeout_s
    still_running_s = timeout_s + patience.grace_s if call.worker_may_live else 0.0
    return still_running_s + timeout_s + settle_s(call, patience)


def settle_s(call: CallState, patience: Patience) -> float:
    """How many seconds after the time-out of a lost attempt its request may still arrive at the service."""
    return patience.settle_s if call.settle_s is None else call.settle_s


def quiet_at(call: CallState, patience: Patience) -> int | None:
    """The wall-clock time after which "not found" counts; None: not known, or never.

    People see this time, so that they do not check too early. The time is not known before a worker has taken over the
    run: until then nothing is recorded about the end of the attempt.
    """
    after_s = quiet_after_s(call, patience)
    return None if after_s is None or not call.quiet_since else call.quiet_since + round(after_s * 1e6)


def about_unknown(call: CallState, key_window_s: float, now: int, why: str = "it may or may not have happened") -> Perform | Park:
    """The verdict when the outcome of an attempt is unknown. To repeat is safe only with a key inside its window."""
    age_s = (now - call.first_ts) / 1e6
    if call.effect == "keyed":
        # The service expires keys by its wall clock, so the age of the key is measured by the local wall clock. After
        # the window a key protects nothing (T14).
        if -_CLOCK_SLACK_S <= age_s <= key_window_s:
            return Perform(call.attempt + 1)
        if age_s < 0:
            return Park(
                f"{why}, and by this clock its first attempt lies in the future, so it is not known whether its key still protects it"
            )
        return Park(
            f"{why}, and its key is {age_s / 3600:.1f} h old, past the window of {key_window_s / 3600:g} h in which the service drops duplicates"
        )
    return Park(why)


# -- after an attempt failed, or a hook answered ------------------------------------------------------------------------
class Rules(Protocol):
    """The part of a tool that decides about its calls."""

    events: CallEvents
    retry: Retry | None
    key_window_s: float

    @property
    def reconciler(self) -> Any: ...

    def encode_result(self, value: Any) -> bytes: ...


class After(Struct, frozen=True, gc=False):
    """The events to record, in order, and then the verdict.

    If the verdict is None, the caller asks `decide` for it.
    """

    bodies: Sequence[AnyBody]
    verdict: Perform | Park | None = None


# No answer came: the service may have done the work and may charge money for it. A service that answered with an error
# has not done the work.
_UNANSWERED = IN_DOUBT_KINDS - {"server_error"}


def after_failed_attempt(
    call: CallState,
    failure: Failure,
    usage: Usage | None,
    tool: Rules,
    *,
    loose: bool,
    wanted: bool,
    closing: bool,
    now: int,
    progress: Payload | None = None,
) -> After:
    """What follows when an attempt ended without a result.

    `loose`: the attempt may still be running. `closing`: the run is being released, and nothing new is planned.
    `progress`: the last progress of the attempt. It is recorded, and decides nothing.
    """
    if is_not_ready(failure) and wanted and not call.doubtful:
        not_started = structs.replace(failure, type=NOT_STARTED)
        return After([tool.events.failed(not_started, attempt=call.attempt, usage=usage, progress=progress)])
    if closing and wanted and failure.kind == "cancelled":
        return After(_stopped_by_drain(call, failure, usage, tool, loose, progress))
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
    doubt = ToolCallInDoubt(call.attempt, f"{failure.type}: {failure.message}"[:500], failure, loose, usage, progress)
    if call.effect in ("read", "idempotent") and failure.kind in _UNANSWERED:
        usage = cost_of(call, usage)
    match verdict:
        case Again(delay_s, in_doubt):
            first = doubt if in_doubt else tool.events.failed(failure, attempt=call.attempt, usage=usage, progress=progress)
            return After([first, RetryScheduled(attempt=call.attempt + 1, at=now + round(delay_s * 1e6))])
        case Doubt():
            return After([doubt], None if tool.reconciler is not None else Park(doubt.why))
        case GiveUpRetrying():
            return After([tool.events.failed(failure, attempt=call.attempt, final=True, usage=usage, progress=progress)])


def _stopped_by_drain(
    call: CallState, failure: Failure, usage: Usage | None, tool: Rules, loose: bool, progress: Payload | None
) -> list[AnyBody]:
    """The events when a drain, and not the agent, stopped the attempt.

    The next worker continues by effect class. An effect that may have happened is recorded as in doubt.
    """
    if call.effect in ("once", "keyed"):
        return [ToolCallInDoubt(call.attempt, "its worker was stopped inside it", failure, loose, usage, progress)]
    usage = cost_of(call, usage)
    if tool.events is not OF_MODEL and usage is None and progress is None:
        return []
    lost = lost_answer("its worker was stopped", tool)
    return [tool.events.failed(lost, attempt=call.attempt, usage=usage, progress=progress)]


def after_hook(
    call: CallState, outcome: Outcome, tool: Rules, *, wanted: bool, cancelling: bool, now: int, pack: Callable[[bytes], Payload]
) -> After:
    """What follows when the reconcile hook has answered.

    The caller passes the answer "not happened" only if that answer counts now (`quiet_after_s`) or can never count.
    """
    attempts = (tool.retry or DEFAULT).attempts
    kind, why = outcome.kind, outcome.why
    if kind == "not_happened" and not outcome.final and never_quiet(call):
        # "Not found" about an attempt that may still be sending proves nothing (T22).
        kind, why = "unknown", f"it found nothing, but {_may_still_run(call)}"
    match kind:
        case "happened":
            result: Payload | None
            failure = None
            try:
                result = pack(tool.encode_result(outcome.result))
            except NotEncodable as refused:
                failure = Failure(kind="not_encodable", type="NotEncodable", message=str(refused))
                result = None
            usage = call.cost_if("happened")
            return After([ToolCallResolved("happened", by="reconcile", attempt=call.attempt, result=result, failure=failure, usage=usage)])
        case "not_happened":
            settled = ToolCallResolved("did_not_happen", by="reconcile", attempt=call.attempt, final=outcome.final)
            if wanted and call.failed < attempts:
                return After([settled])
            words = "its reconcile hook says that it did not happen"
            failure = call.failure or Failure(kind="not_sent", type="NotHappened", message=words)
            return After([settled, ToolCallFailed(failure, attempt=call.attempt, final=True)])
        case "in_progress":
            delay_s = min(2.0**call.asks, 60.0)
            return After([RetryScheduled(attempt=call.attempt, at=now + round(delay_s * 1e6), reconcile=True)])
        case _:
            doubt = ToolCallInDoubt(call.attempt, clean(f"its reconcile hook does not know: {why}", 500), call.failure)
            if call.failed >= attempts or (not wanted and cancelling):
                return After([doubt], Park(doubt.why))
            return After([doubt], about_unknown(call, tool.key_window_s, now, doubt.why))


def is_not_ready(failure: Failure) -> bool:
    """Was the attempt impossible in this process, for a reason that a person has to fix?"""
    return failure.kind == "not_sent" and failure.type == NotReady.__name__


def cost_of(call: CallState, said: Usage | None) -> Usage | None:
    """The charge for an attempt that happened or may have happened: its reported usage or else its estimate."""
    return call.estimate if said is None else said


def lost_answer(why: str, tool: Rules) -> Failure:
    """The failure of an attempt whose answer was lost. It is recorded only if another attempt is safe."""
    if tool.events is OF_MODEL:
        return Failure("process_died", LOST, f"{why} while the model was asked; an answer that was on its way is lost")
    return Failure("process_died", LOST, f"{why} inside it; an answer that was on its way is lost")


def never_quiet(call: CallState) -> bool:
    """May an attempt still be running without a time limit? Then "not found" never proves anything."""
    return call.loose or (call.worker_may_live and call.timeout_s is None)


def _may_still_run(call: CallState) -> str:
    if call.loose:
        return "an attempt that did not stop may still be running"
    return "the worker that was lost may still be alive, and the tool has no timeout= that would have ended the attempt"
