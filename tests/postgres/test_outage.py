"""An outage that is longer than a lease.

All workers were silent for the same time, and none counts another as dead.
"""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import structs
from tests.postgres.tools import SETTINGS, all_ended, check_journals, create_run_of, opened, working

from perdure import Run, agent, tool
from perdure.store.api import Store

OUTAGE_S = 2.6
IMPATIENT = structs.replace(SETTINGS, lease_s=1.0, concurrency=2)


def outlast(postgres: Any, url: str) -> tuple[list[str], list[bool]]:
    """Two workers, each with two calls under way during the whole outage.

    Returns what was shipped, and whether each run changed its worker.
    """
    shipped: list[str] = []

    @tool(effect="once", timeout=60)
    async def ship(order: str) -> str:
        await asyncio.sleep(OUTAGE_S + 1.0)
        shipped.append(order)
        return order

    @agent(version="1")
    async def seller(run: Run, order: str) -> str:
        return str(await ship(order))

    def create(store: Store) -> None:
        for n in range(4):
            create_run_of(store, seller, f"o{n}", f"o{n}")

    async def main(one: Store, two: Store) -> None:
        async with working(one, [seller], IMPATIENT), working(two, [seller], IMPATIENT):
            await asyncio.to_thread(create, one)
            await asyncio.sleep(0.8)
            await asyncio.to_thread(postgres.stop, "fast")
            await asyncio.sleep(OUTAGE_S)
            await asyncio.to_thread(postgres.start)
            await all_ended(one)

    with opened(url) as one, opened(url) as two:
        asyncio.run(main(one, two))
        hands = [sum(event.type == "run_claimed" for event in one.read(f"o{n}")) > 1 for n in range(4)]
    return shipped, hands


def test_calls_that_outlast_an_outage_are_recorded_and_nobody_is_taken_for_dead(postgres: Any, postgres_url: str) -> None:
    shipped, hands = outlast(postgres, postgres_url)
    assert sorted(shipped) == ["o0", "o1", "o2", "o3"]
    assert hands == [False] * 4
    check_journals(postgres_url)
