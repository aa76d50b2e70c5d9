"""Queues: which run is first, how many runs at a time over all workers, and the turns of tenants."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, perdure, run, status_of, until

from perdure import Agent, InvalidInput, Perdure, Run, agent, tool
from perdure.core import codec
from perdure.core.events import RunCreated
from perdure.engine.clock import Clock
from perdure.settings import Queue, Settings
from perdure.store.api import NewRun


@asynccontextmanager
async def at_work(*apps: Perdure) -> AsyncIterator[None]:
    stop = asyncio.Event()
    working = [asyncio.create_task(app.work(stop=stop)) for app in apps]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*working)


class Floor:
    """Where the work is done: who is there, and who was there at the same time."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.there: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def work(self, run: str, parties: tuple[str, ...]) -> None:
        self.order.append(run)
        for party in parties:
            self.there[party] += 1
            self.most[party] = max(self.most[party], self.there[party])
        await asyncio.sleep(0.003)
        for party in parties:
            self.there[party] -= 1


def working_on(floor: Floor, name: str = "worker") -> Agent[Any, Any]:
    @tool(effect="once")
    async def labour(run_id: str, parties: list[str]) -> None:
        await floor.work(run_id, tuple(parties))

    async def working(run: Run, parties: list[str]) -> None:
        await labour(run.id, parties)

    return Agent(working, name=name, version="1")


def limits(concurrency: int = 200, **queues: Queue) -> Settings:
    return Settings(poll_s=0.002, park_after_s=0, flush_s=0.005, concurrency=concurrency, queues=queues)


async def all_done(app: Perdure, ids: list[str]) -> None:
    await until(lambda: all(status_of(app, run_id) == "succeeded" for run_id in ids))


# -- what goes first ----------------------------------------------------------------------------------------------------
def test_of_one_tenant_s_runs_the_higher_priority_goes_first_and_then_the_older() -> None:
    floor = Floor()
    code = working_on(floor)

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [code], clock, limits(concurrency=1)) as app:
            for name, priority in (("low", -5), ("old", 0), ("new", 0), ("high", 9)):
                await app.start(code, [], id=name, priority=priority)
                clock.advance(0.001)
            async with at_work(app):
                await all_done(app, ["low", "old", "new", "high"])

    run(main())
    assert floor.order == ["high", "old", "new", "low"]


@pytest.mark.parametrize("priority", [1001, -1001, 1.5, True, "1", None])
def test_a_priority_that_is_none_is_refused(priority: Any) -> None:
    code = working_on(Floor())

    async def main() -> None:
        async with perdure(None, [code]) as app:
            with pytest.raises(InvalidInput, match=r"priority=.*a whole number from -1,000 to 1,000"):
                await app.start(code, [], id="r", priority=priority)
            assert app.store.get("r") is None

    run(main())


@pytest.mark.parametrize("as_time", [True, False])
def test_a_run_does_not_begin_before_its_time_and_then_it_does(as_time: bool) -> None:
    floor = Floor()
    code = working_on(floor)

    async def main() -> None:
        clock = ManualClock()
        later: Any = timedelta(hours=2)
        if as_time:
            later = datetime.fromtimestamp(clock.now() / 1e6, UTC) + later
        async with perdure(None, [code], clock) as app:
            await app.start(code, [], id="r", not_before=later)
            assert app.store.get("r").ready_at == clock.now() + 7200 * 1_000_000  # type: ignore[union-attr]
            async with at_work(app):
                await asyncio.sleep(0.05)
                assert (status_of(app, "r"), floor.order) == ("queued", [])
                await app.signal("r", "hello")  # what arrives meanwhile does not make it begin earlier
                await asyncio.sleep(0.05)
                assert floor.order == []
                clock.advance(7200)
                await all_done(app, ["r"])

    run(main())


def test_a_time_in_the_past_is_now() -> None:
    code = working_on(Floor())

    async def main() -> None:
        async with perdure(None, [code], Clock()) as app:
            past: list[timedelta | datetime] = [timedelta(hours=-1), datetime(2001, 1, 1, tzinfo=UTC), timedelta(0)]
            for number, when in enumerate(past):
                await app.start(code, [], id=f"r{number}", not_before=when)
            async with at_work(app):
                await all_done(app, ["r0", "r1", "r2"])

    run(main())


@pytest.mark.parametrize(
    "when",
    [
        datetime(2030, 1, 1, tzinfo=UTC).replace(tzinfo=None),
        "tomorrow",
        5,
        True,
        timedelta(days=5_000_000),
        datetime(1969, 12, 31, tzinfo=UTC),
    ],
    ids=str,
)
def test_a_time_without_a_zone_or_out_of_range_is_refused(when: Any) -> None:
    code = working_on(Floor())

    async def main() -> None:
        async with perdure(None, [code]) as app:
            with pytest.raises(InvalidInput, match=r"a datetime with a time zone|lies before 1970 or after 9999"):
                await app.start(code, [], id="r", not_before=when)
            assert app.store.get("r") is None

    run(main())


