"""The workloads: the questions to a contestant, and the figures that are computed from its answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from bench.race.exchange import Failed
from bench.race.figures import BY_KEY
from bench.race.lanes import Lane, Store
from bench.race.table import Table
from bench.race.wire import SAID_CHARS
from msgspec import Struct

Figures = Mapping[str, float]
_LIMIT_S = 150.0
_BUILD_LIMIT_S = 600.0
_STORES: tuple[Store, ...] = ("sqlite", "postgres", "own")


class Measurement(Struct, frozen=True):
    """One cell for each lane and repeat. `prepare` runs once per lane; its result is used in every repeat."""

    name: str
    gives: tuple[str, ...]
    measure: Callable[[Table], Figures]
    prepare: Callable[[Table], Figures] | None = None
    stores: tuple[Store, ...] = _STORES
    as_shipped: bool = False  # also measured without the settings that are not in a contestant's documentation
    limit_s: float = _LIMIT_S
    prepare_limit_s: float = _LIMIT_S

    def takes(self, lane: Lane) -> bool:
        return lane.store in self.stores and (self.as_shipped or not lane.as_shipped)

    @property
    def workloads(self) -> set[str]:
        return {BY_KEY[key].workload for key in self.gives}


def one_run(table: Table) -> Figures:
    steps = table.sizes.steps
    done = table.ask("sequential", steps=steps, tool_ms=0)
    empty = _bytes_of_an_empty_store(table)
    return {
        "W1.steps_per_s": steps / done["seconds"],
        "W1.p50_us": done["p50_us"],
        "W1.p99_us": done["p99_us"],
        "W5.bytes_per_step": (done["bytes"] - empty) / (steps - 1),
    }


def _bytes_of_an_empty_store(table: Table) -> int:
    """The size of an empty store. One step is made first, because many contestants create their tables and files only then."""
    with table.another() as other:
        return int(other.ask("sequential", steps=1, tool_ms=0)["bytes"])


def many_runs(table: Table) -> Figures:
    runs, steps = table.sizes.runs, table.sizes.steps_of_a_run
    done = table.ask("together", runs=runs, steps=steps, tool_ms=0)
    return {"W2.steps_per_s": runs * steps / done["seconds"], "W6.worker_mb": done["peak_mb"], **_server_mb(table, "W6.server_mb")}


def _server_mb(table: Table, key: str) -> Figures:
    """For contestants with their own server."""
    return {} if table.server is None else {key: table.server.peak_mb()}


def queued(table: Table) -> Figures:
    """Contestants that first enqueue and then work report both times; one that works while runs arrive has one figure for both."""
    runs = table.sizes.queued
    done = table.ask("queue", runs=runs)
    if "through_seconds" in done:
        return {"W3.through_per_s": runs / done["through_seconds"]}
    return {
        "W3.runs_per_s": runs / done["seconds"],
        "W3.enqueued_per_s": runs / done["enqueue_seconds"],
        "W3.through_per_s": runs / (done["enqueue_seconds"] + done["seconds"]),
    }


def on_idle(table: Table) -> Figures:
    with table.companion("worker"):
        waits = table.ask("idle", times=table.sizes.idle_starts)["ms"]
    # With forty values a percentile above the 97th is the same as the largest.
    return {"W3.idle_ms": statistics.median(waits), "W3.idle_slowest_ms": max(waits)}


# -- processes that have died -------------------------------------------------------------------------------------------------
def _build(steps: Callable[[Table], int], table: Table) -> Figures:
    table.ask("build", steps=steps(table))
    return {}


def _resume(key: str, table: Table) -> Figures:
    return {key: table.seconds_to_last_words("resume")}


def _talk(table: Table) -> Figures:
    turns = table.sizes.turns
    table.ask("talk", turns=turns)
    stored = table.ask("size")["bytes"] - _bytes_of_an_empty_store(table)
    return {"W7.times_said": stored / (turns * 2 * SAID_CHARS)}


def _talk_on(table: Table) -> Figures:
    return {"W7.resume_s": table.seconds_to_last_words("talk_on")}


# -- runs that wait, and workers that share -----------------------------------------------------------------------------------
def _park(table: Table) -> Figures:
    return {"W8.parked": table.ask("park", runs=table.sizes.parked)["runs"]}


def _parked(table: Table) -> Figures:
    wakes = table.sizes.wakes
    done = table.ask("parked", seconds=table.sizes.parked_s, wakes=wakes, woken=table.woken)
    table.woken += wakes
    return {
        "W8.peak_mb": done["peak_mb"],
        "W8.cpu_percent": done["cpu_percent"],
        "W8.wake_ms": statistics.median(done["wake_ms"]),
        **_server_mb(table, "W8.server_mb"),
        **({"W8.server_cpu_percent": done["server_cpu_percent"]} if "server_cpu_percent" in done else {}),
    }


def _shared(workers: int, table: Table) -> Figures:
    runs, steps = table.sizes.shared_runs, table.sizes.shared_steps
    table.ask("fill", runs=runs, steps=steps)
    with ExitStack() as crew:
        hands = [crew.enter_context(table.companion("worker", on_cue=True)) for _ in range(workers)]
        begun = time.monotonic_ns()
        for hand in hands:
            hand.cue()
        done = table.ask("wait", runs=runs)["done_ns"]
    if done <= begun:
        raise Failed("wait: the runs had ended before the workers began")
    return {f"W9.steps_per_s_{workers}": runs * steps / ((done - begun) / 1e9)}


# -- tools that take their time -----------------------------------------------------------------------------------------------
def _slow_run(table: Table) -> Figures:
    sizes = table.sizes
    done = table.ask("sequential", steps=sizes.slow_steps, tool_ms=sizes.tool_ms)
    return {"T1.share": 100 * sizes.slow_steps * sizes.tool_ms / 1000 / done["seconds"]}


def _slow_runs(table: Table) -> Figures:
    sizes = table.sizes
    done = table.ask("together", runs=sizes.slow_runs, steps=sizes.slow_steps_of_a_run, tool_ms=sizes.tool_ms)
    return {"T2.share": 100 * sizes.slow_steps_of_a_run * sizes.tool_ms / 1000 / done["seconds"]}


MEASUREMENTS = (
    Measurement("one run", ("W1.steps_per_s", "W1.p50_us", "W1.p99_us", "W5.bytes_per_step"), one_run, as_shipped=True),
    Measurement("many runs", ("W2.steps_per_s", "W6.worker_mb", "W6.server_mb"), many_runs, as_shipped=True),
    Measurement("a queue", ("W3.runs_per_s", "W3.enqueued_per_s", "W3.through_per_s"), queued, as_shipped=True),
    Measurement("an idle system", ("W3.idle_ms", "W3.idle_slowest_ms"), on_idle),
    Measurement(
        "a short run resumes", ("W4.short_s",), partial(_resume, "W4.short_s"), partial(_build, lambda table: table.sizes.short_run)
    ),
    Measurement(
        "a long run resumes",
        ("W4.long_s",),
        partial(_resume, "W4.long_s"),
        partial(_build, lambda table: table.sizes.long_run),
        prepare_limit_s=_BUILD_LIMIT_S,
    ),
    Measurement("a conversation", ("W7.times_said", "W7.resume_s"), _talk_on, _talk),
    Measurement(
        "parked runs",
        ("W8.parked", "W8.peak_mb", "W8.server_mb", "W8.cpu_percent", "W8.server_cpu_percent", "W8.wake_ms"),
        _parked,
        _park,
    ),
    *(
        Measurement(f"workers sharing: {count}", (f"W9.steps_per_s_{count}",), partial(_shared, count), stores=("postgres",))
        for count in (1, 2, 4)
    ),
    Measurement("slow tools, one run", ("T1.share",), _slow_run),
    Measurement("slow tools, many runs", ("T2.share",), _slow_runs),
)
