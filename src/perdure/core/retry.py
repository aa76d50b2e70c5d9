"""What follows from a failed attempt: another attempt, the failure of the call, or a doubt.

These are pure functions. The delays are the same on replay.
"""

from __future__ import annotations

import math

from msgspec import Struct

from perdure.core.events import Effect, Failure
from perdure.core.failures import HARMLESS_KINDS, IN_DOUBT_KINDS
from perdure.core.identity import jitter
from perdure.errors import InvalidInput

_PASSING = frozenset(("not_sent", "rate_limited", "timeout", "reset", "server_error", "process_died"))
_NEVER = frozenset(("refused", "fatal", "cancelled", "not_encodable", "not_saved"))
LONGEST_DELAY_S = 365 * 86_400.0


class Retry(Struct, frozen=True):
    """How often a call is tried again, and how long perdure waits before each new attempt.

    After attempt n the wait is `base * factor ** (n - 1)` seconds, at most `max_delay`. To spread retries, the wait is
    made shorter by up to the fraction `jitter`. After a failure that proves that nothing happened, the call is always
    tried again, and `on` does not matter. After a refusal or `Fatal` it is tried again only if `on` names that
    exception. A `once` call is tried again after any other failure only if `on` names that exception.
    """

    attempts: int = 5  # the first attempt included; 1: the call is never tried again
    base: float = 1.0  # seconds
    factor: float = 2.0
    max_delay: float = 60.0  # seconds
    jitter: float = 0.2  # from 0 to 1
    # The exceptions after which the call is tried again. None: all failures except refusals, `Fatal`, cancelled
    # attempts, results that cannot be encoded and artifacts that are too large.
    on: tuple[type[BaseException] | str, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.attempts, int) or isinstance(self.attempts, bool) or self.attempts < 1:
            raise InvalidInput(f"Retry(attempts={self.attempts!r}): a whole number of at least 1 (1 means: never again)")
        for name, low, high in (("base", 0, LONGEST_DELAY_S), ("factor", 1, 1e6), ("max_delay", 0, LONGEST_DELAY_S), ("jitter", 0, 1)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
                raise InvalidInput(f"Retry({name}={value!r}): a number from {low} to {high:g}")
        if self.on is not None and not (isinstance(self.on, (tuple, list, set, frozenset)) and all(map(_names_failures, self.on))):
            raise InvalidInput("Retry(on=…): exception types or their names in a tuple, such as (TimeoutError, 'HTTPError')")

    def covers(self, failure: Failure) -> bool:
        """Does this policy allow another attempt after this failure?"""
        if failure.kind in HARMLESS_KINDS:
            return True
        if self.on is None:
            return failure.kind not in _NEVER
        names = {wanted if isinstance(wanted, str) else wanted.__name__ for wanted in self.on}
        return bool(names & {failure.kind, failure.type, *failure.lineage})

    def delay_s(self, attempt: int, key: str) -> float:
        """Seconds to wait after the given attempt failed."""
        try:
            delay = min(self.base * self.factor ** (attempt - 1), self.max_delay)
        except OverflowError:
            delay = self.max_delay
        return delay * (1 - self.jitter * jitter(key, attempt))


def _names_failures(wanted: object) -> bool:
    return isinstance(wanted, str) or (isinstance(wanted, type) and issubclass(wanted, BaseException))


class Again(Struct, frozen=True):
    delay_s: float
    in_doubt: bool = False  # an earlier attempt may have happened; repeating is safe because the key is the same


class Doubt(Struct, frozen=True):
    """An attempt may have happened. No other attempt is made until its outcome is known."""


class RetryGiveUp(Struct, frozen=True):
    pass


DEFAULT = Retry()
# About half an hour of retries for failures that may pass: a provider may be down for minutes, and a waiting run costs
# nothing.
PATIENT = Retry(attempts=20, max_delay=120.0, on=tuple(sorted(_PASSING)))


def after_failure(
    failure: Failure,
    *,
    effect: Effect,
    attempt: int,
    retry: Retry | None,
    key: str,
    has_reconcile: bool,
    wanted: bool = True,
    doubtful: bool = False,
) -> Again | Doubt | RetryGiveUp:
    """The verdict on a failed attempt.

    `wanted`: the agent still waits for the call. `doubtful`: an earlier attempt may have happened, so the failure of
    this attempt does not mean that the whole call failed.
    """
    again = wanted and _may_repeat(failure, effect, retry) and attempt < (retry or DEFAULT).attempts
    in_doubt = doubtful or (failure.kind in IN_DOUBT_KINDS and effect in ("once", "keyed"))
    # A `once` call in doubt is never tried again. A `keyed` call in doubt is tried again at once only if the tool has
    # no reconcile hook. If the tool has a hook, the hook is asked first.
    if in_doubt and (not again or effect == "once" or has_reconcile):
        return Doubt()
    if not again:
        return RetryGiveUp()
    if failure.retry_after_s is not None:
        return Again(min(max(failure.retry_after_s, 0.0), LONGEST_DELAY_S), in_doubt)
    return Again((retry or DEFAULT).delay_s(attempt, key), in_doubt)


def _may_repeat(failure: Failure, effect: Effect, retry: Retry | None) -> bool:
    if retry is None:
        # A `once` tool may raise an exception after its effect. So only proof that nothing happened allows another
        # attempt.
        return failure.kind in (HARMLESS_KINDS if effect == "once" else _PASSING)
    if effect == "once" and retry.on is None:
        return failure.kind in HARMLESS_KINDS
    return retry.covers(failure)
