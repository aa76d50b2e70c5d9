"""An intent is written, but its answer is lost, and another worker makes the call.

The first worker then begins nothing.
"""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest
from tests.postgres.tools import behind_proxy, opened, working
from tests.servers.proxy import Cut

from perdure import Agent, Budget, Call, Outcome, Run, agent, tool
from perdure.core import codec
from perdure.core.events import Limits, RunCreated
from perdure.settings import Settings
from perdure.store.api import NewRun, RunRow, Store

# One statement, and a transaction of several (a run under a budget). The lease runs out; or it does not, and the others see that the
# worker's connection is gone.
SHORT = Settings(poll_s=0.05, flush_s=0.005, lease_s=1.0, drain_timeout_s=2.0, cancel_grace_s=0.1)
LONG = Settings(drain_timeout_s=2.0, cancel_grace_s=0.1)
ONE_STATEMENT, COMMIT = "^WITH moved AS|^WITH given AS", "^COMMIT$"


def payer_of(name: str, gate: asyncio.Event, deeds: list[str]) -> Agent[[], str]:
    @tool(effect="read", name="gate")
    async def wait_for_gate() -> None:
        await gate.wait()

    @tool(effect="once", timeout=0.5, name="pay")
    async def pay(call: Call) -> str:
        deeds.append(name)
        return name

    @pay.reconcile
    async def _(call: Call) -> Outcome:
        return Outcome.happened("x") if deeds else Outcome.not_happened()

    @agent(version="1", name="payer")
    async def payer(run: Run) -> str:
        await wait_for_gate()
        return await pay()

    return payer


def create(store: Store, payer: Agent[[], str], budget: Limits | None) -> None:
    encoded = payer.bind((), {})
    created = RunCreated("r", payer.name, payer.version, "default", codec.pack(encoded)[0], target=payer.target, budget=budget)
    store.create_run(NewRun("r", created, uuid.uuid4().hex, time.time_ns() // 1000, codec.digest(encoded)))


def row(store: Store) -> RunRow:
    found = store.get("r")
    assert found is not None
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "budget", "lost"),
    [
        (SHORT, None, ONE_STATEMENT),
        (SHORT, Budget(calls=10).limits, COMMIT),
        (LONG, None, ONE_STATEMENT),
        (LONG, Budget(calls=10).limits, COMMIT),
    ],
    ids=["at once", "in a transaction", "at once, within the lease", "in a transaction, within the lease"],
)
def test_a_worker_whose_answer_comes_after_another_has_made_the_call_does_not_make_it(
    postgres_url: str, settings: Settings, budget: Limits | None, lost: str
) -> None:
    async def main() -> None:
        gate, deeds = asyncio.Event(), list[str]()
        with behind_proxy(postgres_url, 1.5 if settings is SHORT else 10.0) as (slow, proxy), opened(postgres_url) as fast:
            payer = payer_of("first", gate, deeds)
            create(fast, payer, budget)
            async with working(slow, [payer], settings) as first:
                while row(fast).holder != first.id:
                    await asyncio.sleep(0.05)
                async with working(fast, [payer_of("second", gate, deeds)], settings):
                    await asyncio.sleep(settings.lease_s / 4 + 1.0)  # a beat of the first one: the second knows that it was alive
                    cut = proxy.rule(Cut(lost, "silent"))
                    gate.set()
                    await asyncio.to_thread(cut.wait_done)
                    proxy.silence()
                    proxy.reset()
                    while row(fast).status != "succeeded":
                        await asyncio.sleep(0.05)
                    assert deeds == ["second"]
                    assert "r" in first._drives, "the first one knows already: nothing is tested here"
                    proxy.speak()
                    proxy.reset()
                    while "r" in first._drives:
                        await asyncio.sleep(0.05)
        assert deeds == ["second"]

    asyncio.run(asyncio.wait_for(main(), 120))
