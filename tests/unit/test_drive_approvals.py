"""Approvals from the agent's side.

What it learns, whichever process is alive, and that only the approved call is made (G9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import apsw
import pytest
from tests.unit.approval_tools import (
    HOUR,
    WAYS,
    Asking,
    answered,
    approve,
    check_replay,
    clock_of,
    driven,
    pending,
    refused,
    reject,
    rows,
    statuses,
    the_one,
    told,
    withdraw,
)
from tests.unit.drive_tools import ManualClock, local, outline, perdure, run, until, worker_of

from perdure import (
    Approval,
    Call,
    Conflict,
    InvalidInput,
    NotApproved,
    NotPermitted,
    NotSent,
    Perdure,
    Retry,
    Run,
    RunEnded,
    Settings,
    ToolFailed,
    agent,
    tool,
)
from perdure.core.events import ApprovalDecided, ApprovalRequested, ToolCallInitiated
from perdure.store.api import Append, Appended, RunRow
from perdure.tool import Tool

Decide = Callable[[Perdure], Awaitable[Any]]
CALL = {"order": "o-7", "cents": 900}


async def edit(app: Perdure) -> None:
    await approve(app, note="less", edit={"cents": 500})


async def expire(app: Perdure) -> None:
    clock_of(app).advance(HOUR)
    if local(app)._worker is not None:
        for drive in list(worker_of(app)._drives.values()):
            # This is the test's clock: nothing else tells a worker that it has moved.
            asyncio.get_running_loop().call_soon(drive.look_at_clock)


async def withdraw_it(app: Perdure) -> None:
    await withdraw(app, the_one(app))


DECISIONS: dict[str, Decide] = {
    "approved": lambda app: approve(app, note="fine"),
    "edited": edit,
    "rejected": reject,
    "expired": expire,
    "withdrawn": withdraw_it,
}


# -- what the agent learns --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_run_approve_tells_the_agent_what_was_decided(tmp_path: Path, decision: str, way: str) -> None:
    async def ask(run: Run) -> list[Any]:
        return told(await run.request_approval("refund.issue", CALL, expires=HOUR, editable=["cents"]))

    expected = {
        "approved": [True, "approved", "ann", "fine", CALL],
        "edited": [True, "approved", "ann", "less", {**CALL, "cents": 500}],
        "rejected": [False, "rejected", "ann", "too dear", None],
        "expired": [False, "expired", None, None, None],
        "withdrawn": [False, "withdrawn", None, None, None],
    }
    assert run(answered(tmp_path / "db", Asking(ask), way, DECISIONS[decision]))[0] == expected[decision]


class Refunds:
    """A tool that needs an approval, and the arguments of its calls."""

    def __init__(self, effect: Any = "once", approval: Any = None, **more: Any) -> None:
        self.made: list[list[Any]] = []

        @tool(effect=effect, approval=approval or Approval(expires=HOUR, editable="cents"), **more)
        def refund(order: str, cents: int, call: Call) -> str:
            self.made.append([order, cents, call.key])
            return f"{order}: {cents}"

        self.tool: Tool[..., Any] = refund

    async def ask(self, run: Run) -> Any:
        try:
            return await self.tool("o-7", 900)
        except NotApproved as error:
            return refused(error)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_a_tool_that_needs_a_person_runs_as_approved_or_not_at_all(tmp_path: Path, decision: str, way: str) -> None:
    refunds = Refunds()
    result, lines = run(answered(tmp_path / "db", Asking(refunds.ask), way, DECISIONS[decision]))
    expected = {
        "approved": "o-7: 900",
        "edited": "o-7: 500",
        "rejected": ["not approved", "rejected", "ann", "too dear", "rejected by ann: too dear"],
        "expired": ["not approved", "expired", None, None, "nobody decided in time"],
        "withdrawn": ["not approved", "withdrawn", None, None, "the approval was withdrawn"],
    }
    assert result == expected[decision]
    assert [cents for _, cents, _ in refunds.made] == {"approved": [900], "edited": [500]}.get(decision, [])
    assert [line for line in lines if line.startswith("initiated refund")] == ["initiated refund 2/1"] * len(refunds.made)


@pytest.mark.parametrize("effect", ["read", "idempotent", "keyed", "transaction", "once"])
@pytest.mark.parametrize("granted", [True, False])
def test_every_kind_of_tool_waits_for_its_person(tmp_path: Path, effect: Any, granted: bool) -> None:
    refunds = Refunds(effect)
    result, _ = run(answered(tmp_path / "db", Asking(refunds.ask), "restarted", approve if granted else reject))
    assert (len(refunds.made), result == "o-7: 900") == (int(granted), granted)


@pytest.mark.parametrize("effect", ["read", "idempotent", "keyed", "once"])
def test_nothing_begins_before_the_commit_that_uses_the_approval_up(effect: Any) -> None:
    """This also holds for a `read`, which needs no commit otherwise.

    After a crash the approval could be used again.
    """
    made: list[int] = []
    before: list[int] = []

    @tool(effect=effect, approval=True)
    async def look() -> int:
        made.append(1)
        return 1

    @agent(version="1")
    async def looker(run: Run) -> int:
        return int(await look())

    async def main() -> list[str]:
        async with perdure(None, [looker]) as app:
            await app.start(looker, id="r")
            await driven(app)
            await approve(app)
            append = app.store.append

            def watched(batch: Sequence[Append]) -> list[Appended]:
                if any(isinstance(sealed.event.body, ToolCallInitiated) for one in batch for sealed in one.events):
                    before.append(len(made))
                return append(batch)

            app.store.append = watched  # type: ignore[method-assign]
            await driven(app)
            return statuses(app)

    assert run(main()) == ["consumed"]
    assert (before, made) == ([0], [1])


def test_the_journal_tells_the_whole_story_of_an_approved_call(tmp_path: Path) -> None:
    refunds = Refunds()
    asking = Asking(refunds.ask)

    async def main() -> None:
        result, lines = await answered(tmp_path / "db", asking, "parked", edit, actor="user:17")
        assert result == "o-7: 500"
        asked = ["tool_call_proposed", "approval_requested", "completed 1/1", "approval_decided", "initiated refund 2/1", "completed 2/1"]
        assert [line for line in lines if line in asked] == asked
        async with perdure(tmp_path / "db", [asking.agent]) as app:
            events = await app.handle("r").events()
            (row,) = rows(app)
        (request,) = (event.body for event in events if isinstance(event.body, ApprovalRequested))
        (decided,) = (event.body for event in events if isinstance(event.body, ApprovalDecided))
        (start,) = (event.body for event in events if isinstance(event.body, ToolCallInitiated) and event.call == 2)
        assert (request.tool, request.action, row.actor, row.standing.status) == ("refund", "refund", "user:17", "consumed")
        assert (decided.by, decided.source, decided.note) == ("ann", "app", "less")
        assert start.approval == request.approval == decided.approval == row.approval
        assert start.digest == decided.digest != request.digest

    run(main())


def test_a_call_that_the_policy_lets_through_asks_nobody_and_one_whose_policy_raises_asks() -> None:
    def policy(order: str, cents: int) -> bool | str:
        if order == "?":
            raise KeyError(order)
        return cents > 500 and f"{cents} is over 500"

    refunds = Refunds(approval=policy)

    @agent(version="1")
    async def payer(run: Run, order: str, cents: int) -> str:
        return str(await refunds.tool(order, cents))

    async def main() -> list[str | None]:
        async with perdure(None, [payer]) as app:
            for n, given in enumerate([("a", 500), ("b", 501), ("?", 1)]):
                await app.start(payer, *given, id=f"r{n}")
                await app.engine.drive(f"r{n}", wait=False)
            assert [order for order, _, _ in refunds.made] == ["a"]
            return [row.standing.request.reason for row in await app.approvals()]

    assert run(main()) == ["501 is over 500", "the approval policy of refund raised KeyError: '?'"]


# -- which approval, and when -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["parked", "restarted"])
def test_two_that_wait_in_one_run_are_decided_in_any_order_and_by_their_id(tmp_path: Path, way: str) -> None:
    """T16: an approval is found by its id and never by its run."""
    refunds = Refunds()

    @agent(version="1")
    async def payer(run: Run) -> list[Any]:
        both = await asyncio.gather(refunds.tool("first", 1), refunds.tool("second", 2), return_exceptions=True)
        return [str(one.outcome) if isinstance(one, NotApproved) else one for one in both]

    async def decide(app: Perdure) -> None:
        first, second = sorted(pending(app), key=lambda row: row.call)
        await app.approve(second.approval, by="ann")
        assert (await driven(app)).status == "waiting_approval"
        assert [order for order, _, _ in refunds.made] == ["second"]
        await app.reject(first.approval, by="bob", reason="no")

    async def main() -> Any:
        async with perdure(tmp_path / "db", [payer]) as app:
            await app.start(payer, id="r")
            await driven(app)
            if way == "parked":
                await decide(app)
                await driven(app)
        async with perdure(tmp_path / "db", [payer]) as app:
            if way == "restarted":
                await decide(app)
                await driven(app)
            check_replay(app, payer)
            return await app.handle("r").result()

    assert run(main()) == ["rejected", "second: 2"]
    assert [order for order, _, _ in refunds.made] == ["second"]


def test_a_call_that_was_approved_and_could_not_start_in_time_is_not_made(tmp_path: Path) -> None:
    """The worker was away, and finds an approval that was granted and has expired.

    This differs from an approval without a vote.
    """
    refunds = Refunds()
    asking = Asking(refunds.ask)

    async def late(app: Perdure) -> None:
        await approve(app)
        clock_of(app).advance(HOUR)

    result, lines = run(answered(tmp_path / "db", asking, "restarted", late))
    assert result == ["not approved", "expired", None, None, "the approval was given, and expired before the call could start"]
    assert refunds.made == []
    assert lines[-3:] == ["approval_decided", "approval_expired", "run_succeeded"]


def test_a_yes_to_run_approve_does_not_age(tmp_path: Path) -> None:
    """The agent asked and has its answer; only a call is bound to the time of its approval."""

    async def ask(run: Run) -> list[Any]:
        return told(await run.request_approval("go", expires=HOUR))

    async def late(app: Perdure) -> None:
        await approve(app)
        clock_of(app).advance(10 * HOUR)

    assert run(answered(tmp_path / "db", Asking(ask), "restarted", late))[0] == [True, "approved", "ann", None, None]


def test_a_yes_in_the_last_moment_is_not_used_at_the_edge_of_its_time(tmp_path: Path) -> None:
    refunds = Refunds()
    asking = Asking(refunds.ask)
    asking.release.set()

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [asking.agent], clock) as app:
            await app.start(asking.agent, id="r")
            await driven(app)
            clock.advance(HOUR - 0.02)
            await approve(app)
            assert (await driven(app)).status in ("waiting", "waiting_approval"), "too late to start, too early to have expired"
            clock.advance(0.02)
            return (await driven(app)).status, await app.handle("r").result()

    status, result = run(main())
    assert (status, result[1], refunds.made) == ("succeeded", "expired", [])


def test_deciding_after_the_expiry_is_refused_even_before_a_worker_has_noticed(tmp_path: Path) -> None:
    refunds = Refunds()
    asking = Asking(refunds.ask)

    async def late(app: Perdure) -> None:
        clock_of(app).advance(HOUR)
        with pytest.raises(Conflict, match="has expired"):
            await approve(app)

    assert run(answered(tmp_path / "db", asking, "restarted", late))[0][1] == "expired"


def test_a_worker_is_there_when_an_approval_expires_and_not_before() -> None:
    async def ask(run: Run) -> list[Any]:
        return told(await run.request_approval("go", expires=HOUR))

    asking = Asking(ask)
    asking.release.set()

    async def main() -> tuple[RunRow, str]:
        clock = ManualClock()
        async with perdure(None, [asking.agent], clock) as app:
            await app.start(asking.agent, id="r")
            row = await driven(app)
            assert row.ready_at == clock.now() + round(HOUR * 1e6)
            clock.advance(HOUR - 0.000_001)
            working = asyncio.create_task(app.work())
            await asyncio.sleep(0.05)
            assert statuses(app) == ["pending"]
            clock.advance(0.000_001)
            await until(lambda: statuses(app) == ["expired"])
            result = await app.handle("r").result()
            app.drain()
            await working
            return row, result

    row, result = run(main())
    assert row.waiting_for is not None
    assert "go" in row.waiting_for
    assert result[1] == "expired"


# -- exactly the approved call runs -----------------------------------------------------------------------------------
def test_an_edit_that_does_not_fit_is_refused_and_the_approval_still_waits(tmp_path: Path) -> None:
    refunds = Refunds()

    async def clumsy(app: Perdure) -> None:
        for wrong in ({"cents": "many"}, {"cents": 1.5}, {"order": "o-8"}, {"nonsense": 1}, {"cents": None}):
            with pytest.raises(InvalidInput):
                await approve(app, edit=wrong)
        with pytest.raises(InvalidInput, match="the fields to change"):
            await app.approve(the_one(app), by="ann", edit=[1])  # type: ignore[arg-type]
        assert statuses(app) == ["pending"]
        await approve(app, edit={"cents": 1})

    assert run(answered(tmp_path / "db", Asking(refunds.ask), "parked", clumsy))[0] == "o-7: 1"


def test_edited_arguments_that_the_tool_no_longer_takes_fail_the_call_and_nothing_starts(tmp_path: Path) -> None:
    """Approved under the code of yesterday: today's tool takes no such value."""
    made: list[int] = []

    def build(narrow: bool) -> Any:
        @tool(effect="once", name="refund", approval=Approval(editable="cents"))
        async def wide(cents: int) -> int:
            made.append(cents)
            return cents

        @tool(effect="once", name="refund", approval=Approval(editable="cents"))
        async def tight(cents: Literal[900]) -> int:
            made.append(cents)
            return cents

        refund: Any = tight if narrow else wide

        @agent(version="1")
        async def payer(run: Run) -> list[str]:
            try:
                return [str(await refund(900))]
            except ToolFailed as error:
                return [error.kind, error.type, error.message]

        return payer

    async def main() -> tuple[Any, list[str]]:
        async with perdure(tmp_path / "db", [build(narrow=False)]) as app:
            await app.start("payer", id="r")
            await driven(app)
            await approve(app, edit={"cents": 500})
        async with perdure(tmp_path / "db", [build(narrow=True)]) as app:
            await driven(app)
            return await app.handle("r").result(), outline(await app.handle("r").events())

    (kind, type_, message), lines = run(main())
    assert (kind, type_, made) == ("refused", "InvalidInput", [])
    assert message.startswith("as edited by ann: ")
    assert not any(line.startswith("initiated") for line in lines)


