"""A worker keeps the machines of parked runs and continues without a replay, but never beyond the journal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import structs
from tests.unit.approval_tools import check_replay
from tests.unit.drive_tools import SETTINGS, local, run, status_of, until

from perdure import Perdure, Run, Settings, agent, tool
from perdure.core.codec import Payload, pack
from perdure.core.events import Event, RunClaimed, RunReleased, SignalReceived
from perdure.core.state import CallState, RunState
from perdure.core.steps import ParkedRun, goes_on_from
from perdure.engine.local.parked_runs import ParkedRuns, weight_of

KEEPING = structs.replace(SETTINGS, cache_runs=10)
begun: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    begun.clear()


@tool(effect="keyed")
async def add(what: int) -> int:
    return what


@agent(version="1")
async def adder(run: Run, signals: int) -> int:
    begun[run.id] += 1
    total = 0
    for _ in range(signals):
        total += await add(await run.receive("more"))
    return total


@agent(version="1")
async def part(run: Run, number: int) -> int:
    await asyncio.sleep(0.2)
    return await add(number)


@agent(version="1")
async def whole(run: Run, parts: int) -> int:
    begun[run.id] += 1
    return sum([await part(number) for number in range(parts)])


@asynccontextmanager
async def serving(url: str, settings: Settings = KEEPING) -> AsyncIterator[Perdure]:
    stop = asyncio.Event()
    async with Perdure(url, [adder, whole, part], settings=settings) as app:
        working = asyncio.create_task(app.work(stop=stop))
        try:
            yield app
        finally:
            stop.set()
            await working


def parked_runs(app: Perdure) -> ParkedRuns:
    worker = local(app)._worker
    assert worker is not None
    return worker._parked


async def waits(app: Perdure, run_id: str, claims: int) -> None:
    """Until the run is parked after so many claims."""

    def is_parked() -> bool:
        row = app.store.get(run_id)
        assert row is not None
        return row.epoch == claims and row.status == "waiting"

    await until(is_parked)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'j.db'}" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.mark.parametrize(("kept", "starts"), [(10, 1), (0, 6)])
def test_a_run_that_gets_signals_is_replayed_only_if_its_machine_was_not_kept(url: str, kept: int, starts: int) -> None:
    async def main() -> None:
        async with serving(url, structs.replace(SETTINGS, cache_runs=kept)) as app:
            handle = await app.start(adder, 5, id="r")
            for number in range(5):
                await waits(app, "r", number + 1)
                await app.signal("r", "more", number)
            assert await handle.result() == 10
        assert begun["r"] == starts

    run(main())


def test_a_parent_that_awaits_its_children_in_a_row_is_not_replayed_for_each_of_them(url: str) -> None:
    async def main() -> None:
        async with serving(url, structs.replace(KEEPING, linger_s=0)) as app:
            assert await app.run(whole, 4, id="r") == 6
            row = app.store.get("r")
            assert row is not None
            assert row.epoch >= 4  # it was parked for each child
        assert begun["r"] == 1

    run(main())


def test_a_run_that_another_worker_has_driven_meanwhile_is_replayed(url: str) -> None:
    async def main() -> None:
        async with Perdure(url, [adder], settings=KEEPING) as first, Perdure(url, [adder], settings=KEEPING) as second:
            handle = await first.start(adder, 3, id="r")
            await first.drive("r", wait=False)
            await first.signal("r", "more", 1)
            await second.drive("r", wait=False)  # with another machine
            await first.signal("r", "more", 2)
            await first.drive("r", wait=False)  # its machine does not know the first signal
            await first.signal("r", "more", 4)
            await first.drive("r", wait=False)
            assert await handle.result() == 7
        assert begun["r"] == 3  # first, second, and the replay; the last drive goes on with a kept machine

    run(main())


def test_the_run_that_was_parked_longest_ago_makes_room_for_others(tmp_path: Path) -> None:
    async def main() -> None:
        settings = structs.replace(SETTINGS, cache_runs=2)
        async with Perdure(f"sqlite:///{tmp_path / 'j.db'}", [adder], settings=settings) as app:
            for name in ("a", "b", "c"):
                await app.start(adder, 1, id=name)
                await app.drive(name, wait=False)
            assert len(parked_runs(app)) == 2
            for name in ("c", "b", "a"):
                await app.signal(name, "more", 1)
                await app.drive(name, wait=False)
                assert status_of(app, name) == "succeeded"
            assert len(parked_runs(app)) == 0
        assert begun == {"a": 2, "b": 1, "c": 1}

    run(main())


def test_no_memory_for_kept_machines_means_a_replay(tmp_path: Path) -> None:
    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path / 'j.db'}", [adder], settings=structs.replace(KEEPING, cache_mb=0)) as app:
            handle = await app.start(adder, 1, id="r")
            await app.drive("r", wait=False)
            await app.signal("r", "more", 1)
            await app.drive("r", wait=False)
            assert await handle.result() == 1
        assert begun["r"] == 2

    run(main())


@pytest.mark.parametrize("inline_bytes", [1_000_000, 100], ids=["inline", "as blobs"])
def test_large_results_weigh_in(inline_bytes: int) -> None:
    def state_with(size: int) -> RunState:
        state = RunState(numbers=100)
        for number in range(1, 101):
            payload = pack(b'"' + b"x" * size + b'"', inline_bytes)[0]
            state.calls[number] = CallState(number, "t", "read", "", payload, 1, 1, state.keys)
        return state

    small, large = weight_of(state_with(10)), weight_of(state_with(50_000))
    assert small < 1_000_000
    assert 5_000_000 < large < 10_000_000


def event(seq: int, body: RunReleased | RunClaimed | SignalReceived, event_id: str = "00" * 16) -> Event:
    return Event(seq, event_id, 5, 1, None, None, body)


def test_a_kept_machine_is_used_only_at_its_own_place_in_the_journal() -> None:
    released = event(7, RunReleased("waiting", "a signal"))
    parked = ParkedRun(released, RunState(), None, None, {}, set(), set())  # type: ignore[arg-type]
    claim, signal = RunClaimed("w", "w"), SignalReceived("more", Payload(), by="ann")
    assert goes_on_from(parked, [released, event(8, signal), event(9, claim)])
    assert not goes_on_from(parked, [])  # the journal is shorter: it was restored from a backup
    # The event was written again.
    assert not goes_on_from(parked, [event(7, RunReleased("waiting", "a signal"), "11" * 16), event(8, claim)])
    assert not goes_on_from(parked, [released, event(8, claim), event(9, released.body), event(10, claim)])  # type: ignore[arg-type]


def test_a_kept_machine_does_not_go_on_after_a_person_has_reopened_its_run(tmp_path: Path) -> None:
    """The worker has the machine in memory, and no other worker has driven the run. Still its agent goes back."""

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [adder], settings=KEEPING) as app:
            await app.start(adder, 2, id="r")
            await app.signal("r", "more", 1)
            await app.drive("r", wait=False)
            await app.rewind("r", 2)
            before = begun["r"]
            await app.drive("r", wait=False)
            types = [event.type for event in app.store.read("r")]
            assert begun["r"] == before + 1, "the agent has not gone back"
            assert (types.count("tool_call_initiated"), types.count("call_requested_again")) == (1, 1)
            await app.signal("r", "more", 2)
            await app.drive("r", wait=False)
            assert await app.handle("r").result() == 3
            check_replay(app, adder)

    run(main())
