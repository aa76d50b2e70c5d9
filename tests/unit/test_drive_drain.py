"""Draining a worker at every phase.

Each run is released at a step boundary, or its call is recorded as in doubt (G13).
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, local, outline, perdure, run, status_of, until, worker_of

from perdure import Agent, Call, NotSent, Outcome, Perdure, Retry, Run, Settings, agent, tool
from perdure.core.events import Event, ToolCallInitiated
from perdure.store.api import RunRow

EFFECTS = ["read", "idempotent", "keyed", "once"]
IMPATIENT = Settings(
    poll_s=0.002, park_after_s=0, reconcile_margin_s=0, unknown_deadline_s=0, cancel_grace_s=0.02, flush_s=0.005, drain_timeout_s=0.02
)


async def drained(app: Perdure, when: Any) -> RunRow:
    """The run `r` after a worker that served it was drained as soon as the condition held."""
    working = asyncio.create_task(app.work())
    await until(when)
    app.drain()
    await working
    return await app.handle("r").row()


async def finished(path: Path, code: Agent[Any, Any], settings: Settings = SETTINGS) -> tuple[RunRow, list[str]]:
    async with perdure(path, [code], settings=settings) as app:
        row = await app.engine.drive("r", wait=False)
        return row, outline(await app.handle("r").events(), without=("run_claimed",))


class Steps:
    """An agent with two calls; the first continues until the test lets it end, or it is told to stop."""

    def __init__(self, effect: Any, reconcile: Outcome | None = None) -> None:
        self.began: list[str] = []
        self.finish = asyncio.Event()

        @tool(effect=effect)
        async def step(name: str, call: Call) -> str:
            self.began.append(f"{name} {call.attempt}")
            if name == "first":
                await self.finish.wait()
            return name

        if reconcile is not None:

            @step.reconcile
            async def _(name: str, call: Call) -> Outcome:
                return reconcile

        @agent(version="1")
        async def walker(run: Run) -> list[str]:
            return [await step("first"), await step("second")]

        self.agent: Agent[Any, Any] = walker


async def end_when_draining(app: Perdure, finish: asyncio.Event) -> None:
    await until(lambda: local(app)._worker is not None and worker_of(app)._draining)
    finish.set()


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_call_in_flight_may_end_and_the_next_worker_goes_on_behind_it(tmp_path: Path, effect: Any) -> None:
    case = Steps(effect)

    async def main() -> RunRow:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            await app.start(case.agent, id="r")
            ending = asyncio.create_task(end_when_draining(app, case.finish))
            row = await drained(app, lambda: case.began)
            await ending
            return row

    row = run(main())
    assert (row.status, row.holder) == ("queued", None)
    assert row.ready_at is not None
    row, lines = run(finished(tmp_path / "db", case.agent))
    assert row.status == "succeeded"
    assert case.began == ["first 1", "second 1"], "neither lost nor repeated"
    assert lines.index("completed 1/1") < lines.index("released queued") < lines.index("initiated step 2/1")


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_call_that_does_not_end_in_time_is_recorded_as_what_it_is(tmp_path: Path, effect: Any) -> None:
    case = Steps(effect)

    async def main() -> tuple[RunRow, list[str]]:
        async with perdure(tmp_path / "db", [case.agent], settings=IMPATIENT) as app:
            await app.start(case.agent, id="r")
            row = await drained(app, lambda: case.began)
            return row, outline(await app.handle("r").events())

    row, lines = run(main())
    assert (row.status, row.holder) == ("queued", None), "a drain is no reason to trouble a person; the next worker decides"
    assert ("in_doubt 1/1" in lines) == (effect in ("keyed", "once"))
    case.finish.set()
    row, lines = run(finished(tmp_path / "db", case.agent))
    if effect == "once":
        assert row.status == "needs_attention"
        assert case.began == ["first 1"]
    else:
        assert row.status == "succeeded"
        assert case.began == ["first 1", "first 2", "second 1"]


def test_a_call_stopped_by_a_drain_is_asked_about_by_the_next_worker(tmp_path: Path) -> None:
    case = Steps("once", reconcile=Outcome.happened("found"))

    async def main() -> None:
        async with perdure(tmp_path / "db", [case.agent], settings=IMPATIENT) as app:
            await app.start(case.agent, id="r")
            await drained(app, lambda: case.began)

    run(main())
    row, lines = run(finished(tmp_path / "db", case.agent))
    assert row.status == "succeeded"
    assert "resolved 1/1 happened by reconcile" in lines
    assert case.began == ["first 1", "second 1"]


def test_a_drain_while_a_hook_is_being_asked_hands_the_doubt_over(tmp_path: Path) -> None:
    """The hook hangs. It is no attempt: nothing is lost by not waiting for it, and the next worker asks again."""
    asked: list[int] = []
    hang = [True]

    @tool(effect="once")
    async def pay() -> str:
        raise TimeoutError("no answer")

    @pay.reconcile
    async def _() -> Outcome:
        asked.append(1)
        if hang.pop():
            await asyncio.sleep(60)
        return Outcome.happened("found")

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> RunRow:
        async with perdure(tmp_path / "db", [payer], settings=IMPATIENT) as app:
            await app.start(payer, id="r")
            return await drained(app, lambda: asked)

    row = run(main())
    assert (row.status, row.holder) == ("queued", None)
    hang.append(False)
    row, lines = run(finished(tmp_path / "db", payer))
    assert row.status == "succeeded"
    assert lines[2:4] == ["in_doubt 1/1", "released queued"]
    assert len(asked) == 2


def test_a_keyed_call_in_doubt_whose_next_attempt_was_withdrawn_is_still_in_doubt(tmp_path: Path) -> None:
    """The drain arrives while the intent of attempt 2 is being written. That it never began says nothing about attempt 1."""
    attempts: list[int] = []
    asked: list[int] = []
    apps: list[Perdure] = []

    @tool(effect="keyed")
    async def pay(call: Call) -> str:
        attempts.append(call.attempt)
        raise TimeoutError("no answer")

    @pay.reconcile
    async def _(call: Call) -> Outcome:
        asked.append(call.attempt)
        return Outcome.unknown("?") if call.attempt == 1 else Outcome.happened("the first one, it turns out")

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    def drain_at_the_second_intent(run_id: str, events: Sequence[Event]) -> None:
        worker = local(apps[0])._worker
        if worker is not None and any(isinstance(event.body, ToolCallInitiated) and event.body.attempt == 2 for event in events):
            worker._draining = True
            worker._drives[run_id].drain()

    async def main() -> RunRow:
        async with perdure(tmp_path / "db", [payer], observers=[drain_at_the_second_intent]) as app:
            apps.append(app)
            await app.start(payer, id="r")
            return await app.engine.drive("r", wait=False)

    assert run(main()).status == "queued"
    assert attempts == [1]
    row, lines = run(finished(tmp_path / "db", payer))
    assert row.status == "succeeded"
    assert lines[5:9] == ["failing 1/2 not_sent", "released queued", "in_doubt 1/2", "resolved 1/2 happened by reconcile"]
    assert (attempts, asked) == ([1], [1, 2])


def test_a_call_whose_intent_is_written_but_which_has_not_begun_is_withdrawn_without_a_doubt(tmp_path: Path) -> None:
    """Two runs share commits on the writer's thread; the drain arrives while the intent is on its way."""
    performed: list[str] = []

    @tool(effect="once")
    async def act(run_id: str, at: int) -> None:
        performed.append(f"{run_id} {at}")

    @agent(version="1")
    async def busy(run: Run) -> int:
        for at in range(200):
            await act(run.id, at)
        return 200

    async def first() -> list[str]:
        async with perdure(tmp_path / "db", [busy]) as app:
            for run_id in ("r", "s", "t"):
                await app.start(busy, id=run_id)
            await drained(app, lambda: len(performed) > 60)
            return [(await app.handle(run_id).row()).status for run_id in ("r", "s", "t")]

    async def second() -> list[str]:
        async with perdure(tmp_path / "db", [busy]) as app:
            return [(await app.engine.drive(run_id)).status for run_id in ("r", "s", "t")]

    assert set(run(first())) <= {"queued", "succeeded"}
    assert run(second()) == ["succeeded"] * 3, "nothing was in doubt"
    assert sorted(performed) == sorted(f"{run_id} {at}" for run_id in "rst" for at in range(200)), "each effect once"