@pytest.mark.parametrize("what", ["digest = 'somebody else''s'", "action = 'lookup'", "status = 'pending'", "call = 9", "expires_at = 1"])
def test_a_row_that_says_something_else_than_the_journal_starts_nothing(tmp_path: Path, what: str) -> None:
    """The table of approvals was edited: the commit that would start the call is refused, and a person has to look."""
    refunds = Refunds()
    asking = Asking(refunds.ask)
    asking.release.set()

    async def main() -> tuple[RunRow, RunRow]:
        async with perdure(tmp_path / "db", [asking.agent]) as app:
            await app.start(asking.agent, id="r")
            await driven(app)
            await approve(app)
            tamper(tmp_path / "db", f"UPDATE perdure_approvals SET {what}")
            row = await driven(app)
            assert refunds.made == []
            return row, await driven(app)

    for row in run(main()):
        assert (row.status, row.ready_at) == ("needs_attention", None)
        assert row.error is not None
        assert "may not start" in row.error
    assert refunds.made == []


def tamper(path: Path, statement: str) -> None:
    """Like a user with a database tool, who also switches off the triggers."""
    connection = apsw.Connection(str(path))
    for (trigger,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f'DROP TRIGGER "{trigger}"')
    connection.execute(statement)
    assert connection.changes() == 1
    connection.close()


