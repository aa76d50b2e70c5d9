"""Mistakes in published designs of this kind (GUARANTEES 6): one test for each, named after it, on both stores.

T16 to T20, T25 and T28 to T30 are about approvals, notifications and models, and are tested there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, forget_leases, outline, run, status_of, until
from tests.unit.postgres_tools import cleared

from perdure import (
    Agent,
    Call,
    Conflict,
    InvalidInput,
    NotSent,
    Outcome,
    Perdure,
    ResultNotEncodable,
    ResultTimeout,
    Retry,
    Run,
    RunEnded,
    Settings,
    ToolFailed,
    agent,
    tool,
)
from perdure.core import codec
from perdure.core.events import Event, RunClaimed, ToolCallFailed, ToolCallInitiated
from perdure.core.identity import CallKeys
from perdure.engine.clock import Clock
from perdure.engine.local import leases
from perdure.engine.local.leases import Renewer, Watchdog
from perdure.errors import StoreUnavailable
from perdure.store.api import Store
from perdure.store.open import open_store


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new journal."""
    # Asked for only here: a test on SQLite starts no server.
    return cleared(request.getfixturevalue("postgres")) if request.param == "postgres" else f"sqlite:///{tmp_path / 'db'}"


def perdure(where: str, agents: Iterable[Agent[Any, Any]], clock: Clock | None = None, settings: Settings = SETTINGS) -> Perdure:
    return Perdure(where, agents, settings=settings, clock=clock or ManualClock())


# Whoever beats every few seconds is silent to one that is used to more.
IMPATIENT = msgspec.structs.replace(SETTINGS, lease_s=1.0)  # a busy machine delays no heartbeat of its own for so long


def intents(events: Sequence[Event]) -> list[ToolCallInitiated]:
    return [event.body for event in events if isinstance(event.body, ToolCallInitiated)]


async def crash(app: Perdure, run_id: str, when: Any) -> None:
    """Stop driving the run as soon as the condition holds, as a crash would."""
    driving = asyncio.create_task(app.engine.drive(run_id, wait=False))
    await until(when)
    app.abort()
    await driving


def test_T1_the_second_failure_and_the_retrys_start_are_recorded_and_caused(where: str) -> None:
    @tool(effect="idempotent", retry=Retry(attempts=3, base=0))
    async def flaky(call: Call) -> str:
        if call.attempt < 3:
            raise NotSent("the same words every time")
        return "ok"

    @agent(version="1")
    async def caller(run: Run) -> str:
        return str(await flaky())

    async def main() -> list[Event]:
        async with perdure(where, [caller]) as app:
            handle = await app.start(caller)
            await handle.result()
            return await handle.events()

    events = run(main())
    assert [intent.attempt for intent in intents(events)] == [1, 2, 3]
    assert len([event for event in events if isinstance(event.body, ToolCallFailed)]) == 2
    by_seq = {event.seq: event for event in events}
    completed = next(event for event in events if event.type == "tool_call_completed")
    cause = by_seq[completed.cause or 0].body
    assert isinstance(cause, ToolCallInitiated)
    assert cause.attempt == 3, "the cause of the completion exists, and is the attempt that succeeded"


def test_T2_a_result_that_cannot_be_serialised_does_not_repeat_the_effect(where: str) -> None:
    performed: list[int] = []

    @tool(effect="idempotent")
    async def act() -> Any:
        performed.append(1)
        return {1, 2, 3}

    @agent(version="1")
    async def caller(run: Run) -> str:
        try:
            await act()
        except ResultNotEncodable:
            pass
        await asyncio.sleep(10)
        return "done"

    clock = ManualClock()

    async def main() -> str:
        async with perdure(where, [caller], clock) as app:
            await app.start(caller, id="r")
            return (await app.engine.drive("r", wait=False)).status

    assert run(main()) == "waiting"
    clock.advance(11)
    assert run(main()) == "succeeded"
    assert performed == [1]


