"""A caller that waits for a run of another process continues to wait during an outage of the database."""

from __future__ import annotations

import asyncio

import pytest
from tests.postgres.tools import SETTINGS
from tests.servers.proxy import Cut, Proxy

from perdure import Perdure, Run, agent
from perdure.app import Handle


@agent(version="1")
async def napping(run: Run) -> str:
    await asyncio.sleep(0.5)
    return "slept well"


@pytest.mark.parametrize(
    "question", [r"run_id = \$1", r"status NOT IN \('succeeded'", r"convert_to\(data"], ids=["the run", "its family", "its end"]
)
def test_whoever_waits_goes_on_waiting_when_the_database_is_away_for_a_moment(postgres_url: str, question: str) -> None:
    async def main() -> tuple[str, list[int]]:
        with Proxy(postgres_url) as proxy:
            async with (
                Perdure(proxy.url(postgres_url), settings=SETTINGS) as client,
                Perdure(postgres_url, agents=[napping], settings=SETTINGS) as other,
                asyncio.TaskGroup() as group,
            ):
                group.create_task(other.work())
                handle = await client.start(napping)
                result = group.create_task(handle.result())
                followed = group.create_task(_seqs(handle))
                await asyncio.sleep(0.2)
                # A read that was cut off is repeated once by itself.
                cut = proxy.rule(Cut(question, "before", times=4))
                said = await result, await followed
                assert cut.made == 4
                other.drain()
                return said

    said, seqs = asyncio.run(main())
    assert said == "slept well"
    assert seqs == list(range(1, len(seqs) + 1))


async def _seqs(handle: Handle) -> list[int]:
    return [event.seq async for event in handle.follow()]
