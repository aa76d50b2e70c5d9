"""A clock that only moves when the test moves it, and an app that uses it.

Nothing happens by itself, and nothing is late.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from tests.unit.drive_tools import run, status_of, until

from perdure import Call, InvalidInput, Perdure, Retry, RetryLater, Run, Settings, agent, tool
from perdure.testing import ManualClock

DAY_S = 24 * 3600.0
# Real time, less than the minute after which a worker polls: a wait for a clock that has jumped takes no time.
LONG_S = 20.0


def app_on(clock, *agents):
    """With the settings that a user has, who has set none; but nothing is written meanwhile, not even a sign of life, that would wake it."""
    return Perdure("sqlite://", agents, clock=clock, settings=Settings(lease_s=1000))


@agent(version="1")
async def sleeper(run_: Run, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return run_.now().timestamp()


def test_a_run_that_is_waited_for_goes_on_when_the_clock_is_advanced():
    async def main():
        clock = ManualClock()
        async with app_on(clock, sleeper) as app:
            handle = await app.start(sleeper, 3 * DAY_S, id="r")
            waiting = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: status_of(app, "r") == "waiting")
            clock.advance(days=3)
            assert (await waiting).status == "succeeded"
            assert await handle.result() == clock.time.timestamp() == 1_700_000_000 + 3 * DAY_S

    run(main(), LONG_S)


def test_a_short_wait_parks_the_run_too_since_no_time_passes():
    async def main():
        clock = ManualClock()
        async with app_on(clock, sleeper) as app:
            handle = await app.start(sleeper, 0.5)
            assert (await app.engine.drive(handle.id, wait=False)).status == "waiting"
            clock.advance(0.4)
            assert (await app.engine.drive(handle.id, wait=False)).status == "waiting"
            clock.advance(0.1)
            assert (await app.engine.drive(handle.id, wait=False)).status == "succeeded"

    run(main(), LONG_S)


def test_a_deadline_goes_off_while_a_call_is_under_way():
    begun = asyncio.Event()

    @tool(effect="read")
    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    @agent(version="1")
    async def hurried(run_: Run) -> str:
        try:
            async with asyncio.timeout(3600):
                await endless()
        except TimeoutError:
            return "too late"
        return "in time"

    async def main():
        clock = ManualClock()
        async with app_on(clock, hurried) as app:
            result = asyncio.create_task(app.run(hurried, id="r"))
            await begun.wait()
            await until(lambda: app.store.get("r").seq > 2)  # its intent has been written, and nothing else is about to happen
            await asyncio.sleep(0)
            clock.advance(hours=1)
            assert await result == "too late"

    run(main(), LONG_S)


def test_backoffs_and_expiries_and_beginnings_follow_the_same_clock():
    @tool(effect="keyed", retry=Retry(attempts=3, base=600, jitter=False))
    async def flaky(call: Call) -> int:
        if call.attempt < 2:
            raise RetryLater("busy", after=600)
        return call.attempt

    @agent(version="1")
    async def patient(run_: Run) -> list[object]:
        asked = await run_.request_approval("go", {}, expires=timedelta(hours=4))
        return [asked.outcome, await flaky()]

    async def main():
        clock = ManualClock()
        async with app_on(clock, patient) as app:
            handle = await app.start(patient, not_before=timedelta(days=1))
            waiting = asyncio.create_task(handle.result())
            for status in ("queued", "waiting_approval", "waiting"):
                await until(lambda status=status: status_of(app, handle.id) == status)
                row = app.store.get(handle.id)
                clock.advance_to(datetime.fromtimestamp(row.ready_at / 1e6, UTC))
            assert await waiting == ["expired", 2]
            assert clock.time == datetime.fromtimestamp(1_700_000_000, UTC) + timedelta(days=1, hours=4, minutes=10)

    run(main(), LONG_S)


def test_a_clock_rings_for_as_long_as_somebody_listens():
    clock, rung = ManualClock(), []
    forget = clock.on_jump(lambda: rung.append(clock.now()))
    clock.advance(1)
    clock.advance(minutes=1, hours=1, days=1)
    forget()
    clock.advance(1)
    forget()
    assert rung == [1_700_000_001_000_000, 1_700_090_061_000_000]


def test_a_closed_app_does_not_hear_of_the_clock_any_more():
    async def main():
        clock = ManualClock()
        async with app_on(clock, sleeper) as app:
            await app.run(sleeper, 0)
        return clock

    run(main()).advance(days=1)  # its loop is closed: to ring there would be an error


@pytest.mark.parametrize("step", [{"days": "3"}, {"seconds": float("inf")}, {"hours": float("nan")}])
def test_what_is_no_span_of_time_is_refused(step):
    with pytest.raises(InvalidInput, match=r"give numbers, such as advance\(days=3\)"):
        ManualClock().advance(**step)


def test_time_only_passes_unless_the_clock_is_set():
    clock = ManualClock()
    for step in ({"seconds": -5}, {"hours": 1, "days": -1}):
        with pytest.raises(InvalidInput, match=r"it only moves the clock forward; set_to\(…\) sets it back"):
            clock.advance(**step)
    assert clock.now() == 1_700_000_000_000_000
    rung = []
    clock.on_jump(lambda: rung.append(clock.now()))
    clock.set_to(clock.time - timedelta(microseconds=3))
    assert rung == [1_699_999_999_999_997]
    with pytest.raises(InvalidInput, match=r"set_to\(5\): a datetime with a time zone"):
        clock.set_to(5)  # type: ignore[arg-type]


def test_a_moment_without_a_zone_is_refused_and_one_that_is_past_changes_nothing():
    clock = ManualClock()
    with pytest.raises(InvalidInput, match="with a time zone"):
        clock.advance_to(datetime(2030, 1, 1))  # noqa: DTZ001
    clock.advance_to(datetime(2000, 1, 1, tzinfo=UTC))
    assert clock.now() == 1_700_000_000_000_000
