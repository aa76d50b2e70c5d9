"""Durable timers: never early by the recorded clock, in order, none lost, and without polling every run."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.approval_tools import check_replay, driven
from tests.unit.drive_tools import SETTINGS, ManualClock, outline, perdure, run, until, worker_of

from perdure import Agent, Call, NotSent, Perdure, Retry, Run, Settings, agent, tool
from perdure.core.events import Event, TimerFired, TimerSet
from perdure.core.query import EVERYTHING

HOUR = 3600.0
START_S = 1_700_000_000.0


def offset(run: Run) -> float:
    """Seconds since the clock of the test began, as the agent sees them."""
    return run.now().timestamp() - START_S


# -- over restarts ------------------------------------------------------------------------------------------------------
@agent(version="1")
async def sleeper(run: Run, naps: int) -> list[float]:
    woken = []
    for _ in range(naps):
        await asyncio.sleep(HOUR)
        woken.append(offset(run))
    return woken


async def step(where: Path, clock: ManualClock, code: Agent[Any, Any]) -> str:
    """Another process drives the run until it rests."""
    async with perdure(where, [code], clock) as app:
        status = (await driven(app)).status
        check_replay(app, code)
        return status


def test_sleeps_go_on_in_other_processes_and_wake_when_they_should(tmp_path: Path) -> None:
    async def main() -> Any:
        clock, where = ManualClock(), tmp_path / "db"
        async with perdure(where, [sleeper], clock) as app:
            await app.start(sleeper, 3, id="r")
        seen = []
        for advance in (0, HOUR - 1, 1, HOUR, HOUR):
            clock.advance(advance)
            seen.append(await step(where, clock, sleeper))
        assert seen == ["waiting"] * 4 + ["succeeded"]
        async with perdure(where, [sleeper], clock) as app:
            return await app.handle("r").result()

    assert run(main()) == [HOUR, 2 * HOUR, 3 * HOUR]


def test_a_process_that_comes_late_wakes_the_agent_late_and_only_once(tmp_path: Path) -> None:
    async def main() -> tuple[Any, list[Event]]:
        clock, where = ManualClock(), tmp_path / "db"
        async with perdure(where, [sleeper], clock) as app:
            await app.start(sleeper, 1, id="r")
            await driven(app)
        clock.advance(100 * HOUR)
        assert await step(where, clock, sleeper) == "succeeded"
        async with perdure(where, [sleeper], clock) as app:
            return await app.handle("r").result(), await app.handle("r").events()

    result, events = run(main())
    assert result == [100 * HOUR], "the agent learns the time at which it was woken, not the one that it had asked for"
    assert [type(event.body) for event in events if isinstance(event.body, TimerSet | TimerFired)] == [TimerSet, TimerFired]


@pytest.mark.parametrize("late_s", [0, 59, 60, 61])
def test_a_timeout_over_a_restart_ends_the_wait_when_its_time_is_over(tmp_path: Path, late_s: float) -> None:
    @agent(version="1")
    async def bounded(run: Run) -> list[Any]:
        try:
            async with asyncio.timeout(60):
                heard: Any = await run.receive("chat")
        except TimeoutError:
            heard = "timed out"
        return [heard, offset(run)]

    async def main() -> Any:
        clock, where = ManualClock(), tmp_path / "db"
        async with perdure(where, [bounded], clock) as app:
            await app.start(bounded, id="r")
            await driven(app)
        clock.advance(late_s)
        status = await step(where, clock, bounded)
        async with perdure(where, [bounded], clock) as app:
            return status, (await app.handle("r").result() if status == "succeeded" else None)

    assert run(main()) == (("waiting", None) if late_s < 60 else ("succeeded", ["timed out", late_s]))


def test_a_backoff_is_a_durable_timer_too(tmp_path: Path) -> None:
    attempts: list[int] = []

    @tool(effect="once", retry=Retry(attempts=3, base=60, factor=2, max_delay=HOUR, jitter=0))
    async def pay(call: Call) -> str:
        attempts.append(call.attempt)
        if call.attempt < 3:
            raise NotSent("refused")
        return "paid"

    @agent(version="1")
    async def payer(run: Run) -> list[Any]:
        return [await pay(), offset(run)]

    async def main() -> Any:
        clock, where, made = ManualClock(), tmp_path / "db", list[int]()
        async with perdure(where, [payer], clock) as app:
            await app.start(payer, id="r")
        for advance in (0, 59, 1, 119, 1):
            clock.advance(advance)
            await step(where, clock, payer)
            made.append(len(attempts))
        async with perdure(where, [payer], clock) as app:
            return made, await app.handle("r").result()

    assert run(main()) == ([1, 1, 2, 2, 3], ["paid", 180.0])


def test_timers_of_one_run_fire_in_the_order_of_their_time_and_then_of_their_setting(tmp_path: Path) -> None:
    """All timers are due when a worker finally claims the run."""

    @agent(version="1")
    async def many(run: Run) -> list[str]:
        woken: list[str] = []

        async def nap(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(name)

        await asyncio.gather(nap("c", 30), nap("a1", 10), nap("b", 20), nap("a2", 10), nap("a3", 10))
        return woken

    async def main() -> Any:
        clock, where = ManualClock(), tmp_path / "db"
        async with perdure(where, [many], clock) as app:
            await app.start(many, id="r")
            await driven(app)
        clock.advance(15)
        assert await step(where, clock, many) == "waiting"
        clock.advance(HOUR)
        assert await step(where, clock, many) == "succeeded"
        async with perdure(where, [many], clock) as app:
            return await app.handle("r").result()

    assert run(main()) == ["a1", "a2", "a3", "b", "c"]


# -- the wall clock jumps -----------------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize("jump_s", [HOUR, -HOUR])
@pytest.mark.parametrize("when", ["parked", "held"])
def test_a_wall_clock_that_jumps_loses_no_timer_and_wakes_nobody_early(jump_s: float, when: str) -> None:
    """ "Early" by the recorded clock: the event that wakes the agent is never older than the requested time."""
    release = asyncio.Event()

    @tool(effect="read")
    async def companion() -> None:
        await release.wait()

    @agent(version="1")
    async def napper(run: Run) -> list[float]:
        other = asyncio.create_task(companion())
        woken = [offset(run)]
        for seconds in (100, 10, 1000):
            await asyncio.sleep(seconds)
            woken.append(offset(run))
        await other
        return woken

    async def main() -> tuple[list[float], list[Event]]:
        clock = ManualClock()
        async with perdure(None, [napper], clock) as app:
            handle = await app.start(napper, id="r")
            working = asyncio.create_task(app.work())
            if when == "parked":
                release.set()
            await asyncio.sleep(0.02)
            clock.advance(50)
            await asyncio.sleep(0.02)
            clock.jump(jump_s)
            row = await handle.row()
            while row.status != "succeeded":
                await asyncio.sleep(0.002)
                clock.advance(20)
                nudge(app)
                row = await handle.row()
                if clock.now() > (START_S + 3 * HOUR) * 1e6:
                    release.set()
            result = await handle.result()
            app.drain()
            await working
            return result, await handle.events()

    woken, events = run(main())
    steps = [later - earlier for earlier, later in itertools.pairwise(woken)]
    assert [step >= asked for step, asked in zip(steps, (100, 10, 1000), strict=True)] == [True] * 3
    fired = [event.body.timer for event in events if isinstance(event.body, TimerFired)]
    assert fired == sorted(fired)
    assert len(fired) == 3


def nudge(app: Perdure) -> None:
    """The clock is ours: a worker that sleeps until a time does not know that we have moved it, and looks again only now and then."""
    worker_of(app)._notice()
    for drive in list(worker_of(app)._drives.values()):
        asyncio.get_running_loop().call_soon(drive.look_at_clock)


def test_inside_an_agent_time_never_goes_back(tmp_path: Path) -> None:
    @agent(version="1")
    async def watcher(run: Run) -> list[float]:
        seen = [offset(run)]
        for _ in range(4):
            await run.receive("tick")
            seen.append(offset(run))
        return seen

    async def main() -> Any:
        clock, where = ManualClock(), tmp_path / "db"
        async with perdure(where, [watcher], clock) as app:
            await app.start(watcher, id="r")
        for jump in (10, -HOUR, 20, 2 * HOUR):
            clock.jump(jump)
            async with perdure(where, [watcher], clock) as app:
                await driven(app)
                await app.signal("r", "tick")
        assert await step(where, clock, watcher) == "succeeded"
        async with perdure(where, [watcher], clock) as app:
            return await app.handle("r").result()

    seen = run(main())
    assert seen == sorted(seen)
    assert seen[-1] == 10 + 20 + HOUR


# -- many ---------------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_a_thousand_timers_due_in_the_same_second_all_fire(tmp_path: Path, record_property: Any) -> None:
    many = 1000
    fired: list[tuple[str, int]] = []

    def look(run_id: str, events: Sequence[Event]) -> None:
        fired.extend((run_id, event.ts) for event in events if isinstance(event.body, TimerFired))

    @agent(version="1")
    async def napper(run: Run, n: int) -> int:
        await asyncio.sleep(60 + n / many)
        return n

    async def main() -> float:
        clock = ManualClock()
        settings = Settings(poll_s=0.25, park_after_s=0)
        async with perdure(tmp_path / "db", [napper], clock, settings=settings, observers=[look]) as app:
            for n in range(many):
                await app.start(napper, n, id=f"r{n}")
            working = asyncio.create_task(app.work())
            await until(lambda: count(app, "waiting") == many, 60)
            assert fired == []
            begun = time.perf_counter()
            clock.advance(61)
            await until(lambda: count(app, "succeeded") == many, 60)
            took_s = time.perf_counter() - begun
            app.drain()
            await working
            return took_s

    took_s = run(main(), 120)
    record_property("seconds for 1,000 timers", took_s)
    print(f"1,000 timers due in the same second: all done after {took_s:.2f} s")
    assert Counter(run_id for run_id, _ in fired) == Counter({f"r{n}": 1 for n in range(many)})
    early = [run_id for run_id, ts in fired if ts < (START_S + 60 + int(run_id[1:]) / many) * 1e6 - 1]
    assert early == []
    assert took_s < 20, "a second on this machine when nobody else uses it"


def count(app: Perdure, status: str) -> int:
    return len(app.store.list(EVERYTHING.also(status=status), 10_000))


@pytest.mark.full
def test_a_worker_with_nothing_due_asks_for_next_to_nothing() -> None:
    """Not one question for each of the thousand runs that wait."""
    many = 1000
    asked: Counter[str] = Counter()

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [sleeper], clock, settings=Settings(poll_s=0.25, park_after_s=0)) as app:
            for n in range(many):
                await app.start(sleeper, 1, id=f"r{n}")
            working = asyncio.create_task(app.work())
            await until(lambda: count(app, "waiting") == many, 60)
            await asyncio.sleep(0.5)
            tally(app.store, asked)
            await asyncio.sleep(2.0)
            idle = Counter(asked)
            clock.advance(HOUR)
            await until(lambda: count(app, "succeeded") == many, 60)
            app.drain()
            await working
            assert asked["claim"] > 0, "the tally counts"
            asked.clear()
            asked.update(idle)

    run(main(), 90)
    assert asked["claim"] == asked["read"] == asked["append"] == 0
    assert asked["next_ready"] <= 8, asked
    assert asked["version"] <= 30, asked
    assert asked["get"] + asked["inbox"] + asked["family"] + asked["list"] <= 8, asked


def tally(store: Any, asked: Counter[str]) -> None:
    """Count the calls of the store from here on."""

    def counted(name: str, method: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            asked[name] += 1
            return method(*args, **more)

        return call

    for name in ("claim", "read", "append", "get", "inbox", "next_ready", "version", "family", "list"):
        setattr(store, name, counted(name, getattr(store, name)))


def test_a_worker_wakes_up_for_the_next_timer_and_not_by_chance() -> None:
    """Nothing is polled here within the time of this test: what wakes it is the time itself."""

    @agent(version="1")
    async def napper(run: Run) -> float:
        due = run.now().timestamp() + 0.3
        await asyncio.sleep(0.3)
        return run.now().timestamp() - due

    async def main() -> float:
        settings = SETTINGS.__class__(poll_s=60, park_after_s=0)
        async with Perdure("sqlite://", [napper], settings=settings) as app:
            handle = await app.start(napper)
            working = asyncio.create_task(app.work())
            late_s = await handle.result(timeout=60)
            app.drain()
            await working
            return float(late_s)

    late_s = run(main())
    assert 0 <= late_s < 20


def test_a_timer_that_is_due_soon_is_waited_for_without_giving_the_run_up() -> None:
    @agent(version="1")
    async def napper(run: Run) -> str:
        await asyncio.sleep(0.05)
        return "up"

    async def main() -> list[str]:
        async with Perdure("sqlite://", [napper], settings=Settings(poll_s=0.01)) as app:
            handle = await app.start(napper)
            assert await handle.result(timeout=60) == "up"
            return outline(await handle.events(), without=())

    assert run(main()) == ["run_created", "run_claimed", "timer_fired", "run_succeeded"]
