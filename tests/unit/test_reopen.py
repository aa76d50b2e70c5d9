"""Retry and rewind.

To which event a run goes back, what is refused with which words, and that no effect happens twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.drive_tools import ManualClock, perdure, run

from perdure import Agent, Approval, Budget, Call, Fatal, Outcome, Perdure, Plan, Retry, Run, Step, Tool, Usage, agent, tool
from perdure.cli.reopening import preview
from perdure.core import codec
from perdure.core.events import (
    AnyBody,
    BudgetRaised,
    CancelRequested,
    ChildStarted,
    Event,
    Failure,
    RunClaimed,
    RunCreated,
    RunReopened,
    SignalReceived,
    ToolCallFailed,
    ToolCallInitiated,
    ToolCallProposed,
    ToolCallResolved,
)
from perdure.core.history import history
from perdure.core.reopen import reopening, retry_point
from perdure.core.state import LOST, fold, happened
from perdure.errors import AlreadyRunning, Conflict, Diverged, InvalidInput, NotSent, RunFailed
from perdure.inspect.text import sentence
from perdure.inspect.verify import verify_run
from perdure.inspect.why.page import why

_ONCE = Retry(attempts=1)


class World:
    """Services that fail on request. `log` has each effect, and `keys` the key of each attempt."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.keys: list[str] = []
        self.broken: dict[str, Callable[[], Exception]] = {}
        self.bug = True

    def tool(self, name: str, effect: Any = "idempotent", **options: Any) -> Tool[..., Any]:
        @tool(effect=effect, name=name, retry=_ONCE, **options)
        async def act(what: str) -> Any:
            failing = self.broken.get(f"{name} {what}")
            if failing is not None:
                raise failing()
            self.log.append(f"{name} {what}")
            return {1, 2} if what == "set" else f"{name} of {what}"

        return act

    def fail_if_broken(self) -> None:
        """A bug in the agent, until it is fixed."""
        if self.bug:
            raise ValueError("a bug")


def refused() -> Exception:
    return Fatal("the service says no")


def unsent() -> Exception:
    return NotSent("the line was busy")


async def ended(app: Perdure, run_id: str = "r") -> str:
    return (await app.drive(run_id)).status


async def journal(app: Perdure, run_id: str = "r") -> list[Event]:
    return await app.handle(run_id).events()


def seq_of(events: list[Event], kind: type, call: int | None = None) -> int:
    """The seq of the last event of this type."""
    return next(event.seq for event in reversed(events) if isinstance(event.body, kind) and call in (None, event.call))


def scenario(
    world: World, *agents: Agent[Any, Any], begin: Callable[[Perdure], Any] | None = None
) -> Callable[[Callable[[Perdure], Any]], None]:
    """Run the first agent to its rest, and then the test."""

    def go(test: Callable[[Perdure], Any]) -> None:
        async def main() -> None:
            async with perdure(None, agents, ManualClock()) as app:
                await app.start(agents[0], id="r")
                await app.drive("r", wait=False)
                if begin is not None:
                    await begin(app)
                await test(app)
                # Whatever people did, the journals are sound, and the other tables agree with them.
                for row in app.store.list():
                    assert verify_run(app.store, row).problem is None

        run(main())

    return go


# -- where a retry goes back to -----------------------------------------------------------------------------------------
def test_a_retry_after_a_bug_takes_the_last_step_again_and_makes_no_call_again():
    world = World()
    pay, look = world.tool("pay", "once"), world.tool("look", "read")

    @agent(name="a")
    async def a(run: Run) -> str:
        done = [await pay("bill"), await look("mail")]
        world.fail_if_broken()
        return " and ".join([*done, await pay("tip")])

    async def test(app: Perdure) -> None:
        before = await journal(app)
        world.bug = False
        done = await app.retry("r", by="ann", reason="fixed")
        assert done.back_to == before[-1].cause == seq_of(before, type(before[-2].body))
        assert [call.tool for call in done.kept] == ["pay", "look"]
        assert not done.again
        assert not done.superseded
        assert done.next == ['call 3: pay({"what":"tip"})']
        assert await ended(app) == "succeeded"
        assert world.log == ["pay bill", "look mail", "pay tip"]
        body = (await journal(app))[before[-1].seq].body
        assert body == RunReopened("ann", done.back_to, "fixed")

    scenario(world, a)(test)


@pytest.mark.parametrize("raised", [PermissionError("no"), InvalidInput("the answer does not fit")], ids=["permission", "validation"])
def test_a_refusal_that_a_once_tool_raises_after_its_effect_leads_to_no_second_effect(raised: Exception):
    """A tool may check the answer of the service: the kind of its failure is `refused`, and its effect has happened."""
    world = World()

    @tool(effect="once")
    async def charge(what: str) -> str:
        world.log.append(what)
        raise raised

    @agent(name="a")
    async def a(run: Run) -> str:
        return await charge("bill")

    async def test(app: Perdure) -> None:
        await app.retry("r")
        await app.drive("r", wait=False)
        row = await app.handle("r").row()
        assert (row.status, row.attention) == ("needs_attention", "in_doubt")
        assert world.log == ["bill"]

    scenario(world, a)(test)


def test_an_unproven_failure_counts_also_if_a_later_attempt_was_not_sent():
    world = World()
    ways = iter([ValueError("odd"), NotSent("busy")])

    @tool(effect="keyed", key_window=3600, retry=Retry(attempts=2, base=0))
    async def charge(what: str, call: Call) -> str:
        world.log.append(what)
        raise next(ways, AssertionError("attempted again"))

    @agent(name="a")
    async def a(run: Run) -> str:
        return await charge("bill")

    async def test(app: Perdure) -> None:
        assert len(world.log) == 2
        assert isinstance(app.clock, ManualClock)
        app.clock.advance(7200)  # the key protects nothing any more
        await app.retry("r")
        await app.drive("r", wait=False)
        row = await app.handle("r").row()
        assert (row.status, row.attention) == ("needs_attention", "in_doubt")
        assert len(world.log) == 2

    scenario(world, a)(test)


@pytest.mark.parametrize("effect", ["read", "idempotent", "transaction", "keyed"])
def test_a_retry_attempts_a_failed_call_again_under_its_number_and_key(effect: str):
    world = World()
    world.broken["pay bill"] = refused
    keys: list[str] = []

    @tool(effect=effect, name="pay", retry=_ONCE)  # type: ignore[call-overload]
    def pay(what: str) -> str:
        if world.broken:
            raise refused()
        world.log.append(what)
        return "paid"

    @agent(name="a")
    async def a(run: Run) -> str:
        return str(await pay("bill"))

    async def test(app: Perdure) -> None:
        before = await journal(app)
        world.broken.clear()
        done = await app.retry("r")
        assert done.back_to == seq_of(before, ToolCallFailed) - 1
        assert [(call.call, call.tool) for call in done.again] == [(1, "pay")]
        keys.append(done.again[0].key)
        assert await ended(app) == "succeeded"
        assert world.log == ["bill"]
        state = fold(await journal(app))
        assert (state.numbers, state.calls[1].attempt, state.calls[1].key) == (1, 2, keys[0])

    scenario(world, a)(test)