# -- which queue --------------------------------------------------------------------------------------------------------
def test_a_run_is_in_the_queue_it_is_given_or_its_agent_s_or_the_default_one() -> None:
    @agent(version="1", queue="mail")
    async def mailing(run: Run) -> None: ...

    @agent(version="1")
    async def plain(run: Run) -> None: ...

    async def main() -> list[str]:
        async with perdure(None, [mailing, plain]) as app:
            handles = [
                await app.start(mailing),
                await app.start(mailing, queue="urgent"),
                await app.start(plain),
                await app.start(plain, queue="urgent"),
            ]
            with pytest.raises(InvalidInput, match="the queue"):
                await app.start(plain, queue="a queue", id="r")
            assert app.store.get("r") is None
            return [(await handle.row()).queue for handle in handles]

    assert run(main()) == ["mail", "urgent", "default", "urgent"]
    with pytest.raises(InvalidInput, match="the queue"):
        agent(version="1", queue="no such/queue")(plain_function)


async def plain_function(run: Run) -> None: ...


def test_a_worker_takes_only_from_its_queues(tmp_path: Path) -> None:
    floor = Floor()
    code = working_on(floor)

    async def main() -> None:
        url = f"sqlite:///{tmp_path / 'db'}"
        async with (
            Perdure(url, [code], settings=SETTINGS, queues=["mail", "web"]) as some,
            Perdure(url, [code], settings=SETTINGS) as every,
        ):
            for queue in ("mail", "batch", "web"):
                await some.start(code, [], id=queue, queue=queue)
            async with at_work(some):
                await all_done(some, ["mail", "web"])
                await asyncio.sleep(0.05)
                assert status_of(some, "batch") == "queued"
                (row,) = [worker for worker in some.store.workers(some.clock.now(), 30_000_000) if worker.queues]
                assert row.queues == ("mail", "web")
                async with at_work(every):
                    await all_done(some, ["batch"])

    run(main())


def test_children_are_in_their_parent_s_queue_unless_their_agent_has_one() -> None:
    @agent(version="1")
    async def kid(run: Run) -> None: ...

    @agent(version="1", queue="slow")
    async def particular(run: Run) -> None: ...

    @agent(version="1")
    async def parent(run: Run) -> None:
        await kid()
        await particular()

    async def main() -> list[str]:
        async with perdure(None, [parent]) as app:
            await app.start(parent, id="p", queue="fast")
            await app.engine.drive("p")
            return [(await app.handle(run_id).row()).queue for run_id in ("p", "p/1", "p/2")]

    assert run(main()) == ["fast", "fast", "slow"]


# -- how much at a time -------------------------------------------------------------------------------------------------
def test_a_queue_s_concurrency_holds_over_two_workers_and_leaves_other_queues_alone(tmp_path: Path) -> None:
    floor = Floor()
    code = working_on(floor)
    settings = limits(concurrency=8, narrow=Queue(concurrency=3))

    async def main() -> None:
        async with (
            perdure(tmp_path / "db", [code], Clock(), settings) as one,
            perdure(tmp_path / "db", [code], Clock(), settings) as two,
        ):
            ids = []
            for number in range(20):
                for queue in ("narrow", "wide"):
                    ids.append(f"{queue}-{number}")
                    await one.start(code, [queue], id=ids[-1], queue=queue)
            async with at_work(one, two):
                await all_done(one, ids)
            holders = {
                event.body.worker  # type: ignore[union-attr]
                for run_id in ids
                for event in await one.handle(run_id).events()
                if event.type == "run_claimed"
            }
            assert len(holders) == 2

    run(main())
    assert floor.most["narrow"] == 3
    assert floor.most["wide"] > 3


def test_a_limit_per_tenant_holds_for_each_of_them(tmp_path: Path) -> None:
    floor = Floor()
    code = working_on(floor)
    settings = limits(shared=Queue(concurrency=5, per_tenant=2))

    async def main() -> None:
        async with (
            perdure(tmp_path / "db", [code], Clock(), settings) as one,
            perdure(tmp_path / "db", [code], Clock(), settings) as two,
        ):
            ids = []
            for number in range(8):
                for tenant in ("a", "b"):
                    ids.append(f"{tenant}-{number}")
                    await one.start(code, [tenant, "all"], id=ids[-1], queue="shared", tenant=tenant)
            async with at_work(one, two):
                await all_done(one, ids)

    run(main())
    assert (floor.most["a"], floor.most["b"], floor.most["all"]) == (2, 2, 4)


def test_a_parked_run_takes_up_no_room() -> None:
    """With room for one, the second run is worked on while the first one sleeps."""

    @agent(version="1")
    async def waiting(run: Run) -> str:
        return str(await run.receive("go"))

    async def main() -> None:
        async with perdure(None, [waiting], settings=limits(default=Queue(concurrency=1))) as app, at_work(app):
            for number in range(5):
                await app.start(waiting, id=f"r{number}")
            await until(lambda: all(status_of(app, f"r{number}") == "waiting" for number in range(5)))
            for number in range(5):
                await app.signal(f"r{number}", "go", number)
            await all_done(app, [f"r{number}" for number in range(5)])

    run(main())


