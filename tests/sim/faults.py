"""Which faults happen, and where: a list that is drawn from the seed, and that can be made shorter."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from perdure.errors import StoreUnavailable


class Fault(NamedTuple):
    """A fault at the operation number `at`. `after`: the operation has taken effect.

    `kind` defines `size` and `which`.
    """

    at: int
    kind: str
    after: bool
    size: float
    which: int


# How often each is drawn. What counts as a crash point: a process died, stood still, was cut off, or lost its answer.
_KINDS = {
    "crash": 30,  # of the process at the operation
    "crash other": 12,  # of any other one, wherever it is
    "power": 4,  # all at once
    "stop": 14,  # the process stands still, for longer than its lease or not quite
    "cut": 12,  # off from the store for a while
    "lose": 22,  # the answer
    "drain": 4,  # SIGTERM
    "fail": 5,  # the operation fails, and nothing has happened
    "delay": 4,  # the answer comes late
    "skew": 3,  # the process's wall clock jumps
}
CRASH_POINTS = frozenset(("crash", "crash other", "power", "stop", "cut", "lose"))


class Injected(StoreUnavailable):
    """An error of the store, as ordered."""


def draw(seed: int, operations: int) -> list[Fault]:
    """The plan of a seed."""
    chance = Random(f"faults {seed}")
    gap = chance.choice((2.0, 3.0, 4.0, 8.0))  # faults come thick or thin
    kinds, weights = list(_KINDS), list(_KINDS.values())
    plan: list[Fault] = []
    at = 10
    while True:
        at += 1 + int(chance.expovariate(1 / gap))
        if at > operations:
            return plan
        (kind,) = chance.choices(kinds, weights)
        plan.append(Fault(at, kind, chance.random() < 0.5, chance.random(), chance.randrange(1000)))
