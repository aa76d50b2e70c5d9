"""Calls in doubt: what a reconcile hook may say, how long a key protects, and what a person can do about it (G5, G8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, outline, perdure, run, until

from perdure import Agent, Call, Conflict, InvalidInput, NotEncodable, NotFound, Outcome, Perdure, Run, ToolFailed, agent, tool
from perdure.core.events import Event, RetryScheduled, RunReleased
from perdure.store.api import RunRow

Hook = Callable[[Call], Any]


class Desk:
    """A `once` or `keyed` call whose first attempt ends in doubt, and the hook that is asked about it."""

    def __init__(self, effect: Any, hook: Hook | None = None, key_window: float = 86_400) -> None:
        self.attempts: list[int] = []
        self.keys: list[str] = []
        self.asked: list[int] = []

        @tool(effect=effect, key_window=key_window)
        async def pay(call: Call) -> Any:
            self.attempts.append(call.attempt)
            self.keys.append(call.key)
            if call.attempt == 1:
                raise TimeoutError("no answer")
            return f"paid at attempt {call.attempt}"

        if hook is not None:

            @pay.reconcile
            async def _(call: Call) -> Any:
                self.asked.append(call.attempt)
                self.keys.append(call.key)
                return hook(call)

        @agent(version="1")
        async def payer(run: Run) -> Any:
            try:
                return await pay()
            except ToolFailed as failed:
                return [failed.kind, failed.type, failed.message]

        self.agent: Agent[Any, Any] = payer


async def rested(desk: Desk, clock: ManualClock | None = None, step_s: float = 100) -> tuple[RunRow, Any, list[Event]]:
    """The run where it ends or needs a person, whatever it waits for in between."""
    clock = clock or ManualClock()
    async with perdure(None, [desk.agent], clock) as app:
        handle = await app.start(desk.agent, id="r")
        while (row := await app.drive("r", wait=False)).status == "waiting":
            clock.advance(step_s)
        return row, (await handle.result() if row.status == "succeeded" else None), await handle.events()


# -- hooks --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("effect", ["once", "keyed"])
@pytest.mark.parametrize("result", ["found", None, 0, {"id": 7}])
def test_it_happened_is_the_result_and_nothing_is_performed_again(effect: Any, result: Any) -> None:
    desk = Desk(effect, lambda call: Outcome.happened(result))
    row, output, events = run(rested(desk))
    assert (row.status, output) == ("succeeded", result)
    assert (desk.attempts, desk.asked) == ([1], [1])
    assert outline(events)[1:] == ["initiated pay 1/1", "in_doubt 1/1", "resolved 1/1 happened by reconcile", "run_succeeded"]


@pytest.mark.parametrize("effect", ["once", "keyed"])
def test_it_did_not_happen_is_another_attempt_with_the_same_key(effect: Any) -> None:
    desk = Desk(effect, lambda call: Outcome.not_happened())
    _, output, events = run(rested(desk))
    assert output == "paid at attempt 2"
    assert len(set(desk.keys)) == 1
    assert outline(events)[2:5] == ["in_doubt 1/1", "resolved 1/1 did_not_happen by reconcile", "initiated pay 1/2"]


def test_in_progress_is_asked_again_later_with_growing_pauses_and_finally_a_person_is() -> None:
    desk = Desk("once", lambda call: Outcome.in_progress())
    row, _, events = run(rested(desk))
    assert (row.status, row.ready_at) == ("needs_attention", None)
    assert len(desk.asked) == SETTINGS.reconcile_asks == 20
    pauses = [(event.body.at - event.ts) / 1e6 for event in events if isinstance(event.body, RetryScheduled)]
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert desk.attempts == [1]


def test_in_progress_that_ends_is_settled_by_the_next_answer() -> None:
    answers = [Outcome.in_progress(), Outcome.in_progress(), Outcome.happened("late")]
    desk = Desk("once", lambda call: answers[len(desk.asked) - 1])
    row, output, _ = run(rested(desk))
    assert (row.status, output, desk.attempts) == ("succeeded", "late", [1])


def _raises(call: Call) -> Any:
    raise RuntimeError("the ledger is down")


UNKNOWN: dict[str, Hook] = {
    "unknown": lambda call: Outcome.unknown("the ledger has two of them"),
    "raises": _raises,
    "wrong type": lambda call: True,
    "none": lambda call: None,
    "a text": lambda call: "happened",
    "wrong kind": lambda call: msgspec.structs.replace(Outcome.not_happened(), kind="nonsense"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_hook_that_does_not_know_leaves_a_once_call_to_a_person(name: str) -> None:
    desk = Desk("once", UNKNOWN[name])
    row, _, events = run(rested(desk))
    assert (row.status, desk.attempts, desk.asked) == ("needs_attention", [1], [1])
    assert "reconcile hook" in (row.error or "")
    assert outline(events)[-1] == "attention_needed"


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_hook_that_does_not_know_leaves_a_keyed_call_to_its_key(name: str) -> None:
    desk = Desk("keyed", UNKNOWN[name])
    row, output, _ = run(rested(desk))
    assert (row.status, output) == ("succeeded", "paid at attempt 2")
    assert len(set(desk.keys)) == 1


def test_a_hook_that_found_something_that_cannot_be_recorded_does_not_repeat_the_call() -> None:
    desk = Desk("once", lambda call: Outcome.happened({1, 2}))
    _, output, _ = run(rested(desk))
    assert output[:2] == ["not_encodable", "NotEncodable"]
    assert desk.attempts == [1]


def test_a_sync_hook_and_one_without_the_call_are_asked_too() -> None:
    @tool(effect="once")
    def pay(cents: int) -> str:
        raise ConnectionResetError("gone")

    @pay.reconcile
    def _(cents: int) -> Outcome:
        return Outcome.happened(f"found {cents}")

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay(500))

    async def main() -> str:
        async with perdure(None, [payer]) as app:
            return str(await app.run(payer))

    assert run(main()) == "found 500"


# -- keys ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("passed_s", "attempts"), [(59, 2), (61, 1)])
def test_a_key_protects_inside_its_window_only(tmp_path: Path, passed_s: float, attempts: int) -> None:
    """A crash inside a keyed call; the next worker comes earlier or later than the service forgets the key."""
    hanging, performed = asyncio.Event(), list[int]()

    @tool(effect="keyed", key_window=60)
    async def pay(call: Call) -> str:
        performed.append(call.attempt)
        if call.attempt == 1:
            await hanging.wait()
        return "paid"

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    clock = ManualClock()

    async def crash() -> None:
        async with perdure(tmp_path / "db", [payer], clock) as app:
            await app.start(payer, id="r")
            driving = asyncio.create_task(app.drive("r", wait=False))
            await until(lambda: performed)
            app.abort()
            await driving

    async def resume() -> RunRow:
        async with perdure(tmp_path / "db", [payer], clock) as app:
            return await app.drive("r", wait=False)

    run(crash())
    clock.advance(passed_s)
    row = run(resume())
    assert performed == list(range(1, attempts + 1))
    assert row.status == ("succeeded" if attempts == 2 else "needs_attention")
    if attempts == 1:
        assert "past the window" in (row.error or "")


# -- people -------------------------------------------------------------------------------------------------------------
ANSWERS: list[tuple[dict[str, Any], Any, list[int]]] = [
    ({"happened": {"id": 7}}, {"id": 7}, [1]),
    ({"happened": None}, None, [1]),
    ({"did_not_happen": True}, "paid at attempt 2", [1, 2]),
    ({"fail": "the bank says no"}, ["fatal", "Resolved", "the bank says no"], [1]),
]


@pytest.mark.parametrize(("answer", "output", "attempts"), ANSWERS, ids=["happened", "happened-null", "did-not", "fail"])
def test_a_person_settles_a_doubt_in_three_ways(answer: dict[str, Any], output: Any, attempts: list[int]) -> None:
    desk = Desk("once")

    async def main() -> tuple[Any, list[str]]:
        async with perdure(None, [desk.agent]) as app:
            handle = await app.start(desk.agent, id="r")
            assert (await app.drive("r")).status == "needs_attention"
            await app.resolve("r", 1, by="ann", note="I called them", **answer)
            assert (await handle.status()).status == "queued"
            return await handle.result(), outline(await handle.events())

    found, lines = run(main())
    assert found == output
    assert desk.attempts == attempts
    assert any(line.startswith("resolved 1/1") and line.endswith("by ann") for line in lines)


@pytest.mark.parametrize(("answer", "output", "attempts"), ANSWERS, ids=["happened", "happened-null", "did-not", "fail"])
def test_a_person_settles_a_doubt_while_a_worker_holds_the_run(answer: dict[str, Any], output: Any, attempts: list[int]) -> None:
    """Another call is still running, so that the answer goes through the inbox of the worker that has the run."""
    finish = asyncio.Event()
    desk_attempts: list[int] = []

    @tool(effect="once")
    async def pay(call: Call) -> Any:
        desk_attempts.append(call.attempt)
        if call.attempt == 1:
            raise TimeoutError("no answer")
        return f"paid at attempt {call.attempt}"

    @tool(effect="read")
    async def slow() -> str:
        await finish.wait()
        return "slow"

    @agent(version="1")
    async def both(run: Run) -> Any:
        found = await asyncio.gather(pay(), slow(), return_exceptions=True)
        if isinstance(found[0], ToolFailed):
            return [found[0].kind, found[0].type, found[0].message]
        return found[0]

    async def main() -> tuple[Any, list[str]]:
        async with perdure(None, [both]) as app:
            handle = await app.start(both, id="r")
            driving = asyncio.create_task(app.drive("r"))
            while "in_doubt 1/1" not in outline(await handle.events()):
                await asyncio.sleep(0.001)
            assert (await handle.status()).holder is not None
            await app.resolve("r", 1, by="ann", **answer)
            while not any(line.startswith("resolved") for line in outline(await handle.events())):
                await asyncio.sleep(0.001)
            finish.set()
            await driving
            return await handle.result(), outline(await handle.events())

    found, lines = run(main())
    assert found == output
    assert desk_attempts == attempts
    assert "attention_needed" not in lines


def test_an_answer_from_a_second_app_reaches_the_run_that_the_first_one_drives(tmp_path: Path) -> None:
    finish = asyncio.Event()

    @tool(effect="once")
    async def pay() -> Any:
        raise TimeoutError("no answer")

    @tool(effect="read")
    async def slow() -> None:
        await finish.wait()

    @agent(version="1")
    async def both(run: Run) -> Any:
        return (await asyncio.gather(pay(), slow()))[0]

    async def main() -> Any:
        async with perdure(tmp_path / "db", [both]) as first, perdure(tmp_path / "db", [both]) as second:
            handle = await first.start(both, id="r")
            driving = asyncio.create_task(first.drive("r"))
            while "in_doubt 1/1" not in outline(await handle.events()):
                await asyncio.sleep(0.001)
            await second.resolve("r", 1, happened="seen at the bank")
            finish.set()
            await driving
            return await handle.result()

    assert run(main()) == "seen at the bank"


def test_the_second_answer_to_the_same_doubt_is_refused() -> None:
    desk = Desk("once")

    async def main() -> None:
        async with perdure(None, [desk.agent]) as app:
            await app.start(desk.agent, id="r")
            await app.drive("r")
            await app.resolve("r", 1, happened="yes")
            with pytest.raises(Conflict, match="only a call in doubt can be resolved"):
                await app.resolve("r", 1, did_not_happen=True)
            await app.drive("r")
            with pytest.raises(Conflict):
                await app.resolve("r", 1, happened="again")

    run(main())
    assert desk.attempts == [1]


@pytest.mark.parametrize("answer", [{}, {"happened": 1, "did_not_happen": True}, {"did_not_happen": True, "fail": "x"}])
def test_an_answer_says_exactly_one_thing(answer: dict[str, Any]) -> None:
    desk = Desk("once")

    async def main(app: Perdure) -> None:
        await app.start(desk.agent, id="r")
        await app.drive("r")
        await app.resolve("r", 1, **answer)

    async def within() -> None:
        async with perdure(None, [desk.agent]) as app:
            await main(app)

    with pytest.raises(InvalidInput, match="exactly one of"):
        run(within())


def test_answers_about_nothing_are_refused_and_lose_nothing() -> None:
    desk = Desk("once")

    async def main() -> str:
        async with perdure(None, [desk.agent]) as app:
            await app.start(desk.agent, id="r")
            await app.drive("r")
            with pytest.raises(NotFound, match="has no call 9"):
                await app.resolve("r", 9, happened=1)
            with pytest.raises(NotFound, match="no run nowhere"):
                await app.resolve("nowhere", 1, happened=1)
            with pytest.raises(NotEncodable):
                await app.resolve("r", 1, happened={1, 2})
            assert (await app.handle("r").status()).status == "needs_attention"
            await app.resolve("r", 1, happened="all the same")
            return str(await app.handle("r").result())

    assert run(main()) == "all the same"


def test_a_second_doubt_waits_for_its_own_answer() -> None:
    """Three calls in doubt: settling one does not settle the others."""

    @tool(effect="once")
    async def pay(at: int) -> int:
        raise TimeoutError("no answer")

    @agent(version="1")
    async def payer(run: Run) -> list[int]:
        return await asyncio.gather(*(pay(at) for at in range(3)))

    async def main() -> tuple[list[str], Any]:
        statuses = []
        async with perdure(None, [payer]) as app:
            await app.start(payer, id="r")
            for number in (2, 3, 1):
                row = await app.drive("r")
                statuses.append(row.waiting_for or "")
                await app.resolve("r", number, happened=number * 10)
            return statuses, await app.handle("r").result()

    statuses, output = run(main())
    assert [status.count("call") for status in statuses] == [3, 2, 1]
    assert output == [10, 20, 30]


def test_a_run_in_doubt_still_wakes_up_for_its_timer() -> None:
    """Needing a person about one call does not stop what else the agent does."""

    @tool(effect="once")
    async def pay() -> None:
        raise TimeoutError("no answer")

    @agent(version="1")
    async def payer(run: Run) -> str:
        try:
            async with asyncio.timeout(30):
                await pay()
        except TimeoutError:
            run.note("went on without it")
        return "done"

    async def main() -> tuple[list[Event], Any]:
        clock = ManualClock()
        async with perdure(None, [payer], clock) as app:
            handle = await app.start(payer, id="r")
            row = await app.drive("r", wait=False)
            assert (row.status, row.ready_at) == ("needs_attention", clock.now() + 30_000_000)
            clock.advance(31)
            row = await app.drive("r", wait=False)
            assert (row.status, row.ready_at) == ("needs_attention", None), "its doubt must still be settled: nothing is guessed away"
            await app.resolve("r", 1, happened=None)
            return await handle.events(), await handle.result()

    events, output = run(main())
    assert output == "done"
    assert "note went on without it" in outline(events)
    assert [event.body.status for event in events if isinstance(event.body, RunReleased)] == ["needs_attention"] * 2
