"""The app: starting, waiting, following and steering runs, in one process and in two."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, outline, perdure, run, status_of, until

from perdure import (
    AlreadyRunning,
    Conflict,
    InvalidInput,
    NeedsAttention,
    NotAllowedInAgent,
    NotFound,
    Outcome,
    Perdure,
    ResultTimeout,
    Run,
    RunEnded,
    ToolFailed,
    UnknownAgent,
    agent,
    tool,
)
from perdure.core.events import Event, RunCreated


@tool(effect="read")
async def look(what: Any) -> Any:
    return what


@agent(version="1")
async def echo(run: Run, what: Any = None) -> Any:
    return await look(what)


@agent(version="1")
async def sleeper(run: Run, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


def test_a_run_is_durable_when_start_returns(tmp_path: Path) -> None:
    async def first() -> None:
        async with perdure(tmp_path / "db", [echo]) as app:
            handle = await app.start(echo, {"a": 1}, id="r", tenant="acme", actor="user:17")
            row = await handle.row()
            assert (row.status, row.tenant, row.actor, row.agent, row.version) == ("queued", "acme", "user:17", "echo", "")

    async def second() -> Any:
        async with perdure(tmp_path / "db", [echo]) as app:
            return await app.handle("r").result()

    run(first())
    assert run(second()) == {"a": 1}


def test_the_same_id_with_the_same_input_is_the_same_run() -> None:
    async def main() -> tuple[int, Any]:
        async with perdure(None, [echo]) as app:
            handles = [await app.start(echo, {"b": 2, "a": 1}, id="r"), await app.start("echo", what={"a": 1, "b": 2}, id="r")]
            await handles[0].result()
            again = await app.start(echo, {"a": 1, "b": 2}, id="r")
            return len(app.store.list()), await again.result()

    assert run(main()) == (1, {"a": 1, "b": 2})


@pytest.mark.parametrize("how", ["input", "agent", "tenant"])
def test_the_same_id_for_something_else_is_a_conflict_and_changes_nothing(how: str) -> None:
    async def main() -> Any:
        async with perdure(None, [echo, sleeper]) as app:
            await app.start(echo, 1, id="r", tenant="acme")
            other: tuple[Any, Any, str] = {"input": (echo, 1.0, "acme"), "agent": (sleeper, 1, "acme"), "tenant": (echo, 1, "rival")}[how]
            with pytest.raises(Conflict, match="r ") as conflict:
                await app.start(other[0], other[1], id="r", tenant=other[2])
            assert "acme" not in str(conflict.value), "another tenant learns nothing about the run"
            return await app.handle("r").result()

    assert run(main()) == 1


def test_many_starts_of_one_id_at_once_make_one_run(tmp_path: Path) -> None:
    performed: list[int] = []

    @tool(effect="once")
    async def act() -> None:
        performed.append(1)

    @agent(version="1")
    async def actor(run: Run) -> str:
        await act()
        return "done"

    async def main() -> list[Any]:
        async with perdure(tmp_path / "db", [actor]) as first, perdure(tmp_path / "db", [actor]) as second:
            return await asyncio.gather(*(app.run(actor, id="r") for app in (first, second) for _ in range(5)))

    assert run(main()) == ["done"] * 10
    assert performed == [1]


def test_ids_are_made_up_when_none_is_given() -> None:
    async def main() -> set[str]:
        async with perdure(None, [echo]) as app:
            return {(await app.start(echo)).id for _ in range(50)}

    ids = run(main())
    assert len(ids) == 50
    assert all(len(one) == 32 for one in ids)


# -- waiting ------------------------------------------------------------------------------------------------------------
def test_waiting_for_a_result_has_a_limit_and_the_run_goes_on() -> None:
    async def main() -> Any:
        clock = ManualClock()
        async with perdure(None, [sleeper], clock) as app:
            handle = await app.start(sleeper, 60)
            with pytest.raises(ResultTimeout, match="the run goes on") as waited:
                await handle.result(timeout=0.05)
            assert isinstance(waited.value, TimeoutError)
            clock.advance(61)
            return await handle.result(timeout=60)

    assert run(main()) == "awake"


def test_a_run_of_an_agent_that_is_not_known_here_is_waited_for(tmp_path: Path) -> None:
    async def main() -> Any:
        async with perdure(tmp_path / "db", [echo]) as worker, perdure(tmp_path / "db", []) as client:
            await worker.start(echo, "x", id="r")
            waiting = asyncio.create_task(client.handle("r").result())
            await asyncio.sleep(0.02)
            assert not waiting.done()
            with pytest.raises(UnknownAgent):
                await client.drive("r")
            working = asyncio.create_task(worker.work())
            found = await waiting
            worker.drain()
            await working
            return found

    assert run(main()) == "x"


def test_a_run_that_a_live_worker_holds_is_not_driven_twice(tmp_path: Path) -> None:
    hold, began = asyncio.Event(), list[int]()

    @tool(effect="read")
    async def slow() -> str:
        began.append(1)
        await hold.wait()
        return "slow"

    @agent(version="1")
    async def holder(run: Run) -> str:
        return str(await slow())

    async def main() -> list[Any]:
        async with perdure(tmp_path / "db", [holder]) as first, perdure(tmp_path / "db", [holder]) as second:
            await first.start(holder, id="r")
            driving = asyncio.create_task(first.handle("r").result())
            await until(lambda: began)
            with pytest.raises(AlreadyRunning, match="is held by another worker"):
                await second.engine.drive("r")
            waiting = asyncio.create_task(second.handle("r").result())
            await asyncio.sleep(0.01)
            hold.set()
            return [await driving, await waiting]

    assert run(main()) == ["slow", "slow"]
    assert began == [1]


def test_two_waits_for_one_run_in_one_app_share_its_drive() -> None:
    async def main() -> list[Any]:
        async with perdure(None, [echo]) as app:
            handle = await app.start(echo, 7)
            return await asyncio.gather(*(handle.result() for _ in range(5)))

    assert run(main()) == [7] * 5


def test_a_queue_worker_drives_what_others_start(tmp_path: Path) -> None:
    async def main() -> list[Any]:
        async with perdure(tmp_path / "db", [echo]) as worker, perdure(tmp_path / "db", [echo]) as client:
            stop = asyncio.Event()
            working = asyncio.create_task(worker.work(stop=stop))
            handles = [await client.start(echo, at) for at in range(30)]
            await until(lambda: all(status_of(client, one.id) == "succeeded" for one in handles))
            stop.set()
            await working
            return [await one.result() for one in handles]

    assert run(main()) == list(range(30))


def test_more_runs_than_the_worker_may_drive_at_a_time_wait_their_turn() -> None:
    at_once: list[int] = []
    inside = 0

    @tool(effect="read")
    async def slow() -> None:
        nonlocal inside
        inside += 1
        at_once.append(inside)
        await asyncio.sleep(0.005)
        inside -= 1

    @agent(version="1")
    async def one(run: Run) -> None:
        await slow()

    async def main() -> None:
        settings = SETTINGS.__class__(poll_s=0.002, concurrency=3)
        async with perdure(None, [one], settings=settings) as app:
            handles = [await app.start(one) for _ in range(12)]
            working = asyncio.create_task(app.work())
            await until(lambda: all(status_of(app, each.id) == "succeeded" for each in handles))
            app.drain()
            await working

    run(main())
    assert max(at_once) <= 3


# -- looking ------------------------------------------------------------------------------------------------------------
def test_following_a_run_can_be_ended_before_the_run_does() -> None:
    async def main() -> tuple[str, list[Event]]:
        async with perdure(None, [echo]) as app:
            handle = await app.start(echo, 1, not_before=timedelta(hours=1))
            async with contextlib.aclosing(handle.follow()) as events:
                first = await anext(events)
            return first.type, [event async for event in events]

    assert run(main()) == ("run_created", [])


def test_following_a_run_ends_when_the_run_does() -> None:
    async def main() -> tuple[list[Event], list[Event]]:
        async with perdure(None, [echo]) as app:
            handle = await app.start(echo, 1)

            async def follow() -> list[Event]:
                return [event async for event in handle.follow()]

            following = asyncio.create_task(follow())
            await handle.result()
            return await following, await handle.events()

    followed, events = run(main())
    assert followed == events
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


def test_the_state_as_of_every_event() -> None:
    async def main() -> list[str]:
        async with perdure(None, [echo]) as app:
            handle = await app.start(echo, 1)
            await handle.result()
            length = len(await handle.events())
            for wrong in (0, -1, length + 1):
                with pytest.raises(NotFound, match=f"there is no event {wrong}"):
                    await handle.state(at=wrong)
            assert [event.seq for event in await handle.events(after=2)] == list(range(3, length + 1))
            return [(await handle.state(at=at)).status for at in range(1, length + 1)]

    assert run(main()) == ["queued", "running", "running", "running", "succeeded"]


def test_observers_hear_of_every_durable_event_in_order() -> None:
    heard: list[tuple[str, int]] = []

    async def main() -> list[Event]:
        async with perdure(None, [echo], observers=[lambda run_id, events: heard.extend((run_id, event.seq) for event in events)]) as app:
            await app.run(echo, 1, id="r")
            return await app.handle("r").events()

    events = run(main())
    assert heard == [("r", event.seq) for event in events if event.type not in ("run_created", "run_claimed")]


def test_an_observer_that_fails_is_logged_and_neither_the_run_nor_the_other_observers_are_hurt(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def broken(run_id: str, events: Sequence[Event]) -> None:
        raise ValueError(f"about {run_id}")

    async def main() -> Any:
        async with perdure(None, [echo], observers=[broken, lambda _, events: heard.extend(event.seq for event in events)]) as app:
            return await app.run(echo, 1, id="r")

    assert run(main()) == 1
    assert heard == [3, 4, 5]
    failures = [record for record in caplog.records if "an observer has failed" in record.getMessage()]
    assert failures
    assert all(record.exc_info and str(record.exc_info[1]) == "about r" for record in failures)


def test_an_observer_is_called_on_the_thread_of_the_loop_before_the_calls_that_depend_on_the_events() -> None:
    order: list[tuple[str, int]] = []

    @tool(effect="idempotent")
    async def noted() -> None:
        order.append(("effect", threading.get_ident()))

    @agent(version="1")
    async def noting(run: Run) -> None:
        await noted()

    def observe(run_id: str, events: Sequence[Event]) -> None:
        order.extend((event.type, threading.get_ident()) for event in events)

    async def main() -> None:
        async with perdure(None, [noting], observers=[observe]) as app:
            await app.run(noting, id="r")

    run(main())
    assert order == [(name, threading.get_ident()) for name in ("tool_call_initiated", "effect", "tool_call_completed", "run_succeeded")]


def test_a_handle_on_nothing_is_not_found_when_it_is_used() -> None:
    async def main() -> None:
        async with perdure(None, [echo]) as app:
            handle = app.handle("nowhere")
            for using in (handle.status, handle.result, handle.events, handle.state):
                with pytest.raises(NotFound, match="there is no run nowhere"):
                    await using()
            for steering in (app.cancel, app.unpause, app.drive):
                with pytest.raises(NotFound):
                    await steering("nowhere")

    run(main())


# -- steering -----------------------------------------------------------------------------------------------------------
def test_only_a_run_that_needs_attention_can_be_sent_back() -> None:
    async def main() -> None:
        async with perdure(None, [sleeper]) as app:
            await app.start(sleeper, 60, id="r")
            with pytest.raises(Conflict, match="run r is queued"):
                await app.unpause("r")
            await app.engine.drive("r", wait=False)
            with pytest.raises(Conflict, match="run r is waiting"):
                await app.unpause("r")

    run(main())


def test_a_run_that_needs_attention_says_so_to_who_waits() -> None:
    @agent(version="1")
    async def stuck(run: Run) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with perdure(None, [stuck]) as app:
            await app.run(stuck, id="r")

    with pytest.raises(NeedsAttention, match="perdure why r"):
        run(main())


def test_texts_of_people_that_are_no_unicode_are_recorded_as_they_can_be_shown() -> None:
    """A command line gives bytes that are no UTF-8 as lone surrogates. They must neither be refused nor break the journal."""
    bad = b"\xff bad".decode("utf-8", "surrogateescape")

    @tool(effect="once")
    async def pay() -> str:
        raise TimeoutError("no answer")

    @pay.reconcile
    async def _() -> Outcome:
        return Outcome.unknown(bad)

    @agent(version="1")
    async def payer(run: Run) -> str:
        try:
            return str(await pay())
        except ToolFailed as failed:
            return failed.message

    async def main() -> tuple[Any, list[str]]:
        async with perdure(None, [payer]) as app:
            handle = await app.start(payer, id="r")
            row = await app.engine.drive("r")
            assert (row.status, row.error) == ("needs_attention", "call 1 (pay): its reconcile hook does not know: \\udcff bad")
            await app.unpause("r", by=bad, note=bad)
            await app.engine.drive("r")
            await app.resolve("r", 1, fail=bad, by=bad, note=bad)
            output = await handle.result()
            await app.start(payer, id="s")
            await app.cancel("s", by=bad, reason=bad)
            await app.engine.drive("s")
            return output, [str(event.body) for event in [*await handle.events(), *await app.handle("s").events()]]

    output, bodies = run(main())
    assert output == "\\udcff bad"
    assert sum(body.count("udcff") for body in bodies) >= 8
    assert all(body.isascii() or body.encode() for body in bodies)


def test_nothing_steers_a_finished_run() -> None:
    async def main() -> list[str]:
        async with perdure(None, [echo]) as app:
            await app.run(echo, 1, id="r")
            before = outline(await app.handle("r").events())
            with pytest.raises(RunEnded):
                await app.cancel("r")
            with pytest.raises(RunEnded):
                await app.unpause("r")
            assert (await app.engine.drive("r")).status == "succeeded"
            assert outline(await app.handle("r").events()) == before
            return before

    assert run(main())[-1] == "run_succeeded"


# -- wrong use ----------------------------------------------------------------------------------------------------------
def test_an_app_that_is_not_open_says_how_to_open_it() -> None:
    app = perdure(None, [echo])
    with pytest.raises(InvalidInput, match="async with Perdure"):
        run(app.start(echo, 1))


def test_agents_are_agents_and_have_different_names() -> None:
    with pytest.raises(InvalidInput, match="decorate the coroutine function with @agent"):
        Perdure("sqlite://", [look])  # type: ignore[list-item]

    @agent(name="echo", version=echo.version)
    async def other(run: Run) -> None: ...

    with pytest.raises(InvalidInput, match="two agents are called echo"):
        Perdure("sqlite://", [echo, other])


def test_of_two_versions_of_an_agent_the_one_given_last_is_started() -> None:
    @agent(name="echo", version="new")
    async def newer(run: Run, what: int) -> str:
        return f"newer {what}"

    async def main() -> tuple[Any, str]:
        async with perdure(None, [echo, newer]) as app:
            handle = await app.start("echo", 1)
            return await handle.result(), (await handle.row()).version

    assert run(main()) == ("newer 1", "new")


def test_an_agent_is_called_inside_another_agent_and_nowhere_else() -> None:
    with pytest.raises(NotAllowedInAgent, match=r"app\.start\(echo"):
        asyncio.run(echo(1))


@pytest.mark.parametrize("wrong", [None, 7, look, "no agent's name"])
def test_what_cannot_be_started_is_named(wrong: Any) -> None:
    async def main() -> None:
        async with perdure(None, [echo]) as app:
            await app.start(wrong)

    with pytest.raises((InvalidInput, UnknownAgent)):
        run(main())


def test_driving_needs_agents() -> None:
    async def main() -> None:
        async with perdure(None, []) as app:
            await app.work()

    with pytest.raises(UnknownAgent, match="no agents to drive"):
        run(main())


def test_a_tool_outside_an_agent_just_runs() -> None:
    async def main() -> Any:
        return await look("plain")

    assert asyncio.run(main()) == "plain"
    assert asyncio.run(look.fn("plain")) == "plain"


def test_the_url_comes_from_the_environment_when_nobody_gives_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERDURE_URL", f"sqlite:///{tmp_path / 'env.db'}")

    async def main() -> Any:
        async with Perdure(agents=[echo]) as app:
            return await app.run(echo, 1)

    assert run(main()) == 1
    assert (tmp_path / "env.db").exists()


def test_the_source_of_an_agent_is_its_version_when_none_is_given() -> None:
    @agent
    async def one(run: Run) -> int:
        return 1

    @agent
    async def two(run: Run) -> int:
        return 2

    assert one.version != two.version
    assert len(one.version) == 12


def test_what_is_recorded_about_a_run_when_it_is_created() -> None:
    async def main() -> RunCreated:
        async with perdure(None, [echo]) as app:
            await app.start(echo, "x", id="r", tenant="acme", actor="user:17")
            body = (await app.handle("r").events())[0].body
            assert isinstance(body, RunCreated)
            return body

    created = run(main())
    assert (created.run_id, created.agent, created.version, created.tenant, created.actor) == ("r", "echo", "", "acme", "user:17")
    assert created.input.inline == b'{"what":"x"}'
