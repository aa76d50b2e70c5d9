"""The targets for perdure against each peer, and whether they are met."""

from __future__ import annotations

from typing import Literal

from bench.race.results import Results
from msgspec import Struct

Verdict = Literal["ok", "miss", "not measured"]


class Target(Struct, frozen=True):
    """perdure should be at least that many times better than a lane. If less is better, `at_most` is the inverse ratio."""

    key: str
    lane: str
    at_least: float | None = None
    at_most: float | None = None

    def measured(self, results: Results) -> float | None:
        times = results.times(self.key, self.lane)
        if times is None:
            return None
        return times if self.at_least is not None else 1 / times

    def verdict(self, results: Results) -> Verdict:
        return _verdict(self.measured(results), self.at_least, self.at_most)


class Bound(Struct, frozen=True):
    """An absolute limit for a figure of perdure."""

    key: str
    lane: str
    at_most: float

    def measured(self, results: Results) -> float | None:
        found = results.summary(self.key, self.lane)
        return None if found is None else found.median

    def verdict(self, results: Results) -> Verdict:
        return _verdict(self.measured(results), None, self.at_most)


def _verdict(measured: float | None, at_least: float | None, at_most: float | None) -> Verdict:
    if measured is None:
        return "not measured"
    is_met = (at_least is None or measured >= at_least) and (at_most is None or measured <= at_most)
    return "ok" if is_met else "miss"


_PEERS = ("dbos/sqlite", "dbos/postgres", "langgraph/sqlite", "langgraph/postgres", "temporal", "restate")

TARGETS: tuple[Target | Bound, ...] = (
    Target("W1.steps_per_s", "dbos/sqlite", 10),
    Target("W1.steps_per_s", "langgraph/sqlite", 4),
    Target("W1.steps_per_s", "dbos/postgres", 5),
    Target("W1.steps_per_s", "langgraph/postgres", 2),
    Target("W1.steps_per_s", "restate", 5),
    Target("W1.steps_per_s", "temporal", 100),
    Target("W2.steps_per_s", "dbos/sqlite", 50),
    Target("W2.steps_per_s", "langgraph/sqlite", 20),
    Target("W2.steps_per_s", "restate", 6),
    Target("W2.steps_per_s", "dbos/postgres", 40),
    Target("W2.steps_per_s", "langgraph/postgres", 20),
    Target("W3.runs_per_s", "dbos/sqlite", 15),
    Target("W3.runs_per_s", "dbos/postgres", 15),
    # Restate works while runs arrive and has no figure for the work alone.
    Target("W3.through_per_s", "restate", 3),
    Bound("W3.idle_ms", "perdure/sqlite", 5),
    Bound("W3.idle_ms", "perdure/postgres", 5),
    Target("W4.long_s", "dbos/sqlite", 30),
    Target("W4.long_s", "dbos/postgres", 30),
    Target("W4.long_s", "langgraph/sqlite", 1),
    Target("W4.long_s", "langgraph/postgres", 1),
    Target("W5.bytes_per_step", "dbos/sqlite", at_most=1.5),
    Target("W5.bytes_per_step", "dbos/postgres", at_most=1.5),
    Target("W5.bytes_per_step", "langgraph/sqlite", at_most=0.1),
    Target("W5.bytes_per_step", "langgraph/postgres", at_most=0.1),
    *(Target("W6.worker_mb", lane, at_most=1) for lane in _PEERS),
)
