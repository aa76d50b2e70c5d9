"""Two events at the wrong moment.

The end of a run and calls that are not awaited, a store that fails in the middle, code that changes between two
workers, money that arrives while the run stops.

The recorded events are always complete, and an effect that must happen once happens once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.stalls import Stalls
from tests.unit.approval_tools import HOUR, check_replay, driven, fills_up, statuses, the_one
from tests.unit.drive_tools import ManualClock, at_once, outline, perdure, run, status_of, until, worker_of

from perdure import (
    Agent,
    Approval,
    Budget,
    Call,
    Fatal,
    InvalidInput,
    NotApproved,
    NotSent,
    Perdure,
    Rate,
    Retry,
    RetryLater,
    Run,
    RunFailed,
    Settings,
    agent,
    tool,
)
from perdure.agent import source_digest
from perdure.core import codec, run_core
from perdure.core.budget import NOTHING
from perdure.core.events import BudgetRaised, ToolCallResolved
from perdure.errors import StoreUnavailable
from perdure.settings import Queue


@tool(effect="idempotent")
async def plain(x: int) -> int:
    return x


# -- calls that were made and are not awaited yet -----------------------------------------------------------------------
class Eager:
    """An agent that makes a call of some kind, and would await it only after a signal that never comes, or makes it raise."""

    def __init__(self, kind: str) -> None:
        self.made: list[str] = []

        @tool(effect="once", approval=True)
        async def risky() -> None:
            self.made.append("risky")

        @tool(effect="idempotent", retry=Retry(attempts=100, base=60, factor=1, jitter=False))
        async def flaky() -> None:
            self.made.append("flaky")
            raise NotSent("nobody there")

        @tool(effect="once", rate=Rate(limit=1, per=60))
        async def limited(name: str) -> None:
            self.made.append(name)

        @agent(version="1")
        async def kid(run: Run) -> None:
            await run.receive("never")
            self.made.append("kid")

        def make(run: Run) -> Any:
            kinds: dict[str, Callable[[], Any]] = {
                "approval": risky,
                "retry": flaky,
                "rate": lambda: limited("second"),
                "child": kid,
            }
            return kinds[kind]()

        @agent(version="1")
        async def eager(run: Run) -> None:
            if kind == "rate":
                await limited("first")
            left = make(run)
            if await run.receive("go") == "fail":
                raise ValueError("no")
            await left

        self.agent: Agent[Any, Any] = eager
        self.made_before = {"retry": ["flaky"], "rate": ["first"]}.get(kind, [])


KINDS = ["approval", "retry", "rate", "child"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_the_end_of_an_agent_reaches_the_calls_that_it_has_not_awaited_yet(tmp_path: Path, kind: str, restart: bool, end: str) -> None:
    eager = Eager(kind)

    async def finish(app: Perdure, clock: ManualClock) -> None:
        await (app.cancel("r") if end == "cancelled" else app.signal("r", "go", "fail"))
        await app.engine.drive("r", wait=False)
        assert status_of(app, "r") == end
        assert statuses(app) == (["withdrawn"] if kind == "approval" else [])
        if kind == "child":
            assert status_of(app, "r/1") == "cancelled"
        assert app.store.family("r") == []
        clock.advance(HOUR)
        assert app.store.next_ready(list(app.versions), None) is None
        check_replay(app, eager.agent)

    async def main() -> None:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [eager.agent], clock) as app:
            await app.start(eager.agent, id="r")
            await app.engine.drive("r", wait=False)
            assert status_of(app, "r") in ("waiting", "waiting_approval")
            if not restart:
                await finish(app, clock)
        if restart:
            async with perdure(tmp_path / "db", [eager.agent], clock) as app:
                await finish(app, clock)

    run(main())
    assert eager.made == eager.made_before


@pytest.mark.parametrize("effect", ["once", "idempotent"])
def test_a_call_in_flight_that_a_failed_agent_has_not_awaited_ends_before_the_run_does(effect: Any) -> None:
    """The call may have happened, and this is recorded before the run's end.

    A call that can safely be cancelled is stopped.
    """
    begun, finish = asyncio.Event(), asyncio.Event()

    @tool(effect=effect)
    async def slow() -> str:
        begun.set()
        await finish.wait()
        return "done"

    @tool(effect="read")
    async def broken() -> None:
        await begun.wait()
        raise Fatal("no")

    @agent(version="1")
    async def failing(run: Run) -> None:
        left = slow()
        await broken()
        await left

    async def main() -> list[str]:
        async with perdure(None, [failing]) as app:
            handle = await app.start(failing, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await begun.wait()
            if effect == "once":
                await asyncio.sleep(0.02)
                assert not driving.done()
                finish.set()
            assert (await driving).status == "failed"
            check_replay(app, failing)
            return outline(await handle.events())

    assert run(main())[-2:] == ["completed 1/1" if effect == "once" else "failed 1/1 cancelled", "run_failed"]


@pytest.mark.parametrize("end", ["failed", "cancelled", "succeeded"])
def test_what_a_task_calls_while_it_cleans_up_is_made_however_the_agent_has_ended(end: str) -> None:
    """A task that was stopped with the agent waits for the call: the task puts back what it had taken."""
    made: list[str] = []

    @tool(effect="once")
    async def act(what: str) -> None:
        made.append(what)

    async def borrowing(run: Run) -> None:
        await act("take")
        try:
            await run.receive("never")
        finally:
            await act("put back")
            await act("say so")

    @agent(version="1")
    async def careless(run: Run) -> None:
        task = asyncio.create_task(borrowing(run))
        if await run.receive("go") == "fail":
            raise ValueError("no")
        assert not task.done()

    async def main() -> str:
        async with perdure(None, [careless]) as app:
            await app.start(careless, id="r")
            await app.engine.drive("r")
            await (app.cancel("r") if end == "cancelled" else app.signal("r", "go", "fail" if end == "failed" else None))
            row = await app.engine.drive("r")
            check_replay(app, careless)
            return row.status

    assert run(main()) == end
    assert made == ["take", "put back", "say so"]


# -- a store that fails inside an activation ----------------------------------------------------------------------------
class ThreeAtOnce:
    """An agent that makes three calls at once; whether the middle one may start is a question to the store."""

    def __init__(self, effect: Any) -> None:
        self.made: list[int] = []

        @tool(effect=effect)
        async def act(x: int) -> int:
            self.made.append(x)
            return x

        @tool(effect=effect, rate=Rate(limit=100))
        async def limited(x: int) -> int:
            self.made.append(x)
            return x

        @agent(version="1")
        async def parallel(run: Run) -> list[int]:
            await plain(0)
            return list(await asyncio.gather(act(1), limited(2), act(3)))

        self.agent: Agent[Any, Any] = parallel


def fails_once(app: Perdure, method: str, error: Exception) -> list[int]:
    """From here on the store's method raises this, once. Returns the list of how often it has."""
    real, failures = getattr(app.store, method), list[int]()

    def failing(*args: Any, **more: Any) -> Any:
        if not failures:
            failures.append(1)
            raise error
        return real(*args, **more)

    setattr(app.store, method, failing)
    return failures


