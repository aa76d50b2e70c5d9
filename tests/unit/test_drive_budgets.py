"""Budgets: reserved before a call, settled after it, counted once, shared with children."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, local, outline, perdure, run, status_of, until, worker_of

from perdure import (
    Approval,
    Budget,
    BudgetExceeded,
    Call,
    ChildFailed,
    Conflict,
    InvalidInput,
    NeedsAttention,
    NotSent,
    Perdure,
    Retry,
    Run,
    RunFailed,
    Settings,
    ToolFailed,
    Usage,
    agent,
    tool,
)
from perdure.core.budget import NOTHING, Amounts
from perdure.core.events import BudgetExceeded as BudgetExceededEvent
from perdure.engine.local import drive
from perdure.store.api import RunRow


class Ledger:
    """What was really begun, recorded by the tools themselves."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.at_once = 0
        self.most_at_once = 0


@asynccontextmanager
async def at_work(app: Perdure) -> AsyncIterator[Perdure]:
    stop = asyncio.Event()
    working = asyncio.create_task(app.work(stop=stop))
    try:
        yield app
    finally:
        stop.set()
        await working


def spent(app: Perdure, run_id: str) -> Amounts:
    (ledger,) = app.store.ledgers(run_id)
    return ledger.spent


def reserved(app: Perdure, run_id: str) -> Amounts:
    (ledger,) = app.store.ledgers(run_id)
    return ledger.reserved


@tool(effect="once")
async def step(number: int = 0) -> int:
    return number


@agent(version="1")
async def stepping(run: Run, count: int) -> int:
    return sum([await step(number) for number in range(count)])


# -- the four amounts ---------------------------------------------------------------------------------------------------
async def _stopped(budget: Budget, tool_fn: Any, clock: ManualClock | None = None) -> tuple[RunRow, list[str], list[BudgetExceededEvent]]:
    @agent(version="1")
    async def looping(run: Run) -> int:
        for _ in range(100):
            await tool_fn()
        return 100

    async with perdure(None, [looping], clock) as app:
        handle = await app.start(looping, id="r", budget=budget)
        row = await app.engine.drive("r")
        events = await handle.events()
        return row, outline(events), [event.body for event in events if isinstance(event.body, BudgetExceededEvent)]


def test_calls_are_limited_and_the_run_stops_before_the_one_too_many() -> None:
    row, lines, (over,) = run(_stopped(Budget(calls=3), step))
    assert (row.status, row.attention, row.holder, row.ready_at) == ("needs_attention", "budget", None, None)
    assert row.error == "call 4 (step): the budget of run r is used up: 3 calls of 3 calls"
    assert sum(line.startswith("initiated") for line in lines) == 3
    assert (over.budget_of, over.what, over.limit, over.used, over.wanted) == ("r", "calls", 3, 3, 1)
    assert lines[-3:] == ["tool_call_proposed", "budget_exceeded", "attention_needed"]


def test_money_that_tools_say_they_spent_is_limited() -> None:
    @tool(effect="once")
    async def pricey(call: Call) -> None:
        call.spend(usd=0.40, tokens_in=7, tokens_out=3)

    row, lines, (over,) = run(_stopped(Budget(usd=1), pricey))
    # The cost was not known in advance: the third call exceeds the limit, and nothing begins after it.
    assert sum(line.startswith("initiated") for line in lines) == 3
    assert (over.what, over.limit, over.used) == ("usd", 1_000_000, 1_200_000)
    assert "$1.20 of $1.00" in str(row.error)


def test_tokens_in_and_out_are_limited() -> None:
    @tool(effect="read")
    async def talk(call: Call) -> None:
        call.spend(tokens_in=70, tokens_out=30)

    _, lines, (over,) = run(_stopped(Budget(tokens=250), talk))
    assert sum(line.startswith("initiated") for line in lines) == 3
    assert (over.what, over.used) == ("tokens", 300)


def test_seconds_are_those_that_calls_take_and_not_those_that_the_run_waits() -> None:
    clock = ManualClock()

    @tool(effect="once")
    async def slow() -> None:
        clock.advance(4)

    row, lines, (over,) = run(_stopped(Budget(seconds=10), slow, clock))
    assert sum(line.startswith("initiated") for line in lines) == 3
    assert (over.what, over.limit, over.used) == ("seconds", 10_000_000, 12_000_000)
    assert "12 s of 10 s" in str(row.error)


