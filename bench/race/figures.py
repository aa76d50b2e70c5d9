"""The figures of the race: what each is called, in which unit, and which direction is better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from bench.race.sizes import Sizes
from msgspec import Struct


class Figure(Struct, frozen=True):
    """One column of a table. If neither direction is better, there is no ratio."""

    key: str
    title: str
    unit: str
    better: Literal["more", "less"] | None

    @property
    def workload(self) -> str:
        return self.key.partition(".")[0]


_MORE: Literal["more"] = "more"
_LESS: Literal["less"] = "less"

FIGURES = (
    Figure("W1.steps_per_s", "steps", "/s", _MORE),
    Figure("W1.p50_us", "a step, median", "µs", _LESS),
    Figure("W1.p99_us", "a step, 99th percentile", "µs", _LESS),
    Figure("W2.steps_per_s", "steps", "/s", _MORE),
    Figure("W3.runs_per_s", "runs, once all are enqueued", "/s", _MORE),
    Figure("W3.enqueued_per_s", "enqueued", "/s", _MORE),
    Figure("W3.through_per_s", "both: runs, from the first send to the last end", "/s", _MORE),
    Figure("W3.idle_ms", "begins on an idle system after, median", "ms", _LESS),
    Figure("W3.idle_slowest_ms", "the same, the slowest of them", "ms", _LESS),
    Figure("W4.short_s", "the shorter run resumes", "s", _LESS),
    Figure("W4.long_s", "the longer run resumes", "s", _LESS),
    Figure("W5.bytes_per_step", "a step", "bytes", _LESS),
    Figure("W6.worker_mb", "its process", "MB", _LESS),
    Figure("W6.server_mb", "its server", "MB", _LESS),
    Figure("W7.times_said", "stored, in what was said", "×", _LESS),
    Figure("W7.resume_s", "resumes", "s", _LESS),
    Figure("W8.parked", "parked", "runs", None),
    Figure("W8.peak_mb", "its process", "MB", _LESS),
    Figure("W8.server_mb", "its server", "MB", _LESS),
    Figure("W8.cpu_percent", "its process, of a core while idle", "%", _LESS),
    Figure("W8.server_cpu_percent", "its server, of a core while idle", "%", _LESS),
    Figure("W8.wake_ms", "an event is acted on after, median", "ms", _LESS),
    Figure("W9.steps_per_s_1", "1 worker", "steps/s", _MORE),
    Figure("W9.steps_per_s_2", "2 workers", "steps/s", _MORE),
    Figure("W9.steps_per_s_4", "4 workers", "steps/s", _MORE),
    Figure("T1.share", "of the ideal", "%", _MORE),
    Figure("T2.share", "of the ideal", "%", _MORE),
)
BY_KEY: Mapping[str, Figure] = {figure.key: figure for figure in FIGURES}

WORKLOADS = tuple(dict.fromkeys(figure.workload for figure in FIGURES))


def titles(sizes: Sizes) -> dict[str, str]:
    """What each workload is, with the sizes that were used."""
    return {
        "W1": f"one run of {sizes.steps:,} steps, one after the other",
        "W2": f"{sizes.runs:,} runs of {sizes.steps_of_a_run} steps at the same time, in one process",
        "W3": f"{sizes.queued:,} queued runs of one step; and one on an idle system, {sizes.idle_starts} times",
        "W4": f"a run of {sizes.short_run:,} and one of {sizes.long_run:,} steps resume in a new process, its start included",
        "W5": "the store, per step of W1",
        "W6": "peak memory in W2",
        "W7": f"a ReAct conversation of {sizes.turns:,} turns of 2 × 2 kB: what is stored for it, and its resume",
        "W8": f"a worker beside {sizes.parked:,} parked runs, which also sends the events",
        "W9": f"{sizes.shared_runs:,} queued runs of {sizes.shared_steps} steps for several worker processes on PostgreSQL",
        "T1": f"{sizes.slow_steps} steps, one after the other, with tools that take {sizes.tool_ms:.0f} ms",
        "T2": f"{sizes.slow_runs} runs of {sizes.slow_steps_of_a_run} such steps at the same time",
    }