@pytest.mark.parametrize("effect", ["read", "idempotent", "once"])
def test_a_store_that_cannot_say_whether_a_call_may_start_is_asked_again_and_the_others_go_on(effect: Any) -> None:
    three = ThreeAtOnce(effect)

    async def main() -> tuple[Any, list[str]]:
        clock = ManualClock()
        async with perdure(None, [three.agent], clock) as app:
            failures = fails_once(app, "admit", StoreUnavailable("the disk is full"))
            handle = await app.start(three.agent, id="r")
            row = await app.engine.drive("r", wait=False)
            assert (row.status, three.made, failures) == ("waiting", [1, 3], [1])
            assert row.ready_at is not None
            clock.advance(1)
            result = await handle.result(timeout=60)
            check_replay(app, three.agent)
            return result, outline(await handle.events())

    result, lines = run(main())
    assert (result, three.made) == ([1, 2, 3], [1, 3, 2])
    assert "attention_needed" not in lines


@pytest.mark.parametrize("effect", ["read", "idempotent", "once", "transaction"])
@pytest.mark.parametrize("restart", [False, True])
def test_an_error_in_the_middle_of_what_an_agent_asks_for_leaves_no_half_of_it(tmp_path: Path, effect: Any, restart: bool) -> None:
    """For example, a store breaks its promise.

    A person looks and lets the run continue: then every call is made once.
    """
    three = ThreeAtOnce(effect) if effect != "transaction" else ThreeTransactions()

    async def main() -> tuple[Any, list[str]]:
        async with perdure(tmp_path / "db", [three.agent]) as app:
            failures = fails_once(app, "admit", RuntimeError("a bug"))
            await app.start(three.agent, id="r")
            row = await app.engine.drive("r")
            assert (row.status, row.attention, failures) == ("needs_attention", "error", [1])
            assert row.error == "unexpected RuntimeError: a bug"
            assert three.made in ([], [1, 3])  # reads wait for no commit
            check_replay(app, three.agent)
            if not restart:
                return await gone_on(app)
        async with perdure(tmp_path / "db", [three.agent]) as app:
            return await gone_on(app)

    async def gone_on(app: Perdure) -> tuple[Any, list[str]]:
        await app.unpause("r")
        handle = app.handle("r")
        result = await handle.result(timeout=60)
        check_replay(app, three.agent)
        return result, outline(await handle.events())

    result, lines = run(main())
    assert (result, sorted(three.made)) == ([1, 2, 3], [1, 2, 3])
    assert sum(line.startswith("completed") for line in lines) == 4


