"""A journal with runs of every kind, made by real agents; and a separate file with the effects of these agents."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

from perdure import Agent, Budget, Fatal, Perdure, Run, Settings, agent, tool
from perdure.inspect.consistency import Relatives
from perdure.inspect.verify import verify_run
from perdure.inspect.view import all_rows
from perdure.store.open import open_store

SETTINGS = Settings(poll_s=0.01, park_after_s=0, drain_timeout_s=5.0)
LONG = "x" * 100_000


class World:
    """Where effects are counted: one line for each."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger"

    def did(self, what: str) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{what}\n".encode())
        os.close(file)

    def count(self) -> Counter[str]:
        return Counter(self.path.read_text().splitlines())

    def agents(self) -> list[Agent[Any, Any]]:
        @tool(effect="once")
        async def pay(what: str) -> str:
            self.did(f"pay {what}")
            return f"paid {what}"

        @tool(effect="once", approval=True)
        async def refund(what: str) -> str:
            self.did(f"refund {what}")
            return f"refunded {what}"

        @tool(effect="idempotent")
        async def odd(text: str) -> str:
            return text + "\0\ud800"

        @tool(effect="once")
        async def broken() -> None:
            raise Fatal("no")

        @agent(version="1")
        async def shop(run: Run, name: str) -> str:
            await pay(f"{name} first")
            await refund(name)
            return await pay(f"{name} second")

        @agent(version="1")
        async def waiting(run: Run, name: str) -> Any:
            await pay(f"{name} first")
            got = await run.receive("go")
            await pay(f"{name} second")
            return got

        @agent(version="1")
        async def parent(run: Run, name: str) -> list[Any]:
            return list(await asyncio.gather(waiting(f"{name} a"), waiting(f"{name} b")))

        @agent(version="1")
        async def large(run: Run) -> str:
            await odd("NUL \0 and \udfff")
            return LONG

        @agent(version="1")
        async def failing(run: Run) -> None:
            await pay("failing")
            await broken()

        return [shop, waiting, parent, large, failing]


async def plant(url: str, world: World, copies: int = 1) -> None:
    """Runs that are over, and runs that wait: for an approval, a signal, children."""
    agents = {one.name: one for one in world.agents()}
    async with Perdure(url, agents.values(), settings=SETTINGS) as app:
        for n in range(copies):
            await app.start(agents["shop"], f"shop-{n}", id=f"shop-{n}", tenant="t", actor="ann")
            await app.start(agents["waiting"], f"waiting-{n}", id=f"waiting-{n}")
            await app.start(agents["parent"], f"parent-{n}", id=f"parent-{n}", budget=Budget(calls=100, usd=5))
            await app.start(agents["large"], id=f"large-{n}")
            await app.start(agents["failing"], id=f"failing-{n}")
            for name in ("shop", "waiting", "parent", "large", "failing"):
                await app.engine.drive(f"{name}-{n}", wait=False)
            for child in ("1", "2"):
                await app.engine.drive(f"parent-{n}/{child}", wait=False)


async def finish(url: str, world: World, copies: int = 1) -> dict[str, Any]:
    """Give every run what it waits for. Returns the results of the runs that succeed."""
    agents = world.agents()
    async with Perdure(url, agents, settings=SETTINGS) as app:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(app.work(stop=stop))
            for n in range(copies):
                for run_id in (f"waiting-{n}", f"parent-{n}/1", f"parent-{n}/2"):
                    await app.signal(run_id, "go", run_id, key="only")
            for approval in await app.approvals():
                await app.approve(approval.approval, by="bob")
            ids = [f"{name}-{n}" for n in range(copies) for name in ("shop", "waiting", "parent", "large")]
            found = {run_id: await app.handle(run_id).result(timeout=60) for run_id in ids}
            stop.set()
    return found


def results(copies: int = 1) -> dict[str, Any]:
    each = [
        {
            f"shop-{n}": f"paid shop-{n} second",
            f"waiting-{n}": f"waiting-{n}",
            f"parent-{n}": [f"parent-{n}/1", f"parent-{n}/2"],
            f"large-{n}": LONG,
        }
        for n in range(copies)
    ]
    return {run_id: result for some in each for run_id, result in some.items()}


def effects(copies: int = 1) -> Counter[str]:
    """Each of them once."""
    names = [name for n in range(copies) for name in (f"shop-{n}", f"waiting-{n}", f"parent-{n} a", f"parent-{n} b")]
    found = Counter(f"pay {name} {which}" for name in names for which in ("first", "second"))
    return found + Counter(f"refund shop-{n}" for n in range(copies)) + Counter({"pay failing": copies})


def verified(url: str) -> dict[str, str]:
    """The head of every run, each recomputed and found sound."""
    store = open_store(url)
    try:
        assert store.problems() == []
        kin = Relatives(store)
        verdicts = [verify_run(store, row, kin) for row in all_rows(store)]
    finally:
        store.close()
    assert {verdict.run_id: verdict.problem for verdict in verdicts if verdict.problem} == {}
    return {verdict.run_id: verdict.head for verdict in verdicts}
