"""Shared by the tests of PostgreSQL's failures.

A store with short time-outs, direct queries, agents with counted effects.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import psycopg
from tests.conformance.suite import new_run
from tests.servers.postgres import Server
from tests.servers.proxy import Proxy

from perdure import Agent, Call, Run, agent, tool
from perdure.core import codec
from perdure.core.events import RunCreated, SignalReceived
from perdure.core.identity import genesis, link
from perdure.engine.clock import Clock
from perdure.engine.local.worker import Worker
from perdure.errors import RunEnded, StoreError, StoreUnavailable
from perdure.inspect.verify import verify_run
from perdure.settings import Settings
from perdure.store.api import FINISHED, NewRun, Store
from perdure.store.open import open_store
from perdure.store.postgres.store import PostgresStore, open_postgres

T = TypeVar("T")
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
ANSWER_S = 1.5  # short, so that a peer that says nothing does not hold up a test
SETTINGS = Settings(poll_s=0.05, park_after_s=0.0, flush_s=0.005, lease_s=4.0, drain_timeout_s=5.0)


@contextmanager
def opened(url: str, answer_s: float = 10.0) -> Iterator[PostgresStore]:
    store = open_postgres(url, answer_s=answer_s)
    assert isinstance(store, PostgresStore)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def behind_proxy(url: str, answer_s: float = 10.0) -> Iterator[tuple[PostgresStore, Proxy]]:
    """A store whose every word passes a proxy. Its schema is there already: making it may take longer than its patience lasts."""
    with opened(url):
        pass
    with Proxy(url) as proxy, opened(proxy.url(url), answer_s) as store:
        yield store, proxy


def rows(url: str, statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """Behind the store's back."""
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(statement.encode(), params or None).fetchall()


def value(url: str, statement: str, *params: Any) -> Any:
    ((only,),) = rows(url, statement, *params)
    return only


def check_journals(url: str, *, whole: bool = True) -> None:
    """Every journal is complete, its chain holds, its row agrees, and epochs count the claims (G1, G3, G10, G11).

    Journals that a test has written itself need not make sense as a whole.
    """
    store = open_store(url)
    try:
        runs = store.list(limit=100_000)
        assert runs
        for row in runs:
            assert not whole or verify_run(store, row).problem is None, (row.run_id, verify_run(store, row))
            assert _head_of(store, row.run_id) == row.head, row.run_id
            events = store.read(row.run_id)
            assert [event.seq for event in events] == list(range(1, row.seq + 1)), row.run_id
            assert [event.epoch for event in events] == sorted(event.epoch for event in events), row.run_id
            assert row.epoch == sum(event.type == "run_claimed" for event in events), row.run_id
        assert store.problems() == []
    finally:
        store.close()
    assert rows(url, "SELECT event_id, count(*) FROM perdure_events GROUP BY 1 HAVING count(*) > 1") == []


def _head_of(store: Store, run_id: str) -> bytes:
    head = genesis(run_id)
    for lies in store.stored(run_id):
        head = link(head, lies.seq, lies.event_id.hex(), lies.ts, lies.epoch, lies.call, lies.cause, lies.data)
        assert head == lies.hash, (run_id, lies.seq)
    return head


def insist(do: Callable[[], T], within_s: float = 60.0) -> T:
    """Repeat it until it is acknowledged, as a caller of the store does."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            return do()
        except StoreUnavailable:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def at_once(works: Sequence[Callable[[], T]], within_s: float = 60.0) -> list[T]:
    """Run all of them, each in its own thread, started at the same moment. Returns their results in order."""
    gate = threading.Barrier(len(works))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(number: int, work: Callable[[], T]) -> None:
        try:
            gate.wait(within_s)
            results[number] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number, work), daemon=True) for number, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s)
        assert not thread.is_alive(), "it does not come to an end"
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(works))]


def until(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        time.sleep(0.01)


def deadlocks(server: Server) -> int:
    """How many there have been, by the server's own log: its statistics are seconds late."""
    return server.log.read_text(errors="replace").count("deadlock detected")


def letter(store: Store, run_id: str, topic: str = "t") -> bool:
    body = SignalReceived(topic, codec.pack(b"1")[0], "ann")
    return store.post(run_id, None, body, event_id=uuid.uuid4().hex, now=1, expect=lambda row: None)


# -- agents whose effects are counted -----------------------------------------------------------------------------------------------------


