"""Control: which names count as one person, what an added budget must be, and a pause that is taken back in time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from msgspec import structs
from pydantic import AwareDatetime
from tests.unit.drive_tools import SETTINGS, ManualClock, outline, perdure, run, status_of, until

from perdure import Approval, Budget, Conflict, InvalidInput, NotApproved, NotPermitted, Perdure, Run, ToolFailed, agent, tool
from perdure.core.events import batch_of
from perdure.inspect.why.page import why
from perdure.store import approvals
from perdure.store.api import ApprovalFilter, ApprovalRow

COMPOSED, SPLIT = "jos\u00e9", "jose\u0301"  # the same name, in two encodings
HOUR = 3600.0
ORDER = UUID(int=1)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@tool(effect="idempotent")
async def step(number: int) -> int:
    return number


@agent(version="1")
async def walker(run: Run, steps: int) -> int:
    for number in range(steps):
        await step(number)
    return steps


class Payments:
    """An agent that asks before it pays."""

    def __init__(self, policy: Approval) -> None:
        @tool(effect="idempotent", approval=policy)
        async def pay() -> str:
            return "paid"

        @agent(version="1")
        async def payer(run: Run) -> str:
            try:
                return await pay()
            except NotApproved as refused:
                return refused.outcome

        self.agent = payer

    async def ask(self, app: Perdure, **start: Any) -> str:
        await app.start(self.agent, id="r", **start)
        await app.engine.drive("r", wait=False)
        (row,) = pending(app)
        return row.approval


def pending(app: Perdure) -> list[ApprovalRow]:
    return app.store.approvals(ApprovalFilter(run_id="r"))


# -- who decides ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("again", ["ann ", " ann", "ann\u200b", "ann\ufe0f", "a\U000e0100nn", "ann\n", "", " ", 5, None])
def test_one_person_is_not_counted_twice_by_a_blank_or_what_nobody_sees(again: Any) -> None:
    payments = Payments(Approval(quorum=2))

    async def main() -> None:
        async with perdure(None, [payments.agent]) as app:
            approval = await payments.ask(app)
            await app.approve(approval, by="ann")
            with pytest.raises(InvalidInput, match="no blank at either end"):
                await app.approve(approval, by=again)
            with pytest.raises(InvalidInput, match="no blank at either end"):
                await app.reject(approval, by=again, reason="no")
            assert pending(app)[0].standing.voters == ("ann",)

    run(main())


def test_one_person_is_not_counted_twice_by_another_encoding_of_their_name() -> None:
    payments = Payments(Approval(by=[SPLIT, "ann", "bob"], quorum=2))

    async def main() -> None:
        async with perdure(None, [payments.agent]) as app:
            approval = await payments.ask(app)
            await app.approve(approval, by=COMPOSED)
            with pytest.raises(Conflict, match="has already approved"):
                await app.approve(approval, by=SPLIT)

    run(main())


def test_one_person_is_not_counted_twice_by_another_form_of_their_letters() -> None:
    payments = Payments(Approval(quorum=2, four_eyes=True))

    async def main() -> None:
        async with perdure(None, [payments.agent]) as app:
            approval = await payments.ask(app, actor="ann")
            with pytest.raises(NotPermitted, match="the run acts for ann"):
                await app.approve(approval, by="\uff41nn")
            await app.approve(approval, by="bob")
            with pytest.raises(Conflict, match="bob has already approved"):
                await app.approve(approval, by="\uff42ob")
            assert pending(app)[0].standing.voters == ("bob",)

    run(main())


@pytest.mark.parametrize("by", ["ann\ufe0f", "ann\U000e0100", "a\x1b[2Jnn", "ann\u202e", "x" * 201])
def test_whoever_steers_a_run_has_a_name_that_can_be_seen(by: str) -> None:
    async def main() -> None:
        async with perdure(None, [walker]) as app:
            await app.start(walker, 1, id="r")
            for steer in (
                app.signal("r", "topic", by=by),
                app.pause("r", by=by),
                app.unpause("r", by=by),
                app.cancel("r", by=by),
                app.cancel("r", by=by, force=True),
                app.undo("r", by=by),
            ):
                with pytest.raises(InvalidInput, match="none of them invisible"):
                    await steer
            assert outline(await app.handle("r").events()) == ["run_created"]

    run(main())


@pytest.mark.parametrize("member", [COMPOSED, SPLIT])
@pytest.mark.parametrize("by", [COMPOSED, SPLIT])
def test_roles_are_looked_up_with_the_name_that_is_counted(member: str, by: str) -> None:
    payments = Payments(Approval(by="role:finance"))

    async def main() -> str:
        settings = structs.replace(SETTINGS, roles={"finance": (member,)})
        async with perdure(None, [payments.agent], settings=settings) as app:
            approval = await payments.ask(app)
            with pytest.raises(NotPermitted):
                await app.approve(approval, by="ann")
            await app.approve(approval, by=by)
            return str(await app.handle("r").result())

    assert run(main()) == "paid"


def test_a_yes_that_had_to_wait_for_the_database_until_the_time_was_over_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    payments, clock = Payments(Approval(expires=HOUR)), ManualClock()
    asked_and_written = iter((0.0, float(HOUR)))  # another transaction had the write lock meanwhile

    async def main() -> None:
        async with perdure(None, [payments.agent], clock) as app:
            approval = await payments.ask(app)
            monkeypatch.setattr(approvals, "time", SimpleNamespace(monotonic=lambda: next(asked_and_written)))
            with pytest.raises(Conflict, match="has expired"):
                await app.approve(approval, by="ann")

    run(main())


# -- what an approval may change --------------------------------------------------------------------------------------
@tool(effect="once", approval=Approval(editable=["when", "price", "order", "aware"]))
async def deliver(when: datetime = NOON, price: Decimal = Decimal("1.50"), order: UUID = ORDER, aware: AwareDatetime = NOON) -> list[str]:
    return [str(when), str(price), str(order)]


@agent(version="1")
async def shop(run: Run) -> Any:
    try:
        return await deliver()
    except ToolFailed as refused:
        return str(refused)


@pytest.mark.parametrize("edit", [{"when": "x"}, {"when": "2026-02-30T00:00Z"}, {"price": "NaN"}, {"price": "x"}, {"order": "zz"}])
def test_an_edit_that_the_tool_could_not_read_is_not_the_one_decision(edit: dict[str, Any]) -> None:
    async def main() -> Any:
        async with perdure(None, [shop]) as app:
            handle = await app.start(shop, id="r")
            await app.engine.drive("r", wait=False)
            (asked,) = pending(app)
            with pytest.raises(InvalidInput, match=f"{next(iter(edit))} = .* must be "):
                await app.approve(asked.approval, by="ann", edit=edit)
            assert pending(app) == [asked]
            good = {"when": "2026-02-28T12:00:00+00:00", "price": "2.00", "order": str(UUID(int=2))}
            await app.approve(asked.approval, by="ann", edit=good)
            return await handle.result()

    assert run(main()) == ["2026-02-28 12:00:00+00:00", "2.00", str(UUID(int=2))]


def test_an_edit_that_only_the_tool_can_judge_is_refused_by_the_worker() -> None:
    async def main() -> Any:
        async with perdure(None, [shop]) as app:
            handle = await app.start(shop, id="r")
            await app.engine.drive("r", wait=False)
            # Its schema says "date-time" and nothing about a zone.
            await app.approve(pending(app)[0].approval, by="ann", edit={"aware": "2026-02-28T12:00:00"})
            return await handle.result()

    assert "as edited by ann" in run(main())


# -- how long a yes is good for ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "later", "outcome"),
    [
        ({"on_expiry": "reject"}, HOUR + 1, "expired"),
        ({"on_expiry": "wait"}, HOUR + 1, "paid"),
        ({"on_expiry": "wait"}, 1000 * HOUR, "paid"),
        ({"on_expiry": "escalate", "escalate_to": "boss"}, HOUR + 1, "paid"),
        ({"on_expiry": "escalate", "escalate_to": "boss"}, 2 * HOUR + 1, "expired"),
    ],
)
def test_a_yes_in_time_is_used_by_a_worker_that_comes_later(policy: dict[str, Any], later: float, outcome: str, tmp_path: Path) -> None:
    payments, clock = Payments(Approval(expires=HOUR, **policy)), ManualClock()

    async def main() -> Any:
        async with perdure(tmp_path / "db", [payments.agent], clock) as app:
            await app.approve(await payments.ask(app), by="ann")
        clock.advance(later)
        async with perdure(tmp_path / "db", [payments.agent], clock) as app:
            await app.engine.drive("r", wait=False)
            return await app.handle("r").result()

    assert run(main()) == outcome


# -- money ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("add", "said"),
    [
        (
            Budget(usd=5),
            "limits calls and not usd, so no usd can be added; it has used up its calls\nadd to what is used up: perdure unpause r --add-calls N",
        ),
        (Budget(usd=5, calls=5), "limits calls and not usd"),
        (Budget(calls=0), "(?s)would stop again at once.*perdure unpause r --add-calls 1$"),
        (Budget(), "(?s)would stop again at once.*perdure unpause r --add-calls 1$"),
    ],
)
def test_a_top_up_that_does_not_help_says_which_one_would(add: Any, said: str) -> None:
    async def main() -> None:
        async with perdure(None, [walker]) as app:
            handle = await app.start(walker, 5, id="r", budget=Budget(calls=3))
            assert (await app.engine.drive("r")).attention == "budget"
            before = await handle.events()
            with pytest.raises(Conflict, match=said):
                await app.unpause("r", add=add)
            assert await handle.events() == before
            assert await app.unpause("r", add=Budget(calls=2)) == ["r"]
            assert await handle.result() == 5

    run(main())


def test_the_least_that_helps_is_told_in_dollars_and_helps() -> None:
    @tool(effect="idempotent", cost=0.5)
    async def think() -> int:
        return 1

    @agent(version="1")
    async def thinker(run: Run) -> int:
        return await think()

    async def main() -> Any:
        async with perdure(None, [thinker]) as app:
            handle = await app.start(thinker, id="r", budget=Budget(usd="0.2"))
            assert (await app.engine.drive("r")).attention == "budget"
            with pytest.raises(Conflict, match=r"--add-usd 0\.3$"):
                await app.unpause("r", add=Budget(usd="0.299999"))
            await app.unpause("r", add=Budget(usd="0.3"))
            return await handle.result()

    assert run(main()) == 1


def test_a_paused_run_that_has_used_nothing_up_may_be_given_more_of_what_is_limited() -> None:
    async def main() -> Any:
        async with perdure(None, [walker]) as app:
            handle = await app.start(walker, 2, id="r", budget=Budget(calls=1))
            await app.pause("r")
            with pytest.raises(Conflict, match="limits calls and not tokens"):
                await app.unpause("r", add=Budget(tokens=5))
            await app.unpause("r", add=Budget(calls=1))
            return await handle.result()

    assert run(main()) == 2


@pytest.mark.parametrize(("limit", "most"), [("usd", 10**12), ("seconds", 10**12), ("calls", 10**15), ("tokens", 10**15)])
def test_no_top_up_takes_a_budget_beyond_what_any_may_have(limit: str, most: int) -> None:
    def of(amount: int) -> Any:
        return Budget(**{limit: amount})  # type: ignore[arg-type]

    async def main() -> None:
        async with perdure(None, [walker]) as app:
            handle = await app.start(walker, 1, id="r", budget=of(most - 1))
            await app.pause("r")
            before = await handle.events()
            for too_much in (2, most):
                with pytest.raises(
                    Conflict, match=f"the budget of run r would allow more {limit} \\(at most {most:,}\\) than any budget may allow"
                ):
                    await app.unpause("r", add=of(too_much))
            assert await handle.events() == before
            await app.unpause("r", add=of(1))
            assert await handle.result() == 1

    run(main())


# -- pausing --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recorded", [False, True])
def test_a_pause_is_taken_back_before_the_run_has_come_to_it(recorded: bool) -> None:
    release = asyncio.Event()

    @tool(effect="idempotent")
    async def slow() -> int:
        await release.wait()
        return 1

    @agent(version="1")
    async def worker(run: Run) -> int:
        return await slow() + await step(1)

    async def main() -> list[str]:
        async with perdure(None, [worker]) as app:
            handle = await app.start(worker, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: status_of(app, "r") == "running" and len(app.store.read("r")) >= 3)
            await app.pause("r", by="ann", reason="lunch")
            if recorded:
                await until(lambda: any(event.type == "run_paused" for event in app.store.read("r")))
                assert status_of(app, "r") == "running"
                page = why(app.store, "r", now=app.clock.now())
                assert page.sentence.startswith("pausing (ann asked: lunch), when what is under way has ended: worker ")
                assert "perdure unpause r" in [one.command for one in page.next]
            assert await app.unpause("r", by="bob") == ["r"]
            release.set()
            row = await driving
            if row.status != "succeeded":
                await app.engine.drive("r")  # it was unpaused in between, and any worker may claim it
            assert await handle.result() == 2
            return outline(await handle.events())

    lines = run(main())
    assert (lines.count("run_paused"), lines.count("run_unpaused")) == (1, 1)


def test_a_run_that_nobody_has_asked_to_pause_cannot_be_let_go_on() -> None:
    release = asyncio.Event()

    @tool(effect="idempotent")
    async def slow() -> int:
        await release.wait()
        return 1

    @agent(version="1")
    async def worker(run: Run) -> int:
        return await slow()

    async def main() -> None:
        async with perdure(None, [worker]) as app:
            await app.start(worker, id="r")
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: status_of(app, "r") == "running")
            with pytest.raises(Conflict, match="only a paused run"):
                await app.unpause("r")
            release.set()
            await driving

    run(main())


def test_an_answer_about_one_attempt_does_not_settle_a_later_one(tmp_path: Path) -> None:
    """The person has looked up what became of attempt 1. Nothing is known about attempt 2, which is in doubt now."""
    sent: list[int] = []

    @tool(effect="once")
    async def ship() -> str:
        sent.append(1)
        raise TimeoutError("no answer")

    @agent(version="1")
    async def shipper(run: Run) -> str:
        return await ship()

    async def main() -> None:
        async with Perdure(f"sqlite:///{tmp_path}/a.db", [shipper], settings=SETTINGS, batch="b-1") as app:
            await app.start(shipper, id="r")
            await app.engine.drive("r", wait=False)
            await app.resolve("r", 1, did_not_happen=True, final=True, attempt=1, by="ann")
            await app.engine.drive("r", wait=False)
            assert len(sent) == 2
            with pytest.raises(Conflict, match="attempt 2 is in doubt, and not attempt 1"):
                await app.resolve("r", 1, happened="shipped", attempt=1, by="ann")
            await app.resolve("r", 1, happened="shipped", attempt=2, by="ann")
            assert (await app.engine.drive("r", wait=False)).status == "succeeded"
            assert [batch for event in app.store.read("r") if (batch := batch_of(event.body))] == ["b-1", "b-1"]

    run(main())
