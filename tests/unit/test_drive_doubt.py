"""Calls in doubt: what a reconcile hook may answer, how long a key protects, and what a person can do (G5, G8)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from msgspec import structs
from tests.unit.drive_tools import SETTINGS, ManualClock, local, outline, perdure, run, until, worker_of

from perdure import Agent, Call, Conflict, InvalidInput, NotEncodable, NotFound, Outcome, Perdure, Retry, Run, ToolFailed, agent, tool
from perdure.core.events import Event, RetryScheduled, RunReleased
from perdure.core.steps import HookAnswered
from perdure.errors import StoreUnavailable
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
    """Drive the run until it ends or needs a person, whatever it waits for in between."""
    clock = clock or ManualClock()
    async with perdure(None, [desk.agent], clock) as app:
        handle = await app.start(desk.agent, id="r")
        while (row := await app.engine.drive("r", wait=False)).status == "waiting":
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


def test_in_progress_that_ends_in_not_knowing_is_left_to_a_person_and_not_asked_for_ever() -> None:
    def answer(call: Call) -> Outcome:
        assert len(desk.asked) < 20, "it is asked again and again"
        return Outcome.in_progress() if len(desk.asked) == 1 else Outcome.unknown("the ledger has two of them")

    desk = Desk("once", answer)
    row, _, events = run(rested(desk))
    assert (row.status, desk.attempts, desk.asked) == ("needs_attention", [1], [1, 1])
    assert outline(events)[-1] == "attention_needed"


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
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: performed)
            app.abort()
            await driving

    async def resume() -> RunRow:
        async with perdure(tmp_path / "db", [payer], clock) as app:
            return await app.engine.drive("r", wait=False)

    run(crash())
    clock.advance(passed_s)
    row = run(resume())
    assert performed == list(range(1, attempts + 1))
    assert row.status == ("succeeded" if attempts == 2 else "needs_attention")
    if attempts == 1:
        assert "past the window" in (row.error or "")


def test_a_key_that_grew_too_old_while_its_retry_waited_protects_nothing() -> None:
    """Every worker was down for three days; the service remembers a key for an hour."""
    desk = Desk("keyed", key_window=3600)
    row, _, events = run(rested(desk, step_s=72 * 3600))
    assert (row.status, desk.attempts) == ("needs_attention", [1])
    assert "past the window" in (row.error or "")
    assert outline(events)[1:4] == ["initiated pay 1/1", "in_doubt 1/1", "retry 1/2"]


def test_a_retry_after_a_doubt_that_its_agent_no_longer_waits_for_stays_in_doubt() -> None:
    """That the agent stops waiting does not prove that the first attempt did not charge."""
    attempts: list[int] = []

    @tool(effect="keyed", key_window=60, retry=Retry(base=600, max_delay=600, jitter=0))
    async def pay(call: Call) -> str:
        attempts.append(call.attempt)
        raise TimeoutError("no answer")

    @agent(version="1")
    async def hasty(run: Run) -> str:
        try:
            async with asyncio.timeout(5):
                await pay()
        except TimeoutError:
            pass
        return "went on without it"

    async def main() -> tuple[RunRow, list[str], Any]:
        clock = ManualClock()
        async with perdure(None, [hasty], clock) as app:
            handle = await app.start(hasty, id="r")
            while (row := await app.engine.drive("r", wait=False)).status == "waiting":
                clock.advance(6)
            lines = outline(await handle.events())
            if row.status == "needs_attention":
                await app.resolve("r", 1, did_not_happen=True)
            return row, lines, await handle.result()

    row, lines, output = run(main())
    assert row.status == "needs_attention"
    assert not [line for line in lines if line.startswith(("failed", "run_"))][1:], "neither the call nor the run has ended"
    assert (output, attempts) == ("went on without it", [1])


def test_a_retry_after_a_doubt_that_is_given_up_as_it_falls_due_is_not_told_as_cancelled() -> None:
    """Its retry and the agent's own time-out are due at the same moment. That attempt 2 has not begun does not undo attempt 1."""
    attempts: list[int] = []

    @tool(effect="keyed", retry=Retry(base=3, jitter=0))
    async def pay(call: Call) -> str:
        attempts.append(call.attempt)
        if call.attempt == 1:
            raise TimeoutError("no answer")
        return "paid"

    @agent(version="1")
    async def hasty(run: Run) -> str:
        try:
            async with asyncio.timeout(5):
                return str(await pay())
        except TimeoutError:
            return "went on without it"

    async def main() -> tuple[Any, list[str]]:
        clock = ManualClock()
        async with perdure(None, [hasty], clock) as app:
            handle = await app.start(hasty, id="r")
            assert (await app.engine.drive("r", wait=False)).status == "waiting"
            clock.advance(10)
            return await handle.result(), outline(await handle.events())

    output, lines = run(main())
    assert output == "went on without it"
    assert lines[4:] == ["initiated pay 1/2", "timer_fired", "completed 1/2", "run_succeeded"], "its key settles it: it has happened once"
    assert attempts == [1, 2]


