"""The sizes of the workloads: for the whole race, and for a trial that only tests that everything works."""

from __future__ import annotations

from msgspec import Struct


class Sizes(Struct, frozen=True):
    steps: int = 1_000
    runs: int = 200
    steps_of_a_run: int = 20
    queued: int = 1_000
    idle_starts: int = 40
    short_run: int = 1_000
    long_run: int = 10_000
    noticed_s: float = 3.0  # from the end of a process that was killed to the start of the one that resumes its run
    turns: int = 200
    parked: int = 10_000
    parked_s: float = 5.0
    wakes: int = 20
    shared_runs: int = 400
    shared_steps: int = 10
    tool_ms: float = 50.0
    slow_steps: int = 20
    slow_runs: int = 50
    slow_steps_of_a_run: int = 10


WHOLE = Sizes()
QUICK = Sizes(
    steps=100,
    runs=20,
    steps_of_a_run=5,
    queued=50,
    idle_starts=5,
    short_run=50,
    long_run=300,
    turns=10,
    parked=50,
    parked_s=1.0,
    wakes=3,
    shared_runs=20,
    shared_steps=5,
    slow_steps=5,
    slow_runs=10,
    slow_steps_of_a_run=3,
)