@pytest.mark.parametrize("falsy", [0, "", False, None, [], {}], ids=repr)
def test_T3_a_falsy_result_is_a_result(where: str, falsy: Any) -> None:
    performed: list[int] = []

    @tool(effect="read")
    async def look() -> Any:
        performed.append(1)
        return falsy

    @agent(version="1")
    async def caller(run: Run) -> Any:
        found = await look()
        await asyncio.sleep(10)
        return found

    clock = ManualClock()

    async def main() -> Any:
        async with perdure(where, [caller], clock) as app:
            handle = await app.start(caller, id="r")
            row = await app.engine.drive("r", wait=False)
            return await handle.result() if row.status == "succeeded" else "not yet"

    assert run(main()) == "not yet"
    clock.advance(11)
    assert repr(run(main())) == repr(falsy)
    assert performed == [1]


def test_T4_two_intended_identical_calls_are_two_calls(where: str) -> None:
    """One after the other and in parallel.

    A key from arguments, or from a count of thoughts, would be the same for both.
    """
    keys: list[str] = []

    @tool(effect="keyed")
    async def pay(cents: int, call: Call) -> int:
        keys.append(call.key)
        return call.number

    @agent(version="1")
    async def payer(run: Run) -> list[int]:
        first = [await pay(5), await pay(5)]
        return first + list(await asyncio.gather(pay(5), pay(5), pay(5)))

    async def main() -> Any:
        async with perdure(where, [payer]) as app:
            return await app.run(payer)

    assert run(main()) == [1, 2, 3, 4, 5]
    assert len(set(keys)) == 5


def test_T5_the_parts_of_a_key_cannot_be_shifted(where: str) -> None:
    assert CallKeys("a:b", "c").key(1, "pay") != CallKeys("a", "b:c").key(1, "pay")
    keys: list[str] = []

    @tool(effect="keyed")
    async def pay(call: Call) -> None:
        keys.append(call.key)

    @agent(version="1")
    async def payer(run: Run) -> None:
        await pay()

    async def main() -> None:
        async with perdure(where, [payer]) as app:
            await app.run(payer, tenant="a:b", id="c")
            await app.run(payer, tenant="a", id="b:c")

    run(main())
    assert len(set(keys)) == 2


def test_T6_a_hole_below_the_last_completed_call_is_filled(where: str) -> None:
    """Calls 2 and 3 have completed, call 1 has not: the crash leaves a gap, not a frontier after call 3."""
    performed: list[str] = []
    hold = asyncio.Event()

    @tool(effect="idempotent")
    async def step(at: int, call: Call) -> int:
        performed.append(f"{at}/{call.attempt}")
        if at == 1 and call.attempt == 1:
            await hold.wait()
        return at

    @agent(version="1")
    async def wide(run: Run) -> list[int]:
        return list(await asyncio.gather(step(1), step(2), step(3)))

    async def first() -> None:
        async with perdure(where, [wide]) as app:
            await app.start(wide, id="r")
            await crash(app, "r", lambda: len([e for e in app.store.read("r") if e.type == "tool_call_completed"]) == 2)

    async def second() -> Any:
        async with perdure(where, [wide]) as app:
            return await app.handle("r").result()

    run(first())
    assert run(second()) == [1, 2, 3]
    assert performed == ["1/1", "2/1", "3/1", "1/2"]


def test_T7_what_a_nondeterministic_planner_said_once_stays_said(where: str) -> None:
    asked: list[int] = []

    @tool(effect="read")
    async def plan() -> list[str]:
        asked.append(1)
        return ["build", "deploy"] if len(asked) == 1 else ["delete everything"]

    done: list[str] = []

    @tool(effect="once")
    async def perform(step: str) -> None:
        done.append(step)

    @agent(version="1")
    async def deployer(run: Run) -> None:
        for step in await plan():
            await perform(step)
            await asyncio.sleep(10)

    clock = ManualClock()

    async def main() -> str:
        async with perdure(where, [deployer], clock) as app:
            await app.start(deployer, id="r")
            return (await app.engine.drive("r", wait=False)).status

    statuses = []
    for _ in range(3):
        statuses.append(run(main()))
        clock.advance(11)
    assert statuses == ["waiting", "waiting", "succeeded"]
    assert (done, asked) == (["build", "deploy"], [1])