# -- attempts that may still be running ---------------------------------------------------------------------------------
class Zombie:
    """A `once` call that goes on after it was given up, and a hook that finds nothing as long as it does."""

    def __init__(self, timeout: float | None = None) -> None:
        self.began: list[int] = []
        self.ledger: list[int] = []
        self.asked: list[int] = []
        self.wake = threading.Event()

        @tool(effect="once", timeout=timeout)
        def pay(call: Call) -> str:
            self.began.append(call.attempt)
            assert self.wake.wait(20)
            self.ledger.append(call.attempt)
            return "paid"

        @pay.reconcile
        async def _(call: Call) -> Outcome:
            self.asked.append(call.attempt)
            return Outcome.happened("seen") if self.ledger else Outcome.not_happened()

        @agent(version="1")
        async def payer(run: Run) -> str:
            return str(await pay())

        self.agent: Agent[Any, Any] = payer


@pytest.mark.parametrize("final", [False, True])
def test_not_found_is_believed_at_once_only_if_the_service_has_ruled_it_out(final: bool) -> None:
    """The loop's clock gives the time that a request may take: it does not move in this test."""
    desk = Desk("once", lambda call: Outcome.not_happened(final=final))

    async def main() -> None:
        patient = structs.replace(SETTINGS, unknown_deadline_s=3600.0)
        async with Perdure("sqlite://", agents=[desk.agent], settings=patient) as app, asyncio.TaskGroup() as group:
            stop = asyncio.Event()
            handle = await app.start(desk.agent, id="r")
            group.create_task(app.work(stop=stop))
            if final:
                assert await handle.result() == "paid at attempt 2"
            else:
                await until(lambda: len(desk.asked) == 1)
                assert [event.type for event in await handle.events()][-1] == "tool_call_in_doubt"
                assert desk.attempts == [1]
            stop.set()

    run(main())


def test_the_hook_is_asked_again_when_the_request_can_no_longer_be_on_its_way() -> None:
    """The second answer of the hook counts: the request had arrived late."""
    answers = iter([Outcome.not_happened(), Outcome.happened("late")])
    desk = Desk("once", lambda call: next(answers))

    async def main() -> None:
        patient = structs.replace(SETTINGS, unknown_deadline_s=0.3)
        async with Perdure("sqlite://", agents=[desk.agent], settings=patient) as app:
            assert await app.run(desk.agent, id="r") == "late"

    run(main())
    assert desk.attempts == [1]
    assert len(desk.asked) == 2


def test_a_person_who_looks_too_early_is_told_when_to_look_again() -> None:
    clock = ManualClock()
    desk = Desk("once")

    async def main() -> None:
        patient = structs.replace(SETTINGS, unknown_deadline_s=60.0, reconcile_margin_s=2.0)
        async with Perdure("sqlite://", agents=[desk.agent], settings=patient, clock=clock) as app:
            handle = await app.start(desk.agent, id="r")
            assert (await app.engine.drive("r", wait=False)).status == "needs_attention"
            before = len(await handle.events())
            clock.advance(61)
            with pytest.raises(
                Conflict, match=r"(?s)call 1 \(pay\) of run r: its request may still arrive until .* UTC: look again .* --final"
            ):
                await app.resolve("r", 1, did_not_happen=True)
            assert len(await handle.events()) == before
            clock.advance(1)
            await app.resolve("r", 1, did_not_happen=True)
            assert await handle.result() == "paid at attempt 2"

    run(main())


