"""Runs of every kind in one database, made by the real app, for the tests of everything that reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from perdure import Perdure, Retry, Run, Settings, agent, tool
from perdure.core import chain
from perdure.core.events import AnyBody
from perdure.store.api import Store
from perdure.store.open import open_store
from perdure.worker.clock import Clock
from perdure.worker.worker import Observer

SETTINGS = Settings(inline_bytes=400)
LEASE_US = 30_000_000
HOLDER = "w-alive"


@tool(effect="read")
async def lookup(order: str) -> dict[str, Any]:
    return {"order": order, "cents": 500}


@tool(effect="read")
async def long_read() -> str:
    return "x" * 2000


@tool(effect="idempotent", retry=Retry(attempts=3, base=0.001))
async def flaky(seen: list[int]) -> str:
    ATTEMPTS.append(1)
    if len(ATTEMPTS) % 2:
        raise ConnectionResetError("the line broke")
    return "at last"


@tool(effect="once")
async def charge(order: str, cents: int) -> dict[str, Any]:
    raise TimeoutError("no answer")


@tool(effect="once")
async def refuse() -> None:
    raise PermissionError("not for you")


ATTEMPTS: list[int] = []


@agent(version="1")
async def shop(run: Run, order: str) -> str:
    run.status("looking it up")
    await asyncio.gather(lookup(order), lookup(f"{order}/history"))
    run.decide("go on", among=["go on", "stop"], reason="it is due")
    text = await long_read()
    await flaky([1])
    run.note("all done")
    await asyncio.sleep(0.001)
    return text


@agent(version="1")
async def buy(run: Run, order: str) -> dict[str, Any]:
    details = await lookup(order)
    paid: dict[str, Any] = await charge(order, details["cents"])
    return paid


@agent(version="1")
async def forbidden(run: Run) -> None:
    await refuse()


@agent(version="1")
async def sleeper(run: Run, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


AGENTS = (shop, buy, forbidden, sleeper)


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def at_work(path: Path, work: Callable[[Perdure], Awaitable[object]], *observers: Observer, clock: Clock | None = None) -> None:
    """Do something with an app on this database, to its end."""

    async def main() -> None:
        async with Perdure(url_of(path), AGENTS, settings=SETTINGS, clock=clock, observers=observers) as app:
            await work(app)

    asyncio.run(main())


def make_zoo(path: Path) -> None:
    """One run in every state that a run can rest in."""

    async def zoo(app: Perdure) -> None:
        await app.start(shop, "o-1", id="done", tenant="acme", actor="user:17")
        await app.start(forbidden, id="failed")
        await app.start(sleeper, 3600.0, id="waiting")
        await app.start(buy, "o-2", id="doubt", actor="user:18")
        await app.start(sleeper, 3600.0, id="cancelled")
        await app.start(buy, "o-3", id="resolved")
        for run_id in ("done", "failed", "waiting", "doubt", "resolved"):
            await app.drive(run_id, wait=False)
        await app.drive("done")
        await app.drive("cancelled", wait=False)
        await app.cancel("cancelled", by="ann", reason="no longer needed")
        await app.drive("cancelled")
        await app.resolve("resolved", 2, happened={"id": "ch_7"}, by="ann", note="seen at the bank")
        await app.start(shop, "o-4", id="queued")

    at_work(path, zoo)


def hold(store: Store, run_id: str, agent: str) -> None:
    """A worker of this process claims the run and goes on holding it."""
    now = Clock().now()
    store.register(HOLDER, "host:1", 1, now)
    assert len(store.claim(HOLDER, [agent], 1, now, run_id=run_id)) == 1


def forge(path: Path, run_id: str, changes: dict[int, AnyBody | dict[str, object] | bytes]) -> None:
    """Rewrite events and then the whole chain and the row's head, as somebody who knows how would."""
    import apsw

    from perdure.core.events import encode_body

    store = open_store(url_of(path))
    stored = store.stored(run_id)
    store.close()
    with apsw.Connection(str(path)) as other:
        other.execute("DROP TRIGGER IF EXISTS perdure_events_no_update; DROP TRIGGER IF EXISTS perdure_runs_finished")
        ((key,),) = other.execute("SELECT id FROM perdure_runs WHERE run_id = ?", (run_id,))
        head = chain.genesis(run_id)
        for one in stored:
            fields = {"call": one.call, "cause": one.cause, "epoch": one.epoch, "ts": one.ts}
            change = changes.get(one.seq)
            data = one.data if change is None or isinstance(change, dict) else change if isinstance(change, bytes) else encode_body(change)
            fields |= change if isinstance(change, dict) else {}
            head = chain.link(head, one.seq, one.event_id.hex(), fields["ts"], fields["epoch"], fields["call"], fields["cause"], data)
            other.execute(
                "UPDATE perdure_events SET ts = ?, epoch = ?, call = ?, cause = ?, data = ?, hash = ? WHERE run = ? AND seq = ?",
                (
                    fields["ts"],
                    fields["epoch"],
                    fields["call"],
                    fields["cause"],
                    data.decode("utf-8", "surrogateescape"),
                    head,
                    key,
                    one.seq,
                ),
            )
        other.execute("UPDATE perdure_runs SET head = ? WHERE id = ?", (head, key))