def test_a_declared_cost_is_reserved_before_the_call_so_that_it_does_not_begin() -> None:
    @tool(effect="once", cost=0.40)
    async def pricey(call: Call) -> None:
        call.spend(usd=0.40)

    _, lines, (over,) = run(_stopped(Budget(usd=1), pricey))
    assert sum(line.startswith("initiated") for line in lines) == 2
    assert (over.used, over.wanted) == (800_000, 400_000)


def test_what_was_reserved_and_not_spent_is_free_again() -> None:
    @tool(effect="once", cost=Usage(usd_micros=900_000, tokens_in=500))
    async def cheap_in_the_end(call: Call) -> None:
        call.spend(usd=0.01)

    @agent(version="1")
    async def looping(run: Run) -> str:
        for _ in range(9):
            await cheap_in_the_end()
        return "done"

    async def main() -> None:
        async with perdure(None, [looping]) as app:
            assert await app.run(looping, id="r", budget=Budget(usd=1, tokens=1000)) == "done"
            assert spent(app, "r") == Amounts(usd_micros=90_000, tokens=0, calls=9, busy_us=0)
            assert reserved(app, "r") == NOTHING

    run(main())


@pytest.mark.parametrize(
    "budget", [Budget(calls=0), Budget(usd=0), Budget(tokens=0), Budget(seconds=0)], ids=["calls", "usd", "tokens", "seconds"]
)
def test_with_a_budget_of_nothing_nothing_begins(budget: Budget) -> None:
    row, lines, _ = run(_stopped(budget, step))
    assert row.attention == "budget"
    assert not any(line.startswith("initiated") for line in lines)


def test_an_agent_s_own_budget_applies_unless_the_run_is_given_another() -> None:
    @agent(version="1", budget=Budget(calls=2))
    async def modest(run: Run) -> int:
        return sum([await step(1) for _ in range(4)])

    async def main() -> None:
        async with perdure(None, [modest]) as app:
            with pytest.raises(NeedsAttention):
                await app.run(modest, id="own")
            assert await app.run(modest, id="given", budget=Budget(calls=4)) == 4

    run(main())


@pytest.mark.parametrize("budget", [5, "5", {"usd": 5}])
def test_a_budget_that_is_none_is_refused_before_anything_is_recorded(budget: Any) -> None:
    async def main() -> None:
        async with perdure(None, [stepping]) as app:
            with pytest.raises(InvalidInput, match="is not a Budget"):
                await app.start(stepping, 1, id="r", budget=budget)
            assert app.store.get("r") is None
            with pytest.raises(InvalidInput, match="is not a Budget"):
                agent(version="1", budget=budget)(stepping.fn)

    run(main())


# -- counted once -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["read", "idempotent", "once"])
def test_what_was_spent_is_counted_once_whatever_is_replayed(effect: Any, tmp_path: Path) -> None:
    @tool(effect=effect)
    async def paid(call: Call) -> None:
        call.spend(usd="0.25", tokens_out=10)

    @agent(version="1")
    async def waiting(run: Run) -> str:
        await paid()
        await run.receive("first")
        await paid()
        await run.receive("second")
        return "done"

    async def main() -> None:
        wanted = Amounts(usd_micros=250_000, tokens=10, calls=1)
        async with perdure(tmp_path / "db", [waiting]) as app:
            await app.start(waiting, id="r", budget=Budget(usd=10))
            await app.engine.drive("r")
            assert spent(app, "r") == wanted
        for topic in ("first", "other", "second"):
            async with perdure(tmp_path / "db", [waiting]) as app:
                await app.signal("r", topic)
                await app.engine.drive("r")
        async with perdure(tmp_path / "db", [waiting]) as app:
            assert await app.handle("r").result() == "done"
            assert spent(app, "r") == wanted + wanted
            (cost,) = await app.costs("run")
            assert (cost.calls, cost.usd_micros, cost.tokens_out) == (2, 500_000, 20)

    run(main())