class ThreeTransactions(ThreeAtOnce):
    def __init__(self) -> None:
        self.made = []

        @tool(effect="transaction")
        def act(x: int, call: Call) -> int:
            self.made.append(x)
            return x

        @tool(effect="transaction", rate=Rate(limit=100))
        def limited(x: int, call: Call) -> int:
            self.made.append(x)
            return x

        @agent(version="1")
        async def parallel(run: Run) -> list[int]:
            await plain(0)
            return list(await asyncio.gather(act(1), limited(2), act(3)))

        self.agent = parallel


def test_a_journal_that_cannot_be_read_for_a_moment_is_read_again_and_needs_nobody(tmp_path: Path) -> None:
    """Blobs are read while the agent is rebuilt. If the disk is busy then, this is no fault of the run."""
    made: list[int] = []

    @tool(effect="once")
    async def large() -> str:
        made.append(1)
        return "x" * 100_000

    @agent(version="1")
    async def reading(run: Run) -> int:
        text = await large()
        await run.receive("go")
        return len(text)

    async def main() -> tuple[Any, list[str]]:
        async with perdure(tmp_path / "db", [reading]) as app:
            await app.start(reading, id="r")
            await app.engine.drive("r")
        async with perdure(tmp_path / "db", [reading]) as app:
            await app.signal("r", "go")
            failures = fails_once(app, "blob", StoreUnavailable("busy"))
            handle = app.handle("r")
            result = await handle.result(timeout=60)
            assert failures == [1]
            return result, outline(await handle.events())

    result, lines = run(main())
    assert (result, made) == (100_000, [1])
    assert "attention_needed" not in lines


# -- two agents of one name ---------------------------------------------------------------------------------------------
def helper(value: Any, version: str | None = None) -> Agent[Any, Any]:
    """An agent made by a function, with the argument of the function in its closure."""

    @agent(name="helper", version=version)
    async def helping(run: Run) -> str:
        return f"with {value}"

    return helping


@pytest.mark.parametrize(("one", "two"), [("A", "B"), (1, 2), (1, "1"), (1.5, 2.5), (b"A", b"B"), (True, None)])
def test_agents_that_a_function_makes_run_with_what_each_was_given(one: Any, two: Any) -> None:
    first, second = helper(one), helper(two)

    @agent(version="1")
    async def parent(run: Run) -> list[str]:
        return [await first(), await second(), await first()]

    async def main() -> Any:
        async with perdure(None, [parent]) as app:
            return await app.run(parent)

    assert first.version != second.version
    assert run(main()) == [f"with {one}", f"with {two}", f"with {one}"]


def test_the_same_value_makes_the_same_version_in_every_process() -> None:
    assert helper("A").version == helper("A").version
    assert helper("\udcff").version == helper("\udcff").version  # a path, say


@pytest.mark.parametrize("values", [(["A"], ["B"]), ({"a": 1}, {"a": 2}), (object(), object()), (plain, run), (("A",), ("B",))])
def test_what_is_not_plain_does_not_change_the_version(values: Any) -> None:
    """It has no form that is the same in every process: a version that changes with each start would strand every run."""
    one, two = map(helper, values)
    assert one.version == two.version


def test_a_closure_that_is_empty_so_far_does_not_change_the_version() -> None:
    def made() -> Any:
        async def calling(run: Run) -> Any:
            return await itself()

        version = source_digest(calling)
        itself = Agent(calling, name="calling")
        return version, itself.version

    assert made() == made()
    assert len(set(made())) == 1


@pytest.mark.parametrize("restart", [False, True])
def test_two_agents_of_one_name_and_version_are_refused_where_the_second_is_called(tmp_path: Path, restart: bool) -> None:
    first, second = helper("A", "1"), helper("B", "1")

    @agent(version="1")
    async def parent(run: Run) -> list[Any]:
        done: list[Any] = [await first()]
        await run.receive("go")
        try:
            await second()
        except InvalidInput as refused:
            done.append(str(refused))
        return [*done, await first()]

    async def main() -> Any:
        async with perdure(tmp_path / "db", [parent]) as app:
            await app.start(parent, id="r")
            await app.engine.drive("r")
            await app.signal("r", "go")
            if not restart:
                return await app.handle("r").result(timeout=60)
        async with perdure(tmp_path / "db", [parent]) as app:
            result = await app.handle("r").result(timeout=60)
            check_replay(app, parent)
            assert app.store.get("r/2") is not None
            assert app.store.get("r/3") is None  # a refused child is no call
            return result

    said = "two agents are called helper (version 1): only one of them would be run; give one another name or version"
    assert run(main()) == ["with A", said, "with A"]


def test_not_catching_that_fails_the_run_with_the_reason() -> None:
    first, second = helper("A", "1"), helper("B", "1")

    @agent(version="1")
    async def parent(run: Run) -> list[Any]:
        return list(await asyncio.gather(first(), second()))

    async def main() -> Any:
        async with perdure(None, [parent]) as app:
            with pytest.raises(RunFailed, match="InvalidInput: two agents are called helper"):
                await app.run(parent, id="r")
            assert app.store.family("r") == []

    run(main())