def test_a_drain_while_a_retry_waits_hands_it_over(tmp_path: Path) -> None:
    attempts: list[int] = []

    @tool(effect="once", retry=Retry(base=0.5, jitter=0))
    async def flaky(call: Call) -> None:
        attempts.append(call.attempt)
        if call.attempt == 1:
            raise NotSent("refused")

    @agent(version="1")
    async def caller(run: Run) -> None:
        await flaky()

    clock = ManualClock()

    async def main() -> RunRow:
        async with perdure(tmp_path / "db", [caller], clock, Settings(poll_s=0.002, park_after_s=5)) as app:
            await app.start(caller, id="r")
            return await drained(app, lambda: attempts)

    async def second() -> RunRow:
        async with perdure(tmp_path / "db", [caller], clock, Settings(poll_s=0.002)) as app:
            return await app.engine.drive("r")

    assert run(main()).status == "queued"
    clock.advance(1)
    assert run(second()).status == "succeeded"
    assert attempts == [1, 2]


def test_a_drain_while_an_agent_sleeps_loses_nothing_of_the_time(tmp_path: Path) -> None:
    @agent(version="1")
    async def sleeper(run: Run) -> float:
        before = run.now()
        await asyncio.sleep(30)
        return (run.now() - before).total_seconds()

    clock = ManualClock()

    async def main() -> RunRow:
        async with perdure(tmp_path / "db", [sleeper], clock, Settings(poll_s=0.002, park_after_s=600)) as app:
            await app.start(sleeper, id="r")
            working = asyncio.create_task(app.work())
            await until(lambda: status_of(app, "r") == "running")
            app.drain()
            await working
            return await app.handle("r").row()

    assert run(main()).status == "queued"
    clock.advance(31)

    async def second() -> Any:
        async with perdure(tmp_path / "db", [sleeper], clock) as app:
            return await app.handle("r").result()

    assert run(second()) == 31


