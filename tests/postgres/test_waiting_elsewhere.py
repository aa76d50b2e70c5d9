"""Whoever waits in one process for what another one does hears of it soon: nothing rings there for the end of a run."""

from __future__ import annotations

import asyncio

import pytest
from tests.postgres.tools import SETTINGS
from tests.servers.proxy import Cut, Proxy

from perdure import Perdure, Run, agent
from perdure.app import Handle
from perdure.store.api import RunRow


@agent(version="1")
async def napping(run: Run) -> str:
    await asyncio.sleep(0.5)
    return "slept well"


def test_a_result_is_looked_for_often_while_the_wait_is_young(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        looks = 0
        async with Perdure(postgres_url, settings=SETTINGS) as client, Perdure(postgres_url, agents=[napping], settings=SETTINGS) as other:
            get = client.store.get

            def counting(run_id: str) -> RunRow | None:
                nonlocal looks
                looks += 1
                return get(run_id)

            monkeypatch.setattr(client.store, "get", counting)
            async with asyncio.TaskGroup() as group:
                group.create_task(other.work())
                assert await (await client.start(napping)).result() == "slept well"
                other.drain()
        return looks

    # By the tick of a quarter of a second, it would be three or four.
    assert asyncio.run(main()) >= 10


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
                cut = proxy.rule(Cut(question, "before", times=4))  # a read that was cut off is tried once more by itself
                said = await result, await followed
                assert cut.made == 4
                other.drain()
                return said

    said, seqs = asyncio.run(main())
    assert said == "slept well"
    assert seqs == list(range(1, len(seqs) + 1))


async def _seqs(handle: Handle) -> list[int]:
    return [event.seq async for event in handle.follow()]