@pytest.mark.parametrize("narrow", ["queue", "worker"])
@pytest.mark.parametrize("polls", [False, True])
def test_a_parent_and_its_children_get_through_where_there_is_room_for_one(narrow: str, polls: bool) -> None:
    """Also when the parent looks after them twice a second instead of just waiting: it must not keep the room that they need."""

    @tool(effect="read")
    async def look() -> int:
        return 1

    @agent(version="1")
    async def leaf(run: Run) -> int:
        return await look()

    @agent(version="1")
    async def middle(run: Run) -> int:
        return sum(await asyncio.gather(leaf(), leaf()))

    @agent(version="1")
    async def top(run: Run) -> int:
        tasks = [asyncio.create_task(middle()) for _ in range(2)]
        while polls and not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=0.1)
        return sum(await asyncio.gather(*tasks))

    async def main() -> Any:
        queues = {"default": Queue(concurrency=1)} if narrow == "queue" else {}
        settings = Settings(poll_s=0.002, flush_s=0.005, linger_s=0.01, concurrency=1 if narrow == "worker" else 200, queues=queues)
        async with perdure(None, [top], Clock(), settings) as app, at_work(app):
            await app.start(top, id="t")
            await all_done(app, ["t"])
            return await app.handle("t").result()

    assert run(main()) == 4


# -- turns
# --------------------------------------------------------------------------------------------------------------
def _crowd(app: Perdure, code: Agent[Any, Any], tenant: str, count: int) -> None:
    payload = codec.pack(code.bind(([],), {}), 65536)[0]
    for number in range(count):
        run_id = f"{tenant}-{number}"
        created = RunCreated(run_id=run_id, agent=code.name, version=code.version, tenant=tenant, input=payload)
        app.store.create_run(NewRun(run_id, created, app.clock.new_id(), app.clock.now(), "same"))


@pytest.mark.full
def test_one_run_of_a_tenant_begins_within_one_slot_of_another_s_ten_thousand() -> None:
    """In one worker with few slots: the single run, started last, is the next one for which a slot comes free."""
    floor = Floor()
    code = working_on(floor)

    async def main() -> None:
        async with perdure(None, [code], Clock(), limits(concurrency=4)) as app:
            _crowd(app, code, "crowd", 10_000)
            async with at_work(app):
                await until(lambda: len(floor.order) >= 50)
                begun = len(floor.order)
                await app.start(code, [], id="single", tenant="lonely")
                await until(lambda: "single" in floor.order)
                # Only runs that were claimed already begin before it.
                assert floor.order.index("single") - begun <= 4 + 1, (begun, floor.order.index("single"))
                app.abort()

    run(main(), seconds=60)


def test_tenants_take_turns_run_by_run_also_when_they_came_late() -> None:
    floor = Floor()
    code = working_on(floor)

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [code], clock, limits(concurrency=1)) as app:
            for tenant, count in (("a", 6), ("b", 3), ("c", 1)):
                for number in range(count):
                    await app.start(code, [], id=f"{tenant}{number}", tenant=tenant)
                    clock.advance(0.001)
            async with at_work(app):
                await until(lambda: len(floor.order) == 10)

    run(main())
    assert floor.order == ["a0", "b0", "c0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


def test_a_worker_that_takes_many_at_once_takes_some_of_each_tenant() -> None:
    floor = Floor()
    code = working_on(floor)

    async def main() -> None:
        async with perdure(None, [code], Clock(), limits(concurrency=8)) as app:
            _crowd(app, code, "crowd", 40)
            _crowd(app, code, "few", 2)
            async with at_work(app):
                await until(lambda: len(floor.order) == 42)

    run(main())
    assert {"few-0", "few-1"} < set(floor.order[:8])


def test_a_fan_out_of_one_tenant_does_not_delay_another_s_run() -> None:
    """Children stand in their own tenant's line: a thousand of them are one party."""
    order: list[str] = []

    @tool(effect="once")
    async def labour(name: str) -> None:
        order.append(name)
        await asyncio.sleep(0.002)

    @agent(version="1")
    async def leaf(run: Run) -> None:
        await labour(run.id)

    @agent(version="1")
    async def parent(run: Run) -> None:
        await asyncio.gather(*(leaf() for _ in range(1000)))

    async def main() -> None:
        async with perdure(None, [parent], Clock(), limits(concurrency=4)) as app:
            await app.start(parent, id="big", tenant="crowd")
            async with at_work(app):
                await until(lambda: len(order) >= 20)
                begun, began_s = len(order), time.perf_counter()
                await app.start(leaf, id="single", tenant="lonely")
                await until(lambda: "single" in order)
                assert order.index("single") - begun <= 4 + 1, (begun, order.index("single"), time.perf_counter() - began_s)
                app.abort()

    run(main(), seconds=60)
