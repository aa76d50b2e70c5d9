"""A live worker drives every run that it holds, or releases it.

A worker that was cancelled or cut off during a claim leaves no run behind (G6).
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import psycopg
from tests.conformance.suite_waiting import hold
from tests.postgres.tools import SETTINGS, all_ended, opened

from perdure import Perdure, Run, agent, tool
from perdure.core.events import RunReleased
from perdure.store.api import Committed, RowChange
from perdure.store.cursor import Locked
from perdure.store.postgres.store import PostgresStore
from perdure.store.writer import GroupCommit


@tool(effect="once")
async def step(n: int) -> int:
    return n


@agent(version="1")
async def steps(run: Run) -> int:
    return int(await step(1)) + int(await step(2))


def test_who_is_cancelled_while_it_claims_strands_nothing(postgres_url: str) -> None:
    chance = random.Random(3)

    async def main() -> None:
        async with Perdure(postgres_url, agents=[steps], settings=SETTINGS) as app:
            for _ in range(40):
                handle = await app.start(steps)
                try:
                    await asyncio.wait_for(handle.result(), chance.uniform(0.0, 0.02))
                except (TimeoutError, asyncio.CancelledError):
                    pass
            for _ in range(15):
                await app.start(steps)
                serving = asyncio.create_task(app.work())
                await asyncio.sleep(chance.uniform(0.0, 0.03))
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
            serving = asyncio.create_task(app.work())
            await all_ended(app.store)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(main())


def test_a_run_whose_row_somebody_has_locked_holds_up_no_other_run_of_its_worker(postgres_url: str) -> None:
    """For example, a parent is inside a transaction tool and its child ends: only the child waits."""
    heard: dict[str, tuple[float, Any]] = {}

    async def main(store: PostgresStore) -> None:
        group = GroupCommit(store, asyncio.get_running_loop())
        begun_s = time.monotonic()
        for run_id in ("locked", "free"):
            append = hands[run_id].sealed(RunReleased("waiting", "x"), row=RowChange("waiting", release=True))
            group.submit(append, lambda answer, name=run_id: heard.update({name: (time.monotonic() - begun_s, answer)}))  # type: ignore[misc]
        while len(heard) < 2:
            await asyncio.sleep(0.01)
        group.close()

    with opened(postgres_url) as store, psycopg.connect(postgres_url) as somebody:
        hands = {run_id: hold(store, run_id) for run_id in ("locked", "free")}
        somebody.execute("SELECT 1 FROM perdure_runs WHERE run_id = 'locked' FOR UPDATE")
        asyncio.run(main(store))
    assert heard["free"][1] == Committed()
    assert heard["free"][0] < 2.0
    assert isinstance(heard["locked"][1], Locked)
