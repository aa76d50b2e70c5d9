"""A worker among others.

Runs that it loses and gets back, post that it cannot decode, a store that fails for a moment.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import ManualClock, forget_leases, local, outline, perdure, run, status_of, until, worker_of
from tests.unit.store_tools import raw

from perdure import Agent, Outcome, Run, Settings, agent, tool
from perdure.core.agent_loop import AgentLoop
from perdure.engine.local import worker as module
from perdure.errors import StoreUnavailable
from perdure.store.api import RunRow


class Slow:
    """An agent with two calls, each of which goes on until it is let go."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.finish = [asyncio.Event(), asyncio.Event()]

        @tool(effect="idempotent")
        async def step(at: int) -> int:
            self.began.append(at)
            await self.finish[at].wait()
            return at

        @agent(version="1")
        async def slow(run: Run) -> list[int]:
            return [await step(0), await step(1)]

        self.agent: Agent[Any, Any] = slow


# -- rings during a query ---------------------------------------------------------------------------------------------
def test_a_ring_that_one_waits_for_is_heard_by_everybody_who_was_just_looking() -> None:
    """A caller waits for a result while the same worker serves. Both must learn of a new run.

    If only the first got the ring, the other would sleep until its next poll.
    """
    case = Slow()

    async def main() -> None:
        async with perdure(None, [case.agent], settings=Settings(poll_s=300)) as app:
            worker = await local(app)._working()
            seen, stop = worker._changes, asyncio.Event()
            worker._rung()
            async with asyncio.timeout(60):
                for _ in range(2):
                    await worker._doze(600, stop, seen)

    run(main())


@pytest.mark.parametrize("what", ["a child", "a child from before", "its end", "a stop"])
def test_who_drives_a_run_hears_at_once_what_concerns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Without polling, which is only for missed rings."""
    monkeypatch.setattr(module, "_REAP_EVERY_S", 3600.0)
    begun, finish = asyncio.Event(), asyncio.Event()

    @tool(effect="read")
    async def stay() -> None:
        begun.set()
        await finish.wait()

    @tool(effect="read")
    async def settle_down() -> None:
        await asyncio.sleep(0.01)  # and the caller has begun to wait for the run

    @tool(effect="read")
    async def let_go() -> None:
        finish.set()

    @agent(version="1")
    async def below(run: Run) -> None:
        if what == "a child from before":
            await run.receive("word")
        await let_go()

    @agent(version="1")
    async def above(run: Run) -> None:
        if what == "a child":
            await settle_down()
        await asyncio.gather(stay(), *([below()] if "child" in what else []))

    async def before() -> None:
        async with perdure(tmp_path / "db", [above, below]) as app, asyncio.TaskGroup() as group:
            group.create_task(app.engine.drive((await app.start(above, id="r")).id))
            await until(lambda: app.store.get("r/2") is not None and status_of(app, "r/2") == "waiting")
            app.abort()
            await app.signal("r/2", "word")

    async def main() -> RunRow:
        stop = asyncio.Event()
        if what == "a child from before":
            await before()
        async with perdure(tmp_path / "db", [above, below]) as app:
            await app.start(above, id="r")
            driving = asyncio.create_task(app.engine.drive("r", stop=stop))
            if what in ("its end", "a stop"):
                await begun.wait()
                await asyncio.sleep(0.01)  # the caller has begun to wait
            if what == "a stop":
                stop.set()
                await until(lambda: worker_of(app)._drives["r"]._core.closing is not None)
            if "child" not in what:
                finish.set()
            return await driving

    assert run(main(), seconds=30).status == ("queued" if what == "a stop" else "succeeded")


_DRAINED = """
import asyncio, sys
from perdure import Perdure, Run, agent, tool

@tool(effect="read")
async def step(number: int) -> int:
    await asyncio.sleep(0.02)
    return number

@agent(version="1")
async def slow(run: Run) -> int:
    return sum([await step(number) for number in range(40)])