@pytest.mark.parametrize(("effect", "calls"), [("idempotent", 2), ("once", 1)])
def test_an_attempt_that_was_cut_off_counts_and_keeps_its_reservation_until_it_is_charged(effect: Any, calls: int, tmp_path: Path) -> None:
    begun = asyncio.Event()

    @tool(effect=effect, cost=0.40)
    async def cut_off(call: Call) -> str:
        begun.set()
        if call.attempt == 1:
            await asyncio.Event().wait()
        call.spend(usd=0.50)
        return "done"

    @agent(version="1")
    async def waiting(run: Run) -> str:
        return str(await cut_off())

    async def main() -> None:
        async with perdure(tmp_path / "db", [waiting]) as app:
            await app.start(waiting, id="r", budget=Budget(usd=1))
            driving = asyncio.create_task(app.engine.drive("r"))
            await begun.wait()
            assert reserved(app, "r") == Amounts(usd_micros=400_000)
            app.abort()
            await driving
        async with perdure(tmp_path / "db", [waiting]) as app:
            assert reserved(app, "r") == Amounts(usd_micros=400_000)
            row = await app.engine.drive("r")
            if effect == "once":
                assert (row.status, row.attention) == ("needs_attention", "in_doubt")
                await app.resolve("r", 1, happened="done")
            assert await app.handle("r").result() == "done"
            assert reserved(app, "r") == NOTHING
            assert spent(app, "r").calls == calls
            assert spent(app, "r").usd_micros == (900_000 if effect == "idempotent" else 400_000)

    run(main())


def test_every_attempt_counts() -> None:
    @tool(effect="once", retry=Retry(attempts=10, base=0, jitter=False))
    async def refused(call: Call) -> None:
        call.spend(usd=0.10)
        raise NotSent("nobody there")

    row, lines, (over,) = run(_stopped(Budget(calls=4), refused))
    assert row.attention == "budget"
    assert (sum(line.startswith("initiated") for line in lines), over.used) == (4, 4)


def test_a_run_that_is_ended_by_force_is_charged_for_what_nobody_saw_the_end_of(tmp_path: Path) -> None:
    """A child is ended by force while its call hangs.

    The call may have happened, and no answer about it can come any more.
    """
    begun = asyncio.Event()

    @tool(effect="once", cost=0.90)
    async def hanging() -> None:
        begun.set()
        await asyncio.Event().wait()

    @agent(version="1")
    async def child(run: Run) -> None:
        await hanging()

    @agent(version="1")
    async def parent(run: Run) -> str:
        try:
            await child()
        except ChildFailed as failed:
            return failed.kind
        return ""

    async def main() -> None:
        async with perdure(tmp_path / "db", [parent]) as app:
            await app.start(parent, id="p", budget=Budget(usd=1))
            driving = asyncio.create_task(app.engine.drive("p"))
            await begun.wait()
            assert reserved(app, "p") == Amounts(usd_micros=900_000)
            app.abort()
            await driving
        async with perdure(tmp_path / "db", [parent]) as app:
            await app.cancel("p/1", force=True)
            assert (reserved(app, "p"), spent(app, "p").usd_micros) == (NOTHING, 900_000)
            assert await app.handle("p").result() == "cancelled"

    run(main())


# -- what happens then --------------------------------------------------------------------------------------------------
def test_a_top_up_lets_the_run_go_on_where_it_stopped() -> None:
    async def main() -> None:
        async with perdure(None, [stepping]) as app:
            handle = await app.start(stepping, 7, id="r", budget=Budget(calls=3))
            await app.engine.drive("r")
            assert await app.unpause("r", by="ann", note="go on", add=Budget(calls=2)) == ["r"]
            row = await app.engine.drive("r")
            assert (row.attention, "5 calls of 5 calls" in str(row.error)) == ("budget", True)
            await app.unpause("r", add=Budget(calls=5))
            assert await handle.result() == sum(range(7))
            state = await handle.state()
            assert state.budget == Budget(calls=10).limits
            numbers = [event.call for event in await handle.events() if event.type == "tool_call_initiated"]
            assert numbers == [1, 2, 3, 4, 5, 6, 7]

    run(main())


