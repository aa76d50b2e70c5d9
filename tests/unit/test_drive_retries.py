"""Failed attempts: which are tried again, when, by which worker, and what the journal says about each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, outline, perdure, run

from perdure import Agent, Call, Fatal, NotSent, Perdure, Retry, RetryLater, Run, ToolFailed, agent, tool
from perdure.core.events import Event, RetryScheduled, RunReleased, ToolCallFailed


class Server500(Exception):
    status_code = 503


class Refused403(Exception):
    status_code = 403


class TooMany(Exception):
    status_code = 429
    headers: ClassVar[dict[str, str]] = {"retry-after": "40"}


FAILURES: dict[str, Callable[[], BaseException]] = {
    "timeout": lambda: TimeoutError("no answer"),
    "reset": lambda: ConnectionResetError("gone"),
    "server_error": lambda: Server500("busy"),
    "not_sent": lambda: NotSent("refused"),
    "rate_limited": lambda: RetryLater("later", after=40),
    "too_many": TooMany,
    "refused": lambda: Refused403("no"),
    "permission": lambda: PermissionError("no"),
    "fatal": lambda: Fatal("no"),
    "error": lambda: KeyError("no"),
    "exit": lambda: SystemExit(2),
    "interrupt": lambda: KeyboardInterrupt(),
    "generator_exit": lambda: GeneratorExit(),
}


def failing_agent(
    effect: Any, errors: list[BaseException | None], retry: Retry | None = None, timeout: float | None = None
) -> Agent[Any, Any]:
    """An agent with one call whose attempts raise these exceptions, one after the other; None means success."""

    @tool(effect=effect, retry=retry, timeout=timeout)
    async def flaky(call: Call) -> str:
        error = errors[call.attempt - 1]
        if error is not None:
            raise error
        return f"attempt {call.attempt}"

    @agent(name="caller", version="1")
    async def caller(run: Run) -> list[Any]:
        try:
            return ["ok", await flaky()]
        except ToolFailed as failed:
            return [failed.kind, failed.type, failed.attempts]

    return caller


async def to_the_end(code: Agent[Any, Any], path: Path | None = None, *, step_s: float = 100) -> tuple[Any, list[Event]]:
    """The run, its clock moved on whenever it waits; its output, or its row when it needs a person."""
    clock = ManualClock()
    async with perdure(path, [code], clock) as app:
        handle = await app.start(code, id="r")
        while (row := await app.engine.drive("r", wait=False)).status == "waiting":
            clock.advance(step_s)
        return (await handle.result() if row.status == "succeeded" else row), await handle.events()


@pytest.mark.parametrize(
    ("name", "again"),
    [
        *((name, True) for name in ("timeout", "reset", "server_error", "not_sent", "rate_limited", "too_many")),
        *((name, False) for name in ("refused", "permission", "fatal", "error", "exit", "interrupt", "generator_exit")),
    ],
)
@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_without_a_policy_what_may_pass_is_tried_again(name: str, again: bool, effect: Any) -> None:
    output, events = run(to_the_end(failing_agent(effect, [FAILURES[name](), None])))
    if again:
        assert output == ["ok", "attempt 2"]
        assert [line.split()[0] for line in outline(events)[1:6]] == ["initiated", "failing", "retry", "initiated", "completed"]
    else:
        assert output[2] == 1
        assert "retry 1/2" not in outline(events)


def test_after_the_last_attempt_the_agent_sees_the_last_failure() -> None:
    output, events = run(to_the_end(failing_agent("idempotent", [ConnectionResetError(f"{at}") for at in range(5)])))
    assert output == ["reset", "ConnectionResetError", 5]
    assert outline(events)[-2:] == ["failed 1/5 reset", "run_succeeded"]


def test_every_attempt_is_recorded_by_itself_and_caused_by_the_one_before() -> None:
    errors: list[BaseException | None] = [ConnectionResetError("one"), ConnectionResetError("two"), None]
    _, events = run(to_the_end(failing_agent("idempotent", errors)))
    lines = outline(events)
    assert lines == [
        "run_created",
        *("initiated flaky 1/1", "failing 1/1 reset", "retry 1/2"),
        *("initiated flaky 1/2", "failing 1/2 reset", "retry 1/3"),
        *("initiated flaky 1/3", "completed 1/3", "run_succeeded"),
    ]
    by_seq = {event.seq: event for event in events}
    for event in events:
        if event.call is not None and event.cause is not None:
            cause = by_seq[event.cause]
            assert cause.seq < event.seq
            assert event.type == "tool_call_initiated" or cause.call == 1, event
    messages = [event.body.failure.message for event in events if isinstance(event.body, ToolCallFailed)]
    assert messages == ["one", "two"], "the second failure is not dropped as a duplicate of the first"


def test_backoff_grows_and_is_the_time_that_the_run_is_parked_until() -> None:
    retry = Retry(attempts=4, base=10, factor=3, jitter=0)
    start = ManualClock().now()
    _, events = run(to_the_end(failing_agent("idempotent", [ConnectionResetError()] * 4, retry), step_s=200))
    planned = [(event.body.at - event.ts) / 1e6 for event in events if isinstance(event.body, RetryScheduled)]
    assert planned == [10, 30, 60]
    parked = [event.body.wake_at for event in events if isinstance(event.body, RunReleased)]
    assert parked == [start + 10_000_000, start + 230_000_000, start + 460_000_000]


def test_what_the_server_says_is_waited_for() -> None:
    async def main(error: BaseException) -> list[tuple[str, int | None]]:
        clock = ManualClock(1000)
        code = failing_agent("once", [error, None])
        async with perdure(None, [code], clock) as app:
            await app.start(code, id="r")
            seen: list[tuple[str, int | None]] = []
            for step_s in (39, 2, 1):
                row = await app.engine.drive("r", wait=False)
                seen.append((row.status, row.ready_at))
                clock.advance(step_s)
            return seen

    for error in (RetryLater(after=40), TooMany()):
        assert run(main(error)) == [("waiting", 1_040_000_000), ("waiting", 1_040_000_000), ("succeeded", None)]


@pytest.mark.parametrize("after", [-1, 0, 1e9, float("nan"), float("inf")])
def test_a_server_that_says_nonsense_is_waited_for_within_reason(after: float) -> None:
    code = failing_agent("once", [RetryLater(after=after), None])
    output, events = run(to_the_end(code, step_s=86_400 * 2))
    assert output == ["ok", "attempt 2"]
    (at,) = [event.body.at - event.ts for event in events if isinstance(event.body, RetryScheduled)]
    assert 0 <= at <= 86_400 * 1_000_000


def test_a_run_that_waits_for_a_retry_is_woken_by_another_app(tmp_path: Path) -> None:
    """Backoff is durable: the app that saw the failure is gone when the next attempt is due."""
    code, clock = failing_agent("once", [NotSent("refused"), None], Retry(base=30, jitter=0)), ManualClock()

    async def first() -> None:
        async with perdure(tmp_path / "db", [code], clock) as app:
            await app.start(code, id="r")
            row = await app.engine.drive("r", wait=False)
            assert (row.status, row.waiting_for, row.holder) == ("waiting", "retry of flaky (call 1)", None)

    async def second() -> tuple[str, str]:
        async with perdure(tmp_path / "db", [code], clock) as app:
            early = (await app.engine.drive("r", wait=False)).status
            clock.advance(31)
            return early, (await app.engine.drive("r", wait=False)).status

    run(first())
    assert run(second()) == ("waiting", "succeeded")


def test_a_queue_worker_wakes_it_up_by_itself(tmp_path: Path) -> None:
    """The run is not named: the worker sees that it is ready."""
    code = failing_agent("once", [NotSent("refused"), None], Retry(base=0.02, jitter=0))

    async def main() -> Any:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [code], settings=SETTINGS) as app:
            handle = await app.start(code)
            working = asyncio.create_task(app.work())
            while (await handle.row()).status != "succeeded":
                await asyncio.sleep(0.005)
            app.drain()
            await working
            return await handle.result()

    assert run(main()) == ["ok", "attempt 2"]


def test_on_decides_which_errors_are_tried_again() -> None:
    covered = failing_agent("idempotent", [KeyError("x"), None], Retry(on=(LookupError,)))
    assert run(to_the_end(covered))[0] == ["ok", "attempt 2"]
    not_covered = failing_agent("idempotent", [ConnectionResetError(), None], Retry(on=(LookupError,)))
    assert run(to_the_end(not_covered))[0] == ["reset", "ConnectionResetError", 1]
    by_name = failing_agent("idempotent", [KeyError("x"), None], Retry(on=("KeyError",)))
    assert run(to_the_end(by_name))[0] == ["ok", "attempt 2"]


def test_one_attempt_means_never_again() -> None:
    assert run(to_the_end(failing_agent("idempotent", [NotSent("refused"), None], Retry(attempts=1))))[0] == ["not_sent", "NotSent", 1]


@pytest.mark.parametrize(
    ("retry", "performed"), [(None, 1), (Retry(attempts=3, base=0), 1), (Retry(attempts=3, base=0, on=(KeyError,)), 3)]
)
def test_a_once_tool_that_raises_after_its_effect_is_not_performed_again_unless_its_policy_says_so(
    retry: Retry | None, performed: int
) -> None:
    ledger: list[int] = []

    @tool(effect="once", retry=retry)
    async def charge() -> str:
        ledger.append(1)
        return {"id": "ch_7"}["receipt"]  # the charge went through; only reading the answer goes wrong

    @agent(version="1")
    async def payer(run: Run) -> list[Any]:
        try:
            return [await charge()]
        except ToolFailed as failed:
            return [failed.type, failed.attempts]

    assert run(to_the_end(payer))[0] == ["KeyError", performed]
    assert len(ledger) == performed


def test_other_calls_go_on_while_one_waits_for_its_retry() -> None:
    order: list[str] = []

    @tool(effect="idempotent", retry=Retry(base=30, jitter=0))
    async def flaky(call: Call) -> None:
        order.append(f"flaky {call.attempt}")
        if call.attempt == 1:
            raise NotSent("refused")

    @tool(effect="once")
    async def steady(at: int) -> None:
        order.append(f"steady {at}")

    @agent(version="1")
    async def both(run: Run) -> None:
        async def chain() -> None:
            for at in range(3):
                await steady(at)

        await asyncio.gather(flaky(), chain())

    run(to_the_end(both))
    assert order == ["flaky 1", "steady 0", "steady 1", "steady 2", "flaky 2"]


@pytest.mark.parametrize("name", ["timeout", "reset", "server_error"])
def test_a_doubt_about_a_once_call_waits_for_a_person(name: str) -> None:
    row, events = run(to_the_end(failing_agent("once", [FAILURES[name](), None])))
    assert (row.status, row.ready_at) == ("needs_attention", None)
    assert "call 1 (flaky)" in row.error
    assert outline(events) == ["run_created", "initiated flaky 1/1", "in_doubt 1/1", "attention_needed"]


@pytest.mark.parametrize("name", ["timeout", "reset", "server_error"])
def test_a_doubt_about_a_keyed_call_is_settled_with_the_same_key(name: str) -> None:
    keys: list[str] = []

    @tool(effect="keyed")
    async def pay(call: Call) -> str:
        keys.append(call.key)
        if call.attempt < 3:
            error = FAILURES[name]()
            raise error
        return "paid"

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    output, events = run(to_the_end(payer))
    assert output == "paid"
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert "attention_needed" not in outline(events)


def test_a_keyed_call_in_doubt_after_its_last_attempt_waits_for_a_person() -> None:
    row, events = run(to_the_end(failing_agent("keyed", [TimeoutError()] * 2, Retry(attempts=2, base=0.001))))
    assert row.status == "needs_attention"
    assert outline(events)[-2:] == ["in_doubt 1/2", "attention_needed"]


def test_a_doubt_about_a_keyed_call_outlives_refused_attempts_and_is_never_told_as_a_failure() -> None:
    """The first attempt may have charged; that the service is down afterwards does not undo that."""
    errors = [TimeoutError("no answer"), ConnectionRefusedError("down"), ConnectionRefusedError("down")]
    code = failing_agent("keyed", list(errors), Retry(attempts=3, base=0))

    async def main() -> tuple[Any, list[str]]:
        clock = ManualClock()
        async with perdure(None, [code], clock) as app:
            handle = await app.start(code, id="r")
            row = await app.engine.drive("r", wait=False)
            assert (row.status, row.ready_at) == ("needs_attention", None)
            lines = outline(await handle.events())
            await app.resolve("r", 1, happened="charged by the first attempt")
            return await handle.result(), lines

    output, lines = run(main())
    assert output == ["ok", "charged by the first attempt"]
    assert [line for line in lines if line.startswith("in_doubt")] == ["in_doubt 1/1", "in_doubt 1/2", "in_doubt 1/3"]
    assert not [line for line in lines if line.startswith("fail")]


# -- time-outs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["read", "idempotent", "keyed", "once"])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_time_out_is_what_the_effect_class_says(effect: Any, is_async: bool) -> None:
    """`once`: in doubt, a person. The others: the next attempt, for `keyed` with the same key."""
    keys: list[str] = []
    retry = Retry(attempts=2, base=0.001)
    if is_async:

        @tool(effect=effect, timeout=0.02, retry=retry)
        async def slow(call: Call) -> str:
            keys.append(call.key)
            await asyncio.sleep(60 if call.attempt == 1 else 0)
            return "done"

    else:

        @tool(effect=effect, timeout=0.02, retry=retry)
        def slow(call: Call) -> str:
            keys.append(call.key)
            while call.attempt == 1 and not call.cancelled:
                pass
            if call.cancelled:
                raise TimeoutError("told to stop")
            return "done"

    @agent(version="1")
    async def caller(run: Run) -> str:
        return str(await slow())

    output, events = run(to_the_end(caller))
    if effect == "once":
        assert output.status == "needs_attention"
        assert outline(events)[1:] == ["initiated slow 1/1", "in_doubt 1/1", "attention_needed"]
        assert len(keys) == 1
    else:
        assert output == "done"
        assert ("in_doubt 1/1" if effect == "keyed" else "failing 1/1 timeout") in outline(events)
        assert len(keys) == 2
        assert len(set(keys)) == 1


def test_a_tool_that_swallows_its_cancellation_is_given_up_after_the_grace() -> None:
    ended = asyncio.Event()

    @tool(effect="idempotent", timeout=0.02, retry=Retry(attempts=1))
    async def stubborn() -> None:
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                pass

    @agent(version="1")
    async def caller(run: Run) -> str:
        try:
            await stubborn()
        except ToolFailed as failed:
            return f"{failed.kind}: {failed.message}"
        return ""

    async def main() -> str:
        async with perdure(None, [caller]) as app:
            said = str(await app.run(caller))
            ended.set()
            await asyncio.sleep(0)
            return said

    said = run(main())
    assert said.startswith("timeout: ")
    assert "may still be running" in said


def test_a_result_that_arrives_within_the_grace_still_counts() -> None:
    """The tool was told to stop, but it had already finished: its result counts."""

    @tool(effect="once", timeout=0.02)
    async def late() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
        return "it is done"

    @agent(version="1")
    async def caller(run: Run) -> str:
        return str(await late())

    output, events = run(to_the_end(caller))
    assert output == "it is done"
    assert outline(events)[1:3] == ["initiated late 1/1", "completed 1/1"]
