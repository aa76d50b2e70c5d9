"""Rate limits: how often calls may start, over all workers, and when the next call may start."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.codec import shown
from perdure.errors import InvalidInput

MAX_KEY_CHARS = 200


class Rate(Struct, frozen=True):
    """How often calls may start, over all workers: on average `limit` calls in `per` seconds.

    All tools with the same `key` share the limit. After a time without calls, `burst` calls may start at once. So in
    any s seconds at most burst + s × limit / per calls start. When the service refuses a call for now (429,
    `RetryLater`), no call with this key starts until the time that the service asked for has passed.
    """

    limit: int | None = None  # None: calls wait only after the service has refused a call for now
    per: float = 1.0  # seconds
    key: str | None = None  # None: the name of the tool
    burst: int | None = None  # None: the same as `limit`

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("burst", self.burst)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**6):
                raise InvalidInput(f"Rate({name}={shown(value)}): a whole number from 1 to 1,000,000")
        if self.burst is not None and self.limit is None:
            raise InvalidInput(f"Rate(burst={self.burst}) without limit= limits nothing; say how many may start in how many seconds")
        if not isinstance(self.per, (int, float)) or isinstance(self.per, bool) or not 0 < self.per <= 86_400:
            raise InvalidInput(f"Rate(per={shown(self.per)}): seconds, above 0 and at most 86,400")
        if self.key is not None and (not isinstance(self.key, str) or not 0 < len(self.key) <= MAX_KEY_CHARS or not self.key.isprintable()):
            raise InvalidInput(f"Rate(key={shown(self.key)}): text of 1 to {MAX_KEY_CHARS} printable characters")

    @property
    def step_us(self) -> int:
        """The time between two starts while many calls wait."""
        assert self.limit is not None, self
        # The time is rounded up. If it were rounded down to 0 µs, a very high limit would be no limit.
        return max(1, -(-round(self.per * 1e6) // self.limit))


def next_start(rate: Rate, *, due: int, paused_until: int, now: int) -> tuple[int, int]:
    """(when the next call may start, the new `due` to store).

    `due`: when the queue is empty if no other call arrives.

    If the clock was set back, `now` is earlier than in the last call. That never allows more starts. A caller that
    knows that the clock was set back moves `due` and `paused_until` back by the same amount, so that calls do not wait
    longer than needed.
    """
    at = max(now, paused_until)
    if rate.limit is None:
        return at, due
    at = max(at, due - rate.step_us * ((rate.burst or rate.limit) - 1))
    return at, max(due, at) + rate.step_us