def test_going_on_without_a_top_up_stops_at_the_same_call_again_and_begins_nothing() -> None:
    async def main() -> None:
        async with perdure(None, [stepping]) as app:
            handle = await app.start(stepping, 7, id="r", budget=Budget(calls=3))
            await app.engine.drive("r")
            await app.unpause("r")
            assert (await app.engine.drive("r")).attention == "budget"
            with pytest.raises(Conflict, match="limits calls and not usd"):
                await app.unpause("r", add=Budget(usd=5))  # of which there was enough
            assert sum(event.type == "tool_call_initiated" for event in await handle.events()) == 3
            assert sum(event.type == "tool_call_proposed" for event in await handle.events()) == 1

    run(main())


def test_adding_to_a_budget_that_is_not_there_is_a_conflict() -> None:
    async def main() -> None:
        async with perdure(None, [stepping]) as app:
            await app.start(stepping, 1, id="r")
            await app.pause("r")
            with pytest.raises(Conflict, match="has no budget"):
                await app.unpause("r", add=Budget(calls=1))

    run(main())


@pytest.mark.parametrize("restart", [False, True])
def test_on_exceed_fail_raises_where_the_call_was_made_and_the_same_on_replay(restart: bool, tmp_path: Path) -> None:
    said: list[tuple[str, int, str, int, str]] = []

    @agent(version="1")
    async def careful(run: Run) -> int:
        done = 0
        try:
            for number in range(10):
                await step(number)
                done += 1
        except BudgetExceeded as over:
            said.append((over.tool, over.call, over.kind, over.attempts, over.message))
        await run.receive("go")
        return done

    async def main() -> Any:
        async with perdure(tmp_path / "db", [careful]) as app:
            await app.start(careful, id="r", budget=Budget(calls=4, on_exceed="fail"))
            assert (await app.engine.drive("r")).waiting_for == "signal 'go'"
            await app.signal("r", "go")
            if not restart:
                return await app.handle("r").result()
        async with perdure(tmp_path / "db", [careful]) as app:
            return await app.handle("r").result()

    assert run(main()) == 4
    assert set(said) == {("step", 5, "over_budget", 0, "the budget of run r is used up: 4 calls of 4 calls")}


def test_a_budget_exceeded_that_nobody_catches_fails_the_run() -> None:
    async def main() -> None:
        async with perdure(None, [stepping]) as app:
            with pytest.raises(RunFailed, match=r"BudgetExceeded.*3 calls of 3 calls"):
                await app.run(stepping, 9, budget=Budget(calls=3, on_exceed="fail"))

    run(main())


@pytest.mark.parametrize("effect", ["read", "idempotent", "once", "transaction"])
def test_of_a_hundred_parallel_calls_exactly_as_many_begin_as_there_are_calls_left(effect: Any, tmp_path: Path) -> None:
    """A call that fits is not delayed by calls that do not fit, and a call that did not begin is not charged."""
    ledger = Ledger()

    def perform(number: int) -> int:
        ledger.begun.append(number)
        return number

    if effect == "transaction":

        @tool(effect="transaction")
        def act(number: int, call: Call) -> int:
            return perform(number)

    else:

        @tool(effect=effect)
        async def act(number: int, call: Call) -> int:
            await asyncio.sleep(0.001)
            return perform(number)

    @agent(version="1")
    async def fanning(run: Run) -> int:
        return sum(await asyncio.gather(*(act(number) for number in range(100))))

    async def main() -> None:
        async with perdure(tmp_path / "db", [fanning]) as app:
            await app.start(fanning, id="r", budget=Budget(calls=10))
            assert (await app.engine.drive("r")).attention == "budget"
            assert sorted(ledger.begun) == list(range(10))
            assert spent(app, "r").calls == 10
            await app.unpause("r", add=Budget(calls=90))
            assert await app.handle("r").result() == sum(range(100))
            assert sorted(ledger.begun) == list(range(100))
            assert spent(app, "r").calls == 100

    run(main())