# -- code that has changed between two workers --------------------------------------------------------------------------
@pytest.mark.parametrize("answer", ["approve", "reject"])
def test_a_call_that_was_not_begun_asks_when_the_next_code_says_so(tmp_path: Path, answer: str) -> None:
    """Its intent was recorded and the run paused in the same breath. Then a deploy: the tool needs a person now."""
    made: list[int] = []
    release = asyncio.Event()

    @tool(effect="idempotent")
    async def busy() -> None:
        await release.wait()

    def paying(approval: Any) -> Agent[Any, Any]:
        @tool(name="pay", effect="once", approval=approval)
        async def pay(cents: int) -> int:
            made.append(cents)
            return cents

        @agent(name="paying", version="1")
        async def code(run: Run) -> Any:
            async def go() -> Any:
                await run.receive("go")
                try:
                    return await pay(7)
                except NotApproved as refused:
                    return refused.outcome

            return (await asyncio.gather(busy(), go()))[1]

        return code

    async def main() -> tuple[Any, list[str]]:
        async with perdure(tmp_path / "db", [paying(None)]) as app:
            await app.start("paying", id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: status_of(app, "r") == "running")
            await until(lambda: len(app.store.read("r")) > 2)
            at_once(app.signal("r", "go", by="ann"))  # without a moment in between
            at_once(app.pause("r", by="ann"))
            await until(lambda: not app.store.inbox(app.store.get("r").holder))  # type: ignore[union-attr, arg-type]
            release.set()
            assert (await driving).status == "paused"
        code = paying(True)
        async with perdure(tmp_path / "db", [code]) as app:
            await app.unpause("r")
            row = await app.engine.drive("r", wait=False)
            assert (row.status, made) == ("waiting_approval", [])
            approval = the_one(app)
            await (app.approve(approval, by="bob") if answer == "approve" else app.reject(approval, by="bob", reason="no"))
            result = await app.handle("r").result(timeout=60)
            check_replay(app, code)
            return result, outline(await app.handle("r").events())

    result, lines = run(main())
    assert "initiated pay 2/1" in lines
    assert "failing 2/1 not_sent" in lines
    assert ("initiated pay 2/2" in lines) == (answer == "approve")
    assert (result, made) == ((7, [7]) if answer == "approve" else ("rejected", []))


def sleeping(patched: bool) -> Agent[Any, Any]:
    @agent(name="sleeping", version="1")
    async def code(run: Run) -> Any:
        await plain(1)
        new = run.patched("x") if patched else None
        if new:
            await plain(2)
        await asyncio.sleep(60)
        return [new, run.patched("late") if patched else None]

    return code


@pytest.mark.parametrize("between", ["nothing", "a signal", "a pause", "another sleep"])
def test_a_run_that_was_asleep_past_the_change_keeps_to_the_old_side(tmp_path: Path, between: str) -> None:
    async def main() -> tuple[Any, float, list[str]]:
        clock = ManualClock()
        began = clock.now()
        async with perdure(tmp_path / "db", [sleeping(False)], clock) as app:
            await app.start("sleeping", id="r")
            await app.engine.drive("r", wait=False)
            if between == "a signal":
                await app.signal("r", "any")
            if between == "a pause":
                await app.pause("r")
                await app.unpause("r")
        code = sleeping(True)
        async with perdure(tmp_path / "db", [code], clock) as app:
            clock.advance(30)
            if between != "nothing":
                row = await app.engine.drive("r", wait=False)
                assert row.ready_at == began + 60_000_000, "the sleep goes on as it was"
            clock.advance(30)
            result = await app.handle("r").result(timeout=60)
            check_replay(app, code)
            return result, (clock.now() - began) / 1e6, outline(await app.handle("r").events())

    result, took_s, lines = run(main())
    assert (result, took_s) == ([False, True], 60)
    assert sum(line.startswith("initiated") for line in lines) == 1


def test_a_run_that_nobody_has_begun_takes_the_new_side_though_it_was_paused(tmp_path: Path) -> None:
    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [sleeping(False)], clock) as app:
            await app.start("sleeping", id="r")
            await app.pause("r")
            await app.unpause("r")
        async with perdure(tmp_path / "db", [sleeping(True)], clock) as app:
            await app.engine.drive("r", wait=False)
            clock.advance(60)
            return await app.handle("r").result(timeout=60)

    assert run(main()) == [True, True]