def test_a_person_may_say_that_the_service_has_ruled_it_out() -> None:
    desk = Desk("once")

    async def main() -> None:
        patient = structs.replace(SETTINGS, unknown_deadline_s=60.0)
        async with Perdure("sqlite://", agents=[desk.agent], settings=patient) as app:
            handle = await app.start(desk.agent, id="r")
            await app.engine.drive("r", wait=False)
            with pytest.raises(InvalidInput, match="final=True: True or False, and True only with did_not_happen=True"):
                await app.resolve("r", 1, happened=1, final=True)
            await app.resolve("r", 1, did_not_happen=True, final=True)
            assert await handle.result() == "paid at attempt 2"

    run(main())


def test_not_found_says_nothing_about_an_attempt_that_did_not_stop() -> None:
    """It timed out and runs on in its thread. That its hook finds nothing now does not mean that nothing will happen (T22)."""
    zombie = Zombie(timeout=0.02)

    async def main() -> tuple[list[str], Any]:
        async with perdure(None, [zombie.agent]) as app:
            await app.start(zombie.agent, id="r")
            seen: list[str] = [(await app.engine.drive("r")).status]
            await app.unpause("r")  # also the next drive, which did not see the attempt, must not trust "not found"
            seen.append((await app.engine.drive("r")).status)
            zombie.wake.set()
            await until(lambda: zombie.ledger)
            await app.unpause("r")
            return seen, await app.handle("r").result()

    assert run(main()) == (["needs_attention", "needs_attention"], "seen")
    assert zombie.asked == [1, 1, 1]
    assert zombie.ledger == [1], "one effect"


def test_not_found_says_nothing_about_an_attempt_of_a_drive_that_broke() -> None:
    """The store failed under a drive. Its worker lives and gives the run up at once, while its attempt runs on."""
    zombie = Zombie()

    async def main() -> tuple[RunRow, Any]:
        clock = ManualClock()
        async with perdure(None, [zombie.agent], clock) as app:
            await app.start(zombie.agent, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: zombie.began)
            worker = local(app)._worker
            assert worker is not None
            worker.broke(worker._drives["r"], StoreUnavailable("a hiccup"))
            await driving
            assert (await app.handle("r").row()).holder is None
            clock.advance(2)
            row = await app.engine.drive("r", wait=False)
            zombie.wake.set()
            await until(lambda: zombie.ledger)
            await app.unpause("r")
            return row, await app.handle("r").result()

    row, output = run(main())
    assert (row.status, output) == ("needs_attention", "seen")
    assert "may still be running" in (row.error or "")
    assert zombie.ledger == [1]


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
            assert (await app.engine.drive("r")).status == "needs_attention"
            await app.resolve("r", 1, by="ann", note="I called them", **answer)
            assert (await handle.row()).status == "queued"
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
            driving = asyncio.create_task(app.engine.drive("r"))
            while "in_doubt 1/1" not in outline(await handle.events()):
                await asyncio.sleep(0.001)
            assert (await handle.row()).holder is not None
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
            driving = asyncio.create_task(first.engine.drive("r"))
            while "in_doubt 1/1" not in outline(await handle.events()):
                await asyncio.sleep(0.001)
            await second.resolve("r", 1, happened="seen at the bank")
            finish.set()
            await driving
            return await handle.result()

    assert run(main()) == "seen at the bank"


def test_a_call_that_a_live_worker_is_performing_cannot_be_resolved(tmp_path: Path) -> None:
    """Its own answer is on the way; two of them would be one too many. Once the worker is gone, a person may know."""
    finish, began = asyncio.Event(), list[int]()

    @tool(effect="once")
    async def pay(call: Call) -> str:
        began.append(call.attempt)
        await finish.wait()
        return "its own answer"

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> list[Any]:
        async with perdure(tmp_path / "db", [payer]) as app, perdure(tmp_path / "db", []) as other:
            for run_id in ("r", "s"):
                await app.start(payer, id=run_id)
            results = [asyncio.create_task(app.handle(run_id).result()) for run_id in ("r", "s")]
            await until(lambda: len(began) == 2)
            for who in (app, other):
                with pytest.raises(Conflict, match="is being performed by a live worker"):
                    await who.resolve("r", 1, happened="by hand")
            worker = local(app)._worker
            assert worker is not None
            worker._drives["s"].abort()
            app.store.unregister(worker.id, app.clock.now())
            await other.resolve("s", 1, happened="by hand")
            results[1].cancel()
            return [(await other.handle("s").state()).calls[1].phase]

    assert run(main()) == ["completed"]