def test_a_failed_once_call_is_attempted_again_only_if_nothing_can_have_happened():
    world = World()
    world.broken["launch moon"] = unsent
    world.broken["launch mars"] = refused
    launch = world.tool("launch", "once")

    @agent(name="a")
    async def a(run: Run) -> list[str]:
        try:
            return [await launch("moon")]
        finally:
            world.log.append("…")

    @agent(name="b")
    async def b(run: Run) -> str:
        return str(await launch("mars"))

    async def proven(app: Perdure) -> None:
        world.broken.clear()
        await app.retry("r")
        assert await ended(app) == "succeeded"
        assert fold(await journal(app)).calls[1].attempt == 2

    async def unproven(app: Perdure) -> None:
        world.broken.clear()
        await app.retry("r")
        await app.drive("r", wait=False)
        row = await app.handle("r").row()
        assert (row.status, row.attention) == ("needs_attention", "in_doubt")
        assert "launch mars" not in world.log
        await app.resolve("r", 1, happened="there", by="ann")
        assert await ended(app) == "succeeded"
        assert "launch mars" not in world.log

    scenario(world, a)(proven)
    world.broken["launch mars"] = refused
    scenario(world, b)(unproven)


def test_a_hook_settles_the_doubt_about_a_failed_once_call():
    world = World()
    failing = [True]

    @tool(retry=_ONCE)
    async def launch(what: str) -> str:
        world.log.append("request")
        if failing:
            raise refused()
        return "up"

    @launch.reconcile
    async def find(what: str) -> Outcome:
        return Outcome.not_happened(final=True)

    @agent(name="a")
    async def a(run: Run) -> str:
        return await launch("moon")

    async def test(app: Perdure) -> None:
        failing.clear()
        await app.retry("r")
        assert await ended(app) == "succeeded"
        assert world.log == ["request", "request"]
        assert fold(await journal(app)).calls[1].attempt == 2

    scenario(world, a)(test)


def test_a_retry_after_a_gather_attempts_what_failed_again_and_keeps_the_rest():
    world = World()
    put, look = world.tool("put"), world.tool("look", "read")

    @agent(name="a")
    async def a(run: Run) -> list[Any]:
        return list(await asyncio.gather(put("one"), put("two"), look("three"), put("four")))

    @agent(name="b")
    async def b(run: Run) -> list[Any]:
        done = await asyncio.gather(put("one"), put("two"), look("three"), put("four"), return_exceptions=True)
        for one in done:
            if isinstance(one, Exception):
                raise one
        return list(done)

    async def test(app: Perdure) -> None:
        before = await journal(app)
        failed = [event for event in before if isinstance(event.body, ToolCallFailed)]
        world.broken.clear()
        done = await app.retry("r")
        assert done.back_to == min(event.seq for event in failed) - 1
        assert [call.call for call in done.again] == [event.call for event in sorted(failed, key=lambda event: event.call or 0)]
        assert await ended(app) == "succeeded"
        assert sorted(world.log) == ["look three", "put four", "put one", "put two"]
        assert fold(await journal(app)).numbers == 4

    for some in ({"put two"}, {"put two", "put four"}):
        for which in (a, b):
            world.log.clear()
            world.broken = dict.fromkeys(some, refused)
            scenario(world, which)(test)


def test_a_retry_after_a_rejected_or_expired_approval_asks_anew():
    world = World()
    pay = world.tool("pay", "once", approval=Approval(by=("bob",), expires=60.0))

    @agent(name="a")
    async def a(run: Run) -> str:
        return str(await pay("bill"))

    async def reject(app: Perdure) -> None:
        (row,) = await app.approvals()
        await app.reject(row.approval, by="bob", reason="no")
        assert await ended(app) == "failed"

    async def expire(app: Perdure) -> None:
        app.clock.advance(120)  # type: ignore[attr-defined]
        assert await ended(app) == "failed"

    async def test(app: Perdure) -> None:
        before = await journal(app)
        done = await app.retry("r")
        assert done.back_to == before[seq_of(before, ToolCallProposed) - 1].cause
        await app.drive("r", wait=False)
        (row,) = await app.approvals()
        assert row.call == 2
        await app.approve(row.approval, by="bob")
        assert await ended(app) == "succeeded"

    scenario(world, a, begin=reject)(test)
    scenario(world, a, begin=expire)(test)
    assert world.log == ["pay bill", "pay bill"]


def test_a_used_approval_stays_used():
    """The approved call was not sent. It has used its approval: the agent makes a new call, and that is asked about."""
    world = World()
    world.broken["pay bill"] = unsent
    pay = world.tool("pay", "once", approval=Approval(by=("bob",)))

    @agent(name="a")
    async def a(run: Run) -> str:
        return str(await pay("bill"))

    async def fail(app: Perdure) -> None:
        (row,) = await app.approvals()
        await app.approve(row.approval, by="bob")
        assert await ended(app) == "failed"

    async def test(app: Perdure) -> None:
        before = await journal(app)
        world.broken.clear()
        done = await app.retry("r")
        assert done.back_to == before[seq_of(before, ToolCallProposed) - 1].cause
        await app.drive("r", wait=False)
        assert world.log == []
        (row,) = await app.approvals()
        assert (row.call, row.status) == (2, "pending")
        await app.approve(row.approval, by="bob")
        assert await ended(app) == "succeeded"
        state = fold(await journal(app))
        assert state.calls[1].attempt == 1
        assert state.calls[1].key != state.calls[2].key

    scenario(world, a, begin=fail)(test)


def test_a_retry_after_a_budget_was_exceeded_asks_again_for_money():
    world = World()
    cost = Usage(usd_micros=1000)
    ask = world.tool("ask", cost=cost)

    @agent(name="a", budget=Budget(usd="0.0015", on_exceed="fail"))
    async def a(run: Run) -> list[str]:
        return [await ask("one"), await ask("two")]

    async def test(app: Perdure) -> None:
        before = await journal(app)
        failed = seq_of(before, ToolCallFailed)
        done = await app.retry("r")
        request = next(event for event in before if event.call == 2)
        assert done.back_to == (request.cause or 0) < failed
        assert await ended(app) == "failed"
        state = fold(await journal(app))
        assert state.used.usd_micros == 1000
        (ledger,) = app.store.ledgers("r")
        assert (ledger.spent.usd_micros, ledger.reserved.usd_micros) == (1000, 0)
        assert world.log == ["ask one"]

    scenario(world, a)(test)