def test_a_drained_worker_claims_nothing_more(tmp_path: Path) -> None:
    case = Steps("read")

    async def main() -> tuple[str, str]:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            await app.start(case.agent, id="r")
            ending = asyncio.create_task(end_when_draining(app, case.finish))
            working = asyncio.create_task(app.work())
            await until(lambda: case.began)
            app.drain()
            await app.start(case.agent, id="late")
            await working
            await ending
            return (await app.handle("r").row()).status, (await app.handle("late").row()).status

    assert run(main()) == ("queued", "queued")


def test_a_stop_ends_a_drive_by_name_in_the_same_way(tmp_path: Path) -> None:
    case = Steps("once")

    async def main() -> RunRow:
        stop = asyncio.Event()
        async with perdure(tmp_path / "db", [case.agent]) as app:
            await app.start(case.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", stop=stop))
            await until(lambda: case.began)
            stop.set()
            # A tool that answers at once is followed by the next call in the same turn: the stop comes first.
            await until(lambda: worker_of(app)._drives["r"]._core.closing is not None)
            case.finish.set()
            return await driving

    row = run(main())
    assert (row.status, row.holder) == ("queued", None)


def test_a_drain_with_nothing_to_do_ends_at_once() -> None:
    case = Steps("read")

    async def main() -> None:
        async with perdure(None, [case.agent]) as app:
            app.drain()
            await app.work()

    run(main())


def test_a_drain_keeps_what_a_cancel_has_asked_for(tmp_path: Path) -> None:
    case = Steps("keyed")

    async def main() -> RunRow:
        async with perdure(tmp_path / "db", [case.agent], settings=IMPATIENT) as app:
            await app.start(case.agent, id="r")
            working = asyncio.create_task(app.work())
            await until(lambda: case.began)
            await app.cancel("r")
            app.drain()
            await working
            return await app.handle("r").row()

    row = run(main())
    assert row.holder is None
    assert row.status in ("queued", "cancelling", "needs_attention")
    row, lines = run(finished(tmp_path / "db", case.agent))
    assert "cancel_requested" in lines
    assert row.status == "needs_attention", "what may have happened is settled by a person before the run is called cancelled"
    assert case.began == ["first 1"]


def test_an_abort_writes_nothing_more(tmp_path: Path) -> None:
    """Like a crash: events that were not durable are lost, and the next worker takes over the run."""
    case = Steps("idempotent")

    async def main() -> list[str]:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            await app.start(case.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: case.began)
            app.abort()
            case.finish.set()
            await driving
            return outline(await app.handle("r").events())

    assert run(main()) == ["run_created", "initiated step 1/1"]
    row, lines = run(finished(tmp_path / "db", case.agent))
    assert row.status == "succeeded"
    assert lines[1:3] == ["initiated step 1/1", "initiated step 1/2"]


# -- several at a time, and afterwards ------------------------------------------------------------------------------------
def test_the_stop_of_one_of_two_ends_that_one_and_the_last_one_hands_over(tmp_path: Path) -> None:
    case = Steps("once")

    async def main() -> tuple[str, str]:
        stops = [asyncio.Event(), asyncio.Event()]
        async with perdure(tmp_path / "db", [case.agent], settings=IMPATIENT) as app:
            works = [asyncio.create_task(app.work(stop=stop)) for stop in stops]
            await app.start(case.agent, id="r")
            await until(lambda: case.began)
            stops[0].set()
            await works[0]
            between = status_of(app, "r")
            await app.start(case.agent, id="next")
            await until(lambda: case.began == ["first 1", "first 1"])
            case.finish.set()
            await until(lambda: status_of(app, "r") == status_of(app, "next") == "succeeded")
            case.finish.clear()
            await app.start(case.agent, id="last")
            await until(lambda: len(case.began) == 5)
            stops[1].set()
            await works[1]
            return between, status_of(app, "last")

    assert run(main()) == ("running", "queued")
    assert case.began == ["first 1", "first 1", "second 1", "second 1", "first 1"]


@pytest.mark.parametrize("by", ["one stop", "drain"])
def test_what_ends_all_at_once_is_over_for_each_when_everything_is_handed_over(tmp_path: Path, by: str) -> None:
    case = Steps("read")

    async def main() -> list[str]:
        stop = asyncio.Event()
        async with perdure(tmp_path / "db", [case.agent], settings=IMPATIENT) as app:
            works = [asyncio.create_task(app.work(stop=stop)) for _ in range(2)]
            await app.start(case.agent, id="r")
            await until(lambda: case.began)
            stop.set() if by == "one stop" else app.drain()
            seen = []
            for work in works:
                await work
                seen.append(status_of(app, "r"))
            return seen

    assert run(main()) == ["queued", "queued"]


def test_the_stop_of_a_drive_by_name_hands_over_its_run_and_no_other(tmp_path: Path) -> None:
    case = Steps("read")

    async def main() -> tuple[str, str, str]:
        stop = asyncio.Event()
        async with perdure(tmp_path / "db", [case.agent], settings=IMPATIENT) as app:
            for run_id in ("r", "s"):
                await app.start(case.agent, id=run_id)
            stopped = asyncio.create_task(app.engine.drive("r", stop=stop))
            driving = asyncio.create_task(app.engine.drive("s"))
            await until(lambda: len(case.began) == 2)
            stop.set()
            first = (await stopped).status
            between = status_of(app, "s")
            case.finish.set()
            return first, between, (await driving).status

    assert run(main()) == ("queued", "running", "succeeded")


def test_the_stop_of_a_drive_by_name_beside_a_worker_leaves_the_run_to_that(tmp_path: Path) -> None:
    case = Steps("once")

    async def main() -> tuple[str, Any]:
        stop = asyncio.Event()
        async with perdure(tmp_path / "db", [case.agent], settings=IMPATIENT) as app:
            handle = await app.start(case.agent, id="r")
            working = asyncio.create_task(app.work())
            driving = asyncio.create_task(app.engine.drive("r", stop=stop))
            await until(lambda: case.began)
            stop.set()
            status = (await driving).status
            case.finish.set()
            result = await handle.result()
            app.drain()
            await working
            return status, result

    assert run(main()) == ("running", ["first", "second"])
    assert case.began == ["first 1", "second 1"]


@pytest.mark.parametrize("end", ["drain", "stop", "abort"])
@pytest.mark.parametrize("again", ["work", "drive", "result"])
def test_after_its_drain_an_app_begins_anew(tmp_path: Path, end: str, again: str) -> None:
    case = Steps("idempotent")

    async def main() -> tuple[str, str]:
        stop = asyncio.Event()
        async with perdure(tmp_path / "db", [case.agent], settings=IMPATIENT) as app:
            await app.start(case.agent, id="r")
            working = asyncio.create_task(app.work(stop=stop))
            await until(lambda: case.began)
            {"drain": app.drain, "stop": stop.set, "abort": app.abort}[end]()
            await working
            between = status_of(app, "r")
            case.finish.set()
            if again == "drive":
                await app.engine.drive("r")
            elif again == "result":
                await app.handle("r").result()
            else:
                working = asyncio.create_task(app.work())
                await until(lambda: status_of(app, "r") == "succeeded")
                app.drain()
                await working
            assert len(app.store.workers(app.clock.now(), 1_000_000)) == 1, "the one before has signed off"
            return between, status_of(app, "r")

    assert run(main()) == ("running" if end == "abort" else "queued", "succeeded")
    assert case.began == ["first 1", "first 2", "second 1"]


def test_who_waits_for_a_result_does_not_take_up_again_what_a_drain_hands_over_and_who_comes_later_does(tmp_path: Path) -> None:
    case = Steps("read")

    async def main() -> tuple[str, list[Any]]:
        async with perdure(tmp_path / "db", [case.agent], settings=IMPATIENT) as app:
            handle = await app.start(case.agent, id="r")
            waiting = asyncio.create_task(handle.result())
            working = asyncio.create_task(app.work())
            await until(lambda: case.began)
            app.drain()
            await working
            await asyncio.sleep(0.05)  # enough for many a look
            between = status_of(app, "r")
            case.finish.set()
            return between, [await handle.result(), await waiting]

    assert run(main()) == ("queued", [["first", "second"]] * 2)


def test_what_begins_while_a_drain_is_under_way_waits_for_its_end(tmp_path: Path) -> None:
    case = Steps("read")

    async def main() -> list[str]:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            await app.start(case.agent, id="r")
            working = asyncio.create_task(app.work())
            await until(lambda: case.began)
            app.drain()
            await until(lambda: local(app)._draining)
            driving = asyncio.create_task(app.engine.drive("r"))
            late = asyncio.create_task((await app.start(case.agent, id="late")).result())
            await asyncio.sleep(0.02)
            before = list(case.began)
            case.finish.set()
            await asyncio.gather(working, driving, late)
            return before

    assert run(main()) == ["first 1"]
    assert sorted(case.began) == ["first 1", "first 1", "second 1", "second 1"], "neither lost nor repeated"


# -- a drain at an unusual moment
# ---------------------------------------------------------------------------------------
def test_a_signal_handler_may_drain_wherever_the_signal_strikes(tmp_path: Path) -> None:
    """In an agent's code, too: it is not the agent who uses the app there."""
    struck: list[int] = []

    @tool(effect="read")
    async def look() -> int:
        return 1

    @agent(version="1")
    async def works(run: Run) -> int:
        found = await look()
        if not struck:
            struck.append(1)
            signal.raise_signal(signal.SIGUSR1)
        return found

    async def main() -> str:
        async with perdure(tmp_path / "db", [works]) as app:
            signal.signal(signal.SIGUSR1, lambda *_: app.drain())
            await app.start(works, id="r")
            await app.work()
            return (await app.engine.drive("r")).status

    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert run(main()) == "succeeded"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert struck


def test_a_drain_ends_each_work_that_was_called_before_it_and_no_other(tmp_path: Path) -> None:
    case = Steps("read")

    async def main() -> tuple[bool, bool]:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            await app.start(case.agent, id="r")
            first = asyncio.create_task(app.work())
            await until(lambda: case.began)
            app.drain()
            await until(lambda: local(app)._worker is not None and worker_of(app).draining)
            second = asyncio.create_task(app.work())  # waits for the end of the drain
            await asyncio.sleep(0)
            app.drain()
            third = asyncio.create_task(app.work())
            case.finish.set()
            await asyncio.gather(first, second)
            await until(lambda: status_of(app, "r") == "succeeded")
            served_on = not third.done()
            app.drain()
            await third
            return served_on, second.done()

    assert run(main()) == (True, True)


@pytest.mark.parametrize("by", ["work", "drive"])
def test_what_cannot_be_handed_over_in_time_is_anybodys_while_the_app_stays_open(tmp_path: Path, by: str) -> None:
    """G6: the worker lives on and renews its lease, so no other worker would ever find the run free."""
    began, finish = threading.Event(), threading.Event()

    @tool(effect="transaction")
    def book() -> int:
        began.set()
        finish.wait(60)
        return 1

    @agent(version="1")
    async def works(run: Run) -> int:
        return await book()

    async def main() -> str:
        stop = asyncio.Event()
        async with perdure(tmp_path / "db", [works], settings=IMPATIENT) as app:
            await app.start(works, id="r")
            at_work = asyncio.create_task(app.work() if by == "work" else app.engine.drive("r", stop=stop))
            await until(began.is_set)
            app.drain() if by == "work" else stop.set()
            await at_work
            assert (await app.handle("r").row()).holder is not None, "it could not be handed over"
            finish.set()
            while (await app.handle("r").row()).holder is not None:
                await asyncio.sleep(0.001)
            async with perdure(tmp_path / "db", [works]) as other:
                return (await other.engine.drive("r")).status

    assert run(main()) == "succeeded"


def test_a_tool_that_drives_another_run_does_not_hold_up_the_drain_that_waits_for_it(tmp_path: Path) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    apps: list[Perdure] = []

    @agent(version="1")
    async def quick(run: Run) -> int:
        return 1

    @tool(effect="once")
    async def drives(run_id: str) -> str:
        began.set()
        await go.wait()
        return (await apps[0].drive(run_id)).status

    @agent(version="1")
    async def outer(run: Run) -> str:
        return str(await drives("other"))

    async def main() -> list[str]:
        async with perdure(tmp_path / "db", [outer, quick]) as app:
            apps.append(app)
            await app.start(outer, id="r")
            working = asyncio.create_task(app.work())
            await began.wait()
            app.drain()
            await until(lambda: local(app)._worker is not None and worker_of(app).draining)
            await app.start(quick, id="other")
            go.set()
            await working
            return outline(await app.handle("r").events())

    assert "completed 1/1" in run(main())


def test_a_drain_while_a_hook_waits_to_be_asked_again_hands_the_run_over_at_once(tmp_path: Path) -> None:
    asked: list[int] = []

    @tool(effect="once", timeout=1, settle=3600)
    async def pay(call: Call) -> None:
        raise ConnectionResetError("cut off")

    @pay.reconcile
    async def _(call: Call) -> Outcome:
        asked.append(call.attempt)
        return Outcome.not_happened()

    @agent(version="1")
    async def payer(run: Run) -> None:
        await pay()

    async def main() -> RunRow:
        patient = Settings(poll_s=0.002, reconcile_margin_s=0, unknown_deadline_s=0, drain_timeout_s=600)
        async with perdure(tmp_path / "db", [payer], settings=patient) as app:
            await app.start(payer, id="r")
            return await drained(app, lambda: asked)

    row = run(main())
    assert (row.status, row.holder) == ("queued", None)