def test_of_a_hundred_parallel_calls_the_rest_fails_one_by_one_when_it_shall_fail(tmp_path: Path) -> None:
    ledger = Ledger()

    @tool(effect="once")
    async def act(number: int) -> int:
        ledger.begun.append(number)
        return number

    @agent(version="1")
    async def fanning(run: Run) -> list[Any]:
        results = await asyncio.gather(*(act(number) for number in range(100)), return_exceptions=True)
        run.note("all are back")
        await run.receive("go")
        return [type(result).__name__ for result in results]

    async def main() -> Any:
        async with perdure(tmp_path / "db", [fanning]) as app:
            await app.start(fanning, id="r", budget=Budget(calls=10, on_exceed="fail"))
            assert (await app.engine.drive("r")).waiting_for == "signal 'go'"
            await app.signal("r", "go")
        async with perdure(tmp_path / "db", [fanning]) as app:
            return await app.handle("r").result()

    assert run(main()) == ["int"] * 10 + ["BudgetExceeded"] * 90
    assert sorted(ledger.begun) == list(range(10))


def test_an_agent_that_reacts_to_a_failed_call_of_a_batch_with_another_call_keeps_its_numbers(tmp_path: Path) -> None:
    """The failure is delivered when all calls of the batch are recorded.

    Otherwise the next call would come before the rest.
    """

    @tool(effect="read")
    async def free() -> str:
        return "read"

    @agent(version="1", budget=Budget(calls=3, on_exceed="fail"))
    async def stubborn(run: Run) -> int:
        async def one(number: int) -> int:
            try:
                return await step(number)
            except BudgetExceeded:
                run.note(f"no {number}")
                try:
                    await free()
                except BudgetExceeded:
                    return -1
                return 0

        return sum(await asyncio.gather(*(one(number) for number in range(6))))

    async def main() -> None:
        async with perdure(tmp_path / "db", [stubborn]) as app:
            assert await app.run(stubborn, id="r") == 0 + 1 + 2 - 3
            state = await app.handle("r").state()
            assert [call.tool for call in state.calls.values()] == ["step"] * 6 + ["free"] * 3

    run(main())


def test_a_call_that_was_handed_over_before_it_began_is_counted_when_it_begins(tmp_path: Path) -> None:
    """A drain in the moment between the durable intent and the effect: the next worker begins it, and it has cost one call."""
    begun: list[int] = []

    @tool(effect="once", cost=0.5)
    async def pay(call: Call) -> None:
        begun.append(call.attempt)

    @agent(version="1")
    async def payer(run: Run) -> str:
        await pay()
        return "done"

    async def main() -> None:
        def drain(run_id: str, events: Any) -> None:
            if events[-1].type == "tool_call_initiated":
                worker = local(app)._worker
                assert worker is not None
                worker._drives[run_id].drain()

        async with perdure(tmp_path / "db", [payer], observers=[drain]) as app:
            await app.start(payer, id="r", budget=Budget(usd=0.75, calls=1))
            worker = await local(app)._working()
            await worker._take_up("r")
            await until(lambda: status_of(app, "r") == "queued")
            assert (begun, spent(app, "r"), reserved(app, "r")) == ([], NOTHING, NOTHING)
        async with perdure(tmp_path / "db", [payer]) as app:
            assert await app.handle("r").result() == "done"
            assert spent(app, "r").calls == 1

    run(main())
    assert begun == [2]


@pytest.mark.parametrize("effect", ["read", "once"])
def test_what_an_agent_asks_for_behind_a_call_without_money_does_not_begin(tmp_path: Path, effect: Any) -> None:
    """The run stops at the first of two calls; there would be money for the second."""
    begun: list[str] = []

    @tool(effect="once", cost=2)
    async def dear() -> None:
        begun.append("dear")

    @tool(effect=effect)
    async def cheap() -> None:
        begun.append("cheap")

    @agent(version="1")
    async def spender(run: Run) -> None:
        await asyncio.gather(dear(), cheap())

    async def main() -> None:
        async with perdure(tmp_path / "db", [spender]) as app:
            handle = await app.start(spender, id="r", budget=Budget(usd=1))
            row = await app.engine.drive("r", wait=False)
            assert (row.status, row.attention, begun) == ("needs_attention", "budget", [])
            await app.unpause("r", add=Budget(usd=5))
            await handle.result()

    run(main())
    assert sorted(begun) == ["cheap", "dear"]


