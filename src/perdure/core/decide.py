"""What to do about a call, and about an attempt whose outcome is unknown. The effect class decides; nothing is repeated blindly (G5).

This module is the one place that decides about unknown outcomes. `RunCore` asks it at three moments:

    the call stands in phase         no attempt is under way          an attempt has failed          its hook has answered
                                     (`decide`)                       (`after_failed_attempt`)       (`after_hook`)
    proposed, approved               perform; give up if unwanted     –                              –
    retry_wait, failing, idle        wait, perform; give up           –                              –
      … with an earlier doubt        as in_doubt                      –                              –
    started                          the worker died inside it:       again, doubt, or give up       –
      read, idempotent, transaction    perform again                    by kind of failure
      keyed without a hook             same key while it protects       and class (`after_failure`)
      once, keyed with a hook          ask the hook, or a person
    in_doubt                         as started                       –                              happened → completed
                                                                                                     not happened → idle, or failed
                                                                                                     in progress → ask again later
                                                                                                     unknown → same key, or a person

"Not happened" is believed only when the request cannot be on its way any more: see `quiet_after_s`.
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
from perdure.core.outcome import Outcome
from perdure.core.retry import DEFAULT, Again, Doubt, Retry, after_failure
from perdure.core.retry import GiveUp as GiveUpRetrying
from perdure.core.state import LOST, NOT_STARTED, CallState
from perdure.errors import NotEncodable, NotReady


class Perform(Struct, frozen=True):
    """Start this attempt, once its intent is durable."""

    attempt: int


class Wait(Struct, frozen=True):
    until: int


class Reconcile(Struct, frozen=True):
    """Ask the tool's own hook what became of the last attempt."""


class Park(Struct, frozen=True):
    """Only a person can know."""

    why: str


class GiveUp(Struct, frozen=True):
    """Nobody wants the call any more, and leaving it hurts nobody."""


_CLOCK_SLACK_S = 60.0  # a clock may be set back by this much and the age of a key still be known well enough
# A transaction's result is in the same commit as its effect: an intent alone proves that it did not happen.
_REPEATABLE = frozenset(("read", "idempotent", "transaction"))
Verdict = Perform | Wait | Reconcile | Park | GiveUp


def decide(call: CallState, *, has_reconcile: bool, key_window_s: float, max_asks: int, wanted: bool, now: int) -> Verdict:
    """The verdict on an open call that nobody is performing. `wanted` is False once the agent or a person has given it up."""
    match call.phase:
        case "retry_wait" | "failing" | "idle" | "proposed" | "approved" if not call.doubtful:
            # Every attempt so far is known not to have happened, or to be harmless: class no longer matters.
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
    """How long is waited about a lost attempt where its tool does not say."""

    timeout_s: float
    settle_s: float
    grace_s: float  # that an attempt has to end by itself after its time-out

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
    """How long after its attempts were last seen alive "not found" proves that none of them will happen; None: it never does.

    Ending an attempt, or its process, does not call back what it has sent: a request may lie in a queue of the network or of the service
    for as long as its sender would have waited for the answer. So a lost attempt has its own time-out, and `settle` after it, counted
    from the moment at which it could last have sent (T22, T31). That is its end, or its worker's end, where one of them is known. A
    worker that was only silent may still be performing the attempt, until its time-out; without a time-out, for ever.
    """
    if never_quiet(call):
        return None
    timeout_s = patience.timeout_s if call.timeout_s is None else call.timeout_s
    still_running_s = timeout_s + patience.grace_s if call.worker_may_live else 0.0
    return still_running_s + timeout_s + settle_s(call, patience)


def settle_s(call: CallState, patience: Patience) -> float:
    """How long after its time-out a lost attempt's request may still arrive."""
    return patience.settle_s if call.settle_s is None else call.settle_s


def quiet_at(call: CallState, patience: Patience) -> int | None:
    """The same as a time of the wall clock, for people: they look once, and may look too early. None: it never does.

    Nor does it before a worker has taken the run over: until then nothing is known about the end of the attempt.
    """
    after_s = quiet_after_s(call, patience)
    return None if after_s is None or not call.quiet_since else call.quiet_since + round(after_s * 1e6)


def about_unknown(call: CallState, key_window_s: float, now: int, why: str = "it may or may not have happened") -> Perform | Park:
    """The verdict when nobody knows what became of an attempt: a key inside its window makes repeating it safe."""
    age_s = (now - call.first_ts) / 1e6
    if call.effect == "keyed":
        # Wall clocks serve here as the provider's own key expiry does; past the window a key protects nothing (T14).
        if -_CLOCK_SLACK_S <= age_s <= key_window_s:
            return Perform(call.attempt + 1)
        if age_s < 0:
            return Park(
                f"{why}, and by this clock its first attempt lies in the future, so that nobody can tell whether its key still protects it"
            )
        return Park(
            f"{why}, and its key is {age_s / 3600:.1f} h old, past the window of {key_window_s / 3600:g} h in which the service drops duplicates"
        )
    return Park(why)