@pytest.mark.parametrize("effect", ["keyed", "once"])
def test_an_approval_is_used_once_however_often_the_call_is_tried(tmp_path: Path, effect: Any) -> None:
    attempts: list[tuple[int, str]] = []

    @tool(effect=effect, approval=True, retry=Retry(attempts=3, base=0))
    async def pay(call: Call) -> str:
        attempts.append((call.attempt, call.key))
        if call.attempt < 3:
            raise NotSent("refused")
        return "paid"

    async def ask(run: Run) -> str:
        return str(await pay())

    asking = Asking(ask)

    async def main() -> tuple[Any, list[str | None], list[str]]:
        result, _ = await answered(tmp_path / "db", asking, "parked", approve)
        async with perdure(tmp_path / "db", [asking.agent]) as app:
            events = await app.handle("r").events()
            starts = [event.body.approval for event in events if isinstance(event.body, ToolCallInitiated) and event.call == 2]
            return result, starts, statuses(app)

    result, starts, after = run(main())
    assert (result, after) == ("paid", ["consumed"])
    assert [start is not None for start in starts] == [True, False, False]
    assert len({key for _, key in attempts}) == 1
    assert [attempt for attempt, _ in attempts] == [1, 2, 3]


@pytest.mark.parametrize(
    ("effect", "calls", "status"), [("keyed", 2, "succeeded"), ("idempotent", 2, "succeeded"), ("once", 1, "needs_attention")]
)
def test_a_crash_inside_an_approved_call_asks_nobody_again(tmp_path: Path, effect: Any, calls: int, status: str) -> None:
    begun: list[str] = []

    @tool(effect=effect, approval=Approval(editable="cents"))
    async def pay(cents: int, call: Call) -> int:
        begun.append(f"{cents} {call.key}")
        if call.attempt == 1:
            await asyncio.sleep(60)
        return cents

    @agent(version="1")
    async def payer(run: Run) -> int:
        return int(await pay(900))

    async def main() -> tuple[RunRow, list[str]]:
        async with perdure(tmp_path / "db", [payer]) as app:
            await app.start(payer, id="r")
            await driven(app)
            await approve(app, edit={"cents": 1})
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: begun)
            app.abort()
            await driving
        async with perdure(tmp_path / "db", [payer]) as app:
            row = await driven(app)
            if row.status == "succeeded":
                check_replay(app, payer)
                assert await app.handle("r").result() == 1
            return row, statuses(app)

    row, after = run(main())
    assert (row.status, after) == (status, ["consumed"])
    assert len(begun) == calls
    assert len(set(begun)) == 1, "the same arguments, as edited, under the same key"