def test_a_drain_that_meets_a_stop_for_money_lets_what_was_paid_for_begin(tmp_path: Path) -> None:
    """Two calls at once, and money for one of them: its intent becomes durable while the worker is drained.

    The run stops because of the budget, as it would without the drain.
    """
    begun: list[int] = []

    @tool(effect="once")
    async def pay(number: int) -> None:
        begun.append(number)

    @agent(version="1")
    async def payer(run: Run) -> None:
        await asyncio.gather(pay(1), pay(2))

    async def main() -> None:
        appends: list[Any] = []

        def drain(run_id: str, events: Any) -> None:
            appends.append(events)
            assert len(appends) < 10, "it goes around in circles"
            worker_of(app)._drives[run_id].drain()

        async with perdure(tmp_path / "db", [payer], observers=[drain]) as app:
            await app.start(payer, id="r", budget=Budget(calls=1))
            row = await app.engine.drive("r", wait=False)
            assert (row.status, row.attention, begun) == ("needs_attention", "budget", [1])
            assert spent(app, "r").calls == 1

    run(main())


def test_an_approved_call_that_there_is_no_money_for_waits_and_uses_its_approval_later() -> None:
    @tool(effect="once", approval=Approval(), cost=2)
    async def pay() -> str:
        return "paid"

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> None:
        async with perdure(None, [payer]) as app:
            await app.start(payer, id="r", budget=Budget(usd=1))
            assert (await app.engine.drive("r")).status == "waiting_approval"
            (asked,) = await app.approvals()
            await app.approve(asked.approval, by="ann")
            row = await app.engine.drive("r")
            assert (row.status, row.attention) == ("needs_attention", "budget")
            assert (await app.approvals(status="approved"))[0].approval == asked.approval
            await app.unpause("r", add=Budget(usd=1))
            assert await app.handle("r").result() == "paid"
            assert [row.approval for row in await app.approvals(status="consumed")] == [asked.approval]

    run(main())


def test_a_run_that_stands_still_for_money_can_be_cancelled() -> None:
    async def main() -> None:
        async with perdure(None, [stepping]) as app:
            await app.start(stepping, 9, id="r", budget=Budget(calls=3))
            await app.engine.drive("r")
            await app.cancel("r")
            assert (await app.engine.drive("r")).status == "cancelled"

    run(main())


# -- children -----------------------------------------------------------------------------------------------------------
def test_children_draw_on_their_parent_s_budget_and_never_open_a_fresh_one() -> None:
    @agent(version="1")
    async def parent(run: Run) -> int:
        return sum(await asyncio.gather(stepping(4), stepping(4), stepping(4)))

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            await app.start(parent, id="p", budget=Budget(calls=8))
            await app.engine.drive("p")
            # Three calls at a time, and none of them sees the calls that the others have just begun.
            assert 8 <= spent(app, "p").calls <= 10
            stopped = [row.run_id for row in app.store.family("p") if row.attention == "budget"]
            assert stopped
            assert status_of(app, "p") == "waiting"
            assert await app.unpause(stopped[0], add=Budget(calls=4)) == stopped  # all of them, and the budget is the parent's
            assert await app.handle("p").result() == 18
            assert spent(app, "p").calls == 12

    run(main())


def test_a_child_s_own_smaller_budget_stops_it_before_its_parent_s_does() -> None:
    @agent(version="1", budget=Budget(calls=2))
    async def modest(run: Run, count: int) -> int:
        return sum([await step(1) for _ in range(count)])

    @agent(version="1")
    async def parent(run: Run) -> int:
        return await modest(2) + await modest(3)

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            await app.start(parent, id="p", budget=Budget(calls=100))
            await app.engine.drive("p")
            row = app.store.get("p/2")
            assert row is not None
            assert row.attention == "budget"
            assert "the budget of run p/2 is used up: 2 calls of 2 calls" in str(row.error)
            assert [(one.run_id, one.spent.calls) for one in app.store.ledgers("p/2")] == [("p/2", 2), ("p", 4)]
            assert await app.unpause("p/2", add=Budget(calls=1)) == ["p/2"]
            assert await app.handle("p").result() == 5
            assert spent(app, "p").calls == 5

    run(main())