class Overtaken:
    """The hook is asked about attempt 1 and says that it did not happen; attempt 2 is then in doubt as well, and asked about for long."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.apps: list[Perdure] = []
        self.answered = asyncio.Event()
        self.asked: list[int] = []

        @tool(effect="once")
        async def pay(call: Call) -> str:
            raise TimeoutError(f"attempt {call.attempt}: no answer")

        @pay.reconcile
        async def _(call: Call) -> Outcome:
            self.asked.append(call.attempt)
            if call.attempt == 1:
                await self.apps[0].resolve("r", 1, by="ann", **answer)  # at the same moment a person answers about attempt 1
                return Outcome.not_happened()
            await self.answered.wait()
            return Outcome.happened("found attempt 2")

        @agent(version="1")
        async def payer(run: Run) -> str:
            return str(await pay())

        self.agent: Agent[Any, Any] = payer


@pytest.mark.parametrize("answer", [{"happened": "by hand"}, {"did_not_happen": True}, {"fail": "no"}], ids=["happened", "did-not", "fail"])
def test_an_answer_about_one_attempt_is_not_taken_for_the_next(answer: dict[str, Any]) -> None:
    case = Overtaken(answer)

    async def main() -> tuple[Any, list[str]]:
        async with perdure(None, [case.agent], settings=structs.replace(SETTINGS, poll_s=0.2)) as app:
            case.apps.append(app)
            worker = await local(app)._working()
            worker._stop_listening()  # the answer is found by looking, a little later
            handle = await app.start(case.agent, id="r")
            result = asyncio.create_task(handle.result())
            await until(lambda: case.asked == [1, 2])
            assert len(app.store.inbox(worker.id)) == 1, "the answer has not been read yet"
            core = worker._drives["r"]._core
            await until(lambda: 1 in core._seen and not core._arrived)
            case.answered.set()
            return await result, outline(await handle.events())

    output, lines = run(main())
    assert output == "found attempt 2"
    assert [line for line in lines if line.startswith("resolved")] == [
        "resolved 1/1 did_not_happen by reconcile",
        "resolved 1/2 happened by reconcile",
    ]


@pytest.mark.parametrize("late", [Outcome.happened("old"), Outcome.not_happened(), Outcome.unknown("?")], ids=lambda late: late.kind)
def test_the_late_end_of_a_hook_that_was_asked_about_an_attempt_before_changes_nothing(late: Outcome) -> None:
    """The answer was queued after the event that settled that attempt; meanwhile the next attempt is in doubt."""
    answered, asked, attempts = asyncio.Event(), list[int](), list[int]()

    @tool(effect="once")
    async def pay(call: Call) -> str:
        attempts.append(call.attempt)
        raise TimeoutError("no answer")

    @pay.reconcile
    async def _(call: Call) -> Outcome:
        asked.append(call.attempt)
        if call.attempt == 1:
            return Outcome.not_happened()
        await answered.wait()
        return Outcome.happened("found attempt 2")

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> Any:
        async with perdure(None, [payer]) as app:
            result = asyncio.create_task((await app.start(payer, id="r")).result())
            await until(lambda: asked == [1, 2])
            drive = worker_of(app)._drives["r"]
            drive._feed_soon(HookAnswered(1, 1, late, asked_at=round(asyncio.get_running_loop().time() * 1e6)))
            await asyncio.sleep(0.02)
            answered.set()
            return await result

    assert run(main()) == "found attempt 2"
    assert (attempts, asked) == ([1, 2], [1, 2])


def test_the_late_end_of_a_hook_does_not_trouble_a_run_that_is_being_given_up() -> None:
    """A person's answer and the hook's arrive together while the worker is drained: the first one settles it."""
    asked: list[int] = []

    @tool(effect="once")
    async def pay() -> str:
        raise TimeoutError("no answer")

    @pay.reconcile
    async def _() -> Outcome:
        asked.append(1)
        await asyncio.sleep(60)
        return Outcome.unknown("?")

    @agent(version="1")
    async def payer(run: Run) -> str:
        return str(await pay())

    async def main() -> tuple[RunRow, list[str]]:
        async with perdure(None, [payer], settings=structs.replace(SETTINGS, poll_s=60)) as app:
            await app.start(payer, id="r")
            worker = await local(app)._working()
            worker._stop_listening()
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: asked)
            drive = worker._drives["r"]
            await app.resolve("r", 1, did_not_happen=True, by="ann")
            worker._draining = True
            drive.drain()
            drive.receive(*app.store.inbox(worker.id))
            drive._feed_soon(HookAnswered(1, 1, Outcome.unknown("?"), asked_at=round(asyncio.get_running_loop().time() * 1e6)))
            await driving
            return await app.handle("r").row(), outline(await app.handle("r").events())

    row, lines = run(main())
    assert (row.status, row.error) == ("queued", None)
    assert lines[-1] == "resolved 1/1 did_not_happen by ann"


def test_the_second_answer_to_the_same_doubt_is_refused() -> None:
    desk = Desk("once")

    async def main() -> None:
        async with perdure(None, [desk.agent]) as app:
            await app.start(desk.agent, id="r")
            await app.engine.drive("r")
            await app.resolve("r", 1, happened="yes")
            with pytest.raises(Conflict, match="only a call in doubt can be resolved"):
                await app.resolve("r", 1, did_not_happen=True)
            await app.engine.drive("r")
            with pytest.raises(Conflict):
                await app.resolve("r", 1, happened="again")

    run(main())
    assert desk.attempts == [1]


@pytest.mark.parametrize("answer", [{}, {"happened": 1, "did_not_happen": True}, {"did_not_happen": True, "fail": "x"}])
def test_an_answer_says_exactly_one_thing(answer: dict[str, Any]) -> None:
    desk = Desk("once")

    async def main(app: Perdure) -> None:
        await app.start(desk.agent, id="r")
        await app.engine.drive("r")
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
            await app.engine.drive("r")
            with pytest.raises(NotFound, match="has no call 9"):
                await app.resolve("r", 9, happened=1)
            with pytest.raises(NotFound, match="no run nowhere"):
                await app.resolve("nowhere", 1, happened=1)
            with pytest.raises(NotEncodable):
                await app.resolve("r", 1, happened={1, 2})
            assert (await app.handle("r").row()).status == "needs_attention"
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
                row = await app.engine.drive("r")
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
            row = await app.engine.drive("r", wait=False)
            assert (row.status, row.ready_at) == ("needs_attention", clock.now() + 30_000_000)
            clock.advance(31)
            row = await app.engine.drive("r", wait=False)
            assert (row.status, row.ready_at) == ("needs_attention", None), "its doubt must still be settled: nothing is guessed away"
            await app.resolve("r", 1, happened=None)
            return await handle.events(), await handle.result()

    events, output = run(main())
    assert output == "done"
    assert "note went on without it" in outline(events)
    assert [event.body.status for event in events if isinstance(event.body, RunReleased)] == ["needs_attention"] * 2


@pytest.mark.parametrize("effect", ["once", "idempotent"])
def test_ctrl_c_while_the_thread_of_a_tool_is_being_started_is_no_proof_that_nothing_was_sent(
    effect: Literal["once", "idempotent"], monkeypatch: pytest.MonkeyPatch
) -> None:
    performed: list[int] = []
    plain, interrupts = threading.Thread.start, [KeyboardInterrupt()]

    @tool(effect=effect)
    def pay() -> int:
        performed.append(1)
        return len(performed)

    @agent(version="1")
    async def payer(run: Run) -> int:
        return await pay()

    def start(self: threading.Thread) -> None:
        plain(self)
        if self.name == "perdure-tool" and interrupts:
            # A signal is handled between any two lines: the thread has begun, and this was not noticed.
            raise interrupts.pop()

    async def main() -> RunRow:
        async with perdure(None, [payer]) as app:
            await app.start(payer, id="r")
            row = await app.engine.drive("r", wait=False)
            await until(lambda: performed)
            return row

    monkeypatch.setattr(threading.Thread, "start", start)
    row = run(main())
    assert (row.status, performed) == ("needs_attention" if effect == "once" else "waiting", [1])  # for a person, or for the next attempt
    assert effect != "once" or "may be running" in (row.error or "")