@pytest.mark.parametrize("late_s", [HOUR - 1, HOUR + 1])
def test_a_key_ages_from_the_first_start_and_not_from_the_proposal(tmp_path: Path, late_s: float) -> None:
    begun: list[int] = []

    @tool(effect="keyed", approval=True, key_window=HOUR)
    async def pay(call: Call) -> int:
        begun.append(call.attempt)
        if call.attempt == 1:
            await asyncio.sleep(60)
        return call.attempt

    @agent(version="1")
    async def payer(run: Run) -> int:
        return int(await pay())

    async def main() -> str:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [payer], clock) as app:
            await app.start(payer, id="r")
            await driven(app)
            clock.advance(50 * HOUR)
            await approve(app)
            driving = asyncio.create_task(app.engine.drive("r"))
            await until(lambda: begun)
            app.abort()
            await driving
        clock.advance(late_s)
        async with perdure(tmp_path / "db", [payer], clock) as app:
            return (await driven(app)).status

    assert (run(main()), begun) == (("succeeded", [1, 2]) if late_s < HOUR else ("needs_attention", [1]))


# -- who decides --------------------------------------------------------------------------------------------------------
def test_after_an_escalation_others_decide_and_those_who_let_it_lapse_do_not(tmp_path: Path) -> None:
    async def ask(run: Run) -> list[Any]:
        return told(
            await run.request_approval("go", by="ann", expires=HOUR, on_expiry="escalate", escalate_to=["bob"], escalate_expires=2 * HOUR)
        )

    asking = Asking(ask)
    asking.release.set()

    async def main() -> Any:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [asking.agent], clock) as app:
            await app.start(asking.agent, id="r")
            await driven(app)
            with pytest.raises(NotPermitted, match="is for ann"):
                await approve(app, by="bob")
            clock.advance(HOUR)
            row = await driven(app)
            assert (row.status, row.ready_at) == ("waiting_approval", clock.now() + round(2 * HOUR * 1e6))
        async with perdure(tmp_path / "db", [asking.agent], clock) as app:
            with pytest.raises(NotPermitted, match="is for bob"):
                await approve(app, by="ann")
            await approve(app, by="bob")
            await driven(app)
            check_replay(app, asking.agent)
            return await app.handle("r").result(), outline(await app.handle("r").events())

    result, lines = run(main())
    assert result[:3] == [True, "approved", "bob"]
    assert [line for line in lines if line.startswith("approval")] == ["approval_requested", "approval_escalated", "approval_decided"]


