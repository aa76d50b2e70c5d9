"""Runs many seeds one after the other, and collects the violations and the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from tests.sim.faults import CRASH_POINTS
from tests.sim.world import World, let_go, outcome

_LET_GO_EVERY = 8  # seeds


class Found(AssertionError):
    """A seed in which something does not hold."""


class Tally:
    """What has happened over many seeds."""

    def __init__(self) -> None:
        self.seeds = 0
        self.operations = 0
        self.points: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def add(self, world: World) -> None:
        self.seeds += 1
        self.operations += world.number
        self.points += world.points
        self.counts += world.checker.counts + world.outside.counts

    @property
    def crash_points(self) -> int:
        return sum(count for kind, count in self.points.items() if kind in CRASH_POINTS)

    def __str__(self) -> str:
        points = ", ".join(f"{kind} {count}" for kind, count in sorted(self.points.items()))
        counts = ", ".join(f"{what} {count}" for what, count in sorted(self.counts.items()))
        return f"{self.seeds} seeds, {self.operations} operations, {self.crash_points} crash points ({points}); {counts}"


def play(seeds: Iterable[int], points: int | None = None, *, enough: Callable[[Tally], bool] = lambda _: True) -> Tally:
    """Play these seeds until there are enough crash points and enough events.

    Raises Found, with the first seed in which a promise is broken.
    """
    tally = Tally()
    try:
        for seed in seeds:
            world, error = outcome(seed)
            if error is not None:
                raise Found(f"seed {seed}: {type(error).__name__}: {error}\nsee it again: python -m tests.sim {seed} --shrink") from error
            tally.add(world)
            if tally.seeds % _LET_GO_EVERY == 0:
                let_go()
            if points is not None and tally.crash_points >= points and enough(tally):
                break
    finally:
        let_go()
    return tally