def test_a_child_s_own_larger_budget_does_not_help_it() -> None:
    @agent(version="1", budget=Budget(calls=1000))
    async def greedy(run: Run) -> int:
        return sum([await step(1) for _ in range(50)])

    @agent(version="1")
    async def parent(run: Run) -> int:
        return await greedy()

    async def main() -> None:
        async with perdure(None, [parent]) as app:
            await app.start(parent, id="p", budget=Budget(calls=5))
            await app.engine.drive("p")
            row = app.store.get("p/1")
            assert row is not None
            assert "the budget of run p is used up" in str(row.error)

    run(main())


@pytest.mark.parametrize("on_exceed", ["pause", "fail"])
def test_fifty_children_in_two_workers_never_begin_more_calls_than_the_budget_and_those_in_flight(on_exceed: Any, tmp_path: Path) -> None:
    ledger = Ledger()

    @tool(effect="once")
    async def act() -> None:
        ledger.begun.append(1)
        ledger.at_once += 1
        ledger.most_at_once = max(ledger.most_at_once, ledger.at_once)
        await asyncio.sleep(0.001)
        ledger.at_once -= 1

    @agent(version="1")
    async def child(run: Run) -> int:
        done = 0
        try:
            while done < 20:
                await act()
                done += 1
        except BudgetExceeded:
            pass
        return done

    @agent(version="1")
    async def parent(run: Run) -> int:
        return sum(await asyncio.gather(*(child() for _ in range(50))))

    settings = Settings(poll_s=0.002, park_after_s=0, flush_s=0.005, concurrency=10)

    async def main() -> None:
        async with (
            perdure(tmp_path / "db", [parent, child], settings=settings) as one,
            perdure(tmp_path / "db", [parent, child], settings=settings) as two,
            at_work(one),
            at_work(two),
        ):
            await one.start(parent, id="p", budget=Budget(calls=200, on_exceed=on_exceed))
            if on_exceed == "fail":
                await until(lambda: status_of(one, "p") == "succeeded")
            else:
                await until(lambda: [row.attention for row in one.store.family("p")] == ["budget"] * 50)
            begun = len(ledger.begun)
            assert 200 <= begun <= 200 + 20, begun  # twenty runs are driven at a time, and each has one call in flight
            assert spent(one, "p").calls == begun

    run(main())
    assert ledger.most_at_once > 1  # or nothing was shared


def test_a_top_up_wakes_all_that_stood_still_and_nobody_else() -> None:
    @agent(version="1")
    async def parent(run: Run) -> int:
        return sum(await asyncio.gather(stepping(3), stepping(3), run.receive("go")))

    async def main() -> None:
        async with perdure(None, [parent, stepping]) as app:
            await app.start(parent, id="p", budget=Budget(calls=1))
            await app.start(stepping, 3, id="other", budget=Budget(calls=1))
            await app.engine.drive("p")
            await app.engine.drive("other")
            assert sorted(await app.unpause("p", add=Budget(calls=9))) == ["p/1", "p/2"]
            assert (status_of(app, "p/1"), status_of(app, "p/2"), status_of(app, "other")) == ("queued", "queued", "needs_attention")
            await app.signal("p", "go", 0)
            assert await app.handle("p").result() == 6

    run(main())


# -- a run without a budget pays no price for budgets -----------------------------------------------------------------
def test_a_run_without_a_budget_never_looks_for_one(tmp_path: Path) -> None:
    asked: list[str] = []

    async def main() -> None:
        async with perdure(tmp_path / "db", [stepping]) as app:
            found = app.store.ledgers

            def ledgers(run_id: str) -> Any:
                asked.append(run_id)
                return found(run_id)

            app.store.ledgers = ledgers  # type: ignore[method-assign]
            await app.run(stepping, 30, id="free")
            assert asked == []
            await app.run(stepping, 30, id="paid", budget=Budget(calls=100))
            assert len(asked) > 30  # or this test would not see them

    run(main())