def test_a_retry_with_a_raise_goes_on_where_the_budget_was_exceeded():
    world = World()
    ask = world.tool("ask", cost=Usage(usd_micros=1000))

    @agent(name="a", budget=Budget(usd="0.0015", on_exceed="fail"))
    async def a(run: Run) -> list[str]:
        return [await ask("one"), await ask("two")]

    async def test(app: Perdure) -> None:
        before = await journal(app)
        more = Budget(usd="0.001")
        with pytest.raises(Conflict, match=r"would stop again at once: .* it takes at least 0\.0005") as no:
            await app.retry("r", add=Budget(usd="0.0001"))
        assert no.value.hint == "add that: perdure retry r --add-usd 0.0005"
        with pytest.raises(Conflict, match="limits usd and not calls, so no calls can be added"):
            await app.retry("r", add=Budget(calls=3))
        with pytest.raises(InvalidInput, match="add="):
            await app.retry("r", add=5)  # type: ignore[arg-type]
        preview = await app.retry("r", dry_run=True, add=more)
        assert await journal(app) == before
        assert app.store.ledgers("r")[0].limits.usd_micros == 1500
        assert await app.retry("r", by="ann", reason="worth it", add=more) == preview
        assert preview.added == more.limits
        reopened, raised = (await journal(app))[len(before) :]
        assert isinstance(reopened.body, RunReopened)
        assert (raised.body, raised.cause) == (BudgetRaised(more.limits, "ann", "worth it"), reopened.seq)
        assert await ended(app) == "succeeded"
        (ledger,) = app.store.ledgers("r")
        assert (ledger.limits.usd_micros, ledger.spent.usd_micros) == (2500, 2000)
        assert world.log == ["ask one", "ask two"]

    scenario(world, a)(test)


def test_what_is_added_needs_a_budget():
    world = World()

    @agent(name="a")
    async def a(run: Run) -> None:
        world.fail_if_broken()

    async def test(app: Perdure) -> None:
        before = await journal(app)
        with pytest.raises(Conflict, match=r"^run r has no budget, so nothing can be added to it$"):
            await app.retry("r", add=Budget(usd=1))
        with pytest.raises(Conflict, match=r"^run r has no budget, so nothing can be added to it$"):
            await app.rewind("r", 2, add=Budget(usd=1))
        assert await journal(app) == before

    scenario(world, a)(test)


def test_after_a_rewind_with_a_raise_new_code_is_new_from_the_first_signal_of_that_commit_on():
    """The agent has not reacted to the signals in the commit of the rewind yet. So `patched` is true there."""
    world = World()
    put = world.tool("put", "once")

    @agent(name="a", budget=Budget(calls=1, on_exceed="fail"))
    async def a(run: Run) -> str:
        first = await run.receive("go")
        if not world.bug and run.patched("extra"):
            await put("extra")
        await put(f"{first} and {await run.receive('go')}")
        return str(await put("last"))

    async def test(app: Perdure) -> None:
        for what in ("one", "two"):
            await app.signal("r", "go", what)
        assert await ended(app) == "failed"
        first = next(event.seq for event in await journal(app) if isinstance(event.body, SignalReceived))
        world.bug = False
        await app.rewind("r", first - 1, add=Budget(calls=2))
        assert await ended(app) == "succeeded"
        assert world.log == ["put one and two", "put extra", "put last"]

    scenario(world, a)(test)


def test_a_retry_after_a_cancel_goes_back_to_before_it():
    world = World()
    put = world.tool("put")

    @agent(name="a")
    async def a(run: Run) -> str:
        await put("one")
        return str(await run.receive("go"))

    async def cancel(app: Perdure) -> None:
        await app.cancel("r", by="ann")
        assert await ended(app) == "cancelled"

    async def test(app: Perdure) -> None:
        before = await journal(app)
        done = await app.retry("r")
        assert done.back_to == seq_of(before, CancelRequested) - 1
        await app.signal("r", "go", "now")
        assert await ended(app) == "succeeded"
        assert world.log == ["put one"]

    scenario(world, a, begin=cancel)(test)


def test_a_cleanup_after_a_failure_or_a_cancel_has_to_be_looked_at_first():
    world = World()
    world.broken["put two"] = refused
    put = world.tool("put")

    @agent(name="a")
    async def a(run: Run) -> str:
        await put("one")
        try:
            await put("two")
        except Exception:
            await put("undo one")
            raise
        return "done"

    @agent(name="b")
    async def b(run: Run) -> str:
        try:
            await run.receive("go")
        except asyncio.CancelledError:
            await put("tidy")
            raise
        return "done"

    async def failed(app: Perdure) -> None:
        before = await journal(app)
        at = seq_of(before, ToolCallFailed)
        with pytest.raises(Conflict) as error:
            await app.retry("r")
        assert str(error.value) == (
            "run r cannot simply be retried: after the failure of call 2 its agent made call 3 (put), perhaps to clean up; to go back "
            f"anyway, say to which event: {at - 1} is the last one before it"
        )
        assert await journal(app) == before
        world.broken.clear()
        done = await app.rewind("r", at - 1)
        assert [call.call for call in done.again] == [2]
        assert [call.call for call in done.superseded] == [3]
        assert await ended(app) == "succeeded"
        assert world.log == ["put one", "put undo one", "put two"]

    async def cancel(app: Perdure) -> None:
        await app.cancel("r", by="ann")
        assert await ended(app) == "cancelled"

    async def cancelled(app: Perdure) -> None:
        with pytest.raises(Conflict, match=r"after its cancel its agent made call 1 \(put\)"):
            await app.retry("r")

    scenario(world, a)(failed)
    scenario(world, b, begin=cancel)(cancelled)


def test_a_result_that_cannot_be_recorded_is_not_made_again():
    world = World()
    put = world.tool("put", "once")

    @agent(name="a")
    async def a(run: Run) -> str:
        return str(await put("set"))

    async def test(app: Perdure) -> None:
        assert world.log == ["put set"]
        done = await app.retry("r")
        assert not done.again
        assert await ended(app) == "failed"
        assert world.log == ["put set"]

    scenario(world, a)(test)


def test_a_call_that_a_person_resolved_as_failed_is_in_doubt_again():
    world = World()

    @tool(retry=_ONCE)
    async def launch(what: str) -> str:
        world.log.append(what)
        raise ConnectionResetError("reset")

    @agent(name="a")
    async def a(run: Run) -> str:
        return await launch("moon")

    async def fail(app: Perdure) -> None:
        await app.resolve("r", 1, fail="it never came", by="ann")
        assert await ended(app) == "failed"

    async def test(app: Perdure) -> None:
        done = await app.retry("r")
        assert [call.call for call in done.again] == [1]
        await app.drive("r", wait=False)
        assert (await app.handle("r").row()).attention == "in_doubt"
        assert world.log == ["moon"]

    scenario(world, a, begin=fail)(test)


