"""Cancelling a run at every phase, and calls that their agent stops waiting for, by effect class."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, local, outline, perdure, run, status_of, until

from perdure import AlreadyRunning, Budget, Call, NotSent, Outcome, Perdure, Retry, Run, RunCancelled, RunEnded, Settings, agent, tool
from perdure.core.events import CancelRequested, Event, ToolCallFailed
from perdure.core.events import RunCancelled as RunCancelledEvent
from perdure.store.api import RunRow

EFFECTS = ["read", "idempotent", "keyed", "once"]


# -- before and between -------------------------------------------------------------------------------------------------
def test_a_run_that_nobody_has_claimed_yet_never_begins() -> None:
    begun: list[int] = []

    @agent(version="1")
    async def eager(run: Run) -> None:
        begun.append(1)

    async def main() -> tuple[str, list[str]]:
        async with perdure(None, [eager]) as app:
            handle = await app.start(eager)
            await app.cancel(handle.id, by="ann", reason="changed my mind")
            assert (await handle.row()).status == "cancelling"
            with pytest.raises(RunCancelled):
                await handle.result()
            return (await handle.row()).status, outline(await handle.events())

    assert run(main()) == ("cancelled", ["run_created", "cancel_requested", "run_cancelled"])
    assert begun == []


@pytest.mark.parametrize("by_worker", [True, False])
def test_a_run_that_is_parked_on_a_timer_is_woken_to_be_cancelled(by_worker: bool) -> None:
    @agent(version="1")
    async def sleeper(run: Run) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            run.note(f"cleaned up, {run.cancelled}")

    async def main() -> tuple[str, list[str]]:
        async with perdure(None, [sleeper]) as app:
            handle = await app.start(sleeper)
            assert (await app.engine.drive(handle.id, wait=False)).status == "waiting"
            await app.cancel(handle.id)
            if by_worker:
                working = asyncio.create_task(app.work())
                while (await handle.row()).status != "cancelled":
                    await asyncio.sleep(0.002)
                app.drain()
                await working
            else:
                await app.engine.drive(handle.id)
            return (await handle.row()).status, outline(await handle.events())[2:]

    assert run(main()) == ("cancelled", ["cancel_requested", "note cleaned up, True", "run_cancelled"])


def test_a_run_that_waits_for_a_retry_gives_the_call_up() -> None:
    attempts: list[int] = []

    @tool(effect="once", retry=Retry(base=60))
    async def pay(call: Call) -> None:
        attempts.append(call.attempt)
        raise NotSent("refused")

    @agent(version="1")
    async def payer(run: Run) -> None:
        await pay()

    async def main() -> tuple[str, list[str]]:
        async with perdure(None, [payer]) as app:
            handle = await app.start(payer)
            assert (await app.engine.drive(handle.id, wait=False)).status == "waiting"
            await app.cancel(handle.id)
            return (await app.engine.drive(handle.id)).status, outline(await handle.events())

    status, lines = run(main())
    assert status == "cancelled"
    assert lines[-3:] == ["cancel_requested", "failed 1/1 cancelled", "run_cancelled"]
    assert attempts == [1]


def test_a_finished_run_takes_no_cancel() -> None:
    @agent(version="1")
    async def quick(run: Run) -> int:
        return 1

    async def main() -> None:
        async with perdure(None, [quick]) as app:
            await app.run(quick, id="r")
            with pytest.raises(RunEnded, match=r"has finished \(succeeded\)"):
                await app.cancel("r")
            assert await app.handle("r").result() == 1

    run(main())


@pytest.mark.parametrize("when", ["while it is parked", "while it cleans up"])
def test_a_second_cancel_does_not_interrupt_the_cleaning_up(when: str) -> None:
    """An impatient person cancels twice; the agent must still be able to release its resources."""
    released: list[int] = []
    finish = asyncio.Event()

    @tool(effect="idempotent")
    async def release(call: Call) -> None:
        released.append(call.attempt)
        await finish.wait()
        released.append(0)

    @agent(version="1")
    async def sleeper(run: Run) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await release()

    async def main() -> list[str]:
        async with perdure(None, [sleeper]) as app:
            handle = await app.start(sleeper)
            await app.engine.drive(handle.id, wait=False)
            await app.cancel(handle.id, reason="first")
            if when == "while it is parked":
                await app.cancel(handle.id, reason="second")
            driving = asyncio.create_task(app.engine.drive(handle.id))
            await until(lambda: released)
            if when == "while it cleans up":
                # As another process would that has read the row before it said "cancelling".
                body = CancelRequested(by="ann", reason="second")
                app.store.post(
                    handle.id, None, body, event_id=app.clock.new_id(), now=app.clock.now(), status="cancelling", expect=lambda _: None
                )
                worker = local(app)._worker
                assert worker is not None
                await until(lambda: not app.store.inbox(worker.id) or worker._drives[handle.id]._core._seen)
                await asyncio.sleep(0.02)
            finish.set()
            assert (await driving).status == "cancelled"
            return outline(await handle.events())

    lines = run(main())
    assert lines[-4:] == ["cancel_requested", "initiated release 1/1", "completed 1/1", "run_cancelled"]
    assert lines.count("cancel_requested") == 1
    assert released == [1, 0]


# -- in flight ----------------------------------------------------------------------------------------------------------
class InFlight:
    """An agent inside a call that continues until it is told to stop."""

    def __init__(self, effect: Any, *, stubborn: bool = False, reconcile: Outcome | None = None) -> None:
        self.began: list[int] = []
        self.cancelled = 0
        self.release = asyncio.Event()

        @tool(effect=effect)
        async def work(call: Call) -> str:
            self.began.append(call.attempt)
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                if not stubborn:
                    raise
                await self.release.wait()
            return "finished after all"

        if reconcile is not None:

            @work.reconcile
            async def _(call: Call) -> Outcome:
                return reconcile

        @agent(version="1")
        async def worker(run: Run) -> str:
            return str(await work())

        self.agent = worker

    async def cancelled_in_flight(self, app: Perdure) -> RunRow:
        await app.start(self.agent, id="r")
        driving = asyncio.create_task(app.engine.drive("r", wait=False))
        await until(lambda: self.began)
        await app.cancel("r")
        return await driving


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_a_harmless_call_in_flight_is_stopped(effect: Any) -> None:
    case = InFlight(effect)

    async def main() -> tuple[RunRow, list[str]]:
        async with perdure(None, [case.agent]) as app:
            return await case.cancelled_in_flight(app), outline(await app.handle("r").events())

    row, lines = run(main())
    assert row.status == "cancelled"
    assert case.cancelled == 1
    assert lines[-3:] == ["cancel_requested", "failed 1/1 cancelled", "run_cancelled"]


@pytest.mark.parametrize("effect", ["keyed", "once"])
def test_an_effect_in_flight_that_was_stopped_is_in_doubt_until_somebody_knows(effect: Any) -> None:
    case = InFlight(effect)

    async def main() -> tuple[RunRow, RunRow, list[str]]:
        async with perdure(None, [case.agent]) as app:
            first = await case.cancelled_in_flight(app)
            await app.resolve("r", 1, did_not_happen=True)
            return first, await app.engine.drive("r"), outline(await app.handle("r").events())

    first, second, lines = run(main())
    assert first.status == "needs_attention"
    assert (second.status, case.began) == ("cancelled", [1])
    assert lines[2:] == [
        *("cancel_requested", "in_doubt 1/1", "attention_needed"),
        *("resolved 1/1 did_not_happen by app", "failed 1/1 cancelled", "run_cancelled"),
    ]


@pytest.mark.parametrize("reconcile", [None, Outcome.unknown("who knows")])
def test_after_a_cancel_a_keyed_call_in_doubt_is_not_performed_again(tmp_path: Path, reconcile: Outcome | None) -> None:
    """Its key keeps it from happening twice; but perhaps it has not happened yet, and now it must not."""
    case = InFlight("keyed", reconcile=reconcile)

    async def first() -> RunRow:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            return await case.cancelled_in_flight(app)

    async def again() -> RunRow:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            return await app.engine.drive("r", wait=False)

    assert run(first()).status == "needs_attention"
    assert run(again()).status == "needs_attention"
    assert case.began == [1]


@pytest.mark.parametrize("effect", ["keyed", "once"])
@pytest.mark.parametrize("known", [Outcome.happened("found"), Outcome.not_happened()], ids=lambda outcome: outcome.kind)
def test_a_hook_settles_an_effect_that_was_stopped(effect: Any, known: Outcome) -> None:
    case = InFlight(effect, reconcile=known)

    async def main() -> RunRow:
        async with perdure(None, [case.agent]) as app:
            return await case.cancelled_in_flight(app)

    assert run(main()).status == "cancelled"
    assert case.began == [1]


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_tool_that_ends_well_within_the_grace_has_completed(effect: Any) -> None:
    """The tool was told to stop and reports success: that is recorded."""
    case = InFlight(effect, stubborn=True)

    async def main() -> tuple[RunRow, list[str]]:
        async with perdure(None, [case.agent]) as app:
            await app.start(case.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: case.began)
            await app.cancel("r")
            await until(lambda: case.cancelled)
            case.release.set()
            return await driving, outline(await app.handle("r").events())

    row, lines = run(main())
    assert row.status == "cancelled"
    assert lines[-2:] == ["completed 1/1", "run_cancelled"]


def test_a_transaction_is_not_cancelled_in_the_middle() -> None:
    @tool(effect="transaction")
    def write(call: Call) -> int:
        call.connection.execute("CREATE TABLE IF NOT EXISTS notes (text TEXT)")
        call.connection.execute("INSERT INTO notes VALUES ('x')")
        return int(call.connection.execute("SELECT count(*) FROM notes")[0][0])

    @agent(version="1")
    async def writer(run: Run) -> int:
        total = 0
        for _ in range(5):
            total = await write()
        return total

    async def main() -> tuple[str, list[str]]:
        async with perdure(None, [writer]) as app:
            await app.start(writer, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            handle = app.handle("r")
            while "completed 2/1" not in outline(await handle.events()):
                await asyncio.sleep(0)
            await app.cancel("r")
            return (await driving).status, outline(await handle.events())

    status, lines = run(main())
    assert status in ("cancelled", "succeeded"), "a cancel that comes too late changes nothing"
    completed = [line for line in lines if line.startswith("completed")]
    assert len(completed) == len([line for line in lines if line.startswith("initiated")]) - ("failed" in " ".join(lines))


def test_a_sync_tool_sees_that_it_should_stop_and_what_it_says_then_counts() -> None:
    begun, seen = threading.Event(), list[bool]()

    @tool(effect="once")
    def work(call: Call) -> str:
        begun.set()
        while not call.cancelled:
            time.sleep(0.001)
        seen.append(call.cancelled)
        return "stopped in good order"

    @agent(version="1")
    async def worker(run: Run) -> str:
        return str(await work())

    async def main() -> tuple[RunRow, list[str]]:
        async with perdure(None, [worker], settings=Settings(poll_s=0.002, park_after_s=0, cancel_grace_s=5)) as app:
            await app.start(worker, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(begun.is_set)
            await app.cancel("r")
            return await driving, outline(await app.handle("r").events())

    row, lines = run(main())
    assert (row.status, seen) == ("cancelled", [True])
    assert lines[-3:] == ["cancel_requested", "completed 1/1", "run_cancelled"]


def test_a_sync_tool_that_does_not_look_is_given_up_and_its_effect_is_in_doubt() -> None:
    begun, release = threading.Event(), threading.Event()

    @tool(effect="once")
    def work() -> str:
        begun.set()
        release.wait(20)
        return "too late"

    @agent(version="1")
    async def worker(run: Run) -> str:
        return str(await work())

    async def main() -> tuple[RunRow, list[str]]:
        async with perdure(None, [worker]) as app:
            await app.start(worker, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(begun.is_set)
            await app.cancel("r")
            row = await driving
            release.set()
            return row, outline(await app.handle("r").events())

    row, lines = run(main())
    assert row.status == "needs_attention"
    assert lines[-3:] == ["cancel_requested", "in_doubt 1/1", "attention_needed"]


ISOLATED = """
import os, time
from perdure import Call, Run, agent, tool