def test_retries_that_there_is_no_money_for_wait_and_go_on_as_the_same_call(tmp_path: Path) -> None:
    attempts: list[int] = []

    @tool(effect="keyed", retry=Retry(attempts=5, base=0, jitter=False))
    async def flaky(call: Call) -> str:
        attempts.append(call.attempt)
        if call.attempt < 3:
            raise NotSent("not yet")
        return call.key

    @agent(version="1")
    async def caller(run: Run) -> str:
        return str(await flaky())

    async def main() -> None:
        async with perdure(tmp_path / "db", [caller]) as app:
            await app.start(caller, id="r", budget=Budget(calls=2))
            assert (await app.engine.drive("r")).attention == "budget"
        async with perdure(tmp_path / "db", [caller]) as app:
            await app.unpause("r", add=Budget(calls=1))
            assert len(await app.handle("r").result()) == 64
            assert spent(app, "r").calls == 3

    run(main())
    assert attempts == [1, 2, 3]


def test_on_exceed_fail_of_a_retry_is_the_call_s_last_word() -> None:
    @tool(effect="keyed", retry=Retry(attempts=5, base=0, jitter=False))
    async def flaky() -> None:
        raise NotSent("not yet")

    @agent(version="1")
    async def caller(run: Run) -> str:
        try:
            await flaky()
        except ToolFailed as failed:
            return f"{type(failed).__name__} after {failed.attempts}"
        return ""

    async def main() -> Any:
        async with perdure(None, [caller]) as app:
            return await app.run(caller, budget=Budget(calls=2, on_exceed="fail"))

    assert run(main()) == "BudgetExceeded after 2"


def test_the_settings_of_these_tests_do_not_hold_runs() -> None:
    assert SETTINGS.park_after_s == 0


def test_people_hear_once_of_a_budget_that_is_used_up(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with perdure(None, [stepping]) as app:
            await app.start(stepping, 9, id="r", budget=Budget(calls=3))
            assert (await app.engine.drive("r")).attention == "budget"

    with caplog.at_level("INFO", "perdure.notify"):
        run(main())
    (told,) = [record.getMessage() for record in caplog.records if record.name == "perdure.notify"]
    assert "3 calls used and 1 call wanted of 3 calls" in told


def test_what_a_dead_worker_had_reserved_is_charged_when_a_person_has_settled_its_call(tmp_path: Path) -> None:
    """The run is not held when the answer comes.

    The answer is charged at once, and the next worker frees the reservation.
    """
    begun = asyncio.Event()

    @tool(effect="once", cost=0.9)
    async def dear() -> str:
        begun.set()
        await asyncio.sleep(30)
        return "never"

    @tool(effect="once", cost=0.5)
    async def cheap() -> str:
        return "made"

    @agent(version="1")
    async def buyer(run: Run) -> list[str]:
        return [await dear(), await cheap()]

    async def main() -> Any:
        async with perdure(tmp_path / "db", [buyer]) as app:
            await app.start(buyer, id="r", budget=Budget(usd="1.40"))
            driving = asyncio.create_task(app.engine.drive("r"))
            await begun.wait()
            app.abort()
            driving.cancel()
        async with perdure(tmp_path / "db", [buyer]) as app:
            await app.resolve("r", 1, happened="found", by="ann")
            assert (spent(app, "r").usd_micros, reserved(app, "r").usd_micros) == (900_000, 900_000)
            made = await app.handle("r").result(timeout=60)
            assert (spent(app, "r").usd_micros, reserved(app, "r")) == (1_400_000, NOTHING)
            return made

    assert run(main()) == ["found", "made"]


@pytest.mark.parametrize("longest_turn_s", [drive._LONGEST_TURN_S, -1.0], ids=["as shipped", "other runs go on after every input"])
def test_children_that_look_at_the_same_moment_do_not_spend_the_same_money(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest_turn_s: float
) -> None:
    monkeypatch.setattr(drive, "_LONGEST_TURN_S", longest_turn_s)

    @tool(effect="read", cost="0.05")
    async def search(call: Call) -> None:
        call.spend(usd="0.05")

    @agent(version="1")
    async def child(run: Run, number: int) -> None:
        await search()

    @agent(version="1")
    async def parent(run: Run) -> int:
        answers = await asyncio.gather(*(child(number) for number in range(40)), return_exceptions=True)
        return sum(answer is None for answer in answers)

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path / 'db'}", [parent]) as app:
            assert await app.run(parent, id="p", budget=Budget(usd="0.20", on_exceed="fail")) == 4
            assert spent(app, "p").usd_micros == 200_000

    run(main())