def test_a_run_that_was_ended_by_force_asks_again_for_the_approval_that_its_end_withdrew():
    world = World()
    pay = world.tool("pay", "once", approval=Approval(by=("bob",)))

    @agent(name="a")
    async def a(run: Run) -> str:
        return str(await pay("bill"))

    async def end(app: Perdure) -> None:
        await app.cancel("r", by="ann", force=True)

    async def test(app: Perdure) -> None:
        before = await journal(app)
        asked = next(event for event in before if event.type == "approval_requested")
        with pytest.raises(InvalidInput) as error:
            await app.rewind("r", before[-2].seq)
        assert str(error.value) == (
            f"run r cannot go back to event {before[-2].seq}: the approval of call 1 was withdrawn when the run ended; "
            f"go back to before event {asked.seq}"
        )
        await app.retry("r")
        await app.drive("r", wait=False)
        (row,) = await app.approvals()
        assert row.call == 2
        await app.approve(row.approval, by="bob")
        assert await ended(app) == "succeeded"
        assert world.log == ["pay bill"]

    scenario(world, a, begin=end)(test)


def test_an_approval_that_the_agent_goes_back_behind_is_withdrawn_and_asked_for_anew():
    world = World()
    pay = world.tool("pay", "once", approval=Approval(by=("bob",)))

    @agent(name="a")
    async def a(run: Run) -> str:
        return str(await pay("bill"))

    async def test(app: Perdure) -> None:
        (old,) = await app.approvals()
        await app.rewind("r", 2)
        await app.drive("r", wait=False)
        assert [row.call for row in await app.approvals()] == [2]
        (new,) = await app.approvals()
        with pytest.raises(Conflict, match="withdrawn"):
            await app.approve(old.approval, by="bob")
        await app.approve(new.approval, by="bob")
        assert await ended(app) == "succeeded"
        assert world.log == ["pay bill"]

    scenario(world, a)(test)


# -- refused ------------------------------------------------------------------------------------------------------------
def test_points_that_are_refused_say_why_and_change_nothing():
    world = World()
    put, look = world.tool("put"), world.tool("look", "read")

    @agent(name="a")
    async def a(run: Run) -> str:
        await put("one")
        await asyncio.gather(look("two"), look("three"), put("four"))
        await run.receive("go")
        return "done"

    async def cancel(app: Perdure) -> None:
        await app.cancel("r", by="ann")
        assert await ended(app) == "cancelled"

    async def test(app: Perdure) -> None:
        before = await journal(app)
        last = before[-1].seq
        cancelled = seq_of(before, CancelRequested)
        gathered = [event for event in before if isinstance(event.body, ToolCallInitiated) and event.call in (2, 3, 4)]
        expected = {
            0: f"run r has no event 0: its events are 1 to {last}",
            last + 1: f"run r has no event {last + 1}: its events are 1 to {last}",
            last: f"run r cannot go back to event {last}: that event is its end; go back to event {last - 1} or before",
            cancelled: f"run r cannot go back to event {cancelled}: its cancel was requested at event {cancelled}; "
            f"go back to event {cancelled - 1} or before",
            gathered[0].seq: f"run r cannot go back to event {gathered[0].seq}: the agent stated the events {gathered[0].seq} to "
            f"{gathered[-1].seq} at once; go back to event {gathered[0].cause} or {gathered[-1].seq}",
        }
        for point, words in expected.items():
            with pytest.raises(InvalidInput) as error:
                await app.rewind("r", point)
            assert str(error.value) == words
        with pytest.raises(InvalidInput, match="the number of an event"):
            await app.rewind("r", True)
        assert await journal(app) == before
        # After a rewind, an event between is superseded.
        await app.rewind("r", gathered[-1].seq)
        with pytest.raises(InvalidInput) as error:
            await app.rewind("r", cancelled - 1)
        assert (
            str(error.value) == f"run r cannot go back to event {cancelled - 1}: that event was superseded when the run was reopened before"
        )

    scenario(world, a, begin=cancel)(test)


def test_a_run_that_has_succeeded_or_waits_is_not_retried():
    world = World()

    @agent(name="a")
    async def a(run: Run) -> str:
        return str(await run.receive("go"))

    async def test(app: Perdure) -> None:
        with pytest.raises(Conflict) as error:
            await app.retry("r")
        assert str(error.value) == "run r is waiting: only a run that has failed or was cancelled can be retried"
        await app.signal("r", "go", 1)
        assert await ended(app) == "succeeded"
        for reopen in (app.retry("r"), app.rewind("r", 2)):
            with pytest.raises(Conflict):
                await reopen
        with pytest.raises(Conflict) as error:
            await app.rewind("r", 2)
        assert str(error.value) == "run r has succeeded: its result counts, and it cannot be reopened"

    scenario(world, a)(test)


def test_a_held_run_is_not_reopened():
    world = World()
    entered, leave = asyncio.Event(), asyncio.Event()

    @tool(effect="idempotent")
    async def wait(what: str) -> str:
        entered.set()
        await leave.wait()
        return "there"

    @agent(name="a")
    async def a(run: Run) -> str:
        return await wait("here")

    async def main() -> None:
        async with perdure(None, [a]) as app:
            await app.start(a, id="r")
            driving = asyncio.ensure_future(app.drive("r"))
            await entered.wait()
            with pytest.raises(AlreadyRunning) as error:
                await app.rewind("r", 1)
            assert str(error.value) == "run r is held by a worker"
            assert error.value.hint == "pause it first: perdure pause r"
            leave.set()
            await driving

    del world
    run(main())


def test_code_that_asks_for_other_calls_before_the_point_is_found_before_anything_is_written(tmp_path: Any):
    world = World()
    put = world.tool("put")

    def version(number: str, first: str) -> Agent[Any, Any]:
        @agent(name="a", version=number)
        async def a(run: Run) -> str:
            await put(first)
            world.fail_if_broken()
            return "done"

        return a

    async def begin() -> list[Event]:
        async with perdure(tmp_path / "db", [version("1", "one")]) as app:
            await app.start("a", id="r")
            assert await ended(app) == "failed"
            return await journal(app)

    async def go_on(before: list[Event]) -> None:
        async with perdure(tmp_path / "db", [version("2", "two")]) as app:
            with pytest.raises(Diverged):
                await app.retry("r")
            assert await journal(app) == before
            # At a point before the call the new code may ask for something else. The old call stays superseded.
            done = await app.rewind("r", 2)
            assert (done.version, [call.call for call in done.superseded]) == ("2", [1])
            assert await ended(app) == "succeeded"
            assert world.log == ["put one", "put two"]
            assert (await app.handle("r").row()).version == "2"

    before = run(begin())
    world.bug = False
    run(go_on(before))