@tool(effect="{effect}", isolate=True)
def work(pidfile: str, call: Call) -> str:
    with open(pidfile, "w") as file:
        file.write(str(os.getpid()))
    while True:
        time.sleep(0.01)  # whatever it is told, it does not stop by itself

@agent(version="1")
async def worker(run: Run, pidfile: str) -> str:
    return await work(pidfile)
"""


@pytest.mark.parametrize(("effect", "status"), [("idempotent", "cancelled"), ("once", "needs_attention")])
def test_an_isolated_tool_is_killed(tmp_path: Path, effect: str, status: str) -> None:
    (tmp_path / "isolated_worker.py").write_text(ISOLATED.format(effect=effect))
    spec = importlib.util.spec_from_file_location("isolated_worker", tmp_path / "isolated_worker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pidfile = tmp_path / "pid"

    async def main() -> tuple[RunRow, list[str]]:
        async with perdure(None, [module.worker], settings=Settings(poll_s=0.002, park_after_s=0, cancel_grace_s=10)) as app:
            await app.start(module.worker, str(pidfile), id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: pidfile.exists() and pidfile.read_text())
            await app.cancel("r")
            return await driving, outline(await app.handle("r").events())

    row, lines = run(main())
    assert row.status == status
    assert lines[2:4] == ["cancel_requested", "failed 1/1 cancelled" if effect == "idempotent" else "in_doubt 1/1"]
    assert not psutil.pid_exists(int(pidfile.read_text())), "it is gone when the journal says so"


# -- while it cleans up -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", EFFECTS)
def test_calls_made_while_cleaning_up_are_performed(effect: Any) -> None:
    done: list[str] = []

    @tool(effect=effect)
    async def tidy(what: str) -> None:
        await asyncio.sleep(0.01)
        done.append(what)

    @agent(version="1")
    async def sleeper(run: Run) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await tidy("first")
            await tidy("second")

    async def main() -> RunRow:
        async with perdure(None, [sleeper]) as app:
            handle = await app.start(sleeper)
            await app.engine.drive(handle.id, wait=False)
            await app.cancel(handle.id)
            driving = asyncio.create_task(app.engine.drive(handle.id))
            await asyncio.sleep(0.005)
            assert (await handle.row()).status == "cancelling"
            return await driving

    assert run(main()).status == "cancelled"
    assert done == ["first", "second"]


def test_a_crash_while_cleaning_up_goes_on_cleaning_up(tmp_path: Path) -> None:
    done: list[str] = []

    @tool(effect="keyed")
    async def tidy(what: str, call: Call) -> None:
        done.append(f"{what} {call.attempt}")
        if what == "second" and call.attempt == 1:
            await asyncio.sleep(60)

    @agent(version="1")
    async def sleeper(run: Run) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await tidy("first")
            await tidy("second")

    async def crash() -> None:
        async with perdure(tmp_path / "db", [sleeper]) as app:
            await app.start(sleeper, id="r")
            await app.engine.drive("r", wait=False)
            await app.cancel("r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: "second 1" in done)
            app.abort()
            await driving

    async def resume() -> RunRow:
        async with perdure(tmp_path / "db", [sleeper]) as app:
            return await app.engine.drive("r")

    run(crash())
    assert run(resume()).status == "cancelled"
    assert done == ["first 1", "second 1", "second 2"], "a call that is wanted is performed again, cancelled or not"


def test_an_agent_that_catches_the_cancel_may_still_succeed() -> None:
    @agent(version="1")
    async def stubborn(run: Run) -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
        await asyncio.sleep(10)
        return f"done, {run.cancelled}"

    async def main() -> tuple[list[str], Any]:
        clock, seen = ManualClock(), list[str]()
        async with perdure(None, [stubborn], clock) as app:
            handle = await app.start(stubborn)
            for step_s in (1, 11, 0):
                seen.append((await app.engine.drive(handle.id, wait=False)).status)
                if step_s == 1:
                    await app.cancel(handle.id)
                clock.advance(step_s)
            return seen, await handle.result()

    seen, output = run(main())
    assert seen[-1] == "succeeded"
    assert output == "done, True"


# -- calls that only their agent has given up ---------------------------------------------------------------------------
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_call_abandoned_by_a_timeout_is_stopped_if_harmless_and_left_to_end_if_not(effect: Any) -> None:
    harmless = effect in ("read", "idempotent")
    finished: list[str] = []
    given_up: list[str] = []

    @tool(effect=effect)
    async def slow() -> str:
        while not given_up:
            await asyncio.sleep(0.01)
        await asyncio.sleep(60 if harmless else 0.1)  # 0.1 s: longer than cancel_grace_s
        finished.append("slow")
        return "slow"

    @agent(version="1")
    async def hasty(run: Run) -> str:
        try:
            async with asyncio.timeout(0.5):  # on a busy machine, too, the call begins before that
                await slow()
        except TimeoutError:
            given_up.append("slow")
            run.note("went on")
        return "done"

    async def main() -> tuple[Any, list[Event]]:
        settings = SETTINGS.__class__(poll_s=0.002, cancel_grace_s=0.05)
        async with Perdure("sqlite://", [hasty], settings=settings) as app:
            handle = await app.start(hasty)
            return await handle.result(), await handle.events()

    output, events = run(main())
    assert output == "done"
    lines = outline(events)
    assert lines[1:4] == ["initiated slow 1/1", "timer_fired", "note went on"]
    if harmless:
        assert lines[4:] == ["failed 1/1 cancelled", "run_succeeded"]
        assert finished == []
    else:
        assert lines[4:] == ["completed 1/1", "run_succeeded"], "nobody knows how to stop an effect half way: the run waits for its end"
        assert finished == ["slow"]


def test_a_call_abandoned_before_it_began_is_withdrawn_without_a_doubt() -> None:
    @tool(effect="once")
    async def never() -> None:
        raise AssertionError("it must not begin")

    @agent(version="1")
    async def fickle(run: Run) -> str:
        task = asyncio.create_task(never())
        await asyncio.sleep(0)
        task.cancel()
        return "never mind"

    async def main() -> tuple[Any, list[Event]]:
        async with perdure(None, [fickle]) as app:
            handle = await app.start(fickle)
            return await handle.result(), await handle.events()

    output, events = run(main())
    assert output == "never mind"
    failed = next(event.body for event in events if isinstance(event.body, ToolCallFailed))
    assert (failed.failure.kind, failed.final) == ("cancelled", True)


@pytest.mark.parametrize("effect", ["keyed", "once"])
def test_an_abandoned_effect_that_fails_in_doubt_keeps_the_run_open_until_it_is_settled(effect: Any) -> None:
    @tool(effect=effect)
    async def slow() -> str:
        await asyncio.sleep(0.6)
        raise ConnectionResetError("gone")

    @agent(version="1")
    async def hasty(run: Run) -> str:
        try:
            async with asyncio.timeout(0.2):
                await slow()
        except TimeoutError:
            pass
        return "done"

    async def main() -> tuple[str, Any]:
        async with Perdure("sqlite://", [hasty], settings=SETTINGS.__class__(poll_s=0.002)) as app:
            handle = await app.start(hasty)
            row = await app.engine.drive(handle.id)
            await app.resolve(handle.id, 1, did_not_happen=True, final=True)
            return row.status, await handle.result()

    assert run(main()) == ("needs_attention", "done")


def test_a_result_timeout_leaves_the_run_and_its_cancel_still_reaches_it() -> None:
    """The caller that waited is gone; the run continues here, and must still get its post."""
    case = InFlight("read")

    async def main() -> str:
        async with perdure(None, [case.agent]) as app:
            handle = await app.start(case.agent)
            with pytest.raises(TimeoutError, match="the run goes on"):
                await handle.result(timeout=0.05)
            assert (await handle.row()).status == "running"
            await app.cancel(handle.id)
            with pytest.raises(RunCancelled):
                await handle.result()
            return (await handle.row()).status

    assert run(main()) == "cancelled"


def test_a_cancel_reaches_a_run_that_nobody_waits_for() -> None:
    """The only caller has stopped waiting, and no worker serves the queue.

    The run is still driven here, and still gets post.
    """
    case = InFlight("read")

    async def main() -> None:
        async with perdure(None, [case.agent]) as app:
            handle = await app.start(case.agent)
            with pytest.raises(TimeoutError, match="the run goes on"):
                await handle.result(timeout=0.05)
            await app.cancel(handle.id)
            await until(lambda: status_of(app, handle.id) == "cancelled")

    run(main())


def test_a_cancel_that_a_worker_took_to_its_grave_reaches_the_next_one(tmp_path: Path) -> None:
    """The cancel is in the inbox of a run that rests as soon as it is claimed.

    It must be read before that, not after.
    """
    case = InFlight("once")

    async def first() -> None:
        async with perdure(tmp_path / "db", [case.agent], settings=SETTINGS.__class__(poll_s=60)) as app:
            await app.start(case.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: case.began)
            await app.cancel("r")
            app.abort()
            await driving

    async def second() -> tuple[RunRow, list[Event]]:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            return await app.engine.drive("r", wait=False), await app.handle("r").events()

    run(first())
    row, events = run(second())
    assert row.status == "needs_attention"
    assert [line for line in outline(events) if line == "cancel_requested"] == ["cancel_requested"]
    assert len(events) < 12, "it does not go round and round"


def test_a_run_that_is_about_to_need_attention_is_cancelled_without_another_word() -> None:
    """Its budget is used up, and a call of another branch is still under way: the cancel waits for neither."""
    begun: list[int] = []

    @tool(effect="read")
    async def work(n: int) -> None:
        begun.append(n)
        await asyncio.sleep(60)

    @agent(version="1", budget=Budget(calls=1))
    async def worker(run: Run) -> None:
        try:
            await asyncio.gather(work(1), work(2))
        finally:
            run.note("cleaned up")

    async def main() -> tuple[str, list[str]]:
        async with perdure(None, [worker]) as app:
            await app.start(worker, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: begun)
            await app.cancel("r")
            row = await driving
            return row.status, outline(await app.handle("r").events())

    status, lines = run(main())
    assert (status, begun) == ("cancelled", [1])
    assert "attention_needed" in lines
    assert lines[-4:] == ["note cleaned up", "failed 1/1 cancelled", "failed 2/0 cancelled", "run_cancelled"]


# -- without its agent --------------------------------------------------------------------------------------------------
def test_a_run_that_no_longer_replays_is_ended_by_force(tmp_path: Path) -> None:
    changed = [False]

    @tool(effect="read")
    async def step(n: int) -> int:
        return n

    @agent(version="1")
    async def walker(run: Run) -> None:
        await step(2 if changed[0] else 1)
        await asyncio.sleep(3600)

    async def main() -> tuple[str, RunCancelledEvent, int]:
        async with perdure(tmp_path / "db", [walker]) as app:
            await app.start(walker, id="r")
            await app.engine.drive("r", wait=False)
            changed[0] = True
            await app.cancel("r", by="ann")
            row = await app.engine.drive("r", wait=False)
            assert (row.status, row.attention) == ("needs_attention", "diverged"), "its agent cannot be told"
            await app.cancel("r", by="ann", reason="the code is gone", force=True)
            seq = (await app.handle("r").row()).seq
            for again in (app.cancel("r"), app.cancel("r", force=True), app.signal("r", "chat"), app.unpause("r")):
                with pytest.raises(RunEnded):
                    await again
            body = (await app.handle("r").events())[-1].body
            assert isinstance(body, RunCancelledEvent)
            return status_of(app, "r"), body, (await app.handle("r").row()).seq - seq

    status, body, more = run(main())
    assert (status, body.forced_by, body.reason, more) == ("cancelled", "ann", "the code is gone", 0)


def test_a_run_that_somebody_drives_is_not_ended_by_force() -> None:
    case = InFlight("read")

    async def main() -> str:
        async with perdure(None, [case.agent]) as app:
            await app.start(case.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: case.began)
            with pytest.raises(AlreadyRunning, match="is held by a worker"):
                await app.cancel("r", force=True)
            assert status_of(app, "r") == "running"
            case.release.set()
            return (await driving).status

    assert run(main()) == "succeeded"


def test_a_doubt_that_was_left_stays_one_when_its_run_is_ended_by_force() -> None:
    """G8: a doubt is never guessed away. The journal of the ended run still says that the outcome is unknown."""
    case = InFlight("once")

    async def main() -> tuple[str, list[str], str]:
        async with perdure(None, [case.agent]) as app:
            assert (await case.cancelled_in_flight(app)).status == "needs_attention"
            await app.cancel("r", by="ann", force=True)
            state = await app.handle("r").state()
            with pytest.raises(RunEnded):
                await app.resolve("r", 1, did_not_happen=True)
            return status_of(app, "r"), outline(await app.handle("r").events()), state.calls[1].phase

    status, lines, phase = run(main())
    assert (status, phase, case.began) == ("cancelled", "in_doubt", [1])
    assert lines[-3:] == ["in_doubt 1/1", "attention_needed", "run_cancelled"]


@pytest.mark.parametrize("how", ["queued", "parked", "paused"])
def test_force_ends_whatever_nobody_holds(how: str) -> None:
    @agent(version="1")
    async def sleeper(run: Run) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise AssertionError("its agent is not asked")

    async def main() -> tuple[str, list[str]]:
        async with perdure(None, [sleeper]) as app:
            await app.start(sleeper, id="r")
            if how == "parked":
                await app.engine.drive("r", wait=False)
            elif how == "paused":
                await app.pause("r")
            await app.cancel("r", force=True)
            with pytest.raises(RunCancelled):
                await app.handle("r").result()
            return status_of(app, "r"), outline(await app.handle("r").events())[-1:]

    assert run(main()) == ("cancelled", ["run_cancelled"])
