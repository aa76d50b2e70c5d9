"""How long a resume takes after 10,000 turns with checkpoints, compared with a resume after the last 10 turns alone.

    .venv/bin/python bench/checkpoints.py [--turns 10000] [--url postgresql://…]

A resume is what a worker does between its claim and the next thing that the agent asks for: it reads the events that it
needs from the database, folds them and replays the agent. The target is a ratio of at most 2.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from perdure import Perdure, Run, agent, tool
from perdure.core.run_core import RunCore
from perdure.core.steps import JournalRead
from perdure.engine.local.worker import run_settings
from perdure.settings import Settings
from perdure.store.open import open_store

EVERY = 10  # turns in a life


@tool(effect="read")
async def look(turn: int) -> str:
    return f"turn {turn}"


@agent(version="1")
async def turns(run: Run, count: int) -> int:
    done: int = run.restored or 0
    for _ in range(EVERY):
        if done == count:
            return int(await run.receive("more"))
        await look(done)
        done += 1
    if done < count:
        await run.checkpoint(done)
    return int(await run.receive("more"))


@agent(version="1")
async def plain(run: Run, count: int) -> int:
    for turn in range(count):
        await look(turn)
    return int(await run.receive("more"))


async def made(url: str, turns_: int) -> None:
    async with Perdure(url, agents=[turns, plain]) as app:
        for made_by, count, name in ((turns, turns_, "long"), (turns, EVERY, "short"), (plain, turns_, "without")):
            await app.start(made_by, count, id=name)
            await app.drive(name, wait=False)


def resumed_ms(store: object, run_id: str, times: int) -> float:
    """The median time of a resume: read, fold, replay."""
    code = plain if run_id == "without" else turns
    settings = run_settings(Settings(), still=False)
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        events = store.read_life(run_id)  # type: ignore[attr-defined]
        core = RunCore(run_id, code, settings, iter(lambda: "0" * 32, ""), {})
        core.step(JournalRead(events), events[-1].ts, 0)
        took.append((time.perf_counter() - begun) * 1e3)
        core.close()
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--url")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        url = args.url or f"sqlite:///{folder}/journal.db"
        asyncio.run(made(url, args.turns))
        store = open_store(url)
        try:
            long, short = resumed_ms(store, "long", 101), resumed_ms(store, "short", 101)
            without = resumed_ms(store, "without", 5)
            row = store.get("long")
            assert row is not None
            print(f"resume after {args.turns:,} turns ({row.seq:,} events), a checkpoint every {EVERY}: {long:.2f} ms")
            print(f"resume after the last {EVERY} turns alone: {short:.2f} ms")
            print(f"ratio: {long / short:.2f} (target: at most 2)")
            print(f"without checkpoints: {without:.0f} ms, {without / short:.0f} times as long")
        finally:
            store.close()


if __name__ == "__main__":
    main()
