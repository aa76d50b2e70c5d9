"""One attempt: whatever the tool does, the attempt ends with an outcome."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from perdure.core.codec import MAX_BYTES
from perdure.core.failures import IN_DOUBT_KINDS
from perdure.core.outcomes import Abandoned, Performed, Raised, Returned, Unrecordable
from perdure.core.retry import Retry
from perdure.engine.local import attempts
from perdure.engine.local.attempts import Attempt, attempt, perform_in_transaction, reconcile
from perdure.engine.threads import Threads
from perdure.errors import Fatal, InvalidInput, NotEncodable, NotSent, RetryLater
from perdure.tool import Call, Outcome, Tool, tool

NOTHING = b"{}"
GRACE_S = 0.1


def a_call(**fields: Any) -> Call:
    known: dict[str, Any] = {"key": "k", "run_id": "r", "number": 4, "attempt": 1, "deadline": None, "tenant": "t", "actor": None}
    return Call(**known | fields)


def performed(declared: Tool[..., Any], args: bytes = NOTHING, call: Call | None = None) -> Performed:
    """What comes of an attempt that is started as the worker starts it, in a plain callback of the loop."""

    async def main() -> Performed:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Performed] = loop.create_future()
        loop.call_soon(attempt(declared, args, call or a_call(), threads=Threads(4), grace_s=GRACE_S).start, answered.set_result)
        return await answered

    return asyncio.run(main())


def in_every_way(work: Callable[[], Any], **options: Any) -> list[Tool[..., Any]]:
    """The same work as a sync tool, as an async tool that never waits, and as an async tool that waits first."""

    def sync() -> Any:
        return work()

    async def at_once() -> Any:
        return work()

    async def waiting() -> Any:
        await asyncio.sleep(0)
        return work()

    return [tool(**options)(sync), tool(**options)(at_once), tool(**options)(waiting)]


def throw(error: BaseException) -> Any:
    raise error


# --- it returns --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, "", False, None, [], {}, {"id": "re-1"}])
def test_what_a_tool_returns_is_its_result(value):
    for declared in in_every_way(lambda: value):
        assert performed(declared) == Returned(declared.encode_result(value))


def test_the_function_gets_typed_arguments_and_its_call():
    @tool
    async def charge(order: str, cents: int, told: Call) -> list[Any]:
        return [order, cents, told.key, told.number]

    assert performed(charge, b'{"cents":5,"order":"o"}') == Returned(b'["o",5,"k",4]')


def test_a_sync_tool_runs_in_another_thread_with_the_callers_context():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("from the caller")
    seen: list[Any] = []

    @tool
    def look() -> None:
        seen.extend((threading.get_ident(), variable.get()))

    performed(look)
    assert seen[0] != threading.get_ident()
    assert seen[1] == "from the caller"


def test_what_a_sync_tool_sets_in_its_context_stays_there_and_its_answer_is_told_in_the_callers():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    @tool
    def change() -> None:
        variable.set("by the tool")

    async def main() -> str:
        variable.set("by the caller")
        seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        attempt(change, NOTHING, a_call(), threads=Threads(1), grace_s=GRACE_S).start(lambda _: seen.set_result(variable.get()))
        return await seen

    assert asyncio.run(main()) == "by the caller"


@pytest.mark.parametrize("make", [object, lambda: {1: 2}, lambda: float("nan"), lambda: map(str, [1]), lambda: "x" * MAX_BYTES])
def test_a_result_that_cannot_be_recorded_has_happened_all_the_same(make):
    for declared in in_every_way(make):
        answer = performed(declared)
        assert isinstance(answer, Unrecordable)
        assert answer.failure.kind == "not_encodable"


def test_a_coroutine_as_result_is_closed_and_named():
    async def forgotten() -> None: ...

    for declared in in_every_way(lambda: forgotten()):
        answer = performed(declared)
        assert isinstance(answer, Unrecordable)
        assert "await forgotten" in answer.failure.message


def test_an_encoder_that_fails_does_not_make_the_call_look_failed():
    class Hostile(dict[str, int]):
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

        keys = items = __iter__

    for declared in in_every_way(Hostile):
        assert isinstance(performed(declared), Unrecordable)


# --- it raises ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "error"),
        (NotSent("x"), "not_sent"),
        (RetryLater(after=4), "rate_limited"),
        (Fatal("x"), "fatal"),
        (ConnectionResetError("x"), "reset"),
        (KeyboardInterrupt("x"), "error"),
        (SystemExit(3), "error"),
        (GeneratorExit("x"), "error"),
        (StopIteration("x"), "error"),
        (asyncio.CancelledError("x"), "cancelled"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_whatever_a_tool_raises_is_a_failure_of_its_call_alone(error, kind):
    for declared in in_every_way(lambda: throw(error)):
        answer = performed(declared)
        assert isinstance(answer, Raised)
        assert answer.failure.kind == kind


def test_a_failure_says_where_it_came_from():
    answer = performed(tool(lambda_free_failure))
    assert isinstance(answer, Raised)
    assert (answer.failure.type, answer.failure.message) == ("ValueError", "bad order")
    assert "lambda_free_failure" in str(answer.failure.traceback)


def lambda_free_failure() -> None:
    raise ValueError("bad order")


def test_recorded_arguments_that_do_not_fit_any_more_are_refused_before_anything_is_sent():
    ran: list[int] = []

    @tool
    async def charge(cents: int) -> None:
        ran.append(cents)

    answer = performed(charge, b'{"gone":1}')
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "refused"
    assert ran == []


# --- time-outs -------------------------------------------------------------------------------------------------------


def test_an_async_tool_is_cancelled_at_its_deadline_and_is_in_doubt():
    @tool(timeout=0.02)
    async def slow() -> None:
        await asyncio.sleep(60)

    answer = performed(slow)
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "timeout"
    assert "did not answer within 0.02 s" in answer.failure.message


def test_a_sync_tool_is_told_to_stop_at_its_deadline():
    @tool(timeout=0.02)
    def slow(call: Call) -> str:
        while not call.cancelled:
            time.sleep(0.001)
        raise RuntimeError("stopping as told")

    answer = performed(slow)
    assert isinstance(answer, Raised)
    assert (answer.failure.kind, answer.failure.message) == ("timeout", "stopping as told")


def test_a_result_within_the_grace_is_a_result():
    @tool(timeout=0.02)
    async def shielded() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "it had happened"
        return "never"

    @tool(timeout=0.02)
    def late() -> str:
        time.sleep(0.05)
        return "it had happened"

    assert performed(shielded) == performed(late) == Returned(b'"it had happened"')


def test_a_tool_that_knows_that_nothing_was_sent_is_believed_even_after_its_deadline():
    @tool(timeout=0.02)
    async def knows() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise NotSent("still in the queue") from None

    answer = performed(knows)
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "not_sent"


def test_a_tool_that_swallows_its_cancellation_is_given_up_after_the_grace(caplog):
    enough = asyncio.Event()

    @tool(timeout=0.02)
    async def stubborn() -> str:
        while not enough.is_set():
            try:
                await enough.wait()
            except asyncio.CancelledError:
                pass
        return "at last"

    async def main() -> tuple[Performed, float]:
        began = time.monotonic()
        answer = await attempt(stubborn, NOTHING, a_call(), threads=Threads(1), grace_s=0.05).run()
        took = time.monotonic() - began
        enough.set()
        async with asyncio.timeout(60):
            while "has ended after its worker stopped waiting" not in caplog.text:
                await asyncio.sleep(0.001)
        return answer, took

    with caplog.at_level(logging.WARNING, "perdure.worker"):
        answer, took = asyncio.run(main())
    assert isinstance(answer, Abandoned)
    assert answer.failure.kind == "timeout"
    assert "may still be running" in answer.failure.message
    assert took > 0.06
    assert "tool stubborn (run r, call 4, attempt 1) has ended after its worker stopped waiting; its outcome is dropped" in caplog.text


def test_a_sync_tool_that_never_returns_is_given_up_after_the_grace(caplog):
    never = threading.Event()

    @tool(timeout=0.02)
    def stuck() -> None:
        never.wait(30)

    with caplog.at_level(logging.WARNING, "perdure.worker"):
        answer = performed(stuck)
    never.set()
    assert isinstance(answer, Abandoned)
    assert answer.failure.kind == "timeout"


def test_the_deadline_of_a_tool_in_time_changes_nothing():
    for declared in in_every_way(lambda: 1, timeout=30):
        assert performed(declared) == Returned(b"1")


# --- stops -----------------------------------------------------------------------------------------------------------


def started(
    declared: Tool[..., Any], then: Callable[[Attempt, asyncio.Task[Any]], Coroutine[Any, Any, None]], grace_s: float = GRACE_S
) -> Any:
    """What comes of an attempt to which `then` is done while it runs."""

    async def main() -> Any:
        running = attempt(declared, NOTHING, a_call(), threads=Threads(1), grace_s=grace_s)
        task = asyncio.create_task(running.run())
        await asyncio.sleep(0.02)
        await then(running, task)
        return await task

    return asyncio.run(main())


async def cancel_attempt(running: Attempt, task: asyncio.Task[Any]) -> None:
    running.cancel()


async def cancel_task(running: Attempt, task: asyncio.Task[Any]) -> None:
    task.cancel()


async def cancel_task_again_and_again(running: Attempt, task: asyncio.Task[Any]) -> None:
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("then", [cancel_attempt, cancel_task, cancel_task_again_and_again])
def test_a_cancelled_attempt_still_answers(then):
    @tool
    async def slow() -> None:
        await asyncio.sleep(60)

    answer = started(slow, then)
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "cancelled"
    assert answer.failure.kind in IN_DOUBT_KINDS


@pytest.mark.parametrize("then", [cancel_attempt, cancel_task, cancel_task_again_and_again])
def test_a_cancelled_attempt_that_does_not_stop_is_given_up(then):
    begun, never = threading.Event(), threading.Event()

    @tool(timeout=30)
    def stuck() -> None:
        begun.set()
        never.wait(30)

    async def then_once_begun(running: Attempt, task: asyncio.Task[Any]) -> None:
        assert await asyncio.to_thread(begun.wait, 20)
        await then(running, task)

    answer = started(stuck, then_once_begun)
    never.set()
    assert isinstance(answer, Abandoned)
    assert answer.failure.kind == "cancelled"


def test_what_a_cancelled_tool_still_returns_counts():
    @tool
    def finishing(call: Call) -> str:
        while not call.cancelled:
            time.sleep(0.001)
        return "done anyway"

    assert started(finishing, cancel_attempt) == Returned(b'"done anyway"')


def test_an_attempt_that_is_cancelled_before_it_began_sent_nothing():
    ran: list[int] = []

    @tool
    async def charge() -> None:
        ran.append(1)

    async def main() -> Any:
        early = attempt(charge, NOTHING, a_call(), threads=Threads(1), grace_s=GRACE_S)
        early.cancel()
        return await early.run()

    answer = asyncio.run(main())
    assert isinstance(answer, Raised)
    assert answer.failure.kind == "not_sent"
    assert ran == []


def test_what_a_sync_tool_waits_for_a_thread_does_not_count_against_its_time_out():
    ran: list[int] = []
    release = threading.Event()

    @tool
    def holder() -> None:
        release.wait(30)

    @tool(timeout=0.02)
    def queued() -> None:
        ran.append(1)

    async def main() -> Any:
        threads = Threads(1)
        holding = asyncio.create_task(attempt(holder, NOTHING, a_call(), threads=threads, grace_s=GRACE_S).run())
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(attempt(queued, NOTHING, a_call(), threads=threads, grace_s=GRACE_S).run())
        await asyncio.sleep(0.1)
        assert ran == []
        release.set()
        await holding
        return await waiting

    assert isinstance(asyncio.run(main()), Returned)
    assert ran == [1]


# --- reconcile ---------------------------------------------------------------------------------------------------------------


def reconciled(hook: Callable[..., Any], timeout: float = 0.05) -> Outcome:
    @tool(effect="keyed", timeout=timeout)
    async def charge(order: str, call: Call) -> None: ...

    charge.reconcile(hook)
    return asyncio.run(reconcile(charge, b'{"order":"o-7"}', a_call(), threads=Threads(1), grace_s=GRACE_S))


def test_a_reconcile_hook_answers():
    async def asynchronous(order: str, told: Call) -> Outcome:
        return Outcome.happened({"order": order, "key": told.key})

    def sync(order: str) -> Outcome:
        return Outcome.not_happened()

    assert reconciled(asynchronous) == Outcome.happened({"order": "o-7", "key": "k"})
    assert reconciled(sync) == Outcome.not_happened()


def test_a_hook_that_raises_hangs_or_says_something_else_knows_nothing():
    def raises(order: str) -> Outcome:
        raise SystemExit("service down")

    async def hangs(order: str) -> Outcome:
        await asyncio.sleep(60)
        return Outcome.not_happened()

    def stuck(order: str) -> Outcome:
        time.sleep(0.3)
        return Outcome.not_happened()

    async def other(order: str) -> Any:
        return {"happened": True}

    def forgotten(order: str) -> Any:
        return hangs(order)

    def invented(order: str) -> Any:
        return Outcome("probably")  # type: ignore[arg-type]

    why = {hook.__name__: reconciled(hook) for hook in (raises, hangs, stuck, other, forgotten, invented)}
    assert {outcome.kind for outcome in why.values()} == {"unknown"}
    assert "service down" in str(why["raises"].why)
    assert "did not answer within 0.05 s" in str(why["hangs"].why)
    assert "may still be running" in str(why["stuck"].why)
    assert "returned a dict; it must return Outcome.happened" in str(why["other"].why)
    assert "returned a coroutine" in str(why["forgotten"].why)


# --- transactions ------------------------------------------------------------------------------------------------------------


class Connection:
    def execute(self, statement: str) -> str:
        return statement


def test_a_transaction_tool_runs_right_here_with_its_connection():
    @tool(effect="transaction")
    def write(n: int, call: Call) -> Any:
        return call.connection.execute(f"insert {n}")

    @tool(effect="transaction")
    async def write_async(n: int, call: Call) -> Any:
        return call.connection.execute(f"insert {n}")

    for declared in (write, write_async):
        assert perform_in_transaction(declared, b'{"n":3}', a_call(connection=Connection())) == b'"insert 3"'


def test_a_transaction_tool_that_waits_for_anything_else_is_refused():
    cleaned: list[int] = []

    @tool(effect="transaction")
    async def waits() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            cleaned.append(1)

    async def inside_a_loop() -> None:
        perform_in_transaction(waits, NOTHING, a_call())

    with pytest.raises(InvalidInput, match=r"tool waits: a transaction tool may only use call.connection"):
        asyncio.run(inside_a_loop())
    assert cleaned == [1]


@pytest.mark.parametrize(
    ("error", "seen"), [(ValueError("x"), ValueError), (KeyboardInterrupt(), KeyboardInterrupt), (StopIteration(), RuntimeError)]
)
def test_what_a_transaction_tool_raises_goes_up_so_that_everything_is_rolled_back(error, seen):
    @tool(effect="transaction")
    def write() -> None:
        raise error

    @tool(effect="transaction")
    async def write_async() -> None:
        raise error

    for declared in (write, write_async):
        with pytest.raises(seen):
            perform_in_transaction(declared, NOTHING, a_call())


def test_a_transaction_result_that_cannot_be_recorded_rolls_back():
    @tool(effect="transaction")
    def write() -> Any:
        return object()

    with pytest.raises(NotEncodable):
        perform_in_transaction(write, NOTHING, a_call())


def test_a_hook_has_a_minute_where_its_tool_has_no_deadline():
    assert attempts.RECONCILE_TIMEOUT_S == 60


# -- a tool that goes silent ----------------------------------------------------------------------------------------------
SILENT_S = 0.2


def quick_beats(call: Call) -> None:
    """Heartbeats for longer than the heartbeat timeout."""
    until_s = time.monotonic() + 3 * SILENT_S
    while time.monotonic() < until_s and not call.cancelled:
        call.heartbeat()
        time.sleep(SILENT_S / 10)


def test_an_async_attempt_that_goes_silent_is_ended_like_a_time_out() -> None:
    @tool(heartbeat_timeout=SILENT_S)
    async def silent(call: Call) -> None:
        call.heartbeat("alive")
        await asyncio.sleep(60)

    call = a_call()
    answer = performed(silent, call=call)
    assert isinstance(answer, Raised)
    assert (answer.failure.kind, answer.failure.type) == ("timeout", "HeartbeatTimeout")
    assert answer.failure.message.startswith("no heartbeat for 0.2 s: tool silent (run r, call 4, attempt 1)")
    assert Retry(on=(TimeoutError,)).covers(answer.failure)
    assert call.progress == "alive"


def test_an_attempt_that_never_sends_a_heartbeat_is_silent_from_its_start_on() -> None:
    @tool(heartbeat_timeout=SILENT_S)
    async def silent() -> None:
        await asyncio.sleep(60)

    begun_s = time.monotonic()
    answer = performed(silent)
    assert isinstance(answer, Raised)
    assert "no heartbeat" in answer.failure.message
    assert time.monotonic() - begun_s >= SILENT_S


def test_a_sync_attempt_that_goes_silent_is_abandoned_after_the_grace_period() -> None:
    ends = threading.Event()

    @tool(heartbeat_timeout=SILENT_S)
    def silent(call: Call) -> None:
        ends.wait(60)

    answer = performed(silent)
    ends.set()
    assert isinstance(answer, Abandoned)
    assert answer.failure.kind == "timeout"
    assert answer.failure.message.startswith("no heartbeat for 0.2 s")


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_heartbeats_keep_an_attempt_alive_longer_than_the_heartbeat_timeout(sync: bool) -> None:
    async def beats(call: Call) -> str:
        for _ in range(15):
            call.heartbeat()
            await asyncio.sleep(SILENT_S / 5)
        return "done"

    def beats_sync(call: Call) -> str:
        quick_beats(call)
        return "done"

    # Long enough that a busy machine does not make a heartbeat late.
    made: Tool[..., Any] = tool(heartbeat_timeout=5 * SILENT_S)(beats_sync if sync else beats)
    assert performed(made) == Returned(b'"done"')


def test_a_silent_tool_that_raises_when_it_is_stopped_has_timed_out() -> None:
    @tool(heartbeat_timeout=SILENT_S)
    async def silent() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("half done") from None

    answer = performed(silent)
    assert isinstance(answer, Raised)
    assert (answer.failure.kind, answer.failure.message) == ("timeout", "half done")


def test_no_timer_is_left_of_an_attempt_that_answered_at_once() -> None:
    @tool(heartbeat_timeout=60)
    async def quick() -> int:
        return 1

    async def main() -> None:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Performed] = loop.create_future()
        one = attempt(quick, NOTHING, a_call(), threads=Threads(4), grace_s=GRACE_S)
        loop.call_soon(one.start, answered.set_result)
        assert await answered == Returned(b"1")
        assert one._beats is None

    asyncio.run(main())
