"""Signals: in order per topic, kept until the agent receives them, once per key, and never lost between two waits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.garbage import own_garbage
from tests.unit.approval_tools import check_replay, driven
from tests.unit.drive_tools import SETTINGS, ManualClock, local, outline, perdure, run, until, worker_of

from perdure import Agent, InvalidInput, NotFound, Perdure, Run, RunEnded, agent, tool
from perdure.core.events import SignalReceived

WAYS = ["held", "parked", "restarted"]


class Listening:
    """An agent that receives signals, with a second call that keeps its run held for as long as the test wants."""

    def __init__(self, listen: Callable[[Run], Awaitable[Any]]) -> None:
        self.heard: list[Any] = []
        self.begun = asyncio.Event()
        self.release = asyncio.Event()

        @tool(effect="read")
        async def companion() -> None:
            self.begun.set()
            await self.release.wait()

        @agent(version="1")
        async def listener(run: Run) -> Any:
            other = asyncio.ensure_future(companion())
            heard = await listen(run)
            self.heard.append(heard)
            await other
            return heard

        self.agent: Agent[Any, Any] = listener


async def spoken_to(where: Path, listening: Listening, way: str, speak: Callable[[Perdure], Awaitable[Any]]) -> tuple[Any, list[str]]:
    """Have the agent listen, speak to it, and let it go on: its result and its journal."""
    clock = ManualClock()
    async with perdure(where, [listening.agent], clock) as app:
        await app.start(listening.agent, id="r")
        if way == "held":
            driving = asyncio.create_task(app.engine.drive("r"))
            await listening.begun.wait()
            await speak(app)
            await until(lambda: listening.heard)
            listening.release.set()
            await driving
        else:
            listening.release.set()
            row = await driven(app)
            assert (row.status, row.ready_at) == ("waiting", None)
            assert (row.waiting_for or "").startswith("signal")
            if way == "parked":
                await speak(app)
                await driven(app)
    async with perdure(where, [listening.agent], clock) as app:
        if way == "restarted":
            await speak(app)
            await driven(app)
        check_replay(app, listening.agent)
        return await app.handle("r").result(), outline(await app.handle("r").events())


# -- order --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
def test_signals_of_a_topic_arrive_in_the_order_in_which_they_were_sent(tmp_path: Path, way: str) -> None:
    async def listen(run: Run) -> list[Any]:
        return [await run.receive("chat") for _ in range(20)]

    async def speak(app: Perdure) -> None:
        for n in range(20):
            await app.signal("r", "chat", n)

    assert run(spoken_to(tmp_path / "db", Listening(listen), way, speak))[0] == list(range(20))


@pytest.mark.parametrize("way", WAYS)
def test_topics_do_not_mix_and_an_order_between_them_is_the_agents_own(tmp_path: Path, way: str) -> None:
    async def listen(run: Run) -> list[Any]:
        return [[await run.receive("b"), await run.receive("b")], [await run.receive("a"), await run.receive("a")]]

    async def speak(app: Perdure) -> None:
        for topic, payload in (("a", 1), ("b", 2), ("a", 3), ("b", 4)):
            await app.signal("r", topic, payload)

    assert run(spoken_to(tmp_path / "db", Listening(listen), way, speak))[0] == [[2, 4], [1, 3]]


def test_what_was_sent_before_anybody_drove_the_run_is_there_when_it_asks(tmp_path: Path) -> None:
    @agent(version="1")
    async def late(run: Run) -> list[Any]:
        await asyncio.sleep(60)
        return [await run.receive("chat"), await run.receive("chat", timeout=0), await run.receive("other", timeout=5)]

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [late], clock) as app:
            await app.start(late, id="r")
            await app.signal("r", "chat", "before the first claim")
            assert (await driven(app)).status == "waiting"
            await app.signal("r", "chat", "while it sleeps")
            row = await driven(app)
            assert (row.status, row.waiting_for, row.ready_at) == ("waiting", "timer", 1_700_000_060_000_000), "it wakes as late as before"
            await app.signal("r", "other", "also")
        clock.advance(60)
        async with perdure(tmp_path / "db", [late], clock) as app:
            await driven(app)
            check_replay(app, late)
            return await app.handle("r").result()

    assert run(main()) == ["before the first claim", "while it sleeps", "also"]


@pytest.mark.parametrize("way", WAYS)
def test_two_tasks_that_receive_take_turns_and_none_gets_the_same(tmp_path: Path, way: str) -> None:
    async def listen(run: Run) -> list[Any]:
        async def two(name: str) -> list[Any]:
            return [name, await run.receive("chat"), await run.receive("chat")]

        return list(await asyncio.gather(two("first"), two("second")))

    async def speak(app: Perdure) -> None:
        for n in range(4):
            await app.signal("r", "chat", n)

    result = run(spoken_to(tmp_path / "db", Listening(listen), way, speak))[0]
    assert sorted(n for _, *heard in result for n in heard) == [0, 1, 2, 3]
    assert all(heard == sorted(heard) for _, *heard in result)
    assert result[0][1] == 0, "whoever has waited longest is first"


@pytest.mark.parametrize("payload", [None, 0, "", False, [], {}, -0.0, "\x00\ud800", 2**70, {"a": [1, {"b": None}]}])
def test_a_payload_arrives_as_it_was_sent(payload: Any) -> None:
    async def listen(run: Run) -> Any:
        return [await run.receive("chat")]

    listening = Listening(listen)
    listening.release.set()

    async def main() -> Any:
        async with perdure(None, [listening.agent]) as app:
            handle = await app.start(listening.agent, id="r")
            await app.signal("r", "chat", payload)
            return await handle.result()

    assert repr(run(main())) == repr([payload])


# -- time ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("timeout", [0, -1, -1e300, timedelta(0), timedelta(days=-1)])
def test_no_time_at_all_takes_what_is_there_and_waits_for_nothing(timeout: Any) -> None:
    @agent(version="1")
    async def poller(run: Run) -> list[Any]:
        heard = []
        for _ in range(3):
            try:
                heard.append(await run.receive("chat", timeout=timeout))
            except TimeoutError:
                heard.append("nothing")
        return heard

    async def main() -> Any:
        async with perdure(None, [poller]) as app:
            handle = await app.start(poller, id="r")
            await app.signal("r", "chat", 1)
            await app.signal("r", "chat", 2)
            return await handle.result(timeout=60)

    assert run(main()) == [1, 2, "nothing"]


@pytest.mark.parametrize("timeout", [math.nan, math.inf, -math.inf, "5", True, object()])
def test_a_timeout_that_is_no_time_is_refused(timeout: Any) -> None:
    @agent(version="1")
    async def listener(run: Run) -> str:
        try:
            await run.receive("chat", timeout=timeout)
        except InvalidInput as error:
            return str(error)
        return "?"

    async def main() -> Any:
        async with perdure(None, [listener]) as app:
            return await (await app.start(listener)).result(timeout=60)

    assert "seconds or a timedelta" in run(main())


@pytest.mark.parametrize("timeout", [1e12, 1e300, timedelta.max])
def test_a_timeout_beyond_the_year_9999_is_refused_with_the_way_out(timeout: Any) -> None:
    @agent(version="1")
    async def listener(run: Run) -> str:
        try:
            await run.receive("chat", timeout=timeout)
        except InvalidInput as error:
            return str(error)
        return "?"

    async def main() -> Any:
        async with perdure(None, [listener]) as app:
            return await (await app.start(listener)).result(timeout=60)

    assert "beyond the year 9999" in run(main())


@pytest.mark.parametrize("timeout", [1e9, timedelta(days=365 * 7000)])
def test_a_huge_timeout_waits_and_still_hears(timeout: Any) -> None:
    @agent(version="1")
    async def listener(run: Run) -> Any:
        return await run.receive("chat", timeout=timeout)

    async def main() -> Any:
        async with perdure(None, [listener]) as app:
            handle = await app.start(listener, id="r")
            row = await driven(app)
            assert row.status == "waiting", row.error
            await app.signal("r", "chat", "here")
            return await handle.result(timeout=60)

    assert run(main()) == "here"


@pytest.mark.parametrize("restart", [False, True])
def test_a_signal_and_the_end_of_the_wait_in_the_same_instant_do_not_lose_the_signal(tmp_path: Path, restart: bool) -> None:
    """Which of the two wins is the journal's to say; the signal is heard either way."""

    @agent(version="1")
    async def listener(run: Run) -> list[Any]:
        heard: list[Any] = []
        for _ in range(2):
            try:
                heard.append(await run.receive("chat", timeout=60))
            except TimeoutError:
                heard.append("timed out")
        return heard

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [listener], clock) as app:
            await app.start(listener, id="r")
            await driven(app)
            clock.advance(60)
            await app.signal("r", "chat", "just in time")
            if not restart:
                await driven(app)
        async with perdure(tmp_path / "db", [listener], clock) as app:
            await driven(app)
            clock.advance(60)
            await driven(app)
            check_replay(app, listener)
            return await app.handle("r").result()

    assert run(main()) == ["just in time", "timed out"], "it was sent before anybody had noticed the time"


