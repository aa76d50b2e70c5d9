"""Rate limits on tools: over all runs and workers, with places that are kept, and pauses for all callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, outline, perdure, run, status_of, until

from perdure import Agent, Approval, Budget, Call, NotSent, Perdure, Rate, Retry, RetryLater, Run, RunCancelled, agent, tool
from perdure.engine.clock import Clock
from perdure.settings import Settings

SECOND = 1_000_000


@asynccontextmanager
async def at_work(*apps: Perdure) -> AsyncIterator[None]:
    stop = asyncio.Event()
    working = [asyncio.create_task(app.work(stop=stop)) for app in apps]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*working)


def most_in_any(span_us: int, starts: list[int]) -> int:
    """The most starts in any span of this length."""
    ordered = sorted(starts)
    return max(sum(begin <= other < begin + span_us for other in ordered) for begin in ordered)


async def drive_on(app: Perdure, clock: ManualClock, seconds: float) -> None:
    """Drive run r to its end, moving the clock on by so much whenever it waits."""
    for _ in range(500):
        if (await app.engine.drive("r", wait=False)).status == "succeeded":
            return
        clock.advance(seconds)
    raise AssertionError(f"it is still {status_of(app, 'r')}")


class Service:
    """The limited service, with its own memory."""

    def __init__(self, clock: Clock) -> None:
        self.starts: list[int] = []
        self.callers: list[str] = []
        self._clock = clock

    def note(self, call: Call) -> None:
        self.starts.append(self._clock.now())
        self.callers.append(f"{call.run_id} {call.number}/{call.attempt}")


def caller_of(limited: Any, name: str = "caller") -> Agent[Any, Any]:
    async def caller(run: Run, count: int) -> int:
        return len(await asyncio.gather(*(limited() for _ in range(count))))

    return Agent(caller, name=name, version="1")


# -- the limit ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["read", "once"])
def test_a_rate_holds_over_all_runs_of_two_apps_on_one_file(effect: Any, tmp_path: Path) -> None:
    performed: list[str] = []

    @tool(effect=effect, rate=Rate(5, per=0.2))
    async def limited(call: Call) -> None:
        performed.append(f"{call.run_id} {call.number}")

    code = caller_of(limited)
    settings = Settings(poll_s=0.002, park_after_s=0, flush_s=0.005)
    ids = [f"r{number}" for number in range(6)]

    async def main() -> tuple[int, list[int]]:
        began = Clock().now()
        async with (
            perdure(tmp_path / "db", [code], Clock(), settings) as one,
            perdure(tmp_path / "db", [code], Clock(), settings) as two,
            at_work(one, two),
        ):
            for number, run_id in enumerate(ids):
                await (one if number % 2 else two).start(code, 5, id=run_id)
            await until(lambda: all(status_of(one, run_id) == "succeeded" for run_id in ids))
            return began, [event.ts for run_id in ids for event in one.store.read(run_id) if event.type == "tool_call_initiated"]

    began, intents = run(main())
    assert len(intents) == len(set(performed)) == len(performed) == 30
    # Five at once after a quiet time, and then one every 40 ms; a late caller uses its place up to 200 ms later.
    assert most_in_any(200_000, intents) <= 5 + 5 + 5
    assert max(intents) - began >= (30 - 5) * 40_000


def test_tools_with_the_same_key_share_one_line_and_others_do_not_wait() -> None:
    clock = ManualClock()
    service, other = Service(clock), Service(clock)

    @tool(effect="once", rate=Rate(2, per=10, key="openai"))
    async def ask(call: Call) -> None:
        service.note(call)

    @tool(effect="once", rate=Rate(2, per=10, key="openai"))
    async def embed(call: Call) -> None:
        service.note(call)

    @tool(effect="once", rate=Rate(2, per=10))
    async def free(call: Call) -> None:
        other.note(call)

    @agent(version="1")
    async def both(run: Run) -> None:
        await asyncio.gather(ask(), ask(), embed(), embed(), free(), free())

    async def main() -> None:
        async with perdure(None, [both], clock) as app:
            await app.start(both, id="r")
            await app.engine.drive("r", wait=False)
            assert (len(service.starts), len(other.starts)) == (2, 2)
            row = await app.handle("r").row()
            assert (row.status, row.holder, row.waiting_for) == ("waiting", None, "its turn under the rate limit: embed (call 3)")
            assert row.ready_at == clock.now() + 5 * SECOND
            clock.advance(5)
            await app.engine.drive("r", wait=False)
            assert len(service.starts) == 3
            clock.advance(5)
            assert (await app.engine.drive("r", wait=False)).status == "succeeded"

    run(main())


def test_many_runs_that_are_parked_until_their_turn_each_start_at_it(tmp_path: Path) -> None:
    """A call keeps its place over a park and a restart.

    If it always went to the end of the line, it might never start.
    """
    clock = ManualClock()
    service = Service(clock)

    @tool(effect="once", rate=Rate(1, per=60))
    async def limited(call: Call) -> None:
        service.note(call)

    code = caller_of(limited)

    async def main() -> None:
        began = clock.now()
        for round_ in range(8):
            async with perdure(tmp_path / "db", [code], clock) as app:
                for number in range(6):
                    if round_ == 0:
                        await app.start(code, 1, id=f"r{number}")
                    if status_of(app, f"r{number}") not in ("succeeded",):
                        await app.engine.drive(f"r{number}", wait=False)
                assert len(service.starts) == min(round_ + 1, 6), round_
            clock.advance(60)
        assert [start - began for start in service.starts] == [number * 60 * SECOND for number in range(6)]
        assert service.callers == [f"r{number} 1/1" for number in range(6)]  # first come, first served

    run(main())


@pytest.mark.parametrize("what", ["retries", "approved"])
def test_retries_and_approved_calls_keep_their_places_too(what: str, tmp_path: Path) -> None:
    clock = ManualClock()
    service = Service(clock)

    @tool(
        effect="once",
        rate=Rate(1, per=60),
        retry=Retry(attempts=9, base=0, jitter=False),
        approval=Approval() if what == "approved" else None,
    )
    async def limited(call: Call) -> None:
        service.note(call)
        if what == "retries" and call.attempt == 1:
            raise NotSent("once more")

    code = caller_of(limited)
    wanted = 6 if what == "retries" else 3

    async def main() -> None:
        async with perdure(tmp_path / "db", [code], clock) as app:
            for number in range(3):
                await app.start(code, 1, id=f"r{number}")
                await app.engine.drive(f"r{number}", wait=False)
                for asked in await app.approvals():
                    await app.approve(asked.approval, by="ann")
        for _ in range(12):
            async with perdure(tmp_path / "db", [code], clock) as app:
                for number in range(3):
                    if status_of(app, f"r{number}") != "succeeded":
                        await app.engine.drive(f"r{number}", wait=False)
            clock.advance(60)
        async with perdure(tmp_path / "db", [code], clock) as app:
            assert [status_of(app, f"r{number}") for number in range(3)] == ["succeeded"] * 3

    run(main())
    assert len(service.starts) == wanted
    assert most_in_any(60 * SECOND, service.starts) == 1
    # No call waited for a place that was not used.
    assert max(service.starts) - min(service.starts) <= (wanted + 1) * 60 * SECOND


def test_a_place_that_went_by_while_no_worker_was_there_is_taken_anew() -> None:
    """All that waited must not start at once now."""
    clock = ManualClock()
    service = Service(clock)

    @tool(effect="once", rate=Rate(1, per=60, burst=1))
    async def limited(call: Call) -> None:
        service.note(call)

    code = caller_of(limited)

    async def main() -> None:
        async with perdure(None, [code], clock) as app:
            await app.start(code, 20, id="r")
            await app.engine.drive("r", wait=False)
            clock.advance(24 * 3600)
            row = await app.engine.drive("r", wait=False)
            assert row.status == "waiting"
            assert most_in_any(60 * SECOND, service.starts) == 1, service.starts
            await drive_on(app, clock, 60)
        assert most_in_any(60 * SECOND, service.starts) == 1
        assert len(service.callers) == len(set(service.callers)) == 20

    run(main())


# -- waiting for it -----------------------------------------------------------------------------------------------------
def test_a_short_wait_is_waited_for_and_a_long_one_parks_the_run() -> None:
    clock = Clock()
    service = Service(clock)

    @tool(effect="once", rate=Rate(1, per=0.05))
    async def soon(call: Call) -> None:
        service.note(call)

    @tool(effect="once", rate=Rate(1, per=3600))
    async def late(call: Call) -> None:
        service.note(call)

    quick, slow = caller_of(soon, "quick"), caller_of(late, "slow")

    async def main() -> int:
        settings = Settings(poll_s=0.002, park_after_s=1.0, flush_s=0.005)
        began = clock.now()
        async with perdure(None, [quick, slow], clock, settings) as app:
            await app.start(quick, 3, id="q")
            assert (await app.engine.drive("q")).status == "succeeded"
            assert sum(event.type == "run_claimed" for event in await app.handle("q").events()) == 1
            await app.start(slow, 2, id="s")
            row = await app.engine.drive("s", wait=False)
            assert (row.status, row.holder) == ("waiting", None)
        return began

    began = run(main())
    # Against the beginning, and not against the start before: on a busy machine that may itself be late.
    assert [start - began >= number * 50_000 for number, start in enumerate(service.starts[:3])] == [True] * 3, service.starts


def test_cancelling_a_run_that_waits_for_its_turn_starts_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    service = Service(clock)

    @tool(effect="once", rate=Rate(1, per=60))
    async def limited(call: Call) -> None:
        service.note(call)

    code = caller_of(limited)

    async def main() -> None:
        async with perdure(tmp_path / "db", [code], clock) as app:
            handle = await app.start(code, 3, id="r")
            assert (await app.engine.drive("r", wait=False)).status == "waiting"
            await app.cancel("r")
            with pytest.raises(RunCancelled):
                await handle.result()
            lines = outline(await handle.events())
            assert [line for line in lines if line.startswith("failed")] == ["failed 2/0 cancelled", "failed 3/0 cancelled"]
            clock.advance(3600)
        assert len(service.starts) == 1

    run(main())


def test_a_timeout_around_a_call_that_waits_for_its_turn_gives_it_up() -> None:
    clock = ManualClock()
    service = Service(clock)

    @tool(effect="once", rate=Rate(1, per=3600))
    async def limited(call: Call) -> None:
        service.note(call)

    @agent(version="1")
    async def hasty(run: Run) -> str:
        await limited()
        try:
            async with asyncio.timeout(5):
                await limited()
        except TimeoutError:
            return "gave up"
        return "done"

    async def main() -> Any:
        async with perdure(None, [hasty], clock) as app:
            await app.start(hasty, id="r")
            await app.engine.drive("r", wait=False)
            clock.advance(6)
            return await app.handle("r").result()

    assert run(main()) == "gave up"
    assert len(service.starts) == 1


def test_a_call_that_may_not_start_for_want_of_money_takes_no_place() -> None:
    clock = ManualClock()
    service = Service(clock)

    @tool(effect="once", rate=Rate(1, per=60))
    async def limited(call: Call) -> None:
        service.note(call)

    code = caller_of(limited)

    async def main() -> None:
        async with perdure(None, [code], clock) as app:
            await app.start(code, 1, id="poor", budget=Budget(calls=0))
            assert (await app.engine.drive("poor", wait=False)).attention == "budget"
            await app.start(code, 1, id="rich")
            assert (await app.engine.drive("rich", wait=False)).status == "succeeded"

    run(main())


def test_the_calls_of_a_run_that_is_drained_while_they_wait_are_not_lost(tmp_path: Path) -> None:
    clock = ManualClock()
    service = Service(clock)

    @tool(effect="once", rate=Rate(2, per=10))
    async def limited(call: Call) -> None:
        service.note(call)

    code = caller_of(limited)

    async def main() -> None:
        settings = Settings(poll_s=0.002, park_after_s=3600, flush_s=0.005)  # so that the run is held while it waits
        async with perdure(tmp_path / "db", [code], clock, settings) as app:
            await app.start(code, 8, id="r")
            async with at_work(app):
                await until(lambda: len(service.starts) == 2)
            assert status_of(app, "r") == "queued"
        async with perdure(tmp_path / "db", [code], clock) as app:
            await drive_on(app, clock, 1)
        assert len(service.callers) == len(set(service.callers)) == 8
        assert most_in_any(10 * SECOND, service.starts) <= 2 + 2

    run(main())


# -- the service asks to wait -----------------------------------------------------------------------------------------
class TooManyRequests(Exception):
    """As HTTP clients raise it."""

    def __init__(self, after: str) -> None:
        super().__init__("429 Too Many Requests")
        self.response = type("Response", (), {"status_code": 429, "headers": {"Retry-After": after}})()


@pytest.mark.parametrize("refusal", [RetryLater(after=30), TooManyRequests("30")], ids=["RetryLater", "HTTP 429"])
@pytest.mark.parametrize("limit", [None, 100])
def test_one_refusal_pauses_the_key_for_every_run_until_its_retry_after(refusal: Exception, limit: int | None, tmp_path: Path) -> None:
    clock = ManualClock()
    service = Service(clock)
    refuses = [True]

    @tool(effect="once", rate=Rate(limit, key="provider"), retry=Retry(attempts=5, base=0, jitter=False))
    async def ask(call: Call) -> None:
        service.note(call)
        if refuses[0]:
            raise refusal

    @tool(effect="once", rate=Rate(limit, key="other"))
    async def elsewhere(call: Call) -> None:
        service.note(call)

    one, two, three = caller_of(ask, "one"), caller_of(ask, "two"), caller_of(elsewhere, "three")

    async def main() -> None:
        async with perdure(tmp_path / "db", [one], clock) as app:
            await app.start(one, 1, id="a")
            assert (await app.engine.drive("a", wait=False)).status == "waiting"
        refuses[0] = False
        async with perdure(tmp_path / "db", [two, three], clock) as app:
            clock.advance(10)
            await app.start(two, 1, id="b")
            row = await app.engine.drive("b", wait=False)
            assert (row.status, row.waiting_for) == ("waiting", "its turn under the rate limit: ask (call 1)")
            assert row.ready_at == clock.now() + 20 * SECOND
            await app.start(three, 1, id="c")
            assert (await app.engine.drive("c", wait=False)).status == "succeeded"
            clock.advance(20)
            assert (await app.engine.drive("b", wait=False)).status == "succeeded"
        async with perdure(tmp_path / "db", [one], clock) as app:
            assert (await app.engine.drive("a", wait=False)).status == "succeeded"

    run(main())
    assert service.callers == ["a 1/1", "c 1/1", "b 1/1", "a 1/2"]


def test_those_who_waited_out_a_pause_still_start_one_after_the_other() -> None:
    """All of their places have come up meanwhile; they must not all be used in the moment in which the pause is over."""
    clock = ManualClock()
    service = Service(clock)

    @tool(effect="once", rate=Rate(1, per=1, burst=1), retry=Retry(attempts=5, base=0, jitter=False))
    async def ask(call: Call) -> None:
        service.note(call)
        if len(service.starts) == 1:
            raise RetryLater(after=100)

    code = caller_of(ask)

    async def main() -> None:
        async with perdure(None, [code], clock) as app:
            await app.start(code, 10, id="r")
            await drive_on(app, clock, 1)

    run(main())
    assert len(service.starts) == 11
    assert service.starts[1] - service.starts[0] >= 100 * SECOND
    assert most_in_any(SECOND, service.starts) <= 2  # a place may be used up to one step of this test's clock late


def test_a_refusal_holds_back_calls_of_the_same_run_that_have_a_place_already() -> None:
    clock = ManualClock()
    service = Service(clock)

    @tool(effect="once", rate=Rate(1, per=2), retry=Retry(attempts=5, base=0, jitter=False))
    async def ask(call: Call) -> None:
        service.note(call)
        if len(service.starts) == 1:
            raise RetryLater(after=60)

    code = caller_of(ask)

    async def main() -> None:
        began = clock.now()
        async with perdure(None, [code], clock) as app:
            await app.start(code, 2, id="r")
            await app.engine.drive("r", wait=False)
            clock.advance(2)  # the second one's place
            row = await app.engine.drive("r", wait=False)
            assert (row.status, len(service.starts)) == ("waiting", 1)
            await drive_on(app, clock, 2)
        assert service.starts[1] - began >= 60 * SECOND

    run(main())


def test_a_tool_without_a_rate_waits_for_nobody_else_s_pause() -> None:
    clock = ManualClock()
    calls: list[str] = []

    @tool(effect="once", retry=Retry(attempts=5, base=0, jitter=False))
    async def plain(call: Call) -> None:
        calls.append(f"{call.run_id} {call.attempt}")
        if call.run_id == "a" and call.attempt == 1:
            raise RetryLater(after=30)

    code = caller_of(plain)

    async def main() -> None:
        async with perdure(None, [code], clock) as app:
            await app.start(code, 1, id="a")
            assert (await app.engine.drive("a", wait=False)).status == "waiting"
            await app.start(code, 1, id="b")
            assert (await app.engine.drive("b", wait=False)).status == "succeeded"

    run(main())
    assert calls == ["a 1", "b 1"]


def test_the_settings_of_these_tests_park_every_wait() -> None:
    assert SETTINGS.park_after_s == 0


def test_a_call_keeps_its_place_when_its_turn_comes_while_a_transaction_has_the_file(tmp_path: Path) -> None:
    """The real clock: the turn of a call comes up while the write lock is taken, again and again."""
    starts: list[int] = []

    @tool(effect="once", rate=Rate(limit=1, per=0.2, burst=1))
    async def limited(n: int) -> int:
        starts.append(n)
        return n

    @tool(effect="transaction")
    def book(n: int, call: Call) -> int:
        time.sleep(0.09)
        return n

    @tool(effect="read")
    async def rest() -> None:
        await asyncio.sleep(0.02)

    @agent(version="1", name="caller")
    async def caller(run: Run) -> list[int]:
        return list(await asyncio.gather(*(limited(n) for n in range(5))))

    @agent(version="1", name="booker")
    async def booker(run: Run) -> None:
        for n in range(12):
            await book(n)
            await rest()

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/db", [caller, booker], settings=Settings(poll_s=0.02)) as app:
            calls, books = await app.start(caller, id="a"), await app.start(booker, id="b")
            await asyncio.gather(calls.result(), books.result())

    run(main())
    assert starts == [0, 1, 2, 3, 4]
