"""Pausing a run at every phase.

Attempts under way end first, post is kept, and no worker drives the run until `unpause`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.approval_tools import check_replay, driven
from tests.unit.drive_tools import SETTINGS, ManualClock, local, outline, perdure, run, status_of, until, worker_of

from perdure import Agent, Call, Conflict, NotFound, NotSent, Perdure, Retry, Run, RunEnded, agent, tool
from perdure.core.events import RunPaused, RunUnpaused
from perdure.store.api import RunRow, Served

EFFECTS = ["read", "idempotent", "keyed", "once"]


class Steps:
    """Two calls one after the other; the first continues until the test lets it end."""

    def __init__(self, effect: Any = "once") -> None:
        self.begun: list[str] = []
        self.finish = asyncio.Event()

        @tool(effect=effect)
        async def step(name: str, call: Call) -> str:
            self.begun.append(f"{name} {call.attempt}")
            if name == "first":
                await self.finish.wait()
            return name

        @agent(version="1")
        async def walker(run: Run) -> list[str]:
            return [await step("first"), await step("second")]

        self.agent: Agent[Any, Any] = walker


async def paused_in_flight(app: Perdure, steps: Steps, *, work: bool = False) -> RunRow:
    """The run `r` after it was paused inside its first call, which then ended."""
    await app.start(steps.agent, id="r")
    driving = asyncio.create_task(app.work() if work else app.engine.drive("r", wait=False))
    await until(lambda: steps.begun)
    await app.pause("r", by="ann", reason="let me look")
    await asyncio.sleep(0.02)
    assert status_of(app, "r") == "running", "asked for, and not yet so: its call is under way"
    steps.finish.set()
    await until(lambda: status_of(app, "r") == "paused")
    if work:
        app.drain()
    await driving
    return await app.handle("r").row()


# -- asked for, and so --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("work", [False, True])
def test_a_call_in_flight_ends_and_is_recorded_before_the_run_stands_still(tmp_path: Path, effect: Any, work: bool) -> None:
    steps = Steps(effect)

    async def main() -> tuple[RunRow, list[str], Any]:
        async with perdure(tmp_path / "db", [steps.agent]) as app:
            row = await paused_in_flight(app, steps, work=work)
            lines = outline(await app.handle("r").events(), without=("run_claimed",))
            assert steps.begun == ["first 1"]
        async with perdure(tmp_path / "db", [steps.agent]) as app:
            assert await app.unpause("r", by="bob") == ["r"]
            await driven(app)
            check_replay(app, steps.agent)
            return row, lines, await app.handle("r").result()

    row, lines, result = run(main())
    assert (row.status, row.ready_at, row.holder) == ("paused", None, None)
    assert row.waiting_for == "a person who unpauses it; ann paused it"
    assert lines == ["run_created", "initiated step 1/1", "run_paused", "completed 1/1", "released paused"]
    assert (result, steps.begun) == (["first", "second"], ["first 1", "second 1"])


@pytest.mark.parametrize("when", ["queued", "waiting for a timer", "waiting for a signal", "waiting for a retry"])
def test_a_run_that_nobody_holds_stands_still_at_once(tmp_path: Path, when: str) -> None:
    tries: list[int] = []

    @tool(effect="once", retry=Retry(base=60))
    async def pay(call: Call) -> None:
        tries.append(call.attempt)
        if call.attempt == 1:
            raise NotSent("refused")

    @agent(version="1")
    async def waiter(run: Run) -> str:
        match when:
            case "waiting for a timer":
                await asyncio.sleep(60)
            case "waiting for a signal":
                await run.receive("chat", timeout=60)
            case "waiting for a retry":
                await pay()
        return "done"

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [waiter], clock) as app:
            await app.start(waiter, id="r")
            if when != "queued":
                assert (await driven(app)).status == "waiting"
            await app.pause("r", by="ann")
            row = await app.handle("r").row()
            assert (row.status, row.ready_at) == ("paused", None)
            clock.advance(3600)
            await app.signal("r", "chat", 1)
            assert (await app.handle("r").row()).status == "paused"
            seq = (await app.handle("r").row()).seq
            with pytest.raises(Conflict, match="perdure unpause r"):
                await app.engine.drive("r")
            await worked_for(app, 0.05)
            assert (await app.handle("r").row()).seq == seq
        async with perdure(tmp_path / "db", [waiter], clock) as app:
            await app.unpause("r")
            assert (await app.handle("r").row()).status == "queued"
            await driven(app)
            check_replay(app, waiter)
            return await app.handle("r").result()

    assert run(main()) == "done"


async def worked_for(app: Perdure, seconds: float) -> None:
    """Serve the queue for a while."""
    stop = asyncio.Event()
    working = asyncio.create_task(app.work(stop=stop))
    await asyncio.sleep(seconds)
    stop.set()
    await working


def test_a_worker_claims_no_paused_run_however_long_it_is_due() -> None:
    steps = Steps()
    steps.finish.set()

    async def main() -> tuple[int, int, str]:
        async with perdure(None, [steps.agent]) as app:
            await app.start(steps.agent, id="r")
            await app.pause("r")
            before = (await app.handle("r").row()).seq
            assert app.store.next_ready([Served(steps.agent.name, "1")]) is None
            await worked_for(app, 0.1)
            row = await app.handle("r").row()
            return before, row.seq, row.status

    before, after, status = run(main())
    assert (after, status, steps.begun) == (before, "paused", [])


def test_pausing_twice_is_pausing_once_and_unpausing_twice_says_so(tmp_path: Path) -> None:
    steps = Steps()
    steps.finish.set()

    async def main() -> list[str]:
        async with perdure(tmp_path / "db", [steps.agent]) as app:
            await app.start(steps.agent, id="r")
            await app.pause("r", by="ann")
            await app.pause("r", by="bob")
            await app.unpause("r")
            with pytest.raises(Conflict, match="only a paused run"):
                await app.unpause("r")
            await driven(app)
            with pytest.raises(RunEnded):
                await app.pause("r")
            with pytest.raises(RunEnded):
                await app.unpause("r")
            with pytest.raises(NotFound):
                await app.pause("nobody")
            return outline(await app.handle("r").events())

    lines = run(main())
    assert (lines.count("run_paused"), lines.count("run_unpaused"), lines[-1]) == (1, 1, "run_succeeded")


def test_pausing_twice_while_a_call_is_in_flight_is_pausing_once(tmp_path: Path) -> None:
    steps = Steps()

    async def main() -> Any:
        async with perdure(tmp_path / "db", [steps.agent]) as app:
            await app.start(steps.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: steps.begun)
            await app.pause("r", by="ann")
            await app.pause("r", by="bob")
            await asyncio.sleep(0.02)
            steps.finish.set()
            assert (await driving).status == "paused"
            assert await app.unpause("r") == ["r"]
            row = await driven(app)
            check_replay(app, steps.agent)
            return row.status

    assert run(main()) == "succeeded", "one unpause is enough"


def test_who_paused_and_who_let_it_go_on_and_why_is_recorded() -> None:
    steps = Steps()

    async def main() -> list[Any]:
        async with perdure(None, [steps.agent]) as app:
            await app.start(steps.agent, id="r")
            await app.pause("r", by="ann", reason="lunch")
            await app.unpause("r", by="bob", note="back")
            return [event.body for event in await app.handle("r").events()][1:]

    assert run(main()) == [RunPaused(by="ann", reason="lunch"), RunUnpaused(by="bob", note="back")]


# -- and then -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("held", [False, True])
def test_a_paused_run_can_be_cancelled_and_its_agent_cleans_up(tmp_path: Path, held: bool) -> None:
    done: list[str] = []
    begun, finish = asyncio.Event(), asyncio.Event()

    @tool(effect="once")
    async def work() -> str:
        begun.set()
        await finish.wait()
        return "worked"

    @tool(effect="once")
    async def tidy() -> None:
        done.append("tidy")

    @agent(version="1")
    async def walker(run: Run) -> None:
        try:
            await work()
            await asyncio.sleep(3600)
        finally:
            await tidy()

    async def main() -> tuple[str, list[str]]:
        async with perdure(tmp_path / "db", [walker]) as app:
            await app.start(walker, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await begun.wait()
            if held:
                await app.pause("r")
                await app.cancel("r")
                await asyncio.sleep(0.02)
                finish.set()
            else:
                finish.set()
                assert (await driving).status == "waiting"
                await app.pause("r")
                await app.cancel("r")
                assert status_of(app, "r") == "cancelling"
            await driving
            row = await driven(app)
            if row.status == "needs_attention":  # the call under way was told to stop, and its outcome is unknown
                await app.resolve("r", 1, did_not_happen=True)
                row = await driven(app)
            check_replay(app, walker)
            return row.status, outline(await app.handle("r").events())

    status, lines = run(main())
    assert (status, done) == ("cancelled", ["tidy"])
    assert lines.index("run_paused") < lines.index("cancel_requested")


@pytest.mark.parametrize(("effect", "status"), [("read", "cancelled"), ("idempotent", "cancelled"), ("once", "needs_attention")])
def test_a_cancel_after_a_pause_does_not_wait_for_a_call_that_goes_on_for_ever(tmp_path: Path, effect: Any, status: str) -> None:
    """T29. The pause would have waited for the call; a cancel does not."""
    steps = Steps(effect)

    async def main() -> tuple[str, list[str]]:
        async with perdure(tmp_path / "db", [steps.agent]) as app:
            await app.start(steps.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: steps.begun)
            await app.pause("r")
            await asyncio.sleep(0.02)
            await app.cancel("r")
            row = await driving
            check_replay(app, steps.agent)
            return row.status, steps.begun

    assert run(main()) == (status, ["first 1"])


def test_what_is_being_cancelled_is_not_paused() -> None:
    steps = Steps()

    async def main() -> None:
        async with perdure(None, [steps.agent]) as app:
            await app.start(steps.agent, id="r")
            await app.cancel("r")
            with pytest.raises(Conflict, match="is cancelling"):
                await app.pause("r")

    run(main())


def test_a_run_that_needs_attention_is_not_paused_and_is_let_go_on_by_the_same_word() -> None:
    wrong = [True]

    @agent(version="1")
    async def stuck(run: Run) -> str:
        if wrong[0]:
            await asyncio.Event().wait()
        return "freed"

    async def main() -> Any:
        async with perdure(None, [stuck]) as app:
            await app.start(stuck, id="r")
            assert (await driven(app)).status == "needs_attention"
            with pytest.raises(Conflict, match="needs attention"):
                await app.pause("r")
            wrong[0] = False
            assert await app.unpause("r") == ["r"]
            return await app.handle("r").result(timeout=60)

    assert run(main()) == "freed"


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_crash_between_the_request_and_the_rest_leads_to_a_paused_run(tmp_path: Path, effect: Any) -> None:
    """The worker has the request in its inbox, or in its memory, and dies inside the call."""
    steps = Steps(effect)

    async def main() -> RunRow:
        async with perdure(tmp_path / "db", [steps.agent]) as app:
            await app.start(steps.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: steps.begun)
            await app.pause("r", by="ann")
            app.abort()
            await driving
        steps.finish.set()
        async with perdure(tmp_path / "db", [steps.agent]) as app:
            assert (await driven(app)).status == "paused"
            assert {line.split()[0] for line in steps.begun} == {"first"}, "nothing new begins"
            await app.unpause("r")
            row = await driven(app)
            check_replay(app, steps.agent)
            return row

    assert run(main()).status == ("needs_attention" if effect == "once" else "succeeded")
    assert steps.begun.count("first 1") <= (2 if effect == "read" else 1), "only reading needs no intent"


def test_a_decision_about_a_doubt_while_the_run_is_paused_is_kept(tmp_path: Path) -> None:
    @tool(effect="once")
    async def pay(call: Call) -> str:
        raise ConnectionResetError("gone")

    @agent(version="1")
    async def payer(run: Run) -> list[Any]:
        paying = asyncio.create_task(pay())
        heard = await run.receive("chat")
        return [heard, await paying]

    async def main() -> Any:
        async with perdure(tmp_path / "db", [payer]) as app:
            await app.start(payer, id="r")
            assert (await driven(app)).status == "needs_attention"
            await app.resolve("r", 1, happened="paid")
            await app.pause("r")
            await app.signal("r", "chat", "hello")
            assert status_of(app, "r") == "paused"
            await app.unpause("r")
            return await app.handle("r").result(timeout=60)

    assert run(main()) == ["hello", "paid"]


def test_timers_that_come_due_during_a_pause_fire_after_it_in_their_order(tmp_path: Path) -> None:
    @agent(version="1")
    async def napper(run: Run) -> list[str]:
        woken: list[str] = []

        async def nap(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(name)

        await asyncio.gather(nap("b", 20), nap("a", 10))
        woken.append(await run.receive("chat"))
        return woken

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [napper], clock) as app:
            await app.start(napper, id="r")
            await driven(app)
            await app.pause("r")
            clock.advance(3600)
            await app.signal("r", "chat", "c")
            await worked_for(app, 0.02)
            await app.unpause("r")
        async with perdure(tmp_path / "db", [napper], clock) as app:
            return await app.handle("r").result(timeout=60)

    assert run(main()) == ["a", "b", "c"]


def test_a_run_that_is_paused_while_its_worker_drains_stays_paused(tmp_path: Path) -> None:
    steps = Steps()

    async def main() -> RunRow:
        async with perdure(tmp_path / "db", [steps.agent], settings=SETTINGS) as app:
            await app.start(steps.agent, id="r")
            working = asyncio.create_task(app.work())
            await until(lambda: steps.begun)
            app.drain()
            await until(lambda: local(app)._worker is not None and worker_of(app)._draining)
            await app.pause("r")
            await asyncio.sleep(0.02)
            steps.finish.set()
            await working
            return await app.handle("r").row()

    row = run(main())
    assert (row.status, row.ready_at, steps.begun) == ("paused", None, ["first 1"])
