"""A slow server: only what needs the server waits for it, the log says so, and afterwards no run is stranded."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from msgspec import structs
from tests.postgres.tools import (
    SETTINGS,
    Deeds,
    all_ended,
    behind_proxy,
    check_journals,
    create_errand,
    create_run_of,
    eventually,
    letter,
    make_notes,
    opened,
    send_news,
    until,
    value,
    working,
)
from tests.servers.proxy import Proxy
from tests.stalls import Stalls

from perdure import Call, Perdure, Rate, Run, agent, tool
from perdure.engine.local.leases import Renewer
from perdure.errors import StoreUnavailable
from perdure.store.postgres.bell import NotifyBell
from perdure.store.postgres.connections import Connections
from perdure.store.postgres.store import PostgresStore


def test_while_the_server_stands_still_the_loop_turns_and_afterwards_everything_goes_on(postgres, postgres_url, caplog) -> None:
    caplog.set_level(logging.INFO)
    make_notes(postgres_url)
    deeds, names = Deeds(), [f"e{n}" for n in range(20)]
    pause_s, ticks = 2.5, Stalls()

    measured: list[float] = []

    def stand_still() -> None:
        postgres.pause()
        ticks.reset()
        cpu_s = time.process_time()
        time.sleep(pause_s)
        measured.extend((ticks.longest_s, time.process_time() - cpu_s))
        postgres.resume()

    async def main(store: PostgresStore) -> None:
        agents, standing = deeds.agents(), threading.Thread(target=stand_still)
        async with working(store, agents):
            ticking = asyncio.ensure_future(ticks.watch())
            for name in names:
                await asyncio.to_thread(create_errand, store, agents, name, wait=False)
                if name == names[10]:
                    standing.start()
            await asyncio.to_thread(standing.join)
            await all_ended(store)
            ticking.cancel()

    with opened(postgres_url) as store, ticks:
        asyncio.run(main(store))
    stood_s, cpu_s = measured
    assert stood_s < pause_s / 4, f"the loop stood still for {stood_s:.1f} s"
    assert cpu_s < 0.5, f"{cpu_s:.2f} s of CPU time while there was nothing to do"
    deeds.check(postgres_url, len(names))
    check_journals(postgres_url)
    assert "for a commit; the runs wait that long" in caplog.text


def test_nothing_is_asked_of_the_server_on_the_event_loop(postgres_url, monkeypatch) -> None:
    """However quickly it answers here: where it does not, every run of the worker would stand still. Budgets and rates are left out."""
    asked = watch(monkeypatch)

    @tool(effect="once")
    async def step(n: int) -> int:
        return n

    @agent
    async def child(run: Run) -> int:
        return await step(3)

    @agent
    async def plain(run: Run) -> int:
        await asyncio.gather(step(1), step(2), child())
        await asyncio.sleep(0.05)
        decision = await run.request_approval("go", {}, reason="to be asked", expires=timedelta(seconds=0.2))
        assert decision.outcome == "expired"
        return int(await run.receive("news"))

    async def main(store: PostgresStore, outside: PostgresStore) -> None:
        async with working(store, [plain, child], structs.replace(SETTINGS, park_after_s=1.0)):
            for n in range(3):
                await asyncio.to_thread(create_run_of, outside, plain, f"p{n}")
            await asyncio.sleep(0.8)
            for n in range(3):
                await asyncio.to_thread(letter, outside, f"p{n}", "news")
            await all_ended(outside)

    with opened(postgres_url) as store, opened(postgres_url) as outside:
        asyncio.run(main(store, outside))
    assert asked == []


def test_an_app_asks_nothing_of_the_server_on_the_event_loop(postgres_url, monkeypatch) -> None:
    asked = watch(monkeypatch)

    @agent
    async def plain(run: Run) -> str:
        await run.request_approval("go", {}, reason="to be asked")
        return "x" * 100_000  # too large to be inline

    async def main() -> None:
        async with Perdure(postgres_url, [plain], settings=SETTINGS) as app:
            handle = await app.start(plain)
            await app.engine.drive(handle.id)
            (asking,) = await app.approvals()
            await app.approve(asking.approval, by="ann")
            assert len(await handle.result()) == 100_000
            assert await app.costs() == []

    asyncio.run(main())
    assert asked == []


def test_a_run_whose_append_was_refused_is_given_up_off_the_event_loop(postgres_url, monkeypatch, caplog) -> None:
    asked, may_end = watch(monkeypatch), threading.Event()

    @tool(effect="once")
    def step() -> None:
        assert may_end.wait(60)

    @agent
    async def plain(run: Run) -> None:
        await step()

    async def main(store: PostgresStore) -> None:
        async with working(store, [plain]):
            await asyncio.to_thread(create_run_of, store, plain, "r")
            held = "SELECT count(*) FROM perdure_events WHERE data LIKE '%step%'"
            await asyncio.to_thread(until, lambda: value(postgres_url, held) == 1)
            nonce = await asyncio.to_thread(value, postgres_url, "SELECT nonce FROM perdure_runs")
            await asyncio.to_thread(value, postgres_url, "UPDATE perdure_runs SET nonce = '\\x00' RETURNING 1")
            may_end.set()
            await asyncio.to_thread(until, lambda: "cannot be released yet" in caplog.text)
            await asyncio.to_thread(value, postgres_url, "UPDATE perdure_runs SET nonce = %s RETURNING 1", nonce)
            stopped = "SELECT status = 'needs_attention' AND holder IS NULL FROM perdure_runs"
            await asyncio.to_thread(until, lambda: value(postgres_url, stopped))

    with opened(postgres_url) as store:
        asyncio.run(main(store))
    assert asked == []


def test_a_rate_that_somebody_else_has_locked_holds_up_only_those_who_need_it(postgres_url) -> None:
    ticks, took_s = Stalls(), []
    rate = Rate(1000, per=1, key="service")

    @tool(effect="once", rate=rate)
    async def step(n: int) -> int:
        return n

    @agent
    async def plain(run: Run) -> int:
        return int(await step(1))

    def stand_in_the_way(store: PostgresStore) -> None:
        with psycopg.connect(postgres_url) as other:
            assert other.execute("SELECT 1 FROM perdure_rates WHERE key = 'service' FOR UPDATE").fetchall() == [(1,)]
            ticks.reset()
            create_run_of(store, plain, "second")
            for needs in (lambda: store.admit(rate, 1), lambda: store.hold_back("service", 1)):
                began_s = time.monotonic()
                with pytest.raises(StoreUnavailable, match="locked"):
                    needs()
                took_s.append(time.monotonic() - began_s)
            time.sleep(1.5)
            assert ticks.longest_s < 0.5, f"the loop stood still for {ticks.longest_s:.1f} s"
            assert other.execute("SELECT count(*) FROM perdure_runs WHERE status = 'succeeded'").fetchone() == (1,)

    async def main(store: PostgresStore) -> None:
        async with working(store, [plain]):
            ticking = asyncio.ensure_future(ticks.watch())
            await asyncio.to_thread(create_run_of, store, plain, "first")
            await all_ended(store)
            await asyncio.to_thread(stand_in_the_way, store)
            await all_ended(store)
            ticking.cancel()

    with opened(postgres_url, answer_s=100.0) as store, ticks:  # others wait for a row for half of this
        asyncio.run(main(store))
    assert max(took_s) < 40, took_s


def test_what_a_program_does_on_the_threads_of_its_loop_keeps_the_store_from_nobody(postgres_url) -> None:
    """The loop has few threads, shared by the whole process: questions to the store have their own threads."""
    may_end = threading.Event()

    @tool(effect="once")
    async def step(n: int) -> int:
        return n

    @agent
    async def plain(run: Run) -> int:
        return int(await step(1))

    async def main() -> None:
        busy = [asyncio.ensure_future(asyncio.to_thread(may_end.wait, 100)) for _ in range(64)]
        await asyncio.sleep(0.01)  # all threads of the loop are taken
        late = threading.Timer(60.0, may_end.set)
        late.start()
        async with Perdure(postgres_url, [plain], settings=SETTINGS) as app:
            handle = await app.start(plain, id="r")
            assert await handle.result() == 1
            assert (await handle.row()).status == "succeeded"
            assert await app.costs()
        assert not may_end.is_set(), "it had to wait for them"
        late.cancel()
        may_end.set()
        await asyncio.gather(*busy)

    asyncio.run(main())


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who waits for the server on an event loop from now on: the names of those who called."""
    asked: list[str] = []
    for kind, name in ((Connections, "_take"), (NotifyBell, "listen"), (Renewer, "stop")):
        monkeypatch.setattr(kind, name, watched(getattr(kind, name), asked))
    return asked


