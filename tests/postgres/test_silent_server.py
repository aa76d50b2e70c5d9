"""A server that does not answer: no question of a run to the server blocks the event loop."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest
from tests.postgres.tools import behind_proxy, opened, working

from perdure import Budget, Rate, Run, agent, tool
from perdure.core import codec
from perdure.core.events import Limits, RunCreated
from perdure.settings import Settings
from perdure.store.api import NewRun

SETTINGS = Settings(poll_s=0.05, drain_timeout_s=1.0, cancel_grace_s=0.1)


@pytest.mark.parametrize("limit", ["a budget", "a rate"])
def test_the_loop_goes_on_while_a_run_waits_to_hear_whether_it_may_make_a_call(postgres_url: str, limit: str) -> None:
    async def main() -> float:
        gate, longest = asyncio.Event(), [0.0]

        @tool(effect="read")
        async def wait_for_gate() -> None:
            await gate.wait()

        @tool(effect="idempotent", rate=Rate(limit=100, per=1.0) if limit == "a rate" else None)
        async def limited() -> int:
            return 1

        @agent(version="1", name="caller")
        async def caller(run: Run) -> int:
            await wait_for_gate()
            return await limited()

        async def turn() -> None:
            while True:
                begun = time.monotonic()
                await asyncio.sleep(0.01)
                longest[0] = max(longest[0], time.monotonic() - begun)

        budget: Limits | None = Budget(calls=10).limits if limit == "a budget" else None
        encoded = caller.bind((), {})
        created = RunCreated("r", caller.name, caller.version, "default", codec.pack(encoded)[0], target=caller.target, budget=budget)
        with behind_proxy(postgres_url, 30.0) as (slow, proxy), opened(postgres_url) as fast:
            fast.create_run(NewRun("r", created, uuid.uuid4().hex, time.time_ns() // 1000, codec.digest(encoded)))
            async with working(slow, [caller], SETTINGS):
                while "tool_call_initiated" not in [event.type for event in fast.read("r")]:
                    await asyncio.sleep(0.05)
                turning = asyncio.create_task(turn())
                proxy.silence()
                gate.set()
                await asyncio.sleep(8.0)
                silent = longest[0]
                turning.cancel()
                proxy.speak()
                while (row := fast.get("r")) is None or row.status != "succeeded":
                    await asyncio.sleep(0.05)
        return silent

    longest_s = asyncio.run(asyncio.wait_for(main(), 120))
    assert longest_s < 4.0, f"the loop stood still for {longest_s:.1f} s of 8"