def test_T8_code_that_skips_a_recorded_step_stops_the_run(where: str) -> None:
    done: list[str] = []

    @tool(effect="once")
    async def perform(step: str) -> None:
        done.append(step)

    def deployer(*steps: str) -> Any:
        @agent(name="deployer", version="1")
        async def code(run: Run) -> None:
            for step in steps:
                await perform(step)
                await asyncio.sleep(10)

        return code

    clock = ManualClock()

    async def main(*steps: str) -> tuple[str, str | None]:
        async with perdure(where, [deployer(*steps)], clock) as app:
            await app.start("deployer", id="r")
            row = await app.engine.drive("r", wait=False)
            clock.advance(11)
            return row.status, row.error

    assert run(main("build", "migrate", "deploy"))[0] == "waiting"
    status, error = run(main("migrate", "deploy"))
    assert status == "needs_attention"
    assert 'perform({"step":"build"})' in (error or "")
    assert 'perform({"step":"migrate"})' in (error or "")
    assert done == ["build"]


@pytest.mark.parametrize("lookalike", [{"$ref": "build"}, "${build.image}", {"ref": ["build", "image"]}, "{{build}}", "ref(build)"])
def test_T9_user_data_is_never_read_as_a_reference(lookalike: Any, where: str) -> None:
    @tool(effect="once")
    async def use(value: Any) -> Any:
        return value

    @agent(version="1")
    async def user(run: Run, value: Any) -> list[Any]:
        built = {"image": "v7"}
        with pytest.raises(KeyError):
            built["missing"]
        return [await use(value), await use(built["image"])]

    async def main() -> Any:
        async with perdure(where, [user]) as app:
            return await app.run(user, lookalike)

    assert run(main()) == [lookalike, "v7"]


def test_T10_tuples_are_lists_live_as_well_and_int_keys_are_refused_before_the_effect(where: str) -> None:
    seen: list[Any] = []
    performed: list[Any] = []

    @tool(effect="once")
    async def use(value: Any) -> Any:
        performed.append(value)
        return (value, (1, 2))

    @agent(version="1")
    async def user(run: Run) -> None:
        seen.append(await use((1, 2)))
        with pytest.raises(InvalidInput, match="keys must be strings"):
            await use({1: "a"})
        await asyncio.sleep(10)

    async def main() -> None:
        clock = ManualClock()
        async with perdure(where, [user], clock) as app:
            handle = await app.start(user)
            await app.engine.drive(handle.id, wait=False)
            clock.advance(11)
            assert (await app.engine.drive(handle.id, wait=False)).status == "succeeded"

    run(main())
    assert seen == [[[1, 2], [1, 2]]] * 2
    assert performed == [[1, 2]]


def test_T11_a_clock_that_goes_back_changes_no_order(where: str) -> None:
    clock = ManualClock()

    @tool(effect="once")
    async def step(at: int) -> int:
        clock.set_to(clock.time - timedelta(seconds=1000))
        return at

    @agent(version="1")
    async def walker(run: Run) -> list[Any]:
        times = [run.now()]
        found = []
        for at in range(5):
            found.append(await step(at))
            times.append(run.now())
        return [found, times == sorted(times)]

    async def main() -> tuple[Any, list[Event]]:
        async with perdure(where, [walker], clock) as app:
            await app.start(walker, id="r")
            return await app.handle("r").result(), await app.handle("r").events()

    output, events = run(main())
    assert output == [[0, 1, 2, 3, 4], True]
    stamps = [event.ts for event in events]
    assert stamps != sorted(stamps), "this test has moved the clock back"
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


