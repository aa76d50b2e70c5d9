"""What the counters of a worker cost: `.venv/bin/python bench/metrics.py`.

The same work is done in turns: with counters that count nothing (off), with the counters that every worker has (on), and
with the HTTP server and a program that reads /metrics twice a second (read). CPU seconds count, because they vary less
than wall seconds on a shared machine. A ratio is off / on of one round; the median of the rounds counts.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from perdure import MetricsServer, Perdure, Run, agent, tool
from perdure.engine.counts import Counts

ROUNDS, RUNS, CALLS = 15, 100, 20


@tool(effect="keyed")
async def step(text: str) -> str:
    return text


@agent(version="1")
async def steps(run: Run, calls: int) -> int:
    for number in range(calls):
        await step(f"{number:020d}")
    return calls


class _Nothing:
    """Counts nothing."""

    def add(self, *_: Any) -> None:
        pass


class _Off(Counts):
    """Counters that count nothing."""

    def __init__(self) -> None:
        super().__init__()
        nothing: Any = _Nothing()
        self.claims = self.takeovers = self.resumes = self.commit_s = self.batch = self.replay_s = nothing

    def appended(self, agent: str, queue: str, state: Any, sealed: Sequence[Any]) -> None:
        pass


async def _work(how: str) -> float:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        async with Perdure(f"sqlite:///{folder}/j.db", [steps]) as app:
            if how == "off":
                app.engine._counts = _Off()  # type: ignore[attr-defined]
            reading = None
            if how == "read":
                server = stack.enter_context(MetricsServer(app, "127.0.0.1:0"))
                reading = asyncio.create_task(_read(server.port))
            begun_s = time.process_time()
            await asyncio.gather(*(app.run(steps, CALLS, id=f"r{number}") for number in range(RUNS)))
            took_s = time.process_time() - begun_s
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            return took_s


async def _read(port: int) -> None:
    while True:
        await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read())
        await asyncio.sleep(0.5)


def main() -> None:
    asyncio.run(_work("on"))  # the first round pays for imports
    took: dict[str, list[float]] = {"off": [], "on": [], "read": []}
    for number in range(ROUNDS):
        order = list(took)[number % 3 :] + list(took)[: number % 3]
        for how in order:
            took[how].append(asyncio.run(_work(how)))
    for how in ("on", "read"):
        ratios = [off / other for off, other in zip(took["off"], took[how], strict=True)]
        print(f"off / {how}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), {ROUNDS} rounds")
    print(f"CPU seconds for {RUNS * CALLS:,} calls: " + ", ".join(f"{how} {statistics.median(some):.3f}" for how, some in took.items()))


if __name__ == "__main__":
    main()