# -- what came of an attempt or of a question to a hook -----------------------------------------------------------------
class Rules(Protocol):
    """What of a tool decides about its calls."""

    events: CallEvents
    retry: Retry | None
    key_window_s: float

    @property
    def reconciler(self) -> Any: ...

    def encode_result(self, value: Any) -> bytes: ...


class After(Struct, frozen=True, gc=False):
    """The events that an end makes, in order, and the verdict that follows them; None: `decide` says how the call goes on."""

    bodies: Sequence[AnyBody]
    verdict: Perform | Park | None = None


# No answer came: the service may have done its work, and may want its money. A service that answered with an error did not.
_UNANSWERED = IN_DOUBT_KINDS - {"server_error"}


def after_failed_attempt(
    call: CallState, failure: Failure, usage: Usage | None, tool: Rules, *, loose: bool, wanted: bool, closing: bool, now: int
) -> After:
    """An attempt has ended without a result. `loose`: it may still be running. `closing`: the run is given up, and nothing is planned."""
    if is_not_ready(failure) and wanted and not call.doubtful:
        return After([tool.events.failed(structs.replace(failure, type=NOT_STARTED), attempt=call.attempt, usage=usage)])
    if closing and wanted and failure.kind == "cancelled":
        return After(_stopped_by_drain(call, failure, usage, tool, loose))
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
        usage = cost_of(call, usage)
    match verdict:
        case Again(delay_s, in_doubt):
            first = doubt if in_doubt else tool.events.failed(failure, attempt=call.attempt, usage=usage)
            return After([first, RetryScheduled(attempt=call.attempt + 1, at=now + round(delay_s * 1e6))])
        case Doubt():
            return After([doubt], None if tool.reconciler is not None else Park(doubt.why))
        case GiveUpRetrying():
            return After([tool.events.failed(failure, attempt=call.attempt, final=True, usage=usage)])


def _stopped_by_drain(call: CallState, failure: Failure, usage: Usage | None, tool: Rules, loose: bool) -> list[AnyBody]:
    """A drain ended the attempt, not the agent: the next worker goes on by effect class. What may have happened is said so."""
    if call.effect in ("once", "keyed"):
        return [ToolCallInDoubt(call.attempt, "its worker was stopped inside it", failure, loose, usage)]
    usage = cost_of(call, usage)
    if tool.events is not OF_MODEL and usage is None:
        return []
    return [tool.events.failed(lost_answer("its worker was stopped", tool), attempt=call.attempt, usage=usage)]


def after_hook(
    call: CallState, outcome: Outcome, tool: Rules, *, wanted: bool, cancelling: bool, now: int, pack: Callable[[bytes], Payload]
) -> After:
    """The reconcile hook has answered. "Not happened" comes here only when it is proof, or when no time would ever make it one."""
    attempts = (tool.retry or DEFAULT).attempts
    kind, why = outcome.kind, outcome.why
    if kind == "not_happened" and not outcome.final and never_quiet(call):
        # "Not found" about an attempt that may still be sending proves nothing (T22).
        kind, why = "unknown", f"it found nothing, but {_may_still_run(call)}"
    match kind:
        case "happened":
            try:
                result = pack(tool.encode_result(outcome.result))
            except NotEncodable as refused:
                failure = Failure(kind="not_encodable", type="NotEncodable", message=str(refused))
                usage = call.cost_if("failed")
                return After([ToolCallResolved("failed", by="reconcile", attempt=call.attempt, failure=failure, usage=usage)])
            usage = call.cost_if("happened")
            return After([ToolCallResolved("happened", by="reconcile", attempt=call.attempt, result=result, usage=usage)])
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
    """Whether this process could not even begin, for a reason that a person has to see to."""
    return failure.kind == "not_sent" and failure.type == NotReady.__name__


def cost_of(call: CallState, said: Usage | None) -> Usage | None:
    """What an attempt that happened, or may have, is charged: what it said, or its estimate if it said nothing."""
    return call.estimate if said is None else said


def lost_answer(why: str, tool: Rules) -> Failure:
    """The failure of an attempt that is simply made again, and whose answer was lost."""
    if tool.events is OF_MODEL:
        return Failure("process_died", LOST, f"{why} while the model was asked; an answer that was on its way is lost")
    return Failure("process_died", LOST, f"{why} inside it; an answer that was on its way is lost")


def never_quiet(call: CallState) -> bool:
    """Whether an attempt may still be sending for ever, so that "not found" proves nothing at any time."""
    return call.loose or (call.worker_may_live and call.timeout_s is None)


def _may_still_run(call: CallState) -> str:
    if call.loose:
        return "an attempt that did not stop may still be running"
    return "the worker that was lost may still be alive, and the tool has no timeout= that would have ended the attempt"
