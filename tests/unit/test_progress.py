"""`call.heartbeat`.

Progress is stored from time to time, recorded with the end of the attempt, given to the next attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec import structs
from tests.unit.drive_tools import SETTINGS, local, outline, perdure, run, until, worker_of

from perdure import Call, Outcome, Rate, Retry, Run, Tool, agent, tool
from perdure.core.codec import Payload, decode
from perdure.core.events import Event, ToolCallCompleted, ToolCallFailed, ToolCallInDoubt, ToolCallInitiated
from perdure.engine.clock import Clock
from perdure.errors import InvalidInput, NotEncodable, RetryLater, StoreUnavailable
from perdure.store.api import KeptProgress
from perdure.tool.call import MAX_PROGRESS_BYTES

AT_ONCE = Retry(attempts=3, base=0.001, jitter=0)
OFTEN = structs.replace(SETTINGS, progress_s=0.0)
STAYS = structs.replace(OFTEN, park_after_s=60.0)


def agent_of(made: Tool[..., Any]) -> Any:
    @agent(version="1")
    async def one(run: Run) -> Any:
        return await made()

    return one


def reached(events: Sequence[Event]) -> list[Any]:
    """The progress in each event that can have one."""
    bodies = [event.body for event in events if isinstance(event.body, ToolCallCompleted | ToolCallFailed | ToolCallInDoubt)]
    return [None if body.progress is None else decode(inline(body.progress)) for body in bodies]


def inline(payload: Payload) -> bytes:
    found = payload.inline
    assert found is not None
    return found


async def driven(made: Tool[..., Any], settings: Any = STAYS, where: Path | None = None) -> tuple[Any, list[Event]]:
    async with perdure(where, [one := agent_of(made)], Clock(), settings) as app:
        handle = await app.start(one, id="r")
        try:
            result = await handle.result()
        except Exception as error:
            result = error
        events = await handle.events()
    return result, events


# -- what is recorded, and what the next attempt gets
# -------------------------------------------------------------------
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_a_failed_attempt_records_its_last_progress_and_the_next_attempt_gets_it(sync: bool) -> None:
    seen: list[Any] = []

    def upload(call: Call) -> str:
        seen.append(call.last_progress)
        if call.attempt == 1:
            call.heartbeat({"part": 1})
            call.heartbeat({"part": 2})
            call.heartbeat()  # only a sign of life: the progress stays
        if call.attempt < 3:
            raise RetryLater("cut off", after=0)
        return "done"

    async def upload_async(call: Call) -> str:
        return upload(call)

    made = tool(effect="idempotent", retry=AT_ONCE)(upload if sync else upload_async)
    result, events = run(driven(made))
    assert result == "done"
    # Attempt 2 reported nothing: what attempt 1 reported is still the last progress.
    assert seen == [None, {"part": 2}, {"part": 2}]
    assert reached(events) == [{"part": 2}, None, None]


def test_the_progress_is_recorded_with_the_result_and_shown_in_the_state() -> None:
    @tool(effect="idempotent")
    async def upload(call: Call) -> str:
        call.heartbeat(["last", 40])
        return "done"

    _, events = run(driven(upload))
    assert reached(events) == [["last", 40]]


def test_a_call_without_a_heartbeat_is_recorded_as_before() -> None:
    @tool(effect="idempotent")
    async def upload(call: Call) -> str:
        return "done"

    _, events = run(driven(upload))
    assert reached(events) == [None]


def test_a_reconcile_hook_gets_the_progress_of_the_attempt_in_doubt() -> None:
    asked: list[Any] = []

    @tool
    async def send(call: Call) -> str:
        call.heartbeat({"part": 3})
        raise TimeoutError("no answer")

    @send.reconcile
    async def _(call: Call) -> Outcome:
        asked.append(call.last_progress)
        call.heartbeat("of the hook")  # a hook has no progress
        return Outcome.happened("found")

    result, events = run(driven(send))
    assert result == "found"
    assert asked == [{"part": 3}]
    assert reached(events) == [{"part": 3}]


def test_a_drained_attempt_that_may_be_repeated_keeps_its_progress_for_the_next_worker(tmp_path: Path) -> None:
    seen: list[Any] = []

    @tool(effect="idempotent")
    async def upload(call: Call) -> str:
        seen.append(call.last_progress)
        if call.attempt == 1:
            call.heartbeat({"part": 9})
            await asyncio.sleep(60)
        return "done"

    one = agent_of(upload)
    quick = structs.replace(SETTINGS, drain_timeout_s=0.0)

    async def main() -> None:
        async with perdure(tmp_path / "j.db", [one], Clock(), quick) as app:
            await app.start(one, id="r")
            working = asyncio.create_task(app.work())
            await until(lambda: seen)
            app.drain()
            await working
        async with perdure(tmp_path / "j.db", [one], Clock(), quick) as app:
            assert await app.handle("r").result() == "done"

    run(main())
    assert seen == [None, {"part": 9}]


def test_a_transaction_records_its_progress_and_a_rolled_back_one_leaves_none(tmp_path: Path) -> None:
    seen: list[Any] = []

    @tool(effect="transaction", retry=AT_ONCE)
    def book(call: Call) -> str:
        seen.append(call.last_progress)
        call.heartbeat(call.attempt)
        if call.attempt == 1:
            raise RetryLater("not now", after=0)
        return "booked"

    result, events = run(driven(book, where=tmp_path / "j.db"))
    assert (result, seen, reached(events)) == ("booked", [None, None], [None, 2])


# -- what is stored while the attempt runs --------------------------------------------------------------------------------
def test_the_progress_is_stored_while_the_call_runs_and_deleted_when_it_has_ended(tmp_path: Path) -> None:
    going = asyncio.Event()

    @tool(effect="idempotent")
    async def upload(call: Call) -> str:
        call.heartbeat({"part": 4})
        await going.wait()
        return "done"

    one = agent_of(upload)

    async def main() -> None:
        async with perdure(tmp_path / "j.db", [one], Clock(), STAYS) as app:
            handle = await app.start(one, id="r")
            waiting = asyncio.create_task(handle.result())
            await until(lambda: app.reading.progress(["r"]))
            assert [one.progress for one in (await handle.info()).running] == [{"part": 4}]
            assert [one.progress for one in app.reading.current(["r"])["r"].running] == [b'{"part":4}']
            going.set()
            assert await waiting == "done"
            assert (await handle.info()).running == ()
        async with perdure(tmp_path / "j.db", [one]) as app:
            assert app.reading.progress(["r"]) == []

    run(main())


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_ten_thousand_heartbeats_are_cheap_and_are_few_writes(sync: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[Sequence[KeptProgress]] = []
    spent: list[float] = []

    def beat(call: Call) -> None:
        begun_s = time.thread_time()
        for part in range(10_000):
            call.heartbeat({"part": part})
        spent.append(time.thread_time() - begun_s)

    def upload(call: Call) -> int:
        beat(call)
        return 1

    async def upload_async(call: Call) -> int:
        beat(call)
        await asyncio.sleep(0)
        return 1

    one = agent_of(tool(effect="idempotent")(upload if sync else upload_async))

    async def main() -> list[Event]:
        async with perdure(tmp_path / "j.db", [one], Clock(), structs.replace(STAYS, progress_s=0.2)) as app:
            store = local(app).store
            keep = store.keep_progress

            def counted(kept: Sequence[KeptProgress], ended: Any, now: int) -> None:
                writes.append(kept)
                keep(kept, ended, now)

            monkeypatch.setattr(store, "keep_progress", counted)
            begun_s = time.monotonic()
            await app.run(one, id="r")
            assert len(writes) <= 2 + (time.monotonic() - begun_s) / 0.2
            return await app.handle("r").events()

    events = run(main())
    assert reached(events) == [{"part": 9_999}]
    assert spent[0] < 0.5  # 50 µs each, on a busy machine; it is a tenth of that on an idle one


def test_an_outage_of_the_store_loses_no_progress_it_is_written_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going = asyncio.Event()
    refused: list[int] = []

    @tool(effect="idempotent")
    async def upload(call: Call) -> str:
        call.heartbeat({"part": 4})
        await going.wait()
        return "done"

    one = agent_of(upload)

    async def main() -> None:
        async with perdure(tmp_path / "j.db", [one], Clock(), STAYS) as app:
            store = local(app).store
            keep = store.keep_progress

            def fails_twice(*args: Any) -> None:
                if len(refused) < 2:
                    refused.append(1)
                    raise StoreUnavailable("away")
                keep(*args)

            monkeypatch.setattr(store, "keep_progress", fails_twice)
            waiting = asyncio.create_task(app.run(one, id="r"))
            await until(lambda: app.reading.progress(["r"]))
            going.set()
            assert await waiting == "done"

    run(main())
    assert len(refused) == 2


def test_after_an_abort_like_a_crash_the_next_worker_gets_the_stored_progress_and_records_it(tmp_path: Path) -> None:
    seen: list[Any] = []

    @tool(effect="keyed")
    async def upload(call: Call) -> str:
        seen.append(call.last_progress)
        if call.attempt == 1:
            call.heartbeat({"part": 12})
            await asyncio.sleep(60)
        return "done"

    one = agent_of(upload)

    async def main() -> list[Event]:
        async with perdure(tmp_path / "j.db", [one], Clock(), STAYS) as app:
            handle = await app.start(one, id="r")
            waiting = asyncio.create_task(handle.result())
            await until(lambda: app.reading.progress(["r"]))
            app.abort()
            waiting.cancel()
        async with perdure(tmp_path / "j.db", [one], Clock(), STAYS) as app:
            assert await app.handle("r").result() == "done"
            return await app.handle("r").events()

    events = run(main())
    assert seen == [None, {"part": 12}]
    assert outline(events)[1:5] == ["initiated upload 1/1", "in_doubt 1/1", "initiated upload 1/2", "completed 1/2"]
    assert reached(events) == [{"part": 12}, None]


def test_a_parked_run_reads_the_stored_progress_of_an_attempt_that_was_cut_off_before(tmp_path: Path) -> None:
    seen: list[Any] = []
    starts: list[int] = []

    @tool(effect="keyed", rate=Rate(limit=1, per=3.0))
    async def upload(call: Call) -> str:
        seen.append(call.last_progress)
        if call.attempt == 1:
            await asyncio.sleep(60)
        return "done"

    @agent(version="1")
    async def one(run: Run) -> str:
        starts.append(1)
        return await upload()

    where, keeping = tmp_path / "j.db", structs.replace(OFTEN, cache_runs=1)

    async def main() -> list[Event]:
        async with perdure(where, [one], Clock(), keeping) as app:
            await app.start(one, id="r")
            working = asyncio.create_task(app.work())
            await until(lambda: seen)
            app.abort()
            working.cancel()
        async with perdure(where, [one], Clock(), keeping) as app:
            await app.drive("r", wait=False)  # the call waits for the rate limit, and the run is parked
            assert len(worker_of(app)._parked) == 1
            # No worker writes such a row while the run is parked. But every stored row must be read at a claim.
            with closing(apsw.Connection(str(where))) as other:
                other.execute("INSERT INTO perdure_progress SELECT id, 1, 1, '7', 1 FROM perdure_runs")
            assert await app.handle("r").result() == "done"
            return await app.handle("r").events()

    events = run(main())
    assert len(starts) == 2  # the second worker has replayed the run once, and kept its machine
    assert seen == [None, 7]
    assert reached(events) == [7, None]


# -- limits ---------------------------------------------------------------------------------------------------------------
def test_a_progress_that_is_too_large_or_not_json_is_refused_and_the_last_one_stays() -> None:
    call = Call.outside()
    call.heartbeat("fits")
    with pytest.raises(NotEncodable, match=r"call.heartbeat: the progress takes 32,77\d bytes as JSON; the limit is 32,768"):
        call.heartbeat("x" * MAX_PROGRESS_BYTES)
    with pytest.raises(NotEncodable):
        call.heartbeat(object())
    assert call.progress == "fits"
    call.heartbeat("x" * (MAX_PROGRESS_BYTES - 2))


@pytest.mark.parametrize("value", [0, -1, "5", True, float("nan"), 1e12])
def test_heartbeat_timeout_is_checked_like_timeout(value: Any) -> None:
    with pytest.raises(InvalidInput, match="tool upload: heartbeat_timeout="):

        @tool(heartbeat_timeout=value)
        async def upload() -> None: ...


def test_a_transaction_has_no_heartbeat_timeout() -> None:
    with pytest.raises(InvalidInput, match="heartbeat_timeout cannot end a transaction"):

        @tool(effect="transaction", heartbeat_timeout=5)
        def book(call: Call) -> None: ...


def test_a_heartbeat_timeout_is_no_part_of_the_pin() -> None:
    def upload() -> None: ...

    assert tool(heartbeat_timeout=5)(upload).pin() == tool()(upload).pin()


def test_a_heartbeat_timeout_is_no_bound_on_how_long_a_request_may_still_arrive() -> None:
    @tool(effect="idempotent", heartbeat_timeout=5)
    async def upload(call: Call) -> str:
        return "done"

    _, events = run(driven(upload))
    (intent,) = [event.body for event in events if isinstance(event.body, ToolCallInitiated)]
    assert intent.timeout_s is None  # core/decide.py waits as for a tool without a timeout