def test_T12_a_worker_that_lost_its_lease_is_refused_at_its_first_append(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """The first worker is alive and was only silent; its result comes after another worker has taken over the run."""
    hold, performed = asyncio.Event(), list[str]()

    @tool(effect="idempotent")
    async def step(call: Call) -> str:
        performed.append(f"attempt {call.attempt}")
        if call.attempt == 1:
            await hold.wait()
        return f"attempt {call.attempt}"

    @agent(version="1")
    async def walker(run: Run) -> str:
        return str(await step())

    async def main() -> tuple[str, list[Event]]:
        async with perdure(where, [walker]) as first, perdure(where, [walker], settings=IMPATIENT) as second:
            await first.start(walker, id="r")
            driving = asyncio.create_task(first.engine.drive("r"))
            await until(lambda: performed)
            forget_leases(first)
            working = asyncio.create_task(second.work())
            await until(lambda: len(performed) == 2)
            hold.set()
            await driving
            output = await second.handle("r").result()
            second.drain()
            await working
            return str(output), await second.handle("r").events()

    output, events = run(main())
    assert output == "attempt 2"
    claims = [event.body for event in events if isinstance(event.body, RunClaimed)]
    assert [claim.takeover for claim in claims] == [False, True]
    assert not claims[1].proven_dead
    assert [event.epoch for event in events] == sorted(event.epoch for event in events)
    assert len([event for event in events if event.type == "tool_call_completed"]) == 1
    assert caplog.text.count("run r") == 1, "the one that was refused says so, once"


@pytest.mark.parametrize("timeout", [None, 0.5])
def test_T31_not_found_says_nothing_while_the_worker_that_was_lost_may_still_send(where: str, timeout: float | None) -> None:
    """The first worker is alive and has merely been silent. Its attempt sends at last, or its time-out ends it: then "not found" counts."""
    hold, sent = asyncio.Event(), list[int]()

    @tool(effect="once", timeout=timeout)
    async def pay(call: Call) -> str:
        if call.attempt == 1:
            await hold.wait()
        sent.append(call.attempt)
        return f"attempt {call.attempt}"

    @pay.reconcile
    async def _(call: Call) -> Outcome:
        return Outcome.happened("found") if sent else Outcome.not_happened()

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> str:
        async with perdure(where, [payer]) as first, perdure(where, [payer], settings=IMPATIENT) as second:
            await first.start(payer, id="r")
            driving = asyncio.create_task(first.engine.drive("r"))
            await until(lambda: status_of(first, "r") == "running")
            forget_leases(first)
            working = asyncio.create_task(second.work())
            await until(lambda: status_of(second, "r") in ("needs_attention", "succeeded"))
            status = status_of(second, "r")
            second.drain()
            await working
            hold.set()
            await driving
            return status

    status = run(main())
    assert status == ("needs_attention" if timeout is None else "succeeded")
    assert len(sent) == 1


class FailsToRenew:
    """The real store, whose first signs of life do not get through."""

    remote = False
    cut_off_after_s = float("inf")

    def __init__(self, store: Store, failures: int) -> None:
        self._store = store
        self._failures = failures
        self.beats = 0

    def renew(self, worker: str, now: int) -> None:
        self.beats += 1
        if self.beats <= self._failures:
            raise StoreUnavailable("disk full")
        self._store.renew(worker, now)


def test_T13_an_error_of_the_renewer_is_told_and_does_not_end_it(caplog: pytest.LogCaptureFixture, where: str) -> None:
    store = open_store(where)
    store.register("w", "host:1", 1, 0)

    def beat_at() -> int:
        return store.workers(77_000_000, 1)[0].beat_at

    registered_at = beat_at()
    faulty = FailsToRenew(store, failures=3)
    loop = asyncio.new_event_loop()
    renewer = Renewer(faulty, "w", ManualClock(77), 0.02, Watchdog(loop, lambda: "nothing"))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        renewer.start()
        deadline = time.monotonic() + 60
        while beat_at() == registered_at and time.monotonic() < deadline:
            time.sleep(0.005)
        renewer.stop()
    loop.close()
    assert beat_at() > registered_at
    assert caplog.text.count("cannot renew the leases of this worker: disk full") == 3
    store.close()


def test_T13_the_leases_of_a_worker_whose_loop_was_closed_run_out(caplog: pytest.LogCaptureFixture, where: str) -> None:
    store = open_store(where)
    store.register("w", "host:1", 1, 0)
    loop = asyncio.new_event_loop()
    renewer = Renewer(store, "w", ManualClock(77), 0.02, Watchdog(loop, lambda: "nothing"))
    loop.close()  # and the worker was never closed: nothing drives its runs, so it must not keep them
    renewer.start()
    renewer._thread.join(timeout=60)
    assert not renewer._thread.is_alive()
    assert "its leases are no longer renewed" in caplog.text
    store.close()


def test_T13_a_worker_counts_on_its_lease_only_while_no_other_may_have_seen_its_connection_end(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store, loop = open_store(where), asyncio.new_event_loop()
    renewer = Renewer(store, "w", ManualClock(77), 600.0, Watchdog(loop, lambda: "nothing"))  # not started: no beat comes
    begun_s, _ = renewer._held
    proof_s = min(600.0, store.cut_off_after_s)
    assert proof_s == 600.0 or where.startswith("postgresql:"), "no other process sees the end of a connection to a file"
    for after_s, holds in ((0.0, True), (proof_s - 0.01, True), (proof_s + 0.01, False)):
        monkeypatch.setattr(leases, "time", SimpleNamespace(monotonic=lambda at_s=begun_s + after_s: at_s))
        assert renewer.has_held_since(begun_s) is holds, after_s
    loop.close()
    store.close()


def test_T14_a_key_that_the_service_has_forgotten_protects_nothing(where: str) -> None:
    hold, performed = asyncio.Event(), list[int]()

    @tool(effect="keyed", key_window=3600)
    async def pay(call: Call) -> None:
        performed.append(call.attempt)
        await hold.wait()

    @agent(version="1")
    async def payer(run: Run) -> None:
        await pay()

    clock = ManualClock()

    async def first() -> None:
        async with perdure(where, [payer], clock) as app:
            await app.start(payer, id="r")
            await crash(app, "r", lambda: performed)

    async def second() -> str:
        async with perdure(where, [payer], clock) as app:
            return (await app.engine.drive("r", wait=False)).status

    run(first())
    clock.advance(3601)
    assert run(second()) == "needs_attention"
    assert performed == [1]


def test_T15_an_answer_that_was_not_delivered_is_delivered_again_without_running_anything(where: str) -> None:
    performed: list[int] = []

    @tool(effect="once")
    async def act() -> str:
        performed.append(1)
        return "receipt"

    @agent(version="1")
    async def actor(run: Run) -> str:
        return str(await act())

    async def deliver() -> Any:
        async with perdure(where, [actor]) as app:
            return await app.run(actor, id="r")

    assert [run(deliver()) for _ in range(3)] == ["receipt"] * 3
    assert performed == [1]


def test_T21_three_calls_in_doubt_are_three_doubts(where: str) -> None:
    hold, performed = asyncio.Event(), list[int]()

    @tool(effect="once")
    async def pay(at: int) -> int:
        performed.append(at)
        await hold.wait()
        return at

    @agent(version="1")
    async def payer(run: Run) -> list[int]:
        return list(await asyncio.gather(pay(1), pay(2), pay(3)))

    async def first() -> None:
        async with perdure(where, [payer]) as app:
            await app.start(payer, id="r")
            await crash(app, "r", lambda: len(performed) == 3)

    async def second() -> tuple[str, list[str], Any]:
        async with perdure(where, [payer]) as app:
            row = await app.engine.drive("r")
            lines = outline(await app.handle("r").events())
            await app.resolve("r", 1, happened=10)
            await app.resolve("r", 2, did_not_happen=True, final=True)
            with pytest.raises(Conflict):
                await app.resolve("r", 1, happened=11)
            await app.resolve("r", 3, happened=30)
            hold.set()
            return row.waiting_for or "", lines, await app.handle("r").result()

    run(first())
    waiting_for, lines, output = run(second())
    assert [line for line in lines if line.startswith("in_doubt")] == ["in_doubt 1/1", "in_doubt 2/1", "in_doubt 3/1"]
    assert all(f"call {number} (pay)" in waiting_for for number in (1, 2, 3))
    assert output == [10, 2, 30]
    assert performed == [1, 2, 3, 2]


def test_T22_not_found_means_nothing_while_the_request_may_still_be_in_flight(where: str) -> None:
    """The tool was told to stop and did not: its effect may come at any moment, whatever the ledger says now."""
    hold, asked = asyncio.Event(), list[int]()

    @tool(effect="once", timeout=0.01)
    async def pay() -> None:
        while not hold.is_set():
            try:
                await hold.wait()
            except asyncio.CancelledError:
                pass

    @pay.reconcile
    async def _() -> Outcome:
        asked.append(1)
        return Outcome.not_happened()

    @agent(version="1")
    async def payer(run: Run) -> None:
        await pay()

    async def main() -> tuple[str, str | None, list[str]]:
        async with perdure(where, [payer]) as app:
            handle = await app.start(payer)
            row = await app.engine.drive(handle.id)
            lines = outline(await handle.events())
            hold.set()
            await asyncio.sleep(0)
            return row.status, row.error, lines

    status, error, lines = run(main())
    assert (status, asked) == ("needs_attention", [1])
    assert "may still be running" in (error or "")
    assert [line for line in lines if line.startswith("initiated")] == ["initiated pay 1/1"]


def test_T22_a_worker_that_may_still_live_is_given_until_its_deadline(where: str) -> None:
    """Its lease ended, but its death is not proven.

    "not found" counts only when its attempt can no longer be sending.
    """
    hold, asked, began = asyncio.Event(), list[float](), list[float]()

    @tool(effect="once", timeout=4.0)
    async def pay(call: Call) -> str:
        began.append(time.monotonic())
        if call.attempt == 1:
            await hold.wait()
        return f"paid by attempt {call.attempt}"

    @pay.reconcile
    async def _() -> Outcome:
        asked.append(time.monotonic())
        return Outcome.not_happened()

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> Any:
        async with perdure(where, [payer]) as first, perdure(where, [payer], settings=IMPATIENT) as second:
            await first.start(payer, id="r")
            driving = asyncio.create_task(first.engine.drive("r"))
            await until(lambda: began)
            forget_leases(first)
            not_yet = [time.monotonic()]

            def is_taken_over() -> bool:
                looked = time.monotonic()
                if (second.store.get("r") or pytest.fail("gone")).epoch >= 2:
                    return True
                not_yet.append(looked)
                return False

            working = asyncio.create_task(second.work())
            await until(is_taken_over)
            output = await second.handle("r").result()
            second.drain()
            await asyncio.gather(working, driving)
            takeovers = [event.type for event in second.store.read("r")].count("run_claimed") - 1
            # It was taken over after the last look that did not see it; when it was seen, a busy machine may have been late.
            return output, takeovers, asked[-1] - not_yet[-1], began[1] - not_yet[-1]

    output, takeovers, asked_s, began_s = run(main())
    assert output == "paid by attempt 2"
    # The worker that takes over asks at once and at the deadline. There is one takeover, unless a busy machine has
    # silenced the second worker too.
    assert 2 <= len(asked) <= 2 * takeovers + 1, "the one that was silent may ask too, before it hears that it has lost the run"
    assert 3.9 <= asked_s <= began_s


def test_T22_a_worker_that_hands_the_run_over_while_it_waits_for_the_deadline_does_not_shorten_the_wait(where: str) -> None:
    """The attempt was cut off two workers ago: the next one, which took nothing over, still does not believe "not found" early."""
    asked, began = list[float](), list[float]()

    @tool(effect="once", timeout=0.5)
    async def pay(call: Call) -> str:
        began.append(time.monotonic())
        if call.attempt == 1:
            await asyncio.Event().wait()
        return f"paid by attempt {call.attempt}"

    @pay.reconcile
    async def _() -> Outcome:
        asked.append(time.monotonic())
        return Outcome.not_happened()

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> Any:
        async with perdure(where, [payer]) as first:
            await first.start(payer, id="r")
            driving = asyncio.create_task(first.engine.drive("r"))
            await until(lambda: began)
            first.abort()  # as a crash would: nothing more is written
            await asyncio.gather(driving, return_exceptions=True)
        impatient = msgspec.structs.replace(SETTINGS, drain_timeout_s=0.02)
        async with perdure(where, [payer], settings=impatient) as second:
            stop = asyncio.Event()
            driving = asyncio.create_task(second.engine.drive("r", stop=stop))
            await until(lambda: asked)
            stop.set()
            assert (await driving).status == "queued"
        claimed = time.monotonic()
        async with perdure(where, [payer]) as third:
            return await third.handle("r").result(), began[1] - claimed

    output, waited_s = run(main())
    assert output == "paid by attempt 2"
    assert waited_s >= 0.45


@pytest.mark.parametrize("raised", [KeyboardInterrupt, asyncio.CancelledError, SystemExit, GeneratorExit])
@pytest.mark.parametrize("is_async", [True, False])
def test_T23_what_except_exception_lets_through_is_recorded_all_the_same(raised: type[BaseException], is_async: bool, where: str) -> None:
    """Raised by the tool after its effect; the process, the loop and the run's other calls go on."""
    performed: list[int] = []
    if is_async:

        @tool(effect="once")
        async def act() -> None:
            performed.append(1)
            raise raised

    else:

        @tool(effect="once")
        def act() -> None:
            performed.append(1)
            raise raised

    @agent(version="1")
    async def caller(run: Run) -> str:
        try:
            await act()
        except ToolFailed as failed:
            return failed.type
        return ""

    async def main() -> tuple[str, list[str]]:
        async with perdure(where, [caller]) as app:
            handle = await app.start(caller)
            return (await app.engine.drive(handle.id)).status, outline(await handle.events())

    status, lines = run(main())
    assert performed == [1]
    if raised is asyncio.CancelledError:
        assert (status, lines[2]) == ("needs_attention", "in_doubt 1/1")
    else:
        assert (status, lines[2]) == ("succeeded", "failed 1/1 error")


def test_T23_whoever_stops_waiting_does_not_stop_the_record_of_what_happened(where: str) -> None:
    began, hold = list[int](), asyncio.Event()

    @tool(effect="once")
    async def act() -> str:
        began.append(1)
        await hold.wait()
        return "receipt"

    @agent(version="1")
    async def caller(run: Run) -> str:
        return str(await act())

    async def main() -> tuple[Any, list[str]]:
        async with perdure(where, [caller]) as app:
            handle = await app.start(caller)
            with pytest.raises(ResultTimeout):
                await handle.result(timeout=0.05)
            waiting = asyncio.create_task(handle.result())
            await asyncio.sleep(0.01)
            waiting.cancel()
            hold.set()
            return await handle.result(), outline(await handle.events())

    output, lines = run(main())
    assert output == "receipt"
    assert lines == ["run_created", "initiated act 1/1", "completed 1/1", "run_succeeded"]
    assert began == [1]


def test_T24_what_was_used_is_in_the_journal_and_is_not_counted_again_on_replay(where: str) -> None:
    """Usage is a result like any other: however often the run is resumed, it stands there once."""

    @tool(effect="read")
    async def ask_a_model(turn: int) -> dict[str, int]:
        return {"tokens": 100 + turn}

    @agent(version="1")
    async def talker(run: Run) -> int:
        used = 0
        for turn in range(4):
            used += (await ask_a_model(turn))["tokens"]
            await asyncio.sleep(10)
        return used

    clock = ManualClock()

    async def main() -> tuple[str, int]:
        async with perdure(where, [talker], clock) as app:
            await app.start(talker, id="r")
            row = await app.engine.drive("r", wait=False)
            state = await app.handle("r").state()
            clock.advance(11)
            return row.status, sum(
                codec.decode(app.load(call.result))["tokens"] for call in state.calls.values() if call.result is not None
            )

    seen = [run(main()) for _ in range(5)]
    assert seen == [("waiting", 100), ("waiting", 201), ("waiting", 303), ("waiting", 406), ("succeeded", 406)]


_POISON = """
import asyncio, os, signal, sys
from perdure import Perdure, Run, Settings, agent, tool

@tool(effect="idempotent")
async def fine() -> str:
    return "fine"

@tool(effect="idempotent")
async def deadly() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

@agent(version="1")
async def poison(run: Run) -> None:
    await fine()
    await deadly()

async def main() -> None:
    async with Perdure(sys.argv[1], [poison], settings=Settings(poison_limit=2)) as app:
        await app.start(poison, id="r")
        print((await app.engine.drive("r")).status)

asyncio.run(main())
"""


def test_T26_a_run_that_kills_every_worker_is_parked(where: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", *sys.path])}
    ends = []
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", _POISON, where], env=env, capture_output=True, text=True, timeout=60, check=False)
        ends.append((done.returncode, done.stdout.strip()))
        if done.returncode == 0:
            break
    assert ends[-1] == (0, "needs_attention"), ends
    assert [code for code, _ in ends[:-1]] == [-signal.SIGKILL] * 2

    async def read() -> list[Event]:
        async with perdure(where, []) as app:
            return await app.handle("r").events()

    events = run(read())
    assert [event.body.takeover for event in events if isinstance(event.body, RunClaimed)] == [False, True, True]
    assert outline(events)[-1] == "attention_needed"
    assert "poison" in repr(events[-2].body)


def test_T27_nothing_is_accepted_after_the_end(where: str) -> None:
    @tool(effect="once")
    async def act() -> str:
        return "done"

    @agent(version="1")
    async def actor(run: Run) -> str:
        return str(await act())

    async def main() -> tuple[list[Event], list[Event]]:
        async with perdure(where, [actor]) as app:
            await app.run(actor, id="r")
            before = await app.handle("r").events()
            for late in (app.cancel("r"), app.unpause("r")):
                with pytest.raises(RunEnded, match="accepts no more post"):
                    await late
            with pytest.raises(Conflict):
                await app.resolve("r", 1, happened="something else")
            with pytest.raises(Conflict):
                await app.start(actor, id="r", tenant="other")
            return before, await app.handle("r").events()

    before, after = run(main())
    assert before == after


def test_T27_a_message_that_races_with_the_end_is_taken_or_refused_and_never_half_taken(where: str) -> None:
    """A cancel in the very turn in which the run ends.

    Either the run is cancelled, or it has succeeded, with no event after its end.
    """
    outcomes: set[str] = set()

    @tool(effect="read")
    async def look(ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    @agent(version="1")
    async def quick(run: Run, ms: int) -> str:
        await look(ms)
        return "done"

    async def main() -> None:
        async with perdure(where, [quick], settings=Settings(poll_s=0.001)) as app:
            for at in range(30):
                handle = await app.start(quick, 3, id=f"r{at}")
                driving = asyncio.create_task(app.engine.drive(handle.id))
                await asyncio.sleep(0.001 + at * 0.0002)
                try:
                    await app.cancel(handle.id)
                except RunEnded:
                    pass
                outcomes.add((await driving).status)
                events = await handle.events()
                assert events[-1].type in ("run_succeeded", "run_cancelled")

    run(main())
    assert outcomes <= {"succeeded", "cancelled"}
