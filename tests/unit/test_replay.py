"""Replay and divergence.

The code asks for the calls of the journal, or the run stops and names the difference (G7).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import ManualClock, outline, perdure, run

from perdure import Agent, Diverged, NeedsAttention, Run, agent, tool
from perdure.core.events import AttentionNeeded, Event, RunCreated, RunSucceeded
from perdure.core.machine import Facts, TimerDue
from perdure.core.replay import Frontier, replay
from perdure.store.api import RunRow

Code = Callable[..., Coroutine[Any, Any, Any]]


@tool(effect="read")
async def look(what: str) -> str:
    return what.upper()


@tool(effect="once")
async def pay(cents: int) -> str:
    return f"paid {cents}"


@tool(effect="once", name="pay")
async def pay_with_a_default(cents: int, currency: str = "EUR") -> str:
    return f"paid {cents} {currency}"


@tool(effect="once", name="pay")
async def pay_with_another_name(amount: int) -> str:
    return f"paid {amount}"


async def original(run: Run) -> str:
    found = await look("a")
    run.note(f"found {found}")
    await asyncio.sleep(5)
    first = await pay(500)
    await asyncio.sleep(60)
    await pay(7)
    return first


# -- the same agent, changed in each way that there is ------------------------------------------------------------------
async def changed_tool(run: Run) -> str:
    return await pay(1)


async def changed_arguments(run: Run) -> str:
    await look("b")
    return ""


async def extra_call(run: Run) -> None:
    await asyncio.gather(look("a"), look("z"))


async def extra_call_later(run: Run) -> str:
    found = await look("a")
    run.note(f"found {found}")
    await look("new")
    await asyncio.sleep(5)
    await pay(500)
    return ""


async def missing_call(run: Run) -> str:
    found = await look("a")
    run.note(f"found {found}")
    await asyncio.sleep(5)
    return "nothing paid"


async def missing_note(run: Run) -> str:
    await look("a")
    await asyncio.sleep(5)
    return str(await pay(500))


async def changed_note(run: Run) -> None:
    run.note(f"saw {await look('a')}")
    await asyncio.sleep(5)


async def note_becomes_decision(run: Run) -> None:
    run.decide(await look("a"))
    await asyncio.sleep(5)


async def reordered(run: Run) -> None:
    run.note("found A")
    await look("a")


async def changed_amount(run: Run) -> None:
    run.note(f"found {await look('a')}")
    await asyncio.sleep(5)
    await pay(501)


async def no_timer(run: Run) -> None:
    run.note(f"found {await look('a')}")
    await pay(500)


async def renamed_argument(run: Run) -> None:
    run.note(f"found {await look('a')}")
    await asyncio.sleep(5)
    await pay_with_another_name(500)


CHANGED: list[tuple[Code, int, list[str]]] = [
    (changed_tool, 1, ['call 1: look({"what":"a"})', 'asks for call 1: pay({"cents":1})']),
    (changed_arguments, 1, ['the journal has call 1: look({"what":"a"})', 'asks for call 1: look({"what":"b"})']),
    (extra_call, 2, ['the journal ends with call 1: look({"what":"a"})', 'also asks for call 2: look({"what":"z"})']),
    (extra_call_later, 2, ["thought_recorded", 'also asks for call 2: look({"what":"new"})']),
    (missing_call, 2, ['the journal has call 2: pay({"cents":500})', 'asks for the run\'s success with "nothing paid"']),
    (missing_note, 0, ["the journal has thought_recorded", "found A", "the code does not ask for it"]),
    (changed_note, 0, ["the journal has thought_recorded", "found A", "asks for thought_recorded", "saw A"]),
    (note_becomes_decision, 0, ["the journal has thought_recorded", "asks for decision_made"]),
    (reordered, 1, ['the journal has call 1: look({"what":"a"})', "asks for thought_recorded"]),
    (changed_amount, 2, ['the journal has call 2: pay({"cents":500})', 'asks for call 2: pay({"cents":501})']),
    (no_timer, 2, ['asks for call 2: pay({"cents":500})']),
    (renamed_argument, 2, ['the journal has call 2: pay({"cents":500})', 'asks for call 2: pay({"amount":500})']),
]


def as_agent(code: Code) -> Agent[Any, Any]:
    return agent(name="payer", version="1")(code)


async def half_way(path: Path, clock: ManualClock, code: Code = original) -> list[Event]:
    """The run up to its second timer, where it is parked."""
    async with perdure(path, [as_agent(code)], clock) as app:
        handle = await app.start("payer", id="r")
        assert (await app.engine.drive("r", wait=False)).status == "waiting"
        clock.advance(6)
        assert (await app.engine.drive("r", wait=False)).status == "waiting"
        return await handle.events()


async def driven(path: Path, clock: ManualClock, code: Code) -> tuple[RunRow, list[Event]]:
    async with perdure(path, [as_agent(code)], clock) as app:
        row = await app.engine.drive("r", wait=False)
        return row, await app.handle("r").events()


@pytest.mark.parametrize(("code", "call", "said"), CHANGED, ids=[code.__name__ for code, _, _ in CHANGED])
def test_changed_code_stops_the_run_and_says_where(tmp_path: Path, code: Code, call: int, said: list[str]) -> None:
    clock = ManualClock()
    before = run(half_way(tmp_path / "db", clock))
    row, events = run(driven(tmp_path / "db", clock, code))
    assert row.status == "needs_attention"
    assert row.error is not None
    for words in said:
        assert words in row.error, row.error
    assert outline(events) == [*outline(before), "attention_needed"], "nothing else was recorded, and nothing performed"
    attention = events[-2].body
    assert isinstance(attention, AttentionNeeded)
    assert attention.reason == "diverged"
    with pytest.raises(Diverged) as diverged:
        replayed(before, code)
    assert (diverged.value.call or 0) == call
    assert str(diverged.value.seq) in str(diverged.value)


def replayed(events: list[Event], code: Code) -> Frontier:
    created = events[0].body
    assert isinstance(created, RunCreated)
    machine = as_agent(code).machine(Facts("r", created.tenant, created.actor, created.agent, created.version), b"{}", 1000)
    return replay(machine, events, lambda payload: payload.inline or b"")


@pytest.fixture
def outer_hooks() -> Iterator[Any]:
    """The hooks of async generators outside of any agent."""
    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(lambda _: None, lambda _: None)
    yield sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(*before)


def test_a_replay_leaves_the_hooks_of_async_generators_as_they_were(tmp_path: Path, outer_hooks: Any) -> None:
    events = run(half_way(tmp_path / "db", ManualClock()))
    replayed(events, original)
    assert sys.get_asyncgen_hooks() == outer_hooks
    with pytest.raises(Diverged):
        replayed(events, changed_amount)
    assert sys.get_asyncgen_hooks() == outer_hooks


def test_async_generators_are_the_agents_own_in_a_replay_and_after_it(tmp_path: Path, outer_hooks: Any) -> None:
    finalizers: list[Any] = []

    async def noting(run: Run) -> str:
        found = await look("a")
        finalizers.append(sys.get_asyncgen_hooks().finalizer)
        run.note(f"found {found}")
        await asyncio.sleep(5)
        first = await pay(500)
        await asyncio.sleep(60)
        finalizers.append(sys.get_asyncgen_hooks().finalizer)
        return f"{first}, then {await pay(7)}"

    events = run(half_way(tmp_path / "db", ManualClock()))
    created = events[0].body
    assert isinstance(created, RunCreated)
    machine = as_agent(noting).machine(Facts("r", created.tenant, created.actor, created.agent, created.version), b"{}", 1000)
    replay(machine, events, lambda payload: payload.inline or b"")
    due = machine.next_timer()
    assert due is not None
    assert machine.deliver(due[0], TimerDue(due[1]))
    assert [finalizer.__name__ for finalizer in finalizers] == ["_close_stray", "_close_stray"]
    assert sys.get_asyncgen_hooks() == outer_hooks
    machine.close()


def test_after_the_code_is_put_right_the_run_is_sent_back_and_finishes(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "db"
    run(half_way(path, clock))
    row, _ = run(driven(path, clock, changed_amount))
    assert (row.status, row.ready_at) == ("needs_attention", None)

    async def put_right() -> tuple[str, list[str]]:
        async with perdure(path, [as_agent(original)], clock) as app:
            with pytest.raises(NeedsAttention, match=r"(?s)pay\(.*perdure why r"):
                await app.handle("r").result()
            await app.unpause("r", by="ann", note="rolled back")
            clock.advance(60)
            return await app.handle("r").result(), outline(await app.handle("r").events())

    output, lines = run(put_right())
    assert output == "paid 500"
    assert [line for line in lines if line.startswith("initiated")] == ["initiated look 1/1", "initiated pay 2/1", "initiated pay 3/1"]
    assert "run_unpaused" in lines


def test_a_parameter_added_with_a_default_is_no_divergence(tmp_path: Path) -> None:
    async def newer(run: Run) -> str:
        run.note(f"found {await look('a')}")
        await asyncio.sleep(5)
        first = await pay_with_a_default(500)
        await asyncio.sleep(60)
        return f"{first}, then {await pay_with_a_default(7)}"

    clock, path = ManualClock(), tmp_path / "db"
    run(half_way(path, clock))
    clock.advance(60)
    row, events = run(driven(path, clock, newer))
    assert row.status == "succeeded", row.error
    assert isinstance(events[-1].body, RunSucceeded)
    assert events[-1].body.output.inline == b'"paid 500, then paid 7 EUR"'


def test_the_new_parameter_with_another_value_is_one(tmp_path: Path) -> None:
    async def newer(run: Run) -> None:
        run.note(f"found {await look('a')}")
        await asyncio.sleep(5)
        await pay_with_a_default(500, "USD")

    clock, path = ManualClock(), tmp_path / "db"
    run(half_way(path, clock))
    row, _ = run(driven(path, clock, newer))
    assert row.status == "needs_attention"
    assert '"currency":"USD"' in (row.error or "")


def test_the_output_of_a_finished_run_is_compared_too(tmp_path: Path) -> None:
    async def short(run: Run) -> str:
        return str(await look("a"))

    async def other(run: Run) -> str:
        return "b" + str(await look("a"))

    async def fails(run: Run) -> str:
        raise ValueError(await look("a"))

    async def main() -> list[Event]:
        async with perdure(tmp_path / "db", [as_agent(short)]) as app:
            await app.run("payer", id="r")
            return await app.handle("r").events()

    events = run(main())
    assert replayed(events, short).pending == []
    with pytest.raises(Diverged, match=r'success with "A"; the code asks for the run\'s success with "bA"'):
        replayed(events, other)
    with pytest.raises(Diverged, match="failure with ValueError: A"):
        replayed(events, fails)


def test_a_timer_that_is_set_in_another_place_is_found_by_its_number(tmp_path: Path) -> None:
    async def no_timers_at_all(run: Run) -> None:
        run.note(f"found {await look('a')}")
        await asyncio.Event().wait()

    events = run(half_way(tmp_path / "db", ManualClock()))
    with pytest.raises(Diverged, match=r"timer_fired\) is about timer 1, which the code never asked for"):
        replayed(events, no_timers_at_all)


def test_other_code_beyond_the_frontier_is_free(tmp_path: Path) -> None:
    """Only recorded calls bind the code: later calls may change."""

    async def rewritten_end(run: Run) -> str:
        run.note(f"found {await look('a')}")
        await asyncio.sleep(5)
        await pay(500)
        await asyncio.sleep(60)
        return "a new ending"

    clock, path = ManualClock(), tmp_path / "db"
    run(half_way(path, clock))
    clock.advance(60)
    row, _ = run(driven(path, clock, rewritten_end))
    assert row.status == "succeeded"


def test_the_agents_own_version_does_not_matter_to_the_comparison(tmp_path: Path) -> None:
    events = run(half_way(tmp_path / "db", ManualClock()))
    assert replayed(events, original).calls.keys() == {1, 2}
    assert replayed(events, original).activations == 4


@pytest.mark.parametrize("cut", range(2, 12))
def test_every_prefix_of_a_journal_replays_to_its_frontier(tmp_path: Path, cut: int) -> None:
    """A crash may leave any prefix that ends with a complete commit; a missing statement is pending."""
    events = run(half_way(tmp_path / "db", ManualClock()))
    frontier = replayed(events[:cut], original)
    stated = {event.seq: event for event in events if event.type in ("tool_call_initiated", "thought_recorded") and event.seq > cut}
    assert len(frontier.pending) <= len(stated)
    assert all(cause <= cut for cause, _ in frontier.pending)


def test_replay_needs_no_running_loop_and_leaves_none_behind(tmp_path: Path) -> None:
    events = run(half_way(tmp_path / "db", ManualClock()))
    replayed(events, original)
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