# -- what the agent gets
# ------------------------------------------------------------------------------------------------
def test_after_a_rewind_results_are_reused_by_tool_and_arguments():
    world = World()
    put = world.tool("put", "once")
    order = ["one", "two", "one"]

    @agent(name="a")
    async def a(run: Run) -> list[str]:
        done = [await put(what) for what in order]
        world.fail_if_broken()
        return done

    async def test(app: Perdure) -> None:
        world.bug = False
        order[:] = ["two", "one", "three", "one"]  # other code, under the same version
        done = await app.rewind("r", 2)
        assert done.reused == [f'call {n}: put({{"what":"{what}"}})' for n, what in ((2, "two"), (1, "one"))]
        assert done.next == ['call 4: put({"what":"three"})']
        assert await ended(app) == "succeeded"
        # "one" was made twice, so it is made twice at most; "three" is new, and gets a number above all others.
        assert world.log == ["put one", "put two", "put one", "put three"]
        state = fold(await journal(app))
        assert state.calls[4].first_seq > state.seq - 8
        assert state.numbers == 4

    scenario(world, a)(test)


def test_a_new_call_at_an_event_where_the_old_code_asked_for_nothing_is_a_new_call():
    """The event is before the event to which the run goes back.

    The call must not get the number, and so the result, of a superseded call.
    """
    world = World()
    put = world.tool("put", "once")

    @agent(name="a")
    async def a(run: Run) -> str:
        await run.receive("first")
        done = [] if world.bug else [await put("new")]
        await run.receive("second")
        done.append(await put("old"))
        world.fail_if_broken()
        return " and ".join(done)

    async def send(app: Perdure) -> None:
        for topic in ("first", "second"):
            await app.signal("r", topic, None)
            await app.drive("r", wait=False)

    async def test(app: Perdure) -> None:
        events = await journal(app)
        world.bug = False
        await app.rewind("r", seq_of(events, SignalReceived))
        assert await ended(app) == "succeeded"
        assert await app.handle("r").result() == "put of new and put of old"
        assert world.log == ["put old", "put new"]

    scenario(world, a, begin=send)(test)


def test_fresh_reads_again_and_makes_no_effect_again():
    world = World()
    put, look = world.tool("put", "once"), world.tool("look", "read")

    @agent(name="a")
    async def a(run: Run) -> list[str]:
        done = [await look("mail"), await put("one")]
        world.fail_if_broken()
        return done

    async def test(app: Perdure) -> None:
        world.bug = False
        await app.rewind("r", 2, fresh=True)
        assert await ended(app) == "succeeded"
        assert world.log == ["look mail", "put one", "look mail"]
        assert fold(await journal(app)).numbers == 2

    scenario(world, a)(test)


@pytest.mark.parametrize("back_to", [2, 8])
def test_fresh_uses_no_approval_twice(back_to: int):
    world = World()
    look = world.tool("look", "read", approval=Approval(by=("bob",)))

    @agent(name="a")
    async def a(run: Run) -> str:
        seen = str(await look("mail"))
        world.fail_if_broken()
        return seen

    async def begin(app: Perdure) -> None:
        (asked,) = await app.approvals()
        await app.approve(asked.approval, by="bob")
        assert await ended(app) == "failed"

    async def test(app: Perdure) -> None:
        assert seq_of(await journal(app), ToolCallInitiated) == 8
        world.bug = False
        plan = await app.rewind("r", back_to, fresh=True)
        assert not any("look" in words for words in plan.next), "the preview says the same"
        assert await ended(app) == "succeeded"
        assert world.log == ["look mail"]

    scenario(world, a, begin=begin)(test)


# -- calls that the run has undone itself --------------------------------------------------------------------------------
@pytest.mark.parametrize("undo_ends", [True, False])
def test_a_run_does_not_go_back_behind_its_own_undo(undo_ends: bool):
    world = World()
    charge, ship = world.tool("charge", "once"), world.tool("ship")
    world.broken["ship parcel"] = refused

    @charge.compensate
    async def uncharge(what: str) -> None:
        world.log.append(f"uncharge {what}")
        if not undo_ends:
            raise ValueError("the line broke")  # it may have happened

    selling = Plan(
        "selling", [Step("pay", charge, {"what": "bill"}), Step("send", ship, {"what": "parcel"}, after=["pay"], on_failure="undo")]
    )

    async def test(app: Perdure) -> None:
        world.broken.clear()
        done, written = [*world.log], await journal(app)
        assert done == ["charge bill", "uncharge bill"]
        if undo_ends:  # if not, a retry continues with the undo
            with pytest.raises(Conflict, match="perhaps to clean up"):
                await app.retry("r")
        first_undo = next(event.seq for event in written if event.call == 3)
        for back_to in range(1, first_undo):
            with pytest.raises((Conflict, InvalidInput)) as error:
                await app.rewind("r", back_to)
            if isinstance(error.value, Conflict):
                how = "has" if undo_ends else "may have"
                assert f"after it the run {how} undone call 1 (charge) itself, with call 3" in str(error.value)
        with pytest.raises(Conflict, match=r"undone call 1 \(charge\) itself"):
            await app.live_fork("r", at=2, id="f")
        assert (world.log, await journal(app)) == (done, written)

    scenario(world, selling)(test)


def test_costs_have_what_a_superseded_call_in_doubt_may_have_cost():
    world = World()

    @tool(effect="once", retry=_ONCE, cost=0.30)
    async def pay(what: str) -> None:
        raise ConnectionResetError("the line broke")  # it may have happened

    @agent(name="a", budget=Budget(usd=1.0))
    async def a(run: Run) -> None:
        await pay("bill")

    async def test(app: Perdure) -> None:
        await app.rewind("r", 2)
        await app.drive("r", wait=False)
        (row,) = app.store.costs("agent")
        assert row.usd_micros == 300_000

    scenario(world, a)(test)


def test_signals_are_neither_lost_nor_repeated_when_a_run_is_reopened_again_and_again():
    world = World()
    put = world.tool("put", "once")

    @agent(name="a")
    async def a(run: Run) -> list[str]:
        heard = [await run.receive("go"), await put("one"), await run.receive("go"), await run.receive("go")]
        world.fail_if_broken()
        return heard

    async def send(app: Perdure) -> None:
        for word in ("x", "y", "z"):
            await app.signal("r", "go", word)
            await app.drive("r", wait=False)
        assert await ended(app) == "failed"

    async def test(app: Perdure) -> None:
        events = await journal(app)
        points = [event.seq for event in events[1:-1]]
        for point in reversed(points):
            try:
                await app.rewind("r", point)
            except InvalidInput:
                continue
            assert await ended(app) == "failed"
        world.bug = False
        await app.retry("r")
        assert await app.handle("r").result() == ["x", "put of one", "y", "z"] if await ended(app) == "succeeded" else False
        assert world.log == ["put one"]
        assert fold(await journal(app)).reopened > 5

    scenario(world, a, begin=send)(test)


