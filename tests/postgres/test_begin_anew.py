"""After a drain an app begins anew with another worker, while those who were driving with the old one may still be asking the server."""

from __future__ import annotations

import asyncio

from tests.postgres.tools import SETTINGS

from perdure import Perdure, Run, agent, tool


def test_an_app_is_drained_and_begins_anew_again_and_again(postgres_url: str) -> None:
    begun: list[str] = []
    finish = asyncio.Event()

    @tool(effect="idempotent")
    async def stay(name: str) -> None:
        begun.append(name)
        await finish.wait()

    @agent(version="1")
    async def guest(run: Run) -> str:
        await stay(run.id)
        return run.id

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
                driving = asyncio.create_task(app.drive(late.id))
                await asyncio.sleep(0.02)
                app.drain()
                finish.set()
                await asyncio.gather(working, driving, app.drive(late.id))
                assert (await late.status()).status == "succeeded"
            return [await handle.result() for handle in handles]

    assert asyncio.run(asyncio.wait_for(main(), 100)) == [f"r-{number}" for number in range(4)]