@pytest.mark.parametrize("restart", [False, True])
def test_a_receiver_that_gave_up_takes_no_signal_from_the_next_one(tmp_path: Path, restart: bool) -> None:
    @agent(version="1")
    async def fickle(run: Run) -> list[Any]:
        first, second = asyncio.create_task(run.receive("chat")), asyncio.create_task(run.receive("chat"))
        await run.receive("go")
        first.cancel()
        return [await second, first.cancelled(), await run.receive("chat")]

    async def main() -> Any:
        async with perdure(tmp_path / "db", [fickle]) as app:
            await app.start(fickle, id="r")
            await driven(app)
            await app.signal("r", "go")
            if not restart:
                await driven(app)
        async with perdure(tmp_path / "db", [fickle]) as app:
            await app.signal("r", "chat", 1)
            await driven(app)
            await app.signal("r", "chat", 2)
            await driven(app)
            check_replay(app, fickle)
            return await app.handle("r").result()

    assert run(main()) == [1, True, 2]


def test_a_topic_that_nobody_listens_to_any_more_is_not_waited_for() -> None:
    @agent(version="1")
    async def listener(run: Run, then: str) -> str:
        try:
            await run.receive("chat", timeout=0)
        except TimeoutError:
            pass
        await (asyncio.sleep(60) if then == "sleep" else asyncio.Event().wait())
        return "?"

    async def main() -> list[tuple[str, str | None]]:
        async with perdure(None, [listener]) as app:
            for then in ("sleep", "hang"):
                await app.start(listener, then, id=then)
            return [((row := await driven(app, run_id)).status, row.waiting_for) for run_id in ("sleep", "hang")]

    assert run(main()) == [("waiting", "timer"), ("needs_attention", "a person: stuck")]