def test_an_escalation_that_nobody_answers_either_expires(tmp_path: Path) -> None:
    refunds = Refunds(approval=Approval(by="ann", expires=HOUR, on_expiry="escalate", escalate_to="bob"))
    asking = Asking(refunds.ask)
    asking.release.set()

    async def main() -> tuple[list[str], Any]:
        clock, seen = ManualClock(), list[str]()
        async with perdure(tmp_path / "db", [asking.agent], clock) as app:
            await app.start(asking.agent, id="r")
            for _ in range(3):
                seen.append((await driven(app)).status)
                clock.advance(HOUR)
            return seen, await app.handle("r").result()

    seen, result = run(main())
    assert seen == ["waiting_approval", "waiting_approval", "succeeded"]
    assert (result[1], refunds.made) == ("expired", [])


def test_one_that_waits_is_reminded_of_once_and_can_be_decided_for_ever(tmp_path: Path) -> None:
    async def ask(run: Run) -> list[Any]:
        return told(await run.request_approval("go", by=["ann"], expires=HOUR, on_expiry="wait"))

    asking = Asking(ask)
    asking.release.set()

    async def main() -> tuple[list[str], Any]:
        clock = ManualClock()
        async with perdure(tmp_path / "db", [asking.agent], clock) as app:
            await app.start(asking.agent, id="r")
            await driven(app)
            clock.advance(HOUR)
            row = await driven(app)
            assert (row.status, row.ready_at) == ("waiting_approval", None)
            clock.advance(1000 * HOUR)
            await approve(app)
            await driven(app)
            return outline(await app.handle("r").events()), await app.handle("r").result()

    lines, result = run(main())
    assert lines.count("approval_escalated") == 1
    assert result[:3] == [True, "approved", "ann"]