def test_an_edit_of_the_arguments_is_kept_when_the_call_is_made_again():
    world = World()
    told: list[Any] = []

    @tool(effect="once", retry=_ONCE, approval=Approval(by=("bob",), editable=("what",)))
    async def pay(what: str) -> str:
        world.log.append(what)
        raise ConnectionResetError("reset")

    @agent(name="a")
    async def a(run: Run) -> str:
        made = pay("bill")
        result = await made
        told.append(run._machine.edits.copy())
        return str(result)

    async def edit(app: Perdure) -> None:
        (row,) = await app.approvals()
        await app.approve(row.approval, by="bob", edit={"what": "half of the bill"})
        await app.drive("r", wait=False)
        assert (await app.handle("r").row()).attention == "in_doubt"

    async def test(app: Perdure) -> None:
        done = await app.rewind("r", 2)
        assert [call.state for call in done.superseded] == ["in_doubt"]
        await app.drive("r", wait=False)
        assert (await app.handle("r").row()).attention == "in_doubt"
        await app.resolve("r", 1, happened="paid", by="ann")
        assert await ended(app) == "succeeded"
        assert world.log == ["half of the bill"]
        assert [list(edits) for edits in told] == [[1]]
        assert not await app.approvals()

    scenario(world, a, begin=edit)(test)


def test_history_and_reopening_are_functions_of_the_journal_alone():
    """Nested: a run that was reopened goes back to before and to after its first reopening."""
    world = World()
    put = world.tool("put", "once")

    @agent(name="a")
    async def a(run: Run) -> list[str]:
        done = [await put("one"), await put("two")]
        world.fail_if_broken()
        return done

    async def test(app: Perdure) -> None:
        first = await journal(app)
        assert history(first).events is first
        made = [event.seq for event in first if isinstance(event.body, ToolCallInitiated)]
        await app.rewind("r", made[1] - 1)
        assert await ended(app) == "failed"
        second = await journal(app)
        past = history(second)
        assert [event.seq for event in past.events][: made[1] - 1] == list(range(1, made[1]))
        (branch,) = past.branches
        assert set(branch.earlier.requests) == {2}
        assert [event.seq for event in branch.earlier.outcomes[2]] == [made[1] + 1]
        assert branch.earlier.last == 2
        # Back to after the first reopening: its branch is kept. Back to before it: only the new one is left.
        after = seq_of(second, RunReopened) + 1
        for point, branches in ((after, 2), (2, 1)):
            found = reopening(second, point, by="ann")
            assert (found.back_to, found.seen, found.run_id) == (point, second[-1].seq, "r")
            await app.rewind("r", point)
            assert len(history(await journal(app)).branches) == branches
            assert await ended(app) == "failed"
            second = await journal(app)
        assert retry_point(second) == second[-1].cause
        world.bug = False
        await app.retry("r")
        assert await ended(app) == "succeeded"
        assert world.log == ["put one", "put two"]

    scenario(world, a)(test)


# -- families -----------------------------------------------------------------------------------------------------------
def test_a_retry_reopens_the_child_that_failed_and_its_child_with_one_budget_for_all():
    world = World()
    world.broken["pay deep"] = refused
    pay = world.tool("pay", "keyed", cost=Usage(usd_micros=100))

    @agent(name="grandchild")
    async def grandchild(run: Run) -> str:
        return str(await pay("deep"))

    @agent(name="child")
    async def child(run: Run) -> str:
        return f"{await pay('middle')}, {await grandchild()}"

    @agent(name="a", budget=Budget(usd="0.0005"))
    async def a(run: Run) -> str:
        return f"{await pay('top')}, {await child()}"

    async def test(app: Perdure) -> None:
        assert await ended(app) == "failed"
        with pytest.raises(Conflict) as error:
            await app.retry("r/2")
        assert (
            str(error.value)
            == "run r/2 is a child of run r, which has been told how it ended: reopen the parent, and its child goes on too"
        )
        assert error.value.hint == "perdure retry r"
        before = {run_id: await journal(app, run_id) for run_id in ("r", "r/2", "r/2/2")}
        world.broken.clear()
        preview = await app.retry("r", dry_run=True)
        assert {run_id: await journal(app, run_id) for run_id in before} == before
        done = await app.retry("r")
        assert done == preview
        assert [child.run_id for child in done.children] == ["r/2"]
        assert [child.run_id for child in done.children[0].children] == ["r/2/2"]
        assert await ended(app) == "succeeded"
        assert world.log == ["pay top", "pay middle", "pay deep"]
        (ledger,) = app.store.ledgers("r")
        used = sum([fold(await journal(app, run_id)).used.usd_micros for run_id in before])
        assert (ledger.spent.usd_micros, ledger.reserved.usd_micros) == (used, 0)
        assert ledger.limits.usd_micros == 500

    scenario(world, a, child, grandchild)(test)


@pytest.mark.parametrize("own", [False, True])
def test_what_is_added_to_a_family_goes_to_the_budget_that_is_used_up(own: bool):
    """The budget is that of the run at the top, which its child shares; or the child has one of its own inside of it."""
    world = World()
    pay = world.tool("pay", "keyed", cost=Usage(usd_micros=100))
    small = Budget(usd="0.0002", on_exceed="fail")

    @agent(name="child", budget=small if own else None)
    async def child(run: Run) -> None:
        for what in ("one", "two", "three"):
            await pay(what)

    @agent(name="a", budget=Budget(usd="0.009") if own else small)
    async def a(run: Run) -> str:
        await child()
        return "done"

    async def test(app: Perdure) -> None:
        owner = "r/1" if own else "r"
        assert await ended(app) == "failed"
        limits = {one.run_id: one.limits.usd_micros for one in app.store.ledgers("r/1")}
        plan = await app.retry("r", add=Budget(usd="0.0001"))
        assert (plan.added is None, plan.children[0].added is None) == (own, not own)
        assert {one.run_id: one.limits.usd_micros for one in app.store.ledgers("r/1")} == {**limits, owner: 300}
        raised = {
            run_id: [event for event in await journal(app, run_id) if isinstance(event.body, BudgetRaised)] for run_id in ("r", "r/1")
        }
        assert [run_id for run_id, found in raised.items() if found] == [owner]
        assert await ended(app) == "succeeded"
        assert world.log == ["pay one", "pay two", "pay three"]
        assert {one.spent.usd_micros for one in app.store.ledgers("r/1")} == {300}

    scenario(world, a, child)(test)