# -- once ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
def test_the_same_key_counts_once_per_topic_whoever_holds_the_run(tmp_path: Path, way: str) -> None:
    async def listen(run: Run) -> list[Any]:
        return [await run.receive("chat"), await run.receive("other"), await run.receive("chat")]

    async def speak(app: Perdure) -> None:
        for payload in ("first", "again", "and again"):
            await app.signal("r", "chat", payload, key="k1")
        await app.signal("r", "other", "another topic", key="k1")
        await app.signal("r", "chat", "last", key="k2")

    result, lines = run(spoken_to(tmp_path / "db", Listening(listen), way, speak))
    assert result == ["first", "another topic", "last"]
    assert lines.count("signal_received") == 3


def test_a_key_that_came_through_the_inbox_is_remembered_when_the_run_is_parked(tmp_path: Path) -> None:
    async def listen(run: Run) -> list[Any]:
        first = await run.receive("chat")
        try:
            return [first, await run.receive("chat", timeout=60)]
        except TimeoutError:
            return [first, "nothing"]

    listening = Listening(listen)

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [listening.agent], clock) as app:
            await app.start(listening.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await listening.begun.wait()
            await app.signal("r", "chat", "held", key="k")
            listening.release.set()
            await driving
            await app.signal("r", "chat", "parked", key="k")
            clock.advance(60)
            await driven(app)
            return await app.handle("r").result()

    assert run(main()) == ["held", "nothing"]


def test_signals_that_a_dead_worker_has_left_unread_come_before_later_ones(tmp_path: Path) -> None:
    async def listen(run: Run) -> list[Any]:
        return [await run.receive("chat") for _ in range(4)]

    listening = Listening(listen)

    async def main() -> Any:
        settings = SETTINGS.__class__(poll_s=60, park_after_s=0)
        async with perdure(tmp_path / "db", [listening.agent], settings=settings) as app:
            await app.start(listening.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await listening.begun.wait()
            await app.signal("r", "chat", 1)
            await app.signal("r", "chat", 2)
            app.abort()
            await driving
            unread = local(app)._worker is not None and app.store.inbox(worker_of(app).id)
            assert unread, "or this tests nothing"
        listening.release.set()
        async with perdure(tmp_path / "db", [listening.agent]) as app:
            await app.signal("r", "chat", 3)
            await driven(app)
            await app.signal("r", "chat", 4)
            await driven(app)
            return await app.handle("r").result()

    assert run(main()) == [1, 2, 3, 4]


# -- refused ------------------------------------------------------------------------------------------------------------
def test_after_the_end_a_signal_is_refused() -> None:
    """T27."""

    @agent(version="1")
    async def quick(run: Run) -> int:
        return 1

    async def main() -> int:
        async with perdure(None, [quick]) as app:
            await app.run(quick, id="r")
            seq = (await app.handle("r").row()).seq
            with pytest.raises(RunEnded, match="accepts no more post"):
                await app.signal("r", "chat", 1)
            with pytest.raises(NotFound):
                await app.signal("nobody", "chat", 1)
            with pytest.raises(NotFound):
                await app.signal("r", "chat", 1, tenant="another")
            return (await app.handle("r").row()).seq - seq

    assert run(main()) == 0


@pytest.mark.parametrize(
    "topic", ["", "a b", "../x", "a/b", "x" * 201, "-lead", "\n", "tab\t", "é", "'; DROP TABLE perdure_runs; --", 5, None]
)
def test_a_topic_that_is_no_name_is_refused_on_both_sides(topic: Any) -> None:
    @agent(version="1")
    async def listener(run: Run) -> str:
        try:
            await run.receive(topic)
        except InvalidInput:
            return "refused"
        return "?"

    async def main() -> Any:
        async with perdure(None, [listener]) as app:
            handle = await app.start(listener, id="r")
            with pytest.raises(InvalidInput):
                await app.signal("r", topic, 1)
            return await handle.result(timeout=60)

    assert run(main()) == "refused"


@pytest.mark.parametrize("payload", ["x" * (2 << 20), math.nan, object(), {1, 2}, b"x"])
def test_a_payload_that_is_too_large_or_no_json_is_refused_and_nothing_is_written(payload: Any) -> None:
    async def listen(run: Run) -> Any:
        return await run.receive("chat")

    listening = Listening(listen)
    listening.release.set()

    async def main() -> Any:
        async with perdure(None, [listening.agent]) as app:
            handle = await app.start(listening.agent, id="r")
            with pytest.raises((InvalidInput, ValueError, TypeError)):
                await app.signal("r", "chat", payload, key="k")
            await app.signal("r", "chat", "x" * 1_000_000, key="k")
            return len(await handle.result())

    assert run(main()) == 1_000_000, "the key is not used up by what was refused"


# -- runs that stand still ----------------------------------------------------------------------------------------------
def test_a_run_that_needs_attention_keeps_its_signals_and_stays_where_it_is() -> None:
    """A signal wakes neither a poisoned run nor a run that does not replay."""
    broken = [True]

    @tool(effect="read")
    async def step(n: int) -> int:
        return n

    @agent(version="1")
    async def listener(run: Run) -> Any:
        await step(1 if broken[0] else 2)
        return await run.receive("chat")

    async def main() -> Any:
        async with perdure(None, [listener]) as app:
            handle = await app.start(listener, id="r")
            await driven(app)
            broken[0] = False
            await app.signal("r", "chat", "first")
            assert (await driven(app)).status == "needs_attention", "it has diverged"
            await app.signal("r", "chat", "second")
            row = await handle.row()
            assert (row.status, row.ready_at) == ("needs_attention", None)
            broken[0] = True
            await app.unpause("r")
            return await handle.result(timeout=60)

    assert run(main()) == "first"


def test_a_run_with_a_call_in_doubt_hears_signals_and_asks_again_about_the_doubt() -> None:
    @tool(effect="once")
    async def pay() -> str:
        raise ConnectionResetError("gone")

    @agent(version="1")
    async def payer(run: Run) -> list[Any]:
        paying = asyncio.create_task(pay())
        heard = await run.receive("chat")
        return [heard, await paying]

    async def main() -> Any:
        async with perdure(None, [payer]) as app:
            handle = await app.start(payer, id="r")
            assert (await driven(app)).status == "needs_attention"
            await app.signal("r", "chat", "hello")
            assert (await driven(app)).status == "needs_attention"
            await app.resolve("r", 1, happened="paid")
            return await handle.result(timeout=60)

    assert run(main()) == ["hello", "paid"]


# -- many ---------------------------------------------------------------------------------------------------------------
async def signalled(many: int, held: bool) -> float:
    """How much work it is to send so many to one run, which adds them up."""

    async def listen(run: Run) -> int:
        return sum([await run.receive("chat") for _ in range(many)])

    listening = Listening(listen)
    if not held:
        listening.release.set()
    async with perdure(None, [listening.agent], settings=SETTINGS.__class__(poll_s=0.05, park_after_s=0)) as app:
        handle = await app.start(listening.agent, id="r")
        driving = asyncio.create_task(app.engine.drive("r", wait=False)) if held else None
        if held:
            await listening.begun.wait()
        begun = time.process_time()
        for n in range(many):
            await app.signal("r", "chat", n)
            if n % 100 == 0:
                await asyncio.sleep(0)
        if driving is not None:
            await until(lambda: listening.heard, 200)
            listening.release.set()
            await driving
        assert await handle.result(timeout=200) == many * (many - 1) // 2
        return time.process_time() - begun


@pytest.mark.full
@pytest.mark.parametrize("held", [False, True])
def test_ten_thousand_signals_to_one_run_cost_ten_times_as_much_as_a_thousand(held: bool) -> None:
    async def main() -> list[float]:
        return [await signalled(1_000, held), await signalled(10_000, held)]

    with own_garbage():
        small, large = run(main(), 250)  # ten seconds of work, on a machine that may be busy
    print(f"1,000 signals: {small:.2f} s; 10,000: {large:.2f} s")
    assert large < 40 * small, "quadratic would be a hundred times as much"


# -- steering -----------------------------------------------------------------------------------------------------------
def test_a_loop_of_calls_is_steered_by_what_its_user_says_meanwhile(tmp_path: Path) -> None:
    """Between two calls the agent looks whether its user has said anything; a crash in the middle changes nothing about that."""
    asked: list[list[str]] = []
    crash_at = 2

    @tool(effect="read")
    async def model(messages: list[str]) -> str:
        asked.append(messages)
        return "DONE" if "stop" in messages else f"step {len(messages)}"

    @agent(version="1")
    async def react(run: Run, goal: str) -> list[str]:
        messages = [goal]
        while True:
            try:
                while True:
                    messages.append(await run.receive("user", timeout=0))
            except TimeoutError:
                pass
            answer = await model(messages)
            messages.append(answer)
            if answer == "DONE":
                return messages
            await asyncio.sleep(10)

    async def main() -> Any:
        clock = ManualClock()
        script = {1: ["look left"], 3: ["look right", "and up"], 4: ["stop"]}
        for step in range(6):
            async with perdure(tmp_path / "db", [react], clock) as app:
                if step == 0:
                    await app.start(react, "find it", id="r")
                for message in script.get(step, []):
                    await app.signal("r", "user", message, by="user:17")
                if step == crash_at:
                    app.abort()
                row = await driven(app)
                clock.advance(10)
                if row.status == "succeeded":
                    check_replay(app, react)
                    return await app.handle("r").result(), await app.handle("r").events()
        raise AssertionError("it does not end")

    messages, events = run(main())
    said = [message for message in messages if not message.startswith("step")]
    assert said == ["find it", "look left", "look right", "and up", "stop", "DONE"]
    assert {event.body.by for event in events if isinstance(event.body, SignalReceived)} == {"user:17"}