# -- waiting for a result is no way around a queue ----------------------------------------------------------------------
def test_waiting_for_the_result_does_not_begin_a_run_before_its_time() -> None:
    begun: list[int] = []
    clock = ManualClock()

    @agent(version="1")
    async def soon(run: Run) -> int:
        begun.append(clock.now())
        return 1

    async def main() -> None:
        async with perdure(None, [soon], clock) as app:
            due = clock.now() + 5_000_000
            handle = await app.start(soon, not_before=timedelta(seconds=5))
            with pytest.raises(TimeoutError):
                await handle.result(timeout=0.1)
            clock.advance(4.9)
            with pytest.raises(TimeoutError):
                await handle.result(timeout=0.1)
            assert begun == []
            clock.advance(0.1)
            assert await handle.result(timeout=60) == 1
            assert begun == [due]

    run(main())


def test_whoever_waits_for_a_result_from_before_its_time_on_has_it_soon_after() -> None:
    @agent(version="1")
    async def soon(run: Run) -> int:
        return 1

    async def main() -> float:
        async with Perdure("sqlite://", [soon], settings=Settings(poll_s=60)) as app:
            loop = asyncio.get_running_loop()
            began = loop.time()
            handle = await app.start(soon, not_before=timedelta(seconds=0.2))
            await handle.result(timeout=60)
            return loop.time() - began

    assert 0.2 <= run(main()) < 20


@pytest.mark.parametrize("apps", [1, 2])
def test_waiting_for_many_results_keeps_to_the_limits_of_their_queue(tmp_path: Path, apps: int) -> None:
    there: list[str] = []
    most: list[int] = []

    @tool(effect="once")
    async def work(who: str) -> None:
        there.append(who)
        most.append(len(there))
        await asyncio.sleep(0.01)
        there.remove(who)

    @agent(version="1", queue="q")
    async def queued(run: Run) -> None:
        await work(run.id)

    async def main() -> None:
        settings = Settings(poll_s=0.002, queues={"q": Queue(concurrency=1)})
        async with (
            perdure(tmp_path / "db", [queued], settings=settings) as one,
            perdure(tmp_path / "db", [queued], settings=settings) as two,
        ):
            handles = [await (one, two)[number % apps].start(queued) for number in range(6)]
            await asyncio.gather(*(handle.result(timeout=60) for handle in handles))

    run(main())
    assert most == [1] * 6


def test_driving_a_run_by_its_name_asks_for_no_turn() -> None:
    """A person asked for this run: `perdure drive` is not a worker of the queue."""
    inside, finish = asyncio.Event(), asyncio.Event()

    @tool(effect="once")
    async def hold() -> None:
        inside.set()
        await finish.wait()

    @agent(version="1", queue="q")
    async def holding(run: Run, holds: bool) -> None:
        await hold() if holds else None

    async def main() -> None:
        async with perdure(None, [holding], settings=Settings(poll_s=0.002, queues={"q": Queue(concurrency=1)})) as app:
            await app.start(holding, True, id="first")
            first = asyncio.create_task(app.handle("first").result())
            await inside.wait()
            second = await app.start(holding, False, id="second")
            with pytest.raises(TimeoutError):
                await second.result(timeout=0.1)
            assert status_of(app, "second") == "queued"
            assert (await app.engine.drive("second")).status == "succeeded"
            finish.set()
            await first

    run(main())