def test_two_children_with_used_up_budgets_get_the_amount_each():
    world = World()
    pay = world.tool("pay", "keyed")

    @agent(name="child", budget=Budget(calls=1, on_exceed="fail"))
    async def child(run: Run, who: str) -> None:
        await pay(f"{who} one")
        await pay(f"{who} two")

    @agent(name="a")
    async def a(run: Run) -> str:
        ends = await asyncio.gather(child("x"), child("y"), return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return "done"

    async def test(app: Perdure) -> None:
        assert await ended(app) == "failed"
        plan = await app.retry("r", add=Budget(calls=1))
        assert plan.added is None
        assert [one.added for one in plan.children] == [Budget(calls=1).limits] * 2
        assert await ended(app) == "succeeded"
        assert [app.store.ledgers(run_id)[0].limits.calls for run_id in ("r/1", "r/2")] == [2, 2]
        assert len(world.log) == 4

    scenario(world, a, child)(test)


def test_a_child_that_the_raised_budget_has_stopped_goes_on_although_only_its_parent_is_rewound():
    world = World()
    pay = world.tool("pay", "keyed")

    @agent(name="child")
    async def child(run: Run) -> str:
        await pay("one")
        await pay("two")
        return "child"

    @agent(name="a", budget=Budget(calls=1))
    async def a(run: Run) -> str:
        return await child()

    async def test(app: Perdure) -> None:
        while (await app.handle("r/1").row()).status != "needs_attention":
            await app.drive("r/1", wait=False)
        parent = await journal(app)
        await app.rewind("r", seq_of(parent, ChildStarted), by="ann", add=Budget(calls=1))
        assert (await app.handle("r/1").row()).status == "queued"
        assert await app.handle("r").result() == "child"
        assert app.store.ledgers("r/1")[0].limits.calls == 2
        assert world.log == ["pay one", "pay two"]

    scenario(world, a, child)(test)


def test_a_live_fork_of_a_run_that_used_up_its_budget_raises_its_own():
    """The copied failure names the budget of the run that was forked."""
    world = World()
    pay = world.tool("pay", "idempotent")

    @agent(name="a", budget=Budget(calls=1, on_exceed="fail"))
    async def a(run: Run) -> str:
        await pay("one")
        return str(await pay("two"))

    async def test(app: Perdure) -> None:
        await app.live_fork("r", id="f", at=seq_of(await journal(app), ToolCallFailed))
        assert await ended(app, "f") == "failed"
        await app.retry("f", add=Budget(calls=1))
        assert await ended(app, "f") == "succeeded"
        assert (app.store.ledgers("f")[0].limits.calls, app.store.ledgers("r")[0].limits.calls) == (2, 1)

    scenario(world, a)(test)


def test_a_family_that_was_ended_by_force_goes_on_together():
    world = World()
    put = world.tool("put", "once")

    @agent(name="child")
    async def child(run: Run, what: str) -> str:
        await put(what)
        return str(await run.receive("go"))

    @agent(name="a")
    async def a(run: Run) -> list[str]:
        return list(await asyncio.gather(child("one"), child("two")))

    async def end(app: Perdure) -> None:
        await app.signal("r/1", "go", "first")
        await app.cancel("r", by="ann", force=True)
        with pytest.raises(Conflict, match=r"its child r/\d is still"):
            await app.retry("r")
        for run_id in ("r/1", "r/2"):
            await app.drive(run_id)

    async def test(app: Perdure) -> None:
        before = await journal(app)
        start = next(event for event in before if isinstance(event.body, ChildStarted))
        statuses = [(await app.handle(f"r/{number}").row()).status for number in (1, 2)]
        done = await app.retry("r")
        assert [child.run_id for child in done.children] == [f"r/{n}" for n, status in enumerate(statuses, 1) if status != "succeeded"]
        await app.drive("r", wait=False)
        # A rewind to before their start is refused while they work.
        with pytest.raises(Conflict, match=r"its child r/\d was started after that and has not ended; cancel it first"):
            await app.rewind("r", start.cause or 0)
        for number, status in enumerate(statuses, 1):
            if status != "succeeded":
                await app.signal(f"r/{number}", "go", f"word {number}")
        assert await ended(app) == "succeeded"
        assert sorted(world.log) == ["put one", "put two"]

    scenario(world, a, child, begin=end)(test)


def test_children_of_a_run_that_was_ended_by_force_are_not_started_again_when_it_goes_back_behind_their_start():
    world = World()
    put = world.tool("put", "once")

    @agent(name="child")
    async def child(run: Run) -> str:
        await put("one")
        return str(await run.receive("go"))

    @agent(name="a")
    async def a(run: Run) -> str:
        return str(await child())

    async def end(app: Perdure) -> None:
        await app.cancel("r", by="ann", force=True)
        await app.drive("r/1")

    async def test(app: Perdure) -> None:
        before = await journal(app)
        start = next(event for event in before if isinstance(event.body, ChildStarted))
        await app.rewind("r", start.cause or 0)
        # The child was cancelled, and the agent learns this. A retry then lets the child go on.
        assert await ended(app) == "failed"
        done = await app.retry("r")
        assert [child.run_id for child in done.children] == ["r/1"]
        await app.drive("r", wait=False)
        await app.signal("r/1", "go", "now")
        assert await ended(app) == "succeeded"
        assert world.log == ["put one"]
        assert fold(await journal(app)).numbers == 1

    scenario(world, a, child, begin=end)(test)


def test_a_failed_run_says_so_until_it_is_reopened():
    world = World()

    @agent(name="a")
    async def a(run: Run) -> str:
        world.fail_if_broken()
        return "done"

    async def test(app: Perdure) -> None:
        with pytest.raises(RunFailed):
            await app.handle("r").result()
        world.bug = False
        await app.retry("r")
        row = await app.handle("r").row()
        assert (row.status, row.error, row.attention) == ("queued", None, None)
        await app.drive("r")
        assert await app.handle("r").result() == "done"

    scenario(world, a)(test)


# -- what has happened, or may have happened, is in every list ------------------------------------------------------------
async def superseded_on_page(app: Perdure) -> list[int]:
    return [one.call for one in why(app.store, "r", now=app.clock.now()).superseded]


def test_a_call_that_happened_without_a_result_that_can_be_recorded_is_in_every_list():
    world = World()

    @tool(effect="once", retry=_ONCE)
    async def order(what: str) -> str:
        raise ConnectionResetError("lost")

    @order.reconcile
    async def find(what: str) -> Outcome:
        return Outcome.happened({1, 2})

    @order.compensate
    async def unorder(what: str) -> None:
        world.log.append(f"unorder {what}")

    @agent(name="a")
    async def a(run: Run) -> str:
        return await order("x")

    async def main(app: Perdure) -> None:
        events = await journal(app)
        (resolved,) = [event.body for event in events if isinstance(event.body, ToolCallResolved)]
        assert (resolved.outcome, resolved.result) == ("happened", None)
        words = sentence(next(event for event in events if event.body is resolved), {1: "order"})
        assert "it happened, and its result could not be recorded: NotEncodable" in words
        assert "fails again with this code: ResultNotEncodable" in (await app.retry("r", dry_run=True)).next[0]
        assert [deed.tool for deed in (await app.plan_undo("r")).steps] == ["order"]
        fork = await app.live_fork("r", id="f", at=2, dry_run=True)
        assert fork.twice[0].startswith("call 1 order (once) has happened in r")
        (call,) = (await app.rewind("r", 2, by="ann")).superseded
        assert (call.happened, call.undo) == ("yes", True)
        assert await superseded_on_page(app) == [1]
        await app.cancel("r", force=True)
        assert (await app.undo("r", by="ann")).status == "succeeded"
        assert world.log == ["unorder x"]

    scenario(world, a)(main)


@pytest.mark.parametrize(("effect", "failure", "answer"), [
    ("once", refused, "maybe"),
    ("keyed", refused, "maybe"),
    ("idempotent", refused, "maybe"),
    ("once", unsent, "no"),
    ("idempotent", unsent, "no"),
    ("read", refused, "no"),
])  # fmt: skip
def test_all_lists_agree_about_a_call_that_failed(effect: str, failure: Callable[[], Exception], answer: str):
    world = World()
    act = world.tool("act", effect)
    world.broken["act x"] = failure

    @agent(name="a")
    async def a(run: Run) -> Any:
        return await act("x")

    async def main(app: Perdure) -> None:
        (state,) = fold(await journal(app)).calls.values()
        assert happened(state) == answer
        listed = answer == "maybe"
        plan = await app.plan_undo("r")
        assert ([deed.call for deed in plan.doubtful], plan.steps, plan.irreversible) == ([1] if listed else [], (), ())
        twice = (await app.live_fork("r", id="f", at=2, dry_run=True)).twice
        assert any("may have happened" in line for line in twice) == listed
        (call,) = (await app.rewind("r", 2, by="ann")).superseded
        assert call.happened == answer
        assert await superseded_on_page(app) == ([1] if listed else [])

    scenario(world, a)(main)


def test_ended_children_are_in_the_preview_and_in_what_may_happen_twice():
    world = World()
    pay = world.tool("pay", "once")

    @agent(name="kid")
    async def kid(run: Run, what: str) -> str:
        await pay(what)
        if what == "b":
            raise ValueError("down")
        return what

    @agent(name="a")
    async def a(run: Run) -> None:
        await kid("a")
        await kid("b")

    async def main(app: Perdure) -> None:
        fork = await app.live_fork("r", id="f", at=2, dry_run=True)
        assert [line.partition(":")[0] for line in fork.twice[:2]] == ["child r/1 (kid) has run", "child r/2 (kid) has run"]
        assert [(child.run_id, child.status) for child in fork.done_children] == [("r/1", "succeeded"), ("r/2", "failed")]
        back = await app.rewind("r", 2, by="ann", dry_run=True)
        assert [(child.call, child.run_id, child.agent, child.status) for child in back.superseded_children] == [
            (1, "r/1", "kid", "succeeded"),
            (2, "r/2", "kid", "failed"),
        ]
        lines = list(preview(back))
        assert "    call 2, child r/2 (kid): failed" in lines
        assert any("stays done; when the run has ended: perdure undo r" in line for line in lines)
        # The second child is waited for at its start, and goes on: it is not superseded.
        assert [child.run_id for child in (await app.retry("r", dry_run=True)).superseded_children] == []

    scenario(world, a, kid)(main)


@pytest.mark.parametrize(("effect", "answer"), [("idempotent", "maybe"), ("transaction", "no"), ("read", "no")])
@pytest.mark.parametrize("told", [False, True])
def test_a_lost_attempt_may_have_happened_whatever_the_next_one_says(effect: Any, answer: str, told: bool):
    lost = [ToolCallFailed(Failure("process_died", LOST, "its worker ended"), attempt=1)] if told else []
    bodies: list[tuple[AnyBody, int | None]] = [
        (RunCreated("r", "a", "1", "default", codec.pack(b"{}", 100)[0]), None),
        (RunClaimed("w1", "1"), None),
        (ToolCallInitiated("put", effect, args=codec.pack(b"{}", 100)[0]), 1),
        (RunClaimed("w2", "1", takeover=True), None),
        *((body, 1) for body in lost),
        (ToolCallInitiated("put", effect, attempt=2), 1),
        (ToolCallFailed(Failure("not_sent", "NotSent", "busy"), attempt=2, final=True), 1),
    ]
    events = [Event(seq, f"{seq:032}", seq, 1, call, seq - 1 or None, body) for seq, (body, call) in enumerate(bodies, 1)]
    assert happened(fold(events).calls[1]) == answer


def test_the_page_of_a_fork_offers_no_undo_of_what_it_has_inherited():
    world = World()
    pay = world.tool("pay", "once")

    @agent(name="kid")
    async def kid(run: Run) -> Any:
        return await pay("as a child")

    @agent(name="a")
    async def a(run: Run) -> None:
        await pay("x")
        await kid()
        world.fail_if_broken()

    def undos(app: Perdure, run_id: str) -> list[str]:
        return [step.does for step in why(app.store, run_id, now=app.clock.now()).next if "perdure undo" in step.command]

    async def main(app: Perdure) -> None:
        assert "(1 call, and what its children did)" in undos(app, "r")[0]
        await app.live_fork("r", id="f", by="ann")
        assert await ended(app, "f") == "failed"
        assert undos(app, "f") == []

    scenario(world, a, kid)(main)


def test_a_run_that_moves_between_its_row_and_its_journal_is_not_reopened(monkeypatch: pytest.MonkeyPatch):
    """The row says which version drives the run: the plan of an older row would check other code than the run's."""
    world = World()

    @agent(name="a")
    async def a(run: Run) -> None:
        world.fail_if_broken()

    async def main(app: Perdure) -> None:
        reading, row = app.reading, app.store.get("r")
        assert row is not None
        older = msgspec.structs.replace(row, seq=row.seq - 1)
        monkeypatch.setattr(type(reading), "get", lambda self, run_id: older if run_id == "r" else None)
        with pytest.raises(Conflict, match="run r has moved on while its journal was read"):
            await app.retry("r", dry_run=True)
        monkeypatch.undo()
        assert (await app.retry("r", dry_run=True)).back_to

    scenario(world, a)(main)