@pytest.mark.parametrize("way", WAYS)
def test_with_four_eyes_whoever_the_run_acts_for_is_not_the_one_who_decides(tmp_path: Path, way: str) -> None:
    refunds = Refunds(approval=Approval(four_eyes=True))

    async def decide(app: Perdure) -> None:
        with pytest.raises(NotPermitted, match="needs a second person"):
            await approve(app, by="user:17")
        await approve(app, by="ann")

    assert run(answered(tmp_path / "db", Asking(refunds.ask), way, decide, actor="user:17"))[0] == "o-7: 900"


@pytest.mark.parametrize("way", WAYS)
def test_a_quorum_needs_two_people_and_one_of_them_twice_is_one(tmp_path: Path, way: str) -> None:
    refunds = Refunds(approval=Approval(by=["ann", "bob", "eve"], quorum=2))

    async def decide(app: Perdure) -> None:
        await approve(app, by="ann")
        with pytest.raises(Conflict, match="has already approved"):
            await approve(app, by="ann")
        if way == "parked":
            assert (await driven(app)).status == "waiting_approval", "one vote alone does nothing, also when somebody drives the run"
        assert refunds.made == []
        await approve(app, by="bob")

    result, lines = run(answered(tmp_path / "db", Asking(refunds.ask), way, decide))
    assert result == "o-7: 900"
    assert [line for line in lines if line in ("approval_voted", "approval_decided")] == ["approval_voted", "approval_decided"]