async def main() -> None:
    async with Perdure(sys.argv[1], agents=[slow]) as app:
        stop = asyncio.Event()
        working = asyncio.create_task(app.work(stop=stop))
        handles = [await app.start(slow) for _ in range(3)]
        waiting = [asyncio.create_task(handle.result()) for handle in handles]
        await asyncio.sleep(0.1)
        stop.set()
        await working
        await asyncio.sleep(0.1)
        assert not any(one.done() for one in waiting)
        late = asyncio.create_task((await app.start(slow)).result())
        async with Perdure(sys.argv[1], agents=[slow]) as other:
            stop = asyncio.Event()
            working = asyncio.create_task(other.work(stop=stop))
            print(await asyncio.gather(*waiting, late))
            stop.set()
            await working

asyncio.run(main())
"""


def test_who_waits_for_a_result_while_its_worker_is_drained_goes_on_waiting_and_lets_the_loop_go_on(tmp_path: Path) -> None:
    """In a separate process: a loop that is blocked could not be timed out in this process."""
    asked = [sys.executable, "-c", _DRAINED, f"sqlite:///{tmp_path}/db"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str([780] * 4)), done.stderr


# -- runs that it loses and gets back -----------------------------------------------------------------------------------
def test_a_worker_that_gets_back_a_run_which_it_lost_in_its_sleep_drives_it_once(tmp_path: Path) -> None:
    """Its lease looked expired to another process. It claims the run again before its old drive has noticed anything."""
    case = Slow()

    async def main() -> tuple[Any, list[str]]:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            await app.start(case.agent, id="r")
            working = asyncio.create_task(app.work())
            await until(lambda: case.began == [0])
            worker = worker_of(app)
            old = worker._drives["r"]
            app.store.register("other", "host:1", 1, app.clock.now())
            forget_leases(app)
            assert app.store.reap("other", -1_000_000, app.clock.now()) == 1
            await until(lambda: case.began == [0, 0])
            new = worker._drives["r"]
            assert (new is not old, old.over, new.over) == (True, True, False)
            case.finish[0].set()
            await until(lambda: case.began == [0, 0, 1])
            assert worker._drives["r"] is new, "the end of the old drive must not take the new one off the list"
            await app.cancel("r")
            await until(lambda: status_of(app, "r") == "cancelled")
            await until(lambda: worker._drives == {})
            app.drain()
            await working
            return None, outline(await app.handle("r").events())

    _, lines = run(main())
    assert lines[1:4] == ["initiated step 1/1", "initiated step 1/2", "completed 1/2"]


def test_a_run_that_is_still_held_is_given_up_again_until_that_works(tmp_path: Path, monkeypatch, caplog) -> None:
    """The release is refused once, as after a late append of the same worker.

    Without a retry, the run would stay held.
    """
    monkeypatch.setattr(module, "AGAIN_AFTER_S", 0.05)
    case = Slow()

    async def main() -> tuple[str, str]:
        async with perdure(tmp_path / "db", [case.agent]) as app:
            await app.start(case.agent, id="r")
            working = asyncio.create_task(app.work())
            await until(lambda: case.began == [0])
            other = raw(tmp_path / "db")
            ((nonce,),) = other.execute("SELECT nonce FROM perdure_runs").fetchall()
            other.execute("UPDATE perdure_runs SET nonce = randomblob(16)")
            case.finish[0].set()
            await until(lambda: caplog.text.count("cannot be released yet: run r is held by worker") >= 2)
            before = status_of(app, "r")
            other.execute("UPDATE perdure_runs SET nonce = ?", (nonce,))
            other.close()
            await until(lambda: status_of(app, "r") != before)
            app.drain()
            await working
            return before, status_of(app, "r")

    assert run(main()) == ("running", "needs_attention")
    assert case.began == [0]


# -- post that it cannot read -------------------------------------------------------------------------------------------
def test_post_from_a_newer_version_stops_its_own_run_for_a_person_and_no_other(tmp_path: Path) -> None:
    case = Slow()
    path = tmp_path / "db"

    async def first() -> tuple[RunRow, RunRow]:
        async with perdure(path, [case.agent]) as app:
            await app.start(case.agent, id="r")
            await app.start(case.agent, id="s")
            working = asyncio.create_task(app.work())
            await until(lambda: case.began == [0, 0])
            with raw(path) as other:
                other.execute(
                    "INSERT INTO perdure_inbox (run, event_id, ts, data) SELECT id, zeroblob(16), 0, ? FROM perdure_runs WHERE run_id = 'r'",
                    ('{"type":"signal_received","topic":"t"}',),
                )
            await until(lambda: worker_of(app)._drives["r"]._core._seen)
            for event in case.finish:
                event.set()
            await until(lambda: status_of(app, "s") == "succeeded" and status_of(app, "r") == "needs_attention")
            assert not working.done()
            rows = await app.handle("r").row(), await app.handle("s").row()
            app.drain()
            await working
            return rows

    row, other = run(first())
    assert other.status == "succeeded"
    assert (row.ready_at, row.holder) == (None, None), "it must not be claimed again and again for post that nobody here can read"
    assert "written by a newer perdure; upgrade this worker" in (row.error or "")

    async def second() -> tuple[int, int]:
        async with perdure(path, [case.agent]) as app:
            working = asyncio.create_task(app.work())
            await asyncio.sleep(0.1)
            seq = (await app.handle("r").row()).seq
            app.drain()
            await working
            other = raw(path)
            letters = len(other.execute("SELECT 1 FROM perdure_inbox").fetchall())
            other.close()
            return seq, letters

    assert run(second()) == (row.seq, 1), "the post waits for a worker that can read it"


# -- a store that fails for a moment ------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["version", "next_ready", "inbox", "reap", "claim"])
def test_a_store_that_cannot_be_read_for_a_moment_does_not_end_the_worker(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Slow()
    failures: list[int] = []

    async def main() -> None:
        async with perdure(None, [case.agent]) as app:
            await app.start(case.agent, id="r")
            working = asyncio.create_task(app.work())
            await until(lambda: case.began == [0])
            real = getattr(app.store, what)

            def fails_twice(*args: Any, **kwargs: Any) -> Any:
                if len(failures) < 2:
                    failures.append(1)
                    raise StoreUnavailable("disk I/O error, for a moment")
                return real(*args, **kwargs)

            monkeypatch.setattr(app.store, what, fails_twice)
            if what == "inbox":
                await app.cancel("r")
            else:
                await app.start(case.agent, id="s")
            await until(lambda: len(failures) == 2 or working.done())
            assert not working.done()
            if what == "inbox":
                await until(lambda: status_of(app, "r") == "cancelled")
            else:
                for event in case.finish:
                    event.set()
                await until(lambda: {status_of(app, run_id) for run_id in ("r", "s")} == {"succeeded"})
            app.drain()
            await working

    run(main())


# -- where an agent is entered ------------------------------------------------------------------------------------------
def test_no_agent_is_ever_entered_inside_a_task_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a task the first step of a tool would have to wait. Starting, waking, cancelling, resolving and draining."""
    entered: list[bool] = []
    real = AgentLoop.run_until_quiet

    def watched(loop: AgentLoop) -> None:
        outer = asyncio.get_running_loop()
        entered.append(asyncio.current_task(outer) is not None)
        real(loop)

    monkeypatch.setattr(AgentLoop, "run_until_quiet", watched)
    asked: list[int] = []

    @tool(effect="once")
    async def lost() -> str:
        raise TimeoutError("no answer")

    @lost.reconcile
    async def _() -> Outcome:
        asked.append(1)
        await asyncio.sleep(60)
        return Outcome.unknown("?")

    @agent(version="1")
    async def doubtful(run: Run) -> str:
        await asyncio.sleep(1)
        return str(await lost())

    case = Slow()

    async def main() -> list[str]:
        clock = ManualClock()
        async with perdure(None, [case.agent, doubtful], clock) as app:
            await app.start(doubtful, id="d")
            await app.engine.drive("d", wait=False)
            clock.advance(2)
            result = asyncio.create_task(app.handle("d").result())
            await until(lambda: asked)
            await app.resolve("d", 1, happened="found")
            assert await result == "found"
            for run_id in ("r", "s"):
                await app.start(case.agent, id=run_id)
            working = asyncio.create_task(app.work())
            await until(lambda: case.began == [0, 0])
            await app.cancel("r")
            await until(lambda: status_of(app, "r") == "cancelled")
            app.drain()
            await until(lambda: worker_of(app)._draining)
            case.finish[0].set()
            await working
            return [status_of(app, run_id) for run_id in ("d", "r", "s")]

    assert run(main()) == ["succeeded", "cancelled", "queued"]
    assert len(entered) >= 6
    assert not any(entered)
