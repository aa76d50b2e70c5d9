"""Runs of every kind in one database, made by the real app, for the tests of all readers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure import Agent, Approval, Budget, Call, Circles, Perdure, Rate, Retry, Run, Settings, agent, tool
from perdure.core import identity
from perdure.core.events import AnyBody
from perdure.engine.clock import Clock
from perdure.engine.local.worker import Observer
from perdure.store.api import ApprovalFilter, Served, Store
from perdure.store.open import is_postgres, open_store, sqlite_path

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


def url_of(path: Path | str) -> str:
    return path if isinstance(path, str) else f"sqlite:///{path}"


def at_work(
    path: Path | str,
    work: Callable[[Perdure], Awaitable[object]],
    *observers: Observer,
    clock: Clock | None = None,
    agents: Sequence[Agent[Any, Any]] = AGENTS,
) -> None:
    """Do something with an app on this database, to its end."""

    async def main() -> None:
        async with Perdure(url_of(path), agents, settings=SETTINGS, clock=clock, observers=observers) as app:
            await work(app)

    asyncio.run(main())


def make_zoo(path: Path | str) -> None:
    """One run in every state that a run can rest in. `path` is a SQLite file, or the URL of any journal."""

    async def zoo(app: Perdure) -> None:
        await app.start(shop, "o-1", id="done", tenant="acme", actor="user:17")
        await app.start(forbidden, id="failed")
        await app.start(sleeper, 3600.0, id="waiting")
        await app.start(buy, "o-2", id="doubt", actor="user:18")
        await app.start(sleeper, 3600.0, id="cancelled")
        await app.start(buy, "o-3", id="resolved")
        for run_id in ("done", "failed", "waiting", "doubt", "resolved"):
            await app.engine.drive(run_id, wait=False)
        await app.engine.drive("done")
        await app.engine.drive("cancelled", wait=False)
        await app.cancel("cancelled", by="ann", reason="no longer needed")
        await app.engine.drive("cancelled")
        await app.resolve("resolved", 2, happened={"id": "ch_7"}, by="ann", note="seen at the bank")
        await app.start(shop, "o-4", id="queued")

    at_work(path, zoo)


# -- runs that wait for people, signals, children, money and turns --------------------------------------------------------------
HOSTILE = "yes\x1b[2J\u202e\nap-00000000000000000000 approved by ann"  # text that would like to be an approval


@tool(effect="once", approval=Approval(by=("ann", "role:finance"), expires=3600, editable="cents", reason="over $5"))
async def refund(order: str, cents: int, call: Call) -> str:
    call.spend(usd="0.0123", tokens_in=1200, tokens_out=34, model="m-1")
    return f"r-{order}-{cents}"


@tool(effect="once", rate=Rate(limit=1, per=3600, key="inspect"))
async def slow_service(number: int) -> int:
    return number


@tool(effect="idempotent")
async def poll(order: str) -> str:
    return "not yet"


@agent(version="1")
async def asks(run: Run, text: str) -> str:
    decision = await run.request_approval(
        "publish",
        {"text": text, "copies": 3},
        reason=f"the editor said {text}",
        by=("ann", "bob", "role:press"),
        quorum=2,
        expires=timedelta(hours=4),
        on_expiry="escalate",
        escalate_to=("cleo", "dora"),
        escalate_expires=timedelta(hours=1),
    )
    return decision.outcome


@agent(version="1")
async def refunds(run: Run, order: str, cents: int) -> str:
    return await refund(order, cents)


@agent(version="1")
async def listens(run: Run) -> Any:
    return await run.receive("chat")


@agent(version="1")
async def parent(run: Run, orders: list[str]) -> list[Any]:
    return list(await asyncio.gather(*(buy(order) for order in orders), return_exceptions=True))


@agent(version="1")
async def grandparent(run: Run, orders: list[str]) -> list[Any]:
    return await parent(orders)


@agent(version="1")
async def squares(run: Run, numbers: list[int]) -> list[int]:
    return await asyncio.gather(*(square(number) for number in numbers))


@agent(version="1")
async def square(run: Run, number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    await lookup(str(number))
    return number * number


@agent(version="1", budget=Budget(calls=2, usd=5))
async def thrifty(run: Run) -> int:
    for number in range(9):
        await poll(str(number))
    return 9


@agent(version="1", circles=Circles(repeats=3))
async def circling(run: Run) -> None:
    while True:
        await poll("o-1")


@agent(version="1")
async def hurried(run: Run) -> list[int]:
    return list(await asyncio.gather(slow_service(1), slow_service(2)))


WAITERS = (asks, refunds, listens, parent, grandparent, squares, thrifty, circling, hurried, sleeper, buy)


def make_waiting(path: Path | str) -> None:
    """A run for everything that a run can wait for without a process."""

    async def zoo(app: Perdure) -> None:
        await app.start(asks, HOSTILE, id="asks", actor="user:17")
        await app.start(refunds, "o-1", 900, id="refund", tenant="acme")
        await app.start(listens, id="listens", queue="chat", priority=5)
        await app.start(parent, ["o-1"], id="parent")
        await app.start(grandparent, ["o-1"], id="grand")
        await app.start(squares, [2, 3], id="squares")
        await app.start(squares, [-1], id="negative")
        await app.start(sleeper, 3600.0, id="paused")
        await app.start(thrifty, id="thrifty")
        await app.start(circling, id="circling")
        await app.start(hurried, id="hurried")
        await app.start(buy, "o-2", id="forced")
        await app.start(sleeper, 1.0, id="later", not_before=timedelta(hours=2), version="1")
        await app.start(refunds, "o-2", 900, id="bought")
        await app.start(refunds, "o-3", 900, id="refused")
        await app.pause("paused", by="ann", reason="the bank is closed")
        for row in app.store.list():
            if row.status == "queued" and row.run_id != "later":
                await app.engine.drive(row.run_id, wait=False)
        await app.approve(approval_of(app.store, "asks"), by="bob", note="fine", source="cli")
        await app.approve(approval_of(app.store, "bought"), by="ann", edit={"cents": 700}, note="less", source="10.0.0.7")
        await app.reject(approval_of(app.store, "refused"), by="ann", reason="fraud")
        for run_id in ("bought", "refused"):
            await app.engine.drive(run_id, wait=False)
        await app.cancel("forced", by="bob", reason="its code is gone", force=True)

    at_work(path, zoo, agents=WAITERS)


def approval_of(store: Store, run_id: str) -> str:
    """The only approval that the run waits for."""
    (row,) = store.approvals(ApprovalFilter(run_id=run_id))
    return row.approval


def hold(store: Store, run_id: str, agent: str) -> None:
    """A worker of this process claims the run and goes on holding it."""
    now = Clock().now()
    store.register(HOLDER, "host:1", 1, now)
    row = store.get(run_id)
    assert row is not None
    assert len(store.claim(HOLDER, [Served(agent, row.version)], 1, now, run_id=run_id)) == 1


Forge = Callable[[str], None]
_FORGED_TABLES = ("perdure_runs", "perdure_events", "perdure_approvals", "perdure_budgets")


@contextmanager
def forging(url: str) -> Iterator[Forge]:
    """A function that edits rows of this database: it switches the triggers off for one statement."""
    if is_postgres(url):
        import psycopg

        with psycopg.connect(url, autocommit=True) as outside:

            def forge_there(sql: str) -> None:
                for table in _FORGED_TABLES:
                    outside.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER".encode())
                outside.execute("ALTER TABLE perdure_runs DROP CONSTRAINT IF EXISTS perdure_runs_check")
                outside.execute(sql.encode())
                for table in _FORGED_TABLES:
                    outside.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER".encode())

            yield forge_there
        return
    import apsw

    connection = apsw.Connection(str(sqlite_path(url)))
    connection.set_busy_timeout(5000)

    def forge_here(sql: str) -> None:
        triggers = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        connection.pragma("ignore_check_constraints", 1)
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(sql)
        for _, made in triggers:
            connection.execute(str(made))

    yield forge_here
    connection.close()


def forge(path: Path, run_id: str, changes: dict[int, AnyBody | dict[str, object] | bytes]) -> None:
    """Rewrite events, then the whole chain and the row's head, as an expert forger would."""
    import apsw

    from perdure.core.events import encode_body

    store = open_store(url_of(path))
    stored = store.stored(run_id)
    store.close()
    with apsw.Connection(str(path)) as other:
        other.execute("DROP TRIGGER IF EXISTS perdure_events_no_update; DROP TRIGGER IF EXISTS perdure_runs_finished")
        ((key,),) = other.execute("SELECT id FROM perdure_runs WHERE run_id = ?", (run_id,))
        head = identity.genesis(run_id)
        for one in stored:
            fields = {"call": one.call, "cause": one.cause, "epoch": one.epoch, "ts": one.ts}
            change = changes.get(one.seq)
            data = one.data if change is None or isinstance(change, dict) else change if isinstance(change, bytes) else encode_body(change)
            fields |= change if isinstance(change, dict) else {}
            head = identity.link(head, one.seq, one.event_id.hex(), fields["ts"], fields["epoch"], fields["call"], fields["cause"], data)
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