def watched(ask: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    def asking(*args: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return ask(*args)
        asked.extend(frame.name for frame in traceback.extract_stack()[-8:-1])
        return ask(*args)

    return asking


def test_every_packet_late_costs_time_and_nothing_else(postgres_url) -> None:
    make_notes(postgres_url)
    deeds, ticks, names = Deeds(), Stalls(), [f"e{n}" for n in range(6)]

    async def main(store: PostgresStore, proxy: Proxy) -> None:
        agents = deeds.agents()
        proxy.latency_s = 0.02
        async with working(store, agents):
            ticking = asyncio.ensure_future(ticks.watch())
            await asyncio.gather(*(asyncio.to_thread(create_errand, store, agents, name, wait=False) for name in names))
            await all_ended(store)
            assert ticks.longest_s < 0.5, f"the loop stood still for {ticks.longest_s:.2f} s, a dozen round trips"
            ticking.cancel()
            proxy.latency_s = 0.0

    with behind_proxy(postgres_url) as (store, proxy), ticks:
        asyncio.run(main(store, proxy))
    deeds.check(postgres_url, len(names))
    check_journals(postgres_url)


def test_a_worker_whose_server_is_away_for_long_keeps_still_and_renews_afterwards(postgres, postgres_url, caplog) -> None:
    """The lease ends meanwhile, and no other worker can take over; then everything continues."""
    caplog.set_level(logging.INFO)
    make_notes(postgres_url)
    deeds, ticks, names = Deeds(), Stalls(), [f"e{n}" for n in range(8)]
    measured: list[float] = []

    def go_away() -> None:
        postgres.stop("immediate")
        ticks.reset()
        cpu_s = time.process_time()
        time.sleep(3.0)
        measured.extend((ticks.longest_s, time.process_time() - cpu_s))
        postgres.start()

    async def main(store: PostgresStore) -> None:
        agents, going = deeds.agents(), threading.Thread(target=go_away)
        for name in names:
            create_errand(store, agents, name)
        async with working(store, agents, structs.replace(SETTINGS, lease_s=2.0, park_after_s=60.0)) as worker:
            ticking = asyncio.ensure_future(ticks.watch())
            await asyncio.sleep(0.5)  # by now all of them wait in this worker
            going.start()
            await asyncio.to_thread(going.join)
            beat = f"SELECT beat_at FROM perdure_workers WHERE worker = '{worker.id}'"
            before = value(postgres_url, beat)
            await asyncio.to_thread(until, lambda: value(postgres_url, beat) > before)
            await asyncio.to_thread(send_news, store, names, random.Random(1))
            await all_ended(store)
            ticking.cancel()

    with opened(postgres_url, answer_s=5.0) as store, ticks:
        asyncio.run(main(store))
    stood_s, cpu_s = measured
    assert stood_s < 0.5, f"the loop stood still for {stood_s:.1f} s"
    assert cpu_s < 0.5, f"{cpu_s:.2f} s of CPU time in 3 s without a server"
    lines = [record.getMessage() for record in caplog.records if record.name == "perdure.store" and record.levelno >= logging.WARNING]
    away = [line for line in lines if "cannot be reached" in line and "looking what became" not in line]
    back = [line for line in lines if "is back after" in line]
    # One line when it goes and one when it is back. On a busy machine a server that is being stopped may let one more in: then it goes twice.
    assert 1 <= len(away) <= 2, f"one line when it goes: {away}"
    assert len(back) == len(away), lines
    deeds.check(postgres_url, len(names))
    check_journals(postgres_url)


def test_tools_that_take_their_time_inside_transactions_hold_up_nobody_else(postgres_url) -> None:
    """More of them than there are connections and threads to spare: leases are renewed and other runs go on meanwhile."""
    make_notes(postgres_url)
    may_end = threading.Event()

    @tool(effect="transaction")
    def ponder(call: Call) -> None:
        call.connection.execute("INSERT INTO notes VALUES (?)", [call.run_id])
        assert may_end.wait(30)

    @tool(effect="once")
    async def step(n: int) -> int:
        return n

    @agent
    async def slow(run: Run) -> None:
        await ponder()

    @agent
    async def quick(run: Run) -> int:
        return sum([await step(n) for n in range(5)])

    async def main(store: PostgresStore) -> None:
        async with working(store, [slow, quick], structs.replace(SETTINGS, lease_s=2.0)) as worker:
            try:
                for n in range(20):
                    await asyncio.to_thread(create_run_of, store, slow, f"slow{n}")
                await eventually(lambda: are_open(postgres_url), within_s=60)
                beat = f"SELECT beat_at FROM perdure_workers WHERE worker = '{worker.id}'"
                before = value(postgres_url, beat)
                await asyncio.to_thread(create_run_of, store, quick, "quick")
                await eventually(lambda: has_ended(postgres_url, "quick"), within_s=60)
                await asyncio.to_thread(until, lambda: value(postgres_url, beat) > before)
            finally:
                may_end.set()
            await all_ended(store)

    with opened(postgres_url) as store:
        asyncio.run(main(store))
    assert value(postgres_url, "SELECT count(*) FROM notes") == 20


async def are_open(url: str) -> bool:
    """As many tools as may be are inside their transactions."""
    waiting = "SELECT count(*) >= 5 FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()"
    return bool(await asyncio.to_thread(value, url, waiting))


async def has_ended(url: str, run_id: str) -> bool:
    return bool(await asyncio.to_thread(value, url, f"SELECT status = 'succeeded' FROM perdure_runs WHERE run_id = '{run_id}'"))
