"""How often something may be started, over all workers, and when the next start is due."""

from __future__ import annotations

from msgspec import Struct

from perdure.core.codec import shown
from perdure.errors import InvalidInput

MAX_KEY_CHARS = 200


class Rate(Struct, frozen=True):
    """On average at most `limit` starts in `per` seconds for everything under `key`; a 429 pauses the key for everybody.

    After a quiet time `burst` may start at once, so that no span of s seconds sees more than burst + s × limit / per of them.
    Without a limit only the pausing applies. Without a key the tool's own name is the key.
    """

    limit: int | None = None
    per: float = 1.0
    key: str | None = None
    burst: int | None = None  # the limit unless said

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
        """The time between two starts when many wait."""
        assert self.limit is not None, self
        # Rounded up: rounded down, a limit of a million would be none.
        return max(1, -(-round(self.per * 1e6) // self.limit))


def next_start(rate: Rate, *, due: int, paused_until: int, now: int) -> tuple[int, int]:
    """(when the next start may be, the `due` to remember). `due` is when the line would be empty if nobody else came.

    Told an earlier time than before, it never allows more starts for that: whoever knows that the clock was set back, and wants
    nobody to wait for the time it has lost, moves `due` and `paused_until` back by as much.
    """
    at = max(now, paused_until)
    if rate.limit is None:
        return at, due
    at = max(at, due - rate.step_us * ((rate.burst or rate.limit) - 1))
    return at, max(due, at) + rate.step_us
