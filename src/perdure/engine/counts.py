"""What a worker has done since it began: the counters behind its metrics (`perdure.metrics` shows them).

Counters are plain numbers. Only the thread of the event loop changes them, and a thread that serves metrics reads them
at any time. (That thread also adds the names of agents and queues that it has read to the known values of labels.) So
each append costs a few dictionary look-ups, and nothing more if no metrics are read.

Labels are bounded: each label has at most MOST_VALUES values, and all further values are counted together as "other".
Ids of runs and tenants are no labels, because their number has no bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from perdure.core.events import (
    CallAnswered,
    ModelCallCompleted,
    ModelCallFailed,
    ModelCallInitiated,
    RunCancelled,
    RunFailed,
    RunSucceeded,
    ToolCallCompleted,
    ToolCallFailed,
    ToolCallInDoubt,
    ToolCallInitiated,
    ToolCallResolved,
    Usage,
)
from perdure.core.identity import Sealed
from perdure.core.state import RunState

MOST_VALUES = 200
OTHER = "other"
Key = tuple[str, ...]

# Seconds. A commit on a fast disk takes less than 1 ms, and a commit to a server a few.
_COMMIT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_REPLAY_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
_LAG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
_APPENDS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_ENDS = {RunSucceeded: "succeeded", RunFailed: "failed", RunCancelled: "cancelled"}
_BEGINS = frozenset((ToolCallInitiated, ModelCallInitiated))
_SPENDS = frozenset(
    (ToolCallCompleted, ModelCallCompleted, ToolCallFailed, ModelCallFailed, ToolCallInDoubt, ToolCallResolved, CallAnswered)
)


class Histogram:
    """How many values were at most as large as each bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # of each interval; the last one has no upper bound
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class LabelValues:
    """The values that each label has had so far: the first MOST_VALUES of them, and "other" for the rest."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}

    def bounded(self, labels: Key, values: Key) -> Key:
        return tuple(self._one(label, value) for label, value in zip(labels, values, strict=True))

    def _one(self, label: str, value: str) -> str:
        known = self._known.setdefault(label, set())
        if value in known:
            return value
        if len(known) >= MOST_VALUES:
            return OTHER
        known.add(value)
        return value


class Counter:
    """A number for each combination of values of these labels."""

    __slots__ = ("_seen", "labels", "values")

    def __init__(self, seen: LabelValues, *labels: str) -> None:
        self._seen = seen
        self.labels = labels
        self.values: dict[Key, int] = {}

    def add(self, key: Key, number: int = 1) -> None:
        values = self.values
        if key not in values:
            key = self._seen.bounded(self.labels, key)
            values.setdefault(key, 0)
        values[key] += number


class Counts:
    """The counters of one engine. They go on counting if its worker is drained and another one begins."""

    def __init__(self) -> None:
        self.seen = seen = LabelValues()
        self.claims = Counter(seen, "agent", "queue")
        self.takeovers = Counter(seen, "agent", "queue")
        self.ended = Counter(seen, "agent", "queue", "status")
        self.resumes = Counter(seen, "source")
        self.attempts = Counter(seen, "agent", "tool")
        self.retries = Counter(seen, "agent", "tool")
        self.doubts = Counter(seen, "agent", "tool")
        self.tokens = Counter(seen, "agent", "model", "kind")
        self.usd_micros = Counter(seen, "agent", "model")
        self.ticks = Counter(seen, "agent", "outcome")
        self.fenced_writes = 0
        self.drains = 0
        self.commit_s = Histogram(_COMMIT_S)
        self.batch = Histogram(_APPENDS)
        self.replay_s = Histogram(_REPLAY_S)
        self.lag_s = Histogram(_LAG_S)

    def appended(self, agent: str, queue: str, state: RunState, sealed: Sequence[Sealed]) -> None:
        """These events of a run are durable."""
        for one in sealed:
            event = one.event
            body = event.body
            kind = type(body)
            if kind in _BEGINS:
                begun: ToolCallInitiated = body  # type: ignore[assignment]
                key = (agent, begun.tool)
                self.attempts.add(key)
                if begun.attempt > 1:
                    self.retries.add(key)
            elif kind in _SPENDS:
                usage: Usage | None = body.usage  # type: ignore[union-attr]
                if usage is not None:
                    self._spent(agent, usage)
                if kind is ToolCallInDoubt:
                    call = state.calls.get(event.call or 0)
                    self.doubts.add((agent, "" if call is None else call.tool))
            elif kind in _ENDS:
                self.ended.add((agent, queue, _ENDS[kind]))

    def _spent(self, agent: str, usage: Usage) -> None:
        model = usage.model or ""
        for kind, number in (("input", usage.tokens_in), ("output", usage.tokens_out), ("cached", usage.tokens_cached)):
            if number:
                self.tokens.add((agent, model, kind), number)
        if usage.usd_micros:
            self.usd_micros.add((agent, model), usage.usd_micros)