@pytest.mark.parametrize("way", WAYS)
def test_one_no_is_enough_whatever_the_quorum(tmp_path: Path, way: str) -> None:
    refunds = Refunds(approval=Approval(quorum=3))

    async def decide(app: Perdure) -> None:
        await approve(app, by="ann")
        await reject(app, by="bob", reason="no")

    assert run(answered(tmp_path / "db", Asking(refunds.ask), way, decide))[0][1:4] == ["rejected", "bob", "no"]


def test_a_role_from_the_settings_may_decide() -> None:
    refunds = Refunds(approval=Approval(by="role:finance"))
    asking = Asking(refunds.ask)
    asking.release.set()

    async def main() -> Any:
        settings = Settings(poll_s=0.002, park_after_s=0, roles={"finance": ("ann",)})
        async with perdure(None, [asking.agent], settings=settings) as app:
            await app.start(asking.agent, id="r")
            await driven(app)
            for who in ("bob", "role:finance", "finance"):
                with pytest.raises(NotPermitted):
                    await approve(app, by=who)
            await approve(app, by="ann")
            return await app.handle("r").result()

    assert run(main()) == "o-7: 900"


# -- one decision counts ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
def test_the_second_decision_is_a_conflict_whoever_holds_the_run(tmp_path: Path, way: str) -> None:
    """T17. If the run is held, the first decision is in the inbox and not in the journal yet. It still counts."""
    refunds = Refunds()

    async def decide(app: Perdure) -> None:
        name = the_one(app)
        await app.reject(name, by="ann", reason="no")
        with pytest.raises(Conflict, match="has been settled: rejected by ann"):
            await app.approve(name, by="bob")
        with pytest.raises(Conflict, match="has been settled"):
            await app.reject(name, by="bob", reason="also no")

    assert run(answered(tmp_path / "db", Asking(refunds.ask), way, decide))[0][1:4] == ["rejected", "ann", "no"]
    assert refunds.made == []


def test_somebody_who_has_seen_something_else_does_not_decide_this(tmp_path: Path) -> None:
    refunds = Refunds()

    async def decide(app: Perdure) -> None:
        with pytest.raises(Conflict, match="look at it again"):
            await approve(app, digest="0" * 64)
        await approve(app, digest=pending(app)[0].standing.request.digest)

    assert run(answered(tmp_path / "db", Asking(refunds.ask), "parked", decide))[0] == "o-7: 900"


def test_after_the_end_of_its_run_nothing_is_decided(tmp_path: Path) -> None:
    asking = Asking(Refunds().ask)
    asking.release.set()

    async def main() -> list[str]:
        async with perdure(None, [asking.agent]) as app:
            await app.start(asking.agent, id="r")
            await driven(app)
            name = the_one(app)
            await app.cancel("r", force=True)
            with pytest.raises(RunEnded):
                await app.approve(name, by="ann")
            return statuses(app)

    assert run(main()) == ["withdrawn"]
