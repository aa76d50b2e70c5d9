"""What a failure of an attempt means for the call: try again, give up, or doubt. Pure; delays are the same on replay."""

from __future__ import annotations

import math

from msgspec import Struct

from perdure.core.events import Effect, Failure
from perdure.core.failures import IN_DOUBT_KINDS
from perdure.core.identity import jitter
from perdure.errors import InvalidInput

_PASSING = frozenset(("not_sent", "rate_limited", "timeout", "reset", "server_error", "process_died"))
_NEVER = frozenset(("refused", "fatal", "cancelled", "not_encodable"))
_HARMLESS = frozenset(("not_sent", "rate_limited"))  # proof that nothing happened: no class forbids another attempt
LONGEST_DELAY_S = 365 * 86_400.0


class Retry(Struct, frozen=True):
    """How often and how fast a tool is tried again. Without `on`, whatever may pass: not validation, permission or Fatal."""

    attempts: int = 5
    base: float = 1.0
    factor: float = 2.0
    max_delay: float = 60.0
    jitter: float = 0.2
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
        """Whether this policy wants another attempt after such a failure."""
        if failure.kind in _HARMLESS:
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
    in_doubt: bool = False  # what was done so far may have happened; the same key makes repeating it safe


class Doubt(Struct, frozen=True):
    """The attempt may have happened, and this effect class does not allow to guess."""


class GiveUp(Struct, frozen=True):
    pass


DEFAULT = Retry()
# Half an hour, for what may pass: a provider may be away for minutes, and a run that waits for it costs nothing.
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
) -> Again | Doubt | GiveUp:
    """The verdict on a failed attempt.

    `wanted` is False when the agent or a person has given the call up; `doubtful` is True when an attempt before this one may
    have happened, so that this one's failure says nothing about the call as a whole.
    """
    again = wanted and _may_repeat(failure, effect, retry) and attempt < (retry or DEFAULT).attempts
    in_doubt = doubtful or (failure.kind in IN_DOUBT_KINDS and effect in ("once", "keyed"))
    # A `once` call is never tried again on a doubt; a `keyed` one only if nobody can be asked first.
    if in_doubt and (not again or effect == "once" or has_reconcile):
        return Doubt()
    if not again:
        return GiveUp()
    if failure.retry_after_s is not None:
        return Again(min(max(failure.retry_after_s, 0.0), LONGEST_DELAY_S), in_doubt)
    return Again((retry or DEFAULT).delay_s(attempt, key), in_doubt)


def _may_repeat(failure: Failure, effect: Effect, retry: Retry | None) -> bool:
    if retry is None:
        # What a `once` tool raises of its own may have come after the effect: only proof that nothing happened allows another go.
        return failure.kind in (_HARMLESS if effect == "once" else _PASSING)
    if effect == "once" and retry.on is None:
        return failure.kind in _HARMLESS
    return retry.covers(failure)
