"""Workloads in this process: one run, many runs, a full queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import agents
import litter
import raw
from figures import Figure, Sample

from perdure import Agent, Perdure, Settings
from perdure.core.events import Event, RunSucceeded

_LEAST, _MOST = 3, 5  # repeats: more than the minimum only while they have taken less than this
_ENOUGH_S = 2.0


def new_path(folder: Path) -> Path:
    return folder / f"ours-{time.monotonic_ns()}.db"


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def beside_raw(folder: Path, ours: Callable[[str], Coroutine[Any, Any, float]]) -> tuple[Sample, Sample]:
    """Measure raw commits and `ours` in turn, each on a new file with a warm log. Returns the rates of both."""
    theirs: list[float] = []
    own: list[float] = []
    begun = time.perf_counter()
    while len(own) < _LEAST or (len(own) < _MOST and time.perf_counter() - begun < _ENOUGH_S):
        litter.collect()  # garbage of one repeat must not cost time in the next
        theirs.append(raw.commits_per_s(folder))
        path = new_path(folder)
        with raw.warm(path):
            own.append(asyncio.run(ours(url_of(path))))
    return Sample.of(theirs), Sample.of(own)


def sequential(folder: Path) -> list[Figure]:
    """One run of 1,000 sequential calls. Every call costs one commit, so the figure is compared with raw commits."""
    commits, rate = _on_new_files(folder, 1000)
    first = Figure(
        "one run, 1,000 calls on a new file: share of the raw commit rate",
        rate.over(commits),
        "×",
        0.5,
        note=_beside(rate, "calls/s", commits),
    )
    commits, rate = beside_raw(folder, lambda url: one_run(url, agents.steps, 1000))
    later = Figure("the same where the log has its full length", rate.over(commits), "×", note=_beside(rate, "calls/s", commits))
    return [first, later]


def _on_new_files(folder: Path, calls: int) -> tuple[Sample, Sample]:
    """The rates of the first commits of a new file: raw commits and perdure's, in turn."""
    theirs: list[float] = []
    own: list[float] = []
    for _ in range(_LEAST):
        litter.collect()
        theirs.append(raw.first_commits_per_s(folder, calls))
        own.append(asyncio.run(one_run(url_of(new_path(folder)), agents.steps, calls)))
    return Sample.of(theirs), Sample.of(own)


def reading(folder: Path) -> list[Figure]:
    """One run of 1,000 reads: a read waits for no commit, because a lost read can be repeated."""
    commits, rate = beside_raw(folder, lambda url: one_run(url, agents.looks, 1000))
    cost = Sample.of([1e6 / one for one in rate.values])
    return [Figure("one run, 1,000 reads: a call", cost, "µs", note=_beside(rate, "calls/s", commits))]


def space(folder: Path) -> list[Figure]:
    """Bytes in the database for one call, after a checkpoint of its log."""
    calls = 1000
    # The number of bytes does not depend on syncs.
    quick = Settings(synchronous="normal")

    def size(runs: Sequence[int]) -> int:
        path = new_path(folder)
        for one in runs:
            asyncio.run(one_run(url_of(path), agents.steps, one, quick))  # closing checkpoints the log
        return path.stat().st_size

    per_call = Sample.of([(size([0, calls]) - size([0])) / calls for _ in range(_LEAST)])
    return [Figure("database per call (20-character argument)", per_call, "bytes", 700, "at most", "after a checkpoint")]


def concurrent(folder: Path) -> list[Figure]:
    """200 concurrent runs of 20 calls in one process: they share commits."""
    runs, calls = 200, 20
    commits, seconds = beside_raw(folder, lambda url: serve(url, agents.steps, [calls] * runs))
    rate = Sample.of([runs * calls / one for one in seconds.values])
    target = min(10_000.0, 4 * commits.median)
    return [
        Figure(
            "200 runs of 20 calls at a time",
            rate,
            "calls/s",
            target,
            note=f"{rate.over(commits).median:.2f} × {commits.median:,.0f} raw commits/s",
        )
    ]


def queued(folder: Path) -> list[Figure]:
    """1,000 runs of one call, queued before the worker begins."""
    runs = 1000
    commits, seconds = beside_raw(folder, lambda url: serve(url, agents.steps, [1] * runs))
    rate = Sample.of([runs / one for one in seconds.values])
    return [Figure("1,000 queued runs of one call", rate, "runs/s", 1500, note=_beside(rate, "runs/s", commits))]


async def one_run(url: str, agent: Agent[..., Any], calls: int, settings: Settings | None = None) -> float:
    """Calls per second of one run, driven in this process."""
    async with Perdure(url, agents=[agent], settings=settings) as app:
        begun = time.perf_counter()
        await app.run(agent, calls)
        return calls / (time.perf_counter() - begun)


def counted(runs: int) -> tuple[Callable[[str, Sequence[Event]], None], asyncio.Event]:
    """An observer, and the event that it sets when `runs` runs have succeeded."""
    left, stop = runs, asyncio.Event()

    def count(run_id: str, events: Sequence[Event]) -> None:
        nonlocal left
        left -= sum(isinstance(event.body, RunSucceeded) for event in events)
        if not left:
            stop.set()

    return count, stop


async def serve(url: str, agent: Agent[..., Any], inputs: Sequence[int]) -> float:
    """Seconds from a worker's start until it has finished all these runs, which were queued before."""
    count, stop = counted(len(inputs))
    async with Perdure(url, agents=[agent], observers=[count]) as app:
        for one in inputs:
            await app.start(agent, one)
        begun = time.perf_counter()
        await app.work(stop=stop)
        return time.perf_counter() - begun


def _beside(rate: Sample, unit: str, commits: Sample) -> str:
    return f"{rate.median:,.0f} {unit} beside {commits.median:,.0f} raw commits/s"