# -- money that comes while the run is about to stop --------------------------------------------------------------------
class Spending:
    """An agent whose second quick call is too much for its budget, while a slow one is still in flight."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.release = asyncio.Event()

        @tool(effect="once")
        async def slow() -> None:
            self.made.append("slow")
            await self.release.wait()

        @tool(effect="once")
        async def quick(name: str) -> None:
            self.made.append(name)

        @agent(version="1", budget=Budget(calls=2))
        async def spending(run: Run) -> str:
            task = asyncio.create_task(slow())
            await quick("one")
            await quick("two")
            await task
            return "done"

        self.agent: Agent[Any, Any] = spending


def is_over(app: Perdure, run_id: str = "r") -> bool:
    return any(event.type == "budget_exceeded" for event in app.store.read(run_id))


@pytest.mark.parametrize("enough", [True, False])
def test_a_top_up_while_calls_are_in_flight_is_not_lost_on_the_run(enough: bool) -> None:
    spending = Spending()

    async def main() -> None:
        async with perdure(None, [spending.agent]) as app:
            handle = await app.start(spending.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: is_over(app))
            if enough:
                assert await app.unpause("r", add=Budget(calls=10)) == []  # it has not stopped yet, and does not need to
            spending.release.set()
            row = await driving
            assert row.status == ("succeeded" if enough else "needs_attention"), row.error
            if not enough:
                assert (row.attention, row.ready_at, spending.made) == ("budget", None, ["slow", "one"])
                assert await app.unpause("r", add=Budget(calls=1)) == ["r"]
            assert await handle.result(timeout=60) == "done"
            check_replay(app, spending.agent)
            # If the budget is large enough, no person needs a notice: the run continues where it stopped.
            assert ("run_unpaused" in outline(await handle.events())) == (not enough)
            (ledger,) = app.store.ledgers("r")
            assert (ledger.limits.calls, ledger.spent.calls, ledger.reserved) == (12 if enough else 3, 3, NOTHING)

    run(main())
    assert spending.made == ["slow", "one", "two"]


@pytest.mark.parametrize("moment", ["before it stops", "as it stops"])
def test_a_top_up_of_the_parent_s_budget_reaches_a_child_that_is_about_to_stop_for_it(moment: str) -> None:
    """The amount is added in the parent's journal.

    The child finds it in the ledger, or the command that added it continues it.
    """
    spending = Spending()
    child = Agent(spending.agent.fn, name="child", version="1")

    @agent(version="1")
    async def parent(run: Run) -> str:
        return str(await child())

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            handle = await app.start(parent, id="r", budget=Budget(calls=2))
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: app.store.get("r/1") is not None and is_over(app, "r/1"))
            if moment == "before it stops":
                await app.unpause("r/1", add=Budget(calls=10))
            else:
                append = app.store.append

                def topped_up(batch: Any) -> Any:
                    if any(one.row is not None and one.row.attention == "budget" for one in batch):
                        app.store.append = append  # type: ignore[method-assign]
                        at_once(app.unpause("r/1", by="ann", add=Budget(calls=10)))
                    return append(batch)

                app.store.append = topped_up  # type: ignore[method-assign]
            spending.release.set()
            await driving
            assert await handle.result(timeout=60) == "done"

    run(main())
    assert spending.made == ["slow", "one", "two"]


def modelling(prices: list[float]) -> tuple[Agent[Any, Any], list[int], asyncio.Event]:
    """An agent that makes calls at once. Each call may cost half a dollar, and finally costs the given amount."""
    made: list[int] = []
    release = asyncio.Event()

    @tool(effect="idempotent", cost=0.5)
    async def model(x: int, call: Call) -> int:
        made.append(x)
        await release.wait()
        call.spend(usd=prices[x])
        return x

    @agent(version="1", budget=Budget(usd=1))
    async def asking(run: Run) -> list[int]:
        return list(await asyncio.gather(*(model(x) for x in range(len(prices)))))

    return asking, made, release


@pytest.mark.parametrize("prices", [[0.01, 0.01, 0.01], [0.5, 0.5, 0.01]], ids=["room again", "no room"])
def test_what_is_only_reserved_is_waited_for_and_what_is_spent_is_not(prices: list[float]) -> None:
    code, made, release = modelling(prices)
    room = sum(prices) < 1

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [code], clock) as app:
            handle = await app.start(code, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: len(made) == 2)
            assert not is_over(app)
            release.set()
            row = await driving
            assert (row.status, made) == ("waiting", [0, 1])
            clock.advance(1)
            row = await app.engine.drive("r", wait=False)
            check_replay(app, code)
            assert row.status == ("succeeded" if room else "needs_attention")
            if room:
                assert await handle.result() == [0, 1, 2]
            else:
                assert row.attention == "budget"
                assert "$1.00 of $1.00" in str(row.error)
            (ledger,) = app.store.ledgers("r")
            assert ledger.reserved == NOTHING

    run(main())
    assert made == ([0, 1, 2] if room else [0, 1])


def test_a_top_up_counts_though_others_have_reserved_what_it_added() -> None:
    """The child needs half a dollar, and has room as soon as its sibling has freed its reservation."""
    hold, release = asyncio.Event(), asyncio.Event()
    made: list[str] = []

    @tool(effect="once")
    async def slow() -> None:
        await hold.wait()

    @tool(effect="once", cost=0.5)
    async def model(name: str, call: Call) -> None:
        made.append(name)
        call.spend(usd=0.6)

    @tool(effect="once", cost=0.3)
    async def other(call: Call) -> None:
        made.append("other")
        await release.wait()
        call.spend(usd=0.01)

    @agent(version="1")
    async def spender(run: Run) -> None:
        task = asyncio.create_task(slow())
        await model("first")
        await run.receive("go")
        await model("second")
        await task

    @agent(version="1")
    async def sibling(run: Run) -> None:
        await other()

    @agent(version="1")
    async def parent(run: Run) -> str:
        await asyncio.gather(spender(), sibling())
        return "done"

    async def main() -> None:
        clock = ManualClock()
        async with perdure(None, [parent], clock) as app:
            handle = await app.start(parent, id="r", budget=Budget(usd=1))
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: sorted(made) == ["first", "other"])
            await app.signal("r/1", "go")
            await until(lambda: is_over(app, "r/1"))
            await app.unpause("r/1", add=Budget(usd=0.3))
            hold.set()
            # Let go and taken again at once, it is queued for a moment on the way to its wait.
            await until(lambda: not is_held(app, "r/1") and status_of(app, "r/1") == "waiting")
            assert made[2:] == []
            release.set()
            await until(lambda: status_of(app, "r/2") == "succeeded")
            clock.advance(1)
            await driving
            assert await handle.result(timeout=60) == "done"

    run(main())
    assert made[2:] == ["second"]


# -- the write lock -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["rate", "refused"])
def test_a_limited_call_while_a_transaction_has_the_write_lock_does_not_stop_the_loop(tmp_path: Path, kind: str) -> None:
    """A place in the line of a rate needs the lock, and so does the pause that the service has asked for."""
    inside, finish, gate = threading.Event(), threading.Event(), asyncio.Event()
    made: list[int] = []

    @tool(effect="transaction")
    def book(call: Call) -> str:
        inside.set()
        assert finish.wait(60)
        return "booked"

    @tool(effect="idempotent", rate=Rate(limit=100), retry=Retry(attempts=2, base=0.01, jitter=False))
    async def limited(x: int) -> int:
        made.append(x)
        if kind == "refused":
            await gate.wait()
            if len(made) == 1:
                raise RetryLater(after=0.01)
        return x

    @tool(effect="read")
    async def wait() -> None:
        await gate.wait()

    @agent(version="1")
    async def booking(run: Run) -> str:
        return str(await book())

    @agent(version="1")
    async def calling(run: Run) -> int:
        if kind == "rate":
            await wait()
        return int(await limited(1))

    async def main() -> tuple[list[Any], float]:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [booking, calling], settings=Settings(poll_s=0.002)) as app:
            async with asyncio.TaskGroup() as group:
                called = group.create_task(app.run(calling, id="c"))
                await until(lambda: made or (kind == "rate" and is_held(app, "c")))
                booked = group.create_task(app.run(booking, id="b"))
                await until(inside.is_set)
                gate.set()
                with Stalls() as stalls:
                    await stalls.watch_for(0.6)
                ended = called.done()
                finish.set()
            assert not ended, "its intent needs the lock"
            return [called.result(), booked.result()], stalls.longest_s

    results, longest_s = run(main())
    assert results == [1, "booked"]
    assert made == ([1] if kind == "rate" else [1, 1])
    assert longest_s < 0.3, "the loop stood still"


def is_held(app: Perdure, run_id: str) -> bool:
    row = app.store.get(run_id)
    return row is not None and row.holder is not None


# -- commits with an unexpected time or outcome -----------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["read", "once", "transaction"])
@pytest.mark.parametrize("late", [True, False])
def test_an_approval_is_not_used_by_a_commit_that_goes_out_after_its_time(tmp_path: Path, effect: Any, late: bool) -> None:
    """The disk was full when the intent was recorded, and has room again when the approval has expired: nothing begins."""
    made: list[int] = []

    async def pay(call: Call) -> str:
        made.append(1)
        return "paid"

    def pay_here(call: Call) -> str:
        made.append(1)
        return "paid"

    paying = tool(effect=effect, name="pay", approval=Approval(expires=60))(pay_here if effect == "transaction" else pay)

    @agent(version="1")
    async def payer(run: Run) -> str:
        try:
            return str(await paying())
        except NotApproved as refused:
            return refused.outcome

    async def main() -> tuple[Any, list[str]]:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [payer], clock) as app:
            await app.start(payer, id="r")
            await driven(app)
            full = fills_up(app)
            await app.approve(the_one(app), by="ann")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: full.refused)
            clock.advance(61 if late else 30)
            full.room = True
            await driving
            clock.advance(2)  # a worker that could not begin it gives the run up for a moment
            result = await app.handle("r").result(timeout=60)
            check_replay(app, payer)
            return result, statuses(app)

    assert run(main()) == (("expired", ["expired"]) if late else ("paid", ["consumed"]))
    assert made == ([] if late else [1])


@pytest.mark.parametrize("what", ["money", "signal"])
def test_a_post_whose_commit_went_through_unknown_to_its_sender_counts_once_though_the_holder_has_read_it(
    tmp_path: Path, what: str
) -> None:
    """The sender searches for its event id: in the inbox, or in the journal if the holder was faster."""
    release = asyncio.Event()
    begun = asyncio.Event()

    @tool(effect="idempotent")
    async def slow() -> None:
        begun.set()
        await release.wait()

    @agent(version="1", budget=Budget(calls=5))
    async def listening(run: Run) -> list[Any]:
        await slow()
        heard: list[Any] = []
        try:
            while True:
                heard.append(await run.receive("u", timeout=0))
        except TimeoutError:
            return heard

    def send(other: Perdure) -> None:
        for _ in range(2):
            try:
                if what == "money":
                    at_once(other.engine.post("r", BudgetRaised(Budget(calls=10).limits, "ann", None)))
                else:
                    at_once(other.signal("r", "u", "once", by="ann"))
                return
            except StoreUnavailable:
                pass  # like any sender: it was told that nothing was written

    async def main() -> tuple[Any, int | None]:
        async with perdure(tmp_path / "db", [listening]) as app, perdure(tmp_path / "db", []) as other:
            handle = await app.start(listening, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await begun.wait()
            lost = loses_the_answer(other, lambda: any(event.type in ("budget_raised", "signal_received") for event in app.store.read("r")))
            await asyncio.to_thread(send, other)
            assert lost == [1]
            release.set()
            await driving
            (ledger,) = app.store.ledgers("r")
            return await handle.result(), ledger.limits.calls

    assert run(main()) == (([], 15) if what == "money" else (["once"], 5))


def loses_the_answer(app: Perdure, is_read: Callable[[], bool]) -> list[int]:
    """The next commit of this app takes effect, and its answer is an error.

    The app checks only after the holder has read the post.
    """
    database: Any = app.store._database  # type: ignore[attr-defined]
    write, lost = database.write, list[int]()
    wait = threading.Event().wait

    def losing(work: Any, arrived: Any, **options: Any) -> Any:
        done = write(work, arrived, **options)
        if not lost:
            lost.append(1)
            app.store._bell.ring()  # type: ignore[attr-defined]
            for _ in range(1000):
                if is_read():
                    break
                wait(0.005)
            assert is_read(), "the holder has not read it"
            if not database._look(lambda fresh: arrived(fresh, done)):
                raise StoreUnavailable("disk I/O error in COMMIT")
        return done

    database.write = losing
    return lost


# -- faults that the storm tests found --------------------------------------------------------------------------------
def test_what_a_person_said_about_a_cut_off_call_is_heard_before_it_is_made_again(tmp_path: Path) -> None:
    """The answer was accepted while its worker was only silent; the worker that takes over the run reads it first."""
    made: list[int] = []

    @tool(effect="keyed")
    async def pay(call: Call) -> str:
        made.append(call.attempt)
        await asyncio.sleep(30)
        return "paid"

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> Any:
        async with perdure(tmp_path / "db", [payer]) as first:
            await first.start(payer, id="r")
            driving = asyncio.create_task(first.engine.drive("r"))
            await until(lambda: made == [1])
            body = ToolCallResolved("happened", by="ann", attempt=1, result=codec.pack(b'"said by ann"')[0])
            worker_of(first)._stop_listening()
            assert not first.store.post("r", 1, body, event_id="0" * 32, now=first.clock.now(), expect=lambda row: None)
            first.abort()  # as a crash would
            driving.cancel()
        async with perdure(tmp_path / "db", [payer]) as second:
            return await second.handle("r").result()

    assert run(main()) == "said by ann"
    assert made == [1]


def test_an_approval_whose_turn_comes_too_late_expires_in_its_time() -> None:
    clock = ManualClock()

    @tool(effect="once", approval=Approval(expires=5), rate=Rate(1, per=3600))
    async def pay(number: int) -> str:
        return f"paid {number}"

    @agent(version="1")
    async def payer(run: Run) -> list[str]:
        answers = await asyncio.gather(pay(1), pay(2), return_exceptions=True)
        return [answer if isinstance(answer, str) else getattr(answer, "outcome", repr(answer)) for answer in answers]

    async def main() -> Any:
        async with perdure(None, [payer], clock) as app:
            await app.start(payer, id="r")
            await app.engine.drive("r", wait=False)
            for asked in await app.approvals():
                await app.approve(asked.approval, by="ann")
            row = await app.engine.drive("r", wait=False)
            assert row.ready_at == clock.now() + 5_000_000, "its time, and not its turn an hour later"
            clock.advance(6)
            return await app.handle("r").result()

    assert run(main()) == ["paid 1", "expired"]


def test_whoever_has_waited_long_enough_for_reserved_money_stops_once_and_nobody_says_that_the_budget_was_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_core, "_LEDGER_PATIENCE_US", 0)
    begun = asyncio.Event()

    @tool(effect="once", cost=0.5)
    async def long() -> None:
        begun.set()
        await asyncio.sleep(30)

    @tool(effect="once", cost=0.8)
    async def want() -> None: ...

    @agent(version="1")
    async def first(run: Run) -> None:
        await long()

    @agent(version="1")
    async def second(run: Run) -> None:
        await run.receive("go")
        await want()

    @agent(version="1", budget=Budget(usd=1))
    async def parent(run: Run) -> None:
        await asyncio.gather(first(), second())

    async def main() -> list[str]:
        async with perdure(tmp_path / "db", [parent]) as app:
            await app.start(parent, id="p")
            working = asyncio.create_task(app.work())
            await begun.wait()
            await app.signal("p/2", "go")
            await until(lambda: status_of(app, "p/2") == "needs_attention")
            await asyncio.sleep(0.1)
            assert status_of(app, "p/2") == "needs_attention", "and it stays so"
            lines = [event.type for event in await app.handle("p/2").events()]
            app.abort()
            working.cancel()
            return lines

    assert run(main()).count("budget_exceeded") == 1