class Deeds:
    """What tools really did, outside the database. `once` counts calls, and so does `keyed` by key; `read` may be done again."""

    def __init__(self) -> None:
        self.once: Counter[str] = Counter()
        self.keyed: Counter[str] = Counter()
        self.written: Counter[str] = Counter()

    def agents(self) -> list[Agent[Any, Any]]:
        """errand: every effect class, a child, a wait for a signal. leaf: its child."""
        deeds = self

        @tool(effect="read")
        async def look(what: str) -> str:
            return f"{what} seen"

        @tool(effect="once")
        async def ring(what: str, call: Call) -> str:
            deeds.once[f"{call.run_id} {call.number}"] += 1
            return f"{what} rung"

        @tool(effect="keyed")
        async def send(what: str, call: Call) -> str:
            deeds.keyed[call.key] += 1
            return f"{what} sent"

        @tool(effect="transaction")
        def note(what: str, call: Call) -> str:
            deeds.written[f"{call.run_id} {call.number}"] += 1
            call.connection.execute("INSERT INTO notes (what) VALUES (?)", [f"{call.run_id} {what}"])
            return f"{what} noted"

        @agent
        async def leaf(run: Run, name: str) -> str:
            return await ring(f"leaf {name}")

        @agent
        async def errand(run: Run, name: str, wait: bool) -> str:
            seen = await asyncio.gather(look(name), look(f"{name}/b"))
            await ring(name)
            await send(name)
            await note(name)
            if wait:
                heard = await run.receive("news")
                assert heard == name
            await leaf(name)
            await note(f"{name} again")
            return " ".join(seen)

        return [errand, leaf]

    def check(self, url: str, runs: int) -> None:
        """Nothing lost, nothing doubled."""
        assert len(self.once) == 2 * runs
        assert len(self.keyed) == runs
        assert set(self.once.values()) == {1}, [what for what, count in self.once.items() if count > 1]
        noted = Counter(what for (what,) in rows(url, "SELECT what FROM notes"))
        assert len(noted) == 2 * runs
        assert set(noted.values()) == {1}, noted.most_common(3)


def make_notes(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS notes (what text)")


def create_errand(store: Store, agents: Sequence[Agent[Any, Any]], name: str, *, wait: bool = True) -> None:
    """A run of errand under its name."""
    create_run_of(store, agents[0], name, name, wait)


def create_run_of(store: Store, kind: Agent[Any, Any], name: str, *args: Any) -> None:
    encoded = kind.bind(args, {})
    created = RunCreated(name, kind.name, kind.version, "default", codec.pack(encoded)[0], target=kind.target)
    insist(lambda: store.create_run(NewRun(name, created, uuid.uuid4().hex, time.time_ns() // 1000, codec.digest(encoded))))


def send_news(store: Store, names: Sequence[str], chance: random.Random) -> None:
    """Send to each run what it waits for, at some moment.

    Each is sent twice, as after a lost answer: the key identifies it.
    """
    for name in chance.sample(list(names), len(names)):
        time.sleep(chance.uniform(0.0, 0.1))
        body = SignalReceived("news", codec.pack(codec.encode(name))[0], "ann", name)
        insist(partial(_post, store, name, body))
        try:
            insist(partial(_post, store, name, body))
        except RunEnded:
            pass  # it has read the first one already


def _post(store: Store, run_id: str, body: SignalReceived) -> bool:
    return store.post(run_id, None, body, event_id=uuid.uuid4().hex, now=time.time_ns() // 1000, expect=lambda row: None)


@asynccontextmanager
async def working(store: Store, agents: Iterable[Agent[Any, Any]], settings: Settings = SETTINGS) -> Any:
    """A worker on this loop that serves until the block ends."""
    stop = asyncio.Event()
    async with Worker(store, agents, settings, Clock(lambda: store.ahead_us)) as worker:
        serving = asyncio.ensure_future(worker.serve(stop))
        try:
            yield worker
        finally:
            stop.set()
            await serving


async def patiently(do: Callable[[], T]) -> T:
    """Ask the store off the loop, again and again while it is not to be had."""
    while True:
        try:
            return await asyncio.to_thread(do)
        except StoreError:
            await asyncio.sleep(0.05)


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def all_ended(store: Store, within_s: float = 60.0) -> None:
    """Wait until every run has succeeded."""

    async def ended() -> bool:
        runs = await patiently(lambda: store.list(limit=10_000))
        assert not [row for row in runs if row.status in ("failed", "cancelled", "needs_attention")], runs
        return all(row.status in FINISHED for row in runs)

    await eventually(ended, within_s)


def create_plain(store: Store, count: int, prefix: str = "r", **fields: Any) -> list[str]:
    ids = [f"{prefix}{n}" for n in range(count)]
    for run_id in ids:
        store.create_run(new_run(run_id, **fields))
    return ids
