"""Several `work` and `result` calls in one app with a slow server.

Drains, a second `work`, limits, an answer that fails.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs
from tests.postgres.tools import SETTINGS

from perdure import Agent, Perdure, Run, agent, tool
from perdure.errors import StoreUnavailable


class Guests:
    """An agent whose runs stay until they are let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.finish = asyncio.Event()

        @tool(effect="idempotent")
        async def stay(name: str) -> None:
            self.begun.append(name)
            await self.finish.wait()

        @agent(version="1")
        async def guest(run: Run) -> str:
            await stay(run.id)
            return run.id

        self.agent: Agent[Any, Any] = guest


def test_an_app_is_drained_and_begins_anew_again_and_again(postgres_url: str) -> None:
    guests = Guests()
    guest, begun, finish = guests.agent, guests.begun, guests.finish

    async def main() -> list[str]:
        async with Perdure(postgres_url, agents=[guest], settings=SETTINGS) as app:
            handles = [await app.start(guest, id=f"r-{number}") for number in range(4)]
            for _ in range(3):
                finish.clear()
                begun.clear()
                late = await app.start(guest)
                working = asyncio.create_task(app.work())
                while late.id not in begun:
                    await asyncio.sleep(0.01)
                driving = asyncio.create_task(app.engine.drive(late.id))
                await asyncio.sleep(0.02)
                app.drain()
                finish.set()
                await asyncio.gather(working, driving, app.engine.drive(late.id))
                assert (await late.row()).status == "succeeded"
            return [await handle.result() for handle in handles]

    assert asyncio.run(asyncio.wait_for(main(), 100)) == [f"r-{number}" for number in range(4)]


def test_a_drain_while_the_worker_signs_on_ends_every_work(postgres_url: str) -> None:
    @agent(version="1")
    async def guest(run: Run) -> None:
        pass

    async def main() -> None:
        async with Perdure(postgres_url, agents=[guest], settings=SETTINGS) as app:
            works = [asyncio.create_task(app.work()) for _ in range(3)]
            await asyncio.sleep(0)
            app.drain()
            await asyncio.gather(*works)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_several_who_work_in_one_app_keep_to_its_concurrency_together(postgres_url: str) -> None:
    guests = Guests()
    guest, begun, finish = guests.agent, guests.begun, guests.finish

    async def main() -> int:
        async with Perdure(postgres_url, agents=[guest], settings=structs.replace(SETTINGS, concurrency=4)) as app:
            handles = [await app.start(guest) for _ in range(20)]
            works = [asyncio.create_task(app.work()) for _ in range(4)]
            while len(begun) < 4:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # in which too many would come
            at_a_time = len(begun)
            finish.set()
            await asyncio.gather(*(handle.result() for handle in handles))
            app.drain()
            await asyncio.gather(*works)
            return at_a_time

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 4


@pytest.mark.parametrize("where", ["register", "claim"])
def test_who_waits_for_a_result_goes_on_when_its_worker_cannot_reach_the_server(postgres_url: str, where: str) -> None:
    @agent(version="1")
    async def quick(run: Run) -> int:
        return 7

    async def main() -> Any:
        async with Perdure(postgres_url, agents=[quick], settings=SETTINGS) as app:
            handle = await app.start(quick)
            real, failures = getattr(app.store, where), [1]

            def away(*args: Any, **kwargs: Any) -> Any:
                if failures:
                    failures.pop()
                    raise StoreUnavailable("the server is away for a moment")
                return real(*args, **kwargs)

            setattr(app.store, where, away)
            return await handle.result()

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 7
