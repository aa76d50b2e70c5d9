"""What to do about a call now. The effect class decides; nothing is ever blindly re-fired (G5).

Asked about every open call that nobody is performing: after a crash, after a wait, after a doubt was resolved.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from perdure.core.state import CallState


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
    if call.loose or (call.worker_may_live and call.timeout_s is None):
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
