"""Workloads about waiting: runs that are parked, decisions, timers that are due together, and many children."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import agents
from elsewhere import child, worker
from figures import Figure, Sample
from here import new_path, url_of

from perdure import Perdure, Settings

_PATIENCE_S = 60.0
_PARKED = 10_000
_IDLE_S = 1.5


def parked(folder: Path) -> list[Figure]:
    """A worker beside 10,000 runs that wait for an approval: its memory, its CPU time, the latency of a decision."""
    url = url_of(new_path(folder))
    child(folder, "park", url, _PARKED)
    empty = url_of(new_path(folder))
    # Measure both workers at the same time: both are idle, so neither slows down the other.
    with ThreadPoolExecutor(2) as both:
        pairs = [list(both.map(partial(_idle, folder), (url, empty))) for _ in range(3)]
    crowded, alone = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    more = Sample.of([many[0] - one[0] for many, one in zip(crowded, alone, strict=True)])
    share = Sample.of([many[1] for many in crowded])
    beside = Sample.of([one[1] for one in alone]).median
    with worker(folder, url):
        waits = Sample.of(asyncio.run(_decisions(url, 20)))
    return [
        Figure("10,000 parked runs, memory that they cost a worker", more, "MB", 30, "at most", "against a worker on an empty journal"),
        Figure("10,000 parked runs, share of a core", share, "%", 1.0, "at most", f"{beside:.2f} % on an empty journal"),
        Figure("a decision is acted on by an idle worker elsewhere", waits, "ms", 50, "at most", "beside the parked ones, 20 times"),
    ]


def _idle(folder: Path, url: str) -> tuple[float, ...]:
    """Peak memory in MB and share of a core in % of a worker that has nothing to do for a while."""
    return tuple(map(float, child(folder, "idle", url, _IDLE_S)))


async def _decisions(url: str, times: int) -> list[float]:
    """The time from approve() to the next effect of the run, which is driven in another process."""
    waits = []
    async with Perdure(url) as app:
        for _ in range(times):
            handle = await app.start(agents.asking)
            while not (pending := await app.approvals(run_id=handle.id)):  # until the approval is requested
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.03)
            begun = time.monotonic_ns()
            await app.approve(pending[0].approval, by="bench")
            waits.append((await handle.result(timeout=_PATIENCE_S) - begun) / 1e6)
    return waits


def timers(folder: Path) -> list[Figure]:
    """1,000 timers that are due in the same second."""
    late = Sample.of([asyncio.run(_late(url_of(new_path(folder)), 1000)) for _ in range(3)])
    return [
        Figure("1,000 timers due in the same second, the last one fires after", late, "s", 2.0, "at most", "the second itself included")
    ]


async def _late(url: str, runs: int) -> float:
    async with Perdure(url, agents=[agents.sleeper], settings=Settings(park_after_s=0.1)) as app:
        due = time.time() + 2.0
        handles = [await app.start(agents.sleeper, due + number / runs) for number in range(runs)]
        working = asyncio.ensure_future(app.work())
        for handle in handles:
            await handle.result(timeout=_PATIENCE_S)
        seconds = time.time() - due
        app.drain()
        await working
    return seconds


def children(folder: Path) -> list[Figure]:
    """A parent with 1,000 children, compared with a parent with 250 children."""
    many = [asyncio.run(_family(url_of(new_path(folder)), 1000)) for _ in range(3)]
    few = [asyncio.run(_family(url_of(new_path(folder)), 250)) for _ in range(3)]
    rate = Sample.of([1000 / seconds for seconds in many])
    growth = Sample.of(many).over(Sample.of(few))
    return [
        Figure("a parent with 1,000 children of one call", rate, "children/s", note="fan-out, results and the parent's end"),
        Figure("1,000 children, in times of 250", growth, "×", 6, "at most", "4 would be linear"),
    ]


async def _family(url: str, count: int) -> float:
    async with Perdure(url, agents=[agents.parent]) as app:
        begun = time.perf_counter()
        await app.run(agents.parent, count)
        return time.perf_counter() - begun


def rewinding(folder: Path) -> list[Figure]:
    """The plan of a rewind of a run with 10,000 events: in resumes of the same run, both in CPU time of this process."""
    resumes, rewinds = asyncio.run(_rewinds(url_of(new_path(folder)), 5_000))
    told = f"{rewinds.median:,.0f} ms against {resumes.median:,.0f} ms"
    return [Figure("10,000 events rewind, in resumes", rewinds.over(resumes), "×", 1.5, "at most", told)]


async def _rewinds(url: str, steps: int) -> tuple[Sample, Sample]:
    settings = Settings(synchronous="normal", park_after_s=0, cache_runs=0)
    async with Perdure(url, agents=[agents.patient], settings=settings) as app:
        await app.start(agents.patient, steps, id="r")
        await app.drive("r", wait=False)
        last = (await app.handle("r").row()).seq
    resumes, rewinds = [], []
    for to in (last - 1, last // 2 + 1, 2) * 3:
        async with Perdure(url, agents=[agents.patient], settings=settings) as app:
            await app.signal("r", "other", None)
            begun = time.process_time()
            await app.drive("r", wait=False)
            resumed = time.process_time()
            await app.rewind("r", to, dry_run=True)
            resumes.append((resumed - begun) * 1e3)
            rewinds.append((time.process_time() - resumed) * 1e3)
    return Sample.of(resumes), Sample.of(rewinds)
